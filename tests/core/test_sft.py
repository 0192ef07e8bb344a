"""Supervised fine-tuning: cross-entropy over target tokens, the same for any split."""

import pytest
import torch

from gtpo_lightning import SFTModule
from tests.helpers.training import Sums, flat, make_trainer, sgd, spawn


class Targets(Sums):
    def make_problems(self, split):
        problems = super().make_problems(split)
        for i, problem in enumerate(problems):
            problem.meta["target"] = "<answer>" + "12345"[: 1 + i % 5] + "</answer>"
        return problems


def step(folder, batch_size=4, accumulate=1, devices=1, strategy="auto", **settings):
    module = SFTModule("tiny", prompt_template="{question}", optimizer=sgd, **settings)
    module.configure_model()
    before = flat(module)
    trainer = make_trainer(folder, accumulate_grad_batches=accumulate, devices=devices, strategy=strategy)
    trainer.fit(module, Targets(batch_size=batch_size, shuffle=False))
    return before - flat(module), trainer


def reference(limit=100):
    module = SFTModule("tiny", prompt_template="{question}")
    module.configure_model()
    total, tokens = torch.tensor(0.0), 0
    for problem in Targets(batch_size=4).make_problems("train")[:4]:
        prompt = module.codec.tokenizer(problem.question).input_ids
        target = [*module.codec.tokenizer(problem.meta["target"]).input_ids, module.codec.tokenizer.eos_token_id][
            :limit
        ]
        logits = module.policy.model(input_ids=torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")
        tokens += len(target)
    (total / tokens).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.policy.parameters()]), float(total / tokens)


def test_the_gradient_is_that_of_cross_entropy_over_target_tokens(tmp_path):
    grad, trainer = step(tmp_path)
    expected, loss = reference()
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "split", [{"micro_batch_size": 3}, {"batch_size": 2, "accumulate": 2}, {"batch_size": 1, "accumulate": 4}]
)
def test_d_01_the_gradient_does_not_depend_on_the_split(tmp_path, split):
    torch.testing.assert_close(step(tmp_path, **split)[0], step(tmp_path)[0], atol=1e-6, rtol=1e-4)


def test_long_targets_are_cut_counted_and_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="max_completion_length: 4 cuts targets of up to 7 tokens"):
        grad, trainer = step(tmp_path, max_completion_length=4)
    assert trainer.lightning_module.cut_targets == 3  # targets of 4, 5, 6 and 7 tokens
    expected, _ = reference(limit=4)
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)


def _ranks(rank, folder):
    torch.save(step(folder, batch_size=2, devices=2, strategy="ddp")[0], f"{folder}/{rank}.pt")


def test_two_processes_give_the_gradient_of_one(tmp_path):
    spawn(_ranks, tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "1.pt"), step(tmp_path)[0], atol=1e-6, rtol=1e-4)
