"""`ablate`: grids of runs that fail, are killed, are shared between processes, and go on."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gtpo_lightning import ablation
from gtpo_lightning.ablation import runner
from gtpo_lightning.ablation.record import Lock
from gtpo_lightning.cli import check, main

ROOT = Path(__file__).parents[2]
# Stands in for a training process: says when it ran, leaves a checkpoint, and does what its words ask for.
STAND_IN = """
import os, signal, sys, time, zipfile
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Lightning, it saves on both
words = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:] if "=" in word)
at = [words.get("trainer.logger." + key, "") for key in ("save_dir", "name", "version")]
folder = os.path.join(*at) if at[0] else words["makes"]
os.makedirs(folder, exist_ok=True)
def checkpoint(name):
    zipfile.ZipFile(os.path.join(folder, name), "w").close()
open(os.path.join(folder, "begun"), "a").write(" ".join(sys.argv[1:]) + "\\n")
if "save" in words and "ckpt_path" not in words:
    checkpoint(words["save"])
    open(os.path.join(folder, "events.out.tfevents.1"), "w").close()
if "made" in words:
    open(words["made"], "w").close()
began = time.time()
try:
    while "wait" in words and not os.path.exists(words["wait"]):
        time.sleep(0.02)
        if time.time() - began > 60:
            sys.exit(9)
except KeyboardInterrupt:
    checkpoint("interrupted.ckpt")
    sys.exit(1)
open(os.path.join(folder, "span"), "w").write(f"{began} {time.time()}")
print("last words")
sys.exit(int(words.get("code", "0")))
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Runs a grid of stand-ins in this process; `variants` are written as YAML."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(runner, "program", lambda: [sys.executable, str(script)])

    def run(variants, *flags, seeds="[0]", check=lambda words: None, **settings):
        file = tmp_path / "grid.yaml"
        rest = "".join(f"{key}: {value}\n" for key, value in settings.items())
        file.write_text(f"folder: {tmp_path / 'runs'}\nseeds: {seeds}\n{rest}variants: {variants}\n")
        return ablation.main(["-c", str(file), *flags], check)

    run.runs = tmp_path / "runs"
    run.script = script
    return run


def record(folder):
    return json.loads((folder / "run.json").read_text())


def begun(folder):
    """The command lines that were started in a folder."""
    path = folder / "begun"
    return path.read_text().splitlines() if path.exists() else []


# ------------------------------------------------------------------------------------------------------ what is run


def test_every_regime_variant_value_and_seed_is_a_run_of_its_own(grid):
    variants = "{a: [--x=1 --y='2 3'], b: {words: [--x=2], values: {part.gamma: [0.5, 1]}, regimes: [hot]}}"
    assert grid(variants, seeds="[3, 4]", base="[--z=0]", regimes="{cold: [], hot: [--t=9]}") == 0
    names = ["cold/a", "hot/a", "hot/b-gamma=0.5", "hot/b-gamma=1"]
    folders = {f"{name}/seed{seed}" for name in names for seed in (3, 4)}
    assert {str(path.parent.relative_to(grid.runs)) for path in grid.runs.rglob("run.json")} == folders
    (line,) = begun(grid.runs / "hot/b-gamma=0.5/seed4")
    flags = ["--z=0", "--t=9", "--x=2", "--part.gamma=0.5", "--seed_everything=4"]
    assert line.split()[:6] == ["fit", *flags]
    found = record(grid.runs / "hot/b-gamma=0.5/seed4")
    assert (found["regime"], found["variant"], found["key"], found["value"]) == ("hot", "b", "part.gamma", 0.5)
    assert (found["seed"], found["exit_code"], len(found["attempts"])) == (4, 0, 1)
    assert found["command"][1] == str(grid.script)
    assert found["command"][2:] == found["words"] == line.split()
    assert "--y=2 3" in record(grid.runs / "cold/a/seed3")["words"]
    log = (grid.runs / "cold/a/seed3/log.txt").read_text().splitlines()
    assert log[0].endswith(shlex.join(record(grid.runs / "cold/a/seed3")["command"]))
    assert log[-1] == "last words"


def test_list_numbers_the_commands_and_index_runs_one_of_them(grid, capsys):
    assert grid("{a: [], b: []}", "--list", seeds="[0, 1]") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
    assert lines[2].endswith(f"--trainer.logger.save_dir={grid.runs} --trainer.logger.name=b "
                             "--trainer.logger.version=seed0")  # fmt: skip
    assert not grid.runs.exists()
    assert grid("{a: [], b: []}", "--index=2", seeds="[0, 1]") == 0
    assert [path.parent.relative_to(grid.runs) for path in grid.runs.rglob("run.json")] == [Path("b/seed0")]
    assert grid("{a: [], b: []}", "--index=4", seeds="[0, 1]") == 2
    assert "valid: 0 to 3" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done_and_does_nothing(grid, capsys):
    assert grid("{a: [--code=1 --save=x.ckpt]}") == 1
    before = (grid.runs / "a/seed0/run.json").read_text()
    capsys.readouterr()
    assert grid("{a: [--code=1 --save=x.ckpt], b: []}", "--dry_run") == 0
    said = capsys.readouterr().out
    assert "would go on" in said
    assert "would start" in said
    assert (grid.runs / "a/seed0/run.json").read_text() == before
    assert not (grid.runs / "b").exists()


