"""Engines with weights of their own: what they are given, and what the loss makes of what they say."""

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch

from gtpo_lightning import GTPOModule, PolicyModule, Problem, SFTModule
from gtpo_lightning.adapters import untied
from gtpo_lightning.callbacks import ConflictMasking
from gtpo_lightning.cli import check
from gtpo_lightning.engines import Completions, Engine, Sampling
from gtpo_lightning.engines.vllm import VLLMEngine
from gtpo_lightning.engines.vllm_settings import VLLM
from gtpo_lightning.engines.weights import has_own_head, named_weights, weights_stamp
from gtpo_lightning.lora import LoRA
from gtpo_lightning.models import load_model
from gtpo_lightning.policy import Policy
from tests.core.test_policy import NAMES, build
from tests.helpers.training import Sums, flat, make_module, make_trainer, sgd, spawn

HERE = importlib.util.find_spec("vllm") is not None


# What a user reads


@pytest.mark.skipif(HERE, reason="vLLM is installed")
@pytest.mark.parametrize("kind", [GTPOModule, SFTModule, PolicyModule])
def test_without_vllm_it_is_said_what_to_install_before_a_model_is_read(kind, monkeypatch):
    monkeypatch.setattr("gtpo_lightning.codec.load_tokenizer", None)
    with pytest.raises(ValueError, match=r"engine: 'vllm' needs the package vllm.*gtpo-lightning\[vllm\].*local"):
        kind(model="tiny", engine="vllm")


@pytest.mark.skipif(HERE, reason="vLLM is installed")
def test_the_command_line_says_so_too(capsys):
    from gtpo_lightning.cli import main

    with pytest.raises((SystemExit, ValueError)) as error:
        main(["fit", "-c", "configs/gtpo.yaml", "-c", "configs/models/tiny.yaml", "--model.engine=vllm"])
    assert "pip install 'gtpo-lightning[vllm]'" in str(error.value) + capsys.readouterr().err


def test_the_overlay_is_read():
    check(["fit", "-c", "configs/gtpo.yaml", "-c", "configs/models/tiny.yaml", "-c", "configs/options/vllm.yaml"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"engine": "sglang"}, "engine: 'sglang' is not valid; valid: local, vllm"),
        ({"vllm": VLLM()}, "vllm: settings were given, but engine is 'local'"),
        ({"importance_sampling_cap": 0}, "importance_sampling_cap: 0 is not valid; valid: null, or a number above 0"),
        ({"importance_sampling_cap": True}, "importance_sampling_cap: True"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        GTPOModule(model="tiny", **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gpu_memory_utilization": 0}, "vllm.gpu_memory_utilization: 0 is not valid"),
        ({"gpu_memory_utilization": 1.1}, "vllm.gpu_memory_utilization: 1.1"),
        ({"dtype": "fp8"}, "vllm.dtype: 'fp8' is not valid; valid: auto, float32, bfloat16, float16"),
        ({"max_model_len": 1}, "vllm.max_model_len: 1 is not valid"),
        ({"sleep": "yes"}, "vllm.sleep: 'yes'"),
        ({"options": {"model": "other", "seed": 3}}, "vllm.options: model cannot be given there"),
    ],
)
def test_wrong_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        VLLM(**arguments)


def test_who_samples_is_not_kept_in_a_checkpoint():
    module = GTPOModule(model="tiny", engine="local", importance_sampling_cap=3.0)
    assert "engine" not in module.hparams
    assert "vllm" not in module.hparams
    assert module.hparams["importance_sampling_cap"] == 3.0


# The weights


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_a_saved_model_under_its_names(name, tmp_path):
    from safetensors.torch import load_file

    model = build(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    got = dict(named_weights(Policy(model)))
    assert set(saved) <= set(got)
    assert all(torch.equal(got[key], value) for key, value in saved.items())
    # What is there beside is a tied weight under its second name.
    assert all(any(torch.equal(got[key], value) for value in saved.values()) for key in set(got) - set(saved))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
@pytest.mark.parametrize("saved", [None, ["norm"]])
def test_p_01_adapters_are_merged_into_a_copy(targets, saved):
    module = GTPOModule(model="tiny", lora=LoRA(rank=3, targets=targets, modules_to_save=saved))
    module.configure_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    before = {name: value.clone() for name, value in module.policy.state_dict().items()}
    got = dict(named_weights(module.policy))
    assert all(torch.equal(value, before[name]) for name, value in module.policy.state_dict().items())
    tied = load_model("tiny").config.tie_word_embeddings
    assert has_own_head(module.policy) is (not tied or "lm_head" in targets)
    untied(module.policy.causal_lm)
    merged = module.policy.model.merge_and_unload(safe_merge=True)
    expected = {**merged.state_dict()}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-6)


