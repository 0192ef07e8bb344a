"""Rewards: answer extraction, equivalence, format, and their weighted composition."""

from gtpo_lightning.rewards.composition import RewardFunctions
from gtpo_lightning.rewards.equivalence import Grade, compare, is_equivalent
from gtpo_lightning.rewards.extraction import extract_answer
from gtpo_lightning.rewards.format import format_reward
from gtpo_lightning.rewards.functions import SoftOverlong, is_correct
from gtpo_lightning.rewards.outcomes import Failure, Scores
from gtpo_lightning.rewards.pool import close_workers

__all__ = [
    "Failure",
    "Grade",
    "RewardFunctions",
    "Scores",
    "SoftOverlong",
    "close_workers",
    "compare",
    "extract_answer",
    "format_reward",
    "is_correct",
    "is_equivalent",
]
