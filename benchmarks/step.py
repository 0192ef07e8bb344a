"""How long one training step takes, and how much memory, next to TRL's `GRPOTrainer` on the same work.

The work: 4 prompts of 32 tokens, 8 completions of 128 tokens each, a Llama with random weights (49,152 vocabulary
entries, 256 hidden units, 688 intermediate, 6 layers, 4 heads, tied embeddings) in fp32, one AdamW update. The
end-of-sequence id lies outside the vocabulary, so nothing ends early and neither side pays for suppressing a token.

Each side runs in a process of its own, so that peak memory is its own too, and waits for the word `step` on its
standard input. The parent sends it to one side at a time, in turns, so that both meet the same machine; medians are
compared::

    python benchmarks/step.py --steps 5 --output benchmarks/results/step.json
    python benchmarks/step.py --sides trl --trl-checkpointing

Needs the `bench` extra (`make bench-step` installs it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

__all__ = ["Pacer", "Side", "main"]

VOCABULARY = 49_152
PROMPTS = 4
GROUP = 8
PROMPT_TOKENS = 32
COMPLETION_TOKENS = 128
LEARNING_RATE = 1e-6
PEERS = {"ours": ["torch", "transformers", "lightning"], "trl": ["torch", "transformers", "trl", "accelerate"]}


# --------------------------------------------------------------------------------------------------------------- work


def build_model(folder: str, seed: int = 0) -> None:
    """Saves the random Llama and a word-level tokenizer, whose words are `w2`, `w3`, ..., to `folder`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}, "<eos>": VOCABULARY}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)


def question(index: int) -> str:
    """Prompt number `index`: exactly 32 words of the tokenizer, no two prompts alike."""
    return " ".join(f"w{2 + (index * 977 + position * 31) % (VOCABULARY - 2)}" for position in range(PROMPT_TOKENS))


def checksum(completions: list[str], **_: Any) -> list[float]:
    """The reward of both sides: costs nothing, differs within a group, and does not depend on the length."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]


# ------------------------------------------------------------------------------------------------------------- worker


class Pacer:
    """The worker's end of the pipe: waits for `step`, reports each step's seconds and parts as one JSON line.

    Args:
        replies: Where the lines go; the real standard output, kept apart from what libraries print.
    """

    def __init__(self, replies: IO[str]) -> None:
        self.replies = replies
        self.rollout = 0.0
        self.tokens = 0
        self._start = self._cpu = 0.0

    def reply(self, **values: Any) -> None:
        """Sends one JSON line to the parent."""
        print(json.dumps(values), file=self.replies, flush=True)

    def begin(self) -> None:
        """Blocks until the parent says `step`, then starts the clock; ends the process on anything else."""
        self.reply(ready=True, rss_mib=_peak_mib())
        if sys.stdin.readline().strip() != "step":
            self.reply(peak_mib=_peak_mib())
            os._exit(0)  # out of the trainer's loop, whatever it would still like to do
        self.rollout, self.tokens = 0.0, 0
        self._cpu, self._start = time.process_time(), time.perf_counter()

    def end(self) -> None:
        """Stops the clock and reports: whole step, sampling with scoring, the rest, and processor time, in seconds."""
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        self.reply(seconds=seconds, rollout=self.rollout, update=seconds - self.rollout, cpu=cpu, tokens=self.tokens)


def _peak_mib() -> float:
    """Peak resident memory of this process so far, MiB (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def work_ours(folder: str, pacer: Pacer, args: argparse.Namespace) -> None:
    """This package: `GTPOModule` with the three parts of GTPO, in a plain Lightning trainer."""
    import lightning.pytorch as pl
    import torch

    from gtpo_lightning import GTPOModule, Problem, RLCallback
    from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)

    class Clock(RLCallback):
        def on_train_batch_start(self, *_: Any) -> None:
            pacer.begin()

        def on_rollout_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Any) -> None:
            pacer.rollout = time.perf_counter() - self.start
            pacer.tokens = int(rollout.prompts.mask.sum()) * GROUP + int(rollout.lengths.sum())

        def on_train_batch_end(self, *_: Any) -> None:
            pacer.end()

    module = GTPOModule(
        model=folder,
        group_size=GROUP,
        max_completion_length=COMPLETION_TOKENS,
        temperature=1.0,
        rewards=checksum,
        optimizer=optimizer,
        system_prompt="",
        prompt_template="{question}",  # the question alone: the 32 tokens that the other side gets
        **json.loads(args.ours_settings),
    )
    trainer = pl.Trainer(
        max_steps=args.steps + 2,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ConflictMasking(), EntropyFilter(), EntropyRegularizer(), Clock()],
    )
    problems = [Problem(id=str(i), question=question(i), answer="") for i in range(PROMPTS * (args.steps + 2))]
    trainer.fit(module, torch.utils.data.DataLoader(problems, batch_size=PROMPTS, collate_fn=list))  # type: ignore[arg-type]


