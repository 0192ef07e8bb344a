"""Windows, batches and ranks that do not come out even: the weights of one process under each strategy, and no hang."""

import pytest
import torch

from gtpo_lightning.callbacks import Evaluator
from gtpo_lightning.hooks import RLCallback
from tests.core.test_fsdp1 import whole as whole_fsdp1
from tests.core.test_sharding import Sampled, fsdp2, whole
from tests.helpers.cpu_strategies import FSDPOnCPU
from tests.helpers.training import Sums, all_parts, make_module, make_trainer, spawn


class Drop(RLCallback):
    """Takes all completions of some problems out of the loss, on whichever rank they are."""

    def __init__(self, numbers):
        self.ids = {f"train/{number}" for number in numbers}

    def on_before_loss(self, trainer, pl_module, rollout):
        keep = torch.tensor([rollout.prompts.problems[i].id not in self.ids for i in rollout.group_ids.tolist()])
        rollout.sequence_weights *= keep


# Problems of an epoch, four to a batch of all ranks; batches a window; updates a rollout; problems whose completions
# are dropped; optimizer steps. Two ranks have the first and the second half of each batch.
CASES = {
    "short_window": {"train": 11, "accumulate": 2, "steps": 2},  # {4, 4}, {3}: ranks with 1 and 2 problems
    "rank_without_prompts": {"train": 9, "accumulate": 2, "steps": 2},  # {4, 4}, {1}: a rank with none
    "uneven_batches": {"train": 7, "steps": 2},  # {4}, {3}
    "rank_filtered": {"train": 8, "steps": 2, "drop": [0, 1, 4, 5]},  # all of the first rank's
    "all_filtered": {"train": 8, "steps": 2, "drop": range(4)},  # the first step has no gradient
    "more_updates": {"train": 7, "updates": 2, "steps": 4},  # {4}, {4} again, {3}, {3} again
    "more_updates_of_windows": {"train": 8, "updates": 2, "accumulate": 2, "steps": 2},
    "micro_batches": {"train": 9, "steps": 3, "micro": 3},  # {4}, {4}, {1}
}


def run(folder, ranks, flags, train, steps, accumulate=1, updates=1, drop=(), micro=None):
    """What the weights lost with SGD, each step's completions by problem, and the evaluations of 3 problems."""
    module = make_module(updates_per_rollout=updates, epsilon=0.2, micro_batch_size=micro, optimizer=slow)
    start = whole(module)
    data = Sums(train=train, val=3, batch_size=4 // ranks, val_batch_size=2, shuffle=False)
    sampled, judge = Sampled(), Evaluator()
    settings = {"accumulate_grad_batches": accumulate, "max_steps": steps, "max_epochs": -1, "limit_val_batches": 1.0}
    trainer = make_trainer(folder, [sampled, *all_parts(), Drop(drop), judge], **settings, **flags)
    trainer.fit(module, data)
    end = whole_fsdp1(trainer, module) if isinstance(trainer.strategy, FSDPOnCPU) else whole(module)
    return start - end, sampled.seen, judge.history


def slow(params):
    return torch.optim.SGD(params, lr=0.05)  # at 0.2 the last of four updates runs away: its weights move by 8


STRATEGIES = {"ddp": lambda: "ddp", "fsdp2": fsdp2, "fsdp1": FSDPOnCPU}
PAIRS = [(name, case) for name in ("ddp", "fsdp2") for case in CASES]
PAIRS += [("fsdp1", case) for case in ("rank_without_prompts", "rank_filtered", "more_updates")]


def _ranks(rank, folder):
    for name, make in STRATEGIES.items():
        cases = [case for strategy, case in PAIRS if strategy == name]
        found = {case: run(folder, 2, {"devices": 2, "strategy": make()}, **CASES[case]) for case in cases}
        torch.save(found, f"{folder}/{name}{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    spawn(_ranks, folder)
    return {name: [torch.load(folder / f"{name}{rank}.pt") for rank in (0, 1)] for name in STRATEGIES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {case: run(folder, 1, {}, **settings) for case, settings in CASES.items()}


@pytest.mark.parametrize(("strategy", "case"), PAIRS)
def test_d_02_e_12_e_13_two_ranks_of_odd_sizes_train_as_one_process(strategy, case, ranks, alone):
    lost, sampled, history = alone[case]
    (mine, first, judged), (theirs, second, _) = (ranks[strategy][rank][case] for rank in (0, 1))
    assert torch.equal(mine, theirs)
    assert [a + b for a, b in zip(first, second, strict=True)] == sampled
    assert lost.abs().max() > 1e-3
    assert (mine - lost).abs().max() < 1e-5
    assert judged == history
