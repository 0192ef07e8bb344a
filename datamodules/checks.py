"""Checks that all data sets share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gtpo_lightning.rollout import Problem

__all__ = ["check_at_least", "check_ids", "check_names", "checked_problems", "shared_questions"]


def check_at_least(minimum: int, **values: Any) -> None:
    """Refuses what is no integer of at least `minimum`.

    Raises:
        ValueError: Naming the argument.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}: {value!r}; valid: an integer >= {minimum}")


def checked_problems(problems: Any, where: str) -> list[Problem]:
    """What a data set made, as a list of problems.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(problems, (list, tuple)) or not all(isinstance(problem, Problem) for problem in problems):
        raise ValueError(f"{where} gave {type(problems).__name__} {str(problems)[:80]!r}; valid: a list of Problem")
    return list(problems)


def check_ids(sets: Sequence[tuple[str, Sequence[Problem]]]) -> None:
    """Refuses an id that stands twice, within a set or in two of them.

    Args:
        sets: Names and problems.

    Raises:
        ValueError: Naming the id and the sets.
    """
    seen: dict[str, str] = {}
    for where, problems in sets:
        for problem in problems:
            if problem.id in seen:
                first = seen[problem.id]
                place = f"twice in {where}" if first == where else f"in {first} and in {where}"
                raise ValueError(f"id: {problem.id!r} stands {place}; valid: one id per problem")
            seen[problem.id] = where


def check_names(sets: Sequence[Any]) -> None:
    """Refuses two data modules of one name.

    Args:
        sets: Data modules with a `name`.

    Raises:
        ValueError: Naming both classes and the name.
    """
    seen: dict[str, str] = {}
    for one in sets:
        kind = type(one).__name__
        if one.name in seen:
            raise ValueError(
                f"eval_sets: {seen[one.name]} and {kind} are both named {one.name!r}; valid: sets of different names"
            )
        seen[one.name] = kind


def shared_questions(problems: Sequence[Problem], others: Sequence[Problem]) -> int:
    """How many of the other problems ask what one of the problems asks, white space aside.

    Example:
        >>> shared_questions([Problem("a", "1 + 1", "2")], [Problem("b", "1  + 1 ", "2"), Problem("c", "1+1", "2")])
        1
    """
    asked = {" ".join(problem.question.split()) for problem in problems}
    return sum(" ".join(problem.question.split()) in asked for problem in others)
