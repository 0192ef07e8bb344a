"""What a collapse looks like in words: the signals that moved, in their order, and what may help."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from gtpo_lightning.functional.collapse import CollapseScore, SignalTrend

__all__ = ["describe"]

_UNDECIDED = (
    "`baseline: group` or a smaller `gamma` of the entropy regularizer, sampling without top_k, top_p and min_p, "
    "`kl_penalty`"
)
_ADVICE = {
    "entropy": _UNDECIDED,
    "undecided": _UNDECIDED,
    "decided": "`kl_penalty`, a larger temperature",
    "format": "a format reward with a weight, `kl_penalty`",
    "reward": "more prompts a step, `kl_penalty`",
    "equal_groups": "a larger group_size",
    "kl": "a larger `beta` of `kl_penalty`",
}
_NAMES = {
    "entropy": "token entropy",
    "undecided": "share of completions above ln 2",
    "decided": "token entropy near 0:",
    "format": "share in the full format",
    "reward": "reward",
    "equal_groups": "share of groups with equal rewards",
    "kl": "KL to the reference",
}


def describe(step: int, score: CollapseScore, first: Mapping[str, int], trends: Mapping[str, SignalTrend]) -> str:
    """One message of a collapse.

    Args:
        step: The optimizer step it is seen at.
        score: The score of that step.
        first: The step each signal passed the threshold at, in the order they did.
        trends: The trends of all signals.
    """
    seen = "; ".join(f"{_drift(name, trends[name])} since step {since}" for name, since in first.items())
    advice = list(dict.fromkeys(_ADVICE[name] for name in first))
    return (
        f"EntropyCollapse: at optimizer step {step} the run has drifted away from its best (score {score.score:.2f}). "
        f"In the order they were seen: {seen}. Try a lower learning rate or a longer warm-up; {'; '.join(advice)}."
    )


def _drift(name: str, trend: SignalTrend) -> str:
    best = "" if trend.signal.level else f" (best {trend.best:.3g})"
    return f"{_NAMES[name]} {median(trend.values):.3g}{best}"
