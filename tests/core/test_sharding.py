"""FSDP2 on two processes: the same rollouts, gradients and weights as one process, whatever each of them has to do."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor

from gtpo_lightning.callbacks import KLPenalty
from tests.helpers.training import Sums, adam, all_parts, make_module, make_trainer, spawn


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
    fit = make_trainer(folder, [sampled, *all_parts()], max_steps=steps, max_epochs=-1, gradient_clip_val=0.5, **flags,
                       **(trainer or {}))  # fmt: skip
    fit.fit(module, data or Sums(batch_size=batch_size // ranks, shuffle=False))
    return start - whole(module), sampled.seen, {name: float(value) for name, value in fit.callback_metrics.items()}


def _two(rank, folder, cases):
    torch.save([train(folder, 2, **case) for case in cases], f"{folder}/{rank}.pt")


CASES = [{}, {"micro_batch_size": 3}]


def _fsdp2(rank, folder):
    _two(rank, folder, CASES)


def test_two_processes_that_share_the_weights_train_as_one(tmp_path):
    spawn(_fsdp2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for case, mine, theirs in zip(CASES, first, second, strict=True):
        lost, sampled, logged = train(tmp_path, 1, **case)
        assert torch.equal(mine[0], theirs[0])
        assert [a + b for a, b in zip(mine[1], theirs[1], strict=True)] == sampled
        print(case, (mine[0] - lost).abs().max(), lost.abs().max())
        assert (mine[0] - lost).abs().max() < 1e-5
        assert lost.abs().max() > 1e-2
        for name in ("train/grad_norm", "train/kl", "train/reward", "train/entropy", "gtpo/conflict_frac"):
            assert mine[2][name] == pytest.approx(logged[name], abs=1e-4), name
