r"""Whether two answers are the same: plain ones exactly in this process, formulas in one that can be killed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from gtpo_lightning.rewards.formulas import read
from gtpo_lightning.rewards.latex import TEXT_OPEN, mark, squash
from gtpo_lightning.rewards.matching import has_perfect_matching
from gtpo_lightning.rewards.numerals import plain_number
from gtpo_lightning.rewards.outcomes import Outcome
from gtpo_lightning.rewards.pool import grading_pool
from gtpo_lightning.rewards.symbolic import normal_form
from gtpo_lightning.rewards.values import Value, parse

__all__ = ["Grade", "compare", "is_equivalent"]

Question = tuple[str, str]

_EXACT = ("number", "based", "ratio", "date", "word", "blank")
# Bounds of one comparison: questions for the pool, elements of an unordered pair that are matched one by one, pairs of
# values looked at. What is beyond is unequal, so that no text makes the comparison hang.
_MAX_QUESTIONS, _MAX_UNMATCHED, _MAX_STEPS = 64, 24, 5000
# Up to so many letters, `xy` may be a product; beyond so many characters or bits, formulas are compared as strings.
_MAX_PRODUCT, _MAX_LENGTH, _MAX_BITS = 3, 1000, 3000
# Answers of at most so many characters are kept as they were read.
_MAX_KEPT = 200
# No reader of formulas takes a longer product of letters; commands, indices and plain functions are something else.
_LONG_WORD = re.compile(r"(?<![\\A-Za-z{_])(?!arc|sinh|cosh|tanh|sqrt)[A-Za-z]{4}")
# `\text` as `squash` writes it; words that stand beside digits: `Room 5B`, `B2`, but not `2x`, `x-5`.
_TEXT = re.compile(r'"(?=[^"]*[A-Za-z]{2})([^"]*)"')
_WORDY = re.compile(r"[^\W\d_](?:[^\W_]|[␣.,:'’])*|(?=.*[^\W\d_]{4})(?:[^\W_]|[␣.,:'’/-])*")

_normal_form = lru_cache(maxsize=1024)(normal_form)
_formula = lru_cache(maxsize=1024)(read)


class Grade(NamedTuple):
    """The result of one comparison.

    Args:
        equal: Whether the answer equals the reference; False where that could not be found out.
        failure: `timeout` or `error` where the comparison of formulas ended so, else None.
    """

    equal: bool
    failure: Literal["timeout", "error"] | None = None


_EQUAL, _UNEQUAL, _FAILED = Grade(True), Grade(False), Grade(False, "error")


class _Comparison:
    """One comparison of two values; it collects the questions about formulas that it cannot answer.

    Without answers it takes each open question for a yes. Where it comes out unequal so, nothing needs to be asked;
    else `compare` has all questions answered and calls it again.
    """

    def __init__(self, left: Value, right: Value) -> None:
        self.left, self.right = left, right
        self.questions: dict[Question, None] = {}
        self.answers: Mapping[Question, bool] = {}
        self.steps = 0

    def __call__(self) -> bool:
        self.steps = 0
        return self.same(self.left, self.right)

    def same(self, left: Value, right: Value) -> bool:
        """Equal, where a unit or a label that one side lacks does not count."""
        self.steps += 1
        return (
            self.steps <= _MAX_STEPS
            and _compatible(left.unit, right.unit)
            and (_turned(left, right) or (_compatible(left.label, right.label) and self._cores(left, right)))
        )

    def _cores(self, left: Value, right: Value) -> bool:
        if left.elements or right.elements:
            if left.kind != right.kind or len(left.elements) != len(right.elements):
                return False
            if left.kind in ("ordered", "matrix"):
                if left.core[0] != right.core[0]:  # type: ignore[index]
                    return False
                # An open question counts as a yes, so this goes on behind it and all questions are met.
                return all(map(self.same, left.elements, right.elements))
            return self._unordered(left.elements, right.elements)
        if left.kind == right.kind and left.core == right.core:
            return True
        if left.kind in _EXACT and right.kind in _EXACT:
            return False
        return self._expressions(left, right)

    def _unordered(self, left: tuple[Value, ...], right: tuple[Value, ...]) -> bool:
        """Equal as multisets: what is identical goes first, the few that are left are matched one by one."""
        mine, theirs = Counter(left), Counter(right)
        rest, candidates = list((mine - theirs).elements()), list((theirs - mine).elements())
        if len(rest) > _MAX_UNMATCHED:
            return False
        return has_perfect_matching([[self.same(value, other) for other in candidates] for value in rest])

    def _expressions(self, left: Value, right: Value) -> bool:
        """By identical strings, else by the exact algebra, else by what the pool says."""
        if left.text == right.text or _spelled(left.text) == _spelled(right.text):
            return True
        if any(map(_is_no_formula, (left, right))):
            return False
        mine, theirs = _as_equation(left, right), _as_equation(right, left)
        if max(len(mine), len(theirs)) > _MAX_LENGTH:
            return False
        forms = _normal_form(mine), _normal_form(theirs)
        if None not in forms:
            return forms[0] == forms[1]
        formulas = _formula(mine), _formula(theirs)
        if None in formulas or formulas[0] == formulas[1]:
            return None not in formulas
        return self._asked((mine, theirs) if mine < theirs else (theirs, mine))

    def _asked(self, question: Question) -> bool:
        if question in self.answers:
            return self.answers[question]
        if len(self.questions) < _MAX_QUESTIONS:
            self.questions[question] = None
        return question in self.questions


def _compatible(left: str | None, right: str | None) -> bool:
    return left is None or right is None or left == right


def _turned(left: Value, right: Value) -> bool:
    """`x = y` and `y = x`, with a single name on both sides."""
    return left.label is not None and (left.label, left.text) == (right.text, right.label)


def _spelled(text: str) -> str:
    r"""A squashed text without what says that it is `\text`, and without case where it is words and digits."""
    if '"' in text:
        text = _TEXT.sub(r"\1", text)
    return text.lower() if len(text) <= _MAX_LENGTH and _WORDY.fullmatch(text) else text


def _is_no_formula(value: Value) -> bool:
    if value.kind == "expression":
        return _LONG_WORD.search(value.text) is not None
    long = value.kind == "word" and len(value.text) > _MAX_PRODUCT
    return long or value.kind in ("based", "ratio", "date", "blank")


def _as_equation(value: Value, other: Value) -> str:
    """A value's formula; with its label where the other is an equation in several names, such as 2x - y = -1."""
    if isinstance(value.core, Fraction):
        top, bottom = value.core.numerator, value.core.denominator
        return f"{top}/{bottom}" if max(top.bit_length(), bottom.bit_length()) <= _MAX_BITS else value.text
    labelled = value.label is not None and value.kind == "expression" and other.label is None and "=" in other.text
    return f"{value.label}={value.text}" if labelled else value.text


