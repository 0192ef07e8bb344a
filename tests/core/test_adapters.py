"""Training adapters: what is trained, saved, resumed and measured against; references are peft and transformers."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model

from gtpo_lightning import GTPOModule, PolicyModule, SFTModule
from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer, KLPenalty
from gtpo_lightning.datamodules import Arithmetic
from gtpo_lightning.engines import Sampling
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.models import load_model
from tests.helpers.fakes import warnings_of
from tests.helpers.training import THRESHOLD, Sums, adam, make_trainer, spawn, vowels

SMALL = {"rank": 4, "alpha": 8.0}


def made(**kwargs):
    """A module with adapters on the tiny model as it is, so that it can be made again from its arguments."""
    settings = {
        "model": "tiny",
        "group_size": 4,
        "max_completion_length": 10,
        "rewards": {vowels: 1.0},
        "prompt_template": "{question}",
        "optimizer": adam,
        "lora": SMALL,
        **kwargs,
    }
    return GTPOModule(**settings)


def all_parts():
    """The filter measures its start, which leaves it off: this model's head is nearly flat."""
    return [ConflictMasking(), EntropyFilter(threshold=THRESHOLD), EntropyRegularizer(gamma=0.1)]


def fitted(folder, steps=1, parts=(), module=None, name=None, ckpt_path=None, data=None, **trainer):
    module = module or made()
    fit = make_trainer(folder, parts, max_steps=steps, max_epochs=-1, **trainer)
    fit.fit(module, data or Sums(train=10, batch_size=2), ckpt_path=ckpt_path)
    if name is not None:
        fit.save_checkpoint(folder / name)
    return module


def trained(module):
    return {name: p.detach().clone() for name, p in module.policy.named_parameters() if p.requires_grad}


def frozen(module):
    return {name: p.detach().clone() for name, p in module.policy.named_parameters() if not p.requires_grad}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def of_peft(folder, **settings):
    """A trained adapter in a folder, by peft alone."""
    torch.manual_seed(3)
    model = get_peft_model(
        load_model("tiny"), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def logits(model, ids=None):
    ids = torch.arange(3, 40)[None] if ids is None else ids
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


class Watch(RLCallback):
    """What came by."""

    def __init__(self):
        self.rollouts, self.losses, self.logprobs, self.refs = [], [], [], []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        self.rollouts.append(rollout.completion_ids.tolist())
        self.losses.append({name: float(loss.detach()) for name, loss in losses.items()})
        self.logprobs.append((rollout.logprobs.detach().clone(), rollout.sampled_logprobs, rollout.completion_mask))
        self.refs.append(rollout.ref_logprobs)


# What is trained


def test_only_adapters_are_trained_in_fp32_and_a_fresh_one_does_nothing():
    module = made()
    module.configure_model()
    module.configure_model()  # p_04: one wrap, however often it is asked for
    wrapped = [type(m).__name__ for m in module.policy.modules()].count("PeftModelForCausalLM")
    assert wrapped == 1
    assert not any(name.count("base_layer") > 1 for name in module.policy.state_dict())
    names = trained(module)
    assert all("lora_A" in name or "lora_B" in name for name in names)
    assert len(names) == 2 * 2 * 7  # A and B of 7 linear layers in 2 layers; the head is none of them
    torch.testing.assert_close(logits(module.policy.causal_lm), logits(load_model("tiny")), atol=0, rtol=0)


def test_the_first_weights_depend_on_the_runs_seed_and_on_nothing_else():
    modules = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        module = made(seed=seed)
        module.configure_model()
        assert torch.equal(torch.get_rng_state(), (torch.manual_seed(state), torch.get_rng_state())[1])
        modules.append(trained(module))
    assert same(modules[0], modules[1])
    assert not same(modules[0], modules[2])


def test_training_moves_the_adapter_only_and_sampling_merges_nothing(tmp_path):
    module = made()
    module.configure_model()
    base, start, ids = frozen(module), trained(module), {name: id(p) for name, p in module.policy.named_parameters()}
    fitted(tmp_path, 2, all_parts(), module)
    assert same(frozen(module), base)
    moved = trained(module)
    assert all(not torch.equal(moved[name], start[name]) for name in start)
    prompts = module.codec.prompts(Sums().make_problems("train")[:2])
    module.sample(prompts, Sampling(2, 8), "train")
    assert same(frozen(module), base)
    assert same(trained(module), moved)
    assert {name: id(p) for name, p in module.policy.named_parameters()} == ids


def dense(model, module, rollout):
    """Log-probs of a rollout by a plain forward of a model, row by row."""
    rows = []
    for i, length in enumerate(rollout.lengths.tolist()):
        prompt = module.codec.prompt_ids(rollout.prompts.problems[int(rollout.group_ids[i])])
        completion = rollout.completion_ids[i, :length].tolist()
        out = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows.append(out.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return rows


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}]
)
def test_sampling_scores_and_gradients_are_those_of_pefts_forward(tmp_path, settings, layers, micro_batch_size):
    folder = of_peft(tmp_path, **settings)
    module = made(lora=None, adapter=folder, gradient_checkpointing=layers, micro_batch_size=micro_batch_size)
    module.configure_model()
    rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:2]), module.sampling, "train")
    logprobs, _ = module.score(rollout)
    logprobs.sum().backward()
    own = {n.split("model.", 1)[1]: p.grad for n, p in module.policy.named_parameters() if p.grad is not None}

    reference = PeftModel.from_pretrained(load_model("tiny"), folder, is_trainable=True)
    rows = dense(reference, module, rollout)
    for i, row in enumerate(rows):
        torch.testing.assert_close(logprobs[i, : len(row)], row, atol=1e-5, rtol=0)
        torch.testing.assert_close(rollout.sampled_logprobs[i, : len(row)], row.detach(), atol=1e-5, rtol=0)  # b_02
    sum(row.sum() for row in rows).backward()
    theirs = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert own.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (own[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name


def test_modules_to_save_train_whole_also_as_the_head(tmp_path):
    module = made(lora={**SMALL, "targets": ["q_proj"], "modules_to_save": ["lm_head"]})
    fitted(tmp_path, 2, module=module, name="x.ckpt")
    moved = [name for name in trained(module) if "lora" not in name]
    assert moved == ["model.base_model.model.lm_head.modules_to_save.default.weight"]
    assert not torch.equal(module.policy.head.weight, load_model("tiny").lm_head.weight)
    rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:1]), module.sampling, "train")
    for i, row in enumerate(dense(module.policy.model.eval(), module, rollout)):
        torch.testing.assert_close(module.score(rollout)[0][i, : len(row)], row, atol=1e-5, rtol=0)


