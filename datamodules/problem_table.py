"""Any table of questions and answers."""

from __future__ import annotations

from typing import Any

from gtpo_lightning.datamodules.files import Row
from gtpo_lightning.datamodules.golds import as_text
from gtpo_lightning.datamodules.table import TableDataModule
from gtpo_lightning.rewards import extract_answer
from gtpo_lightning.rollout import Problem

__all__ = ["ProblemTable"]


class ProblemTable(TableDataModule):
    """Problems from any hub id, file or folder, with the columns and splits named where they are not recognised.

    For evaluation only, give `test_source` (or `test_split`, which then serves nothing else) and no training rows.
    `meta`: `solution` and `source_id` (the id column), where there are such columns.

    Args:
        name: The name of the set, in ids and in the names of scores.
        source: Hub id, or local file or folder. A single file holds the training rows, unless its name says test or
            validation. Default: none, if `test_source` or `val_source` is given.
        answer_style: Where the reference answer stands in its column: a style of `extract_answer`, such as gsm8k or
            boxed. Default: the column is the answer.
        id_column: Column of an id that is kept as `meta["source_id"]`. Default: recognised, such as `unique_id`.
        **kwargs: Arguments of `TableDataModule`, `TableReader` and `DataModule`.

    Raises:
        ValueError: An argument is out of range, or there is no source.
    """

    extra_columns = ("solution", "id")

    def __init__(
        self,
        name: str,
        source: str | None = None,
        answer_style: str | None = None,
        id_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not name or name != name.strip() or "/" in name:
            raise ValueError(f"name: {name!r}; valid: a name without a slash, such as my_problems")
        if answer_style is not None:
            extract_answer("", style=answer_style)  # refuses an unknown style at once
        self.name = name
        super().__init__(source=source, **kwargs)
        if not self._locations():
            raise ValueError("source: None; valid: a source, a val_source or a test_source")
        self.answer_style = answer_style
        self.chosen_columns["id"] = id_column

    def to_problem(self, row: Row, id: str) -> Problem | str:
        """A problem with its reference answer."""
        gold = as_text(row["answer"])
        if gold is not None and self.answer_style is not None:
            gold = extract_answer(gold, style=self.answer_style)
        if gold is None:
            return f"no answer of style {self.answer_style!r}" if self.answer_style else "no answer"
        kept = {"solution": row["solution"], "source_id": row["id"]}
        return Problem(id, row["question"], gold, {key: value for key, value in kept.items() if value is not None})
