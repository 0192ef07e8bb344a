"""What a checkpoint of this package says about its policy: weights, and for an adapter what it lies over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtpo_lightning.checkpoint_folders import in_parts, read_parts

__all__ = ["Origin", "StoredPolicy", "fingerprint_of", "load_weights", "misfit", "read_policy"]

_SAMPLED = 1024  # entries of each tensor that a fingerprint reads


def fingerprint_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and up to 1,024 evenly spaced entries of each tensor: other weights, another hash."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        entries = value.detach().reshape(-1)
        entries = entries[:: max(1, -(-len(entries) // _SAMPLED))].float().cpu()
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(entries.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Origin:
    """Where weights came from, so that they can be made again.

    Args:
        source: The checkpoint, or the folder of an adapter; None: those of the model itself.
        fingerprint: Of the weights; None where nobody took it.
    """

    source: str | None = None
    fingerprint: str | None = None

    @classmethod
    def of(cls, source: str | None, fingerprint: str | None = None) -> Origin:
        """With the whole path of the source."""
        return cls(None if source is None else str(Path(source).resolve()), fingerprint)

    def plain(self) -> dict[str, str | None]:
        """Plain values, for a checkpoint."""
        return {"source": self.source, "fingerprint": self.fingerprint}


@dataclass
class StoredPolicy:
    """The policy in a checkpoint.

    Args:
        path: The file.
        weights: By the names that `Policy.state_dict` gives.
        adapter: Of a checkpoint that holds adapter weights only: `settings`, and the `base` they lie over.
        hyper_parameters: Of the module that was trained.
        step: Optimizer steps.
        epoch: Epochs that were over.
    """

    path: str
    weights: dict[str, Tensor]
    adapter: dict[str, Any] | None = None
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0

    @property
    def base(self) -> Origin:
        """What the adapter lies over."""
        return Origin(**self.adapter["base"]) if self.adapter is not None else Origin()


def read_policy(path: str, argument: str = "weights", *, mmap: bool = False) -> StoredPolicy:
    """Reads a checkpoint, without running code from it.

    Args:
        path: A file written by a run of this package, or FSDP's folder of parts.
        argument: What errors name.
        mmap: Whether weights are read from the file only when they are used.

    Raises:
        ValueError: It cannot be read, or holds no policy.
    """
    try:
        parts = in_parts(path)
        content = read_parts(path) if parts else torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        state: dict[str, Tensor] = content["state_dict"]
    except Exception as error:  # whatever a file of another kind makes the reader raise
        raise ValueError(f"{argument}: {path!r} is no checkpoint of this package ({type(error).__name__})") from error
    return StoredPolicy(
        path=path,
        weights={name.removeprefix("policy."): value for name, value in state.items() if name.startswith("policy.")},
        adapter=content.get("adapter"),
        hyper_parameters=dict(content.get("hyper_parameters", {})),
        step=int(content.get("global_step", 0)),
        epoch=int(content.get("epoch", 0)),
    )


def load_weights(policy: nn.Module, stored: StoredPolicy, argument: str = "weights") -> None:
    """Puts the weights of a checkpoint that holds all of them into a policy.

    Raises:
        ValueError: They are those of another model.
    """
    own, wanted = stored.weights, policy.state_dict()
    missing, unexpected = sorted(wanted.keys() - own.keys()), sorted(own.keys() - wanted.keys())
    sizes = [name for name in wanted.keys() & own.keys() if wanted[name].shape != own[name].shape]
    if missing or unexpected or sizes:
        raise ValueError(misfit(argument, stored.path, missing, unexpected, sizes))
    policy.load_state_dict(own)


def misfit(argument: str, path: str, missing: list[str], unexpected: list[str], sizes: list[str]) -> str:
    """The message about weights of another model."""
    return (
        f"{argument}: {path!r} does not fit the model (missing {missing[:3]}, unexpected {unexpected[:3]}, "
        f"of another size {sorted(sizes)[:3]}); valid: a checkpoint of the same model"
    )
