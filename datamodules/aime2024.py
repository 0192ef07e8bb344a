"""AIME 2024: the 30 problems of both papers of that year."""

from __future__ import annotations

from gtpo_lightning.datamodules.contest import Contest

__all__ = ["AIME2024"]


class AIME2024(Contest):
    """AIME 2024 from the hub (`HuggingFaceH4/aime_2024`) or from local files; for evaluation only.

    `AI-MO/aimo-validation-aime` and `Maxwell-Jia/AIME_2024` are read as well.

    Takes the arguments of `EvaluationSet`, `TableReader` and `DataModule`.
    """

    name = "aime2024"
    size = 30
    year = 2024
    default_source = "HuggingFaceH4/aime_2024"
    default_splits = ("train",)
    parts = r".*\bI{1,2}"
