"""What the functions that count answers do with their arguments first: plain ints and bools."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["as_flags", "as_list", "whole_number"]


def as_list(name: str, values: Sequence[Any] | Tensor) -> list[Any]:
    """The entries of a sequence, or of a tensor of one dimension, as plain numbers.

    Args:
        name: The argument's name.
        values: (n,).

    Returns:
        n entries.

    Raises:
        ValueError: A tensor or an array of another shape.

    Example:
        >>> as_list("labels", (3, -1))
        [3, -1]
    """
    shape = tuple(values.shape) if hasattr(values, "shape") else (len(values),)
    if len(shape) != 1:
        raise ValueError(f"{name}: shape {shape}; valid: (n,)")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def as_flags(correct: Sequence[bool] | Tensor) -> list[bool]:
    """Whether each answer is right, as bools.

    Args:
        correct: (n,): bools, or 0 and 1 of any dtype.

    Returns:
        n bools.

    Raises:
        ValueError: Other values.

    Example:
        >>> as_flags([1.0, 0])
        [True, False]
    """
    flags = as_list("correct", correct)
    for flag in flags:
        if flag not in (0, 1):
            raise ValueError(f"correct: {flag!r}; valid: True and False, or 1 and 0")
    return [bool(flag) for flag in flags]


def whole_number(name: str, value: Any, valid: str) -> int:
    """A count or label as an int; floats are taken where they are whole, bools are not numbers.

    Args:
        name: The argument's name.
        value: What was given.
        valid: The valid values in words.

    Returns:
        The same number.

    Raises:
        ValueError: It is none.

    Example:
        >>> whole_number("num_correct", 3.0, "whole numbers")
        3
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: {value!r}; valid: {valid}") from None
