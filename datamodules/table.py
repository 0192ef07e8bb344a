"""Data sets that are tables: a subclass is constants and one function from a row to a problem."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np

from gtpo_lightning.datamodules.base import DataModule
from gtpo_lightning.datamodules.sources import has_split, is_local, load_rows
from gtpo_lightning.rollout import Problem

__all__ = ["TableDataModule"]

_log = logging.getLogger(__name__)


class TableDataModule(DataModule):
    """Base of the data sets that are rows of a table, on the hub or in local files.

    A subclass sets the constants and writes `to_problem`. A problem's id is "{name}/{split}/{row}", of the split and
    the row (from 0) of the source, so it stays the same whatever is held out, limited or left out.

    *Validation.* `val_source` if given; else the source's own validation split, if it has one; else `val_size` rows
    held out of the training rows. Which ones is decided by `split_seed` alone, so that a run with another `seed`, or
    one that goes on from a warm start, never trains on another's validation problems.

    Args:
        source: Hub id, or local file or folder (see `load_rows`). A single file holds the training rows, or, for a data
            set without training rows, the test rows. Default: the data set's hub id.
        config: Configuration on the hub. Default: the data set's.
        val_source: Local file, folder or hub id of the validation rows.
        test_source: The same for the test rows.
        val_size: Rows held out of the training rows for validation; 0 for none.
        split_seed: Decides which.
        **kwargs: Arguments of `DataModule`.

    Raises:
        ValueError: An argument is out of range.
    """

    default_source: ClassVar[str]
    default_config: ClassVar[str | None] = None
    # Which split of the hub's data set serves as which of ours.
    hub_splits: ClassVar[dict[str, str]] = {"train": "train", "test": "test"}
    columns: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        source: str | None = None,
        config: str | None = None,
        val_source: str | None = None,
        test_source: str | None = None,
        val_size: int = 256,
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(val_size, int) or isinstance(val_size, bool) or val_size < 0:
            raise ValueError(f"val_size: {val_size!r}; valid: an integer >= 0")
        if split_seed < 0:
            raise ValueError(f"split_seed: {split_seed!r}; valid: an integer >= 0")
        self.source = source or self.default_source
        self.config = config or self.default_config
        self.val_source = val_source
        self.test_source = test_source
        self.val_size = val_size
        self.split_seed = split_seed

    def to_problem(self, row: dict[str, Any], id: str) -> Problem | None:
        """Makes a problem of a row.

        Args:
            row: The row, with all of `columns`.
            id: The problem's id.

        Returns:
            The problem, or None where the row cannot be used; such rows are counted.
        """
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Fetches a hub data set once per node, before every process reads it."""
        for source in {self.source, self.val_source or self.source, self.test_source or self.source}:
            if not is_local(source):
                split = next(iter(self.hub_splits))
                load_rows(source, split, config=self.config, hub_split=self.hub_splits[split])

    def make_problems(self, split: str) -> list[Problem]:
        """All problems of a split; an empty list where the data set has no such split."""
        place = self._place(split)
        held_out = bool(self.val_size) and self._place("val") is None
        if place is None:
            return self._hold_out()[1] if split == "val" and held_out and self._place("train") else []
        return self._hold_out()[0] if split == "train" and held_out else self._read(*place)

    def _place(self, split: str) -> tuple[str, str] | None:
        """The source and the split in it that hold all rows of a split of ours; None if held out or absent."""
        own = {"val": self.val_source, "test": self.test_source}.get(split)
        if own is not None:
            return own, split
        if not is_local(self.source):
            return (self.source, split) if split in self.hub_splits else None
        if has_split(self.source, split, self.config):
            return self.source, split
        only = "train" if "train" in self.hub_splits else "test"
        # A source that is not there goes on to `load_rows`, which says so.
        return (self.source, split) if split == only else None

    def _hold_out(self) -> tuple[list[Problem], list[Problem]]:
        """Training and validation problems of the training rows, both in the order of the rows."""
        problems = self._read(self.source, "train")
        count = len(problems)
        if self.val_size >= count:
            raise ValueError(
                f"val_size: {self.val_size} leaves no training problem of {count}; valid: 0 to {count - 1}, "
                "or a val_source"
            )
        # Sorting raw Philox words gives the same permutation under every numpy version.
        words = np.random.Philox(key=self.split_seed).random_raw(count)
        held = set(np.argsort(words, kind="stable")[count - self.val_size :].tolist())
        train = [problem for index, problem in enumerate(problems) if index not in held]
        return train, [problems[index] for index in sorted(held)]

    def _read(self, source: str, split: str) -> list[Problem]:
        rows = load_rows(
            source, split, columns=self.columns, config=self.config, hub_split=self.hub_splits.get(split, split)
        )
        found = [self.to_problem(row, f"{self.name}/{split}/{index}") for index, row in enumerate(rows)]
        problems = [problem for problem in found if problem is not None]
        unusable = len(rows) - len(problems)
        if not problems:
            raise ValueError(
                f"source: none of the {unusable} rows of {source!r} gives a problem of {self.name}; valid: rows with "
                f"{list(self.columns)} as {self.default_source} has them"
            )
        if unusable:
            _log.warning("%s/%s: %d of %d rows give no problem and are left out", self.name, split, unusable, len(rows))
        return problems
