"""What each of Lightning's strategies needs of a policy: how its weights are split, gathered, clipped and measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gtpo_lightning import fsdp, zero
from gtpo_lightning.policy import Policy
from gtpo_lightning.sharding import shard

if TYPE_CHECKING:
    from gtpo_lightning.policy_module import PolicyModule

__all__ = ["check_quantized", "check_strategy", "clip_norm", "gradient_norm", "read_whole", "saves_parts", "split", "whole"]

_GPU_ONLY = {"FSDPStrategy": "fsdp", "DeepSpeedStrategy": "deepspeed"}


def check_strategy(trainer: Any) -> None:
    """Refuses a strategy that needs a GPU where there is none, before anything is read.

    Args:
        trainer: Its settings, as they were parsed.

    Raises:
        ValueError: Such a strategy on a CPU.
    """
    strategy, accelerator = trainer.get("strategy"), trainer.get("accelerator")
    name = strategy if isinstance(strategy, str) else str(getattr(strategy, "class_path", ""))
    short = name.rpartition(".")[2]
    found = next((kind for kind, alias in _GPU_ONLY.items() if short == kind or short.split("_")[0] == alias), None)
    if found is None or (accelerator not in ("cpu", "mps", "tpu") and torch.cuda.is_available()):
        return
    what = "torch finds none" if not torch.cuda.is_available() else f"trainer.accelerator is {accelerator}"
    raise ValueError(
        f"trainer.strategy: {short} needs a GPU, and {what}; valid on a CPU: configs/trainer/cpu.yaml, ddp.yaml or "
        "fsdp2.yaml"
    )


def check_quantized(strategy: Strategy | None, quantization: str | None) -> None:
    """Refuses weights in 4 bits where a strategy would split them.

    Raises:
        ValueError: It would.
    """
    splits = isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) or zero.splits_weights(strategy)
    if quantization is not None and splits:
        raise ValueError(
            f"quantization: {quantization!r} keeps weights in blocks that {type(strategy).__name__} would cut apart; "
            "valid: configs/trainer/ddp.yaml or one GPU, where each holds all of the small weights, or quantization: "
            "null"
        )


def read_whole(strategy: Strategy | None) -> AbstractContextManager[None]:
    """A context in which a model is made with all its weights, whatever the strategy does to new modules."""
    return zero.outside_init() if isinstance(strategy, DeepSpeedStrategy) else nullcontext()


def saves_parts(strategy: Strategy) -> bool:
    """Whether each process saves its own part of the weights, by FSDP1, which then reads all of them again."""
    return isinstance(strategy, FSDPStrategy) and strategy._state_dict_type == "sharded"


def split(module: PolicyModule) -> None:
    """Splits the policies of a module over processes, or readies them for a strategy that does so later."""
    strategy = None if module._trainer is None else module.trainer.strategy
    policies = [part for part in module.modules() if isinstance(part, Policy) and not part.shares_weights]
    if not policies:
        return
    # These strategies would look for the frozen weights of adapters in the checkpoint, too.
    splits = module._device_mesh is not None or isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy))
    if splits and module.lora is not None:
        module.strict_loading = False
    if module._device_mesh is not None:
        for policy in policies:
            shard(policy, module._device_mesh)
    elif isinstance(strategy, FSDPStrategy):
        fsdp.prepare(strategy, module)
    elif isinstance(strategy, DeepSpeedStrategy):
        zero.prepare(strategy, policies)


def clip_norm(trainer: pl.Trainer, largest: float) -> bool:
    """Clips the norm of the gradient of all processes together; False where Lightning can do it itself."""
    return fsdp.clip_norm(trainer, largest)


def gradient_norm(module: pl.LightningModule) -> Tensor | None:
    """The norm of the whole gradient of all processes together, before clipping; None where DeepSpeed keeps it."""
    if isinstance(module.trainer.strategy, DeepSpeedStrategy):
        return None
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else fsdp.joined_norm(module.trainer, norm)


@contextmanager
def whole(trainer: pl.Trainer, module: nn.Module) -> Iterator[None]:
    """The module with all its weights on every process, to be read; those of FSDP2 stay tensors of all processes."""
    with fsdp.whole(trainer), zero.whole(trainer, module):
        yield