def test_two_jobs_run_at_once_and_one_job_does_not(grid):
    def span(place):
        return tuple(map(float, (grid.runs / place / "seed0/span").read_text().split()))

    # Each ends only after the other has begun.
    waits = [f"--wait={grid.runs}/{other}/seed0/begun" for other in "ba"]
    assert grid(f"{{a: [{waits[0]}], b: [{waits[1]}]}}", "--jobs=2") == 0
    assert grid("{c: [], d: []}") == 0
    assert span("c")[1] < span("d")[0]


# -------------------------------------------------------------------------------------------- failures and restarts


def test_a_failure_stops_nothing_and_a_second_start_repeats_only_it(grid, capsys):
    variants = "{bad: [--code=3], good: []}"
    assert grid(variants) == 1
    said = capsys.readouterr().out
    assert "exit code 3: last words" in " ".join(said.split())
    times = {path: path.stat().st_mtime_ns for path in (grid.runs / "good").rglob("*") if path.is_file()}
    assert grid(variants) == 1
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert [a["exit_code"] for a in record(grid.runs / "bad/seed0")["attempts"]] == [3, 3]
    assert len(begun(grid.runs / "good/seed0")) == 1


def test_a_broken_run_goes_on_from_its_newest_whole_checkpoint(grid):
    grid("{a: [--code=1 --save=old.ckpt]}")
    folder = grid.runs / "a/seed0"
    (folder / "checkpoints").mkdir()
    newer, torn = folder / "checkpoints/newer.ckpt", folder / "torn.ckpt"
    zipfile.ZipFile(newer, "w").close()
    torn.write_bytes(b"PK\x03\x04 and then the machine went down")
    for age, path in enumerate((torn, newer, folder / "old.ckpt")):
        os.utime(path, (time.time() - age, time.time() - age))
    grid("{a: [--code=1 --save=old.ckpt]}")
    assert begun(folder)[1].split()[-1] == f"--ckpt_path={newer}"
    assert (folder / "events.out.tfevents.1").exists()


def test_without_a_checkpoint_it_starts_afresh_and_the_broken_curves_are_gone(grid):
    grid("{a: [--code=1 --save=x.ckpt]}")
    folder = grid.runs / "a/seed0"
    (folder / "x.ckpt").unlink()
    before = (folder / "events.out.tfevents.1").stat().st_ino
    (folder / "events.out.tfevents.0").touch()
    grid("{a: [--code=1 --save=x.ckpt]}")
    assert "ckpt_path" not in begun(folder)[1]
    assert not (folder / "events.out.tfevents.0").exists()
    assert before


def test_checkpoints_of_finished_runs_are_removed_if_asked(grid):
    assert grid("{a: [--save=x.ckpt], bad: [--save=x.ckpt --code=1]}", keep_checkpoints="false") == 1
    assert [path.parent.parent.name for path in grid.runs.rglob("*.ckpt")] == ["bad"]


def test_a_folder_never_mixes_two_settings(grid, capsys):
    grid("{a: [--x=1]}")
    assert grid("{b: [], a: [--x=2]}") == 2
    said = capsys.readouterr().err
    assert "--x=1" in said
    assert "+--x=2" in said
    assert not (grid.runs / "b").exists()


