"""What an engine returns, and what it has to do: sample completions of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_lightning.engines.sampling import Sampling
from gtpo_lightning.rollout import Prompts

__all__ = ["Completions", "Engine", "OnFinished"]


@dataclass
class Completions:
    """Sampled completions, N = B · num_samples rows in prompt order.

    Args:
        ids: Token ids up to and with the first end-of-sequence token, padded behind it, (N, T).
        lengths: Tokens of each row, (N,).
        truncated: Whether the length limit cut a row, (N,) bool.
        logprobs: Log-probs of the sampled tokens at the sampling temperature, (N, T), nats, 0 on padding.
        entropies: Entropies of the distributions they were drawn from, (N, T), nats, 0 on padding; None from an engine
            that does not say.
    """

    ids: Tensor
    lengths: Tensor
    truncated: Tensor
    logprobs: Tensor
    entropies: Tensor | None

    @classmethod
    def empty(
        cls, rows: int, length: int, pad_id: int, device: torch.device, *, with_entropies: bool = True
    ) -> Completions:
        """Room for rows of up to `length` tokens, none of them sampled yet and all counted as cut."""
        return cls(
            ids=torch.full((rows, length), pad_id, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            truncated=torch.ones(rows, dtype=torch.bool, device=device),
            logprobs=torch.zeros(rows, length, dtype=torch.float32, device=device),
            entropies=torch.zeros(rows, length, dtype=torch.float32, device=device) if with_entropies else None,
        )

    def trim(self) -> Completions:
        """Cuts, in place, the positions that no row reached; one stays."""
        longest = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        self.ids, self.logprobs = self.ids[:, :longest], self.logprobs[:, :longest]
        self.entropies = None if self.entropies is None else self.entropies[:, :longest]
        return self

    @property
    def mask(self) -> Tensor:
        """True on real tokens, from the lengths and never from token values, (N, T)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


OnFinished = Callable[[Sequence[int], Completions], None]
"""Called with the numbers of rows that have just ended and the completions so far."""


class Engine:
    """Samples completions. The local engine decodes with the policy itself; others may keep a copy of its weights."""

    exact: bool = False
    """Whether log-probs are those of the policy's own forward; else the loss corrects for the difference."""

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        keys: Sequence[tuple[object, ...]],
        *,
        show_progress: bool = False,
        on_finished: OnFinished | None = None,
    ) -> Completions:
        """Samples `sampling.num_samples` completions of each prompt.

        Args:
            prompts: B tokenised prompts.
            sampling: All settings.
            keys: One key a row, N in all, that its random numbers are drawn by.
            show_progress: Whether a bar appears when sampling takes long.
            on_finished: Told of rows as they end, each once: their numbers and the completions so far.
        """
        raise NotImplementedError(f"{type(self).__name__}.generate")

    def start(self) -> None:
        """Readies the engine, weights included; called on every process before a stage (fit, validation, test)."""

    def rest(self) -> None:
        """Frees what the device needs for training; called after the rollout of a training step."""

    def close(self) -> None:
        """Ends what runs outside the policy; called when a stage is over."""


def check_keys(keys: Sequence[tuple[object, ...]], rows: int) -> None:
    """Refuses another number of keys than rows.

    Raises:
        ValueError: With both numbers.
    """
    if len(keys) != rows:
        raise ValueError(f"keys: {len(keys)} given for {rows} rows; valid: one a row")


def check_length(prompts: Prompts, sampling: Sampling, limit: int | None) -> None:
    """Refuses completions that would not fit the positions of the model.

    Args:
        prompts: What is asked.
        sampling: How long an answer may be.
        limit: Positions; None for no limit.

    Raises:
        ValueError: With what would fit.
    """
    longest = int(prompts.mask.sum(dim=1).max()) if len(prompts.ids) else 0
    if limit and longest + sampling.max_completion_length > limit:
        raise ValueError(
            f"max_completion_length: {sampling.max_completion_length} and a prompt of {longest} tokens exceed the "
            f"model's {limit} positions; valid: at most {max(limit - longest, 0)} here, or drop long prompts with "
            "max_prompt_length"
        )
