"""Bounded dynamic sampling: groups without an advantage are sampled again, a limited number of times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gtpo_lightning.functional import group_advantages
from gtpo_lightning.rollout import Problem, Rollout

__all__ = ["resample"]

_TOKEN_FIELDS = ("completion_ids", "completion_mask", "sampled_logprobs", "sampled_entropies")
_ROW_FIELDS = ("truncated", "lengths", "rewards")


def resample(
    rollout: Rollout,
    sample: Callable[[list[Problem], int], Rollout],
    tries: int,
    most: Callable[[int], int] = int,
) -> tuple[Rollout, list[int]]:
    """Samples groups whose rewards are all equal again, and takes the first try whose rewards differ.

    A group that stays equal keeps its first completions, and one without any scored completion is left alone. No rank
    waits for another: each looks at its own groups only, except where ranks share the weights and have to sample
    together.

    What is trained on is then conditioned on its rewards being different. An easy or hard problem appears with more
    balanced groups than the policy gives it, so advantages and logged rewards are biased towards problems that it
    solves half of the time; problems that are always or never solved cost all tries and stay.

    Args:
        rollout: Sampled and scored, without advantages.
        sample: Samples and scores the groups of some problems once more; the second argument is the number of the try,
            from 1, which the random numbers are keyed by.
        tries: How often a group is sampled again at most.
        most: The largest of all processes' counts where they share the weights (`Policy.most`).

    Returns:
        The rollout, and of each group how often it was sampled again.
    """
    counts = [0] * len(rollout.prompts)
    for attempt in range(1, tries + 1):
        groups = [group for group, equal in enumerate(_without_signal(rollout)) if equal]
        if most(len(groups)) == 0:
            break
        for group in groups:
            counts[group] += 1
        again = sample([rollout.prompts.problems[group] for group in groups], attempt)
        better = [(group, place) for place, group in enumerate(groups) if _has_signal(again, place)]
        if better:
            to = torch.cat([_rows(rollout, group) for group, _ in better])
            source = torch.cat([_rows(again, place) for _, place in better])
            rollout = _replaced(rollout, to, again, source)
    return rollout, counts


def _rows(rollout: Rollout, group: int) -> Tensor:
    return (rollout.group_ids == group).nonzero()[:, 0]


def _has_signal(rollout: Rollout, group: int) -> bool:
    rows = _rows(rollout, group)
    return bool(group_advantages(rollout.rewards[rows], rollout.group_ids[rows]).any())


def _without_signal(rollout: Rollout) -> list[bool]:
    """Of each group, whether it was scored and gives no completion an advantage."""
    scored = [bool((~rollout.rewards[_rows(rollout, group)].isnan()).any()) for group in range(len(rollout.prompts))]
    return [known and not _has_signal(rollout, group) for group, known in enumerate(scored)]


def _replaced(rollout: Rollout, rows: Tensor, other: Rollout, source: Tensor) -> Rollout:
    """The rollout with some rows taken from another one, which may be wider or narrower."""

    def taken(mine: Tensor, theirs: Tensor) -> Tensor:
        mine = mine.clone()
        mine[rows] = theirs[source]
        return mine

    width = max(rollout.completion_ids.shape[1], other.completion_ids.shape[1])
    fields: dict[str, Any] = {name: taken(getattr(rollout, name), getattr(other, name)) for name in _ROW_FIELDS}
    for name in _TOKEN_FIELDS:
        mine, theirs = getattr(rollout, name), getattr(other, name)
        if mine is not None:
            fields[name] = taken(*(pad(x, (0, width - x.shape[1])) for x in (mine, theirs)))
    parts = {name: taken(part, other.reward_parts[name]) for name, part in rollout.reward_parts.items()}
    failures = {
        name: {kind: taken(failed, other.reward_failures[name][kind]) for kind, failed in kinds.items()}
        for name, kinds in rollout.reward_failures.items()
    }
    texts = list(rollout.texts)
    for row, place in zip(rows.tolist(), source.tolist(), strict=True):
        texts[row] = other.texts[place]
    # The slots are made anew, of the new width.
    slots: dict[str, Any] = dict.fromkeys(("token_weights", "sequence_weights", "advantage_shift"))
    return dataclasses.replace(rollout, **fields, **slots, texts=texts, reward_parts=parts, reward_failures=failures)
