"""Learning-rate schedules for YAML."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["WarmupCosine"]

_SETTINGS = ("warmup", "final", "fixed", "total_steps")


class WarmupCosine(LambdaLR):
    """Linear warm-up, then a cosine down to a share of the learning rate.

    Args:
        optimizer: Whose learning rate is scaled.
        warmup: Share of all steps (below 1) or number of steps (1 and above) of the warm-up.
        total_steps: Optimizer steps of the whole run; null takes the trainer's.
        final: Share of the learning rate at the end.

    Raises:
        ValueError: A value outside its range.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.005, total_steps: int | None = None, final: float = 0.0
    ) -> None:
        if not 0 <= warmup < math.inf:
            raise ValueError(f"warmup: {warmup!r} is not valid; valid: a share in [0, 1) or a number of steps")
        if not 0 <= final <= 1:
            raise ValueError(f"final: {final!r} is not valid; valid: a share of the learning rate in [0, 1]")
        self.warmup = warmup
        self.final = final
        self.fixed = total_steps is not None
        self.total_steps: int | None = None if total_steps is None else self._checked(total_steps)
        super().__init__(optimizer, self.factor)

    def _checked(self, total_steps: float) -> int:
        if not math.isfinite(total_steps) or total_steps < 1:
            raise ValueError(
                f"total_steps: {total_steps!r} is not valid; valid: an integer of at least 1. A run without max_steps "
                "or max_epochs has no end that a cosine could reach: give total_steps"
            )
        return int(total_steps)

    def set_total_steps(self, total_steps: float) -> None:
        """Sets the length of the run once the trainer knows it, and the learning rate of the first step."""
        self.total_steps = self._checked(total_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is; how long it is belongs to the run, not to the checkpoint."""
        return {name: value for name, value in super().state_dict().items() if name not in _SETTINGS}

    def factor(self, step: int) -> float:
        """The factor of the learning rate at an optimizer step, counted from 0."""
        if self.total_steps is None:
            if step > 0:
                raise ValueError(
                    "total_steps: null, and no trainer told the length of the run; valid: give total_steps"
                )
            return 1.0
        warmup = math.ceil(self.warmup * self.total_steps) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
