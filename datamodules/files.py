"""Rows of a table from one local file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["SUFFIXES", "VALID_SOURCES", "Row", "plain_rows", "read_rows"]

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
VALID_SOURCES = "a hub id, or a local .jsonl, .json or .parquet file, or a folder of such files or of a saved data set"


def read_rows(path: Path, *, single: bool = False) -> list[Row]:
    """The rows of a file. Nothing is cached or left behind.

    Args:
        path: A .jsonl, .json (a list of objects) or .parquet file.
        single: Whether a .json file may also hold one object, which is then the one row.

    Raises:
        ValueError: The file cannot be read or holds something else.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"source: {str(path)!r} is no {', '.join(SUFFIXES)} file; valid: {VALID_SOURCES}")
    try:
        rows = _content(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"source: {str(path)!r} cannot be read ({error}); valid: {VALID_SOURCES}") from error
    if single and path.suffix == ".json" and isinstance(rows, dict):
        return [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"source: {str(path)!r} holds {type(rows).__name__}; valid: one object a row")
    return rows


def plain_rows(table: Any) -> list[Row]:
    """Rows of a `datasets.Dataset`, with the names of classes where a column holds their numbers.

    In a copy of MATH the class 0 is "Level 1".
    """
    from datasets import ClassLabel

    rows: list[Row] = table.to_list()
    for column, feature in table.features.items():
        if isinstance(feature, ClassLabel):
            for row in rows:
                row[column] = None if row[column] is None else feature.int2str(row[column])
    return rows


def _content(path: Path) -> Any:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        table = parquet.ParquetFile(path).read()
        if b"huggingface" not in (table.schema.metadata or {}):
            return table.to_pylist()
        from datasets import Dataset

        return plain_rows(Dataset(table))
    text = path.read_text(encoding="utf-8")
    # Split at newlines only: `splitlines` would also split at separators that JSON allows inside a string.
    return json.loads(text) if path.suffix == ".json" else _json_lines(text.split("\n"))


def _json_lines(lines: Iterable[str]) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return rows