def _gradient(folder, module, **trainer):
    module.configure_model()
    with torch.no_grad():  # a fresh B lets no gradient through to A
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    before = trained(module)
    data = Sums(
        train=8, batch_size=4 // trainer.get("devices", 1) // trainer.get("accumulate_grad_batches", 1), shuffle=False
    )
    fitted(folder, parts=all_parts(), module=module, data=data, **trainer)
    return {name: before[name] - value for name, value in trained(module).items()}


def _sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def _ddp(rank, folder):
    torch.save(_gradient(folder, made(optimizer=_sgd), devices=2, strategy="ddp"), f"{folder}/{rank}.pt")


def test_d_01_the_gradient_is_one_for_any_split_and_for_two_processes(tmp_path):
    whole = _gradient(tmp_path, made(optimizer=_sgd))
    assert max(float(grad.abs().max()) for grad in whole.values()) > 1e-3
    spawn(_ddp, tmp_path)
    splits = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    splits.append(_gradient(tmp_path, made(optimizer=_sgd), accumulate_grad_batches=2))
    splits.append(_gradient(tmp_path, made(optimizer=_sgd, micro_batch_size=3, gradient_checkpointing=True)))
    for split in splits:
        for name, grad in whole.items():
            torch.testing.assert_close(split[name], grad, atol=1e-5, rtol=1e-4, msg=name)


# Dropout