def test_an_interrupt_reaches_the_run_which_can_go_on(grid, monkeypatch):
    folder = grid.runs / "a/seed0"
    sleep = time.sleep

    def interrupt(seconds):
        sleep(seconds)
        if begun(folder):
            monkeypatch.setattr(runner.time, "sleep", sleep)
            raise KeyboardInterrupt

    gate = grid.script.parent / "gate"
    variants = f"{{a: [--wait={gate}], b: []}}"
    monkeypatch.setattr(runner.time, "sleep", interrupt)
    assert grid(variants) == 130
    assert record(folder)["interrupted"] is True
    assert not (folder / "run.lock").exists()
    assert not (grid.runs / "b").exists()
    gate.touch()
    assert grid(variants) == 0
    assert begun(folder)[1].endswith(f"--ckpt_path={folder / 'interrupted.ckpt'}")
    assert record(folder)["exit_code"] == 0
    assert len(begun(grid.runs / "b/seed0")) == 1


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_runner_leaves_finished_runs_and_its_child_is_not_doubled(grid, capfd):
    gate = grid.script.parent / "gate"
    variants = f"{{a: [], b: [--wait={gate}], c: []}}"
    grid(variants, "--list")  # writes the file
    code = (
        "import sys; from gtpo_lightning import ablation; from gtpo_lightning.ablation import runner\n"
        f"runner.program = lambda: [sys.executable, {str(grid.script)!r}]\n"
        f"ablation.main(['-c', {str(grid.script.parent / 'grid.yaml')!r}], lambda words: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait_for(lambda: begun(grid.runs / "b/seed0"))
    finally:
        process.kill()
        process.wait()
    done = {path: path.stat().st_mtime_ns for path in (grid.runs / "a").rglob("*") if path.is_file()}
    assert record(grid.runs / "a/seed0")["exit_code"] == 0
    assert record(grid.runs / "b/seed0")["exit_code"] is None

    assert grid(variants) == 0  # the child of the killed runner is still at b
    assert "b/seed0: elsewhere: process" in capfd.readouterr().out
    assert len(begun(grid.runs / "b/seed0")) == 1
    assert len(begun(grid.runs / "c/seed0")) == 1
    gate.touch()
    wait_for(lambda: Lock(grid.runs / "b/seed0").holder() is None)

    assert grid(variants) == 0
    assert len(begun(grid.runs / "b/seed0")) == 2
    assert record(grid.runs / "b/seed0")["exit_code"] == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done


# ------------------------------------------------------------------------------------------------------------ locks


def test_a_run_that_another_process_is_at_is_left_to_it(grid):
    lock = Lock(grid.runs / "a/seed0")
    assert lock.acquire() is None
    assert Lock(grid.runs / "a/seed0").acquire() == f"process {os.getpid()} on {socket.gethostname()}"
    assert grid("{a: [], b: []}") == 0
    assert begun(grid.runs / "a/seed0") == []
    lock.release()
    assert grid("{a: [], b: []}") == 0
    assert len(begun(grid.runs / "a/seed0")) == 1


@pytest.mark.parametrize(
    ("host", "pid", "born", "age", "held"),
    [
        (None, "gone", "1", 0, False),
        (None, "own", "1", 0, False),  # the id came again for another process
        ("elsewhere", "own", "1", 0, True),
        ("elsewhere", "own", "1", 700, False),
    ],
)
def test_a_stale_lock_is_noticed(tmp_path, host, pid, born, age, held):
    if pid == "gone":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        number = process.pid
    else:
        number = os.getpid()
    lock = Lock(tmp_path)
    lock.path.write_text(json.dumps({"host": host or socket.gethostname(), "runner": [number, born]}))
    os.utime(lock.path, (time.time() - age, time.time() - age))
    assert (lock.acquire() is not None) == held


def test_a_lock_that_was_never_written_is_stale_after_a_moment(tmp_path):
    lock = Lock(tmp_path)
    lock.path.touch()
    assert "starting" in lock.acquire()
    os.utime(lock.path, (time.time() - 6, time.time() - 6))
    assert lock.acquire() is None


# ------------------------------------------------------------------------------------------------------------ first


def test_first_runs_once_and_before_all(grid):
    made = grid.script.parent / "warm.ckpt"
    first = f"{{words: [--makes={grid.runs} --made={made}], makes: {made}}}"
    assert grid("{a: []}", first=first) == 0
    assert grid("{a: []}", first=first) == 0
    assert record(grid.runs / "first")["exit_code"] == 0
    assert len(begun(grid.runs)) == 1
    made.unlink()
    assert grid("{a: []}", first=first) == 0
    assert len(begun(grid.runs)) == 2


@pytest.mark.parametrize("flag", ["--code=1", "--code=0"])
def test_nothing_runs_if_first_fails_or_makes_nothing(grid, flag, capsys):
    assert grid("{a: []}", first=f"{{words: [--makes={grid.runs} {flag}], makes: never.ckpt}}") == 1
    assert "first failed" in capsys.readouterr().err
    assert not (grid.runs / "a").exists()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sedes=[1]"], ["sedes", "seeds"]),
        (["--variants.a.wrods=[]"], ["wrods", "words, values, base, command, regimes"]),
        (["--first.words=[]", "--first.maks=x"], ["maks", "words, makes, command"]),
        (["--seeds=[]"], ["seeds", "valid"]),
        (["--seeds=[1,1]"], ["seeds", "valid"]),
        (["--jobs=0"], ["jobs", "valid"]),
        (["--variants={}"], ["variants", "valid"]),
        (["--variants.a.regimes=[hot]"], ["variants.a.regimes", "valid"]),
        (["--variants={a: {values: {x: [1], y: [2]}}}"], ["variants.a.values", "one dotted key"]),
        (["--variants={a: [], a/: []}", "--variants={x y: [], x+y: [], x_y: []}"], ["x_y", "valid"]),
        (["--base=['--x=\"']"], ["base", "quoted"]),
    ],
)
def test_settings_that_make_no_grid_are_refused_with_what_is_valid(tmp_path, capsys, flags, words):
    code = ablation.main([f"--folder={tmp_path}/runs", "--variants.a=[]", *flags], lambda words: None)
    said = capsys.readouterr().err
    assert code == 2
    assert [word for word in words if word not in said] == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-c configs/ablations/no_such_part.yaml", "no_such_part.yaml"),
        ("--entropy_filtre=null", "entropy_filtre"),
        ("--entropy_filter.treshold=1", "treshold"),
    ],
)
def test_misspelt_words_are_refused_before_the_first_run(grid, monkeypatch, capsys, words, said):
    monkeypatch.chdir(ROOT)
    code = grid(f"{{good: [], bad: [{words}]}}", base="[-c configs/quickstart.yaml]", check=check)
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("ablate: bad: ")
    assert said in error
    assert not grid.runs.exists()


