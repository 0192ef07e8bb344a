r"""A small exact algebra: sums of rational multiples of square roots, symbols and their powers.

It decides `\sqrt[4]{16}` = 2, `2\sqrt{3}` = `\sqrt{12}`, `6+9i` = `9i+6`, `(x+1)^2` = `x^2+2x+1` by bringing both
sides to one normal form. Whatever it does not know it refuses, and every size is bounded, so that no text makes it
hang. It refuses, too, what can be read in two ways: `a/bc`, `x2`, `2\frac{1}{2}`, `f(x)`, a word among symbols.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import reduce
from math import gcd, isqrt

from gtpo_lightning.rewards.latex import mark, squash

__all__ = ["normal_form"]

# A term is (radicand, ((symbol, exponent), ...)); a polynomial maps terms to their coefficients.
Term = tuple[int, tuple[tuple[str, int], ...]]
Polynomial = dict[Term, Fraction]

_ONE: Term = (1, ())
_MAX_LENGTH, _MAX_DEPTH, _MAX_TERMS, _MAX_BITS, _MAX_POWER = 400, 25, 100, 4096, 64
# Square factors are divided out up to this one; what could hold the square of a larger one is refused.
_MAX_SQUARED = 10_000
_NUMERIC_FRACTION = re.compile(r"\\frac\{?[0-9]+\}?\{?[0-9]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_GREEK = "pi alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi omega"
_SYMBOLS = frozenset("\\" + name for name in _GREEK.split())


class _UnknownError(Exception):
    """The text is outside the algebra, or too large for it."""


def normal_form(text: str) -> frozenset[tuple[Term, Fraction]] | None:
    r"""The normal form of an expression: equal forms mean equal expressions, different ones different expressions.

    Args:
        text: An expression in LaTeX or plain characters.

    Returns:
        The terms with their coefficients; None if the expression is outside the algebra or too large.

    Example:
        >>> normal_form(r"\sqrt{12}") == normal_form(r"2\sqrt{3}"), normal_form(r"\sin x") is None
        (True, True)
    """
    if len(text) > _MAX_LENGTH or _WORD.search(text):
        return None
    try:
        return frozenset(_Reader(squash(mark(text))).whole().items())
    except _UnknownError:
        return None


def _constant(value: Fraction | int) -> Polynomial:
    return {_ONE: Fraction(value)} if value else {}


def _add(left: Polynomial, right: Polynomial, sign: int = 1) -> Polynomial:
    total = dict(left)
    for term, coefficient in right.items():
        total[term] = total.get(term, Fraction(0)) + sign * coefficient
    return _bounded({term: coefficient for term, coefficient in total.items() if coefficient})


def _bounded(value: Polynomial) -> Polynomial:
    if len(value) > _MAX_TERMS or any(
        max(c.numerator.bit_length(), c.denominator.bit_length(), term[0].bit_length()) > _MAX_BITS
        for term, c in value.items()
    ):
        raise _UnknownError
    return value


def _multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for (radicand, symbols), a in left.items():
        for (other, others), b in right.items():
            common = gcd(radicand, other)
            exponents = dict(symbols)
            for symbol, exponent in others:
                exponents[symbol] = exponents.get(symbol, 0) + exponent
            turns = exponents.get("i", 0) % 4
            exponents["i"] = turns % 2
            if max(map(abs, exponents.values())) > _MAX_POWER:
                raise _UnknownError
            key = (radicand * other // common**2, tuple(sorted((s, e) for s, e in exponents.items() if e)))
            total[key] = total.get(key, Fraction(0)) + a * b * common * (-1 if turns > 1 else 1)
    return _bounded({term: coefficient for term, coefficient in total.items() if coefficient})


def _divide(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(right) == 2:
        (first, a), (second, b) = right.items()
        conjugate = {first: a, second: -b}
        left, right = _multiply(left, conjugate), _multiply(right, conjugate)
    if len(right) != 1:
        raise _UnknownError
    ((radicand, symbols), coefficient) = next(iter(right.items()))
    inverse = {(radicand, tuple((s, -e) for s, e in symbols)): 1 / (coefficient * radicand)}
    return _multiply(left, inverse)


def _rational(value: Polynomial) -> Fraction:
    if not value:
        return Fraction(0)
    if set(value) != {_ONE}:
        raise _UnknownError
    return value[_ONE]


def _power(base: Polynomial, exponent: Polynomial) -> Polynomial:
    number = _rational(exponent)
    if number.denominator != 1 or abs(number) > (_MAX_BITS if len(base) <= 1 else 16):
        raise _UnknownError
    times = abs(int(number))
    if not times and not base:
        raise _UnknownError  # 0^0
    if set(base) == {_ONE}:
        value = base[_ONE]
        if times * max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise _UnknownError
        result = _constant(value**times)
    elif times > _MAX_POWER:
        raise _UnknownError
    else:
        result = reduce(_multiply, [base] * times, _constant(1))
    return _divide(_constant(1), result) if number < 0 else result


def _integer_root(value: int, degree: int) -> int | None:
    """The exact root of a non-negative integer, or None."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def _square_root(value: Fraction) -> Polynomial:
    sign: tuple[tuple[str, int], ...] = (("i", 1),) if value < 0 else ()
    radicand, outside, step = abs(value.numerator) * value.denominator, 1, 2
    if (exact := isqrt(radicand)) ** 2 == radicand:
        radicand, outside = 1, exact
    rest = radicand
    while step <= _MAX_SQUARED and step * step <= rest:
        while radicand % (step * step) == 0:
            radicand, rest, outside = radicand // (step * step), rest // step**2, outside * step
        while rest % step == 0:
            rest //= step
        step += 1
    # `rest` has only prime factors that were not tried: with three of them it could hold a square.
    if rest > _MAX_SQUARED**3:
        raise _UnknownError
    if (exact := isqrt(rest)) ** 2 == rest:
        radicand, outside = radicand // rest, outside * exact
    return {(radicand, sign): Fraction(outside, value.denominator)} if value else {}


