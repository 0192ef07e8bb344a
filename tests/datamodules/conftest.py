"""A module that records what it was shown, one function that runs it on a real Trainer, tables to read."""

import inspect
import json

import datasets
import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset

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


class Named(DataModule):
    """Problems "{name}/{split}/0", ... in each split; says what was called."""

    def __init__(self, name, train=0, val=0, test=0, **kwargs):
        self.name = name
        super().__init__(**{"batch_size": 2, **kwargs})
        self.counts = {"train": train, "val": val, "test": test}
        self.prepared = 0

    def prepare_data(self):
        super().prepare_data()
        self.prepared += 1

    def make_problems(self, split):
        ids = [f"{self.name}/{split}/{i}" for i in range(self.counts[split])]
        return [Problem(id, f"What is {id}?", str(i)) for i, id in enumerate(ids)]


class Watch(Recorder):
    """Keeps ids by the number of the loader."""

    def __init__(self):
        super().__init__()
        self.shown = {"val": {}, "test": {}, "predict": {}}

    def training_step(self, problems, batch_idx):
        return self.weight * len(problems)

    def _show(self, stage, problems, dataloader_idx):
        self.shown[stage].setdefault(dataloader_idx, []).append([problem.id for problem in problems])

    def validation_step(self, problems, batch_idx, dataloader_idx=0):
        self._show("val", problems, dataloader_idx)

    def test_step(self, problems, batch_idx, dataloader_idx=0):
        self._show("test", problems, dataloader_idx)

    def predict_step(self, problems, batch_idx, dataloader_idx=0):
        self._show("predict", problems, dataloader_idx)


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


# tables


def write_table(path, rows):
    """Writes rows as .jsonl, .json or .parquet; a dict as a .json file of one object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


class FakeHub:
    """Stands in for the three functions of `datasets` that reach the hub, and takes only calls those would take.

    `sets` has rows (or a Dataset) by hub id, configuration and split; `asked` what was asked for.
    """

    def __init__(self, monkeypatch):
        self.sets, self.asked = {}, []
        for name in ("load_dataset", "get_dataset_config_names", "get_dataset_split_names"):
            real = inspect.signature(getattr(datasets, name))
            monkeypatch.setattr(datasets, name, self._bound(real, getattr(self, f"_{name}")))

    @staticmethod
    def _bound(real, fake):
        def call(*args, **kwargs):
            return fake(**real.bind(*args, **kwargs).arguments)

        return call

    def _get_dataset_config_names(self, path):
        self.asked.append((path, "configs"))
        return list(self._find(path))

    def _get_dataset_split_names(self, path, config_name=None):
        self.asked.append((path, config_name, "splits"))
        return list(self._config(path, config_name))

    def _load_dataset(self, path, name=None, split=None):
        self.asked.append((path, name, split))
        splits = self._config(path, name)
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
        rows = splits[split]
        return rows if isinstance(rows, Dataset) else Dataset.from_list(rows)

    def _find(self, path):
        if path not in self.sets:
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub.")
        return self.sets[path]

    def _config(self, path, name):
        configs = self._find(path)
        if name is None and len(configs) == 1:
            name = next(iter(configs))
        if name not in configs:
            raise ValueError(f"BuilderConfig {name!r} not found. Available: {list(configs)}")
        return configs[name]

    def loads(self):
        return [one for one in self.asked if one[-1] not in ("configs", "splits")]


@pytest.fixture
def hub(monkeypatch):
    return FakeHub(monkeypatch)


@pytest.fixture
def told(caplog):
    """What the data modules logged so far, at INFO and above."""
    caplog.set_level("INFO", logger="gtpo_lightning.datamodules")
    return lambda level="INFO": [one.getMessage() for one in caplog.records if one.levelname == level]
