"""Small real training runs: the tiny model, made-up problems, rewards that depend on the text only."""

import os
import socket

import lightning.pytorch as pl
import pytest
import torch

from gtpo_lightning import GTPOModule, Problem
from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer
from gtpo_lightning.datamodules.base import DataModule
from tests.helpers.processes import start

THRESHOLD = 2.7


class Sums(DataModule):
    """Problems i+j= with ids of their own; `val` is disjoint."""

    name = "sums"

    def __init__(self, train=8, val=3, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"train": train, "val": val, "test": val}

    def make_problems(self, split):
        return [Problem(f"{split}/{i}", f"{i}+{i + 1}=", str(2 * i + 1)) for i in range(self.sizes[split])]


def vowels(completions):
    """A reward with many values, some equal: vowels of the text, at most 3."""
    return [float(min(3, sum(c in "aeiouAEIOU13579" for c in text))) for text in completions]


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def make_module(**kwargs):
    settings = {
        "model": "tiny",
        "group_size": 4,
        "max_completion_length": 10,
        "rewards": {vowels: 1.0},
        "prompt_template": "{question}",
        "optimizer": sgd,
        **kwargs,
    }
    module = GTPOModule(**settings)
    module.configure_model()
    with torch.no_grad():  # far from uniform: completions share tokens, and entropies differ
        module.policy.causal_lm.get_output_embeddings().weight.mul_(15)
    return module


def all_parts():
    # The start is given, so that the filter is armed; the threshold lies in the middle of this model's entropies.
    return [ConflictMasking(), EntropyFilter(threshold=THRESHOLD, initial_entropy=0.5), EntropyRegularizer(gamma=0.1)]


def make_trainer(folder, callbacks=(), **kwargs):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
        "max_steps": 1,
        "limit_val_batches": 0,
        **kwargs,
    }
    return pl.Trainer(callbacks=list(callbacks), **settings)


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.policy.parameters()])


def gradient(folder, callbacks=(), data=None, module=None, **trainer):
    """The gradient of the first optimizer step: with SGD at learning rate 1, what the weights lost."""
    module = module or make_module()
    module.configure_model()
    before = flat(module)
    fit = make_trainer(folder, callbacks, **trainer)
    fit.fit(module, data or Sums(batch_size=4, shuffle=False))
    return before - flat(module)


def assert_trained_as_one(alone, first, second, logged, name):
    """Two ranks' (lost weights, completions by step, logged values) are those of one process with all problems."""
    (lost, sampled, values), (mine, seen, mine_logged), (theirs, others, _) = alone, first, second
    assert torch.equal(mine, theirs), name
    assert [a + b for a, b in zip(seen, others, strict=True)] == sampled, name
    assert lost.abs().max() > 1e-3, name
    assert (mine - lost).abs().max() < 1e-5, name
    assert mine_logged["history"] == values["history"], name
    for key in logged:
        assert mine_logged[key] == pytest.approx(values[key], abs=1e-4), (name, key)


def spawn(function, folder, ranks=2):
    """Runs `function(rank, folder)` in processes set up as torchrun would, so that Lightning's DDP joins them."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    start(_run, (function, str(folder), ranks, port), ranks)


def _run(rank, function, folder, ranks, port):
    torch.set_num_threads(1)
    os.environ.update(
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
    )
    function(rank, folder)
