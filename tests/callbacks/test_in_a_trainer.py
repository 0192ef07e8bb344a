"""The parts in Lightning's own trainer: hooks, logging, saving, resuming."""

import json

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from gtpo_lightning.callbacks import CompletionLog, ConflictMasking, EntropyFilter, EntropyRegularizer
from gtpo_lightning.hooks import call_rl_hooks
from gtpo_lightning.rollout import Rollout


class Bandit(pl.LightningModule):
    """Three tokens drawn from one table of logits, without any sampling: rows are fixed, their entropies learn."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]))
        self.entropy_grad = False
        self.scales = [1.0]
        self.weights = []

    def training_step(self, batch, batch_idx):
        ids = torch.tensor([[0, 1, 2], [0, 2, 2], [0, 1, 1], [1, 1, 2]])
        logprobs = self.logits.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1).expand(4, 3) * torch.tensor([0.2, 0.6, 1.0, 1.4])[:, None]
        entropies = entropies * self.scales[batch_idx % len(self.scales)]
        rollout = Rollout(None, torch.tensor([0, 0, 1, 1]), ids, torch.ones(4, 3))
        rollout.advantages = torch.tensor([0.5, -0.5, 0.05, -0.05])
        rollout.logprobs = logprobs[torch.arange(3), ids]
        rollout.entropies = entropies if self.entropy_grad else entropies.detach()
        rollout.texts = ["a", "b", "c", "d"]
        call_rl_hooks(self.trainer, "on_before_loss", rollout)
        ratio = (rollout.logprobs - rollout.logprobs.detach()).exp()
        losses = {"policy": -(rollout.weights() * ratio).mean(dim=1).mean()}
        call_rl_hooks(self.trainer, "on_after_loss", rollout, losses)
        self.weights.append(rollout.weights().detach())
        return sum(losses.values())

    def train_dataloader(self):
        return DataLoader(range(8), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(folder, steps, parts, ckpt_path=None, scales=(1.0,), **more):
    module = Bandit()
    module.scales = scales
    trainer = pl.Trainer(
        default_root_dir=folder, max_steps=steps, callbacks=parts, logger=False, accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **more,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, module


def parts(**regularizer):
    return [ConflictMasking(), EntropyFilter(), EntropyRegularizer(**regularizer), CompletionLog(2, num_samples=1)]


@pytest.mark.parametrize("regularizer", [{"gamma": 0.3}, {"gamma": 0.3, "differentiable": True}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_e_08_two_steps_resume_two_steps_equals_four(tmp_path, regularizer):
    _, whole = fit(tmp_path / "whole", 4, parts(**regularizer))
    trainer, _ = fit(tmp_path / "halves", 2, parts(**regularizer))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = parts(**regularizer)
    _, module = fit(tmp_path / "halves", 4, resumed, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(whole.logits, module.logits)
    assert not torch.equal(whole.logits, Bandit().logits)
    assert resumed[1].initial_entropy == pytest.approx(0.8 * float(entropy(Bandit().logits).mean()), abs=1e-6)
    written = [(tmp_path / name / "completions.jsonl").read_text() for name in ("whole", "halves")]
    assert written[0] == written[1]
    assert [json.loads(line)["step"] for line in written[0].splitlines()] == [0, 2]


def optional_parts():
    delta = EntropyFilter(adaptive=0.75, window=2)
    return [ConflictMasking(shift=1), delta, EntropyRegularizer(0.3, warmup_steps=3)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_e_08_with_the_options_on_resumed_equals_uninterrupted(tmp_path, stop, accumulate):
    settings = {"accumulate_grad_batches": accumulate, "scales": [1.0, 0.4, 1.3, 0.7]}
    whole_parts, resumed = optional_parts(), optional_parts()
    whole_trainer, whole = fit(tmp_path, 4, whole_parts, **settings)
    trainer, _ = fit(tmp_path, stop, optional_parts(), **settings)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed_trainer, module = fit(tmp_path, 4, resumed, ckpt_path=tmp_path / "stop.ckpt", **settings)
    assert torch.equal(whole.logits, module.logits)
    assert whole_parts[1].state_dict() == resumed[1].state_dict()
    for name in ("gtpo/gamma", "gtpo/entropy_threshold"):
        assert whole_trainer.callback_metrics[name] == resumed_trainer.callback_metrics[name]
    assert float(whole_trainer.callback_metrics["gtpo/gamma"]) == pytest.approx(0.3, abs=1e-7)  # of step 3
    assert any((weights == 0).all(1).any() for weights in whole.weights)  # a row was dropped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_warm_up_counts_optimizer_steps_not_micro_batches(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(round(float(trainer.callback_metrics["gtpo/gamma"]), 6))

    fit(tmp_path, 3, [EntropyRegularizer(0.3, warmup_steps=2), Watch()], accumulate_grad_batches=2)
    assert seen == [0.0, 0.0, 0.15, 0.15, 0.3, 0.3]


def entropy(logits):
    return torch.distributions.Categorical(logits=logits.detach()).entropy()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_accumulated_micro_batches_of_the_first_step_share_the_measurement(tmp_path):
    part = EntropyFilter()
    fit(tmp_path, 2, [part], scales=[0.5, 1.2, 7.0, 7.0], accumulate_grad_batches=2)
    expected = 0.8 * float(entropy(Bandit().logits).mean()) * (0.5 + 1.2) / 2
    assert part.initial_entropy == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_names_are_logged_from_within_the_training_step(tmp_path):
    trainer, _ = fit(tmp_path, 1, parts())
    assert {name for name in trainer.callback_metrics if name.startswith("gtpo/")} == {
        "gtpo/conflict_frac",
        "gtpo/entropy_filtered_frac",
        "gtpo/entropy_init",
        "gtpo/seq_entropy_mean",
        "gtpo/seq_entropy_max",
        "gtpo/sign_flip_frac",
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_order_trains_to_the_same_weights(tmp_path):
    results = [fit(tmp_path, 3, order)[1] for order in (parts(gamma=0.3), parts(gamma=0.3)[::-1])]
    assert torch.equal(results[0].logits, results[1].logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_differentiable_term_asks_the_module_for_the_gradient(tmp_path):
    _, module = fit(tmp_path, 1, [EntropyRegularizer(0.3, differentiable=True)])
    assert module.entropy_grad is True
    _, plain = fit(tmp_path, 1, [])
    assert not torch.equal(module.logits, plain.logits)
