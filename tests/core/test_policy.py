"""The policy: shared prompts, chunks, positions and the head, against the plain forward of the model."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gtpo_lightning.policy import Policy, eval_mode, position_ids

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name):
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2)
        ),
        "cohere-scaled": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        "granite-scaled": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
        "gemma2-capped": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager")
        ),
    }
    model = models[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # away from the start, where all logits are nearly equal
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


NAMES = ["llama", "llama-tied", "qwen2", "mistral-sliding", "gpt2", "cohere-scaled", "granite-scaled", "gemma2-capped"]

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
COMPLETIONS = [[20, 21, 22, 2], [23, 2], [24, 25, 26, 27, 28], [29], [30, 31, 32], [33, 34, 35, 2]]
ROWS = [0, 1, 2, 0, 1, 2]  # rows of a group need not be neighbours


def batch():
    width, length = max(map(len, PROMPTS)) + 2, max(map(len, COMPLETIONS)) + 1
    ids, mask = torch.full((3, width), 0), torch.zeros(3, width)
    for i, row in enumerate(PROMPTS):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), 1
    out, out_mask = torch.full((6, length), 60), torch.zeros(6, length)
    for i, row in enumerate(COMPLETIONS):
        out[i, : len(row)], out_mask[i, : len(row)] = torch.tensor(row), 1
    return ids, mask, torch.tensor(ROWS), out, out_mask


def reference(model, temperature):
    """Row by row through the whole model, without padding: log-probs and entropies, each a list of tensors."""
    logprobs, entropies = [], []
    for row, completion in zip(ROWS, COMPLETIONS, strict=True):
        ids = torch.tensor([PROMPTS[row] + completion])
        logits = model(input_ids=ids).logits[0, len(PROMPTS[row]) - 1 : -1] / temperature
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(1, torch.tensor(completion)[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return logprobs, entropies


@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_score_equals_the_plain_forward_in_value_and_gradient(name, micro_batch_size):
    model = build(name)
    policy = Policy(model)
    ids, mask, rows, out, out_mask = batch()
    logprobs, entropies = policy.score(
        ids, mask, rows, out, out_mask, temperature=0.7, micro_batch_size=micro_batch_size
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (logprobs * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    expected, expected_entropies = reference(model, 0.7)
    total = torch.tensor(0.0)
    for i, (row, entropy) in enumerate(zip(expected, expected_entropies, strict=True)):
        torch.testing.assert_close(logprobs[i, : len(row)], row, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[i, : len(row)], entropy, atol=1e-5, rtol=1e-5)
        assert (logprobs[i, len(row) :] == 0).all()
        assert (entropies[i, len(row) :] == 0).all()
        total = total + (row * weights[i, : len(row)]).sum()
    total.backward()
    assert not entropies.requires_grad
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[n], p.grad, atol=1e-5 * float(p.grad.abs().max() + 1), rtol=1e-4, msg=n)


def test_a_03_a_04_left_padding_shifts_nothing():
    for name in ("llama", "gpt2"):
        policy = Policy(build(name))
        ids, mask, _, out, out_mask = batch()
        one = torch.zeros(1, dtype=torch.long)
        padded, _ = policy.score(ids[1:2], mask[1:2], one, out[:1], out_mask[:1])
        plain, _ = policy.score(ids[1:2, -3:], mask[1:2, -3:], one, out[:1], out_mask[:1])
        torch.testing.assert_close(padded, plain, atol=1e-5, rtol=0)


def test_entropy_gradient_is_there_only_when_asked_for():
    policy = Policy(build("llama"))
    _, entropies = policy.score(*batch(), entropy_grad=True, micro_batch_size=2)
    entropies.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


def test_a_06_nothing_to_score_is_zero_and_attached():
    policy = Policy(build("llama"))
    ids, mask, rows, out, _ = batch()
    logprobs, _ = policy.score(ids, mask, rows, out, torch.zeros(out.shape))
    logprobs.sum().backward()
    assert logprobs.shape == out.shape
    assert all((p.grad == 0).all() for p in policy.parameters())


def test_a_rank_without_rows_is_zero_and_attached():
    policy = Policy(build("llama"))
    ids, mask, rows, out, out_mask = (x[:0] for x in batch())
    logprobs, _ = policy.score(ids, mask, rows, out, out_mask)
    logprobs.sum().backward()
    assert logprobs.shape == out.shape
    assert all((p.grad == 0).all() for p in policy.parameters())


def test_a_recurrent_model_is_refused_by_name():
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        Policy(MambaForCausalLM(config))


def test_a_head_that_is_not_linear_is_refused_by_name():
    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3 + 1
            return out

    with pytest.raises(ValueError, match="the head of Odd"):
        Policy(Odd(LlamaConfig(**SIZES)))


def test_eval_mode_restores_each_module():
    model = build("gpt2")
    model.train()
    model.transformer.drop.eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert model.training
    assert not model.transformer.drop.training


def test_dropout_never_reaches_the_scores():
    model = build("gpt2").train()
    policy = Policy(model)
    first, _ = policy.score(*batch(), micro_batch_size=2)
    second, _ = policy.score(*batch())
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)
    assert model.training


def test_position_ids_follow_the_mask():
    assert position_ids(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
