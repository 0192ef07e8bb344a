"""The policy's weights as another engine loads them: whole, dense, under the names of a saved model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from gtpo_lightning.policy import Policy
from gtpo_lightning.quantization import dense_weight

__all__ = ["has_own_head", "named_weights", "weights_stamp"]


@torch.no_grad()
def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight, as `save_pretrained` would write them, tied ones under both names.

    Adapters are merged into a copy of one matrix at a time, 4-bit weights stand as the numbers they mean, and weights
    that are split over processes are gathered one by one, so every process has to read all of it.

    Args:
        policy: Left as it is.
    """
    model = policy.causal_lm
    if getattr(model, "_weight_conversions", None):  # saved in another layout than kept: as a whole only
        yield from revert_weight_conversion(model, dict(_named(model, ""))).items()
    else:
        yield from _named(model, "")


def _named(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if hasattr(module, "lora_A"):
        yield f"{prefix}weight", _merged(module)
        bias = getattr(module, "bias", None)
        if bias is not None:
            yield f"{prefix}bias", _whole(bias)
        return
    if hasattr(module, "modules_to_save"):
        saved: Any = module
        yield from _named(saved.modules_to_save[saved.active_adapters[0]], prefix)
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{prefix}{name}", _whole(dense_weight(module) if name == "weight" else parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield f"{prefix}{name}", _whole(buffer)
    for name, child in module.named_children():
        yield from _named(child, f"{prefix}{name}.")


def _merged(layer: Any) -> Tensor:
    """W + alpha / rank · B·A, also where the layer is switched off, as for a reference that is being read."""
    weight = _whole(dense_weight(layer.base_layer))
    for name in layer.active_adapters:
        if name in layer.lora_A:
            weight = (weight.float() + _whole(layer.get_delta_weight(name)).float()).to(weight.dtype)
    return weight


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def has_own_head(policy: Policy) -> bool:
    """Whether the head differs from the embeddings: it is not tied to them, or an adapter changes one of the two."""
    model = policy.causal_lm
    places = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = any(hasattr(place, "base_layer") or hasattr(place, "modules_to_save") for place in places)
    return adapted or not model.config.get_text_config(decoder=True).tie_word_embeddings


def weights_stamp(policy: Policy) -> tuple[tuple[int, int], ...]:
    """Changes with every change of a weight in place, and with every weight that is put in another's place."""
    return tuple((id(parameter), parameter._version) for parameter in policy.parameters())
