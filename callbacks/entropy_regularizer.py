"""−γ⟨H⟩: completions are worth less the more uncertain the policy was while it wrote them."""

from __future__ import annotations

from typing import Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.callbacks._checks import check_counts, check_number, require
from gtpo_lightning.functional import mean_entropy
from gtpo_lightning.functional._inputs import check_choice
from gtpo_lightning.functional.groups import group_centered, sign_flips
from gtpo_lightning.hooks import RLCallback, log_means
from gtpo_lightning.rollout import Rollout

__all__ = ["Baseline", "EntropyRegularizer"]

Baseline = Literal["none", "group"]


class EntropyRegularizer(RLCallback):
    """Adds the entropy regularisation to the advantage shift (Simoni et al., arXiv 2508.03772).

        A_i  →  A_i − γ⟨H⟩_i                          (the paper's form, detached)
        A_i  →  A_i − γ(⟨H⟩_i − mean of the group)    (`baseline: group`)
        loss →  loss + γ · mean of δ_i⟨H⟩_i           (`differentiable: true`)

    In the paper's form a group whose rewards are all equal has no other gradient and is pushed down as a whole, also
    where every answer was right; `baseline: group` takes the common part away. γ is relative to the scale of the
    rewards. Rows without any token in the loss are shifted by 0. Logs `gtpo/sign_flip_frac`: among the completions with
    A ≠ 0, the share whose sign the whole shift changes.

    With `warmup_steps` of n, beyond the paper, γ grows with the optimizer steps s done, γ_s = γ · min(1, s/n), and is
    logged as `gtpo/gamma`. It follows the trainer's `global_step`, which a checkpoint restores.

    Args:
        gamma: γ, at least 0; rewards per nat. Default 0.1.
        baseline: `none` (the paper), or `group`: minus the mean ⟨H⟩ of the group's non-empty completions.
        differentiable: Instead of the shift, add `losses["entropy"]`, with the entropy's own gradient. The module then
            computes the entropies with gradient, which needs more memory. Not together with `baseline: group`: the mean
            of ⟨H⟩ minus its own mean is 0.
        warmup_steps: n, optimizer steps until γ is reached, at least 0. Default 0, γ from the start.

    Raises:
        ValueError: `gamma` is negative or not finite, an unknown `baseline`, a baseline with `differentiable`, or
            `warmup_steps` is no integer of at least 0.

    Example:
        >>> EntropyRegularizer(baseline="group").gamma
        0.1
    """

    def __init__(
        self, gamma: float = 0.1, baseline: Baseline = "none", differentiable: bool = False, warmup_steps: int = 0
    ) -> None:
        self.gamma = check_number("gamma", gamma)
        check_choice("baseline", baseline, get_args(Baseline))
        if differentiable and baseline != "none":
            raise ValueError(f"baseline: {baseline!r} with differentiable=True has no effect; valid: 'none'")
        check_counts(0, warmup_steps=warmup_steps)
        self.baseline: Baseline = baseline
        self.differentiable = differentiable
        self.warmup_steps = warmup_steps
        self._warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the module for entropies with gradient where the term needs them."""
        if self.differentiable:
            pl_module.entropy_grad = True  # type: ignore[assignment]

    def on_before_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Subtracts γ⟨H⟩ from `advantage_shift`, (N,)."""
        gamma = self.gamma_at(trainer.global_step)
        if self.warmup_steps:
            pl_module.log("gtpo/gamma", gamma, batch_size=1)
        self._shift(rollout, gamma)

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """The same shift."""
        self._shift(rollout, self.gamma_at(trainer.global_step))

    def _shift(self, rollout: Rollout, gamma: float) -> None:
        if self.differentiable:
            return
        entropies = mean_entropy(require(rollout, "entropies").detach(), rollout.completion_mask)
        if self.baseline == "group":
            entropies = group_centered(entropies, rollout.group_ids, rollout.scored())
        rollout.advantage_shift -= gamma * entropies

    def on_after_loss(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout, losses: dict[str, Tensor]
    ) -> None:
        """Adds `losses["entropy"]` in the differentiable form, and logs the signs that the whole shift changed."""
        if self.differentiable:
            term = self._term(rollout, self.gamma_at(trainer.global_step))
            losses["entropy"] = losses["entropy"] + term if "entropy" in losses else term
        advantages = require(rollout, "advantages")
        signed = rollout.scored() & (advantages != 0)
        flipped = signed & sign_flips(advantages, rollout.advantage_shift)
        log_means(trainer, pl_module, {"gtpo/sign_flip_frac": (flipped.sum(), signed.sum())})

    def gamma_at(self, step: int) -> float:
        """γ at an optimizer step, rewards per nat: 0 at step 0 of a warm-up, the whole γ from `warmup_steps` on."""
        return self.gamma * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.gamma

    def _term(self, rollout: Rollout, gamma: float) -> Tensor:
        """γ · mean over the non-empty rows of δ_i⟨H⟩_i, a scalar in nats times γ, with gradient."""
        entropies = require(rollout, "entropies")
        if torch.is_grad_enabled() and not entropies.requires_grad and not self._warned:
            self._warned = True
            rank_zero_warn(
                "EntropyRegularizer(differentiable=True): the rollout's entropies have no gradient, so the term has no "
                "effect; the module has to compute them with gradient where its `entropy_grad` is True."
            )
        values = mean_entropy(entropies, rollout.completion_mask)
        return gamma * rollout.mean(rollout.sequence_weights * values)
