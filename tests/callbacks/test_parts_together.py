"""What holds for the three parts together: they commute, they leave each other alone, YAML builds them."""

from itertools import permutations

import pytest
import torch
from jsonargparse import ArgumentParser

from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer
from tests.helpers.fakes import FakeModule, fake_trainer, random_rollout

PARTS = {
    "conflict_masking": lambda: ConflictMasking("position", 1.9, 0.3),
    "entropy_filter": lambda: EntropyFilter(initial_entropy=0.2),
    "entropy_regularizer": lambda: EntropyRegularizer(0.13, "group"),
    "differentiable": lambda: EntropyRegularizer(0.07, differentiable=True),
}


# every option beyond the paper; one form of the regularizer at a time, since each logs its own γ
OPTIONS = {
    "conflict_masking": lambda: ConflictMasking(shift=1),
    "entropy_filter": lambda: EntropyFilter(adaptive=0.75, keep_at_least=0.25, window=2),
    "entropy_regularizer": lambda: EntropyRegularizer(0.13, "group", warmup_steps=5),
}
DIFFERENTIABLE = {
    **OPTIONS,
    "entropy_regularizer": lambda: EntropyRegularizer(0.1, differentiable=True, warmup_steps=5),
}


def run(names, seed=3, update=lambda rollout: None, parts=PARTS, steps=1):
    """The last of the steps, each with a rollout of its own."""
    chosen = [parts[name]() for name in names]
    for step in range(steps):
        rollout, module, losses = random_rollout(seed + step), FakeModule(), {}
        rollout.entropies.requires_grad_()
        update(rollout)
        for part in chosen:
            part.on_before_loss(fake_trainer(step), module, rollout)
        for part in chosen:
            part.on_after_loss(fake_trainer(step), module, rollout, losses)
    return rollout, module.logged, losses


@pytest.mark.parametrize("order", list(permutations(PARTS)))
def test_every_order_gives_bit_identical_slots_logs_and_terms(order):
    rollout, logged, losses = run(PARTS)
    other_rollout, other_logged, other_losses = run(order)
    for slot in ("token_weights", "sequence_weights", "advantage_shift"):
        assert torch.equal(getattr(rollout, slot), getattr(other_rollout, slot))
    assert logged == other_logged
    assert torch.equal(losses["entropy"], other_losses["entropy"])
    assert losses.keys() == other_losses.keys() == {"entropy"}


@pytest.mark.parametrize("parts", [OPTIONS, DIFFERENTIABLE], ids=["shift", "differentiable"])
@pytest.mark.parametrize("order", list(permutations(OPTIONS)))
def test_every_order_is_bit_identical_with_the_options_on(order, parts):
    rollout, logged, losses = run(OPTIONS, parts=parts, steps=4)
    other_rollout, other_logged, other_losses = run(order, parts=parts, steps=4)
    for slot in ("token_weights", "sequence_weights", "advantage_shift"):
        assert torch.equal(getattr(rollout, slot), getattr(other_rollout, slot))
    assert logged == other_logged
    assert losses.keys() == other_losses.keys()
    assert all(torch.equal(losses[name], other_losses[name]) for name in losses)
    assert {"gtpo/entropy_threshold", "gtpo/gamma"} <= logged.keys()
    assert len(rollout.token_weights.unique()) == 3
    assert set(rollout.sequence_weights.tolist()) == {0.0, 1.0}
    assert (rollout.advantage_shift != 0).any() == (parts is OPTIONS)
    assert bool(losses) == (parts is DIFFERENTIABLE)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_part_with_its_options_changes_its_own_slot_only(name):
    rollout, _, losses = run([name], parts=OPTIONS, steps=2)
    plain, _, _ = run([], parts=OPTIONS, steps=2)
    slots = ("token_weights", "sequence_weights", "advantage_shift")
    own = dict(zip(OPTIONS, slots, strict=True))[name]
    for slot in slots:
        assert torch.equal(getattr(rollout, slot), getattr(plain, slot)) == (slot != own)
    assert losses == {}


