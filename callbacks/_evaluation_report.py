"""What an evaluation leaves behind: a table, `results.json`, `results.csv` and the curves as a figure."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from gtpo_lightning.functional import bootstrap_interval
from gtpo_lightning.judging import JudgedProblem, problem_scores

Judged = Mapping[str, Mapping[str, JudgedProblem]]
"""Judged problems by id, by data set."""

CONFIDENCE = 0.95

_COLUMNS = (
    *("dataset", "problem_id", "sample", "question", "gold", "extracted", "correct", "format", "label"),
    *("failure", "length", "truncated", "completion"),
)


class Score(NamedTuple):
    """A mean over problems with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}"

    @property
    def interval(self) -> str:
        """The interval as text; empty where one problem alone has none."""
        return "" if math.isnan(self.low) else f"[{self.low:.3f}, {self.high:.3f}]"


def summarise(scores: Sequence[Mapping[str, float]]) -> dict[str, Score]:
    """Means of the scores that all problems have, with 95 % bootstrap intervals over problems."""
    names = [name for name in scores[0] if all(name in row for row in scores)] if scores else []
    if not names:
        return {}
    values = np.array([[row[name] for row in scores] for name in names])
    lows, highs = bootstrap_interval(values, confidence=CONFIDENCE)
    return {
        name: Score(float(mean), float(low), float(high))
        for name, mean, low, high in zip(names, values.mean(axis=1), lows, highs, strict=True)
    }


class Curve(NamedTuple):
    """pass@k and maj@k of a data set for k = 1 … n."""

    problems: int
    ks: list[int]
    passed: list[Score]
    majority: list[Score]


def curve(problems: Mapping[str, JudgedProblem]) -> Curve:
    """The curves of a data set, up to the fewest samples that any of its problems has."""
    count = min(len(judged.answers) for judged in problems.values())
    ks = list(range(1, count + 1))
    scores = summarise([problem_scores(judged, ks) for judged in problems.values()])
    return Curve(len(problems), ks, [scores[f"pass@{k}"] for k in ks], [scores[f"maj@{k}"] for k in ks])


def score_table(title: str, columns: Mapping[str, Mapping[str, float]], intervals: Mapping[str, str]) -> Table:
    """Scores as rows; a column for each evaluation, and the intervals of the last.

    Args:
        title: Above the table.
        columns: Heading to scores by name.
        intervals: Interval of a score by its name.
    """
    table = Table(title=title)
    table.add_column("score")
    for heading in columns:
        table.add_column(heading, justify="right")
    table.add_column(f"{CONFIDENCE:.0%} interval", justify="right")
    for name in dict.fromkeys(name for scores in columns.values() for name in scores):
        cells = (f"{scores[name]:.3f}" if name in scores else "" for scores in columns.values())
        table.add_row(name, *cells, intervals.get(name, ""))
    return table


def figure(curves: Mapping[str, Curve]) -> Figure:
    """pass@k and maj@k over k, a panel for each data set, with bands of the bootstrap intervals."""
    width = max(len(curves), 1)
    drawing = Figure(figsize=(4.8 * width, 3.6), layout="constrained")
    panels = drawing.subplots(1, width, squeeze=False)[0]
    for panel, (name, drawn) in zip(panels, curves.items(), strict=False):
        for label, scores in (("pass@k", drawn.passed), ("maj@k", drawn.majority)):
            _draw(panel, label, drawn.ks, scores)
        panel.set(
            title=f"{name} ({drawn.problems} problems)",
            xlabel="k (samples of a problem)",
            ylabel="share of problems",
            ylim=(-0.02, 1.02),
        )
        panel.set_xscale("log", base=2)
        ticks = [k for k in drawn.ks if k & (k - 1) == 0 or k == drawn.ks[-1]]
        panel.set_xticks(ticks, labels=[str(k) for k in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    return drawing


def _draw(panel: Axes, label: str, ks: list[int], scores: list[Score]) -> None:
    means = [score.mean for score in scores]
    (line,) = panel.plot(ks, means, marker="o", markersize=3, label=label)
    lows, highs = [score.low for score in scores], [score.high for score in scores]
    if len(ks) > 1:
        panel.fill_between(ks, lows, highs, alpha=0.2, color=line.get_color(), linewidth=0)
    elif not math.isnan(lows[0]):
        below, above = max(means[0] - lows[0], 0.0), max(highs[0] - means[0], 0.0)
        panel.errorbar(ks, means, yerr=[[below], [above]], color=line.get_color(), capsize=4)


def write_results(
    folder: Path,
    header: Mapping[str, Any],
    judged: Judged,
    scores: Mapping[str, Mapping[str, Score]],
    curves: Mapping[str, Curve],
) -> None:
    """Writes `results.json` and `results.csv` with every answer.

    Args:
        folder: Where; made if it is not there.
        header: What was evaluated and how, plain values.
        judged: Every problem.
        scores: Data set to scores by name.
        curves: Data set to its curves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for dataset, problems in judged.items() for row in _rows(dataset, problems)]
    datasets = {
        dataset: {
            "problems": len(problems),
            "scores": {name: _plain(score) for name, score in scores[dataset].items()},
            "curves": {
                "k": curves[dataset].ks,
                "pass": [_plain(score) for score in curves[dataset].passed],
                "maj": [_plain(score) for score in curves[dataset].majority],
            },
            "answers": [{key: row[key] for key in _COLUMNS[1:]} for row in rows if row["dataset"] == dataset],
        }
        for dataset, problems in judged.items()
    }
    content = {**header, "confidence": CONFIDENCE, "datasets": datasets}
    (folder / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with (folder / "results.csv").open("w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _rows(dataset: str, problems: Mapping[str, JudgedProblem]) -> list[dict[str, Any]]:
    """One row an answer, in the order of the problems."""
    rows = []
    for judged in problems.values():
        asked = {
            "dataset": dataset,
            "problem_id": judged.problem.id,
            "question": judged.problem.question,
            "gold": judged.problem.answer,
        }
        rows += [{**asked, "sample": index, **asdict(answer)} for index, answer in enumerate(judged.answers)]
    return rows


def _plain(score: Score) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in score._asdict().items()}


def write_curves(folder: Path, curves: Mapping[str, Curve], loggers: Iterable[Logger], tag: str, step: int) -> None:
    """Draws the curves into `curves.png` and into each TensorBoard."""
    drawing = figure(curves)
    drawing.savefig(folder / "curves.png", dpi=120)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, drawing, step, close=False)
            logger.experiment.flush()


def merged(ranks: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Problems of all ranks by data set and id, each once, in the order of their ids."""
    merged: dict[str, dict[str, Any]] = {}
    for part in ranks:
        for dataset, problems in part.items():
            merged.setdefault(dataset, {}).update(problems)
    return {name: dict(sorted(problems.items(), key=_by_number)) for name, problems in merged.items() if problems}


def _by_number(item: tuple[str, Any]) -> list[tuple[int, int | str]]:
    """Sorts "x/9" before "x/10"."""
    parts = re.split(r"(\d+)", item[0])
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts]
