"""Named reward functions combined by weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gtpo_lightning.rewards.calls import RewardCall
from gtpo_lightning.rewards.columns import columns_of
from gtpo_lightning.rewards.functions import REWARDS, SoftOverlong
from gtpo_lightning.rewards.outcomes import Scores

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Problem

__all__ = ["PAPER_REWARDS", "RewardFunctions", "check_limits"]

PAPER_REWARDS = ("format", "correctness")

Reward = Callable[..., Any]


class RewardFunctions:
    """The reward R of each completion: a weighted sum of named functions.

    R_i = Σ_k w_k · r_k(o_i), over the functions with w_k ≠ 0 that scored completion i; NaN if none did. A function with
    weight 0 is evaluated and logged only.

    A reward function is called as `fn(completions=[...], **columns)` and returns N numbers (list, tensor or array),
    where None and NaN mean "not scored"; None for the whole list scores nothing. In place of a number it may return a
    `Failure`, which is counted. It gets, by keyword, the columns its signature names, or all of them if it takes
    `**kwargs`; each is a list with one entry a completion:

    * `completions`: texts; `prompts` and `question`: question texts; `answer`: references; `id`: problem ids
    * `completion_ids`: lists of token ids; `lengths`: tokens; `truncated`: bools (where the caller gave them)
    * every key of `Problem.meta` found in any of the problems, None where a problem lacks it

    **Errors.** A function that raises does not end a run: it is called again for each completion by itself, and those
    it still raises for are not scored and count as errors. Mistakes that concern every call (a column there is not, a
    wrong number of values) always end it.

    **Time.** With `time_limit` every completion is a call of its own, with lists of one entry, in a worker process: a
    function must then not depend on the other completions of its batch, and what it changes stays in that process. A
    call that takes longer is killed, with its children, is not scored and counts as a timeout; one whose process dies
    counts as an error. The built-in functions are bounded by themselves and stay in this process.

    Args:
        rewards: What to combine. None: the paper's, `format` and `correctness` with weight 1. A mapping to weights, a
            sequence (weight 1 each), or one. A function is given as a registered name, a dotted import path, or a
            callable. Its name is the registered name, else its `__name__`, else the name of its class.
        on_error: What an exception of a function does: `skip` the completion, or `raise`. A timeout is never raised.
        time_limit: Seconds a completion and function. Default: no limit.

    Raises:
        ValueError: An unknown name, a path that cannot be imported, something that cannot be called, a weight that is
            no finite number, nothing at all, two functions of one name, an unknown `on_error`, a limit that is not
            positive, or with a limit a function that cannot be pickled.

    Example:
        >>> from gtpo_lightning.rollout import Problem
        >>> rewards = RewardFunctions({"format": 1.0, "correct_answer": 0.5})
        >>> texts = ["<reasoning>2+3</reasoning><answer>5</answer>", "<answer>6</answer>"]
        >>> scores = rewards(texts, [Problem("a", "2+3?", "5")] * 2)
        >>> scores.rewards.tolist(), scores.parts["correct_answer"].tolist()
        ([15.0, 1.0], [10.0, 0.0])
    """

    def __init__(
        self, rewards: Any = None, *, on_error: Literal["skip", "raise"] = "skip", time_limit: float | None = None
    ) -> None:
        check_limits("on_error", on_error, "time_limit", time_limit)
        self.functions: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
        self._calls: dict[str, RewardCall] = {}
        for given, weight in _pairs(rewards):
            function = _resolve(given)
            name = _name(function)
            if name in self.functions:
                raise ValueError(
                    f"rewards: {self.functions[name]!r} and {function!r} are both named {name!r}; valid: one function "
                    "a name"
                )
            self.functions[name] = function
            self.weights[name] = _weight(name, weight)
            limit = None if _is_built_in(function) else time_limit
            self._calls[name] = RewardCall(name, function, on_error=on_error, time_limit=limit)
        if not self.functions:
            raise ValueError(f"rewards: {rewards!r} is empty; valid: None for the paper's rewards, or {_choices()}")

    @property
    def names(self) -> list[str]:
        """The functions' names, in the order they were given."""
        return list(self.functions)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weights})"

    def __call__(
        self,
        texts: Sequence[str],
        problems: Sequence[Problem],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        truncated: Sequence[bool] | Tensor | None = None,
    ) -> Scores:
        """Scores N completions.

        Args:
            texts: N completions.
            problems: N problems, the problem of each completion.
            completion_ids: N lists of token ids, without padding.
            lengths: N generated lengths, tokens. Default: counted from `completion_ids` where that is given.
            truncated: N bools, whether a completion was cut by the length limit.

        Returns:
            The rewards R, the raw values of each function and what each failed on.

        Raises:
            ValueError: Inputs of unequal length; a function that names a column there is not, or returns the wrong
                number of values, something that is no number, or an infinite value.
            RuntimeError: A function raised, with `on_error="raise"`; or the worker process of one cannot start.
        """
        columns = columns_of(texts, problems, completion_ids, lengths, truncated)
        results = {name: call(columns) for name, call in self._calls.items()}
        parts = {name: part for name, (part, _) in results.items()}
        return Scores(
            self._combine(parts, len(texts)).float(),
            {name: part.float() for name, part in parts.items()},
            {name: failures for name, (_, failures) in results.items()},
        )

    def _combine(self, parts: dict[str, Tensor], rows: int) -> Tensor:
        total = torch.zeros(rows, dtype=torch.float64)
        scored = torch.zeros(rows, dtype=torch.bool)
        for name, part in parts.items():
            if self.weights[name] != 0:
                scored |= ~part.isnan()
                total += self.weights[name] * part.nan_to_num(nan=0.0)
        return total.masked_fill(~scored, math.nan)


