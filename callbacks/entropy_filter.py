"""δ: completions of high mean entropy are left out while the policy started from a low one."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.callbacks._checks import check_counts, check_number, check_share, require
from gtpo_lightning.distributed import gather_objects
from gtpo_lightning.functional import entropy_keep_mask, mean_entropy
from gtpo_lightning.functional.groups import lowest_rows
from gtpo_lightning.functional.recent import RecentThreshold
from gtpo_lightning.hooks import RLCallback, log_max, log_means, reduce_sums, window_complete
from gtpo_lightning.rollout import Rollout

__all__ = ["EntropyFilter"]


class EntropyFilter(RLCallback):
    """Multiplies the sequence weights by the entropy filter δ (Simoni et al., arXiv 2508.03772).

        δ_i = 1 if ⟨H⟩_ini > threshold;  else 1 where ⟨H⟩_i <= threshold, 0 above

    ⟨H⟩_i is the mean entropy of a completion's tokens and ⟨H⟩_ini its mean over the completions of the first optimizer
    step, over all ranks, before the first update. With several accumulated micro-batches the estimate grows until the
    update. It is kept in the checkpoint; a resumed run that lacks it measures at its first step and says so.

    A dropped completion has weight 0 and stays in the loss's counts. Once the whole policy is above the threshold every
    completion is dropped, the gradient is exactly 0 and nothing brings it back: this is counted in
    `all_filtered_steps`, warned about once, and `keep_at_least` prevents it.

    With `adaptive` of q, beyond the paper, the threshold is a quantile of what the policy itself wrote, whatever
    ⟨H⟩_ini is: the smallest ⟨H⟩ that at least the share q of all completions of the last `window` optimizer steps, over
    all ranks, does not exceed. The present step does not count, so the threshold is the same for any split into
    micro-batches, and the first step keeps everything. Of the window at most the share 1 − q lies above: about that is
    dropped of a steady policy, less while its entropy falls, more while it climbs. Dropped completions stay in the
    window: else the threshold would only ever sink, and after a sudden climb nothing would be kept again, where so the
    threshold follows once more than the share 1 − q of the window is from after the climb.

    Logs over non-empty completions of all ranks: `gtpo/entropy_filtered_frac`, `gtpo/entropy_init`,
    `gtpo/seq_entropy_mean`, `gtpo/seq_entropy_max`, and `gtpo/entropy_threshold` where it is adaptive.

    Args:
        threshold: Largest mean entropy that is kept, nats. Default ln 2. Not together with `adaptive`.
        initial_entropy: ⟨H⟩_ini, nats, in place of a measured one and of a checkpoint's. Default: measured.
        keep_at_least: Share of a rank's step, 0 to 1, that is never dropped: the floor(share · N) completions of lowest
            mean entropy, equal ones in row order. Default 0.
        adaptive: q, above 0 and at most 1, of the threshold from the run itself. Default: the fixed threshold.
        window: Optimizer steps that an adaptive threshold is taken from, at least 1. Default 16.

    Raises:
        ValueError: An argument is negative or not finite, `keep_at_least` is above 1, `adaptive` or `window` is out of
            range, or a threshold is given with `adaptive`.

    Example:
        >>> round(EntropyFilter().threshold, 4)
        0.6931
    """

    def __init__(
        self,
        threshold: float = math.log(2),
        initial_entropy: float | None = None,
        keep_at_least: float = 0.0,
        adaptive: float | None = None,
        window: int = 16,
    ) -> None:
        self.threshold = check_number("threshold", threshold)
        self.keep_at_least = check_number("keep_at_least", keep_at_least, high=1.0)
        # the value in use: given, loaded or measured; None until then
        self.initial_entropy = None if initial_entropy is None else check_number("initial_entropy", initial_entropy)
        self.adaptive = None if adaptive is None else check_share("adaptive", adaptive)
        if self.adaptive is not None and threshold != math.log(2):
            raise ValueError(f"threshold: {threshold!r} with adaptive={adaptive!r} has no effect; valid: ln 2")
        check_counts(1, window=window)
        self.all_filtered_steps = 0
        self._recent = None if self.adaptive is None else RecentThreshold(self.adaptive, window)
        self._given = initial_entropy is not None
        self._frozen = self._given
        self._first_step: int | None = None
        self._total, self._count = 0.0, 0.0
        self._warned: set[str] = set()

    def on_before_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Multiplies `sequence_weights`, (N,), by δ."""
        valid = rollout.scored()
        entropies = mean_entropy(require(rollout, "entropies").detach(), rollout.completion_mask)
        if self._is_first_step(trainer.global_step):
            self._measure(trainer, pl_module, entropies[valid])
        if self._recent is not None:
            self._recent.update(trainer.global_step, _finite_of_all_ranks(entropies[valid]))
        keep = self._keep(entropies, valid)
        rollout.sequence_weights *= keep
        self._log(trainer, pl_module, entropies[valid], keep[valid])

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """δ by the threshold and the initial entropy as they stand; before the first measurement all are kept."""
        entropies = mean_entropy(require(rollout, "entropies"), rollout.completion_mask)
        rollout.sequence_weights *= self._keep(entropies, rollout.scored())

    def state_dict(self) -> dict[str, Any]:
        """The initial entropy, the number of steps without any kept completion, and the window, as plain numbers."""
        state = {"initial_entropy": self.initial_entropy, "all_filtered_steps": self.all_filtered_steps}
        return state if self._recent is None else {**state, "recent": self._recent.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the initial entropy over, unless the constructor was given one, and the window if there is one."""
        self.all_filtered_steps = state_dict.get("all_filtered_steps", 0)
        if not self._given:
            self.initial_entropy = state_dict.get("initial_entropy")
            self._frozen = self.initial_entropy is not None
        if self._recent is not None and "recent" in state_dict:
            self._recent.load_state_dict(state_dict["recent"])

    def _is_first_step(self, step: int) -> bool:
        """Whether ⟨H⟩_ini is still being measured: until the first update after a measurement."""
        if not self._frozen and step != self._first_step:
            self._frozen = self.initial_entropy is not None
            self._first_step, self._total, self._count = step, 0.0, 0.0
        return not self._frozen

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule, entropies: Tensor) -> None:
        self._total += float(entropies.double().sum())
        self._count += len(entropies)
        ((total, count),) = reduce_sums(trainer, pl_module, [(self._total, self._count)])
        if count == 0 or not math.isfinite(total):
            return  # no completion on any rank: the next step measures
        self.initial_entropy = total / count
        if trainer.global_step > 0:
            self._warn_once(
                "late",
                f"EntropyFilter: the initial entropy ({self.initial_entropy:.4f} nats) was measured at optimizer step "
                f"{trainer.global_step}, not before the first update: neither a checkpoint nor the argument "
                "`initial_entropy` gave it, and this run had no completion to measure it on earlier.",
            )

    def _threshold(self) -> float | None:
        """The threshold in use, nats; None before an adaptive one has a step to be taken from."""
        return self.threshold if self._recent is None else self._recent.value

    def _keep(self, entropies: Tensor, valid: Tensor) -> Tensor:
        threshold = self._threshold()
        initial = self.initial_entropy if self._recent is None else -math.inf  # below any threshold: the filter is on
        if initial is None or threshold is None:
            return torch.ones_like(entropies)
        # as a tensor, so that both entropies meet the threshold in one precision: ln 2 in fp32 is above ln 2
        keep = entropy_keep_mask(entropies, initial_entropy=entropies.new_tensor(initial), threshold=threshold)
        return torch.maximum(keep, lowest_rows(entropies, valid, self.keep_at_least).to(keep.dtype))

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, entropies: Tensor, keep: Tensor) -> None:
        """Logs over the non-empty rows given; the same reductions on every rank, whatever it holds."""
        filtered = "gtpo/entropy_filtered_frac"
        values: dict[str, tuple[Tensor | float, Tensor | float]] = {
            filtered: ((keep == 0).sum(), len(keep)),
            "gtpo/seq_entropy_mean": (entropies.double().sum(), len(entropies)),
        }
        if self.initial_entropy is not None:
            pl_module.log("gtpo/entropy_init", self.initial_entropy, batch_size=1)
        threshold = self._threshold()
        if self._recent is not None and threshold is not None:
            pl_module.log("gtpo/entropy_threshold", threshold, batch_size=1)
        share = log_means(trainer, pl_module, values)[filtered]
        log_max(trainer, pl_module, "gtpo/seq_entropy_max", float(entropies.max()) if len(entropies) else -math.inf)
        if share == 1.0 and window_complete(trainer, pl_module):
            self.all_filtered_steps += 1
            self._warn_once(
                "all filtered",
                f"EntropyFilter: every completion of optimizer step {trainer.global_step} has a mean entropy above "
                f"{threshold:.4f} nats and was filtered, so the gradient is 0; if this goes on, the policy "
                "no longer changes. Try `keep_at_least` above 0, or a smaller `gamma` of the entropy regularizer.",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            rank_zero_warn(message)


def _finite_of_all_ranks(entropies: Tensor) -> list[float]:
    """The finite values of every rank, (n,) on each, in rank order; every rank has to call it, also without any."""
    values = [value for value in entropies.tolist() if math.isfinite(value)]
    return [value for rank in gather_objects(values) for value in rank]
