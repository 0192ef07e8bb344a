"""One optimizer step, one denominator: micro-batches and ranks add up to the gradient of the whole step.

A trainer averages the losses of K accumulated micro-batches and of W ranks. That is the mean over the step's
completions only if every micro-batch of every rank holds equally many. Here each rank divides by the step's count over
all ranks, per rank, and what later micro-batches of the window hold is corrected on the gradient, before it is clipped.
"""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from torch import Tensor

from gtpo_lightning.rollout import Rollout

__all__ = ["Normalizer"]


class Normalizer:
    """Counts what the loss of one optimizer step divides by.

    Args:
        aggregation: `sequence` and `constant` count completions with a non-empty mask, `token` their tokens.
    """

    def __init__(self, aggregation: str) -> None:
        self.aggregation = aggregation
        self._counts: list[float] = []

    @property
    def denominator(self) -> float:
        """What every micro-batch of the current window divides by: the first count of it, over all ranks, per rank."""
        return next((count for count in self._counts if count > 0), 1.0)

    def start(self, rollout: Rollout, trainer: pl.Trainer) -> None:
        """Counts a micro-batch over all ranks and tells the rollout how the loss averages."""
        mask = rollout.completion_mask.bool()
        local = (mask if self.aggregation == "token" else mask.any(dim=1)).sum().double()
        self._counts.append(float(trainer.strategy.reduce(local.clone(), reduce_op="mean")))
        rollout.aggregation = self.aggregation
        rollout.denominator = self.denominator

    def clear(self) -> None:
        """Forgets the window."""
        self._counts.clear()

    def finish(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Rescales the accumulated gradients from the first micro-batch's count to the window's.

        The trainer divided each loss by `accumulate`, also in a short last window; the factor is exactly 1, and nothing
        is touched, where the window was full and its micro-batches equal.
        """
        total = sum(self._counts)
        factor = accumulate * self.denominator / total if total > 0 else 1.0
        self._counts.clear()
        if factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
