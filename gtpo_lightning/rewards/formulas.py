r"""A strict reader of formulas, which writes them out so that there is one way to read them.

math-verify's grammar reads LaTeX well where it is plain, and guesses where it is not: `2(3)` is 5, `1/2x` is 1/(2x),
`\sin x \cdot y` is sin(xy), names lose their case, `e`, `d` and `I` become something else. Here every product, argument
and bracket is made explicit, and what a reader could take in two ways is refused: `a/bc`, `x2`, `2\frac{1}{2}`,
`\sin x/2`, `\sin(x)^2`. A fraction of two numerals before a factor is its coefficient: `1/2x` is half of x.

Only the standard library: the worker of `math_verify_equal` loads this file without its package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Formula", "read"]

_MAX_LENGTH, _MAX_DEPTH = 1000, 40
# Longer runs of letters are words.
_MAX_LETTERS = 3

_TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_OTHER_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh ln log lg exp"
_FUNCTIONS = _TRIGONOMETRIC.union(_OTHER_FUNCTIONS.split())
_LETTERS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"
)
_GREEK = frozenset(_LETTERS.split())
_RELATIONS = {"le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">="}
_RELATIONS |= {"lt": "<", "gt": ">", "ne": "!=", "neq": "!="}
_SYNONYMS = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"}
_SIGNS = _RELATIONS | {"cdot": "*", "times": "*", "ast": "*", "div": "/", "lvert": "|", "rvert": "|", "vert": "|"}
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))", "°"),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|limits|q?quad)(?![A-Za-z])(?! ?\.)|\\[,;:! ]|[$~]", " "),
        (r"\\(?:operatorname|mathrm) ?\{((?:arc)?(?:sin|cos|tan)h?|ln|exp)\}", r"\\\1"),
        (r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)h?|ln|log|exp|sqrt|pi)(?![A-Za-z])", r"\\\1"),
        (r"(?<=[0-9])\s+(?=[0-9])", "␣"),
    )
)
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|\\(?P<command>[A-Za-z]+)"
    r"|(?P<symbol>[A-Za-z](?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]{1,8}\}))?)|(?P<sign>[<>!]=|\*\*|[-+*/^_(){}\[\]|!°=<>␣])"
)


class Formula(NamedTuple):
    r"""A formula, or a chain of them with relations between.

    Args:
        sides: LaTeX without anything left to guess; names as `\variable{v…}`, from the bytes of their spelling.
        relations: `=`, `!=`, `<`, `<=`, `>` or `>=` between each two sides.
    """

    sides: tuple[str, ...]
    relations: tuple[str, ...]


class _RefusedError(Exception):
    """The text is no formula, or can be read in two ways."""


class _Token(NamedTuple):
    kind: str
    text: str


def read(text: str) -> Formula | None:
    r"""Reads a formula strictly.

    Numbers, names with an index, Greek letters, `e`, `i`, `\pi`, sums, products, quotients, powers, roots, factorials,
    `\binom`, absolute values, floors and ceilings, the common functions, degree signs in trigonometric functions, and
    the relations of `Formula`.

    Args:
        text: LaTeX or plain characters.

    Returns:
        The formula; None if there is anything else in it, if it can be read in two ways, or if it is longer than 1000
        characters.

    Example:
        >>> read(r"\sin 2\pi").sides, read("1/2(3) = 0.5").sides, read("a/bc")
        (('\\sin(2\\cdot \\pi)',), ('\\frac{1}{2}\\cdot (3)', '\\frac{5}{10}'), None)
    """
    if len(text) > _MAX_LENGTH:
        return None
    try:
        return _Reader(list(_tokens(text))).whole()
    except _RefusedError:
        return None


def _tokens(text: str) -> Iterator[_Token]:
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    at, letters = 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        letters = letters + 1 if match and match.lastgroup == "symbol" else 0
        if letters > _MAX_LETTERS or (match is None and not text[at].isspace()):
            raise _RefusedError
        at = match.end() if match else at + 1
        if match:
            yield _token(str(match.lastgroup), match[str(match.lastgroup)])


def _token(kind: str, text: str) -> _Token:
    if kind == "command":
        text = _SYNONYMS.get(text, text)
        if text in _SIGNS:
            return _Token("sign", _SIGNS[text])
        if text in _GREEK:
            return _Token("symbol", "\\" + text)
    return _Token(kind, "^" if text == "**" else text)


class _Reader:
    """Recursive descent over tokens; each method returns what it read, explicitly, most with its kind."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens, self.at = tokens, 0
        self.depth, self.angles, self.bars = 0, 0, False

    @property
    def following(self) -> _Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else _Token("end", "")

    def stands(self, *signs: str) -> bool:
        return self.following.kind == "sign" and self.following.text in signs

    def take(self, *signs: str) -> str:
        if not self.stands(*signs):
            return ""
        self.at += 1
        return self.tokens[self.at - 1].text

    def until(self, closing: str) -> str:
        text = self.sum()
        if not self.take(closing):
            raise _RefusedError
        return text

    def group(self, *brackets: str) -> str | None:
        """What stands in the brackets that open here; None if none of these do."""
        return next((self.until(pair[1]) for pair in brackets if self.take(pair[0])), None)

    def whole(self) -> Formula:
        sides, relations = [self.sum()], []
        while relation := self.take("=", "<", ">", "<=", ">=", "!="):
            relations.append(relation)
            sides.append(self.sum())
        if self.at != len(self.tokens):
            raise _RefusedError
        return Formula(tuple(sides), tuple(relations))

    def sum(self) -> str:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _RefusedError
        text = self.take("+", "-").replace("+", "") + self.product()
        while sign := self.take("+", "-"):
            text += sign + self.product()
        self.depth -= 1
        return text

    def product(self) -> str:
        text, kind = self.factor()
        divided = False  # by a formula, so that a factor right behind it could be meant below the line
        divisions = 0
        while True:
            if self.take("/"):
                divisions += 1
                if divisions > _MAX_DEPTH:
                    raise _RefusedError
                bottom, below = self.factor()
                divided = (kind, below) != ("number", "number")
                text, kind = rf"\frac{{{text}}}{{{bottom}}}", "fraction"
            elif self.take("*"):
                factor, kind = self.factor()
                text, divided = rf"{text}\cdot {factor}", False
            elif self.factor_follows():
                if divided or self.ambiguous(kind):
                    raise _RefusedError
                factor, kind = self.factor()
                text = rf"{text}\cdot {factor}"
            else:
                return text

    def factor_follows(self) -> bool:
        kind, text = self.following
        commands = ("frac", "sqrt", "pi", "binom", "lfloor", "lceil")
        if kind == "command":
            return text in commands or text in _FUNCTIONS
        return kind in ("number", "symbol") or self.stands("(", "{") or (self.stands("|") and not self.bars)

    def ambiguous(self, kind: str) -> bool:
        r"""Whether a factor right behind one of a kind is no plain product: `x2`, `2\frac{1}{2}`."""
        inside = [t.kind for t in self.tokens[self.at + 1 : self.at + 6] if t.text not in ("{", "}", "␣")]
        mixed = kind == "number" and self.following == ("command", "frac") and inside[:2] == ["number", "number"]
        return mixed or (self.following.kind == "number" and kind != "factorial")

    def factor(self) -> tuple[str, str]:
        """A signed power with what follows it: `-x^2`, `n!`, `30°`."""
        sign = self.take("+", "-")
        text, kind = self.atom()
        if self.take("!"):
            text, kind = _bracketed(text, kind) + "!", "factorial"
        elif self.angles and self.take("°"):
            text, kind = rf"{_bracketed(text, kind)}\cdot\frac{{\pi}}{{180}}", "product"
        elif self.take("^"):
            text, kind = f"{_bracketed(text, kind)}^{{{self.exponent()}}}", "power"
        if self.stands("^", "!", "°"):
            raise _RefusedError
        return (f"(-{text})", "group") if sign == "-" else (text, kind)

    def exponent(self) -> str:
        inside = self.group("{}", "()")
        return self.take("+", "-").replace("+", "") + self.atom()[0] if inside is None else inside

    def atom(self) -> tuple[str, str]:
        kind, text = self.following
        if kind == "sign":
            if self.take("|"):
                return f"|{self.inside_bars()}|", "function"
            inside = self.group("()", "{}", "[]")
            if inside is None:
                raise _RefusedError
            return f"({inside})", "group"
        self.at += 1
        if kind == "number":
            whole, _, decimals = text.partition(".")
            exact = rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"
            return (exact, "fraction") if decimals else (whole, "number")
        if kind == "symbol":
            return self.symbol(text)
        return self.command(text)

    def inside_bars(self) -> str:
        if self.bars:
            raise _RefusedError  # `|a|b|c|`
        self.bars = True
        text = self.until("|")
        self.bars = False
        return text

    def symbol(self, name: str) -> tuple[str, str]:
        if name in ("f", "g") and self.stands("("):
            raise _RefusedError  # a function nobody knows
        if name in ("e", "i"):
            return (r"\exp(1)", "function") if name == "e" else ("I", "symbol")
        return rf"\variable{{v{name.encode().hex()}}}", "symbol"

    def command(self, name: str) -> tuple[str, str]:
        if name == "pi":
            return r"\pi", "symbol"
        if name == "frac":
            return rf"\frac{{{self.argument()}}}{{{self.argument()}}}", "fraction"
        if name == "binom":
            top, bottom = self.argument(), self.argument()
            return rf"\frac{{({top})!}}{{({bottom})!\cdot (({top})-({bottom}))!}}", "fraction"
        if name == "sqrt":
            return self.root(), "function"
        if name in ("lfloor", "lceil"):
            text, closing = self.sum(), "r" + name[1:]
            if self.following != ("command", closing):
                raise _RefusedError
            self.at += 1
            return rf"\{name} {text}\{closing}", "function"
        if name in _FUNCTIONS:
            return self.function(name), "function"
        raise _RefusedError

    def argument(self) -> str:
        r"""What `\frac` and its like take: a group or one character, so that `\frac12` has two."""
        inside = self.group("{}")
        if inside is not None:
            return inside
        kind, text = self.following
        if kind == "number":
            if "." in text:
                raise _RefusedError  # `\frac.5`, `\sqrt1.5`
            rest = [_Token("number", text[1:])] if text[1:] else []
            self.tokens[self.at : self.at + 1] = [_Token("number", text[0]), *rest]
        elif kind != "symbol" and text != "pi":
            raise _RefusedError
        found = self.atom()[0]
        self.take("␣")
        return found

    def root(self) -> str:
        degree = ""
        if self.take("["):
            degree = self.following.text
            self.at += 1
            if not (degree.isdecimal() and 2 <= int(degree) <= 100 and self.take("]")):
                raise _RefusedError
        inside = self.group("()")
        return rf"\sqrt{f'[{degree}]' if degree else ''}{{{self.argument() if inside is None else inside}}}"

    def function(self, name: str) -> str:
        base = "10" if name in ("log", "lg") else ""
        if name == "log" and self.take("_"):
            base = self.base()
        power = self.exponent() if self.take("^") else ""
        if power == "-1" and name in ("sin", "cos", "tan"):
            name, power = "arc" + name, ""
        if power.startswith("-"):
            raise _RefusedError
        self.angles += name in _TRIGONOMETRIC
        argument = self.function_argument()
        self.angles -= name in _TRIGONOMETRIC
        text = rf"\{'log' if base else name}{f'_{{{base}}}' if base else ''}({argument})"
        return f"({text})^{{{power}}}" if power else text

    def base(self) -> str:
        """The base of a logarithm: 2 in `_2 8`, `_28` and `_{2}8`, 10 in `_10 8`."""
        number = self.following
        if number.kind == "number" and self.tokens[self.at + 1 : self.at + 2] == [("sign", "␣")]:
            self.at += 2
            return number.text
        return self.argument()

    def function_argument(self) -> str:
        r"""A group, or the factors up to the next sign or function: `\sin 2\pi`."""
        inside = self.group("()", "{}", "[]")
        if inside is None:
            if not (self.bare_follows() or self.stands("|")):
                raise _RefusedError
            inside, kind = self.factor()
            while self.bare_follows():
                if self.ambiguous(kind):
                    raise _RefusedError
                factor, kind = self.factor()
                inside = rf"{inside}\cdot {factor}"
            after = self.tokens[self.at + 1 : self.at + 2]
            if self.stands("/", "(", "{") or (self.stands("*") and not (after and after[0].text in _FUNCTIONS)):
                raise _RefusedError
        if self.stands("^", "!", "°"):
            raise _RefusedError
        return inside

    def bare_follows(self) -> bool:
        return self.following.kind in ("number", "symbol") or self.following in (
            ("command", "frac"),
            ("command", "sqrt"),
            ("command", "pi"),
        )


def _bracketed(text: str, kind: str) -> str:
    return text if kind in ("number", "symbol", "group") else f"({text})"
