"""FSDP1: the policy's layers as the units of Lightning's `FSDPStrategy`, which wraps the whole module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from gtpo_lightning.policy import Policy
from gtpo_lightning.sharding import Lockstep, decoder_layers

__all__ = ["clip_norm", "joined_norm", "prepare", "whole"]


def prepare(strategy: FSDPStrategy, module: nn.Module) -> None:
    """Has the strategy split each decoder layer on its own, whatever the model, before it wraps the module.

    The module is the root, whose own weights (embedding, last norm, head) are gathered for as long as a step runs, so
    steps have to be run by the strategy and not by calling the module's methods. A wrapping policy that was given to
    the strategy stays.

    Args:
        strategy: Has not wrapped the module yet.
        module: Its policies are told that their weights are shared.

    Raises:
        ValueError: The strategy is to checkpoint layers itself, or the module's weights are of several dtypes.
    """
    if strategy._activation_checkpointing_kwargs:
        raise ValueError(
            "trainer.strategy.activation_checkpointing_policy: layers that run again would extend the cache of their "
            "prompt twice; valid: none, and model.gradient_checkpointing: true, which does the same here"
        )
    policies = [part for part in module.modules() if isinstance(part, Policy)]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for policy in policies for p in policy.parameters()})
    if len(dtypes) > 1:
        raise ValueError(
            f"dtype: weights of several dtypes ({', '.join(dtypes)}) cannot be split by FSDPStrategy, which joins "
            "those of a layer in one tensor; valid: dtype: float32 (with trainer.precision bf16-mixed), or "
            "configs/trainer/fsdp2.yaml"
        )
    layers = {type(layer) for policy in policies for layer in decoder_layers(policy)}
    strategy.kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy(layers))
    mixed = strategy.mixed_precision_config
    if mixed is not None and strategy.mixed_precision is None:
        # Rotary frequencies are buffers: in half precision they would turn late positions by a wrong angle.
        strategy.mixed_precision = replace(mixed, buffer_dtype=None)
    for policy in policies:
        policy.most, policy.shares_weights = Lockstep(strategy.root_device), True


def _root(trainer: pl.Trainer) -> FullyShardedDataParallel | None:
    model = trainer.strategy.model
    return model if isinstance(model, FullyShardedDataParallel) else None


def clip_norm(trainer: pl.Trainer, largest: float) -> bool:
    """Clips the norm of the gradient of all processes together; False where they do not split it by FSDP1."""
    root = _root(trainer)
    if root is None:
        return False
    root.clip_grad_norm_(largest)
    return True


def joined_norm(trainer: pl.Trainer, norm: Tensor) -> Tensor:
    """The norm of the whole gradient, from that of each process's share; unchanged where nothing is split."""
    root = _root(trainer)
    if root is None or root.sharding_strategy is ShardingStrategy.NO_SHARD:
        return norm
    squared = norm**2
    torch.distributed.all_reduce(squared, group=root.process_group)
    return squared.sqrt()


@contextmanager
def whole(trainer: pl.Trainer) -> Iterator[None]:
    """The module with all its weights on every process, to be read."""
    root = _root(trainer)
    if root is None:
        yield
        return
    with FullyShardedDataParallel.summon_full_params(root, writeback=False):
        yield
