"""GRPO in the module: clipping against the policy that sampled, the overlong penalty by name, groups sampled again."""

from pathlib import Path

import pytest
import torch

from gtpo_lightning.callbacks import KLPenalty
from gtpo_lightning.cli import main
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.resampling import resample
from gtpo_lightning.rewards import RewardFunctions, SoftOverlong
from gtpo_lightning.rollout import Problem, Prompts, Rollout
from tests.helpers.training import Sums, adam, flat, gradient, make_module, make_trainer, spawn, vowels

CONFIGS = Path(__file__).parents[2] / "configs"


class Watch(RLCallback):
    """Keeps the rollout of each update, with copies of what changes."""

    def __init__(self):
        self.seen, self.logged = [], []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        self.seen.append(
            {
                "ids": rollout.completion_ids.clone(),
                "mask": rollout.completion_mask.bool().clone(),
                "logprobs": rollout.logprobs.detach().clone(),
                "old": None if rollout.old_logprobs is None else rollout.old_logprobs.clone(),
                "weights": rollout.weights().clone(),
                "rewards": rollout.rewards.clone(),
                "texts": list(rollout.texts),
                "sampled": rollout.sampled_logprobs.clone(),
                "loss": float(losses["policy"].detach()),
            }
        )

    def on_train_batch_end(self, trainer, *args):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


# Clipping


def two_updates(folder, **settings):
    module = make_module(updates_per_rollout=2, group_size=8, optimizer=adam, **settings)
    watch = Watch()
    make_trainer(folder, [watch], max_steps=2).fit(module, Sums(batch_size=4, shuffle=False))
    return watch


def clipped_by_hand(seen, low, high, delta):
    """Loss and shares of clipped tokens, token by token from the definition."""
    total, counts, tokens = 0.0, {"low": 0, "high": 0, "delta": 0}, 0
    rows = len(seen["mask"])
    for i in range(rows):
        length = int(seen["mask"][i].sum())
        for t in range(length):
            ratio = float((seen["logprobs"][i, t].double() - seen["old"][i, t].double()).exp())
            weight = float(seen["weights"][i, t])
            counts["low"] += ratio < 1 - low and weight < 0
            counts["high"] += ratio > 1 + high and weight > 0
            counts["delta"] += ratio > delta and weight < 0
            term = min(ratio * weight, min(max(ratio, 1 - low), 1 + high) * weight)
            term = max(term, delta * weight) if weight < 0 else term
            total -= term / length / rows
        tokens += length
    return total, {name: count / tokens for name, count in counts.items()}


def test_g_10_l_03_the_second_update_is_clipped_against_the_policy_that_sampled(tmp_path):
    low, high, delta = 0.1, 0.2, 1.5
    watch = two_updates(tmp_path, epsilon=(low, high), delta=delta)
    first, second = watch.seen
    assert torch.equal(first["ids"], second["ids"])
    mask = first["mask"]
    # the old log-probs are those the rollout was sampled with, and stay
    assert torch.equal(first["old"], first["logprobs"])
    assert torch.equal(second["old"], first["old"])
    assert torch.allclose(first["old"][mask], first["sampled"][mask], atol=1e-4)
    assert not torch.allclose(second["old"][mask], second["logprobs"][mask], atol=1e-2)
    loss, shares = clipped_by_hand(second, low, high, delta)
    assert min(shares.values()) > 0  # each kind occurs
    assert second["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    logged = watch.logged[1]
    assert logged["train/clip_ratio/low_mean"] == pytest.approx(shares["low"], abs=1e-6)
    assert logged["train/clip_ratio/high_mean"] == pytest.approx(shares["high"], abs=1e-6)
    assert logged["train/clip_ratio/region_mean"] == pytest.approx(shares["low"] + shares["high"], abs=1e-6)
    assert logged["train/clip_ratio/delta_mean"] == pytest.approx(shares["delta"], abs=1e-6)
    assert logged["train/clip_ratio/low_min"] == pytest.approx(shares["low"], abs=1e-6)
    assert logged["train/clip_ratio/high_max"] == pytest.approx(shares["high"], abs=1e-6)
    assert all(watch.logged[0][f"train/clip_ratio/{name}"] == 0 for name in ("low_mean", "high_max", "delta_mean"))


def test_the_least_and_largest_clip_ratios_are_those_of_micro_batches(tmp_path):
    watch, module = Watch(), make_module(updates_per_rollout=2, optimizer=adam, epsilon=0.1)
    trainer = make_trainer(tmp_path, [watch], max_steps=2, accumulate_grad_batches=4)
    trainer.fit(module, Sums(batch_size=1, shuffle=False))
    shares = [clipped_by_hand(seen, 0.1, 0.1, 1e9)[1] for seen in watch.seen[4:]]
    logged = watch.logged[-1]
    assert logged["train/clip_ratio/low_min"] == pytest.approx(min(s["low"] for s in shares), abs=1e-6)
    assert logged["train/clip_ratio/high_max"] == pytest.approx(max(s["high"] for s in shares), abs=1e-6)
    assert logged["train/clip_ratio/low_min"] < logged["train/clip_ratio/low_mean"]


def test_delta_alone_clips_and_without_clipping_nothing_is_logged(tmp_path):
    loose, tight = (two_updates(tmp_path, delta=delta) for delta in (None, 1.05))
    assert not any("clip_ratio" in name for name in loose.logged[1])
    assert tight.logged[1]["train/clip_ratio/delta_mean"] > 0
    assert tight.seen[1]["loss"] < loose.seen[1]["loss"]  # a bounded ratio loses less on negative weights


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": 1.0}, "delta: 1.0"),
        ({"delta": 1.2, "epsilon": 0.2}, "delta: 1.2.*1.2"),
        ({"delta": 1.25, "epsilon": (0.1, 0.28)}, "delta: 1.25.*1.28"),
        ({"delta": "2"}, "delta: '2'"),
        ({"resample_groups": -1}, "resample_groups: -1"),
        ({"resample_groups": 1.5}, "resample_groups: 1.5"),
    ],
)
def test_c_15b_bad_settings_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        make_module(**settings)


