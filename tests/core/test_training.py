"""One optimizer step: what its gradient is, what it does not depend on, and what each part changes."""

import dataclasses
import itertools
import math

import pytest
import torch

from gtpo_lightning import GTPOModule, Problem
from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer, KLPenalty
from gtpo_lightning.models import tiny_model, tiny_tokenizer
from tests.helpers.fakes import warnings_of
from tests.helpers.training import Sums, adam, all_parts, flat, gradient, make_module, make_trainer, spawn, vowels


def close(a, b, tolerance=1e-5):
    """Equal to the tolerance, measured against the size of the gradient."""
    return (a - b).abs().max() <= tolerance * max(1e-3, float(b.abs().max()))


def plain_policy_gradient(module, aggregation="sequence"):
    """The objective written out completion by completion, from the definition, with the plain forward of the model."""
    problems = Sums(batch_size=4, shuffle=False).make_problems("train")[:4]
    module.configure_model()
    trainer = make_trainer(".", ())
    module.trainer = trainer
    trainer.strategy.connect(module)
    rollout = module.sample(module.codec.prompts(problems), module.sampling, "train")
    module.reward(rollout)
    rewards = rollout.rewards.view(4, -1)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).view(-1)
    assert (advantages != 0).any()
    total, tokens = torch.tensor(0.0), int(rollout.lengths.sum())
    for i, length in enumerate(rollout.lengths.tolist()):
        prompt = module.codec.prompt_ids(problems[i // 4])
        completion = rollout.completion_ids[i, :length].tolist()
        logits = module.policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logp = (
            (logits / (module.loss_temperature or module.temperature))
            .log_softmax(-1)
            .gather(1, torch.tensor(completion)[:, None])
            .sum()
        )
        scale = {"sequence": 1 / (16 * length), "token": 1 / tokens, "constant": 1 / (16 * 10)}[aggregation]
        total = total - advantages[i] * logp * scale
    module.policy.zero_grad()
    total.backward()
    return torch.cat([p.grad.reshape(-1) for p in module.policy.parameters()])


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize(
    "temperatures", [{}, {"temperature": 0.7}, {"temperature": 0.7, "loss_temperature": 1.0}], ids=["1", "0.7", "both"]
)
@pytest.mark.filterwarnings("ignore:loss_temperature")
def test_without_parts_it_is_plain_group_relative_policy_gradient(tmp_path, aggregation, temperatures):
    settings = {"aggregation": aggregation, **temperatures}
    expected = plain_policy_gradient(make_module(**settings), aggregation)
    got = gradient(tmp_path, module=make_module(**settings))
    assert expected.abs().max() > 1e-4
    assert close(got, expected)


def test_each_part_alone_changes_the_gradient(tmp_path):
    plain = gradient(tmp_path)
    for part in all_parts():
        assert not close(gradient(tmp_path, [part]), plain, 1e-3), type(part).__name__


def test_all_orders_of_the_parts_give_bit_identical_weights(tmp_path):
    results = []
    for order in itertools.permutations(range(3)):
        module = make_module(optimizer=adam)
        parts = all_parts()
        make_trainer(tmp_path, [parts[i] for i in order], max_steps=2).fit(module, Sums(batch_size=4))
        results.append(flat(module))
    assert all(torch.equal(results[0], other) for other in results[1:])


SPLITS = [
    {"batch_size": 4, "accumulate": 1, "micro_batch_size": 1},
    {"batch_size": 4, "accumulate": 1, "micro_batch_size": 5},
    {"batch_size": 2, "accumulate": 2, "micro_batch_size": None},
    {"batch_size": 1, "accumulate": 4, "micro_batch_size": 3},
]


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_d_01_the_gradient_does_not_depend_on_the_split(tmp_path, aggregation, differentiable):
    def run(batch_size=4, accumulate=1, micro_batch_size=None):
        module = make_module(aggregation=aggregation, mask_truncated=True, micro_batch_size=micro_batch_size)
        parts = [*all_parts()[:2], EntropyRegularizer(gamma=0.1, differentiable=differentiable)]
        data = Sums(batch_size=batch_size, shuffle=False)
        return gradient(tmp_path, parts, data, module, accumulate_grad_batches=accumulate)

    whole = run()
    assert whole.abs().max() > 1e-4
    for split in SPLITS:
        assert close(run(**split), whole), split


def test_d_02_a_short_last_window_counts_what_it_holds(tmp_path):
    # 5 problems in an epoch of 5 batches, 4 accumulated: the second step holds one batch and must weigh it fully.
    def second_step(batch_size, accumulate, train):
        module = make_module()
        seen = []

        class Keep(torch.optim.SGD):
            def step(self, closure=None):
                out = super().step(closure)
                seen.append(flat(module).clone())
                return out

        module.build_optimizer = lambda params: Keep(params, lr=0.01)
        data = Sums(train=train, batch_size=batch_size, shuffle=False)
        make_trainer(tmp_path, max_steps=2, accumulate_grad_batches=accumulate).fit(module, data)
        return seen[1] - seen[0]

    assert close(second_step(1, 4, 5), second_step(4, 1, 5), 1e-4)


AGGREGATIONS = ("sequence", "token", "constant")


def _split_step(folder, aggregation, differentiable, batch_size, **trainer):
    parts = [*all_parts()[:2], EntropyRegularizer(gamma=0.1, differentiable=differentiable)]
    module = make_module(mask_truncated=True, aggregation=aggregation)
    return gradient(folder, parts, Sums(batch_size=batch_size, shuffle=False), module, **trainer)


def _ddp(rank, folder):
    cases = itertools.product(AGGREGATIONS, (False, True))
    torch.save([_split_step(folder, *case, 2, devices=2, strategy="ddp") for case in cases], f"{folder}/{rank}.pt")


def test_d_06_two_processes_give_the_gradient_of_one_for_every_aggregation(tmp_path):
    spawn(_ddp, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, case in enumerate(itertools.product(AGGREGATIONS, (False, True))):
        assert torch.equal(ranks[0][i], ranks[1][i])
        assert close(ranks[0][i], _split_step(tmp_path, *case, 4)), case


def _ddp_lopsided(rank, folder):
    # 3 problems on 2 ranks of 2: rank 0 gets one, rank 1 two; then rank 1 alone is without work.
    module = make_module(optimizer=adam)
    data = Sums(train=5, batch_size=2, shuffle=False)
    make_trainer(folder, all_parts(), devices=2, strategy="ddp", max_steps=4, max_epochs=2).fit(module, data)
    torch.save(flat(module), f"{folder}/{rank}.pt")


def test_e_13_a_rank_without_work_stops_no_other(tmp_path):
    spawn(_ddp_lopsided, tmp_path)
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))


def rollouts(module, problems, size):
    module.configure_model()
    trainer = make_trainer(".", ())
    module.trainer = trainer
    trainer.strategy.connect(module)
    rows = []
    for start in range(0, len(problems), size):
        out = module.sample(module.codec.prompts(problems[start : start + size]), module.sampling, "train")
        rows += [ids[:n] for ids, n in zip(out.completion_ids.tolist(), out.lengths.tolist(), strict=True)]
    return rows


def test_the_same_seed_gives_the_same_rollouts_for_other_batches():
    problems = Sums(train=6, batch_size=1).make_problems("train")
    whole = rollouts(make_module(), problems, 6)
    assert whole == rollouts(make_module(), problems, 1) == rollouts(make_module(rollout_batch_size=2), problems, 6)
    assert whole != rollouts(make_module(seed=1), problems, 6)
    assert len(set(map(tuple, whole))) > 20


def test_a_06_g_01_a_step_of_filtered_completions_is_zero_finite_and_said(tmp_path):
    module = make_module()
    trainer_parts = [EntropyFilter(initial_entropy=0.1)]
    with pytest.warns(UserWarning, match="filter"):
        grad = gradient(tmp_path, trainer_parts, module=module)
    assert (grad == 0).all()
    assert module.trainer.callback_metrics["gtpo/entropy_filtered_frac"] == 1.0
    assert float(module.trainer.callback_metrics["train/loss"]) == 0.0
    # G-01: the filter is off where the start is above ln 2.
    assert (gradient(tmp_path, [EntropyFilter(initial_entropy=0.9)]) != 0).any()


def constant(completions):
    return [0.35] * len(completions)


def test_c_01_equal_rewards_leave_nothing_but_are_counted_and_warned_about_once(tmp_path):
    module = make_module(rewards={constant: 1.0}, group_size=8)
    grads = []
    said = warnings_of(lambda: grads.append(gradient(tmp_path, [ConflictMasking()], module=module, max_steps=2)))
    (grad,) = grads
    assert (grad == 0).all()
    metrics = module.trainer.callback_metrics
    assert metrics["train/frac_reward_zero_std"] == 1.0
    assert metrics["gtpo/conflict_frac"] == 0.0
    assert module.monitor.equal_steps == 2
    assert sum("equal rewards" in text for text in said) == 1


def test_g_11_equal_rewards_are_pushed_down_unless_the_group_is_the_baseline(tmp_path):
    paper = gradient(tmp_path, [EntropyRegularizer()], module=make_module(rewards={constant: 1.0}))
    assert (paper != 0).any()
    module = make_module(rewards={constant: 1.0})
    gradient(tmp_path, [EntropyRegularizer(baseline="group")], module=module)
    # Each group's shifts sum to zero, so as a whole it is pushed nowhere.
    assert math.isclose(float(module.trainer.callback_metrics["train/loss"]), 0.0, abs_tol=1e-6)


def test_c_11_the_loss_is_zero_and_the_gradient_is_not(tmp_path):
    module = make_module()
    grad = gradient(tmp_path, module=module)
    assert abs(float(module.trainer.callback_metrics["train/loss"])) < 1e-5
    assert grad.abs().max() > 1e-4


def test_b_09_b_10_g_10_the_second_update_has_a_real_clipped_ratio(tmp_path):
    logged = []

    class Watch(ConflictMasking):
        def on_after_loss(self, trainer, pl_module, rollout, losses):
            ratio = (rollout.logprobs.detach() - rollout.old_logprobs).exp()[rollout.completion_mask.bool()]
            logged.append((trainer.global_step, float((ratio - 1).abs().max()), rollout.completion_ids.clone()))

    module = make_module(updates_per_rollout=2, epsilon=(0.1, 0.2), optimizer=adam)
    make_trainer(tmp_path, [Watch()], max_steps=4).fit(module, Sums(batch_size=4, shuffle=False))
    assert [step for step, _, _ in logged] == [0, 1, 2, 3]
    assert logged[0][1] < 1e-6
    assert logged[2][1] < 1e-6
    assert logged[1][1] > 1e-2
    assert logged[3][1] > 1e-2
    assert torch.equal(logged[0][2], logged[1][2])
    assert not torch.equal(logged[0][2], logged[2][2])
    assert module.trainer.callback_metrics["train/clip_ratio/region_mean"] > 0
    single = make_module()
    gradient(tmp_path, module=single)
    assert not any(name.startswith("train/clip_ratio") for name in single.trainer.callback_metrics)


def test_l_03_updates_per_rollout_repeat_whole_windows_and_steps_are_optimizer_steps(tmp_path):
    seen = []

    class Watch(ConflictMasking):
        def on_after_loss(self, trainer, pl_module, rollout, losses):
            ids = tuple(problem.id.split("/")[1] for problem in rollout.prompts.problems)
            seen.append((trainer.global_step, ids, bool((rollout.logprobs.detach() == rollout.old_logprobs).all())))

    module = make_module(updates_per_rollout=2, optimizer=adam)
    make_trainer(tmp_path, [Watch()], max_steps=4, accumulate_grad_batches=2).fit(
        module, Sums(batch_size=2, shuffle=False)
    )
    assert [(step, ids) for step, ids, _ in seen] == [
        (0, ("0", "1")),
        (0, ("2", "3")),
        (1, ("0", "1")),
        (1, ("2", "3")),
        (2, ("4", "5")),
        (2, ("6", "7")),
        (3, ("4", "5")),
        (3, ("6", "7")),
    ]
    assert [first for *_, first in seen] == [True, True, False, False] * 2
    assert module.trainer.global_step == 4  # max_steps and global_step count optimizer steps, not rollouts


def test_updates_per_rollout_refuses_a_loader_that_does_not_repeat(tmp_path):
    problems = [Problem(str(i), f"{i}=", str(i)) for i in range(4)]
    loader = torch.utils.data.DataLoader(problems, batch_size=2, collate_fn=list)
    with pytest.raises(ValueError, match="updates_per_rollout: 2 needs a loader that repeats"):
        make_trainer(tmp_path, max_steps=4).fit(make_module(updates_per_rollout=2), loader)


def test_a_08_a_10_truncated_completions_leave_the_loss_not_the_lengths_nor_the_baseline(tmp_path):
    seen = {}

    class Watch(ConflictMasking):
        def on_before_loss(self, trainer, pl_module, rollout):
            seen["rollout"] = rollout
            seen["advantages"] = rollout.advantages.clone()

    module = make_module(mask_truncated=True)
    gradient(tmp_path, [Watch()], module=module)
    rollout = seen["rollout"]
    cut = rollout.truncated
    assert 0 < int(cut.sum()) < len(cut)
    assert (rollout.completion_mask[cut] == 0).all()
    assert (rollout.lengths[cut] == 10).all()
    metrics = module.trainer.callback_metrics
    assert metrics["train/completions/max_length"] == 10
    assert metrics["train/completions/min_length"] == rollout.lengths.min()
    assert metrics["train/completions/clipped_ratio"] == pytest.approx(float(cut.float().mean()))
    rewards = rollout.rewards.view(4, 4)
    torch.testing.assert_close(seen["advantages"].view(4, 4), rewards - rewards.mean(dim=1, keepdim=True))


def half_scored(completions):
    return [1.0, None, 0.0, None] * (len(completions) // 4)


def test_c_12_unscored_completions_are_out_of_the_baseline(tmp_path):
    seen = []

    class Watch(ConflictMasking):
        def on_before_loss(self, trainer, pl_module, rollout):
            seen.append(rollout.advantages.view(-1, 4).clone())

    module = make_module(rewards={half_scored: 1.0})
    gradient(tmp_path, [Watch()], module=module)
    assert seen[0].tolist() == [[0.5, 0.0, -0.5, 0.0]] * 4
    assert module.trainer.callback_metrics["train/reward"] == 0.5
    assert module.trainer.callback_metrics["rewards/half_scored/none_frac"] == 0.5


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"group_size": 0}, "group_size: 0"),
        ({"group_size": 1}, "group_size: 1"),
        ({"max_completion_length": 0}, "max_completion_length: 0"),
        ({"temperature": 0}, "temperature: 0"),
        ({"loss_temperature": 0}, "loss_temperature: 0 "),
        ({"loss_temperature": float("inf")}, "loss_temperature: inf"),
        ({"loss_temperature": "1"}, "loss_temperature: '1'"),
        ({"micro_batch_size": 0}, "micro_batch_size: 0"),
        ({"rollout_batch_size": -1}, "rollout_batch_size: -1"),
        ({"updates_per_rollout": 0}, "updates_per_rollout: 0"),
        ({"advantage_scale": "std"}, "advantage_scale: 'std'.*none, group, batch"),
        ({"aggregation": "mean"}, "aggregation: 'mean'.*sequence, token, constant"),
        ({"epsilon": -0.1}, "epsilon: -0.1"),
        ({"epsilon": (0.1, 0.2, 0.3)}, "epsilon"),
        ({"dtype": "fp8"}, "dtype: 'fp8'.*bfloat16"),
        ({"rewards": {"no_such_reward": 1.0}}, "no_such_reward"),
        ({"weights": "nowhere.ckpt"}, "weights: 'nowhere.ckpt'"),
        ({"prompt_template": "no question"}, "prompt_template"),
        ({"model": "./no/such/folder"}, "model: './no/such/folder'"),
    ],
)
def test_c_15_bad_arguments_are_refused_by_name_before_a_model_is_read(setting, words, monkeypatch):
    monkeypatch.setattr("gtpo_lightning.policy_source.load_model", lambda *a, **k: pytest.fail("a model was read"))
    with pytest.raises(ValueError, match=words):
        make_module(**setting)


