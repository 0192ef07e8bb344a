"""What the collapse detector reads of a rollout: sums and counts, so that micro-batches and ranks add up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gtpo_lightning.functional import kl_k3, mean_entropy
from gtpo_lightning.rewards.format import FULL_FORMAT, format_reward
from gtpo_lightning.rollout import Rollout

__all__ = ["measure"]

Pair = tuple[float, float]
_NONE: Pair = (0.0, 0.0)


def measure(rollout: Rollout) -> dict[str, Pair]:
    """Sum and count of each signal over the rows of a rollout; count 0 where it cannot be told.

    Args:
        rollout: Scored, with entropies and advantages.

    Returns:
        `entropy`, `decided` (the same) and `kl` over completion tokens, `undecided` over completions that count in the
        loss, `format` and `reward` over sampled completions, `equal_groups` over groups with a scored completion.
    """
    with torch.no_grad():
        entropy = _tokens(rollout.entropies, rollout.completion_mask)
        return {
            "entropy": entropy,
            "undecided": _undecided(rollout),
            "decided": entropy,
            "format": _format(rollout),
            "reward": _mean(rollout.rewards),
            "equal_groups": _equal_groups(rollout),
            "kl": _kl(rollout),
        }


def _tokens(values: Tensor | None, mask: Tensor) -> Pair:
    if values is None:
        return _NONE
    real = mask.bool()
    return float(values.double().masked_fill(~real, 0.0).sum()), float(real.sum())


def _undecided(rollout: Rollout) -> Pair:
    if rollout.entropies is None:
        return _NONE
    rows = mean_entropy(rollout.entropies, rollout.completion_mask)[rollout.scored()]
    return float((rows > math.log(2)).sum()), float(len(rows))


def _format(rollout: Rollout) -> Pair:
    """From the reward of that name where it is one of the run's, else from the texts."""
    part = rollout.reward_parts.get("format")
    if part is not None:
        known = ~part.isnan()
        return float((part[known] >= FULL_FORMAT).sum()), float(known.sum())
    return float(sum(format_reward(text) == FULL_FORMAT for text in rollout.texts)), float(len(rollout.texts))


def _mean(rewards: Tensor | None) -> Pair:
    if rewards is None:
        return _NONE
    known = rewards[~rewards.isnan()].double()
    return float(known.sum()), float(len(known))


def _equal_groups(rollout: Rollout) -> Pair:
    if rollout.rewards is None or rollout.advantages is None:
        return _NONE
    asked = rollout.group_ids[~rollout.rewards.isnan()].unique()
    unequal = rollout.group_ids[rollout.advantages != 0].unique()
    return float((~torch.isin(asked, unequal)).sum()), float(len(asked))


def _kl(rollout: Rollout) -> Pair:
    """k3 to the reference where another part computed its log-probs."""
    reference = getattr(rollout, "ref_logprobs", None)
    if reference is None or rollout.logprobs is None:
        return _NONE
    real = rollout.completion_mask.bool()
    return float(kl_k3(rollout.logprobs.detach()[real], reference.detach()[real]).double().sum()), float(real.sum())
