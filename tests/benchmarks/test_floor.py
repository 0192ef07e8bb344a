"""The floor's formulas, counted by hand and by a loop over tokens on a tiny step."""

from dataclasses import replace

import pytest

from benchmarks.floor import PHASES, Rates, costs, floor, measure_here, parse, table
from benchmarks.workloads import WORKLOADS, Workload

# 2 prompts x 3 completions of 3 tokens; D = 8 in 2 heads, 1 of keys and values, 1 layer, V = 10.
TINY = Workload("tiny", "llama", 2, 3, 2, 3, 10, 8, 16, 1, 2, 1)


def test_weights_are_those_of_the_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert TINY.parameters == sum(p.numel() for p in model.parameters()) - norms
    assert TINY.body_weights == 64 + 2 * 8 * 4 + 64 + 3 * 8 * 16


def test_operations_and_bytes_by_hand():
    # W = 576 body weights, A = 4·8·1 = 32, head 80. Prompts: 4 tokens, 2·3 pairs. Completions: 6 rows read 2 of their 3
    # tokens; the first sees 3 keys, the second 4: 42 pairs.
    found = costs(TINY)
    prefill = 2 * 576 * 4 + 32 * 6 + 2 * 80 * 2
    decode = (2 * 576 + 2 * 80) * 12 + 32 * 42
    score = 2 * 576 * 16 + 32 * 48 + 2 * 80 * 14
    assert found["prefill"] == (prefill, 4 * 656)
    # In each of 2 steps all weights; keys and values, 4 entries each: prompts' 4 tokens, completions' 6, then 12.
    assert found["decode"] == (decode, 4 * 656 * 2 + 4 * 2 * 4 * (4 * 2 + 6 + 12))
    assert found["score"] == (score, 4 * 656)
    assert found["backward"] == (2 * score, 8 * 656)
    assert found["optimizer"] == (0, 8 * 4 * 656)


def test_costs_of_prompts_of_unlike_lengths_by_a_loop():
    lengths, pairs, tokens = [5, 1], 0, 0
    for p in lengths:
        pairs += sum(query + 1 for query in range(p))
        for _ in range(TINY.group):
            for query in range(TINY.completion_tokens - 1):
                pairs += p + query + 1
                tokens += 1
    operations = 2 * 576 * (6 + tokens) + 32 * pairs + 2 * 80 * (2 + tokens)
    assert costs(TINY, lengths)["score"][0] == operations
    assert costs(TINY, [2, 2]) == costs(TINY)


def test_a_phase_takes_the_longer_of_operations_and_bytes():
    found = costs(TINY)
    seconds = floor(TINY, Rates(flops=1e6, bandwidth=1e3))
    assert seconds["decode"] == pytest.approx(found["decode"][1] / 1e3)
    assert seconds["optimizer"] == pytest.approx(found["optimizer"][1] / 1e3)
    fast_memory = floor(TINY, Rates(flops=1e6, bandwidth=1e12))
    assert fast_memory["score"] == pytest.approx(found["score"][0] / 1e6)
    assert fast_memory["total"] == pytest.approx(sum(fast_memory[phase] for phase in PHASES))
    assert fast_memory["rollout"] == fast_memory["prefill"] + fast_memory["decode"]


def test_the_prompt_is_paid_once_and_half_precision_moves_half():
    one, two, three = (costs(replace(TINY, group=g))["score"][0] for g in (1, 2, 3))
    assert three - two == two - one
    assert costs(replace(TINY, dtype="bfloat16"))["decode"][1] == costs(TINY)["decode"][1] / 2
    assert costs(replace(TINY, tied=False))["decode"] == costs(TINY)["decode"]


def test_rates_are_measured_and_the_table_has_every_workload(monkeypatch):
    import torch

    monkeypatch.setattr("benchmarks.floor._SIZE", 64)
    monkeypatch.setattr("benchmarks.floor._READ_BYTES", 2**20)
    rates = measure_here(torch.get_num_threads(), repeats=2)
    assert rates.flops > 0 < rates.bandwidth
    lines = table(rates, list(WORKLOADS.values())).splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(WORKLOADS)
    assert parse(["--rates-only", "--threads", "1"]).threads == 1
