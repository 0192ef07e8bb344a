"""What is checked when training starts: settings that would quietly do something else than they say."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from gtpo_lightning.hooks import RLCallback

__all__ = ["check_fit"]


def check_fit(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses a part given twice, and warns about half-precision weights, short windows and loaders without state.

    Raises:
        ValueError: Two callbacks of one kind.
    """
    _refuse_doubled_parts(trainer)
    _warn_of_half_precision(module)
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


def _warn_of_half_precision(module: pl.LightningModule) -> None:
    half = {p.dtype for p in module.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if half:
        rank_zero_warn(
            f"the only copy of the trained weights is in half precision ({', '.join(map(str, half))}), in which "
            "updates of a small learning rate round away (at 1e-6 a bfloat16 weight of 1.0 never moves); dtype float32 "
            "with trainer.precision bf16-mixed keeps fp32 masters"
        )


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
