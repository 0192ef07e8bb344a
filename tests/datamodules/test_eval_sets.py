"""Several evaluation sets beside one training set: order, names, batch sizes, limits, leaks, ranks."""

import logging

import lightning.pytorch as pl
import pytest
import torch

from gtpo_lightning.datamodules import AIME2024, MATH500, HendrycksMATH, ProblemLoader, ProblemTable
from tests.datamodules.conftest import Named, Recorder, Watch, make_trainer, write_table


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def ids(name, split, *numbers):
    return [f"{name}/{split}/{i}" for i in numbers]


def flat(batches):
    return [one for batch in batches for one in batch]


def test_fit_validate_test_and_predict_show_the_sets_in_order():
    data = Named(
        "own", train=4, val=3, test=1, eval_sets=[Named("with_val", val=1, test=9), Named("only_test", test=3)]
    )
    fit, rest = Watch(), Watch()
    make_trainer(max_epochs=1).fit(fit, data)
    val = {
        0: [ids("own", "val", 0, 1), ids("own", "val", 2)],
        1: [ids("with_val", "val", 0)],
        2: [ids("only_test", "test", 0, 1), ids("only_test", "test", 2)],
    }
    assert fit.shown["val"] == val
    assert data.eval_names("fit") == data.eval_names("validate") == data.eval_names("val")
    assert data.eval_names("val") == ["own", "with_val", "only_test"]
    make_trainer().validate(rest, data, verbose=False)
    assert rest.shown["val"] == val
    make_trainer().test(rest, data, verbose=False)
    make_trainer().predict(rest, data)
    assert rest.shown["test"] == rest.shown["predict"]
    assert rest.shown["test"][0] == [ids("own", "test", 0)]
    assert flat(rest.shown["test"][1]) == ids("with_val", "test", *range(9))
    assert flat(rest.shown["test"][2]) == ids("only_test", "test", 0, 1, 2)
    assert data.eval_names("test") == data.eval_names("predict") == ["own", "with_val", "only_test"]
    with pytest.raises(ValueError, match=r"stage: 'training'; valid: fit, .*val, test"):
        data.eval_names("training")


def test_only_the_splits_of_the_stage_are_built():
    class Strict(Named):
        def make_problems(self, split):
            assert split != "train", "an evaluation set's training rows are not needed"
            return super().make_problems(split)

    beside = Strict("beside", val=1, test=1)
    Named("own", train=2, eval_sets=[beside]).setup("fit")
    assert (len(beside.val_problems), beside.test_problems) == (1, [])


def test_the_own_set_is_absent_without_problems_and_one_loader_is_no_list():
    data = Named("own", train=4, eval_sets=[Named("beside", test=3)])
    data.setup()
    assert data.eval_names("val") == data.eval_names("test") == ["beside"]
    assert isinstance(data.val_dataloader(), ProblemLoader)
    assert isinstance(Named("own", val=2).val_dataloader(), list)  # nothing is set up: none while fitting
    module = Watch()
    make_trainer(max_epochs=1).fit(module, data)
    assert list(module.shown["val"]) == [0]
    two = Named("own", train=4, eval_sets=[Named("a", test=1), Named("b", test=1)])
    two.setup()
    assert two.eval_names("val") == ["a", "b"]
    assert [len(loader) for loader in two.val_dataloader()] == [1, 1]


def test_without_further_sets_nothing_is_a_list(lightning):
    data = lightning.Numbers(val=2, test=2)
    data.setup()
    assert isinstance(data.val_dataloader(), ProblemLoader)
    assert isinstance(data.test_dataloader(), ProblemLoader)
    assert isinstance(data.predict_dataloader(), ProblemLoader)
    assert data.eval_names("val") == ["numbers"]


def test_batch_sizes_are_the_sets_own_or_the_first_ones():
    sets = [Named("a", test=8, batch_size=3), Named("b", test=8, val_batch_size=3)]
    for given, expected in (({"val_batch_size": 4}, [4, 4, 3]), ({}, [2, 2, 3])):
        data = Named("own", val=8, eval_sets=sets, **given)
        data.setup("validate")
        assert [loader.batch_size for loader in data.val_dataloader()] == expected