def _as_text(answer: object) -> str:
    """Text of an answer; an int of any size, a float by its shortest decimal form; None and NaN are blank."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return format(Decimal(answer), "f")
    return "" if answer is None or answer != answer else str(answer)


def _decide(prediction: object, gold: object) -> Grade | _Comparison:
    """The grade, or a comparison with open questions."""
    try:
        decided = _judge(prediction, gold)
    except Exception:  # a defect in here is no reason to end a run, nor to change the other grades of a batch
        return _FAILED
    return decided if isinstance(decided, _Comparison) else _EQUAL if decided else _UNEQUAL


def _read(text: str) -> tuple[str, Value]:
    """An answer's marked form and value; those of short ones are kept, since the members of a group share theirs."""
    return _read_short(text) if len(text) <= _MAX_KEPT else _marked_and_parsed(text)


def _marked_and_parsed(text: str) -> tuple[str, Value]:
    marked = mark(text)
    return marked, parse(marked)


_read_short = lru_cache(maxsize=4096)(_marked_and_parsed)


def _judge(prediction: object, gold: object) -> bool | _Comparison:
    left, right = _as_text(prediction), _as_text(gold)
    first: Hashable = plain_number(left)
    if first is not None:
        second = plain_number(right)
        if second is not None:
            return first == second
    if not left.strip() or not right.strip():
        return False
    (left, mine), (right, reference) = _read(left), _read(right)
    if "blank" in (mine.kind, reference.kind):
        return False
    comparison = _Comparison(mine, reference)
    equal = comparison()
    if not equal and (TEXT_OPEN in left or TEXT_OPEN in right):
        return _spelled(squash(left)) == _spelled(squash(right))  # the same but for `\text`
    return comparison if equal and comparison.questions else equal


