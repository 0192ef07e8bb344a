"""What a reward function is given: the columns of a batch, and those of them that its signature asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Problem

__all__ = ["Arguments", "arguments_of", "columns_of"]


def columns_of(
    texts: Sequence[str],
    problems: Sequence[Problem],
    completion_ids: Sequence[Sequence[int]] | None,
    lengths: Sequence[int] | Tensor | None,
    truncated: Sequence[bool] | Tensor | None,
) -> dict[str, list[Any]]:
    """Every column a function may ask for, one entry a completion.

    Args:
        texts: N completions.
        problems: N problems.
        completion_ids: N lists of token ids.
        lengths: N lengths, tokens. Default: counted from `completion_ids`.
        truncated: N bools.

    Raises:
        ValueError: Inputs of unequal length.
    """
    if lengths is None and completion_ids is not None:
        lengths = [len(ids) for ids in completion_ids]
    meta = dict.fromkeys(key for problem in problems for key in problem.meta)
    columns: dict[str, Any] = {key: [problem.meta.get(key) for problem in problems] for key in meta}
    questions = [problem.question for problem in problems]
    columns |= {
        "completions": texts,
        "prompts": questions,
        "question": questions,
        "answer": [problem.answer for problem in problems],
        "id": [problem.id for problem in problems],
    }
    given = {"completion_ids": completion_ids, "lengths": lengths, "truncated": truncated}
    columns |= {name: column for name, column in given.items() if column is not None}
    columns = {name: c.tolist() if isinstance(c, Tensor) else list(c) for name, c in columns.items()}
    for name, column in columns.items():
        if len(column) != len(texts):
            source = "problems" if name not in given else name
            raise ValueError(f"{source}: {len(column)} entries; valid: one for each of the {len(texts)} completions")
    return columns


class Arguments(NamedTuple):
    """The columns one function is called with."""

    positional: list[list[Any]]
    keywords: dict[str, list[Any]]

    def of(self, rows: slice) -> Arguments:
        """Those of some rows, copied, so that no function changes what the next call sees."""
        return Arguments(
            [column[rows] for column in self.positional], {name: column[rows] for name, column in self.keywords.items()}
        )


def arguments_of(name: str, function: Callable[..., Any], columns: dict[str, list[Any]]) -> Arguments:
    """The columns a function's signature asks for.

    A first parameter of another name than any column takes the completions, so that `lambda texts: ...` works.

    Args:
        name: The function's name, for the message.
        function: The reward function.
        columns: Every column there is.

    Raises:
        ValueError: It asks for a column there is not.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional: list[Any] = []
    first = parameters[0] if parameters else None
    if first is not None and (
        first.kind is first.POSITIONAL_ONLY
        or (
            first.kind is first.POSITIONAL_OR_KEYWORD
            and first.default is first.empty
            and first.name not in columns
            and all(p.name != "completions" for p in parameters)
        )
    ):
        positional, parameters = [columns["completions"]], parameters[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        skipped = {"completions"} if positional else set()
        return Arguments(positional, {key: column for key, column in columns.items() if key not in skipped})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.name not in columns and p.default is p.empty]
    if missing:
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(missing)}, which this call does not have; valid: "
            f"{', '.join(sorted(columns))}"
        )
    return Arguments(positional, {p.name: columns[p.name] for p in named if p.name in columns})
