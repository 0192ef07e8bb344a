r"""Answers as comparable values: numbers, words, tuples, intervals, sets, matrices, and expressions for the rest."""

from __future__ import annotations

import re
from collections.abc import Hashable
from fractions import Fraction
from typing import NamedTuple

from gtpo_lightning.rewards.inequalities import Bounds, intervals
from gtpo_lightning.rewards.latex import BREAK, CUP, DOLLAR, SET_CLOSE, SET_OPEN, TEXT_CLOSE, TEXT_OPEN, squash, trim
from gtpo_lightning.rewards.numerals import leading_number
from gtpo_lightning.rewards.units import CODES, CURRENCIES, currency_name, is_known_unit, unit_name

__all__ = ["Value", "parse"]

# Bounds in time: a longer list or a deeper nest is compared as a string.
_MAX_DEPTH, _MAX_ELEMENTS = 30, 1000
_OPENING, _CLOSING = f"([{{{SET_OPEN}", f")]}}{SET_CLOSE}"
# A name, `x_1`, `\theta`, `f(2)`, `(x, y)`, `\text{Area}`, an angle, or the length of a segment.
_NAMES = (
    r"[A-Za-z]{1,40}(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]{1,8}\}))?'?",
    r"\\[A-Za-z]{1,20}",
    r"[A-Za-z]\((?:[A-Za-z]|-?[0-9]{1,6})\)",
    r"\([A-Za-z](?: ?, ?[A-Za-z]){1,8}\)",
    rf"{TEXT_OPEN}[^{TEXT_CLOSE}=<>]{{1,40}}{TEXT_CLOSE}",
    r"\\angle ?[A-Z]{1,3}",
    r"\| ?[A-Z]{2} ?\|",
    r"\\overline ?\{ ?[A-Z]{2} ?\}",
)
_LABEL = re.compile(rf"(?:m ?(?=\\angle))?(?P<name>{'|'.join(_NAMES)}) ?(?:=|\\in(?![A-Za-z]))")
_LENGTH = re.compile(r"\||\\overline|[{}]")
_TEXT_LABEL = re.compile(rf"{TEXT_OPEN}(?P<name>[A-Za-z :]{{1,40}}){TEXT_CLOSE}(?= ?[-+0-9\\.{CURRENCIES}])")
_NOT_A_LABEL = "not no never at least most less more than about approximately or and between under over"
_DENIALS = frozenset(_NOT_A_LABEL.split())
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|approx)(?![A-Za-z])")
_CURRENCY = re.compile(rf"([-+ ]*)(?:US(?={DOLLAR}))?([{CURRENCIES}]|(?:{'|'.join(CODES)})(?![A-Za-z])) ?")
_BASED = re.compile(r"([-+]?)\(?0*([0-9A-Za-z][0-9A-Za-z.]*)\)?_(?:([0-9]{1,3})|\{ ?([0-9]{1,3}|[a-z]{3,7}) ?\})\Z")
_BASE_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_NAMED_BASE = re.compile(r" ?\(?base ([0-9]{1,3})\)?\Z")
_CONJUNCTION = re.compile(rf",? ?{TEXT_OPEN}?(?<![A-Za-z]) ?(?:and|or) ?(?![A-Za-z]){TEXT_CLOSE}? ?")
_RUN = re.compile(r"(?<![0-9.])[0-9]+(?![0-9])(?:,[0-9]+(?![0-9]))+")
_MATRIX = re.compile(r"\\begin ?\{(?:([pbBvV]?)matrix|array)\}(?:\{[lcr| ]{1,20}\})?(.*)\\end ?\{[a-zA-Z]{5,7}\}\Z")
_RIGHT_LABEL = re.compile(r"([^=]{1,60}?) ?= ?(?P<name>[A-Za-z]|\\[A-Za-z]{2,20})\Z")
_RATIO = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?(?: ?: ?[0-9]{1,9}(?:\.[0-9]{1,9})?)+)(?![0-9.:])")
_DATE = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\Z")
_SIGN_OF_TWO = re.compile(r"\\(pm|mp)(?![A-Za-z])")
# All in `\text`, with something in it that words do not have.
_WHOLE_TEXT = re.compile(rf"{TEXT_OPEN}(?=[^{TEXT_CLOSE}]*[0-9=<>])([^{TEXT_OPEN}{TEXT_CLOSE}]*){TEXT_CLOSE}\Z")
_CHOICE = re.compile(r"\(?([A-Za-z])\)\Z")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREE = f"{TEXT_OPEN}°{TEXT_CLOSE}"
_TRAILING_WORDS = re.compile(r"(?<=[0-9A-Za-z)}!|]) ([A-Za-z]{2,13}(?: [A-Za-z]{2,13}){0,3})\Z")
_TRAILING_TEXT = re.compile(rf"{TEXT_OPEN}[^{TEXT_CLOSE}]*{TEXT_CLOSE} ?(?:\^ ?(?:[0-9]|\{{[0-9]\}}))?\Z")
_PRIMED = re.compile(r"['’](?![A-Za-z])")
_SYNONYMS = {"infinity": "\\infty", "pi": "\\pi", "emptyset": "\\emptyset"}
_ALL_NUMBERS = ("allrealnumbers", "realnumbers", "allreals", "reals")