def _answered(comparison: _Comparison, questions: Sequence[Question], outcome: Outcome) -> Grade:
    """The grade of a comparison whose questions the pool has answered, or failed to."""
    if outcome.failure is not None:
        return Grade(False, outcome.failure)
    try:
        comparison.answers = dict(zip(questions, outcome.value, strict=True))
        return _EQUAL if comparison() else _UNEQUAL
    except Exception:
        return _FAILED


def compare(pairs: Sequence[tuple[str | float | None, str | float | None]]) -> list[Grade]:
    r"""The grades of many answers, by the rules of `is_equivalent`.

    Numbers, words, units and lists of those are decided in this process, exactly. What is left are formulas that are
    neither identical nor inside the exact algebra of `symbolic.normal_form`: the questions about them are collected for
    the whole batch and answered by `math_verify_equal` in the processes of `grading_pool`. The pool's time limit holds
    for one answer with all its elements; an answer that reaches it, or whose process dies, is graded as unequal with
    the failure named, and changes no other grade; so is one that the comparison in this process fails on.

    Args:
        pairs: (prediction, gold) each; None is no answer.

    Returns:
        One grade a pair, in order.

    Raises:
        RuntimeError: The pool's processes cannot start: a broken installation, not a bad answer.

    Example:
        >>> compare([("0.5", r"\frac12"), (r"\log_2 8", "3"), (r"\sin x", r"\cos x"), (None, "5")])
        [Grade(equal=True, failure=None), Grade(equal=True, failure=None), Grade(equal=False, failure=None),
         Grade(equal=False, failure=None)]
    """
    grades: list[Grade] = []
    waiting: dict[tuple[Question, ...], list[tuple[int, _Comparison]]] = {}
    for index, (prediction, gold) in enumerate(pairs):
        decided = _decide(prediction, gold)
        if isinstance(decided, _Comparison):
            waiting.setdefault(tuple(decided.questions), []).append((index, decided))
        grades.append(_UNEQUAL if isinstance(decided, _Comparison) else decided)
    if waiting:
        for (questions, open_), outcome in zip(
            waiting.items(), grading_pool().map([list(questions) for questions in waiting]), strict=True
        ):
            for index, comparison in open_:
                grades[index] = _answered(comparison, questions, outcome)
    return grades


def is_equivalent(prediction: str | float | None, gold: str | float | None) -> bool:
    r"""Whether an answer equals the reference.

    * Numbers are compared exactly, at any size: integers, decimals, fractions, mixed numbers, `\frac12`,
      `0.\overline{3}`. 0.333 is not 1/3, and neither is 0.333333. Leading zeros and thousands separators (`8,000`,
      `8{,}000`, `8\,000`) do not count; a plain space separates no thousands. `5 million` is 5,000,000, `2 dozen` 24.
    * A unit, currency sign, degree sign, percent sign, `\text` or `x =` that one side lacks does not count; two
      different ones are unequal. So `10\%` equals 10, not 0.1. Other multipliers and parts of a fraction are no units:
      `5 k`, `5 pairs` and `5 tenths` equal only themselves.
    * A number with a base equals only itself with the same base; a ratio or time `3:30` and a date `2023-01-05` only
      the same figures.
    * (1,2) and [1,2] are ordered and keep their brackets; bare lists and sets {1,2} are unordered and one kind. An
      inequality with one name and numbers is the interval it describes.
    * Words compare without case, spaces and `\text`, also beside digits (`Room 5B`); a choice `(C)` is the word C.
    * All else are formulas: the same as strings, or the same number, function or equation by the exact algebra of
      `symbolic.normal_form` or by `math_verify_equal`, whose rules stand at the top of that file.

    Args:
        prediction: The extracted answer.
        gold: The reference.

    Returns:
        True or False; False for None or a blank on either side, and where a comparison of formulas fails or takes too
        long. Never raises on text, never hangs, and works in any thread. Of many answers, `compare` is faster.

    Raises:
        RuntimeError: The processes that compare formulas cannot start.

    Example:
        >>> is_equivalent("8{,}000", 8000), is_equivalent(r"\dfrac{5}{3}", "5/3"), is_equivalent("0.333", "1/3")
        (True, True, False)
    """
    decided = _decide(prediction, gold)
    return compare([(prediction, gold)])[0].equal if isinstance(decided, _Comparison) else decided.equal
