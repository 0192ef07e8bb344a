"""MATH-500: 500 test problems of MATH, chosen by Lightman et al. (arXiv 2305.20050)."""

from __future__ import annotations

from gtpo_lightning.datamodules.evaluation_set import EvaluationSet
from gtpo_lightning.datamodules.files import Row
from gtpo_lightning.datamodules.hendrycks_math import math_problem
from gtpo_lightning.rollout import Problem

__all__ = ["MATH500"]


class MATH500(EvaluationSet):
    """MATH-500 from the hub (`HuggingFaceH4/MATH-500`) or from local files; for evaluation only.

    None of its problems is in the 7,500 training rows of MATH. `meta`: `subject`, `level` and `solution`.

    Takes the arguments of `EvaluationSet`, `TableReader` and `DataModule`.
    """

    name = "math500"
    size = 500
    default_source = "HuggingFaceH4/MATH-500"
    columns = ("question", ("answer", "solution"))
    extra_columns = ("subject", "level")

    def to_problem(self, row: Row, id: str) -> Problem | str:
        """A problem with its reference answer, subject, level and solution."""
        return math_problem(row, id)
