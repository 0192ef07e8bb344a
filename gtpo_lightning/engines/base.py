"""What an engine returns, and what it has to do: sample completions of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        entropies: Entropies of the distributions they were drawn from, (N, T), nats, 0 on padding.
    """

    ids: Tensor
    lengths: Tensor
    truncated: Tensor
    logprobs: Tensor
    entropies: Tensor

    @property
    def mask(self) -> Tensor:
        """True on real tokens, from the lengths and never from token values, (N, T)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


OnFinished = Callable[[Sequence[int], Completions], None]
"""Called with the numbers of rows that have just ended and the completions so far."""


class Engine(Protocol):
    """Samples completions. The local engine decodes with the policy itself; others may sit on other machines."""

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
        ...