def test_dropout_acts_in_the_loss_and_neither_in_sampling_nor_in_what_is_not_trained(tmp_path):
    folder = of_peft(tmp_path)
    module = made(lora={**SMALL, "dropout": 0.5}, adapter=folder, micro_batch_size=3, gradient_checkpointing=True)
    module.configure_model()
    prompts = module.codec.prompts(Sums().make_problems("train")[:2])
    rollout = module.sample(prompts, module.sampling, "train")
    with torch.no_grad():
        quiet, _ = module.score(rollout)
    torch.testing.assert_close(quiet, rollout.sampled_logprobs, atol=1e-5, rtol=0)
    modes = [m.training for m in module.policy.modules()]
    torch.manual_seed(1)
    loud, _ = module.score(rollout)
    assert (loud - quiet).abs().max() > 1e-2
    assert [m.training for m in module.policy.modules()] == modes
    loud.sum().backward()  # the chunks and layers run again with the same zeros
    grads = {name: p.grad.clone() for name, p in module.policy.named_parameters() if p.requires_grad}
    module.zero_grad()
    torch.manual_seed(1)
    module.micro_batch_size = None
    plain = made(lora={**SMALL, "dropout": 0.5}, adapter=folder, micro_batch_size=3)
    plain.configure_model()
    again, _ = plain.score(rollout)
    torch.testing.assert_close(again, loud, atol=1e-6, rtol=0)
    again.sum().backward()
    for name, parameter in plain.policy.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-4)


# Checkpoints


def run(folder, steps, ckpt_path=None, save_at=None, **settings):
    watch = Watch()
    callbacks = [*all_parts(), KLPenalty(0.1), watch]
    if save_at:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1))
    module = fitted(folder, steps, callbacks, made(**settings), ckpt_path=ckpt_path, enable_checkpointing=bool(save_at))
    return module, watch


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": {**SMALL, "dropout": 0.3}, "updates_per_rollout": 2, "epsilon": 0.2},
        {"lora": {**SMALL, "targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "gradient_checkpointing": True},
        {"dtype": "bfloat16", "micro_batch_size": 3},
    ],
)
@pytest.mark.parametrize("stop", [2, 3])
def test_e_08_p_04_stopped_and_resumed_equals_uninterrupted(tmp_path, settings, stop):
    whole, watch = run(tmp_path / "whole", stop + 2, **settings)
    run(tmp_path / "first", stop, save_at=stop, **settings)
    again, seen = run(
        tmp_path / "second", stop + 2, ckpt_path=str(tmp_path / "first" / f"step={stop}.ckpt"), **settings
    )
    assert same(trained(again), trained(whole))
    assert same(frozen(again), frozen(whole))
    assert seen.rollouts == watch.rollouts[-2:]
    assert seen.losses == watch.losses[-2:]
    assert all(torch.equal(a, b) for a, b in zip(seen.refs, watch.refs[-2:], strict=True))
    assert [type(m).__name__ for m in again.policy.modules()].count("PeftModelForCausalLM") == 1


