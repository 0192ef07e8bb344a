import io
import math

import pytest
import torch

from gtpo_lightning.callbacks import EntropyFilter
from tests.helpers.fakes import FakeModule, fake_trainer, rollout_of, warnings_of

NAN = float("nan")


def kept(part, entropies, lengths=None, step=0):
    """What the part leaves of weights 1, and what it logs."""
    rollout, module = rollout_of(entropies, lengths), FakeModule()
    part.on_before_loss(fake_trainer(step), module, rollout)
    return rollout.sequence_weights.tolist(), module.logged


@pytest.mark.parametrize("initial", [0.9, 0.6932, 3.0])
def test_g_01_a_policy_that_starts_undecided_is_not_filtered(initial):
    assert kept(EntropyFilter(initial_entropy=initial), [0.8, 0.1, 5.0])[0] == [1, 1, 1]


def test_g_01_the_same_with_a_measured_start():
    part = EntropyFilter()
    assert kept(part, [0.9, 0.9, 0.9])[0] == [1, 1, 1]
    assert part.initial_entropy == pytest.approx(0.9, abs=1e-7)
    assert kept(part, [0.8, 0.7, 0.1], step=1)[0] == [1, 1, 1]


@pytest.mark.parametrize("initial", [0.0, 0.5, math.log(2)])
def test_a_decided_start_filters_above_the_threshold_only(initial):
    part = EntropyFilter(initial_entropy=initial)
    weights, logged = kept(part, [0.1, math.log(2), 0.6932, 0.8])
    assert weights == [1, 1, 0, 0]
    assert logged["gtpo/entropy_filtered_frac"] == 0.5


def test_a_start_at_ln_2_exactly_is_not_above_it_in_single_precision():
    part = EntropyFilter()
    kept(part, [math.log(2)] * 3)
    assert kept(part, [0.8, 0.5], step=1)[0] == [0, 1]


def test_mean_of_the_means_of_the_non_empty_rows_not_of_the_tokens():
    part = EntropyFilter()
    kept(part, [[0.2, 0.4, 0.3], [0.9], 0.0], [3, 1, 0])
    assert part.initial_entropy == pytest.approx((0.3 + 0.9) / 2, abs=1e-7)


def test_all_micro_batches_of_the_first_step_count_and_later_ones_do_not():
    part = EntropyFilter()
    kept(part, [0.2, 0.4, 0.6])
    _, logged = kept(part, [1.0, 0.0, 0.6], [2, 0, 1])
    assert part.initial_entropy == pytest.approx(2.8 / 5, abs=1e-7)
    assert logged["gtpo/entropy_init"] == pytest.approx(2.8 / 5, abs=1e-7)
    for step in (1, 1, 2, 9):
        _, logged = kept(part, [0.1], step=step)
        assert logged["gtpo/entropy_init"] == pytest.approx(2.8 / 5, abs=1e-7)
    assert part.initial_entropy == pytest.approx(2.8 / 5, abs=1e-7)


def test_a_given_number_wins_over_measurement_and_checkpoint():
    part = EntropyFilter(initial_entropy=0.4)
    _, logged = kept(part, [0.9, 0.9, 0.2])
    assert logged["gtpo/entropy_init"] == 0.4
    part.load_state_dict({"initial_entropy": 0.9, "all_filtered_steps": 3})
    assert (part.initial_entropy, part.all_filtered_steps) == (0.4, 3)
    assert kept(part, [0.9, 0.2], step=1)[0] == [0, 1]


def test_state_survives_a_checkpoint_that_loads_weights_only():
    first, second = EntropyFilter(), EntropyFilter()
    kept(first, [0.3, 0.5])
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for part in (first, second):
        assert warnings_of(lambda part=part: kept(part, [0.1, 0.2], step=4)) == []
        assert kept(part, [2.0, 0.1], step=5)[0] == [0, 1]
    assert second.initial_entropy == first.initial_entropy == pytest.approx(0.4, abs=1e-7)
    assert second.state_dict() == first.state_dict()


def test_a_used_part_takes_a_state_over_completely():
    part = EntropyFilter()
    kept(part, [0.3])
    part.load_state_dict({"initial_entropy": 0.9})
    kept(part, [0.3])
    assert part.initial_entropy == 0.9
    part.load_state_dict({"initial_entropy": None})
    assert warnings_of(lambda: kept(part, [0.4], step=1)) != []
    assert part.initial_entropy == pytest.approx(0.4, abs=1e-7)


