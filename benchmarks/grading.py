r"""How right and how fast answers are graded: one table of figures on real golds.

    python benchmarks/grading.py [--data FOLDER] [--json OUT]

The folder holds `gsm8k_train.jsonl`, `gsm8k_test.jsonl`, `math500.jsonl` and `aime24.jsonl`, one JSON object a line
with the columns of the public data sets. Exits with 1 if a figure is not what is expected, with 2 if a file is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from gtpo_lightning.rewards import Grade, close_workers, compare, extract_answer, is_equivalent

__all__ = ["Figure", "main", "measure"]

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FILES = ("gsm8k_train", "gsm8k_test", "math500", "aime24")
MIXED, HOSTILE = 10_000, 50
# What is made to hang, to fill memory, to nest without end, or to be run. Each kind five times.
KINDS = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\binom{10^9}{5\cdot10^8}",
    "1000000!",
    r"\sum_{n=1}^{10^9}\frac{1}{n^{n}}",
    "(" * 100_000 + "1" + ")" * 100_000,
    "7" * 1_000_000,
    ",".join(rf"\ln({n})" for n in range(2, 3000)),
    r"\frac{1}{1+" * 39 + r"\sin x" + "}" * 39,
    "__import__('os').system('exit 1')",
    "\x00\ud800\u200b" * 1000,
)

Rows = dict[str, list[dict[str, Any]]]
Pair = tuple[Any, Any]


class Figure(NamedTuple):
    """One line of the table.

    Args:
        name: What is measured.
        value: The figure.
        expected: What it should be, in words; empty where it is only told.
        passed: Whether it is.
    """

    name: str
    value: float
    expected: str = ""
    passed: bool = True


def share(grades: Sequence[Grade]) -> float:
    """The share of equal pairs; 0 of none."""
    return sum(grade.equal for grade in grades) / max(len(grades), 1)


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def gsm8k_golds(rows: Rows) -> list[tuple[str, int]]:
    """Solution texts and integer golds, read without the package."""
    both = rows["gsm8k_train"] + rows["gsm8k_test"]
    return [(row["answer"], int(row["answer"].rpartition("####")[2].replace(",", ""))) for row in both]


def rightness(rows: Rows) -> list[Figure]:
    """Every gold against its solution's text, against its neighbours and in other spellings."""
    gsm8k, math = gsm8k_golds(rows), rows["math500"]
    pairs: list[Pair] = [(extract_answer(text, style="gsm8k"), gold) for text, gold in gsm8k]
    pairs += [(extract_answer(row["solution"], style="boxed"), row["answer"]) for row in math]
    integers = [gold for _, gold in gsm8k] + [int(row["answer"]) for row in rows["aime24"]]
    near: list[Pair] = [(str(wrong), gold) for gold in integers for wrong in (gold + 1, 10 * gold + 1)]
    aime = [int(row["answer"]) for row in rows["aime24"]]
    spelled: list[Pair] = [(f"{a:03d}", gold) for a in aime for gold in (a, float(a), str(a), f"{a:03d}")]
    own, wrong, zeros = share(compare(pairs)), share(compare(near)), share(compare(spelled))
    return [
        Figure(f"golds of {len(pairs)} solutions that are right", own, "1", own == 1),
        Figure("gold + 1 and 10 gold + 1 accepted", wrong, "0", wrong == 0),
        Figure("AIME golds as 033 against 33 and 33.0, right", zeros, "1", zeros == 1),
    ]