def test_l_08_a_checkpoint_holds_adapters_and_their_moments_only(tmp_path):
    module = fitted(tmp_path, 1, [KLPenalty(0.1)], name="x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    names = {name.removeprefix("policy.") for name in checkpoint["state_dict"]}
    assert names == trained(module).keys()
    moments = checkpoint["optimizer_states"][0]["state"]
    assert len(moments) == len(names)
    weights = sum(value.numel() for value in checkpoint["state_dict"].values())
    assert weights == sum(value.numel() for value in trained(module).values()) < 0.2 * 140_000
    assert (tmp_path / "x.ckpt").stat().st_size < 4 * 3 * weights + 60_000


@pytest.mark.parametrize("kind", [GTPOModule, PolicyModule])
def test_l_08_load_from_checkpoint_and_weights_give_the_policy_back(tmp_path, kind):
    module = fitted(tmp_path, 2, name="x.ckpt")
    again = kind.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert same(trained(again), trained(module))
    torch.testing.assert_close(logits(again.policy.causal_lm), logits(module.policy.causal_lm), atol=0, rtol=0)
    fresh = made(weights=str(tmp_path / "x.ckpt"))
    fresh.configure_model()
    assert same(trained(fresh), trained(module))


def test_l_08_a_missing_or_unknown_adapter_weight_is_an_error(tmp_path):
    fitted(tmp_path, 1, name="x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    name = next(iter(checkpoint["state_dict"]))
    value = checkpoint["state_dict"].pop(name)
    torch.save(checkpoint, tmp_path / "missing.ckpt")
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        GTPOModule.load_from_checkpoint(tmp_path / "missing.ckpt", weights_only=True)
    checkpoint["state_dict"] |= {name: value, name.replace("lora_A", "lora_C"): value}
    torch.save(checkpoint, tmp_path / "unknown.ckpt")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lora_C"):
        GTPOModule.load_from_checkpoint(tmp_path / "unknown.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"weights: .*missing.ckpt' does not fit the model \(missing .*lora_A"):
        made(weights=str(tmp_path / "missing.ckpt")).configure_model()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora": {"rank": 8, "alpha": 8.0}}, "lora.rank 4, and this run has 8; valid: 4"),
        ({"lora": {"rank": 4, "alpha": 1.0}}, "lora.alpha 8.0, and this run has 1.0; valid: 8.0"),
        (
            {"lora": None},
            "holds an adapter over a frozen model, and this run has none; valid: lora with rank 4 and alpha 8",
        ),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, settings, words):
    fitted(tmp_path, 1, name="x.ckpt")
    path = str(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=f"weights: .*{words}"):
        made(weights=path, **settings).configure_model()
    with pytest.raises(ValueError, match=f"ckpt_path: .*{words}"):
        fitted(tmp_path, 2, module=made(**settings), ckpt_path=path)


def test_other_targets_are_refused_by_the_weights_that_do_not_fit(tmp_path):
    fitted(tmp_path, 1, name="x.ckpt")
    module = made(lora={**SMALL, "targets": ["q_proj"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*down_proj"):
        fitted(tmp_path, 2, module=module, ckpt_path=str(tmp_path / "x.ckpt"))


# A base from a checkpoint


def warm_start(folder):
    """A supervised run of the whole model."""
    module = SFTModule("tiny", 16, prompt_template="{question}", optimizer=adam)
    make_trainer(folder, max_steps=2).fit(module, Arithmetic(size=16, val_size=2, batch_size=4))
    module.trainer.save_checkpoint(folder / "sft.ckpt")
    return module, str(folder / "sft.ckpt")


def test_a_whole_policy_as_weights_is_the_base_of_a_fresh_adapter(tmp_path):
    sft, start = warm_start(tmp_path)
    module = made(weights=start)
    module.configure_model()
    torch.testing.assert_close(logits(module.policy.causal_lm), logits(sft.policy.causal_lm), atol=0, rtol=0)
    with pytest.raises(ValueError, match="ckpt_path: the checkpoint holds a whole policy, and this run has lora"):
        fitted(tmp_path, 2, module=made(), ckpt_path=start)


def test_e_08_a_resumed_run_reads_the_base_that_the_checkpoint_names(tmp_path):
    _, start = warm_start(tmp_path)
    whole, _ = run(tmp_path / "whole", 4, weights=start)
    run(tmp_path / "first", 2, save_at=2, weights=start)
    path = tmp_path / "first" / "step=2.ckpt"
    for name, settings in (("named", {}), ("given", {"weights": start})):
        again, _ = run(tmp_path / name, 4, ckpt_path=str(path), **settings)
        assert same(trained(again), trained(whole))
        assert same(frozen(again), frozen(whole))
    loaded = GTPOModule.load_from_checkpoint(path, weights_only=True)
    assert same(frozen(loaded), frozen(whole))
    moved = (tmp_path / "sft.ckpt").rename(tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=r"over the policy of .*sft.ckpt, and that file is gone; valid: "):
        run(tmp_path / "gone", 4, ckpt_path=str(path))
    again, _ = run(tmp_path / "moved", 4, ckpt_path=str(path), weights=str(moved))
    assert same(trained(again), trained(whole))
    state = torch.load(moved, weights_only=True)
    state["state_dict"]["policy.model.lm_head.weight"] += 0.1
    torch.save(state, tmp_path / "sft.ckpt")
    with pytest.raises(ValueError, match=r"sft.ckpt, which has other weights now"):
        run(tmp_path / "changed", 4, ckpt_path=str(path))


def test_an_adapter_over_a_base_from_a_checkpoint_brings_it_along(tmp_path):
    _, start = warm_start(tmp_path)
    first = fitted(tmp_path, 2, module=made(weights=start), name="first.ckpt")
    second = made(weights=str(tmp_path / "first.ckpt"))
    second.configure_model()
    assert same(trained(second), trained(first))
    assert same(frozen(second), frozen(first))
    fitted(tmp_path, 1, module=second, name="second.ckpt")
    third = PolicyModule.load_from_checkpoint(tmp_path / "second.ckpt", weights_only=True)
    assert same(frozen(third), frozen(first))
    with pytest.raises(ValueError, match=r"adapter: .* cannot both be the start"):
        made(lora=None, weights=str(tmp_path / "first.ckpt"), adapter=of_peft(tmp_path / "a")).configure_model()


# The reference


def size(module):
    """Bytes of all weights that are in memory for a module, shared ones once."""
    kept = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    reference = getattr(module, "reference", None)
    if isinstance(reference, torch.nn.Module):
        assert all(p in set(module.parameters()) for p in reference.parameters())
    return sum(kept.values())


def test_p_01_a_fresh_adapter_needs_no_copy_and_its_kl_starts_at_0(tmp_path):
    watch, module = Watch(), made()
    plain = made()
    plain.configure_model()
    fitted(tmp_path, 2, [KLPenalty(0.1), watch], module)
    assert size(module) == size(plain)
    assert watch.losses[0]["kl"] == 0.0
    assert watch.losses[1]["kl"] > 1e-6
    assert [name for name, p in module.named_parameters() if p.requires_grad] == [f"policy.{n}" for n in trained(plain)]
    # the reference of the second step is the model as it is, by a plain forward
    base = load_model("tiny")
    rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:2]), module.sampling, "train")
    for i, row in enumerate(dense(base, module, rollout)):
        torch.testing.assert_close(module.reference_logprobs(rollout)[i, : len(row)], row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3, "gradient_checkpointing": True, "dtype": "bfloat16"}])
