"""pass@k and maj@k of a problem: exact, from all its answers, nothing sampled.

Letters: n answers of a problem, c of them right, k of them drawn without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from gtpo_lightning.functional._counts import whole_number
from gtpo_lightning.functional._inputs import result_dtype
from gtpo_lightning.functional.votes import count_votes, majority_curve

__all__ = ["maj_at_k", "maj_at_ks", "pass_at_k"]


@overload
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float: ...
@overload
def pass_at_k(num_samples: Tensor, num_correct: int | Sequence[int] | Tensor, k: int) -> Tensor: ...
@overload
def pass_at_k(num_samples: int | Sequence[int], num_correct: Tensor, k: int) -> Tensor: ...
@overload
def pass_at_k(num_samples: Sequence[int], num_correct: int | Sequence[int], k: int) -> list[float]: ...
@overload
def pass_at_k(num_samples: int, num_correct: Sequence[int], k: int) -> list[float]: ...


def pass_at_k(
    num_samples: int | Sequence[int] | Tensor, num_correct: int | Sequence[int] | Tensor, k: int
) -> float | list[float] | Tensor:
    """The chance that at least one of k answers, drawn without replacement, is right.

        pass@k = 1 − C(n−c, k) / C(n, k)

    Calculated with whole numbers; the one rounding is that of the result. The value of a set of problems is the mean
    over its problems: problems are not samples, and counts of several problems must not be added up first.

    Args:
        num_samples: n, answers of a problem: a whole number, a list or a tensor of them.
        num_correct: c, right answers of a problem, 0 to n; in the shape of `num_samples`, or one of the two a single
            number for all. Whole floats are counts too, bools are not: a mask of right answers is no count.
        k: Answers drawn, 1 to the smallest n; an int.

    Returns:
        A float for two numbers, a list if one of them is a list, a tensor of the same shape if one is a tensor: fp64
        for fp64 counts, else fp32.

    Raises:
        ValueError: k is not within 1 to n, c is not within 0 to n, no whole numbers, or shapes that do not fit.

    Example:
        >>> pass_at_k(4, 1, 2)  # scores 1, 0, 0, 0
        0.5
        >>> pass_at_k([4, 4, 8], [0, 1, 8], k=4)
        [0.0, 1.0, 1.0]
    """
    shape = _common_shape(num_samples, num_correct)
    counts = zip(_spread(num_samples, shape), _spread(num_correct, shape), strict=True)
    chances = [_pass_at_k(n, c, k) for n, c in counts]
    tensors = [value for value in (num_samples, num_correct) if isinstance(value, Tensor)]
    if tensors:
        device = max(tensors, key=Tensor.dim).device
        return torch.tensor(chances, dtype=result_dtype(*tensors), device=device).reshape(shape)
    return chances if shape else chances[0]


def maj_at_k(labels: Sequence[int] | Tensor, correct: Sequence[bool] | Tensor, k: int) -> float:
    """The chance that the majority of k answers, drawn without replacement, is right.

        maj@k = (1 / C(n, k)) Σ_{S, |S| = k} (right winners of S) / (winners of S)

    The winners of a subset S are the classes of equal answers with most votes in it; tied classes share equally. An
    answer that is missing does not vote, and a subset without any vote counts 0. The sum is exact, by counting the
    subsets, for any n (polynomial time); the one rounding is that of the result.

    Args:
        labels: Classes of one problem's n answers, (n,): equal ints for equivalent answers, −1 for no answer. Other
            negative numbers are classes like any other.
        correct: Whether each answer is right, (n,): bools, or 0 and 1. That of a missing answer is not looked at.
        k: Answers drawn, 1 to n.

    Returns:
        maj@k, 0 to 1.

    Raises:
        ValueError: Unequal lengths, k not within 1 to n, a class with right and wrong members, or other values.

    Example:
        >>> maj_at_k([8, 2, 8, 2, 6], [False, True, False, True, False], 5)  # two against two, in any order
        0.5
        >>> round(maj_at_k([8, 2, 8, 2, 6], [False, True, False, True, False], 3), 6)
        0.433333
    """
    return maj_at_ks(labels, correct, [k])[0]


def maj_at_ks(labels: Sequence[int] | Tensor, correct: Sequence[bool] | Tensor, ks: Sequence[int]) -> list[float]:
    """maj@k for several k, which cost no more together than one does: see `maj_at_k`.

    Args:
        labels: As in `maj_at_k`, (n,).
        correct: As in `maj_at_k`, (n,).
        ks: Values of k, each 1 to n; none gives an empty list.

    Returns:
        maj@k for each k, in the order of `ks`.

    Raises:
        ValueError: As in `maj_at_k`.

    Example:
        >>> maj_at_ks([0, 0, 1, -1], [True, True, False, False], range(1, 5))
        [0.5, 0.6666666666666666, 0.75, 1.0]
    """
    votes = count_votes(labels, correct)
    drawn = [_check_k(k, votes.total) for k in ks]
    curve = majority_curve(votes)
    return [curve[k - 1] for k in drawn]


def _check_k(k: Any, n: int) -> int:
    valid = f"an int from 1 to {n}, the number of answers"
    number = whole_number("k", k, valid)
    if isinstance(k, float) or not 1 <= number <= n:
        raise ValueError(f"k: {k!r}; valid: {valid}")
    return number


def _pass_at_k(num_samples: Any, num_correct: Any, k: int) -> float:
    n = whole_number("num_samples", num_samples, "whole numbers from 1")
    if n < 1:
        raise ValueError(f"num_samples: {n}; valid: whole numbers from 1")
    c = whole_number("num_correct", num_correct, f"whole numbers from 0 to {n}")
    if not 0 <= c <= n:
        raise ValueError(f"num_correct: {c}; valid: whole numbers from 0 to {n}")
    k = _check_k(k, n)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def _shape(value: Any) -> tuple[int, ...]:
    """() of a number, (length,) of a list."""
    return tuple(value.shape) if hasattr(value, "shape") else (len(value),) if isinstance(value, Sequence) else ()


def _common_shape(num_samples: Any, num_correct: Any) -> tuple[int, ...]:
    first, second = _shape(num_samples), _shape(num_correct)
    if first and second and first != second:
        raise ValueError(f"num_correct: shape {second}; valid: {first}, that of num_samples, or a single number")
    return first or second


def _spread(value: Any, shape: tuple[int, ...]) -> list[Any]:
    """The counts in a flat list, a single one as often as the shape asks."""
    if not _shape(value):
        return [value.item() if hasattr(value, "item") else value] * math.prod(shape)
    if isinstance(value, Tensor):
        return list(value.flatten().tolist())
    return list(value)
