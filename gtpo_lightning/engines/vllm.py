"""vLLM as the engine: sampling by a copy of the policy's weights, in the process that trains."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from tqdm import tqdm

from gtpo_lightning.engines.base import Completions, Engine, OnFinished, check_keys, check_length
from gtpo_lightning.engines.sampling import Sampling
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.engines.weights import has_own_head, named_weights, weights_stamp
from gtpo_lightning.policy import Policy
from gtpo_lightning.rollout import Prompts

__all__ = ["VLLMEngine"]

_PROBE = 8  # tokens of the prompt, and of the completion, that a first copy of the weights is checked with
_TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.3, torch.float16: 0.1}  # nats, of the mean over a probe


class VLLMEngine(Engine):
    """Samples with vLLM in this process, from a copy of the policy's weights that follows them.

    Each process samples its own prompts. A row's random numbers come from a seed made of its key, so rollouts repeat
    from run to run; they are not those of the local engine. Log-probs are those of the distribution that tokens were
    drawn from, top-k, top-p and min-p included, and differ from the policy's own by rounding: the loss corrects for it.

    Args:
        policy: Whose weights are copied: merged, dense and whole, whatever adapters, 4-bit weights or sharding it has.
        eos_ids: Every token that ends a completion.
        pad_id: What stands behind a finished completion.
        settings: Of vLLM.
        dtype: What `auto` means.
        version: Something that changes when the weights do; what is done to them in place is seen without it.

    Raises:
        ValueError: A device vLLM would not use, or a model whose weights it does not take over as they are.
    """

    def __init__(
        self,
        policy: Policy,
        eos_ids: Sequence[int],
        pad_id: int,
        settings: VLLM,
        *,
        dtype: torch.dtype = torch.float32,
        version: Callable[[], object] = lambda: None,
    ) -> None:
        self.policy = policy
        self.eos_ids = tuple(sorted(eos_ids))
        self.pad_id = pad_id
        self.settings = settings
        self.dtype = dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self.version = version
        self._llm: Any = None
        self._stamp: object = None
        self._checked = False
        self._asleep = False
        self._owns_process_group = False
        self._requests = 0

    # weights

    def start(self) -> None:
        """Loads or wakes vLLM and gives it the policy's weights where they changed; every process has to call it."""
        with isolate_rng():  # vLLM seeds the random numbers of its process, and draws some in vain
            self._start()

    def _start(self) -> None:
        if self._llm is None:
            self._llm = self._load()
        elif self._asleep:
            self._llm.wake_up(tags=["weights"])
        stamp = (self.version(), weights_stamp(self.policy))
        if self.policy.most(int(stamp != self._stamp)):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(self.policy)})
            self._stamp = stamp
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()  # what it holds was computed with other weights
        if not self._checked:
            self._check()
            self._checked = True

    def rest(self) -> None:
        """Drops the copy of the weights and the cache until the next rollout, where the device allows it."""
        if self._llm is not None and self._can_sleep() and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._stamp = True, None

    def close(self) -> None:
        """Ends vLLM and frees what it held; it is loaded again when it is needed."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._stamp, self._asleep = None, None, False
        gc.collect()  # vLLM's objects hold each other, and its cache is the largest of them
        if self._owns_process_group:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def _can_sleep(self) -> bool:
        if not self.settings.sleep:
            return False
        from vllm.platforms import current_platform

        return bool(current_platform.is_sleep_mode_available())

    def _load(self) -> Any:
        """VLLM with random weights of the right shapes; the policy's follow."""
        device = next(self.policy.parameters()).device
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if device.type == "cuda" and ranks == 1 and device.index:
            raise ValueError(
                f"trainer.devices: vLLM in a single process takes the first GPU, and training is on number "
                f"{device.index}; valid: CUDA_VISIBLE_DEVICES={device.index} with devices: 1"
            )
        _set_environment(ranks)
        from vllm import LLM

        self._owns_process_group = not torch.distributed.is_initialized()
        with tempfile.TemporaryDirectory() as folder:
            _config(self.policy, self.dtype).save_pretrained(folder)
            return LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=str(self.dtype).removeprefix("torch."),
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                gpu_memory_utilization=self.settings.gpu_memory_utilization,
                max_model_len=self.settings.max_model_len or -1,
                enable_sleep_mode=self._can_sleep(),
                distributed_executor_backend="external_launcher" if ranks > 1 else "uni",
                **{"seed": 0, "disable_log_stats": True, **self.settings.options},
            )

    @torch.no_grad()
    def _check(self) -> None:
        """Compares the log-probs of a few tokens with the policy's own.

        Raises:
            ValueError: They differ by more than rounding, so vLLM computes something else.
        """
        device = next(self.policy.parameters()).device
        size = self.policy.causal_lm.config.get_text_config(decoder=True).vocab_size
        ids = (torch.arange(1, _PROBE + 1, device=device)[None] * 7) % size
        prompts = Prompts(ids, torch.ones_like(ids), [])
        sampling = Sampling(max_completion_length=_PROBE)
        out = self._sample(prompts, sampling, [("probe",)], show_progress=False, on_finished=None)
        rows = torch.zeros(1, dtype=torch.long, device=device)
        logprobs, _ = self.policy.score(ids, prompts.mask, rows, out.ids, out.mask)
        difference = float((logprobs - out.logprobs)[out.mask].abs().mean())
        if not difference <= _TOLERANCE[self.dtype]:
            raise ValueError(
                f"engine: vLLM's log-probs of {type(self.policy.causal_lm).__name__} differ from the policy's by "
                f"{difference:.3g} nats a token, so it does not compute the same model; valid: engine: local"
            )

    # sampling

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        keys: Sequence[tuple[object, ...]],
        *,
        show_progress: bool = False,
        on_finished: OnFinished | None = None,
    ) -> Completions:
        """Samples `sampling.num_samples` completions of each prompt; see `Engine.generate`.

        Raises:
            ValueError: Prompt and completion do not fit, or the number of keys is wrong.
        """
        check_keys(keys, len(prompts.ids) * sampling.num_samples)
        check_length(prompts, sampling, self.policy.max_positions)
        self.start()
        self._check_room(prompts, sampling)
        with isolate_rng():
            return self._sample(prompts, sampling, keys, show_progress=show_progress, on_finished=on_finished)

    def _check_room(self, prompts: Prompts, sampling: Sampling) -> None:
        limit = int(self._llm.model_config.max_model_len)
        longest = int(prompts.mask.sum(dim=1).max()) if len(prompts.ids) else 0
        if longest + sampling.max_completion_length > limit:
            raise ValueError(
                f"vllm.max_model_len: {limit} does not hold a prompt of {longest} tokens and max_completion_length "
                f"{sampling.max_completion_length}; valid: a larger max_model_len or gpu_memory_utilization, or a "
                "smaller max_completion_length or max_prompt_length"
            )

    def _sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        keys: Sequence[tuple[object, ...]],
        *,
        show_progress: bool,
        on_finished: OnFinished | None,
    ) -> Completions:
        length = sampling.max_completion_length
        out = Completions.empty(len(keys), length, self.pad_id, torch.device("cpu"), with_entropies=False)
        engine = self._llm.llm_engine
        rows: dict[str, int] = {}
        texts = [ids[mask.bool()].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
        bar = tqdm(total=len(keys), desc="Sampling", unit="row", leave=False, delay=5, disable=not show_progress)
        try:
            for row, key in enumerate(keys):
                name = str(self._requests)
                self._requests, rows[name] = self._requests + 1, row
                text = {"prompt_token_ids": texts[row // sampling.num_samples]}
                engine.add_request(name, text, self._parameters(sampling, key))
            while engine.has_unfinished_requests():
                ended = [output for output in engine.step() if output.finished]
                for output in ended:
                    _write(out, rows[output.request_id], output.outputs[0])
                done = [rows.pop(output.request_id) for output in ended]
                bar.update(len(done))
                if done and on_finished is not None:
                    on_finished(done, out)
        finally:
            bar.close()
            if rows:  # interrupted: what is left must not turn up in the next rollout
                engine.abort_request(list(rows))
        out = out.trim()
        device = prompts.ids.device
        moved = {name: getattr(out, name).to(device) for name in ("ids", "lengths", "truncated", "logprobs")}
        return replace(out, **moved)

    def _parameters(self, sampling: Sampling, key: tuple[object, ...]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=sampling.min_p,
            max_tokens=sampling.max_completion_length,
            seed=_seed(key),
            stop_token_ids=list(self.eos_ids),
            ignore_eos=True,  # the ids above are all of them
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _set_environment(ranks: int) -> None:
    """What vLLM reads from the environment: one process, no pinned threads, its place among the processes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # It warns, in twenty lines, of the tokenizer that it is told to do without; what it computes is checked.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if ranks > 1:
        os.environ["RANK"] = str(torch.distributed.get_rank())
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])


def _config(policy: Policy, dtype: torch.dtype) -> Any:
    """The model's configuration, for weights that are dense and merged."""
    model = policy.causal_lm
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tied = not has_own_head(policy)
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = tied
    return config


def _seed(key: tuple[object, ...]) -> int:
    """A seed in [0, 2^63) that depends on nothing but the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def _write(out: Completions, row: int, completion: Any) -> None:
    tokens = list(completion.token_ids)
    out.ids[row, : len(tokens)] = torch.tensor(tokens)
    chosen = [places[token].logprob for token, places in zip(tokens, completion.logprobs, strict=True)]
    out.logprobs[row, : len(tokens)] = torch.tensor(chosen)
    out.lengths[row] = len(tokens)
    out.truncated[row] = completion.finish_reason != "stop"
