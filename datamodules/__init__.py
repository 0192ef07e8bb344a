"""Data sets as Lightning data modules. One file per data set over the bases in `base` and `table`."""

from gtpo_lightning.datamodules.arithmetic import Arithmetic
from gtpo_lightning.datamodules.base import DataModule
from gtpo_lightning.datamodules.gsm8k import GSM8K
from gtpo_lightning.datamodules.loader import ProblemLoader
from gtpo_lightning.datamodules.table import TableDataModule

__all__ = ["GSM8K", "Arithmetic", "DataModule", "ProblemLoader", "TableDataModule"]
