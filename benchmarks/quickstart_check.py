"""Whether the last quickstart learned: reads its TensorBoard file, prints before and after, fails below the marks.

    python benchmarks/quickstart_check.py runs/quickstart/gtpo

The marks: at most 50 % right answers before, at least 75 % after, and at least 95 % of the completions in full format.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

__all__ = ["main", "read_scores"]

RIGHT, FORMAT = "val/arithmetic/avg@1", "val/arithmetic/format"


def read_scores(folder: Path) -> dict[str, tuple[float, float]]:
    """First and last value of the two scores in the newest run of a folder.

    Args:
        folder: Holds `version_0`, `version_1`, …

    Raises:
        FileNotFoundError: There is no run.
    """
    runs = sorted(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run; make quickstart makes one")
    events = EventAccumulator(str(runs[-1]))
    events.Reload()
    values = {name: [event.value for event in events.Scalars(name)] for name in (RIGHT, FORMAT)}
    return {name: (found[0], found[-1]) for name, found in values.items()}


def main(args: list[str] | None = None) -> int:
    """Prints the scores; 0 where they pass the marks, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/quickstart/gtpo"))
    scores = read_scores(parser.parse_args(args).folder)
    for name, (before, after) in scores.items():
        print(f"{name}: {before:.3f} before, {after:.3f} after")
    passed = scores[RIGHT][0] <= 0.5 and scores[RIGHT][1] >= 0.75 and scores[FORMAT][1] >= 0.95
    print("passed" if passed else "FAILED: at most 0.50 before, at least 0.75 after, format at least 0.95")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