@pytest.mark.parametrize("way", [{"dtype": "bfloat16"}, {"precision": "bf16-true"}])
def test_p_07_half_precision_weights_warn_and_slots_stay_fp32(tmp_path, way):
    seen = []

    class Watch(ConflictMasking):
        def on_before_loss(self, trainer, pl_module, rollout):
            seen.extend([rollout.token_weights, rollout.sequence_weights, rollout.advantage_shift])
            seen.extend([rollout.sampled_logprobs, rollout.sampled_entropies])

    module = make_module(**{k: v for k, v in way.items() if k == "dtype"})
    trainer = make_trainer(tmp_path, [Watch()], **{k: v for k, v in way.items() if k == "precision"})
    with pytest.warns(UserWarning, match="fp32 masters"):
        trainer.fit(module, Sums(batch_size=2))
    assert {tensor.dtype for tensor in seen} == {torch.float32}


def test_p_07_mixed_precision_keeps_fp32_masters(tmp_path):
    module = make_module(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6))
    moved = gradient(tmp_path, module=module, precision="bf16-mixed")
    assert next(module.policy.parameters()).dtype == torch.float32
    # Adam's first step is the learning rate for every weight with a gradient: none was rounded away.
    touched = moved[moved != 0].abs()
    assert len(touched) > 0.5 * len(moved)
    assert touched.median() == pytest.approx(1e-6, rel=0.2)


