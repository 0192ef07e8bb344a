"""One year of a contest whose answers are whole numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from gtpo_lightning.datamodules.evaluation_set import EvaluationSet
from gtpo_lightning.datamodules.files import Row
from gtpo_lightning.datamodules.golds import whole_number
from gtpo_lightning.rollout import Problem

__all__ = ["Contest", "told_year"]

# One whole number, perhaps with a sign or a unit around it, such as 336^\circ.
_ONE_NUMBER = re.compile(r"[^0-9.]{0,12}[0-9]{1,12}[^0-9.]{0,12}")
_YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")


class Contest(EvaluationSet):
    """Base of the sets that are one year of a contest.

    Where the rows tell their years (a column `year`, a `url`, an id such as "2024-II-4"), those of other years are left
    out, and the log says so; where no row does, all are taken. Reference answers are kept as the source writes them
    ("033"), except that 27.0 becomes 27. `meta`: `solution`, if there is one.

    Takes the arguments of `EvaluationSet`, `TableReader` and `DataModule`.
    """

    year: ClassVar[int]
    extra_columns = ("solution", "year", "url", "id")

    def select(self, rows: Sequence[Row]) -> tuple[list[int], str]:
        """The rows of the year."""
        years = [told_year(row) for row in rows]
        told = any(year is not None for year in years)
        return [place for place, year in enumerate(years) if year == self.year or not told], f"of {self.year}"

    def to_problem(self, row: Row, id: str) -> Problem | str:
        """A problem with its reference answer."""
        gold = whole_number(row["answer"])
        if gold is None or not _ONE_NUMBER.fullmatch(gold):
            return "no answer" if gold is None else "an answer that is no whole number"
        return Problem(id, row["question"], gold, {} if row["solution"] is None else {"solution": row["solution"]})


def told_year(row: dict[str, Any]) -> int | None:
    """The year that a row tells; None if it tells none.

    Args:
        row: By roles: `year`, `url`, `id`. A number as an id tells nothing.

    Example:
        >>> told_year({"year": None, "url": "https://a.example/2023_AMC_12A_Problems/Problem_1", "id": 2024})
        2023
    """
    id = row["id"] if not str(row["id"]).isdigit() else None
    for value in (row["year"], row["url"], id):
        found = _YEAR.search(str(value))
        if found:
            return int(found.group())
    return None
