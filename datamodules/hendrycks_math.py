"""MATH: competition problems of seven subjects and five levels (Hendrycks et al., arXiv 2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gtpo_lightning.datamodules.files import Row
from gtpo_lightning.datamodules.golds import as_text
from gtpo_lightning.datamodules.table import TableDataModule
from gtpo_lightning.rewards import extract_answer
from gtpo_lightning.rollout import Problem

__all__ = ["LEVELS", "SUBJECTS", "HendrycksMATH", "math_level", "math_problem"]

SUBJECTS = {
    "algebra": "Algebra",
    "counting_and_probability": "Counting & Probability",
    "geometry": "Geometry",
    "intermediate_algebra": "Intermediate Algebra",
    "number_theory": "Number Theory",
    "prealgebra": "Prealgebra",
    "precalculus": "Precalculus",
}
"""The configurations of the hub's data set, and how its rows spell them."""

LEVELS = (1, 2, 3, 4, 5)


class HendrycksMATH(TableDataModule):
    r"""MATH from the hub (`EleutherAI/hendrycks_math`, 7,500 training and 5,000 test rows) or from local files.

    The seven configurations of the hub, one a subject, are joined. A copy may have all subjects in one table, or a
    folder a subject, as the original archive (`train/algebra/1.json`). The reference answer is the `answer` column
    where it is filled, else the last `\boxed` or `\fbox` of the solution; a row without either is left out. There is
    no validation split: `val_size` training rows are held out for it.

    `meta`: `subject` (such as "Number Theory"), `level` (1 to 5; None for "Level ?") and `solution`.

    Args:
        subjects: Which are taken, by the names of the hub's configurations. Default: all.
        levels: Which are taken, 1 to 5. Default: all, also rows without a level.
        **kwargs: Arguments of `TableDataModule`, `TableReader` and `DataModule`.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "math"
    default_source = "EleutherAI/hendrycks_math"
    default_configs = tuple(SUBJECTS)
    parts = rf"(?:.*/)?(?:{'|'.join(SUBJECTS)})"
    columns = ("question", ("answer", "solution"))
    extra_columns = ("subject", "level")

    def __init__(self, subjects: list[str] | None = None, levels: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, values, valid in (("subjects", subjects, list(SUBJECTS)), ("levels", levels, list(LEVELS))):
            known = [_subject_key(value) if name == "subjects" else value for value in values or ()]
            if values is not None and (not values or any(value not in valid for value in known)):
                raise ValueError(f"{name}: {values!r}; valid: some of {valid}")
        self.subjects = None if subjects is None else [_subject_key(subject) for subject in subjects]
        self.levels = levels

    def select(self, rows: Sequence[Row]) -> tuple[list[int], str]:
        """The rows of the chosen subjects and levels."""
        subjects, levels = self.subjects, self.levels
        places = [
            place
            for place, row in enumerate(rows)
            if (subjects is None or _subject_key(_subject(row)) in subjects)
            and (levels is None or math_level(row["level"]) in levels)
        ]
        common = [f"of the subjects {subjects}"] if subjects else []
        return places, " and ".join([*common, *([f"of the levels {levels}"] if levels else [])])

    def to_problem(self, row: Row, id: str) -> Problem | str:
        """A problem with its reference answer, subject, level and solution."""
        return math_problem(row, id)


def math_problem(row: Row, id: str) -> Problem | str:
    r"""A problem of MATH or of a set made of it.

    Args:
        row: By roles: `question`, `answer`, `solution`, `subject`, `level`, `config`.
        id: The problem's id.

    Returns:
        The problem, or why there is none.

    Example:
        >>> row = {"question": "1+1?", "answer": None, "solution": r"It is \boxed{2}.", "subject": None}
        >>> problem = math_problem({**row, "level": "Level 1", "config": "algebra"}, "math/test/0")
        >>> problem.answer, problem.meta["subject"], problem.meta["level"]
        ('2', 'Algebra', 1)
    """
    solution = row["solution"]
    answer = as_text(row["answer"])
    if answer is None and isinstance(solution, str):
        answer = extract_answer(solution, style="boxed")
    if answer is None:
        return r"no \boxed in the solution" if row["answer"] is None else r"no answer and no \boxed in the solution"
    meta = {"subject": _subject(row), "level": math_level(row["level"]), "solution": solution}
    return Problem(id, row["question"], answer, meta)


def math_level(value: Any) -> int | None:
    """The number of a level; None where there is none.

    Example:
        >>> math_level("Level 3"), math_level(3), math_level("Level ?")
        (3, 3, None)
    """
    found = re.fullmatch(r"(?:level\s*)?([1-5])(?:\.0)?", str(value).strip(), re.IGNORECASE)
    return int(found[1]) if found else None


def _subject(row: Row) -> str | None:
    """As the row says, else as the configuration or folder does."""
    return row["subject"] or SUBJECTS.get(row["config"].rpartition("/")[2])


def _subject_key(subject: Any) -> str:
    return re.sub(r"[^a-z]+", "_", str(subject).lower().replace("&", "and")).strip("_")
