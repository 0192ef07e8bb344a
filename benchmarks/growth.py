"""How the cost of a step grows: seconds against group and vocabulary, peak memory against G, T and V.

Every point is a run in fresh processes. `time` changes one number of workload `b` at a time and fits straight lines:
with the prompt paid once, a step of G completions costs a + c·G, and a step over V entries a' + c'·V. `memory` starts
from one prompt of workload `a` and takes our side twice, with all rows in one piece and with `micro_batch_size` 8, and
TRL in its two settings::

    python -m benchmarks.growth time --output benchmarks/results/growth.json
    python -m benchmarks.growth memory --output benchmarks/results/memory.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from benchmarks.floor import floor, measure_rates
from benchmarks.step import add_run_arguments, measure_sides, side_names
from benchmarks.workloads import VOCABULARIES, WORKLOADS, Workload, growth

__all__ = ["line_fit", "main", "memory_points", "memory_table", "time_table"]

MICRO_BATCH = 8
_MEMORY_SIDES = ("ours", f"ours, micro_batch_size {MICRO_BATCH}", "trl", "trl-checkpointing")


def line_fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The least-squares line through points.

    Args:
        x: At least two different numbers.
        y: As many.

    Returns:
        `intercept` and `slope`; `worst`, the largest distance of a point from the line, as a share of the point's y.

    Example:
        >>> line_fit([1, 2, 3], [3, 5, 7])
        {'intercept': 1.0, 'slope': 2.0, 'worst': 0.0}
    """
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    intercept = mean_y - slope * mean_x
    worst = max(abs(intercept + slope * a - b) / b for a, b in zip(x, y, strict=True))
    return {"intercept": intercept, "slope": slope, "worst": worst}


def memory_points() -> list[tuple[str, Workload]]:
    """The steps whose memory is compared, each with the letter that changes: G, T or V."""
    base = replace(WORKLOADS["a"], name="one prompt of a", prompts=1)
    return [
        *(("G", replace(base, group=value)) for value in (8, 16, 32)),
        *(("T", replace(base, completion_tokens=value)) for value in (128, 256, 512)),
        *(("V", replace(base, vocabulary=value)) for value in VOCABULARIES),
    ]


def _value(axis: str, work: Workload) -> int:
    return {"G": work.group, "T": work.completion_tokens, "V": work.vocabulary}[axis]


def measure_time(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of a step's seconds at each point, the floors, and the lines through our side's points."""
    rates = measure_rates(args.threads, args.device)
    names = side_names(args.sides, args.trl_settings)
    points, lines = [], {}
    for axis in ("group", "vocabulary"):
        seconds, values = [], []
        for work in growth(axis):
            sides = measure_sides(work, names, args)
            points.append(
                {"axis": axis, "value": getattr(work, axis), "floor": floor(work, rates)["total"]}
                | {name: {"median": side["median"], "peak_mib": side["peak_mib"]} for name, side in sides.items()}
            )
            if "ours" in sides:
                seconds.append(sides["ours"]["median"]["seconds"])
                values.append(getattr(work, axis))
        if seconds:
            lines[axis] = line_fit(values, seconds)
    return {"points": points, "lines": lines, "work": WORKLOADS["b"].describe()}


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of each point's processes in MiB, after a warm-up and `--steps` steps; one point is run once."""
    known: dict[str, dict[str, float]] = {}
    points = []
    for axis, work in memory_points():
        if work.to_json() not in known:
            peaks = {}
            for label in _MEMORY_SIDES:
                here = copy(args)
                if "micro_batch" in label:
                    here.ours_settings = json.dumps({**json.loads(args.ours_settings), "micro_batch_size": MICRO_BATCH})
                name = label.split(",")[0]
                if name.split("-")[0] not in args.sides:
                    continue
                peaks[label] = measure_sides(work, [name], here)[name]["peak_mib"]
                print(f"{axis} {_value(axis, work)} {label}: {peaks[label]:.0f} MiB", file=sys.stderr, flush=True)
            known[work.to_json()] = peaks
        points.append({"axis": axis, "value": _value(axis, work), "peak_mib": known[work.to_json()]})
    return {"points": points, "work": replace(WORKLOADS["a"], prompts=1).describe()}


def time_table(report: dict[str, Any]) -> str:
    """Seconds of each point, and the lines."""
    lines = [f"{'':12}{'value':>9}{'side':>20}{'step s':>9}{'/ floor':>9}{'peak GiB':>10}"]
    for point in report["points"]:
        for name, side in point.items():
            if isinstance(side, dict):
                seconds = side["median"]["seconds"]
                lines.append(
                    f"{point['axis']:12}{point['value']:9,}{name:>20}{seconds:9.3f}{seconds / point['floor']:9.2f}"
                    f"{side['peak_mib'] / 1024:10.2f}"
                )
    for axis, fit in report["lines"].items():
        lines.append(
            f"ours = {fit['intercept']:.3f} s + {fit['slope']:.3g} s · {axis}, at most {100 * fit['worst']:.1f} % off"
        )
    return "\n".join(lines)


def memory_table(report: dict[str, Any]) -> str:
    """Peak memory in GiB, one line a point, as markdown."""
    labels = list(report["points"][0]["peak_mib"])
    lines = [f"| | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for point in report["points"]:
        cells = " | ".join(f"{point['peak_mib'][label] / 1024:.2f}" for label in labels)
        lines.append(f"| {point['axis']} = {point['value']:,} | {cells} |")
    return "\n".join(lines)


def parse(args: list[str] | None) -> argparse.Namespace:
    """The command line; `time` measures our side unless told otherwise, `memory` both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--sides", nargs="+", choices=["ours", "trl"], help="`time`: ours; `memory`: ours trl")
    parser.add_argument("--trl-settings", choices=["off", "on", "both"], default="off", help="of `time`")
    add_run_arguments(parser, steps=0)
    options = parser.parse_args(args)
    options.steps = options.steps or {"time": 3, "memory": 1}[options.what]
    options.sides = options.sides or {"time": ["ours"], "memory": ["ours", "trl"]}[options.what]
    options.words = sys.argv[1:] if args is None else args
    return options


def main(args: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    options = parse(args)
    measured, table = {"time": (measure_time, time_table), "memory": (measure_memory, memory_table)}[options.what]
    report = {"command": " ".join(["python -m benchmarks.growth", *options.words]), "threads": options.threads}
    report |= measured(options)
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
