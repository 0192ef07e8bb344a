"""How long one training step takes, and how much memory, next to TRL's `GRPOTrainer` and next to the machine's floor.

The work is one of `benchmarks.workloads`. Each side runs in a process of its own, so that peak memory is its own too,
and waits for the word `step` on its standard input. The parent sends it to one side at a time, in turns, so that all
meet the same machine; medians are compared. TRL takes part twice, with and without layer checkpointing (its own default
is on), and the faster of the two is the one compared with::

    python -m benchmarks.step --workload a --output benchmarks/results/step_a.json
    python -m benchmarks.step --workload b --sides ours --steps 1

The floor (`benchmarks.floor`) is that of the same run: the machine's rates are measured before and after it. Needs the
`bench` extra (`make bench-step` installs it and runs the three workloads).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.floor import Rates, floor, measure_rates
from benchmarks.report import compare, table
from benchmarks.sides import PARTS
from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["Side", "main", "measure", "measure_sides", "parse", "side_names"]

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTING = "trl-checkpointing"
_PACKAGES = {"ours": ["torch", "transformers", "lightning"], "trl": ["torch", "transformers", "trl", "accelerate"]}


class Side:
    """The parent's end: one worker process and what it measured.

    Args:
        name: `ours`, `trl` or `trl-checkpointing`.
        work: What a step is.
        folder: The model's folder.
        args: The command line, handed on.
    """

    def __init__(self, name: str, work: Workload, folder: str, args: argparse.Namespace) -> None:
        self.name = name
        self.work = work
        self.steps: list[dict[str, Any]] = []
        self.errors = (Path(folder).parent / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            worker_command(name, work, folder, args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=_environment(args.threads),
        )
        self.start_mib = self.receive("rss_mib")["rss_mib"]

    def receive(self, key: str) -> dict[str, Any]:
        """The next reply that has `key`.

        Raises:
            RuntimeError: The worker ended without one; the message has the end of what it printed.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply: dict[str, Any] = json.loads(line)
            if key in reply:
                return reply
        self.errors.seek(0)
        raise RuntimeError(f"the worker {self.name} ended early:\n{self.errors.read()[-4000:]}")

    def send(self, word: str) -> None:
        """Writes one line to the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def step(self, keep: bool) -> dict[str, Any]:
        """One training step, measured by the worker; a warm-up is not kept.

        Raises:
            RuntimeError: The worker did other work than it should.
        """
        self.send("step")
        reply = self.receive("seconds")
        check_work(self.name, self.work, reply)
        self.receive("ready")  # the worker waits again: the other sides have the machine to themselves
        if keep:
            self.steps.append(reply)
        return reply

    def finish(self) -> dict[str, Any]:
        """Ends the worker and returns medians, all steps and memory."""
        self.send("quit")
        memory = self.receive("peak_mib")
        self.process.wait(timeout=60)
        packages = _PACKAGES[self.name.split("-")[0]]
        return {
            "median": medians(self.steps),
            "steps": self.steps,
            "peak_mib": memory["peak_mib"],
            "rss_peak_mib": memory["rss_peak_mib"],
            "start_mib": self.start_mib,
            "versions": {name: version(name) for name in packages},
        }


def check_work(name: str, work: Workload, reply: dict[str, Any]) -> None:
    """Refuses a step that is not the workload's.

    Raises:
        RuntimeError: Other prompts or other completions than the workload has.
    """
    tokens, expected = reply["completion_tokens"], work.rows * work.completion_tokens
    if tokens != expected:
        raise RuntimeError(f"{name}: {tokens} tokens in the completions of a step; the work is {expected}")
    lengths = reply["prompt_lengths"]
    right = [work.prompt_tokens] * work.prompts
    if len(lengths) != work.prompts or (work.family != "smollm2" and lengths != right):
        raise RuntimeError(f"{name}: prompts of {lengths} tokens in a step; the work is {right}")


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of the whole step, its processor time and each part, in seconds; `callbacks` is inside other parts."""
    parts = (*PARTS, *(["callbacks"] if any("callbacks" in step["parts"] for step in steps) else []))
    return {
        **{name: statistics.median(step[name] for step in steps) for name in ("seconds", "cpu")},
        **{part: statistics.median(step["parts"].get(part, 0.0) for step in steps) for part in parts},
    }