def test_l_04_clipping_is_lightnings(tmp_path):
    free = gradient(tmp_path)
    clipped = gradient(tmp_path, gradient_clip_val=float(free.norm()) / 2)
    torch.testing.assert_close(clipped, free / 2, atol=1e-6, rtol=1e-3)


def test_d_09_logged_reward_is_the_weighted_sum_and_parts_are_raw(tmp_path):
    def one(completions):
        return [1.0] * len(completions)

    def four(completions):
        return [4.0] * len(completions)

    module = make_module(rewards={one: 2.0, four: 0.5})
    gradient(tmp_path, module=module)
    metrics = module.trainer.callback_metrics
    assert metrics["train/reward"] == 4.0
    assert metrics["train/rewards/one/mean"] == 1.0
    assert metrics["train/rewards/four/mean"] == 4.0


def one_group_in_ten(completions):
    # Groups of 4: all equal in three of four groups, so 75 % give no signal.
    return [float(i % 16 == 0) for i in range(len(completions))]


def test_c_16_e_10_steps_that_stay_poor_are_warned_about_once(tmp_path):
    module = make_module(rewards={one_group_in_ten: 1.0}, max_completion_length=1, optimizer=adam)
    trainer = make_trainer(tmp_path, max_steps=22, max_epochs=-1)
    said = warnings_of(lambda: trainer.fit(module, Sums(batch_size=4)))
    assert sum("most groups" in text for text in said) == 1
    assert sum("cut by max_completion_length" in text for text in said) == 1
    assert module.trainer.callback_metrics["train/frac_reward_zero_std"] == 0.75
    assert module.monitor.equal_steps == 0


