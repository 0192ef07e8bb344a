"""How far a run has drifted from the best it was: one score of several recorded signals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

__all__ = ["SIGNALS", "CollapseScore", "CollapseSignal", "SignalTrend", "collapse_score", "largest_score"]


@dataclass(frozen=True)
class CollapseSignal:
    """A value recorded once an optimizer step, and what would be bad news of it.

    Args:
        direction: 1 if rising is bad, −1 if falling is.
        tolerance: A drift of this size scores 0.5, in the signal's unit.
        relative: Whether the tolerance is a share instead: of the largest median so far, in size.
        level: Whether the tolerance is a level near 0 instead, at which a signal whose falling is bad scores 0.5.
        only_with: A signal that has to have drifted, too, for this one to count: `equal_groups` also rises, and entropy
            vanishes, where every problem is solved.

    Raises:
        ValueError: `direction` is neither 1 nor −1, `tolerance` is not above 0, or a level of a rising signal.
    """

    direction: int
    tolerance: float
    relative: bool = False
    level: bool = False
    only_with: str | None = None

    def __post_init__(self) -> None:
        if self.direction not in (1, -1):
            raise ValueError(f"direction: {self.direction!r}; valid: 1 (rising is bad), -1 (falling is bad)")
        if not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"tolerance: {self.tolerance!r}; valid: a finite number > 0")
        if self.level and self.direction == 1:
            raise ValueError("level: True with direction 1; valid: direction -1, a signal that vanishes")


SIGNALS: dict[str, CollapseSignal] = {
    "entropy": CollapseSignal(1, 0.06),
    "undecided": CollapseSignal(1, 0.05),
    "decided": CollapseSignal(-1, 0.01, level=True, only_with="reward"),
    "format": CollapseSignal(-1, 0.08),
    "reward": CollapseSignal(-1, 0.25, relative=True),
    "equal_groups": CollapseSignal(1, 0.6, only_with="reward"),
    "kl": CollapseSignal(1, 0.3),
}
"""Known signals, each with a tolerance. `entropy`: mean over tokens, nats. `undecided`: share of completions with
⟨H⟩ > ln 2. `decided`: the mean entropy again, bad near 0. `format`: share in the full format. `reward`: mean.
`equal_groups`: share of groups without an advantage. `kl`: mean k3 to the reference, nats a token."""

_STATE = ("best", "largest", "error", "score")


class SignalTrend:
    """The drift of one signal, value by value.

        m_t = median of the last n values, n = `window`, at the start from half of that on
        b_t = the best of the medians so far, with the s = 1.4826 · MAD and the n of its values
        d_t = direction · (m_t − b_t)  >= 0,   tol_t = max(tolerance, noise · 1.2533 · s / √n)
        score = d_t / (d_t + tol_t)  in [0, 1]

    or, of a signal that is bad near 0 (`level`), tolerance / (tolerance + |m_t|).

    The best is a running one because a healthy run moves, too: entropy falls from its first value all along, so only
    its climb from the lowest value is news. s is a robust standard deviation of one value and 1.2533 s / √n the
    standard error of the median of n, so a signal of few completions has to drift further to count. The score is 0
    until half a window is full: to wait for more would take what a run that fails at once has left for its best.

    Args:
        signal: Direction and tolerance.
        window: Values of the median, at least 2.
        noise: Standard errors of the median that a drift has to reach to score 0.5, at least 0.

    Example:
        >>> trend = SignalTrend(CollapseSignal(1, 0.05), window=3)
        >>> [trend.update(value) for value in (0.4, 0.3, 0.2, 0.2, 0.2, 0.3, 0.25, 0.3)][-1]  # 0.3 after a best of 0.2
        0.6666666666666666
    """

    def __init__(self, signal: CollapseSignal, window: int = 8, noise: float = 4.0) -> None:
        self.signal, self.window, self.noise = signal, window, noise
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.values: list[float] = []
        self.best: float | None = None
        self.largest = 0.0
        self.error = 0.0
        self.score = 0.0

    def update(self, value: float | None) -> float:
        """Takes the next value and returns the score; None or a number that is not finite leaves it as it was."""
        if value is None or not math.isfinite(value):
            return self.score
        self.values = [*self.values, float(value)][-self.window :]
        if len(self.values) >= max(2, self.window // 2):
            middle = median(self.values)
            self.largest = max(self.largest, abs(middle))
            if self.best is None or self.signal.direction * (middle - self.best) < 0:
                self.best = middle
                spread = 1.4826 * median(abs(x - middle) for x in self.values)
                self.error = 1.2533 * spread / math.sqrt(len(self.values))
            drift = self.signal.direction * (middle - self.best)
            self.score = drift / (drift + self.allowed)
            if self.signal.level:
                self.score = self.signal.tolerance / (self.signal.tolerance + abs(middle))
        return self.score

    @property
    def allowed(self) -> float:
        """The drift that scores 0.5 as things stand."""
        unit = self.largest if self.signal.relative else 1.0
        return max(self.signal.tolerance * unit, self.noise * self.error, 1e-12)

    def state_dict(self) -> dict[str, Any]:
        """The values of the window and what is known of those before, as plain numbers."""
        return {name: getattr(self, name) for name in _STATE} | {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, cut to this window."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.values = [float(x) for x in state["values"]][-self.window :]


class CollapseScore(NamedTuple):
    """A score in [0, 1], the signal that gave it (None where every score is 0), and the score of each signal."""

    score: float
    signal: str | None
    scores: dict[str, float]


def collapse_score(
    curves: Mapping[str, Iterable[float | None]],
    *,
    signals: Mapping[str, CollapseSignal] | None = None,
    window: int = 8,
    noise: float = 4.0,
) -> CollapseScore:
    """The score of recorded curves at their last value: the largest of the signals' scores.

    A signal with `only_with` counts only where that one's score is at least 1/3, half its tolerance.

    Args:
        curves: Of each signal its values, one an optimizer step, oldest first; None or NaN where nothing was measured.
        signals: What the names mean. Default: `SIGNALS`.
        window: Values of a median, at least 2. See `SignalTrend`.
        noise: Standard errors that a drift has to reach to score 0.5.

    Returns:
        `CollapseScore(score, signal, scores)`, plain numbers.

    Raises:
        ValueError: A curve of an unknown signal, or `window` or `noise` outside its range.

    Example:
        >>> curves = {"entropy": [0.4, 0.3, 0.2, 0.2, 0.2, 0.3, 0.3], "format": [0.9, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]}
        >>> score = collapse_score(curves, window=3)
        >>> score.signal, round(score.score, 3)  # 0.1 above the lowest median, 0.06 is allowed
        ('entropy', 0.625)
    """
    known = SIGNALS if signals is None else signals
    _check_window(window, noise)
    unknown = [name for name in curves if name not in known]
    if unknown:
        raise ValueError(f"curves: {unknown[0]!r}; valid: {', '.join(map(repr, known))}")
    trends = {name: SignalTrend(known[name], window, noise) for name in curves}
    for name, values in curves.items():
        for value in values:
            trends[name].update(value)
    return largest_score(trends, tuple(curves))


def largest_score(trends: Mapping[str, SignalTrend], names: Sequence[str]) -> CollapseScore:
    """The largest score of the signals named, as things stand.

    Args:
        trends: Every trend that is followed, also those that others only count with.
        names: The signals that take part; of equal scores the first one's name is given.

    Returns:
        `CollapseScore(score, signal, scores)`.

    Example:
        >>> largest_score({"kl": SignalTrend(SIGNALS["kl"])}, ("kl",))
        CollapseScore(score=0.0, signal=None, scores={'kl': 0.0})
    """
    scores = {name: trends[name].score if _counts(trends, name) else 0.0 for name in names}
    score = max(scores.values(), default=0.0)
    return CollapseScore(score, next((name for name in names if score and scores[name] == score), None), scores)


def _counts(trends: Mapping[str, SignalTrend], name: str) -> bool:
    other = trends.get(trends[name].signal.only_with or "")
    return other is None or 3 * other.score >= 1 - 1e-9


def _check_window(window: int, noise: float) -> None:
    """Refuses a window or a noise outside its range.

    Raises:
        ValueError: `window` is no integer of at least 2, or `noise` is no finite number of at least 0.
    """
    if not isinstance(window, int) or isinstance(window, bool) or window < 2:
        raise ValueError(f"window: {window!r}; valid: an integer >= 2")
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise: {noise!r}; valid: a finite number >= 0")
