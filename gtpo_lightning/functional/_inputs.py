"""What every function of this folder does with its arguments first: dtypes, masks and shapes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_bool", "check_choice", "check_shape", "result_dtype"]


def result_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to calculate and answer in: fp64 if one of the tensors is fp64, else fp32.

    Half precision and integers come out as fp32; a sum of thousands of bf16 numbers would keep two digits.

    Args:
        *tensors: Any shapes; None is passed over.

    Returns:
        `torch.float64` or `torch.float32`.

    >>> result_dtype(torch.zeros(1, dtype=torch.float64), torch.zeros(1)), result_dtype(torch.tensor([1]))
    (torch.float64, torch.float32)
    """
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def as_bool(mask: Tensor) -> Tensor:
    """A mask of any dtype as bool: True where it is not 0.

    Args:
        mask: Any shape; bool, int or float.

    Returns:
        Bool, same shape.

    >>> as_bool(torch.tensor([1.0, 0.0])).tolist()
    [True, False]
    """
    return mask if mask.dtype == torch.bool else mask != 0


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], letters: str) -> None:
    """Refuses a tensor of another shape.

    Args:
        name: The argument's name.
        tensor: What was given.
        shape: What is valid.
        letters: The valid shape in letters, such as "(N, T)".

    Raises:
        ValueError: The shapes differ.

    >>> check_shape("rewards", torch.zeros(3), (2,), "(N,)")
    Traceback (most recent call last):
    ValueError: rewards: shape (3,); valid: (N,) = (2,)
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; valid: {letters} = {tuple(shape)}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses a word that is none of the choices.

    Args:
        name: The argument's name.
        value: What was given.
        choices: What is valid.

    Raises:
        ValueError: `value` is none of `choices`.

    >>> check_choice("scale", "std", ("none", "group"))
    Traceback (most recent call last):
    ValueError: scale: 'std'; valid: 'none', 'group'
    """
    if value not in choices:
        raise ValueError(f"{name}: {value!r}; valid: {', '.join(map(repr, choices))}")
