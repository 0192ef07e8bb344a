"""What all data sets share: splits as lists of problems, loaders that know the ranks, limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from gtpo_lightning.datamodules.loader import ProblemLoader
from gtpo_lightning.datamodules.progress import TrainerProgress
from gtpo_lightning.rollout import Problem
from gtpo_lightning.seeding import seed_or_global

__all__ = ["DataModule"]

_log = logging.getLogger(__name__)

# The splits that each stage of a trainer needs.
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}


class DataModule(pl.LightningDataModule):
    """Base of the data sets: a subclass is a `name` and the function `make_problems`.

    Training batches are made by a `ProblemLoader`: sharded over the ranks, resumable, and repeated where the module
    asks for several updates per rollout (`updates_per_rollout`). Evaluation shows every problem once over all ranks.
    A rank's batch may be an empty list where a last step has fewer problems than there are ranks.

    Problems whose prompt is longer than `max_prompt_length` are left out and counted; the length is what the trainer's
    module says, by its method `prompt_length(problem) -> int`.

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

    Raises:
        ValueError: An argument is out of range.
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
    ) -> None:
        super().__init__()
        _check_at_least(1, batch_size=batch_size)
        limits = {"limit_train": limit_train, "limit_val": limit_val, "limit_test": limit_test}
        optional = {"val_batch_size": val_batch_size, "max_prompt_length": max_prompt_length, **limits}
        _check_at_least(1, **{name: value for name, value in optional.items() if value is not None})
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.seed = seed_or_global(seed)
        self.max_prompt_length = max_prompt_length
        self.limits = {"train": limit_train, "val": limit_val, "test": limit_test}
        self.drop_last = drop_last
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

    def setup(self, stage: str | None = None) -> None:
        """Builds the problems of the splits that a stage needs, once.

        Args:
            stage: "fit", "validate", "test" or "predict". Default: all splits.

        Raises:
            ValueError: Two problems have the same id.
        """
        for split in _STAGES.get(str(getattr(stage, "value", stage)), ("train", "val", "test")):
            if split not in self._problems:
                problems = _checked(self.make_problems(split), f"{type(self).__name__}.make_problems({split!r})")
                problems = problems[: self.limits[split]]
                _check_ids(problems, f"{self.name}/{split}")
                self._problems[split] = problems

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
            raise ValueError(f"train: {self.name} has no training problems; valid: a source with a training split")
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

        Raises:
            ValueError: Validation was asked for and there is no such split.
        """
        return self._eval_loader("val")

    def test_dataloader(self) -> ProblemLoader | list[Any]:
        """Test batches of this rank.

        Raises:
            ValueError: There is no test split.
        """
        return self._eval_loader("test")

    def predict_dataloader(self) -> ProblemLoader | list[Any]:
        """The test problems, to be completed without a score.

        Raises:
            ValueError: There is no test split.
        """
        return self._eval_loader("test")

    def _eval_loader(self, split: str) -> ProblemLoader | list[Any]:
        problems = self._fitting_problems(split)
        if problems:
            return self._loader(problems, self.val_batch_size or self.batch_size)
        if split == "val" and (self.trainer is None or self.trainer.state.fn == "fit"):
            return []
        raise ValueError(f"{split}: {self.name} has no {split} problems; valid: a source with such a split")

    def _loader(self, problems: Sequence[Problem], batch_size: int, **kwargs: Any) -> ProblemLoader:
        rank, world_size = _rank_and_world_size(self.trainer)
        return ProblemLoader(
            problems, batch_size=batch_size, seed=self.seed, rank=rank, world_size=world_size, **kwargs
        )


def _check_at_least(minimum: int, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}: {value!r}; valid: an integer >= {minimum}")


def _checked(problems: Any, where: str) -> list[Problem]:
    if not isinstance(problems, (list, tuple)) or not all(isinstance(problem, Problem) for problem in problems):
        raise ValueError(f"{where} gave {type(problems).__name__} {str(problems)[:80]!r}; valid: a list of Problem")
    return list(problems)


def _check_ids(problems: list[Problem], where: str) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"id: {problem.id!r} stands twice in {where}; valid: one id per problem")
        seen.add(problem.id)


def _rank_and_world_size(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Which share of the data is this process's.

    With tensor parallelism several processes share one, which only the strategy's own numbers tell.
    """
    if trainer is None:
        return 0, 1
    replicas = getattr(trainer, "distributed_sampler_kwargs", None) or {}
    return replicas.get("rank", trainer.global_rank), replicas.get("num_replicas", trainer.world_size)
