"""Which attention kernel a model is read with where none was asked for."""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["default_attention"]


def default_attention(dtype: str, device: str) -> str | None:
    """Flash attention where it can be had, else the default of transformers (None).

    It needs the package flash_attn, a GPU, and weights in half precision: under mixed precision over fp32 weights the
    default stays.

    Args:
        dtype: How weights are kept, such as `bfloat16`.
        device: Type of the device that the model will be on, such as `cuda`.

    Example:
        >>> default_attention("float32", "cpu") is None
        True
    """
    there = importlib.util.find_spec("flash_attn") is not None
    half = dtype in ("bfloat16", "float16")
    return "flash_attention_2" if there and half and device == "cuda" and torch.cuda.is_available() else None
