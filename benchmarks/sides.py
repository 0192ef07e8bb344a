"""The two sides of the step benchmark, each a process that does one training step when its parent says `step`.

`python -m benchmarks.sides NAME` is started by `benchmarks.step` and answers with one JSON line a step on its standard
output; see `Pacer`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import zlib
from pathlib import Path
from typing import IO, Any

from benchmarks.workloads import WORKLOADS, Workload, build, read_prompts

__all__ = ["PARTS", "Pacer", "checksum", "main"]

LEARNING_RATE = 1e-6
PARTS = ("rollout", "reward", "score", "backward", "optimizer")
_METHOD = ("ConflictMasking", "EntropyFilter", "EntropyRegularizer")


def checksum(completions: list[str], **_: Any) -> list[float]:
    """The reward of both sides: costs nothing, differs within a group, and does not depend on the length."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]


class Pacer:
    """The worker's end of the pipe: waits for `step`, reports each step's seconds and parts as one JSON line.

    Args:
        replies: Where the lines go; the real standard output, kept apart from what libraries print.
        device: `cpu` or `cuda`; the clock is read when the device has done all before.
    """

    def __init__(self, replies: IO[str], device: str = "cpu") -> None:
        self.replies = replies
        self.device = device
        self.parts: dict[str, float] = {}
        self.prompt_lengths: list[int] = []
        self.completion_tokens = 0
        self._start = self._cpu = self._mark = 0.0

    def reply(self, **values: Any) -> None:
        """Sends one JSON line to the parent."""
        print(json.dumps(values), file=self.replies, flush=True)

    def now(self) -> float:
        """Seconds, with the device's work done."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """Blocks until the parent says `step`, then starts the clock; ends the process on anything else."""
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()  # the other sides need the memory; the peak is counted before
        self.reply(ready=True, rss_mib=_rss_mib())
        if sys.stdin.readline().strip() != "step":
            self.reply(peak_mib=_peak_mib(self.device), rss_peak_mib=_rss_mib())
            os._exit(0)  # out of the trainer's loop, whatever it would still like to do
        self.parts = {}
        self._cpu, self._start = time.process_time(), self.now()
        self._mark = self._start

    def add(self, part: str, seconds: float) -> None:
        """Counts seconds of a part, of which a step may have several stretches."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def lap(self, part: str) -> None:
        """The time since the last lap, or the step's start, was this part."""
        now = self.now()
        self.add(part, now - self._mark)
        self._mark = now

    def end(self) -> None:
        """Stops the clock and reports seconds (whole step, parts, processor time) and what was worked on."""
        seconds, cpu = self.now() - self._start, time.process_time() - self._cpu
        self.reply(
            seconds=seconds,
            cpu=cpu,
            parts=self.parts,
            prompt_lengths=self.prompt_lengths,
            completion_tokens=self.completion_tokens,
        )


