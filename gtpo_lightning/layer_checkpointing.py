"""Activation checkpointing of a model's layers, also in evaluation mode and with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = ["checkpoint_layers"]

Modes = list[tuple[nn.Module, bool]]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Has every layer keep its input only, and run again in the backward pass: less memory, one more forward.

    The switch of transformers does nothing here: it acts in training mode only, where dropout is on, and takes away a
    layer's cache, with which completions would lose their prompt. This one leaves both as they are. The caches that
    layers are run with have to bear a second `update` (`prefix_cache`, `recording_cache`). A forward without gradients
    is not touched.

    Args:
        model: Changed in place; its layers are those that transformers would checkpoint.

    Raises:
        ValueError: The model has no such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that transformers could checkpoint; valid: "
            "false, and micro_batch_size to bound the memory"
        )
    for layer in layers:
        # `forward` and not the call of the module: hooks, such as those of a sharded strategy, stay outside.
        layer.forward = partial(_forward, layer)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    modes = [(module, module.training) for module in layer.modules()]
    return checkpoint(_run, modes, forward, *args, use_reentrant=False, **kwargs)


def _run(modes: Modes, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _as_before(modes):
        return forward(*args, **kwargs)


@contextmanager
def _as_before(modes: Modes) -> Iterator[None]:
    """Puts modules into the modes of the first run: the second one comes when the step has left them long ago."""
    changed = [(module, module.training) for module, training in modes if module.training is not training]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in changed:
            module.training = training
