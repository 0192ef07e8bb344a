"""What a training step logs, under the names TRL gives the same quantities, and what it warns about once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.functional import clip_counts
from gtpo_lightning.hooks import log_max, log_means, reduce_sums, window_complete
from gtpo_lightning.rewards.outcomes import FAILURES
from gtpo_lightning.rollout import Rollout
from gtpo_lightning.strategies import gradient_norm

if TYPE_CHECKING:
    from gtpo_lightning.module import GTPOModule

__all__ = ["Monitor"]

_PATIENCE = 20  # steps over which a share that may pass by itself is averaged before it is worth a warning

_EQUAL = (
    "every group of this step has equal rewards, so no completion has an advantage and only the other terms of the "
    "loss act; if this goes on, sample more completions (group_size), raise the temperature or take "
    "problems of another difficulty"
)
_UNSCORED = (
    "no completion of this step was scored: every reward function with a weight returned None or NaN for all of them, "
    "so nothing can be learned; rewards/{function}/none_frac shows which"
)
_MOSTLY_EQUAL = (
    "most groups (60 % and more over the last 20 steps) had equal rewards and gave no signal; a larger "
    "group_size or problems of another difficulty give more"
)
_CLIPPED = (
    "nearly all completions were cut by max_completion_length in each of the last 20 steps; an answer may not fit, "
    "raise max_completion_length"
)


class Monitor:
    """Logs a step's statistics, exact over all ranks, and warns once about steps that cannot teach anything."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.equal_steps = 0
        """Steps whose groups all had equal rewards."""
        self._recent: dict[str, list[float]] = {"equal": [], "clipped": []}
        self._warned: list[str] = []
        self._update_started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the time inside to what `log_rollout` logs as `time/{name}`."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def start_update(self) -> None:
        """Marks where the update begins: the rollout is there."""
        self._update_started = time.perf_counter()

    def log_rollout(self, module: GTPOModule, rollout: Rollout, tries: list[int]) -> None:
        """Logs rewards, groups and lengths, as they were sampled: what the loss leaves out counts here.

        Args:
            module: Logs.
            rollout: With rewards and advantages.
            tries: How often each group was sampled again.
        """
        stds, equal = _group_statistics(rollout)
        scored = ~rollout.rewards.isnan()
        lengths = rollout.lengths
        values: dict[str, tuple[Any, Any]] = {
            "train/reward": (rollout.rewards[scored].sum(), scored.sum()),
            "train/reward_std": (stds.sum(), len(stds)),
            "train/frac_reward_zero_std": (equal.sum(), len(equal)),
            "train/completions/mean_length": (lengths.sum(), len(lengths)),
            "train/completions/clipped_ratio": (rollout.truncated.sum(), len(lengths)),
        }
        if module.resample_groups:
            values["gtpo/resampled_frac"] = (sum(count > 0 for count in tries), len(tries))
            values["gtpo/resample_tries"] = (sum(tries), len(tries))
        for name, part in rollout.reward_parts.items():
            known = ~part.isnan()
            values[f"train/rewards/{name}/mean"] = (part[known].sum(), known.sum())
            values[f"rewards/{name}/none_frac"] = (len(part) - known.sum(), len(part))
            failed = rollout.reward_failures.get(name, {})
            for kind in FAILURES:
                count = failed[kind].sum() if kind in failed else 0
                values[f"rewards/{name}/{kind}_frac"] = (count, len(part))
        prompt_tokens = rollout.prompts.mask.sum(dim=1)[rollout.group_ids].sum()
        ((tokens, _),) = reduce_sums(module.trainer, module, [(prompt_tokens + lengths.sum(), 0)])
        self.num_tokens += int(tokens)
        means = log_means(module.trainer, module, values)
        self._log_extremes(module, lengths)
        module.log("train/num_tokens", float(self.num_tokens), batch_size=1)
        module.log_dict({f"time/{name}": seconds for name, seconds in self._seconds.items()}, batch_size=1)
        self._seconds.clear()
        bar = {"reward": means["train/reward"], "length": means["train/completions/mean_length"]}
        module.log_dict(bar, prog_bar=True, logger=False, batch_size=1)
        if window_complete(module.trainer, module, ahead=1):
            self._watch(
                means["train/frac_reward_zero_std"],
                means["train/completions/clipped_ratio"],
                not math.isnan(means["train/reward"]),
            )

    def _log_extremes(self, module: GTPOModule, lengths: Tensor) -> None:
        shortest = float(lengths.min()) if len(lengths) else torch.inf
        longest = float(lengths.max()) if len(lengths) else -torch.inf
        log_max(module.trainer, module, "train/completions/max_length", longest)
        log_max(module.trainer, module, "train/completions/min_length", shortest, smallest=True)

    def log_update(self, module: GTPOModule, rollout: Rollout, losses: dict[str, Tensor]) -> None:
        """Logs the loss terms, the entropy over completion tokens, and clip ratios where a ratio can differ from 1."""
        mask = rollout.completion_mask.bool()
        entropies = rollout.entropies.detach()
        values: dict[str, tuple[Any, Any]] = {"train/entropy": (entropies[mask].sum(), mask.sum())}
        if rollout.old_logprobs is not None and not (module.epsilon is None and module.delta is None):
            values |= self._clip_ratios(module, rollout, rollout.old_logprobs)
        for name, loss in losses.items():
            values[f"train/loss/{name}"] = (loss.detach(), 1)
        values["train/loss"] = (sum(float(loss.detach()) for loss in losses.values()), 1)
        means = log_means(module.trainer, module, values)
        module.log("entropy", means["train/entropy"], prog_bar=True, logger=False, batch_size=1)

    def _clip_ratios(self, module: GTPOModule, rollout: Rollout, old: Tensor) -> dict[str, tuple[Any, Any]]:
        """Shares of tokens that the clipping takes out; the least and the largest are those of a rank's micro-batch."""
        arguments = (rollout.weights(), rollout.completion_mask, module.epsilon, module.delta)
        counts = clip_counts(rollout.logprobs, old, *arguments)
        tokens = counts["tokens"]
        low, high = (float(counts[name] / tokens) if tokens else math.nan for name in ("low", "high"))
        log_max(module.trainer, module, "train/clip_ratio/low_min", low if tokens else math.inf, smallest=True)
        log_max(module.trainer, module, "train/clip_ratio/high_max", high if tokens else -math.inf)
        values = {"low_mean": counts["low"], "high_mean": counts["high"], "region_mean": counts["low"] + counts["high"]}
        if "delta" in counts:
            values["delta_mean"] = counts["delta"]
        return {f"train/clip_ratio/{name}": (count, tokens) for name, count in values.items()}

    def log_update_time(self, module: GTPOModule) -> None:
        """Logs the time since the rollout was there: scoring, loss, backward and, where it stepped, the optimizer."""
        module.log("time/update", time.perf_counter() - self._update_started, batch_size=1)

    def log_gradient(self, module: GTPOModule) -> None:
        """Logs the norm of the whole gradient before clipping."""
        norm = gradient_norm(module)
        if norm is not None:
            module.log("train/grad_norm", norm, batch_size=1)
        rates = [group["lr"] for optimizer in module.trainer.optimizers for group in optimizer.param_groups]
        module.log("train/learning_rate", float(rates[0]), batch_size=1)

    def _watch(self, equal: float, clipped: float, scored: bool) -> None:
        if equal == 1.0:
            self.equal_steps += 1
            self._warn_once(_EQUAL if scored else _UNSCORED)
        for name, share, high, text in (("equal", equal, 0.6, _MOSTLY_EQUAL), ("clipped", clipped, 0.9, _CLIPPED)):
            self._recent[name] = [*self._recent[name], share][-_PATIENCE:]
            if len(self._recent[name]) == _PATIENCE and sum(self._recent[name]) >= high * _PATIENCE:
                self._warn_once(text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.append(text)
            rank_zero_warn(text)

    def state_dict(self) -> dict[str, Any]:
        """The running counts."""
        return {
            "num_tokens": self.num_tokens,
            "equal_steps": self.equal_steps,
            "recent": {name: list(shares) for name, shares in self._recent.items()},
            "warned": list(self._warned),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.num_tokens = state["num_tokens"]
        self.equal_steps = state["equal_steps"]
        self._recent = {name: list(shares) for name, shares in state["recent"].items()}
        self._warned = list(state["warned"])


def _group_statistics(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Std of the rewards of each group with a scored completion, and whether each group is without an advantage."""
    rewards, groups = rollout.rewards.double(), rollout.group_ids
    size = int(groups.max()) + 1 if len(groups) else 0
    known = ~rewards.isnan()
    zeros = torch.zeros(size, dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, groups, known.double())
    mean = zeros.index_add(0, groups, rewards.nan_to_num()) / count.clamp(min=1)
    square = torch.where(known, rewards - mean[groups], 0.0) ** 2
    std = (zeros.index_add(0, groups, square) / (count - 1).clamp(min=1)).sqrt()
    signal = zeros.index_add(0, groups, rollout.advantages.ne(0).double()) > 0
    asked = zeros.index_add(0, groups, torch.ones_like(rewards)) > 0
    return std[count > 0], ~signal[asked]
