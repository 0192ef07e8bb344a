"""Sends tasks to worker processes, listens to all of them at once and keeps their limits."""

from __future__ import annotations

import math
import pickle
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gtpo_lightning.rewards.outcomes import Outcome
from gtpo_lightning.rewards.process import WorkerProcess

if TYPE_CHECKING:
    from gtpo_lightning.rewards.pool import WorkerPool

__all__ = ["Dispatch", "WorkerStartError"]

# Seconds for a worker's imports, and for taking a task that was sent to it: what takes longer is broken.
_PATIENCE = 120.0
# How often a task is sent to a new worker because the one it was sent to had ended before it took it.
_ATTEMPTS = 3


class WorkerStartError(RuntimeError):
    """No worker process can be started: the installation is broken, or the function cannot be imported in one."""


class _Flight:
    """A task on its way: where it is, and until when it may be there."""

    def __init__(self, index: int, worker: WorkerProcess) -> None:
        self.index, self.worker = index, worker
        self.taken = False
        self.deadline = time.monotonic() + _PATIENCE


class Dispatch:
    """One call of `WorkerPool.map`: a loop over what its workers say, in the caller's thread.

    Args:
        pool: Lends the workers.
        tasks: What is sent.
    """

    def __init__(self, pool: WorkerPool, tasks: Sequence[Any]) -> None:
        self.pool = pool
        self.frames: list[bytes] = []
        self.attempts = [0] * len(tasks)
        self.waiting: deque[int] = deque()
        self.flights: list[_Flight] = []
        self.outcomes: dict[int, Outcome] = {}
        for index, task in enumerate(tasks):
            try:
                self.frames.append(b"T" + pickle.dumps(task, pickle.HIGHEST_PROTOCOL))
                self.waiting.append(index)
            except Exception as error:
                self.frames.append(b"")
                self.outcomes[index] = _error(f"the task cannot be sent ({type(error).__name__}: {error})")

    def run(self) -> list[Outcome]:
        """The outcome of each task, in order.

        Raises:
            WorkerStartError: A worker cannot start.
        """
        try:
            while self.waiting or self.flights:
                self._send()
                self._listen()
                for flight in list(self.flights):
                    self._advance(flight)
        finally:
            self.pool.give_all(self)  # none is left, unless this was interrupted
        return [self.outcomes[index] for index in range(len(self.frames))]

    def _send(self) -> None:
        """Gives waiting tasks to free workers; waits for one only where nothing is on its way."""
        while self.waiting:
            worker = self.pool.take(self, wait=not self.flights)
            if worker is None:
                return
            try:
                worker.start()
            except OSError as error:
                raise WorkerStartError(f"a worker process cannot be started ({error})") from error
            index = self.waiting.popleft()
            self.attempts[index] += 1
            worker.post(self.frames[index])
            self.flights.append(_Flight(index, worker))

    def _listen(self) -> None:
        """Waits until a worker has something to say, or a deadline passes."""
        poll = select.poll()
        for flight in self.flights:
            flight.worker.watch(poll)
        left = min(flight.deadline for flight in self.flights) - time.monotonic()
        poll.poll(max(0, math.ceil(left * 1000)))

    def _advance(self, flight: _Flight) -> None:
        worker = flight.worker
        for kind, content in worker.exchange():
            if kind == b"R":
                worker.started()
                flight.deadline = time.monotonic() + _PATIENCE
            elif kind == b"A":
                flight.taken = True
                flight.deadline = time.monotonic() + self.pool.time_limit
            else:
                self._finish(flight, _outcome(kind, content), usable=True)
                return
        late = time.monotonic() >= flight.deadline
        if late or worker.gone:
            self._fail(flight, late and not worker.gone)

    def _fail(self, flight: _Flight, late: bool) -> None:
        """The task's worker has ended, or is to be ended."""
        worker = flight.worker
        if not worker.ready and not worker.closed:
            words = worker.kill()
            reason = f"has not started within {_PATIENCE:g} s" if late else words
            raise WorkerStartError(f"a worker process of kind {self.pool.kind} {reason}: {worker.errors()}")
        if late and flight.taken:
            self._finish(flight, Outcome(None, "timeout", f"took longer than {self.pool.time_limit:g} s"))
        elif flight.taken or self.attempts[flight.index] >= _ATTEMPTS:
            self._finish(flight, None)
        else:
            self.flights.remove(flight)
            self.pool.give(worker, usable=False)
            self.waiting.appendleft(flight.index)

    def _finish(self, flight: _Flight, outcome: Outcome | None, *, usable: bool = False) -> None:
        self.flights.remove(flight)
        words = self.pool.give(flight.worker, usable=usable)
        if outcome is None:
            words = "was ended, the pool was closed" if flight.worker.closed else words
            outcome = _error(f"the worker process {words}")
        self.outcomes[flight.index] = outcome


def _outcome(kind: bytes, content: bytes) -> Outcome:
    if kind == b"E":
        return _error(content.decode(errors="replace"))
    try:
        return Outcome(pickle.loads(content), None, "")
    except Exception as error:
        return _error(f"the result cannot be read here ({type(error).__name__}: {error})")


def _error(message: str) -> Outcome:
    return Outcome(None, "error", message)