def _rss_mib() -> float:
    """Peak resident memory of this process so far, MiB (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _peak_mib(device: str) -> float:
    """Peak memory of the process, or of its tensors on the GPU."""
    if device != "cuda":
        return _rss_mib()
    import torch

    return torch.cuda.max_memory_allocated() / 2**20


def work_ours(work: Workload, pacer: Pacer, args: argparse.Namespace) -> None:
    """This package: `GTPOModule` with the three parts of GTPO, in a plain Lightning trainer."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.profilers import Profiler

    from gtpo_lightning import GTPOModule, Problem, RLCallback
    from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    class TimedModule(GTPOModule):
        def reward(self, rollout: Any) -> None:
            pacer.lap("rollout")
            super().reward(rollout)
            pacer.lap("reward")

    class Clock(RLCallback):
        def on_train_batch_start(self, *_: Any) -> None:
            pacer.begin()

        def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Any) -> None:
            pacer.lap("rollout")
            pacer.prompt_lengths = rollout.prompts.mask.sum(dim=1).tolist()
            pacer.completion_tokens = int(rollout.lengths.sum())

        def on_before_backward(self, *_: Any) -> None:
            pacer.lap("score")

        def on_after_backward(self, *_: Any) -> None:
            pacer.lap("backward")

        def on_train_batch_end(self, *_: Any) -> None:
            pacer.lap("optimizer")
            pacer.end()

    class HookClock(Profiler):
        """Counts the time of the three parts' hooks as `callbacks`, which is a share of the other parts of a step."""

        def __init__(self) -> None:
            super().__init__()
            self.started: dict[str, float] = {}

        def start(self, action_name: str) -> None:
            if any(name in action_name for name in _METHOD):
                self.started[action_name] = pacer.now()

        def stop(self, action_name: str) -> None:
            if action_name in self.started:
                pacer.add("callbacks", pacer.now() - self.started.pop(action_name))

    module = TimedModule(
        model=args.folder,
        group_size=work.group,
        max_completion_length=work.completion_tokens,
        temperature=1.0,
        rewards=checksum,
        optimizer=optimizer,
        system_prompt="",
        prompt_template="{question}",  # the text alone: the tokens that the other side gets
        dtype=work.dtype,
        **json.loads(args.ours_settings),
    )
    trainer = pl.Trainer(
        max_steps=args.steps + 2,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
        profiler=HookClock(),
        callbacks=[ConflictMasking(), EntropyFilter(), EntropyRegularizer(), Clock()],
    )
    problems = [Problem(id=str(i), question=text, answer="") for i, text in enumerate(read_prompts(args.folder))]
    loader: Any = torch.utils.data.DataLoader(problems, batch_size=work.prompts, collate_fn=list)  # type: ignore[arg-type]
    trainer.fit(module, loader)


def work_trl(work: Workload, pacer: Pacer, args: argparse.Namespace) -> None:
    """The peer: TRL's `GRPOTrainer` without a reference model."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pacer.begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.start = pacer.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pacer.add("optimizer", pacer.now() - self.start)
            pacer.end()

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            start = pacer.now()
            rewards = super()._calculate_rewards(*args, **kwargs)
            pacer.add("reward", pacer.now() - start)
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start, before = pacer.now(), pacer.parts.get("reward", 0.0)
            batch = super()._generate_and_score_completions(inputs)
            rewards = pacer.parts["reward"] - before
            pacer.add("rollout", pacer.now() - start - rewards)
            pacer.prompt_lengths = batch["prompt_mask"].sum(dim=1)[:: work.group].tolist()
            pacer.completion_tokens = int(batch["completion_mask"].sum())
            return batch

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            start = pacer.now()
            loss = super().compute_loss(*args, **kwargs)
            pacer.add("score", pacer.now() - start)
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            before, start = sum(pacer.parts.values()), pacer.now()
            loss = super().training_step(*args, **kwargs)
            inside = sum(pacer.parts.values()) - before
            pacer.add("backward", pacer.now() - start - inside)
            return loss

    micro_batch = args.trl_micro_batch or work.rows
    config = GRPOConfig(
        output_dir=args.folder,
        use_cpu=args.device == "cpu",
        bf16=work.dtype == "bfloat16",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.rows // micro_batch,
        num_generations=work.group,
        max_completion_length=work.completion_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=args.trl_checkpointing,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=args.steps + 2,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, work.dtype)),
        reward_funcs=checksum,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in read_prompts(args.folder)]),
        processing_class=AutoTokenizer.from_pretrained(args.folder),
        callbacks=[Clock()],
    ).train()


def parse(args: list[str] | None) -> argparse.Namespace:
    """The worker's command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["build", "ours", "trl"])
    parser.add_argument("--work", type=Workload.from_json, default=WORKLOADS["a"], help="JSON of a Workload")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--trl-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--trl-micro-batch", type=int, default=0)
    parser.add_argument("--ours-settings", default="{}")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    """Builds the folder, or runs one side until the parent closes the pipe."""
    options = parse(args)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the standard error, so that replies stay JSON
    import torch

    torch.set_num_threads(options.threads)
    if options.side == "build":
        return build(options.work, options.folder, options.work.prompts * (options.steps + 2), options.data)
    worker = {"ours": work_ours, "trl": work_trl}[options.side]
    return worker(options.work, Pacer(replies, options.device), options)


if __name__ == "__main__":
    main()
