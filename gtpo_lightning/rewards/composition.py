"""Named reward functions combined by weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtpo_lightning.rewards.functions import REWARDS

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Problem

__all__ = ["PAPER_REWARDS", "RewardFunctions"]

PAPER_REWARDS = ("format", "correctness")

Reward = Callable[..., Any]


class RewardFunctions:
    """The reward R of each completion: a weighted sum of named functions.

    R_i = Σ_k w_k · r_k(o_i), over the functions with w_k ≠ 0 that scored completion i; NaN if none did. A function with
    weight 0 is evaluated and logged only.

    A reward function is called as `fn(completions=[...], **columns)` and returns N numbers (list, tensor or array),
    where None and NaN mean "not scored"; None for the whole list scores nothing. It gets, by keyword, the columns its
    signature names, or all of them if it takes `**kwargs`; each is a list with one entry a completion:

    * `completions`: texts; `prompts` and `question`: question texts; `answer`: references; `id`: problem ids
    * `completion_ids`: lists of token ids; `lengths`: tokens; `truncated`: bools (where the caller gave them)
    * every key of `Problem.meta` found in any of the problems, None where a problem lacks it

    Args:
        rewards: What to combine. None: the paper's, `format` and `correctness` with weight 1. A mapping to weights, a
            sequence (weight 1 each), or one. A function is given as a registered name, a dotted import path, or a
            callable. Its name is the registered name, else its `__name__`, else the name of its class.

    Raises:
        ValueError: An unknown name, a path that cannot be imported, something that cannot be called, a weight that is
            no finite number, nothing at all, or two functions of one name.

    Example:
        >>> from gtpo_lightning.rollout import Problem
        >>> rewards = RewardFunctions({"format": 1.0, "correct_answer": 0.5})
        >>> texts = ["<reasoning>2+3</reasoning><answer>5</answer>", "<answer>6</answer>"]
        >>> total, parts = rewards(texts, [Problem("a", "2+3?", "5")] * 2)
        >>> total.tolist(), parts["correct_answer"].tolist()
        ([15.0, 1.0], [10.0, 0.0])
    """

    def __init__(self, rewards: Any = None) -> None:
        self.functions: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores N completions.

        Args:
            texts: N completions.
            problems: N problems, the problem of each completion.
            completion_ids: N lists of token ids, without padding.
            lengths: N generated lengths, tokens. Default: counted from `completion_ids` where that is given.
            truncated: N bools, whether a completion was cut by the length limit.

        Returns:
            The rewards R, (N,) fp32, NaN where nothing was scored; and the raw values of each function by name, (N,)
            fp32 each.

        Raises:
            ValueError: Inputs of unequal length; a function that names a column there is not, or returns the wrong
                number of values, something that is no number, or an infinite value.
            RuntimeError: A function raised; its error is the cause.
        """
        columns = _columns(texts, problems, completion_ids, lengths, truncated)
        parts = {name: _score(name, function, columns) for name, function in self.functions.items()}
        return self._combine(parts, len(texts)).float(), {name: part.float() for name, part in parts.items()}

    def _combine(self, parts: dict[str, Tensor], rows: int) -> Tensor:
        total = torch.zeros(rows, dtype=torch.float64)
        scored = torch.zeros(rows, dtype=torch.bool)
        for name, part in parts.items():
            if self.weights[name] != 0:
                scored |= ~part.isnan()
                total += self.weights[name] * part.nan_to_num(nan=0.0)
        return total.masked_fill(~scored, math.nan)


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


def _columns(
    texts: Sequence[str],
    problems: Sequence[Problem],
    completion_ids: Sequence[Sequence[int]] | None,
    lengths: Sequence[int] | Tensor | None,
    truncated: Sequence[bool] | Tensor | None,
) -> dict[str, list[Any]]:
    """Every column a function may ask for, one entry a completion."""
    if lengths is None and completion_ids is not None:
        lengths = [len(ids) for ids in completion_ids]
    meta = dict.fromkeys(key for problem in problems for key in problem.meta)
    columns: dict[str, Any] = {key: [problem.meta.get(key) for problem in problems] for key in meta}
    questions = [problem.question for problem in problems]
    columns |= {
        "completions": texts,
        "prompts": questions,
        "question": questions,
        "answer": [problem.answer for problem in problems],
        "id": [problem.id for problem in problems],
    }
    given = {"completion_ids": completion_ids, "lengths": lengths, "truncated": truncated}
    columns |= {name: column for name, column in given.items() if column is not None}
    columns = {name: c.tolist() if isinstance(c, Tensor) else list(c) for name, c in columns.items()}
    for name, column in columns.items():
        if len(column) != len(texts):
            source = "problems" if name not in given else name
            raise ValueError(f"{source}: {len(column)} entries; valid: one for each of the {len(texts)} completions")
    return columns


def _arguments(name: str, function: Reward, columns: dict[str, list[Any]]) -> tuple[list[Any], dict[str, list[Any]]]:
    """The columns a function's signature asks for, copied, so that no function changes what the next one sees.

    A first parameter of another name than any column takes the completions, so that `lambda texts: ...` works.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional: list[Any] = []
    first = parameters[0] if parameters else None
    if first is not None and (
        first.kind is first.POSITIONAL_ONLY
        or (
            first.kind is first.POSITIONAL_OR_KEYWORD
            and first.default is first.empty
            and first.name not in columns
            and all(p.name != "completions" for p in parameters)
        )
    ):
        positional, parameters = [list(columns["completions"])], parameters[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        skipped = {"completions"} if positional else set()
        return positional, {key: list(column) for key, column in columns.items() if key not in skipped}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.name not in columns and p.default is p.empty]
    if missing:
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(missing)}, which this call does not have; valid: "
            f"{', '.join(sorted(columns))}"
        )
    return positional, {p.name: list(columns[p.name]) for p in named if p.name in columns}


def _score(name: str, function: Reward, columns: dict[str, list[Any]]) -> Tensor:
    """The raw values of one function, (N,) float64, NaN where it did not score."""
    rows = len(columns["completions"])
    if rows == 0:
        return torch.zeros(0, dtype=torch.float64)
    positional, keywords = _arguments(name, function, columns)
    try:
        values = function(*positional, **keywords)
        if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Tensor)):
            values = list(values)
    except Exception as error:
        raise RuntimeError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error
    if values is None:
        values = [None] * rows
    if isinstance(values, Tensor):
        values = values.detach().cpu().tolist()
    if not isinstance(values, list) or len(values) != rows:
        got = f"{len(values)} values" if isinstance(values, list) else f"{type(values).__name__} {values!r}"
        raise ValueError(f"reward function {name!r} returned {got}; expected {rows}, one for each completion")
    return torch.tensor([_value(name, i, value) for i, value in enumerate(values)], dtype=torch.float64)


def _value(name: str, index: int, value: Any) -> float:
    """One value as a float; NaN for None."""
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
        valid = not isinstance(value, (str, bytes)) and not abs(number) > torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        valid = False
    if not valid:
        raise ValueError(
            f"reward function {name!r} returned {value!r} at {index}; expected a finite number, or None or NaN for "
            "not scored"
        )
    return number
