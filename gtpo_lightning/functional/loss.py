"""−J: the policy-gradient loss over weighted tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import as_bool, check_choice, check_shape, result_dtype

__all__ = ["clip_counts", "policy_loss"]

_AGGREGATIONS = ("sequence", "token", "constant")
_UNBOUNDED = (-math.inf, math.inf, math.inf)


def policy_loss(
    logprobs: Tensor,
    weights: Tensor,
    completion_mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    epsilon: float | tuple[float, float] | None = None,
    delta: float | None = None,
    aggregation: str = "sequence",
    denominator: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """The loss −J = −Σ_i Σ_t w_{i,t} · r_{i,t}, averaged by `aggregation`.

    With one update per rollout the ratio is 1, so with advantages around 0 the value is about 0 and the gradient is
    not.

    Args:
        logprobs: log π(o_{i,t}), (N, T), with gradient.
        weights: w = δ_i · (A_i + shift_i) · λ_{i,t}, (N, T); a constant. A weight of 0 is not a mask: the token stays
            in every count.
        completion_mask: 1 on tokens that count, (N, T). A row without any leaves both sides.
        old_logprobs: log π_old, (N, T), a constant. None: r = exp(logp − stopgrad(logp)). Else: r = exp(logp − old).
        epsilon: (ε_low, ε_high), or one number for both. With `old_logprobs` each token counts
            min(r · w, clamp(r, 1 − ε_low, 1 + ε_high) · w); without them it has no effect.
        delta: δ, an upper bound of the ratio where the weight is negative, above 1 + ε_high ("dual clip"): such a token
            counts max(min(r · w, clamp(…) · w), δ · w). The plain minimum leaves r · w unbounded there. It too has no
            effect without `old_logprobs`.
        aggregation: `sequence`: Σ_i (1/|o_i|) Σ_t / N, N being the rows with a non-empty mask. `token`: Σ_i Σ_t / the
            number of tokens. `constant`: Σ_i Σ_t / (N · max_length).
        denominator: Replaces N (or the number of tokens) by a global count, so that micro-batches and ranks add up.
        max_length: The length limit of a completion, in tokens; `constant` needs it.

    Returns:
        The loss, a scalar attached to `logprobs`, 0 where no row is left; fp64 if one argument is fp64, else fp32.

    Raises:
        ValueError: The shapes do not fit; `aggregation` is unknown; `constant` without `max_length`; `epsilon`,
            `delta`, `denominator` or `max_length` out of range.

    >>> logprobs = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]], requires_grad=True)
    >>> weights, mask = torch.tensor([[1.0, 1.0], [-0.5, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> loss = policy_loss(logprobs, weights, mask)
    >>> loss.backward()
    >>> loss.item(), logprobs.grad.tolist()
    (-0.25, [[-0.25, -0.25], [0.25, 0.0]])
    """
    check_choice("aggregation", aggregation, _AGGREGATIONS)
    if aggregation == "constant" and (max_length is None or max_length <= 0):
        raise ValueError(f"max_length: {max_length}; valid with aggregation 'constant': a positive number of tokens")
    if isinstance(denominator, int | float) and not denominator >= 0:
        raise ValueError(f"denominator: {denominator}; valid: a count >= 0, or None")
    bounds = _clip_bounds(epsilon, delta)
    _check_shapes(logprobs, weights, completion_mask, old_logprobs)

    real = as_bool(completion_mask)
    dtype = result_dtype(logprobs, weights, *([] if old_logprobs is None else [old_logprobs]))
    objective = _objective(logprobs.to(dtype), weights.detach().to(dtype), real, old_logprobs, bounds)
    lengths = real.sum(dim=1)
    per_row = objective.sum(dim=1)
    if aggregation == "sequence":
        per_row = per_row / lengths.clamp(min=1)
    count = lengths.sum() if aggregation == "token" else (lengths > 0).sum()
    divisor = torch.as_tensor(count if denominator is None else denominator, dtype=dtype, device=per_row.device)
    divisor = torch.where(divisor == 0, 1.0, divisor)  # nothing to average: the sum is 0 already
    if aggregation == "constant" and max_length is not None:
        divisor = divisor * max_length
    return -per_row.sum() / divisor


def clip_counts(
    logprobs: Tensor,
    old_logprobs: Tensor,
    weights: Tensor,
    completion_mask: Tensor,
    epsilon: float | tuple[float, float] | None,
    delta: float | None = None,
) -> dict[str, Tensor]:
    """Counts the tokens whose gradient the clipping of `policy_loss` takes away; counts add up over micro-batches.

    Args:
        logprobs: log π(o_{i,t}), (N, T).
        old_logprobs: log π_old, (N, T).
        weights: The signed weights of the loss, (N, T).
        completion_mask: 1 on tokens that count, (N, T).
        epsilon: (ε_low, ε_high), one number for both, or None.
        delta: δ, the upper bound of the ratio where w < 0, or None.

    Returns:
        Scalars, int64: `low` (r < 1 − ε_low and w < 0), `high` (r > 1 + ε_high and w > 0), `tokens` (all that count),
        and with `delta` `delta` (r > δ and w < 0).

    Raises:
        ValueError: The shapes do not fit, or `epsilon` or `delta` is out of range.

    >>> counts = clip_counts(torch.tensor([[0.0, -1.0, 0.1]]), torch.tensor([[-1.0, 0.0, 0.0]]),
    ...                      torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(1, 3), 0.2)
    >>> {name: count.item() for name, count in counts.items()}
    {'low': 1, 'high': 1, 'tokens': 3}
    """
    low, high, most = _clip_bounds(epsilon, delta) or _UNBOUNDED
    _check_shapes(logprobs, weights, completion_mask, old_logprobs)
    real = as_bool(completion_mask)
    dtype = result_dtype(logprobs, weights)
    ratio = (logprobs.detach().to(dtype) - old_logprobs.detach().to(dtype)).exp()
    counts = {
        "low": (real & (ratio < low) & (weights < 0)).sum(),
        "high": (real & (ratio > high) & (weights > 0)).sum(),
        "tokens": real.sum(),
    }
    return counts if delta is None else {**counts, "delta": (real & (ratio > most) & (weights < 0)).sum()}


def _objective(
    logprobs: Tensor,
    weights: Tensor,
    real: Tensor,
    old_logprobs: Tensor | None,
    bounds: tuple[float, float, float] | None,
) -> Tensor:
    """Each token's part of J, (N, T); exactly 0, in value and gradient, on padding and where the weight is 0."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach().to(logprobs.dtype)
    counts = real & (weights != 0)
    weights = weights.masked_fill(~counts, 0.0)
    # Padding and clipped tokens leave before exp: behind it, inf · 0 would be a NaN in the backward pass.
    log_ratio = logprobs.masked_fill(~counts, 0.0) - old.masked_fill(~counts, 0.0)
    if old_logprobs is None or bounds is None:
        return log_ratio.exp() * weights
    ratio = log_ratio.detach().exp()
    low, high, most = bounds
    clips = (
        ((weights > 0) & (ratio > high), high),
        ((weights < 0) & (ratio < low), low),
        ((weights < 0) & (ratio > most), most),
    )
    kept = log_ratio
    for clipped, _ in clips:
        kept = kept.masked_fill(clipped, 0.0)
    ratio = kept.exp()
    for clipped, bound in clips:
        ratio = ratio.masked_fill(clipped, bound)
    return ratio * weights


def _clip_bounds(
    epsilon: float | tuple[float, float] | None, delta: float | None = None
) -> tuple[float, float, float] | None:
    """(1 − ε_low, 1 + ε_high, δ), or None without clipping; a bound that is not asked for is infinite."""
    if epsilon is None and delta is None:
        return None
    low, high, most = _UNBOUNDED
    if epsilon is not None:
        pair = (epsilon, epsilon) if isinstance(epsilon, int | float) else tuple(epsilon)
        if len(pair) != 2 or not all(value >= 0 for value in pair):
            raise ValueError(f"epsilon: {epsilon!r}; valid: a number >= 0, a pair (low, high) of them, or None")
        low, high = 1.0 - pair[0], 1.0 + pair[1]
    if delta is not None:
        floor = 1.0 if epsilon is None else high
        if isinstance(delta, bool) or not isinstance(delta, int | float) or not delta > floor:
            raise ValueError(f"delta: {delta!r}; valid: a number above 1 + the upper epsilon, here {floor:g}, or None")
        most = float(delta)
    return low, high, most


def _check_shapes(logprobs: Tensor, weights: Tensor, completion_mask: Tensor, old_logprobs: Tensor | None) -> None:
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs: shape {tuple(logprobs.shape)}; valid: (N, T)")
    check_shape("weights", weights, tuple(logprobs.shape), "(N, T)")
    check_shape("completion_mask", completion_mask, tuple(logprobs.shape), "(N, T)")
    if old_logprobs is not None:
        check_shape("old_logprobs", old_logprobs, tuple(logprobs.shape), "(N, T)")
