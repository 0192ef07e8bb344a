"""Keeps rollouts for more than one update: the loader repeats a batch, the store repeats its rollout."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from gtpo_lightning.rollout import Problem, Prompts, Rollout

__all__ = ["RolloutStore"]


class RolloutStore:
    """Hands out each rollout `updates` times, in the order a loader repeats its batches.

    With accumulation over K batches the loader yields b1 … bK, then b1 … bK again; the store keeps K rollouts and hands
    each out again when its batch comes back. Old log-probs are fixed at the first use.

    Args:
        updates: Optimizer steps on each rollout (μ).
    """

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self._window = 1
        self._kept: deque[tuple[int, Rollout]] = deque()

    def start(self, window: int, device: torch.device) -> None:
        """Tells how many batches one optimizer step accumulates, and where rollouts live."""
        self._window = window
        for _, rollout in self._kept:
            rollout.to(device)

    def take(self, problems: list[Problem], sample: Callable[[list[Problem]], Rollout]) -> Rollout:
        """The rollout of a batch: a kept one if the batch came back, else a new one.

        Raises:
            ValueError: The loader does not repeat its batches.
        """
        if self.updates == 1:
            return sample(problems)
        ids = [problem.id for problem in problems]
        due = [problem.id for problem in self._kept[0][1].prompts.problems] if self._kept else None
        if ids == due:
            uses, rollout = self._kept.popleft()
        elif len(self._kept) < self._window:
            uses, rollout = 0, sample(problems)
        else:
            raise ValueError(
                f"updates_per_rollout: {self.updates} needs a loader that repeats each batch, but {ids[:2]} came where "
                f"{due[:2] if due else due} was due again; valid: the loaders of gtpo_lightning.datamodules, or 1"
            )
        if uses + 1 < self.updates:
            self._kept.append((uses + 1, rollout))
        return rollout

    def freeze(self, rollout: Rollout) -> None:
        """Fixes the old log-probs when the rollout was scored for the first time."""
        if self.updates > 1 and rollout.old_logprobs is None and rollout.logprobs is not None:
            rollout.old_logprobs = rollout.logprobs.detach().clone()

    def state_dict(self) -> list[dict[str, Any]]:
        """The kept rollouts as plain values and tensors."""
        return [{"uses": uses, **_pack(rollout)} for uses, rollout in self._kept]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restores what `state_dict` returned."""
        self._kept = deque((int(entry["uses"]), _unpack(entry)) for entry in state)


_SKIPPED = ("prompts", "logprobs", "entropies", "foreseen")  # the first is packed by itself, the others are made anew


def _pack(rollout: Rollout) -> dict[str, Any]:
    rollout = dataclasses.replace(rollout).to("cpu")
    fields = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout) if f.name not in _SKIPPED}
    problems = [dataclasses.asdict(problem) for problem in rollout.prompts.problems]
    return {"fields": fields, "ids": rollout.prompts.ids, "mask": rollout.prompts.mask, "problems": problems}


def _unpack(entry: dict[str, Any]) -> Rollout:
    problems = [Problem(**problem) for problem in entry["problems"]]
    return Rollout(prompts=Prompts(entry["ids"], entry["mask"], problems), **entry["fields"])
