"""Grids of runs: `python main.py ablate -c configs/ablation.yaml`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtpo_lightning.ablation.plan import Run, first_run, make_plan, program
from gtpo_lightning.ablation.record import Lock, Record, newest_checkpoint
from gtpo_lightning.ablation.runner import Outcome, interrupts, run_all, run_once
from gtpo_lightning.ablation.settings import First, Grid, Options, Variant, read_settings

__all__ = ["First", "Grid", "Options", "Outcome", "Run", "Variant", "main", "make_plan", "read_settings", "run_all"]


def main(args: list[str], check: Callable[[list[str]], None]) -> int:
    """Runs a grid.

    Args:
        args: Words behind `ablate`.
        check: Raises a ValueError for words that the command line would refuse.

    Returns:
        0; 1 if a run failed; 2 if the grid is refused, before anything runs; 130 after an interrupt.
    """
    try:
        grid, options = read_settings(args)
        plan = make_plan(grid)
        if options.list:
            sys.stdout.writelines(f"{run.number} {shlex.join([*program(), *run.words])}\n" for run in plan)
            return 0
        chosen = _chosen(plan, options.index)
        for run in chosen:
            Record(run).check()
        _check_words(chosen, first_run(grid), check)
    except ValueError as error:
        sys.stderr.write(f"ablate: {error}\n")
        return 2
    if options.dry_run:
        _show(chosen, [_intention(run) for run in chosen])
        return 0
    return _run(grid, options, chosen)


def _run(grid: Grid, options: Options, chosen: list[Run]) -> int:
    console = Console()

    def tell(run: Run, outcome: Outcome | None) -> None:
        text = "starts" if outcome is None else outcome.text
        console.print(f"{run.number} {run.name}: {text}", soft_wrap=True, highlight=False, markup=False)

    with interrupts():
        first = first_run(grid)
        if first is not None and grid.first is not None:
            made = Path(grid.first.makes)
            try:
                outcome = run_once(first, made)
            except KeyboardInterrupt:
                return 130
            if outcome.state == "failed":
                sys.stderr.write(f"ablate: first failed, so nothing else runs: {outcome.note}\n")
                return 1
            console.print(f"first: {outcome.state}, {made}", soft_wrap=True, highlight=False, markup=False)
        outcomes = run_all(chosen, jobs=options.jobs, keep_checkpoints=grid.keep_checkpoints, tell=tell)
    _show(chosen, outcomes)
    states = {outcome.state for outcome in outcomes}
    return 130 if states & {"interrupted", "waiting"} else int("failed" in states)


def _chosen(plan: list[Run], index: int | None) -> list[Run]:
    """The runs that this process is asked for."""
    if index is None:
        return plan
    if not 0 <= index < len(plan):
        raise ValueError(f"index: {index}; valid: 0 to {len(plan) - 1}, as --list numbers them")
    return [plan[index]]


def _check_words(runs: Sequence[Run], first: Run | None, check: Callable[[list[str]], None]) -> None:
    """Has each command line parsed once, whatever its seed, so that a misspelt one is refused before hours of runs."""
    different = {(run.regime, run.label): run for run in reversed(runs)}
    for run in (*([first] if first else []), *reversed(different.values())):
        try:
            check(list(run.words))
        except ValueError as error:
            raise ValueError(f"{run.name.rpartition('/')[0]}: {error}") from error


def _intention(run: Run) -> Outcome:
    """What would be done with a run."""
    seconds = Record(run).read().get("seconds", 0.0)
    holder = Lock(run.folder).holder()
    if holder is not None:
        return Outcome("elsewhere", seconds, holder)
    if Record(run).finished:
        return Outcome("kept", seconds)
    checkpoint = newest_checkpoint(run.folder)
    return Outcome("waiting", seconds, "would start" if checkpoint is None else f"would go on from {checkpoint}")


def _show(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """The state of each run as a table."""
    table = Table(title="Runs")
    for heading, justify in (("number", "right"), ("run", "left"), ("state", "left"), ("seconds", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for run, outcome in zip(runs, outcomes, strict=True):
        table.add_row(str(run.number), run.name, outcome.text, f"{outcome.seconds:.1f}")
    Console().print(table)
