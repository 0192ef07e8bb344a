"""The hooks of a reinforcement-learning step, and the one function that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Prompts, Rollout

__all__ = ["RLCallback", "StepWindow", "call_rl_hooks", "log_max", "log_means", "reduce_sums", "window_complete"]


class RLCallback(pl.Callback):
    """A Lightning callback with five more hooks, called inside the training step.

    The loop, drawn once::

        for problems in loader:
            prompts = tokenize(problems)
            on_rollout_start(trainer, module, prompts)           # may change the sampling settings
            rollout = engine.generate(prompts)                   # G completions of each prompt
            rollout.rewards = score(rollout.texts, problems)
            on_rollout_end(trainer, module, rollout)             # may add to the rewards
            rollout.advantages = group_advantages(rollout.rewards, rollout.group_ids)
            for update in range(updates_per_rollout):
                foresee(trainer, module, a copy of the rollout)      # what on_before_loss will do to the slots
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

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> bool | None:
        """Does to the slots what `on_before_loss` will do, without logging and without a change of its own state.

        `entropies` and `logprobs` are those that the engine recorded, equal to the coming ones but for rounding. What
        is foreseen makes the update faster and never changes its result, so a good guess is enough. A callback that
        only reads leaves the body empty. One that has `on_before_loss` or `on_after_loss` and not this hook, since it
        adds a loss term or needs more than is known, makes the module foresee nothing; so
        does one that returns False here.
        """

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


class StepWindow:
    """Statistics of the micro-batches that one optimizer step accumulates, so that what is logged is the step's.

    A module holds one as `step_window`, counts its micro-batches in `batches`, and clears it when the optimizer steps.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.sums: dict[str, tuple[float, float]] = {}
        self.maxima: dict[str, float] = {}

    def clear(self) -> None:
        """Forgets the window."""
        self.__init__()  # type: ignore[misc]

    def add(self, name: str, total: float, count: float) -> tuple[float, float]:
        """Adds to a sum and its count and returns both as they stand."""
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + total, before[1] + count)
        return self.sums[name]

    def raise_to(self, name: str, value: float) -> float:
        """Raises a maximum and returns it as it stands."""
        self.maxima[name] = max(value, self.maxima.get(name, value))
        return self.maxima[name]


def _window(pl_module: pl.LightningModule) -> StepWindow | None:
    window = getattr(pl_module, "step_window", None)
    return window if isinstance(window, StepWindow) else None


def window_complete(trainer: pl.Trainer, pl_module: pl.LightningModule, *, ahead: int = 0) -> bool:
    """Whether this micro-batch is the last one of an optimizer step, so that the step can be judged as a whole.

    Args:
        trainer: Its `accumulate_grad_batches` is the length of a window; 1 if it has none.
        pl_module: Its `step_window` counts; without one every call is a step.
        ahead: Micro-batches that are being made and not counted yet.
    """
    window = _window(pl_module)
    return window is None or window.batches + ahead >= getattr(trainer, "accumulate_grad_batches", 1)


def log_means(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    values: dict[str, tuple[Tensor | float, Tensor | float]],
    **kwargs: Any,
) -> dict[str, float]:
    """Logs means that are exact over all ranks and over the micro-batches of the optimizer step so far.

    Each is given as a sum and a count; one reduction serves all of them.

    Args:
        trainer: Its strategy reduces.
        pl_module: Its `log` takes the values; a mean of nothing (count 0) is not logged. Its `step_window`, if it has
            one, remembers the micro-batches before.
        values: Name to (sum, count).
        **kwargs: Further arguments of `log`, such as `prog_bar`.

    Returns:
        The means, NaN where the count is 0.
    """
    if not values:
        return {}
    window = _window(pl_module)
    means = {}
    for name, (total, count) in zip(values, reduce_sums(trainer, pl_module, list(values.values())), strict=True):
        if window is not None:
            total, count = window.add(name, total, count)
        means[name] = total / count if count else float("nan")
        if count:
            pl_module.log(name, means[name], batch_size=1, **kwargs)
    return means


def log_max(
    trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, value: float, *, smallest: bool = False
) -> None:
    """Logs a maximum over all ranks and over the micro-batches of the optimizer step so far.

    Args:
        trainer: Its strategy reduces.
        pl_module: Its `log` takes the value; nothing is logged where no rank has one.
        name: What is logged.
        value: This rank's; ±inf if it has none.
        smallest: Takes the minimum instead.
    """
    sign = -1.0 if smallest else 1.0
    local = torch.tensor(sign * value, dtype=torch.float64, device=_device(pl_module))
    largest = float(trainer.strategy.reduce(local.clone(), reduce_op="max"))
    window = _window(pl_module)
    if window is not None:
        largest = window.raise_to(name, largest)
    if largest > -torch.inf:
        pl_module.log(name, sign * largest, batch_size=1)


def reduce_sums(
    trainer: pl.Trainer, pl_module: pl.LightningModule, pairs: list[tuple[Tensor | float, Tensor | float]]
) -> list[tuple[float, float]]:
    """Sums and counts over all ranks, in fp64, by one reduction."""
    local = torch.tensor([[float(x) for x in pair] for pair in pairs], dtype=torch.float64, device=_device(pl_module))
    reduced = trainer.strategy.reduce(local.clone(), reduce_op="sum")
    return [(total, count) for total, count in (reduced if isinstance(reduced, Tensor) else local).tolist()]


def _device(pl_module: pl.LightningModule) -> torch.device:
    device = getattr(pl_module, "device", None)
    return device if isinstance(device, torch.device) else torch.device("cpu")
