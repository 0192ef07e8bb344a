"""The containers that flow through a training step: `Problem`, `Prompts`, `Rollout`.

Letters used in every shape of this package: B prompts of a step, G completions of a prompt (a group), N = B·G rows,
P prompt positions, T completion positions, V vocabulary entries, D hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtpo_lightning.functional.groups import row_mean

__all__ = ["Problem", "Prompts", "Rollout"]


@dataclass
class Problem:
    """One problem of a data set: text only, known by its id.

    Args:
        id: Identity of the problem. Two rows with the same text and different ids are two problems.
        question: What is asked, without any template.
        answer: The reference answer.
        meta: Further columns of the data set, handed to reward functions as keyword arguments. `solution` (a worked
            solution) and `target` (a whole completion) are used by supervised fine-tuning.
    """

    id: str
    question: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str, **kwargs: Any) -> Problem:
        """Text needs no device; with this method Lightning hands a batch over as it is instead of copying it."""
        return self


@dataclass(eq=False)
class Prompts:
    """Tokenised prompts, left-padded.

    Args:
        ids: Token ids, (B, P) int64.
        mask: 1 on the prompt's tokens, 0 on the padding before them, (B, P).
        problems: The B problems the prompts ask.
    """

    ids: Tensor
    mask: Tensor
    problems: list[Problem]

    def __len__(self) -> int:
        return len(self.problems)


@dataclass(eq=False)
class Rollout:
    """N sampled completions with everything the loss needs, in prompt order.

    Groups are told by `group_ids`, never by position. The three slots belong to the parts of the method: a callback may
    multiply a weight slot or add to the shift slot; it overwrites nothing, so that the parts commute.

    Args:
        prompts: What was asked. `Prompts` in the module's own rollouts.
        group_ids: The group of each row, (N,) int64. In the module's own rollouts: the row of `prompts`.
        completion_ids: Token ids, (N, T) int64, up to and with the first end-of-sequence token.
        completion_mask: 1 on tokens that count in the loss, then 0, (N, T).
        truncated: Whether a completion was cut by the length limit, (N,) bool.
        lengths: Generated tokens of each row, (N,) int64, also where the loss leaves a row out. Default: counted from
            the mask.
        texts: Decoded completions, without end-of-sequence and padding tokens.
        rewards: R_i, (N,) fp32; NaN where nothing was scored.
        reward_parts: Raw values of each reward function, (N,) each.
        reward_failures: Of each reward function, the completions it failed on: `error` and `timeout`, (N,) bool each.
        advantages: A_i, (N,), written once by the module.
        logprobs: log π(o_{i,t}), (N, T), nats, with gradient.
        entropies: H_{i,t}, (N, T), nats; detached unless a part asked for the gradient.
        old_logprobs: log π_old of the policy that sampled, (N, T), fixed when the rollout was first scored; None while
            there is one update per rollout.
        ref_logprobs: log π_ref of the reference policy, (N, T), without gradient; None without the KL part.
        sampled_logprobs: Log-probs the engine recorded while sampling, (N, T).
        sampled_entropies: Entropies the engine recorded while sampling, (N, T).
        token_weights: λ_{i,t}, (N, T). Default ones.
        sequence_weights: δ_i, (N,). Default ones.
        advantage_shift: −γ⟨H⟩_i, (N,). Default zeros.
        foreseen: A guess of the loss's gradient in the log-probs, (N, T), while the policy is read; else None.
        temperature: What the logits were divided by in sampling, and are in scoring unless `loss_temperature` is given.
        aggregation: How the loss averages: `sequence` and `constant` over completions, `token` over tokens.
        denominator: What it divides by, so that micro-batches and ranks add up: completions with a non-empty mask (or
            their tokens) over all ranks, divided by the number of ranks. None: counted from the mask.
        max_length: The length limit that `constant` divides by, tokens; set by the module.
    """

    prompts: Any
    group_ids: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    # sampling
    truncated: Tensor = None  # type: ignore[assignment]
    lengths: Tensor = None  # type: ignore[assignment]
    texts: list[str] = field(default_factory=list)
    sampled_logprobs: Tensor | None = None
    sampled_entropies: Tensor | None = None
    # scoring
    rewards: Tensor = None  # type: ignore[assignment]
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    reward_failures: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    advantages: Tensor = None  # type: ignore[assignment]
    # policy
    logprobs: Tensor = None  # type: ignore[assignment]
    entropies: Tensor = None  # type: ignore[assignment]
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    # slots
    token_weights: Tensor = None  # type: ignore[assignment]
    sequence_weights: Tensor = None  # type: ignore[assignment]
    advantage_shift: Tensor = None  # type: ignore[assignment]
    foreseen: Tensor | None = None
    # normalisation
    temperature: float = 1.0
    aggregation: str = "sequence"
    denominator: float | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        rows, length = self.completion_ids.shape
        device = self.completion_ids.device
        if self.completion_mask.shape != (rows, length):
            raise ValueError(
                f"completion_mask: shape {tuple(self.completion_mask.shape)} does not fit completion_ids "
                f"{(rows, length)}; valid: the same (N, T)"
            )
        if self.group_ids.shape != (rows,):
            raise ValueError(f"group_ids: shape {tuple(self.group_ids.shape)}; valid: (N,) = ({rows},)")
        if self.truncated is None:
            self.truncated = torch.zeros(rows, dtype=torch.bool, device=device)
        if self.lengths is None:
            self.lengths = self.completion_mask.long().sum(dim=1)
        if self.token_weights is None:
            self.token_weights = torch.ones(rows, length, dtype=torch.float32, device=device)
        if self.sequence_weights is None:
            self.sequence_weights = torch.ones(rows, dtype=torch.float32, device=device)
        if self.advantage_shift is None:
            self.advantage_shift = torch.zeros(rows, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return self.completion_ids.shape[0]

    def to(self, device: torch.device | str) -> Rollout:
        """Moves every tensor to a device, in place."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.reward_parts = {name: value.to(device) for name, value in self.reward_parts.items()}
        self.reward_failures = {
            name: {kind: rows.to(device) for kind, rows in kinds.items()}
            for name, kinds in self.reward_failures.items()
        }
        if isinstance(self.prompts, Prompts):
            self.prompts = Prompts(self.prompts.ids.to(device), self.prompts.mask.to(device), self.prompts.problems)
        return self

    def reset_slots(self) -> None:
        """Sets the three slots back to their neutral values, for one more update on the same rollout."""
        self.token_weights = torch.ones_like(self.token_weights)
        self.sequence_weights = torch.ones_like(self.sequence_weights)
        self.advantage_shift = torch.zeros_like(self.advantage_shift)

    def scored(self) -> Tensor:
        """Rows that count in the loss: those with a non-empty mask, (N,) bool."""
        return self.completion_mask.bool().any(dim=1)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a value of each completion, averaged as the loss is.

        Args:
            values: (N,), with or without gradient; rows with an empty mask never matter.

        Returns:
            A scalar: Σ_i x_i / N for `sequence` and `constant`, Σ_i |o_i| x_i / tokens for `token`; 0 and attached
            where no row counts.
        """
        if self.aggregation != "token":
            return row_mean(values, self.scored(), denominator=self.denominator)
        lengths = self.completion_mask.sum(dim=1).to(values.dtype)
        denominator = float(lengths.sum()) if self.denominator is None else self.denominator
        return row_mean(values, self.scored(), weights=lengths, denominator=denominator)

    def token_mean(self, values: Tensor) -> Tensor:
        """The mean of a value of each token, averaged as the loss averages its tokens.

        Args:
            values: (N, T), with or without gradient; what stands in the padding never matters.

        Returns:
            A scalar: Σ_i (1/|o_i|) Σ_t x / N for `sequence`, Σ_i Σ_t x / tokens for `token`, Σ_i Σ_t x / (N ·
            max_length) for `constant` (the first form where `max_length` is not set).
        """
        real = self.completion_mask.bool()
        sums = torch.where(real, values, 0.0).sum(dim=1)
        if self.aggregation == "constant" and self.max_length is not None:
            return self.mean(sums / self.max_length)
        return self.mean(sums / real.sum(dim=1).clamp(min=1))

    def weights(self) -> Tensor:
        """δ_i · (A_i + shift_i) · λ_{i,t}, the three slots multiplied, (N, T).

        Raises:
            ValueError: `advantages` is not set.
        """
        if self.advantages is None:
            raise ValueError("advantages: not set; the weights of the loss need them")
        per_sequence = self.sequence_weights * (self.advantages + self.advantage_shift)
        return per_sequence[:, None] * self.token_weights
