"""`report`: hand-made runs with known numbers come out as those numbers, on one page that needs nothing else."""

import base64
import json
import math
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from gtpo_lightning import report
from gtpo_lightning.report.figures import style_of
from gtpo_lightning.report.reading import RunData, join_series, read_runs
from gtpo_lightning.report.sections import make_sections
from gtpo_lightning.report.statistics import band, collapse_of, curves_of, mean_interval, smoothed

# Two-sided 95 % points of Student's t for 1 and 2 degrees of freedom, from a printed table.
T1, T2 = 12.7062, 4.30265


def log(folder, scalars, start=0):
    with SummaryWriter(str(folder)) as writer:
        for name, values in scalars.items():
            for step, value in enumerate(values, start):
                writer.add_scalar(name, value, step)


def results(folder, scores, answers=(), stage="fit", dataset="sums"):
    (folder / stage).mkdir(parents=True, exist_ok=True)
    content = {"scores": {name: {"mean": value} for name, value in scores.items()}, "answers": list(answers)}
    (folder / stage / "results.json").write_text(json.dumps({"datasets": {dataset: content}}))


def recorded(folder, code=0, **names):
    known = {"number": 0, "regime": "", "variant": "a", "label": "a", "key": "", "value": None, "seed": 0}
    command = ["python", "main.py", "fit", "--model.prompt_template={question} <&>"]
    (folder / "run.json").write_text(json.dumps({**known, **names, "exit_code": code, "command": command}))


