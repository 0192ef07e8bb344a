"""The evaluator: right answers over problems, each once, never in the sanity check, with its own sampling."""

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from gtpo_lightning import PolicyModule, Problem, Rollout
from gtpo_lightning.callbacks import Evaluator
from gtpo_lightning.completion_store import CompletionStore
from gtpo_lightning.rollout import Prompts
from tests.helpers.training import Sums, make_module, make_trainer, spawn


def judged(texts, answers, n):
    """A rollout whose problem i has the n next texts."""
    problems = [Problem(f"p{i}", "q", answer) for i, answer in enumerate(answers)]
    prompts = Prompts(torch.zeros(len(answers), 1), torch.ones(len(answers), 1), problems)
    return Rollout(
        prompts=prompts,
        group_ids=torch.arange(len(answers)).repeat_interleave(n),
        completion_ids=torch.zeros(len(texts), 4, dtype=torch.long),
        completion_mask=torch.ones(len(texts), 4),
        texts=list(texts),
    )


class FakeTrainer:
    global_step = 3
    datamodule = type("Data", (), {"name": "toy"})()


def scores_of(evaluator, *batches):
    for batch in batches:
        evaluator._judge("toy", batch, batch.prompts.problems, None)
    return evaluator._scores(FakeTrainer(), "val")


def test_k_05b_scores_are_means_over_problems_and_k_10_apart_from_format():
    full = "<reasoning>r</reasoning><answer>{}</answer>"
    texts = [full.format(5), "<answer>5</answer>", full.format(1), full.format(2)]
    scores = scores_of(Evaluator(num_samples=2), judged(texts, ["5", "2"], 2))
    assert scores == {
        "val/toy/pass@1": 0.75, "val/toy/pass@2": 1.0, "val/toy/maj@1": 0.75, "val/toy/maj@2": 0.75,
        "val/toy/avg@2": 0.75, "val/toy/format": 0.75, "val/toy/length": 4.0,
    }  # fmt: skip


def test_k_05b_problems_with_all_and_none_right_average_to_a_half():
    evaluator = Evaluator(num_samples=3, ks=[2])
    scores = scores_of(evaluator, judged(["<answer>5</answer>"] * 3 + ["<answer>6</answer>"] * 3, ["5", "7"], 3))
    assert scores["val/toy/pass@2"] == 0.5


def test_k_06_the_mean_of_16_samples_is_reported_under_that_name():
    scores = scores_of(Evaluator(num_samples=16), judged(["<answer>5</answer>"] * 16, ["5"], 16))
    assert scores["val/toy/avg@16"] == 1


@pytest.mark.parametrize(("n", "ks"), [(1, [5]), (4, [0]), (4, [1.5]), (4, [True])])
def test_k_02_and_k_03_a_k_above_the_samples_of_a_problem_is_refused(n, ks):
    with pytest.raises(ValueError, match=f"ks: {ks[0]} with num_samples {n}; valid: integers of 1 to num_samples"):
        Evaluator(num_samples=n, ks=ks)


def test_k_12_a_repeated_problem_counts_once():
    single = [judged(["<answer>5</answer>"], ["5"], 1)] * 3
    both = judged(["<answer>5</answer>", "<answer>7</answer>"], ["5", "6"], 1)
    assert scores_of(Evaluator(), *single, both)["val/toy/avg@1"] == 0.5


def test_k_13_own_sampling_and_greedy_with_several_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_samples: 4"):
        Evaluator(num_samples=4, greedy=True)
    module = make_module()
    trainer = make_trainer(tmp_path, [Evaluator(num_samples=3, max_completion_length=5)], limit_val_batches=1)
    trainer.validate(module, Sums(batch_size=2), verbose=False)
    assert module.eval_sampling.num_samples == 3
    assert module.sampling.num_samples == 4
    assert trainer.callback_metrics["val/sums/length"] <= 5