def work_trl(folder: str, pacer: Pacer, args: argparse.Namespace) -> None:
    """The peer: TRL's `GRPOTrainer` without a reference model, and with the settings that make it fastest."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pacer.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pacer.end()

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            pacer.rollout = time.perf_counter() - start
            pacer.tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
            return batch

    rows = PROMPTS * GROUP
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.trl_micro_batch,
        gradient_accumulation_steps=rows // args.trl_micro_batch,
        num_generations=GROUP,
        max_completion_length=COMPLETION_TOKENS,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=args.trl_checkpointing,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=args.steps + 2,
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=checksum,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question(i)} for i in range(PROMPTS * (args.steps + 2))]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    ).train()


def run_worker(args: argparse.Namespace) -> None:
    """Runs one side until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the standard error, so that replies stay JSON
    import torch

    torch.set_num_threads(args.threads)
    if args.worker == "build":
        build_model(args.folder)
    else:
        worker = {"ours": work_ours, "trl": work_trl}[args.worker]
        worker(args.folder, Pacer(replies), args)


# ------------------------------------------------------------------------------------------------------------- parent


class Side:
    """The parent's end: one worker process and what it measured.

    Args:
        name: `ours` or `trl`.
        folder: The model's folder.
        args: The command line, handed on.
    """

    def __init__(self, name: str, folder: str, args: argparse.Namespace) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        self.errors = (Path(folder).parent / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            _worker_command(name, folder, args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=_worker_environment(args.threads),
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
        """One training step, measured by the worker; a warm-up is not kept."""
        self.send("step")
        reply = self.receive("seconds")
        expected = PROMPTS * GROUP * (PROMPT_TOKENS + COMPLETION_TOKENS)
        if reply["tokens"] != expected:
            raise RuntimeError(f"{self.name}: {reply['tokens']} tokens in a step; the work is {expected}")
        self.receive("ready")  # the worker waits again: the other side has the machine to itself
        if keep:
            self.steps.append(reply)
        return reply

    def finish(self) -> dict[str, Any]:
        """Ends the worker and returns medians, all steps and memory."""
        self.send("quit")
        peak = self.receive("peak_mib")["peak_mib"]
        self.process.wait(timeout=60)
        medians = {
            part: statistics.median(s[part] for s in self.steps) for part in ("seconds", "rollout", "update", "cpu")
        }
        return {
            "median": medians,
            "steps": self.steps,
            "peak_mib": peak,
            "start_mib": self.start_mib,
            "versions": {name: version(name) for name in PEERS[self.name]},
        }


def _worker_command(name: str, folder: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--worker", name, "--folder", folder]
    command += ["--threads", str(args.threads), "--steps", str(args.steps)]
    command += ["--trl-micro-batch", str(args.trl_micro_batch), "--ours-settings", args.ours_settings]
    return [*command, "--trl-checkpointing" if args.trl_checkpointing else "--no-trl-checkpointing"]


def _worker_environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def rounds(sides: list[Side], steps: int) -> Iterator[tuple[Side, int]]:
    """Who steps when: round 0 warms up, and every round turns the order, so that neither side is always first."""
    for number in range(steps + 1):
        for side in sides if number % 2 == 0 else sides[::-1]:
            yield side, number


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all sides in turns and returns what is written to the output file."""
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "model")
        subprocess.run(
            _worker_command("build", folder, args), check=True, env=_worker_environment(args.threads), stdout=2
        )
        load = os.getloadavg()[0]
        sides = [Side(name, folder, args) for name in args.sides]
        try:
            for side, number in rounds(sides, args.steps):
                reply = side.step(keep=number > 0)
                print(
                    f"round {number} {side.name:5} {reply['seconds']:7.2f} s, cpu {reply['cpu']:7.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            results = {side.name: side.finish() for side in sides}
        finally:
            for side in sides:
                side.process.kill()
    settings = {"trl_checkpointing": args.trl_checkpointing, "trl_micro_batch": args.trl_micro_batch}
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    report: dict[str, Any] = {
        "work": __doc__.split("The work: ")[1].split("\n\n")[0].replace("\n", " ") if __doc__ else "",
        "threads": args.threads,
        "load_at_start": round(load, 2),
        "settings": {**settings, "ours": json.loads(args.ours_settings)},
        "machine": machine,
        "sides": results,
    }
    if {"ours", "trl"} <= results.keys():
        ours, peer = results["ours"], results["trl"]
        report["time_ratio"] = ours["median"]["seconds"] / peer["median"]["seconds"]
        report["memory_ratio"] = ours["peak_mib"] / peer["peak_mib"]
    return report


def table(report: dict[str, Any]) -> str:
    """The report as lines for a terminal: seconds are medians, memory is the peak of the process in GiB."""
    lines = [f"{'side':6}{'step s':>9}{'rollout s':>11}{'update s':>10}{'min..max s':>16}{'peak GiB':>10}"]
    for name, side in report["sides"].items():
        seconds = [step["seconds"] for step in side["steps"]]
        median = side["median"]
        lines.append(
            f"{name:6}{median['seconds']:9.2f}{median['rollout']:11.2f}{median['update']:10.2f}"
            f"{min(seconds):9.2f}..{max(seconds):<5.2f}{side['peak_mib'] / 1024:10.2f}"
        )
    if "time_ratio" in report:
        lines.append(f"ours / trl: time {report['time_ratio']:.3f}, peak memory {report['memory_ratio']:.3f}")
    return "\n".join(lines)


def parse(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--trl-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="TRL's layer checkpointing (its own default is on)",
    )
    parser.add_argument("--trl-micro-batch", type=int, default=32, help="completions in one backward of TRL")
    parser.add_argument("--ours-settings", default="{}", help="further arguments of GTPOModule, JSON")
    parser.add_argument("--worker", choices=["build", "ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    """Measures and prints, or is one of the workers."""
    options = parse(args)
    if options.worker:
        return run_worker(options)
    report = measure(options)
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