class Page(HTMLParser):
    """Tables by rows of cells, images, and whether all tags close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.tables, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.images += [value for key, value in attrs if key in ("src", "srcset")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data.replace("\u200b", "")

    def row(self, table, heading):
        head, *rows = self.tables[table]
        (found,) = (row for row in rows if row[0] == heading)
        return dict(zip(head, found, strict=True))


def written(folder, *flags):
    assert report.main([str(folder), *flags]) == 0
    text = (Path(folder) / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    return page, text


# ------------------------------------------------------------------------------------------------------------ numbers


def test_a_resumed_run_has_no_doubled_step_and_nothing_of_the_broken_end(tmp_path):
    log(tmp_path / "a/seed0", {"train/reward": [0.0, 1.0, 2.0, 99.0, 99.0], "val/sums/pass@1": [0.25]})
    log(tmp_path / "a/seed0", {"train/reward": [3.0, 4.0]}, start=3)
    log(tmp_path / "a/seed0", {"train/reward": [14.0]}, start=4)
    (run,), notes = read_runs([tmp_path])
    assert run.scalars["train/reward"] == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 14.0}
    assert run.scalars["val/sums/pass@1"] == {0: 0.25}
    assert notes == []


def test_a_resume_from_further_back_drops_the_later_steps_of_the_first_attempt():
    first = {"train/reward": {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, "val/x/pass@1": {0: 0.1, 2: 0.2}}
    assert join_series([first, {"train/reward": {1: 9.0}}]) == {
        "train/reward": {0: 0.0, 1: 9.0},
        "val/x/pass@1": {0: 0.1, 2: 0.2},
    }


def test_an_evaluation_in_the_same_folder_takes_nothing_away():
    first = {"train/reward": {0: 0.0, 1: 1.0}, "val/x/pass@1": {0: 0.1, 2: 0.2}}
    joined = join_series([first, {"val/x/pass@1": {0: 0.3}}])
    assert joined == {"train/reward": {0: 0.0, 1: 1.0}, "val/x/pass@1": {0: 0.3, 2: 0.2}}


def test_bands_are_smallest_and_largest_seed_around_the_mean():
    drawn = band([{0: 1.0, 5: 4.0}, {0: 2.0, 5: 6.0}, {0: 6.0}])
    assert drawn.steps == [0, 5]
    assert drawn.means == [3.0, 5.0]
    assert drawn.lows == [1.0, 4.0]
    assert drawn.highs == [6.0, 6.0]


def test_smoothing_looks_back_only_and_is_shorter_at_the_start():
    assert smoothed({0: 3.0, 10: 6.0, 20: 0.0, 30: 3.0}, 3) == {0: 3.0, 10: 4.5, 20: 3.0, 30: 3.0}
    assert smoothed({0: 3.0, 1: 6.0}, 1) == {0: 3.0, 1: 6.0}


def test_the_interval_over_seeds_is_that_of_the_t_table():
    three = mean_interval([0.7, 0.8, 0.9])
    assert three.mean == pytest.approx(0.8)
    assert three.half == pytest.approx(T2 * 0.1 / math.sqrt(3), rel=1e-4)
    two = mean_interval([0.0, 1.0])
    assert two.half == pytest.approx(T1 * math.sqrt(0.5) / math.sqrt(2), rel=1e-4)
    assert str(mean_interval([0.5])) == "0.500"


def test_curves_over_k_are_means_over_problems():
    def answers(problem, right, labels):
        pairs = zip(right, labels, strict=True)
        return [{"problem_id": problem, "correct": bool(c), "label": label} for c, label in pairs]

    # p: 1 of 3 right, the wrong ones differ; q: 2 of 3 right.
    rows = answers("p", (1, 0, 0), (0, 1, 2)) + answers("q", (1, 1, 0), (0, 0, 1))
    content = {"datasets": {"sums": {"scores": {}, "answers": rows}}}
    curves = curves_of(RunData(Path(), results={"val": content}))["val/sums"]
    assert curves["pass@k"] == pytest.approx({1: (1 / 3 + 2 / 3) / 2, 2: (2 / 3 + 1) / 2, 3: 1.0})
    # maj@2 of p: pairs with the right answer tie (1/2 each, 2 of 3 pairs); of q: 1 right pair, 2 ties. maj@3: p ties.
    assert curves["maj@k"] == pytest.approx({1: 0.5, 2: (1 / 3 + 2 / 3) / 2, 3: (1 / 3 + 1) / 2})


def collapse(scores, settings=None, **signals):
    scalars = {"gtpo/collapse_score": dict(enumerate(scores))}
    scalars |= {f"gtpo/collapse/{name}": dict(enumerate(values)) for name, values in signals.items()}
    return collapse_of(RunData(Path(), scalars=scalars, settings=settings or {}))


def test_the_detector_fires_after_its_patience_and_names_the_signal():
    seen = collapse([0.1, 0.5, 0.2, 0.6, 0.6, 0.6, 0.1], entropy=[0, 0.1] + [0] * 5, format=[0, 0.5] + [0] * 5)
    assert (seen.passed, seen.fired, seen.signal) == (1, 5, "format")
    own = {"entropy_collapse": {"class_path": "x", "init_args": {"threshold": 0.65, "patience": 1}}}
    assert collapse([0.1, 0.6, 0.7], own).fired == 2
    assert collapse([0.1, 0.6, 0.6], own).passed is None
    assert collapse_of(RunData(Path())) is None


# --------------------------------------------------------------------------------------------------- names and states


def test_without_records_names_come_from_paths(tmp_path):
    for place in ("hot/a/seed0", "hot/a/seed10", "hot/b/version_3", "cold/a/seed0", "alone"):
        log(tmp_path / place, {"train/reward": [1.0]})
    runs, _ = read_runs([tmp_path])
    assert [(run.regime, run.label, run.seed) for run in runs] == [
        ("", "alone", ""),
        ("cold", "a", "0"),
        ("hot", "a", "0"),
        ("hot", "a", "10"),
        ("hot", "b", "3"),
    ]
    (run,), _ = read_runs([tmp_path / "hot/b/version_3"])
    assert (run.label, run.seed) == ("b", "3")
    runs, _ = read_runs([tmp_path / "hot/a", tmp_path / "hot"])
    assert len(runs) == 3


def test_equal_names_of_two_folders_stay_apart(tmp_path):
    for grid in ("one", "two"):
        log(tmp_path / grid / "a/seed0", {"train/reward": [1.0]})
    runs, _ = read_runs([tmp_path / "one", tmp_path / "two"])
    assert sorted(Path(run.regime).name for run in runs) == ["one", "two"]


def test_an_unfinished_seed_is_drawn_and_not_counted(tmp_path):
    for seed, (code, reward) in enumerate([(0, 1.0), (0, 3.0), (None, 50.0), (7, 70.0)]):
        log(tmp_path / f"a/seed{seed}", {"train/reward": [reward]})
        recorded(tmp_path / f"a/seed{seed}", code, seed=seed)
    log(tmp_path / "b/seed0", {"train/reward": [4.0]})
    recorded(tmp_path / "b/seed0", None, label="b")
    page, _ = written(tmp_path)
    assert page.row(0, "a")["seeds"] == "2 of 4"
    assert page.row(0, "a")["train/reward"] == f"2.000 ± {T1 * math.sqrt(2) / math.sqrt(2):.3f}"
    assert page.row(0, "b")["seeds"] == "1, so far"
    assert page.row(0, "b")["train/reward"] == "4.000"
    assert "failed, exit code 7" in " ".join(page.words)


# ----------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two regimes, two variants with two seeds, and a sweep."""
    folder = tmp_path_factory.mktemp("grid")
    rows = [
        {"problem_id": f"p{i}", "correct": i + j < 3, "label": 0 if i + j < 3 else 1} for i in range(3) for j in (0, 1)
    ]
    for number, (label, key, value) in enumerate((("z", "", None), ("a", "", None), ("s-g=0.1", "p.g", 0.1),
                                                  ("s-g=0", "p.g", 0))):  # fmt: skip
        for regime in ("hot", "cold"):
            for seed in (0, 1):
                place = folder / regime / label / f"seed{seed}"
                scalars = {
                    "train/reward": [0.5, 1.0 + seed, 2.0 + seed],
                    "train/entropy": [0.3, 0.2, 0.1],
                    "val/sums/pass@1": [0.1, 0.2],
                    "val/sums/avg@2": [0.1, 0.2],
                    "gtpo/collapse_score": [0.0, 0.6, 0.6],
                }
                log(place, scalars)
                results(place, {"pass@1": 0.5 + 0.1 * seed, "pass@2": 0.75, "maj@1": 0.5, "avg@2": 0.5}, rows)
                recorded(place, label=label, key=key, value=value, seed=seed, regime=regime, number=number,
                         variant="s" if key else label)  # fmt: skip
    return folder, *written(folder)


