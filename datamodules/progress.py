"""Lightning's own count of batches and epochs, kept in step with the loader when a run is resumed."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

__all__ = ["TrainerProgress"]


class TrainerProgress:
    """The progress of a trainer's fit loop, as a `ProblemLoader` needs it.

    It guards two defects of Lightning 2.6, each held by a test that fails when the defect is gone:

    * With `max_steps` the fit loop takes every checkpoint for one from the middle of an epoch. One that was saved in
      `on_train_epoch_end` then costs an epoch: it is counted without its batches, or with one of them.
    * A run that stops in the middle of an epoch (`max_steps`, `should_stop`, `max_time`) counts that epoch as done.
      What is saved after the stop goes on with the next epoch, and the rest of this one is never seen.

    Args:
        trainer: Its fit loop is read and, on a resume, corrected.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    @property
    def processed(self) -> int:
        """Batches of the current epoch that were trained on."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch that was trained on ended the epoch, by its length or by `limit_train_batches`."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return progress.is_last_batch and progress.current.processed == progress.current.ready  # type: ignore[attr-defined]

    def repair(self, length: int) -> None:
        """Makes the restored counters say what happened, before the fit loop reads them; nothing unless resuming.

        Args:
            length: Batches of an epoch.
        """
        loop = self.trainer.fit_loop
        epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
        counted = 0 < epochs.current.ready == epochs.current.processed  # type: ignore[attr-defined]
        if not loop.is_resuming or not counted:
            return
        if self.is_last_batch or batches.current.ready >= length:
            # The property's own setter would turn this into True under `max_steps`.
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            return
        for tracker in (epochs.total, epochs.current):
            tracker.processed = tracker.completed = tracker.ready - 1  # type: ignore[attr-defined]
        loop.restarting = True

    def shift(self, batches: int) -> None:
        """Moves the restored count of batches, where the loader goes on at another place than Lightning thinks."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for tracker in (progress.total, progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(tracker, name, getattr(tracker, name) + batches)
