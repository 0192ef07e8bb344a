"""What `GTPOModule` refuses of its arguments, before a model is read."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["check_cap", "check_choices", "check_delta", "check_loss_temperature", "check_resampling"]


def check_choices(
    group_size: int,
    advantage_scale: str,
    aggregation: str,
    updates_per_rollout: int,
    epsilon: float | tuple[float, float] | None,
) -> None:
    """Refuses counts and words outside their range.

    Raises:
        ValueError: With the valid choices.
    """
    if not isinstance(group_size, int) or group_size < 2:
        raise ValueError(
            f"group_size: {group_size!r} is not valid; valid: an integer of at least 2, since the advantage compares "
            "the completions of a group"
        )
    if not isinstance(updates_per_rollout, int) or updates_per_rollout < 1:
        raise ValueError(f"updates_per_rollout: {updates_per_rollout!r} is not valid; valid: an integer of at least 1")
    for name, value, valid in (
        ("advantage_scale", advantage_scale, ("none", "group", "batch")),
        ("aggregation", aggregation, ("sequence", "token", "constant")),
    ):
        if value not in valid:
            raise ValueError(f"{name}: {value!r} is not valid; valid: {', '.join(valid)}")
    bounds = (0.0, 0.0) if epsilon is None else (epsilon,) * 2 if isinstance(epsilon, (int, float)) else tuple(epsilon)
    if len(bounds) != 2 or not all(bound >= 0 for bound in bounds):
        raise ValueError(f"epsilon: {epsilon!r} is not valid; valid: null, a number of at least 0, or [low, high]")


def check_delta(delta: float | None, epsilon: float | tuple[float, float] | None) -> None:
    """Refuses a bound of the ratio that would cut what clipping lets through.

    Raises:
        ValueError: With the valid choices.
    """
    high = 0.0 if epsilon is None else epsilon if isinstance(epsilon, (int, float)) else epsilon[1]
    number = isinstance(delta, (int, float)) and not isinstance(delta, bool)
    if delta is not None and not (number and delta > 1 + high):
        raise ValueError(
            f"delta: {delta!r} is not valid; valid: null, or a number above 1 + high epsilon = {1 + high:g}"
        )


def check_resampling(tries: int) -> None:
    """Refuses a number of further tries that is none.

    Raises:
        ValueError: With the valid choices.
    """
    if not isinstance(tries, int) or isinstance(tries, bool) or tries < 0:
        raise ValueError(f"resample_groups: {tries!r} is not valid; valid: an integer of at least 0 (further tries)")


def check_loss_temperature(value: float | None, temperature: float) -> None:
    """Refuses a temperature that is none, and warns of one that is not that of sampling.

    Raises:
        ValueError: With the valid choices.
    """
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"loss_temperature: {value!r} is not valid; valid: null, or a finite number above 0")
    if value != temperature:
        rank_zero_warn(
            f"loss_temperature: {value:g} is not the temperature of sampling, {temperature:g}, so log-probs are not "
            "those of the distribution that tokens are drawn from and training is off-policy"
        )


def check_cap(cap: float | None) -> None:
    """Refuses a bound of the importance ratio that is none.

    Raises:
        ValueError: With the valid choices.
    """
    if cap is not None and (not isinstance(cap, (int, float)) or isinstance(cap, bool) or not cap > 0):
        raise ValueError(f"importance_sampling_cap: {cap!r} is not valid; valid: null, or a number above 0")
