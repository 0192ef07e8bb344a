"""Worker processes that can be killed: what may hang, crash or eat all memory runs in them."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]

from gtpo_lightning.rewards.dispatch import Dispatch
from gtpo_lightning.rewards.keeper import Keeper
from gtpo_lightning.rewards.outcomes import Outcome
from gtpo_lightning.rewards.process import WorkerProcess

__all__ = ["Outcome", "WorkerPool", "close_workers", "grading_pool"]

# One answer's symbolic questions take milliseconds; the few that take longer than this do not end.
_GRADING_S = 5.0
# A grading worker has 60 MB after its imports, an ordinary comparison adds a few; a tower of powers takes all there is.
_GRADING_BYTES = 1 << 30


class WorkerPool:
    """Runs tasks in processes of their own and kills those that take too long.

    Workers start when they are needed, by `subprocess`, so that the caller's main module is not run again; they share
    nothing with this process but two pipes. They end with the pool, with this process however it ends, and after
    `idle_s` without a task. A pool may be used from several threads. Needs a POSIX system.

    Args:
        kind: `symbolic`: a task is a list of (prediction, gold), its result a list of bools. `functions`: a task is
            (args, kwargs) of `function`, its result what that returns.
        function: The callable of kind `functions`: by reference if a module can be imported for it, else by value.
        workers: Processes at most.
        time_limit: Seconds a task may take, from when a worker has taken it. A worker's start does not count.
        memory_limit: Bytes by which the tasks of a worker may grow its address space (Linux). Default: no limit.
        idle_s: Seconds without a task after which a worker ends, by itself or by a thread that waits for it; the next
            task starts another.

    Raises:
        ValueError: An unknown kind, a limit that is not positive, or a function that cannot be pickled.

    Example:
        >>> with WorkerPool("functions", function=divmod, time_limit=1.0) as pool:
        ...     [outcome.value or outcome.message for outcome in pool.map([((7, 2), {}), ((7, 0), {})])]
        [(3, 1), 'ZeroDivisionError: integer division or modulo by zero']
    """

    def __init__(
        self,
        kind: Literal["symbolic", "functions"],
        *,
        function: Callable[..., Any] | None = None,
        workers: int = 2,
        time_limit: float = 5.0,
        memory_limit: int | None = None,
        idle_s: float = 30.0,
    ) -> None:
        _check(kind, function, workers, time_limit=time_limit, memory_limit=memory_limit, idle_s=idle_s)
        self.kind, self.workers, self.time_limit = kind, workers, float(time_limit)
        self._setup = {
            "kind": kind,
            "content": None if function is None else _pickled(function),
            "time_limit": self.time_limit,
            "memory_limit": memory_limit,
            "idle_s": float(idle_s),
        }
        self._env = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if kind == "symbolic" else {})
        self._idle: list[WorkerProcess] = []
        self._busy: dict[WorkerProcess, object] = {}  # with the call of `map` that uses each
        self._free = threading.Condition()
        self._keeper = Keeper(self._idle, self._free, float(idle_s))
        weakref.finalize(self, _end_all, self._idle, self._busy, self._keeper)
        with _LOCK:
            _POOLS.add(self)

    def map(self, tasks: Sequence[Any]) -> list[Outcome]:
        """Runs each task in a worker.

        Args:
            tasks: What is sent; each must be picklable.

        Returns:
            The outcome of each task, in the order of the tasks.

        Raises:
            WorkerStartError: A worker cannot start. That is a broken installation, or a function that cannot be
                imported, and no fault of a task.
        """
        return Dispatch(self, tasks).run()

    def close(self) -> None:
        """Ends all workers at once, those within a task too; the pool can be used again, with new ones."""
        with self._free:
            idle, busy = list(self._idle), list(self._busy)
            self._idle.clear()
        self._keeper.stop()
        for worker in busy:
            worker.closed = True
            worker.kill()
        for worker in idle:
            worker.end()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, user: object, *, wait: bool) -> WorkerProcess | None:
        """A worker for one task, which `give` takes back; None if all are in use and it shall not wait."""
        with self._free:
            while not self._idle and len(self._busy) >= self.workers:
                if not wait:
                    return None
                self._free.wait()
            worker = self._idle.pop() if self._idle else WorkerProcess(self._setup, self._env)
            self._busy[worker] = user
            return worker

    def give(self, worker: WorkerProcess, *, usable: bool) -> str:
        """Takes a worker back, or ends it; returns how it had ended, in words."""
        usable = usable and not worker.gone and not worker.closed
        words = "" if usable else worker.end()
        with self._free:
            self._busy.pop(worker, None)
            if usable:
                worker.idle_since = time.monotonic()
                self._idle.append(worker)
                self._keeper.watch()
            self._free.notify()
        return words

    def give_all(self, user: object) -> None:
        """Ends the workers that a call of `map` holds."""
        for worker in [worker for worker, holder in list(self._busy.items()) if holder is user]:
            self.give(worker, usable=False)

    def _after_fork(self) -> None:
        """In a forked child: the workers are the parent's, and its pipes are not to be held open here."""
        for worker in [*self._idle, *self._busy]:
            worker.forget()
        self._idle.clear()
        self._busy.clear()
        self._free = threading.Condition()
        self._keeper.forked(self._free)


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        return cloudpickle.dumps(function)  # type: ignore[no-any-return]
    except Exception as error:
        raise ValueError(
            f"function: {function!r} cannot be sent to another process ({type(error).__name__}: {error}); valid: a "
            "function or object that can be pickled"
        ) from error


def _check(kind: str, function: object, workers: object, **limits: float | None) -> None:
    if kind not in ("symbolic", "functions"):
        raise ValueError(f"kind: {kind!r}; valid: symbolic, functions")
    if callable(function) != (kind == "functions"):
        raise ValueError(f"function: {function!r}; valid: a callable for the kind functions, None for symbolic")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers: {workers!r}; valid: an integer of at least 1")
    for name, limit in limits.items():
        if limit is None and name == "memory_limit":
            continue
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
            raise ValueError(f"{name}: {limit!r}; valid: a number above 0")


# All pools of this process, so that they can be closed together and told of a fork; and the one that grades answers.
_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_GRADING: list[WorkerPool] = []
_LOCK = threading.Lock()


def grading_pool() -> WorkerPool:
    """The process's pool for symbolic comparisons, made on first use.

    Returns:
        A pool of kind `symbolic`: 5 s a task, and 1 GiB beyond what a worker has after its imports.
    """
    if not _GRADING:
        pool = WorkerPool("symbolic", time_limit=_GRADING_S, memory_limit=_GRADING_BYTES)
        with _LOCK:
            _GRADING[:] = _GRADING[:1] or [pool]
    return _GRADING[0]


def close_workers() -> None:
    """Ends the workers of all pools of this process; they start again when there is a task."""
    with _LOCK:
        pools = list(_POOLS)
    for pool in pools:
        pool.close()


def _end_all(idle: list[WorkerProcess], busy: dict[WorkerProcess, object], keeper: Keeper) -> None:
    """Ends a pool's workers when it is collected or the interpreter ends; a forked child has none in these."""
    for worker in [*idle, *busy]:
        with contextlib.suppress(OSError):
            worker.end()
    idle.clear()
    keeper.stop()


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    for pool in list(_POOLS):
        pool._after_fork()


os.register_at_fork(after_in_child=_after_fork)
