"""Small sums made in code: a task with an exact answer that a tiny model learns in minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

from gtpo_lightning.datamodules.base import DataModule
from gtpo_lightning.datamodules.teacher import Teacher, pick, solve
from gtpo_lightning.datamodules.word_problems import word_problem
from gtpo_lightning.rollout import Problem

__all__ = ["Arithmetic", "questions"]

Numbers = tuple[int, ...]

LEVELS = (1, 2, 3, 4)
KINDS = ("expression", "word")
_EXPRESSIONS = {1: "{}+{}=", 2: "{}+{}=", 3: "{}+{}=", 4: "{}*{}+{}="}


class Arithmetic(DataModule):
    """Sums of four levels, as expressions (`17+25=`) or as short word problems.

    Level 1 is a+b with one digit each, level 2 ab+c, level 3 ab+cd with a sum below 100, level 4 a*b+c with one digit
    each. Of each level's distinct questions a tenth is held out for validation and another tenth for the test set;
    which ones depends on nothing, so a run that goes on from a warm start never trains on what it is judged by. Word
    problems follow the same split by their numbers.

    *Training rows* are drawn from the training questions with replacement, level and kind by their weights, keyed by
    `seed`. Each row is a problem of its own, with its own id ("arithmetic/train/000123") and, for supervised
    fine-tuning, its own draw of the teacher's errors in `meta["target"]`; so a number of rows as large as the number of
    training steps times the batch size never shows one target twice. Two rows may ask the same.

    *Validation and test rows* take the levels (and kinds) in turn, whatever the weights, and repeat a question only
    after all held-out ones of its level. They do not depend on `seed`; their targets are exact.

    `meta`: `level`, `kind`, `solution` (the exact steps, `10+20=30,7+5=12,30+12=42`) and `target` (a whole completion,
    `<reasoning>…</reasoning><answer>42</answer>`).

    Args:
        size: Training rows.
        val_size: Validation rows; 0 for none.
        test_size: Test rows; 0 for none.
        levels: Levels to draw from.
        level_weights: How often each is drawn for training, in proportion. Default: equally often.
        kinds: "expression", "word", or both.
        kind_weights: The same for the kinds.
        noise: q, probability of a wrong number in a training target (see `Teacher`).
        format_noise: q_f, probability of a broken format in a training target.
        filler: Probability of each filler word in a training target.
        **kwargs: Arguments of `DataModule`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> data = Arithmetic(size=3, levels=[3])
        >>> problem = data.make_problems("train")[0]
        >>> problem.id, problem.question, problem.answer
        ('arithmetic/train/000000', '21+63=', '84')
    """

    name = "arithmetic"

    def __init__(
        self,
        size: int = 4096,
        val_size: int = 1024,
        test_size: int = 1024,
        levels: Sequence[int] = LEVELS,
        level_weights: Sequence[float] | None = None,
        kinds: Sequence[str] = ("expression",),
        kind_weights: Sequence[float] | None = None,
        noise: float = 0.0,
        format_noise: float = 0.0,
        filler: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value, minimum in (("size", size, 1), ("val_size", val_size, 0), ("test_size", test_size, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"{name}: {value!r}; valid: an integer >= {minimum}")
        # Filler words come until a draw says stop, so certainty would never end.
        for name, chance, top in (("noise", noise, 1), ("format_noise", format_noise, 1), ("filler", filler, 0.95)):
            if not 0 <= chance <= top:
                raise ValueError(f"{name}: {chance!r}; valid: 0 to {top}")
        self.sizes = {"train": size, "val": val_size, "test": test_size}
        self.levels = _choice("levels", levels, LEVELS)
        self.level_weights = _weights("level_weights", level_weights, len(self.levels))
        self.kinds = _choice("kinds", kinds, KINDS)
        self.kind_weights = _weights("kind_weights", kind_weights, len(self.kinds))
        self.noise = noise
        self.format_noise = format_noise
        self.filler = filler

    def make_problems(self, split: str) -> list[Problem]:
        """The rows of a split, see the class."""
        random = Random(f"{self.seed}/train" if split == "train" else split)
        draws = self._train_draws(random) if split == "train" else self._eval_draws(split, random)
        errors = (self.noise, self.format_noise, self.filler) if split == "train" else (0.0, 0.0, 0.0)
        teachers = {kind: Teacher(*errors, spaced=kind == "word") for kind in self.kinds}
        problems = []
        for index, (level, kind, numbers) in zip(range(self.sizes[split]), draws, strict=False):
            problems.append(_problem(f"{self.name}/{split}/{index:06d}", level, kind, numbers, teachers[kind], random))
        return problems

    def _train_draws(self, random: Random) -> Iterator[tuple[int, str, Numbers]]:
        while True:
            level = self.levels[_weighted(self.level_weights, random)]
            kind = self.kinds[_weighted(self.kind_weights, random)]
            yield level, kind, pick(questions(level, "train"), random)

    def _eval_draws(self, split: str, random: Random) -> Iterator[tuple[int, str, Numbers]]:
        decks: dict[int, list[Numbers]] = {level: [] for level in self.levels}
        while True:
            for kind, level in product(self.kinds, self.levels):
                decks[level] = decks[level] or _shuffled(questions(level, split), random)
                yield level, kind, decks[level].pop()


@cache
def questions(level: int, split: str) -> tuple[Numbers, ...]:
    """The numbers of the distinct questions of a level that belong to a split.

    Args:
        level: 1 to 4.
        split: "train" (eight tenths), "val" or "test" (a tenth each).

    Example:
        >>> [len(questions(level, "train")) for level in (1, 2, 3, 4)]
        [80, 720, 2592, 800]
    """
    digits, two_digits = range(10), range(10, 100)
    every: dict[int, list[Numbers]] = {
        1: list(product(digits, digits)),
        2: list(product(two_digits, digits)),
        3: [(a, b) for a, b in product(two_digits, two_digits) if a + b < 100],
        4: list(product(digits, digits, digits)),
    }
    ordered = _shuffled(every[level], Random(f"held out of level {level}"))
    tenth = len(ordered) // 10
    parts = {"val": ordered[:tenth], "test": ordered[tenth : 2 * tenth], "train": ordered[2 * tenth :]}
    return tuple(parts[split])


def _problem(id: str, level: int, kind: str, numbers: Numbers, teacher: Teacher, random: Random) -> Problem:
    steps = solve(level, numbers)
    solution, answer = Teacher(spaced=teacher.spaced).write(steps, random)
    question = word_problem(level, numbers, random) if kind == "word" else _EXPRESSIONS[level].format(*numbers)
    meta = {"level": level, "kind": kind, "solution": solution, "target": teacher.target(steps, random)}
    return Problem(id, question, answer, meta)


def _shuffled(items: Sequence[Numbers], random: Random) -> list[Numbers]:
    keys = [random.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def _weighted(weights: Sequence[float], random: Random) -> int:
    """An index, drawn in proportion to its weight."""
    rest = random.random() * sum(weights)
    for index, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return index
    return max(index for index, weight in enumerate(weights) if weight)


def _choice(name: str, values: Sequence[Any], valid: Sequence[Any]) -> tuple[Any, ...]:
    if not values or len(set(values)) != len(values) or any(value not in valid for value in values):
        raise ValueError(f"{name}: {list(values)!r}; valid: some of {list(valid)}, each once")
    return tuple(values)


def _weights(name: str, values: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if values is None:
        return (1.0,) * count
    if len(values) != count or any(value < 0 for value in values) or not sum(values) > 0:
        raise ValueError(f"{name}: {list(values)!r}; valid: {count} numbers >= 0, not all 0")
    return tuple(float(value) for value in values)
