"""The parts of the method, one a file; each is switched on by adding it to the trainer's callbacks."""

from gtpo_lightning.callbacks.completion_log import CompletionLog
from gtpo_lightning.callbacks.conflict_masking import ConflictMasking
from gtpo_lightning.callbacks.entropy_collapse import EntropyCollapse
from gtpo_lightning.callbacks.entropy_filter import EntropyFilter
from gtpo_lightning.callbacks.entropy_regularizer import EntropyRegularizer
from gtpo_lightning.callbacks.evaluator import Evaluator
from gtpo_lightning.callbacks.kl_penalty import KLPenalty

__all__ = [
    "CompletionLog",
    "ConflictMasking",
    "EntropyCollapse",
    "EntropyFilter",
    "EntropyRegularizer",
    "Evaluator",
    "KLPenalty",
]
