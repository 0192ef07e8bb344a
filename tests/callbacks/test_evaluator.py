"""The evaluator: right answers over problems, each once, never in the sanity check, with its own sampling."""

import pytest
import torch

from gtpo_lightning import Problem, Rollout
from gtpo_lightning.callbacks import Evaluator
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


def test_k_05b_scores_are_means_over_problems_and_k_10_apart_from_format():
    evaluator = Evaluator(num_samples=2)
    full = "<reasoning>r</reasoning><answer>{}</answer>"
    texts = [full.format(5), "<answer>5</answer>", full.format(1), full.format(2)]
    evaluator._judge(judged(texts, ["5", "2"], 2))
    scores = evaluator._scores(FakeTrainer(), "val")
    assert scores == {"val/toy/avg@2": 0.75, "val/toy/format": 0.75, "val/toy/length": 4.0}


def test_k_12_a_repeated_problem_counts_once():
    evaluator = Evaluator()
    for _ in range(3):
        evaluator._judge(judged(["<answer>5</answer>"], ["5"], 1))
    evaluator._judge(judged(["<answer>5</answer>", "<answer>7</answer>"], ["5", "6"], 1))
    assert evaluator._scores(FakeTrainer(), "val")["val/toy/avg@1"] == 0.5


def test_k_13_own_sampling_and_greedy_with_several_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_samples: 4"):
        Evaluator(num_samples=4, greedy=True)
    module = make_module()
    trainer = make_trainer(tmp_path, [Evaluator(num_samples=3, max_completion_length=5)], limit_val_batches=1)
    trainer.validate(module, Sums(batch_size=2), verbose=False)
    assert module.eval_sampling.num_samples == 3
    assert module.sampling.num_samples == 4
    assert trainer.callback_metrics["val/sums/length"] <= 5


def test_an_unknown_answer_style_is_refused_at_once():
    with pytest.raises(ValueError, match="style"):
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
