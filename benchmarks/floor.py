"""The least that a training step can take on a machine: its unavoidable operations over the rates the machine reaches.

A step of B prompts with P_b tokens and N = B·G completions of T tokens has five phases. W is the number of weights that
every token is multiplied with in the body, V·D those of the head, A = 4·D·layers the operations of one query with one
key it sees (a product for the score, one for the value). Only what differs is counted: a prompt is read once for its
group, in sampling and in training; the last token of a completion is read by nobody, so T − 1 of T are; and the G
first tokens of a group are drawn from one row of logits, so the head sees R = B + N·(T − 1) rows::

    pairs    P(P + 1)/2 of each prompt, Σ_{j < T−1} (P + j + 1) of each completion
    prefill  2·W·ΣP + A·(pairs of prompts) + 2·V·D·B
    decode   (2·W + 2·V·D)·N·(T − 1) + A·(pairs of completions)
    score    2·W·(ΣP + N·(T − 1)) + A·(all pairs) + 2·V·D·R
    backward twice score: the gradient of what is multiplied, and of the weights
    optimizer 0 operations worth counting

The bytes of a phase are those it has to move at least once: prefill and score read the weights, backward also writes
their gradients; decode reads, for each of its T − 1 steps, all weights and the keys and values of what the rows see,
those of a prompt once for its group; the optimizer (gradient norm, AdamW) passes eight times over the weights: it reads
gradients for their norm, then weights, gradients and two moments, and writes all but the gradients. A phase takes the
longer of operations over rate and bytes over bandwidth; the floor is the sum. Gradients and moments are of the weights'
type.

`python -m benchmarks.floor` measures both rates here and prints the table of every workload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["PHASES", "Rates", "costs", "floor", "main", "measure_rates"]

PHASES = ("prefill", "decode", "score", "backward", "optimizer")
_SIZE = 2048  # side of the square matrices; larger ones are no faster on two threads
_GPU_SIZE = 8192
_READ_BYTES = 2**28  # far more than any cache holds


@dataclass(frozen=True)
class Rates:
    """What a machine reaches.

    Args:
        flops: Operations a second of a large matrix product.
        bandwidth: Bytes a second read from memory.
    """

    flops: float
    bandwidth: float


def costs(work: Workload, prompt_lengths: Sequence[int] | None = None) -> dict[str, tuple[float, float]]:
    """Operations and bytes of each phase; the formulas are in the module's docstring.

    Args:
        work: The step.
        prompt_lengths: P_b of each prompt; None takes the workload's for all.
    """
    lengths = [work.prompt_tokens] * work.prompts if prompt_lengths is None else list(prompt_lengths)
    read = work.completion_tokens - 1  # tokens of a completion that are read
    body, head = 2.0 * work.body_weights, 2.0 * work.vocabulary * work.hidden
    attention = 4.0 * work.hidden * work.layers
    prompts, tokens = sum(lengths), work.rows * read
    prompt_pairs = sum(p * (p + 1) / 2 for p in lengths)
    pairs = sum(work.group * (p * read + read * (read + 1) / 2) for p in lengths)

    prefill = body * prompts + attention * prompt_pairs + head * work.prompts
    decode = (body + head) * tokens + attention * pairs
    score = body * (prompts + tokens) + attention * (prompt_pairs + pairs) + head * (work.prompts + tokens)

    size = work.number_bytes
    weights = size * (work.body_weights + work.vocabulary * work.hidden)  # an untied input embedding is not multiplied
    seen = prompts * read + work.rows * read * (read + 1) / 2
    key_values = size * 2 * work.key_value_width * work.layers * seen
    return {
        "prefill": (prefill, weights),
        "decode": (decode, weights * read + key_values),
        "score": (score, weights),
        "backward": (2 * score, 2 * weights),
        "optimizer": (0.0, 8.0 * size * work.parameters),
    }


def floor(work: Workload, rates: Rates, prompt_lengths: Sequence[int] | None = None) -> dict[str, float]:
    """Seconds of each phase, `rollout` (prefill and decode) and `total`, at least.

    Args:
        work: The step.
        rates: Of the machine, at the workload's type.
        prompt_lengths: P_b of each prompt; None takes the workload's for all.

    Returns:
        The keys of `PHASES`, `rollout` and `total`: for each phase max(operations / flops, bytes / bandwidth).
    """
    seconds = {
        phase: max(operations / rates.flops, moved / rates.bandwidth)
        for phase, (operations, moved) in costs(work, prompt_lengths).items()
    }
    return {**seconds, "rollout": seconds["prefill"] + seconds["decode"], "total": sum(seconds.values())}


def _median_seconds(function: Callable[[], Any], device: str, repeats: int) -> float:
    import torch

    seconds = []
    for _ in range(repeats + 2):  # two to warm up
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure_here(threads: int, device: str = "cpu", dtype: str = "float32", repeats: int = 9) -> Rates:
    """Measures in this process: medians of a large product, and the better of two ways to read much memory."""
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    side = _GPU_SIZE if device == "cuda" else _SIZE
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * side**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device, repeats)
    matrix = torch.ones(_READ_BYTES // (4096 * a.element_size()), 4096, device=device, dtype=kind)
    vector = torch.ones(4096, device=device, dtype=kind)
    moved = matrix.numel() * matrix.element_size()
    reads: list[Callable[[], Any]] = [lambda: torch.mv(matrix, vector), matrix.sum]
    bandwidth = max(moved / _median_seconds(read, device, repeats) for read in reads)
    return Rates(flops, bandwidth)


def measure_rates(threads: int, device: str = "cpu", dtype: str = "float32") -> Rates:
    """Measures in a process of its own, so that the caller's memory stays small."""
    command = [sys.executable, "-m", "benchmarks.floor", "--rates-only"]
    command += ["--threads", str(threads), "--device", device, "--dtype", dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Rates(**json.loads(done.stdout))


def table(rates: Rates, works: Sequence[Workload]) -> str:
    """Seconds of each phase of each workload, as lines for a terminal."""
    lines = [f"{rates.flops / 1e9:.1f} Gflop/s, {rates.bandwidth / 1e9:.1f} GB/s; seconds at least:"]
    lines.append(f"{'workload':20}" + "".join(f"{name:>11}" for name in (*PHASES, "total")))
    for work in works:
        seconds = floor(work, rates)
        lines.append(f"{work.name:20}" + "".join(f"{seconds[name]:11.3f}" for name in (*PHASES, "total")))
    return "\n".join(lines)


def parse(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rates-only", action="store_true", help="print the rates as JSON")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(args)
    rates = measure_here(options.threads, options.device, options.dtype)
    if options.rates_only:
        print(json.dumps({"flops": rates.flops, "bandwidth": rates.bandwidth}))
        return
    print(table(rates, [work for work in WORKLOADS.values() if work.dtype == options.dtype]))


if __name__ == "__main__":
    main()
