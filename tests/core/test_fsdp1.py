"""FSDP1, Lightning's `FSDPStrategy`, on two CPU processes: rollouts, gradients and weights of one process."""

import pytest
import torch
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from gtpo_lightning.callbacks import Evaluator
from gtpo_lightning.fsdp import prepare
from gtpo_lightning.policy import Policy
from tests.core.test_policy import NAMES, build
from tests.core.test_sharding import PARTS, SETTINGS, Sampled, made
from tests.helpers.cpu_strategies import FSDPOnCPU
from tests.helpers.training import Sums, all_parts, assert_trained_as_one, flat, make_module, make_trainer, spawn

LOGGED = ("train/grad_norm", "train/kl", "train/reward", "train/entropy", "gtpo/conflict_frac", "val/sums/avg@1")


def train(folder, ranks, *, steps=1, data=None, trainer=None, **settings):
    """What the weights lost (with SGD at learning rate 1 the clipped gradients), what was sampled and logged."""
    module = make_module(**settings)
    start = flat(module)
    sampled = Sampled()
    flags = {"devices": 2, "strategy": FSDPOnCPU()} if ranks == 2 else {}
    parts = [sampled, *all_parts(), Evaluator()]
    settings = {"max_steps": steps, "gradient_clip_val": 0.5, "max_epochs": -1, "limit_val_batches": 1.0}
    fit = make_trainer(folder, parts, **{**settings, **flags, **(trainer or {})}, val_check_interval=1)
    fit.fit(module, data or Sums(batch_size=4 // ranks, shuffle=False))
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    return start - whole(fit, module), sampled.seen, {**logged, "history": parts[-1].history}


def whole(trainer, module):
    if not isinstance(trainer.strategy.model, FullyShardedDataParallel):
        return flat(module)
    with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
        return flat(module)


def judged(folder, module, **flags):
    data = Sums(val=3, batch_size=2, shuffle=False)
    make_trainer(folder, [Evaluator(store=f"{folder}/kept")], limit_test_batches=1.0, **flags).test(module, data)


def _judged(rank, folder):
    judged(folder, make_module(), devices=2, strategy=FSDPOnCPU())


def test_an_evaluation_under_fsdp1_knows_the_policy_by_its_weights(tmp_path):
    spawn(_judged, tmp_path)
    judged(tmp_path / "one", make_module())
    here, there = ({file.name for file in (folder / "kept").iterdir()} for folder in (tmp_path, tmp_path / "one"))
    assert there
    assert there <= here


LAYERS = {
    "llama": "LlamaDecoderLayer",
    "llama-tied": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "mistral-sliding": "MistralDecoderLayer",
    "gpt2": "GPT2Block",
    "cohere-scaled": "CohereDecoderLayer",
    "granite-scaled": "GraniteDecoderLayer",
    "gemma2-capped": "Gemma2DecoderLayer",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_layers_of_each_layout_are_the_units(name):
    policy, strategy = Policy(build(name)), FSDPStrategy(parallel_devices=[torch.device("cpu")])
    prepare(strategy, nn.ModuleList([policy, nn.Linear(2, 2)]))
    units = strategy.kwargs["auto_wrap_policy"]._run_policy(nn.ModuleList([policy]), set(), {})
    assert [type(layer).__name__ for layer in units] == [LAYERS[name]] * 2
    assert strategy.kwargs["use_orig_params"]  # trained adapters lie beside frozen weights


def test_a_wrapping_policy_that_was_given_stays():
    mine = ModuleWrapPolicy({nn.Embedding})
    strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")], auto_wrap_policy=mine)
    prepare(strategy, Policy(build("llama")))
    assert strategy.kwargs["auto_wrap_policy"] is mine


def test_rotary_frequencies_stay_in_fp32_under_mixed_precision():
    strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")], precision_plugin=FSDPPrecision("bf16-mixed"))
    assert strategy.mixed_precision_config.buffer_dtype == torch.bfloat16  # what Lightning would do
    prepare(strategy, Policy(build("llama")))
    assert strategy.mixed_precision_config.buffer_dtype is None
    assert strategy.mixed_precision_config.param_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"activation_checkpointing_policy": {nn.Embedding}},
            "activation_checkpointing_policy: .* model.gradient_checkpointing: true",
        ),
        ({}, "dtype: weights of several dtypes .bfloat16, float32. .* valid: dtype: float32"),
    ],
)
def test_what_fsdp1_cannot_do_is_refused(settings, message):
    policy = Policy(build("llama"))
    if not settings:
        policy.causal_lm.lm_head.bfloat16()
    strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")], **settings)
    with pytest.raises(ValueError, match=message):
        prepare(strategy, policy)


