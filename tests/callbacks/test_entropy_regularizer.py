import pytest
import torch

from gtpo_lightning.callbacks import EntropyRegularizer
from tests.helpers.fakes import FakeModule, fake_trainer, random_rollout, rollout_of, warnings_of


def mean_entropies_by_loops(rollout):
    """⟨H⟩ of each row, None without tokens."""
    means = []
    for row in range(len(rollout)):
        length = int(rollout.completion_mask[row].sum())
        values = [float(rollout.entropies[row, t]) for t in range(length)]
        means.append(sum(values) / length if length else None)
    return means


def shifts_by_loops(rollout, gamma, baseline):
    means, groups = mean_entropies_by_loops(rollout), rollout.group_ids.tolist()
    shifts = []
    for mean, group in zip(means, groups, strict=True):
        if mean is None:
            shifts.append(0.0)
            continue
        partners = [m for m, g in zip(means, groups, strict=True) if g == group and m is not None]
        shifts.append(-gamma * (mean - (sum(partners) / len(partners) if baseline == "group" else 0.0)))
    return shifts


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("seed", range(4))
def test_shift_is_that_of_the_loops_and_is_added(baseline, seed):
    rollout = random_rollout(seed)
    rollout.advantage_shift += 0.25
    EntropyRegularizer(0.3, baseline).on_before_loss(fake_trainer(), FakeModule(), rollout)
    expected = torch.tensor(shifts_by_loops(rollout, 0.3, baseline)) + 0.25
    assert torch.allclose(rollout.advantage_shift, expected, atol=1e-6, rtol=0)
    assert rollout.completion_mask.sum(1).min() == 0  # an empty row is among them


def test_padding_never_counts_and_no_gradient_gets_into_the_slot():
    rollout = rollout_of([[0.5, 1.5], [1.0], 0.0], [2, 1, 0])  # NaN in the padding
    rollout.entropies.requires_grad_()
    EntropyRegularizer(gamma=0.1).on_before_loss(fake_trainer(), FakeModule(), rollout)
    assert rollout.advantage_shift.tolist() == pytest.approx([-0.1, -0.1, 0.0], abs=1e-8)
    assert not rollout.advantage_shift.requires_grad


def test_g_11_a_group_with_all_answers_right_is_pushed_down_by_the_papers_form_only():
    # two groups of equal rewards, interleaved: A = 0 everywhere
    entropies, groups = [0.2, 0.9, 0.4, 0.5], [3, 8, 3, 8]
    sums = {}
    for baseline in ("none", "group"):
        rollout, module = rollout_of(entropies, group_ids=groups), FakeModule()
        part = EntropyRegularizer(0.1, baseline)
        part.on_before_loss(fake_trainer(), module, rollout)
        part.on_after_loss(fake_trainer(), module, rollout, {})
        sums[baseline] = [float(rollout.weights()[torch.tensor(groups) == group, 0].sum()) for group in (3, 8)]
        assert module.logged == {}  # no row has a sign to lose
    assert sums["none"] == pytest.approx([-0.06, -0.14], abs=1e-7)
    assert sums["group"] == pytest.approx([0.0, 0.0], abs=1e-8)


def test_sign_flips_are_those_of_the_whole_shift_over_scored_rows_with_a_sign():
    rollout = rollout_of([1.0] * 6, [1, 1, 1, 1, 0, 1], [0.05, 0.5, 0.0, -0.4, 0.05, -0.1])
    part, module = EntropyRegularizer(gamma=0.1), FakeModule()
    part.on_before_loss(fake_trainer(), module, rollout)
    assert "gtpo/sign_flip_frac" not in module.logged  # another part may still add to the shift
    rollout.advantage_shift[5] += 0.3
    part.on_after_loss(fake_trainer(), module, rollout, {})
    # of rows 0, 1, 3, 5: 0.05 - 0.1 < 0 and -0.1 - 0.1 + 0.3 > 0
    assert module.logged == {"gtpo/sign_flip_frac": 0.5}