def test_without_options_every_part_is_that_of_the_paper_bit_for_bit():
    off = {
        "conflict_masking": lambda: ConflictMasking("edges", 2.0, 0.0, 0),
        "entropy_filter": lambda: EntropyFilter(initial_entropy=0.2, adaptive=None, window=3),
        "entropy_regularizer": lambda: EntropyRegularizer(0.1, "none", False, 0),
    }
    paper = {
        "conflict_masking": ConflictMasking,
        "entropy_filter": lambda: EntropyFilter(initial_entropy=0.2),
        "entropy_regularizer": EntropyRegularizer,
    }
    (rollout, logged, _), (expected, expected_logged, _) = (run(off, parts=p, steps=3) for p in (off, paper))
    for slot in ("token_weights", "sequence_weights", "advantage_shift"):
        assert torch.equal(getattr(rollout, slot), getattr(expected, slot))
    assert logged == expected_logged
    assert not {"gtpo/entropy_threshold", "gtpo/gamma"} & logged.keys()


def test_the_orders_above_compare_something():
    rollout, logged, losses = run(PARTS)
    assert len(rollout.token_weights.unique()) == 3
    assert set(rollout.sequence_weights.tolist()) == {0.0, 1.0}
    assert (rollout.advantage_shift != 0).any()
    assert logged["gtpo/sign_flip_frac"] > 0
    assert losses["entropy"] > 0


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_changes_its_own_slot_only(name):
    rollout, _, _ = run([name])
    plain = random_rollout(3)
    slots = {"conflict_masking": "token_weights", "entropy_filter": "sequence_weights"}
    slots["entropy_regularizer"] = "advantage_shift"
    for slot in ("token_weights", "sequence_weights", "advantage_shift"):
        assert torch.equal(getattr(rollout, slot), getattr(plain, slot)) == (slots.get(name) != slot)
    for read in ("completion_ids", "completion_mask", "advantages", "entropies", "logprobs", "group_ids"):
        assert torch.equal(getattr(rollout, read), getattr(plain, read))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_other_dtypes(dtype, mask_dtype):
    def convert(rollout):
        rollout.completion_mask = rollout.completion_mask.to(mask_dtype)
        rollout.advantages = rollout.advantages.to(dtype)
        rollout.entropies = rollout.entropies.detach().to(dtype).requires_grad_()

    rollout, _, losses = run(PARTS, update=convert)
    expected, _, expected_losses = run(PARTS)
    tolerance = 1e-6 if dtype is torch.float64 else 5e-3
    assert torch.equal(rollout.token_weights, expected.token_weights)
    assert torch.allclose(rollout.advantage_shift, expected.advantage_shift, atol=tolerance, rtol=0)
    assert float(losses["entropy"].detach()) == pytest.approx(float(expected_losses["entropy"].detach()), abs=tolerance)
    assert rollout.weights().isfinite().all()


def test_everything_dropped_has_weights_of_exactly_zero():
    def raise_entropies(rollout):
        rollout.entropies = (rollout.entropies.detach() + 1.0).requires_grad_()

    with pytest.warns(UserWarning, match="every completion"):
        rollout, logged, losses = run(PARTS, update=raise_entropies)
    scored = rollout.completion_mask.bool()
    loss = -(rollout.weights() * rollout.logprobs.requires_grad_())[scored].sum() + losses["entropy"]
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(rollout.logprobs.grad, torch.zeros_like(rollout.logprobs))
    assert torch.equal(rollout.entropies.grad, torch.zeros_like(rollout.entropies))
    assert logged["gtpo/entropy_filtered_frac"] == 1.0


@pytest.mark.parametrize(
    ("cls", "given", "refused"),
    [
        (ConflictMasking, ["--part.scope=suffix", "--part.positive=3"], "--part.scope=middle"),
        (ConflictMasking, ["--part.shift=4"], "--part.shift=0.5"),
        (EntropyFilter, ["--part.adaptive=0.9", "--part.window=4"], "--part.window=often"),
        (EntropyFilter, ["--part.adaptive=null"], "--part.adaptive=median"),
        (EntropyRegularizer, ["--part.warmup_steps=100"], "--part.warmup_steps=0.1"),
        (EntropyFilter, ["--part.initial_entropy=null", "--part.threshold=1e-1"], "--part.initial_entropy=high"),
        (EntropyRegularizer, ["--part.baseline=group", "--part.gamma=1e-2"], "--part.baseline=batch"),
    ],
)
def test_parts_build_from_the_command_line_and_their_help_is_the_docstring(cls, given, refused):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "part")
    part = parser.instantiate_classes(parser.parse_args(given)).part
    assert isinstance(part, cls)
    first = given[0].split(".", 1)[1].split("=")
    assert str(getattr(part, first[0])) == first[1].replace("null", "None")
    text = parser.format_help()
    assert "Default " in text
    with pytest.raises(Exception, match=refused.split(".")[1].split("=")[0]):
        parser.parse_args([refused])
