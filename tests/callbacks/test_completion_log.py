import json
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from gtpo_lightning.callbacks import CompletionLog
from gtpo_lightning.rollout import Problem, Prompts
from tests.helpers.fakes import FakeModule, fake_trainer, rollout_of

NAN = float("nan")
HOSTILE = [
    "a|b||c\\|d",
    "one\ntwo\r\nthree\rfour\u2028five\x0bsix",
    "<script>alert(1)</script><td></td></table>",
    "&lt;b&gt; &#124; &amp;",
    "`code | code` ```\n~~~",
    "[x](javascript:alert(1)) ![i](http://example.invalid/i.png) <http://example.invalid>",
    "**bold** __bold__ # head\n# head\n- item\n1. item\n> quote",
    "--- | :--: | ---",
    "\x00\x02wzxhzdk:0\x03\x1b[31m",
    "\ud800 lone, 漢字, \u202e",
    "",
    "   ",
]


def sampled(texts, questions=("What is 2+3?",), group_ids=None, **more):
    count = len(texts)
    rollout = rollout_of([0.5] * count, [1] * count, [0.25] * count, group_ids or [0] * count, **more)
    problems = [Problem(f"p{i}", question, "5") for i, question in enumerate(questions)]
    rollout.prompts = Prompts(torch.zeros(len(problems), 1), torch.ones(len(problems), 1), problems)
    rollout.texts = list(texts)
    rollout.rewards = torch.arange(count, dtype=torch.float32)
    rollout.reward_parts = {"correct": torch.ones(count), "format": torch.full((count,), NAN)}
    return rollout


def write(part, rollout, folder=None, step=0, loggers=(), **more):
    trainer = fake_trainer(step, loggers=list(loggers), log_dir=folder and str(folder), **more)
    part.on_after_loss(trainer, FakeModule(), rollout, {})


def lines(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().split("\n")[:-1]]


def written_tables(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("completions/text_summary")]


