"""Small reductions over the rows and groups of a rollout (N rows; groups told by their id, never by position)."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import result_dtype

__all__ = ["group_centered", "lowest_rows", "row_mean", "sign_flips"]


def group_centered(values: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Each value minus the mean of its group, over the rows that are valid.

    The baseline of the entropy regularisation: x_i − (1/|g|) Σ_{j ∈ g} x_j, g the valid rows of i's group. Within a
    group the result sums to zero, so a group whose rewards are all equal is not pushed down as a whole.

    Args:
        values: x_i, (N,). What stands in rows that are not valid never matters.
        group_ids: The group of each row, (N,); any integers, rows of a group need not be neighbours.
        valid: Rows that count, (N,) bool.

    Returns:
        (N,), 0 in rows that are not valid; fp64 for fp64 values, else fp32.

    Example:
        >>> group_centered(torch.tensor([1.0, 4.0, 3.0]), torch.tensor([7, 2, 7]), torch.tensor([True, True, True]))
        tensor([-1.,  0.,  1.])
    """
    values = torch.where(valid, values.to(result_dtype(values)), 0.0)
    group_keys, group_index = torch.unique(group_ids, return_inverse=True)
    sums = values.new_zeros(len(group_keys)).index_add(0, group_index, values)
    counts = values.new_zeros(len(group_keys)).index_add(0, group_index, valid.to(values.dtype))
    means = sums / counts.clamp(min=1)
    return torch.where(valid, values - means[group_index], 0.0)


def row_mean(
    values: Tensor, valid: Tensor, *, weights: Tensor | None = None, denominator: float | None = None
) -> Tensor:
    """The mean of weighted values over the valid rows: Σ_i w_i x_i / denominator.

    A weight is not a mask: a row with weight 0 stays in the count.

    Args:
        values: x_i, (N,), with or without gradient. What stands in rows that are not valid never matters.
        valid: Rows that count, (N,) bool.
        weights: w_i, (N,). Default 1.
        denominator: Divides the sum, so that micro-batches and ranks add up. Default: the number of valid rows.

    Returns:
        A scalar; without valid rows 0, still attached to the graph of `values`.

    Example:
        >>> row_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    values = torch.where(valid, values.to(result_dtype(values)), 0.0)
    if weights is not None:
        values = torch.where(valid, weights, 0.0) * values
    count = float(valid.sum()) if denominator is None else float(denominator)
    return values.sum() / (count if count > 0 else 1.0)


def lowest_rows(values: Tensor, valid: Tensor, share: float) -> Tensor:
    """Marks the floor(share · N) valid rows of lowest value; equal values are taken in row order.

    Args:
        values: (N,).
        valid: Rows that may be marked, (N,) bool.
        share: Between 0 and 1, read as the decimal it is written as: 0.29 of 100 rows are 29, though 0.29 * 100 is
            28.999999999999996 in floating point.

    Returns:
        (N,) bool; at most all valid rows.

    Raises:
        ValueError: `share` is not between 0 and 1.

    Example:
        >>> lowest_rows(torch.tensor([0.9, 0.1, 0.5, 0.7]), torch.tensor([True, False, True, True]), 0.5)
        tensor([False, False,  True,  True])
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: {share!r}; valid: 0 to 1")
    wanted = math.floor(Fraction(repr(float(share))) * len(values))
    order = torch.argsort(torch.where(valid, values, math.inf), stable=True)
    marked = torch.zeros_like(valid, dtype=torch.bool)
    marked[order[:wanted]] = True
    return marked & valid


def sign_flips(advantages: Tensor, shift: Tensor) -> Tensor:
    """Rows whose advantage is not 0 and whose sign changes (also to 0) when the shift is added.

    Args:
        advantages: A_i, (N,).
        shift: What is added, −γ⟨H⟩_i in GTPO, (N,).

    Returns:
        (N,) bool.

    Example:
        >>> sign_flips(torch.tensor([0.05, 0.5, 0.0, -1.0]), torch.tensor([-0.1, -0.1, -0.1, -0.1]))
        tensor([ True, False, False, False])
    """
    return (advantages != 0) & (torch.sign(advantages + shift) != torch.sign(advantages))