def test_the_stamp_changes_with_the_weights_and_with_nothing_else():
    policy = make_module().policy
    first = weights_stamp(policy)
    policy.causal_lm(torch.arange(5)[None]).logits.sum().backward()
    assert weights_stamp(policy) == first
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    second = weights_stamp(policy)
    assert second != first
    policy.load_state_dict(policy.state_dict())
    assert weights_stamp(policy) != second


def sharded(rank, folder):
    torch.distributed.init_process_group("gloo")
    from gtpo_lightning.sharding import shard

    module = make_module(lora=LoRA(rank=2)) if "lora" in folder else make_module()
    with torch.no_grad():
        for index, parameter in enumerate(module.policy.parameters()):
            parameter.add_(0.01 * index)
    whole = {name: value.clone() for name, value in named_weights(module.policy)}
    shard(module.policy, torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",)))
    got = dict(named_weights(module.policy))
    assert list(got) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-6)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_split_weights_are_gathered(kind, tmp_path):
    (tmp_path / kind).mkdir()
    spawn(sharded, tmp_path / kind)


# vLLM, played by an object that does what its documentation says


class Played:
    """Draws tokens 5, 6, 7, … ended by 3, and keeps what it was told."""

    def __init__(self, length=512):
        self.calls, self.requests = [], {}
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=length)

    def collective_rpc(self, method, kwargs):
        self.calls.append((method, dict(kwargs["weights_iterator"])))

    def reset_prefix_cache(self):
        self.calls.append(("reset",))

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def add_request(self, name, prompt, parameters):
        self.requests[name] = (prompt["prompt_token_ids"], parameters)

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        name, (prompt, _) = list(self.requests.items())[-1]  # the last is finished first
        del self.requests[name]
        tokens = [5 + i for i in range(len(prompt))] + ([3] if len(prompt) < 4 else [])
        logprobs = [{token: SimpleNamespace(logprob=-0.1 * token)} for token in tokens]
        answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="stop" if 3 in tokens else "length")
        return [SimpleNamespace(finished=True, request_id=name, outputs=[answer])]


@pytest.fixture
def engine(monkeypatch):
    played = Played()
    engine = VLLMEngine(make_module().policy, [3], 0, VLLM())
    monkeypatch.setattr(engine, "_load", lambda: played)
    monkeypatch.setattr(engine, "_parameters", lambda sampling, key: key)
    monkeypatch.setattr(engine, "_check", lambda: None)
    monkeypatch.setattr(engine, "_can_sleep", lambda: engine.settings.sleep)
    return engine


def prompts_of(lengths):
    module = make_module()
    prompts = module.codec.prompts([Problem(str(n), "1" * n, "") for n in lengths], torch.device("cpu"))
    assert prompts.mask.sum(dim=1).tolist() == list(lengths)
    return prompts


def test_rows_come_back_in_order_whatever_order_they_end_in(engine):
    told = []
    out = engine.generate(
        prompts_of([2, 4]), Sampling(2, 6), [(i,) for i in range(4)], on_finished=lambda rows, _: told.extend(rows)
    )
    assert isinstance(out, Completions)
    assert told == [3, 2, 1, 0]
    assert out.ids.tolist() == [[5, 6, 3, 0]] * 2 + [[5, 6, 7, 8]] * 2
    assert out.lengths.tolist() == [3, 3, 4, 4]
    assert out.truncated.tolist() == [False, False, True, True]
    torch.testing.assert_close(out.logprobs[0], torch.tensor([-0.5, -0.6, -0.3, 0.0]))
    assert out.entropies is None


def test_weights_go_over_when_they_changed_and_the_cache_is_emptied(engine):
    calls = engine._load().calls
    engine.start()
    assert [call[0] for call in calls] == ["reload_weights", "reset"]
    assert calls[0][1].keys() == dict(named_weights(engine.policy)).keys()
    engine.start()
    assert [call[0] for call in calls] == ["reload_weights", "reset", "reset"]
    with torch.no_grad():
        next(engine.policy.parameters()).add_(1.0)
    engine.start()
    assert [call[0] for call in calls][3:] == ["reload_weights", "reset"]
    steps = iter((1, 2))
    engine.version = lambda: next(steps)  # weights that were changed out of sight of their own counters
    engine.start()
    engine.start()
    assert [call[0] for call in calls][5:] == ["reload_weights", "reset"] * 2


def test_asleep_it_wakes_for_weights_before_the_cache(engine):
    calls = engine._load().calls
    engine.start()
    calls.clear()
    engine.rest()
    engine.rest()
    engine.start()
    assert [call[:2] if call[0] != "reload_weights" else call[0] for call in calls] == [
        ("sleep", 2), ("wake", "weights"), "reload_weights", ("wake", "kv_cache"), ("reset",),
    ]  # fmt: skip
    engine.settings = VLLM(sleep=False)
    calls.clear()
    engine.rest()
    assert calls == []


