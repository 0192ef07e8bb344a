r"""Where the answer stands in a completion: five named styles, all in linear time.

Strict and lenient readings are separate styles, so that a metric says what it accepted:

| text | `answer_tag` | `boxed` | `gsm8k` | `flexible` |
|---|---|---|---|---|
| `<answer>$\boxed{7}$</answer>` | 7 | 7 | None | 7 |
| `so \boxed{7}` | None | 7 | None | 7 |
| `#### $18`, `####18`, `#### 18.` | None | None | 18 | 18 |
| `The answer is 18` | None | None | None | 18 |
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["ANSWER_STYLES", "Boxes", "extract_answer", "find_boxes"]

ANSWER_STYLES = ("answer_tag", "boxed", "gsm8k", "auto", "flexible")

# A doubled backslash is an escape of its own, unless it is an over-escaped `\\boxed`.
_BRACES = re.compile(
    r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?|\\\\(?!boxed|fbox)|\\[{}]|(?P<open>\{)|(?P<close>\})"
)
_GROUPED = r"[0-9]{1,3}(?:(?:,|\{,\}|\\,|,\\!)[0-9]{3})+(?![0-9])"
# Every digit run is entered at its first digit only, which keeps long runs linear.
_NUMBER = (
    r"(?:(?<![0-9A-Za-z.)\]}])[-+−])?(?:\\?\$\s?)?"
    rf"(?:(?<![0-9]){_GROUPED}|(?<![0-9])[0-9]+|(?<![0-9])(?=\.[0-9]))(?:\.[0-9]+)?(?:/(?:{_GROUPED}|[0-9]+))?"
)
_UP_TO_SPACE = re.compile(r"[\s$]")
_ANY_NUMBER = re.compile(_NUMBER)
_NUMBER_AFTER_MARK = re.compile(r"\s*(?P<number>(?:\\?\$\s?)?" + _NUMBER + ")")


class Boxes(NamedTuple):
    r"""The closed `\boxed` and `\fbox` of a text. A box is (where its command, its content and the rest begin).

    Args:
        number: How many there are, nested ones included.
        first: The one that opens first, as (start, content start, content end, end).
        last: The one that opens last.
    """

    number: int
    first: tuple[int, int, int, int]
    last: tuple[int, int, int, int]


def find_boxes(text: str) -> Boxes | None:
    r"""The closed boxes of a text, with balanced braces, in one pass.

    Escaped braces (`\{`) do not count. A box without braces goes up to white space or `$`.

    Args:
        text: Any text.

    Returns:
        How many there are, the first and the last; None if there is none or none is closed.

    Example:
        >>> text = r"\boxed{\frac{1}{2}}, then $\fbox 4$ and \boxed{3"
        >>> boxes = find_boxes(text)
        >>> boxes.number, text[boxes.first[1] : boxes.first[2]], text[boxes.last[1] : boxes.last[2]]
        (2, '\\frac{1}{2}', '4')
    """
    count, first, last = 0, (len(text), 0, 0, 0), (-1, 0, 0, 0)
    stack: list[tuple[int, int] | None] = []
    for token in _BRACES.finditer(text) if "\\" in text else ():
        kind = token.lastgroup
        if kind == "open":
            stack.append(None)
        elif kind == "brace":
            stack.append(token.span())
        elif kind == "box" and token.end() < len(text):  # else the text was cut here
            count, box = count + 1, (*token.span(), -1, -1)
            first, last = min(first, box), max(last, box)
        elif kind == "close" and stack:
            opened = stack.pop()
            if opened is not None:
                count, box = count + 1, (*opened, *token.span())
                first, last = min(first, box), max(last, box)
    return Boxes(count, _measured(text, first), _measured(text, last)) if count else None


def _measured(text: str, box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    if box[2] >= 0:
        return box
    space = _UP_TO_SPACE.search(text, box[1])
    end = space.start() if space else len(text)
    return (*box[:2], end, end)


def _last_pair(text: str, tag: str) -> str | None:
    """What the last closed `<tag>…</tag>` holds, or None."""
    start = text.rfind(f"<{tag}>", 0, max(text.rfind(f"</{tag}>"), 0))
    if start < 0:
        return None
    start += len(tag) + 2
    return text[start : text.index(f"</{tag}>", start)]


def _from_answer_tag(text: str) -> str | None:
    content = _last_pair(text, "answer")
    if content is None:
        return None
    boxes = find_boxes(content)
    return content[boxes.last[1] : boxes.last[2]] if boxes and boxes.number == 1 else content


def _from_box(text: str) -> str | None:
    boxes = find_boxes(text)
    return text[boxes.last[1] : boxes.last[2]] if boxes else None


def _from_gsm8k(text: str) -> str | None:
    mark = text.rfind("####")
    number = _NUMBER_AFTER_MARK.match(text, mark + 4) if mark >= 0 else None
    return _without_currency(number["number"]) if number else None


def _from_last_number(text: str) -> str | None:
    number = None
    for match in _ANY_NUMBER.finditer(text):
        number = match
    return _without_currency(number.group()) if number else None


def _without_currency(number: str) -> str:
    return re.sub(r"\\?\$\s?", "", number)


def extract_answer(text: str, *, style: str = "answer_tag") -> str | None:
    r"""The raw text of the answer in a completion, stripped.

    Styles:
        * `answer_tag`: the last closed `<answer>…</answer>`. If it holds exactly one box, the box is opened, whatever
          stands around it.
        * `boxed`: the last closed `\boxed` or `\fbox` with balanced braces; without braces the rest up to white space
          or `$`.
        * `gsm8k`: the number right after the last `####` (`$` allowed before it).
        * `auto`: `answer_tag`, then `boxed`, then `gsm8k`.
        * `flexible`: `auto`, else the last number (sign, digits, thousands separators, decimal point, or a/b).

    The last closed one counts, also if it is empty: then there is no answer.

    Args:
        text: A completion or a reference solution.
        style: One of `ANSWER_STYLES`.

    Returns:
        The answer, or None if nothing was found, closed and non-empty.

    Raises:
        ValueError: Unknown `style`, or a text that is no str.

    Example:
        >>> extract_answer("<answer>3</answer> no: <answer>so \\boxed{5} it is</answer>")
        '5'
        >>> extract_answer("The total is 72 clips, altogether.", style="flexible")
        '72'
    """
    if not isinstance(text, str):
        raise ValueError(f"text: {text!r}; valid: a str")
    if style == "answer_tag":
        found = _from_answer_tag(text)
    elif style == "boxed":
        found = _from_box(text)
    elif style == "gsm8k":
        found = _from_gsm8k(text)
    elif style in ("auto", "flexible"):
        readers = (_from_answer_tag, _from_box, _from_gsm8k, _from_last_number)
        found = next(
            (a for a in (read(text) for read in readers[: 3 + (style == "flexible")]) if a and a.strip()), None
        )
    else:
        raise ValueError(f"style: {style!r}; valid: {', '.join(ANSWER_STYLES)}")
    return (found.strip() or None) if found is not None else None
