"""`SFTModule`: supervised fine-tuning on reference solutions; the paper's baseline and the warm start."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.codec import PLAIN_TEMPLATE, SYSTEM_PROMPT, render_target
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.hooks import log_means
from gtpo_lightning.lora import LoRA
from gtpo_lightning.module_arguments import adamw, not_plain
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.rollout import Problem, Rollout

__all__ = ["SFTModule"]


class SFTModule(PolicyModule):
    """Teaches the policy reference solutions in the answer format, by cross-entropy over their tokens.

    A problem's completion is `meta["target"]`, else `meta["solution"]` and the answer put between the format's tags.

    Args:
        model: Hub id, folder, or an embedded name: `tiny`, `smollm2-135m`.
        max_completion_length: Tokens of a completion at most; longer targets are cut, counted and warned about.
        temperature: Temperature of sampling in evaluation; the loss is at 1.
        micro_batch_size: Rows read at once, under activation checkpointing; null keeps the activations of all.
        weights: A checkpoint of this package whose policy is the start.
        lora: Settings of adapters that are trained in place of the model, see `PolicyModule`; null trains all of it.
        adapter: A folder with a trained adapter to start from, written by peft or by `export --adapter_only`.
        dtype: How weights are kept: `float32`, `bfloat16` or `float16`; adapters are always kept in float32.
        quantization: `4bit` keeps the frozen weights below `lora` in 4 bits, by bitsandbytes.
        attention: Attention kernel of transformers; null takes flash attention where it can be had, else the default.
        gradient_checkpointing: Whether the model's layers run again in the backward pass and keep no activations.
        system_prompt: Instruction that asks for the answer format; empty for none.
        prompt_template: Prompt of tokenizers without a chat template, with `{system}` and `{question}`.
        rollout_batch_size: Prompts sampled at once in evaluation; null samples all of a batch together.
        engine: Who samples in evaluation: `local`, the policy itself, or `vllm`.
        vllm: Settings of vLLM, see `VLLM`.
        seed: Seed of the random numbers that tokens are drawn with; null takes that of `seed_everything`.
        optimizer: Builds the optimizer from parameters; AdamW with the paper's settings if left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; stepped after each optimizer step.

    Raises:
        ValueError: An argument outside its range, before any weights are read.
    """

    def __init__(
        self,
        model: str,
        max_completion_length: int = 512,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        *,
        weights: str | None = None,
        lora: LoRA | None = None,
        adapter: str | None = None,
        dtype: str = "float32",
        quantization: Literal["4bit"] | None = None,
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        system_prompt: str = SYSTEM_PROMPT,
        prompt_template: str = PLAIN_TEMPLATE,
        rollout_batch_size: int | None = None,
        engine: Literal["local", "vllm"] = "local",
        vllm: VLLM | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k != "self" and not k.startswith("__")}
        super().__init__(**arguments)
        self.save_hyperparameters(ignore=not_plain(arguments))
        self.save_hyperparameters({"lora": None if self.lora is None else self.lora.plain()})
        self.cut_targets = 0
        """Targets that `max_completion_length` cut so far, on this rank."""

    def training_step(self, problems: list[Problem], batch_idx: int) -> Tensor:
        """−(1/tokens) Σ log π(target), scalar; the mean is over all target tokens of the optimizer step."""
        prompts = self.codec.prompts(problems, self.device)
        ids, mask = self.codec.completions([render_target(problem) for problem in problems], self.device)
        self._count_cut(mask)
        ids, mask = ids[:, : self.max_completion_length], mask[:, : self.max_completion_length]
        rows = torch.arange(len(problems), device=self.device)
        rollout = Rollout(prompts=prompts, group_ids=rows, completion_ids=ids, completion_mask=mask)
        self.begin_micro_batch(rollout)
        logprobs, entropies = self.policy.score(
            prompts.ids, prompts.mask, rows, ids, mask, micro_batch_size=self.micro_batch_size
        )
        tokens = mask.sum()
        nll = -logprobs.detach().sum()
        log_means(self.trainer, self, {"train/loss": (nll, tokens)}, prog_bar=True)
        log_means(self.trainer, self, {"train/entropy": (entropies.detach().sum(), tokens)})
        return -(logprobs * mask).sum() / self.normalizer.denominator

    def _count_cut(self, mask: Tensor) -> None:
        lengths = mask.sum(dim=1)
        cut = int((lengths > self.max_completion_length).sum())
        if cut and not self.cut_targets:
            rank_zero_warn(
                f"max_completion_length: {self.max_completion_length} cuts targets of up to {int(lengths.max())} "
                "tokens; a cut target teaches not to end. They are counted in `cut_targets`."
            )
        self.cut_targets += cut