def test_a_resumed_run_without_it_measures_and_says_so_once():
    part = EntropyFilter()
    part.load_state_dict({"initial_entropy": None, "all_filtered_steps": 0})
    (text,) = warnings_of(lambda: [kept(part, [0.4, 0.6], step=step) for step in (7, 7)] + [kept(part, [0.1], step=8)])
    assert "initial entropy (0.5000 nats) was measured at optimizer step 7" in text
    assert part.initial_entropy == pytest.approx(0.5, abs=1e-7)


def test_a_fresh_start_says_nothing():
    assert warnings_of(lambda: kept(EntropyFilter(), [0.4, 0.9])) == []


def test_a_06_without_any_completion_nothing_is_measured_filtered_or_logged():
    part = EntropyFilter()
    weights, logged = kept(part, [5.0, 5.0], [0, 0])
    assert (weights, logged, part.initial_entropy) == ([1, 1], {}, None)
    (text,) = warnings_of(lambda: kept(part, [0.2, 0.8, 0.0], [1, 2, 0], step=1))
    assert "optimizer step 1" in text
    assert kept(part, [0.2, 0.8, 0.0], [1, 2, 0], step=2)[0] == [1, 0, 1]
    assert part.initial_entropy == pytest.approx(0.5, abs=1e-7)


def test_a_06_every_completion_filtered_is_counted_and_warned_about_once():
    part = EntropyFilter(initial_entropy=0.3)
    results = []

    def run():
        for step in range(3):
            results.append(kept(part, [0.8, 2.0, 0.0], [2, 1, 0], step=step))
        kept(part, [0.8, 0.1], step=3)

    (text,) = warnings_of(run)
    assert all(word in text for word in ("every completion of optimizer step 0", "keep_at_least", "gamma"))
    for weights, logged in results:
        assert weights[:2] == [0, 0]
        assert logged["gtpo/entropy_filtered_frac"] == 1.0
    assert part.all_filtered_steps == part.state_dict()["all_filtered_steps"] == 3


def test_logged_statistics_leave_padding_and_empty_rows_out():
    _, logged = kept(EntropyFilter(), [[0.2, 0.6], [0.5, 1.5, 1.0], [0.1], 0.0], [2, 3, 1, 0])
    assert logged == {
        "gtpo/entropy_filtered_frac": pytest.approx(1 / 3, abs=1e-12),  # start at 0.5, the row of 1.0 goes
        "gtpo/entropy_init": pytest.approx(0.5, abs=1e-7),
        "gtpo/seq_entropy_mean": pytest.approx(0.5, abs=1e-7),
        "gtpo/seq_entropy_max": pytest.approx(1.0, abs=1e-7),
    }


@pytest.mark.filterwarnings("ignore:EntropyFilter")
@pytest.mark.parametrize(
    ("share", "entropies", "lengths", "expected"),
    [
        (0.5, [0.9, 0.8, 1.0, 0.7], None, [0, 1, 0, 1]),
        (0.49, [0.9, 0.8, 1.0, 0.7], None, [0, 0, 0, 1]),
        (0.24, [0.9, 0.8, 1.0, 0.7], None, [0, 0, 0, 0]),
        (0.5, [0.9, 0.9, 0.9, 0.9], None, [1, 1, 0, 0]),  # ties by row order
        (0.25, [0.9, 0.1, 0.9, 0.9], None, [0, 1, 0, 0]),  # the kept ones count
        (0.5, [0.9, 0.0, 0.8, 0.0], [1, 0, 1, 0], [1, 1, 1, 1]),  # empty rows take no place
        (0.25, [0.9, 0.0, 0.8, 0.0], [1, 0, 1, 0], [0, 1, 1, 1]),
        (1.0, [0.9, 0.8], None, [1, 1]),
    ],
)
def test_keep_at_least(share, entropies, lengths, expected):
    part = EntropyFilter(initial_entropy=0.1, keep_at_least=share)
    assert kept(part, entropies, lengths)[0] == expected


