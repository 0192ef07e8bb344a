"""Sampled completions to read: a table in TensorBoard and a JSON Lines file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from gtpo_lightning.completion_store import append_lines
from gtpo_lightning.functional import mean_entropy
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.rollout import Rollout

__all__ = ["CompletionLog"]

_COLUMNS = ("problem", "prompt", "completion", "reward", "parts", "advantage", "mean entropy", "kept δ")
# Markdown and HTML syntax, as entities; every character that ends a line or steers a terminal.
_ESCAPES = {ord(char): f"&#{ord(char)};" for char in "\\`*_{}[]()#+-!|<>&~$^=:\"'"}
_ESCAPES |= dict.fromkeys([*range(32), *range(127, 160)], "\ufffd") | {ord("\t"): " "}
_ESCAPES |= {ord(char): "<br>" for char in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"}


class CompletionLog(RLCallback):
    """Writes completions with their rewards every few optimizer steps, from the main process only.

    Each active `TensorBoardLogger` gets the table `completions`, with one row a completion; text is escaped, so
    that no completion can break the table or reach the browser as markup. The file `completions.jsonl` in the trainer's
    `log_dir` (`default_root_dir` without a logger) gets one JSON object a completion: step, problem_id, question,
    completion, length, truncated, reward, reward_parts, advantage, mean_entropy (nats), kept (whether δ is not 0); what
    is unknown or not a finite number is null. A resumed run appends. Under `fast_dev_run` nothing is written.

    Args:
        every_n_steps: Optimizer steps between two writes; the first step is written. Default 10.
        num_samples: Completions a write, evenly spread over the step's rows on the main process. Default 8.
        jsonl: Whether the file is written. Default true.

    Raises:
        ValueError: `every_n_steps` or `num_samples` is no whole number >= 1.

    Example:
        >>> CompletionLog(num_samples=4).every_n_steps
        10
    """

    def __init__(self, every_n_steps: int = 10, num_samples: int = 8, jsonl: bool = True) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_samples", num_samples)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r}; valid: a whole number >= 1")
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.jsonl = jsonl
        self._last_step: int | None = None

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Nothing: this callback leaves the loss alone."""

    def on_after_loss(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout, losses: dict[str, Tensor]
    ) -> None:
        """Reads the rollout and writes, if a write is due."""
        step = trainer.global_step
        if not self._is_due(step) or getattr(trainer, "fast_dev_run", False):
            return
        self._last_step = step
        # `log_dir` is a broadcast: every rank has to ask for it
        folder = getattr(trainer, "log_dir", None) or getattr(trainer, "default_root_dir", None)
        if not getattr(trainer, "is_global_zero", True):
            return
        records = _records(rollout, step, self.num_samples)
        for logger in getattr(trainer, "loggers", None) or ():
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("completions", _table(records), step)
                logger.experiment.flush()
        if self.jsonl and folder is not None:
            append_lines(Path(folder) / "completions.jsonl", records)

    def state_dict(self) -> dict[str, Any]:
        """The step of the last write, so that a resumed run writes at the steps an unbroken one would."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the step of the last write over."""
        self._last_step = state_dict.get("last_step")

    def _is_due(self, step: int) -> bool:
        """Once in each window of `every_n_steps`, also where steps are skipped or come in several micro-batches."""
        return self._last_step is None or step // self.every_n_steps != self._last_step // self.every_n_steps


def _records(rollout: Rollout, step: int, num_samples: int) -> list[dict[str, Any]]:
    """One JSON-ready object for each of `num_samples` rows, evenly spread."""
    count = min(num_samples, len(rollout))
    entropies = None
    if rollout.entropies is not None:
        entropies = mean_entropy(rollout.entropies.detach(), rollout.completion_mask)
        entropies = entropies.masked_fill(~rollout.scored(), math.nan)
    records = []
    for row in (index * len(rollout) // count for index in range(count)):
        problem = _problem(rollout, row)
        records.append(
            {
                "step": step,
                "problem_id": getattr(problem, "id", None),
                "question": getattr(problem, "question", None),
                "completion": rollout.texts[row] if row < len(rollout.texts) else None,
                "length": None if rollout.lengths is None else int(rollout.lengths[row]),
                "truncated": None if rollout.truncated is None else bool(rollout.truncated[row]),
                "reward": _number(rollout.rewards, row),
                "reward_parts": {name: _number(values, row) for name, values in rollout.reward_parts.items()},
                "advantage": _number(rollout.advantages, row),
                "mean_entropy": _number(entropies, row),
                "kept": bool(rollout.sequence_weights[row] != 0),
            }
        )
    return records


def _problem(rollout: Rollout, row: int) -> object:
    problems = getattr(rollout.prompts, "problems", None) or ()
    group = int(rollout.group_ids[row])
    return problems[group] if 0 <= group < len(problems) else None


def _number(values: Tensor | None, row: int) -> float | None:
    value = math.nan if values is None else float(values[row].detach())
    return value if math.isfinite(value) else None


def _table(records: list[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    lines = [" | ".join(_COLUMNS), " | ".join("---" for _ in _COLUMNS)]
    for record in records:
        parts = "<br>".join(f"{_cell(name)} {_cell(value)}" for name, value in record["reward_parts"].items())
        values = (record[name] for name in ("problem_id", "question", "completion", "reward"))
        numbers = (_cell(record["advantage"]), _cell(record["mean_entropy"]), _cell(int(record["kept"])))
        lines.append(" | ".join([*map(_cell, values), parts or "–", *numbers]))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: object) -> str:
    """Text with every character of Markdown and HTML syntax escaped, numbers with four digits, "–" for None."""
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return text.translate(_ESCAPES)
