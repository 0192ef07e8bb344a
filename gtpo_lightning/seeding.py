"""Where seeds come from when none is given."""

from __future__ import annotations

import os

__all__ = ["seed_or_global"]


def seed_or_global(seed: int | None) -> int:
    """The seed given, else the one that `seed_everything` set for the process, else 0.

    Raises:
        ValueError: A negative seed, or one that is no integer.
    """
    if seed is None:
        return int(os.environ.get("PL_GLOBAL_SEED", 0))
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed: {seed!r}; valid: an integer >= 0, or null for that of seed_everything")
    return seed
