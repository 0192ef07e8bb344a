"""Where the rows of a table come from: a hub id, a local file, a local folder. All have the same three methods."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from gtpo_lightning.datamodules.files import SUFFIXES, VALID_SOURCES, Row, plain_rows, read_rows
from gtpo_lightning.datamodules.hub import HubSource
from gtpo_lightning.datamodules.recognise import split_words

__all__ = ["Source", "is_local", "open_source"]


class Source(Protocol):
    """Rows in splits in configurations. A configuration or split named "" is the only one, without a name."""

    location: str

    def configs(self) -> list[str]:
        """Names of the configurations."""

    def splits(self, config: str) -> list[str]:
        """Names of the splits of a configuration."""

    def rows(self, config: str, split: str) -> list[Row]:
        """All rows of a split."""


def is_local(location: str) -> bool:
    """Whether a source names a file or a folder rather than a data set of the hub.

    Example:
        >>> is_local("rows.jsonl"), is_local("openai/gsm8k")
        (True, False)
    """
    path = Path(location).expanduser()
    return path.exists() or path.suffix in SUFFIXES or location.startswith(("/", "./", "../", "~"))


def open_source(location: str) -> Source:
    """The source at a location. Local sources need no network and leave no cache behind.

    * A single file (.jsonl, .json with a list of objects, .parquet) is one split: the one among the words of the file's
      name (`gsm8k_test.jsonl`), else one without a name.
    * A folder that `datasets` wrote by `save_to_disk` has the splits that were saved.
    * In any other folder the name of a split is looked for among the words of a file's name (`gsm8k_train.jsonl`,
      `train-00000-of-00002.parquet`), then of its folders (`train/algebra/1.json`). Other folders are configurations
      (`algebra/train.jsonl`, `main/test.parquet`), `data` aside. A .json file here may also hold a single row.
      Subfolders in which nothing names a split are one split without a name.

    Args:
        location: A hub id, a file or a folder.

    Raises:
        ValueError: A local path is not there, or a folder holds no file that says its split.
    """
    if not is_local(location):
        return HubSource(location)
    path = Path(location).expanduser()
    if path.is_file():
        return _FileSource(location, path)
    if not path.is_dir():
        raise ValueError(f"source: {location!r} does not exist (looked in {Path.cwd()}); valid: {VALID_SOURCES}")
    saved = _saved_splits(path)
    return _FolderSource(location, path) if saved is None else _SavedSource(location, path, saved)


class _FileSource:
    def __init__(self, location: str, path: Path) -> None:
        self.location = location
        self.path = path

    def configs(self) -> list[str]:
        return [""]

    def splits(self, config: str) -> list[str]:
        words = split_words(self.path.stem)
        return list(words) if len(words) == 1 else [""]

    def rows(self, config: str, split: str) -> list[Row]:
        return read_rows(self.path)


class _SavedSource:
    def __init__(self, location: str, path: Path, saved: list[str]) -> None:
        self.location = location
        self.path = path
        self.saved = saved

    def configs(self) -> list[str]:
        return [""]

    def splits(self, config: str) -> list[str]:
        return self.saved

    def rows(self, config: str, split: str) -> list[Row]:
        from datasets import load_from_disk

        return plain_rows(load_from_disk(str(self.path / split)))


def _saved_splits(path: Path) -> list[str] | None:
    """Splits that `save_to_disk` wrote: subfolders by name, "" for a data set without splits; None: nothing saved."""
    if (path / "dataset_dict.json").is_file():
        return list(json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    return [""] if (path / "state.json").is_file() and (path / "dataset_info.json").is_file() else None


class _File(NamedTuple):
    config: str
    splits: frozenset[str]
    path: Path


class _FolderSource:
    def __init__(self, location: str, path: Path) -> None:
        self.location = location
        self.path = path

    @cached_property
    def files(self) -> list[_File]:
        found = [_place(path, self.path) for path in sorted(self.path.rglob("*")) if _is_table(path, self.path)]
        named = [file for file in found if file.splits]
        # Subfolders alone may be all there is of one split; loose files of unknown meaning are not taken.
        usable = named or [file._replace(splits=frozenset({""})) for file in found if file.config]
        if not usable:
            names = [str(file.path.relative_to(self.path)) for file in found[:10]]
            raise ValueError(
                f"source: no file in {self.location!r} says which split it is, there are only {names}; valid: files or "
                "folders with train, validation or test in their names, or the path of one file"
            )
        return usable

    def configs(self) -> list[str]:
        return sorted({file.config for file in self.files})

    def splits(self, config: str) -> list[str]:
        return sorted({split for file in self.files if file.config == config for split in file.splits})

    def rows(self, config: str, split: str) -> list[Row]:
        files = [file.path for file in self.files if file.config == config and split in file.splits]
        return [row for path in files for row in read_rows(path, single=True)]


def _is_table(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.suffix in SUFFIXES and not hidden and path.is_file()


def _place(path: Path, root: Path) -> _File:
    """Configuration and splits of a file by its names from the inside out."""
    folders = path.relative_to(root).parts[:-1]
    words = [split_words(name) for name in (path.stem, *reversed(folders))]
    config = "/".join(name for name in folders if name != "data" and not split_words(name))
    return _File(config, frozenset(next(filter(None, words), set())), path)
