"""Time and memory of single functions, each in a fresh process, beside what they have to stay under.

* `conflict`: `conflict_mask` on G = 16 rows of T = 4,096 tokens, for three vocabularies: under 20 ms and 64 MB.
* `callbacks`: the hooks of the three parts of GTPO in a step of workload `a`: under 1 % of it.
* `head`, `head_dense`: `logprobs_and_entropies` at V = 151,936, D = 1,024, M = 2,048, forward and backward, and the
  same by `log_softmax` over the whole of the logits with autograd: at most 1/8 of the memory, and not slower. The
  gradients, which both sides have to return, alone are about 1/6 of what dense takes (`gradients_mib`).
* `draw`: `draw_tokens` on 32 rows of 49,152 logits: under 1 ms on an idle machine.

Extra memory is the peak of the process during a call, less what it held before, after a call of the same kind at a
small size has loaded and warmed everything up::

    python -m benchmarks.parts --output benchmarks/results/parts.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS

__all__ = ["PARTS", "main", "table", "verdicts"]

CONFLICT_VOCABULARIES = (32_000, 151_936, 2**31)
PARTS = (*(f"conflict_{size}" for size in CONFLICT_VOCABULARIES), "head", "head_dense", "draw")
HEAD = {"V": 151_936, "D": 1_024, "M": 2_048}


# --------------------------------------------------------------------------------------------------------------- worker


def conflict(vocabulary: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call that is measured, and a small one; half of the rows' tokens are shared, so that runs are long."""
    import torch

    from gtpo_lightning.functional import conflict_mask

    def call(rows: int, tokens: int) -> Callable[[], Any]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
        ids[:, : tokens // 4] = ids[:1, : tokens // 4]
        ids[:, -tokens // 4 :] = ids[:1, -tokens // 4 :]
        mask, groups = torch.ones(rows, tokens, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
        advantages = torch.linspace(-1, 1, rows)
        return lambda: conflict_mask(ids, mask, advantages, groups)

    return call(16, 4096), call(4, 64)


def head(dense: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of log-probs and entropies, by this package or over the whole of the logits."""
    import torch

    from gtpo_lightning.functional import logprobs_and_entropies

    def call(vocabulary: int, width: int, tokens: int) -> Callable[[], Any]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
        weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).requires_grad_()
        targets = torch.randint(0, vocabulary, (tokens,), generator=generator)

        def run() -> None:
            hidden.grad = weight.grad = None
            if dense:
                logprobs = (hidden @ weight.T).log_softmax(dim=-1)
                with torch.no_grad():
                    -(logprobs.exp() * logprobs).sum(dim=-1)
                chosen = logprobs.gather(1, targets[:, None])[:, 0]
            else:
                chosen, _ = logprobs_and_entropies(hidden, weight, targets)
            chosen.sum().backward()

        return run

    return call(HEAD["V"], HEAD["D"], HEAD["M"]), call(1000, 32, 64)


def draw() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Drawing a token for each of 32 rows."""
    import torch

    from gtpo_lightning.engines import Sampling
    from gtpo_lightning.engines.sampling import draw_tokens

    def call(rows: int, size: int) -> Callable[[], Any]:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(rows, size, generator=generator)
        uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
        sampling = Sampling(8, 128, 1.0)
        return lambda: draw_tokens(logits, uniforms, sampling)

    return call(32, 49_152), call(2, 1000)


def measure_here(part: str, threads: int) -> dict[str, float]:
    """One part, in this process: `ms`, a median, and `extra_mib`."""
    import torch

    torch.set_num_threads(threads)
    name, _, vocabulary = part.partition("_")
    makers: dict[str, Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]] = {
        "conflict": lambda: conflict(int(vocabulary)),
        "head": lambda: head(dense=vocabulary == "dense"),
        "draw": draw,
    }
    function, small = makers[name]()
    small()
    before = _reset_peak()
    function()
    extra = _peak() - before
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 5 or (time.perf_counter() - began < 2 and len(seconds) < 200):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    found = {"ms": 1000 * statistics.median(seconds), "extra_mib": extra, "calls": len(seconds)}
    if name == "head":
        found["gradients_mib"] = 4 * HEAD["D"] * (HEAD["V"] + HEAD["M"]) / 2**20
    return found


def _status(key: str) -> float:
    """A line of this process's memory status, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def _peak() -> float:
    return _status("VmHWM")


def _reset_peak() -> float:
    """Makes the peak the present, where Linux allows it, and returns it, MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


# --------------------------------------------------------------------------------------------------------------- parent


def _measure(part: str, threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.parts", "--worker", part, "--threads", str(threads)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _callbacks(args: argparse.Namespace) -> dict[str, float]:
    from benchmarks.step import measure_sides
    from benchmarks.step import parse as parse_step

    words = ["--steps", str(args.steps), "--threads", str(args.threads), "--sides", "ours"]
    median = measure_sides(WORKLOADS["a"], ["ours"], parse_step(words))["ours"]["median"]
    return {"ms": 1000 * median["callbacks"], "step_ms": 1000 * median["seconds"]}


def verdicts(parts: dict[str, dict[str, float]]) -> list[tuple[str, float, float, str]]:
    """What has to hold of the measured parts: (what, value, limit, unit), for those that were measured."""
    out: list[tuple[str, float, float, str]] = []
    for size in CONFLICT_VOCABULARIES:
        found = parts.get(f"conflict_{size}")
        if found:
            out.append((f"conflict_mask, vocabulary {size:,}: time", found["ms"], 20, "ms"))
            out.append((f"conflict_mask, vocabulary {size:,}: memory", found["extra_mib"] * 1.048576, 64, "MB"))
    if "callbacks" in parts:
        found = parts["callbacks"]
        out.append(("three parts of GTPO, share of a step", 100 * found["ms"] / found["step_ms"], 1, "%"))
    if {"head", "head_dense"} <= parts.keys():
        ours, dense = parts["head"], parts["head_dense"]
        out.append(("head against dense log_softmax: memory", ours["extra_mib"] / dense["extra_mib"], 1 / 8, "times"))
        out.append(("head against dense log_softmax: time", ours["ms"] / dense["ms"], 1, "times"))
    if "draw" in parts:
        out.append(("draw_tokens, 32 x 49,152", parts["draw"]["ms"], 1, "ms"))
    return out


def table(parts: dict[str, dict[str, float]]) -> str:
    """One line for each thing that has to hold, and one for each measured part."""
    lines = [f"{name:14}" + "".join(f"{key:>12} {value:<12.4g}" for key, value in found.items()).rstrip()
             for name, found in parts.items()]  # fmt: skip
    for what, value, limit, unit in verdicts(parts):
        word = "holds" if value <= limit else "MISSED"
        lines.append(f"{what:48}{value:10.3f} {unit:6} limit {limit:g} {word}")
    return "\n".join(lines)


def parse(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "callbacks"], default=[*PARTS, "callbacks"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of workload a, for `callbacks`")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    options.words = sys.argv[1:] if args is None else args
    return options


def main(args: list[str] | None = None) -> None:
    """Measures, prints and writes, or measures one part for the parent."""
    options = parse(args)
    if options.worker:
        print(json.dumps(measure_here(options.worker, options.threads)))
        return
    parts = {}
    for part in options.parts:
        parts[part] = _callbacks(options) if part == "callbacks" else _measure(part, options.threads)
    print(table(parts))
    if options.output:
        command = " ".join(["python -m benchmarks.parts", *options.words])
        holds = [
            {"what": what, "value": value, "limit": limit, "unit": unit, "holds": value <= limit}
            for what, value, limit, unit in verdicts(parts)
        ]
        report = {"command": command, "threads": options.threads, "parts": parts, "verdicts": holds}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
