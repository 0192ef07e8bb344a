"""SmolLM2-135M trained through vLLM: what the engine says of its tokens is what the policy says, after updates too."""

import copy
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from gtpo_lightning import GTPOModule, Problem, Prompts, RLCallback
from gtpo_lightning.cli import main
from gtpo_lightning.engines import Sampling
from gtpo_lightning.engines.vllm import VLLMEngine
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.export import Export, export
from tests.helpers.training import Sums, make_trainer, spawn

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**29}
SMALL = VLLM(max_model_len=512, options=OPTIONS)
FLAGS = ["--model.engine=vllm", "--model.vllm.max_model_len=512",
         "--model.vllm.options={enforce_eager: true, kv_cache_memory_bytes: 536870912}"]  # fmt: skip


def digits(completions):
    return [float(sum(c in "0123456789" for c in text)) for text in completions]


def module_of(**kwargs):
    settings = {
        "model": "smollm2-135m", "group_size": 4, "max_completion_length": 24, "rewards": {digits: 1.0},
        "engine": "vllm", "vllm": SMALL, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-4), **kwargs,
    }  # fmt: skip
    return GTPOModule(**settings)


class Watch(RLCallback):
    """Keeps the distance of the engine's log-probs from the policy's, now and as it was before the first update."""

    def __init__(self, remember=True):
        self.now, self.before, self.start, self.remember = [], [], None, remember

    def on_rollout_start(self, trainer, module, prompts):
        if self.start is None and self.remember:
            self.start = copy.deepcopy(module.policy)

    def on_before_loss(self, trainer, module, rollout):
        real = rollout.completion_mask.bool()
        sampled = rollout.sampled_logprobs[real]
        self.now.append((rollout.logprobs.detach()[real] - sampled).abs())
        if self.start is None:
            return
        with torch.no_grad():
            old, _ = self.start.score(
                rollout.prompts.ids, rollout.prompts.mask, rollout.group_ids, rollout.completion_ids, real
            )
        self.before.append((old[real] - sampled).abs())


def one_prompt(module, question="What is 12 + 30?"):
    problem = Problem("p", question, "42")
    return module.codec.prompts([problem], torch.device("cpu"))


def test_after_each_update_the_engine_has_the_weights_of_the_policy(tmp_path):
    module, watch = module_of(), Watch()
    trainer = make_trainer(tmp_path, [watch], max_steps=3, gradient_clip_val=1.0)
    trainer.fit(module, Sums(batch_size=2, shuffle=False))
    assert trainer.global_step == 3
    assert all(float(difference.max()) < 2e-3 for difference in watch.now)
    assert float(watch.before[0].mean()) < 1e-4
    # The first policy says something else of what the later ones sampled, so weights went over after each update.
    for now, old in zip(watch.now[1:], watch.before[1:], strict=True):
        assert float(old.mean()) > 100 * float(now.mean())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("sampling/")}
    assert sorted(logged) == [
        "sampling/importance_sampling_ratio/max",
        "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/min",
        "sampling/sampling_logp_difference/max",
        "sampling/sampling_logp_difference/mean",
    ]
    assert abs(logged["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(float(watch.now[-1].mean()), rel=1e-3)


def test_p_01_adapters_are_sampled_with_and_stay_unmerged(tmp_path):
    module, watch = module_of(lora={"rank": 4}, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)), Watch()
    trainer = make_trainer(tmp_path, [watch], max_steps=2)
    trainer.fit(module, Sums(batch_size=2, shuffle=False))
    assert all(float(difference.max()) < 2e-3 for difference in watch.now)
    assert float(watch.before[1].mean()) > 100 * float(watch.now[1].mean())
    base = {name: value for name, value in module.policy.state_dict().items() if "lora_" not in name}
    start = watch.start.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in base.items())


def test_in_bf16_the_engine_is_the_policy_to_bf16_accuracy(tmp_path):
    settings = VLLM(dtype="bfloat16", max_model_len=512, options=OPTIONS)
    module, watch = module_of(vllm=settings, optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4)), Watch()
    make_trainer(tmp_path, [watch], max_steps=2).fit(module, Sums(batch_size=2, shuffle=False))
    now, before = ([float(difference.mean()) for difference in kept] for kept in (watch.now, watch.before))
    assert all(1e-4 < mean < 0.1 for mean in now), now
    assert before[1] > 2 * now[1], (before, now)


