"""A module that records what it was shown, and one function that runs it on a real Trainer."""

import lightning.pytorch as pl
import pytest
import torch

from gtpo_lightning.datamodules import DataModule
from gtpo_lightning.rollout import Problem


class Recorder(pl.LightningModule):
    """Trains one number; `seen` gets (epoch, batch_idx, ids) of each batch."""

    updates_per_rollout = 1
    fails_at = None

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated, self.tested, self.predicted = [], [], [], []

    def training_step(self, problems, batch_idx):
        if len(self.seen) + 1 == self.fails_at:
            raise ZeroDivisionError("the training step failed")
        self.seen.append((self.current_epoch, batch_idx, [problem.id for problem in problems]))
        # Depends on the problems and on the weight, so that a missing or doubled step shows in the weight.
        return (self.weight - sum(int(problem.id) + 1 for problem in problems)) ** 2

    def validation_step(self, problems, batch_idx):
        self.validated.append([problem.id for problem in problems])

    def test_step(self, problems, batch_idx):
        self.tested.append([problem.id for problem in problems])

    def predict_step(self, problems, batch_idx):
        self.predicted.append([problem.id for problem in problems])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Numbers(DataModule):
    """Problems "0", "1", ... in each split."""

    name = "numbers"

    def __init__(self, train=10, val=0, test=0, **kwargs):
        super().__init__(**{"batch_size": 2, **kwargs})
        self.counts = {"train": train, "val": val, "test": test}

    def make_problems(self, split):
        return [Problem(str(i), f"{i}+0=", str(i)) for i in range(self.counts[split])]


class Saver(pl.Callback):
    """Saves a checkpoint at the n-th call of a hook."""

    def __init__(self, hook, path, nth=1):
        self.hook, self.path, self.left = hook, path, nth
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)


def make_trainer(callbacks=(), **kwargs):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**defaults, **kwargs})


def run_fit(data=None, ckpt=None, module=None, callbacks=(), **kwargs):
    """Fits a Recorder; returns it and its trainer."""
    module = Recorder() if module is None else module
    trainer = make_trainer(callbacks, **kwargs)
    trainer.fit(module, data if data is not None else Numbers(), ckpt_path=ckpt, weights_only=False if ckpt else None)
    return module, trainer


@pytest.fixture
def lightning():
    """Everything above under one name: test files cannot import each other under importlib mode."""

    class Names:
        pass

    names = Names()
    names.Recorder, names.Numbers, names.Saver = Recorder, Numbers, Saver
    names.trainer, names.fit = make_trainer, run_fit
    return names
