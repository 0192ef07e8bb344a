"""Problems from the rows of tables: what is common to all data sets that are read."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_only

from gtpo_lightning.datamodules.base import DataModule
from gtpo_lightning.datamodules.files import Row
from gtpo_lightning.datamodules.recognise import find_columns
from gtpo_lightning.datamodules.sources import Source, is_local, open_source
from gtpo_lightning.rollout import Problem

__all__ = ["TableReader"]

_log = logging.getLogger(__name__)

# A configuration and a split of a source.
Part = tuple[str, str]


class TableReader(DataModule):
    """Base of the data sets that are read from the rows of a table, on the hub or in local files.

    A subclass sets the constants and writes `to_problem`. Copies of a data set that name columns, splits or
    configurations otherwise are recognised, and what was taken is logged; where that is not certain, the error names
    what there is and the argument that chooses. A problem's id is "{name}/{split}/{row}" with the row (from 0) of the
    source, running on through configurations that are joined, so it stays the same whatever is left out.

    Args:
        source: Hub id, or local file or folder (see `open_source`). Default: the data set's hub id.
        config: Configuration, on the hub or as a subfolder. Default: the one there is, or those that make up the set.
        question_column: Column of the question. Default: recognised, such as `problem` or `Question`.
        answer_column: Column of the reference answer. Default: recognised, such as `answer` or `expected_answer`.
        solution_column: Column of the worked solution. Default: recognised.
        **kwargs: Arguments of `DataModule`.

    Raises:
        ValueError: An argument is out of range.
    """

    default_source: ClassVar[str | None] = None
    # Configurations of the default source, joined in this order, and its splits; known, so never asked for.
    default_configs: ClassVar[tuple[str, ...]] = ("",)
    default_splits: ClassVar[tuple[str, ...]] = ("train", "test")
    # Configurations whose names match as a whole are parts of one set.
    parts: ClassVar[str | None] = None
    # Roles of columns (see `COLUMN_NAMES`) that are needed; of a tuple of roles one is enough.
    columns: ClassVar[tuple[str | tuple[str, ...], ...]] = ("question", "answer")
    # Roles that are handed to `to_problem` where there are such columns.
    extra_columns: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        source: str | None = None,
        config: str | None = None,
        question_column: str | None = None,
        answer_column: str | None = None,
        solution_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = source or self.default_source
        self.config = config
        self.chosen_columns = {"question": question_column, "answer": answer_column, "solution": solution_column}
        if solution_column is not None and "solution" not in self._roles():
            raise ValueError(f"solution_column: {solution_column!r}; valid: null, {self.name} reads no such column")
        self._sources: dict[str, Source] = {}
        self._read_before: dict[tuple[str, tuple[Part, ...], str], list[Problem]] = {}

    def to_problem(self, row: Row, id: str) -> Problem | str:
        """Makes a problem of a row.

        Args:
            row: The row by roles: all of `columns` and `extra_columns`, None where there is no such column, and
                `config`, the name of the configuration.
            id: The problem's id.

        Returns:
            The problem, or why the row gives none; such rows are counted.
        """
        raise NotImplementedError

    def select(self, rows: Sequence[Row]) -> tuple[list[int], str]:
        """Which rows belong to the data set as it was asked for.

        Args:
            rows: All rows, by roles.

        Returns:
            Their places, and what they have in common, such as "of 2024".
        """
        return list(range(len(rows))), ""

    def prepare_data(self) -> None:
        """Fetches hub data sets once per node, before every process reads them."""
        super().prepare_data()
        for location in dict.fromkeys(self._locations()):
            if not is_local(location):
                source = self._open(location)
                for config in self._configs(source):
                    split = next(iter(self._splits(source, config)), None)
                    if split is not None:
                        source.rows(config, split)

    def _locations(self) -> list[str]:
        """Every source that is read."""
        return [self.source] if self.source is not None else []

    def _open(self, location: str) -> Source:
        if location not in self._sources:
            self._sources[location] = open_source(location)
        return self._sources[location]

    def _configs(self, source: Source) -> list[str]:
        """The configurations that are read, in order."""
        if self.config is not None and not is_local(source.location):
            return [self.config]
        if source.location == self.default_source and not is_local(source.location):
            return list(self.default_configs)
        return _choose_configs(source, self.config, self.default_configs, self.parts)

    def _splits(self, source: Source, config: str) -> list[str]:
        """The splits of a configuration."""
        if source.location == self.default_source and not is_local(source.location):
            return list(self.default_splits)
        return source.splits(config)

    def _read(self, source: Source, parts: Sequence[Part], split: str) -> list[Problem]:
        """The problems of some parts of a source, in the order of the rows; read once.

        Args:
            source: The source.
            parts: Configurations and their splits.
            split: Our name of the split, for ids.
        """
        key = (source.location, tuple(parts), split)
        if key not in self._read_before:
            where = f"{source.location!r}{_in_words(parts)}"
            rows, columns = self._by_roles([(config, source.rows(config, part)) for config, part in parts], where)
            taken = ", ".join(f"{role} from {column!r}" for role, column in columns.items())
            problems, left_out = self._make(rows, f"{self.name}/{split}", where, taken)
            # Once, not once a process.
            rank_zero_only(_log.info)("%s/%s: %d problems from %s: %s", self.name, split, len(problems), where, taken)
            for level, text in left_out:
                rank_zero_only(_log.log)(level, "%s/%s: %s", self.name, split, text)
            self._read_before[key] = problems
        return self._read_before[key]

    def _roles(self) -> list[str]:
        needed = [role for group in self.columns for role in (group if isinstance(group, tuple) else (group,))]
        return [*needed, *self.extra_columns]

    def _by_roles(self, tables: Sequence[tuple[str, list[Row]]], where: str) -> tuple[list[Row], dict[str, str]]:
        """Rows with the roles of their columns as keys, and which column has which role."""
        rows = [row for _, table in tables for row in table]
        if not rows:
            raise ValueError(f"source: {where} has no rows; valid: at least one")
        columns = find_columns(rows, self.columns, self.extra_columns, chosen=self.chosen_columns, where=where)
        blank = dict.fromkeys(self._roles())
        by_roles = [
            {**blank, "config": config, **{role: row.get(column) for role, column in columns.items()}}
            for config, table in tables
            for row in table
        ]
        return by_roles, columns

    def _make(
        self, rows: list[Row], prefix: str, where: str, taken: str
    ) -> tuple[list[Problem], list[tuple[int, str]]]:
        """The problems of the rows, and what to log of rows that were left out."""
        places, common = self.select(rows)
        if not places:
            raise ValueError(f"source: none of the {len(rows)} rows of {where} is {common}; valid: one with such rows")
        found = [self._problem(rows[place], f"{prefix}/{place}") for place in places]
        problems = [problem for problem in found if isinstance(problem, Problem)]
        reasons = Counter(reason for reason in found if isinstance(reason, str))
        why = ", ".join(f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.items())
        if not problems:
            raise ValueError(
                f"source: none of the {len(places)} rows of {where} gives a problem of {self.name} ({why}; {taken}); "
                "valid: another source, or other columns by question_column, answer_column and solution_column"
            )
        texts = []
        if len(places) < len(rows):
            others = len(rows) - len(places)
            texts.append((logging.INFO, f"{others} of {len(rows)} rows are left out, they are not {common}"))
        if reasons:
            count = len(places) - len(problems)
            texts.append((logging.WARNING, f"{count} of {len(places)} rows give no problem and are left out: {why}"))
        return problems, texts

    def _problem(self, row: Row, id: str) -> Problem | str:
        question = row["question"]
        return self.to_problem(row, id) if isinstance(question, str) and question.strip() else "no text as question"


def _in_words(parts: Sequence[Part]) -> str:
    """Configurations and splits, those that have a name."""
    configs = [repr(config) for config, _ in parts if config]
    splits = [repr(split) for split in dict.fromkeys(split for _, split in parts) if split]
    words = [f"config {', '.join(configs)}"] if configs else []
    words += [f"split {', '.join(splits)}"] if splits else []
    return f" ({'; '.join(words)})" if words else ""


def _choose_configs(source: Source, chosen: str | None, defaults: tuple[str, ...], parts: str | None) -> list[str]:
    """The configurations of a source that was not seen before."""
    names = source.configs()
    if chosen in names:
        return [str(chosen)]
    if len(names) == 1 and (chosen is None or names == [""]):
        return names
    if chosen is None:
        joined = sorted(name for name in names if parts is not None and re.fullmatch(parts, name, re.IGNORECASE))
        known = [name for name in (*defaults, "default", "all") if name in names]
        if joined or known:
            return joined or known[:1]
    raise ValueError(f"config: {source.location!r} has the configurations {names}; valid: one of them")
