"""Options of the three parts: each overlay sets one, keeps the rest, and trains; the main config names them all."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from gtpo_lightning.cli import PARTS, main
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.lora import LoRA

CONFIGS = Path(__file__).parents[2] / "configs"
# overlay: part, argument, value, what the part logs for it
OPTIONS = {
    "conflict_shift": ("conflict_masking", "shift", 2, None),
    "conflict_position": ("conflict_masking", "scope", "position", None),
    "adaptive_threshold": ("entropy_filter", "adaptive", 0.9, "gtpo/entropy_threshold"),
    "keep_at_least": ("entropy_filter", "keep_at_least", 0.25, None),
    "gamma_warmup": ("entropy_regularizer", "warmup_steps", 100, "gtpo/gamma"),
    "group_baseline": ("entropy_regularizer", "baseline", "group", None),
}
# overlays of the model: what they give of it
MODEL_OPTIONS = {
    "vllm": {
        "engine": "vllm",
        "vllm": {
            "gpu_memory_utilization": 0.3,
            "dtype": "auto",
            "max_model_len": None,
            "sleep": True,
            "options": {},
        },
    },
    "lora": {
        "lora": {
            "rank": 128,
            "alpha": 128,
            "targets": "all-linear",
            "dropout": 0.0,
            "rslora": False,
            "modules_to_save": None,
        }
    },
    "qlora": {
        "lora": {"rank": 128, "alpha": 128},
        "quantization": "4bit",
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
    },
}
SMALL = [
    "--model.group_size=2",
    "--model.max_completion_length=6",
    "--data.batch_size=2",
    "--data.val_batch_size=4",
    "--data.size=8",
    "--data.val_size=4",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
    "--trainer.enable_progress_bar=false",
]


def fit(folder, *overlays):
    names = ["gtpo.yaml", "models/tiny.yaml", "data/arithmetic.yaml", "trainer/cpu.yaml", *overlays]
    files = [word for name in names for word in ("-c", str(CONFIGS / name))]
    return main(["fit", *files, *SMALL, f"--trainer.logger.save_dir={folder}", f"--trainer.default_root_dir={folder}"])


def part_of(cli, name):
    (part,) = (callback for callback in cli.trainer.callbacks if type(callback) is PARTS[name])
    return part


def arguments(part):
    return {name: parameter.default for name, parameter in inspect.signature(part).parameters.items()}


def section(text, key):
    """Lines of a key of a YAML file, indented once."""
    return re.search(rf"^{key}:.*\n((?:  .*\n)+)", text, re.MULTILINE).group(1).splitlines()


@pytest.mark.parametrize("overlay", list(OPTIONS))
def test_each_overlay_sets_one_option_and_trains(tmp_path, overlay):
    part, argument, value, logged = OPTIONS[overlay]
    assert yaml.safe_load((CONFIGS / f"options/{overlay}.yaml").read_text()) == {part: {argument: value}}
    cli = fit(tmp_path, f"options/{overlay}.yaml")
    assert cli.trainer.global_step == 2
    assert getattr(part_of(cli, part), argument) == value
    assert logged is None or logged in cli.trainer.callback_metrics
    saved = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
    for name in ("conflict_masking", "entropy_filter", "entropy_regularizer"):
        expected = arguments(PARTS[name]) | ({argument: value} if name == part else {})
        assert saved[name].get("init_args", saved[name]) == expected


def test_every_option_has_an_overlay_here():
    assert sorted(path.stem for path in (CONFIGS / "options").glob("*.yaml")) == sorted([*OPTIONS, *MODEL_OPTIONS])


@pytest.mark.parametrize("base", ["gtpo.yaml", "grpo.yaml", "sft.yaml"])
def test_the_lora_overlay_goes_over_any_method_and_says_all_settings(tmp_path, base):
    given = yaml.safe_load((CONFIGS / "options/lora.yaml").read_text())["model"]["init_args"]
    assert given == MODEL_OPTIONS["lora"]
    assert given["lora"].keys() == {field.name for field in fields(LoRA)}
    names = [base, "models/tiny.yaml", "data/arithmetic.yaml", "trainer/cpu.yaml", "options/lora.yaml"]
    files = [word for name in names for word in ("-c", str(CONFIGS / name))]
    small = [word for word in SMALL if base != "sft.yaml" or "group_size" not in word]
    place = [f"--trainer.logger.save_dir={tmp_path}", f"--trainer.default_root_dir={tmp_path}"]
    cli = main(["fit", *files, *small, *place, "--model.lora.rank=4"])
    assert cli.model.lora == LoRA(rank=4, alpha=128)  # typed over the file; the rest of it stays
    assert cli.trainer.global_step == 2
    saved = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
    assert saved["model"]["init_args"]["lora"]["rank"] == 4


def test_the_qlora_overlay_is_read_whole_and_names_what_it_needs(tmp_path):
    given = yaml.safe_load((CONFIGS / "options/qlora.yaml").read_text())["model"]["init_args"]
    assert given == MODEL_OPTIONS["qlora"]
    with pytest.raises(ValueError, match="quantization: '4bit' "):  # the tiny model has no files of its own
        fit(tmp_path, "options/qlora.yaml")


@pytest.mark.parametrize("base", ["gtpo.yaml", "grpo.yaml", "sft.yaml"])
def test_the_vllm_overlay_goes_over_any_method_says_all_settings_and_what_it_needs(base, monkeypatch):
    given = yaml.safe_load((CONFIGS / "options/vllm.yaml").read_text())["model"]["init_args"]
    assert given == MODEL_OPTIONS["vllm"]
    assert VLLM(**given["vllm"]) == VLLM()
    assert given["vllm"].keys() == {field.name for field in fields(VLLM)}
    names = [base, "models/tiny.yaml", "data/arithmetic.yaml", "trainer/cpu.yaml", "options/vllm.yaml"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'gtpo-lightning\[vllm\]'"):
        main(["fit", *(word for name in names for word in ("-c", str(CONFIGS / name)))])


def test_options_of_one_part_add_up(tmp_path):
    cli = fit(tmp_path, *(f"options/{name}.yaml" for name in OPTIONS))
    for part, argument, value, _ in OPTIONS.values():
        assert getattr(part_of(cli, part), argument) == value
    assert {"gtpo/entropy_threshold", "gtpo/gamma"} <= cli.trainer.callback_metrics.keys()


@pytest.mark.parametrize("name", ["conflict_masking", "entropy_filter", "entropy_regularizer"])
def test_the_main_config_gives_every_argument_its_default_and_a_comment(name):
    text = (CONFIGS / "gtpo.yaml").read_text()
    assert yaml.safe_load(text)[name] == arguments(PARTS[name])
    for line in section(text, name):
        key, _, comment = line.partition(" # ")
        assert comment.strip(), key
    described = PARTS[name].__doc__.partition("Args:")[2].partition("Raises:")[0]
    for key in arguments(PARTS[name]):
        assert re.search(rf"^ +{key}: ", described, re.MULTILINE), key
    for choice in {"conflict_masking": ["position"], "entropy_regularizer": ["group"]}.get(name, []):
        assert choice in described
        assert choice in "".join(section(text, name))


@pytest.mark.parametrize("config", ["gtpo.yaml", "sft.yaml"])
def test_the_configs_name_what_a_model_can_be_told(config):
    text = (CONFIGS / config).read_text()
    given = yaml.safe_load(text)["model"]["init_args"]
    for key, value in {"lora": None, "adapter": None, "quantization": None, "gradient_checkpointing": False}.items():
        assert given[key] is value, key
        assert re.search(rf"^    {key}: \w+ +# \w", text, re.MULTILINE), key
