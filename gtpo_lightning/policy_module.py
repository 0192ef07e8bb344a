"""What every training module of this package shares: the policy, its prompts, evaluation and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from gtpo_lightning.adapters import seed_dropout
from gtpo_lightning.checkpoint_folders import check_checkpoint
from gtpo_lightning.codec import PLAIN_TEMPLATE, SYSTEM_PROMPT, Codec
from gtpo_lightning.completion_store import CompletionStore
from gtpo_lightning.engines import Completions, Engine, OnFinished, Sampling
from gtpo_lightning.engines.building import build_engine, compute_dtype
from gtpo_lightning.engines.vllm_settings import VLLM, vllm_settings
from gtpo_lightning.fit_checks import check_fit
from gtpo_lightning.hooks import StepWindow
from gtpo_lightning.judging import Sample
from gtpo_lightning.lora import LoRA, lora_settings
from gtpo_lightning.models import check_name
from gtpo_lightning.module_arguments import adamw, check_builders, check_counts, check_dtype
from gtpo_lightning.normalizer import Normalizer
from gtpo_lightning.optimizer_settings import OptimizerSettings
from gtpo_lightning.policy import Policy
from gtpo_lightning.policy_source import PolicySource
from gtpo_lightning.rewards.pool import close_workers
from gtpo_lightning.rollout import Problem, Prompts, Rollout
from gtpo_lightning.schedulers import WarmupCosine
from gtpo_lightning.seeding import seed_or_global
from gtpo_lightning.strategies import check_run, clip_norm, read_whole, saves_parts, split
from gtpo_lightning.trained_part import drop_frozen, trained_part

__all__ = ["PolicyModule"]


class PolicyModule(pl.LightningModule):
    """A policy that can sample, be evaluated and be optimised; how it is trained is up to the subclass.

    The tokenizer is read at once, so that data modules can measure prompts; the weights are read in `configure_model`,
    inside the strategy's context, after all arguments were checked.

    Args:
        model: Hub id, folder, or an embedded name: `tiny`, `smollm2-135m`. On the command line a checkpoint
            (`ckpt_path`) fills it in.
        weights: A checkpoint of this package whose policy is the start, such as that of a supervised warm start. A
            resumed run (`ckpt_path`) takes its weights from there instead. With `lora` it may hold a whole policy, over
            which a new adapter is trained, or an adapter that is trained on.
        lora: Settings of adapters that are trained in place of the model (`rank`, `alpha`, `targets`, …, see `LoRA`).
            A checkpoint then holds the adapters only, and where what they lie over came from: a resumed run needs that
            model, and the checkpoint that was given as `weights` where there was one (named again as `weights` if it
            has moved). Null trains the whole model.
        adapter: A folder with a trained adapter to start from, written by peft or by `export --adapter_only`.
        dtype: How weights are kept: `float32`, `bfloat16` or `float16`; adapters are always kept in float32. Mixed
            precision is the trainer's `precision`.
        quantization: `4bit` keeps the frozen weights below `lora` in 4 bits (NF4), by the package bitsandbytes.
        attention: Attention kernel of transformers, such as `sdpa`, `eager` or `flash_attention_2`; null takes flash
            attention where it can be had (the package flash_attn, a GPU, `dtype` in half precision), else the default.
        gradient_checkpointing: Whether the model's layers run again in the backward pass and keep no activations. Less
            memory for one more forward; `micro_batch_size` does the same for rows, and both add up.
        system_prompt: Instruction that asks for the answer format; empty for none.
        prompt_template: Prompt of tokenizers without a chat template, with `{system}` and `{question}`.
        max_completion_length: Tokens of a completion at most (T).
        temperature: Temperature of sampling and of log-probs and entropies.
        rollout_batch_size: Prompts sampled at once; null samples all of a step together. vLLM decides for itself.
        engine: Who samples: `local`, the policy itself, or `vllm`, by a copy of its weights that follows them.
        vllm: Settings of vLLM, see `VLLM`.
        micro_batch_size: Completions scored at once, under activation checkpointing; null keeps the activations of all.
        seed: Seed of the random numbers that tokens are drawn with; null takes that of `seed_everything`.
        optimizer: Builds the optimizer from parameters; AdamW with the paper's settings if left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; stepped after each optimizer step.

    Raises:
        ValueError: An argument outside its range, an unknown dtype, a model or checkpoint that cannot be read.
    """

    def __init__(
        self,
        model: str | None = None,
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
        max_completion_length: int = 512,
        temperature: float = 1.0,
        rollout_batch_size: int | None = None,
        engine: Literal["local", "vllm"] = "local",
        vllm: VLLM | None = None,
        micro_batch_size: int | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        model = check_name(model)
        check_builders(optimizer, lr_scheduler)
        check_counts(rollout_batch_size=rollout_batch_size, micro_batch_size=micro_batch_size)
        check_dtype(dtype)
        self.vllm = vllm_settings(engine, vllm)
        if weights is not None:
            check_checkpoint(weights, "weights")
        self.eval_sampling = Sampling(max_completion_length=max_completion_length, temperature=temperature)
        self.completion_store: CompletionStore | None = None
        """Where evaluation keeps finished completions; what it holds is not sampled again."""
        self.checkpoint_step = 0
        """Optimizer steps of the checkpoint that the weights were read from."""
        self.model_name = model
        self.weights = weights
        self.lora = lora_settings(lora, adapter)
        self.temperature = temperature
        self.max_completion_length = max_completion_length
        self.rollout_batch_size = rollout_batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed_or_global(seed)
        self.optimizer_settings = OptimizerSettings()
        self.step_window = StepWindow()
        self.normalizer = Normalizer("token")
        self.build_optimizer = optimizer
        self.build_lr_scheduler = lr_scheduler
        self.codec = Codec.of_model(model, system_prompt=system_prompt, prompt_template=prompt_template)
        self.source = PolicySource(
            model,
            dtype=dtype,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=self.lora,
            adapter=adapter,
            quantization=quantization,
            seed=self.seed,
        )
        """Makes the policy, and others of the same model."""
        self.policy: Policy = None  # type: ignore[assignment]
        self._engine: Engine | None = None
        self._trained: frozenset[str] | None = None

    def configure_model(self) -> None:
        """Reads the weights once, in the strategy's context, and splits them where the strategy asks for it."""
        strategy = None if self._trainer is None else self._trainer.strategy
        if self._trainer is not None:
            check_run(self._trainer, self.source.quantization, self.vllm)
        with read_whole(strategy):
            self._make_policy("cpu" if strategy is None else strategy.root_device.type)
            self.add_models()
        self._keep_buffers_local()
        split(self)

    def _make_policy(self, device: str) -> None:
        if self.policy is None:
            self.source.device = device
            self.policy = self.source.start(self.weights)
            self.codec.add_end_ids(self.policy.causal_lm.config, self.policy.causal_lm.generation_config)
            self.codec.vocab_size = self.policy.causal_lm.config.get_text_config(decoder=True).vocab_size
            self.policy.train()  # sampling and scoring switch dropout off themselves and restore the mode they found
            if self.lora is not None:
                self._trained = trained_part(self)

    def add_models(self) -> None:
        """What a subclass holds beside the policy; called each time, before weights are split."""

    def build_policy(self, weights: str | None) -> Policy:
        """A policy of the model, with the weights of a checkpoint of this package or with the model's own."""
        return self.source.of_checkpoint(weights)

    def _keep_buffers_local(self) -> None:
        """Tells DDP to leave buffers alone.

        A model's buffers are constants (rotary frequencies). Broadcasting them at every forward, as DDP does by
        default, would make ranks wait for each other in validation, where their numbers of batches differ.
        """
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Builds the policy before its weights are restored, so that `load_from_checkpoint` works.

        Raises:
            ValueError: The checkpoint has no adapter and this module has, or the other way round, or what the adapter
                lies over is gone or changed.
        """
        record = checkpoint.get("adapter")
        if self.policy is None and self.weights is None and record is not None:
            self.weights = record["base"]["source"]
        self.configure_model()
        self.source.resume(self.policy, record)
        self.checkpoint_step = int(checkpoint.get("global_step", 0))
        if self._trainer is not None and self._trainer.state.fn == "fit":
            self.optimizer_settings.load(checkpoint, self.build_optimizer)

    # sampling

    @property
    def engine(self) -> Engine:
        """Who samples; the local engine unless another was set."""
        if self._engine is None:
            self.configure_model()
            precision = "" if self._trainer is None else str(self._trainer.precision)
            self._engine = build_engine(
                self.policy,
                self.codec,
                vllm=self.vllm,
                batch_size=self.rollout_batch_size,
                dtype=compute_dtype(self.source.dtype, precision),
                version=self._optimizer_steps,
            )
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    def _optimizer_steps(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_step

    def on_fit_start(self) -> None:
        """Readies the engine on every process, whether it will have something to sample or not."""
        self.engine.start()

    def on_validation_start(self) -> None:
        """As `on_fit_start`: weights have changed since."""
        self.engine.start()

    def on_test_start(self) -> None:
        """As `on_fit_start`."""
        self.engine.start()

    def on_predict_start(self) -> None:
        """As `on_fit_start`."""
        self.engine.start()

    def prompt_length(self, problem: Problem) -> int:
        """Tokens of a problem's prompt; what data modules compare with `max_prompt_length`."""
        return len(self.codec.prompt_ids(problem))

    def sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        stage: str,
        *,
        first_member: int = 0,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """Samples completions of each prompt and decodes them; nothing is scored yet.

        Args:
            prompts: B prompts.
            sampling: All settings; `sampling.num_samples` completions of each prompt.
            stage: `train`, `val` or `test`; part of the key of the random numbers.
            first_member: Number of a problem's first completion; those before it were sampled earlier.
            on_finished: Told of rows as they end; see `Engine.generate`.
        """
        members = range(first_member, first_member + sampling.num_samples)
        epoch = self.current_epoch if stage == "train" else 0
        keys = [(self.seed, stage, epoch, problem.id, member) for problem in prompts.problems for member in members]
        out = self.engine.generate(
            prompts, sampling, keys, show_progress=self._shows_progress(), on_finished=on_finished
        )
        return Rollout(
            prompts=prompts,
            group_ids=torch.arange(len(prompts), device=out.ids.device).repeat_interleave(sampling.num_samples),
            completion_ids=out.ids,
            completion_mask=out.mask,
            truncated=out.truncated,
            lengths=out.lengths,
            texts=self.codec.decode(out.ids, out.lengths),
            sampled_logprobs=out.logprobs,
            sampled_entropies=out.entropies,
            temperature=sampling.temperature,
        )

    def _shows_progress(self) -> bool:
        if self._trainer is None or not self._trainer.is_global_zero:
            return False
        return bool(getattr(self._trainer.progress_bar_callback, "is_enabled", False))

    # evaluation

    def validation_step(  # type: ignore[override]
        self, problems: list[Problem], batch_idx: int, dataloader_idx: int = 0
    ) -> Rollout:
        """Samples with the evaluation settings and returns the rollout; callbacks judge it.

        With a `completion_store` the rollout holds only what was sampled now; the store holds everything.
        """
        return self._evaluate(problems, "val")

    def test_step(  # type: ignore[override]
        self, problems: list[Problem], batch_idx: int, dataloader_idx: int = 0
    ) -> Rollout:
        """As `validation_step`."""
        return self._evaluate(problems, "test")

    def predict_step(self, problems: list[Problem], batch_idx: int, dataloader_idx: int = 0) -> Rollout:
        """As `test_step`, with the same random numbers."""
        return self._evaluate(problems, "test")

    def _evaluate(self, problems: list[Problem], stage: str) -> Rollout:
        """Samples what the store lacks, and gives it to the store row by row."""
        store = self.completion_store
        if store is None:
            return self.sample(self.codec.prompts(problems, self.device), self.eval_sampling, stage)
        missing = [problem for problem in problems if not store.finished(problem)]
        first = min((store.known(problem) for problem in missing), default=0)
        sampling = replace(self.eval_sampling, num_samples=self.eval_sampling.num_samples - first)

        def keep(rows: Sequence[int], out: Completions) -> None:
            lengths = out.lengths[rows]
            texts = self.codec.decode(out.ids[rows], lengths)
            for row, *sample in zip(rows, texts, lengths.tolist(), out.truncated[rows].tolist(), strict=True):
                problem, member = divmod(row, sampling.num_samples)
                store.add(missing[problem], first + member, Sample(*sample))

        prompts = self.codec.prompts(missing, self.device)
        return self.sample(prompts, sampling, stage, first_member=first, on_finished=keep)

    def teardown(self, stage: str) -> None:
        """Ends the engine and the processes that judged answers; they start again when they are needed."""
        super().teardown(stage)
        if self._engine is not None:
            self._engine.close()
        close_workers()

    def configure_callbacks(self) -> list[pl.Callback]:
        """Does the same when a run ends by an exception, after which Lightning does not call `teardown`."""
        there = any(isinstance(callback, _CloseWorkers) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if there else [_CloseWorkers()]

    # optimisation

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the trainable parameters, and the scheduler stepped with it."""
        optimizer = self.build_optimizer([p for p in self.parameters() if p.requires_grad])
        scheduler = None if self.build_lr_scheduler is None else self.build_lr_scheduler(optimizer)
        self.optimizer_settings.remember(optimizer)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Tells a schedule over the whole run how long the run is.

        Not in `configure_optimizers`: asking the trainer there makes it load the data before a checkpoint's progress is
        restored, which the data module then cannot correct (see `TrainerProgress`).

        Raises:
            ValueError: A schedule over the whole run, in a run without an end.
        """
        check_fit(self.trainer, self)
        self.optimizer_settings.prefer_new(self.trainer.optimizers, self.trainer.lr_scheduler_configs)
        self.normalizer.clear()  # an earlier fit may have ended within a window
        self.step_window.clear()
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, WarmupCosine) and not config.scheduler.fixed:
                config.scheduler.set_total_steps(self.trainer.estimated_stepping_batches)

    def begin_micro_batch(self, rollout: Rollout) -> None:
        """Counts what the loss of this micro-batch divides by, over all ranks."""
        seed_dropout(self.lora, self.seed, self.global_step, self.step_window.batches, self.global_rank)
        self.step_window.batches += 1
        self.normalizer.start(rollout, self.trainer)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Corrects the gradient where accumulated micro-batches were not of equal size, before it is clipped."""
        self.normalizer.finish(self.parameters(), self.trainer.accumulate_grad_batches)
        self.step_window.clear()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips, also where processes hold shares of the gradient whose norm Lightning cannot tell."""
        by_norm = gradient_clip_val and gradient_clip_algorithm in (None, "norm")
        if not (by_norm and clip_norm(self.trainer, float(gradient_clip_val or 0))):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the optimizer was built with, and what an adapter lies over."""
        checkpoint["optimizer_settings"] = self.optimizer_settings.state_dict()
        if self.policy.adapter is not None:
            checkpoint["adapter"] = self.policy.adapter.record()
        if self._trained is not None and not saves_parts(self.trainer.strategy):
            drop_frozen(checkpoint.get("state_dict", {}), self._trained)


class _CloseWorkers(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        close_workers()
