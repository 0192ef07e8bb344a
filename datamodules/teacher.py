"""Worked steps of small sums, and the noisy teacher that writes them down with errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

__all__ = ["FILLERS", "TAGS", "Step", "Teacher", "pick", "solve"]

T = TypeVar("T")

FILLERS = ("so", "ok", "now", "then", "we", "get", "let", "hmm")
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_OFFSETS = (-10, -2, -1, 1, 2, 10)

# A number of a step: written as it is (True), or the result of the step with that place (False).
Operand = tuple[int, bool]
Step = tuple[Operand, str, Operand]


def solve(level: int, numbers: Sequence[int]) -> list[Step]:
    """The steps in which a question of a level is worked out; the last one's result is the answer.

    Args:
        level: 1 (a+b) to 4 (a*b+c).
        numbers: The question's numbers.

    Example:
        >>> solve(4, (3, 4, 5))  # 3*4, then the result of step 0 plus 5
        [((3, True), '*', (4, True)), ((0, False), '+', (5, True))]
    """
    if level == 1:
        a, b = numbers
        return [((a, True), "+", (b, True))]
    if level == 4:
        a, b, c = numbers
        return [((a, True), "*", (b, True)), ((0, False), "+", (c, True))]
    a, b = numbers
    ones = ((a % 10, True), "+", (b % 10, True))
    if level == 2:
        return [ones, ((a - a % 10, True), "+", (0, False))]
    return [((a - a % 10, True), "+", (b - b % 10, True)), ones, ((0, False), "+", (1, False))]


@dataclass(frozen=True)
class Teacher:
    """Writes worked completions: exact by default, or with the errors that leave reinforcement learning room.

    Args:
        noise: q, the probability with which the result of a step, and the final answer, is written wrong by 1, 2 or 10
            in either direction (never below 0). Later steps go on from what was written.
        format_noise: q_f, the probability of a broken format: one tag left out (60 %), the answer repeated after
            `</answer>` (20 %), `</answer>` doubled (20 %).
        filler: Before each step filler words are written, one after another, as long as a draw falls below this.
        spaced: Write `10 + 20 = 30, 7 + 5 = 12` instead of `10+20=30,7+5=12`.
    """

    noise: float = 0.0
    format_noise: float = 0.0
    filler: float = 0.0
    spaced: bool = False

    def write(self, steps: Sequence[Step], random: Random) -> tuple[str, str]:
        """The text of the steps and the final answer.

        Example:
            >>> Teacher().write(solve(3, (17, 25)), Random(0))
            ('10+20=30,7+5=12,30+12=42', '42')
        """
        results: list[int] = []
        texts = []
        gap = " " if self.spaced else ""
        for left, operator, right in steps:
            a, b = (value if written else results[value] for value, written in (left, right))
            results.append(self._number(a * b if operator == "*" else a + b, random))
            words = "".join(word + gap for word in self._fillers(random))
            texts.append(f"{words}{a}{gap}{operator}{gap}{b}{gap}={gap}{results[-1]}")
        return f",{gap}".join(texts), str(self._number(results[-1], random))

    def target(self, steps: Sequence[Step], random: Random) -> str:
        """A whole completion, `<reasoning>…</reasoning><answer>…</answer>`.

        Example:
            >>> Teacher().target(solve(1, (3, 4)), Random(0))
            '<reasoning>3+4=7</reasoning><answer>7</answer>'
        """
        text, answer = self.write(steps, random)
        parts = [TAGS[0], text, TAGS[1], TAGS[2], answer, TAGS[3]]
        if random.random() < self.format_noise:
            kind = random.random()
            if kind < 0.6:
                parts.remove(pick(TAGS, random))
            else:
                parts.append(answer if kind < 0.8 else TAGS[3])
        return "".join(parts)

    def _number(self, value: int, random: Random) -> int:
        if random.random() >= self.noise:
            return value
        return pick([value + offset for offset in _OFFSETS if value + offset >= 0], random)

    def _fillers(self, random: Random) -> list[str]:
        words = []
        while random.random() < self.filler:
            words.append(pick(FILLERS, random))
        return words


def pick(items: Sequence[T], random: Random) -> T:
    """One item, each equally likely.

    Built on `random()` alone, the one method whose stream Python keeps the same across versions.

    Example:
        >>> pick("abc", Random(0))
        'c'
    """
    return items[int(random.random() * len(items))]