def test_tied_weights_stay_tied_through_training_and_a_checkpoint(tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer), tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    settings = {"prompt_template": "{question}", "group_size": 2, "max_completion_length": 4}
    module = GTPOModule(str(tmp_path / "tied"), rewards=vowels, optimizer=adam, **settings)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, Sums(batch_size=2))
    lm = module.policy.causal_lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert sum(p is lm.lm_head.weight for group in trainer.optimizers[0].param_groups for p in group["params"]) == 1
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = GTPOModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).policy.causal_lm
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, lm.lm_head.weight)


def none_at_all(completions):
    return None


def test_f_01_a_step_in_which_nothing_was_scored_counts_as_without_signal(tmp_path):
    module = make_module(rewards={none_at_all: 1.0})
    said = warnings_of(lambda: gradient(tmp_path, module=module))
    assert module.monitor.equal_steps == 1
    assert module.trainer.callback_metrics["train/frac_reward_zero_std"] == 1.0
    assert sum("no completion of this step was scored" in text for text in said) == 1
    assert not any("equal rewards" in text for text in said)


LOGGED = ("train/reward", "train/reward_std", "train/frac_reward_zero_std", "train/entropy", "train/num_tokens",
          "train/completions/mean_length", "train/completions/min_length", "train/completions/max_length",
          "train/completions/clipped_ratio", "gtpo/conflict_frac", "gtpo/entropy_filtered_frac",
          "gtpo/seq_entropy_mean", "gtpo/seq_entropy_max", "gtpo/sign_flip_frac", "train/grad_norm")  # fmt: skip


