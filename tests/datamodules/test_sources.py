import json

import pytest
from datasets import Dataset, DatasetDict

from gtpo_lightning.datamodules.sources import has_split, is_local, load_rows

ROWS = [{"question": f"What is {i}+1?", "answer": f"#### {i + 1}"} for i in range(3)]
COLUMNS = ("question", "answer")


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_single_file_is_all_of_its_rows(tmp_path, suffix, split):
    assert load_rows(write(tmp_path / f"rows.{suffix}"), split, columns=COLUMNS) == ROWS


def test_lines_may_hold_unicode_separators_and_end_in_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "one\u2028line\x85here", "answer": "#### 1"}\r\n\n', encoding="utf-8")
    assert load_rows(str(path)) == [{"question": "one\u2028line\x85here", "answer": "#### 1"}]


@pytest.mark.parametrize(
    "names",
    [
        {"train": ["train.jsonl"], "val": ["validation.jsonl"], "test": ["test.jsonl"]},
        {"train": ["sums_train.json"], "val": ["sums_dev.json"], "test": ["sums_test.json"]},
        {
            "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            "val": ["data/valid-00000.parquet"],
            "test": ["data/test.parquet"],
        },
        {"train": ["main/train.jsonl"], "val": ["main/val.jsonl"], "test": ["main/test.jsonl"]},
    ],
)
def test_a_folder_has_files_per_split(tmp_path, names):
    expected = {}
    for split, files in names.items():
        expected[split] = []
        for number, file in enumerate(files):
            rows = [{"question": f"{split} {number}", "answer": "#### 1"}]
            write(tmp_path / file, rows)
            expected[split] += rows
    for split in names:
        assert has_split(str(tmp_path), split, "main")
        assert load_rows(str(tmp_path), split, config="main") == expected[split]


def test_a_split_is_a_word_of_a_files_name(tmp_path):
    write(tmp_path / "latest.jsonl")
    write(tmp_path / "constrained.jsonl")
    assert not has_split(str(tmp_path), "test")
    with pytest.raises(ValueError, match=r"no file for 'train', only .*constrained.jsonl.*valid: .*train"):
        load_rows(str(tmp_path), "train")


def test_saved_data_sets(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS[:1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert load_rows(str(tmp_path / "both"), "train") == ROWS
    assert load_rows(str(tmp_path / "both"), "val") == ROWS[:1]
    assert not has_split(str(tmp_path / "both"), "test")
    with pytest.raises(ValueError, match=r"has the splits \['train', 'validation'\], none for 'test'"):
        load_rows(str(tmp_path / "both"), "test")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    assert load_rows(str(tmp_path / "one"), "train") == ROWS
    assert not has_split(str(tmp_path / "one"), "val")


def test_reading_leaves_nothing_behind(tmp_path):
    for suffix in ("jsonl", "json", "parquet"):
        load_rows(write(tmp_path / f"rows.{suffix}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "rows.jsonl", "rows.parquet"]


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/nowhere/at/all", "~/missing.parquet"])
def test_a_missing_path_is_named(source):
    assert is_local(source)
    with pytest.raises(ValueError, match=rf"source: '{source}' does not exist .*valid"):
        load_rows(source)


def test_hub_ids_are_not_paths():
    assert not is_local("openai/gsm8k")
    assert not has_split("openai/gsm8k", "train")


def test_a_missing_column_is_named_with_what_is_there(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"problem": "1", "solution": "2"}])
    message = r"row 4 has the columns \['problem', 'solution'\] and lacks \['question', 'answer'\]; valid: rows with"
    with pytest.raises(ValueError, match=message) as error:
        load_rows(path, columns=COLUMNS)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"question": 1}\n{"question"\n', "cannot be read .line 2"),
        ("rows.json", '{"question": 1}', "holds dict"),
        ("rows.json", "[1, 2]", "holds list"),
        ("rows.jsonl", "1\n", "holds list"),
        ("rows.jsonl", "", "has no rows"),
        ("rows.csv", "question,answer\n", "is no .jsonl, .json, .parquet file"),
        ("rows.parquet", "not parquet", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=f"source: .*{name}.*{message}|{message}"):
        load_rows(str(path))


def test_the_hub_is_asked_for_config_and_split_and_its_errors_are_explained(monkeypatch):
    asked = []

    def load_dataset(source, config, split):
        asked.append((source, config, split))
        if source == "down/hub":
            raise ConnectionError("no route")
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert load_rows("some/set", "test", config="main", hub_split="validation") == ROWS
    assert asked == [("some/set", "main", "validation")]
    with pytest.raises(ValueError, match=r"could not load 'down/hub' .*ConnectionError: no route.*valid: a hub id, or"):
        load_rows("down/hub")
