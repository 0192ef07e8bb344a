"""The benchmark of grading, on miniature rows made here."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "grading.py"


@pytest.fixture
def grading(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_of_grading", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MIXED", 240)
    monkeypatch.setattr(module, "HOSTILE", 10)
    return module


@pytest.fixture
def folder(tmp_path):
    sums = [{"question": f"{n}+1=", "answer": f"One more.\n#### {n + 1:,}"} for n in range(900, 1100)]
    golds = [r"\frac{1}{2}", "(1,2)", r"2\sqrt{3}", r"\text{even}", r"[0,\infty)", "x^2+1"]
    math = [{"problem": "?", "solution": rf"It is $\boxed{{{gold}}}$.", "answer": gold} for gold in golds]
    aime = [{"problem": "?", "answer": f"{n:03d}"} for n in (7, 33, 204)]
    for name, rows in {"gsm8k_train": sums, "gsm8k_test": sums[:5], "math500": math, "aime24": aime}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def test_right_golds_pass(grading, folder, capsys):
    assert grading.main(["--data", str(folder), "--json", str(folder / "figures.json")]) == 0
    figures = {figure["name"]: figure["value"] for figure in json.loads((folder / "figures.json").read_text())}
    assert figures["golds of 211 solutions that are right"] == 1
    assert figures["gold + 1 and 10 gold + 1 accepted"] == 0
    assert figures["other grades that changed"] == figures["processes left"] == 0
    assert "plain comparisons a second" in capsys.readouterr().out


def test_a_gold_that_its_solution_does_not_earn_fails(grading, folder, capsys):
    file = folder / "math500.jsonl"
    file.write_text(file.read_text().replace('"answer": "(1,2)"', '"answer": "(2,1)"'), encoding="utf-8")
    assert grading.main(["--data", str(folder)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_missing_files_are_named(grading, tmp_path, capsys):
    (tmp_path / "math500.jsonl").touch()
    assert grading.main(["--data", str(tmp_path)]) == 2
    assert "lacks gsm8k_train.jsonl, gsm8k_test.jsonl, aime24.jsonl" in capsys.readouterr().err
