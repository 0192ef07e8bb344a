"""The score of recorded curves: hand-worked drifts, an independent reference, what must not count."""

import math
import random

import numpy as np
import pytest

from gtpo_lightning.functional import collapse_score
from gtpo_lightning.functional.collapse import SIGNALS, CollapseSignal, SignalTrend

NAN = float("nan")
RISING = {"x": CollapseSignal(1, 0.1)}


def scores(values, signal, window, noise):
    """The definition over the whole history at once, in numpy, for every step."""
    least = max(2, window // 2)
    found, best, largest = [0.0] * (least - 1), None, 0.0
    for end in range(least, len(values) + 1):
        part = np.array(values[max(0, end - window) : end])
        middle = np.median(part)
        largest = max(largest, abs(middle))
        if best is None or signal.direction * middle < signal.direction * best[0]:
            best = middle, 1.4826 * np.median(np.abs(part - middle)) / np.sqrt(len(part))
        drift = abs(middle - best[0])
        unit = largest if signal.relative else 1.0
        allowed = max(signal.tolerance * unit, noise * best[1] * 1.2533, 1e-12)
        found.append(drift / (drift + allowed))
    return found


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("window", "noise"), [(2, 0.0), (5, 3.0), (8, 4.0)])
def test_every_step_equals_the_definition(direction, relative, window, noise):
    signal, generator = CollapseSignal(direction, 0.1, relative), random.Random(window)
    values = [1 + math.sin(i / 9) + generator.gauss(0, 0.2) for i in range(60)]
    trend = SignalTrend(signal, window, noise)
    assert [trend.update(value) for value in values] == pytest.approx(scores(values, signal, window, noise), abs=1e-12)
    assert max(scores(values, signal, window, noise)) > 0.5
    whole = collapse_score({"x": values}, signals={"x": signal}, window=window, noise=noise)
    assert whole.score == pytest.approx(scores(values, signal, window, noise)[-1], abs=1e-12)


def test_a_drift_of_the_tolerance_scores_a_half_of_twice_two_thirds():
    for rise, expected in ((0.0, 0.0), (0.05, 1 / 3), (0.1, 0.5), (0.2, 2 / 3)):
        assert collapse_score({"x": [0.3] * 4 + [0.3 + rise] * 4}, signals=RISING, window=4).score == pytest.approx(
            expected, abs=1e-9
        )


def test_it_is_measured_from_the_running_best_not_from_the_start():
    curve = [0.4] * 5 + [0.1] * 5 + [0.25] * 5  # below its start, and 0.15 above its best
    score = collapse_score({"entropy": curve}, window=5)
    assert score.signal == "entropy"
    assert score.score == pytest.approx(0.15 / (0.15 + SIGNALS["entropy"].tolerance), abs=1e-9)
    assert collapse_score({"entropy": curve[:10]}, window=5) == (0.0, None, {"entropy": 0.0})


def test_one_outlier_is_no_drift():
    assert collapse_score({"x": [0.2] * 9 + [9.0]}, signals=RISING, window=5).score == 0


def test_a_noisy_signal_has_to_drift_further():
    quiet, noisy = [0.2] * 8 + [0.4] * 8, [0.3, 0.1] * 4 + [0.5, 0.3] * 4
    first, second = (collapse_score({"x": curve}, signals=RISING, window=8).score for curve in (quiet, noisy))
    assert first == pytest.approx(2 / 3, abs=1e-9)
    # the best is the first median there is, of four values
    assert second == pytest.approx(0.2 / (0.2 + 4 * 1.4826 * 0.1 * 1.2533 / math.sqrt(4)), abs=1e-9)


@pytest.mark.parametrize("gap", [None, NAN, math.inf])
def test_what_was_not_measured_leaves_the_score_as_it_was(gap):
    curve = [0.2] * 4 + [0.4] * 4
    gaps = [value for number in curve for value in (number, gap)]
    assert collapse_score({"x": gaps}, signals=RISING, window=4) == collapse_score(
        {"x": curve}, signals=RISING, window=4
    )
    assert collapse_score({"x": [gap] * 20}, signals=RISING).score == 0


