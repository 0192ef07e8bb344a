"""What all data sets share: splits as lists of problems, loaders that know the ranks, limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_only

from gtpo_lightning.datamodules.checks import (
    check_at_least,
    check_ids,
    check_names,
    checked_problems,
    shared_questions,
)
from gtpo_lightning.datamodules.loader import ProblemLoader
from gtpo_lightning.datamodules.progress import TrainerProgress
from gtpo_lightning.rollout import Problem
from gtpo_lightning.seeding import seed_or_global

__all__ = ["DataModule"]

_log = logging.getLogger(__name__)

# The splits that each stage of a trainer needs.
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}
# The split that is judged in each of them, also by its own name.
_JUDGED = {"fit": "val", "sanity_check": "val", "validate": "val", "val": "val", "test": "test", "predict": "test"}


class DataModule(pl.LightningDataModule):
    """Base of the data sets: a subclass is a `name` and the function `make_problems`.

    Training batches are made by a `ProblemLoader`: sharded over the ranks, resumable, and repeated where the module
    asks for several updates per rollout (`updates_per_rollout`). Evaluation shows every problem once over all ranks.
    A rank's batch may be an empty list where a last step has fewer problems than there are ranks.

    Problems whose prompt is longer than `max_prompt_length` are left out and counted; the length is what the trainer's
    module says, by its method `prompt_length(problem) -> int`.

    *Further sets.* `eval_sets` are judged beside this one's own problems, each under its name. In validation such a set
    shows its validation problems, or without any its test problems; in test its test problems. The loaders of
    evaluation are then a list, in the order of `eval_names`.

    Args:
        batch_size: Problems of one rank in one training step, B. Groups are made of them inside the step, so a batch
            size that is found automatically never tears a group.
        val_batch_size: Problems of one rank in one evaluation step. Default: `batch_size`.
        shuffle: Whether each training epoch has its own order.
        seed: Key of the orders, not negative. Default: that of `seed_everything`.
        max_prompt_length: Longest prompt that is kept, tokens. Default: all are kept.
        limit_train: Use only the first so many training problems. Default: all.
        limit_val: The same for validation.
        limit_test: The same for the test set.
        drop_last: Whether a short last training step is left out (and logged).
        eval_sets: Further sets that are judged beside this one's own, in validation and in test. They keep their own
            limits and `max_prompt_length`; without a `val_batch_size` they take this set's.

    Raises:
        ValueError: An argument is out of range, or two sets have one name.
    """

    name: str = "data"

    def __init__(
        self,
        batch_size: int = 4,
        val_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        max_prompt_length: int | None = None,
        limit_train: int | None = None,
        limit_val: int | None = None,
        limit_test: int | None = None,
        drop_last: bool = False,
        eval_sets: list[DataModule] | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        limits = {"limit_train": limit_train, "limit_val": limit_val, "limit_test": limit_test}
        optional = {"val_batch_size": val_batch_size, "max_prompt_length": max_prompt_length, **limits}
        check_at_least(1, **{name: value for name, value in optional.items() if value is not None})
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.seed = seed_or_global(seed)
        self.max_prompt_length = max_prompt_length
        self.limits = {"train": limit_train, "val": limit_val, "test": limit_test}
        self.drop_last = drop_last
        self.eval_sets = list(eval_sets or [])
        self._check_eval_sets()
        self._leak_told = False
        self._problems: dict[str, list[Problem]] = {}
        self._measured: dict[str, int] = {}

    # problems

    def make_problems(self, split: str) -> list[Problem]:
        """All problems of a split, in a fixed order.

        Args:
            split: "train", "val" or "test".

        Returns:
            The problems; an empty list where the data set has no such split.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define make_problems(split) -> list[Problem]")

    def prepare_data(self) -> None:
        """Fetches what the further sets need, once per node; a subclass that fetches something of its own adds it."""
        for one in self.eval_sets:
            one.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Builds the problems of the splits that a stage needs, once.

        Args:
            stage: "fit", "validate", "test" or "predict". Default: all splits.

        Raises:
            ValueError: Two problems have the same id.
        """
        splits = _STAGES.get(str(getattr(stage, "value", stage)), ("train", "val", "test"))
        for split in splits:
            if split not in self._problems:
                self._problems[split] = self._limited(split, self.make_problems(split))
        for one in self.eval_sets:
            one.trainer = self.trainer
            one._setup_beside(splits, self.name)
        if self.eval_sets:
            self._check_beside(splits)

    def _limited(self, split: str, problems: Any) -> list[Problem]:
        problems = checked_problems(problems, f"{type(self).__name__}.make_problems({split!r})")[: self.limits[split]]
        check_ids([(f"{self.name}/{split}", problems)])
        return problems

    @property
    def train_problems(self) -> list[Problem]:
        """The training problems that `setup` built."""
        return self._problems.get("train", [])

    @property
    def val_problems(self) -> list[Problem]:
        """The validation problems that `setup` built."""
        return self._problems.get("val", [])

    @property
    def test_problems(self) -> list[Problem]:
        """The test problems that `setup` built."""
        return self._problems.get("test", [])

    def _fitting_problems(self, split: str) -> list[Problem]:
        """The problems of a split without those whose prompt is too long.

        Lengths are taken here and not in `setup`, because Lightning sets the module up after the data.
        """
        problems = self._problems.get(split, [])
        module = getattr(self.trainer, "lightning_module", None)
        measure = getattr(module, "prompt_length", None)
        if not problems or self.max_prompt_length is None or measure is None or self._measured.get(split) == id(module):
            return problems
        kept = [problem for problem in problems if measure(problem) <= self.max_prompt_length]
        dropped = len(problems) - len(kept)
        if not kept:
            raise ValueError(
                f"max_prompt_length: {self.max_prompt_length} leaves none of the {len(problems)} problems of "
                f"{self.name}/{split}; valid: at least {min(measure(problem) for problem in problems)}"
            )
        if dropped:
            _log.warning(
                "%s/%s: %d of %d problems have a prompt of more than %d tokens and are left out",
                self.name,
                split,
                dropped,
                len(problems),
                self.max_prompt_length,
            )
        self._problems[split] = kept
        self._measured[split] = id(module)
        return kept

    # loaders

    def train_dataloader(self) -> ProblemLoader:
        """Training batches of this rank, set up for a resume.

        Raises:
            ValueError: There is no training split, or the number of accumulated batches changes during the run while
                rollouts are used for several updates.
        """
        problems = self._fitting_problems("train")
        if not problems:
            raise ValueError(self._missing("train"))
        trainer = self.trainer
        if trainer is None:
            return self._loader(problems, self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last)
        repeats = getattr(trainer.lightning_module, "updates_per_rollout", 1)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if repeats > 1 and any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            raise ValueError(
                f"updates_per_rollout: {repeats} with a GradientAccumulationScheduler; valid: 1, or a fixed "
                "accumulate_grad_batches, because rollouts are repeated window by window"
            )
        loader = self._loader(
            problems,
            self.batch_size,
            # Overfitting means the same batches in every epoch. Lightning can turn off only a DataLoader's shuffling.
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]
            drop_last=self.drop_last,
            repeats=repeats,
            # Asked anew in each epoch, for a GradientAccumulationScheduler changes it.
            window=lambda: trainer.accumulate_grad_batches,
            progress=(progress := TrainerProgress(trainer)),
        )
        progress.repair(len(loader))
        return loader

    def val_dataloader(self) -> ProblemLoader | list[Any]:
        """Validation batches of this rank; none while fitting where there is no validation split.

        Returns:
            A loader; with more sets than one that have problems to show, a list of them in the order of `eval_names`.

        Raises:
            ValueError: Validation was asked for and there is no such split.
        """
        return self._eval_loaders("val")

    def test_dataloader(self) -> ProblemLoader | list[Any]:
        """Test batches of this rank.

        Returns:
            As `val_dataloader`.

        Raises:
            ValueError: There is no test split.
        """
        return self._eval_loaders("test")

    def predict_dataloader(self) -> ProblemLoader | list[Any]:
        """The test problems, to be completed without a score.

        Returns:
            As `val_dataloader`.

        Raises:
            ValueError: There is no test split.
        """
        return self._eval_loaders("test")

    def eval_names(self, stage: str) -> list[str]:
        """Names of the sets that a stage judges, in the order of its loaders; known after `setup`.

        Args:
            stage: "val" or "test", or a stage of a trainer: "fit", "validate", "test", "predict".

        Returns:
            This set's name first, unless it has no problems of that split, then those of `eval_sets`.

        Raises:
            ValueError: An unknown stage.
        """
        name = str(getattr(stage, "value", stage))
        if name not in _JUDGED:
            raise ValueError(f"stage: {stage!r}; valid: {', '.join(_JUDGED)}")
        return [one.name for one in self._judged(_JUDGED[name])]

    def _judged(self, split: str) -> list[DataModule]:
        """The sets that have problems to show, this one first."""
        return [one for one in (self, *self.eval_sets) if one._problems.get(split)]

    def _eval_loaders(self, split: str) -> ProblemLoader | list[Any]:
        size = self.val_batch_size or self.batch_size
        loaders = []
        for one in self._judged(split):
            one.trainer = self.trainer
            loaders.append(one._loader(one._fitting_problems(split), one.val_batch_size or size))
        if len(loaders) == 1:
            return loaders[0]
        if loaders or (split == "val" and (self.trainer is None or self.trainer.state.fn == "fit")):
            return loaders
        raise ValueError(self._missing(split))

    def _missing(self, split: str) -> str:
        """What to say where a stage needs a split that is not there."""
        kind = "training" if split == "train" else split
        return f"{split}: {self.name} has no {kind} problems; valid: a source with such a split"

    # further sets

    def _check_eval_sets(self) -> None:
        for one in self.eval_sets:
            if not isinstance(one, DataModule):
                raise ValueError(f"eval_sets: {one!r}; valid: data modules of this package, such as MATH500()")
            if one.eval_sets:
                raise ValueError(f"eval_sets: {one.name} has eval_sets of its own; valid: all of them in one list")
        check_names([self, *self.eval_sets])

    def _setup_beside(self, splits: Sequence[str], main: str) -> None:
        """Builds what this set shows beside another."""
        if "val" in splits:
            self.setup("validate")
            if not self._problems.get("val"):
                limit = "val" if self.limits["val"] else "test"
                self._problems["val"] = self._limited(limit, self.make_problems("test"))
        if "test" in splits:
            self.setup("test")
        for split in splits:
            if split != "train" and not self._problems.get(split):
                rank_zero_only(_log.warning)(
                    "eval_sets: %s has no %s problems to show beside %s", self.name, split, main
                )

    def _check_beside(self, splits: Sequence[str]) -> None:
        """Refuses ids that two sets share, and warns once of training problems that are also judged."""
        for split in splits:
            judged = self._judged(split) if split != "train" else []
            check_ids([(one.name, one._problems[split]) for one in judged])
        if "train" not in splits or self._leak_told:
            return
        shared = [(one, shared_questions(self.train_problems, one.val_problems)) for one in self.eval_sets]
        leaks = [f"{count} of {len(one.val_problems)} problems of {one.name}" for one, count in shared if count]
        if leaks:
            self._leak_told = True
            rank_zero_only(_log.warning)(
                "eval_sets: training problems of %s are also asked in %s; those scores show training, too",
                self.name,
                ", ".join(leaks),
            )

    def _loader(self, problems: Sequence[Problem], batch_size: int, **kwargs: Any) -> ProblemLoader:
        rank, world_size = _rank_and_world_size(self.trainer)
        return ProblemLoader(
            problems, batch_size=batch_size, seed=self.seed, rank=rank, world_size=world_size, **kwargs
        )


def _rank_and_world_size(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Which share of the data is this process's.

    With tensor parallelism several processes share one, which only the strategy's own numbers tell.
    """
    if trainer is None:
        return 0, 1
    replicas = getattr(trainer, "distributed_sampler_kwargs", None) or {}
    return replicas.get("rank", trainer.global_rank), replicas.get("num_replicas", trainer.world_size)
