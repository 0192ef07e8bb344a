r"""Whether two formulas are the same: read by math-verify, compared to more digits than chance can explain.

For a process that can be killed; it imports nothing of its package but, by its place, the neighbouring `formulas.py`.
math-verify's own verdict is not asked for: it compares rounded floats (1/2^99 is 1/2^98, 0.333 pi is pi/3), takes units
and primes away and lowers the case of names, and its time limits use signals, which threads may not. The rules are:

| kind | the same where |
|---|---|
| numbers | at least 50 significant digits agree; how many more grows with the sizes that occur in the formulas, so 1 + 10^-300 is not 1. Decimals are exact rationals, `\log` has base 10, `e` and `i` are the constants |
| functions | at 24 real points of both signs both are real and agree so, or neither is real; in formulas with `i`, those agree too. So `\sqrt{x^2}` is \|x\| and not x, and `\ln x^2` is not `2\ln x`. Odd roots of negative numbers are real |
| equations, inequalities | the differences of their two sides are proportional, for inequalities by a positive factor; `5 < x` is `x > 5`; chains relation by relation |
| all else | never, unless the texts are identical: what `formulas.read` refuses, `1/0`, a relation and a value, |g| whose g was met with one sign only, floors of names |
"""  # noqa: E501

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]

__all__ = ["equal"]

# It warns that its time limit is off; the limit is that of the process.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_AS_WRITTEN = LatexExtractionConfig(
    boxed_match_priority=-1, normalization_config=NormalizationConfig(basic_latex=False, boxed="none")
)

# Digits of the first look, digits that must agree beyond what the sizes explain, and the largest sizes, in digits.
_FIRST, _DIGITS, _MAX_SIZE = 100, 60, 1500
# Of a value, in bits; of an argument of a factorial, whole and broken.
_MAX_MAGNITUDE, _MAX_FACTORIAL, _MAX_GAMMA = 8000, 1000, 30
_POINTS, _FEWEST_POINTS = 24, 5
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}

Relation = tuple[Any, Any, str]
Point = Mapping[str, Fraction]


class _DoubtError(Exception):
    """It is not known whether the formulas are the same."""


class _UndefinedError(Exception):
    """A formula has no value at a point."""


