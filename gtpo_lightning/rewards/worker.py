"""The program of a worker process, started by path: it must not import this package, which would load torch.

Both directions carry frames: eight bytes of length, one byte that says what it is, then the content.

    from the parent   S set-up (pickled dict), T task (pickled)
    to the parent     R ready, A task taken, V value (pickled), E error (text)
"""

from __future__ import annotations

import sys

# The folder of a program comes first on its path; the files beside this one would hide modules of the same names.
if __name__ == "__main__" and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]

import contextlib
import fcntl
import importlib.util
import os
import pickle
import resource
import select
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["LENGTH", "main"]

LENGTH = struct.Struct("!Q")

# Seconds after which the kernel ends a task that outlived its limit: its parent, which should have, is gone.
_GRACE = 3.0
_PAGE = resource.getpagesize()


class _Pipes:
    """The two pipes to the parent, out of reach of what tasks read and print."""

    def __init__(self) -> None:
        self.input, self.output = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        # When the parent's end closes within a task, the kernel kills this process and its children, also where C code
        # never returns to Python. Not every system can; the timer of `guarded` is there on all.
        self._signals = getattr(os, "O_ASYNC", 0)
        try:
            fcntl.fcntl(self.input, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(self.input, fcntl.F_SETSIG, signal.SIGKILL)
        except (AttributeError, OSError):
            self._signals = 0

    def read(self, timeout: float | None = None) -> bytes | None:
        """The next frame; None when there is none within the time, or no parent."""
        poll = select.poll()
        poll.register(self.input, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return None
        head = self._exactly(LENGTH.size)
        return None if head is None else self._exactly(*LENGTH.unpack(head))

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.input, min(size - len(data), 1 << 20))
            if not chunk:
                return None
            data += chunk
        return bytes(data)

    def send(self, kind: bytes, content: bytes = b"") -> None:
        left = memoryview(LENGTH.pack(1 + len(content)) + kind + content)
        while left:
            left = left[os.write(self.output, left) :]

    @contextlib.contextmanager
    def guarded(self, limit: float) -> Iterator[None]:
        """Within it this process does not outlive its parent."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit + _GRACE)
        flags = fcntl.fcntl(self.input, fcntl.F_GETFL)
        fcntl.fcntl(self.input, fcntl.F_SETFL, flags | self._signals)
        poll = select.poll()
        poll.register(self.input, 0)
        if poll.poll(0):  # closed before the signal was asked for
            _leave()
        try:
            yield
        finally:
            fcntl.fcntl(self.input, fcntl.F_SETFL, flags)
            signal.setitimer(signal.ITIMER_REAL, 0)


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    except OSError:
        return 0


def _limit_memory(room: int | None) -> int:
    """Lets the address space grow by `room` bytes; returns the size at which half of it is used, 0 for no limit."""
    size = _address_space()
    if room is None or not size:
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + room if hard == resource.RLIM_INFINITY else min(size + room, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return size + room // 2


def _symbolic(_: Any) -> Callable[[Any], Any]:
    """Tasks are lists of (prediction, gold); results are lists of bools."""
    path = Path(__file__).with_name("math_verify_equal.py")
    spec = importlib.util.spec_from_file_location("math_verify_equal", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda pairs: [module.equal(prediction, gold) for prediction, gold in pairs]


def _functions(pickled: bytes) -> Callable[[Any], Any]:
    """Tasks are (args, kwargs) of one function; results are what it returns, an iterator as a list."""
    function = pickle.loads(pickled)

    def call(task: Any) -> Any:
        args, kwargs = task
        value = function(*args, **kwargs)
        return list(value) if isinstance(value, Iterator) else value

    return call


_KINDS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {"symbolic": _symbolic, "functions": _functions}


def _answer(call: Callable[[Any], Any], frame: bytes) -> tuple[bytes, bytes, bool]:
    """The reply to a task, and whether this process can go on: not after it ran out of memory."""
    try:
        value = call(pickle.loads(frame[1:]))
    except BaseException as error:  # a task that calls `sys.exit` has failed like any other
        return b"E", f"{type(error).__name__}: {error}".encode(errors="replace"), not isinstance(error, MemoryError)
    try:
        return b"V", pickle.dumps(value, pickle.HIGHEST_PROTOCOL), True
    except Exception as error:
        text = f"a result of type {type(value).__name__} cannot be sent back ({type(error).__name__}: {error})"
        return b"E", text.encode(errors="replace"), not isinstance(error, MemoryError)


def _leave() -> None:
    """Ends this process and whatever its tasks started."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)


def _prepare(setup: dict[str, Any]) -> Callable[[Any], Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # of two processes, the kernel shall end this one and not the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.path[:] = setup["path"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    call = _KINDS[setup["kind"]](setup["content"])
    # Until here errors went to a file of the parent's; what tasks write goes where the parent's own errors go.
    os.dup2(setup["stderr"], 2)
    os.close(setup["stderr"])
    os.dup2(2, 1)
    return call


def main() -> None:
    """Answers tasks until the parent is gone, or has nothing to ask for a while."""
    pipes = _Pipes()
    frame = pipes.read()
    if frame is None:
        return
    setup = pickle.loads(frame[1:])
    call = _prepare(setup)
    full = _limit_memory(setup["memory_limit"])
    pipes.send(b"R")
    going = True
    # One that has used half of its memory leaves after its answer, so that no task pays for those before it.
    while going and not (full and _address_space() > full):
        frame = pipes.read(setup["idle_s"])
        if frame is None:
            break
        pipes.send(b"A")
        with pipes.guarded(setup["time_limit"]):
            kind, content, going = _answer(call, frame)
        pipes.send(kind, content)
    _leave()


if __name__ == "__main__":
    main()
