r"""Inequalities with one name and numbers, read as the intervals they describe."""

from __future__ import annotations

import re
from typing import NamedTuple

from gtpo_lightning.rewards.latex import TEXT_CLOSE, TEXT_OPEN

__all__ = ["Bounds", "intervals"]

_MAX_LENGTH = 300
_ORDER = re.compile(r"<|>|\\(?:leqslant|leq?|lt|geqslant|geq?|gt)(?![A-Za-z])")
_OR = re.compile(rf",? ?(?:{TEXT_OPEN} ?or ?{TEXT_CLOSE}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])) ?")
_NAME = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|lambda|phi|omega)|[A-Za-z]_[0-9A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_STRICT = ("<", ">", "\\lt", "\\gt")


class Bounds(NamedTuple):
    """An interval of a name.

    Args:
        name: What lies in it.
        brackets: `()`, `(]`, `[)` or `[]`.
        low: The marked text of its lower bound.
        high: That of its upper bound.
    """

    name: str
    brackets: str
    low: str
    high: str


def intervals(marked: str) -> list[Bounds]:
    r"""The intervals that an inequality describes, or several of one name with `or` between them.

    Args:
        marked: What `mark` gave.

    Returns:
        Their bounds; empty if the text is anything else, such as an inequality of two names.

    Example:
        >>> intervals(r"-2 < x \le 7")
        [Bounds(name='x', brackets='(]', low='-2', high='7')]
        >>> intervals("x < 2 or x > 3")[1]
        Bounds(name='x', brackets='()', low='3', high='\\infty')
    """
    if len(marked) > _MAX_LENGTH or not _ORDER.search(marked):
        return []
    found = [_bounds(part) for part in _OR.split(marked)]
    known = [bounds for bounds in found if bounds is not None]
    return known if len(known) == len(found) and len({bounds.name for bounds in known}) == 1 else []


def _bounds(text: str) -> Bounds | None:
    signs, sides = _ORDER.findall(text), [side.strip() for side in _ORDER.split(text)]
    if not 1 <= len(signs) <= 2 or len({_is_less(sign) for sign in signs}) > 1:
        return None
    if not _is_less(signs[0]):
        signs, sides = signs[::-1], sides[::-1]
    if len(signs) == 1:
        first = _NAME.fullmatch(sides[0])
        sides, signs = (["-\\infty", *sides], ["<", *signs]) if first else ([*sides, "\\infty"], [*signs, "<"])
    low, name, high = sides
    if not (_NAME.fullmatch(name) and _is_numeric(low) and _is_numeric(high)):
        return None
    return Bounds(name, ("(" if signs[0] in _STRICT else "[") + (")" if signs[1] in _STRICT else "]"), low, high)


def _is_less(sign: str) -> bool:
    return sign == "<" or sign.startswith("\\l")


def _is_numeric(side: str) -> bool:
    return bool(side) and not any(c.isalpha() or c in "=,;" for c in _COMMAND.sub("", side))
