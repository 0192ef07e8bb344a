"""Data sets as Lightning data modules. One file per data set over the bases in `base`, `table` and `evaluation_set`."""

from gtpo_lightning.datamodules.aime2024 import AIME2024
from gtpo_lightning.datamodules.aime2025 import AIME2025
from gtpo_lightning.datamodules.amc2023 import AMC2023
from gtpo_lightning.datamodules.arithmetic import Arithmetic
from gtpo_lightning.datamodules.base import DataModule
from gtpo_lightning.datamodules.evaluation_set import EvaluationSet
from gtpo_lightning.datamodules.gsm8k import GSM8K
from gtpo_lightning.datamodules.hendrycks_math import HendrycksMATH
from gtpo_lightning.datamodules.loader import ProblemLoader
from gtpo_lightning.datamodules.math500 import MATH500
from gtpo_lightning.datamodules.problem_table import ProblemTable
from gtpo_lightning.datamodules.table import TableDataModule

__all__ = [
    "AIME2024",
    "AIME2025",
    "AMC2023",
    "GSM8K",
    "MATH500",
    "Arithmetic",
    "DataModule",
    "EvaluationSet",
    "HendrycksMATH",
    "ProblemLoader",
    "ProblemTable",
    "TableDataModule",
]
