"""The check of the quickstart reads what a run logs and fails below its marks."""

import runpy
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

CHECK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "quickstart_check.py"), run_name="check")


def log(folder, version, right, in_format):
    with SummaryWriter(str(folder / f"version_{version}")) as writer:
        for step, (a, b) in enumerate(zip(right, in_format, strict=True)):
            writer.add_scalar("val/arithmetic/avg@1", a, step)
            writer.add_scalar("val/arithmetic/format", b, step)


@pytest.mark.parametrize(
    ("right", "in_format", "code"),
    [
        ((0.45, 0.6, 0.8), (0.9, 0.9, 0.99), 0),
        ((0.55, 0.6, 0.8), (0.9, 0.9, 0.99), 1),
        ((0.45, 0.8, 0.7), (0.9, 0.9, 0.99), 1),
        ((0.45, 0.6, 0.8), (0.9, 0.99, 0.9), 1),
    ],
)
def test_the_newest_run_is_judged_by_its_first_and_last_scores(tmp_path, capsys, right, in_format, code):
    log(tmp_path, 9, (0.9, 0.1), (0.1, 0.1))
    log(tmp_path, 10, right, in_format)
    assert CHECK["main"]([str(tmp_path)]) == code
    assert f"{right[0]:.3f} before, {right[-1]:.3f} after" in capsys.readouterr().out


def test_no_run_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="make quickstart"):
        CHECK["main"]([str(tmp_path)])
