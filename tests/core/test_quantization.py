"""4-bit weights below adapters: refusals anywhere, training and merging where bitsandbytes is installed."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM

from gtpo_lightning import GTPOModule
from gtpo_lightning.callbacks import KLPenalty
from gtpo_lightning.export import Export, export
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.models import tiny_model, tiny_tokenizer
from gtpo_lightning.strategies import check_run
from tests.helpers.training import Sums, adam, make_trainer, vowels

bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def folder_of(path):
    tiny_tokenizer().save_pretrained(path)
    tiny_model(len(tiny_tokenizer())).save_pretrained(path)
    return str(path)


def made(model, **kwargs):
    settings = {"group_size": 4, "max_completion_length": 8, "prompt_template": "{question}", "rewards": {vowels: 1.0}}
    lora = {"lora": {"rank": 4, "alpha": 8.0}, "quantization": "4bit", "optimizer": adam}
    return GTPOModule(model, **{**settings, **lora, **kwargs})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "8bit"}, "quantization: '8bit' is not valid; valid: null, 4bit"),
        ({"lora": None}, "quantization: '4bit' weights cannot be trained themselves; valid: lora settings"),
        ({"model": "tiny"}, "is for models read from their own files, which this one is not"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(tmp_path, settings, words, monkeypatch):
    monkeypatch.setattr("gtpo_lightning.policy_source.load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=words):
        made(**{"model": folder_of(tmp_path), **settings})


def test_without_bitsandbytes_it_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n == "bitsandbytes" else find(n, *a))
    with pytest.raises(ValueError, match="needs the package bitsandbytes, which is not installed; valid: pip install"):
        made(folder_of(tmp_path))


@bitsandbytes
def test_without_a_device_for_it_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("bitsandbytes.supported_torch_devices", {"cuda"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs a GPU with bitsandbytes .*, and torch finds none"):
        made(folder_of(tmp_path))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


def dense(module):
    """The numbers that the 4-bit weights stand for, in a plain model."""
    from bitsandbytes.functional import dequantize_4bit

    model = tiny_model(len(tiny_tokenizer()))
    for name, layer in module.policy.causal_lm.named_modules():
        if type(layer).__name__ == "Linear4bit" and hasattr(layer, "quant_state"):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            model.get_submodule(name.removesuffix(".base_layer")).weight.data = weight.float()
    return model


@bitsandbytes
def test_adapters_over_4_bits_train_with_the_gradient_of_the_dequantised_model(tmp_path):
    from peft import LoraConfig, get_peft_model

    module = made(folder_of(tmp_path / "m"), gradient_checkpointing=True, micro_batch_size=3)
    module.configure_model()
    kinds = [type(layer).__name__ for layer in module.policy.causal_lm.modules()]
    assert kinds.count("Linear4bit") >= 14
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:2]), module.sampling, "train")
    logprobs, _ = module.score(rollout)
    torch.testing.assert_close(logprobs.detach(), rollout.sampled_logprobs, atol=1e-5, rtol=0)
    logprobs.sum().backward()
    reference = get_peft_model(dense(module), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    own = {name.removeprefix("model."): p for name, p in module.policy.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in own:
                parameter.copy_(own[name])
    total = torch.tensor(0.0)
    for i, length in enumerate(rollout.lengths.tolist()):
        prompt = module.codec.prompt_ids(rollout.prompts.problems[int(rollout.group_ids[i])])
        completion = rollout.completion_ids[i, :length]
        out = reference(input_ids=torch.cat([torch.tensor(prompt), completion])[None]).logits[0, len(prompt) - 1 : -1]
        total = total + out.log_softmax(-1).gather(1, completion[:, None]).sum()
    total.backward()
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-4, rtol=1e-3, msg=name)


@bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p_03_an_adapter_is_merged_into_dequantised_weights(tmp_path, dtype):
    name = folder_of(tmp_path / "m")
    module = made(name, dtype=dtype)
    trainer = make_trainer(tmp_path, [KLPenalty(0.1)], max_steps=2, max_epochs=-1)
    trainer.fit(module, Sums(batch_size=2))
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    names = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name for name in names)
    folder = export(Export(str(tmp_path / "x.ckpt"), str(tmp_path / "out"), dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    close = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(logits(model), logits(module.policy.model).float(), atol=close, rtol=0)
    if dtype == "float32":  # what merging in place would give: the sum rounded to 4 bits again
        rounded = module.policy.model.merge_and_unload()
        assert (logits(rounded) - logits(model)).abs().max() > 1e-3


@bitsandbytes
def test_e_08_4_bit_runs_resume_exactly_and_refuse_dense_weights(tmp_path):
    name = folder_of(tmp_path / "m")

    def run(steps, ckpt_path=None, save=None):
        module = made(name)
        trainer = make_trainer(tmp_path, [KLPenalty(0.1)], max_steps=steps, max_epochs=-1)
        trainer.fit(module, Sums(train=10, batch_size=2), ckpt_path=ckpt_path)
        if save:
            trainer.save_checkpoint(save)
        return {n: p.detach().clone() for n, p in module.policy.named_parameters() if p.requires_grad}

    whole = run(4)
    run(2, save=tmp_path / "x.ckpt")
    again = run(4, ckpt_path=str(tmp_path / "x.ckpt"))
    assert all(torch.equal(again[n], whole[n]) for n in whole)
    full = made(name, lora=None, quantization=None)
    trainer = make_trainer(tmp_path)
    trainer.fit(full, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    with pytest.raises(ValueError, match=r"weights: .* holds dense weights, which cannot be read into 4 bits"):
        made(name, weights=str(tmp_path / "full.ckpt")).configure_model()


class KL(RLCallback):
    """Each step's exact KL estimate, before it is logged."""

    def __init__(self):
        self.seen = []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        real = rollout.completion_mask.bool()
        self.seen.append(float((rollout.logprobs.detach() - rollout.ref_logprobs)[real].abs().max()))


@bitsandbytes
@pytest.mark.parametrize("start", ["untrained", "trained"])
def test_p_01_over_4_bits_the_kl_of_the_first_step_is_0_and_then_is_not(tmp_path, start):
    settings = {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_size": 3}
    name = folder_of(tmp_path / "m")
    if start == "trained":  # the reference is then a second adapter over the same 4 bits
        module = made(name, **settings)
        trainer = make_trainer(tmp_path, max_steps=2, max_epochs=-1)
        trainer.fit(module, Sums(batch_size=2))
        trainer.save_checkpoint(tmp_path / "start.ckpt")
        settings["weights"] = str(tmp_path / "start.ckpt")
    module, kl = made(name, **settings), KL()
    make_trainer(tmp_path, [KLPenalty(0.1), kl], max_steps=2, max_epochs=-1).fit(module, Sums(batch_size=2))
    assert kl.seen[0] == 0
    assert kl.seen[1] > 1e-4
    layers = [type(layer).__name__ for layer in module.policy.causal_lm.modules()]
    assert layers.count("Linear4bit") >= 14


def test_4_bits_that_a_strategy_would_cut_apart_are_refused():
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(ValueError, match=r"quantization: '4bit' .* ModelParallelStrategy would cut apart; valid: "):
        check_run(SimpleNamespace(strategy=strategy, accumulate_grad_batches=1), "4bit")
