"""The method's mathematics as pure tensor functions: fp64 in, fp64 out; half precision and integers in, fp32 out.

Letters of all shapes: N rows (completions), T completion positions, M tokens, D hidden units, V vocabulary entries.
"""

from gtpo_lightning.functional.advantages import group_advantages
from gtpo_lightning.functional.collapse import CollapseScore, collapse_score
from gtpo_lightning.functional.conflict import conflict_mask, conflict_weights
from gtpo_lightning.functional.entropy import entropy_from_logits, entropy_keep_mask, entropy_threshold, mean_entropy
from gtpo_lightning.functional.head import logprobs_and_entropies
from gtpo_lightning.functional.importance import importance_ratio
from gtpo_lightning.functional.intervals import bootstrap_interval
from gtpo_lightning.functional.judge import maj_at_k, maj_at_ks, pass_at_k
from gtpo_lightning.functional.kl import kl_k3
from gtpo_lightning.functional.loss import clip_counts, policy_loss

__all__ = [
    "CollapseScore",
    "bootstrap_interval",
    "clip_counts",
    "collapse_score",
    "conflict_mask",
    "conflict_weights",
    "entropy_from_logits",
    "entropy_keep_mask",
    "entropy_threshold",
    "group_advantages",
    "importance_ratio",
    "kl_k3",
    "logprobs_and_entropies",
    "maj_at_k",
    "maj_at_ks",
    "mean_entropy",
    "pass_at_k",
    "policy_loss",
]
