"""How judging a completion can end: what reward functions and worker processes return beside a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAILURES", "Failure", "Outcome", "Scores"]

FAILURES = ("error", "timeout")


class Failure(NamedTuple):
    """A completion that a reward function could not judge; it is counted beside the scores.

    Args:
        kind: `error` or `timeout`.
        score: The raw value of the completion all the same; None leaves it without a score.

    Example:
        >>> Failure("timeout", score=0.0)
        Failure(kind='timeout', score=0.0)
    """

    kind: Literal["error", "timeout"]
    score: float | None = None


class Scores(NamedTuple):
    """What `RewardFunctions` returns for N completions.

    Args:
        rewards: R, (N,) fp32; NaN where nothing was scored.
        parts: Raw values of each function by name, (N,) fp32 each; NaN where it did not score.
        failures: Of each function by name, which completions it failed on: `error` and `timeout`, (N,) bool each.
    """

    rewards: Tensor
    parts: dict[str, Tensor]
    failures: dict[str, dict[str, Tensor]]


class Outcome(NamedTuple):
    """What became of a task.

    Args:
        value: What it returned; None if it failed.
        failure: None, `timeout` (it was killed at the limit) or `error` (it raised, or its process died).
        message: What happened, in words; empty without a failure.
    """

    value: Any
    failure: Literal["timeout", "error"] | None
    message: str