# The overlong penalty


def test_f_07_soft_overlong_by_name_takes_the_modules_limit_and_a_fifth_of_it(tmp_path):
    module = make_module(rewards={vowels: 1.0, "soft_overlong": 0.5})
    watch = Watch()
    gradient(tmp_path, [watch], module=module)
    (seen,) = watch.seen
    lengths = seen["mask"].sum(dim=1).tolist()
    assert {10} < set(lengths)
    # limit 10, cache 2: 0 up to 8 tokens, -0.5 at 9, -1 at 10
    expected = [v + 0.5 * {9: -0.5, 10: -1.0}.get(n, 0.0) for v, n in zip(vowels(seen["texts"]), lengths, strict=True)]
    assert seen["rewards"].tolist() == pytest.approx(expected)
    assert module.trainer.callback_metrics["train/rewards/soft_overlong/mean"] < 0


def test_f_07_the_limits_default_cache_and_ones_own():
    named = RewardFunctions({"soft_overlong": 2.0})
    assert named.weights == {"soft_overlong": 2.0}
    function = named.functions["soft_overlong"]
    with pytest.raises(ValueError, match="maximum: not set"):
        function([""], lengths=[3])
    function.limit_to(100)
    problems = [Problem("a", "", "")] * 4
    assert named([""] * 4, problems, lengths=[80, 90, 100, 101]).parts["soft_overlong"].tolist() == [0, -0.5, -1, -1]
    own = SoftOverlong(50, 10)
    own.limit_to(100)
    assert (own.maximum, own.cache) == (50, 10)
    assert SoftOverlong(4).cache == 1
    with pytest.raises(ValueError, match="cache: 20 is larger than maximum 10"):
        SoftOverlong(cache=20).limit_to(10)


# Groups sampled again


