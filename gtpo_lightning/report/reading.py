"""Reads runs: TensorBoard's event files, `results.json` of evaluations, and `run.json` where `ablate` left one."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

__all__ = ["EVENTS", "RunData", "Series", "join_series", "read_runs"]

EVENTS = "events.out.tfevents*"

Series = dict[int, float]
"""Values of a scalar by optimizer step, in the order of the steps."""

_SEED = re.compile(r"(?:seed|version)_?(\d+)")
_STAGES = {"test": "test", "validate": "val", "fit": "val"}


@dataclass
class RunData:
    """What is known of one run.

    Args:
        folder: Where it lies.
        regime: Section of the page; "" where there is one only.
        label: Name of the row or line that its seeds share.
        seed: Its seed, or the name that stands for it.
        key: Dotted key of a sweep; "" outside one.
        value: Value of that key.
        state: `finished`, `not finished`, `failed` or, where nothing tells, `unknown`.
        scalars: Series by logged name.
        results: `results.json` by the prefix its scores have in TensorBoard, `val` or `test`.
        record: `run.json`; empty without one.
        settings: `config.yaml`; empty without one.
    """

    folder: Path
    regime: str = ""
    label: str = ""
    seed: str = ""
    key: str = ""
    value: Any = None
    state: str = "unknown"
    scalars: dict[str, Series] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """The code it ran with, shortened; a "+" stands for changes on top of the commit."""
        full = str(self.record.get("commit") or "")
        return full[:12] + ("+" if full.endswith("+") else "")

    @property
    def command(self) -> str:
        """The exact command as a shell takes it; "" where it is not recorded."""
        return shlex.join(self.record.get("command", []))


def read_runs(folders: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """Every run in some folders, sorted by regime, in the order of their paths.

    Args:
        folders: Searched at any depth for folders with TensorBoard event files.

    Returns:
        The runs, and a line for each file that could not be read.

    Raises:
        ValueError: There is no run.
    """
    notes: list[str] = []
    runs: list[tuple[str, RunData]] = []
    seen: set[Path] = set()
    for folder in folders:
        for place in sorted({path.parent for path in folder.rglob(EVENTS)}, key=_natural):
            if place.resolve() not in seen:
                seen.add(place.resolve())
                runs.append(_read_run(place, folder, notes))
    kept = [(origin, run) for origin, run in runs if run.scalars or run.results]
    if not kept:
        searched = ", ".join(map(str, folders))
        problem = "; ".join(notes) or "nothing there"
        raise ValueError(f"folders: no run in {searched} ({problem}); valid: folders that hold {EVENTS} at any depth")
    # In the order of their grid; sorting keeps that of the paths where none is recorded.
    kept.sort(key=lambda item: item[1].record.get("number", 0))
    return _told_apart(kept), notes


def _told_apart(runs: list[tuple[str, RunData]]) -> list[RunData]:
    """Puts the folder's name before the regime if two runs had the same names otherwise."""
    names = [(run.regime, run.label, run.seed) for _, run in runs]
    if len(set(names)) == len(names):
        return [run for _, run in runs]
    return [replace(run, regime=" / ".join(filter(None, (origin, run.regime)))) for origin, run in runs]


def _read_run(place: Path, searched: Path, notes: list[str]) -> tuple[str, RunData]:
    """A run, and the folder that tells it from runs of the same names elsewhere."""
    run = RunData(place, record=_read_json(place / "run.json", notes), settings=_read_settings(place / "config.yaml"))
    run.scalars = join_series(_read_events(place, notes))
    for stage, prefix in _STAGES.items():
        content = _read_json(place / stage / "results.json", notes)
        if content and prefix not in run.results:
            run.results[prefix] = content
    run.state = _state(run)
    return _name(run, searched), run


def _name(run: RunData, searched: Path) -> str:
    """Names a run by its record, else by its path: …/regime/variant/seed0."""
    record = run.record
    if "label" in record:
        run.regime, run.label, run.seed = record["regime"], record["label"], str(record["seed"])
        run.key, run.value = record["key"], record["value"]
        return str(run.folder.parents[2 if run.regime else 1])
    inner = list(run.folder.resolve().relative_to(searched.resolve()).parts)
    parts = [*searched.resolve().parts[-2:], *inner]
    ending = _SEED.fullmatch(parts[-1])
    if ending is not None and len(parts) > 1:
        run.seed = ending.group(1)
        parts.pop()
        inner = inner[:-1]
    run.label = parts[-1]
    run.regime = "/".join(inner[:-1])
    return str(searched)


def _state(run: RunData) -> str:
    if "exit_code" in run.record:
        code = run.record["exit_code"]
        if code is None or run.record.get("interrupted"):
            return "not finished"
        return "finished" if code == 0 else f"failed, exit code {code}"
    return "finished" if run.results else "unknown"


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Sorts seed9 before seed10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path}: not read, {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path}: not read, it is no JSON object")
        return {}
    return content


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings that Lightning saved; they only refine the page, so a broken file is no news."""
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except Exception:  # of the YAML reader, whose kinds of error are its own
        return {}
    return content if isinstance(content, dict) else {}


def _read_events(place: Path, notes: list[str]) -> list[dict[str, Series]]:
    """The scalars of each event file, oldest file first."""
    found: list[tuple[float, dict[str, Series]]] = []
    for path in sorted(path for path in place.glob(EVENTS) if path.stat().st_size):  # one may just have been opened
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        try:
            events.Reload()
            tags = events.Tags()["scalars"]
            began = events.FirstEventTimestamp()
        except Exception as error:  # a torn or foreign file must not hide the others
            notes.append(f"{path}: not read, {type(error).__name__}: {error}")
            continue
        found.append((began, {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}))
    return [scalars for _, scalars in sorted(found, key=lambda item: item[0])]


def join_series(files: Iterable[dict[str, Series]]) -> dict[str, Series]:
    """Joins the event files of one run, oldest first, without doubled steps.

    A file with training scalars goes on with the run: of each scalar in it, what older files have from its first
    step on is replaced, since the run was set back to a checkpoint. Other files replace equal steps only.

    Example:
        >>> broken = {"train/reward": {0: 1.0, 1: 2.0, 2: 3.0}}
        >>> join_series([broken, {"train/reward": {1: 2.5}}])
        {'train/reward': {0: 1.0, 1: 2.5}}
    """
    joined: dict[str, Series] = {}
    for scalars in files:
        trains = any(name.startswith("train/") for name in scalars)
        for name, series in scalars.items():
            if not series:
                continue
            first = min(series)
            before = joined.get(name, {})
            kept = {step: value for step, value in before.items() if not trains or step < first}
            joined[name] = dict(sorted({**kept, **series}.items()))
    return joined
