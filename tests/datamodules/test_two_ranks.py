"""Two gloo processes: the shares of a real Trainer, several evaluation sets, a resume on another number of ranks."""

import json
import logging

import pytest

from tests.datamodules.conftest import Named, Numbers, Recorder, Saver, Watch, make_trainer, run_fit
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


class Judge(Watch):
    """Writes what this rank judged."""

    folder = ""

    def on_fit_end(self):
        with open(f"{self.folder}/judged{self.global_rank}.json", "w") as file:
            json.dump(self.shown["val"], file)


def two_ranks(rank, folder):
    writer = Writer()
    writer.folder = folder
    saver = Saver("on_train_batch_end", f"{folder}/c.ckpt", 2)
    run_fit(numbers(2), module=writer, callbacks=[saver], devices=2, strategy="ddp", max_epochs=2)

    judge = Judge()
    judge.folder = folder
    sets = [Named("a", test=3, val_batch_size=1), Named("b", val=1), Named("c", test=5)]
    data = Named("own", train=16, val=3, eval_sets=sets)
    flags = {"val_check_interval": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    make_trainer(devices=2, strategy="ddp", **flags).fit(judge, data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes left behind; starting them takes longer than all they do."""
    place = tmp_path_factory.mktemp("two_ranks")
    spawn(two_ranks, place)
    return place


def test_d11_e01_l10_two_processes_then_one(lightning, folder):
    path = str(folder / "c.ckpt")
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
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


def test_k12_l10_l12_each_of_several_sets_is_judged_once_in_each_validation(folder):
    """4 batches a rank, validated in the middle and at the end, with sets that no two ranks can share evenly."""
    ranks = [json.loads((folder / f"judged{rank}.json").read_text()) for rank in range(2)]
    sizes = {"own/val": 3, "a/test": 3, "b/val": 1, "c/test": 5}
    for number, (name, size) in enumerate(sizes.items()):
        shares = [rank[str(number)] for rank in ranks]
        shown = sorted(one for share in shares for batch in share for one in batch)
        assert shown == sorted(2 * [f"{name}/{i}" for i in range(size)])
        assert len(shares[0]) == len(shares[1])
