"""Which column is the question and which split is the test set, in tables of other owners."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gtpo_lightning.datamodules.files import Row

__all__ = ["COLUMN_NAMES", "find_columns", "find_only_split", "find_split", "split_words"]

COLUMN_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "question": (("problem", "question"), ("prompt",)),
    "answer": (("answer", "final_answer", "expected_answer"),),
    "solution": (("solution",),),
    "id": (("unique_id",), ("id",)),
    "subject": (("subject",), ("type",)),
    "level": (("level",),),
    "url": (("url",),),
    "year": (("year",),),
}
"""Names of the columns that have a role, compared without case. A later group counts only without an earlier one."""

_SPLIT_NAMES = {
    "train": {"train", "training"},
    "val": {"val", "valid", "validation", "dev"},
    "test": {"test"},
}


def split_words(name: str) -> set[str]:
    """The names of splits among the words of a name.

    Example:
        >>> split_words("gsm8k_Train-00000-of-00002"), split_words("latest")
        ({'train'}, set())
    """
    return set(re.split(r"[-_.\s]+", name.lower())) & set().union(*_SPLIT_NAMES.values())


def find_split(names: Sequence[str], split: str, *, chosen: str | None, where: str) -> str | None:
    """The split of a source that is one of ours.

    Args:
        names: The source's splits.
        split: "train", "val" or "test".
        chosen: The name given for it by argument `{split}_split`.
        where: The source, for messages.

    Returns:
        Its name; None if there is no such split.

    Raises:
        ValueError: The chosen name is not there, or several could be meant.

    Example:
        >>> find_split(["train", "Validation"], "val", chosen=None, where="rows")
        'Validation'
    """
    if chosen is not None:
        return _given(names, chosen, f"{split}_split", where, "split")
    found = [name for name in names if name.casefold() in _SPLIT_NAMES[split]]
    if len(found) > 1:
        raise ValueError(f"{split}_split: {where} has the splits {list(names)}; valid: one of {found}")
    return found[0] if found else None


def find_only_split(
    names: Sequence[str], split: str, *, chosen: str | None, where: str, argument: str | None = None
) -> str:
    """The split of a source that serves one purpose only: that of this name, else the only one.

    Args:
        names: The source's splits.
        split: "val" or "test".
        chosen: The name given for it.
        where: The source, for messages.
        argument: The argument that chooses. Default: `{split}_split`.

    Raises:
        ValueError: The chosen name is not there, or none has the name and there are several.

    Example:
        >>> find_only_split(["train"], "test", chosen=None, where="rows")
        'train'
    """
    argument = argument or f"{split}_split"
    if chosen is not None:
        return _given(names, chosen, argument, where, "split")
    found = find_split(names, split, chosen=None, where=where) or (names[0] if len(names) == 1 else None)
    if found is None:
        raise ValueError(f"{argument}: {where} has the splits {list(names)}, none is named {split}; valid: one of them")
    return found


def find_columns(
    rows: Sequence[Row],
    required: Sequence[str | tuple[str, ...]],
    optional: Sequence[str],
    *,
    chosen: Mapping[str, str | None],
    where: str,
) -> dict[str, str]:
    """The column of each role.

    Args:
        rows: The rows, at least one.
        required: Roles that are needed; of a tuple of roles one is enough.
        optional: Roles that are taken where they are there.
        chosen: Columns given by argument, or None, by role: only the roles that have such an argument.
        where: The source, for messages.

    Returns:
        The name of the column by role.

    Raises:
        ValueError: A chosen column is not there, a required role has none, a role has several of different content, or
            a row lacks a required column.

    Example:
        >>> find_columns([{"Problem": "1+1", "Answer": 2}], ["question", "answer"], [], chosen={}, where="rows")
        {'question': 'Problem', 'answer': 'Answer'}
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    groups = [role if isinstance(role, tuple) else (role,) for role in required]
    found = {}
    for role in [*(role for group in groups for role in group), *optional]:
        column = _column(rows, names, role, chosen, where)
        if column is not None:
            found[role] = column
    for group in groups:
        if not any(role in found for role in group):
            known = [name for role in group for tier in COLUMN_NAMES[role] for name in tier]
            arguments = " or ".join(f"{role}_column" for role in group)
            raise ValueError(
                f"{arguments}: {where} has the columns {names}, none of {known}; valid: one of its columns"
            )
    needed = [found[group[0]] for group in groups if len(group) == 1]
    _check_rows(rows, needed, where)
    return found


def _column(
    rows: Sequence[Row], names: Sequence[str], role: str, chosen: Mapping[str, str | None], where: str
) -> str | None:
    given = chosen.get(role)
    if given is not None:
        return _given(names, given, f"{role}_column", where, "column")
    for tier in COLUMN_NAMES[role]:
        found = [name for name in names if name.casefold().replace(" ", "_") in tier]
        if len(found) > 1 and role in chosen and not _same(rows, found):
            raise ValueError(f"{role}_column: {where} has {found} among the columns {names}; valid: one of {found}")
        if found:
            return found[0]
    return None


def _same(rows: Sequence[Row], columns: Sequence[str]) -> bool:
    return all(row.get(column) == row.get(columns[0]) for row in rows for column in columns)


def _given(names: Sequence[str], chosen: str, argument: str, where: str, kind: str) -> str:
    """The name that was chosen, or the only one that differs from it by case."""
    if chosen in names:
        return chosen
    found = [name for name in names if name.casefold() == chosen.casefold()]
    if len(found) != 1:
        raise ValueError(f"{argument}: {chosen!r} is no {kind} of {where}; valid: {', '.join(names) or 'none'}")
    return found[0]


def _check_rows(rows: Sequence[Row], columns: Sequence[str], where: str) -> None:
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns if column not in row]
        if missing:
            raise ValueError(
                f"source: {where}, row {number} has the columns {sorted(row)} and lacks {missing}; "
                f"valid: rows with {list(columns)}"
            )
