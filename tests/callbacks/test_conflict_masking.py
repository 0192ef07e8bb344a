import pytest
import torch

from gtpo_lightning.callbacks import ConflictMasking
from tests.helpers.fakes import FakeModule, fake_trainer, random_rollout, rollout_of


def conflicts_by_loops(rollout, scope, shift=0):
    """The definition, one token after the other, on lists of real tokens."""
    rows = len(rollout)
    tokens = [rollout.completion_ids[i, : int(rollout.completion_mask[i].sum())].tolist() for i in range(rows)]
    signs = [(a > 0) - (a < 0) for a in rollout.advantages.tolist()]
    groups = rollout.group_ids.tolist()

    def shared(i, position):
        """A row of the other sign has row i's token about that position (negative: from the end)."""
        others = [tokens[j] for j in range(rows) if groups[j] == groups[i] and signs[i] * signs[j] < 0]
        for other in others:
            for near in range(position - shift, position + shift + 1):
                same_end = (near < 0) == (position < 0) and -len(other) <= near < len(other)
                if same_end and other[near] == tokens[i][position]:
                    return True
        return False

    def run(i, positions):
        missed = 0
        for position in positions:
            missed += not shared(i, position)
            if missed > shift:
                return
            marked[i, position % len(tokens[i])] |= shared(i, position)

    marked = torch.zeros(rollout.completion_ids.shape, dtype=torch.bool)
    for i, own in enumerate(tokens):
        if scope == "position":
            for t in range(len(own)):
                marked[i, t] = shared(i, t)
        if scope in ("prefix", "edges"):
            run(i, range(len(own)))
        if scope in ("suffix", "edges"):
            run(i, range(-1, -len(own) - 1, -1))
    return marked


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("scope", ["edges", "prefix", "suffix", "position"])
@pytest.mark.parametrize("seed", range(5))
def test_weights_and_share_are_those_of_the_double_loop(scope, seed, shift):
    rollout, module = random_rollout(seed, vocabulary=2 + 3 * shift), FakeModule()
    marked = conflicts_by_loops(rollout, scope, shift)
    expected = torch.ones(rollout.completion_ids.shape)
    for i, t in marked.nonzero().tolist():
        expected[i, t] = 1.75 if rollout.advantages[i] > 0 else 0.25
    part = ConflictMasking(scope, positive=1.75, negative=0.25, shift=shift)
    part.on_before_loss(fake_trainer(), module, rollout)
    assert torch.equal(rollout.token_weights, expected)
    assert 0 < int(marked.sum()) < rollout.completion_mask.sum()
    assert module.logged == {
        "gtpo/conflict_frac": pytest.approx(int(marked.sum()) / float(rollout.completion_mask.sum()), abs=1e-12)
    }


def test_defaults_double_the_good_and_silence_the_bad():
    rollout = rollout_of([0.1] * 3, [3, 3, 2], [1.0, -1.0, 0.0], ids=[[7, 8, 9], [7, 5, 9], [7, 9, 0]])
    ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), rollout)
    assert rollout.token_weights.tolist() == [[2, 1, 2], [0, 1, 0], [1, 1, 1]]


def test_a_shift_reaches_the_format_before_answers_of_another_length():
    # <answer> 4 2 </answer> and <answer> 7 </answer>
    ids, advantages = [[1, 8, 4, 2, 9], [5, 8, 7, 9, 0]], [1.0, -1.0]
    weights = {}
    for shift in (0, 2):
        rollout = rollout_of([0.1] * 2, [5, 4], advantages, ids=ids)
        ConflictMasking(shift=shift).on_before_loss(fake_trainer(), FakeModule(), rollout)
        weights[shift] = rollout.token_weights.tolist()
    assert weights[0] == [[1, 1, 1, 1, 2], [1, 1, 1, 0, 1]]
    assert weights[2] == [[1, 2, 1, 1, 2], [1, 0, 1, 0, 1]]


def test_without_a_shift_the_result_is_that_of_the_default():
    default, zero = random_rollout(2), random_rollout(2)
    ConflictMasking().on_before_loss(fake_trainer(), FakeModule(), default)
    ConflictMasking(shift=0).on_before_loss(fake_trainer(), FakeModule(), zero)
    assert ConflictMasking().shift == 0
    assert torch.equal(default.token_weights, zero.token_weights)


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
        ({"shift": -1}, "shift: -1; valid: an integer >= 0"),
        ({"shift": 1.5}, "shift: 1.5"),
        ({"shift": True}, "shift: True"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        ConflictMasking(**arguments)
