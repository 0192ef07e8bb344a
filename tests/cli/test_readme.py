"""G-21: every command the README shows runs, on the tiny model where it names a larger one."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from gtpo_lightning import datamodules
from gtpo_lightning.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EVERY = [shlex.split(line)[2:] for line in re.findall(r"^python main\.py .*$", README, re.MULTILINE)]
COMMANDS = [words for words in EVERY if words[0] not in ("ablate", "report", "export")]
TOOLS = [words for words in EVERY if words[0] in ("ablate", "report")]
EXPORTS = [words for words in EVERY if words[0] == "export"]
SMALL = [
    *("-c", str(ROOT / "configs/models/tiny.yaml"), "-c", str(ROOT / "configs/trainer/cpu.yaml")),
    *("--trainer.precision=32-true", "--trainer.max_steps=1", "--trainer.limit_val_batches=1"),
    *("--trainer.limit_test_batches=1", "--trainer.limit_predict_batches=1"),
    *("--trainer.enable_progress_bar=false", "--model.max_completion_length=6", "--data.batch_size=2"),
    "--data.val_batch_size=2",
]
# A stand-in for every set that a command loads from the hub or from a file; of the right columns, and made up.
ROWS = {
    "gsm8k": [{"question": f"{i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(100)],
    "math": [
        {"problem": f"${i}+{i}$?", "solution": rf"\boxed{{{2 * i}}}", "level": "Level 1", "type": "Algebra"}
        for i in range(100)
    ],
    "math500": [{"problem": f"{i}-{i}?", "solution": r"\boxed{0}", "answer": "0"} for i in range(4)],
    "aime2024": [{"problem": f"{i}*{i}?", "answer": f"{i * i:03d}"} for i in range(4)],
    "aime2025": [{"problem": f"2*{i}?", "answer": 2 * i} for i in range(4)],
    "amc2023": [{"problem": f"3*{i}?", "answer": 3.0 * i} for i in range(4)],
}
SETS = {
    "gsm8k": datamodules.GSM8K,
    "math": datamodules.HendrycksMATH,
    "math500": datamodules.MATH500,
    "aime2024": datamodules.AIME2024,
    "aime2025": datamodules.AIME2025,
    "amc2023": datamodules.AMC2023,
}


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Files for the sets, which stand where the hub's would; file names on the command line lead to them too."""
    for name, rows in ROWS.items():
        split = "test" if name in ("math500", "aime2024", "aime2025", "amc2023") else "train"
        path = tmp_path / f"{name}_{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(SETS[name], "default_source", str(path))
    shutil.copy(tmp_path / "gsm8k_train.jsonl", tmp_path / "gsm8k_test.jsonl")
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """What the commands that name a checkpoint find."""
    folder = tmp_path_factory.mktemp("run")
    base = ["fit", "-c", str(ROOT / "configs/gtpo.yaml"), "-c", str(ROOT / "configs/data/arithmetic.yaml")]
    cli = main([*base, *SMALL, f"--trainer.logger.save_dir={folder}"])
    return cli.trainer.checkpoint_callback.last_model_path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A checkpoint of adapters."""
    folder = tmp_path_factory.mktemp("run")
    base = ["fit", "-c", str(ROOT / "configs/gtpo.yaml"), "-c", str(ROOT / "configs/data/arithmetic.yaml")]
    cli = main([*base, *SMALL, "--model.lora.rank=2", f"--trainer.logger.save_dir={folder}"])
    return cli.trainer.checkpoint_callback.last_model_path


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 6


def in_place(word, folder, checkpoint):
    """A word of a command, with files of this machine."""
    if word.endswith(".jsonl"):
        return str(folder / word)
    return checkpoint if word.endswith(".ckpt") else word


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_g_21_each_command_runs(command, stand_ins, tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(ROOT)
    flags = [*SMALL, f"--trainer.logger.save_dir={tmp_path}"]
    hub = [path.read_text() for path in map(Path, command) if path.parent.name == "data" and path.is_file()]
    if any("source: " in text for text in hub) and not any(word.startswith("--data.source") for word in command):
        name = yaml.safe_load(hub[0])["data"]["class_path"].rpartition(".")[2]
        (key,) = (key for key, made in SETS.items() if made.__name__ == name)
        flags.append(f"--data.source={SETS[key].default_source}")
    if command[0] != "fit":
        flags.append(f"--evaluator.store={tmp_path}/completions")
    if "configs/options/vllm.yaml" in command:  # what it does with vLLM is tested by `make test-vllm`
        with pytest.raises(ValueError, match="engine: 'vllm' needs the package vllm"):
            main([*command, *flags])
        return
    cli = main([*(in_place(word, stand_ins, checkpoint) for word in command), *flags])
    if command[0] == "fit":
        assert cli.trainer.global_step == 1
    elif command[0] == "test":
        assert list(Path(cli.trainer.log_dir).glob("test/results.json"))
    else:
        assert list((tmp_path / "completions").glob("*.jsonl"))


@pytest.mark.parametrize("command", TOOLS, ids=" ".join)
def test_g_21_each_command_about_many_runs_works(command, tmp_path, monkeypatch, capsys, checkpoint):
    monkeypatch.chdir(ROOT)
    if command[0] == "ablate":  # the grids themselves take hours
        main([*command, "--list"])
        assert "main.py fit" in capsys.readouterr().out
    else:
        runs = Path(checkpoint).parents[2]
        main([*(str(runs) if word.startswith("runs/") else word for word in command), f"--output={tmp_path}/page.html"])
        assert "<img" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("command", EXPORTS, ids=" ".join)
def test_g_21_each_export_works(command, tmp_path, checkpoint, adapters):
    path = adapters if "--adapter_only" in command else checkpoint
    words = [path if word.endswith(".ckpt") else word for word in command]
    words[words.index("--output") + 1] = str(tmp_path / "out")
    main(words)
    assert {"README.md", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 2
    scope = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), scope)
    assert scope["trainer"].global_step == 2
    assert "train/reward" in scope["trainer"].callback_metrics
    data = scope["Doubles"](batch_size=2)
    data.setup("fit")
    assert [problem.answer for problem in data.val_problems[:2]] == ["180", "182"]


@pytest.mark.parametrize("name", ["quickstart_sft.yaml", "quickstart.yaml"])
def test_the_quickstart_configs_run_in_small(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ["--trainer.max_steps=1", f"--trainer.logger.save_dir={tmp_path}", "--data.size=8", "--data.val_size=4",
             "--data.batch_size=4", "--trainer.callbacks=null", "--trainer.enable_progress_bar=false"]  # fmt: skip
    if name == "quickstart.yaml":
        small.append("--model.weights=null")
    cli = main(["fit", "-c", f"configs/{name}", *small])
    assert cli.trainer.global_step == 1


def test_every_config_is_run_somewhere():
    tests = [*Path(__file__).parent.glob("*.py"), ROOT / "tests/datamodules/test_configs.py"]
    here = README + "".join(path.read_text() for path in tests)
    configs = [path.relative_to(ROOT / "configs") for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    ran = [path for path in configs if path.name in here or f'"{path.stem}"' in here or path.parent.name == "ablations"]
    missing = sorted(str(path) for path in set(configs) - set(ran))
    assert missing == []
