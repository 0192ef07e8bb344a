"""The bootstrap interval against the distribution of all resamples there are."""

import itertools
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from gtpo_lightning.functional import bootstrap_interval


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def quantile_of_all_resamples(values, share):
    """Smallest mean of a resample that at least this share of all of them does not exceed."""
    means = sorted(Fraction(sum(drawn), len(values)) for drawn in itertools.product(values, repeat=len(values)))
    return float(means[math.ceil(share * len(means)) - 1])


@pytest.mark.parametrize("values", [[0, 0, 0, 1], [0, 1, 1, 1, 1], [0, 2, 3, 7, 11]])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
def test_ends_are_quantiles_over_all_resamples(values, confidence):
    low, high = bootstrap_interval(values, confidence=confidence, resamples=40_000)
    # the share of resamples at the end itself is drawn too, to within 4 standard errors
    slack = 4 * 0.5 / math.sqrt(40_000)
    for got, share in ((low, (1 - confidence) / 2), (high, (1 + confidence) / 2)):
        nearby = [quantile_of_all_resamples(values, min(max(share + d, 1e-9), 1)) for d in (-slack, slack)]
        assert nearby[0] - 1e-12 <= got <= nearby[1] + 1e-12


def test_width_is_that_of_the_normal_approximation_for_many_problems():
    values = [1.0] * 300 + [0.0] * 700
    low, high = bootstrap_interval(values)
    error = math.sqrt(0.3 * 0.7 / 1000)
    assert low == pytest.approx(0.3 - 1.96 * error, abs=0.002)
    assert high == pytest.approx(0.3 + 1.96 * error, abs=0.002)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3])
@pytest.mark.parametrize("count", [2, 7, 10])
def test_equal_values_give_that_value(value, count):
    assert bootstrap_interval([value] * count) == (value, value)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_problems_give_nan(count):
    assert all(math.isnan(end) for end in bootstrap_interval([0.5] * count))
    low, high = bootstrap_interval(np.ones((3, count)))
    assert low.shape == high.shape == (3,)
    assert np.isnan([low, high]).all()


def test_curves_have_the_intervals_that_each_has_alone():
    curves = np.random.default_rng(3).random((4, 25))
    low, high = bootstrap_interval(curves)
    assert low.dtype == high.dtype == np.float64
    for row, ends in zip(curves, zip(low, high, strict=True), strict=True):
        assert bootstrap_interval(row) == pytest.approx(ends, abs=1e-14)
    empty_low, empty_high = bootstrap_interval(np.zeros((0, 5)))
    assert empty_low.shape == empty_high.shape == (0,)


def test_order_of_the_problems_does_not_matter():
    values = np.random.default_rng(4).random(25)
    assert bootstrap_interval(values) == bootstrap_interval(values[::-1]) == bootstrap_interval(np.roll(values, 7))


def test_the_seed_decides_alone():
    values = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.2]
    first = bootstrap_interval(values, resamples=500)
    np.random.seed(5)
    torch.manual_seed(5)
    state = np.random.get_state()[1].tolist()
    assert bootstrap_interval(values, resamples=500) == bootstrap_interval(values, resamples=500, seed=0) == first
    assert np.random.get_state()[1].tolist() == state
    assert len({bootstrap_interval(values, resamples=500, seed=seed) for seed in range(5)}) > 1
    # as drawn on another machine
    assert first == pytest.approx((0.2785714285714286, 0.7857142857142857), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_lists_and_tensors_give_floats(dtype):
    expected = bootstrap_interval([0.0, 1.0, 1.0, 0.0, 1.0])
    assert [type(end) for end in expected] == [float, float]
    assert bootstrap_interval(torch.tensor([0, 1, 1, 0, 1]).to(dtype)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": [0.0, math.nan]}, r"values: not finite"),
        ({"values": [[0.0, math.inf]]}, r"values: not finite"),
        ({"values": 0.5}, r"values: shape \(\); valid: \(P,\) or \(C, P\)"),
        ({"values": np.zeros((1, 1, 1))}, r"values: shape \(1, 1, 1\); valid"),
        ({"confidence": 0.0}, r"confidence: 0\.0; valid"),
        ({"confidence": 1}, r"confidence: 1; valid"),
        ({"confidence": 95}, r"confidence: 95; valid"),
        ({"confidence": math.nan}, r"confidence: nan; valid"),
        ({"resamples": 0}, r"resamples: 0; valid: an int from 1"),
        ({"resamples": 10.5}, r"resamples: 10\.5; valid: an int from 1"),
        ({"seed": -1}, r"seed: -1; valid: an int from 0"),
        ({"seed": None}, r"seed: None; valid: an int from 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        bootstrap_interval(**{"values": [0.0, 1.0]} | arguments)
