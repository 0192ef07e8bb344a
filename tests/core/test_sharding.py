"""FSDP2 on two processes: the same rollouts, gradients and weights as one process, whatever each of them has to do."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor

from gtpo_lightning import GTPOModule
from gtpo_lightning.callbacks import ConflictMasking, EntropyCollapse, EntropyRegularizer, KLPenalty
from gtpo_lightning.hooks import RLCallback
from tests.callbacks.test_entropy_collapse import Wreck
from tests.helpers.training import Sums, adam, all_parts, make_module, make_trainer, spawn, vowels


def fsdp2(**kwargs):
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False, **kwargs
    )


def whole(module):
    values = [p.detach() for p in module.policy.parameters()]
    return torch.cat([(v.full_tensor() if isinstance(v, DTensor) else v).reshape(-1) for v in values])


class Sampled(KLPenalty):
    """Keeps each step's completions by problem."""

    def __init__(self):
        super().__init__(beta=0.1)
        self.seen = []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        super().on_after_loss(trainer, pl_module, rollout, losses)
        keys = [rollout.prompts.problems[i].id for i in rollout.group_ids.tolist()]
        rows = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)]
        self.seen.append(list(zip(keys, rows, strict=True)))


def train(folder, ranks, *, steps=1, batch_size=4, data=None, module=None, trainer=None, **settings):
    """What the weights lost, with SGD at learning rate 1 the gradients, what was sampled, and what was logged."""
    module = module or make_module(**settings)
    start = whole(module)
    sampled = Sampled()
    flags = {"devices": 2, "strategy": fsdp2()} if ranks == 2 else {}
    fit = make_trainer(folder, [sampled, *all_parts()], max_steps=steps, gradient_clip_val=0.5,
                       **{"max_epochs": -1, **flags, **(trainer or {})})  # fmt: skip
    fit.fit(module, data or Sums(batch_size=batch_size // ranks, shuffle=False))
    return start - whole(module), sampled.seen, {name: float(value) for name, value in fit.callback_metrics.items()}


def _two(rank, folder, cases):
    torch.save([train(folder, 2, **case) for case in cases], f"{folder}/{rank}.pt")


CASES = [{}, {"micro_batch_size": 3}, {"lora": {"rank": 4}}]


def _fsdp2(rank, folder):
    _two(rank, folder, CASES)


def test_two_processes_that_share_the_weights_train_as_one(tmp_path):
    spawn(_fsdp2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for case, mine, theirs in zip(CASES, first, second, strict=True):
        lost, sampled, logged = train(tmp_path, 1, **case)
        assert torch.equal(mine[0], theirs[0])
        assert [a + b for a, b in zip(mine[1], theirs[1], strict=True)] == sampled
        assert (mine[0] - lost).abs().max() < 1e-5
        assert lost.abs().max() > 1e-2
        for name in ("train/grad_norm", "train/kl", "train/reward", "train/entropy", "gtpo/conflict_frac"):
            assert mine[2][name] == pytest.approx(logged[name], abs=1e-4), name


def _uneven(rank, folder):
    # 5 problems on 2 ranks of 2: the last step of an epoch has one problem, so one rank has an empty list.
    data = Sums(train=5, val=3, batch_size=2, val_batch_size=2, shuffle=False)
    _, sampled, logged = train(folder, 2, steps=4, data=data, trainer={"limit_val_batches": 1.0, "max_epochs": 2})
    torch.save((sampled, logged), f"{folder}/{rank}.pt")


def test_e_13_a_process_without_work_stops_no_other_in_training_or_validation(tmp_path):
    spawn(_uneven, tmp_path)
    (mine, logged), (theirs, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert sorted(map(len, (mine[1], theirs[1]))) == [0, 4]
    assert logged["train/grad_norm"] > 0


def _filtered(rank, folder):
    # Rank 0 has the first problem of each step, and its completions are all taken out of the loss.
    class Drop(KLPenalty):
        def on_before_loss(self, trainer, pl_module, rollout):
            super().on_before_loss(trainer, pl_module, rollout)
            if rank == 0:
                rollout.completion_mask = rollout.completion_mask & False

    module = make_module()
    start = whole(module)
    data = Sums(batch_size=2, shuffle=False)
    make_trainer(folder, [Drop()], max_steps=2, devices=2, strategy=fsdp2()).fit(module, data)
    torch.save(start - whole(module), f"{folder}/{rank}.pt")


def test_e_12_a_process_whose_completions_are_all_dropped_stops_no_other(tmp_path):
    spawn(_filtered, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    assert first.abs().max() > 1e-2


PARTS = [ConflictMasking(), EntropyRegularizer()]
SETTINGS = {"full": {}, "lora": {"lora": {"rank": 4}}}


def _resumed(rank, folder):
    data = Sums(train=16, batch_size=2, shuffle=False)
    for name, settings in SETTINGS.items():
        path, weights = f"{folder}/{name}.ckpt", []
        for steps, ckpt_path in ((4, None), (2, None), (4, path)):
            module = made(settings)
            trainer = make_trainer(folder, PARTS, max_steps=steps, max_epochs=-1, devices=2, strategy=fsdp2())
            trainer.fit(module, data, ckpt_path=ckpt_path)
            if steps == 2:
                trainer.save_checkpoint(path)
            weights.append(whole(module))
        torch.save(weights, f"{folder}/{name}{rank}.pt")


def made(settings):
    """As it comes from its arguments, since adapters are read on top of a base that is made again."""
    arguments = {"model": "tiny", "group_size": 4, "max_completion_length": 10, "prompt_template": "{question}"}
    return GTPOModule(**arguments, rewards={vowels: 1.0}, optimizer=adam, **settings)


def test_e_08_a_resumed_run_ends_where_the_unbroken_one_does_and_one_process_goes_on_from_it(tmp_path):
    spawn(_resumed, tmp_path)
    for name, settings in SETTINGS.items():
        unbroken, _, resumed = torch.load(tmp_path / f"{name}0.pt")
        assert torch.equal(resumed, unbroken), name
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert {"lora" in key for key in saved} == {name == "lora"}
        module = made(settings)
        trainer = make_trainer(tmp_path, PARTS, max_steps=4, max_epochs=-1)
        trainer.fit(module, Sums(train=16, batch_size=4, shuffle=False), ckpt_path=str(tmp_path / f"{name}.ckpt"))
        assert (whole(module) - unbroken).abs().max() < 1e-3, name  # Adam makes steps of the last digits


def sevens(completions):
    """A reward that is rare, so that groups are sampled again, and on one process more often than on the other."""
    return [float("7" in text) for text in completions]


RARE = {"rewards": {sevens: 1.0}, "resample_groups": 3}


def _sampled_again(rank, folder):
    _two(rank, folder, [RARE])


def test_groups_are_sampled_again_in_step(tmp_path):
    spawn(_sampled_again, tmp_path)
    ((_, first, _),), ((_, second, _),) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    _, one, logged = train(tmp_path, 1, **RARE)
    assert [a + b for a, b in zip(first, second, strict=True)] == one
    assert logged["gtpo/resampled_frac"] > 0


def _split_weights(rank, folder):
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2"):
        make_trainer(folder, devices=2, strategy=strategy).fit(make_module(), Sums(batch_size=2))
    torch.save(True, f"{folder}/{rank}.pt")


def test_weights_split_within_themselves_are_refused(tmp_path):
    spawn(_split_weights, tmp_path)
    assert torch.load(tmp_path / "0.pt")


class Weights(RLCallback):
    """The whole weights before and after each optimizer step, and the rollbacks so far."""

    def __init__(self, part):
        self.part, self.before, self.after, self.rollbacks = part, [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append(whole(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(whole(pl_module))
        self.rollbacks.append(self.part.rollbacks)


def _rolled_back(rank, folder):
    module = make_module(optimizer=adam)
    part = EntropyCollapse("rollback", window=3, patience=2, keep_every=3, max_rollbacks=1, signals=["entropy"])
    weights = Weights(part)
    trainer = make_trainer(folder, [Wreck(6), part, weights], max_steps=10, max_epochs=-1, devices=2, strategy=fsdp2())
    trainer.fit(module, Sums(train=64, batch_size=2))
    good = [i for i, before in enumerate(weights.before[:8]) if torch.equal(weights.after[8], before)]
    torch.save((weights.rollbacks, good), f"{folder}/{rank}.pt")


def test_a_rollback_restores_each_processes_share(tmp_path):
    spawn(_rolled_back, tmp_path)
    for rank in (0, 1):
        rollbacks, good = torch.load(tmp_path / f"{rank}.pt")
        assert rollbacks == [0] * 8 + [1] * 2
        assert good == [3]
