"""Two gloo processes: logged numbers and the initial entropy are those of all rows, whatever each rank holds."""

import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy

from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer
from tests.helpers.fakes import FakeModule, rollout_of
from tests.helpers.two_ranks import run_on_two_ranks

# for each scenario and step: (entropies, lengths, advantages, ids) of rank 0 and of rank 1
PLAIN = ([0.2, 0.4, 0.6], [1, 2, 3], [1.0, -1.0, 0.05], [[7, 0, 0], [7, 1, 0], [5, 6, 7]])
SHORT = ([1.4], [2], [0.1], [[1, 2]])
EMPTY = ([0.5, 0.5], [0, 0], [1.0, -1.0], [[1], [1]])
HIGH = ([0.9, 0.8], [1, 1], [1.0, -1.0], [[1], [1]])
SCENARIOS = {
    "uneven": [(PLAIN, SHORT), (PLAIN, SHORT)],
    "one empty": [(EMPTY, PLAIN), (PLAIN, EMPTY)],
    "both empty": [(EMPTY, EMPTY), (PLAIN, SHORT)],
    "all filtered on one": [(PLAIN, PLAIN), (HIGH, PLAIN)],
    "all filtered": [(PLAIN, PLAIN), (HIGH, HIGH)],
    "adaptive": [(PLAIN, SHORT), (PLAIN, PLAIN), (EMPTY, PLAIN), (HIGH, EMPTY)],
}


def run_scenarios(rank):
    strategy, results = DDPStrategy(), {}
    for name, steps in SCENARIOS.items():
        delta = EntropyFilter(adaptive=0.75, window=2) if name == "adaptive" else EntropyFilter()
        parts = [ConflictMasking(), delta, EntropyRegularizer(gamma=0.1)]
        results[name] = {"logged": [], "weights": []}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, ranks in enumerate(steps):
                entropies, lengths, advantages, ids = ranks[rank]
                trainer, module = SimpleNamespace(global_step=step, strategy=strategy), FakeModule()
                rollout = rollout_of(entropies, lengths, advantages, ids=ids)
                for part in parts:
                    part.on_before_loss(trainer, module, rollout)
                for part in parts:
                    part.on_after_loss(trainer, module, rollout, {})
                results[name]["logged"].append(module.logged)
                results[name]["weights"].append(rollout.sequence_weights.tolist())
        results[name]["state"] = parts[1].state_dict()
        results[name]["warnings"] = [str(warning.message) for warning in caught]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_two_ranks(run_scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_ranks_agree(ranks, name):
    assert ranks[0][name]["logged"] == ranks[1][name]["logged"]
    assert ranks[0][name]["state"] == ranks[1][name]["state"]


def test_means_are_those_of_all_rows(ranks):
    for step, logged in enumerate(ranks[0]["uneven"]["logged"]):
        assert logged == {
            # tokens 7 of rows 0 and 1 (both ends); 8 tokens in all
            "gtpo/conflict_frac": pytest.approx(2 / 8, abs=1e-12),
            "gtpo/entropy_init": pytest.approx(2.6 / 4, abs=1e-7),
            "gtpo/entropy_filtered_frac": pytest.approx(1 / 4, abs=1e-12),
            "gtpo/seq_entropy_mean": pytest.approx(2.6 / 4, abs=1e-7),
            "gtpo/seq_entropy_max": pytest.approx(1.4, abs=1e-6),
            # 0.05 - 0.06 and 0.1 - 0.14
            "gtpo/sign_flip_frac": pytest.approx(2 / 4, abs=1e-12),
        }, step


def test_an_empty_rank_takes_part_in_the_reductions(ranks):
    result = ranks[0]["one empty"]
    for logged in result["logged"]:
        assert logged["gtpo/entropy_init"] == pytest.approx(0.4, abs=1e-7)
        assert logged["gtpo/seq_entropy_max"] == pytest.approx(0.6, abs=1e-7)
        assert logged["gtpo/entropy_filtered_frac"] == 0.0
    assert result["state"] == {"initial_entropy": pytest.approx(0.4, abs=1e-7), "all_filtered_steps": 0}


def test_two_empty_ranks_stay_unmeasured_until_the_next_step(ranks):
    result = ranks[0]["both empty"]
    assert result["logged"][0] == {}
    assert result["logged"][1]["gtpo/entropy_init"] == pytest.approx(2.6 / 4, abs=1e-7)
    assert any("optimizer step 1" in text for text in result["warnings"])


def test_a_rank_of_dropped_rows_is_no_step_of_dropped_rows(ranks):
    for rank in ranks:
        assert rank["all filtered on one"]["state"]["all_filtered_steps"] == 0
        assert rank["all filtered"]["state"]["all_filtered_steps"] == 1
    assert ranks[0]["all filtered on one"]["weights"][1] == [0, 0]
    assert ranks[1]["all filtered on one"]["weights"][1] == [1, 1, 1]
    assert not any("every completion" in text for text in ranks[0]["all filtered on one"]["warnings"])
    assert sum("every completion" in text for text in ranks[0]["all filtered"]["warnings"]) == 1


def test_an_adaptive_threshold_is_that_of_all_rows_of_both_ranks(ranks):
    logged = [step.get("gtpo/entropy_threshold") for step in ranks[0]["adaptive"]["logged"]]
    assert logged == [
        None,
        pytest.approx(0.6, abs=1e-6),  # third of 0.2 0.4 0.6 1.4, of which rank 1 has the last
        pytest.approx(0.6, abs=1e-6),  # eighth of 0.2 0.2 0.2 0.4 0.4 0.4 0.6 0.6 0.6 1.4
        pytest.approx(0.6, abs=1e-6),  # seventh of three times 0.2 0.4 0.6
    ]
    assert [rank["adaptive"]["weights"][3] for rank in ranks] == [[0, 0], [1, 1]]
    recent = ranks[1]["adaptive"]["state"]["recent"]
    assert [len(values) for values in recent["steps"]] == [6, 3]
    assert recent["own"] == pytest.approx([0.9, 0.8], abs=1e-6)
