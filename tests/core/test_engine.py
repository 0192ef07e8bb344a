"""The local engine: ends, settings, keyed random numbers, and that what it records is what scoring finds."""

import warnings

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gtpo_lightning.engines.local import LocalEngine
from gtpo_lightning.engines.sampling import Sampling, draw_inverse_cdf, draw_tokens, keyed_uniforms, restrict_logits
from gtpo_lightning.policy import Policy
from gtpo_lightning.rollout import Problem, Prompts

VOCAB = 37


def llama(**config):
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **config}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    )


def make_prompts(rows):
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), 1
    return Prompts(ids, mask, [Problem(f"p{i}-{row}", str(row), "0") for i, row in enumerate(rows)])


def keys(prompts, members, seed=0):
    return [(seed, "train", 0, p.id, m) for p in prompts.problems for m in range(members)]


PROMPTS = make_prompts([[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]])


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.9, 0.6])
def test_b_02_g_08_g_09_recorded_logprobs_are_those_of_scoring(build, temperature):
    policy = Policy(build())
    sampling = Sampling(num_samples=4, max_completion_length=20, temperature=temperature)
    out = LocalEngine(policy, [2, 3], 0).generate(PROMPTS, sampling, keys(PROMPTS, 4))
    rows = torch.arange(3).repeat_interleave(4)
    logprobs, entropies = policy.score(PROMPTS.ids, PROMPTS.mask, rows, out.ids, out.mask, temperature=temperature)
    assert out.lengths.min() < 20  # some rows left the batch early
    torch.testing.assert_close(out.logprobs, logprobs.detach(), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.entropies, entropies, atol=1e-4, rtol=0)


def test_a_01_lengths_end_with_the_first_eos_and_pad_may_be_eos():
    policy = Policy(llama())
    out = LocalEngine(policy, [7], 7).generate(
        PROMPTS, Sampling(num_samples=16, max_completion_length=30), keys(PROMPTS, 16)
    )
    assert (~out.truncated).any()
    for ids, length, truncated in zip(out.ids.tolist(), out.lengths.tolist(), out.truncated.tolist(), strict=True):
        assert 7 not in ids[: length - 1]
        assert truncated == (ids[length - 1] != 7)
        assert truncated <= (length == 30)
        assert all(token == 7 for token in ids[length:])
    assert out.mask.sum(dim=1).tolist() == out.lengths.tolist()


def test_a_02b_every_eos_id_ends_a_completion():
    policy = Policy(llama())
    out = LocalEngine(policy, [5, 9], 0).generate(
        PROMPTS, Sampling(num_samples=32, max_completion_length=30), keys(PROMPTS, 32)
    )
    last = out.ids.gather(1, out.lengths[:, None] - 1)[:, 0]
    ended = ~out.truncated
    assert {5, 9} == set(last[ended].tolist())
    for ids, length in zip(out.ids.tolist(), out.lengths.tolist(), strict=True):
        assert not {5, 9} & set(ids[: length - 1])


def test_b_04_the_models_generation_config_never_leaks_in():
    model = llama()
    policy = Policy(model)
    sampling = Sampling(num_samples=16, max_completion_length=8)
    plain = LocalEngine(policy, [2], 0).generate(PROMPTS, sampling, keys(PROMPTS, 16))
    model.generation_config = GenerationConfig(top_k=1, repetition_penalty=1.3, temperature=0.1, do_sample=True)
    same = LocalEngine(policy, [2], 0).generate(PROMPTS, sampling, keys(PROMPTS, 16))
    assert torch.equal(plain.ids, same.ids)
    assert len({tuple(row) for row in plain.ids.tolist()}) > 40


def test_rollouts_do_not_depend_on_the_batch_they_are_sampled_in():
    policy = Policy(llama())
    sampling = Sampling(num_samples=4, max_completion_length=16)
    whole = LocalEngine(policy, [2, 3], 0).generate(PROMPTS, sampling, keys(PROMPTS, 4))
    chunked = LocalEngine(policy, [2, 3], 0, batch_size=1).generate(PROMPTS, sampling, keys(PROMPTS, 4))
    assert torch.equal(whole.ids, chunked.ids)
    one = make_prompts([[11, 12]])
    one.problems = [PROMPTS.problems[1]]
    alone = LocalEngine(policy, [2, 3], 0).generate(one, sampling, keys(one, 4))
    width = alone.ids.shape[1]
    assert torch.equal(whole.ids[4:8, :width], alone.ids)
    assert whole.lengths[4:8].tolist() == alone.lengths.tolist()


def test_greedy_is_the_argmax_of_the_plain_forward():
    model = llama()
    policy = Policy(model)
    out = LocalEngine(policy, [36], 0).generate(
        PROMPTS, Sampling(max_completion_length=10, greedy=True), keys(PROMPTS, 1)
    )
    for i, prompt in enumerate(([5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15])):
        ids = list(prompt)
        for _ in range(int(out.lengths[i])):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert out.ids[i, : out.lengths[i]].tolist() == ids[len(prompt) :]


