"""What an engine with weights of its own needs in the loss: the ratio of the policy to what tokens were drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gtpo_lightning.functional import importance_ratio
from gtpo_lightning.hooks import log_max, log_means
from gtpo_lightning.rollout import Rollout

if TYPE_CHECKING:
    from gtpo_lightning.module import GTPOModule

__all__ = ["correct_sampling"]


def correct_sampling(module: GTPOModule, rollout: Rollout, cap: float | None) -> None:
    """Multiplies the truncated importance ratio into the weights of the tokens, and logs it under TRL's names.

    Logged over all ranks: `sampling/sampling_logp_difference/{mean,max}`, |log π − log μ| of the tokens that count, and
    `sampling/importance_sampling_ratio/{min,mean,max}`, the ratio as it is used (or, without a cap, as it would be).

    Args:
        module: Logs.
        rollout: Scored by the policy that sampled it; its `token_weights` change.
        cap: Upper bound of the ratio; None only logs.
    """
    if rollout.sampled_logprobs is None:
        return
    policy = rollout.logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    ratio = importance_ratio(
        policy, rollout.sampled_logprobs, rollout.completion_mask, cap=torch.inf if cap is None else cap
    )
    if cap is not None:
        rollout.token_weights = rollout.token_weights * ratio
    real = rollout.completion_mask.bool()
    difference = (policy.detach() - rollout.sampled_logprobs)[real].abs().double()
    ratios = ratio[real].double()
    count = len(ratios)
    log_means(
        module.trainer,
        module,
        {
            "sampling/sampling_logp_difference/mean": (difference.sum(), count),
            "sampling/importance_sampling_ratio/mean": (ratios.sum(), count),
        },
    )
    for name, values, smallest in (
        ("sampling/sampling_logp_difference/max", difference, False),
        ("sampling/importance_sampling_ratio/max", ratios, False),
        ("sampling/importance_sampling_ratio/min", ratios, True),
    ):
        nothing = torch.inf if smallest else -torch.inf
        extreme = nothing if not count else float(values.min() if smallest else values.max())
        log_max(module.trainer, module, name, extreme, smallest=smallest)