def test_a_sum_of_zero_has_lost_its_sign():
    rollout, module = rollout_of([1.0, 1.0], advantages=[0.5, -0.5]), FakeModule()
    part = EntropyRegularizer(gamma=0.5)
    part.on_before_loss(fake_trainer(), module, rollout)
    part.on_after_loss(fake_trainer(), module, rollout, {})
    assert module.logged == {"gtpo/sign_flip_frac": 0.5}


def test_differentiable_adds_a_term_and_no_shift():
    rollout = rollout_of([[0.5, 1.5], [2.0], 0.0, [0.3]], [2, 1, 0, 1], [1.0, -1.0, 1.0, -1.0])
    rollout.entropies.requires_grad_()
    rollout.sequence_weights *= torch.tensor([1.0, 0.5, 1.0, 0.0])
    part, losses = EntropyRegularizer(gamma=0.2, differentiable=True), {"policy": torch.tensor(3.0)}
    part.on_before_loss(fake_trainer(), FakeModule(), rollout)
    part.on_after_loss(fake_trainer(), FakeModule(), rollout, losses)
    assert torch.equal(rollout.advantage_shift, torch.zeros(4))
    assert losses["policy"] == 3.0
    # a dropped row stays in the count, an empty one does not
    assert float(losses["entropy"].detach()) == pytest.approx(0.2 * (1.0 * 1.0 + 0.5 * 2.0 + 0.0 * 0.3) / 3, abs=1e-7)
    losses["entropy"].backward()
    expected = [[0.2 / 3 / 2, 0.2 / 3 / 2], [0.2 * 0.5 / 3, 0], [0, 0], [0, 0]]
    assert torch.allclose(rollout.entropies.grad, torch.tensor(expected), atol=1e-8, rtol=0)


def test_differentiable_adds_to_a_term_that_is_there():
    losses = {}
    for gamma in (0.1, 0.3):
        rollout = rollout_of([1.0, 2.0])
        rollout.entropies.requires_grad_()
        EntropyRegularizer(gamma, differentiable=True).on_after_loss(fake_trainer(), FakeModule(), rollout, losses)
    assert float(losses["entropy"].detach()) == pytest.approx(0.4 * 1.5, abs=1e-7)


@pytest.mark.parametrize("sizes", [[6], [1, 5], [3, 3], [1, 1, 1, 1, 1, 1]])
def test_differentiable_terms_of_micro_batches_add_up_by_the_denominator(sizes):
    entropies, lengths = [0.1, 0.7, 0.4, 0.9, 0.2, 1.1], [3, 1, 0, 2, 5, 4]
    total, start = 0.0, 0
    for size in sizes:
        part = slice(start, start + size)
        rollout = rollout_of(entropies[part], lengths[part], denominator=5.0)
        rollout.entropies.requires_grad_()
        losses = {}
        EntropyRegularizer(0.5, differentiable=True).on_after_loss(fake_trainer(), FakeModule(), rollout, losses)
        total += float(losses["entropy"].detach())
        start += size
    assert total == pytest.approx(0.5 * (0.1 + 0.7 + 0.9 + 0.2 + 1.1) / 5, abs=1e-7)


@pytest.mark.parametrize("denominator", [None, 0.0, 4.0])
def test_a_06_differentiable_without_completions_is_zero_and_attached(denominator):
    rollout = rollout_of([0.5, 0.5], [0, 0], denominator=denominator)
    rollout.entropies.requires_grad_()
    losses = {}
    EntropyRegularizer(differentiable=True).on_after_loss(fake_trainer(), FakeModule(), rollout, losses)
    assert float(losses["entropy"].detach()) == 0.0
    losses["entropy"].backward()
    assert torch.equal(rollout.entropies.grad, torch.zeros(2, 1))


def test_a_06_shift_without_completions_is_zero_for_both_baselines():
    for baseline in ("none", "group"):
        rollout, module = rollout_of([0.5, 0.5], [0, 0], [1.0, -1.0]), FakeModule()
        part = EntropyRegularizer(0.1, baseline)
        part.on_before_loss(fake_trainer(), module, rollout)
        part.on_after_loss(fake_trainer(), module, rollout, {})
        assert torch.equal(rollout.advantage_shift, torch.zeros(2))
        assert module.logged == {}


