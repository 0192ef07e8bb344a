"""What a run leaves in its folder beside Lightning's files: `run.json`, a lock, and what it can go on from."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gtpo_lightning
from gtpo_lightning.ablation.plan import Run

__all__ = ["LOG", "Lock", "Record", "commit", "newest_checkpoint", "now"]

LOG = "log.txt"
"""Standard output and error of all attempts at a run."""


class Record:
    """`run.json` of a run: what it is, its exact command, and every attempt at it.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / "run.json"

    def read(self) -> dict[str, Any]:
        """What is recorded; empty where nothing is, or where a crash left half a file."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def finished(self) -> bool:
        """Whether the run ended with exit code 0."""
        return self.read().get("exit_code") == 0

    def check(self) -> None:
        """Refuses to mix two settings in one folder.

        Raises:
            ValueError: The folder holds a run of another command line.
        """
        before = self.read().get("words")
        if before is not None and tuple(before) != self.run.words:
            changed = [*(f"-{w}" for w in before if w not in self.run.words),
                       *(f"+{w}" for w in self.run.words if w not in before)] or ["their order"]  # fmt: skip
            raise ValueError(
                f"{self.run.folder}: holds a run of another command line (differs in {' '.join(changed)}); valid: "
                "another folder for this grid, or remove that run"
            )

    def begin(self, command: list[str]) -> None:
        """Records an attempt that starts now."""
        content = self.read()
        attempts = [*content.get("attempts", []), {"command": command, "start": now(), "end": None, "exit_code": None}]
        names = {
            name: getattr(self.run, name) for name in ("number", "regime", "variant", "label", "key", "value", "seed")
        }
        self._write({
            **names,
            "words": list(self.run.words),
            "command": content.get("command", command),
            "cwd": os.getcwd(),
            "start": attempts[0]["start"],
            "end": None,
            "seconds": content.get("seconds", 0.0),
            "exit_code": None,
            "commit": commit(),
            "attempts": attempts,
        })  # fmt: skip

    def end(self, exit_code: int, seconds: float, *, interrupted: bool = False) -> None:
        """Records how the last attempt ended; `seconds` of all attempts add up."""
        content = self.read()
        ended = {"end": now(), "exit_code": exit_code, "interrupted": interrupted}
        content["attempts"][-1] |= {**ended, "seconds": round(seconds, 1)}
        self._write({**content, **ended, "seconds": round(content["seconds"] + seconds, 1)})

    def _write(self, content: dict[str, Any]) -> None:
        """Replaces the file as a whole, so that a crash leaves the old one or the new one."""
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)


class Lock:
    """A file that says which process is at a run. Its content names processes by host, id and time of birth.

    A lock is stale if it is of this host and neither its runner nor the runner's child is alive, or if it is of another
    host and was not touched for ten minutes.

    Args:
        folder: Folder of the run.
    """

    silence = 600.0
    """Seconds without a touch after which a lock of another host is stale."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self._touched = 0.0

    def acquire(self) -> str | None:
        """Takes the lock. Returns None, or who holds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                holder = self.holder()
                if holder is not None:
                    return holder
                continue
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"host": socket.gethostname(), "runner": _identity(os.getpid())}, file)
            return None

    def holder(self) -> str | None:
        """Who holds the lock; None if nobody does. Removes a stale lock."""
        try:
            text, age = self.path.read_text(encoding="utf-8"), time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        alive = _alive(text, age, self.silence)
        if alive is None:
            self._remove_stale(text)
        return alive

    def _remove_stale(self, text: str) -> None:
        """Removes the lock that was judged; if another process was faster, its new lock is put back."""
        aside = self.path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if aside.read_text(encoding="utf-8") != text:
            os.link(aside, self.path)
        aside.unlink()

    def name_child(self, pid: int) -> None:
        """Adds the process that the run happens in, which may outlive its runner."""
        content = {"host": socket.gethostname(), "runner": _identity(os.getpid()), "child": _identity(pid)}
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.replace(draft, self.path)

    def touch(self) -> None:
        """Says every half minute, to other hosts too, that the holder is alive."""
        if time.monotonic() - self._touched > 30:
            self._touched = time.monotonic()
            os.utime(self.path)

    def release(self) -> None:
        """Gives the lock back."""
        self.path.unlink(missing_ok=True)


def _alive(text: str, age: float, silence: float) -> str | None:
    """The living holder that a lock names, or None."""
    try:
        content = json.loads(text)
        host, processes = content["host"], [content[key] for key in ("child", "runner") if key in content]
        living = [int(pid) for pid, born in processes if _identity(int(pid)) == [pid, born]]
    except (ValueError, KeyError, TypeError):
        # A process that was killed between making the file and writing it; a living one writes within a moment.
        return "a process that is just starting" if age < 5 else None
    if host != socket.gethostname():
        return f"process {processes[-1][0]} on {host}" if age < silence else None
    return f"process {living[0]} on {host}" if living else None


def _identity(pid: int) -> list[Any]:
    """Id and time of birth of a process, since ids come again; birth is None for one that is gone."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [pid, None if state == "Z" else rest[18]]
    except FileNotFoundError:
        return [pid, None if Path("/proc/self/stat").exists() or not _signalled(pid) else "alive"]


def _signalled(pid: int) -> bool:
    """Whether a process is there, where no process table can be read."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; one that was cut while it was written does not count."""
    found = sorted(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in found if zipfile.is_zipfile(path)), None)


def commit() -> str | None:
    """Commit of the checkout the package lies in, with "+" for changed files; None outside a checkout."""
    root = Path(gtpo_lightning.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head, changed = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")


def now() -> str:
    """The time of day, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
