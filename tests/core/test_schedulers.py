"""The warm-up cosine: its values, its length, and what a resumed run takes from it."""

import math

import pytest
import torch

from gtpo_lightning.schedulers import WarmupCosine
from tests.helpers.training import Sums, make_module, make_trainer


def rates(steps, **settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = WarmupCosine(optimizer, **settings)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_values_against_the_formula():
    expected = [0.5, 1.0, 1.5, 2.0]
    expected += [2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 16))) for k in range(16)]
    assert rates(20, warmup=4, total_steps=20, final=0.1) == pytest.approx(expected)
    assert rates(20, warmup=0.2, total_steps=20, final=0.1) == pytest.approx(expected)
    assert rates(25, warmup=0, total_steps=20)[20:] == [0.0] * 5


@pytest.mark.parametrize(
    ("name", "value"), [("warmup", -1), ("final", 2), ("total_steps", 0), ("total_steps", math.inf)]
)
def test_values_outside_their_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}: {value}"):
        rates(1, **{name: value})


def test_the_length_is_the_trainers_and_a_longer_resumed_run_stretches_it(tmp_path):
    def fit(steps, ckpt_path=None):
        module = make_module(lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup=0))
        trainer = make_trainer(tmp_path, max_steps=steps, max_epochs=-1)
        trainer.fit(module, Sums(batch_size=2), ckpt_path=ckpt_path)
        return trainer

    first = fit(2)
    assert first.lr_scheduler_configs[0].scheduler.total_steps == 2
    first.save_checkpoint(tmp_path / "x.ckpt")
    again = fit(4, ckpt_path=str(tmp_path / "x.ckpt"))
    scheduler = again.lr_scheduler_configs[0].scheduler
    assert scheduler.total_steps == 4
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi)))


def test_a_run_without_an_end_is_refused(tmp_path):
    module = make_module(lr_scheduler=WarmupCosine)
    with pytest.raises(ValueError, match="total_steps: inf"):
        make_trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(module, Sums(batch_size=2))


def test_a_length_that_nobody_tells_is_refused_after_the_first_step():
    with pytest.raises(ValueError, match="total_steps: null"):
        rates(2)
