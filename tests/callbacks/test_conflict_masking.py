import pytest
import torch

from gtpo_lightning.callbacks import ConflictMasking
from tests.helpers.fakes import FakeModule, fake_trainer, random_rollout, rollout_of


def conflicts_by_loops(rollout, scope):
    """The definition, one token after the other, on lists of real tokens."""
    rows = len(rollout)
    tokens = [rollout.completion_ids[i, : int(rollout.completion_mask[i].sum())].tolist() for i in range(rows)]
    signs = [(a > 0) - (a < 0) for a in rollout.advantages.tolist()]
    groups = rollout.group_ids.tolist()

    def shared(i, position):
        """Both signs have row i's token at that position (negative: from the end)."""
        found = set()
        for j in range(rows):
            reaches = groups[j] == groups[i] and -len(tokens[j]) <= position < len(tokens[j])
            if reaches and tokens[j][position] == tokens[i][position]:
                found.add(signs[j])
        return {1, -1} <= found and signs[i] != 0

    marked = torch.zeros(rollout.completion_ids.shape, dtype=torch.bool)
    for i, own in enumerate(tokens):
        if scope == "position":
            for t in range(len(own)):
                marked[i, t] = shared(i, t)
        if scope in ("prefix", "edges"):
            for t in range(len(own)):
                if not shared(i, t):
                    break
                marked[i, t] = True
        if scope in ("suffix", "edges"):
            for t in range(1, len(own) + 1):
                if not shared(i, -t):
                    break
                marked[i, len(own) - t] = True
    return marked


@pytest.mark.parametrize("scope", ["edges", "prefix", "suffix", "position"])
@pytest.mark.parametrize("seed", range(5))
def test_weights_and_share_are_those_of_the_double_loop(scope, seed):
    rollout, module = random_rollout(seed), FakeModule()
    marked = conflicts_by_loops(rollout, scope)
    expected = torch.ones(rollout.completion_ids.shape)
    for i, t in marked.nonzero().tolist():
        expected[i, t] = 1.75 if rollout.advantages[i] > 0 else 0.25
    ConflictMasking(scope, positive=1.75, negative=0.25).on_before_loss(fake_trainer(), module, rollout)
    assert torch.equal(rollout.token_weights, expected)
    assert 0 < int(marked.sum()) < rollout.completion_mask.sum()
    assert module.logged == {
        "gtpo/conflict_frac": pytest.approx(int(marked.sum()) / float(rollout.completion_mask.sum()), abs=1e-12)
    }


def test_defaults_double_the_good_and_silence_the_bad():
    rollout = rollout_of([0.1] * 3, [3, 3, 2], [1.0, -1.0, 0.0], ids=[[7, 8, 9], [7, 5, 9], [7, 9, 0]])
    ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), rollout)
    assert rollout.token_weights.tolist() == [[2, 1, 2], [0, 1, 0], [1, 1, 1]]


def test_the_slot_is_multiplied_not_overwritten():
    plain, rollout = random_rollout(0), random_rollout(0)
    rollout.token_weights[::2] *= 0.5
    rollout.token_weights[1, :] = 0
    before = rollout.token_weights.clone()
    for each in (plain, rollout):
        ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), each)
    assert torch.equal(rollout.token_weights, before * plain.token_weights)


def test_signs_are_those_of_the_advantage_and_dropped_rows_take_part():
    plain, rollout = random_rollout(1), random_rollout(1)
    rollout.advantage_shift -= 100.0  # every sum A + shift is negative
    rollout.sequence_weights[::2] *= 0.0
    for each in (plain, rollout):
        ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), each)
    assert torch.equal(rollout.token_weights, plain.token_weights)
    assert (plain.token_weights == 0).any()
    assert (plain.token_weights == 2).any()


@pytest.mark.parametrize("advantages", [[0.0, 0.0], [0.5, 0.5], [-1.0, 0.0]])
def test_without_both_signs_nothing_is_in_conflict(advantages):  # C-01, C-16: an equal group leaves no sign
    rollout, module = rollout_of([0.1, 0.2], advantages=advantages), FakeModule()
    ConflictMasking().on_before_loss(fake_trainer(), module, rollout)
    assert torch.equal(rollout.token_weights, torch.ones(2, 2))
    assert module.logged == {"gtpo/conflict_frac": 0.0}


def test_a_06_a_step_without_tokens_has_no_share():
    rollout, module = rollout_of([0.1, 0.2], [0, 0], [1.0, -1.0]), FakeModule()
    ConflictMasking().on_before_loss(fake_trainer(), module, rollout)
    assert torch.equal(rollout.token_weights, torch.ones(2, 1))
    assert module.logged == {}


def test_advantages_are_needed():
    rollout = random_rollout(0)
    rollout.advantages = None
    with pytest.raises(ValueError, match="advantages"):
        ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), rollout)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"scope": "middle"}, "scope: 'middle'.*'edges', 'prefix', 'suffix', 'position'"),
        ({"scope": None}, "scope"),
        ({"positive": -1.0}, "positive: -1.0"),
        ({"positive": float("inf")}, "positive: inf"),
        ({"negative": float("nan")}, "negative: nan"),
        ({"negative": "0"}, "negative: '0'"),
        ({"negative": True}, "negative: True"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        ConflictMasking(**arguments)
