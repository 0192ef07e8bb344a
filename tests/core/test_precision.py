"""Which attention is chosen where, and what half-precision weights lose."""

import importlib.util
import warnings

import pytest
import torch

from gtpo_lightning import GTPOModule
from gtpo_lightning.attention import default_attention
from gtpo_lightning.fit_checks import lost_share
from gtpo_lightning.policy_source import PolicySource
from tests.helpers.training import Sums, make_trainer, vowels


@pytest.fixture
def flash(monkeypatch):
    """As on a machine with a GPU and the package."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: find("json") if n == "flash_attn" else find(n, *a))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return monkeypatch


def test_flash_attention_is_chosen_where_it_can_be_had(flash):
    for dtype in ("bfloat16", "float16"):
        assert default_attention(dtype, "cuda") == "flash_attention_2"
        assert default_attention(dtype, "cpu") is None
    assert default_attention("float32", "cuda") is None


@pytest.mark.parametrize("missing", ["package", "gpu"])
def test_flash_attention_is_not_chosen_where_something_is_missing(flash, missing):
    if missing == "gpu":
        flash.setattr("torch.cuda.is_available", lambda: False)
    else:
        find = importlib.util.find_spec
        flash.setattr("importlib.util.find_spec", lambda n, *a: None if n == "flash_attn" else find(n, *a))
    assert default_attention("bfloat16", "cuda") is None


def test_what_was_asked_for_wins_and_a_model_that_cannot_takes_the_default(flash):
    asked = []

    def load(name, *, attention=None, **settings):
        asked.append(attention)
        if attention == "flash_attention_2":
            raise ValueError("does not support Flash Attention")
        from gtpo_lightning.models import load_model

        return load_model(name, **settings)

    flash.setattr("gtpo_lightning.policy_source.load_model", load)
    PolicySource("tiny", dtype="bfloat16", device="cuda").start(None)
    assert asked == ["flash_attention_2", None]
    asked.clear()
    PolicySource("tiny", dtype="bfloat16", device="cuda", attention="eager").start(None)
    assert asked == ["eager"]
    with pytest.raises(ValueError, match="does not support"):
        PolicySource("tiny", dtype="bfloat16", device="cuda", attention="flash_attention_2").start(None)


def test_without_a_gpu_the_model_has_the_usual_attention():
    module = GTPOModule("tiny")
    module.configure_model()
    assert module.policy.causal_lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("values", "step", "share"),
    [
        ([1.0], 1e-6, 1.0),
        ([1.0], 2**-7, 0.0),  # the spacing of bf16 above 1
        ([1.0, 0.01, 1e-6, 0.0], 1e-6, 0.5),
        ([], 1e-6, 0.0),
    ],
)
def test_p_07_the_share_of_lost_updates_is_counted(values, step, share):
    assert lost_share([torch.tensor(values, dtype=torch.bfloat16)], step) == share
    assert lost_share([torch.tensor(values)], step) == 0.0  # fp32 keeps them


@pytest.mark.parametrize(("rate", "share"), [(1e-6, "100%"), (10.0, "0%")])
def test_p_07_the_warning_says_what_is_lost_at_the_runs_learning_rate(tmp_path, rate, share):
    def optimizer(params):
        return torch.optim.AdamW(params, lr=rate)

    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))

    module = GTPOModule("tiny", 4, 6, dtype="bfloat16", prompt_template="{question}", rewards=vowels,
                        optimizer=optimizer, lr_scheduler=warm_up)  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path).fit(module, Sums(batch_size=2))
    (said,) = (str(w.message) for w in caught if "half precision" in str(w.message))
    assert f"at the learning rate {rate:g}, {share} of them do not move" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_frequencies_stay_in_fp32_where_a_strategy_converts_the_weights(dtype):
    plain, module = (GTPOModule("tiny") for _ in range(2))
    for one in (plain, module):
        one.configure_model()
    expected = dict(plain.policy.named_buffers())
    module.to(dtype)  # as bf16-true and DeepSpeed do
    assert {p.dtype for p in module.policy.parameters()} == {dtype}
    assert expected
    for name, buffer in module.policy.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert not torch.equal(expected[name].to(dtype).float(), expected[name])
    module.double()
    assert {p.dtype for p in module.policy.parameters()} == {torch.float64}
