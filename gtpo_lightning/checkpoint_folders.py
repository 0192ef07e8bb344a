"""Checkpoints that are folders, since each process wrote its own part: FSDP's are read here, DeepSpeed's converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

__all__ = ["FoldersToo", "check_checkpoint", "in_parts", "read_parts", "read_record", "with_folders"]

_RECORD = "meta.pt"  # what Lightning writes beside the parts: everything but weights and optimizer
_CONVERT = (
    'python -c "from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as c; '
    "c('{path}', '{path}.single')\""
)
_WEIGHTS = ("state_dict", "model")  # FSDP2's and FSDP1's name for them


def in_parts(path: str | Path) -> bool:
    """Whether a path is a checkpoint in parts, as `save_distributed_checkpoint` and `state_dict_type: sharded` do."""
    return (Path(path) / _RECORD).is_file()


def check_checkpoint(path: str, argument: str) -> None:
    """Makes sure that a path is a checkpoint whose weights can be read, without reading them.

    Args:
        path: A file, or a folder of parts.
        argument: What errors name.

    Raises:
        ValueError: It is something else, or a folder of DeepSpeed, with the command that makes a file of it.
    """
    place = Path(path)
    if place.is_file() or in_parts(place):
        return
    if (place / "latest").is_file() or (place / "zero_to_fp32.py").is_file():
        command = _CONVERT.format(path=str(path).rstrip("/"))
        raise ValueError(
            f"{argument}: {path!r} is a checkpoint of DeepSpeed, which only its own strategy reads; valid: the file "
            f"that this command makes of it, where deepspeed is installed: {command}"
        )
    raise ValueError(
        f"{argument}: {path!r} is no file; valid: a checkpoint written by a run of this package, or a folder of parts "
        "that one wrote"
    )


def read_record(path: str | Path) -> dict[str, Any]:
    """What is in a checkpoint, or beside its parts, without reading the weights."""
    file = Path(path) / _RECORD if in_parts(path) else Path(path)
    record: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return record


def read_parts(path: str | Path) -> dict[str, Any]:
    """A checkpoint in parts as a file would hold it, without the optimizer's state; the weights are whole, on the CPU.

    Args:
        path: The folder.

    Returns:
        `state_dict`, and what `read_record` returns.

    Raises:
        ValueError: It holds no weights.
    """
    reader = FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    name = next((name for name in _WEIGHTS if any(key.startswith(f"{name}.") for key in found)), None)
    if name is None:
        raise ValueError(f"{str(path)!r} holds no weights; valid: a folder that a run of this package wrote")
    weights: dict[str, Tensor] = {
        key.removeprefix(f"{name}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in found.items()
        if key.startswith(f"{name}.") and isinstance(entry, TensorStorageMetadata)
    }
    load({name: weights}, storage_reader=reader, no_dist=True)
    return {**read_record(path), "state_dict": weights}


class FoldersToo(TorchCheckpointIO):
    """Reads files as Lightning does, and folders of parts for strategies that have whole weights."""

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A file's content, or a folder's without the optimizer's state."""
        return read_parts(path) if in_parts(path) else super().load_checkpoint(path, *args, **kwargs)


def with_folders(plugins: Any) -> list[Any]:
    """A trainer's plugins and `FoldersToo`, unless one of them reads checkpoints already."""
    given = list(plugins) if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]
    return given if any(isinstance(plugin, CheckpointIO) for plugin in given) else [*given, FoldersToo()]