def test_limits_are_each_sets_own(lightning):
    sets = [Named("a", val=5, test=5, limit_val=2, limit_test=3), Named("b", test=5, limit_val=1, limit_test=4)]
    data = Named("own", train=9, val=5, test=5, limit_val=4, eval_sets=sets)
    data.setup()
    assert [len(loader.problems) for loader in data.val_dataloader()] == [4, 2, 1]
    assert [len(loader.problems) for loader in data.test_dataloader()] == [5, 3, 4]
    module = Watch()
    make_trainer(limit_val_batches=1).validate(module, data, verbose=False)
    assert {number: len(batches) for number, batches in module.shown["val"].items()} == {0: 1, 1: 1, 2: 1}


def test_e09_long_prompts_are_left_out_by_each_sets_own_limit(caplog):
    class Measuring(Watch):
        def prompt_length(self, problem):
            return len(problem.id)

    data = Named("own", val=3, max_prompt_length=9, eval_sets=[
        Named("kept", test=3), Named("cut", val=11, max_prompt_length=len("cut/val/0")),
    ])  # fmt: skip
    module = Measuring()
    make_trainer().validate(module, data, verbose=False)
    shown = {number: len(flat(batches)) for number, batches in module.shown["val"].items()}
    assert shown == {0: 3, 1: 3, 2: 10}
    assert [one.getMessage() for one in caplog.records if "prompt" in one.getMessage()] == [
        "cut/val: 1 of 11 problems have a prompt of more than 9 tokens and are left out"
    ]


def test_data_is_prepared_and_the_trainer_known_in_each_set():
    beside = Named("beside", test=1)
    data = Named("own", val=1, eval_sets=[beside])
    trainer = make_trainer()
    trainer.validate(Watch(), data, verbose=False)
    assert (data.prepared, beside.prepared) == (1, 1)
    assert beside.trainer is trainer


def test_two_sets_of_one_name_are_refused_with_both_named():
    with pytest.raises(ValueError, match=r"eval_sets: Named and MATH500 are both named 'math500'; valid: sets of diff"):
        Named("math500", eval_sets=[MATH500(source="a.jsonl")])
    tables = [ProblemTable(name="mine", test_source="a.jsonl"), Named("mine")]
    with pytest.raises(ValueError, match=r"eval_sets: ProblemTable and Named are both named 'mine'"):
        Named("own", eval_sets=tables)
    with pytest.raises(ValueError, match=r"eval_sets: ProblemTable and MATH500 are both named 'math500'"):
        ProblemTable(name="math500", source="a.jsonl", eval_sets=[MATH500(source="a.jsonl")])
    with pytest.raises(ValueError, match=r"eval_sets: b has eval_sets of its own; valid: all of them in one list"):
        Named("a", eval_sets=[Named("b", eval_sets=[Named("c")])])
    with pytest.raises(ValueError, match=r"eval_sets: 'MATH500'; valid: data modules of this package"):
        Named("a", eval_sets=["MATH500"])


def test_m02_an_id_in_two_sets_is_refused(lightning):
    other = lightning.Numbers(val=2)
    other.name = "others"
    data = lightning.Numbers(val=3, eval_sets=[other])
    with pytest.raises(ValueError, match=r"id: '0' stands in numbers and in others; valid: one id per problem"):
        data.setup("validate")


def test_a_set_without_anything_to_show_is_told(caplog):
    data = Named("own", train=2, val=2, eval_sets=[Named("train_only", train=3), Named("b", val=1)])
    data.setup()
    assert data.eval_names("val") == ["own", "b"]
    assert [one.getMessage() for one in caplog.records] == [
        "eval_sets: train_only has no val problems to show beside own",
        "eval_sets: train_only has no test problems to show beside own",
        "eval_sets: b has no test problems to show beside own",
    ]


def table(name, questions, tmp_path, **kwargs):
    rows = [{"problem": question, "answer": "1"} for question in questions]
    return ProblemTable(name=name, **{kwargs.pop("to"): write_table(tmp_path / f"{name}.jsonl", rows)}, **kwargs)


