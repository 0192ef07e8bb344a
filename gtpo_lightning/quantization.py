"""Frozen weights in 4 bits below trained adapters (QLoRA), by bitsandbytes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from gtpo_lightning.lora import LoRA

__all__ = ["check_quantization", "dense_weight", "dequantized", "quantization_config", "unpacked"]


def check_quantization(quantization: str | None, lora: LoRA | None, *, embedded: bool) -> None:
    """Refuses 4-bit weights where they cannot be had, before anything is read.

    Args:
        quantization: `4bit` or None.
        lora: Of the run.
        embedded: Whether the model is one that is made in code or read from a packed file.

    Raises:
        ValueError: Another word, no adapter to train, a model without a file of its own, no bitsandbytes, or no device
            that it works on.
    """
    if quantization is None:
        return
    if quantization != "4bit":
        raise ValueError(f"quantization: {quantization!r} is not valid; valid: null, 4bit")
    if lora is None:
        raise ValueError(
            "quantization: '4bit' weights cannot be trained themselves; valid: lora settings beside it, or null"
        )
    if embedded:
        raise ValueError(
            "quantization: '4bit' is for models read from their own files, which this one is not; valid: a hub id or a "
            "folder, such as export writes, or null"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "quantization: '4bit' needs the package bitsandbytes, which is not installed; valid: pip install "
            "'gtpo-lightning[qlora]' (it works on a GPU, and slowly on a CPU), or quantization: null"
        )
    _check_device()


def _check_device() -> None:
    import bitsandbytes

    works_on = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if not torch.cuda.is_available() and "cpu" not in works_on:
        raise ValueError(
            f"quantization: '4bit' needs a GPU with bitsandbytes {bitsandbytes.__version__}, and torch finds none; "
            "valid: a machine with one, a newer bitsandbytes, or quantization: null"
        )


def quantization_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with quantised constants; products are computed in `dtype`.

    Source: Dettmers et al., arXiv 2305.14314.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """The model, computing with its weights as they are also on a CPU.

    On some CPUs bitsandbytes repacks weights at the first forward without gradients, for products in bf16 that let no
    gradient through; a policy samples before it is trained.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in fp32, so that an adapter can be merged into them without rounding them to 4 bits again."""
    dense: Any = model.dequantize(dtype=torch.float32)  # type: ignore[operator]
    return dense.float()


def dense_weight(layer: nn.Module) -> Tensor:
    """A layer's weight as numbers; those kept in 4 bits as what they mean, in the dtype they are computed with."""
    weight: Any = layer.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)