@pytest.mark.filterwarnings("ignore:EntropyFilter")
@pytest.mark.parametrize("hundredths", [0, 1, 7, 28, 29, 55, 56, 57, 58, 99, 100])
def test_keep_at_least_counts_as_the_decimal_is_written(hundredths):  # 0.29 * 100 is 28.999999999999996
    part = EntropyFilter(initial_entropy=0.1, keep_at_least=hundredths / 100)
    assert sum(kept(part, [0.9] * 100)[0]) == hundredths


def test_adaptive_drops_what_lies_above_the_share_of_the_last_steps():
    part = EntropyFilter(adaptive=0.75, window=2)
    weights, logged = kept(part, [0.1, 0.2, 0.3, 5.0])
    assert weights == [1, 1, 1, 1]  # nothing was seen before
    assert "gtpo/entropy_threshold" not in logged
    expected = [
        ([0.3, 0.31, 0.1, 0.0], [1, 0, 1, 1], 0.3),  # third of the four of step 0
        ([0.30, 0.31, 0.32, 0.0], [1, 0, 0, 1], 0.3),  # sixth of 0 .1 .1 .2 .3 .3 .31 5
        ([0.3, 0.32, 9.0, 0.1], [1, 0, 0, 1], 0.31),  # step 0 has left: sixth of 0 0 .1 .3 .3 .31 .31 .32
    ]
    for step, (entropies, weights, threshold) in enumerate(expected, start=1):
        result, logged = kept(part, entropies, step=step)
        assert result == weights
        assert logged["gtpo/entropy_threshold"] == pytest.approx(threshold, abs=1e-6)
        assert logged["gtpo/entropy_filtered_frac"] == weights.count(0) / 4


@pytest.mark.parametrize("initial", [None, 0.1, 5.0])
def test_adaptive_is_armed_whatever_the_start(initial):
    part = EntropyFilter(adaptive=0.5, initial_entropy=initial)
    _, logged = kept(part, [1.8, 2.0, 2.2, 2.4])
    assert logged["gtpo/entropy_init"] == pytest.approx(initial or 2.1, abs=1e-6)
    assert kept(part, [1.9, 2.0, 2.1, 0.1], step=1)[0] == [1, 1, 0, 1]


def by_definition(history, entropies, share, window):
    """δ of a step from the lists of the steps before; an independent count, in steps that are multiples of 1/8."""
    seen = [x for values in history[-window:] for x in values]
    allowed = [x for x in seen if sum(y <= x for y in seen) >= share * len(seen)]
    return [float(x <= min(allowed)) if allowed else 1.0 for x in entropies]


@pytest.mark.filterwarnings("ignore:EntropyFilter")
@pytest.mark.parametrize(("share", "window"), [(0.5, 1), (0.75, 3), (1.0, 2)])
@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2]])
def test_adaptive_is_that_of_the_definition_for_any_split_into_micro_batches(share, window, sizes):
    part, history = EntropyFilter(adaptive=share, window=window), []
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        entropies = (torch.randint(20, (6,), generator=generator) / 8).tolist()
        weights, start = [], 0
        for size in sizes:
            weights += kept(part, entropies[start : start + size], step=step)[0]
            start += size
        assert weights == by_definition(history, entropies, share, window)
        history.append(entropies)


def test_adaptive_counts_dropped_rows_and_lets_a_policy_that_climbed_go_on():
    part, steps = EntropyFilter(adaptive=0.75, window=4), []
    for step in range(4):
        kept(part, [0.1] * 4, step=step)
    (text,) = warnings_of(lambda: steps.extend(kept(part, [0.9] * 4, step=4 + step)[0] for step in range(4)))
    assert "0.1000 nats" in text
    # a quarter of the window is from after the climb, then a half
    assert steps == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert part.all_filtered_steps == 2


@pytest.mark.filterwarnings("ignore:EntropyFilter")
def test_adaptive_leaves_empty_rows_and_what_is_not_finite_out():
    part = EntropyFilter(adaptive=1.0)
    kept(part, [0.4, 9.0, NAN, math.inf], [2, 0, 1, 1])
    _, logged = kept(part, [0.1], step=1)
    assert logged["gtpo/entropy_threshold"] == pytest.approx(0.4, abs=1e-7)


