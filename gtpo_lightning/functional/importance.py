"""Importance ratio of the policy that is trained to what tokens were drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import as_bool, check_shape, result_dtype

__all__ = ["importance_ratio"]


def importance_ratio(
    logprobs: Tensor, sampled_logprobs: Tensor, completion_mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """min(π(o_{i,t}) / μ(o_{i,t}), cap), token by token, detached.

    An engine that samples with weights of its own, in another precision or with other kernels, draws from a
    distribution μ that is not quite the policy π. The ratio puts the difference right; the cap bounds its variance at
    the price of a small bias.

    Args:
        logprobs: log π of the sampled tokens, (N, T), nats.
        sampled_logprobs: log μ of the same tokens, as the engine recorded them, (N, T), nats.
        completion_mask: 1 on tokens, (N, T); elsewhere the ratio is 1, whatever stands there.
        cap: Upper bound, above 0.

    Returns:
        (N, T); fp64 if one argument is fp64, else fp32.

    Raises:
        ValueError: The shapes differ, or the cap is not above 0.

    Source: Ionides, "Truncated Importance Sampling", 2008; for engines that sample: Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", 2025.

    >>> policy, engine = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-1.5, -3.0, 0.0]])
    >>> ratio = importance_ratio(policy, engine, torch.tensor([[1, 1, 0]]))
    >>> [round(x, 3) for x in ratio[0].tolist()]  # e^0.5, the cap, padding
    [1.649, 2.0, 1.0]
    """
    if not cap > 0:
        raise ValueError(f"cap: {cap!r} is not valid; valid: a number above 0")
    shape = tuple(logprobs.shape)
    check_shape("sampled_logprobs", sampled_logprobs, shape, "shape of logprobs")
    check_shape("completion_mask", completion_mask, shape, "shape of logprobs")
    dtype, real = result_dtype(logprobs, sampled_logprobs), as_bool(completion_mask)
    difference = logprobs.detach().to(dtype) - sampled_logprobs.detach().to(dtype)
    return torch.where(real, torch.exp(difference).clamp(max=cap), 1.0)
