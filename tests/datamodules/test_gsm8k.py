import json
import logging
import re
import time
from pathlib import Path

import pytest
from datasets import Dataset

from gtpo_lightning.datamodules import GSM8K
from gtpo_lightning.datamodules.gsm8k import gold_answer, worked_solution

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def rows(count, start=0):
    return [
        {
            "question": f"Ada has {i} pens and buys 2 more. How many has she?",
            "answer": f"She has {i}+2=<<{i}+2={i + 2}>>{i + 2} pens.\n#### {i + 2}",
        }
        for i in range(start, start + count)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("It is 5.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("####18", "18"),
        ("#### $18", "18"),
        ("#### -3", "-3"),
        ("#### 2.50", "2.50"),
        ("#### 18.", "18"),
        ("first #### 1\nthen #### 2", "2"),
        ("no mark 12", None),
        ("#### none", None),
        ("#### 3 and then ####", None),
        ("", None),
    ],
)
def test_gold(text, gold):
    assert gold_answer(text) == gold


def test_worked_solution():
    text = "Half is 48/2=<<48/2=24>>24.\nAll: 48+24 = <<48+24=72>>72.\n#### 72"
    assert worked_solution(text) == "Half is 48/2=24.\nAll: 48+24 = 72."


def test_a_single_file_is_the_training_rows_less_validation(lightning, tmp_path):
    path = write(tmp_path / "mine.jsonl", rows(20))
    data = GSM8K(source=path, val_size=6, batch_size=3)
    data.setup("fit")
    train, val = ([problem.id for problem in part] for part in (data.train_problems, data.val_problems))
    assert len(train) == 14
    assert len(val) == 6
    assert set(train) | set(val) == {f"gsm8k/train/{i}" for i in range(20)}
    for part in (train, val):
        assert part == sorted(part, key=lambda id: int(id.rsplit("/", 1)[1]))
    assert val != [f"gsm8k/train/{i}" for i in range(14, 20)]
    problem = data.train_problems[0]
    number = int(problem.id.rsplit("/", 1)[1])
    assert problem.question == f"Ada has {number} pens and buys 2 more. How many has she?"
    assert problem.answer == str(number + 2)
    assert problem.meta == {"solution": f"She has {number}+2={number + 2} pens."}
    with pytest.raises(ValueError, match=r"test: gsm8k has no test problems"):
        lightning.trainer().test(lightning.Recorder(), data, verbose=False)


def test_what_is_held_out_depends_on_the_split_seed_alone(tmp_path):
    path = write(tmp_path / "mine.jsonl", rows(30))

    def held_out(**kwargs):
        data = GSM8K(source=path, val_size=5, **kwargs)
        data.setup("fit")
        assert not {problem.id for problem in data.train_problems} & {problem.id for problem in data.val_problems}
        return [problem.id for problem in data.val_problems]

    assert held_out(seed=0) == held_out(seed=7) == held_out(limit_train=3)
    assert held_out(split_seed=0) != held_out(split_seed=1)


def test_own_validation_and_test_files_leave_the_training_rows_whole(tmp_path):
    data = GSM8K(
        source=write(tmp_path / "a.jsonl", rows(4)),
        val_source=write(tmp_path / "b.jsonl", rows(2, 10)),
        test_source=write(tmp_path / "c.jsonl", rows(3, 20)),
    )
    data.setup()
    ids = [[problem.id for problem in part] for part in (data.train_problems, data.val_problems, data.test_problems)]
    assert ids == [
        [f"gsm8k/train/{i}" for i in range(4)],
        ["gsm8k/val/0", "gsm8k/val/1"],
        [f"gsm8k/test/{i}" for i in range(3)],
    ]
    assert data.test_problems[0].answer == "22"


def test_a_folder_with_its_own_validation(tmp_path):
    write(tmp_path / "train.jsonl", rows(5))
    write(tmp_path / "validation.jsonl", rows(2))
    write(tmp_path / "test.jsonl", rows(3))
    data = GSM8K(source=str(tmp_path))
    data.setup()
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [5, 2, 3]


def test_the_hub_is_asked_for_main_and_its_two_splits(monkeypatch):
    asked = []

    def load_dataset(source, config, split):
        asked.append((source, config, split))
        return Dataset.from_list(rows(12 if split == "train" else 3))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data = GSM8K(val_size=2)
    data.prepare_data()
    assert asked == [("openai/gsm8k", "main", "train")]
    data.setup()
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [10, 2, 3]
    assert set(asked) == {("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")}


def test_rows_without_a_gold_are_counted_and_ids_stay(tmp_path, caplog):
    mixed = rows(6)
    mixed[1]["answer"] = "no mark"
    mixed[4]["answer"] = "#### nothing"
    with caplog.at_level(logging.WARNING):
        data = GSM8K(source=write(tmp_path / "a.jsonl", mixed), val_size=0)
        data.setup("fit")
    assert [problem.id for problem in data.train_problems] == [f"gsm8k/train/{i}" for i in (0, 2, 3, 5)]
    assert data.val_problems == []
    assert [record.getMessage() for record in caplog.records] == [
        "gsm8k/train: 2 of 6 rows give no problem and are left out"
    ]
    for row in mixed:
        row["answer"] = "no mark"
    with pytest.raises(ValueError, match=r"source: none of the 6 rows of .*valid"):
        GSM8K(source=write(tmp_path / "b.jsonl", mixed), val_size=0).setup("fit")


def test_wrong_arguments_and_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(5))
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"val_size: {wrong}; valid"):
            GSM8K(source=path, val_size=wrong)
    with pytest.raises(ValueError, match=r"split_seed: -1; valid"):
        GSM8K(source=path, split_seed=-1)
    with pytest.raises(ValueError, match=r"val_size: 5 leaves no training problem of 5; valid: 0 to 4"):
        GSM8K(source=path, val_size=5).setup("fit")
    with pytest.raises(ValueError, match=r"source: 'gone.jsonl' does not exist"):
        GSM8K(source="gone.jsonl").setup("fit")
    with pytest.raises(ValueError, match=r"lacks \['question', 'answer'\]"):
        GSM8K(source=write(tmp_path / "c.jsonl", [{"problem": "1"}])).setup("fit")


if REAL.is_dir():

    def test_the_real_files():
        start = time.monotonic()
        data = GSM8K(source=str(REAL / "gsm8k_train.jsonl"), test_source=str(REAL / "gsm8k_test.jsonl"), val_size=256)
        data.setup()
        assert time.monotonic() - start < 5
        problems = data.train_problems + data.val_problems + data.test_problems
        assert [len(data.train_problems), len(data.val_problems), len(data.test_problems)] == [7217, 256, 1319]
        assert len({problem.id for problem in problems}) == 7473 + 1319
        for problem in problems:
            assert re.fullmatch(r"-?\d+(\.\d+)?", problem.answer)
            assert "<<" not in problem.meta["solution"]
            assert "####" not in problem.meta["solution"]
        whole = GSM8K(source=str(REAL / "gsm8k_train.jsonl"), val_size=0)
        whole.setup("fit")
        texts = [json.loads(line)["answer"] for line in (REAL / "gsm8k_train.jsonl").open(encoding="utf-8")]
        assert [problem.answer for problem in whole.train_problems] == [
            text.split("####")[1].strip().replace(",", "") for text in texts
        ]
