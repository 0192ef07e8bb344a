import json

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from gtpo_lightning.datamodules.sources import is_local, open_source
from tests.datamodules.conftest import write_table

ROWS = [{"question": f"What is {i}+1?", "answer": f"#### {i + 1}"} for i in range(3)]


def only(path):
    """The rows of a source without configurations and splits."""
    source = open_source(str(path))
    assert source.configs() == [""]
    assert source.splits("") == [""]
    return source.rows("", "")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_single_file_is_all_of_its_rows(tmp_path, suffix):
    assert only(write_table(tmp_path / f"rows.{suffix}", ROWS)) == ROWS


@pytest.mark.parametrize(
    ("name", "split"),
    [("gsm8k_test.jsonl", "test"), ("Train.json", "train"), ("dev-00000.parquet", "dev"), ("train_test.jsonl", "")],
)
def test_a_single_files_name_may_say_its_split(tmp_path, name, split):
    source = open_source(write_table(tmp_path / "test_train" / name, ROWS))
    assert (source.configs(), source.splits("")) == ([""], [split])
    assert source.rows("", split) == ROWS


def test_lines_may_hold_unicode_separators_and_end_in_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "one\u2028line\x85here", "answer": "#### 1"}\r\n\n', encoding="utf-8")
    assert only(path) == [{"question": "one\u2028line\x85here", "answer": "#### 1"}]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("", {"train": ["train.jsonl"], "validation": ["validation.jsonl"], "test": ["test.jsonl"]}),
        ("", {"train": ["sums_train.json"], "dev": ["sums_dev.json"], "test": ["Sums-Test.json"]}),
        (
            "",
            {
                "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
                "valid": ["data/valid-00000.parquet"],
                "test": ["data/test.parquet"],
            },
        ),
        ("main", {"train": ["main/train.jsonl"], "val": ["main/val.jsonl"], "test": ["main/test.jsonl"]}),
        ("algebra", {"train": ["train/algebra/1.json", "train/algebra/2.json"], "test": ["test/algebra/1.json"]}),
        ("algebra", {"train": ["algebra/train/1.json"], "test": ["algebra/test/1.json"]}),
        ("geometry", {"train": ["data/geometry/train-0.parquet"], "test": ["data/geometry/test-0.parquet"]}),
    ],
)
def test_a_folder_has_files_per_split_and_configuration(tmp_path, config, names):
    expected = {}
    for split, files in names.items():
        expected[split] = [{"question": f"{split} {number}", "answer": "1"} for number in range(len(files))]
        for file, row in zip(files, expected[split], strict=True):
            write_table(tmp_path / file, [row])
    source = open_source(str(tmp_path))
    assert source.configs() == [config]
    assert source.splits(config) == sorted(expected)
    assert {split: source.rows(config, split) for split in expected} == expected


def test_a_json_file_in_a_folder_may_be_one_row(tmp_path):
    for number in range(2):
        write_table(tmp_path / f"train/algebra/{number}.json", {"problem": str(number)})
    write_table(tmp_path / "test/geometry/0.json", {"problem": "g"})
    write_table(tmp_path / "test/.cache/0.json", {"problem": "hidden"})
    source = open_source(str(tmp_path))
    assert source.configs() == ["algebra", "geometry"]
    assert source.splits("geometry") == ["test"]
    assert source.rows("algebra", "train") == [{"problem": "0"}, {"problem": "1"}]


def test_the_innermost_name_says_the_split(tmp_path):
    write_table(tmp_path / "train_and_more/test.jsonl", ROWS[:1])
    write_table(tmp_path / "train_and_more/rest.jsonl", ROWS[1:])
    source = open_source(str(tmp_path))
    assert source.splits("") == ["test", "train"]
    assert source.rows("", "test") == ROWS[:1]
    assert source.rows("", "train") == ROWS[1:]


def test_subfolders_without_any_split_are_one_split(tmp_path):
    write_table(tmp_path / "algebra/1.json", ROWS[0])
    write_table(tmp_path / "geometry/1.json", ROWS[1])
    source = open_source(str(tmp_path))
    assert source.configs() == ["algebra", "geometry"]
    assert source.splits("algebra") == [""]
    assert source.rows("geometry", "") == ROWS[1:2]


def test_a_split_is_a_word_of_a_files_name(tmp_path):
    write_table(tmp_path / "latest.jsonl", ROWS)
    write_table(tmp_path / "constrained.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"says which split it is, there are only .*constrained.jsonl.*valid: .*train"):
        open_source(str(tmp_path)).configs()


def test_saved_data_sets(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS[:1])})
    both.save_to_disk(str(tmp_path / "both"))
    source = open_source(str(tmp_path / "both"))
    assert source.configs() == [""]
    assert source.splits("") == ["train", "validation"]
    assert source.rows("", "train") == ROWS
    assert source.rows("", "validation") == ROWS[:1]
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    assert only(tmp_path / "one") == ROWS


def test_classes_are_read_by_their_names(tmp_path):
    """In a copy of MATH the class 0 is "Level 1": its number would be another level."""
    features = Features({"level": ClassLabel(names=["Level 1", "Level 2", "Level ?"]), "problem": Value("string")})
    table = Dataset.from_dict({"level": [1, None, 2, 0], "problem": list("abcd")}, features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        assert [row["level"] for row in only(path)] == ["Level 2", None, "Level ?", "Level 1"]


def test_reading_leaves_nothing_behind(tmp_path):
    for suffix in ("jsonl", "json", "parquet"):
        only(write_table(tmp_path / f"rows.{suffix}", ROWS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "rows.jsonl", "rows.parquet"]


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/nowhere/at/all", "~/missing.parquet"])
def test_a_missing_path_is_named(source):
    assert is_local(source)
    with pytest.raises(ValueError, match=rf"source: '{source}' does not exist .*valid"):
        open_source(source)


def test_hub_ids_are_not_paths():
    assert not is_local("openai/gsm8k")
    assert type(open_source("openai/gsm8k")).__name__ == "HubSource"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"question": 1}\n{"question"\n', "cannot be read .line 2"),
        ("rows.json", '{"question": 1}', "holds dict"),
        ("rows.json", "[1, 2]", "holds list"),
        ("rows.jsonl", "1\n", "holds list"),
        ("rows.csv", "question,answer\n", "is no .jsonl, .json, .parquet file"),
        ("rows.parquet", "not parquet", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"source: .*{name}.*{message}"):
        only(path)


def test_a_file_in_a_folder_that_cannot_be_read_is_named(tmp_path):
    write_table(tmp_path / "train/algebra/1.json", {"problem": "1"})
    (tmp_path / "train/algebra/2.json").write_text(json.dumps("text"))
    with pytest.raises(ValueError, match=r"source: .*train/algebra/2.json' holds str"):
        open_source(str(tmp_path)).rows("algebra", "train")
