"""The hooks of a reinforcement-learning step, and the one function that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Prompts, Rollout

__all__ = ["RLCallback", "call_rl_hooks", "log_means"]


class RLCallback(pl.Callback):
    """A Lightning callback with four more hooks, called inside the training step.

    The loop, drawn once::

        for problems in loader:
            prompts = tokenize(problems)
            on_rollout_start(trainer, module, prompts)           # may change the sampling settings
            rollout = engine.generate(prompts)                   # G completions of each prompt
            rollout.rewards = score(rollout.texts, problems)
            on_rollout_end(trainer, module, rollout)             # may add to the rewards
            rollout.advantages = group_advantages(rollout.rewards, rollout.group_ids)
            for update in range(updates_per_rollout):
                rollout.logprobs, rollout.entropies = policy(rollout)
                on_before_loss(trainer, module, rollout)         # may multiply or add to the three slots
                losses = {"policy": policy_loss(rollout)}
                on_after_loss(trainer, module, rollout, losses)  # may add a named term
                sum(losses.values()).backward()
                optimizer.step()

    **Rule of the slots.** A callback may multiply `token_weights` and `sequence_weights`, add to `advantage_shift`, or
    add a named loss term. It reads everything and overwrites nothing; then the parts commute.

    Evaluation needs none of these: `validation_step` returns the `Rollout`, which Lightning hands to
    `on_validation_batch_end` as `outputs`.
    """

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, prompts: Prompts) -> None:
        """Before sampling; sampling settings may be changed."""

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Sampled and scored, no advantages yet; rewards may be added to."""

    def on_before_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Advantages, log-probs and entropies are there; the three slots may be changed."""

    def on_after_loss(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout, losses: dict[str, Tensor]
    ) -> None:
        """The loss terms are known and not summed yet; a named term may be added."""


def call_rl_hooks(trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Calls the hook `name` of every `RLCallback` of the trainer, in order, inside the profiler.

    Args:
        trainer: The trainer; its `lightning_module` is the second argument of the hook.
        name: A hook of `RLCallback`.
        *args: What follows trainer and module.

    Raises:
        ValueError: `RLCallback` has no hook of that name.
    """
    if name not in _HOOKS:
        raise ValueError(f"name: {name!r} is no hook of RLCallback; valid: {', '.join(_HOOKS)}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RLCallback):
            label = f"[RLCallback]{type(callback).__name__}.{name}"
            with trainer.profiler.profile(label):  # type: ignore[attr-defined]
                getattr(callback, name)(trainer, trainer.lightning_module, *args)


_HOOKS = ("on_rollout_start", "on_rollout_end", "on_before_loss", "on_after_loss")


def log_means(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    values: dict[str, tuple[Tensor | float, Tensor | float]],
    **kwargs: Any,
) -> dict[str, float]:
    """Logs means that are exact over all ranks, each given as a sum and a count; one reduction for all of them.

    Args:
        trainer: Its strategy reduces.
        pl_module: Its `log` takes the values; a mean of nothing (count 0) is not logged.
        values: Name to (sum, count).
        **kwargs: Further arguments of `log`, such as `prog_bar`.

    Returns:
        The means over all ranks, NaN where the count is 0.
    """
    if not values:
        return {}
    pairs = torch.tensor([[float(total), float(count)] for total, count in values.values()], dtype=torch.float64)
    device = getattr(pl_module, "device", None)
    pairs = pairs.to(device if isinstance(device, torch.device) and device.type != "mps" else "cpu")
    reduced = trainer.strategy.reduce(pairs.clone(), reduce_op="sum")
    totals = reduced.tolist() if isinstance(reduced, Tensor) else pairs.tolist()
    means = {
        name: total / count if count else float("nan") for name, (total, count) in zip(values, totals, strict=True)
    }
    for name, (_, count) in zip(values, totals, strict=True):
        if count:
            pl_module.log(name, means[name], batch_size=1, **kwargs)
    return means
