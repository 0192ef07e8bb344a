"""One optimizer step, one denominator: micro-batches and ranks add up to the gradient of the whole step.

A trainer averages the losses of K accumulated micro-batches and of W ranks. That is the mean over the step's completions
only if every micro-batch of every rank holds equally many. Here each rank divides by the step's count over all ranks, per
rank, and what later micro-batches of the window hold is corrected on the gradient, before it is clipped.
"""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from torch import Tensor

from gtpo_lightning.rollout import Rollout

__all__ = ["Normalizer"]


class Normalizer:
    """Counts what the loss of one optimizer step divides by.

    Args:
        aggregation: `sequence` and `constant` count completions with a non-empty mask, `token` their tokens.
        max_completion_length: T, the factor of `constant` (applied by the loss itself).
    """

    def __init__(self, aggregation: str, max_completion_length: int) -> None:
        self.aggregation = aggregation
        self.max_completion_length = max_completion_length
        self._counts: list[float] = []

    @property
    def denominator(self) -> float:
        """What every micro-batch of the current window divides by: the first one's count per rank."""
        return next((count for count in self._counts if count > 0), 1.0)

    def start(self, rollout: Rollout, trainer: pl.Trainer) -> None:
        """Counts a micro-batch over all ranks; sets the rollout's `num_completions`."""
        rows = rollout.scored().sum()
        tokens = rollout.completion_mask.sum()
        local = torch.stack([rows, tokens]).to(torch.float64)
        completions, count = trainer.strategy.reduce(local.clone(), reduce_op="mean").tolist()
        self._counts.append(count if self.aggregation == "token" else completions)
        self._completions = [*getattr(self, "_completions", []), completions]
        rollout.num_completions = next((c for c in self._completions if c > 0), 1.0)

    def finish(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Rescales the accumulated gradients from the first micro-batch's count to the window's, and forgets the window.

        The trainer divided each loss by `accumulate`, also in a short last window; the factor is exactly 1, and nothing is
        touched, where the window was full and its micro-batches equal.
        """
        total = sum(self._counts)
        factor = accumulate * self.denominator / total if total > 0 else 1.0
        self._counts.clear()
        self._completions.clear()
        if factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
