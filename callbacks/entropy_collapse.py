"""Watch: a run that drifts away from its best is warned about, stopped, or set back to its last good state."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.callbacks._checks import check_counts, check_number, check_share
from gtpo_lightning.callbacks._collapse_settings import check_signals, make_trends
from gtpo_lightning.callbacks._collapse_signals import measure
from gtpo_lightning.callbacks._collapse_text import describe
from gtpo_lightning.callbacks._good_state import GoodState, scale_learning_rate
from gtpo_lightning.functional._inputs import check_choice
from gtpo_lightning.functional.collapse import CollapseScore, largest_score
from gtpo_lightning.hooks import RLCallback, reduce_sums, window_complete
from gtpo_lightning.rollout import Rollout

__all__ = ["Action", "EntropyCollapse"]

Action = Literal["warn", "stop", "rollback"]

# Not less: the KL of a healthy run grows, too, and would soon leave no step to copy.
_HEALTHY = 0.8


class EntropyCollapse(RLCallback):
    """Watches a run for collapse, and warns, stops it or sets it back.

    Of each optimizer step, over all ranks and accumulated micro-batches, it takes the signals named, and of each the
    drift from its own running best (`functional.collapse.SignalTrend`): a score in [0, 1], 0.5 where the drift is the
    signal's tolerance. The score of the run is the largest one. A collapse is `patience` steps in a row at `threshold`
    or above.

    `rollback` keeps two copies of the trainable weights and the optimizer's state in the host memory of each rank (its
    own shards): with Adam in fp32 24 bytes a trainable parameter. A copy is taken every `keep_every` healthy steps
    (score below 0.8 times the threshold), and used once the next one is taken, so that it is from before the signals
    moved; a run starts, and is resumed, with a copy of what it starts from. Going back restores weights and optimizer
    state and multiplies the learning rate, also that of a schedule, by `learning_rate_factor`. Data, global step and
    schedule go on: what was learned after the copy is lost. All trends start afresh, so nothing fires before their
    windows are half full again. After `max_rollbacks`, or without a copy, it stops the run. With several updates a
    rollout it waits until the kept rollouts, which the collapsed policy sampled, are used up.

    It only reads rollouts. Logs `gtpo/collapse_score`, `gtpo/collapse/{signal}`, `gtpo/format_frac` (share of sampled
    completions in the full format) and, if it rolls back, `gtpo/collapse_rollbacks`.

    Args:
        action: `warn` once a collapse, `stop` the run, or `rollback`. Default `warn`.
        window: Optimizer steps of the medians, at least 2. Default 8.
        threshold: Score, above 0 and below 1. Default 0.5, a drift of the tolerance; 0.67 is twice, 0.33 half of it.
        patience: Steps in a row, at least 1. Default 3.
        signals: Names of `functional.collapse.SIGNALS`. Null takes all; one that a run does not have scores 0.
        tolerances: Other tolerances, `{signal: drift}`, in the unit of `SIGNALS`.
        noise: Standard errors of the window's median that a drift has to reach, whatever the tolerance. Default 4.
        learning_rate_factor: Above 0, at most 1. Default 0.5.
        max_rollbacks: Rollbacks of a run, at least 1. Default 3.
        keep_every: Optimizer steps between two copies, at least `window`. Default 20.

    Raises:
        ValueError: An argument outside its range, or an unknown action or signal.

    Example:
        >>> EntropyCollapse("stop", signals=["entropy", "format"]).patience
        3
    """

    def __init__(
        self,
        action: Action = "warn",
        window: int = 8,
        threshold: float = 0.5,
        patience: int = 3,
        signals: list[str] | None = None,
        tolerances: dict[str, float] | None = None,
        noise: float = 4.0,
        learning_rate_factor: float = 0.5,
        max_rollbacks: int = 3,
        keep_every: int = 20,
    ) -> None:
        check_choice("action", action, get_args(Action))
        check_counts(2, window=window)
        check_counts(1, patience=patience, max_rollbacks=max_rollbacks)
        # A copy of a collapsed state must not count as proved: within a window its score would show.
        check_counts(window if action == "rollback" else 1, keep_every=keep_every)
        self.action: Action = action
        self.threshold = check_share("threshold", threshold, below_one=True)
        self.patience, self.window, self.keep_every = patience, window, keep_every
        self.learning_rate_factor = check_share("learning_rate_factor", learning_rate_factor)
        self.max_rollbacks = max_rollbacks
        self.signals = check_signals(signals)
        self.score = CollapseScore(0.0, None, {})
        """Of the last step."""
        self.rollbacks = 0
        self._trends = make_trends(self.signals, tolerances or {}, window, check_number("noise", noise))
        self._sums: dict[str, tuple[float, float]] = {}
        self._micro_batches = 0
        self._first: dict[str, int] = {}  # step at which each signal passed the threshold, in the order they did
        self._streak = 0
        self._told = False
        self._due = False
        self._kept: list[GoodState] = []  # the one to go back to, and a newer one that has to prove itself

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses a strategy whose state it cannot copy.

        Raises:
            ValueError: `rollback` under DeepSpeed, which keeps weights and moments in a form of its own.
        """
        if self.action == "rollback" and "DeepSpeed" in type(trainer.strategy).__name__:
            raise ValueError("action: 'rollback' under DeepSpeed, whose state it cannot copy; valid: 'warn', 'stop'")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets a window that an earlier fit broke off, and copies what this fit starts from."""
        self._sums, self._micro_batches, self._due = {}, 0, False
        self._kept = []
        self._keep(trainer, pl_module)

    def foresee(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Nothing: this callback leaves the loss alone."""

    def on_after_loss(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout, losses: dict[str, Tensor]
    ) -> None:
        """Adds a micro-batch, and judges the optimizer step with its last one."""
        for name, (total, count) in measure(rollout).items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + count)
        self._micro_batches += 1
        if window_complete(trainer, pl_module):
            self._judge(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Judges a step that is shorter than its window, at the end of an epoch, and copies a healthy state.

        Here the weights are still those that the step's rollouts were sampled with.
        """
        if self._micro_batches:
            self._judge(trainer, pl_module)
        if not self._kept or trainer.global_step - self._kept[-1].step >= self.keep_every:
            self._keep(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Acts, after the optimizer and the schedule have stepped: all ranks or none."""
        if self.action == "warn" or self._micro_batches:
            return
        if not trainer.strategy.reduce_boolean_decision(self._due, all=False):
            return
        if self.action == "stop" or not self._kept or self.rollbacks >= self.max_rollbacks:
            self._stop(trainer)
        elif not _rollouts_in_use(pl_module):
            self._roll_back(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Trends, counts and rollbacks done as plain numbers; copies of weights are not kept."""
        return {
            "trends": {name: trend.state_dict() for name, trend in self._trends.items()},
            "first": dict(self._first),
            "streak": self._streak,
            "told": self._told,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, of the signals this run has."""
        for name, state in state_dict.get("trends", {}).items():
            if name in self._trends:
                self._trends[name].load_state_dict(state)
        self._first = dict(state_dict.get("first", {}))
        self._streak = state_dict.get("streak", 0)
        self._told = state_dict.get("told", False)
        self.rollbacks = state_dict.get("rollbacks", 0)
        self.score = largest_score(self._trends, self.signals)

    def _judge(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Scores the optimizer step from the sums of all ranks, the same on each."""
        sums = dict(zip(self._sums, reduce_sums(trainer, pl_module, list(self._sums.values())), strict=True))
        self._sums, self._micro_batches = {}, 0
        for name, trend in self._trends.items():
            total, count = sums[name]
            trend.update(total / count if count else None)
        self.score = largest_score(self._trends, self.signals)
        measured = {name: score for name, score in self.score.scores.items() if sums[name][1]}
        if measured:  # a step without any completion tells nothing
            self._count(trainer.global_step, measured)
        self._log(pl_module, measured)
        total, count = sums.get("format", (0.0, 0.0))
        if count:
            pl_module.log("gtpo/format_frac", total / count, batch_size=1)

    def _log(self, pl_module: pl.LightningModule, measured: dict[str, float]) -> None:
        pl_module.log("gtpo/collapse_score", self.score.score, batch_size=1)
        for name, score in measured.items():
            pl_module.log(f"gtpo/collapse/{name}", score, batch_size=1)
        if self.action == "rollback":
            pl_module.log("gtpo/collapse_rollbacks", float(self.rollbacks), batch_size=1)

    def _count(self, step: int, measured: dict[str, float]) -> None:
        """Counts the steps in a row, and tells once of each collapse."""
        for name, score in measured.items():
            if score >= self.threshold:
                self._first.setdefault(name, step)
            elif score < self.threshold / 2:
                self._first.pop(name, None)
        self._streak = self._streak + 1 if max(measured.values()) >= self.threshold else 0
        self._due = self._streak >= self.patience
        if self._due and not self._told:
            self._told = True
            rank_zero_warn(describe(step, self.score, self._first, self._trends))
        elif not self._first:
            self._told = False

    def _keep(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copies the state if it is healthy; the copy before it has proved itself by that."""
        lengths = {len(trend.values) for trend in self._trends.values()} - {0}
        judged = not self._kept or lengths == {self.window}  # after a rollback nothing is judged for a while
        if self.action == "rollback" and judged and self.score.score < _HEALTHY * self.threshold:
            self._kept = [*self._kept[-1:], GoodState(pl_module, trainer.optimizers, trainer.global_step)]

    def _stop(self, trainer: pl.Trainer) -> None:
        self._due = False
        trainer.should_stop = True
        rank_zero_warn(f"EntropyCollapse: the run stops at optimizer step {trainer.global_step}.")

    def _roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        good, self._kept = self._kept[0], self._kept[:1]
        good.restore(pl_module, trainer.optimizers)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        rate = scale_learning_rate(trainer.optimizers, schedulers, self.learning_rate_factor)
        self.rollbacks += 1
        for trend in self._trends.values():
            trend.clear()
        self._first, self._streak, self._told, self._due = {}, 0, False, False
        self.score = largest_score(self._trends, self.signals)
        rank_zero_warn(
            f"EntropyCollapse: the policy is back at its state before optimizer step {good.step} (rollback "
            f"{self.rollbacks} of at most {self.max_rollbacks}); the learning rate is now {rate:.3g}."
        )


def _rollouts_in_use(pl_module: pl.LightningModule) -> bool:
    store = getattr(pl_module, "store", None)
    return bool(store.state_dict()) if store is not None else False
