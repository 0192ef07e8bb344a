"""Reference answers as text."""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["as_text", "whole_number"]

_EXACT = 2**53  # floats below are whole numbers only where they are meant to be
_WHOLE = re.compile(r"([-+]?[0-9]+)\.0+")


def as_text(value: Any) -> str | None:
    """A reference answer of any type as text; None if there is none, or several. A list of one is its element.

    Example:
        >>> as_text(27.0), as_text(" 1/2 "), as_text("")
        ('27', '1/2', None)
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return as_text(value[0])
    if value is None or isinstance(value, (list, tuple, dict)):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)
    return str(value).strip() or None


def whole_number(value: Any) -> str | None:
    """The same where answers are whole numbers by rule: "27.0" is 27. All else stays as it is.

    Example:
        >>> whole_number("27.0"), whole_number("033"), whole_number(5)
        ('27', '033', '5')
    """
    text = as_text(value)
    found = _WHOLE.fullmatch(text) if text is not None else None
    return found[1] if found else text
