import logging
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import BatchSizeFinder

from gtpo_lightning.datamodules import DataModule
from gtpo_lightning.rollout import Problem


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def flat(batches):
    return [one for batch in batches for one in batch]


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": -3},
        {"batch_size": 1.5},
        {"val_batch_size": 0},
        {"max_prompt_length": 0},
        {"limit_train": 0},
        {"limit_val": -1},
        {"limit_test": 0},
        {"seed": -1},
    ],
)
def test_c15b_arguments_out_of_range_are_refused_before_anything_is_loaded(lightning, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}: {value!r}; valid: an integer >= [01]"):
        lightning.Numbers(**wrong)


def test_splits_and_limits(lightning):
    data = lightning.Numbers(train=5, val=4, test=3, limit_train=2, limit_val=3)
    data.setup("fit")
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [2, 3, 0]
    data.setup("test")
    assert [problem.id for problem in data.test_problems] == ["0", "1", "2"]
    assert [problem.id for problem in data.train_problems] == ["0", "1"]


def test_without_a_trainer_it_is_one_process(lightning):
    data = lightning.Numbers(train=3, val=3, val_batch_size=3, shuffle=False)
    data.setup()
    assert [[problem.id for problem in batch] for batch in data.train_dataloader()] == [["0", "1"], ["2"]]
    assert [len(batch) for batch in data.val_dataloader()] == [3]


def test_c06_the_same_text_twice_is_two_problems_the_same_id_is_an_error():
    class Rows(DataModule):
        name = "rows"

        def __init__(self, ids):
            super().__init__()
            self.ids = ids

        def make_problems(self, split):
            return [Problem(id, "1+1=", "2") for id in self.ids]

    data = Rows(["a", "b"])
    data.setup("fit")
    assert len(data.train_problems) == 2
    with pytest.raises(ValueError, match=r"id: 'b' stands twice in rows/train; valid: one id per problem"):
        Rows(["a", "b", "c", "b"]).setup("fit")


def test_a_missing_split_is_a_clear_error(lightning):
    with pytest.raises(ValueError, match=r"train: numbers has no training problems; valid"):
        lightning.fit(lightning.Numbers(train=0))
    with pytest.raises(ValueError, match=r"val: numbers has no val problems; valid"):
        lightning.trainer().validate(lightning.Recorder(), lightning.Numbers(), verbose=False)
    with pytest.raises(ValueError, match=r"test: numbers has no test problems; valid"):
        lightning.trainer().test(lightning.Recorder(), lightning.Numbers(), verbose=False)


def test_fitting_goes_without_a_validation_split(lightning):
    module, _ = lightning.fit(lightning.Numbers(val=0), num_sanity_val_steps=2)
    assert module.validated == []
    assert len(module.seen) == 10


def test_each_stage_sees_its_split(lightning):
    module = lightning.Recorder()
    data = lightning.Numbers(train=2, val=3, test=5, val_batch_size=2)
    lightning.fit(data, module=module, max_epochs=1)
    trainer = lightning.trainer()
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    assert module.validated == [["0", "1"], ["2"]] * 2
    assert module.tested == module.predicted == [["0", "1"], ["2", "3"], ["4"]]


# prompts that are too long


class Measured:
    """`prompt_length` is the problem's number plus one."""

    calls = 0

    def prompt_length(self, problem):
        self.calls += 1
        return int(problem.id) + 1


@pytest.fixture
def measuring(lightning):
    return type("MeasuringRecorder", (Measured, lightning.Recorder), {})


