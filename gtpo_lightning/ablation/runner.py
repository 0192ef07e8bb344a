"""Runs the processes of a grid, several at once, and survives failures, interrupts and restarts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal, TypeAlias

from gtpo_lightning.ablation.plan import Run, program
from gtpo_lightning.ablation.record import LOG, Lock, Record, newest_checkpoint, now

__all__ = ["Outcome", "State", "Tell", "interrupts", "run_all", "run_once"]

State: TypeAlias = Literal["finished", "kept", "failed", "interrupted", "elsewhere", "waiting"]


@dataclass
class Outcome:
    """How a run stands: what became of it, and the seconds of all attempts at it."""

    state: State
    seconds: float = 0.0
    note: str = ""

    @property
    def text(self) -> str:
        """State and note."""
        return f"{self.state}: {self.note}" if self.note else self.state


Tell: TypeAlias = Callable[[Run, Outcome | None], None]


class _Attempt:
    """A run that is being done in a process of its own."""

    def __init__(self, run: Run, lock: Lock) -> None:
        self.run, self.record, self._lock = run, Record(run), lock
        command = [*program(), *run.words, *_resume(run)]
        self.record.begin(command)
        self._began = time.monotonic()
        self._log: IO[str] = (run.folder / LOG).open("a", encoding="utf-8")
        self._log.write(f"# {now()} {shlex.join(command)}\n")
        self._log.flush()
        # A session of its own: an interrupt from the keyboard reaches the runner alone, which passes it on once.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        lock.name_child(self.process.pid)

    def poll(self) -> Outcome | None:
        """Its outcome once it has ended."""
        self._lock.touch()
        code = self.process.poll()
        return None if code is None else self.close(code)

    def close(self, code: int, *, interrupted: bool = False) -> Outcome:
        """Records the end and gives the lock back."""
        self._log.close()
        self.record.end(code, time.monotonic() - self._began, interrupted=interrupted)
        self._lock.release()
        seconds = self.record.read()["seconds"]
        if interrupted:
            return Outcome("interrupted", seconds)
        return Outcome("finished", seconds) if code == 0 else Outcome("failed", seconds, _failure(self.run, code))

    def stop(self, patience: float) -> Outcome:
        """Interrupts the process as the keyboard would, so that Lightning saves a checkpoint; then ends it."""
        # A shell's background job ignores SIGINT, and so do its children; Lightning saves on SIGTERM as well.
        deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        gentle = [] if deaf else [(signal.SIGINT, patience)]
        for number, wait in (*gentle, (signal.SIGTERM, patience if deaf else 10.0), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(wait)
                break
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue
        return self.close(self.process.returncode or 130, interrupted=True)


def _resume(run: Run) -> list[str]:
    """The flag that goes on from the last checkpoint; without one, the events of a broken attempt are removed."""
    checkpoint = newest_checkpoint(run.folder) if run.words[0] == "fit" else None
    if checkpoint is not None:
        return [f"--ckpt_path={checkpoint}"]
    for path in (*run.folder.glob("events.out.tfevents*"), run.folder / "completions.jsonl"):
        path.unlink(missing_ok=True)
    return []


def _failure(run: Run, code: int) -> str:
    """Exit code, and the last line that the run said."""
    lines = (run.folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"exit code {code}: {last[-160:]} ({run.folder / LOG})"


def run_once(run: Run, made: Path) -> Outcome:
    """Runs the command that all others need, unless the file it makes is there; waits where another process is at it.

    Raises:
        KeyboardInterrupt: After the process was stopped cleanly.
    """
    lock = Lock(run.folder)
    while lock.acquire() is not None:
        time.sleep(1.0)
    if made.is_file():
        lock.release()
        return Outcome("kept", Record(run).read().get("seconds", 0.0))
    attempt = _Attempt(run, lock)
    try:
        outcome = None
        while outcome is None:
            time.sleep(0.1)
            outcome = attempt.poll()
    except KeyboardInterrupt:
        attempt.stop(60.0)
        raise
    if outcome.state == "finished" and not made.is_file():
        return Outcome("failed", outcome.seconds, f"ended well and did not make {made}")
    return outcome


def run_all(
    runs: Sequence[Run], *, jobs: int = 1, keep_checkpoints: bool = True, tell: Tell | None = None
) -> list[Outcome]:
    """Does every run that is not finished, at most `jobs` at once. A failure does not stop the others.

    Args:
        runs: The runs; a finished one is kept, a broken one goes on from its newest checkpoint.
        jobs: Processes at once.
        keep_checkpoints: False removes a run's checkpoints once it has ended well.
        tell: Called with a run and its outcome, None at its start.

    Returns:
        An outcome for each run. After an interrupt, which also SIGTERM and SIGHUP are, the children have been
        interrupted and `interrupted` and `waiting` are among the states.
    """
    say: Tell = tell or (lambda run, outcome: None)
    outcomes: dict[int, Outcome] = {}
    active: dict[int, _Attempt] = {}
    queue = list(enumerate(runs))
    try:
        while queue or active:
            while queue and len(active) < jobs:
                number, run = queue.pop(0)
                begun = _begin(run)
                if isinstance(begun, Outcome):
                    outcomes[number] = begun
                else:
                    active[number] = begun
                say(run, begun if isinstance(begun, Outcome) else None)
            for number, attempt in list(active.items()):
                outcome = attempt.poll()
                if outcome is not None:
                    outcomes[number] = outcome
                    del active[number]
                    if outcome.state == "finished" and not keep_checkpoints:
                        _remove_checkpoints(attempt.run)
                    say(attempt.run, outcome)
            if active:
                time.sleep(0.1)
    except KeyboardInterrupt:
        outcomes |= {number: attempt.stop(60.0) for number, attempt in active.items()}
    return [outcomes.get(number, Outcome("waiting")) for number in range(len(runs))]


def _begin(run: Run) -> _Attempt | Outcome:
    """Starts a run, unless it is finished or another process is at it."""
    lock = Lock(run.folder)
    holder = lock.acquire()
    if holder is not None:
        return Outcome("elsewhere", note=holder)
    record = Record(run)
    if record.finished:  # asked with the lock held, since another process may just have done it
        lock.release()
        return Outcome("kept", record.read()["seconds"])
    return _Attempt(run, lock)


def _remove_checkpoints(run: Run) -> None:
    for path in run.folder.rglob("*.ckpt"):
        path.unlink()


@contextmanager
def interrupts() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end a grid as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
