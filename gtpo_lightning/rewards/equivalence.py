r"""Whether two answers are the same: decided exactly, without floating point and without evaluating text."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

from gtpo_lightning.rewards.latex import mark
from gtpo_lightning.rewards.numerals import plain_number
from gtpo_lightning.rewards.symbolic import normal_form
from gtpo_lightning.rewards.values import Value, parse

__all__ = ["is_equivalent", "symbolic_equivalent"]

_EXACT = ("number", "based", "word", "blank")
# How many expressions of one comparison are handed to the symbolic part, and how many elements of an unordered pair
# may be left to match one by one; what is beyond is unequal, so that no text makes the comparison hang.
_MAX_SYMBOLIC, _MAX_UNMATCHED = 64, 24


def symbolic_equivalent(prediction: str, gold: str) -> bool:
    r"""The one place where two expressions that differ as strings can still be equal.

    Called by `is_equivalent` for single values (elements of lists one by one) of which at least one is neither a number
    nor a word. Decides by the exact normal form of `symbolic.normal_form`; an expression outside that algebra equals
    only itself.

    Args:
        prediction: An expression in LaTeX or plain characters.
        gold: The reference.

    Returns:
        Whether the two are equal; False where that is not known. Never raises, bounded in time.

    Example:
        >>> symbolic_equivalent(r"\sqrt[4]{16}", "2"), symbolic_equivalent(r"\frac{3}{\sqrt{3}}", r"\sqrt 3")
        (True, True)
    """
    left = normal_form(prediction)
    return left is not None and left == normal_form(gold)


class _Comparison:
    """One comparison of two values with a bounded number of symbolic questions."""

    def __init__(self) -> None:
        self.asked = 0

    def same(self, left: Value, right: Value) -> bool:
        """Equal, where a unit or a label that one side lacks does not count."""
        return _compatible(left.unit, right.unit) and _compatible(left.label, right.label) and self._cores(left, right)

    def _cores(self, left: Value, right: Value) -> bool:
        if left.elements or right.elements:
            if left.kind != right.kind or len(left.elements) != len(right.elements):
                return False
            if left.kind in ("ordered", "matrix"):
                same_form = left.core[0] == right.core[0]  # type: ignore[index]
                return same_form and all(map(self.same, left.elements, right.elements))
            return self._unordered(left.elements, right.elements)
        if left.kind == right.kind and left.core == right.core:
            return True
        if left.kind in _EXACT and right.kind in _EXACT:
            return False
        return self._expressions(left, right)

    def _expressions(self, left: Value, right: Value) -> bool:
        if left.text == right.text:
            return True
        if any(
            value.kind in ("based", "blank") or (value.kind == "word" and len(value.text) > 1)
            for value in (left, right)
        ):
            return False
        self.asked += 1
        return self.asked <= _MAX_SYMBOLIC and symbolic_equivalent(left.text, right.text)

    def _unordered(self, left: tuple[Value, ...], right: tuple[Value, ...]) -> bool:
        """Equal as multisets: what is identical goes first, the few that are left are matched one by one."""
        mine, theirs = Counter(left), Counter(right)
        rest = sorted((mine - theirs).elements(), key=_annotations, reverse=True)
        candidates = sorted((theirs - mine).elements(), key=_annotations, reverse=True)
        if len(rest) > _MAX_UNMATCHED:
            return False
        for value in rest:
            partner = next((i for i, other in enumerate(candidates) if self.same(value, other)), None)
            if partner is None:
                return False
            del candidates[partner]
        return True


def _compatible(left: str | None, right: str | None) -> bool:
    return left is None or right is None or left == right


def _annotations(value: Value) -> int:
    return (value.unit is not None) + (value.label is not None)


def _as_text(answer: object) -> str:
    """Text of an answer; an int of any size, a float by its shortest decimal form; None and NaN are blank."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return format(Decimal(answer), "f")
    return "" if answer is None or answer != answer else str(answer)


def is_equivalent(prediction: str | float | None, gold: str | float | None) -> bool:
    r"""Whether an answer equals the reference.

    * Numbers are compared exactly, at any size: integers, decimals, fractions, mixed numbers, `\frac12`,
      `0.\overline{3}`. 0.333 is not 1/3, and neither is 0.333333. Leading zeros and thousands separators (`8,000`,
      `8{,}000`, `8\,000`) do not count.
    * A unit, currency sign, degree sign, percent sign, `\text` or `x =` that one side lacks does not count; two
      different ones are unequal. So `10\%` equals 10, not 0.1.
    * A number with a base equals only itself with the same base.
    * (1,2) and [1,2] are ordered and keep their brackets; bare lists and sets {1,2} are unordered and one kind.
    * Words compare without case, spaces and `\text`; a choice `(C)` is the word C.
    * All else compares as a normalised string, then by `symbolic_equivalent`.

    Args:
        prediction: The extracted answer.
        gold: The reference.

    Returns:
        True or False; False for None or a blank on either side. Never raises on text, never hangs, and works in any
        thread.

    Example:
        >>> is_equivalent("8{,}000", 8000), is_equivalent(r"\dfrac{5}{3}", "5/3"), is_equivalent("0.333", "1/3")
        (True, True, False)
    """
    left, right = _as_text(prediction), _as_text(gold)
    first = plain_number(left)
    if first is not None:
        second = plain_number(right)
        if second is not None:
            return first == second
    if not left.strip() or not right.strip():
        return False
    mine, reference = parse(mark(left)), parse(mark(right))
    return mine.kind != "blank" and reference.kind != "blank" and _Comparison().same(mine, reference)
