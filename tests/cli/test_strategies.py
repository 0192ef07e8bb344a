"""The overlays of strategies that need a GPU: parsed, refused early on a CPU, and what else they ask for."""

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from gtpo_lightning import cli
from gtpo_lightning.cli import check, main
from tests.cli.test_nodes import ROOT, words

OVERLAYS = {"fsdp": FSDPStrategy, "deepspeed_stage_2": DeepSpeedStrategy, "deepspeed_stage_3": DeepSpeedStrategy}


def overlay(name):
    return ("-c", f"configs/trainer/{name}.yaml")


def no_cpu(words):
    """As they are, but without the accelerator that the small runs of tests are on."""
    return [word for word in words if "accelerator" not in word]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_gpu_strategy_is_refused_before_anything_is_read(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("gtpo_lightning.codec.load_tokenizer", lambda name: pytest.fail("read"))
    for given in (words(tmp_path, *overlay(name)), no_cpu(words(tmp_path, *overlay(name)))):
        with pytest.raises(ValueError, match=r"trainer.strategy: \w+Strategy needs a GPU.*valid on a CPU: .*fsdp2"):
            main(given)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload", "deepspeed", "deepspeed_stage_3_offload"])
def test_the_short_names_are_refused_too(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=rf"trainer.strategy: {name} needs a GPU"):
        main(words(tmp_path, f"--trainer.strategy={name}"))


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_overlays_parse_up_to_lightnings_own_refusal(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(words(tmp_path, *overlay(name)))
    with pytest.raises(ValueError, match="no_such_setting"):
        check(words(tmp_path, *overlay(name), "--trainer.strategy.init_args.no_such_setting=1"))
    monkeypatch.setattr(cli, "check_strategy", lambda trainer: None)
    missing = "No supported gpu backend|must have DeepSpeed installed"
    with pytest.raises((MisconfigurationException, ValueError), match=missing):
        main(no_cpu(words(tmp_path, *overlay(name))))


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_overlays_name_arguments_with_their_types(name):
    strategy = yaml.safe_load((ROOT / f"configs/trainer/{name}.yaml").read_text())["trainer"]["strategy"]
    kind = OVERLAYS[name]
    assert strategy["class_path"] == f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}"