def check_limits(error_name: str, on_error: object, limit_name: str, time_limit: object) -> None:
    """Refuses settings of how reward functions are called, under the names the caller has for them.

    Raises:
        ValueError: An unknown choice, or a limit that is no positive number.
    """
    if on_error not in ("skip", "raise"):
        raise ValueError(f"{error_name}: {on_error!r}; valid: skip, raise")
    number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if time_limit is not None and not (number and 0 < time_limit < math.inf):  # type: ignore[operator]
        raise ValueError(f"{limit_name}: {time_limit!r}; valid: null, or a number above 0 (seconds a completion)")


def _is_built_in(function: Reward) -> bool:
    return isinstance(function, SoftOverlong) or any(function is built_in for built_in in REWARDS.values())


def _choices() -> str:
    return f"{', '.join(REWARDS)}, a dotted import path, or a callable"


def _pairs(rewards: Any) -> Iterable[tuple[Any, Any]]:
    """(function as given, weight) for every form in which rewards may be given."""
    if rewards is None:
        return [(name, 1.0) for name in PAPER_REWARDS]
    if isinstance(rewards, Mapping):
        return rewards.items()
    if isinstance(rewards, str) or callable(rewards):
        return [(rewards, 1.0)]
    if isinstance(rewards, Sequence):
        return [(reward, 1.0) for reward in rewards]
    raise ValueError(f"rewards: {rewards!r}; valid: None, or a mapping to weights, a list or one of: {_choices()}")


def _resolve(given: Any) -> Reward:
    """The callable behind a registered name, a dotted path, or itself; a class is made without arguments."""
    function = given
    if isinstance(given, str):
        function = REWARDS[given] if given in REWARDS else _import(given)
    if inspect.isclass(function):
        try:
            function = function()
        except TypeError as error:
            raise ValueError(f"rewards: the class {given!r} needs arguments; valid: an instance of it") from error
    if not callable(function):
        raise ValueError(f"rewards: {given!r} cannot be called; valid: {_choices()}")
    return function  # type: ignore[no-any-return]


def _import(path: str) -> Any:
    module, _, name = path.strip().rpartition(".")
    try:
        if not module:
            raise ImportError(f"{path!r} is no registered name and no dotted path")
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"rewards: {path!r} cannot be found ({error}); valid: {_choices()}") from error


def _name(function: Reward) -> str:
    for name, registered in REWARDS.items():
        if function is registered:
            return name
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _weight(name: str, weight: Any) -> float:
    try:
        # YAML reads 1e-3 as a string.
        number = math.nan if isinstance(weight, bool) else float(weight)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"rewards: weight {weight!r} of {name!r}; valid: a finite number")
    return number