def test_the_contract_of_completions():
    module = module_of()
    module.configure_model()
    engine, before = module.engine, torch.get_rng_state()
    prompts, sampling = one_prompt(module), Sampling(8, 24, temperature=0.7)
    keys = [("key", member) for member in range(8)]
    told = []
    out = engine.generate(prompts, sampling, keys, on_finished=lambda rows, out: told.extend(rows))
    assert sorted(told) == list(range(8))
    assert torch.equal(before, torch.get_rng_state())  # vLLM seeds the random numbers of its process; they are put back
    assert len({tuple(row) for row in out.ids.tolist()}) > 4
    # The same keys give the same rows, in any batch.
    part = engine.generate(prompts, Sampling(2, 24, temperature=0.7), [keys[5], keys[2]])
    for row, other in ((0, 5), (1, 2)):
        length = int(part.lengths[row])
        assert length == int(out.lengths[other])
        assert torch.equal(part.ids[row, :length], out.ids[other, :length])
    # Log-probs are those of the tempered distribution.
    with torch.no_grad():
        policy, _ = module.policy.score(
            prompts.ids, prompts.mask, torch.zeros(8, dtype=torch.long), out.ids, out.mask, temperature=0.7
        )
    torch.testing.assert_close(policy, out.logprobs, atol=2e-3, rtol=0)
    # Any end-of-sequence token ends a row, stays in it, and nothing comes after.
    ends = set(out.ids[:, 6].tolist())
    other = VLLMEngine(module.policy, sorted(ends), 0, SMALL)
    other._llm, other._stamp, other._checked = engine._llm, engine._stamp, True
    cut = other.generate(prompts, sampling, keys)
    for row in range(8):
        ids = cut.ids[row, : int(cut.lengths[row])].tolist()
        assert ids == out.ids[row, : len(ids)].tolist()
        assert (ids[-1] in ends) is not bool(cut.truncated[row])
        assert not ends & set(ids[:-1])
        assert set(cut.ids[row, len(ids) :].tolist()) <= {0}
    # Weights go over only when they changed.
    calls = []
    rpc = engine._llm.collective_rpc
    engine._llm.collective_rpc = lambda *args, **kwargs: calls.append(args[0]) or rpc(*args, **kwargs)
    engine.generate(prompts, sampling, keys)
    assert calls == []
    with torch.no_grad():
        next(module.policy.parameters()).mul_(1.0)
    engine.generate(prompts, sampling, keys)
    assert calls == ["reload_weights"]
    # What does not fit is refused by name, and an interrupted rollout leaves nothing behind.
    with pytest.raises(ValueError, match=r"vllm\.max_model_len: 512"):
        engine.generate(prompts, Sampling(1, 600), keys[:1])

    def stop(rows, out):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other.generate(prompts, sampling, keys, on_finished=stop)
    assert not engine._llm.llm_engine.has_unfinished_requests()
    again = engine.generate(prompts, sampling, keys)
    assert torch.equal(again.ids, out.ids)
    empty = engine.generate(Prompts(prompts.ids[:0], prompts.mask[:0], []), sampling, [])
    assert empty.ids.shape == (0, 1)
    engine.close()


def test_a_model_that_vllm_computes_otherwise_is_refused():
    module = module_of()
    module.configure_model()
    engine = module.engine
    engine.policy.causal_lm.config.rope_parameters["rope_theta"] = 500.0  # vLLM is told so, the policy was built before
    try:
        with pytest.raises(ValueError, match="does not compute the same model"):
            engine.start()
    finally:
        engine.close()


def test_the_command_line_trains_on_gsm8k_exports_and_the_folder_loads_in_vllm(tmp_path):
    source = REAL
    if not REAL.exists():
        rows = [f'{{"question": "{i} plus {i}?", "answer": "{i}+{i}={2 * i}\\n#### {2 * i}"}}' for i in range(100)]
        source = tmp_path / "gsm8k_train.jsonl"
        source.write_text("\n".join(rows) + "\n")
    names = ("gtpo.yaml", "models/smollm2-135m.yaml", "data/gsm8k.yaml", "options/lora.yaml")
    flags = [word for name in names for word in ("-c", str(ROOT / "configs" / name))]
    cli = main(
        ["fit", *flags, *FLAGS, f"--data.source={source}", "--trainer.max_steps=2", "--trainer.accelerator=cpu",
         f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false", "--data.batch_size=2",
         "--model.max_completion_length=48", "--model.optimizer.lr=1e-3"]
    )  # fmt: skip
    assert cli.trainer.global_step == 2
    assert type(cli.model.engine).__name__ == "VLLMEngine"
    checkpoint = str(next(Path(cli.trainer.log_dir, "checkpoints").glob("last.ckpt")))
    folder = export(Export(checkpoint, str(tmp_path / "exported")))
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = [1, 4093, 198, 1780, 314, 260]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    llm = LLM(str(folder), dtype="float32", max_model_len=256, **OPTIONS)
    (answer,) = llm.generate(
        [{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False
    )
    assert list(answer.outputs[0].token_ids) == expected


def test_evaluation_samples_through_vllm(tmp_path):
    names = ("eval.yaml", "models/smollm2-135m.yaml", "data/arithmetic.yaml")
    flags = [word for name in names for word in ("-c", str(ROOT / "configs" / name))]
    cli = main(
        ["test", *flags, *FLAGS, f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false",
         "--trainer.accelerator=cpu", f"--evaluator.store={tmp_path}/completions", "--data.limit_test=3",
         "--model.max_completion_length=16"]
    )  # fmt: skip
    results = json.loads((Path(cli.trainer.log_dir) / "test" / "results.json").read_text())["datasets"]
    (content,) = results.values()
    assert content["problems"] == 3
    assert len({answer["completion"] for answer in content["answers"]}) > 3


def two_processes(rank, folder):
    watch = Watch(remember=False)
    strategy = "ddp" if "ddp" in folder else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = module_of(vllm=VLLM(max_model_len=256, options=OPTIONS))
    trainer = make_trainer(folder, [watch], max_steps=2, devices=2, strategy=strategy, limit_val_batches=1)
    # One validation problem: the second process has nothing to sample there and is not waited for.
    trainer.fit(module, Sums(batch_size=1, train=4, val=1, shuffle=False))
    assert trainer.global_step == 2
    assert all(float(difference.max()) < 2e-3 for difference in watch.now)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_each_sample_their_own_prompts(tmp_path, kind):
    (tmp_path / kind).mkdir()
    spawn(two_processes, tmp_path / kind)
