"""G-21: every command the README shows runs, on the tiny model where it names a larger one."""

import re
import shlex
from pathlib import Path

import pytest

from gtpo_lightning.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [shlex.split(line)[2:] for line in re.findall(r"^python main\.py .*$", README, re.MULTILINE)]
SMALL = [
    *("-c", str(ROOT / "configs/models/tiny.yaml"), "-c", str(ROOT / "configs/trainer/cpu.yaml")),
    *("--trainer.precision=32-true", "--trainer.max_steps=1", "--trainer.limit_val_batches=1"),
    *("--trainer.enable_progress_bar=false", "--model.max_completion_length=6", "--data.batch_size=2"),
    "--data.val_batch_size=2",
]


def gsm8k(folder):
    rows = [f'{{"question": "{i} plus {i}?", "answer": "{i}+{i}={2 * i}\\n#### {2 * i}"}}' for i in range(100)]
    path = folder / "gsm8k_train.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_g_21_each_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = [*SMALL, f"--trainer.logger.save_dir={tmp_path}"]
    if any("gsm8k" in word for word in command):
        flags.append(f"--data.source={gsm8k(tmp_path)}")
    cli = main([*command, *flags])
    assert cli.trainer.global_step == 1


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
    here = (Path(__file__).parent / "test_cli.py").read_text() + README + Path(__file__).read_text()
    configs = [path.relative_to(ROOT / "configs") for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    missing = [str(path) for path in configs if path.parent.name != "ablations" and path.name not in here]
    assert missing == []