def test_p_01_a_trained_adapter_is_kept_a_second_time_and_its_kl_starts_at_0(tmp_path, settings, extra):
    folder = of_peft(tmp_path / "adapter", **extra)
    watch, module = Watch(), made(lora=None, adapter=folder, **settings)
    plain = made(lora=None, adapter=folder, **settings)
    plain.configure_model()
    fitted(tmp_path, 3, [KLPenalty(0.1), watch], module, name="x.ckpt")
    assert watch.losses[0]["kl"] == 0.0
    assert watch.losses[-1]["kl"] > 1e-6
    adapter = sum(p.numel() * p.element_size() for p in plain.policy.parameters() if p.requires_grad)
    assert size(module) == size(plain) + adapter
    assert trained(module).keys() == trained(plain).keys()
    names = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert {name.removeprefix("policy.") for name in names} == trained(module).keys()  # not twice
    if not settings:
        start = PeftModel.from_pretrained(load_model("tiny"), folder)
        rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:2]), module.sampling, "train")
        for i, row in enumerate(dense(start, module, rollout)):
            torch.testing.assert_close(module.reference_logprobs(rollout)[i, : len(row)], row, atol=1e-5, rtol=0)


def test_the_penaltys_gradient_is_that_of_a_full_copy(tmp_path):
    """The same step with the reference as a second model: a checkpoint of the whole start policy."""
    folder, grads = of_peft(tmp_path / "adapter"), []
    merged = PeftModel.from_pretrained(load_model("tiny"), folder).merge_and_unload()
    torch.save({"state_dict": {f"policy.model.{n}": v for n, v in merged.state_dict().items()}}, tmp_path / "full.ckpt")
    for reference in (None, str(tmp_path / "full.ckpt")):
        module = made(lora=None, adapter=folder, optimizer=_sgd, updates_per_rollout=2)
        before = None
        module.configure_model()
        fitted(tmp_path, 1, [KLPenalty(0.0)], module)  # away from the reference
        before = trained(module)
        part = KLPenalty(5.0, reference=reference)
        again = made(lora=None, adapter=folder, optimizer=_sgd)
        again.configure_model()
        part.setup(None, again, "fit")
        again.reference_weights, again.wants_reference = reference, True
        again.configure_model()
        again.policy.load_state_dict(before, strict=False)
        fitted(tmp_path, 1, [part], again)
        grads.append({name: before[name] - value for name, value in trained(again).items()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_e_08_p_01_a_run_from_a_trained_adapter_resumes_with_it_as_the_reference(tmp_path):
    folder = of_peft(tmp_path / "adapter")
    settings = {"lora": None, "adapter": folder}
    whole, watch = run(tmp_path / "whole", 4, **settings)
    run(tmp_path / "first", 2, save_at=2, **settings)
    path = str(tmp_path / "first" / "step=2.ckpt")
    # given again, and without: the settings are in the checkpoint, the place of the start too
    for name, given in (("given", settings), ("named", {}), ("loaded", None)):
        if given is None:
            module = GTPOModule.load_from_checkpoint(path, optimizer=adam, rewards={vowels: 1.0}, weights_only=True)
            seen = Watch()
            fitted(tmp_path, 4, [*all_parts(), KLPenalty(0.1), seen], module, ckpt_path=path)
            again = module
        else:
            again, seen = run(tmp_path / name, 4, ckpt_path=path, **given)
        assert same(trained(again), trained(whole)), name
        assert all(torch.equal(a, b) for a, b in zip(seen.refs, watch.refs[-2:], strict=True)), name
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"measures KL to the policy of .*adapter, and that file is gone"):
        run(tmp_path / "gone", 4, ckpt_path=path)


def test_e_08_p_01_a_run_from_a_checkpoints_adapter_resumes_with_it_as_the_reference(tmp_path):
    _, start = warm_start(tmp_path)
    fitted(tmp_path, 2, module=made(weights=start), name="adapter.ckpt")
    settings = {"weights": str(tmp_path / "adapter.ckpt")}
    whole, watch = run(tmp_path / "whole", 4, **settings)
    assert watch.losses[0]["kl"] == 0.0
    run(tmp_path / "first", 2, save_at=2, **settings)
    path = str(tmp_path / "first" / "step=2.ckpt")
    for name, given in (("given", settings), ("base", {"weights": start}), ("named", {})):
        again, seen = run(tmp_path / name, 4, ckpt_path=path, **given)
        assert same(trained(again), trained(whole)), name
        assert all(torch.equal(a, b) for a, b in zip(seen.refs, watch.refs[-2:], strict=True)), name


def test_p_01_a_policy_that_was_loaded_and_is_trained_anew_is_its_own_reference(tmp_path):
    fitted(tmp_path, 2, name="x.ckpt")
    module = GTPOModule.load_from_checkpoint(
        tmp_path / "x.ckpt", optimizer=adam, rewards={vowels: 1.0}, weights_only=True
    )
    watch = Watch()
    fitted(tmp_path, 2, [KLPenalty(0.1), watch], module)
    assert watch.losses[0]["kl"] == 0.0
    assert watch.losses[1]["kl"] > 1e-6


def test_a_checkpoint_given_as_the_reference(tmp_path):
    """An adapter over the same base shares it; a whole policy, or an adapter over another base, is a second model."""
    sft, start = warm_start(tmp_path)
    near = fitted(tmp_path, 2, name="near.ckpt")
    far = fitted(tmp_path, 2, module=made(weights=start), name="far.ckpt")
    plain = made()
    plain.configure_model()
    copies = {}
    for name, origin in (("near", near), ("far", far), ("sft", sft)):
        module = made()
        fitted(tmp_path, 1, [KLPenalty(0.1, reference=str(tmp_path / f"{name}.ckpt"))], module)
        rollout = module.sample(module.codec.prompts(Sums().make_problems("train")[:2]), module.sampling, "train")
        for i, row in enumerate(dense(copy.deepcopy(origin.policy.model).eval(), module, rollout)):
            torch.testing.assert_close(module.reference_logprobs(rollout)[i, : len(row)], row, atol=1e-5, rtol=0)
        copies[name] = (size(module) - size(plain)) / size(plain)
    assert copies["near"] < 0.2
    assert copies["far"] == pytest.approx(1.0, abs=0.01)
    assert copies["sft"] < 1.0


# Precision


def test_p_07_a_bf16_base_keeps_its_adapters_in_fp32_so_that_small_updates_stay(tmp_path):
    module = made(dtype="bfloat16", optimizer=lambda params: torch.optim.Adam(params, lr=1e-6))
    module.configure_model()
    assert {p.dtype for p in module.policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in module.policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    before = trained(module)
    texts = warnings_of(lambda: fitted(tmp_path, 1, module=module, precision="bf16-mixed"))
    assert not any("half precision" in text for text in texts)
    moved = torch.cat([(value - before[name]).reshape(-1) for name, value in trained(module).items()])
    assert moved[moved != 0].abs().median() == pytest.approx(1e-6, rel=0.2)
    assert (moved != 0).float().mean() > 0.4  # B; a fresh A has no gradient yet
