"""The head of a causal language model: hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Head"]


@dataclass
class Head:
    """The map from hidden states to logits: softcap · tanh(scale · (hidden · weightᵀ + bias) / softcap).

    Args:
        weight: (V, D).
        bias: (V,) or None.
        scale: Factor of the logits (Cohere, Granite); 1 elsewhere.
        softcap: Bound of the logits (Gemma 2); None elsewhere.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Logits of a few positions, accumulated in fp32 or better: (..., D) to (..., V).

        Args:
            hidden: (..., D).
            scratch: Numbers of the logits' dtype that are written over, where they do for (n, V) logits of hidden
                states (n, D) without a bias: a loop that gives them asks for no new memory.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        if scratch is not None and self.bias is None and self.scale == 1.0 and self.softcap is None:
            out = scratch[: len(hidden) * len(self.weight)].view(len(hidden), -1)
            with torch.autocast(hidden.device.type, enabled=False):
                return torch.mm(hidden.to(dtype), self.weight.to(dtype).t(), out=out)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def upcast(self) -> Head:
        """The same head with its weights in fp32 or better, so that a loop converts them once."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias, self.scale, self.softcap)