def test_the_table_has_means_and_intervals_over_seeds(grid):
    _, page, _ = grid
    head = page.tables[0][0]
    assert head[:2] == ["variant", "seeds"]
    assert [name for name in head if "avg@" in name or "maj@1" in name] == []
    assert [row[0] for row in page.tables[0][1:]] == ["z", "a", "s-g=0.1", "s-g=0"]  # the order of the grid
    row = page.row(0, "z")
    assert row["seeds"] == "2"
    assert row["val/sums/pass@1"] == f"0.550 ± {T1 * 0.1 / 2:.3f}"
    assert row["val/sums/pass@2"] == "0.750 ± 0.000"
    means = [(0.5 + 1 + 2) / 3, (0.5 + 2 + 3) / 3]
    assert row["train/reward"] == f"{sum(means) / 2:.3f} ± {T1 * (means[1] - means[0]) / 2:.3f}"


def test_each_regime_has_its_section_and_its_collapses(grid):
    _, page, _ = grid
    assert len(page.tables) == 4
    row = page.tables[1][1]
    assert row == ["z", "0", "1", "never", "", "0.600", "0.5, 3 in a row"]


def test_the_page_needs_nothing_else(grid):
    folder, page, text = grid
    assert "://" not in text
    assert [word for word in ("<script", "<link", "@import", "url(") if word in text] == []
    images = [base64.b64decode(image.removeprefix("data:image/png;base64,"), validate=True) for image in page.images]
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in images)
    beside = sorted((folder / "report_figures").glob("*.png"))
    assert 2 * len(beside) == len(images)  # light and dark
    assert {path.read_bytes() for path in beside} <= set(images)
    names = {path.stem for path in beside}
    assert {"hot_train_reward", "hot_val_sums_pass_1", "hot_val_sums_pass_k", "hot_val_sums_maj_k"} <= names
    assert {"cold_s_final_val_sums_pass_1", "cold_s_train_reward"} <= names
    width, height = struct.unpack(">II", beside[0].read_bytes()[16:24])
    assert width > height > 300


