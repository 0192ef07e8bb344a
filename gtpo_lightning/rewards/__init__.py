"""Rewards: answer extraction, equivalence, format, and their weighted composition."""

from gtpo_lightning.rewards.composition import RewardFunctions
from gtpo_lightning.rewards.equivalence import is_equivalent, symbolic_equivalent
from gtpo_lightning.rewards.extraction import extract_answer
from gtpo_lightning.rewards.format import format_reward
from gtpo_lightning.rewards.functions import SoftOverlong, is_correct

__all__ = [
    "RewardFunctions",
    "SoftOverlong",
    "extract_answer",
    "format_reward",
    "is_correct",
    "is_equivalent",
    "symbolic_equivalent",
]
