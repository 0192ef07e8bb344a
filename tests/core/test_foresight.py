"""Gradients that are foreseen: those of the plain path in every setting, and made in the forward pass."""

import pytest
import torch

from gtpo_lightning import foresight
from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer, KLPenalty
from gtpo_lightning.functional import foreseen as functional
from gtpo_lightning.hooks import RLCallback
from tests.helpers.training import Sums, all_parts, flat, make_module, make_trainer

CASES = {
    "one": {},
    "micro": {"micro_batch_size": 3},
    "token": {"aggregation": "token"},
    "scaled": {"advantage_scale": "group", "temperature": 0.8},
    "truncated": {"mask_truncated": True, "max_completion_length": 40},
    "updates": {"updates_per_rollout": 2, "epsilon": 0.2},
    "lora": {"lora": {"rank": 4}},
    "lora_head": {"lora": {"rank": 4, "targets": ["q_proj", "lm_head"]}},
    "layers": {"gradient_checkpointing": True},
}
TRAINERS = {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}, "clipped": {"gradient_clip_val": 0.1}}


class Counted(functional.Tally):
    """A tally of all heads of a run."""

    def watch(self, monkeypatch):
        apply = functional._Foreseen.apply
        monkeypatch.setattr(functional._Foreseen, "apply", lambda *args: apply(*args[:-1], self))
        return self


def lost(folder, callbacks, trainer, settings, steps=2):
    module = make_module(**settings)
    before = flat(module)
    fit = make_trainer(folder, callbacks, max_steps=steps, max_epochs=-1, **trainer)
    fit.fit(module, Sums(batch_size=4, shuffle=False))
    return before - flat(module)


def same(got, plain):
    """Equal to 1e-5 of what was lost, or to two last places of the weights, which lie between 1 and 2."""
    return bool((got - plain).abs().max() <= max(1e-5 * float(plain.abs().max()), 2.5e-7))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_a_foreseen_run_trains_as_the_plain_one(case, trainer, tmp_path, monkeypatch):
    tally = Counted().watch(monkeypatch)
    got = lost(tmp_path, all_parts(), TRAINERS[trainer], CASES[case])
    assert tally.rows > 0
    assert tally.missed <= 0.3 * tally.rows  # where A and γ⟨H⟩ nearly cancel, rounding counts
    monkeypatch.setattr("gtpo_lightning.module.foresee", lambda *_: None)
    plain = lost(tmp_path, all_parts(), TRAINERS[trainer], CASES[case])
    assert plain.abs().max() > 1e-4
    assert same(got, plain)


class Doubles(RLCallback):
    """Changes the weights of odd tokens and foresees something else."""

    def foresee(self, trainer, pl_module, rollout):
        rollout.token_weights *= 3

    def on_before_loss(self, trainer, pl_module, rollout):
        rollout.token_weights[:, ::2] *= 2


def test_a_wrong_guess_changes_no_number(tmp_path, monkeypatch):
    tally = Counted().watch(monkeypatch)
    got = lost(tmp_path, [*all_parts(), Doubles()], {}, {})
    assert tally.missed > 0
    monkeypatch.setattr("gtpo_lightning.module.foresee", lambda *_: None)
    plain = lost(tmp_path, [*all_parts(), Doubles()], {}, {})
    assert same(got, plain)


class Silent(RLCallback):
    def on_after_loss(self, trainer, pl_module, rollout, losses):
        """Reads; no one can tell."""


@pytest.mark.parametrize(
    ("callbacks", "settings", "trainer"),
    [
        ([KLPenalty(beta=0.1)], {}, {}),
        ([Silent()], {}, {}),
        ([EntropyRegularizer(differentiable=True)], {}, {}),
        ([], {"loss_temperature": 0.5}, {}),
        ([], {"dtype": "bfloat16"}, {}),
        ([], {}, {"precision": "bf16-mixed"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_foreseen_goes_the_plain_way(callbacks, settings, trainer, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("gtpo_lightning.module.foresee", lambda *args: seen.append(foresight.foresee(*args)))
    lost(tmp_path, [ConflictMasking(), *callbacks], trainer, settings, steps=1)
    assert seen == [None]


def test_foreseeing_logs_nothing_and_leaves_the_rollout_and_the_parts_alone(tmp_path, monkeypatch):
    parts = [ConflictMasking(), EntropyFilter(adaptive=0.5), EntropyRegularizer(warmup_steps=3)]
    states = []

    def watched(module, rollout):
        before = [part.state_dict() for part in parts], set(module.trainer.logged_metrics)
        weights = rollout.token_weights.clone()
        guess = foresight.foresee(module, rollout)
        states.append(before == ([part.state_dict() for part in parts], set(module.trainer.logged_metrics)))
        assert torch.equal(rollout.token_weights, weights)
        assert guess.shape == rollout.completion_ids.shape
        assert not guess[~rollout.completion_mask].any()
        return guess

    monkeypatch.setattr("gtpo_lightning.module.foresee", watched)
    lost(tmp_path, parts, {}, {}, steps=3)
    assert states == [True] * 3
