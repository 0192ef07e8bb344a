"""β·KL: the policy is held near the one it started from."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor

from gtpo_lightning.callbacks._checks import check_number, require
from gtpo_lightning.checkpoint_folders import check_checkpoint
from gtpo_lightning.functional import kl_k3
from gtpo_lightning.hooks import RLCallback, log_means
from gtpo_lightning.rollout import Rollout

__all__ = ["KLPenalty"]


class KLPenalty(RLCallback):
    """Adds β times the KL to the start policy, by the estimator k3, as a loss term of its own (GRPO).

        losses["kl"] = β · mean of exp(d_{i,t}) − d_{i,t} − 1,   d = log π_ref(o_{i,t}) − log π(o_{i,t})

    The mean is taken over tokens as the policy loss takes its own (`aggregation`, micro-batches, ranks), at the
    temperature of the rollout; token weights and filters do not touch it. From the second update of a rollout on, its
    tokens are still those of the policy that sampled.

    The reference π_ref is the policy at the start of training: a frozen copy beside it, or where adapters are trained
    the same policy with them switched off or with a copy of those it started from. So the KL of the first step is 0.
    Its log-probs are computed once a rollout, without gradient, in the chunks of `micro_batch_size`. A checkpoint does
    not hold it; a resumed run makes it again from the model or from the `weights` the run started with, and refuses to
    go on where those are gone or changed. Logs `train/kl`, the mean over completion tokens, nats.

    Source: Shao et al., arXiv 2402.03300.

    Args:
        beta: β, at least 0; rewards per nat (of scaled rewards where `advantage_scale` scales them). Default 0: the KL
            is measured and has no gradient.
        log: Whether `train/kl` is logged. With β 0 and without it the part does nothing and makes no copy.
        reference: A checkpoint of this package whose policy is the reference, in place of the start policy. Default:
            the start policy.

    Raises:
        ValueError: `beta` is negative or not finite, or `reference` is no file.

    Example:
        >>> KLPenalty(beta=0.04).beta
        0.04
    """

    def __init__(self, beta: float = 0.0, log: bool = True, reference: str | None = None) -> None:
        self.beta = check_number("beta", beta)
        self.logged = log  # not `log`: Lightning sets an attribute of that name on every callback
        if reference is not None:
            check_checkpoint(reference, "reference")
        self.reference = reference

    @property
    def active(self) -> bool:
        """Whether the KL is needed at all."""
        return self.beta > 0 or self.logged

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the module for a reference before it makes its policy."""
        if self.active and stage == "fit":
            pl_module.wants_reference = True  # type: ignore[assignment]
            pl_module.reference_weights = self.reference  # type: ignore[assignment]

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> bool:
        """Nothing where KL is only measured; its gradient depends on the reference's log-probs, which are not known."""
        return self.beta == 0

    def on_before_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Has `ref_logprobs`, (N, T), computed at the first update of a rollout."""
        score = getattr(pl_module, "reference_logprobs", None)
        if self.active and rollout.ref_logprobs is None and callable(score):
            rollout.ref_logprobs = score(rollout)

    def on_after_loss(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout, losses: dict[str, Tensor]
    ) -> None:
        """Adds `losses["kl"]` where β is above 0, and logs the KL."""
        if not self.active:
            return
        logprobs, ref = require(rollout, "logprobs"), require(rollout, "ref_logprobs").detach()
        padding = ~rollout.completion_mask.bool()
        # Filled before, not after: behind exp, what stands in the padding would come back through the gradient.
        logprobs = (logprobs if self.beta > 0 else logprobs.detach()).masked_fill(padding, 0.0)
        kl = kl_k3(logprobs, ref.masked_fill(padding, 0.0))
        if self.beta > 0:
            term = self.beta * rollout.token_mean(kl)
            losses["kl"] = losses["kl"] + term if "kl" in losses else term
        if self.logged:
            log_means(trainer, pl_module, {"train/kl": (kl.detach().double().sum(), (~padding).sum())})
