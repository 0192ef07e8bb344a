"""Engines: who samples the completions."""

from gtpo_lightning.engines.base import Completions, Engine, OnFinished
from gtpo_lightning.engines.sampling import Sampling

__all__ = ["Completions", "Engine", "OnFinished", "Sampling"]
