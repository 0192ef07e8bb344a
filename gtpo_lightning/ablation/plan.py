"""The runs of a grid, numbered, each with its folder and its command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import gtpo_lightning
from gtpo_lightning.ablation.settings import Grid, Variant

__all__ = ["Run", "first_run", "make_plan", "program"]


@dataclass(frozen=True)
class Run:
    """One run of a grid.

    Args:
        folder: Its own folder, also Lightning's `log_dir`.
        words: Words of its command line, from the subcommand on.
        variant: Name of the variant.
        seed: Its seed.
        regime: Name of the regime; "" where there are none.
        key: Dotted key of a sweep; "" outside one.
        value: Value of that key.
        number: Its place in the plan.
    """

    folder: Path
    words: tuple[str, ...]
    variant: str
    seed: int
    regime: str = ""
    key: str = ""
    value: Any = None
    number: int = 0

    @property
    def label(self) -> str:
        """Variant, and the value of a sweep, as in the name of the folder."""
        return f"{self.variant}-{self.key.rpartition('.')[2]}={_text(self.value)}" if self.key else self.variant

    @property
    def name(self) -> str:
        """Regime, label and seed for people."""
        return "/".join(part for part in (self.regime, self.label, f"seed{self.seed}") if part)


def program() -> list[str]:
    """The words that start the command line in a process of its own: `main.py` of a checkout, else the package."""
    door = Path(gtpo_lightning.__file__).parents[1] / "main.py"
    if door.is_file():
        return [sys.executable, str(door)]
    return [sys.executable, "-c", "from gtpo_lightning.cli import run; run()"]


def make_plan(grid: Grid) -> list[Run]:
    """Every run of a grid, in the order regime, variant, value, seed.

    Raises:
        ValueError: Two runs would share a folder, or words are not quoted as in a shell.

    Example:
        >>> [run.name for run in make_plan(Grid({"a": [], "b": Variant(values={"x.y": [0, 1]})}, seeds=[7]))]
        ['a/seed7', 'b-y=0/seed7', 'b-y=1/seed7']
    """
    plan: list[Run] = []
    for regime, (name, given) in product(grid.regimes or {"": []}, grid.variants.items()):
        variant = given if isinstance(given, Variant) else Variant(given)
        if variant.regimes is None or regime in variant.regimes:
            plan += _runs_of(grid, regime, name, variant)
    folders = [run.folder for run in plan]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise ValueError(f"variants: several runs in {', '.join(twice)}; valid: names and values that differ")
    return [replace(run, number=number) for number, run in enumerate(plan)]


def _runs_of(grid: Grid, regime: str, name: str, variant: Variant) -> list[Run]:
    shared = [variant.command or grid.command]
    for where, part in (
        (
            f"variants.{name}.base" if variant.base is not None else "base",
            grid.base if variant.base is None else variant.base,
        ),
        (f"regimes.{regime}", grid.regimes.get(regime, [])),
        (f"variants.{name}", variant.words),
    ):
        shared += _split(where, part)
    choices = [(key, value) for key, values in variant.values.items() for value in values] or [("", None)]
    return [
        _place(grid, shared, Run(Path(), (), name, seed, regime, key, value))
        for (key, value), seed in product(choices, grid.seeds)
    ]


def _place(grid: Grid, shared: list[str], run: Run) -> Run:
    """Gives a run its folder, and the flags that put Lightning's files there."""
    parent = Path(grid.folder, *([_file_name(run.regime)] if run.regime else []))
    label = _file_name(run.label)
    sweep = [f"--{run.key}={_text(run.value)}"] if run.key else []
    place = [
        "--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger",
        f"--trainer.logger.save_dir={parent}",
        f"--trainer.logger.name={label}",
        f"--trainer.logger.version=seed{run.seed}",
    ]
    words = (*shared, *sweep, f"--seed_everything={run.seed}", *place)
    return replace(run, folder=parent / label / f"seed{run.seed}", words=words)


def first_run(grid: Grid) -> Run | None:
    """The command that is run once before all; its files lie where its own settings put them."""
    if grid.first is None:
        return None
    words = (grid.first.command, *_split("first", grid.first.words))
    return Run(Path(grid.folder) / "first", words, "first", 0)


def _split(where: str, entries: list[str]) -> list[str]:
    """Words of entries that may hold several."""
    try:
        return [word for entry in entries for word in shlex.split(entry)]
    except ValueError as error:
        raise ValueError(f"{where}: {entries} ({error}); valid: words quoted as in a shell") from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file_name(text: str) -> str:
    """A name that is one folder anywhere."""
    return re.sub(r"[^\w.=+-]", "_", text).strip(".") or "_"