def test_sampling_leaves_training_mode_as_it_was_and_uses_no_dropout():
    model = gpt2().train()
    model.transformer.h[0].eval()
    policy = Policy(model)
    before = [module.training for module in model.modules()]
    engine = LocalEngine(policy, [2], 0)
    sampling = Sampling(num_samples=2, max_completion_length=8)
    first = engine.generate(PROMPTS, sampling, keys(PROMPTS, 2))
    second = engine.generate(PROMPTS, sampling, keys(PROMPTS, 2))
    assert [module.training for module in model.modules()] == before
    assert torch.equal(first.ids, second.ids)


def test_a_completion_that_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"max_completion_length: 60 .* 6 tokens exceed the model's 64"):
        LocalEngine(Policy(gpt2()), [2], 0).generate(PROMPTS, Sampling(max_completion_length=60), keys(PROMPTS, 1))


def test_no_prompt_gives_no_row():
    empty = Prompts(PROMPTS.ids[:0], PROMPTS.mask[:0], [])
    out = LocalEngine(Policy(llama()), [2], 0).generate(empty, Sampling(num_samples=4, max_completion_length=5), [])
    assert out.ids.shape[0] == 0
    assert out.mask.shape[0] == 0


def test_keyed_uniforms_differ_by_every_part_of_the_key():
    base = (0, "train", 0, "p", 0)
    variants = [base, (1, *base[1:]), (0, "val", 0, "p", 0), (0, "train", 1, "p", 0), (0, "train", 0, "q", 0)]
    variants += [(0, "train", 0, "p", 1)]
    table = keyed_uniforms(variants, 1000)
    assert len({tuple(row[:4].tolist()) for row in table}) == len(variants)
    assert (table >= 0).all()
    assert (table < 1).all()
    corr = np.corrcoef(table.numpy()) - np.eye(len(variants))
    assert abs(corr).max() < 0.15


@pytest.mark.parametrize("size", [1, 3, 128, 129, 1000])
def test_inverse_cdf_equals_the_plain_search(size):
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(500, size, generator=generator).pow(8)
    probs[:, ::3] = torch.where(torch.rand(500, len(range(0, size, 3)), generator=generator) < 0.5, 0.0, probs[:, ::3])
    probs[:, size // 2] += 1e-3
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    got = draw_inverse_cdf(probs, uniforms)
    cdf = probs.double().numpy().cumsum(axis=1)
    expected = [
        int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(cdf, uniforms.numpy(), strict=True)
    ]
    assert got.tolist() == expected
    assert (probs.gather(1, got[:, None]) > 0).all()


def test_inverse_cdf_never_draws_an_impossible_token_at_the_ends():
    probs = torch.zeros(2, 300)
    probs[:, [3, 200]] = torch.tensor([0.3, 0.7])
    edge = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw_inverse_cdf(probs, edge).tolist() == [3, 200]


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.2, 0.2, 0.0, 0.1])
    uniforms = keyed_uniforms([(0, "x")], 40_000)[0]
    counts = torch.bincount(draw_inverse_cdf(probs.expand(40_000, -1), uniforms), minlength=5) / 40_000
    torch.testing.assert_close(counts, probs, atol=0.01, rtol=0)


def test_unlikely_tokens_keep_their_share():
    # One in a hundred million: lost when sums are taken in fp32 one entry at a time.
    probs = torch.full((1, 50_000), 1e-8)
    probs[0, 0] = 1 - 5e-4
    assert draw_inverse_cdf(probs, torch.tensor([1 - 2.5e-4], dtype=torch.float64)).item() == pytest.approx(
        25_000, abs=50
    )


def test_b_01_logprob_and_entropy_are_those_of_the_tempered_distribution():
    sampling = Sampling(temperature=0.5)
    token, logprob, entropy = draw_tokens(torch.tensor([[2.0, 0.0]]), torch.tensor([0.1]).double(), sampling)
    assert token.item() == 0
    assert logprob.item() == pytest.approx(-0.018150, abs=1e-5)
    assert entropy.item() == pytest.approx(0.090095, abs=1e-5)


def test_b_03_restrictions_warn_and_defaults_do_not():
    for setting in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.warns(UserWarning, match="off-policy"):
            Sampling(**setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sampling()
        Sampling(temperature=0.6)


@pytest.mark.filterwarnings("ignore:top_k, top_p")
@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 0.39, "top_k": 3}, {0, 1, 2}),
    ],
)
def test_restrictions_keep_the_likeliest(setting, kept):
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log()
    left = restrict_logits(logits, Sampling(**setting))
    assert set(left.isfinite().nonzero()[:, 1].tolist()) == kept
    drawn = {
        draw_tokens(logits, torch.tensor([u], dtype=torch.float64), Sampling(**setting))[0].item()
        for u in np.linspace(0, 0.999, 50)
    }
    assert drawn == kept


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_samples": 0}, "num_samples: 0"),
        ({"max_completion_length": 0}, "max_completion_length: 0"),
        ({"temperature": 0.0}, "temperature: 0.0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_k": 0}, "top_k: 0"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"min_p": 1.0}, "min_p: 1.0"),
        ({"greedy": True, "num_samples": 2}, "num_samples: 2"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(setting, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**setting)