def test_a_leak_into_an_evaluation_set_is_warned_of_once(tmp_path, caplog):
    asked = ["What is 1+1?", "What  is\n2+1? ", "What is 3+1?"]
    sets = [
        table("leaky", ["What is 1+1? ", "what is 1+1?", "What is 2+1?"], tmp_path, to="test_source"),
        table("clean", ["What is 11?"], tmp_path, to="test_source"),
    ]
    data = table("train", asked, tmp_path, to="source", val_size=0, eval_sets=sets)
    data.setup("fit")
    data.setup("fit")
    data.setup()
    warnings = [one.getMessage() for one in caplog.records if "also asked" in one.getMessage()]
    (warning,) = warnings
    assert "eval_sets: training problems of train are also asked in 2 of 3 problems of leaky;" in warning


def test_no_leak_no_warning_and_none_without_training(tmp_path, caplog):
    leaky = table("leaky", ["a?"], tmp_path, to="test_source")
    data = table("train", ["a?", "b?"], tmp_path, to="source", val_size=0, eval_sets=[leaky])
    data.setup("test")
    data.setup("validate")
    data.setup("predict")
    other = table("clean", ["c?"], tmp_path, to="test_source")
    table("train", ["a?", "b?"], tmp_path, to="source", val_size=0, eval_sets=[other]).setup("fit")
    assert not [one for one in caplog.records if "also asked" in one.getMessage()]


def test_the_papers_watch_out_of_distribution(hub):
    """MATH is trained on; its held-out rows, MATH-500 and AIME 2024 are watched, and tested with MATH's own test."""
    rows = [
        {"problem": f"MATH {i}?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{1}"} for i in range(9)
    ]
    hub.sets["EleutherAI/hendrycks_math"] = {
        name: {"train": rows[:1], "test": rows[1:2]} for name in HendrycksMATH.default_configs
    }
    five = [{"problem": "MATH 1?", "answer": "1", "solution": r"\boxed{1}", "subject": "Algebra", "level": 1}]
    hub.sets["HuggingFaceH4/MATH-500"] = {"default": {"test": five}}
    hub.sets["HuggingFaceH4/aime_2024"] = {"default": {"train": [{"problem": "AIME?", "answer": "001"}]}}
    data = HendrycksMATH(val_size=2, eval_sets=[MATH500(), AIME2024()])
    module = Watch()
    make_trainer(max_epochs=1).fit(module, data)
    assert data.eval_names("fit") == ["math", "math500", "aime2024"]
    assert [len(flat(batches)) for batches in module.shown["val"].values()] == [2, 1, 1]
    make_trainer().test(module, data, verbose=False)
    assert [len(flat(batches)) for batches in module.shown["test"].values()] == [7, 1, 1]
    assert ("HuggingFaceH4/MATH-500", None, "test") in hub.asked


def test_lightning_numbers_the_loaders_in_the_order_of_the_names():
    """What callbacks rely on: `dataloader_idx` counts the list that the data module returned."""
    seen = []

    class Order(pl.Callback):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            seen.append((trainer.datamodule.eval_names("val")[dataloader_idx], batch[0].id.split("/")[0]))

    data = Named("own", val=3, eval_sets=[Named("a", test=2), Named("b", test=1)])
    make_trainer([Order()]).validate(Watch(), data, verbose=False)
    assert seen == [("own", "own"), ("own", "own"), ("a", "a"), ("b", "b")]


class Both(Watch):
    training_step = Recorder.training_step


@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 2}, {"reload_dataloaders_every_n_epochs": 1}])
def test_l09_e03_a_resume_in_mid_epoch_with_further_sets(lightning, tmp_path, flags):
    def run(ckpt=None, callbacks=()):
        data = lightning.Numbers(val=3, eval_sets=[Named("a", test=3), Named("b", test=1)])
        return lightning.fit(data, ckpt, Both(), callbacks, **flags)[0]

    path = str(tmp_path / "c.ckpt")
    whole = run(callbacks=[lightning.Saver("on_train_batch_end", path, 3)])
    resumed = run(ckpt=path)
    assert resumed.seen == whole.seen[3:]
    assert torch.equal(resumed.weight, whole.weight)
    epoch = {0: [["0", "1"], ["2"]], 1: [ids("a", "test", 0, 1), ids("a", "test", 2)], 2: [ids("b", "test", 0)]}
    validations = 4 if "val_check_interval" in flags else 2
    assert whole.shown["val"] == {number: batches * validations for number, batches in epoch.items()}
