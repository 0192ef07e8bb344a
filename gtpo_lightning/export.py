"""A checkpoint as a folder that other programs load: `python main.py export --ckpt_path FILE --output FOLDER`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from torch import nn

from gtpo_lightning.adapters import untied
from gtpo_lightning.checkpoint_folders import check_checkpoint
from gtpo_lightning.checkpoints import Origin, StoredPolicy, read_policy
from gtpo_lightning.model_card import hub_name, model_card
from gtpo_lightning.models import EMBEDDED, load_tokenizer
from gtpo_lightning.policy import Policy
from gtpo_lightning.policy_source import PolicySource, settings_of
from gtpo_lightning.quantization import dequantized

__all__ = ["Export", "export", "main"]

_DTYPES = ("float32", "bfloat16", "float16")
_MARKS = ("config.json", "adapter_config.json")  # one of them is in every folder that an export writes


@dataclass(frozen=True)
class Export:
    """What is exported, and how.

    Args:
        ckpt_path: A checkpoint written by a run of this package, a file or FSDP's folder of parts.
        output: The folder to make.
        adapter_only: Whether only the adapter is written, as peft loads it; else it is merged into the model.
        dtype: Of the weights written: float32, bfloat16 or float16. Default: that of the run's weights; of an adapter
            float32.
        overwrite: Whether an earlier export in the folder is replaced.
        model: Where the model of the run is now, if not where it was.
        weights: Where the checkpoint is now that the adapter was trained over, if not where it was.
    """

    ckpt_path: str
    output: str
    adapter_only: bool = False
    dtype: str | None = None
    overwrite: bool = False
    model: str | None = None
    weights: str | None = None


def export(wanted: Export) -> Path:
    """Writes a folder with weights, tokenizer (chat template included), generation settings and a model card.

    It is written aside and moved in place when it is whole. Everything is read and merged on the CPU, in fp32.

    Args:
        wanted: What and how.

    Returns:
        The folder.

    Raises:
        ValueError: A checkpoint or folder that cannot be used, or an adapter asked of a run that trained none.
    """
    output = Path(wanted.output)
    check_paths(wanted, output)
    stored = read_policy(wanted.ckpt_path, "ckpt_path", mmap=True)
    settings = stored.hyper_parameters
    if not isinstance(settings.get("model"), str):
        raise ValueError(
            f"ckpt_path: {wanted.ckpt_path!r} does not say which model it is of; valid: a checkpoint of a run"
        )
    if wanted.adapter_only and stored.adapter is None:
        raise ValueError(
            f"adapter_only: {wanted.ckpt_path!r} holds a whole policy and no adapter; valid: an export without it"
        )
    name = wanted.model or settings["model"]
    with moved_in_place(output) as folder:
        policy = restored(stored, wanted, name)
        if wanted.adapter_only:
            save_adapter(policy, folder, name, wanted.dtype or "float32")
        else:
            save_whole(merged(policy), folder, wanted.dtype or settings.get("dtype", "float32"))
        load_tokenizer(name).save_pretrained(folder)
        card = model_card(stored, name, adapter=wanted.adapter_only)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return output


def check_paths(wanted: Export, output: Path) -> None:
    """Refuses what could not work, and what would be lost, before anything is read.

    Raises:
        ValueError: No such checkpoint or one of DeepSpeed, a folder in use, or an unknown dtype.
    """
    checkpoint = Path(wanted.ckpt_path)
    if wanted.dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype: {wanted.dtype!r} is not valid; valid: {', '.join(_DTYPES)}")
    check_checkpoint(wanted.ckpt_path, "ckpt_path")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {wanted.output!r} is a file; valid: a folder that is empty or not there yet")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not wanted.overwrite:
        raise ValueError(f"output: {wanted.output!r} is not empty; valid: another folder, or --overwrite to replace it")
    if not any((output / mark).is_file() for mark in _MARKS) or output.resolve() in checkpoint.resolve().parents:
        raise ValueError(
            f"output: {wanted.output!r} holds something else than an export, which --overwrite does not remove; valid: "
            "another folder"
        )


@contextmanager
def moved_in_place(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when all went well, and else is removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        old = folder.with_name(folder.name + ".old")
        if output.exists():
            output.rename(old)
        folder.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def restored(stored: StoredPolicy, wanted: Export, name: str) -> Policy:
    """The policy of a checkpoint, in fp32; weights that were in 4 bits as the numbers they stand for."""
    lora = None if stored.adapter is None else settings_of(stored)
    if stored.adapter is not None and wanted.weights is not None:
        stored.adapter["base"] = Origin(wanted.weights, stored.base.fingerprint).plain()
    settings = stored.hyper_parameters
    quantization = settings.get("quantization") if name not in EMBEDDED else None
    # The dtype is the run's, so that what the adapter lies over is recognised; fp32 comes after, without a loss.
    source = PolicySource(name, dtype=settings.get("dtype", "float32"), lora=lora, quantization=quantization)
    policy = source.of_stored(stored, "ckpt_path", whole=dequantized if quantization else None)
    nn.Module.to(policy, torch.float32)
    return policy.eval()


def merged(policy: Policy) -> Any:
    """The policy's transformers model, with its adapter merged where it has one."""
    if policy.adapter is None:
        return policy.causal_lm
    untied(policy.causal_lm)
    tuned: Any = policy.model
    return tuned.merge_and_unload(safe_merge=True)


def save_whole(model: Any, folder: Path, dtype: str) -> None:
    """Writes a model as `AutoModelForCausalLM.from_pretrained` reads it."""
    nn.Module.to(model, getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)


def save_adapter(policy: Policy, folder: Path, name: str, dtype: str) -> None:
    """Writes an adapter as `PeftModel.from_pretrained` reads it."""
    tuned: Any = policy.model
    nn.Module.to(tuned, getattr(torch, dtype))
    tuned.peft_config["default"].base_model_name_or_path = hub_name(name)
    # The vocabulary is the model's, so its embeddings need not come along.
    tuned.save_pretrained(folder, save_embedding_layers=False)


def main(args: list[str]) -> int:
    """Exports a checkpoint.

    Args:
        args: Words behind `export`.

    Returns:
        0; 2 if nothing can be exported.
    """
    parser = ArgumentParser(
        prog="main.py export", description="A folder that transformers and peft load, from a checkpoint of a run."
    )
    parser.add_argument("--ckpt_path", type=str, required=True, help="A checkpoint written by a run of this package.")
    parser.add_argument("--output", type=str, required=True, help="The folder to make.")
    parser.add_argument(
        "--adapter_only", action="store_true", help="Only the adapter, as peft loads it; else it is merged."
    )
    parser.add_argument(
        "--dtype", type=str | None, default=None, help="Of the weights written: float32, bfloat16, float16. The run's."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replaces an earlier export in the folder.")
    parser.add_argument("--model", type=str | None, default=None, help="Where the run's model is now, if it moved.")
    parser.add_argument(
        "--weights", type=str | None, default=None, help="Where the checkpoint below the adapter is now, if it moved."
    )
    given = parser.parse_args(args)
    try:
        folder = export(Export(**given.as_dict()))
    except ValueError as error:
        sys.stderr.write(f"export: {error}\n")
        return 2
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    Console().print(f"{folder}: {size / 2**20:,.1f} MiB", soft_wrap=True, highlight=False)
    return 0