def _root(value: Polynomial, degree: Fraction) -> Polynomial:
    number = _rational(value)
    if degree == 2:
        return _bounded(_square_root(number))
    if degree.denominator != 1 or not 2 < degree <= _MAX_POWER or (number < 0 and degree % 2 == 0):
        raise _UnknownError
    top, bottom = (_integer_root(part, int(degree)) for part in (abs(number.numerator), number.denominator))
    if top is None or bottom is None:
        raise _UnknownError
    return _constant(Fraction(top if number > 0 else -top, bottom))


class _Reader:
    """Recursive descent over one squashed string."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def whole(self) -> Polynomial:
        value = self.sum()
        if self.at != len(self.text) or not self.text:
            raise _UnknownError
        return value

    def take(self, *options: str) -> str:
        for option in options:
            if self.text.startswith(option, self.at):
                self.at += len(option)
                return option
        return ""

    def expect(self, option: str) -> None:
        if not self.take(option):
            raise _UnknownError

    def sum(self) -> Polynomial:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _UnknownError
        sign = self.take("+", "-")
        value = self.product()
        total = _add({}, value, -1 if sign == "-" else 1)
        while sign := self.take("+", "-"):
            total = _add(total, self.product(), -1 if sign == "-" else 1)
        self.depth -= 1
        return total

    def product(self) -> Polynomial:
        start, value = self.at, self.factor()
        divided = False  # by more than a numeral, so that a factor right behind it could be meant below the line
        while True:
            before = self.text[start : self.at]
            if self.take("/"):
                start = self.at
                value = _divide(value, self.factor())
                divided = not (before + self.text[start : self.at]).isdecimal()
            elif self.take("*"):
                start, divided = self.at, False
                value = _multiply(value, self.factor())
            elif self.starts_factor():
                if divided or self.mixed(before):
                    raise _UnknownError
                start = self.at
                value = _multiply(value, self.factor())
            else:
                return value

    def starts_factor(self) -> bool:
        following = self.text[self.at : self.at + 1]
        return following in ("(", "{", "\\") or (following.isascii() and following.isalpha())

    def mixed(self, before: str) -> bool:
        """Whether a numeral stands before a fraction of numerals."""
        return before.isdecimal() and _NUMERIC_FRACTION.match(self.text, self.at) is not None

    def factor(self) -> Polynomial:
        if self.take("-"):
            return _add({}, self.base(), -1)
        return self.base()

    def base(self) -> Polynomial:
        value = self.atom()
        if self.take("^"):
            sign = -1 if self.take("-") else 1
            value = _power(value, _multiply(self.atom(), _constant(sign)))
        return value

    def group(self, opening: str, closing: str) -> Polynomial:
        self.expect(opening)
        value = self.sum()
        self.expect(closing)
        return value

    def argument(self) -> Polynomial:
        """What a command takes: a group or one character."""
        if self.text.startswith("{", self.at):
            return self.group("{", "}")
        if self.text[self.at : self.at + 1].isdecimal():
            self.at += 1
            return _constant(int(self.text[self.at - 1]))
        return self.atom()

    def atom(self) -> Polynomial:
        for opening, closing in ("()", "{}"):
            if self.text.startswith(opening, self.at):
                return self.group(opening, closing)
        if self.take("\\frac"):
            top = self.argument()
            return _divide(top, self.argument())
        if self.take("\\sqrt"):
            degree = _rational(self.group("[", "]")) if self.text.startswith("[", self.at) else Fraction(2)
            return _root(self.argument(), degree)
        number = self.number()
        return self.symbol() if number is None else number

    def number(self) -> Polynomial | None:
        start = self.at
        while self.at < len(self.text) and (self.text[self.at] in "0123456789." and self.at - start < _MAX_LENGTH):
            self.at += 1
        digits = self.text[start : self.at]
        if not digits:
            return None
        if digits.count(".") > 1 or digits == ".":
            raise _UnknownError
        return _constant(Fraction("0" + digits + "0" if "." in digits else digits))

    def symbol(self) -> Polynomial:
        name = self.text[self.at : self.at + 1]
        if name == "\\":
            end = self.at + 1
            while end < len(self.text) and self.text[end].isalpha():
                end += 1
            name = self.text[self.at : end]
        elif name in ("f", "g") and self.text[self.at + 1 : self.at + 2] == "(":
            raise _UnknownError  # a function nobody knows
        if name not in _SYMBOLS and not (name.isascii() and name.isalpha()):
            raise _UnknownError
        self.at += len(name)
        self.take(" ")
        return {(1, ((name, 1),)): Fraction(1)}