def worker_command(name: str, work: Workload, folder: str, args: argparse.Namespace) -> list[str]:
    """The command line of a worker: `build`, `ours`, `trl` or `trl-checkpointing`."""
    command = [sys.executable, "-m", "benchmarks.sides", name.split("-")[0], "--folder", folder]
    command += ["--work", work.to_json(), "--data", str(args.data), "--steps", str(args.steps)]
    command += ["--threads", str(args.threads), "--device", args.device, "--ours-settings", args.ours_settings]
    command += ["--trl-micro-batch", str(args.trl_micro_batch)]
    return [*command, "--trl-checkpointing" if name == CHECKPOINTING else "--no-trl-checkpointing"]


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def rounds(sides: list[Side], steps: int) -> Iterator[tuple[Side, int]]:
    """Who steps when: round 0 warms up, and every round turns the order, so that no side is always first."""
    for number in range(steps + 1):
        for side in sides if number % 2 == 0 else sides[::-1]:
            yield side, number


def side_names(sides: list[str], trl_settings: str) -> list[str]:
    """The processes of a run: `trl` stands for the settings asked for.

    Args:
        sides: `ours`, `trl`.
        trl_settings: `off`, `on` or `both`: TRL's layer checkpointing.
    """
    peers = {"off": ["trl"], "on": [CHECKPOINTING], "both": ["trl", CHECKPOINTING]}[trl_settings]
    return [name for side in sides for name in (peers if side == "trl" else [side])]


def measure_sides(work: Workload, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Runs processes in turns and returns what each measured, by name."""
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "model")
        Path(folder).mkdir()
        build = worker_command("build", work, folder, args)
        subprocess.run(build, check=True, env=_environment(args.threads), stdout=2)
        sides: list[Side] = []
        try:
            for name in names:
                sides.append(Side(name, work, folder, args))
            for side, number in rounds(sides, args.steps):
                reply = side.step(keep=number > 0)
                print(
                    f"{work.name} round {number} {side.name:17} {reply['seconds']:7.2f} s, cpu {reply['cpu']:7.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            results = {side.name: side.finish() for side in sides}
        finally:
            for side in sides:
                side.process.kill()
    lengths = {name: [step["prompt_lengths"] for step in side["steps"]] for name, side in results.items()}
    if any(found != lengths[names[0]] for found in lengths.values()):
        raise RuntimeError(f"the sides had different prompts: {lengths}")
    return results


def measure(work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a workload and returns what is written to the output file."""
    load = os.getloadavg()[0]
    before = measure_rates(args.threads, args.device, work.dtype)
    results = measure_sides(work, side_names(args.sides, args.trl_settings), args)
    after = measure_rates(args.threads, args.device, work.dtype)
    rates = Rates((before.flops + after.flops) / 2, (before.bandwidth + after.bandwidth) / 2)
    steps = next(iter(results.values()))["steps"]
    floors = [floor(work, rates, step["prompt_lengths"]) for step in steps]
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.step", *(args.words or [])]),
        "workload": work.name,
        "work": work.describe(),
        "threads": args.threads,
        "device": args.device,
        "load_at_start": round(load, 2),
        "settings": {"trl_micro_batch": args.trl_micro_batch or work.rows, "ours": json.loads(args.ours_settings)},
        "machine": _machine(args.device),
        "rates": {
            "gflops": [round(r.flops / 1e9, 2) for r in (before, after)],
            "gb_per_s": [round(r.bandwidth / 1e9, 2) for r in (before, after)],
        },
        "floor": {phase: statistics.median(one[phase] for one in floors) for phase in floors[0]},
        "sides": results,
    }
    return {**report, **compare(report)}


def _machine(device: str) -> dict[str, Any]:
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        name = "import torch; print(torch.cuda.get_device_name())"
        machine["gpu"] = subprocess.run(
            [sys.executable, "-c", name], check=True, capture_output=True, text=True
        ).stdout.strip()
    return machine


def add_run_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """What every benchmark of steps takes."""
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each side, after one warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with gsm8k_train.jsonl")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--trl-micro-batch", type=int, default=0, help="completions in one backward of TRL; 0: all")
    parser.add_argument("--ours-settings", default="{}", help="further arguments of GTPOModule, JSON")


def parse(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="a")
    parser.add_argument("--sides", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument("--trl-settings", choices=["off", "on", "both"], default="both", help="layer checkpointing")
    parser.add_argument(
        "--trl-checkpointing", dest="trl_settings", action="store_const", const="on", help="as --trl-settings on"
    )
    add_run_arguments(parser, steps=5)
    options = parser.parse_args(args)
    options.words = sys.argv[1:] if args is None else args
    return options


def main(args: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    options = parse(args)
    report = measure(WORKLOADS[options.workload], options)
    print(table(report))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