def test_the_largest_score_gives_its_name():
    score = collapse_score({"format": [1.0] * 4 + [0.9] * 4, "entropy": [0.2] * 4 + [0.22] * 4}, window=4)
    assert score.signal == "format"
    assert score.score == score.scores["format"] > score.scores["entropy"] > 0


def test_equal_groups_count_only_where_the_reward_fell_too():
    equal = [0.2] * 4 + [0.9] * 4
    solved = collapse_score({"equal_groups": equal, "reward": [1.0] * 4 + [2.0] * 4}, window=4)
    assert (solved.score, solved.signal) == (0.0, None)
    fallen = collapse_score({"equal_groups": equal, "reward": [2.0] * 4 + [1.7] * 4}, window=4)
    assert fallen.signal == "equal_groups"
    assert fallen.scores["reward"] < 0.5 < fallen.scores["equal_groups"]
    assert collapse_score({"equal_groups": equal}, window=4).signal == "equal_groups"  # nothing to judge it by


def test_entropy_near_zero_counts_only_where_the_reward_fell_too():
    entropy, kept, fallen = [0.3] * 4 + [0.005] * 4, [1.0] * 4 + [1.9] * 4, [2.0] * 4 + [1.7] * 4
    assert collapse_score({"decided": entropy, "reward": kept}, window=4).scores["decided"] == 0
    score = collapse_score({"decided": entropy, "reward": fallen}, window=4)
    assert score.signal == "decided"
    assert score.score == pytest.approx(0.01 / 0.015, abs=1e-9)
    assert collapse_score({"decided": [0.0] * 8}, window=4).score == 1


def test_a_relative_tolerance_takes_the_scale_of_the_curve_also_around_zero():
    curve = [-1.0] * 4 + [0.0] * 4 + [-0.2] * 4
    expected = 0.2 / (0.2 + SIGNALS["reward"].tolerance)
    assert collapse_score({"reward": curve}, window=4).score == pytest.approx(expected, abs=1e-9)
    for scale in (1.0, 10.0):
        curve = [2.0 * scale] * 4 + [1.6 * scale] * 4
        tolerance = SIGNALS["reward"].tolerance
        expected = 0.2 / (0.2 + tolerance)
        assert collapse_score({"reward": curve}, window=4).score == pytest.approx(expected, abs=1e-9)


def test_a_best_of_zero_is_no_division_by_zero():
    assert collapse_score({"reward": [0.0] * 20}).score == 0
    fallen = collapse_score({"reward": [0.0] * 10 + [-1.0] * 10}).score
    assert fallen == pytest.approx(1 / (1 + SIGNALS["reward"].tolerance), abs=1e-9)


def test_a_trend_goes_on_from_its_state():
    generator = random.Random(0)
    values = [generator.random() for _ in range(40)]
    whole, first, second = (SignalTrend(SIGNALS["entropy"], 6) for _ in range(3))
    expected = [whole.update(value) for value in values]
    for value in values[:17]:
        first.update(value)
    second.load_state_dict(first.state_dict())
    assert [second.update(value) for value in values[17:]] == expected[17:]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="'entropie'; valid: 'entropy'"):
        collapse_score({"entropie": [1.0]})
    for window in (1, 2.0, True):
        with pytest.raises(ValueError, match="window"):
            collapse_score({"entropy": [1.0]}, window=window)
    for noise in (-1, NAN, True):
        with pytest.raises(ValueError, match="noise"):
            collapse_score({"entropy": [1.0]}, noise=noise)
    with pytest.raises(ValueError, match="direction: 0; valid: 1"):
        CollapseSignal(0, 0.1)
    with pytest.raises(ValueError, match="level: True with direction 1"):
        CollapseSignal(1, 0.1, level=True)
    for tolerance in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="tolerance"):
            CollapseSignal(1, tolerance)
