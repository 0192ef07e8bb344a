"""The step benchmark: workloads, command lines, which peer counts, tables, and one step of our side."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import growth, parts, report, sides, step, workloads
from benchmarks.floor import Rates
from benchmarks.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
TINY = Workload("tiny", "llama", 2, 2, 5, 4, 97, 16, 32, 1, 2, 1)


def side(seconds, peak, **callbacks):
    parts = {"rollout": seconds / 2, "score": seconds / 4, "backward": seconds / 4, **callbacks}
    one = {"seconds": seconds, "cpu": 2 * seconds, "parts": parts}
    return {"median": step.medians([one, one]), "steps": [one, one], "peak_mib": peak}


def report_of(**sides):
    floor = {"prefill": 0.1, "decode": 0.4, "rollout": 0.5, "score": 0.5, "backward": 0.9, "optimizer": 0.1, "total": 2}
    found = {"work": "some work", "sides": sides, "floor": floor}
    return {**found, **report.compare(found)}


# ------------------------------------------------------------------------------------------------------------ workloads


@pytest.mark.parametrize("work", [*WORKLOADS.values(), *workloads.growth("group"), *workloads.growth("vocabulary")])
def test_workloads_are_well_formed(work):
    assert Workload.from_json(work.to_json()) == work
    assert work.hidden % work.heads == work.heads % work.kv_heads == 0
    assert work.prompt_tokens + work.completion_tokens <= 2048
    assert f"{work.vocabulary:,}" in work.describe()


def test_workloads_have_the_sizes_of_their_models():
    assert WORKLOADS["a"].parameters == pytest.approx(17e6, rel=0.03)
    assert WORKLOADS["c"].parameters == pytest.approx(134.5e6, rel=0.01)
    for name, billions in (("gpu_0.5b", 0.49), ("gpu_1.5b", 1.54), ("gpu_3b", 3.09)):
        assert WORKLOADS[name].parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert [work.group for work in workloads.growth("group")] == [4, 8, 16, 32]
    others = {replace(work, name="", vocabulary=0) for work in workloads.growth("vocabulary")}
    assert len(others) == 1
    names = [work.name for axis in ("group", "vocabulary") for work in workloads.growth(axis)]
    assert len(set(names)) == len(names)


def test_prompts_have_their_length_and_the_end_cannot_be_drawn(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    workloads.build(TINY, str(tmp_path), prompts=6, data=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    texts = workloads.read_prompts(str(tmp_path))
    assert len(set(texts)) == 6
    assert all(len(tokenizer(text).input_ids) == 5 for text in texts)
    assert tokenizer.unk_token_id not in tokenizer(texts).input_ids[5]
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.lm_head.out_features


def test_missing_rows_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data: .* lacks gsm8k_train\.jsonl"):
        workloads.build(WORKLOADS["c"], str(tmp_path), 2, tmp_path)
    (tmp_path / "gsm8k_train.jsonl").write_text('{"question": "1+1?"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="has 1 rows; 2 are needed"):
        workloads.build(WORKLOADS["c"], str(tmp_path), 2, tmp_path)


# -------------------------------------------------------------------------------------------------------- command lines


def test_the_settings_of_trl_are_processes_of_their_own():
    assert step.side_names(["ours", "trl"], "both") == ["ours", "trl", "trl-checkpointing"]
    assert step.side_names(["trl"], "off") == ["trl"]
    assert step.parse([]).trl_settings == "both"
    assert step.parse(["--trl-checkpointing"]).trl_settings == "on"
    assert step.parse([]).steps >= 5
    with pytest.raises(SystemExit):
        step.parse(["--workload", "d"])


@pytest.mark.parametrize(("name", "on"), [("ours", False), ("trl", False), ("trl-checkpointing", True)])
def test_workers_read_what_the_parent_writes(name, on):
    args = step.parse(["--threads", "3", "--ours-settings", '{"micro_batch_size": 2}', "--data", "rows"])
    words = step.worker_command(name, TINY, "folder", args)
    assert words[1:3] == ["-m", "benchmarks.sides"]
    found = sides.parse(words[3:])
    assert found.work == TINY
    assert (found.side, found.trl_checkpointing) == (name.split("-")[0], on)
    assert (found.threads, found.steps, found.folder, found.data) == (3, 5, "folder", Path("rows"))
    assert json.loads(found.ours_settings) == {"micro_batch_size": 2}


def test_every_command_of_the_gpu_script_parses():
    done = subprocess.run(["bash", "benchmarks/gpu_step.sh", "--list"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [words[:2] for words in found] == [["-m", "benchmarks.step"]] * 3
    options = [step.parse(words[2:]) for words in found]
    assert [one.workload for one in options] == [name for name in WORKLOADS if name.startswith("gpu_")]
    assert {one.device for one in options} == {"cuda"}
    assert min(one.steps for one in options) >= 5
    assert len({one.output for one in options}) == 3


def test_growth_and_parts_parse():
    assert (growth.parse(["time"]).sides, growth.parse(["time"]).steps) == (["ours"], 3)
    assert (growth.parse(["memory"]).sides, growth.parse(["memory"]).steps) == (["ours", "trl"], 1)
    assert parts.parse(["--parts", "draw"]).parts == ["draw"]
    assert set(parts.PARTS) < set(parts.parse([]).parts)


# -------------------------------------------------------------------------------------------------------------- reports


def test_the_faster_setting_is_compared_with():
    found = report_of(**{"ours": side(4, 1000), "trl": side(24, 5000), "trl-checkpointing": side(20, 4000)})
    assert found["peer"] == "trl-checkpointing"
    assert (found["speedup"], found["memory_ratio"]) == (5, 0.25)
    assert found["measured_over_floor"] == {"ours": 2, "trl": 12, "trl-checkpointing": 10}
    other = report_of(**{"ours": side(4, 1000), "trl": side(16, 5000), "trl-checkpointing": side(20, 4000)})
    assert (other["peer"], other["speedup"], other["memory_ratio"]) == ("trl", 4, 0.2)
    assert other["memory_ratio_to_leanest"] == 0.25
    assert "peer" not in report_of(ours=side(4, 1000))


def test_the_table_shows_sides_floor_and_ratios():
    lines = report.table(report_of(ours=side(4, 1024, callbacks=0.02), trl=side(24, 5120))).splitlines()
    assert lines[0] == "some work"
    assert lines[2].split() == [
        "ours",
        *["4.000", "2.000", "0.000", "1.000", "1.000", "0.000", "4.00..4.00", "1.00", "2.00"],
    ]
    assert lines[4].split() == ["floor", *["2.000", "0.500", "0.000", "0.500", "0.900", "0.100"]]
    assert lines[5] == "the three parts of GTPO: 0.50 % of our step"
    assert "against trl, the faster setting: 6.00 times its step rate, 0.200 of its peak memory" in lines[6]


def test_other_work_is_refused():
    right = {"completion_tokens": 16, "prompt_lengths": [5, 5]}
    step.check_work("ours", TINY, right)
    with pytest.raises(RuntimeError, match="ours: 15 tokens in the completions of a step; the work is 16"):
        step.check_work("ours", TINY, {**right, "completion_tokens": 15})
    with pytest.raises(RuntimeError, match=r"prompts of \[5, 4\] tokens"):
        step.check_work("ours", TINY, {**right, "prompt_lengths": [5, 4]})
    step.check_work("ours", replace(TINY, family="smollm2"), {**right, "prompt_lengths": [7, 4]})


def test_growth_tables_and_lines():
    assert growth.line_fit([4, 8, 16], [1.5, 2.5, 4.5])["slope"] == pytest.approx(0.25)
    assert growth.line_fit([1, 2, 3], [1, 2, 4])["worst"] == pytest.approx(1 / 6)
    point = {"axis": "group", "value": 16, "floor": 2.0, "ours": {"median": {"seconds": 3.0}, "peak_mib": 512}}
    lines = {"group": {"intercept": 0.5, "slope": 0.25, "worst": 0.01}}
    text = growth.time_table({"points": [point], "lines": lines})
    assert text.splitlines()[1].split() == ["group", "16", "ours", "3.000", "1.50", "0.50"]
    assert text.splitlines()[2] == "ours = 0.500 s + 0.25 s · group, at most 1.0 % off"
    memory = {"points": [{"axis": "V", "value": 32_000, "peak_mib": {"ours": 512, "trl": 2048}}]}
    assert growth.memory_table(memory).splitlines() == [
        "| | ours | trl |",
        "|---|---|---|",
        "| V = 32,000 | 0.50 | 2.00 |",
    ]
    assert {axis for axis, _ in growth.memory_points()} == {"G", "T", "V"}


def test_growth_measures_each_point(monkeypatch, tmp_path, capsys):
    asked = []

    def measured(work, names, args):
        asked.append((work.name, *names, args.ours_settings))
        return {name: side(0.5 + 0.25 * work.group, 1024 + work.group) for name in names}

    monkeypatch.setattr(growth, "measure_sides", measured)
    monkeypatch.setattr(growth, "measure_rates", lambda *_: Rates(1e9, 1e9))
    growth.main(["time", "--output", str(tmp_path / "growth.json")])
    found = json.loads((tmp_path / "growth.json").read_text())
    assert found["lines"]["group"] == pytest.approx({"intercept": 0.5, "slope": 0.25, "worst": 0}, abs=1e-9)
    assert [point["value"] for point in found["points"]] == [*workloads.GROUPS, *workloads.VOCABULARIES]
    assert len(asked) == 8

    asked.clear()
    growth.main(["memory", "--output", str(tmp_path / "memory.json")])
    found = json.loads((tmp_path / "memory.json").read_text())
    assert len(found["points"]) == 10
    assert len(asked) == 4 * 8  # three of the points are one and the same
    assert [one[2] for one in asked[:4]] == ["{}", '{"micro_batch_size": 8}', "{}", "{}"]
    assert found["points"][2]["peak_mib"]["trl-checkpointing"] == 1056
    assert "| G = 32 | 1.03 | 1.03 | 1.03 | 1.03 |" in capsys.readouterr().out


def test_what_misses_its_limit_is_said():
    found = {
        "conflict_32000": {"ms": 25.0, "extra_mib": 10.0},
        "callbacks": {"ms": 5.0, "step_ms": 1000.0},
        "head": {"ms": 9.0, "extra_mib": 40.0, "gradients_mib": 30.0},
        "head_dense": {"ms": 10.0, "extra_mib": 400.0, "gradients_mib": 30.0},
    }
    judged = {what: (value, limit) for what, value, limit, _ in parts.verdicts(found)}
    assert judged["three parts of GTPO, share of a step"] == (0.5, 1)
    assert judged["head against dense log_softmax: memory"] == (0.1, 0.125)
    lines = parts.table(found).splitlines()
    assert [line.split()[-1] for line in lines[4:]] == ["MISSED", "holds", "holds", "holds", "holds"]


# -------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.timeout(120)
def test_our_side_reports_its_parts():
    args = step.parse(["--steps", "1", "--threads", "1"])
    found = step.measure_sides(TINY, ["ours"], args)["ours"]
    assert len(found["steps"]) == 1
    (one,) = found["steps"]
    assert set(sides.PARTS) | {"callbacks"} == set(one["parts"])
    assert 0 < sum(one["parts"][part] for part in sides.PARTS) <= one["seconds"]
    assert one["parts"]["callbacks"] < one["seconds"]
    assert (one["prompt_lengths"], one["completion_tokens"]) == ([5, 5], 16)
    assert found["peak_mib"] >= found["start_mib"] > 0


def test_a_worker_that_fails_says_why():
    args = step.parse(["--steps", "1", "--threads", "1", "--ours-settings", '{"group": 3}'])
    with pytest.raises(RuntimeError, match=r"(?s)worker ours ended early:.*unexpected keyword"):
        step.measure_sides(TINY, ["ours"], args)


@pytest.mark.parametrize("part", ["conflict_32000", "draw"])
def test_a_part_is_measured(part):
    found = parts.measure_here(part, threads=1)
    assert found["ms"] > 0 <= found["extra_mib"]
    assert found["calls"] >= 5