def test_e09_one_prompt_too_long_is_left_out_and_counted(lightning, measuring, caplog):
    module = measuring()
    data = lightning.Numbers(train=10, val=11, max_prompt_length=9, shuffle=False)
    lightning.fit(data, module=module, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert flat(batch for _, _, batch in module.seen) == [str(i) for i in range(9)] * 3
    assert flat(module.validated) == [str(i) for i in range(9)] * 3
    warnings = [record.getMessage() for record in caplog.records if "prompt" in record.getMessage()]
    assert warnings == [
        "numbers/train: 1 of 10 problems have a prompt of more than 9 tokens and are left out",
        "numbers/val: 2 of 11 problems have a prompt of more than 9 tokens and are left out",
    ]
    assert module.calls == 10 + 11


def test_e09_prompts_within_the_limit_are_not_warned_of(lightning, measuring, caplog):
    module, _ = lightning.fit(lightning.Numbers(max_prompt_length=10), module=measuring(), max_epochs=1)
    assert len(flat(batch for _, _, batch in module.seen)) == 10
    assert "prompt" not in caplog.text


def test_e09_all_prompts_too_long(lightning):
    class Long(lightning.Recorder):
        def prompt_length(self, problem):
            return 5000 - int(problem.id)

    with pytest.raises(ValueError, match=r"max_prompt_length: 512 leaves none of the 10 .*valid: at least 4991"):
        lightning.fit(lightning.Numbers(max_prompt_length=512), module=Long())


def test_a_module_that_cannot_measure_keeps_all(lightning):
    module, _ = lightning.fit(lightning.Numbers(max_prompt_length=1), max_epochs=1)
    assert len(flat(batch for _, _, batch in module.seen)) == 10


# flags of the trainer


@pytest.mark.parametrize(
    ("flags", "epochs", "length"),
    [
        ({"fast_dev_run": True}, 1, 1),
        ({"fast_dev_run": 2}, 1, 2),
        ({"limit_train_batches": 1, "max_epochs": 3}, 3, 1),
        ({"limit_train_batches": 0.5, "max_epochs": 2}, 2, 2),
        ({"max_epochs": -1, "max_steps": 12}, 3, 5),
        ({"overfit_batches": 1, "max_epochs": 3}, 3, 1),
        ({"overfit_batches": 2, "max_epochs": 2}, 2, 2),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, 3, 5),
    ],
)
def test_l16_each_runs(lightning, flags, epochs, length):
    module, _ = lightning.fit(lightning.Numbers(val=2), **flags)
    assert {epoch for epoch, _, _ in module.seen} == set(range(epochs))
    assert max(index for _, index, _ in module.seen) == length - 1
    assert all(len(batch) == 2 for _, _, batch in module.seen)


def test_l16_overfitting_sees_the_same_batches_in_every_epoch_and_others_do_not(lightning, recwarn):
    module, _ = lightning.fit(overfit_batches=2, max_epochs=3)
    epochs = [[batch for epoch, _, batch in module.seen if epoch == wanted] for wanted in range(3)]
    assert epochs[0] == epochs[1] == epochs[2] == [["0", "1"], ["2", "3"]]
    assert not [one for one in recwarn if "shuffling" in str(one.message)]
    module, _ = lightning.fit(limit_train_batches=2, max_epochs=2)
    assert module.seen[0][2] != module.seen[2][2]


def test_c14_a_batch_size_found_automatically(lightning):
    class Small(lightning.Recorder):
        def training_step(self, problems, batch_idx):
            if len(problems) > 8:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(problems, batch_idx)

    data = lightning.Numbers(train=64)
    finder = BatchSizeFinder(mode="power", init_val=2, steps_per_trial=1)
    module, _ = lightning.fit(data, module=Small(), callbacks=[finder], max_epochs=1)
    assert data.batch_size == 8
    batches = [batch for _, _, batch in module.seen][-8:]
    assert [len(batch) for batch in batches] == [8] * 8
    assert sorted(flat(batches), key=int) == [str(i) for i in range(64)]


# accumulation


def test_d02_l13_lightning_divides_the_short_last_window_by_the_full_size(lightning):
    """5 batches, 4 accumulated: the loader tells the real sizes, 4 and 1; fails when Lightning divides by them."""
    told, gradients = [], []

    class Watch(lightning.Recorder):
        def training_step(self, problems, batch_idx):
            told.append(self.trainer.train_dataloader.window_length(batch_idx, self.trainer.num_training_batches))
            return self.weight

        def on_before_optimizer_step(self, optimizer):
            gradients.append(self.weight.grad.item())

    lightning.fit(module=Watch(), accumulate_grad_batches=4, max_epochs=1)
    assert told == [4, 4, 4, 4, 1]
    assert gradients == [1.0, 0.25], "Lightning is mended: the module must not scale the last window"


