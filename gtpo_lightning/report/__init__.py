"""A page on any set of runs: `python main.py report runs/ablation`."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from gtpo_lightning.report.page import write_page
from gtpo_lightning.report.reading import RunData, read_runs

__all__ = ["main", "read_runs", "write_page"]


def main(args: list[str]) -> int:
    """Writes a page on the runs in some folders.

    Args:
        args: Words behind `report`.

    Returns:
        0; 2 if there is nothing to show.
    """
    parser = ArgumentParser(prog="main.py report", description="One HTML page on runs, also while they train.")
    parser.add_argument("folders", type=str, nargs="+", help="Searched for TensorBoard files at any depth.")
    parser.add_argument(
        "--output", type=str | None, default=None, help="The page. Default: report.html in the first folder."
    )
    parser.add_argument(
        "--smooth", type=int, default=10, help="Logged training steps a curve is averaged over; 1: none."
    )
    parser.add_argument(
        "--baseline", type=str, default="gtpo", help="The variant that the others are compared with, seed by seed."
    )
    parser.add_argument(
        "--variants", type=list[str] | None, default=None, help="Those to show, as [a, b]. Default: all of them."
    )
    given = parser.parse_args(args)
    folders = [Path(folder) for folder in given.folders]
    output = Path(given.output) if given.output is not None else folders[0] / "report.html"
    try:
        if given.smooth < 1:
            raise ValueError(f"smooth: {given.smooth}; valid: an integer >= 1")
        runs, notes = read_runs(folders)
        runs = _chosen(runs, given.variants, given.baseline)
    except ValueError as error:
        sys.stderr.write(f"report: {error}\n")
        return 2
    for note in notes:
        sys.stderr.write(f"report: {note}\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    written = write_page(output, runs, notes, given.smooth, given.baseline)
    Console().print(f"{len(runs)} runs, {len(written) - 2} figures: {output}", soft_wrap=True, highlight=False)
    return 0


def _chosen(runs: list[RunData], variants: list[str] | None, baseline: str) -> list[RunData]:
    """The runs of some variants, in the order given.

    Raises:
        ValueError: A variant, or a baseline other than the default, that no run has.
    """
    labels = dict.fromkeys(run.label for run in runs)
    unknown = [f"variants: {name!r}" for name in variants or [] if name not in labels]
    if baseline not in (*labels, "gtpo"):
        unknown.append(f"baseline: {baseline!r}")
    if unknown:
        raise ValueError(f"{unknown[0]} is no variant of these runs; valid: {', '.join(labels)}")
    if variants is None:
        return runs
    return sorted((run for run in runs if run.label in variants), key=lambda run: variants.index(run.label))
