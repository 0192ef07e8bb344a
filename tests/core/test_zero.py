"""DeepSpeed's ZeRO, stages 2 and 3, on two CPU processes: rollouts, gradients and weights of one process."""

import os
import re
import subprocess
import sys

import pytest
import torch

from gtpo_lightning.callbacks import Evaluator
from gtpo_lightning.checkpoint_folders import check_checkpoint
from tests.core.test_sharding import PARTS, SETTINGS, Sampled, made
from tests.helpers.cpu_strategies import DeepSpeedOnCPU
from tests.helpers.training import Sums, all_parts, assert_trained_as_one, flat, make_module, make_trainer, spawn

pytest.importorskip("deepspeed")

LOGGED = ("train/kl", "train/reward", "train/entropy", "gtpo/conflict_frac", "val/sums/avg@1")


def whole(module):
    import deepspeed

    split = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(split):
        return flat(module).clone()


def train(folder, stage, *, steps=1, data=None, trainer=None, **settings):
    """What the weights lost (with SGD at learning rate 1 the clipped gradients), what was sampled and logged."""
    module = make_module(**settings)
    start = flat(module)
    sampled = Sampled()
    flags = {"devices": 2, "strategy": DeepSpeedOnCPU(stage)} if stage else {}
    parts = [sampled, *all_parts(), Evaluator()]
    settings = {"max_steps": steps, "gradient_clip_val": 0.5, "max_epochs": -1, "limit_val_batches": 1.0}
    fit = make_trainer(folder, parts, **{**settings, **flags, **(trainer or {})}, val_check_interval=1)
    fit.fit(module, data or Sums(batch_size=2 if stage else 4, shuffle=False))
    if stage == 3:
        sizes = {p.numel() for p in module.policy.parameters()}
        assert sizes == {0}  # between steps a process holds no whole weight
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    return start - (whole(module) if stage else flat(module)), sampled.seen, {**logged, "history": parts[-1].history}


CASES = {
    "plain": {},
    "micro": {"micro_batch_size": 3},
    "layers": {"gradient_checkpointing": True},
    "lora": {"lora": {"rank": 4}, "micro_batch_size": 3},
    "lora_head": {"lora": {"rank": 4, "targets": ["q_proj", "lm_head"]}},
}


def _stage_2(rank, folder):
    torch.save({name: train(folder, 2, **case) for name, case in CASES.items()}, f"{folder}/2{rank}.pt")


def _stage_3(rank, folder):
    torch.save({name: train(folder, 3, **case) for name, case in CASES.items()}, f"{folder}/3{rank}.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_under_zero_train_and_are_judged_as_one(stage, tmp_path):
    spawn(_stage_2 if stage == 2 else _stage_3, tmp_path)
    first, second = (torch.load(tmp_path / f"{stage}{rank}.pt") for rank in (0, 1))
    for name, case in CASES.items():
        assert_trained_as_one(train(tmp_path, 0, **case), first[name], second[name], LOGGED, name)


def _uneven(rank, folder):
    # 5 problems on 2 ranks of 2: the last step of an epoch has one problem, so one rank has an empty list.
    for stage in (2, 3):
        data = Sums(train=5, val=3, batch_size=2, val_batch_size=2, shuffle=False)
        lost, sampled, _ = train(folder, stage, steps=4, data=data, trainer={"max_epochs": 2})
        torch.save((sampled, float(lost.abs().max())), f"{folder}/{stage}{rank}.pt")


def test_e_13_a_process_without_work_stops_no_other_under_zero(tmp_path):
    spawn(_uneven, tmp_path)
    for stage in (2, 3):
        (mine, lost), (theirs, _) = (torch.load(tmp_path / f"{stage}{rank}.pt") for rank in (0, 1))
        assert sorted(map(len, (mine[1], theirs[1]))) == [0, 4]
        assert lost > 0


def _accumulated(rank, folder):
    flags = {"devices": 2, "strategy": DeepSpeedOnCPU(2), "accumulate_grad_batches": 2}
    with pytest.raises(ValueError, match="accumulate_grad_batches: 2 with DeepSpeed"):
        make_trainer(folder, **flags).fit(made({}), Sums(batch_size=2))
    torch.save(True, f"{folder}/{rank}.pt")


def test_accumulation_which_deepspeed_keeps_to_itself_is_refused(tmp_path):
    spawn(_accumulated, tmp_path)
    assert torch.load(tmp_path / "0.pt")


def _resumed(rank, folder):
    data = Sums(train=16, batch_size=2, shuffle=False)
    for stage in (2, 3):
        for name, settings in SETTINGS.items():
            path, weights = f"{folder}/{name}{stage}.ckpt", []
            for steps, ckpt_path in ((4, None), (2, None), (4, path)):
                module = made(settings)
                flags = {"devices": 2, "strategy": DeepSpeedOnCPU(stage)}
                trainer = make_trainer(folder, PARTS, max_steps=steps, max_epochs=-1, **flags)
                trainer.fit(module, data, ckpt_path=ckpt_path)
                if steps == 2:
                    trainer.save_checkpoint(path)
                weights.append(whole(module))
            torch.save(weights, f"{folder}/{name}{stage}{rank}.pt")


@pytest.mark.slow
def test_e_08_a_resumed_run_under_zero_ends_where_the_unbroken_one_does(tmp_path):
    spawn(_resumed, tmp_path)
    for stage in (2, 3):
        for name in SETTINGS:
            unbroken, half, resumed = torch.load(tmp_path / f"{name}{stage}0.pt")
            assert (half - unbroken).abs().max() > 1e-3
            assert (resumed - unbroken).abs().max() < 1e-6, (stage, name)
            if stage == 2:  # the conversion of its folders is the same
                continue
            path = f"{tmp_path}/{name}{stage}.ckpt"
            with pytest.raises(ValueError, match=r"weights: .* checkpoint of DeepSpeed") as refused:
                check_checkpoint(path, "weights")
            code = re.search(r'python -c "(.*)"', str(refused.value)).group(1)
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
            module = made({**SETTINGS[name], "weights": f"{path}.single"})
            module.configure_model()
            assert torch.equal(flat(module), half), (stage, name)
