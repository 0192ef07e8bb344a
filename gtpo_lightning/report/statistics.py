"""Numbers of a page: smoothed series, means and spreads over seeds, final scores, first steps of a collapse."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student  # type: ignore[import-untyped]

from gtpo_lightning.functional import maj_at_ks, pass_at_k
from gtpo_lightning.report.reading import RunData, Series

__all__ = [
    "Band",
    "Collapse",
    "Mean",
    "accuracy_names",
    "band",
    "collapse_of",
    "curves_of",
    "final_scores",
    "fired_at",
    "mean_interval",
    "paired",
    "rule_of",
    "smoothed",
]

LAST = 10
"""Training steps that a final training figure is the mean of."""

CONFIDENCE = 0.95

_TRAINING = ("reward", "rewards/format/mean", "rewards/correctness/mean", "entropy", "kl", "completions/mean_length")


class Mean(NamedTuple):
    """A mean over seeds, and half the width of its 95 % t interval; NaN for one seed."""

    mean: float
    half: float
    seeds: int

    def __str__(self) -> str:
        return format(self)

    def __format__(self, sign: str) -> str:
        """With "+" the mean has a sign."""
        return f"{self.mean:{sign}.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def mean_interval(values: Sequence[float]) -> Mean:
    """Mean with the half-width t_{0.975, n−1} · s / √n.

    Args:
        values: One for each seed, at least one.

    Example:
        >>> str(mean_interval([0.8, 0.9]))
        '0.850 ± 0.635'
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Mean(mean, math.nan, count)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    factor = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Mean(mean, factor * deviation / math.sqrt(count), count)


def smoothed(series: Series, window: int) -> Series:
    """The mean of each value and the `window` − 1 values before it, fewer at the start.

    Example:
        >>> smoothed({0: 1.0, 1: 3.0, 2: 5.0}, 2)
        {0: 1.0, 1: 2.0, 2: 4.0}
    """
    values = list(series.values())
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return {step: sum(part) / len(part) for step, part in zip(series, parts, strict=True)}


class Band(NamedTuple):
    """Means over seeds with the smallest and the largest seed, by step."""

    steps: list[float]
    means: list[float]
    lows: list[float]
    highs: list[float]


def band(seeds: Sequence[Mapping[Any, float]]) -> Band:
    """Mean, minimum and maximum at each step, over the seeds that have it.

    Example:
        >>> band([{0: 1.0, 1: 2.0}, {0: 3.0}]).means
        [2.0, 2.0]
    """
    steps = sorted({step for series in seeds for step in series})
    columns = [[series[step] for series in seeds if step in series] for step in steps]
    means = [sum(column) / len(column) for column in columns]
    return Band(steps, means, [min(column) for column in columns], [max(column) for column in columns])


def final_scores(run: RunData) -> dict[str, float]:
    """The final figures of a run: scores of its evaluations, and training figures over its last steps.

    Scores are those of `results.json`, else the last that TensorBoard has. `avg@n` is left out beside `pass@1`, which
    it equals, and so is `maj@1`.
    """
    scores = {
        name: series[max(series)] for name, series in run.scalars.items() if re.match(r"(val|test)/", name) and series
    }
    for prefix, content in run.results.items():
        for dataset, judged in content.get("datasets", {}).items():
            scores |= {f"{prefix}/{dataset}/{name}": score["mean"] for name, score in judged["scores"].items()}
    shown = {name: value for name, value in sorted(scores.items(), key=_order) if not _repeated(name, scores)}
    for name in _TRAINING:
        series = run.scalars.get(f"train/{name}")
        if series:
            last = list(series.values())[-LAST:]
            shown[f"train/{name}"] = sum(last) / len(last)
    return shown


def _repeated(name: str, scores: Mapping[str, float]) -> bool:
    start, _, score = name.rpartition("/")
    return score == "maj@1" or (score.startswith("avg@") and f"{start}/pass@1" in scores)


def _order(item: tuple[str, float]) -> tuple[str, int, int]:
    """By data set; there accuracy, pass@k, maj@k, format, length."""
    start, _, score = item[0].rpartition("/")
    kind, _, k = score.partition("@")
    kinds = ["avg", "pass", "maj", "format", "length"]
    return start, kinds.index(kind) if kind in kinds else len(kinds), int(k) if k.isdecimal() else 0


