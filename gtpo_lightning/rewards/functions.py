"""The built-in reward functions, by name, and the judge of correctness.

A reward function is any callable `fn(completions, **columns)` that returns one number for each completion, or None
where it does not score. The ones here return 0 for an answer whose comparison failed, as a `Failure` that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from gtpo_lightning.rewards.equivalence import compare, is_equivalent
from gtpo_lightning.rewards.extraction import extract_answer
from gtpo_lightning.rewards.format import FORMAT_TAGS, FULL_FORMAT, format_reward
from gtpo_lightning.rewards.outcomes import Failure

__all__ = ["REWARDS", "SoftOverlong", "correct_answer", "correctness", "format_rewards", "is_correct", "tag_count"]

RIGHT = 10.0


def is_correct(text: str, gold: str | float, *, style: str = "auto") -> bool:
    """Whether a completion holds the right answer; correctness for evaluation, apart from any reward.

    Args:
        text: A completion.
        gold: The reference answer.
        style: Where the answer stands, one of `ANSWER_STYLES`.

    Returns:
        True or False; a missing answer is never right.

    Raises:
        ValueError: Unknown `style`.

    Example:
        >>> is_correct("so <answer>8,000</answer>", 8000), is_correct("8000", 8000)
        (True, False)
    """
    return is_equivalent(extract_answer(text, style=style), gold)


def format_rewards(completions: list[str]) -> list[float]:
    """`format`: the paper's format reward, 0 to 3 in part and 10 in full.

    Args:
        completions: N texts.

    Returns:
        N values.

    Example:
        >>> format_rewards(["<reasoning>2+3</reasoning><answer>5</answer>", "5"])
        [10.0, 0.0]
    """
    return [format_reward(text) for text in completions]


def correctness(completions: list[str], answer: list[str]) -> list[float | Failure]:
    """`correctness`: the paper's, 10 for a right answer in a completion of full format, else 0.

    Args:
        completions: N texts.
        answer: N references.

    Returns:
        N values, 0 or 10; a `Failure` of score 0 where the comparison failed.

    Example:
        >>> correctness(["<reasoning>2+3</reasoning><answer>5</answer>", "<answer>5</answer>"], ["5", "5"])
        [10.0, 0.0]
    """
    return _graded(
        (extract_answer(text, style="answer_tag") if format_reward(text) == FULL_FORMAT else None, gold)
        for text, gold in zip(completions, answer, strict=True)
    )


def correct_answer(completions: list[str], answer: list[str]) -> list[float | Failure]:
    r"""`correct_answer`: 10 for a right answer in any of the strict styles (`auto`), whatever the format, else 0.

    Args:
        completions: N texts.
        answer: N references.

    Returns:
        N values, 0 or 10; a `Failure` of score 0 where the comparison failed.

    Example:
        >>> correct_answer([r"so \boxed{5}", "#### 6", "5"], ["5", "5", "5"])
        [10.0, 0.0, 0.0]
    """
    return _graded((extract_answer(text, style="auto"), gold) for text, gold in zip(completions, answer, strict=True))


def _graded(pairs: Iterable[tuple[str | None, str]]) -> list[float | Failure]:
    """10 for each answer that equals its reference; 0 for a comparison that failed, which is not the answer's merit."""
    return [
        RIGHT * grade.equal if grade.failure is None else Failure(grade.failure, score=0.0)
        for grade in compare(list(pairs))
    ]


def tag_count(completions: list[str]) -> list[float]:
    """`tag_count`: a format reward on the scale 0 to 1 that gives small models a slope to climb.

    1.0 for the full format (where `format` gives 10), else 0.125 for each of the four tags that occurs exactly once.

    Args:
        completions: N texts.

    Returns:
        N values: 0, 0.125, 0.25, 0.375, 0.5 or 1.

    Example:
        >>> tag_count(["<reasoning>2+3</reasoning><answer>5</answer>", "<answer>5</answer></answer>"])
        [1.0, 0.125]
    """
    return [
        1.0 if format_reward(text) == FULL_FORMAT else 0.125 * sum(text.count(tag) == 1 for tag in FORMAT_TAGS)
        for text in completions
    ]


class SoftOverlong:
    """`soft_overlong`: a penalty that grows over the last tokens before the length limit.

    0 up to `maximum - cache` tokens, then falling linearly to −1 at `maximum`, −1 beyond. By its name, as in
    `rewards: {soft_overlong: 1.0}`, it takes the module's `max_completion_length` and a fifth of it; other numbers are
    given by an instance of one's own, whose dotted path is the name then.

    Args:
        maximum: Length limit L, tokens. Default: the module's `max_completion_length`.
        cache: Over how many tokens before the limit the penalty grows. Default: a fifth of the limit, at least 1
            (DAPO's 4,096 of 20,480, arXiv 2503.14476).

    Raises:
        ValueError: `maximum` or `cache` is not a positive integer, or `cache` is larger than `maximum`.

    Example:
        >>> SoftOverlong(maximum=100, cache=20)(["", "", "", ""], lengths=[80, 90, 100, 101])
        [0.0, -0.5, -1.0, -1.0]
    """

    def __init__(self, maximum: int | None = None, cache: int | None = None) -> None:
        for name, value in (("maximum", maximum), ("cache", cache)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: {value!r}; valid: an integer of at least 1 (tokens)")
        if maximum is None:
            self.__name__ = "soft_overlong"  # the registered name; an instance with a limit of its own has its class's
        self.maximum, self.cache = maximum, cache
        self._check_cache()

    def limit_to(self, maximum: int) -> None:
        """Takes the limit of the run, unless it was given one.

        Args:
            maximum: Tokens.

        Raises:
            ValueError: `cache` is larger.
        """
        if self.maximum is None:
            self.maximum = maximum
            self._check_cache()

    def _check_cache(self) -> None:
        if self.maximum is None:
            return
        if self.cache is None:
            self.cache = max(1, self.maximum // 5)
        if self.cache > self.maximum:
            raise ValueError(f"cache: {self.cache} is larger than maximum {self.maximum}; valid: 1 to maximum")

    def __call__(self, completions: list[str], lengths: list[int]) -> list[float]:
        """The penalty of each completion.

        Args:
            completions: N texts, not read.
            lengths: N generated lengths, tokens.

        Returns:
            N values, −1 to 0.

        Raises:
            ValueError: Neither the constructor nor a module gave a limit.
        """
        if self.maximum is None or self.cache is None:
            raise ValueError("maximum: not set; valid: SoftOverlong(maximum, cache), or a GTPOModule, which sets it")
        free, cache = self.maximum - self.cache, self.cache
        return [0.0 if n <= free else max((free - n) / cache, -1.0) for n in lengths]


REWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "format": format_rewards,
        "correctness": correctness,
        "correct_answer": correct_answer,
        "tag_count": tag_count,
        "soft_overlong": SoftOverlong,
    }
)
