"""The commands of gpu_strategies.sh parse, what they meter is written, and its table says what happened."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.step_meter import table
from gtpo_lightning.cli import check, main

ROOT = Path(__file__).parents[2]
NAMES = ["one_gpu", "one_gpu_bf16_weights", "lora", "qlora", "ddp", "fsdp2", "fsdp", "deepspeed_stage_2",
         "deepspeed_stage_3"]  # fmt: skip


def commands():
    done = subprocess.run(["bash", "benchmarks/gpu_strategies.sh", "--list"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_every_command_parses(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands()
    assert [words[-2] for words in found] == [f"--trainer.default_root_dir=runs/gpu_strategies/{n}" for n in NAMES]
    for script, *words in found:
        assert script == "main.py"
        check([word for word in words if not word.startswith("--model.model=")])  # that folder is made by the script
    with pytest.raises(ValueError, match="no_such_word"):
        check([*words, "--model.no_such_word=1"])


def test_a_command_trains_here_and_leaves_its_measure(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, *words = commands()[0]
    here = ["-c", "configs/models/tiny.yaml", "-c", "configs/trainer/cpu.yaml", "--model.max_completion_length=8"]
    cli = main([*words, *here, "--model.group_size=4", f"--trainer.default_root_dir={tmp_path}/one_gpu"])
    assert cli.trainer.global_step == 3
    assert list(tmp_path.rglob("*.ckpt"))
    found = json.loads((tmp_path / "one_gpu/steps.json").read_text())
    assert len(found["seconds"]) == found["steps"] == 3
    (tmp_path / "ddp.txt").write_text("Traceback\nValueError: a | b\nbye\n")
    lines = table(tmp_path, ["one_gpu", "ddp"]).splitlines()
    assert lines[2].startswith("| one_gpu | ok, 3 steps | ")
    assert lines[3] == r"| ddp | failed: ValueError: a \| b | – | – |"
