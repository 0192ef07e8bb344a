"""Votes of a problem's answers, and how often a majority of some of them is right.

Letters: n answers, k of them drawn without replacement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from gtpo_lightning.functional._counts import as_flags, as_list, whole_number

__all__ = ["Votes", "count_votes", "majority_curve"]

NO_ANSWER = -1


class Votes(NamedTuple):
    """All that maj@k depends on: how many answers are missing, and the sizes of the classes, ascending.

    Args:
        missing: Answers that are missing.
        right: Sizes of the classes of right answers.
        wrong: Sizes of the classes of wrong answers.
    """

    missing: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def total(self) -> int:
        """n, missing answers included."""
        return self.missing + sum(self.right) + sum(self.wrong)


def count_votes(labels: Sequence[int] | Tensor, correct: Sequence[bool] | Tensor) -> Votes:
    """Counts one problem's answers by class.

    Args:
        labels: As in `maj_at_k`, (n,).
        correct: As in `maj_at_k`, (n,).

    Returns:
        The counts, the same for any order of the answers and any names of the classes.

    Raises:
        ValueError: Unequal lengths, a class with right and wrong members, or values that are no labels or flags.

    Example:
        >>> count_votes([8, 2, 8, 2, 6, -1], [False, True, False, True, False, False])
        Votes(missing=1, right=(2,), wrong=(1, 2))
    """
    names = [whole_number("labels", label, "ints") for label in as_list("labels", labels)]
    flags = as_flags(correct)
    if len(names) != len(flags):
        raise ValueError(f"correct: {len(flags)} flags; valid: {len(names)}, one for each label")
    sizes = Counter(names)
    missing = sizes.pop(NO_ANSWER, 0)
    right = Counter(name for name, flag in zip(names, flags, strict=True) if flag and name != NO_ANSWER)
    for name, hits in right.items():
        if hits != sizes[name]:
            raise ValueError(
                f"correct: {hits} of {sizes[name]} answers of label {name}; valid: all or none of a label, "
                "since equal labels are equivalent answers"
            )
    wrong = sorted(size for name, size in sizes.items() if name not in right)
    return Votes(missing, tuple(sorted(right.values())), tuple(wrong))


# Pure, and asked again for one problem with several k and for problems that are answered alike; a curve takes 2 kB.
@lru_cache(maxsize=1024)
def majority_curve(votes: Votes) -> tuple[float, ...]:
    """maj@k for each k of 1 to n.

    Subsets are counted by the most votes v that a class has in them. A polynomial in x, the number of answers drawn, is
    packed into one int: its coefficients are the digits in base 2^slot, and none of them reaches the base, since a
    subset adds at most the common multiple of all numbers of winners.

    Args:
        votes: The counts of `count_votes`.

    Returns:
        n floats, the value for k at k − 1.

    Example:
        >>> majority_curve(Votes(missing=0, right=(2,), wrong=(1,)))
        (0.6666666666666666, 0.6666666666666666, 1.0)
    """
    n, sizes = votes.total, votes.right + votes.wrong
    common = math.lcm(*range(1, len(sizes) + 1))
    slot = (common << n).bit_length()
    packed = 0
    for most in range(1, max(sizes, default=0) + 1):
        for winners, right_winners in enumerate(_right_winners(votes, most, slot)[1:], start=1):
            packed += right_winners * (common // winners)
    shares = ((packed >> k * slot) & ((1 << slot) - 1) for k in range(1, n + 1))
    return tuple(share / (common * math.comb(n, k)) for k, share in enumerate(shares, start=1))


def _right_winners(votes: Votes, most: int, slot: int) -> list[int]:
    """Σ (right winners) over the subsets in which some class has `most` votes and none has more.

    Args:
        votes: The counts.
        most: Votes of a winner, from 1.
        slot: Bits of a coefficient.

    Returns:
        One packed polynomial for each number of winners 0, 1, 2, …
    """
    below = votes.missing + sum(size for size in votes.right + votes.wrong if size < most)
    subsets = [_binomials(below, slot)]
    for size in votes.wrong:
        if size >= most:
            subsets = _times(subsets, *_split(size, most, slot))
    right_winners = [0] * len(subsets)
    for size in votes.right:
        if size >= most:
            fewer, exactly = _split(size, most, slot)
            wins = _times(subsets, 0, exactly)
            right_winners = [old + new for old, new in zip(_times(right_winners, fewer, exactly), wins, strict=True)]
            subsets = _times(subsets, fewer, exactly)
    return right_winners


def _binomials(size: int, slot: int) -> int:
    """(1 + x)^size: in how many ways some of `size` answers are drawn."""
    return int((1 + (1 << slot)) ** size)


def _split(size: int, most: int, slot: int) -> tuple[int, int]:
    """The ways to draw from one class: fewer than `most` of it, and exactly `most`."""
    shift = most * slot
    return _binomials(size, slot) & ((1 << shift) - 1), math.comb(size, most) << shift


def _times(polynomials: list[int], fewer: int, exactly: int) -> list[int]:
    """One class more: it stays below the winners, or is one more of them (the next place of the list)."""
    return [a * fewer + b * exactly for a, b in zip([*polynomials, 0], [0, *polynomials], strict=True)]
