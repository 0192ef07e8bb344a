"""AMC 12 of 2023: the 40 problems of both papers whose answers are whole numbers."""

from __future__ import annotations

from gtpo_lightning.datamodules.contest import Contest

__all__ = ["AMC2023"]


class AMC2023(Contest):
    """AMC 2023 from the hub (`AI-MO/aimo-validation-amc`) or from local files; for evaluation only.

    The hub's 83 rows are of 2022 and 2023; those of 2023 are taken.

    Takes the arguments of `EvaluationSet`, `TableReader` and `DataModule`.
    """

    name = "amc2023"
    size = 40
    year = 2023
    default_source = "AI-MO/aimo-validation-amc"
    default_splits = ("train",)