@pytest.mark.filterwarnings("ignore:EntropyFilter")
def test_adaptive_keeps_at_least():
    part = EntropyFilter(adaptive=0.5, keep_at_least=0.5)
    kept(part, [0.1, 0.1, 0.1, 0.1])
    assert kept(part, [0.9, 0.4, 0.5, 0.8], step=1)[0] == [0, 1, 1, 0]
    assert kept(part, [0.1, 0.0, 0.1, 0.8], step=1)[0] == [1, 1, 1, 0]


def test_adaptive_saved_resumed_and_continued_equals_uninterrupted():
    settings = {"adaptive": 0.75, "window": 2}
    steps = [[0.1, 0.5, 0.3], [0.2, 0.6, 0.1], [0.7, 0.3, 0.2], [0.4, 0.5, 0.8], [0.3, 0.5, 0.6]]
    whole = EntropyFilter(**settings)
    expected = [kept(whole, values, step=step) for step, values in enumerate(steps)]
    for stop in range(1, 5):
        first, second = EntropyFilter(**settings), EntropyFilter(**settings)
        results = [kept(first, values, step=step) for step, values in enumerate(steps[:stop])]
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        second.load_state_dict(torch.load(buffer, weights_only=True))
        results += [kept(second, values, step=step) for step, values in enumerate(steps) if step >= stop]
        assert results == expected
        assert second.state_dict() == whole.state_dict()
    assert {0.0, 1.0} == {weight for weights, _ in expected for weight in weights}


def test_adaptive_and_fixed_take_each_others_checkpoints():
    fixed, adaptive = EntropyFilter(), EntropyFilter(adaptive=0.5)
    for part in (fixed, adaptive):
        kept(part, [0.2, 0.4])
    fixed_state, adaptive_state = fixed.state_dict(), adaptive.state_dict()
    assert set(fixed_state) == {"initial_entropy", "all_filtered_steps"}
    fixed.load_state_dict(adaptive_state)
    assert kept(fixed, [0.69, 0.7], step=1)[0] == [1, 0]
    fresh = EntropyFilter(adaptive=0.5)
    fresh.load_state_dict(fixed_state)
    assert kept(fresh, [0.3, 5.0], step=1)[0] == [1, 1]
    assert kept(fresh, [0.3, 5.0], step=2)[0] == [1, 0]


def test_the_slot_is_multiplied_and_no_gradient_gets_into_it():
    rollout = rollout_of([0.9, 0.2, 0.3])
    rollout.entropies.requires_grad_()
    rollout.sequence_weights *= torch.tensor([0.5, 0.5, 0.0])
    call = (fake_trainer(), FakeModule(), rollout)
    assert warnings_of(lambda: EntropyFilter(initial_entropy=0.1).on_before_loss(*call)) == []
    assert rollout.sequence_weights.tolist() == [0, 0.5, 0]
    assert not rollout.sequence_weights.requires_grad


def test_a_nan_entropy_does_not_become_the_initial_one():
    part = EntropyFilter()
    kept(part, [NAN, 0.5])
    assert part.initial_entropy is None


def test_entropies_are_needed():
    rollout = rollout_of([0.1])
    rollout.entropies = None
    with pytest.raises(ValueError, match="entropies"):
        EntropyFilter().on_before_loss(fake_trainer(), FakeModule(), rollout)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threshold": -0.1}, "threshold: -0.1"),
        ({"threshold": NAN}, "threshold: nan"),
        ({"initial_entropy": -1}, "initial_entropy: -1"),
        ({"initial_entropy": math.inf}, "initial_entropy: inf"),
        ({"keep_at_least": 1.5}, "keep_at_least: 1.5.*<= 1"),
        ({"keep_at_least": -0.5}, "keep_at_least: -0.5"),
        ({"keep_at_least": None}, "keep_at_least: None"),
        ({"adaptive": 0}, "adaptive: 0; valid: a number > 0 and <= 1"),
        ({"adaptive": 1.1}, "adaptive: 1.1"),
        ({"adaptive": NAN}, "adaptive: nan"),
        ({"adaptive": True}, "adaptive: True"),
        ({"adaptive": 0.9, "threshold": 0.5}, "threshold: 0.5 with adaptive=0.9 has no effect; valid: ln 2"),
        ({"window": 0}, "window: 0; valid: an integer >= 1"),
        ({"window": 2.0}, "window: 2.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        EntropyFilter(**arguments)