class Cells(HTMLParser):
    """The text of each cell of each row, and the tags that occur."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.rows, self.tags = [], set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_data(self, data):
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


@pytest.mark.parametrize("unknown", [-1, 2, 7])
def test_one_object_a_completion_with_unknowns_as_null(tmp_path, unknown):
    rollout = rollout_of([[0.5, 1.5], [0.25], 0.0], [2, 1, 0], [1.0, -1.0, 0.0], group_ids=[1, 0, unknown])
    rollout.prompts = Prompts(torch.zeros(2, 1), torch.ones(2, 1), [Problem("a", "A?", "1"), Problem("b", "B?", "2")])
    rollout.texts = ["first", "second\nline", "third"]
    rollout.truncated = torch.tensor([False, False, True])
    rollout.lengths = torch.tensor([2, 1, 9])
    rollout.rewards = torch.tensor([0.5, NAN, float("inf")])
    rollout.reward_parts = {"correct": torch.tensor([1.0, NAN, 0.0])}
    rollout.sequence_weights = torch.tensor([1.0, 0.0, 1.0])
    rollout.entropies.requires_grad_()
    write(CompletionLog(), rollout, tmp_path, step=0)
    common = {"step": 0, "truncated": False}
    assert lines(tmp_path) == [
        common
        | {"problem_id": "b", "question": "B?", "completion": "first", "length": 2, "reward": 0.5}
        | {"reward_parts": {"correct": 1.0}, "advantage": 1.0, "mean_entropy": 1.0, "kept": True},
        common
        | {"problem_id": "a", "question": "A?", "completion": "second\nline", "length": 1, "reward": None}
        | {"reward_parts": {"correct": None}, "advantage": -1.0, "mean_entropy": 0.25, "kept": False},
        common
        | {"problem_id": None, "question": None, "completion": "third", "length": 9, "reward": None}
        | {"reward_parts": {"correct": 0.0}, "advantage": 0.0, "mean_entropy": None, "kept": True, "truncated": True},
    ]


def test_a_bare_rollout_is_enough(tmp_path):
    rollout = rollout_of([0.5])
    rollout.entropies = rollout.advantages = None
    write(CompletionLog(), rollout, tmp_path)
    (record,) = lines(tmp_path)
    assert record["completion"] is record["reward"] is record["advantage"] is record["mean_entropy"] is None


@pytest.mark.parametrize(
    ("count", "wanted", "rows"),
    [(8, 4, [0, 2, 4, 6]), (3, 8, [0, 1, 2]), (5, 2, [0, 2]), (7, 1, [0]), (8, 8, range(8))],
)
def test_samples_are_spread_over_the_rows(tmp_path, count, wanted, rows):
    write(CompletionLog(num_samples=wanted), sampled([str(row) for row in range(count)]), tmp_path)
    assert [int(record["completion"]) for record in lines(tmp_path)] == list(rows)


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (3, [0, 1, 2, 3, 4, 5, 6], [0, 3, 6]),
        (1, [0, 0, 1, 1, 1, 2], [0, 1, 2]),  # micro-batches of one optimizer step: the first
        (2, [0, 0, 1, 1, 2, 2], [0, 2]),
        (10, [0, 4, 8, 12, 16, 20, 24], [0, 12, 20]),  # several updates a step
        (10, [7, 8, 9, 10, 11], [7, 10]),
    ],
)
def test_writes_every_n_optimizer_steps_the_first_included(tmp_path, every, steps, expected):
    part = CompletionLog(every, num_samples=1)
    for step in steps:
        write(part, sampled(["x", "y"]), tmp_path, step=step)
    assert [record["step"] for record in lines(tmp_path)] == expected


def test_a_resumed_run_appends_at_the_steps_of_an_unbroken_one(tmp_path):
    unbroken, first, second = (CompletionLog(5, num_samples=2) for _ in range(3))
    (tmp_path / "a").mkdir()
    for step in range(13):
        write(unbroken, sampled(["x", "y"]), tmp_path / "a", step=step)
    for step in range(7):
        write(first, sampled(["x", "y"]), tmp_path / "b", step=step)
    second.load_state_dict(first.state_dict())
    for step in range(7, 13):
        write(second, sampled(["x", "y"]), tmp_path / "b", step=step)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert len(lines(tmp_path / "b")) == 6


def test_a_line_left_unfinished_does_not_swallow_the_next(tmp_path):
    (tmp_path / "completions.jsonl").write_text('{"step": 1}\n{"step": 2, "compl')
    write(CompletionLog(), sampled(["x"]), tmp_path, step=3)
    found = (tmp_path / "completions.jsonl").read_text().split("\n")
    assert found[1] == '{"step": 2, "compl'
    assert json.loads(found[2])["step"] == 3


def test_hostile_text_stays_one_json_line(tmp_path):
    write(CompletionLog(num_samples=99), sampled(HOSTILE), tmp_path)
    assert len((tmp_path / "completions.jsonl").read_bytes().splitlines()) == len(HOSTILE)
    assert [record["completion"] for record in lines(tmp_path)] == HOSTILE


def test_hostile_text_cannot_break_the_table(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    rollout = sampled(HOSTILE, HOSTILE, list(range(len(HOSTILE))))
    rollout.reward_parts = {text: torch.ones(len(HOSTILE)) for text in HOSTILE[:3]}
    write(CompletionLog(num_samples=99, jsonl=False), rollout, tmp_path, step=4, loggers=[logger])
    ((step, table),) = written_tables(tmp_path)
    assert step == 4
    assert len(table.splitlines()) == len(HOSTILE) + 2
    page = Cells(markdown_to_safe_html(table))
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td", "br"}
    assert [len(row) for row in page.rows] == [8] * (len(HOSTILE) + 1)
    completions = {row[2] for row in page.rows[1:]}
    for plain in (HOSTILE[0], HOSTILE[2], HOSTILE[3], HOSTILE[5], HOSTILE[7], "one\ntwo\nthree\nfour\nfive\nsix"):
        assert plain in completions
    assert not (tmp_path / "completions.jsonl").exists()


def test_table_shows_the_numbers(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    rollout = sampled(["a", "b"])
    rollout.sequence_weights[1] = 0
    write(CompletionLog(), rollout, tmp_path, loggers=[logger, CSVLogger(tmp_path / "csv")])
    page = Cells(markdown_to_safe_html(written_tables(tmp_path)[0][1]))
    assert page.rows == [
        ["problem", "prompt", "completion", "reward", "parts", "advantage", "mean entropy", "kept δ"],
        ["p0", "What is 2+3?", "a", "0", "correct 1\nformat –", "0.25", "0.5", "1"],
        ["p0", "What is 2+3?", "b", "1", "correct 1\nformat –", "0.25", "0.5", "0"],
    ]


def test_g_20_without_a_logger_the_default_root_takes_the_file(tmp_path):
    trainer = SimpleNamespace(global_step=0, loggers=[], log_dir=None, default_root_dir=str(tmp_path / "new" / "one"))
    CompletionLog().on_after_loss(trainer, FakeModule(), sampled(["x"]), {})
    assert len(lines(tmp_path / "new" / "one")) == 1


def test_g_20_the_least_of_trainers_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CompletionLog().on_after_loss(fake_trainer(), FakeModule(), sampled(["x"]), {})
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_ask_for_the_folder_and_write_nothing(tmp_path):
    asked = []

    class Trainer:
        global_step, loggers, is_global_zero = 0, (), False

        @property
        def log_dir(self):  # a broadcast in Lightning: a rank that does not ask leaves the others waiting
            asked.append(1)
            return str(tmp_path)

    CompletionLog().on_after_loss(Trainer(), FakeModule(), sampled(["x"]), {})
    assert asked == [1]
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_nothing(tmp_path):
    write(CompletionLog(), sampled(["x"]), tmp_path, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["every_n_steps", "num_samples"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: {value!r}"):
        CompletionLog(**{name: value})
