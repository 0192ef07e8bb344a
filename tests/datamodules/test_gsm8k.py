import json
import logging
import re
import time
from pathlib import Path

import pytest

from gtpo_lightning.datamodules import GSM8K
from gtpo_lightning.datamodules.gsm8k import gold_answer, worked_solution
from tests.datamodules.conftest import write_table as write

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def rows(count, start=0):
    return [
        {
            "question": f"Ada has {i} pens and buys 2 more. How many has she?",
            "answer": f"She has {i}+2=<<{i}+2={i + 2}>>{i + 2} pens.\n#### {i + 2}",
        }
        for i in range(start, start + count)
    ]


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


def test_a_single_file_that_says_test_is_the_test_rows(lightning, tmp_path):
    path = write(tmp_path / "gsm8k_test.jsonl", rows(4))
    module = lightning.Recorder()
    lightning.trainer().test(module, GSM8K(source=path, limit_test=3), verbose=False)
    assert [one for batch in module.tested for one in batch] == [f"gsm8k/test/{i}" for i in range(3)]
    with pytest.raises(
        ValueError, match=r"train: gsm8k has no training problems; valid: .*has 'test'\), or train_split"
    ):
        lightning.fit(GSM8K(source=path))
    chosen = GSM8K(source=path, train_split="test", val_size=1)
    chosen.setup("fit")
    assert [len(chosen.train_problems), len(chosen.val_problems)] == [3, 1]


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


def test_the_hub_is_asked_for_main_and_its_two_splits_and_for_no_names(hub):
    hub.sets["openai/gsm8k"] = {"main": {"train": rows(12), "test": rows(3)}, "socratic": {}}
    data = GSM8K(val_size=2)
    data.prepare_data()
    assert hub.asked == [("openai/gsm8k", "main", "train")]
    data.setup()
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [10, 2, 3]
    assert set(hub.asked) == {("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")}


@pytest.mark.parametrize("config", ["main", "default", "all", "plain"])
def test_a_copy_on_the_hub_with_other_names(hub, told, config):
    copy = [{"Question": row["question"], "Answer": row["answer"], "extra": 1} for row in rows(12)]
    hub.sets["my/copy"] = {config: {"Train": copy[:9], "validation": copy[9:11], "test": copy[11:]}}
    if config != "plain":
        hub.sets["my/copy"]["other"] = {"train": copy}
    data = GSM8K(source="my/copy")
    data.prepare_data()
    data.setup()
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [9, 2, 1]
    assert data.train_problems[8].id == "gsm8k/train/8"
    assert data.test_problems[0].answer == "13"
    place = f"from 'my/copy' (config '{config}'; split 'Train')"
    assert f"gsm8k/train: 9 problems {place}: question from 'Question', answer from 'Answer'" in told()
    assert not told("WARNING")


def test_several_configurations_of_a_copy_are_named(hub):
    hub.sets["my/copy"] = {"easy": {"train": rows(2)}, "hard": {"train": rows(2)}}
    with pytest.raises(ValueError, match=r"config: 'my/copy' has the configurations \['easy', 'hard'\]; valid: one of"):
        GSM8K(source="my/copy").setup("fit")
    data = GSM8K(source="my/copy", config="hard", val_size=0)
    data.setup("fit")
    assert hub.loads() == [("my/copy", "hard", "train")]


def test_a_local_copy_of_the_whole_repository_gives_main(tmp_path):
    for config in ("main", "socratic"):
        write(tmp_path / config / "train-00000-of-00001.jsonl", rows(4 if config == "main" else 2))
    data = GSM8K(source=str(tmp_path), val_size=0)
    data.setup("fit")
    assert len(data.train_problems) == 4
    other = GSM8K(source=str(tmp_path), val_size=0, config="socratic")
    other.setup("fit")
    assert len(other.train_problems) == 2
    with pytest.raises(ValueError, match=r"config: .* has the configurations \['main', 'socratic'\]; valid"):
        GSM8K(source=str(tmp_path), config="algebra").setup("fit")


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_copy_whose_only_split_is_another_has_no_training_problems(lightning, hub, name):
    hub.sets["my/copy"] = {"default": {name: rows(3)}}
    module = lightning.Recorder()
    stage = {"validation": "validate", "test": "test"}[name]
    getattr(lightning.trainer(), stage)(module, GSM8K(source="my/copy"), verbose=False)
    assert sum(len(batch) for batch in module.validated + module.tested) == 3
    with pytest.raises(ValueError, match=rf"train: gsm8k has no training problems; valid: .*'my/copy' has '{name}'"):
        lightning.fit(GSM8K(source="my/copy"))


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
        "gsm8k/train: 2 of 6 rows give no problem and are left out: no number after #### in the answer"
    ]
    for row in mixed:
        row["answer"] = "no mark"
    with pytest.raises(ValueError, match=r"source: none of the 6 rows of .*no number after ####.*valid"):
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
    with pytest.raises(ValueError, match=r"answer_column: .*c.jsonl' has the columns \['problem'\], none of .*valid"):
        GSM8K(source=write(tmp_path / "c.jsonl", [{"problem": "1"}])).setup("fit")
    with pytest.raises(ValueError, match=r"row 6 has the columns \['text'\] and lacks \['question', 'answer'\]"):
        GSM8K(source=write(tmp_path / "d.jsonl", [*rows(5), {"text": "1"}])).setup("fit")
    with pytest.raises(ValueError, match=r"solution_column: 'text'; valid: null"):
        GSM8K(source=path, solution_column="text")


def test_each_source_is_read_once_for_training_and_validation(tmp_path, told):
    data = GSM8K(source=write(tmp_path / "a.jsonl", rows(5)), val_size=2)
    data.setup("fit")
    assert len(told()) == 1


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
