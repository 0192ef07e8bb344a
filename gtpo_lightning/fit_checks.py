"""What is checked when training starts: settings that would quietly do something else than they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.hooks import RLCallback

__all__ = ["check_fit", "lost_share"]


def check_fit(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses a part given twice, and warns about half-precision weights, short windows and loaders without state.

    Raises:
        ValueError: Two callbacks of one kind.
    """
    _refuse_doubled_parts(trainer)
    _warn_of_half_precision(trainer, module)
    _warn_of_short_windows(trainer)
    _warn_of_forgetful_loader(trainer)


def _refuse_doubled_parts(trainer: pl.Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    kinds = [type(callback) for callback in callbacks if isinstance(callback, RLCallback)]
    doubled = sorted({kind.__name__ for kind in kinds if kinds.count(kind) > 1})
    if doubled:
        raise ValueError(
            f"callbacks: {', '.join(doubled)} given twice, so it would act twice; valid: one of a kind, in its own "
            "slot of the command line or in the trainer's callbacks"
        )


def _warn_of_half_precision(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    weights = [p for p in module.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not weights:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rate = max((float(group.get("initial_lr", group["lr"])) for group in groups), default=0.0)
    kinds = ", ".join(sorted({str(p.dtype) for p in weights}))
    rank_zero_warn(
        f"the only copy of the trained weights is in half precision ({kinds}), in which small updates round away: at "
        f"the learning rate {rate:g}, {lost_share(weights, rate):.0%} of them do not move in a step of Adam; dtype "
        "float32 with trainer.precision bf16-mixed keeps fp32 masters, and lora keeps adapters in fp32"
    )


@torch.no_grad()
def lost_share(weights: Sequence[Tensor], step: float) -> float:
    """The share of weights that a step of this size, up or down, rounds back to what they were.

    Args:
        weights: In the precision they are kept in; of sharded ones, this process's part.
        step: About the learning rate, for Adam and its kin.

    Example:
        >>> lost_share([torch.tensor([1.0, 1e-5], dtype=torch.bfloat16)], 1e-6)
        0.5
    """
    lost = total = 0
    for weight in weights:
        local = weight.detach()
        local = local.to_local() if hasattr(local, "to_local") else local  # type: ignore[operator]
        lost += int((((local + step) == local) & ((local - step) == local)).sum())
        total += local.numel()
    return lost / max(total, 1)


def _warn_of_short_windows(trainer: pl.Trainer) -> None:
    """An epoch shorter than a window steps at its end all the same, however few batches were accumulated."""
    batches, window = trainer.num_training_batches, trainer.accumulate_grad_batches
    if batches < window and not getattr(trainer, "fast_dev_run", False):
        rank_zero_warn(
            f"accumulate_grad_batches: {window}, but an epoch has only {int(batches)} batches, so every optimizer step "
            f"takes in {int(batches)}"
        )


def _warn_of_forgetful_loader(trainer: pl.Trainer) -> None:
    """A loader without state starts its epoch again: batches seen come twice, as many others never."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    in_mid_epoch = progress.current.ready > 0 and not progress.is_last_batch
    if in_mid_epoch and not hasattr(trainer.train_dataloader, "state_dict"):
        rank_zero_warn(
            f"ckpt_path: resumed after {progress.current.ready} batches of an epoch, but the loader has no "
            "state_dict and starts the epoch again; the loaders of gtpo_lightning.datamodules go on where they were"
        )
