"""The policy: shared prompts, chunks, positions and the head, against the plain forward of the model."""

import copy

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


# Checkpointed layers


def scored(name, layers, micro_batch_size=None):
    """Log-probs, entropies and gradients of a weighted sum of both, by the parameter's name."""
    model = build(name).train()
    policy = Policy(model, gradient_checkpointing=layers)
    logprobs, entropies = policy.score(*batch(), temperature=0.7, micro_batch_size=micro_batch_size, entropy_grad=True)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    ((logprobs - 0.3 * entropies) * weights).sum().backward()
    return logprobs, entropies, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_layers_give_the_gradients_of_kept_activations(name, micro_batch_size):
    kept, again = scored(name, False), scored(name, True, micro_batch_size)
    for i in range(2):
        torch.testing.assert_close(again[i], kept[i], atol=1e-6, rtol=0)
    assert again[2].keys() == kept[2].keys()
    for n, grad in kept[2].items():
        assert (again[2][n] - grad).abs().max() <= 1e-6 * max(1.0, float(grad.abs().max())), n


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointed_layers_run_twice_and_keep_less(name):
    """What autograd keeps, and how often a layer runs, with and without."""
    kept = {}
    for layers in (False, True):
        model = build(name)
        policy = Policy(model, gradient_checkpointing=layers)
        runs, sizes = [], {}
        layer = policy.body.h[0] if name == "gpt2" else policy.body.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs, _ = policy.score(*batch())
        runs.append("backward")
        logprobs.sum().backward()
        kept[layers] = sum(sizes.values())
        assert runs.count(1) - runs[: runs.index("backward")].count(1) == (2 if layers else 0)  # prompts, completions
    assert kept[True] < 0.7 * kept[False]


def test_checkpointed_layers_run_again_without_dropout_and_leave_the_modes_alone():
    model = build("gpt2").train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    policy = Policy(model, gradient_checkpointing=True)
    logprobs, _ = policy.score(*batch())
    logprobs.sum().backward()
    assert [module.training for module in model.modules()] == modes
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain, _ = Policy(build("gpt2").eval()).score(*batch())
    torch.testing.assert_close(logprobs, plain, atol=1e-6, rtol=0)
    again, _ = policy.score(*batch(), micro_batch_size=2)
    again.sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, atol=1e-5, rtol=1e-4)


def test_a_copy_of_a_checkpointed_policy_runs_its_own_layers():
    policy = Policy(build("llama"), gradient_checkpointing=True)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_()
    logprobs, _ = other.score(*batch())
    torch.testing.assert_close(logprobs, Policy(build("llama")).score(*batch())[0], atol=1e-6, rtol=0)


def test_a_model_without_layers_to_checkpoint_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("gtpo_lightning.layer_checkpointing.GradientCheckpointingLayer", torch.nn.Bilinear)
    with pytest.raises(ValueError, match="gradient_checkpointing: LlamaForCausalLM has no layers"):
        Policy(build("llama"), gradient_checkpointing=True)
