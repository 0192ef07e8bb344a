"""The mean entropies of a run's last optimizer steps, and the threshold they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gtpo_lightning.functional.entropy import entropy_threshold

__all__ = ["RecentThreshold"]


class RecentThreshold:
    """A quantile of the values of the last optimizer steps before the present one.

        θ_s = the q-quantile of ⟨H⟩ of all completions of the last n steps before s that had any

    The step's own values do not count, so θ is known before its first micro-batch, and is the same for any split of the
    step into micro-batches. There is no θ before a first step is over.

    Args:
        quantile: q, above 0 and at most 1; see `entropy_threshold`.
        window: n, optimizer steps, at least 1.

    Example:
        >>> recent = RecentThreshold(0.5, window=2)
        >>> [recent.update(step, values) for step, values in enumerate([[0.1, 0.2, 0.3], [0.9], [0.8], []])]
        [None, 0.2, 0.2, 0.8]
    """

    def __init__(self, quantile: float, window: int) -> None:
        self.quantile, self.window = quantile, window
        self.value: float | None = None
        """θ of the present step."""
        self._steps: list[list[float]] = []
        self._own: list[float] = []
        self._step: int | None = None

    def update(self, step: int, values: Iterable[float]) -> float | None:
        """Adds values of a step, nats, and returns the step's θ, which they do not change; None without a step before.

        Args:
            step: The optimizer step; another number than last time ends the step before.
            values: Of one micro-batch, over all ranks.
        """
        if step != self._step:
            self._keep([*self._steps, self._own])
            self._step, self._own = step, []
        self._own = [*self._own, *values]
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The values of the window and of the present step, as plain numbers."""
        return {"steps": [list(values) for values in self._steps], "own": list(self._own), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, cut to this window."""
        self._step, self._own = state["step"], list(state["own"])
        self._keep(state["steps"])

    def _keep(self, steps: list[list[float]]) -> None:
        self._steps = [list(values) for values in steps if values][-self.window :]
        every = [value for values in self._steps for value in values]
        self.value = entropy_threshold(torch.tensor(every, dtype=torch.float64), self.quantile) if every else None