def test_commands_are_exact_and_quoted(grid):
    _, page, text = grid
    assert "python main.py fit '--model.prompt_template={question} <&>'" in page.words
    assert "<&>" not in text


def test_both_color_schemes_and_narrow_screens_are_provided_for(grid):
    _, _, text = grid
    assert text.count("prefers-color-scheme: dark") > 2
    assert 'name="viewport"' in text
    assert text.count('class="scroll"') == 4


def test_a_variant_keeps_its_style_whatever_its_section_holds(tmp_path):
    runs = [RunData(tmp_path, regime, label, "0", scalars={"train/reward": {0: 1.0}}) for regime, label in
            (("hot", "a"), ("hot", "b"), ("cold", "b"))]  # fmt: skip
    drawn = []
    import gtpo_lightning.report.sections as sections

    original = sections.curve_png
    try:
        sections.curve_png = lambda title, xlabel, lines, theme, **_: drawn.extend(lines) or b""
        make_sections(runs, 1)
    finally:
        sections.curve_png = original
    assert {line.name: line.style for line in drawn} == {"a": style_of(0), "b": style_of(1)}
    assert {line.style for line in drawn if line.name == "b"} == {style_of(1)}


def test_styles_differ_in_colour_or_dash():
    assert len({(style_of(i).colour, style_of(i).dash) for i in range(28)}) == 28


# ------------------------------------------------------------------------------------------------------------- errors


def test_no_run_says_what_was_looked_for(tmp_path, capsys):
    assert report.main([str(tmp_path), str(tmp_path / "missing")]) == 2
    said = capsys.readouterr().err
    assert "events.out.tfevents" in said
    assert str(tmp_path / "missing") in said
    assert not (tmp_path / "report.html").exists()


def test_files_that_cannot_be_read_are_named_and_skipped(tmp_path, capsys):
    log(tmp_path / "a/seed0", {"train/reward": [1.0]})
    (tmp_path / "a/seed0/run.json").write_text("{")
    log(tmp_path / "b/seed0", {"train/reward": [2.0]})
    results(tmp_path / "b/seed0", {"pass@1": 0.5})
    (tmp_path / "b/seed0/fit/results.json").write_text("[1]")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/events.out.tfevents.1").write_bytes(b"this is no event file" * 9)
    page, _ = written(tmp_path)
    assert [row[0] for row in page.tables[0][1:]] == ["a", "b"]
    said = capsys.readouterr().err
    for name in ("run.json", "results.json", "events.out.tfevents.1"):
        assert f"{name}: not read" in said
        assert any(f"{name}: not read" in word for word in page.words)


def test_a_file_that_is_being_written_shows_what_it_has(tmp_path):
    log(tmp_path / "a/seed0", {"train/reward": [1.0, 2.0, 3.0]})
    (path,) = (tmp_path / "a/seed0").glob("events*")
    path.write_bytes(path.read_bytes()[:-7])
    (run,), notes = read_runs([tmp_path])
    assert run.scalars["train/reward"] == {0: 1.0, 1: 2.0}
    assert notes == []


def test_smooth_and_output(tmp_path, capsys):
    log(tmp_path / "runs/a/seed0", {"train/reward": [1.0]})
    assert report.main([str(tmp_path / "runs"), "--smooth=0"]) == 2
    assert "smooth: 0" in capsys.readouterr().err
    assert report.main([str(tmp_path / "runs"), "--smooth=1", f"--output={tmp_path}/new/page.html"]) == 0
    assert (tmp_path / "new/page.html").is_file()
    assert (tmp_path / "new/page_figures/train_reward.png").is_file()
