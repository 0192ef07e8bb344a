"""Settings of adapters: what is valid, what a folder of peft says, and refusals before weights are read."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gtpo_lightning import GTPOModule, SFTModule
from gtpo_lightning.lora import LoRA, lora_of_folder, lora_settings
from gtpo_lightning.models import load_model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "lora.rank: 0"),
        ({"rank": -4}, "lora.rank: -4"),
        ({"rank": True}, "lora.rank: True"),
        ({"rank": 2.0}, "lora.rank: 2.0"),
        ({"alpha": 0}, "lora.alpha: 0"),
        ({"alpha": float("nan")}, "lora.alpha: nan"),
        ({"dropout": 1.0}, "lora.dropout: 1.0"),
        ({"dropout": -0.1}, "lora.dropout: -0.1"),
        ({"rslora": "yes"}, "lora.rslora: 'yes'"),
        ({"targets": []}, r"lora.targets: \[\]"),
        ({"targets": ""}, "lora.targets: ''"),
        ({"modules_to_save": "lm_head"}, "lora.modules_to_save: 'lm_head'"),
        ({"ranks": 4}, "lora: ranks is not known; valid: rank, alpha, targets, dropout, rslora, modules_to_save"),
        ({"targets": ["q_proj", "w_proj"]}, r"lora.targets: 'w_proj' matches no module .*down_proj, .*q_proj"),
        ({"targets": "layers.9.*"}, r"lora.targets: 'layers.9\.\*' matches no module"),
        ({"modules_to_save": ["head"]}, r"lora.modules_to_save: 'head' matches no module .*lm_head"),
    ],
)
@pytest.mark.parametrize("module", [GTPOModule, SFTModule])
def test_bad_settings_are_refused_by_name_before_weights_are_read(module, settings, words, monkeypatch):
    monkeypatch.setattr("gtpo_lightning.policy_source.load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=words):
        module("tiny", lora=settings)


def test_something_else_than_settings_is_refused():
    with pytest.raises(ValueError, match="lora: 16 is not valid"):
        GTPOModule("tiny", lora=16)


def test_without_peft_the_extra_is_named(monkeypatch):
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "peft" else find(name, *a))
    with pytest.raises(ValueError, match=r"lora: needs the package peft.*gtpo-lightning\[peft\]"):
        GTPOModule("tiny", lora=LoRA())
    GTPOModule("tiny", lora=None)


def saved(folder, **settings):
    """An adapter that peft itself wrote, with weights that do something."""
    torch.manual_seed(3)
    model = get_peft_model(
        load_model("tiny"), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def test_the_settings_are_those_of_the_folder(tmp_path):
    folder = saved(tmp_path, r=6, lora_alpha=9, use_rslora=True, lora_dropout=0.1, modules_to_save=["lm_head"])
    expected = LoRA(6, 9.0, ["q_proj", "v_proj"], 0.1, True, ["lm_head"])
    assert lora_of_folder(folder) == lora_settings(None, folder) == expected
    own = LoRA(6, 9.0, "all-linear", 0.0, True)
    assert lora_settings(own, folder) == own  # dropout is the run's; targets are compared with the weights


@pytest.mark.parametrize(("name", "value"), [("rank", 8), ("alpha", 1.0), ("rslora", True)])
def test_settings_that_are_not_the_folders_are_refused(tmp_path, name, value):
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match=f"lora.{name}: {value!r}, but the adapter of "):
        lora_settings({"rank": 4, "alpha": 8.0, name: value}, folder)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"use_dora": True}, "use_dora: True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: "),
        ({"init_lora_weights": "olora"}, "init_lora_weights: olora"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_what_is_different(tmp_path, settings, word):
    folder = saved(tmp_path, **settings)
    with pytest.raises(ValueError, match=f"of a kind that is not supported .*{word}"):
        lora_of_folder(folder)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"adapter: .*holds no adapter_config.json"):
        GTPOModule("tiny", adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json that can be read"):
        GTPOModule("tiny", adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ValueError, match="peft_type: IA3"):
        GTPOModule("tiny", adapter=str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = saved(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    module = GTPOModule("tiny", adapter=folder)
    with pytest.raises(ValueError, match=r"adapter: .*holds no adapter_model.safetensors"):
        module.configure_model()
