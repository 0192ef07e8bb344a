"""The gradient of the loss in the log-probs, foreseen before the policy is read.

While the policy that samples is the one that is trained, the engine's record says what scoring will find: the same
log-probs and entropies but for rounding. The weights of the loss follow from rewards, tokens and entropies, and so does
its gradient in each log-prob. The head then forms its own gradients in the forward pass (`functional.foreseen`); a
guess that comes out wrong costs time and changes no number.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gtpo_lightning.hooks import RLCallback

if TYPE_CHECKING:
    from gtpo_lightning.module import GTPOModule
    from gtpo_lightning.rollout import Rollout

__all__ = ["foresee"]

_LOSS_HOOKS = ("on_before_loss", "on_after_loss")


def foresee(module: GTPOModule, rollout: Rollout) -> Tensor | None:
    """A guess of dL / d log-prob, (N, T); None where it would not come true often enough to pay.

    That is: a rollout of an earlier policy or of an engine with weights of its own, another temperature in the loss,
    entropies with a gradient, half precision (whose two ways of reading the policy differ in each number), weights
    split over processes, or a callback with a say in the loss that has no `foresee`.

    Args:
        module: Its callbacks and its loss.
        rollout: Sampled and scored; its slots are left alone.
    """
    if not _pays(module, rollout):
        return None
    logprobs = rollout.sampled_logprobs.detach().clone().requires_grad_()  # type: ignore[union-attr]
    told = dataclasses.replace(rollout, logprobs=logprobs, entropies=rollout.sampled_entropies)  # type: ignore[arg-type]
    told.reset_slots()
    for callback in _parts(module):
        if callback.foresee(module.trainer, module, told) is False:
            return None
    return torch.autograd.grad(module.policy_loss(told), logprobs)[0]


def _pays(module: GTPOModule, rollout: Rollout) -> bool:
    return (
        torch.is_grad_enabled()
        and module.engine.exact
        and rollout.sampled_logprobs is not None
        and rollout.sampled_entropies is not None
        and rollout.old_logprobs is None
        and module.loss_temperature is None
        and not module.entropy_grad
        and not module.policy.shares_weights
        and str(module.trainer.precision).startswith("32")
        and module.source.dtype == "float32"
        and all(_foresees(callback) for callback in _parts(module))
    )


def _parts(module: GTPOModule) -> list[RLCallback]:
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, RLCallback)]


def _foresees(callback: RLCallback) -> bool:
    kind = type(callback)
    silent = all(getattr(kind, hook) is getattr(RLCallback, hook) for hook in _LOSS_HOOKS)
    return silent or kind.foresee is not RLCallback.foresee
