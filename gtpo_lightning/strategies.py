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
from gtpo_lightning.checkpoint_folders import check_checkpoint
from gtpo_lightning.policy import Policy
from gtpo_lightning.sharding import shard

if TYPE_CHECKING:
    from gtpo_lightning.policy_module import PolicyModule

__all__ = [
    "check_folder",
    "check_run",
    "check_strategy",
    "clip_norm",
    "gradient_norm",
    "read_whole",
    "saves_parts",
    "split",
    "whole",
]


def check_strategy(trainer: Any) -> None:
    """Refuses a strategy that needs a GPU where there is none, before anything is read.

    Args:
        trainer: Its settings, as they were parsed.

    Raises:
        ValueError: Such a strategy on a CPU.
    """
    accelerator, short = trainer.get("accelerator"), _strategy_name(trainer)
    if not _is(short, "fsdp", "deepspeed") or (accelerator not in ("cpu", "mps", "tpu") and torch.cuda.is_available()):
        return
    what = "torch finds none" if not torch.cuda.is_available() else f"trainer.accelerator is {accelerator}"
    raise ValueError(
        f"trainer.strategy: {short} needs a GPU, and {what}; valid on a CPU: configs/trainer/cpu.yaml, ddp.yaml or "
        "fsdp2.yaml"
    )


def check_folder(path: str, trainer: Any, *, fit: bool) -> None:
    """Refuses a checkpoint in parts that a run's strategy could not go on from.

    Args:
        path: The folder.
        trainer: Its settings, as they were parsed.
        fit: Whether training goes on, which needs the optimizer's state, too.

    Raises:
        ValueError: The folder is another strategy's, or none.
    """
    name = _strategy_name(trainer)
    if _is(name, "deepspeed"):
        return
    check_checkpoint(path, "ckpt_path")
    if fit and not _is(name, "fsdp", "model"):
        raise ValueError(
            f"ckpt_path: {path!r} is a checkpoint in parts, whose optimizer state only a sharded strategy restores; "
            "valid: configs/trainer/fsdp2.yaml on any number of processes (also one: --trainer.devices=1 and "
            f"data_parallel_size 1), or --model.weights {path} to start a new run from its policy"
        )


def _strategy_name(trainer: Any) -> str:
    strategy = trainer.get("strategy")
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", None)
    return (name or "").rpartition(".")[2]


def _is(name: str, *kinds: str) -> bool:
    """Whether a strategy's class or its short name, such as `deepspeed_stage_2`, is of a kind."""
    known = {"fsdp": "FSDPStrategy", "deepspeed": "DeepSpeedStrategy", "model": "ModelParallelStrategy"}
    return any(name == known[kind] or name.split("_")[0] == kind for kind in kinds)


def check_run(trainer: pl.Trainer, quantization: str | None, vllm: object = None) -> None:
    """Refuses what a strategy would do wrong, before weights are read.

    Raises:
        ValueError: Weights in 4 bits that would be split, weights that vLLM could not be given, or gradients that
            DeepSpeed would accumulate.
    """
    strategy = trainer.strategy
    splits = isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) or zero.splits_weights(strategy)
    if quantization is not None and splits:
        raise ValueError(
            f"quantization: {quantization!r} keeps weights in blocks that {type(strategy).__name__} would cut apart; "
            "valid: configs/trainer/ddp.yaml or one GPU, where each holds all of the small weights, or quantization: "
            "null"
        )
    if vllm is not None and (isinstance(strategy, FSDPStrategy) or zero.splits_weights(strategy)):
        raise ValueError(
            f"engine: 'vllm' with {type(strategy).__name__}, whose split weights cannot be read one by one; valid: "
            "configs/trainer/ddp.yaml, fsdp2.yaml or deepspeed_stage_2.yaml, or engine: local"
        )
    if isinstance(strategy, DeepSpeedStrategy) and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches: {trainer.accumulate_grad_batches} with DeepSpeed, which keeps the gradient to "
            "itself, so that windows of uneven or of few batches could not be corrected; valid: 1, with a larger "
            "data.batch_size and model.micro_batch_size to bound the memory"
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