def _neighbour(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"_{name}", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_read = _neighbour("formulas").read


@lru_cache(maxsize=512)
def _tree(side: str) -> Any:
    """What math-verify makes of an explicit formula: a sympy expression, not evaluated."""
    found = parse(
        f"${side}$", [_AS_WRITTEN], fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    if len(found) != 1 or not isinstance(found[0], sympy.Expr):
        raise _DoubtError
    return found[0]


class _Values:
    """Values of trees at one point, to the context's precision.

    Attributes:
        size: The digits of all values that occurred, before or behind the decimal point: what cancellation can cost.
    """

    def __init__(self, context: Any, point: Point, *, final: bool = False) -> None:
        self.context, self.point, self.size = context, point, 0.0
        self.rounding = context.mpf(10) ** (-0.6 * context.dps)
        # With all the digits that the sizes ask for, what is this small is 0, such as sin(pi).
        self.nothing = context.mpf(10) ** (-0.9 * context.dps) if final else 0

    def of(self, tree: Any) -> Any:
        """The value; real where its imaginary part is nothing but rounding."""
        try:
            value = self.context.convert(self._of(tree))
        except (ZeroDivisionError, ValueError) as error:
            raise _UndefinedError from error
        if isinstance(value, self.context.mpc) and abs(value.imag) <= self.rounding * max(1, abs(value.real)):
            value = value.real
        if value and abs(value) < self.nothing:
            value = self.context.mpf(0)
        magnitude = abs(self.context.mag(value)) if value else 0
        if not magnitude <= _MAX_MAGNITUDE:
            raise _DoubtError
        self.size += magnitude * 0.30103
        return value

    def _of(self, tree: Any) -> Any:
        if tree.is_Symbol:
            return self.context.mpf(self.point[tree.name].numerator) / self.point[tree.name].denominator
        if tree.is_Rational:
            return self.context.mpf(tree.p) / tree.q
        if tree.is_Pow:
            return self._power(tree.base, tree.exp)
        values = [self.of(part) for part in tree.args]
        if tree.is_Add:
            return self.context.fsum(values)
        if tree.is_Mul:
            return self.context.fprod(values)
        return self._function(type(tree).__name__, *values)

    def _power(self, base_tree: Any, exponent_tree: Any) -> Any:
        base, exponent = self.of(base_tree), self.of(exponent_tree)
        if not base:
            if self.context.re(exponent) <= 0:
                raise _UndefinedError
            return base
        if abs(exponent) * max(1, abs(self.context.mag(base))) > _MAX_MAGNITUDE:
            raise _DoubtError
        if not exponent_tree.is_Rational:
            return self.context.power(base, exponent)
        above, below = int(exponent_tree.p), int(exponent_tree.q)
        if below == 1:
            return base**above
        if below % 2 and isinstance(base, self.context.mpf) and base < 0:
            return (-1) ** above * self.context.power(-base, exponent)
        return self.context.power(base, exponent)

    def _function(self, name: str, *values: Any) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name](self.context)
        if name in _GROWING or name in _PERIODIC:
            limit = _MAX_MAGNITUDE if name in _GROWING else 10**30
            if abs(values[0]) > limit or abs(self.context.im(values[0])) > 100:
                raise _DoubtError
            self.size += float(abs(values[0])) if name == "tanh" else 0  # that close to 1 it comes
            return getattr(self.context, name)(values[0])
        if name in _PLAIN:
            return getattr(self.context, _PLAIN[name])(values[0])
        if name == "log":
            if not values[0]:
                raise _UndefinedError
            return self.context.ln(values[0]) / (self.context.ln(values[1]) if len(values) > 1 else 1)
        if not isinstance(values[0], self.context.mpf):
            raise _DoubtError
        return self._of_a_real(name, values[0])

    def _of_a_real(self, name: str, value: Any) -> Any:
        if name == "factorial" and abs(value) <= (_MAX_FACTORIAL if self.context.isint(value) else _MAX_GAMMA):
            return self.context.factorial(value)
        if name in ("floor", "ceiling"):
            nearest = self.context.nint(value)
            if abs(value - nearest) <= self.rounding:
                return nearest
            return self.context.floor(value) if name == "floor" else self.context.ceil(value)
        raise _DoubtError


_CONSTANTS: Mapping[str, Callable[[Any], Any]] = {
    "Pi": lambda context: +context.pi,
    "Exp1": lambda context: +context.e,
    "ImaginaryUnit": lambda context: context.mpc(0, 1),
}
_GROWING, _PERIODIC = {"exp", "sinh", "cosh", "tanh"}, {"sin", "cos", "tan", "cot", "sec", "csc"}
_PLAIN = {"asin": "asin", "acos": "acos", "atan": "atan", "Abs": "fabs"}


def _values(trees: Sequence[Any], point: Point, context: Any) -> tuple[list[Any], Any]:
    """Values of trees at a point, and the relative difference that is nothing but rounding."""
    context.dps = _FIRST
    look = _Values(context, point)
    first = [look.of(tree) for tree in trees]
    if look.size > _MAX_SIZE:
        raise _DoubtError
    size, digits = int(look.size) + 10, _DIGITS + 2 * int(look.size)
    if digits > _FIRST:
        context.dps = digits
        values = _Values(context, point, final=True)
        first = [values.of(tree) for tree in trees]
    context.dps = 2 * digits
    values = _Values(context, point, final=True)
    second = [values.of(tree) for tree in trees]
    for one, other in zip(first, second, strict=True):
        # A value that more digits change is a division by zero in disguise, or stands at a jump.
        if abs(one - other) > context.mpf(10) ** (size - digits) * max(1, abs(other)):
            raise _DoubtError
    return second, context.mpf(10) ** (size - 2 * digits)


def _names(*trees: Any) -> list[str]:
    return sorted({symbol.name for tree in trees for symbol in tree.free_symbols})


def _points(names: Sequence[str]) -> Iterator[dict[str, Fraction]]:
    """Points that no formula is made for, from 0.1 to 100,000, the first third positive."""
    source = random.Random(20)
    scales = (1, 10, 10, 100, 1000, 100_000)
    for index in range(_POINTS if names else 1):
        yield {
            name: Fraction(source.randint(10**5, 10**6), 10**6)
            * scales[(index + shift) % len(scales)]
            * (1 if index < _POINTS // 3 else source.choice((1, -1)))
            for shift, name in enumerate(names)
        }


def _hold(trees: Sequence[Any], same: Callable[[Any, Any, Any], bool], *, complex_values: bool) -> bool:
    """Whether `same(left, right, rounding)` holds at all points where the two trees have values."""
    names, context, held = _names(*trees), mpmath.MPContext(), 0
    for point in _points(names):
        try:
            (left, right), rounding = _values(trees, point, context)
        except _DoubtError:
            continue
        except _UndefinedError:
            if any(_is_defined(tree, point, context) for tree in trees):
                return False
            continue
        real = {not mpmath.im(left), not mpmath.im(right)}
        holds = len(real) == 1 and same(left, right, rounding)
        if not holds and (complex_values or not names or True in real):
            return False
        held += holds
    return held >= (_FEWEST_POINTS if names else 1)


def _is_defined(tree: Any, point: Point, context: Any) -> bool:
    try:
        _values([tree], point, context)
    except _UndefinedError:
        return False
    return True


def _kinks_are_met(*trees: Any) -> bool:
    """Whether each |g| was met on both sides of g = 0, so that it is not taken for g; jumps of floors never all are."""
    names, context = _names(*trees), mpmath.MPContext()
    for node in (node for tree in trees for node in sympy.preorder_traversal(tree) if node.free_symbols):
        if type(node).__name__ in ("floor", "ceiling"):
            return False
        if type(node).__name__ == "Abs":
            signs = set()
            for point in _points(names):
                try:
                    (value,), _ = _values(node.args, point, context)
                    signs.add(bool(mpmath.re(value) > 0))
                except (_DoubtError, _UndefinedError):
                    continue
            if len(signs) < 2:
                return False
    return True


def _same_value(left: Any, right: Any, rounding: Any) -> bool:
    return bool(abs(left - right) <= rounding * max(1, abs(left), abs(right)))


def _same_function(left: Any, right: Any) -> bool:
    is_complex = left.has(sympy.I) or right.has(sympy.I)
    return _kinks_are_met(left, right) and _hold((left, right), _same_value, complex_values=is_complex)


def _same_relation(mine: Relation, theirs: Relation) -> bool:
    left, right = (sympy.Add(a, sympy.Mul(-1, b, evaluate=False), evaluate=False) for a, b, _ in (mine, theirs))
    names = _names(left)
    if mine[2] != theirs[2] or not names or names != _names(right) or left.has(sympy.I) or right.has(sympy.I):
        return False
    ratios: list[Any] = []
    roundings: list[Any] = []

    def proportional(one: Any, other: Any, rounding: Any) -> bool:
        ratios.append(one / other if one and other else 0)
        roundings.append(rounding * 10**20)
        # Each point has a precision of its own; two ratios agree to that of the coarser.
        return bool(ratios[0]) and _same_value(ratios[-1] / ratios[0], 1, max(roundings[0], roundings[-1]))

    held = _kinks_are_met(left, right) and _hold((left, right), proportional, complex_values=False)
    return held and (ratios[0] > 0 or mine[2] not in _FLIPPED)


def _same(mine: Sequence[Any], relations: Sequence[str], theirs: Sequence[Any], others: Sequence[str]) -> bool:
    """Whether two formulas are the same, given by their sides and the relations between these."""
    if len(relations) != len(others):
        return False
    if not relations:
        return _same_function(mine[0], theirs[0])
    chain = list(zip(mine, mine[1:], relations, strict=False))
    other = list(zip(theirs, theirs[1:], others, strict=False))
    turned = [(right, left, _FLIPPED.get(sign, sign)) for left, right, sign in reversed(other)]
    return any(all(map(_same_relation, chain, way)) for way in (other, turned))


@lru_cache(maxsize=2048)
def equal(prediction: str, gold: str) -> bool:
    r"""Whether two formulas are the same number, function, equation or inequality, by the rules at this file's top.

    Args:
        prediction: One formula, LaTeX or plain characters: no box, no text around it.
        gold: Another.

    Returns:
        True where they are the same beyond doubt, else False; the order does not matter. Takes milliseconds, but may
        take any time and all memory on what was made for it: for a process that can be killed.

    Example:
        >>> equal(r"\sin 30^\circ", r"\frac12"), equal("1/2^99", "1/2^98"), equal("2x+y=5", "y=5-2x")
        (True, False, True)
    """
    left, right = _read(prediction), _read(gold)
    if left is None or right is None:
        return prediction.strip() == gold.strip() != ""
    if left == right:
        return True
    try:
        return _same(
            [_tree(side) for side in left.sides],
            left.relations,
            [_tree(side) for side in right.sides],
            right.relations,
        )
    except MemoryError:
        raise
    except Exception:
        # What math-verify and sympy raise on a text they do not understand is of any kind.
        return False
