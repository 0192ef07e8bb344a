"""Ends the workers of a pool that have no task, in time and without a call from outside."""

from __future__ import annotations

import contextlib
import threading
import time

from gtpo_lightning.rewards.process import WorkerProcess

__all__ = ["Keeper"]

# A worker leaves by itself after its idle time, with all it has to write written; then it only has to be waited for.
_MARGIN = 0.2


class Keeper:
    """Ends idle workers from a thread of its own, which lives as long as there are any.

    A process that has ended stays in the system's table until its parent waits for it. The thread does not hold the
    pool itself, so that a forgotten pool is collected all the same.

    Args:
        idle: The pool's list of workers without a task.
        lock: Guards the list.
        idle_s: Seconds without a task after which a worker is ended.
    """

    def __init__(self, idle: list[WorkerProcess], lock: threading.Condition, idle_s: float) -> None:
        self.idle, self.lock, self.idle_s = idle, lock, idle_s
        self._running = False
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Makes sure that somebody looks after the list; for a caller that holds the lock."""
        if self._running:
            return
        self._running = True
        try:
            threading.Thread(target=self._run, name="idle workers", daemon=True).start()
        except RuntimeError:  # no thread can be started, as at the very end of a program
            self._running = False

    def stop(self) -> None:
        """Lets the thread see that the list is empty."""
        self._stopped.set()

    def forked(self, lock: threading.Condition) -> None:
        """In a forked child, which has no threads but one: nobody looks after the list, which is empty."""
        self.lock, self._running, self._stopped = lock, False, threading.Event()

    def _run(self) -> None:
        while (wait := self._end_overdue()) is not None:
            self._stopped.wait(wait)
            self._stopped.clear()

    def _end_overdue(self) -> float | None:
        """Ends those whose time is over; returns the seconds until the next one's is, None if there is none."""
        with self.lock:
            now = time.monotonic()
            left = {worker: worker.idle_since + self.idle_s + _MARGIN - now for worker in self.idle}
            overdue = [worker for worker, seconds in left.items() if seconds <= 0]
            self.idle[:] = [worker for worker in self.idle if left[worker] > 0]
            self._running = bool(self.idle)
            wait = min((left[worker] for worker in self.idle), default=None)
        for worker in overdue:
            with contextlib.suppress(OSError):
                worker.end()
        return wait
