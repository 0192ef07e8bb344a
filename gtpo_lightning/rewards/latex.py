r"""Brings the many ways to write one answer into one marked form that the comparison can read.

Marks are control characters, which no answer holds: they keep what braces and dollar signs meant.
"""

from __future__ import annotations

import re

from gtpo_lightning.rewards.extraction import find_boxes

__all__ = ["BREAK", "CUP", "DOLLAR", "SET_CLOSE", "SET_OPEN", "TEXT_CLOSE", "TEXT_OPEN", "mark", "squash", "trim"]

TEXT_OPEN, TEXT_CLOSE, SET_OPEN, SET_CLOSE, CUP, DOLLAR, BREAK = "\x01\x02\x03\x04\x05\x06\x07"

_SIGNS = (
    "times cdot cdot div infty cup in pm mp sqrt leq geq neq pi theta alpha beta gamma delta lambda rho sigma phi omega"
)
_FRACTIONS = "12 13 23 14 34 15 25 35 45 16 56 18 38 58 78 17 19"
_OTHERS = r"^{\circ} \emptyset \mathbb{R} /"
_CHARACTERS = {
    **dict.fromkeys(c for c in range(32) if chr(c) not in "\t\n\v\f\r"),
    **{code + 0xFEE0: chr(code) for code in range(0x21, 0x7F)},  # full-width forms
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff")),
    **dict.fromkeys(map(ord, "\u2212\u2013\u2010\u2011"), "-"),
    **{ord(c): f" \\{name} " for c, name in zip("×·⋅÷∞∪∈±∓√≤≥≠πθαβγδλρσφω", _SIGNS.split(), strict=True)},
    **{ord(c): rf"\frac{{{n[0]}}}{{{n[1]}}}" for c, n in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑", _FRACTIONS.split(), strict=True)},
    **{ord(c): text for c, text in zip("°∅ℝ⁄", _OTHERS.split(), strict=True)},
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# What Unicode writes by position: 10⁻², √12, ∛8.
_POSITIONS = (
    (re.compile("[⁰¹²³⁴-⁹⁻]+"), lambda match: f"^{{{match[0].translate(_RAISED)}}}"),
    (re.compile(r"([√∛]) ?([0-9]+(?:\.[0-9]+)?)"), r"\1{\2}"),
    (re.compile("∛"), r"\\sqrt[3]"),
)

_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt)|operatorname|emph|boldsymbol|bold)"
    r"\s?\{([^{}]*)\}"
)
_SEPARATED = re.compile(r"(?<![0-9])[0-9]+(?![0-9])(?: ?(?:\{,\}|,\\!|\\!,|\\[,;:]) ?[0-9]+(?![0-9]))+")
_SEPARATOR = re.compile(r" ?(?:\{,\}|,\\!|\\!,|\\[,;:]) ?")
_FUNCTIONS = "(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp"
# Plain words and signs that are mathematics: `sqrt(2)`, `sin x`, `2pi`, `x**2`, `1.5x10^3`, `<=`. A function needs an
# argument behind it, so that `5 logs` stays an amount.
_PLAIN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![A-Za-z\\])sqrt ?(?=[({0-9A-Za-z\\])", r"\\sqrt "),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?= ?(?:[({{|0-9_^\\]|[A-Za-z](?![A-Za-z])))", r"\\\1"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[-0-9A-Za-z({])", "^"),
        (r"(?<=[0-9]) ?[xX] ?(?=10(?:\^|\*\*))", r"\\times "),
        ("<=", r"\\le "),
        (">=", r"\\ge "),
        ("!=", r"\\ne "),
    )
)
_IS_PLAIN = re.compile(r"(?<![A-Za-z\\])(?:sqrt|pi|arc|sin|cos|tan|cot|sec|csc|ln|log|exp)|\*\*|[xX] ?10|[<>!]=")
_UNIT = rf"\{{{TEXT_OPEN}([^{TEXT_CLOSE}]*){TEXT_CLOSE}\}}"


def _over(match: re.Match[str]) -> str:
    top, kind, bottom = match.groups()
    return rf"\{'frac' if kind == 'over' else 'binom'}{{{top.strip()}}}{{{bottom.strip()}}}"


# Each with a string that stands in whatever its pattern matches: most texts have few of them.
_SUBSTITUTIONS = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        (TEXT_OPEN, rf"{TEXT_OPEN}({_FUNCTIONS}){TEXT_CLOSE}", r"\\\1 "),
        (TEXT_OPEN, rf"\\[dtc]?frac ?{_UNIT} ?{_UNIT}", rf"{TEXT_OPEN}\1/\2{TEXT_CLOSE}"),
        (TEXT_OPEN, rf"\^ ?\{{? ?{TEXT_OPEN} ?(st|nd|rd|th) ?{TEXT_CLOSE} ?\}}?", rf"{TEXT_OPEN}\1{TEXT_CLOSE}"),
        ("\\over", r"\{([^{}]{0,200})\\(over)(?![A-Za-z])([^{}]{0,200})\}", _over),
        ("\\choose", r"\{([^{}]{0,200})\\(choose)(?![A-Za-z])([^{}]{0,200})\}", _over),
        ("\\over", r"\A([^{}]{0,200})\\(over)(?![A-Za-z])([^{}]{0,200})\Z", _over),
        ("\\choose", r"\A([^{}]{0,200})\\(choose)(?![A-Za-z])([^{}]{0,200})\Z", _over),
        ("\\dot", r"\\dot ?(?:\{ ?([0-9]{1,20}) ?\}|([0-9]))", lambda m: rf"\overline{{{m[1] or m[2]}}}"),
        ("\\bar", r"\\bar ?(?:\{ ?([0-9]{1,20}) ?\}|([0-9]))", lambda m: rf"\overline{{{m[1] or m[2]}}}"),
        ("binom", r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        ("\\mathbb", r"\\mathbb(?: ?\{ ?R ?\}| ?R(?![A-Za-z]))", r"\\mathbb{R}"),
        ("\\colon", r"\\colon(?![A-Za-z])", ":"),
        ("\\left", r"\\left(?: ?\.|(?![A-Za-z]))", ""),
        ("\\right", r"\\right(?: ?\.|(?![A-Za-z]))", ""),
        ("\\", r"\\(?:middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("\\circ", r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))", f"{TEXT_OPEN}°{TEXT_CLOSE}"),
        ("\\degree", r"\\degrees?(?![A-Za-z])", f"{TEXT_OPEN}°{TEXT_CLOSE}"),
        ("\\{", r"\\\{", SET_OPEN),
        ("\\}", r"\\\}", SET_CLOSE),
        ("\\lbrace", r"\\lbrace(?![A-Za-z])", SET_OPEN),
        ("\\rbrace", r"\\rbrace(?![A-Za-z])", SET_CLOSE),
        ("\\cup", r"\\cup(?![A-Za-z])", CUP),
        ("\\", r"\\(?:[,;:!]| |q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))", " "),
        ("\\", r"\\[()\[\]]", ""),
    )
)
_DIGIT_GAP = re.compile(r"(?<=[0-9]) (?=[0-9])")
# `\\pi r` keeps its space, and two letters or more of text keep that they are text.
_COMMAND_GAP, _KEPT = re.compile(r"(\\[A-Za-z]+) (?=[A-Za-z])"), "\x08"
_WORDS = re.compile(rf"{TEXT_OPEN}(?=[^{TEXT_CLOSE}]*[A-Za-z]{{2}})([^{TEXT_CLOSE}]*){TEXT_CLOSE}")
_UNMARKED = {ord(TEXT_OPEN): None, ord(TEXT_CLOSE): None, ord(" "): None, ord(_KEPT): " ", ord(DOLLAR): "$"}
_SQUASHED = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        ("\\cdot", r"\\cdot(?![A-Za-z])", "*"),
        ("\\times", r"\\times(?![A-Za-z])", "*"),
        ("\\ast", r"\\ast(?![A-Za-z])", "*"),
        ("\\div", r"\\div(?![A-Za-z])", "/"),
        ("\\le", r"\\(?:leqslant|leq|le)(?![A-Za-z])", r"\\le"),
        ("\\ge", r"\\(?:geqslant|geq|ge)(?![A-Za-z])", r"\\ge"),
        ("\\lt", r"\\lt(?![A-Za-z])", "<"),
        ("\\gt", r"\\gt(?![A-Za-z])", ">"),
        ("\\ne", r"\\(?:neq|ne)(?![A-Za-z])", r"\\ne"),
        ("\\varnothing", r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        ("+\\infty", r"\+(?=\\infty)", ""),
        ("\\frac ", r"\\frac +(?=[0-9])", r"\\frac"),
        ("\\sqrt ", r"\\sqrt +(?=[0-9])", r"\\sqrt"),
        ("\\frac", r"\\frac([0-9]) ?([0-9])", r"\\frac{\1}{\2}"),
        ("\\frac", r"\\frac([0-9])\{", r"\\frac{\1}{"),
        ("\\frac", r"\\frac\{([^{}]*)\} ?([0-9])", r"\\frac{\1}{\2}"),
        ("\\sqrt", r"\\sqrt([0-9])(?![0-9.])", r"\\sqrt{\1}"),
        ("^", r"\^\{([A-Za-z]|[0-9](?! ?\}\s?[0-9.]))\}", r"^\1"),
    )
)