CASES = {
    "plain": {},
    "micro": {"micro_batch_size": 3},
    "layers": {"gradient_checkpointing": True},
    "lora": {"lora": {"rank": 4}, "micro_batch_size": 3},
}


def _fsdp1(rank, folder):
    torch.save({name: train(folder, 2, **case) for name, case in CASES.items()}, f"{folder}/{rank}.pt")


def test_two_processes_under_fsdp1_train_and_are_judged_as_one(tmp_path):
    spawn(_fsdp1, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, case in CASES.items():
        assert_trained_as_one(train(tmp_path, 1, **case), first[name], second[name], LOGGED, name)


def _uneven(rank, folder):
    # 5 problems on 2 ranks of 2: the last step of an epoch has one problem, so one rank has an empty list.
    data = Sums(train=5, val=3, batch_size=2, val_batch_size=2, shuffle=False)
    _, sampled, logged = train(folder, 2, steps=4, data=data, trainer={"max_epochs": 2})
    torch.save((sampled, logged), f"{folder}/{rank}.pt")


def test_e_13_a_process_without_work_stops_no_other_under_fsdp1(tmp_path):
    spawn(_uneven, tmp_path)
    (mine, logged), (theirs, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert sorted(map(len, (mine[1], theirs[1]))) == [0, 4]
    assert logged["train/grad_norm"] > 0


def _resumed(rank, folder):
    data = Sums(train=16, batch_size=2, shuffle=False)
    for name, settings in SETTINGS.items():
        for kind in ("full", "sharded"):
            path, weights = f"{folder}/{name}_{kind}.ckpt", []
            for steps, ckpt_path in ((4, None), (2, None), (4, path)):
                module = made(settings)
                strategy = FSDPOnCPU(state_dict_type=kind)
                trainer = make_trainer(folder, PARTS, max_steps=steps, max_epochs=-1, devices=2, strategy=strategy)
                trainer.fit(module, data, ckpt_path=ckpt_path)
                if steps == 2:
                    trainer.save_checkpoint(path)
                weights.append(whole(trainer, module))
            torch.save(weights, f"{folder}/{name}_{kind}{rank}.pt")


def test_e_08_a_resumed_run_under_fsdp1_ends_where_the_unbroken_one_does(tmp_path):
    spawn(_resumed, tmp_path)
    for name, settings in SETTINGS.items():
        for kind in ("full", "sharded"):
            unbroken, _, resumed = torch.load(tmp_path / f"{name}_{kind}0.pt")
            assert torch.equal(resumed, unbroken), (name, kind)
        saved = torch.load(tmp_path / f"{name}_full.ckpt", weights_only=True)["state_dict"]
        assert {"lora" in key for key in saved} == {name == "lora"}
        module = made(settings)
        trainer = make_trainer(tmp_path, PARTS, max_steps=4, max_epochs=-1)
        trainer.fit(module, Sums(train=16, batch_size=4, shuffle=False), ckpt_path=str(tmp_path / f"{name}_full.ckpt"))
        assert (flat(module) - unbroken).abs().max() < 1e-3, name  # Adam makes steps of the last digits
