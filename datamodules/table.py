"""Data sets that are tables with training rows: a subclass is constants and one function from a row to a problem."""

from __future__ import annotations

from typing import Any

import numpy as np

from gtpo_lightning.datamodules.reader import Part, TableReader
from gtpo_lightning.datamodules.recognise import find_only_split, find_split
from gtpo_lightning.datamodules.sources import Source
from gtpo_lightning.rollout import Problem

__all__ = ["TableDataModule"]

_SPLITS = ("train", "val", "test")


class TableDataModule(TableReader):
    """Base of the tables with training rows. See `TableReader` for what a subclass defines.

    *Validation.* `val_source` if given; else the source's own validation split, if it has one; else `val_size` rows
    held out of the training rows. Which ones is decided by `split_seed` alone, so that a run with another `seed`, or
    one that goes on from a warm start, never trains on another's validation problems.

    Args:
        source: Hub id, or local file or folder (see `open_source`). A single file holds the training rows, unless its
            name says test or validation. Default: the data set's hub id.
        val_source: Local file, folder or hub id of the validation rows.
        test_source: The same for the test rows.
        train_split: Name of the training split. Default: recognised. A split that is named for one purpose serves no
            other.
        val_split: The same for validation.
        test_split: The same for the test set.
        val_size: Rows held out of the training rows for validation, where there are no others; 0 for none.
        split_seed: Decides which.
        **kwargs: Arguments of `TableReader` and `DataModule`.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: str | None = None,
        val_source: str | None = None,
        test_source: str | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        test_split: str | None = None,
        val_size: int = 256,
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(source=source, **kwargs)
        for name, value in (("val_size", val_size), ("split_seed", split_seed)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}: {value!r}; valid: an integer >= 0")
        self.own_sources = {"val": val_source, "test": test_source}
        self.chosen_splits = {"train": train_split, "val": val_split, "test": test_split}
        self.val_size = val_size
        self.split_seed = split_seed

    def make_problems(self, split: str) -> list[Problem]:
        """All problems of a split; an empty list where the data set has no such split."""
        if split == "test":
            return self._rows("test")
        own = self._rows("val")
        if own or not self.val_size:
            return own if split == "val" else self._rows("train")
        train, held_out = self._hold_out()
        return held_out if split == "val" else train

    def _locations(self) -> list[str]:
        own = [location for location in self.own_sources.values() if location is not None]
        return [*super()._locations(), *own]

    def _rows(self, split: str) -> list[Problem]:
        """The rows that the sources have for a split."""
        own = self.own_sources.get(split)
        if own is not None:
            source = self._open(own)
            return self._read(source, self._own_parts(source, split), split)
        if self.source is None:
            return []
        source = self._open(self.source)
        parts = self._parts(source)[split]
        return self._read(source, parts, split) if parts else []

    def _own_parts(self, source: Source, split: str) -> list[Part]:
        """Parts of a source that is given for one split."""
        chosen = self.chosen_splits[split]
        return [
            (config, find_only_split(self._splits(source, config), split, chosen=chosen, where=_where(source, config)))
            for config in self._configs(source)
        ]

    def _parts(self, source: Source) -> dict[str, list[Part]]:
        """Parts of the main source by split."""
        found: dict[str, list[Part]] = {split: [] for split in _SPLITS}
        seen = []
        for config in self._configs(source):
            names = self._splits(source, config)
            seen += names
            for split, name in self._named_splits(names, _where(source, config)).items():
                found[split].append((config, name))
        if not any(found.values()):
            raise ValueError(
                f"train_split, val_split, test_split: {source.location!r} has the splits {list(dict.fromkeys(seen))}, "
                "none with a known name; valid: one of them for what it is to be"
            )
        return found

    def _named_splits(self, names: list[str], where: str) -> dict[str, str]:
        """The source's splits by ours."""
        wanted = [split for split in _SPLITS if self.own_sources.get(split) is None]
        if names == [""] and not any(self.chosen_splits[split] for split in wanted):
            return {"train": ""}
        taken = {self.chosen_splits[split] for split in wanted}
        found = {}
        for split in wanted:
            chosen = self.chosen_splits[split]
            free = names if chosen is not None else [name for name in names if name not in taken]
            name = find_split(free, split, chosen=chosen, where=where)
            if name is not None:
                found[split] = name
        return found

    def _missing(self, split: str) -> str:
        if self.source is None:
            return super()._missing(split)
        source = self._open(self.source)
        names = list(dict.fromkeys(name for config in self._configs(source) for name in self._splits(source, config)))
        if names == [""] and split != "train":
            return (
                f"{split}: {self.name} has no {split} problems, {self.source!r} holds training rows; valid: a "
                f"{split}_source"
            )
        there = f" ({self.source!r} has {', '.join(map(repr, names))})" if names != [""] else ""
        other = "" if split == "train" else f" or a {split}_source"
        return f"{super()._missing(split)}{there}{other}, or {split}_split with the name of one"

    def _hold_out(self) -> tuple[list[Problem], list[Problem]]:
        """Training and validation problems of the training rows, both in the order of the rows."""
        problems = self._rows("train")
        count = len(problems)
        if not problems:
            return [], []
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


def _where(source: Source, config: str) -> str:
    return f"{source.location!r} ({config})" if config else repr(source.location)
