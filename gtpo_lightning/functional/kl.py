"""KL to a reference policy, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import check_shape, result_dtype

__all__ = ["kl_k3"]


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimator k3 = exp(d) − d − 1 with d = ref − logp: unbiased for KL(π‖π_ref), never negative.

    It works element by element and knows no mask: fill the padding of both arguments with a number before, not the
    result after, or a NaN there comes back through the gradient.

    Args:
        logprobs: log π(o_t), any shape, of tokens drawn from π.
        ref_logprobs: log π_ref(o_t), same shape.

    Returns:
        Same shape; fp64 if one argument is fp64, else fp32.

    Raises:
        ValueError: The shapes differ.

    Source: J. Schulman, "Approximating KL divergence", 2020; used by GRPO (arXiv 2402.03300).

    >>> round(kl_k3(torch.tensor([-1.0]), torch.tensor([-2.0])).item(), 6)  # e^-1 + 1 - 1
    0.367879
    """
    check_shape("ref_logprobs", ref_logprobs, tuple(logprobs.shape), "shape of logprobs")
    dtype = result_dtype(logprobs, ref_logprobs)
    difference = ref_logprobs.to(dtype) - logprobs.to(dtype)
    return torch.expm1(difference) - difference
