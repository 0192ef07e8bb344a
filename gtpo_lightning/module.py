"""`GTPOModule`: rollout and loss. With no callback it is plain group-relative policy gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gtpo_lightning.codec import PLAIN_TEMPLATE, SYSTEM_PROMPT
from gtpo_lightning.distributed import gather_objects, of_this_rank
from gtpo_lightning.engines import Sampling
from gtpo_lightning.engines.correction import correct_sampling
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.foresight import foresee
from gtpo_lightning.functional import group_advantages, policy_loss
from gtpo_lightning.hooks import call_rl_hooks
from gtpo_lightning.lora import LoRA
from gtpo_lightning.module_arguments import adamw, not_plain
from gtpo_lightning.module_checks import check_cap, check_choices, check_delta, check_loss_temperature, check_resampling
from gtpo_lightning.monitor import Monitor
from gtpo_lightning.normalizer import Normalizer
from gtpo_lightning.policy import Policy
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.reference import AdapterReference, Reference, ignore_missing_reference, make_reference, start_origin
from gtpo_lightning.resampling import resample
from gtpo_lightning.rewards import RewardFunctions, SoftOverlong
from gtpo_lightning.rewards.composition import check_limits
from gtpo_lightning.rollout import Problem, Prompts, Rollout
from gtpo_lightning.rollout_store import RolloutStore

__all__ = ["GTPOModule"]


class GTPOModule(PolicyModule):
    """Trains a policy on groups of its own completions.

    One training step is one rollout of B prompts x G completions and one backward, so clipping, accumulation,
    precision, schedulers and strategies are Lightning's. The parts of GTPO attach as callbacks: `ConflictMasking`,
    `EntropyFilter`, `EntropyRegularizer`; with none of them this is plain group-relative policy gradient, and with
    `advantage_scale: group`, `epsilon` and `KLPenalty` it is GRPO.

    Sources: Simoni et al., arXiv 2508.03772 (GTPO); Shao et al., arXiv 2402.03300 (GRPO).

    Args:
        model: Hub id, folder, or an embedded name: `tiny`, `smollm2-135m`.
        group_size: Completions of each prompt (G).
        max_completion_length: Tokens of a completion at most (T).
        temperature: Temperature of sampling and of log-probs and entropies.
        micro_batch_size: Completions scored at once, under activation checkpointing; null keeps the activations of all.
        rewards: Reward functions with weights, `{name: weight}`; names are built in (`format`, `correctness`, …) or
            dotted import paths. Null is the paper's: `{format: 1, correctness: 1}`. `soft_overlong` penalises the last
            fifth of `max_completion_length` tokens.
        reward_errors: What a reward function that raises does: `skip` the completions it raises for, which are not
            scored and counted in `rewards/{function}/error_frac`, or `raise` and end the run.
        reward_time_limit: Seconds a reward function that is not built in may take for one completion. Each completion
            is then a call of its own in a process that is killed at the limit; what is killed is not scored and counted
            in `rewards/{function}/timeout_frac`. A function must not depend on the other completions of its batch. Null
            calls functions in this process, without a limit.
        top_k: Sampling cut to the k likeliest tokens; off-policy, so it warns.
        top_p: Sampling cut to the likeliest tokens of mass p; off-policy, so it warns.
        min_p: Sampling cut to tokens at least min_p times as likely as the likeliest; off-policy, so it warns.
        advantage_scale: `none` (GTPO), `group` (GRPO: divided by the group's std) or `batch`.
        aggregation: Denominator of the loss: `sequence` (the paper's, 1/(N|o_i|)), `token` (all tokens of the step) or
            `constant` (N · max_completion_length).
        updates_per_rollout: Optimizer steps on each rollout (μ); `max_steps` counts optimizer steps.
        epsilon: Clipping of the ratio, `[low, high]` or one number for both; null does not clip. Without effect on the
            first update of a rollout, whose ratio is 1.
        delta: Upper bound of the ratio where the weight is negative, above 1 + the high epsilon (two-sided, or dual,
            clipping): without it such a token has no bound. Null does not bound it. Without effect on the first update.
        resample_groups: How often groups of a step whose rewards are all equal are sampled again, at most; 0 never. The
            first try whose rewards differ replaces such a group, which else stays. Each try costs the sampling of the
            groups that are left (`gtpo/resample_tries` a group). What is trained on is then conditioned on differing
            rewards, so rewards and advantages are biased towards problems solved half of the time.
        loss_temperature: Temperature of log-probs and entropies in training where it is not that of sampling; null
            takes `temperature`. Another value trains off-policy, so it warns: it is there to measure what that does.
        mask_truncated: Whether completions cut by the length limit are left out of the loss. Their rewards stay in the
            group's mean: they were sampled by the policy, and dropping the worst ones would bias the baseline upwards.
        weights: A checkpoint of this package whose policy is the start.
        lora: Settings of adapters that are trained in place of the model, see `PolicyModule`; null trains all of it.
        adapter: A folder with a trained adapter to start from, written by peft or by `export --adapter_only`.
        dtype: How weights are kept: `float32`, `bfloat16` or `float16`; adapters are always kept in float32.
        quantization: `4bit` keeps the frozen weights below `lora` in 4 bits, by bitsandbytes.
        attention: Attention kernel of transformers; null takes flash attention where it can be had, else the default.
        gradient_checkpointing: Whether the model's layers run again in the backward pass and keep no activations.
        system_prompt: Instruction that asks for the answer format; empty for none.
        prompt_template: Prompt of tokenizers without a chat template, with `{system}` and `{question}`.
        rollout_batch_size: Prompts sampled at once; null samples all of a step together. vLLM decides for itself.
        engine: Who samples: `local`, the policy itself, or `vllm`, by a copy of its weights that follows them.
        vllm: Settings of vLLM, see `VLLM`.
        importance_sampling_cap: Upper bound of the ratio of the policy to what an engine with weights of its own drew
            from, which multiplies each token's weight; null leaves the difference in. Without effect for `local`.
        seed: Seed of the random numbers that tokens are drawn with; null takes that of `seed_everything`.
        optimizer: Builds the optimizer from parameters; AdamW with the paper's settings if left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; stepped after each optimizer step.

    Raises:
        ValueError: An argument outside its range or an unknown choice, before any weights are read.
    """

    def __init__(
        self,
        model: str,
        group_size: int = 8,
        max_completion_length: int = 512,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        rewards: dict[str, float] | list[str] | Callable[..., Any] | None = None,
        *,
        reward_errors: Literal["skip", "raise"] = "skip",
        reward_time_limit: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        advantage_scale: Literal["none", "group", "batch"] = "none",
        aggregation: Literal["sequence", "token", "constant"] = "sequence",
        updates_per_rollout: int = 1,
        epsilon: float | tuple[float, float] | None = None,
        delta: float | None = None,
        resample_groups: int = 0,
        loss_temperature: float | None = None,
        mask_truncated: bool = False,
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
        importance_sampling_cap: float | None = 2.0,
        seed: int | None = None,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k != "self" and not k.startswith("__")}
        check_choices(group_size, advantage_scale, aggregation, updates_per_rollout, epsilon)
        check_delta(delta, epsilon)
        check_resampling(resample_groups)
        check_loss_temperature(loss_temperature, temperature)
        check_cap(importance_sampling_cap)
        check_limits("reward_errors", reward_errors, "reward_time_limit", reward_time_limit)
        reward_functions = RewardFunctions(rewards, on_error=reward_errors, time_limit=reward_time_limit)
        sampling = Sampling(group_size, max_completion_length, temperature, top_k, top_p, min_p)
        for function in reward_functions.functions.values():
            if isinstance(function, SoftOverlong):
                function.limit_to(max_completion_length)
        super().__init__(
            model,
            weights=weights,
            lora=lora,
            adapter=adapter,
            dtype=dtype,
            quantization=quantization,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            system_prompt=system_prompt,
            prompt_template=prompt_template,
            max_completion_length=max_completion_length,
            temperature=temperature,
            rollout_batch_size=rollout_batch_size,
            engine=engine,
            vllm=vllm,
            micro_batch_size=micro_batch_size,
            seed=seed,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        self.save_hyperparameters(ignore=not_plain(arguments))
        self.save_hyperparameters({"lora": None if self.lora is None else self.lora.plain()})
        self.reward_functions = reward_functions
        self.sampling = sampling
        self.advantage_scale = advantage_scale
        self.aggregation = aggregation
        self.updates_per_rollout = updates_per_rollout
        self.epsilon = epsilon
        self.delta = delta
        self.resample_groups = resample_groups
        self.loss_temperature = loss_temperature
        self.mask_truncated = mask_truncated
        self.importance_sampling_cap = importance_sampling_cap
        self.entropy_grad = False
        """Whether entropies carry a gradient; a callback that needs it sets it in its `setup`."""
        self.wants_reference = False
        """Whether the start policy is kept; a callback that needs it sets it in its `setup`."""
        self.reference_weights: str | None = None
        """A checkpoint whose policy is the reference in place of the start policy; set together with the above."""
        self.reference: Reference | AdapterReference | None = None
        self._start: dict[str, str | None] = {}
        self.store = RolloutStore(updates_per_rollout)
        self.normalizer = Normalizer(aggregation)
        self.monitor = Monitor()
        self._restored_rollouts: list[Any] = []

    def add_models(self) -> None:
        """Remembers the start policy, and keeps it where a callback asked for it."""
        if not self._start:
            self._start = start_origin(self.weights, self.policy)
        if not self.wants_reference or self.reference is not None:
            return
        self.reference = make_reference(self.policy, self.weights, self.reference_weights, self.build_policy)
        self.register_load_state_dict_post_hook(ignore_missing_reference)

    def training_step(self, problems: list[Problem], batch_idx: int) -> Tensor:
        """One rollout and its loss: −(1/N) Σ_i δ_i · (A_i − γ⟨H⟩_i) / |o_i| · Σ_t λ_{i,t} · r_{i,t}, scalar."""
        rollout = self.store.take(problems, self.rollout)
        self.begin_micro_batch(rollout)
        rollout.foreseen = foresee(self, rollout)
        rollout.logprobs, rollout.entropies = self.score(rollout)
        rollout.foreseen = None
        self.store.freeze(rollout)
        if not self.engine.exact:
            correct_sampling(self, rollout, self.importance_sampling_cap)
        call_rl_hooks(self.trainer, "on_before_loss", rollout)
        losses = {"policy": self.policy_loss(rollout)}
        call_rl_hooks(self.trainer, "on_after_loss", rollout, losses)
        self.monitor.log_update(self, rollout, losses)
        return torch.stack(list(losses.values())).sum()

    def begin_micro_batch(self, rollout: Rollout) -> None:
        """Readies a rollout for an update: its denominators, neutral slots, the clock."""
        super().begin_micro_batch(rollout)
        rollout.reset_slots()
        rollout.max_length = self.max_completion_length
        self.monitor.start_update()

    def rollout(self, problems: list[Problem]) -> Rollout:
        """Samples G completions of each problem, scores them and writes their advantages."""
        prompts = self.codec.prompts(problems, self.device)
        call_rl_hooks(self.trainer, "on_rollout_start", prompts)
        rollout = self._sample_and_score(prompts)
        rollout, tries = resample(rollout, self._sample_again, self.resample_groups, self.policy.most)
        self.engine.rest()
        call_rl_hooks(self.trainer, "on_rollout_end", rollout)
        rollout.advantages = self.advantages(rollout)
        self.monitor.log_rollout(self, rollout, tries)
        if self.mask_truncated:
            rollout.completion_mask = rollout.completion_mask & ~rollout.truncated[:, None]
        return rollout

    def _sample_and_score(self, prompts: Prompts, attempt: int = 0) -> Rollout:
        """One try at each prompt's group; a further one draws the completions whose numbers come after the last's."""
        first = attempt * self.sampling.num_samples
        with self.monitor.clock("rollout"):
            rollout = self.sample(prompts, self.sampling, "train", first_member=first)
        with self.monitor.clock("reward"):
            self.reward(rollout)
        return rollout

    def _sample_again(self, problems: list[Problem], attempt: int) -> Rollout:
        return self._sample_and_score(self.codec.prompts(problems, self.device), attempt)

    def reward(self, rollout: Rollout) -> None:
        """Scores each completion: the combined reward, and of each function the raw value and failures, (N,) each."""
        problems = [rollout.prompts.problems[i] for i in rollout.group_ids.tolist()]
        ids = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)]
        scores = self.reward_functions(
            rollout.texts,
            problems,
            completion_ids=ids,
            lengths=rollout.lengths.tolist(),
            truncated=rollout.truncated.tolist(),
        )
        rollout.rewards = scores.rewards.to(self.device)
        rollout.reward_parts = {name: values.to(self.device) for name, values in scores.parts.items()}
        rollout.reward_failures = {
            name: {kind: rows.to(self.device) for kind, rows in failed.items()}
            for name, failed in scores.failures.items()
        }

    def advantages(self, rollout: Rollout) -> Tensor:
        """A_i of each completion, (N,); with `batch` scaling the std is that of all ranks' rewards."""
        if self.advantage_scale != "batch" or self.trainer.world_size == 1:
            return group_advantages(rollout.rewards, rollout.group_ids, scale=self.advantage_scale)
        ranks = gather_objects((rollout.rewards.tolist(), rollout.group_ids.tolist()))
        rewards = torch.tensor([reward for rank in ranks for reward in rank[0]])
        groups = torch.tensor([index * 2**32 + group for index, rank in enumerate(ranks) for group in rank[1]])
        before = sum(len(rank[0]) for rank in ranks[: self.global_rank])
        every = group_advantages(rewards, groups, scale="batch")
        return every[before : before + len(rollout)].to(self.device)

    def score(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probs (N, T) with gradient and entropies (N, T) under the policy as it is now, nats."""
        return self._read(self.policy, rollout, self.entropy_grad)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        """Log-probs (N, T) under the reference, nats, without gradient; None where there is no reference."""
        if self.reference is None:
            return None
        with self.reference.reading() as policy:
            return self._read(policy, rollout)[0]

    def _read(self, policy: Policy, rollout: Rollout, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        return policy.score(
            rollout.prompts.ids,
            rollout.prompts.mask,
            rollout.group_ids,
            rollout.completion_ids,
            rollout.completion_mask,
            temperature=rollout.temperature if self.loss_temperature is None else self.loss_temperature,
            micro_batch_size=self.micro_batch_size,
            entropy_grad=entropy_grad,
            foreseen=rollout.foreseen if torch.is_grad_enabled() else None,
        )

    def policy_loss(self, rollout: Rollout) -> Tensor:
        """The loss of the three slots, scaled so that micro-batches and ranks add up to one optimizer step."""
        return policy_loss(
            rollout.logprobs,
            rollout.weights(),
            rollout.completion_mask,
            old_logprobs=rollout.old_logprobs,
            epsilon=self.epsilon,
            delta=self.delta,
            aggregation=self.aggregation,
            denominator=rollout.denominator,
            max_length=self.max_completion_length,
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Corrects the gradient for uneven micro-batches and logs its norm, before it is clipped."""
        super().on_before_optimizer_step(optimizer)
        self.monitor.log_gradient(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs how long the update took: everything of a step but its rollout."""
        self.monitor.log_update_time(self)

    def on_train_start(self) -> None:
        """Tells the store of rollouts how many batches an optimizer step accumulates.

        Raises:
            ValueError: `batch` scaling over accumulated batches, whose std would be that of a part of the step.
        """
        super().on_train_start()
        if isinstance(self.reference, Reference):
            self.reference.eval()  # not earlier: Lightning warns of a model that is partly in evaluation mode
        if self.advantage_scale == "batch" and self.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"advantage_scale: 'batch' with accumulate_grad_batches {self.trainer.accumulate_grad_batches} would "
                "take the std of a part of the step; valid: accumulate_grad_batches 1, or advantage_scale none or group"
            )
        self.store.load_state_dict(of_this_rank(self._restored_rollouts))
        self._restored_rollouts = []
        self.store.start(self.trainer.accumulate_grad_batches, self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what a resumed run needs: the rollouts still in use and the running counts."""
        super().on_save_checkpoint(checkpoint)
        # Only rollouts in use belong to a rank; without any, saving needs no other rank.
        rollouts = gather_objects(self.store.state_dict()) if self.updates_per_rollout > 1 else []
        checkpoint["gtpo_lightning"] = {
            "monitor": self.monitor.state_dict(),
            "rollouts": rollouts,
            "start": self._start if self.reference is None else self.reference.origin(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("gtpo_lightning")
        if state is not None:
            self.monitor.load_state_dict(state["monitor"])
            self._restored_rollouts = state["rollouts"]
            if self._trainer is not None and self._trainer.state.fn == "fit":
                self._resume_reference(state.get("start"))

    def _resume_reference(self, start: dict[str, str | None] | None) -> None:
        """Makes the reference that of the run that is resumed; a run without one passes on where it started from."""
        if start is None:
            if self.reference is not None:
                rank_zero_warn(
                    "ckpt_path: the checkpoint does not say which policy its run started from, so KL is measured to "
                    "that of `model` and `weights`"
                )
            return
        self._start = start
        if self.reference is not None:
            self.reference = self.reference.resume(start, self.build_policy)
