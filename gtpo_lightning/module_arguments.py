"""Arguments that every training module has: their default optimizer, their checks, and what a checkpoint keeps."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["adamw", "check_builders", "check_counts", "check_dtype", "not_plain"]


def adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW with the paper's settings: learning rate 1e-6, weight decay 0.1."""
    return torch.optim.AdamW(params, lr=1e-6, weight_decay=0.1)


def not_plain(arguments: dict[str, Any]) -> list[str]:
    """Names of arguments that a checkpoint should not hold.

    Callables, since a checkpoint is read without running code, `weights` and `adapter`, since the checkpoint has the
    weights, and `engine`, since who samples is up to the machine and not to the policy.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(plain(key) and plain(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return all(plain(item) for item in value)
        return isinstance(value, (str, int, float, bool, type(None)))

    return ["weights", "adapter", "engine", "vllm", *(name for name, value in arguments.items() if not plain(value))]


def check_counts(**counts: int | None) -> None:
    """Refuses sizes that are neither left out nor positive.

    Raises:
        ValueError: With the argument's name.
    """
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: {value!r} is not valid; valid: null or an integer of at least 1")


def check_builders(optimizer: object, lr_scheduler: object) -> None:
    """Refuses what cannot build an optimizer or, where one is given, a scheduler.

    Raises:
        ValueError: With the argument's name.
    """
    for name, value in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if not callable(value) and not (name == "lr_scheduler" and value is None):
            raise ValueError(f"{name}: {value!r} is not valid; valid: a class or function that builds it")


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that weights cannot be kept in.

    Raises:
        ValueError: With the valid names.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: {dtype!r} is not valid; valid: float32, bfloat16, float16")
