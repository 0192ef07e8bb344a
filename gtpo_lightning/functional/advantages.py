"""A_i: how much better a completion is than its group."""

from __future__ import annotations

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import check_choice, check_shape, result_dtype

__all__ = ["group_advantages"]

_SCALES = ("none", "group", "batch")
_TOLERANCE = 1e-6  # relative to the largest |reward| of the group, absolute below 1
_EPSILON = 1e-4  # added to every standard deviation


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: str = "none") -> Tensor:
    r"""Group-relative advantages: A_i = (R_i − mean of the scored rewards of i's group) / s.

    A member within 1e-6 · max(1, largest \|reward\| of the group) of its group's mean gets exactly 0. Conflicts are
    found by the sign of A, so a sign that is only rounding error would mask whole completions.

    Args:
        rewards: R_i, (N,); NaN where nothing was scored: advantage 0, left out of every mean and std.
        group_ids: The group of each row, (N,) integers, any values; rows of a group need not be neighbours and groups
            may differ in size.
        scale: s. `none` (GTPO): 1. `group` (GRPO): the std of the group's scored rewards + 1e-4. `batch`: the std of
            all scored rewards, as they are (groups' means included), + 1e-4. Standard deviations divide by n − 1; the
            std of a single value is 0.

    Returns:
        A, (N,); fp64 for fp64 rewards, else fp32.

    Raises:
        ValueError: `scale` is unknown, the shapes do not fit, or a reward is infinite.

    >>> group_advantages(torch.tensor([2.0, 4.0, 0.0, 1.0]), torch.tensor([3, 8, 3, 3])).tolist()
    [1.0, 0.0, -1.0, 0.0]
    """
    check_choice("scale", scale, _SCALES)
    if rewards.dim() != 1:
        raise ValueError(f"rewards: shape {tuple(rewards.shape)}; valid: (N,)")
    check_shape("group_ids", group_ids, tuple(rewards.shape), "(N,)")
    if torch.isinf(rewards).any():
        raise ValueError("rewards: an infinite value; valid: finite numbers, NaN where nothing was scored")
    scored = ~torch.isnan(rewards)
    wide = torch.float32 if rewards.device.type == "mps" else torch.float64
    values = torch.where(scored, rewards, torch.zeros_like(rewards)).to(wide)
    ids, group = torch.unique(group_ids, return_inverse=True)
    count = values.new_zeros(len(ids)).index_add_(0, group, scored.to(wide)).clamp_(min=1)
    mean = values.new_zeros(len(ids)).index_add_(0, group, values) / count
    largest = values.new_zeros(len(ids)).scatter_reduce_(0, group, values.abs(), "amax")
    centred = torch.where(scored, values - mean[group], 0.0)
    advantages = torch.where(centred.abs() <= _TOLERANCE * largest.clamp(min=1)[group], 0.0, centred)
    if scale == "group":
        squares = values.new_zeros(len(ids)).index_add_(0, group, centred**2)
        advantages = advantages / ((squares / (count - 1).clamp(min=1)).sqrt() + _EPSILON)[group]
    elif scale == "batch":
        advantages = advantages / (_std(values[scored]) + _EPSILON)
    return advantages.to(result_dtype(rewards))


def _std(values: Tensor) -> Tensor:
    """The standard deviation with n − 1; 0 for fewer than two values."""
    return values.std() if len(values) > 1 else values.new_zeros(())