def test_the_command_line_says_what_went_wrong_by_its_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ablate", "--variants={}"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["ablate", "--help"])
    assert ended.value.code == 0
    assert "--keep_checkpoints" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["configs/ablation.yaml"], 14 * 3),
        (["configs/ablation_toy.yaml"], (16 + 6 + 16) * 3),
        (["configs/ablation_smollm2.yaml"], 4),
        (["configs/ablation_smollm2.yaml", "benchmarks/gpu_science.yaml"], 4),
    ],
    ids=["paper", "toy", "smollm2", "gpu"],
)
def test_every_command_of_the_shipped_grids_parses(names, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    files = [word for name in names for word in ("-c", name)]
    main(["ablate", *files, f"--folder={tmp_path}", "--dry_run"])
    assert capsys.readouterr().out.count("would start") == runs


# -------------------------------------------------------------------------------------------------------- real runs

REAL = """
base:
  - -c configs/gtpo.yaml -c configs/models/tiny.yaml -c configs/data/arithmetic.yaml -c configs/trainer/cpu.yaml
  - --trainer.max_steps=2 --trainer.val_check_interval=2 --model.group_size=2 --model.max_completion_length=6
  - --data.batch_size=2 --data.size=8 --data.val_size=4 --data.val_batch_size=4 --trainer.enable_progress_bar=false
seeds: [0, 1]
variants:
  gtpo: []
  no_filter: [-c configs/ablations/no_entropy_filter.yaml]
"""


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.images, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        self.images += [value for key, value in attrs if key in ("src", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def check_real_grid(folder):
    for name in ("gtpo", "no_filter"):
        for seed in (0, 1):
            place = folder / name / f"seed{seed}"
            assert record(place)["exit_code"] == 0
            assert list(place.glob("events.out.tfevents*"))
            assert list(place.rglob("*.ckpt"))
    main(["report", str(folder)])
    page = Tags()
    text = (folder / "report.html").read_text()
    page.feed(text)
    assert page.open == []
    assert "://" not in text
    assert len(page.images) >= 10
    assert all(image.startswith("data:image/png;base64,") for image in page.images)
    assert {"gtpo", "no_filter", "val/\u200barithmetic/\u200bpass@1"} <= set(page.cells)
    row = page.cells[page.cells.index("gtpo") :]
    scores = [
        json.loads((folder / f"gtpo/seed{seed}/fit/results.json").read_text())["datasets"]["arithmetic"]["scores"]
        for seed in (0, 1)
    ]
    lengths = [score["length"]["mean"] for score in scores]
    assert row[1] == "2"
    assert f"{sum(lengths) / 2:.3f}" in [cell.split(" ± ")[0] for cell in row[:8]]


@pytest.mark.slow
def test_a_real_grid_whose_runner_was_killed_goes_on_two_at_once_and_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "grid.yaml").write_text(REAL)
    command = ["ablate", "-c", str(tmp_path / "grid.yaml"), f"--folder={tmp_path}/runs"]
    process = subprocess.Popen([sys.executable, "main.py", *command], cwd=ROOT)
    second = tmp_path / "runs/gtpo/seed1"
    try:
        wait_for(lambda: (second / "run.json").exists() and "child" in (second / "run.lock").read_text(), 200)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    child = json.loads((second / "run.lock").read_text())["child"][0]
    os.kill(child, signal.SIGKILL)
    first = tmp_path / "runs/gtpo/seed0"
    times = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}
    wait_for(lambda: Lock(second).holder() is None)
    main([*command, "--jobs=2"])
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert [a["exit_code"] for a in record(second)["attempts"]] == [None, 0]
    check_real_grid(tmp_path / "runs")