def rollout_of(rewards, width, first=0):
    """Two rows a group; completions are told by their tokens, which count up from `first`."""
    rows = len(rewards)
    problems = [Problem(str(i), f"q{i}", "") for i in range(rows // 2)]
    rollout = Rollout(
        Prompts(torch.zeros(rows // 2, 1), torch.ones(rows // 2, 1), problems),
        torch.arange(rows // 2).repeat_interleave(2),
        torch.arange(first, first + rows)[:, None].repeat(1, width),
        torch.ones(rows, width, dtype=torch.bool),
        rewards=torch.tensor(rewards),
        reward_parts={"part": torch.tensor(rewards) * 2},
        reward_failures={"part": {"error": torch.tensor(rewards) == 7}},
        sampled_logprobs=torch.full((rows, width), float(first)),
        texts=[f"{first}+{i}" for i in range(rows)],
        truncated=torch.full((rows,), first > 0),
    )
    return rollout


NAN = float("nan")


def test_groups_without_variance_are_replaced_by_their_first_try_with_one():
    # groups: 0 differs; 1 never; 2 at the second try, which is shorter; 3 was not scored
    asked = []
    tries = {1: rollout_of([5.0, 5.0, 3.0, 3.0], 3, 100), 2: rollout_of([1.0, 1.0, 0.0, 7.0], 2, 200)}

    def sample(problems, attempt):
        asked.append(([problem.id for problem in problems], attempt))
        return tries[attempt]

    before = rollout_of([0.0, 1.0, 0.4, 0.4, 2.0, 2.0, NAN, NAN], 2)
    rollout, counts = resample(before, sample, 2)
    assert asked == [(["1", "2"], 1), (["1", "2"], 2)]
    assert counts == [0, 2, 2, 0]
    assert rollout.rewards[:6].tolist() == pytest.approx([0.0, 1.0, 0.4, 0.4, 0.0, 7.0])
    assert rollout.completion_ids.tolist() == [[i, i] for i in (0, 1, 2, 3, 202, 203, 6, 7)]
    assert rollout.texts == ["0+0", "0+1", "0+2", "0+3", "200+2", "200+3", "0+6", "0+7"]
    assert rollout.truncated.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert rollout.sampled_logprobs[:, 0].tolist() == [0] * 4 + [200] * 2 + [0] * 2
    assert rollout.reward_parts["part"][4:6].tolist() == [0.0, 14.0]
    assert rollout.reward_failures["part"]["error"].tolist() == [False] * 5 + [True] + [False] * 2
    assert before.rewards[4:6].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("width", "other"), [(2, 4), (4, 2)])
def test_a_longer_or_shorter_try_fits_in(width, other):
    rollout, counts = resample(
        rollout_of([1.0, 2.0, 1.0, 1.0], width), lambda problems, attempt: rollout_of([0.0, 1.0], other, 50), 3
    )
    assert counts == [0, 1]
    assert rollout.completion_mask.sum(dim=1).tolist() == [width, width, other, other]
    assert rollout.completion_ids[2:, :other].tolist() == [[50] * other, [51] * other]
    assert rollout.lengths.tolist() == [width, width, other, other]
    assert rollout.token_weights.shape == (4, 4)


def rare(completions):
    """1 for a completion with an a in it: most groups of this policy have none."""
    return [float("a" in text) for text in completions]


def resampled(folder, tries, steps=1, batch_size=8, **trainer):
    watch, module = Watch(), make_module(rewards={rare: 1.0}, resample_groups=tries, optimizer=adam)
    data = Sums(train=16, batch_size=batch_size, shuffle=False)
    make_trainer(folder, [watch], max_steps=steps, max_epochs=-1, **trainer).fit(module, data)
    return watch, flat(module), module


def test_resampling_in_training_fills_groups_and_counts(tmp_path):
    plain, _, _ = resampled(tmp_path, 0)
    watch, _, _ = resampled(tmp_path, 3)
    before, after = plain.seen[0]["rewards"].view(8, 4), watch.seen[0]["rewards"].view(8, 4)
    equal = before.std(dim=1) == 0
    still = after.std(dim=1) == 0
    assert equal.sum() > still.sum()
    assert torch.equal(after[~equal], before[~equal])
    assert torch.equal(after[still], before[still])  # the first try stays where none had variance
    logged = watch.logged[0]
    assert logged["gtpo/resampled_frac"] == pytest.approx(float(equal.float().mean()))
    assert float(equal.float().mean()) <= logged["gtpo/resample_tries"] <= 3 * float(equal.float().mean())
    assert logged["train/frac_reward_zero_std"] == pytest.approx(float(still.float().mean()))
    assert "gtpo/resampled_frac" not in plain.logged[0]
    seen = watch.seen[0]
    # log-probs of the replaced completions are theirs
    assert torch.allclose(seen["logprobs"][seen["mask"]], seen["sampled"][seen["mask"]], atol=1e-4)


def test_resampling_does_not_depend_on_the_batch_and_repeats_itself(tmp_path):
    whole, weights, _ = resampled(tmp_path, 2)
    again, same, _ = resampled(tmp_path, 2)
    split, _, module = resampled(tmp_path, 2, batch_size=2, accumulate_grad_batches=4)
    assert torch.equal(weights, same)
    texts = [text for seen in split.seen for text in seen["texts"]]
    assert texts == whole.seen[0]["texts"] == again.seen[0]["texts"]
    for name in ("gtpo/resampled_frac", "gtpo/resample_tries"):
        assert float(module.trainer.callback_metrics[name]) == pytest.approx(whole.logged[0][name]), name


def test_e_08_a_resumed_run_samples_again_what_the_unbroken_one_did(tmp_path):
    _, whole, _ = resampled(tmp_path, 2, steps=4, batch_size=2)
    _, _, module = resampled(tmp_path, 2, steps=2, batch_size=2)
    module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    watch, second = Watch(), make_module(rewards={rare: 1.0}, resample_groups=2, optimizer=adam)
    trainer = make_trainer(tmp_path, [watch], max_steps=4, max_epochs=-1)
    trainer.fit(second, Sums(train=16, batch_size=2, shuffle=False), ckpt_path=str(tmp_path / "x.ckpt"))
    assert torch.equal(flat(second), whole)


def _ddp(rank, folder):
    watch, weights, _ = resampled(folder, 2, steps=2, batch_size=2, devices=2, strategy="ddp")
    names = ("gtpo/resampled_frac", "gtpo/resample_tries")
    torch.save(
        ([seen["texts"] for seen in watch.seen], weights, [watch.logged[0][n] for n in names]), f"{folder}/{rank}.pt"
    )


def test_two_ranks_sample_again_by_themselves_what_one_would(tmp_path):
    spawn(_ddp, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(ranks[0][1], ranks[1][1])
    one, _, _ = resampled(tmp_path, 2, batch_size=4)
    assert ranks[0][0][0] + ranks[1][0][0] == one.seen[0]["texts"]
    for rank in ranks:
        assert rank[2] == pytest.approx([one.logged[0]["gtpo/resampled_frac"], one.logged[0]["gtpo/resample_tries"]])


# The configuration


def fit(folder, *flags, configs=("grpo.yaml",)):
    configs = [*configs, "models/tiny.yaml", "data/arithmetic.yaml"]
    files = [word for name in configs for word in ("-c", str(CONFIGS / name))]
    data = ["--data.batch_size=2", "--data.size=8", "--data.val_size=4", "--model.max_completion_length=6"]
    trainer = ["accelerator=cpu", "devices=1", "enable_progress_bar=false", "max_steps=1", "limit_val_batches=0"]
    small = [*data, *(f"--trainer.{flag}" for flag in trainer), f"--trainer.logger.save_dir={folder}"]
    return main(["fit", *files, *small, *map(str, flags)])


def parts_of(cli):
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, RLCallback)]


@pytest.mark.parametrize("configs", [("grpo.yaml",), ("gtpo.yaml", "grpo.yaml")])
def test_grpo_yaml_is_grpo_alone_and_over_the_main_config(tmp_path, configs):
    cli = fit(tmp_path, "--kl_penalty.beta", "1e-6", configs=configs)
    names = [type(part).__name__ for part in parts_of(cli)]
    assert {"ConflictMasking", "EntropyFilter", "EntropyRegularizer"}.isdisjoint(names)
    (part,) = (part for part in parts_of(cli) if isinstance(part, KLPenalty))
    assert (part.beta, part.logged, part.reference) == (1e-6, True, None)
    assert (cli.model.advantage_scale, cli.model.epsilon, cli.model.delta) == ("group", 0.2, None)
    assert cli.trainer.callback_metrics["train/kl"] == 0.0


def test_a_run_from_weights_resumes_on_the_command_line_with_the_same_reference(tmp_path):
    start = fit(tmp_path, "--model.optimizer.lr=1e-2").trainer.checkpoint_callback.last_model_path
    flags = ["--model.weights", start, "--model.optimizer.lr=1e-2"]
    first = fit(tmp_path, *flags)
    again = fit(tmp_path, *flags, "--ckpt_path", first.trainer.checkpoint_callback.last_model_path,
                "--trainer.max_steps=2")  # fmt: skip
    assert again.trainer.global_step == 2
    kept = [torch.cat([p.reshape(-1) for p in cli.model.reference.parameters()]) for cli in (first, again)]
    assert torch.equal(*kept)
    saved = torch.load(start, weights_only=True)["state_dict"]
    assert torch.equal(again.model.reference.policy.model.lm_head.weight, saved["policy.model.lm_head.weight"])
    assert not torch.equal(flat(again.model), kept[1])
    assert again.trainer.callback_metrics["train/kl"] > 0


def test_the_part_is_switched_off_by_null_and_on_in_the_main_config(tmp_path):
    off = fit(tmp_path, "--kl_penalty=null")
    assert off.model.reference is None
    assert "train/kl" not in off.trainer.callback_metrics
    overlay = tmp_path / "off.yaml"
    overlay.write_text("kl_penalty: null\nmodel:\n  init_args:\n    rewards: {correctness: 1.0, soft_overlong: 0.5}\n")
    off = fit(tmp_path, "-c", overlay)
    assert off.model.reference is None
    assert off.model.reward_functions.weights["soft_overlong"] == 0.5
    on = fit(tmp_path, "--kl_penalty.beta=0", configs=["gtpo.yaml"])
    assert on.trainer.callback_metrics["train/kl"] == 0.0
    assert "train/loss/kl" not in on.trainer.callback_metrics
    assert fit(tmp_path, configs=["gtpo.yaml"]).model.reference is None