def accuracy_names(names: Iterable[str]) -> list[str]:
    """The logged name of the accuracy on each held-out set: `pass@1`, else the first `avg@n`.

    Example:
        >>> accuracy_names(["val/sums/avg@4", "val/sums/format", "val/gsm8k/pass@1", "val/gsm8k/avg@1", "train/loss"])
        ['val/gsm8k/pass@1', 'val/sums/avg@4']
    """
    held_out = [name for name in names if name.startswith("val/")]
    found = []
    for start in sorted({name.rpartition("/")[0] for name in held_out}):
        own = sorted(name for name in held_out if name.startswith(f"{start}/avg@"))
        found += [f"{start}/pass@1"] if f"{start}/pass@1" in held_out else own[:1]
    return found


def paired(runs: Mapping[str, float], others: Mapping[str, float]) -> list[float]:
    """Differences between two variants' scores by seed, over the seeds that both have.

    Example:
        >>> paired({"0": 0.75, "1": 0.5}, {"0": 0.5, "2": 1.0})
        [0.25]
    """
    return [value - others[seed] for seed, value in runs.items() if seed in others]


def curves_of(run: RunData) -> dict[str, dict[str, dict[int, float]]]:
    """pass@k and maj@k for k = 1 … n by data set, from the answers in `results.json`; n is the fewest of a problem."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for prefix, content in run.results.items():
        for dataset, judged in content.get("datasets", {}).items():
            problems: dict[str, list[dict[str, Any]]] = {}
            for answer in judged.get("answers", []):
                problems.setdefault(answer["problem_id"], []).append(answer)
            if problems:
                curves[f"{prefix}/{dataset}"] = _curves(list(problems.values()))
    return curves


def _curves(problems: list[list[dict[str, Any]]]) -> dict[str, dict[int, float]]:
    ks = list(range(1, min(map(len, problems)) + 1))
    passed, majority = np.zeros(len(ks)), np.zeros(len(ks))
    for answers in problems:
        right = [bool(answer["correct"]) for answer in answers]
        passed += [float(pass_at_k(len(right), sum(right), k)) for k in ks]
        majority += maj_at_ks([answer["label"] for answer in answers], right, ks)
    return {
        "pass@k": dict(zip(ks, (passed / len(problems)).tolist(), strict=True)),
        "maj@k": dict(zip(ks, (majority / len(problems)).tolist(), strict=True)),
    }


class Collapse(NamedTuple):
    """What the collapse detector saw in a run; a step is None where it never came."""

    threshold: float
    patience: int
    passed: int | None
    fired: int | None
    signal: str
    highest: float


def collapse_of(run: RunData) -> Collapse | None:
    """When `gtpo/collapse_score` first reached its threshold, and first did so `patience` times in a row.

    Threshold and patience are those of the run's `config.yaml`, else the part's defaults. None without that score.
    """
    scores = run.scalars.get("gtpo/collapse_score")
    if not scores:
        return None
    threshold, patience = rule_of(run)
    passed = fired_at(scores, threshold, 1)
    fired = fired_at(scores, threshold, patience)
    return Collapse(threshold, patience, passed, fired, _signal(run, passed), max(scores.values()))


def rule_of(run: RunData) -> tuple[float, int]:
    """Threshold and patience of a run's collapse detector: those of its `config.yaml`, else the part's defaults."""
    given = (run.settings.get("entropy_collapse") or {}).get("init_args") or {}
    return float(given.get("threshold", 0.5)), int(given.get("patience", 3))


def fired_at(scores: Series, threshold: float, patience: int) -> int | None:
    """The step at which a score had been at its threshold for `patience` logged steps in a row; None if it never was.

    Example:
        >>> fired_at({1: 0.6, 2: 0.1, 3: 0.5, 4: 0.7}, 0.5, 2)
        4
    """
    streak = 0
    for step, score in scores.items():
        streak = streak + 1 if score >= threshold else 0
        if streak == patience:
            return step
    return None


def _signal(run: RunData, step: int | None) -> str:
    """The signal whose score was the largest at a step."""
    start = "gtpo/collapse/"
    at = {
        name.removeprefix(start): series[step]
        for name, series in run.scalars.items()
        if name.startswith(start) and step is not None and step in series
    }
    return max(at, key=lambda name: at[name]) if at else ""
