"""How one reward function is called, and what becomes of its errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from gtpo_lightning.rewards.columns import Arguments, arguments_of
from gtpo_lightning.rewards.dispatch import WorkerStartError
from gtpo_lightning.rewards.outcomes import FAILURES, Failure
from gtpo_lightning.rewards.pool import WorkerPool

__all__ = ["RewardCall"]

# Seconds until a worker without a task ends: between two rollouts it stays, since it may have a model in memory.
_IDLE_S = 600.0
# A worker that is killed in its first call starts anew, so that a slow import within the function never ends.
_SLOW = "what it imports or loads when it is called counts, for each worker: import at the top of its module"


class RewardCall:
    """Calls one reward function and gives each completion a value.

    Args:
        name: The function's name.
        function: The function.
        on_error: `skip`: after an exception the function is called again for each completion by itself, and those it
            still raises for have no score and count as errors. `raise`: an exception ends the run.
        time_limit: Seconds a completion. Every completion is then a call of its own in a worker process; one that takes
            longer has no score and counts as a timeout. None: called once, in this process, without a limit.

    Raises:
        ValueError: A time limit for a function that cannot be pickled.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        on_error: Literal["skip", "raise"] = "skip",
        time_limit: float | None = None,
    ) -> None:
        self.name, self.function, self.on_error, self.time_limit = name, function, on_error, time_limit
        self._warned: set[str] = set()
        self._pool = self._make_pool()

    def __call__(self, columns: dict[str, list[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores N completions.

        Args:
            columns: Every column there is, N entries each.

        Returns:
            The raw values, (N,) fp64, NaN where there is no score; and which completions failed, `error` and `timeout`,
            (N,) bool each.

        Raises:
            ValueError: The function asks for a column there is not, or returns the wrong number of values, something
                that is no number, or an infinite value.
            RuntimeError: The function raised, with `on_error="raise"`.
            WorkerStartError: The function's worker process cannot start.
        """
        rows = len(columns["completions"])
        results: list[Any] = []
        if rows:
            arguments = arguments_of(self.name, self.function, columns)
            results = self._here(arguments, rows) if self._pool is None else self._in_workers(arguments, rows)
        values = [_value(self.name, index, result) for index, result in enumerate(results)]
        kinds = [result.kind if isinstance(result, Failure) else None for result in results]
        failures = {kind: torch.tensor([k == kind for k in kinds], dtype=torch.bool) for kind in FAILURES}
        return torch.tensor(values, dtype=torch.float64), failures

    def _here(self, arguments: Arguments, rows: int) -> list[Any]:
        """One call for all; one for each where that raises."""
        try:
            given = arguments.of(slice(None))
            returned = _plain(self.function(*given.positional, **given.keywords))  # reading an iterator may raise too
        except WorkerStartError:  # of a built-in function's workers: no completion is to blame
            raise
        except (Exception, SystemExit) as error:
            if self.on_error == "raise":
                raise RuntimeError(self._raised(error)) from error
            if rows == 1:
                self._warn("error", self._raised(error))
                return [Failure("error")]
        else:
            return self._listed(returned, rows)
        return [value for i in range(rows) for value in self._here(arguments.of(slice(i, i + 1)), 1)]

    def _in_workers(self, arguments: Arguments, rows: int) -> list[Any]:
        """A call for each completion, in processes that can be killed."""
        assert self._pool is not None
        tasks = [tuple(arguments.of(slice(i, i + 1))) for i in range(rows)]
        try:
            outcomes = self._pool.map(tasks)
        except RuntimeError as error:
            raise RuntimeError(
                f"reward function {self.name!r} cannot be called in a worker process: {error}"
            ) from error
        results: list[Any] = []
        for outcome in outcomes:
            if outcome.failure is None:
                results += self._listed(_plain(outcome.value), 1)
                continue
            text = f"reward function {self.name!r} raised {outcome.message}"
            if outcome.failure == "timeout":
                text = f"reward function {self.name!r} took too long: {outcome.message}; {_SLOW}"
            if outcome.failure == "error" and self.on_error == "raise":
                raise RuntimeError(text)
            self._warn(outcome.failure, text)
            results.append(Failure(outcome.failure))
        return results

    def _listed(self, values: Any, rows: int) -> list[Any]:
        """What was returned as a list with an entry for each completion."""
        if values is None:
            return [None] * rows
        if isinstance(values, Tensor):
            values = values.detach().cpu().tolist()
        if not isinstance(values, list) or len(values) != rows:
            got = f"{len(values)} values" if isinstance(values, list) else f"{type(values).__name__} {values!r}"
            raise ValueError(f"reward function {self.name!r} returned {got}; expected {rows}, one for each completion")
        return values

    def _raised(self, error: BaseException) -> str:
        return f"reward function {self.name!r} raised {type(error).__name__}: {error}"

    def _warn(self, kind: str, text: str) -> None:
        """Once for each kind of failure, on the rank where it happened: another may never see it."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"{text}. Such completions have no score from it and are counted in "
                f"rewards/{self.name}/{kind}_frac; this is said once",
                stacklevel=2,
            )

    def _make_pool(self) -> WorkerPool | None:
        if self.time_limit is None:
            return None
        try:
            return WorkerPool("functions", function=self.function, time_limit=self.time_limit, idle_s=_IDLE_S)
        except ValueError as error:
            raise ValueError(
                f"rewards: {self.name!r} with a time limit runs in a process of its own; {error}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pool = self._make_pool()


def _plain(values: Any) -> Any:
    """An iterable of values as a list, anything else as it is."""
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Tensor, Failure)):
        return list(values)
    return values


def _value(name: str, index: int, value: Any) -> float:
    """One value as a float; NaN for None."""
    if isinstance(value, Failure):
        if value.kind not in FAILURES:
            raise ValueError(f"reward function {name!r} returned {value!r} at {index}; valid kinds: error, timeout")
        value = value.score
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