def _logged(folder, batch_size, **trainer):
    module = make_module()
    gradient(folder, all_parts(), Sums(batch_size=batch_size, shuffle=False), module, **trainer)
    return {name: float(module.trainer.callback_metrics[name]) for name in LOGGED}, module


def _ddp_logged(rank, folder):
    torch.save(_logged(folder, 1, devices=2, strategy="ddp", accumulate_grad_batches=2)[0], f"{folder}/{rank}.pt")


def test_d_08_logged_statistics_are_those_of_the_whole_step(tmp_path):
    whole, module = _logged(tmp_path, 4)
    assert whole["train/completions/min_length"] < whole["train/completions/max_length"]
    assert 0 < whole["gtpo/entropy_filtered_frac"] < 1
    for split in ({"batch_size": 2, "accumulate_grad_batches": 2}, {"batch_size": 1, "accumulate_grad_batches": 4}):
        assert _logged(tmp_path, **split)[0] == pytest.approx(whole, rel=1e-4), split
    spawn(_ddp_logged, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(whole, rel=1e-4)
    problems = Sums(batch_size=4).make_problems("train")[:4]
    prompts = sum(4 * module.prompt_length(problem) for problem in problems)
    assert whole["train/num_tokens"] == prompts + 16 * whole["train/completions/mean_length"]


def test_steps_without_signal_are_counted_by_optimizer_step(tmp_path):
    module = make_module(rewards={one_group_in_ten: 1.0}, group_size=4)
    gradient(tmp_path, [], Sums(batch_size=1, shuffle=False), module, accumulate_grad_batches=4)
    # One group of one problem a micro-batch: its first row is rewarded, so no micro-batch and no step is equal.
    assert module.monitor.equal_steps == 0
    module = make_module(rewards={constant: 1.0})
    gradient(tmp_path, [], Sums(batch_size=1, shuffle=False), module, accumulate_grad_batches=4, max_steps=2)
    assert module.monitor.equal_steps == 2


def _ddp_batch_scale(rank, folder):
    module = make_module(advantage_scale="batch")
    grad = gradient(folder, [], Sums(batch_size=2, shuffle=False), module, devices=2, strategy="ddp")
    torch.save(grad, f"{folder}/{rank}.pt")


def test_c_09_batch_scaling_takes_the_std_over_all_ranks_and_refuses_parts_of_a_step(tmp_path):
    spawn(_ddp_batch_scale, tmp_path)
    one = gradient(tmp_path, module=make_module(advantage_scale="batch"))
    assert close(torch.load(tmp_path / "0.pt"), one)
    with pytest.raises(ValueError, match="advantage_scale: 'batch' with accumulate_grad_batches 2"):
        gradient(tmp_path, module=make_module(advantage_scale="batch"), accumulate_grad_batches=2)


def test_a_callback_may_change_the_temperature_of_a_rollout(tmp_path):
    seen = []

    class Anneal(ConflictMasking):
        def on_rollout_start(self, trainer, pl_module, prompts):
            pl_module.sampling = dataclasses.replace(pl_module.sampling, temperature=0.5)

        def on_before_loss(self, trainer, pl_module, rollout):
            seen.append((rollout.logprobs.detach() - rollout.sampled_logprobs).abs().max())

    gradient(tmp_path, [Anneal()])
    assert seen[0] < 1e-4


def test_a_loss_temperature_holds_for_entropies_and_the_reference_and_warns(tmp_path):
    seen = []

    class Watch(KLPenalty):
        def on_before_loss(self, trainer, pl_module, rollout):
            super().on_before_loss(trainer, pl_module, rollout)
            expected = pl_module.policy.score(
                rollout.prompts.ids, rollout.prompts.mask, rollout.group_ids, rollout.completion_ids,
                rollout.completion_mask, temperature=2.0,
            )  # fmt: skip
            seen.append(
                [(a - b).abs().max() for a, b in zip((rollout.logprobs, rollout.entropies), expected, strict=True)]
            )
            seen.append((pl_module.reference_logprobs(rollout) - expected[0]).abs().max())

    with pytest.warns(UserWarning, match=r"loss_temperature: 2 is not the temperature of sampling, 0.5"):
        module = make_module(temperature=0.5, loss_temperature=2.0)
    module.wants_reference = True
    make_trainer(tmp_path, [Watch()], max_steps=1).fit(module, Sums(batch_size=4))
    assert max(*seen[0], seen[1]) < 1e-5


def _ddp_rollouts(rank, folder):
    class Watch(ConflictMasking):
        def on_before_loss(self, trainer, pl_module, rollout):
            keys = [rollout.prompts.problems[i].id for i in rollout.group_ids.tolist()]
            rows = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)]
            torch.save(list(zip(keys, rows, strict=True)), f"{folder}/{rank}.pt")

    gradient(folder, [Watch()], Sums(batch_size=2, shuffle=False), devices=2, strategy="ddp")


