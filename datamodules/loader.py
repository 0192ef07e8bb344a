"""Which problems a rank sees in which step, and where a resumed run goes on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from gtpo_lightning.rollout import Problem

__all__ = ["ProblemLoader", "Progress"]

_log = logging.getLogger(__name__)


class Progress(Protocol):
    """What a trainer counts besides the loader; `TrainerProgress` is Lightning's."""

    @property
    def processed(self) -> int:
        """Batches of the epoch that were trained on."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch ended the epoch."""

    def shift(self, batches: int) -> None:
        """Corrects a restored count by so many batches."""


class ProblemLoader:
    """Batches of problems: the same problems a step on any number of ranks, resumable after any batch.

    A plain sized iterable, no `torch.utils.data.DataLoader`: Lightning re-wraps the sampler of a DataLoader in a
    `DistributedSampler`, which pads with repeats and would tear groups apart. One iteration is one epoch.

    *Order.* With `shuffle` an epoch's order is a permutation keyed by (seed, epoch), the same on all ranks. A step
    takes the next `world_size * batch_size` problems of the order and every rank a contiguous slice of them, so 2 ranks
    of 2 see the problems of 1 rank of 4. The last, short step is shared as evenly as possible; a rank may get an empty
    list. All ranks yield equally many batches and no problem comes twice, which also suits evaluation.

    *Repeats.* With more updates than one per rollout the batches come in windows of `window` batches (one optimizer
    step each), and every window comes `repeats` times: b1 b2 b1 b2 b3 b4 b3 b4 for a window of 2 and 2 repeats. There a
    short last window is filled up with empty lists, because Lightning steps after every `window` batches, wherever they
    come from: unfilled, the repeats of a short window would flow into one step.

    *State.* The position is stored as problems consumed, so that another number of ranks can go on from it. What was
    handed out was consumed: Lightning fetches ahead only from loaders without a length, and this one has a length. The
    one exception is a batch whose training step failed; `progress` tells of that one.

    Args:
        problems: The problems, at least one.
        batch_size: Problems of one rank in one step, B.
        shuffle: Whether each epoch has its own order.
        seed: Key of the orders, not negative.
        rank: This process, 0 to `world_size` - 1.
        world_size: Number of processes.
        repeats: Updates per rollout.
        window: Batches of one optimizer step (`accumulate_grad_batches`), or a function that tells them.
        drop_last: Whether a short last step is left out. What is left out is counted in `dropped` and logged.
        progress: The trainer's own count of batches.

    Raises:
        ValueError: An argument is out of range, or `drop_last` would leave nothing.

    Example:
        >>> problems = [Problem(str(i), "1+1=", "2") for i in range(5)]
        >>> loader = ProblemLoader(problems, batch_size=2)
        >>> [[problem.id for problem in batch] for batch in loader]
        [['0', '1'], ['2', '3'], ['4']]
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        window: int | Callable[[], int] = 1,
        drop_last: bool = False,
        progress: Progress | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "world_size": world_size, "repeats": repeats}
        for name, value in (sizes if callable(window) else {**sizes, "window": window}).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r}; valid: an integer >= 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank!r}; valid: 0 to world_size - 1 = {world_size - 1}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed: {seed!r}; valid: an integer >= 0")
        if not problems:
            raise ValueError("problems: [], nothing to load; valid: at least one problem")
        self.problems = problems
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.repeats = repeats
        self.progress = progress
        self.epoch = 0
        self.position = 0
        self.dropped = len(problems) % self.global_batch_size if drop_last else 0
        self._window = window
        self._resumed = False
        if self.dropped == len(problems):
            raise ValueError(
                f"drop_last: True leaves nothing of {len(problems)} problems with {self.global_batch_size} a step; "
                f"valid: False, or batch_size * world_size <= {len(problems)}"
            )
        if self.dropped:
            _log.warning("drop_last: %d of %d problems are left out of each epoch", self.dropped, len(problems))

    # sizes

    @property
    def global_batch_size(self) -> int:
        """Problems of one step over all ranks."""
        return self.world_size * self.batch_size

    @property
    def window(self) -> int:
        """Batches of one optimizer step."""
        return self._window() if callable(self._window) else self._window

    @property
    def num_batches(self) -> int:
        """Batches of an epoch before they are repeated."""
        return -(-(len(self.problems) - self.dropped) // self.global_batch_size)

    def __len__(self) -> int:
        if self.repeats == 1:
            return self.num_batches
        return -(-self.num_batches // self.window) * self.window * self.repeats

    def window_length(self, index: int, length: int | None = None) -> int:
        """How many batches with problems the optimizer step of the `index`-th batch takes in.

        Less than `window` only in the last window of an epoch, where Lightning divides by `window` all the same. A
        training step finds its loader as `trainer.train_dataloader`.

        Args:
            index: Place of a batch in the epoch, from 0.
            length: Batches of the epoch, where `limit_train_batches` cuts it. Default: all.

        Example:
            >>> loader = ProblemLoader([Problem(str(i), "", "") for i in range(5)], batch_size=1, window=4)
            >>> [loader.window_length(i) for i in range(5)]
            [4, 4, 4, 4, 1]
        """
        window = self.window
        first = index - index % window
        stop = min(first + window, len(self) if length is None else min(length, len(self)))
        return sum(self._base_index(i, window) < self.num_batches for i in range(first, stop))

    # iteration

    def __iter__(self) -> Iterator[list[Problem]]:
        # A generator: nothing happens before the first batch is asked for, because Lightning calls `iter` before it
        # loads the state and sets the epoch.
        if self.position and (self.position >= len(self) or not self._resumed):
            self.set_epoch(self.epoch + 1)
        self._resumed = False
        order, window, length = self._order(), self.window, len(self)
        while self.position < length:
            self.position += 1
            yield self._batch(order, self._base_index(self.position - 1, window))

    def _order(self) -> list[int]:
        size = len(self.problems)
        if not self.shuffle:
            return list(range(size))
        # Sorting raw Philox words gives the same permutation under every numpy version.
        words = np.random.Philox(key=np.array([self.seed, self.epoch], dtype=np.uint64)).random_raw(size)
        return np.argsort(words, kind="stable").tolist()

    def _base_index(self, index: int, window: int) -> int:
        """The batch, counted without repeats, that comes at place `index`."""
        if self.repeats == 1:
            return index
        cycle, place = divmod(index, window * self.repeats)
        return cycle * window + place % window

    def _batch(self, order: list[int], index: int) -> list[Problem]:
        """This rank's share of a step; empty behind the last one."""
        if index >= self.num_batches:
            return []
        first = index * self.global_batch_size
        count = min(self.global_batch_size, len(order) - first)
        start, stop = (count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return [self.problems[i] for i in order[first + start : first + stop]]

    # epoch and state

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The place where Lightning looks for `set_epoch`, which it calls before each epoch.

        With an attribute `sampler` it would take the loader for a DataLoader and ask for more of one. DeepSpeed's
        strategy reads the batch size in the same place.
        """
        return SimpleNamespace(sampler=self, batch_size=self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that epoch's, from its first batch on; nothing if it is that epoch's already."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """What was consumed, and a fingerprint of the data; plain integers, booleans and strings."""
        position = self.position if self.progress is None else min(self.position, self.progress.processed)
        steps, extra = divmod(position, self._cycle)
        consumed = min(steps * self._problems_per_cycle, len(self.problems) - self.dropped)
        return {
            "epoch": self.epoch,
            "position": position,
            "consumed": consumed,
            "finished": position >= len(self),
            "inside_cycle": extra,
            "layout": self._layout,
            "data": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind what a state says was consumed.

        A state from inside an accumulation window goes on at the start of the window: the gradients that were gathered
        in it are not in a checkpoint. (Only with `progress`; without a trainer there are no gradients.)

        Args:
            state: From `state_dict`, also of another rank or another number of ranks.

        Raises:
            ValueError: The state is from the middle of an epoch over other data or another order, or of another layout
                of batches that has no boundary there.
        """
        position = self._resume_position(state)
        self.epoch = state["epoch"]
        self.position = position
        self._resumed = True
        if self.progress is not None and position != state["position"]:
            self.progress.shift(position - state["position"])

    @property
    def _cycle(self) -> int:
        """Batches from one rollout to the next."""
        return self.window * self.repeats if self.repeats > 1 else 1

    @property
    def _problems_per_cycle(self) -> int:
        return self.global_batch_size * (self.window if self.repeats > 1 else 1)

    @property
    def _layout(self) -> dict[str, int]:
        """What the place of a batch in the epoch depends on."""
        return {"problems_per_cycle": self._problems_per_cycle, "cycle": self._cycle, "repeats": self.repeats}

    def _fingerprint(self) -> dict[str, Any]:
        return {"problems": len(self.problems), "ids": self._digest, "seed": self.seed, "shuffle": self.shuffle}

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256("\n".join(problem.id for problem in self.problems).encode()).hexdigest()[:16]

    def _resume_position(self, state: dict[str, Any]) -> int:
        fingerprint = self._fingerprint()
        finished = state["finished"]
        if state["data"] != fingerprint:
            changes = f"the checkpoint has {state['data']}, this run {fingerprint}"
            if not finished and state["position"]:
                raise ValueError(
                    f"state: {changes}; valid in the middle of an epoch (batch {state['position']}): the same "
                    "problems, seed and shuffle"
                )
            _log.warning("other data than the checkpoint's: %s; going on with a new epoch", changes)
        if finished:
            return len(self)
        position = state["position"]
        if state["layout"] != self._layout:
            if state["inside_cycle"] or state["consumed"] % self._problems_per_cycle:
                raise ValueError(
                    f"state: {state['consumed']} problems consumed in steps of {state['layout']} are no boundary of "
                    f"this run's {self._layout}; valid: the batch_size * number of ranks (and accumulate_grad_batches "
                    "and updates per rollout) of the checkpoint, or a divisor of what was consumed"
                )
            position = state["consumed"] // self._problems_per_cycle * self._cycle
        if self.progress is None or self.progress.is_last_batch:
            return position
        return position - position % self.window
