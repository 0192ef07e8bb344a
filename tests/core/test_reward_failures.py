"""Training goes on when a reward function raises or hangs, and what happened is logged."""

import os
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
import yaml

from gtpo_lightning import GTPOModule
from gtpo_lightning.cli import main
from gtpo_lightning.rewards.pool import WorkerPool, grading_pool
from tests.helpers.training import Sums, make_module, make_trainer, spawn

CONFIGS = Path(__file__).parents[2] / "configs"


def raises_on(*characters):
    """1 for each completion, but raises for those with one of the characters; by value, for a worker too."""

    def picky(completions):
        if any(character in text for text in completions for character in characters):
            raise KeyError("unwelcome")
        return [1.0] * len(completions)

    return picky


def half(completions):
    return [0.5] * len(completions)


def bad(text):
    return "a" in text or "1" in text


class Steps(pl.Callback):
    """What each optimizer step logged, with the texts and rewards of its batches."""

    def __init__(self):
        self.texts, self.rewards, self.logged, self.workers = [], [], [], []

    def on_train_start(self, trainer, pl_module):
        inner = pl_module.reward

        def reward(rollout):
            inner(rollout)
            self.texts += rollout.texts
            self.rewards += rollout.rewards.tolist()

        pl_module.reward = reward

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.workers.append(len(workers()))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            names = [name for name in trainer.callback_metrics if name.startswith("rewards/")]
            metrics = {name: float(trainer.callback_metrics[name]) for name in names}
            self.logged.append((self.texts, self.rewards, metrics))
            self.texts, self.rewards = [], []


def workers():
    """The worker processes of this process that run."""
    found = psutil.Process().children()
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and "worker.py" in " ".join(p.cmdline())]


def train(folder, module, *callbacks, batch_size=4, **trainer):
    steps = Steps()
    fit = make_trainer(folder, [steps, *callbacks], **{"max_steps": 2, **trainer})
    fit.fit(module, Sums(batch_size=batch_size, shuffle=False))
    return steps


@pytest.mark.filterwarnings("ignore:reward function")
@pytest.mark.parametrize("split", [{"batch_size": 4}, {"batch_size": 2, "accumulate_grad_batches": 2}])
def test_two_steps_of_a_reward_that_raises_on_some(tmp_path, split):
    module = make_module(rewards={raises_on("a", "1"): 1.0, half: 1.0})
    steps = train(tmp_path, module, **split)
    assert len(steps.logged) == 2
    for texts, rewards, logged in steps.logged:
        share = sum(map(bad, texts)) / 16
        assert len(texts) == 16
        assert 0 < share < 1
        assert rewards == [0.5 if bad(text) else 1.5 for text in texts]  # the other function has scored them
        assert logged == {
            "rewards/picky/error_frac": share,
            "rewards/picky/none_frac": share,
            "rewards/picky/timeout_frac": 0.0,
            "rewards/half/error_frac": 0.0,
            "rewards/half/none_frac": 0.0,
            "rewards/half/timeout_frac": 0.0,
        }


def _ddp(rank, folder):
    steps = train(folder, make_module(rewards={raises_on("a", "1"): 1.0}), batch_size=2, devices=2, strategy="ddp")
    torch.save(steps.logged, f"{folder}/{rank}.pt")


def test_shares_are_those_of_all_ranks(tmp_path):
    spawn(_ddp, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    counts = [[sum(map(bad, texts)) for texts, *_ in logged] for logged in ranks]
    assert counts[0] != counts[1]
    for step in range(2):
        share = (counts[0][step] + counts[1][step]) / 16
        assert [logged[step][2]["rewards/picky/error_frac"] for logged in ranks] == [share, share]


def test_the_first_error_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match="reward function 'picky' raised KeyError: 'unwelcome'") as caught:
        train(tmp_path, make_module(rewards={raises_on("a", "1"): 1.0}))
    assert sum("picky" in str(warning.message) for warning in caught) == 1


def test_an_option_ends_the_run_instead(tmp_path):
    module = make_module(rewards={raises_on("a", "1"): 1.0}, reward_errors="raise")
    with pytest.raises(RuntimeError, match="reward function 'picky' raised KeyError: 'unwelcome'"):
        train(tmp_path, module)


