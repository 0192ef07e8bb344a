"""Makes the engine that a module's settings ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtpo_lightning.codec import Codec
from gtpo_lightning.engines.base import Engine
from gtpo_lightning.engines.local import LocalEngine
from gtpo_lightning.engines.vllm import VLLMEngine
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.policy import Policy

__all__ = ["build_engine", "compute_dtype"]


def build_engine(
    policy: Policy,
    codec: Codec,
    *,
    vllm: VLLM | None,
    batch_size: int | None,
    dtype: torch.dtype,
    version: Callable[[], object],
) -> Engine:
    """VLLM where there are settings of it, else the policy itself.

    Args:
        policy: Who samples, or whose weights are copied.
        codec: Knows the tokens that end and pad completions.
        vllm: Settings of vLLM; None for the local engine.
        batch_size: Prompts the local engine samples at once; None samples all together.
        dtype: What products are computed in, for vLLM's `dtype: auto`.
        version: Something that changes when the weights do.
    """
    if vllm is None:
        return LocalEngine(policy, codec.eos_ids, codec.pad_id, batch_size)
    return VLLMEngine(policy, codec.eos_ids, codec.pad_id, vllm, dtype=dtype, version=version)


def compute_dtype(weights: str, precision: str) -> torch.dtype:
    """What products are computed in: the trainer's mixed precision where it has one, else the dtype of the weights.

    Example:
        >>> compute_dtype("float32", "bf16-mixed"), compute_dtype("float32", "32-true")
        (torch.bfloat16, torch.float32)
    """
    mixed = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else None
    return getattr(torch, weights) if mixed is None else mixed  # type: ignore[no-any-return]