def answers(rows: Rows, number: int) -> list[Pair]:
    """Answers as models write them, right and wrong, to golds of both kinds in turns."""
    golds = [row["answer"] for row in rows["math500"]]
    golds = [gold for pair in zip(golds, map(str, (g for _, g in gsm8k_golds(rows))), strict=False) for gold in pair]
    pairs: list[Pair] = []
    for index in range(number):
        gold, other = golds[index // 8 % len(golds)], golds[(index // 8 + 2) % len(golds)]
        forms = (gold, rf"${gold}$.", gold.replace(r"\frac", r"\dfrac"), f"x = {gold}", other, f"{gold}1", None)
        pairs.append(((*forms, rf"\sqrt{{{gold}}}\cdot\sin 30^\circ")[index % 8], gold))
    return pairs


def speed(rows: Rows) -> list[Figure]:
    """Comparisons a second in one process."""
    integers = [gold for _, gold in gsm8k_golds(rows)]
    plain: list[Pair] = [(f"${gold:,}.00", str(gold)) for gold in integers]
    plain += [(str(gold + 1), str(gold)) for gold in integers]
    golds = [row["answer"] for row in rows["math500"]]
    latex: list[Pair] = [(gold.replace(r"\frac", r"\dfrac") + " ", gold) for gold in golds]
    latex += list(pairwise(golds))
    start_up = seconds(lambda: is_equivalent(r"\log_2 8", "3"))
    plain_rate = len(plain) / seconds(lambda: [is_equivalent(*pair) for pair in plain])
    return [
        Figure("first comparison of formulas, seconds", start_up),
        Figure("plain comparisons a second", plain_rate, "20,000 or more", plain_rate >= 20_000),
        Figure("LaTeX comparisons a second", len(latex) / seconds(lambda: compare(latex))),
        Figure("500 problems x 8 answers, seconds", seconds(lambda: compare(answers(rows, 4000)))),
    ]


def hostility(rows: Rows) -> list[Figure]:
    """Hostile answers among others: these keep their grades, and no process is left behind."""
    close_workers()
    before = children()
    pairs = answers(rows, MIXED - HOSTILE)
    alone = compare(pairs)
    step = MIXED // HOSTILE
    for index in range(HOSTILE):
        pairs.insert(index * step + step // 2, (KINDS[index % len(KINDS)], "5"))
    grades: list[Grade] = []
    taken = seconds(lambda: grades.extend(compare(pairs)))
    hostile = [grades[index * step + step // 2] for index in range(HOSTILE)]
    kept = [grade for index, grade in enumerate(grades) if index % step != step // 2]
    changed = sum(a != b for a, b in zip(kept, alone, strict=True))
    wrong = sum(grade.equal for grade in hostile)
    close_workers()
    left = children() - before
    return [
        Figure(f"{MIXED} answers, {HOSTILE} hostile, seconds", taken),
        Figure("other grades that changed", changed, "0", changed == 0),
        Figure("hostile answers accepted", wrong, "0", wrong == 0),
        Figure("comparisons that failed", sum(grade.failure is not None for grade in grades)),
        Figure("processes left", left, "0", left == 0),
    ]


def children() -> int:
    """Child processes of this one, by /proc; 0 where there is none."""
    found = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found += int(fields[1]) == os.getpid() and fields[0] != "Z"
    return found


def measure(folder: Path) -> list[Figure]:
    """All figures.

    Args:
        folder: Holds the files.

    Raises:
        FileNotFoundError: One is missing; the message names all that are.
    """
    missing = [f"{name}.jsonl" for name in FILES if not (folder / f"{name}.jsonl").is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in FILES
    }
    return [*speed(rows), *rightness(rows), *hostility(rows)]


def main(args: list[str] | None = None) -> int:
    """Prints the table; 0 if all figures are as expected, 1 if one is not, 2 if there is no data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the JSON Lines files")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    options = parser.parse_args(args)
    try:
        figures = measure(options.data)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    table = Table("figure", "value", "expected", "", title="Grading")
    for figure in figures:
        value = f"{figure.value:,.0f}" if figure.value >= 100 or figure.value % 1 == 0 else f"{figure.value:.3f}"
        table.add_row(figure.name, value, figure.expected, "" if figure.passed else "FAILED")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([figure._asdict() for figure in figures], indent=2) + "\n", encoding="utf-8")
    return 0 if all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
