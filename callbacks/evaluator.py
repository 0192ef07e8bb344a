"""Judges the policy on held-out problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from gtpo_lightning.distributed import gather_objects
from gtpo_lightning.engines import Sampling
from gtpo_lightning.rewards import format_reward, is_correct
from gtpo_lightning.rewards.format import FULL_FORMAT
from gtpo_lightning.rollout import Problem, Rollout

__all__ = ["Evaluator"]


class Evaluator(pl.Callback):
    """Samples answers to held-out problems with its own settings and logs how many are right.

    Logged under `val/{dataset}/` (and `test/{dataset}/`): `avg@{n}`, the mean over problems of the share of right
    answers among n samples; `format`, the share of completions in full format; `length`, their mean length in tokens. A
    problem counts once, whatever a sampler repeats. Correctness is separate from reward.

    Args:
        num_samples: Completions of each problem (n).
        temperature: Temperature of sampling.
        top_k: Sampling cut to the k likeliest tokens; null keeps all.
        top_p: Sampling cut to the likeliest tokens of mass p; 1 keeps all.
        greedy: Takes the likeliest token; then `num_samples` must be 1.
        max_completion_length: Tokens of a completion at most; null takes the module's.
        before_training: Whether the policy is judged once before its first update.
        answer_style: Where the answer stands; see `extract_answer`.

    Raises:
        ValueError: A sampling setting outside its range.
    """

    def __init__(
        self,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        greedy: bool = False,
        max_completion_length: int | None = None,
        before_training: bool = True,
        answer_style: str = "auto",
    ) -> None:
        self.sampling = Sampling(
            num_samples=num_samples,
            max_completion_length=1 if max_completion_length is None else max_completion_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
        )
        self.max_completion_length = max_completion_length
        self.before_training = before_training
        self.answer_style = answer_style
        is_correct("", "", style=answer_style)  # an unknown style is refused here, not after the first epoch
        self.history: list[tuple[int, dict[str, float]]] = []
        """Step and scores of each evaluation so far."""
        self._seen: dict[str, tuple[float, float, float]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the module the sampling settings of evaluation."""
        length = self.max_completion_length or pl_module.max_completion_length
        settings = {name: getattr(self.sampling, name) for name in Sampling.__dataclass_fields__}
        pl_module.eval_sampling = Sampling(  # type: ignore[assignment]
            **{**settings, "max_completion_length": length}
        )

    def state_dict(self) -> dict[str, Any]:
        """Step and scores of each evaluation so far."""
        return {"history": [[step, dict(scores)] for step, scores in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.history = [(int(step), dict(scores)) for step, scores in state_dict["history"]]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judges the policy before its first update; a resumed run was judged already."""
        datamodule = getattr(trainer, "datamodule", None)
        trial = getattr(trainer, "fast_dev_run", False)
        if not self.before_training or trainer.global_step > 0 or datamodule is None or trial:
            return
        self._seen = {}
        limit = trainer.limit_val_batches
        loader = datamodule.val_dataloader()
        batches = int(limit * len(loader)) if isinstance(limit, float) else int(limit)
        with torch.no_grad():
            for index, problems in enumerate(loader):
                if index >= batches:
                    break
                with trainer.strategy.precision_plugin.val_step_context():
                    self._judge(cast(Rollout, pl_module.validation_step(problems, index)))
        scores = self._scores(trainer, "val")
        for logger in trainer.loggers:
            logger.log_metrics(scores, step=0)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets the last evaluation."""
        self._seen = {}

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Judges a rollout, except in the sanity check."""
        if not trainer.sanity_checking:
            self._judge(outputs)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the scores, exact over all ranks."""
        if not trainer.sanity_checking:
            pl_module.log_dict(self._scores(trainer, "val"), batch_size=1)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the scores, exact over all ranks."""
        pl_module.log_dict(self._scores(trainer, "test"), batch_size=1)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the first and the last evaluation side by side."""
        folder = trainer.log_dir  # a broadcast, so every rank asks
        if not trainer.is_global_zero:
            return
        console = Console()
        if self.history:
            console.print(self._table())
        files = sorted(Path(folder).glob("events.out.tfevents.*")) if folder else []
        for path in files[-1:]:
            console.print(f"TensorBoard: {path}", soft_wrap=True)

    def _table(self) -> Table:
        (first, before), (last, after) = self.history[0], self.history[-1]
        table = Table(title="Evaluation on held-out problems")
        table.add_column("score")
        for step in dict.fromkeys([first, last]):
            table.add_column(f"step {step}", justify="right")
        for name in after:
            values = [before.get(name, float("nan")), after[name]] if last != first else [after[name]]
            table.add_row(name, *(f"{value:.3f}" for value in values))
        return table

    def _judge(self, rollout: Rollout) -> None:
        """Adds each problem's mean correctness, format and length."""
        problems: list[Problem] = rollout.prompts.problems
        groups = rollout.group_ids.tolist()
        sums: dict[str, list[float]] = {}
        for group, text, length in zip(groups, rollout.texts, rollout.lengths.tolist(), strict=True):
            problem = problems[group]
            right = is_correct(text, problem.answer, style=self.answer_style)
            row = sums.setdefault(problem.id, [0.0, 0.0, 0.0, 0.0])
            for i, value in enumerate((right, format_reward(text) == FULL_FORMAT, length, 1)):
                row[i] += float(value)
        for key, (right_sum, format_sum, length_sum, count) in sums.items():
            self._seen.setdefault(key, (right_sum / count, format_sum / count, length_sum / count))

    def _scores(self, trainer: pl.Trainer, stage: str) -> dict[str, float]:
        """Means over all problems of all ranks."""
        seen: dict[str, tuple[float, float, float]] = {}
        for part in gather_objects(self._seen):
            seen.update(part)
        if not seen:
            return {}
        dataset = getattr(getattr(trainer, "datamodule", None), "name", "held_out")
        names = (f"avg@{self.sampling.num_samples}", "format", "length")
        columns = zip(*seen.values(), strict=True)
        means = [sum(column) / len(seen) for column in columns]
        scores = {f"{stage}/{dataset}/{name}": mean for name, mean in zip(names, means, strict=True)}
        if stage == "val":
            self.history.append((trainer.global_step, scores))
        return scores
