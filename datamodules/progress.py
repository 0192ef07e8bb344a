"""Lightning's own count of batches and epochs, kept in step with the loader when a run is resumed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

__all__ = ["TrainerProgress"]


class TrainerProgress:
    """The progress of a trainer's fit loop, as a `ProblemLoader` needs it.

    It guards four defects of Lightning 2.6, each held by a test that fails when the defect is gone:

    * With `max_steps` the fit loop takes every checkpoint for one from the middle of an epoch. One that was saved in
      `on_train_epoch_end` then costs an epoch: it is counted without its batches, or with one of them.
    * A run that stops in the middle of an epoch (`max_steps`, `should_stop`, `max_time`) counts that epoch as done.
      What is saved after the stop goes on with the next epoch, and the rest of this one is never seen.
    * A checkpoint from `on_train_epoch_start` still has the batch count of the epoch before, and goes on at its end.
    * A batch whose step failed stays in the count over all epochs, by which `val_check_interval` may go.

    Args:
        trainer: Its fit loop is read and, on a resume, corrected.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    @property
    def processed(self) -> int:
        """Batches of the current epoch that were trained on."""
        current: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return current.processed

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch ended the epoch, by its length or by `limit_train_batches`."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def repair(self, length: int) -> None:
        """Makes the restored counters say what happened, before the fit loop reads them; nothing unless resuming.

        Args:
            length: Batches of an epoch.
        """
        loop = self.trainer.fit_loop
        if not loop.is_resuming:
            return
        self._take_back_failed_batch()
        epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
        current: Any = epochs.current
        announced = current.started < current.ready
        counted = 0 < current.ready == current.processed
        if not (announced or counted):
            return
        trackers: tuple[Any, ...] = (epochs.total, epochs.current)
        if counted and not (self.is_last_batch or batches.current.ready >= length):
            for tracker in trackers:
                tracker.processed = tracker.completed = tracker.ready - 1
            loop.restarting = True
            return
        for tracker in trackers:
            tracker.ready = tracker.started
        # The property's own setter would turn this into True under `max_steps`.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]

    def _take_back_failed_batch(self) -> None:
        """A batch that was begun and not trained on comes again: it counts for nothing, and it ended no epoch."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        failed = progress.current.ready - self.processed
        if failed:
            progress.is_last_batch = False
            trackers: tuple[Any, ...] = (progress.total, progress.current)
            for tracker in trackers:
                tracker.ready -= failed
                tracker.started = tracker.ready

    def shift(self, batches: int) -> None:
        """Moves the restored count of batches, where the loader goes on at another place than Lightning thinks."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for tracker in (progress.total, progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(tracker, name, getattr(tracker, name) + batches)