class Value(NamedTuple):
    """One answer, or one element of one.

    Args:
        kind: `number`, `based`, `ratio`, `date`, `word`, `expression`, `ordered`, `unordered`, `union`, `matrix` or
            `blank`.
        core: What is compared within a kind: a number, a word, the normalised string, or (brackets, elements).
        text: The normalised string, whatever the kind.
        unit: The name of its unit; None where it has none.
        label: The left-hand side of `x =`; None where it has none.
    """

    kind: str
    core: Hashable
    text: str
    unit: str | None = None
    label: str | None = None

    @property
    def elements(self) -> tuple[Value, ...]:
        """The elements of a tuple, interval, list, set, union or matrix; empty for a single value."""
        return self.core[1] if isinstance(self.core, tuple) and self.kind in _COLLECTIONS else ()


_COLLECTIONS = ("ordered", "unordered", "union", "matrix")


def _split(text: str, separators: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    if not any(s in text for s in separators):
        return [text]
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(depth - 1, 0)
        elif depth == 0 and character in separators:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _wrapped(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    if len(text) < 2 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return False
    depth = 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return at == len(text) - 1
    return False


def _join_run(match: re.Match[str]) -> str:
    first, *rest = match[0].split(",")
    return first + "".join(rest) if len(first) <= 3 and all(len(group) == 3 for group in rest) else match[0]


def parse(marked: str, depth: int = 0) -> Value:
    r"""Reads a marked answer.

    A bare comma between groups of three digits (`1,234`) separates thousands; any other comma, `;`, `and`, `or` makes a
    list. Inside brackets a bare comma always separates elements. An inequality with one name and numbers is an interval
    of that name; several joined by `or` are a union.

    Args:
        marked: What `mark` gave.
        depth: How deep the text stands in brackets; beyond 30, as beyond 1000 elements, it is an expression.

    Returns:
        The value.

    Example:
        >>> value = parse("x = 1,080 cm")
        >>> value.kind, value.core, value.unit, value.label
        ('number', Fraction(1080, 1), 'cm', 'x')
    """
    text = trim(marked)
    if text[:1] == TEXT_OPEN and (whole := _WHOLE_TEXT.match(text)):
        text = trim(whole[1])
    if not text:
        return Value("blank", "", "")
    if depth > _MAX_DEPTH:
        return Value("expression", squash(text), squash(text))
    if found := intervals(text):
        return _union_of_intervals(found, text, depth)
    if " or" in text or " and" in text or TEXT_OPEN in text:
        text = trim(_CONJUNCTION.sub(" , ", text))
    if "," in text and not any(bracket in text for bracket in ("(", "[", SET_OPEN)) and text[:1] != "{":
        text = _RUN.sub(_join_run, text)
    if len(text) > _MAX_ELEMENTS < sum(text.count(separator) for separator in f",;&{CUP}{BREAK}"):
        return Value("expression", squash(text), squash(text))
    if CUP in text and len(parts := _split(text, CUP)) > 1:
        return _collection("union", "", parts, text, depth)
    if len(parts := _split(text, ",;")) > 1:
        return _collection("unordered", "", parts, text, depth)
    return _labelled(text, depth)


def _collection(kind: str, brackets: str, parts: list[str], text: str, depth: int) -> Value:
    elements: list[Value] = []
    for part in parts:
        value = parse(part, depth + 1)
        # `1 \pm \sqrt 2, 3` is one list of three.
        inner = kind == "unordered" and value.kind == kind and _SIGN_OF_TWO.search(part) and value.label is None
        elements += value.elements if inner else [value]
    return Value(kind, (brackets, tuple(elements)), squash(text))


def _union_of_intervals(found: list[Bounds], text: str, depth: int) -> Value:
    values = [
        Value("ordered", (brackets, (parse(low, depth + 1), parse(high, depth + 1))), squash(text), label=squash(name))
        for name, brackets, low, high in found
    ]
    if len(values) == 1:
        return values[0]
    return Value("union", ("", tuple(values)), squash(text), label=values[0].label)


def _labelled(text: str, depth: int) -> Value:
    """A single value with an optional `x =` before it."""
    if "=" not in text and "\\in" not in text and text[:1] != TEXT_OPEN:
        return _single(text, depth)
    label = _LABEL.match(text)
    rest = text[label.end() :] if label else text
    if label is None and (words := _TEXT_LABEL.match(text)) and not _DENIALS & set(words["name"].lower().split()):
        label, rest = words, text[words.end() :]
    if label is None and (turned := _RIGHT_LABEL.match(text)) and parse(turned[1], depth + 1).kind == "number":
        label, rest = turned, turned[1]
    if label and "=" in rest:
        rest = _end_of_chain(rest, depth)
    if label is None or not rest.strip() or _RELATION.search(rest):
        return _single(text, depth)
    return parse(rest, depth + 1)._replace(label=_label_name(label["name"]))


def _label_name(text: str) -> str:
    r"""One name of a label; a segment's length is `AB`, `|AB|` and `\overline{AB}`."""
    name = squash(_unmarked(text))
    return _LENGTH.sub("", name) if name[:1] == "|" or name.startswith("\\overline") else name


def _end_of_chain(text: str, depth: int) -> str:
    """The number at the end of `3^2 = 9`, what stands behind `n =`; the text itself where it is anything else."""
    *steps, last = text.split("=")
    computed = all(any(c.isdigit() for c in step) for step in steps)
    return last if computed and parse(last, depth + 1).kind == "number" else text


def _unmarked(text: str) -> str:
    return text.replace(TEXT_OPEN, "").replace(TEXT_CLOSE, "")


def _single(text: str, depth: int) -> Value:
    if _wrapped(text):
        return _bracketed(text, depth)
    if both := _with_both_signs(text):
        return _collection("unordered", "", both, text, depth)
    if text.startswith("\\begin") and (matrix := _MATRIX.match(text)) and matrix[1] not in ("v", "V"):
        rows = [cell.split("&") for cell in matrix[2].strip(f" {BREAK}").split(BREAK)]
        shape = "x".join(str(len(row)) for row in rows)
        return _collection("matrix", shape, [cell for row in rows for cell in row], text, depth)
    return _number(text) or _ratio(text) or _date(text) or _word_or_expression(text, depth)


def _with_both_signs(text: str) -> list[str]:
    r"""The two readings of `\pm` and `\mp`; none without these, or where one of them stands twice."""
    signs = _SIGN_OF_TWO.findall(text) if "\\" in text else []
    if not signs or len(set(signs)) < len(signs):
        return []
    upper, lower = {"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"}
    return [_SIGN_OF_TWO.sub(lambda s: upper[s[1]], text), _SIGN_OF_TWO.sub(lambda s: lower[s[1]], text)]


def _ratio(text: str) -> Value | None:
    """`1:2`, `3:30 p.m.`: equal only to the same figures, since 2:4 may be a time."""
    plain = text.removeprefix(TEXT_OPEN) if ":" in text else ""
    ratio = _RATIO.match(plain)
    if ratio is None:
        return None
    rest = plain[ratio.end() :]
    unit = unit_name(rest) if _unmarked(rest).strip() else None
    if unit is None and _unmarked(rest).strip():
        return None
    return Value("ratio", tuple(Fraction(part.strip()) for part in ratio[1].split(":")), squash(text), unit)


def _date(text: str) -> Value | None:
    """`2023-01-05`, which is no difference."""
    date = _DATE.match(text)
    return Value("date", date.groups(), text) if date else None


def _bracketed(text: str, depth: int) -> Value:
    inner, brackets = text[1:-1], text[0] + text[-1]
    parts = _split(inner, ",;")
    if brackets in ("{}", SET_OPEN + SET_CLOSE):
        value = _collection("unordered", "", parts, text, depth) if len(parts) > 1 else parse(inner, depth + 1)
        return value if value.kind != "blank" else Value("expression", "\\emptyset", "\\emptyset")
    if len(parts) > 1 or brackets != "()":
        return _collection("ordered", brackets, parts, text, depth)
    return parse(inner, depth + 1)


def _has_base(digits: str, base: int) -> bool:
    """Whether a numeral is written in a base: it begins with a figure (`11_3`), or all its letters are digits there.

    So `FF_{16}` is a number and `x_1`, `a_2` are names with an index.
    """
    if digits[0].isdigit():
        return True
    return 10 < base <= 36 and all(char == "." or int(char, 36) < base for char in digits.lower())


def _number(text: str) -> Value | None:
    """An integer, decimal or fraction with its unit, currency or base; None if the text is more than that."""
    if "_" in text and (based := _based(squash(_unmarked(text)))):
        return based
    squashed = squash(text)
    plain = _unmarked(text) if text.startswith(TEXT_OPEN) else text
    currency = _CURRENCY.match(plain)
    found = leading_number(currency[1] + plain[currency.end() :] if currency else plain)
    if found is None:
        return None
    value, rest = found
    if base := _NAMED_BASE.match(_unmarked(rest)) if "base" in rest else None:
        digits = plain[: len(plain) - len(rest)].strip()
        return Value("based", (digits[0] == "-", digits.lstrip("-+0").lower(), int(base[1])), squashed)
    rest = rest if _unmarked(rest).strip() else ""
    unit = unit_name(rest) if rest else None
    if rest and unit is None:
        return None
    if currency:
        name = currency_name(currency[2])
        unit = name if unit in (None, name) else f"{name} {unit}"
    return Value("number", value, squashed, unit)


def _based(squashed: str) -> Value | None:
    """A numeral with its base: `11_2`, `(11)_{2}`, `FF_{16}`, `11_{two}`."""
    found = _BASED.match(squashed)
    if found is None:
        return None
    base = _BASE_WORDS.get(found[4] or "", 0) or int(found[3] or (found[4] if found[4].isdecimal() else 0))
    if not base or not _has_base(found[2], base):
        return None
    return Value("based", (found[1] == "-", found[2].lower(), base), squashed)


def _word_or_expression(text: str, depth: int) -> Value:
    if _unmarked(text) == "\\mathbb{R}":
        return parse("(-\\infty,\\infty)", depth + 1)
    word = _unmarked(text).strip(" .,;:")
    if choice := _CHOICE.match(word):
        word = choice[1]
    if _wrapped(word) and word != text:
        return parse(word, depth + 1)
    if _is_word(word):
        key = "".join(c for c in word.lower() if c.isalpha())
        if key in _ALL_NUMBERS:
            return parse("(-\\infty,\\infty)", depth + 1)
        name = _SYNONYMS.get(key)
        return Value("expression", name, name) if name else Value("word", key, squash(text))
    if _DEGREE in text and not _ANGLE_FUNCTION.search(text):
        expression = squash(text.replace(_DEGREE, ""))
        return Value("expression", expression, expression, "°")
    formula, unit = _formula_and_unit(text)
    expression = squash(formula)
    return Value("expression", expression, expression, unit)


def _formula_and_unit(text: str) -> tuple[str, str | None]:
    """Takes the unit off: text behind the formula, or words that can be nothing else."""
    if (words := _TRAILING_WORDS.search(text)) and is_known_unit(words[1]):
        return text[: words.start()], unit_name(words[0])
    tail = _TRAILING_TEXT.search(text) if TEXT_OPEN in text[1:] else None
    if tail is None or not tail.start() or tail[0].startswith(_DEGREE):  # degrees of an angle are part of the formula
        return text, None
    unit = unit_name(tail[0])
    return (text[: tail.start()], unit) if unit else (text, None)


def _is_word(text: str) -> bool:
    """Letters, spaces; apostrophes within a word, so that `x'` is a name; hyphens within longer words: `p-q`."""
    if _PRIMED.search(text):
        return False
    if not any(c.isalpha() for c in text) or not all(c.isalpha() or c in " '’.-" for c in text):
        return False
    return "-" not in text or all(len(part) > 2 for part in text.split("-"))
