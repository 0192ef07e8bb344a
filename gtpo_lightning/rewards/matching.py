"""Whether the elements of two collections can be paired off."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["has_perfect_matching"]


def has_perfect_matching(edges: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have a column of its own that it may be paired with; by augmenting paths.

    Args:
        edges: For each of n rows, which of the n columns it may be paired with.

    Returns:
        True or False; True for no rows.

    Example:
        >>> has_perfect_matching([[True, True], [True, False]]), has_perfect_matching([[True, False], [True, False]])
        (True, False)
    """
    partner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, possible in enumerate(edges[row]):
            if possible and column not in tried:
                tried.add(column)
                if column not in partner or place(partner[column], tried):
                    partner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(edges)))