def test_one_id_of_two_problems_is_refused_and_not_taken_for_a_repeat():
    problems = [Problem("x", "1+1", "2"), Problem("x", "2+2", "4")]
    rollout = judged(["<answer>2</answer>", "<answer>4</answer>"], ["2", "4"], 1)
    rollout.prompts.problems[:] = problems
    with pytest.raises(ValueError, match=r"id: 'x' is of two problems of toy"):
        scores_of(Evaluator(), rollout)
    again = judged(["<answer>4</answer>"], ["4"], 1)
    again.prompts.problems[:] = problems[1:]
    evaluator = Evaluator()
    first = judged(["<answer>2</answer>"], ["2"], 1)
    first.prompts.problems[:] = problems[:1]
    with pytest.raises(ValueError, match=r"id: 'x'"):
        scores_of(evaluator, first, again)


def test_a_store_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(PolicyModule, "configure_model", None)  # not reached
    module = PolicyModule("tiny")
    with pytest.raises(ValueError, match=r"store: .*file/x' cannot be written to"):
        make_trainer(tmp_path, [Evaluator(store=str(tmp_path / "file" / "x"))]).test(module, Sums(), verbose=False)


def test_an_unknown_answer_style_is_refused_at_once():
    with pytest.raises(ValueError, match="answer_style: 'box'; valid: answer_tag"):
        Evaluator(answer_style="box")


def test_l_15_the_sanity_check_leaves_no_score_and_the_start_is_judged_once(tmp_path):
    evaluator = Evaluator(before_training=True)
    trainer = make_trainer(
        tmp_path, [evaluator], num_sanity_val_steps=2, limit_val_batches=1.0, max_steps=4, max_epochs=2
    )
    trainer.fit(make_module(), Sums(batch_size=4))
    assert [step for step, _ in evaluator.history] == [0, 2, 4]


def _ranks(rank, folder):
    evaluator = Evaluator(before_training=False)
    trainer = make_trainer(folder, [evaluator], limit_val_batches=1.0, devices=2, strategy="ddp", max_steps=2)
    trainer.fit(make_module(), Sums(train=4, val=3, batch_size=1, val_batch_size=1))
    torch.save(evaluator.history, f"{folder}/{rank}.pt")


