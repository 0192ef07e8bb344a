"""Settings of vLLM, and whether it is there; nothing here imports it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["VLLM", "require_vllm", "vllm_settings"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# Arguments of vllm.LLM that are not the user's to give as options.
_OURS = {"model", "skip_tokenizer_init", "load_format", "logprobs_mode", "generation_config", "enable_sleep_mode"}
_OURS |= {"distributed_executor_backend", "gpu_memory_utilization", "dtype", "max_model_len", "tensor_parallel_size"}


@dataclass(frozen=True)
class VLLM:
    """Settings of the vLLM engine.

    Args:
        gpu_memory_utilization: Share of the device's memory for vLLM's copy of the weights and its key-value cache. On
            a CPU of the host's, and everything in the process counts: there, better give `kv_cache_memory_bytes` in
            `options`.
        dtype: Of vLLM's copy: `float32`, `bfloat16`, `float16`; `auto` is that of the trainer's precision.
        max_model_len: Tokens of a prompt and its completion at most; null takes what fits the memory.
        sleep: Whether the copy and the cache are dropped while the policy is trained, on devices where vLLM can do so.
        options: Further arguments of `vllm.LLM`, such as `enforce_eager` or `max_num_seqs`.

    Raises:
        ValueError: A value outside its range.
    """

    gpu_memory_utilization: float = 0.3
    dtype: str = "auto"
    max_model_len: int | None = None
    sleep: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        share, length = self.gpu_memory_utilization, self.max_model_len
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"vllm.gpu_memory_utilization: {share!r} is not valid; valid: above 0, at most 1")
        if self.dtype not in _DTYPES:
            raise ValueError(f"vllm.dtype: {self.dtype!r} is not valid; valid: {', '.join(_DTYPES)}")
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
            raise ValueError(f"vllm.max_model_len: {length!r} is not valid; valid: null or an integer of at least 2")
        if not isinstance(self.sleep, bool):
            raise ValueError(f"vllm.sleep: {self.sleep!r} is not valid; valid: true or false")
        taken = sorted(set(self.options) & _OURS)
        if taken:
            raise ValueError(
                f"vllm.options: {', '.join(taken)} cannot be given there; valid: other arguments of vllm.LLM, and "
                "gpu_memory_utilization, dtype, max_model_len beside options"
            )


def vllm_settings(engine: str, settings: VLLM | Mapping[str, Any] | None) -> VLLM | None:
    """The settings of a module's engine; None where the policy samples itself.

    Raises:
        ValueError: An unknown engine, settings of one that is not used, or vLLM is not installed.
    """
    if engine not in ("local", "vllm"):
        raise ValueError(f"engine: {engine!r} is not valid; valid: local, vllm")
    if engine == "local":
        if settings is not None:
            raise ValueError("vllm: settings were given, but engine is 'local'; valid: engine: vllm, or vllm: null")
        return None
    require_vllm()
    return settings if isinstance(settings, VLLM) else VLLM(**(settings or {}))


def require_vllm() -> None:
    """Refuses the engine where vLLM is not installed.

    Raises:
        ValueError: With what to install.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "engine: 'vllm' needs the package vllm, which is not installed; valid: install the extra with "
            "pip install 'gtpo-lightning[vllm]' (in an environment of its own: it fixes the versions of torch and "
            "transformers), or engine: local"
        )
