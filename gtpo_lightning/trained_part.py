"""Of a policy under adapters a checkpoint holds only what is trained; what is frozen comes from where it came from."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["drop_frozen", "trained_part"]


def trained_part(module: nn.Module) -> frozenset[str]:
    """Has the state of a module hold only what is trained of its policy, and loading miss nothing else.

    A missing or unknown adapter weight is still an error.

    Args:
        module: With a `policy` whose frozen weights no checkpoint is to hold.

    Returns:
        The names of what is trained of the policy, in the module's state.
    """
    policy: nn.Module = module.policy  # type: ignore[assignment]
    named = policy.named_parameters(remove_duplicate=False)
    trained = frozenset(f"policy.{name}" for name, parameter in named if parameter.requires_grad)
    module.register_state_dict_post_hook(partial(_keep_trained, trained))
    module.register_load_state_dict_post_hook(partial(_miss_trained_only, trained))
    return trained


def drop_frozen(state: dict[str, Any], trained: frozenset[str], prefix: str = "") -> None:
    """Takes what is frozen of the policy out of a module's state, in place."""
    for name in [name for name in state if name.startswith(f"{prefix}policy.")]:
        if name.removeprefix(prefix) not in trained:
            del state[name]


def _keep_trained(trained: frozenset[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    # FSDP1 looks for all that it split in the state when this hook has run; `on_save_checkpoint` drops it later.
    if not any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        drop_frozen(state, trained, prefix)


def _miss_trained_only(trained: frozenset[str], module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.startswith("policy.") or name in trained]