def _join_thousands(match: re.Match[str]) -> str:
    groups = _SEPARATOR.split(match.group())
    if len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        return "".join(groups)
    return match.group()


def _open_whole_box(text: str) -> str:
    """Opens a box that is the whole text but for dollar signs, brackets of math mode, white space and dots."""
    for _ in range(3 if "\\boxed" in text or "\\fbox" in text else 0):
        boxes = find_boxes(text)
        if boxes is None:
            break
        start, inner, stop, end = boxes.first
        if (text[:start] + text[end:]).strip(" \t\n$.\\[]()"):
            break
        text = text[inner:stop]
    return text


def _commands(text: str) -> str:
    """Replaces LaTeX commands by marks; commands that carry meaning stay."""
    text = text.replace("\\\\", BREAK) if "\\begin" in text else text.replace("\\\\", "\\")
    text = text.replace("\\$", DOLLAR).replace("\\%", "%")
    text = _TEXT.sub(rf"{TEXT_OPEN}\1{TEXT_CLOSE}", text)
    text = _SEPARATED.sub(_join_thousands, text)
    for needle, pattern, replacement in _SUBSTITUTIONS:
        if needle in text:
            text = pattern.sub(replacement, text)
    return text.replace(TEXT_OPEN + TEXT_CLOSE, "")


