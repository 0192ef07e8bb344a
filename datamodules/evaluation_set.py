"""Tables that are for evaluation only: all of their rows are shown, in validation as in test."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_only

from gtpo_lightning.datamodules.reader import TableReader
from gtpo_lightning.datamodules.recognise import find_only_split
from gtpo_lightning.rollout import Problem

__all__ = ["EvaluationSet"]

_log = logging.getLogger(__name__)


class EvaluationSet(TableReader):
    """Base of the sets that a policy is judged by and never trained on. See `TableReader` for what a subclass defines.

    Alone it serves `validate`, `test` and `predict`; beside a training set it is one of that set's `eval_sets`. Its
    problems are the same in validation and in test, with the same ids.

    Args:
        source: Hub id, or local file or folder (see `open_source`). Default: the data set's hub id.
        split: Name of the split that is read. Default: the test split, or the only one there is.
        **kwargs: Arguments of `TableReader` and `DataModule`.

    Raises:
        ValueError: An argument is out of range.
    """

    default_splits: ClassVar[tuple[str, ...]] = ("test",)
    # How many problems the set has, where that is fixed; another number is said.
    size: ClassVar[int | None] = None

    def __init__(self, source: str | None = None, split: str | None = None, **kwargs: Any) -> None:
        super().__init__(source=source, **kwargs)
        self.split = split
        self.limits["val"] = self.limits["val"] or self.limits["test"]  # validation shows the same rows

    def make_problems(self, split: str) -> list[Problem]:
        """All problems, except for training: there are none."""
        if split == "train" or self.source is None:
            return []
        source = self._open(self.source)
        parts = []
        for config in self._configs(source):
            names, where = self._splits(source, config), f"{self.source!r}" + (f" ({config})" if config else "")
            name = find_only_split(names, "test", chosen=self.split, where=where, argument="split")
            parts.append((config, name))
        problems = self._read(source, parts, "test")
        if self.size not in (None, len(problems)):
            rank_zero_only(_log.warning)(
                "%s has %s problems and %r gives %d: is it another set, or a part?",
                self.name,
                self.size,
                self.source,
                len(problems),
            )
        return problems

    def _missing(self, split: str) -> str:
        if split != "train":
            return super()._missing(split)
        return (
            f"train: {self.name} is for evaluation only and has no training problems; valid: validate, test or "
            f"predict, or {type(self).__name__} as one of the eval_sets of a data set with a training split"
        )
