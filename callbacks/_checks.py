"""What every part checks: its own arguments, and that the rollout carries what it reads."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gtpo_lightning.rollout import Rollout

__all__ = ["check_counts", "check_number", "check_share", "require"]


def check_number(name: str, value: object, *, high: float = math.inf) -> float:
    """Returns the argument as a float if it is a finite number from 0 to `high`.

    Args:
        name: The argument's name, for the message.
        value: What was given.
        high: The largest valid value.

    Raises:
        ValueError: `value` is no number, not finite, negative or above `high`.

    Example:
        >>> check_number("gamma", 1)
        1.0
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and 0 <= number <= high):
        bound = f" and <= {high:g}" if high < math.inf else ""
        raise ValueError(f"{name}: {value!r}; valid: a finite number >= 0{bound}")
    return number


def check_counts(low: int, **counts: object) -> None:
    """Refuses what is no integer of at least `low`.

    Raises:
        ValueError: One of `counts` is not.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name}: {value!r}; valid: an integer >= {low}")


def check_share(name: str, value: object, *, below_one: bool = False) -> float:
    """Returns the argument as a float if it is above 0 and at most 1, or below it.

    Raises:
        ValueError: It is not.
    """
    number = check_number(name, value, high=1.0)
    if number == 0 or (below_one and number == 1):
        raise ValueError(f"{name}: {value!r}; valid: a number > 0 and {'<' if below_one else '<='} 1")
    return number


def require(rollout: Rollout, name: str) -> Tensor:
    """Returns a tensor field of the rollout that the part cannot do without.

    Args:
        rollout: The rollout.
        name: The field.

    Raises:
        ValueError: The field is not set.
    """
    value = getattr(rollout, name)
    if not isinstance(value, Tensor):
        raise ValueError(f"rollout.{name}: {value!r}; valid: a tensor, set before the hook is called")
    return value
