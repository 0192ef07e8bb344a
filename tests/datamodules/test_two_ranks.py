"""Two gloo processes: the shares of a real Trainer, and a resume on another number of ranks."""

import json
import logging

import pytest

from tests.datamodules.conftest import Numbers, Recorder, Saver, run_fit
from tests.helpers.training import spawn


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def numbers(batch_size):
    return Numbers(train=11, val=3, batch_size=batch_size, val_batch_size=1)


class Writer(Recorder):
    """Writes what this rank saw, for the parent to read."""

    folder = ""

    def training_step(self, problems, batch_idx):
        return super().training_step(problems, batch_idx) + 0 * self.weight

    def on_train_end(self):
        seen = {"train": self.seen, "val": self.validated, "weight": self.weight.item()}
        with open(f"{self.folder}/{self.global_rank}.json", "w") as file:
            json.dump(seen, file)


def two_ranks(rank, folder):
    writer = Writer()
    writer.folder = folder
    saver = Saver("on_train_batch_end", f"{folder}/c.ckpt", 2)
    run_fit(numbers(2), module=writer, callbacks=[saver], devices=2, strategy="ddp", max_epochs=2)


def test_d11_e01_l10_two_processes_then_one(lightning, tmp_path):
    path = str(tmp_path / "c.ckpt")
    spawn(two_ranks, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    single, _ = lightning.fit(numbers(4), max_epochs=2)

    together = [
        [epoch, index, first + second]
        for (epoch, index, first), (_, _, second) in zip(ranks[0]["train"], ranks[1]["train"], strict=True)
    ]
    assert together == [list(batch) for batch in single.seen]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    # three problems on two ranks, each once an epoch
    validated = [one for rank in ranks for batch in rank["val"] for one in batch]
    assert sorted(validated) == ["0", "0", "1", "1", "2", "2"]

    resumed, _ = lightning.fit(numbers(4), ckpt=path, max_epochs=2)
    assert resumed.seen == single.seen[2:]