def test_what_does_not_fit_is_refused_by_name(engine):
    engine._load().model_config.max_model_len = 9
    with pytest.raises(ValueError, match=r"vllm\.max_model_len: 9 does not hold a prompt of 4 tokens"):
        engine.generate(prompts_of([4]), Sampling(1, 6), [("a",)])
    with pytest.raises(ValueError, match="keys: 1 given for 2 rows"):
        engine.generate(prompts_of([2]), Sampling(2, 6), [("a",)])


def test_an_interrupted_rollout_leaves_nothing_behind(engine):
    def stop(rows, out):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of([2, 3]), Sampling(2, 6), [(i,) for i in range(4)], on_finished=stop)
    assert not engine._load().requests


# The loss


class Off(Engine):
    """The local engine with log-probs that are not the policy's."""

    def __init__(self, module, shift):
        self.inner, self.shift, self.stages, self.rests = module.engine, shift, 0, 0

    def start(self):
        self.stages += 1

    def rest(self):
        self.rests += 1

    def generate(self, prompts, sampling, keys, **kwargs):
        out = self.inner.generate(prompts, sampling, keys, **kwargs)
        noise = torch.linspace(-self.shift, self.shift, out.ids.shape[1])
        return Completions(out.ids, out.lengths, out.truncated, (out.logprobs + noise) * out.mask, None)


def trained(tmp_path, shift, exact=False, callbacks=(), **kwargs):
    module = make_module(optimizer=sgd, **kwargs)
    engine = Off(module, shift)
    engine.exact = exact
    module.engine = engine
    before = flat(module)
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(module, Sums(batch_size=4, shuffle=False))
    return before - flat(module), trainer, engine, module


def by_hand(module, cap, shift):
    """The gradient with each token's term multiplied by min(π/μ, cap), written out."""
    module = make_module()
    problems = [Problem(f"train/{i}", f"{i}+{i + 1}=", str(2 * i + 1)) for i in range(4)]
    rollout = module._sample_and_score(module.codec.prompts(problems, torch.device("cpu")))
    advantages = module.advantages(rollout)
    logprobs, _ = module.score(rollout)
    noise = torch.linspace(-shift, shift, rollout.completion_ids.shape[1])
    total = 0.0
    for row in range(len(rollout)):
        length = int(rollout.lengths[row])
        for t in range(length):
            ratio = min(float(torch.exp(-noise[t])), cap)
            total = total - advantages[row] * ratio * logprobs[row, t] / length / len(rollout)
    grads = torch.autograd.grad(total, list(module.policy.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


@pytest.mark.parametrize(("cap", "bound"), [(2.0, 2.0), (1.1, 1.1), (None, None)])
def test_the_gradient_is_that_of_the_truncated_ratio(tmp_path, cap, bound):
    got, trainer, engine, module = trained(tmp_path, 1.0, importance_sampling_cap=cap)
    if cap is None:
        plain, *_ = trained(tmp_path, 0.0, exact=True)
        assert torch.equal(got, plain)
    else:
        torch.testing.assert_close(got, by_hand(module, cap, 1.0), atol=1e-6, rtol=1e-4)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "sampling/" in name}
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(1.0, abs=1e-4)
    assert 0.4 < logged["sampling/sampling_logp_difference/mean"] < 0.7
    assert logged["sampling/importance_sampling_ratio/max"] == pytest.approx(bound or 2.71828, abs=1e-3)
    assert 0.3 < logged["sampling/importance_sampling_ratio/min"] < 0.6
    assert engine.stages >= 1
    assert engine.rests == 1


def test_an_exact_engine_is_not_corrected(tmp_path):
    got, trainer, *_ = trained(tmp_path, 1.0, exact=True)
    plain, *_ = trained(tmp_path, 0.0, exact=True)
    assert torch.equal(got, plain)
    assert not [name for name in trainer.callback_metrics if "sampling/" in name]


def test_it_commutes_with_the_parts(tmp_path):
    got, *_ = trained(tmp_path, 1.0, callbacks=[ConflictMasking()])
    assert not torch.equal(got, trained(tmp_path, 1.0)[0])
    assert not torch.equal(got, trained(tmp_path, 0.0, exact=True, callbacks=[ConflictMasking()])[0])


def test_more_updates_keep_the_ratio_of_the_first(tmp_path):
    seen = []

    class See(ConflictMasking):
        def on_before_loss(self, trainer, pl_module, rollout):
            seen.append(rollout.token_weights.clone())

    module = make_module(optimizer=sgd, updates_per_rollout=2)
    module.engine = Off(module, 1.0)
    make_trainer(tmp_path, [See()], max_steps=2).fit(module, Sums(batch_size=4, shuffle=False))
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], torch.ones_like(seen[0]))
