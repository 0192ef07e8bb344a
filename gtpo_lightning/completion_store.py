"""Finished completions on disk, one JSON object a line, so that an interrupted evaluation goes on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtpo_lightning.judging import Sample
from gtpo_lightning.rollout import Problem

__all__ = ["CompletionStore", "append_lines", "settings_key", "weights_digest"]

_log = logging.getLogger(__name__)


class CompletionStore:
    """The completions of one policy under one set of sampling settings.

    A line is `{"problem_id", "sample", "question", "completion", "length", "truncated", "prompt"}`, where `prompt` is a
    digest of the prompt's token ids: a problem whose prompt changed is sampled again. Each process writes a file of its
    own (`name.jsonl`, `name.rank1.jsonl`, …) and reads all of them at the start, so another number of processes can go
    on. Lines are flushed as they are written; a line that was cut by a kill is left out.

    Args:
        path: The file of the first process, `….jsonl`; its folder is made.
        num_samples: Completions a problem needs to be finished.
        prompt_ids: Token ids of a problem's prompt.
        rank: This process.
    """

    def __init__(
        self, path: str | Path, *, num_samples: int, prompt_ids: Callable[[Problem], Iterable[int]], rank: int = 0
    ) -> None:
        path = Path(path)
        self.path = path.with_suffix(f".rank{rank}.jsonl") if rank else path
        self.num_samples = num_samples
        self._prompt_ids = prompt_ids
        self._known: dict[tuple[str, str], dict[int, Sample]] = {}
        self._digests: dict[tuple[str, str], str] = {}
        others = path.parent.glob(f"{path.stem}.rank*.jsonl")
        for file in sorted({path, self.path, *others}):
            if file.is_file():
                self._read(file)

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._known.values())

    def known(self, problem: Problem) -> int:
        """How many completions of a problem are there, counted from the first without a gap."""
        known = self._known.get(self._key(problem), {})
        return next((sample for sample in range(self.num_samples) if sample not in known), self.num_samples)

    def finished(self, problem: Problem) -> bool:
        """Whether all completions of a problem are there."""
        return self.known(problem) == self.num_samples

    def samples(self, problem: Problem) -> list[Sample]:
        """The completions of a finished problem, in order."""
        known = self._known[self._key(problem)]
        return [known[sample] for sample in range(self.num_samples)]

    def add(self, problem: Problem, index: int, sample: Sample) -> None:
        """Writes one completion, unless it is there."""
        key = self._key(problem)
        known = self._known.setdefault(key, {})
        if index in known:
            return
        known[index] = sample
        line = {
            "problem_id": problem.id,
            "sample": index,
            "question": problem.question,
            "completion": sample.completion,
            "length": sample.length,
            "truncated": sample.truncated,
            "prompt": key[1],
        }
        append_lines(self.path, [line])

    def _key(self, problem: Problem) -> tuple[str, str]:
        asked = (problem.id, problem.question)
        if asked not in self._digests:
            ids = ",".join(str(token) for token in self._prompt_ids(problem))
            self._digests[asked] = hashlib.sha256(ids.encode()).hexdigest()[:16]
        return problem.id, self._digests[asked]

    def _read(self, path: Path) -> None:
        for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
            try:
                line = json.loads(text)
                key = (line["problem_id"], line["prompt"])
                sample = Sample(line["completion"], line["length"], line["truncated"])
            except (ValueError, KeyError, TypeError):
                if text.strip():
                    _log.warning("%s, line %d: no completion, left out: %.60r", path, number, text)
                continue
            self._known.setdefault(key, {}).setdefault(line["sample"], sample)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds one JSON line a record; a last line that a killed run left unfinished stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())
        file.flush()


def settings_key(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that change with any of the settings.

    Args:
        settings: Names to plain values.

    Example:
        >>> settings_key({"temperature": 1.0}) == settings_key({"temperature": 0.5})
        False
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def weights_digest(module: nn.Module) -> str:
    """A digest of the weights themselves, so that it tells models apart whatever their names and paths are.

    Sums of the bits as integers: exact, in any order, on any device. Sharded weights are gathered one by one.

    Args:
        module: With its weights loaded; those that FSDP1 or DeepSpeed split are gathered by the caller.
    """
    digest = hashlib.sha256()
    for full, parameter in module.named_parameters():
        name = full.replace("_fsdp_wrapped_module.", "")  # what FSDP1 puts around a layer
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {_bit_sums(parameter.detach())}".encode())
    return digest.hexdigest()[:16]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bit_sums(tensor: Tensor) -> tuple[int, ...]:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    bits = full.contiguous().view(_INTEGERS[full.element_size()]).reshape(-1)
    # Two sums, of which the second depends on where a value stands.
    half = len(bits) // 2
    return int(bits.sum(dtype=torch.int64)), int(bits[:half].sum(dtype=torch.int64))
