"""What a training step costs: seconds and peak memory, in a file beside the run."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["StepMeter", "table"]


class StepMeter(pl.Callback):
    """Writes `steps.json` into the trainer's `default_root_dir` when training ends.

    `seconds` has each step from its start to that of the next one, optimizer included; `peak_gib` is the most memory
    that tensors took on this process's GPU, in GiB, and null without one.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Starts the clock, when the GPU has done all before."""
        self._started = _now()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Stops it."""
        self.seconds.append(_now() - self._started)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the file."""
        if not trainer.is_global_zero:
            return
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        content = {"seconds": self.seconds, "peak_gib": peak, "steps": trainer.global_step}
        Path(trainer.default_root_dir, "steps.json").write_text(json.dumps(content), encoding="utf-8")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def table(folder: Path, names: list[str]) -> str:
    """One line a run: its name, whether it ended well, seconds a step (median without the first), peak memory.

    Args:
        folder: Holds `NAME.txt`, what a run said, and `NAME/steps.json`, if it ended.
        names: The runs, in order.
    """
    lines = ["| strategy | result | seconds a step | peak memory, GiB |", "|---|---|---|---|"]
    for name in names:
        path = folder / name / "steps.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            peak = "–" if found["peak_gib"] is None else f"{found['peak_gib']:.2f}"
            seconds = statistics.median(found["seconds"][1:] or found["seconds"])
            lines.append(f"| {name} | ok, {found['steps']} steps | {seconds:.2f} | {peak} |")
        else:
            lines.append(f"| {name} | failed: {_last_error(folder / f'{name}.txt')} | – | – |")
    return "\n".join(lines) + "\n"


def _last_error(path: Path) -> str:
    """The last line that names an error, else the last line; nothing that would break a table."""
    said = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if "Error" in line or "error:" in line or "Exception" in line]
    return (errors or said or ["it said nothing"])[-1].replace("|", "\\|")[:300]
