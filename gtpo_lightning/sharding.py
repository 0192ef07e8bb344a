"""FSDP2: the policy's weights split over the processes of Lightning's `ModelParallelStrategy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from gtpo_lightning.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Lockstep", "decoder_layers", "shard"]


class Lockstep:
    """What keeps processes that gather weights together at the same number of forward calls.

    A forward of a sharded layer is a collective: it returns when every process has called it. Processes differ in how
    long their completions are and how many they have, so each loop asks how long the longest one is.

    Args:
        device: Where the group's collectives run, such as `cuda` or `cpu`.
        group: The processes that share the weights; None: all of them.
    """

    def __init__(self, device: str | torch.device, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group

    def __call__(self, count: int) -> int:
        """The largest count of all processes; each has to call it equally often."""
        value = torch.tensor(count, device=self.device)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(value)

    def __deepcopy__(self, memo: object) -> Lockstep:
        return self


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Splits the weights of each decoder layer, and those around the layers, over the processes of a mesh, in place.

    A process then holds its share of the weights, their gradients and the optimizer's state. Layers are gathered one
    at a time, in sampling, too; what stands around them (embedding, last norm, head) is gathered once a rollout.

    Args:
        policy: With all weights on every process.
        mesh: Dimensions `data_parallel` and `tensor_parallel`, as Lightning makes them.

    Raises:
        ValueError: The mesh splits single weights, too.
    """
    names = mesh.mesh_dim_names or ()
    if "tensor_parallel" in names and mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"tensor_parallel_size: {mesh['tensor_parallel'].size()} splits single weights, which this package does "
            "not do; valid: tensor_parallel_size 1 and data_parallel_size the number of processes"
        )
    inner = mesh["data_parallel"] if "data_parallel" in names else mesh
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=inner)
    # The root is gathered again in the backward pass; kept, it would go stale with the optimizer's step.
    fully_shard(policy, mesh=inner, reshard_after_forward=True)
    policy.most, policy.shares_weights = Lockstep(inner.device_type, inner.get_group()), True


def decoder_layers(policy: Policy) -> Iterator[nn.Module]:
    """The layers that transformers itself says must stay in one piece."""
    whole = set(getattr(policy.causal_lm, "_no_split_modules", None) or ())
    return (module for module in policy.causal_lm.modules() if type(module).__name__ in whole)