def test_d_11_two_processes_sample_what_one_does_each_prompt_once(tmp_path):
    spawn(_ddp_rollouts, tmp_path)
    two = torch.load(tmp_path / "0.pt") + torch.load(tmp_path / "1.pt")
    problems = Sums(batch_size=4, shuffle=False).make_problems("train")[:4]
    one = rollouts(make_module(), problems, 4)
    assert [key for key, _ in two] == [problem.id for problem in problems for _ in range(4)]
    assert [row for _, row in two] == one


def test_seeds_left_out_are_those_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert make_module().seed == 7
    assert Sums().seed == 7
    assert make_module(seed=3).seed == 3
    with pytest.raises(ValueError, match="seed: -1"):
        make_module(seed=-1)


@pytest.mark.parametrize(("train", "limit", "expected"), [(4, 1.0, 2), (8, 1, 1), (6, 1.0, 3)])
def test_d_03_fewer_batches_than_a_window_are_told_for_any_loader(tmp_path, train, limit, expected):
    problems = Sums(train=train).make_problems("train")
    for data in (Sums(train=train, batch_size=2), torch.utils.data.DataLoader(problems, 2, collate_fn=list)):
        trainer = make_trainer(tmp_path, accumulate_grad_batches=4, limit_train_batches=limit, max_steps=2)
        with pytest.warns(UserWarning, match=f"4, but an epoch has only {expected} batches"):
            trainer.fit(make_module(), data)


def test_d_03_full_windows_and_trial_runs_are_not(tmp_path):
    for flags in ({}, {"accumulate_grad_batches": 4}, {"accumulate_grad_batches": 8, "fast_dev_run": 1}):
        trainer = make_trainer(tmp_path, **flags)
        said = warnings_of(lambda trainer=trainer: trainer.fit(make_module(), Sums(batch_size=2)))
        assert not any("an epoch has only" in text for text in said)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_completion_length": 3.5}, "max_completion_length: 3.5"),
        ({"max_completion_length": None}, "max_completion_length: None"),
        ({"temperature": None}, "temperature: None"),
        ({"temperature": "1"}, "temperature: '1'"),
        ({"model": None}, "model: None"),
        ({"system_prompt": None}, "system_prompt: None"),
        ({"group_size": 2.5}, "group_size: 2.5"),
        ({"updates_per_rollout": 1.5}, "updates_per_rollout: 1.5"),
        ({"micro_batch_size": 1.5}, "micro_batch_size: 1.5"),
        ({"epsilon": (0.2,)}, "epsilon"),
    ],
)
def test_c_15b_wrong_types_are_refused_by_name(setting, words):
    with pytest.raises(ValueError, match=words):
        make_module(**setting)