# ranks


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_e01_l10_ranks_of_a_trainer_share_without_padding(lightning, ranks):
    def data(rank, **sampler):
        data = lightning.Numbers(train=10, val=3, val_batch_size=1)
        data.setup("fit")
        module = torch.nn.Module()
        data.trainer = SimpleNamespace(
            global_rank=rank,
            world_size=ranks,
            lightning_module=module,
            callbacks=[],
            overfit_batches=0.0,
            accumulate_grad_batches=1,
            limit_train_batches=1.0,
            fast_dev_run=False,
            fit_loop=SimpleNamespace(
                epoch_progress=SimpleNamespace(current=SimpleNamespace(ready=0, started=0, processed=0)),
                epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=None)),
                is_resuming=False,
                _combined_loader=None,
            ),
            state=SimpleNamespace(fn="fit"),
            **sampler,
        )
        return data

    train, val = [], []
    for rank in range(ranks):
        one = data(rank)
        train.append([[problem.id for problem in batch] for batch in one.train_dataloader()])
        val.append([[problem.id for problem in batch] for batch in one.val_dataloader()])
    assert sorted(flat(flat(train)), key=int) == [str(i) for i in range(10)]
    assert sorted(flat(flat(val))) == ["0", "1", "2"]
    assert len({len(part) for part in train}) == len({len(part) for part in val}) == 1
    # Under tensor parallelism two processes are one replica and see the same problems.
    shared = data(1, distributed_sampler_kwargs={"rank": 0, "num_replicas": 2}).train_dataloader()
    assert (shared.rank, shared.world_size) == (0, 2)


@pytest.mark.parametrize(
    ("kind", "name", "own"),
    [
        ("Arithmetic", "arithmetic", {"levels": [1, 3], "noise": 0.2}),
        ("GSM8K", "gsm8k", {"source": "rows.jsonl", "val_size": 5, "train_split": "a"}),
        ("HendrycksMATH", "math", {"subjects": ["algebra"], "levels": [1, 2], "val_size": 5, "config": "all"}),
        ("ProblemTable", "mine", {"name": "mine", "source": "a/b", "answer_style": "boxed", "id_column": "key"}),
        ("MATH500", "math500", {"split": "train", "solution_column": "text"}),
        ("AIME2024", "aime2024", {"source": "rows.jsonl", "question_column": "text"}),
        ("AIME2025", "aime2025", {"config": "AIME2025-I"}),
        ("AMC2023", "amc2023", {"answer_column": "key"}),
    ],
)
def test_every_argument_can_stand_in_a_configuration(kind, name, own):
    parser = ArgumentParser()
    parser.add_subclass_arguments(DataModule, "data")
    shared = {"batch_size": 3, "max_prompt_length": 64, "limit_train": 7, "seed": 2}
    beside = [{"class_path": "gtpo_lightning.datamodules.Arithmetic", "init_args": {"size": 9, "limit_val": 4}}]
    if kind != "Arithmetic":
        shared["eval_sets"] = beside
    config = {"data": {"class_path": f"gtpo_lightning.datamodules.{kind}", "init_args": {**own, **shared}}}
    data = parser.instantiate_classes(parser.parse_object(config)).data
    assert (data.name, data.batch_size, data.max_prompt_length, data.limits["train"], data.seed) == (name, 3, 64, 7, 2)
    if kind != "Arithmetic":
        assert [(one.name, one.limits["val"]) for one in data.eval_sets] == [("arithmetic", 4)]


@pytest.mark.parametrize("given", [None, [{"id": "1"}], "problems"])
def test_problems_of_another_kind_are_refused_by_name(lightning, given):
    class Odd(lightning.Numbers):
        def make_problems(self, split):
            return given

    with pytest.raises(ValueError, match=r"Odd.make_problems\('train'\) gave .*a list of Problem"):
        Odd().setup("fit")
