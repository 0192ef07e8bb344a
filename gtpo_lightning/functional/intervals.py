"""How far a mean over problems may be off: bootstrap intervals."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["bootstrap_interval"]

# resamples drawn at a time: a hundred of 500 problems on 64 curves take 26 MB
BATCH = 100


def bootstrap_interval(
    values: Sequence[Any] | NDArray[Any] | Tensor, *, confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> tuple[Any, Any]:
    """Percentile bootstrap interval of a mean over problems.

        [Q((1 − confidence)/2), Q((1 + confidence)/2)] of the means of resamples; a resample draws P of the P values

    pass@k, maj@k and avg@n of a set are means over its problems, so what is drawn again, with replacement, are
    problems with their value. The answers within a problem are left as they are: the interval says how much another
    choice of problems would change the mean. It depends neither on the order of the problems nor on other curves.

    Args:
        values: A value for each problem, (P,), or several curves of them, (C, P); finite numbers.
        confidence: Share of the resampled means inside, above 0 and below 1.
        resamples: Number of resamples.
        seed: Of the resampling; the same seed gives the same interval on every machine (of one numpy release).

    Returns:
        (low, high): two floats for (P,), two fp64 arrays, (C,), for (C, P). Equal values give an interval of that
        value; fewer than two problems say nothing about their spread and give NaN.

    Raises:
        ValueError: Values of another shape or not finite, or an argument outside its range.

    Example:
        >>> low, high = bootstrap_interval([0.0] * 30 + [1.0] * 70)
        >>> round(low, 2), round(high, 2)
        (0.61, 0.79)
    """
    numbers = _as_array(values)
    _check(confidence, resamples, seed)
    if numbers.shape[-1] < 2:
        low = high = np.full(numbers.shape[:-1], np.nan)
    else:
        low, high = _percentiles(np.sort(numbers, axis=-1), confidence, resamples, seed)
    return (low, high) if numbers.ndim == 2 else (float(low), float(high))


def _percentiles(values: NDArray[Any], confidence: float, resamples: int, seed: int) -> tuple[Any, Any]:
    # here, since it takes half a second and a training run draws no interval
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    low, high = bootstrap(
        (values,),
        np.mean,
        axis=-1,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    # a mean lies within its values; rounding may leave it one digit outside
    return tuple(np.clip(end, values[..., 0], values[..., -1]) for end in (low, high))  # type: ignore[return-value]


def _as_array(values: Sequence[Any] | NDArray[Any] | Tensor) -> NDArray[Any]:
    plain = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else values
    numbers = np.asarray(plain, dtype=np.float64)
    if numbers.ndim not in (1, 2):
        raise ValueError(f"values: shape {numbers.shape}; valid: (P,) or (C, P)")
    if not np.isfinite(numbers).all():
        raise ValueError("values: not finite; valid: finite numbers")
    return numbers


def _check(confidence: float, resamples: int, seed: int) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: {confidence!r}; valid: above 0 and below 1")
    for name, value, low in (("resamples", resamples, 1), ("seed", seed, 0)):
        try:
            fits = not isinstance(value, bool) and operator.index(value) >= low
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{name}: {value!r}; valid: an int from {low}")
