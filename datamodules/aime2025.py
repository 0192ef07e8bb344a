"""AIME 2025: the 30 problems of both papers of that year."""

from __future__ import annotations

from gtpo_lightning.datamodules.contest import Contest

__all__ = ["AIME2025"]


class AIME2025(Contest):
    """AIME 2025 from the hub (`math-ai/aime25`) or from local files; for evaluation only.

    `opencompass/AIME2025`, which has a configuration for each of the two papers, is read as well.

    Takes the arguments of `EvaluationSet`, `TableReader` and `DataModule`.
    """

    name = "aime2025"
    size = 30
    year = 2025
    default_source = "math-ai/aime25"
    parts = r".*\bI{1,2}"
