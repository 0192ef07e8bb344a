"""DeepSpeed's ZeRO under Lightning's `DeepSpeedStrategy`: what a policy needs to be read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from gtpo_lightning.policy import Policy
from gtpo_lightning.sharding import Lockstep

__all__ = ["outside_init", "prepare", "splits_weights", "whole"]


def splits_weights(strategy: object) -> bool:
    """Whether weights themselves are split (stage 3), and not only gradients and the optimizer's state."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return False
    config: dict[str, Any] = strategy.config or {}  # type: ignore[assignment]
    return int(config.get("zero_optimization", {}).get("stage", 0)) == 3


@contextmanager
def outside_init() -> Iterator[None]:
    """Leaves `deepspeed.zero.Init`, in which new parameters are split at once and a checkpoint's could not be read."""
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()


def prepare(strategy: DeepSpeedStrategy, policies: Sequence[Policy]) -> None:
    """Readies policies for stage 3, in which a module's weights are there only while it runs.

    Layers are gathered by hooks of their own. The head's weight is read without running the head, so the policy itself
    names it as a weight that it needs; it is gathered for as long as `Policy.forward` runs, and for its backward pass.
    """
    if not splits_weights(strategy):
        return
    import deepspeed

    for policy in policies:
        for parameter in policy.causal_lm.get_output_embeddings().parameters():
            deepspeed.zero.register_external_parameter(policy, parameter)
        policy.most, policy.shares_weights = Lockstep(strategy.root_device), True


@contextmanager
def whole(trainer: pl.Trainer, module: nn.Module) -> Iterator[None]:
    """All weights of a module on every process, where stage 3 split them."""
    if not splits_weights(trainer.strategy):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        yield
