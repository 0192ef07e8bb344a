"""Python values across ranks."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gather_objects", "of_this_rank"]


def _running() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather_objects(value: Any) -> list[Any]:
    """Each rank's value, in rank order, on every rank."""
    if not _running():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def of_this_rank(values: list[Any]) -> Any:
    """This rank's entry of what `gather_objects` returned.

    Raises:
        ValueError: Rollouts in use were saved by another number of ranks.
    """
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _running() else (0, 1)
    if ranks == len(values):
        return values[rank]
    if any(values):
        raise ValueError(
            f"ckpt_path: the checkpoint holds rollouts in use of {len(values)} processes, this run has {ranks}; valid: "
            "the same number, or a checkpoint taken when every rollout had its updates_per_rollout updates"
        )
    return []
