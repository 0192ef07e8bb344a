"""What a grid of runs is made of, as it stands in a YAML file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

from jsonargparse import ArgumentParser

__all__ = ["First", "Grid", "Options", "Variant", "read_settings"]


@dataclass
class First:
    """A command that runs once before all others, such as a warm start.

    Args:
        words: Words of its command line; an entry may hold several, quoted as in a shell.
        makes: The file it makes; where that exists already, the command is not run.
        command: Subcommand.
    """

    words: list[str]
    makes: str
    command: str = "fit"


@dataclass
class Variant:
    """One row of an ablation.

    Args:
        words: Words of the command line behind those of the grid's `base` and of the regime.
        values: A sweep: one dotted key and its values, a run for each.
        base: Words in place of the grid's `base`, for a variant on other files.
        command: Subcommand in place of the grid's.
        regimes: Names of the regimes it takes part in; null: all.
    """

    words: list[str] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)
    base: list[str] | None = None
    command: str | None = None
    regimes: list[str] | None = None


@dataclass
class Grid:
    """Every regime x variant (x value) x seed is a run with a folder of its own.

    Args:
        variants: Name to words of the command line, or to a `Variant`.
        base: Words that all runs share. An entry may hold several words, quoted as in a shell.
        command: Subcommand of the runs.
        seeds: Values of `--seed_everything`.
        regimes: Name to words; empty: there is one regime without a name.
        first: A command that is run once before all.
        folder: Where the runs lie.
        keep_checkpoints: False removes a run's checkpoints once it has ended well.
    """

    variants: dict[str, list[str] | Variant]
    base: list[str] = field(default_factory=list)
    command: str = "fit"
    seeds: list[int] = field(default_factory=lambda: [0])
    regimes: dict[str, list[str]] = field(default_factory=dict)
    first: First | None = None
    folder: str = "runs/ablation"
    keep_checkpoints: bool = True


@dataclass
class Options:
    """What to do with a grid.

    Args:
        index: Only the run of this number, for a job array.
        list: Print the numbered commands and run nothing.
        jobs: Runs at once.
        dry_run: Say what would be done and run nothing.
    """

    index: int | None = None
    list: bool = False
    jobs: int = 1
    dry_run: bool = False


def read_settings(args: list[str]) -> tuple[Grid, Options]:
    """Reads a grid from files and flags.

    Args:
        args: Words behind `ablate`; flags and later files win over earlier files.

    Raises:
        ValueError: A key that does not exist, a value of the wrong type, or a setting outside its range.

    Example:
        >>> grid, options = read_settings(["--variants.gtpo=[]", "--seeds=[0,1]", "--jobs=2"])
        >>> grid.seeds, grid.folder, options.jobs
        ([0, 1], 'runs/ablation', 2)
    """
    parser = ArgumentParser(
        prog="main.py ablate",
        description="Runs every variant of a grid with every seed, and goes on where it was interrupted.",
        exit_on_error=False,
    )
    parser.add_argument("-c", "--config", action="config", help="YAML file with the settings below.")
    parser.add_class_arguments(Grid)
    parser.add_argument("--index", type=int | None, default=None, help="Only the run of this number, for a job array.")
    parser.add_argument("--list", action="store_true", help="Print the numbered commands and run nothing.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at once.")
    parser.add_argument("--dry_run", action="store_true", help="Say what would be done and run nothing.")
    try:
        given = parser.parse_args(args)
    except (argparse.ArgumentError, ValueError) as error:
        unknown = any(words in str(error) for words in ("not accepted", "unrecognized", "not expected"))
        raise ValueError(f"{error}; valid: {_keys()}" if unknown else str(error)) from error
    built = vars(parser.instantiate_classes(given))
    grid = Grid(**{each.name: built[each.name] for each in fields(Grid)})
    options = Options(**{each.name: built[each.name] for each in fields(Options)})
    _check(grid, options)
    return grid, options


def _keys() -> str:
    """Every key there is, for an error message."""
    lists = ((name, ", ".join(f.name for f in fields(kind))) for name, kind in _KINDS)
    return "; ".join(f"{name}: {keys}" for name, keys in lists)


_KINDS: tuple[tuple[str, type], ...] = (
    ("keys of the file", Grid),
    ("flags", Options),
    ("keys of a variant, unless it is a list of words", Variant),
    ("keys of first", First),
)


def _check(grid: Grid, options: Options) -> None:
    """Refuses settings that make no grid."""
    if not grid.variants:
        raise ValueError("variants: empty; valid: name to words of a command line, at least one")
    if not grid.seeds or len(set(grid.seeds)) < len(grid.seeds) or min(grid.seeds) < 0:
        raise ValueError(f"seeds: {grid.seeds}; valid: different integers >= 0, at least one")
    if options.jobs < 1:
        raise ValueError(f"jobs: {options.jobs}; valid: an integer >= 1")
    for name, variant in grid.variants.items():
        if isinstance(variant, Variant):
            _check_variant(name, variant, grid)


def _check_variant(name: str, variant: Variant, grid: Grid) -> None:
    if len(variant.values) > 1 or any(not values for values in variant.values.values()):
        raise ValueError(f"variants.{name}.values: {variant.values}; valid: one dotted key and its values")
    unknown = sorted(set(variant.regimes or []) - set(grid.regimes))
    if unknown:
        choices = ", ".join(grid.regimes) or "none, as the grid has no regimes"
        raise ValueError(f"variants.{name}.regimes: {unknown}; valid: {choices}")
