"""One worker process as its parent sees it: how it is started, spoken to without ever waiting for it, and ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtpo_lightning.rewards.worker import LENGTH

__all__ = ["WorkerProcess"]

_PROGRAM = os.path.realpath(Path(__file__).with_name("worker.py"))
_TAIL = 2000  # characters of a failed start's errors that are shown


class WorkerProcess:
    """A process that answers tasks one after the other.

    It leads a session of its own, so that Ctrl-C in a terminal does not reach it and its children can be ended with it.

    Args:
        setup: What the worker is told first, see `worker.py`; `path` and `stderr` are added here.
        env: Environment variables beside the parent's.
    """

    def __init__(self, setup: dict[str, Any], env: dict[str, str]) -> None:
        self._setup, self._env = setup, env
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Any] = []
        self._send = self._receive = -1
        self._errors: Any = None
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._ending = threading.Lock()
        self._code: int | None = None
        self.ready = False
        """Whether it has started and can take tasks."""
        self.gone = False
        """Whether it has ended or closed its pipes."""
        self.idle_since = 0.0
        """When the pool got it back from its last task, by the monotonic clock."""
        self.closed = False
        """Whether the pool was closed meanwhile."""

    def start(self) -> None:
        """Starts the process, unless it was started before.

        Raises:
            OSError: The system cannot.
        """
        if self._process is not None:
            return
        with _standard_numbers_taken():
            self._start()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the start fails, closed when it is done
        stderr = _errors_of_tasks(self._setup["kind"])
        try:
            self._process = subprocess.Popen(
                [sys.executable, _PROGRAM, self._setup["kind"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                pass_fds=(stderr,),
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        finally:
            os.close(stderr)
        self._pipes = [self._process.stdin, self._process.stdout]
        self._send, self._receive = (pipe.fileno() for pipe in self._pipes)
        for pipe in (self._send, self._receive):
            os.set_blocking(pipe, False)
        self.post(b"S" + pickle.dumps({**self._setup, "path": _search_path(), "stderr": stderr}))

    def post(self, content: bytes) -> None:
        """Queues a frame; `exchange` sends it."""
        self._outgoing += LENGTH.pack(len(content)) + content

    def watch(self, poll: select.poll) -> None:
        """Registers what this worker waits for."""
        poll.register(self._receive, select.POLLIN)
        if self._outgoing:
            poll.register(self._send, select.POLLOUT)

    def exchange(self) -> list[tuple[bytes, bytes]]:
        """Sends and receives what goes without waiting; returns the frames that are complete, as (kind, content)."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._send, self._outgoing[: 1 << 20])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.gone = True
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._receive, 1 << 16):
                self._incoming += chunk
            self.gone = True
        return self._frames()

    def _frames(self) -> list[tuple[bytes, bytes]]:
        frames = []
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            frame = bytes(self._incoming[LENGTH.size : end])
            frames.append((frame[:1], frame[1:]))
            del self._incoming[:end]
        return frames

    def started(self) -> None:
        """Notes that it is ready; its errors go elsewhere now."""
        self.ready = True
        self._errors.close()

    def kill(self) -> str:
        """Ends the process and its children at once, from any thread; returns how it had ended, in words."""
        with self._ending:
            if self._process is None:
                return "was never started"
            if self._process.returncode is None:
                code = self._ended_by_itself()
                # Right after it was reaped the number is still that of its group, or nobody's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                # One that hangs in the kernel is left behind; it is reaped when another process is started.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=5)
                self._code = code
            return _words(self._code)

    def _ended_by_itself(self) -> int | None:
        """Its exit code; None if it runs. One that closed its pipes has a moment left until it has ended."""
        assert self._process is not None
        if self.gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
        return self._process.poll()

    def end(self) -> str:
        """Ends it and closes its pipes; only for the thread that uses it. Returns how it had ended, in words."""
        words = self.kill()
        self.forget()
        return words

    def forget(self) -> None:
        """Closes this process's ends of the pipes; all that a forked child does."""
        for file in (*self._pipes, self._errors):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def errors(self) -> str:
        """The last lines that a worker that failed to start wrote."""
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(0)
            return self._errors.read().decode(errors="replace").strip()[-_TAIL:]
        return ""


def _words(code: int | None) -> str:
    if code is None:
        return "was ended"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


@contextlib.contextmanager
def _standard_numbers_taken() -> Iterator[None]:
    """Within it no file that is opened gets the number of a standard stream; a daemon may have closed these.

    A pipe to a worker with such a number would be overwritten when the worker gets its own standard streams.
    """
    held = [os.open(os.devnull, os.O_RDWR)]
    while held[-1] <= 2:
        held.append(os.open(os.devnull, os.O_RDWR))
    os.close(held.pop())
    try:
        yield
    finally:
        for number in held:
            os.close(number)


def _search_path() -> list[str]:
    """The folders that modules are found in; one that is relative to a folder that is gone holds none."""
    folders = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            folders.append(os.path.abspath(folder))
    return folders


def _errors_of_tasks(kind: str) -> int:
    """A file descriptor for what tasks write: this process's errors, nothing for the symbolic kind."""
    if kind != "symbolic" and sys.__stderr__ is not None:  # else it is a daemon, and 2 may be any file
        with contextlib.suppress(OSError):
            return os.dup(2)
    return os.open(os.devnull, os.O_WRONLY)