def mark(text: str) -> str:
    r"""The marked form of an answer: one space for white space, marks for `\text`, sets, unions and currency.

    Math mode signs, sizes (`\left`), LaTeX spacing, thousands separators of LaTeX (`{,}`, `\,`, `\;`, `,\!`), a box
    around the whole, `**` around the whole and one closing dot, comma, colon or semicolon go. Every pattern is linear.

    Args:
        text: An answer as it was written.

    Returns:
        The marked form; may be empty.

    Example:
        >>> mark(r"$\left( 8\,000, \dfrac12 \right)$.")
        '( 8000, \\frac12 )'
    """
    text = _open_whole_box(text)
    if not (text.isascii() and text.isprintable()):
        for pattern, replacement in _POSITIONS:
            text = pattern.sub(replacement, text)
        text = text.translate(_CHARACTERS)
    text = " ".join(text.replace("~", " ").split()).rstrip("\\").lstrip("= ")
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("*")
    if text[:1] in ("'", '"', "`") and len(text) > 2 and text[-1] == text[0]:
        text = text.strip(text[0])
    if _IS_PLAIN.search(text):
        for pattern, replacement in _PLAIN:
            text = pattern.sub(replacement, text)
    if "\\" in text or "{,}" in text:
        text = _commands(text)
    if "$" in text:
        text = text.replace("$", "" if text.count("$") % 2 == 0 else DOLLAR)
    if "%" in text:
        text = text.replace("%", f"{TEXT_OPEN}%{TEXT_CLOSE}")
    return trim(" ".join(text.split()))


def trim(text: str) -> str:
    """Takes white space and closing punctuation off; an ellipsis stays, since it says that digits go on."""
    text = text.strip(" ,;:")
    return text if text.endswith("..") else text.rstrip(" .,;:")


def squash(marked: str) -> str:
    r"""The string that decides for expressions: no white space, braces around every argument, one name per symbol.

    Args:
        marked: What `mark` gave, or a part of it.

    Returns:
        The normalised expression.

    Example:
        >>> squash(mark(r"11 \sqrt2 \cdot \frac 59"))
        '11\\sqrt{2}*\\frac{5}{9}'
    """
    if "\\" in marked or "^" in marked:
        for needle, pattern, replacement in _SQUASHED:
            if needle in marked:
                marked = pattern.sub(replacement, marked)
        if " " in marked:
            marked = _COMMAND_GAP.sub(rf"\1{_KEPT}", marked)
    if TEXT_OPEN in marked:
        marked = _WORDS.sub(r'"\1"', marked)
    # `1 23` is two numbers, never 123.
    marked = _DIGIT_GAP.sub("␣", marked) if " " in marked else marked
    return marked.translate(_UNMARKED)
