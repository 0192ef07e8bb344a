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
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        EntropyFilter(**arguments)
