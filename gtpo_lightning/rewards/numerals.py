r"""Numbers as they stand in answers, read exactly: any size, no floating point."""

from __future__ import annotations

import re
from collections.abc import Hashable
from fractions import Fraction

__all__ = ["leading_number", "plain_number", "to_int"]

# Beyond this many digits a numeral is compared by its canonical digits, which is exact at any size; only fractions of
# such numerals stay plain strings, since reducing them is quadratic.
MAX_FRACTION_DIGITS = 10_000

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)"
_NUMERAL = re.compile(rf"({_DIGITS})?(?:\.([0-9]*))?")
_PLAIN = re.compile(rf"([-+]?)\$?({_DIGITS})?(?:\.([0-9]*))?\Z")
_SIGNS = re.compile(r"[-+ ]*")
_ARGUMENT = r" ?(?:\{ ?([^{}]*)\}|([0-9]))"
_FRACTION = re.compile(rf"\\frac{_ARGUMENT}{_ARGUMENT}")
_SLASH = re.compile(r" ?/ ?")
_MIXED = re.compile(r" ([0-9]+) ?/ ?([0-9]+)(?![0-9.,/])")
_EXPONENT = re.compile(r"[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z.])")
_FIXED = re.compile(r"([0-9]{0,100})\.([0-9]{0,100})")
_REPEATING = re.compile(r"\\overline ?(?:\{([0-9]{1,100})\}|([0-9]))")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"[ \x01]*({'|'.join(_SCALES)})s?(?![A-Za-z])", re.IGNORECASE)


def to_int(digits: str) -> int:
    """An integer of any length; the plain conversion refuses strings of more than 4300 digits.

    Args:
        digits: ASCII digits.

    Returns:
        The integer.

    Example:
        >>> to_int("9" * 5000) == 10**5000 - 1
        True
    """
    if len(digits) < 4000:
        return int(digits)
    half = len(digits) // 2
    return to_int(digits[:-half]) * 10**half + to_int(digits[-half:])


def plain_number(text: str) -> tuple[bool, str, str] | None:
    r"""The canonical form of an integer or decimal with nothing around it but a `$`; the fast path.

    Args:
        text: An answer as it was written.

    Returns:
        (negative, digits before the point, digits after it) without zeros that say nothing, so that two numbers are
        equal exactly if their forms are; None if the text is anything else.

    Example:
        >>> plain_number(" $1,080.50"), plain_number("-0"), plain_number("5 cm")
        ((False, '1080', '5'), (False, '', ''), None)
    """
    match = _PLAIN.match(text.strip())
    return _canonical(*match.groups()) if match and (match[2] or match[3]) else None


def _canonical(sign: str, whole: str | None, decimals: str | None) -> tuple[bool, str, str]:
    whole = (whole or "").replace(",", "").lstrip("0")
    decimals = (decimals or "").rstrip("0")
    return sign == "-" and bool(whole or decimals), whole, decimals


def _numeral(text: str, at: int) -> tuple[tuple[bool, str, str], int] | None:
    """The unsigned numeral at a place of the text, in canonical form, and where it ends."""
    match = _NUMERAL.match(text, at)
    if match is None or not (match[1] or match[2]):
        return None
    return _canonical("", match[1], match[2]), match.end()


def _fraction(form: tuple[bool, str, str]) -> Fraction | None:
    _, whole, decimals = form
    if len(whole) + len(decimals) > MAX_FRACTION_DIGITS:
        return None
    number = to_int((whole + decimals) or "0")
    return Fraction(number, 10 ** len(decimals)) if decimals else Fraction(number)


def _argument(text: str) -> Fraction | None:
    """A signed numeral that is the whole text, small enough to be reduced."""
    signs = _SIGNS.match(text)
    at = signs.end() if signs else 0
    found = _numeral(text, at)
    if found is None or text[found[1] :].strip() or len(text) > MAX_FRACTION_DIGITS:
        return None
    value = _fraction(found[0])
    return -value if value is not None and text[:at].count("-") % 2 else value


def _latex_fraction(text: str, at: int) -> tuple[Fraction, int] | None:
    match = _FRACTION.match(text, at)
    if match is None:
        return None
    top, bottom = _argument(match[1] or match[2] or ""), _argument(match[3] or match[4] or "")
    return (top / bottom, match.end()) if top is not None and bottom else None


def _after_numeral(text: str, value: Fraction, at: int) -> tuple[Fraction, int]:
    """Goes on behind an integer or decimal: mixed number, a/b, exponent, repeating decimals."""
    part = _latex_fraction(text, at + (text[at : at + 1] == " "))
    if part is not None and value.denominator == 1 and 0 < part[0] < 1:
        return value + part[0], part[1]
    if (mixed := _MIXED.match(text, at)) and len(mixed[0]) < 100 and value.denominator == 1 and int(mixed[2]):
        return value + Fraction(int(mixed[1]), int(mixed[2])), mixed.end()
    if slash := _SLASH.match(text, at):
        below = _numeral(text, slash.end())
        bottom = _fraction(below[0]) if below else None
        if below and bottom:
            return value / bottom, below[1]
    if exponent := _EXPONENT.match(text, at):
        return value * Fraction(10) ** int(exponent[1]), exponent.end()
    return value, at


def _scaled(text: str, value: Fraction, at: int) -> tuple[Fraction, int]:
    """Goes on behind a number: at most two multipliers, as in `5 hundred thousand`."""
    for _ in range(2):
        if scale := _SCALE.match(text, at):
            value, at = value * _SCALES[scale[1].lower()], scale.end()
    return value, at


def _repeating(text: str, at: int) -> tuple[Fraction, int] | None:
    r"""`0.1\overline{6}`: whole and fixed decimals, then the repeating ones."""
    fixed = _FIXED.match(text, at)
    block = _REPEATING.match(text, fixed.end()) if fixed else None
    if fixed is None or block is None:
        return None
    digits, scale = block[1] or block[2], 10 ** len(fixed[2])
    value = Fraction(int(fixed[1] + fixed[2] or "0"), scale) + Fraction(int(digits), scale * (10 ** len(digits) - 1))
    return value, block.end()


def leading_number(marked: str) -> tuple[Hashable, str] | None:
    r"""The number a marked answer begins with, and what follows it.

    Reads signs, integers, decimals, thousands separators, `a/b`, `\frac`, mixed numbers, powers of ten (`1e-3`),
    multipliers (`5 million`, `2 dozen`) and repeating decimals (`0.\overline{3}`).

    Args:
        marked: What `mark` gave, or a part of it.

    Returns:
        A value that is equal exactly for equal numbers (a `Fraction`; the canonical digits beyond
        `MAX_FRACTION_DIGITS`) and the rest of the text; None if no number stands there.

    Example:
        >>> leading_number(r"-1 \frac{3}{4} cm")
        (Fraction(-7, 4), ' cm')
    """
    signs = _SIGNS.match(marked)
    at = signs.end() if signs else 0
    negative = marked[:at].count("-") % 2 == 1
    found = _latex_fraction(marked, at) or _repeating(marked, at)
    if found is None:
        numeral = _numeral(marked, at)
        if numeral is None:
            return None
        form, at = numeral
        value = _fraction(form)
        if value is None:
            return (negative, *form[1:]), marked[at:]
        found = _after_numeral(marked, value, at)
    value, at = _scaled(marked, *found)
    return (-value if negative else value), marked[at:]