@pytest.mark.filterwarnings("ignore:reward function")
def test_a_reward_that_hangs_and_dies_on_some(tmp_path):
    def hangs(completions, answer):
        import os
        import time

        if "a" in completions[0]:
            time.sleep(60)
        if "1" in completions[0]:
            os._exit(1)
        return [1.0]

    start = time.monotonic()
    steps = train(tmp_path, make_module(rewards={hangs: 1.0}, reward_time_limit=0.2), max_steps=1)
    assert time.monotonic() - start < 20
    ((texts, rewards, logged),) = steps.logged
    late, dead = sum("a" in text for text in texts), sum("1" in text and "a" not in text for text in texts)
    assert late > 0
    assert dead > 0
    assert logged == {
        "rewards/hangs/error_frac": dead / 16,
        "rewards/hangs/none_frac": (late + dead) / 16,
        "rewards/hangs/timeout_frac": late / 16,
    }
    assert [reward == 1.0 for reward in rewards] == [not bad(text) for text in texts]


def test_no_process_is_left_after_a_run(tmp_path):
    class Grades(pl.Callback):
        """Keeps a worker of the process's other pools busy too."""

        pool = WorkerPool("functions", function=os.getpid)

        def on_validation_batch_end(self, *_):
            assert self.pool.map([((), {})])[0].failure is None

        def on_train_batch_end(self, *_):
            self.on_validation_batch_end()

    module = make_module(rewards={raises_on("§"): 1.0}, reward_time_limit=20.0)
    steps = train(tmp_path, module, Grades(), max_steps=1)
    assert min(steps.workers) >= 1
    assert workers() == []
    make_trainer(tmp_path, [Grades()], limit_val_batches=1).validate(module, Sums(batch_size=4), verbose=False)
    assert workers() == []
    assert train(tmp_path, module, max_steps=1).workers[0] >= 1  # they start again


def test_no_process_is_left_after_an_exception(tmp_path):
    class StopError(Exception):
        pass

    class Stop(pl.Callback):
        def on_train_batch_end(self, *_):
            assert len(workers()) >= 1
            raise StopError

    module = make_module(rewards={raises_on("§"): 1.0}, reward_time_limit=20.0)
    trainer = make_trainer(tmp_path, [Stop()], max_steps=5)
    for _ in range(2):  # again with the same trainer
        with pytest.raises(StopError):
            trainer.fit(module, Sums(batch_size=4))
        assert workers() == []
    assert sum("Close" in type(callback).__name__ for callback in trainer.callbacks) == 1


def test_the_grading_pool_serves_after_a_run(tmp_path):
    before = grading_pool()
    train(tmp_path, make_module(rewards="correct_answer"), max_steps=1)
    assert grading_pool() is before
    assert workers() == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"reward_errors": "ignore"}, "reward_errors: 'ignore'; valid: skip, raise"),
        ({"reward_time_limit": 0}, "reward_time_limit: 0; valid: null"),
        ({"reward_time_limit": -1.0}, "reward_time_limit: -1"),
    ],
)
def test_refused_before_the_model_is_read(setting, words):
    with pytest.raises(ValueError, match=words):
        GTPOModule("tiny", **setting)


def test_the_command_line_reaches_both(tmp_path, capsys):
    arguments = ["fit", "-c", str(CONFIGS / "gtpo.yaml"), "-c", str(CONFIGS / "models/tiny.yaml")]
    with pytest.raises(SystemExit):
        main([*arguments, "--model.reward_errors=raise", "--model.reward_time_limit=2.5", "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert (shown["reward_errors"], shown["reward_time_limit"]) == ("raise", 2.5)
    with pytest.raises(SystemExit):
        main([*arguments, "--model.reward_errors=ignore"])
    assert "reward_errors" in capsys.readouterr().err
    settings = yaml.safe_load((CONFIGS / "gtpo.yaml").read_text())["model"]["init_args"]
    assert (settings["reward_errors"], settings["reward_time_limit"]) == ("skip", None)


def test_m_04_what_was_not_scored_is_left_out_of_a_logged_mean_with_its_weight(tmp_path):
    """1, not scored, 3 and 3: the mean is 7/3, and not (1 + 3 + 3) / 4."""

    def fixed(completions):
        return [1.0, None, 3.0, 3.0]

    fit = make_trainer(tmp_path)
    fit.fit(make_module(rewards={fixed: 1.0}), Sums(batch_size=1, shuffle=False))
    assert float(fit.callback_metrics["train/rewards/fixed/mean"]) == pytest.approx(7 / 3)
    assert float(fit.callback_metrics["train/reward"]) == pytest.approx(7 / 3)
    assert float(fit.callback_metrics["rewards/fixed/none_frac"]) == 0.25
