"""Optimizer settings across a resume: what this run was built with wins over what a checkpoint restores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

__all__ = ["OptimizerSettings"]

_PLAIN = (str, int, float, bool, type(None))


class OptimizerSettings:
    """Remembers what an optimizer was built with, to tell changed settings from scheduled ones in a resumed run.

    A restored optimizer state brings the learning rate and all else of the run that saved it. Where this run's
    optimizer was built with another value than that run's, the new one holds; where nothing changed, nothing is
    touched, so that a schedule goes on bit for bit.
    """

    def __init__(self) -> None:
        self._name = ""
        self._groups: list[dict[str, Any]] = []
        self._saved: list[dict[str, Any]] = []
        self._fresh = False

    def remember(self, optimizer: Optimizer) -> None:
        """Takes down a new optimizer's settings; `lr` is that before a schedule scaled it."""
        self._name = type(optimizer).__name__
        self._groups = [
            {**{k: v for k, v in group.items() if _plain(v)}, "lr": group.get("initial_lr", group["lr"])}
            for group in optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Class name and settings of each group."""
        return {"name": self._name, "groups": self._groups}

    def load(self, checkpoint: dict[str, Any], build: Callable[[Any], Optimizer]) -> None:
        """Reads the settings of the run that made a checkpoint; drops its moments if they are another optimizer's.

        Args:
            checkpoint: As loaded, before the optimizers are restored from it.
            build: Builds this run's optimizer from parameters.
        """
        settings = checkpoint.get("optimizer_settings", {})
        self._saved = settings.get("groups", [])
        saved, now = settings.get("name", ""), type(build([torch.nn.Parameter(torch.zeros(1))])).__name__
        self._fresh = bool(saved) and saved != now
        if self._fresh:
            rank_zero_warn(f"optimizer: the checkpoint was made with {saved}, this run uses {now}, which starts afresh")
            checkpoint["optimizer_states"] = []

    def prefer_new(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Puts changed settings into the restored groups; a scheduled learning rate keeps its place in the schedule."""
        saved, self._saved = self._saved, []
        for optimizer in optimizers if len(saved) == len(self._groups) else []:
            for index, group in enumerate(optimizer.param_groups):
                old, new = saved[index], self._groups[index]
                changed = {name: new[name] for name in new if name in old and new[name] != old[name]}
                rate = changed.pop("lr", None)
                changed.pop("initial_lr", None)
                group.update(changed)
                if rate is not None or self._fresh:
                    _rebase(group, index, old["lr"], new["lr"], [config.scheduler for config in schedulers])


def _rebase(group: dict[str, Any], index: int, old: float, new: float, schedulers: list[Any]) -> None:
    """Moves a learning rate to another base, at the place where the restored schedule is."""
    scheduled = schedulers[0].get_last_lr()[index] if schedulers else old
    group["lr"] = scheduled * new / old if old else new
    if "initial_lr" in group:
        group["initial_lr"] = new
    for scheduler in schedulers:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs[index] = new


def _plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(map(_plain, value)))
