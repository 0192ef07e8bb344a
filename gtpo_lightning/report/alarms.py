"""How early each signal of the collapse detector fired before damage, and how often in runs without damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gtpo_lightning.report.reading import RunData, Series
from gtpo_lightning.report.statistics import accuracy_names, fired_at, rule_of, smoothed

__all__ = ["LOST", "WINDOW", "Damage", "Outcome", "damage_of", "outcomes", "signals_of"]

LOST = 0.10
"""What a rate has to lose from its best for a run to count as damaged."""

WINDOW = 15
"""Optimizer steps that the format rate is averaged over."""

_SIGNALS = "gtpo/collapse/"
_FORMAT = "gtpo/format_frac"


class Damage(NamedTuple):
    """The optimizer step at which each rate had lost `LOST` from its best; None where it never did.

    Args:
        format: Of the share of training completions in the full format, mean of `WINDOW` steps.
        accuracy: Of the accuracy on held-out problems, at the evaluations.
    """

    format: int | None
    accuracy: int | None


class Outcome(NamedTuple):
    """What a signal did over some runs.

    Args:
        signal: Its name, `all` for the largest of all, `all but kl` for that without KL, which needs a reference.
        leads: Steps from its alarm to the damage for each event of `Damage`, one a damaged run, None where it was
            silent; negative where it came late.
        healthy: Runs without damage.
        false_alarms: Those of them in which it fired.
    """

    signal: str
    leads: dict[str, list[int | None]]
    healthy: int
    false_alarms: int


def damage_of(run: RunData) -> Damage:
    """When a run's format rate and its held-out accuracy had lost `LOST` from their best.

    Example:
        >>> from pathlib import Path
        >>> run = RunData(Path("run"), scalars={"val/sums/pass@1": {0: 0.5, 50: 0.8, 100: 0.69}})
        >>> damage_of(run)
        Damage(format=None, accuracy=100)
    """
    rate = run.scalars.get(_FORMAT, {})
    # Means over fewer steps than the window would make an odd first step the best.
    means = dict(list(smoothed(rate, WINDOW).items())[WINDOW - 1 :])
    accuracies = (_first_loss(run.scalars[name]) for name in accuracy_names(run.scalars))
    return Damage(_first_loss(means), min((step for step in accuracies if step is not None), default=None))


def _first_loss(series: Series) -> int | None:
    best = float("-inf")
    for step, value in series.items():
        best = max(best, value)
        if best - value >= LOST - 1e-9:
            return step
    return None


def signals_of(run: RunData) -> dict[str, Series]:
    """The score of each signal over the steps, with `all` and, where KL was measured, `all but kl`."""
    single = {name.removeprefix(_SIGNALS): run.scalars[name] for name in run.scalars if name.startswith(_SIGNALS)}
    if not single:
        return {}
    found = {"all": _largest(list(single.values()))}
    if "kl" in single and len(single) > 1:
        found["all but kl"] = _largest([series for name, series in single.items() if name != "kl"])
    return {**found, **dict(sorted(single.items()))}


def _largest(series: Sequence[Series]) -> Series:
    steps = sorted({step for one in series for step in one})
    return {step: max(one[step] for one in series if step in one) for step in steps}


def outcomes(runs: Sequence[RunData]) -> list[Outcome]:
    """What each signal did over runs that had a collapse detector; none where there is no such run.

    A signal has fired when its score was at the detector's threshold for as many logged steps in a row as its patience.
    """
    watched = {id(run): signals_of(run) for run in runs}
    seen = [(run, watched[id(run)], damage_of(run)) for run in runs if watched[id(run)]]
    names = dict.fromkeys(name for _, signals, _ in seen for name in signals)
    return [_outcome(name, [(run, own[name], hurt) for run, own, hurt in seen if name in own]) for name in names]


def _outcome(name: str, seen: list[tuple[RunData, Series, Damage]]) -> Outcome:
    fired = {id(run): fired_at(series, *rule_of(run)) for run, series, _ in seen}
    healthy = [run for run, _, hurt in seen if hurt == Damage(None, None)]
    leads = {
        event: [_lead(fired[id(run)], step) for run, _, hurt in seen if (step := step_of(hurt)) is not None]
        for event, step_of in _EVENTS.items()
    }
    return Outcome(name, leads, len(healthy), sum(fired[id(run)] is not None for run in healthy))


_EVENTS: Mapping[str, Callable[[Damage], int | None]] = {
    "format": lambda damage: damage.format,
    "accuracy": lambda damage: damage.accuracy,
}


def _lead(alarm: int | None, damage: int) -> int | None:
    return None if alarm is None else damage - alarm


def lead_text(leads: Sequence[int | None]) -> str:
    """How many of the damaged runs a signal told before the damage, and how long before.

    Example:
        >>> lead_text([40, 20, -5, None])
        '2 of 4, 30 steps (20 to 40); late 1, silent 1'
    """
    if not leads:
        return "no run"
    early = [lead for lead in leads if lead is not None and lead > 0]
    late = sum(lead is not None and lead <= 0 for lead in leads)
    silent = sum(lead is None for lead in leads)
    text = f"{len(early)} of {len(leads)}"
    if early:
        text += f", {median(early):g} steps ({min(early)} to {max(early)})"
    rest = [f"{word} {count}" for word, count in (("late", late), ("silent", silent)) if count]
    return f"{text}; {', '.join(rest)}" if rest else text