def test_differentiable_on_detached_entropies_says_once_that_it_has_no_effect():
    part = EntropyRegularizer(differentiable=True)
    call = (fake_trainer(), FakeModule(), rollout_of([1.0]), {})
    (text,) = warnings_of(lambda: [part.on_after_loss(*call) for _ in range(2)])
    assert "no gradient" in text
    with torch.no_grad():
        assert warnings_of(lambda: EntropyRegularizer(differentiable=True).on_after_loss(*call)) == []


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.0), (1000, 1.0)])
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_warm_up_grows_linearly_with_the_optimizer_steps(step, share, baseline):
    rollout, module = random_rollout(0), FakeModule()
    part = EntropyRegularizer(0.3, baseline, warmup_steps=4)
    part.on_before_loss(fake_trainer(step), module, rollout)
    expected = torch.tensor(shifts_by_loops(rollout, 0.3 * share, baseline))
    assert torch.allclose(rollout.advantage_shift, expected, atol=1e-6, rtol=0)
    assert module.logged["gtpo/gamma"] == pytest.approx(0.3 * share, abs=1e-12)


def test_warm_up_of_the_differentiable_term():
    for step, share in ((0, 0.0), (1, 0.1), (10, 1.0), (11, 1.0)):
        rollout, module, losses = rollout_of([1.0, 2.0]), FakeModule(), {}
        rollout.entropies.requires_grad_()
        part = EntropyRegularizer(0.2, differentiable=True, warmup_steps=10)
        part.on_before_loss(fake_trainer(step), module, rollout)
        part.on_after_loss(fake_trainer(step), module, rollout, losses)
        assert float(losses["entropy"].detach()) == pytest.approx(0.2 * share * 1.5, abs=1e-7)
        losses["entropy"].backward()
        assert rollout.entropies.grad[:, 0].tolist() == pytest.approx([0.2 * share / 4] * 2, abs=1e-8)
        assert module.logged["gtpo/gamma"] == pytest.approx(0.2 * share, abs=1e-12)


def test_after_the_warm_up_and_without_one_the_shift_is_bit_identical():
    shifts = []
    for part, step in ((EntropyRegularizer(0.1), 0), (EntropyRegularizer(0.1, warmup_steps=7), 7)):
        rollout, module = random_rollout(1), FakeModule()
        part.on_before_loss(fake_trainer(step), module, rollout)
        shifts.append(rollout.advantage_shift)
    assert torch.equal(*shifts)
    module = FakeModule()
    EntropyRegularizer(0.1).on_before_loss(fake_trainer(), module, random_rollout(1))
    assert module.logged == {}


def test_setup_asks_for_entropies_with_gradient_only_where_they_are_needed():
    asked, plain = FakeModule(), FakeModule()
    EntropyRegularizer(differentiable=True).setup(fake_trainer(), asked, "fit")
    EntropyRegularizer().setup(fake_trainer(), plain, "fit")
    assert asked.entropy_grad is True
    assert not hasattr(plain, "entropy_grad")


def test_no_losses_are_added_in_the_papers_form():
    losses = {}
    part = EntropyRegularizer()
    call = (fake_trainer(), FakeModule(), random_rollout(0), losses)
    assert warnings_of(lambda: part.on_after_loss(*call)) == []
    assert losses == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"gamma": -0.1}, "gamma: -0.1"),
        ({"gamma": float("nan")}, "gamma: nan"),
        ({"gamma": float("inf")}, "gamma: inf"),
        ({"gamma": "0.1"}, "gamma: '0.1'"),
        ({"baseline": "batch"}, "baseline: 'batch'.*'none', 'group'"),
        ({"baseline": "group", "differentiable": True}, "baseline: 'group'.*differentiable"),
        ({"warmup_steps": -1}, "warmup_steps: -1; valid: an integer >= 0"),
        ({"warmup_steps": 0.1}, "warmup_steps: 0.1"),
        ({"warmup_steps": True}, "warmup_steps: True"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        EntropyRegularizer(**arguments)
