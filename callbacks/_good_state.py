"""Copies of a run's trained state in host memory, to go back to: weights and optimizer state of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GoodState", "scale_learning_rate"]


class GoodState:
    """A copy of the trainable weights and of the optimizers' state, on the CPU, of this rank's own shards.

    Frozen weights and buffers do not change in training and are not copied. With Adam in fp32 this is 12 bytes a
    trainable parameter of the rank.

    Args:
        module: Whose trainable parameters are copied.
        optimizers: Whose state is copied: moments and step counts, not settings such as the learning rate.
        step: The optimizer step that would have come next.
    """

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
        self.step = step
        self._weights = [_copy(p) for p in module.parameters() if p.requires_grad]
        self._states = [[_copy(optimizer.state.get(p, {})) for p in _parameters(optimizer)] for optimizer in optimizers]

    @torch.no_grad()
    def restore(self, module: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Writes the copy back in place; the copy stays good for another time."""
        trainable = (p for p in module.parameters() if p.requires_grad)
        for weight, value in zip(trainable, self._weights, strict=True):
            _local(weight).copy_(value)
        for optimizer, states in zip(optimizers, self._states, strict=True):
            for parameter, state in zip(_parameters(optimizer), states, strict=True):
                if state:
                    _write(optimizer.state[parameter], state)
                else:
                    optimizer.state.pop(parameter, None)  # copied before its first step


def scale_learning_rate(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], factor: float) -> float:
    """Multiplies every learning rate: the current one, and the ones that a schedule starts from.

    Args:
        optimizers: Their `lr`, and what schedulers keep in the groups (`initial_lr`, `max_lr`, `min_lr`).
        schedulers: Their `base_lrs`, also of schedulers within schedulers.
        factor: Above 0.

    Returns:
        The learning rate of the first group now.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in {"lr", "initial_lr", "max_lr", "min_lr"} & group.keys():
                group[name] *= factor
    for scheduler in schedulers:
        _scale_schedule(scheduler, factor)
    return float(optimizers[0].param_groups[0]["lr"])


def _scale_schedule(scheduler: Any, factor: float) -> None:
    for name in ("base_lrs", "_last_lr"):
        if isinstance(getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(inner, factor)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor itself."""
    local = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local  # type: ignore[operator]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _local(value).to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _write(target: dict[str, Any], state: dict[str, Any]) -> None:
    """Puts copied entries back: tensors in place, so that fused and capturable optimizers keep theirs."""
    for name in target.keys() - state.keys():
        del target[name]
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(target.get(name), Tensor):
            _local(target[name]).copy_(value)
        else:
            target[name] = _copy(value)
