"""Any table, by the names of its columns and splits. All rows are made up."""

import pytest

from gtpo_lightning.datamodules import ProblemTable
from tests.datamodules.conftest import write_table

ROWS = [{"text": f"{i}+1?", "reply": f"It is #### {i + 1}", "why": f"because {i}", "key": f"k{i}"} for i in range(6)]
COLUMNS = {"question_column": "text", "answer_column": "reply"}


def ready(stage=None, **kwargs):
    data = ProblemTable(**{"name": "mine", "val_size": 0, **kwargs})
    data.prepare_data()
    data.setup(stage)
    return data


def test_named_columns_of_a_file(tmp_path):
    path = write_table(tmp_path / "rows.jsonl", ROWS)
    data = ready(source=path, **COLUMNS, solution_column="why", id_column="key", answer_style="gsm8k")
    assert [one.id for one in data.train_problems] == [f"mine/train/{i}" for i in range(6)]
    problem = data.train_problems[2]
    assert (problem.question, problem.answer) == ("2+1?", "3")
    assert problem.meta == {"solution": "because 2", "source_id": "k2"}
    assert data.test_problems == data.val_problems == []


def test_without_a_style_the_column_is_the_answer(tmp_path):
    path = write_table(tmp_path / "rows.jsonl", ROWS)
    assert ready(source=path, **COLUMNS).train_problems[0].answer == "It is #### 1"
    numbers = write_table(tmp_path / "n.jsonl", [{"problem": "?", "answer": value} for value in (3, 4.0, 0.25)])
    assert [one.answer for one in ready(source=numbers).train_problems] == ["3", "4", "0.25"]


def test_boxed_answers_and_rows_without_one(tmp_path, told):
    rows = [{"problem": "?", "answer": answer} for answer in (r"\boxed{\frac{1}{2}}", "none", r"so \boxed{7}", None)]
    data = ready(source=write_table(tmp_path / "rows.jsonl", rows), answer_style="boxed")
    assert [(one.id, one.answer) for one in data.train_problems] == [
        ("mine/train/0", r"\frac{1}{2}"),
        ("mine/train/2", "7"),
    ]
    assert told("WARNING") == ["mine/train: 2 of 4 rows give no problem and are left out: no answer of style 'boxed'"]


def test_unknown_columns_are_an_error_that_lists_those_there_are(tmp_path):
    path = write_table(tmp_path / "rows.jsonl", ROWS)
    for argument in ("question_column", "answer_column", "solution_column", "id_column"):
        message = rf"{argument}: 'gone' is no column of '.*rows.jsonl'; valid: text, reply, why, key"
        with pytest.raises(ValueError, match=message):
            ready(source=path, **{**COLUMNS, argument: "gone"})
    with pytest.raises(ValueError, match=r"question_column: .* has the columns \['text', 'reply', 'why', 'key'\]"):
        ready(source=path)


def test_named_splits_and_configuration_of_the_hub(hub):
    table = {"one": ROWS[:3], "two": ROWS[3:5], "three": ROWS[5:]}
    hub.sets["my/table"] = {"a": {}, "b": table}
    data = ready(source="my/table", config="b", train_split="one", val_split="two", test_split="three", **COLUMNS)
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [3, 2, 1]
    assert data.val_problems[0].id == "mine/val/0"
    with pytest.raises(ValueError, match=r"config: 'my/table' has the configurations \['a', 'b'\]; valid: one of them"):
        ready(source="my/table", **COLUMNS)
    message = r"train_split, val_split, test_split: 'my/table' has the splits \['one', 'two', 'three'\]"
    with pytest.raises(ValueError, match=message):
        ready(source="my/table", config="b", **COLUMNS)
    with pytest.raises(ValueError, match=r"test_split: 'four' is no split of 'my/table' \(b\); valid: one, two, three"):
        ready(source="my/table", config="b", test_split="four", **COLUMNS)


def test_a_split_named_for_one_purpose_serves_no_other(hub):
    hub.sets["my/table"] = {"default": {"train": ROWS}}
    data = ready(source="my/table", test_split="train", val_size=2, **COLUMNS)
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [0, 0, 6]
    hub.sets["my/other"] = {"default": {"train": ROWS, "test": ROWS[:2]}}
    data = ready(source="my/other", val_split="test", val_size=2, **COLUMNS)
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [6, 2, 0]


def test_test_rows_alone(tmp_path, hub):
    hub.sets["my/bench"] = {"default": {"train": ROWS[:4]}}
    for test_source, count in ((write_table(tmp_path / "rows.jsonl", ROWS), 6), ("my/bench", 4)):
        data = ready(test_source=test_source, **COLUMNS)
        assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [0, 0, count]
        assert data.test_problems[0].id == "mine/test/0"


def test_sources_of_each_purpose(tmp_path, hub):
    hub.sets["my/val"] = {"default": {"test": ROWS[:1], "validation": ROWS[:2]}}
    write_table(tmp_path / "a/train.jsonl", ROWS[:5])
    data = ready(source=str(tmp_path / "a"), val_source="my/val", test_source=write_table(tmp_path / "t.json", ROWS),
                 **COLUMNS)  # fmt: skip
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [5, 2, 6]
    hub.sets["my/val"]["default"] = {"a": ROWS, "b": ROWS[:1]}
    with pytest.raises(
        ValueError, match=r"val_split: 'my/val' .*splits \['a', 'b'\], none is named val; valid: one of"
    ):
        ready(source=str(tmp_path / "a"), val_source="my/val", **COLUMNS)
    assert len(ready(source=str(tmp_path / "a"), val_source="my/val", val_split="b", **COLUMNS).val_problems) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": ""}, "name: ''; valid"),
        ({"name": "a/b"}, "name: 'a/b'; valid"),
        ({"answer_style": "bold"}, "style: 'bold'; valid: answer_tag, boxed"),
        ({"source": None}, "source: None; valid: a source, a val_source or a test_source"),
        ({"val_size": -1}, "val_size: -1; valid"),
    ],
)
def test_wrong_arguments_are_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        ProblemTable(**{"name": "mine", "source": "rows.jsonl", **wrong})
