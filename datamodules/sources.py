"""Rows of a table from a hub id, a local file or a local folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["has_split", "is_local", "load_rows"]

Row = dict[str, Any]

_SUFFIXES = (".jsonl", ".json", ".parquet")
_NAMES = {"train": {"train"}, "val": {"val", "valid", "validation", "dev"}, "test": {"test"}}
_VALID = "a hub id, or a local .jsonl, .json or .parquet file, or a folder of such files or of a saved data set"


def is_local(source: str) -> bool:
    """Whether a source names a file or a folder rather than a data set of the hub.

    Example:
        >>> is_local("rows.jsonl"), is_local("openai/gsm8k")
        (True, False)
    """
    path = Path(source).expanduser()
    return path.exists() or path.suffix in _SUFFIXES or source.startswith(("/", "./", "../", "~"))


def load_rows(
    source: str, split: str = "train", *, columns: Sequence[str] = (), config: str | None = None, hub_split: str = ""
) -> list[Row]:
    """Loads the rows of one split. Local sources need no network and leave no cache behind.

    A single file has no splits: all of it is loaded. In a folder the files of a split are those with its name among
    the words of theirs (`train.jsonl`, `gsm8k_train.jsonl`, `train-00000-of-00002.parquet`; for "val" also valid,
    validation and dev), looked for in the folder, in its subfolder named like `config`, and in `data`. A folder that
    `datasets` wrote by `save_to_disk` is read as such.

    Args:
        source: A hub id, a file (.jsonl, .json with a list of objects, .parquet) or a folder.
        split: "train", "val" or "test".
        columns: Columns that every row needs.
        config: Configuration of a hub data set.
        hub_split: Name of the split on the hub. Default: `split`.

    Raises:
        ValueError: The source is not there, cannot be read, has no such split, or lacks a column.
    """
    path = Path(source).expanduser()
    if not is_local(source):
        rows, where = _hub_rows(source, config, hub_split or split), f"{source} ({hub_split or split})"
    elif path.is_dir():
        rows, where = _folder_rows(path, split, config), f"{source} ({split})"
    elif path.is_file():
        rows, where = _file_rows(path), source
    else:
        raise ValueError(f"source: {source!r} does not exist (looked in {Path.cwd()}); valid: {_VALID}")
    _check_columns(rows, columns, where)
    return rows


def has_split(source: str, split: str, config: str | None = None) -> bool:
    """Whether a local folder has files of that split; False for hub ids and single files."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return False
    saved = _saved_splits(path)
    return bool(_split_files(path, split, config)) if saved is None else _saved_name(saved, split) is not None


def _hub_rows(source: str, config: str | None, split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return load_dataset(source, config, split=split).to_list()
    except Exception as error:  # the hub's client raises a dozen kinds
        raise ValueError(
            f"source: could not load {source!r} (config {config!r}, split {split!r}) from the hub "
            f"({type(error).__name__}: {error}); valid: {_VALID}"
        ) from error


def _file_rows(path: Path) -> list[Row]:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"source: {str(path)!r} is no {', '.join(_SUFFIXES)} file; valid: {_VALID}")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet  # type: ignore[import-untyped]

            return parquet.ParquetFile(path).read().to_pylist()
        text = path.read_text(encoding="utf-8")
        # Split at newlines only: `splitlines` would also split at separators that JSON allows inside a string.
        rows = json.loads(text) if path.suffix == ".json" else _json_lines(text.split("\n"))
    except (ValueError, OSError) as error:
        raise ValueError(f"source: {str(path)!r} cannot be read ({error}); valid: {_VALID}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"source: {str(path)!r} holds {type(rows).__name__}; valid: one object a row")
    return rows


def _json_lines(lines: Iterable[str]) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return rows


def _folder_rows(path: Path, split: str, config: str | None) -> list[Row]:
    saved = _saved_splits(path)
    if saved is not None:
        from datasets import load_from_disk

        name = _saved_name(saved, split)
        if name is None:
            raise ValueError(
                f"source: {str(path)!r} has the splits {saved}, none for {split!r}; valid: a split of these"
            )
        return load_from_disk(str(path / name)).to_list()
    files = _split_files(path, split, config)
    if not files:
        found = sorted(file.name for file in path.iterdir())[:10]
        raise ValueError(
            f"source: {str(path)!r} has no file for {split!r}, only {found}; valid: names with one of "
            f"{sorted(_NAMES[split])} in them, such as {split}.jsonl"
        )
    return [row for file in files for row in _file_rows(file)]


def _saved_splits(path: Path) -> list[str] | None:
    """Splits that `save_to_disk` wrote: subfolders by name, "" for a data set without splits; None: nothing saved."""
    if (path / "dataset_dict.json").is_file():
        return list(json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    return [""] if (path / "state.json").is_file() and (path / "dataset_info.json").is_file() else None


def _saved_name(saved: list[str], split: str) -> str | None:
    names = _NAMES[split] | ({""} if split == "train" else set())
    return next((name for name in saved if name in names), None)


def _split_files(path: Path, split: str, config: str | None) -> list[Path]:
    for folder in (path, *([path / config] if config else []), path / "data"):
        if folder.is_dir():
            files = [file for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES]
            files = [file for file in files if _NAMES[split] & set(re.split(r"[-_.\s]", file.stem.lower()))]
            if files:
                return files
    return []


def _check_columns(rows: list[Row], columns: Sequence[str], where: str) -> None:
    if not rows:
        raise ValueError(f"source: {where} has no rows; valid: at least one")
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns if column not in row]
        if missing:
            raise ValueError(
                f"source: {where}, row {number} has the columns {sorted(row)} and lacks {missing}; "
                f"valid: rows with {list(columns)}"
            )
