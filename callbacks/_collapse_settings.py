"""Arguments of the collapse detector: what is refused, and the trends they ask for."""

from __future__ import annotations

from dataclasses import replace

from gtpo_lightning.callbacks._checks import check_number
from gtpo_lightning.functional._inputs import check_choice
from gtpo_lightning.functional.collapse import SIGNALS, SignalTrend

__all__ = ["check_signals", "make_trends"]


def make_trends(
    signals: tuple[str, ...], tolerances: dict[str, float], window: int, noise: float
) -> dict[str, SignalTrend]:
    """A trend of each signal named, and of those that it only counts with.

    Args:
        signals: Names of `SIGNALS`.
        tolerances: Other tolerances than theirs.
        window: Values of a median.
        noise: Standard errors that a drift has to reach.

    Raises:
        ValueError: A tolerance of an unknown signal, or one that is not above 0.
    """
    for name, tolerance in tolerances.items():
        check_choice("tolerances", name, tuple(SIGNALS))
        if check_number(f"tolerances[{name!r}]", tolerance) == 0:
            raise ValueError(f"tolerances[{name!r}]: {tolerance!r}; valid: a finite number > 0")
    wanted = {*signals, *(SIGNALS[name].only_with for name in signals)}
    return {
        name: SignalTrend(replace(signal, tolerance=float(tolerances.get(name, signal.tolerance))), window, noise)
        for name, signal in SIGNALS.items()
        if name in wanted
    }


def check_signals(signals: list[str] | None) -> tuple[str, ...]:
    """The signals named, all where it is None.

    Raises:
        ValueError: No list of known names, or an empty one.
    """
    if signals is None:
        return tuple(SIGNALS)
    if isinstance(signals, str) or not signals:
        raise ValueError(f"signals: {signals!r}; valid: null or a list of {', '.join(map(repr, SIGNALS))}")
    for name in signals:
        check_choice("signals", name, tuple(SIGNALS))
    return tuple(signals)
