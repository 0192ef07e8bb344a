"""⟨H⟩ and δ: how undecided a completion was, and whether it is kept."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import as_bool, check_shape, result_dtype

__all__ = ["entropy_from_logits", "entropy_keep_mask", "entropy_threshold", "mean_entropy"]


def mean_entropy(entropies: Tensor, completion_mask: Tensor) -> Tensor:
    """⟨H⟩_i: the mean entropy over a completion's own tokens.

    Args:
        entropies: H_{i,t}, (N, T), nats; may carry a gradient. Padding may hold anything, NaN too.
        completion_mask: 1 on real tokens, (N, T).

    Returns:
        ⟨H⟩, (N,), nats; 0 for a row without tokens; fp64 for fp64 entropies, else fp32.

    Raises:
        ValueError: The shapes do not fit.

    >>> mean_entropy(torch.tensor([[0.5, 1.5, float("nan")]]), torch.tensor([[1, 1, 0]])).tolist()
    [1.0]
    """
    if entropies.dim() != 2:
        raise ValueError(f"entropies: shape {tuple(entropies.shape)}; valid: (N, T)")
    check_shape("completion_mask", completion_mask, tuple(entropies.shape), "(N, T)")
    real = as_bool(completion_mask)
    total = entropies.to(result_dtype(entropies)).masked_fill(~real, 0.0).sum(dim=1)
    return total / real.sum(dim=1).clamp(min=1)


def entropy_keep_mask(
    mean_entropies: Tensor, *, initial_entropy: float | Tensor, threshold: float = math.log(2)
) -> Tensor:
    """δ_i: 1 for completions the entropy filter keeps, 0 for those it drops.

    Args:
        mean_entropies: ⟨H⟩_i, (N,), nats.
        initial_entropy: ⟨H⟩_ini, nats, a number or a tensor of one. Above the threshold the filter is off: a policy
            that starts undecided would lose everything.
        threshold: ln 2, the entropy of a fair choice between two tokens.

    Returns:
        δ, (N,), of 0. and 1.: all 1 if ⟨H⟩_ini > threshold, else 1 where ⟨H⟩_i <= threshold; fp64 for fp64 entropies,
        else fp32.

    >>> entropy_keep_mask(torch.tensor([0.2, 0.8]), initial_entropy=0.4).tolist()
    [1.0, 0.0]
    >>> entropy_keep_mask(torch.tensor([0.2, 0.8]), initial_entropy=0.9).tolist()
    [1.0, 1.0]
    """
    dtype = result_dtype(mean_entropies)
    kept = mean_entropies.to(dtype) <= threshold
    return (kept | (initial_entropy > threshold)).to(dtype)


def entropy_threshold(mean_entropies: Tensor, quantile: float) -> float:
    """The smallest of the mean entropies that at least a share of them does not exceed.

    θ = min {x : #(⟨H⟩ <= x) >= q · n}, one of the values and never between two. So at most floor((1 − q) · n) of them
    lie above it, fewer where several are equal to it, and none where all are equal.

    Args:
        mean_entropies: ⟨H⟩, (n,), nats, n at least 1.
        quantile: q, above 0 and at most 1, read as the decimal it is written as: 0.55 of 100 are 55, though 0.55 * 100
            is 55.00000000000001 in floating point.

    Returns:
        θ, nats.

    Raises:
        ValueError: There is no value, or `quantile` is out of range.

    >>> entropy_threshold(torch.tensor([0.5, 0.25, 2.0, 0.125]), 0.75)
    0.5
    """
    if mean_entropies.dim() != 1 or len(mean_entropies) == 0:
        raise ValueError(f"mean_entropies: shape {tuple(mean_entropies.shape)}; valid: (n,), n at least 1")
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile: {quantile!r}; valid: a number > 0 and <= 1")
    rank = math.ceil(Fraction(repr(float(quantile))) * len(mean_entropies))
    return float(mean_entropies.kthvalue(rank).values)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of softmax(logits), over the last dimension.

    An entry of −inf is a token that cannot be drawn: it adds 0 to the entropy and gets gradient 0, where 0 · log 0
    would give NaN in both.

    Args:
        logits: (..., V), at least one of each V finite.

    Returns:
        Entropies, (...), nats, differentiable; fp64 for fp64 logits, else fp32.

    >>> entropy_from_logits(torch.tensor([1.0, 1.0, float("-inf")])).item()  # ln 2
    0.6931471824645996
    """
    logprobs = torch.log_softmax(logits.to(result_dtype(logits)), dim=-1)
    finite = logprobs.masked_fill(logprobs == -math.inf, 0.0)
    return -(logprobs.exp() * finite).sum(dim=-1)