def test_l_10_three_problems_on_two_ranks_end_with_the_scores_of_one(tmp_path):
    spawn(_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    evaluator = Evaluator(before_training=False)
    trainer = make_trainer(tmp_path, [evaluator], limit_val_batches=1.0, max_steps=2)
    trainer.fit(make_module(), Sums(train=4, val=3, batch_size=2, val_batch_size=3))
    assert first[0][1] == pytest.approx(evaluator.history[0][1], abs=1e-6)


def _ranks_while_accumulating(rank, folder):
    evaluator = Evaluator(before_training=False)
    trainer = make_trainer(
        folder, [evaluator], limit_val_batches=1.0, devices=2, strategy="ddp", max_steps=3,
        accumulate_grad_batches=2, val_check_interval=3,
    )  # fmt: skip
    trainer.fit(make_module(), Sums(train=12, val=3, batch_size=1, val_batch_size=1))
    torch.save([step for step, _ in evaluator.history], f"{folder}/{rank}.pt")


def test_l_12_both_ranks_enter_validation_together_while_gradients_accumulate(tmp_path):
    spawn(_ranks_while_accumulating, tmp_path)
    # Batches 3 and 6 of 6; the optimizer stepped after 2, 4 and 6.
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [[1, 3], [1, 3]]


def test_m_07_a_resumed_run_still_knows_the_first_evaluation(tmp_path):
    first = Evaluator()
    first.history = [(0, {"val/x/avg@1": 0.25}), (2, {"val/x/avg@1": 0.5})]
    again = Evaluator()
    again.load_state_dict(first.state_dict())
    assert again.history == first.history


def evaluate(folder, evaluator, run="validate", data=None, module=None, **trainer):
    module = module or make_module()
    data = data or Sums(train=4, batch_size=4, val_batch_size=2)
    made = make_trainer(folder, [evaluator], limit_val_batches=1.0, **trainer)
    getattr(made, run)(module, data, **({} if run in ("fit", "predict") else {"verbose": False}))
    return made


def answers(folder):
    content = json.loads((folder / "results.json").read_text())
    with (folder / "results.csv").open(newline="") as file:
        return content, list(csv.DictReader(file))


@pytest.mark.parametrize(("run", "prefix"), [("fit", "val"), ("validate", "val"), ("test", "test")])
def test_each_run_leaves_a_table_the_answers_and_the_curves(run, prefix, tmp_path, capsys):
    trainer = evaluate(tmp_path, Evaluator(num_samples=3, ks=[1, 2]), run)
    content, rows = answers(tmp_path / run)
    assert (tmp_path / run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert content["run"] == run
    assert content["sampling"]["num_samples"] == 3
    sums = content["datasets"]["sums"]
    assert sums["problems"] == 3
    assert sums["curves"]["k"] == [1, 2, 3]
    assert sums["curves"]["pass"][1] == sums["scores"]["pass@2"]
    assert sums["curves"]["maj"][0] == sums["scores"]["maj@1"]
    assert len(sums["answers"]) == len(rows) == 9
    assert {row["problem_id"] for row in rows} == {f"{prefix}/{i}" for i in range(3)}
    for answer, row in zip(sums["answers"], rows, strict=True):
        assert row["completion"] == answer["completion"]
        assert row["extracted"] == (answer["extracted"] or "")
        assert row["correct"] == str(answer["correct"])
    logged = trainer.callback_metrics
    for name in ("pass@1", "pass@2", "maj@1", "maj@2", "avg@3", "format", "length"):
        assert float(logged[f"{prefix}/sums/{name}"]) == pytest.approx(sums["scores"][name]["mean"])
    shown = capsys.readouterr().out
    assert f"{prefix}/sums/pass@2" in shown
    assert "interval" in shown


def test_nothing_is_written_by_a_trial_run(tmp_path):
    evaluate(tmp_path, Evaluator(), "test", fast_dev_run=True)
    assert not list(tmp_path.rglob("results.*"))


def test_the_curves_reach_tensorboard(tmp_path):
    logger = TensorBoardLogger(str(tmp_path), name="x", version="y")
    evaluate(tmp_path, Evaluator(num_samples=2), "test", logger=logger)
    events = EventAccumulator(str(tmp_path / "x" / "y")).Reload()
    assert events.Tags()["images"] == ["test/curves"]
    assert "test/sums/maj@2" in events.Tags()["scalars"]


def test_a_checkpoint_and_a_stop_can_watch_a_score(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val/sums/pass@2", mode="max", filename="{step}")
    stop = EarlyStopping(monitor="val/sums/maj@1", mode="max", patience=0)
    evaluator = Evaluator(num_samples=2, before_training=False)
    trainer = make_trainer(
        tmp_path, [evaluator, best, stop], limit_val_batches=1.0, max_steps=9, max_epochs=9, enable_checkpointing=True
    )
    trainer.fit(make_module(), Sums(train=4, batch_size=4))
    assert float(best.best_model_score) == max(scores["val/sums/pass@2"] for _, scores in evaluator.history)
    assert trainer.global_step < 9  # an untrained model scores 0 twice, which is no improvement


def test_before_training_also_judges_plain_loaders(tmp_path):
    loader = DataLoader(Sums().make_problems("val"), batch_size=2, collate_fn=list)
    evaluator = Evaluator()
    trainer = make_trainer(tmp_path, [evaluator], limit_val_batches=1.0)
    trainer.fit(
        make_module(), DataLoader(Sums().make_problems("train"), batch_size=4, collate_fn=list), [loader, loader]
    )
    step, scores = evaluator.history[0]
    assert step == 0
    assert {name.rpartition("/")[0] for name in scores} == {"val/held_out", "val/held_out_1"}


class Interrupted(Exception):
    pass


def stop_after(module, problems):
    """Lets the module finish so many problems; the next one is cut off."""
    add, seen = CompletionStore.add, set()

    def counted(store, problem, index, sample):
        seen.add(problem.id)
        if len(seen) > problems:
            raise Interrupted
        add(store, problem, index, sample)

    return counted


@pytest.mark.parametrize("run", ["test", "predict", "validate"])
def test_an_interrupted_evaluation_repeats_no_finished_problem_and_ends_the_same(run, tmp_path, monkeypatch):
    def evaluator(store):
        return Evaluator(num_samples=2, store=str(tmp_path / store))

    module = make_module()
    with monkeypatch.context() as patch:
        patch.setattr(CompletionStore, "add", stop_after(module, 2))
        with pytest.raises(Interrupted):
            evaluate(tmp_path / "a", evaluator("kept"), run, Sums(val=5, batch_size=1), make_module())
    (kept,) = (tmp_path / "kept").glob("tiny-*.jsonl")
    before = kept.read_text()
    assert len(before.splitlines()) == 4
    sampled = []
    sample = PolicyModule.sample
    monkeypatch.setattr(
        PolicyModule, "sample", lambda self, prompts, *a, **k: (
            sampled.extend(problem.id for problem in prompts.problems), sample(self, prompts, *a, **k))[1]
    )  # fmt: skip
    evaluate(tmp_path / "b", evaluator("kept"), run, Sums(val=5, batch_size=2), make_module())
    prefix = "val" if run == "validate" else "test"
    assert sampled == [f"{prefix}/{i}" for i in (2, 3, 4)]
    assert kept.read_text().startswith(before)
    assert len(kept.read_text().splitlines()) == 10
    evaluate(tmp_path / "c", evaluator("other"), run, Sums(val=5, batch_size=5), make_module())
    (whole,) = (tmp_path / "other").glob("tiny-*.jsonl")
    lines = [sorted(path.read_text().splitlines()) for path in (kept, whole)]
    assert lines[0] == lines[1]
    if run != "predict":
        contents = [answers(tmp_path / folder / run)[0]["datasets"] for folder in "bc"]
        assert contents[0] == contents[1]


def test_predict_writes_a_file_without_a_store_and_test_goes_on_from_it(tmp_path, monkeypatch):
    evaluate(tmp_path, Evaluator(), "predict")
    (path,) = (tmp_path / "completions").glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 3
    monkeypatch.setattr(CompletionStore, "add", None)  # nothing is left to add
    evaluate(tmp_path, Evaluator(store=str(tmp_path / "completions")), "test")


def test_more_samples_go_on_from_fewer_and_are_those_of_one_run(tmp_path, monkeypatch):
    store = str(tmp_path / "kept")
    evaluate(tmp_path, Evaluator(num_samples=2, store=store), "test")
    members = []
    sample = PolicyModule.sample

    def watched(self, prompts, sampling, *args, first_member=0, **kwargs):
        members.append(list(range(first_member, first_member + sampling.num_samples)))
        return sample(self, prompts, sampling, *args, first_member=first_member, **kwargs)

    monkeypatch.setattr(PolicyModule, "sample", watched)
    evaluate(tmp_path / "more", Evaluator(num_samples=5, store=store), "test")
    assert members == [[2, 3, 4]] * 2
    evaluate(tmp_path / "whole", Evaluator(num_samples=5), "test")
    more, whole = (answers(tmp_path / folder / "test")[0]["datasets"] for folder in ("more", "whole"))
    assert more == whole


def test_other_settings_and_other_weights_have_files_of_their_own(tmp_path):
    store = str(tmp_path / "kept")
    for evaluator in (Evaluator(store=store), Evaluator(store=store, temperature=0.5), Evaluator(store=store)):
        evaluate(tmp_path, evaluator, "test")
    assert len(list((tmp_path / "kept").iterdir())) == 2
    other = make_module()
    with torch.no_grad():
        next(other.policy.parameters()).mul_(1.5)
    evaluate(tmp_path, Evaluator(store=store), "test", module=other)
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_training_never_reads_the_store(tmp_path):
    evaluate(tmp_path, Evaluator(store=str(tmp_path / "kept")), "fit")
    assert not (tmp_path / "kept").exists()


def _ranks_test(rank, folder):
    evaluate(
        Path(folder), Evaluator(num_samples=2, store=f"{folder}/kept"), "test", Sums(val=3, batch_size=1),
        devices=2, strategy="ddp",
    )  # fmt: skip


def test_two_processes_write_the_results_of_one_and_one_goes_on_from_their_files(tmp_path, monkeypatch):
    spawn(_ranks_test, tmp_path)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    two, _ = answers(tmp_path / "test")
    monkeypatch.setattr(CompletionStore, "add", None)
    evaluate(
        tmp_path / "one", Evaluator(num_samples=2, store=str(tmp_path / "kept")), "test", Sums(val=3, batch_size=3)
    )
    one, _ = answers(tmp_path / "one" / "test")
    assert one["datasets"] == two["datasets"]
