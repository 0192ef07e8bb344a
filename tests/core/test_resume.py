"""A run that was stopped and resumed ends where an uninterrupted one does, bit for bit."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from gtpo_lightning import GTPOModule
from gtpo_lightning.callbacks import EntropyFilter
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.schedulers import WarmupCosine
from tests.helpers.fakes import warnings_of
from tests.helpers.training import Sums, adam, all_parts, flat, make_module, make_trainer


class Record(RLCallback):
    def __init__(self):
        self.seen = []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        ids = [problem.id for problem in rollout.prompts.problems]
        self.seen.append((ids, rollout.completion_ids.tolist()))


def schedule(optimizer):
    return WarmupCosine(optimizer, warmup=2, total_steps=8)


def run(folder, steps, ckpt_path=None, save_at=(), updates=1, accumulate=1, train=10):
    """Trains to `steps` and returns what can differ: weights, optimizer, learning rate, initial entropy, rollouts."""
    module = make_module(optimizer=adam, lr_scheduler=schedule, updates_per_rollout=updates, epsilon=0.2)
    parts = all_parts()
    parts[1] = EntropyFilter(threshold=2.7)  # measures its start
    record = Record()
    callbacks = [*parts, record]
    if save_at:
        callbacks.append(
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1, save_last=False)
        )
    trainer = make_trainer(
        folder,
        callbacks,
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=bool(save_at),
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, Sums(train=train, batch_size=2), ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "weights": flat(module),
        "moments": torch.cat([state["exp_avg_sq"].reshape(-1) for state in optimizer["state"].values()]),
        "lr": optimizer["param_groups"][0]["lr"],
        "filter": parts[1].state_dict(),
        "tokens": module.monitor.num_tokens,
        "rollouts": record.seen,
    }


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (2, {}),  # in mid-epoch
        (5, {"train": 10}),  # at an epoch's end
        (3, {"updates": 2}),  # E-05: between two updates of one rollout
        (1, {"accumulate": 2, "train": 8}),
        (3, {"updates": 2, "accumulate": 2, "train": 8}),
    ],
)
def test_e_08_stopped_and_resumed_equals_uninterrupted(tmp_path, stop, settings):
    total = stop + 2
    whole = run(tmp_path / "whole", total, **settings)
    run(tmp_path / "first", stop, save_at=stop, **settings)
    (path,) = (tmp_path / "first").glob(f"step={stop}.ckpt")
    second = run(tmp_path / "second", total, ckpt_path=str(path), **settings)
    assert second["rollouts"] == whole["rollouts"][-len(second["rollouts"]) :]
    assert len(second["rollouts"]) == 2 * settings.get("accumulate", 1)
    for name in ("weights", "moments"):
        assert torch.equal(second[name], whole[name]), name
    for name in ("lr", "filter", "tokens"):
        assert second[name] == whole[name], name


def test_load_from_checkpoint_gives_the_policy_back(tmp_path):
    module = make_module(optimizer=adam)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(module, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = GTPOModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(flat(again), flat(module))
    assert again.hparams.group_size == 4


def test_weights_start_from_another_runs_policy(tmp_path):
    module = make_module(optimizer=adam)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(module, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    fresh = GTPOModule("tiny", weights=str(tmp_path / "x.ckpt"))
    fresh.configure_model()
    assert torch.equal(flat(fresh), flat(module))


def test_a_checkpoint_does_not_need_the_weights_its_run_started_from(tmp_path):
    module = make_module(optimizer=adam)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "start.ckpt")
    second = GTPOModule("tiny", 4, 6, weights=str(tmp_path / "start.ckpt"), prompt_template="{question}")
    trainer = make_trainer(tmp_path)
    trainer.fit(second, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    (tmp_path / "start.ckpt").unlink()
    again = GTPOModule.load_from_checkpoint(tmp_path / "second.ckpt", weights_only=True)
    assert torch.equal(flat(again), flat(second))


def resumed(folder, first, then, scheduler=None, then_scheduler=None):
    """One step with an optimizer, then a resumed second step with another; the second trainer."""
    module = make_module(optimizer=first, lr_scheduler=scheduler)
    trainer = make_trainer(folder, max_epochs=-1)
    trainer.fit(module, Sums(batch_size=2))
    trainer.save_checkpoint(folder / "x.ckpt")
    module = make_module(optimizer=then, lr_scheduler=then_scheduler)
    trainer = make_trainer(folder, max_steps=2, max_epochs=-1)
    trainer.fit(module, Sums(batch_size=2), ckpt_path=str(folder / "x.ckpt"))
    return trainer


def test_l_01_the_optimizers_own_settings_win_over_the_restored_ones(tmp_path):
    def build(lr, weight_decay):
        return lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)

    (optimizer,) = resumed(tmp_path, build(1e-3, 0.1), build(0.5, 0.2)).optimizers
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    assert all(state["step"] == 2 for state in optimizer.state.values())  # the moments were restored


def test_l_01_a_scheduled_learning_rate_is_rebased(tmp_path):
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def build(lr):
        return lambda params: torch.optim.SGD(params, lr=lr)

    trainer = resumed(tmp_path, build(0.1), build(0.8), halve, halve)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2)  # 0.8, halved twice
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.8]


def test_l_06b_another_optimizer_on_resume_starts_afresh_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="made with Adam, this run uses SGD"):
        trainer = resumed(tmp_path, adam, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_l_06b_another_optimizer_keeps_the_place_in_the_schedule(tmp_path):
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    with pytest.warns(UserWarning, match="starts afresh"):
        trainer = resumed(tmp_path, adam, lambda params: torch.optim.SGD(params, lr=0.8), halve, halve)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2)
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.8]


def test_settings_that_a_schedule_moves_are_left_to_it(tmp_path):
    def build(params):
        return torch.optim.Adam(params, lr=0.1, betas=(0.9, 0.99))

    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)

    trainer = resumed(tmp_path, build, build, one_cycle, one_cycle)
    whole = make_module(optimizer=build, lr_scheduler=one_cycle)
    make_trainer(tmp_path, max_steps=2, max_epochs=-1).fit(whole, Sums(batch_size=2))
    assert torch.equal(flat(trainer.lightning_module), flat(whole))


def test_e_03_a_loader_that_cannot_go_on_is_said(tmp_path):
    problems = Sums().make_problems("train")
    loader = torch.utils.data.DataLoader(problems, batch_size=2, collate_fn=list)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(make_module(), loader)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    for data, said in ((loader, 1), (Sums(batch_size=2, shuffle=False), 0)):
        again = make_trainer(tmp_path, max_steps=3, max_epochs=-1)
        texts = warnings_of(
            lambda again=again, data=data: again.fit(make_module(), data, ckpt_path=str(tmp_path / "x.ckpt"))
        )
        assert sum("has no state_dict" in text for text in texts) == said
