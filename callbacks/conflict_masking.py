"""λ: tokens shared by good and bad completions of a group are not punished and count double where they were good."""

from __future__ import annotations

from typing import Literal, get_args

import lightning.pytorch as pl
from torch import Tensor

from gtpo_lightning.callbacks._checks import check_counts, check_number, require
from gtpo_lightning.functional import conflict_mask, conflict_weights
from gtpo_lightning.functional._inputs import check_choice
from gtpo_lightning.hooks import RLCallback, log_means
from gtpo_lightning.rollout import Rollout

__all__ = ["ConflictMasking", "Scope"]

Scope = Literal["edges", "prefix", "suffix", "position"]


class ConflictMasking(RLCallback):
    """Multiplies the token weights by λ of the conflict tokens (Simoni et al., arXiv 2508.03772).

    A token is in conflict where it stands at the same position in a completion with A > 0 and in one with A < 0 of the
    group. Pushing it up and down at once only adds noise to what both share, such as the format's tags, so on conflict

        λ_{i,t} = `negative` where A_i < 0,  `positive` where A_i > 0,  1 where A_i = 0.

    Signs are those of A, never of A − γ⟨H⟩, and completions that the entropy filter drops still take part: the weights
    do not depend on the other parts. Logs `gtpo/conflict_frac`, the share of the loss's completion tokens in conflict.

    Args:
        scope: Where conflicts are looked for. `edges`: the contiguous runs from the start (positions counted from the
            start) and from the end (counted from the last real token). `prefix`, `suffix`: one of the two runs.
            `position`: any position counted from the start, no run needed.
        positive: λ on conflict where A > 0, at least 0. Default 2.
        negative: λ on conflict where A < 0, at least 0. Default 0.
        shift: Tokens. Above 0, beyond the paper, tokens up to this many positions apart count as at the same position,
            and a run steps over this many tokens without conflict in all: what completions share is found again behind
            an answer of another length. A large shift also meets frequent tokens by chance. Default 0.

    Raises:
        ValueError: An unknown scope, a λ that is negative or not finite, or a shift that is no integer of at least 0.

    Example:
        >>> ConflictMasking(scope="prefix").positive
        2.0
    """

    def __init__(self, scope: Scope = "edges", positive: float = 2.0, negative: float = 0.0, shift: int = 0) -> None:
        check_choice("scope", scope, get_args(Scope))
        check_counts(0, shift=shift)
        self.scope: Scope = scope
        self.positive = check_number("positive", positive)
        self.negative = check_number("negative", negative)
        self.shift = shift

    def on_before_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Multiplies `token_weights`, (N, T), by λ."""
        conflict = self._mask(rollout)
        tokens = rollout.completion_mask.bool().sum()
        log_means(trainer, pl_module, {"gtpo/conflict_frac": (conflict.sum(), tokens)})

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """The same; λ depends on tokens and rewards only."""
        self._mask(rollout)

    def _mask(self, rollout: Rollout) -> Tensor:
        """Multiplies the weights and returns which tokens are in conflict, (N, T)."""
        advantages = require(rollout, "advantages")
        conflict = conflict_mask(
            rollout.completion_ids,
            rollout.completion_mask,
            advantages,
            rollout.group_ids,
            scope=self.scope,
            shift=self.shift,
        )
        rollout.token_weights *= conflict_weights(conflict, advantages, positive=self.positive, negative=self.negative)
        return conflict
