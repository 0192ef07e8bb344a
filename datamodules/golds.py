"""Reference answers as text."""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["as_text", "whole_number"]

_WHOLE = re.compile(r"([-+]?[0-9]+)\.0+")


def as_text(value: Any) -> str | None:
    """A reference answer of any type as text; None if there is none.

    Example:
        >>> as_text(27.0), as_text(" 1/2 "), as_text("")
        ('27', '1/2', None)
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
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
