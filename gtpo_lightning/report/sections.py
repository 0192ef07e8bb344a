"""The contents of a page: for each regime its table, figures, sweeps, collapses and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gtpo_lightning.report.alarms import lead_text, outcomes
from gtpo_lightning.report.figures import Line, Style, curve_png, renditions, style_of, sweep_png, sweep_style
from gtpo_lightning.report.reading import RunData, Series
from gtpo_lightning.report.statistics import (
    accuracy_names,
    band,
    collapse_of,
    curves_of,
    final_scores,
    mean_interval,
    paired,
    smoothed,
)

__all__ = ["Picture", "Row", "Section", "Table", "alarm_table", "make_sections"]


class Panel(NamedTuple):
    """A training figure: the logged name, what it is called, and the factor to its unit."""

    scalar: str
    title: str
    factor: float = 1.0


PANELS = (
    Panel("train/reward", "Reward"),
    Panel("train/rewards/format/mean", "Format reward, share of the full one", 0.1),
    Panel("train/rewards/correctness/mean", "Correctness reward, share of the full one", 0.1),
    Panel("train/entropy", "Entropy, nats a token"),
    Panel("train/kl", "KL to the reference, nats a token"),
    Panel("train/completions/mean_length", "Mean length, tokens"),
    Panel("train/frac_reward_zero_std", "Share of groups with equal rewards"),
    Panel("gtpo/entropy_filtered_frac", "Share of completions that the entropy filter dropped"),
    Panel("gtpo/collapse_score", "Collapse score"),
    Panel("train/loss", "Loss"),
)

STEPS = "optimizer steps"


class Picture(NamedTuple):
    """A figure in every theme, its file name without ending, and what it shows in words."""

    file: str
    images: dict[str, bytes]
    caption: str


class Row(NamedTuple):
    """Cells of a row; the first is its heading."""

    cells: list[str]


class Table(NamedTuple):
    """A table with its headings."""

    headings: list[str]
    rows: list[Row]


@dataclass
class Section:
    """All of one regime."""

    name: str
    scores: Table
    pictures: list[Picture] = field(default_factory=list)
    curves: list[Picture] = field(default_factory=list)
    sweeps: list[tuple[str, list[Picture]]] = field(default_factory=list)
    differences: Table | None = None
    collapses: Table | None = None
    alarms: Table | None = None
    runs: list[RunData] = field(default_factory=list)


def make_sections(runs: Sequence[RunData], smooth: int, baseline: str = "gtpo") -> list[Section]:
    """A section for each regime; a variant has the same colour in all of them.

    Args:
        runs: The runs.
        smooth: Logged training steps that the curves are averaged over.
        baseline: The variant that others are compared with, where it is there.
    """
    labels = dict.fromkeys(run.label for run in runs if not run.key)
    styles = {label: style_of(index) for index, label in enumerate(labels)}
    regimes = dict.fromkeys(run.regime for run in runs)
    sections = [_section(regime, [run for run in runs if run.regime == regime], styles, smooth) for regime in regimes]
    for section in sections:
        section.differences = _differences(section.runs, baseline)
    return sections


def _section(regime: str, runs: list[RunData], styles: dict[str, Style], smooth: int) -> Section:
    section = Section(regime, _scores(runs), runs=runs, collapses=_collapses(runs), alarms=alarm_table(runs))
    plain = [run for run in runs if not run.key]
    section.pictures = _time_pictures(_file(regime), plain, styles, smooth)
    section.curves = _k_pictures(_file(regime), plain, styles)
    for name in dict.fromkeys((run.record.get("variant", run.key), run.key) for run in runs if run.key):
        section.sweeps.append(_sweep(regime, name, runs, smooth))
    return section


def _file(*parts: str) -> str:
    """A file name of the parts that are there."""
    return "_".join(re.sub(r"[^\w.=+-]+", "_", part) for part in parts if part)


def _by_label(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    found: dict[str, list[RunData]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


# tables


def _scores(runs: list[RunData]) -> Table:
    """Final scores, a row for each variant; unfinished runs count only where a variant has no others."""
    finals = {id(run): final_scores(run) for run in runs}
    names = dict.fromkeys(name for scores in finals.values() for name in scores)
    rows = []
    for label, seeds in _by_label(runs).items():
        ended = [run for run in seeds if run.state in ("finished", "unknown")]
        counted = [finals[id(run)] for run in ended or seeds]
        cells = []
        for name in names:
            values = [scores[name] for scores in counted if name in scores]
            short = f" (n = {len(values)})" if values and len(values) < len(counted) else ""
            cells.append(f"{mean_interval(values)}{short}" if values else "")
        rows.append(Row([label, _seeds(len(ended), len(seeds)), *cells]))
    return Table(["variant", "seeds", *names], rows)


def _differences(runs: list[RunData], baseline: str) -> Table | None:
    """Finished runs against those of the baseline of equal seed."""
    finals = {id(run): final_scores(run) for run in runs if run.state in ("finished", "unknown")}
    groups = {label: [run for run in seeds if id(run) in finals] for label, seeds in _by_label(runs).items()}
    base = groups.get(baseline, [])
    names = [
        name
        for name in dict.fromkeys(name for run in base for name in finals[id(run)])
        if name.rpartition("/")[2].partition("@")[0] in ("pass", "maj", "avg", "format", "entropy", "kl")
    ]
    rows = []
    for label, seeds in groups.items():
        cells = []
        for name in names:
            mine, theirs = (
                {run.seed: finals[id(run)][name] for run in group if name in finals[id(run)]} for group in (seeds, base)
            )
            values = paired(mine, theirs)
            cells.append(f"{mean_interval(values):+}" if values else "")
        if label != baseline and any(cells):
            rows.append(Row([label, *cells]))
    return Table(["variant", *names], rows) if rows else None


def alarm_table(runs: Sequence[RunData]) -> Table | None:
    """When each signal of the collapse detector fired, in damaged runs and in others; None without a detector."""
    rows = [
        Row(
            [
                seen.signal,
                *(lead_text(leads) for leads in seen.leads.values()),
                f"{seen.false_alarms} of {seen.healthy}" if seen.healthy else "no run",
            ]
        )
        for seen in outcomes(runs)
    ]
    headings = ["signal", "before the format was lost", "before accuracy was lost", "fired without damage"]
    return Table(headings, rows) if rows else None


def _seeds(ended: int, count: int) -> str:
    if ended == count:
        return str(count)
    return f"{ended} of {count}" if ended else f"{count}, so far"


def _collapses(runs: list[RunData]) -> Table | None:
    rows = []
    for run in runs:
        seen = collapse_of(run)
        if seen is not None:
            steps = ["never" if step is None else str(step) for step in (seen.passed, seen.fired)]
            rule = f"{seen.threshold:g}, {seen.patience} in a row"
            rows.append(Row([run.label, run.seed, *steps, seen.signal, f"{seen.highest:.3f}", rule]))
    headings = ["variant", "seed", "over the threshold", "fired", "by", "highest score", "threshold, patience"]
    return Table(headings, rows) if rows else None


# figures


def _time_pictures(prefix: str, runs: list[RunData], styles: dict[str, Style], smooth: int) -> list[Picture]:
    """Curves over optimizer steps: training figures, then the scores of held-out problems."""
    pictures = []
    for panel in (*PANELS, *_held_out(runs)):
        lines = []
        for label, seeds in _by_label(runs).items():
            series = [
                _prepared(run.scalars[panel.scalar], panel, smooth) for run in seeds if panel.scalar in run.scalars
            ]
            if series:
                lines.append(Line(label, styles[label], band(series), len(series) > 1))
        if lines:
            images = renditions(partial(curve_png, panel.title, STEPS, lines))
            pictures.append(Picture(_file(prefix, panel.scalar), images, f"{panel.title} ({panel.scalar})"))
    return pictures


def _prepared(series: Series, panel: Panel, smooth: int) -> Series:
    scaled = {step: panel.factor * value for step, value in series.items()}
    # The detector smooths by itself, and evaluations are few.
    return smoothed(scaled, smooth) if panel.scalar.startswith("train/") else scaled


def _held_out(runs: Sequence[RunData]) -> list[Panel]:
    """A figure for accuracy, majority, format and length of each held-out set."""
    names = {name for run in runs for name in run.scalars if name.startswith("val/")}
    panels = []
    for start in sorted({name.rpartition("/")[0] for name in names}):
        own = {name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == start}
        single = next((name.rpartition("/")[2] for name in accuracy_names(names) if name.startswith(f"{start}/")), "")
        largest = max((n for n in own if n.startswith("maj@")), key=lambda n: int(n[4:]), default="maj@1")
        dataset = start.removeprefix("val/")
        choices = (
            (single, f"Accuracy on {dataset}"),
            (largest if largest != "maj@1" else "", f"{largest} on {dataset}"),
            ("format", f"Share in full format on {dataset}"),
            ("length", f"Mean length on {dataset}, tokens"),
        )
        panels += [Panel(f"{start}/{name}", title) for name, title in choices if name in own]
    return panels


def _k_pictures(prefix: str, runs: list[RunData], styles: dict[str, Style]) -> list[Picture]:
    """pass@k and maj@k over k for each data set; none where every problem was sampled once."""
    found = {id(run): curves_of(run) for run in runs}
    pictures = []
    for dataset in sorted({name for curves in found.values() for name in curves}):
        for kind in ("pass@k", "maj@k"):
            lines = []
            for label, seeds in _by_label(runs).items():
                series = [found[id(run)][dataset][kind] for run in seeds if dataset in found[id(run)]]
                if series:
                    lines.append(Line(label, styles[label], band(series), len(series) > 1))
            if any(len(line.band.steps) > 1 for line in lines):
                title = f"{kind} on {dataset.partition('/')[2]} ({dataset.partition('/')[0]})"
                images = renditions(partial(curve_png, title, "k, samples of a problem", lines, log=True))
                pictures.append(Picture(_file(prefix, dataset, kind), images, title))
    return pictures


def _sweep(regime: str, name: tuple[str, str], runs: list[RunData], smooth: int) -> tuple[str, list[Picture]]:
    """Final scores over the values of a sweep, and its curves over time."""
    variant, key = name
    own = [run for run in runs if (run.record.get("variant", run.key), run.key) == name]
    values = sorted(_by_label(own).items(), key=lambda item: _value_order(item[1][0].value))
    finals = [[final_scores(run) for run in seeds] for _, seeds in values]
    prefix = _file(regime, variant)
    pictures = []
    for score in dict.fromkeys(name for group in finals for scores in group for name in scores):
        points = [[scores[score] for scores in group if score in scores] for group in finals]
        texts = [f"{seeds[0].value}" for _, seeds in values]
        images = renditions(partial(sweep_png, score, key, texts, points))
        pictures.append(Picture(_file(prefix, "final", score), images, f"Final {score} against {key}"))
    styles = {label: sweep_style(index, len(values)) for index, (label, _) in enumerate(values)}
    ordered = [run for _, seeds in values for run in seeds]
    return f"{variant}: {key}", [*pictures, *_time_pictures(prefix, ordered, styles, smooth)]


def _value_order(value: object) -> tuple[int, float, str]:
    """Numbers by size, then everything else by its text."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))  # type: ignore[arg-type]
