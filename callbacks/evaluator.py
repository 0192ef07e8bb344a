"""Judges the policy on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from gtpo_lightning.callbacks._evaluation_report import (
    Score,
    curve,
    merged,
    score_table,
    summarise,
    write_curves,
    write_results,
)
from gtpo_lightning.callbacks._evaluation_store import check_folder, open_store
from gtpo_lightning.distributed import gather_objects
from gtpo_lightning.engines import Sampling
from gtpo_lightning.judging import JudgedProblem, judge, problem_scores, samples_of
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.rewards.extraction import ANSWER_STYLES
from gtpo_lightning.rollout import Problem, Rollout

__all__ = ["Evaluator"]


class Evaluator(pl.Callback):
    """Samples answers to held-out problems with its own settings, and says how many are right.

    Logged under `val/{dataset}/` (and `test/{dataset}/`), each a mean over problems, so that `ModelCheckpoint` and
    `EarlyStopping` can watch it:

    * `pass@{k}`: probability that at least one of k samples is right, unbiased from n
    * `maj@{k}`: probability that the most frequent answer among k samples is right, exact over all subsets
    * `avg@{n}`: share of right samples
    * `format`: share of completions in full format; `length`: mean length, tokens

    A problem counts once, whatever a sampler repeats, and a missing answer is never right. Correctness is separate from
    reward. After `fit`, `validate` and `test` the scores are shown as a table with 95 % bootstrap intervals over
    problems, and the folder `{fit,validate,test}` in the run's own gets `results.json` and `results.csv` with every
    answer and `curves.png`, pass@k and maj@k for each k up to n, which also goes to TensorBoard.

    With `store`, `validate`, `test` and `predict` keep each completion as soon as it ends, as JSON Lines in a file for
    this policy and these settings, and an interrupted evaluation goes on after the last finished problem. `predict`
    writes such a file in any case, in `completions` in the trainer's `default_root_dir`, and judges nothing.

    Args:
        num_samples: Completions of each problem (n).
        ks: Values of k, each at most n. Default: 1 and n.
        temperature: Temperature of sampling.
        top_k: Sampling cut to the k likeliest tokens; null keeps all.
        top_p: Sampling cut to the likeliest tokens of mass p; 1 keeps all.
        greedy: Takes the likeliest token; then `num_samples` must be 1.
        max_completion_length: Tokens of a completion at most; null takes the module's.
        before_training: Whether the policy is judged once before its first update.
        answer_style: Where the answer stands; see `extract_answer`.
        store: Folder of finished completions; null keeps none.

    Raises:
        ValueError: A sampling setting outside its range, a k above n.
    """

    def __init__(
        self,
        num_samples: int = 1,
        ks: list[int] | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        greedy: bool = False,
        max_completion_length: int | None = None,
        before_training: bool = True,
        answer_style: str = "auto",
        store: str | None = None,
    ) -> None:
        self.sampling = Sampling(
            num_samples=num_samples,
            max_completion_length=1 if max_completion_length is None else max_completion_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
        )
        self.ks = _checked_ks(ks, num_samples)
        self.max_completion_length = max_completion_length
        self.before_training = before_training
        self.answer_style = answer_style
        self.store = store
        if answer_style not in ANSWER_STYLES:
            raise ValueError(f"answer_style: {answer_style!r}; valid: {', '.join(ANSWER_STYLES)}")
        self.history: list[tuple[int, dict[str, float]]] = []
        """Step and scores of each evaluation so far."""
        self._judged: dict[str, dict[str, JudgedProblem]] = {}
        self._finished: dict[str, dict[str, JudgedProblem]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the module the sampling settings of evaluation.

        Raises:
            ValueError: The folder of `store` cannot be written to.
        """
        if self.store is not None and stage != "fit":
            check_folder(self.store)
        module = cast(PolicyModule, pl_module)
        length = self.max_completion_length or module.max_completion_length
        module.eval_sampling = replace(self.sampling, max_completion_length=length)

    def state_dict(self) -> dict[str, Any]:
        """Step and scores of each evaluation so far."""
        return {"history": [[step, dict(scores)] for step, scores in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.history = [(int(step), dict(scores)) for step, scores in state_dict["history"]]

    # sampling and judging

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judges the policy before its first update; a resumed run was judged already."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not self.before_training or trainer.global_step > 0 or getattr(trainer, "fast_dev_run", False):
            return
        loop.setup_data()
        loaders = _as_list(trainer.val_dataloaders)
        self._judged = {}
        with torch.no_grad():
            for number, (loader, batches) in enumerate(zip(loaders, loop.max_batches, strict=True)):
                for index, problems in enumerate(loader):
                    if index >= batches:
                        break
                    rollout = cast(Rollout, trainer.strategy.validation_step(problems, index))
                    self._judge(_dataset(trainer, "val", number), rollout, problems, pl_module)
        scores = self._scores(trainer, "val")
        for logger in trainer.loggers:
            logger.log_metrics(scores, step=0)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets the last evaluation, and opens the store outside training."""
        self._judged = {}
        if trainer.state.fn == "predict" or (trainer.state.fn != "fit" and self.store is not None):
            folder = self.store or Path(trainer.default_root_dir) / "completions"
            cast(PolicyModule, pl_module).completion_store = open_store(folder, trainer, pl_module)

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
            self._judge(_dataset(trainer, _split(trainer), dataloader_idx), outputs, batch, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the scores, exact over all ranks."""
        if not trainer.sanity_checking:
            pl_module.log_dict(self._scores(trainer, _split(trainer)), batch_size=1, sync_dist=True)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _judge(self, dataset: str, rollout: Rollout, batch: list[Problem], pl_module: Any) -> None:
        """Judges the problems of a batch, sampled now or earlier."""
        store = getattr(pl_module, "completion_store", None)
        kept = samples_of(rollout) if store is None else [(problem, store.samples(problem)) for problem in batch]
        seen = self._judged.setdefault(dataset, {})
        questions = {key: judged.problem.question for key, judged in seen.items()}
        for problem in batch:
            if questions.setdefault(problem.id, problem.question) != problem.question:
                raise ValueError(f"id: {problem.id!r} is of two problems of {dataset}; valid: one id per problem")
        fresh = [(problem, samples) for problem, samples in kept if problem.id not in seen]
        seen.update({judged.problem.id: judged for judged in judge(fresh, style=self.answer_style)})

    def _scores(self, trainer: pl.Trainer, stage: str) -> dict[str, float]:
        """Means over all problems of all ranks, by their logged names."""
        own = {
            dataset: {key: problem_scores(judged, self.ks) for key, judged in problems.items()}
            for dataset, problems in self._judged.items()
        }
        every = merged(gather_objects(own))
        self._finished = self._judged
        means: dict[str, float] = {}
        for dataset, problems in every.items():
            rows = list(problems.values())
            means |= {f"{stage}/{dataset}/{name}": sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        if stage == "val" and means:
            self.history.append((trainer.global_step, means))
        return means

    # what is left behind

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the first and the last evaluation side by side, and writes the last."""
        self._report(trainer, cast(PolicyModule, pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows and writes an evaluation outside training."""
        if trainer.state.fn != "fit":
            self._report(trainer, cast(PolicyModule, pl_module))

    on_test_end = on_validation_end

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says where the completions are."""
        store = cast(PolicyModule, pl_module).completion_store
        if store is not None and trainer.is_global_zero:
            Console().print(f"Completions: {store.path}", soft_wrap=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Closes the store."""
        cast(PolicyModule, pl_module).completion_store = None

    def _report(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """The table on the terminal; in the run's folder the answers and the curves."""
        place = trainer.log_dir or trainer.default_root_dir  # a broadcast, so every rank asks
        judged: dict[str, dict[str, JudgedProblem]] = merged(gather_objects(self._finished))
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        run = str(getattr(trainer.state.fn, "value", trainer.state.fn))
        console = Console()
        scores = {dataset: self._summary(problems) for dataset, problems in judged.items()}
        if judged or self.history:
            console.print(self._table(trainer, pl_module, scores, _split(trainer)))
        if judged:
            folder = Path(place) / run
            curves = {dataset: curve(problems) for dataset, problems in judged.items()}
            write_results(folder, self._header(trainer, pl_module, run), judged, scores, curves)
            write_curves(folder, curves, trainer.loggers, f"{_split(trainer)}/curves", _step(trainer, pl_module))
            console.print(f"Answers and curves: {folder}", soft_wrap=True)
            failures = Counter(
                a.failure for row in judged.values() for j in row.values() for a in j.answers if a.failure
            )
            if failures:
                console.print(f"Answers that could not be compared, counted as wrong: {dict(failures)}", soft_wrap=True)
        for path in sorted(Path(place).glob("events.out.tfevents.*"))[-1:]:
            console.print(f"TensorBoard: {path}", soft_wrap=True)

    def _summary(self, problems: Mapping[str, JudgedProblem]) -> dict[str, Score]:
        return summarise([problem_scores(judged, self.ks) for judged in problems.values()])

    def _table(
        self, trainer: pl.Trainer, pl_module: PolicyModule, scores: Mapping[str, Mapping[str, Score]], prefix: str
    ) -> Table:
        flat = {f"{prefix}/{dataset}/{name}": score for dataset, row in scores.items() for name, score in row.items()}
        columns = {f"step {_step(trainer, pl_module)}": {name: score.mean for name, score in flat.items()}}
        if trainer.state.fn == "fit" and self.history:
            columns = {f"step {step}": means for step, means in (self.history[0], self.history[-1])}
        intervals = {name: score.interval for name, score in flat.items()}
        return score_table("Evaluation on held-out problems", columns, intervals)

    def _header(self, trainer: pl.Trainer, pl_module: PolicyModule, run: str) -> dict[str, Any]:
        """What was evaluated, and how."""
        return {
            "run": run,
            "step": _step(trainer, pl_module),
            "model": pl_module.model_name,
            "weights": pl_module.weights,
            "checkpoint": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
            "sampling": asdict(pl_module.eval_sampling),
            "seed": pl_module.seed,
            "answer_style": self.answer_style,
        }


def _checked_ks(ks: Sequence[int] | None, num_samples: int) -> list[int]:
    """The values of k in order; by default 1 and n."""
    chosen = [1, num_samples] if ks is None else ks
    for k in chosen:
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= num_samples:
            raise ValueError(f"ks: {k!r} with num_samples {num_samples}; valid: integers of 1 to num_samples")
    return sorted(set(chosen))


def _split(trainer: pl.Trainer) -> str:
    """What is judged now, and where its scores are logged."""
    return "test" if trainer.state.fn == "test" else "val"


def _step(trainer: pl.Trainer, pl_module: PolicyModule) -> int:
    """Optimizer steps of the policy that is judged: those of this run, or of the checkpoint it was read from."""
    return trainer.global_step if trainer.state.fn == "fit" else pl_module.checkpoint_step


def _as_list(loaders: Any) -> list[Any]:
    """Loaders as a list, in the order in which Lightning numbers them."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def _dataset(trainer: pl.Trainer, split: str, number: int) -> str:
    """The name of the data set that a loader shows."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    names = datamodule.eval_names(split) if hasattr(datamodule, "eval_names") else []
    if number < len(names):
        return str(names[number])
    name = str(getattr(datamodule, "name", "held_out"))
    return name if number == 0 else f"{name}_{number}"
