"""The policy loss against sums written out in Python."""

import itertools
import math
import random

import pytest
import torch

from gtpo_lightning.functional import clip_counts, policy_loss

INF, NAN = float("inf"), float("nan")
AGGREGATIONS = ["sequence", "token", "constant"]


def reference(logprobs, weights, mask, old, epsilon, aggregation, max_length, denominator=None):
    """Value of −J and its gradient in logprobs, by the formula, from lists."""
    rows = [[t for t, m in enumerate(row) if m] for row in mask]
    live = sum(1 for row in rows if row)
    tokens = sum(map(len, rows))
    value, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, row in enumerate(rows):
        if aggregation == "sequence":
            share = 1 / (len(row) * (denominator or live)) if row else 0.0
        elif aggregation == "token":
            share = 1 / (denominator or tokens) if tokens else 0.0
        else:
            share = 1 / ((denominator or live) * max_length) if live else 0.0
        for t in row:
            weight = weights[i][t]
            ratio = 1.0 if old is None else math.exp(logprobs[i][t] - old[i][t])
            term, slope = ratio * weight, ratio * weight
            if old is not None and epsilon is not None:
                clipped = min(max(ratio, 1 - epsilon[0]), 1 + epsilon[1]) * weight
                if clipped < term:
                    term, slope = clipped, 0.0
            value -= share * term
            gradient[i][t] -= share * slope
    return value, gradient


def sample(rng, rows, length):
    def table(draw):
        return [[draw() for _ in range(length)] for _ in range(rows)]

    lengths = [rng.randrange(length + 1) for _ in range(rows)]
    mask = [[int(t < lengths[i]) for t in range(length)] for i in range(rows)]
    weights = table(lambda: rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]))
    return table(lambda: -rng.random()), weights, mask, table(lambda: -rng.random())


def tensors(*tables, dtype=torch.float64):
    return [torch.tensor(table, dtype=dtype) for table in tables]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("epsilon", [None, 0.2, (0.1, 0.3), (0.0, INF)])
@pytest.mark.parametrize("use_old", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_sums(seed, use_old, epsilon, aggregation):
    rng = random.Random(seed)
    logprobs, weights, mask, old = sample(rng, rng.randrange(1, 6), rng.randrange(1, 7))
    pair = (epsilon, epsilon) if isinstance(epsilon, float) else epsilon
    denominator = rng.choice([None, 2.5])
    value, gradient = reference(logprobs, weights, mask, old if use_old else None, pair, aggregation, 9, denominator)
    x, w, m, o = tensors(logprobs, weights, mask, old)
    x.requires_grad_()
    loss = policy_loss(
        x,
        w,
        m.to(rng.choice([torch.bool, torch.int64, torch.float32])),
        old_logprobs=o if use_old else None,
        epsilon=epsilon,
        aggregation=aggregation,
        denominator=denominator,
        max_length=9,
    )
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(value, abs=1e-13)
    torch.testing.assert_close(x.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("use_old", [False, True])
def test_d01_any_split_adds_up(aggregation, use_old):
    """Micro-batches of very different lengths, each divided by the global count."""
    lengths = [3, 30, 0, 7, 30, 1]
    generator = torch.Generator().manual_seed(0)
    logprobs, weights, old = torch.randn(3, 6, 30, generator=generator)
    logprobs.requires_grad_()
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    options = {"aggregation": aggregation, "max_length": 30, "epsilon": 0.2}
    count = float(sum(lengths)) if aggregation == "token" else 5.0

    def gradient(parts):
        logprobs.grad = None
        total = 0.0
        for part in parts:
            kept = old[part] if use_old else None
            loss = policy_loss(
                logprobs[part], weights[part], mask[part], old_logprobs=kept, denominator=count, **options
            )
            loss.backward()
            total += loss.item()
        return total, logprobs.grad.clone()

    logprobs.grad = None
    whole = policy_loss(logprobs, weights, mask, old_logprobs=old if use_old else None, **options)
    whole.backward()
    expected = logprobs.grad.clone()
    assert expected.abs().max() > 1e-3
    splits = [[[0], [1], [2], [3], [4], [5]], [[0, 1], [2], [3, 4, 5]], [[5, 2, 0], [4, 1, 3]], [[2], [0, 1, 3, 4, 5]]]
    for split in splits:
        total, got = gradient(split)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
        assert total == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


def test_d01_two_micro_batches_of_3_and_30_tokens():
    logprobs = torch.zeros(2, 30, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(30) < torch.tensor([3, 30])[:, None]
    for row in range(2):
        part = slice(row, row + 1)
        policy_loss(logprobs[part], torch.ones(1, 30), mask[part], aggregation="token", denominator=33).backward()
    torch.testing.assert_close(logprobs.grad, -mask.double() / 33, rtol=1e-6, atol=0)


def test_d06_token_aggregation_by_hand():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    weights = torch.tensor([[4.0] * 4, [-1.0] * 4])
    assert policy_loss(torch.zeros(2, 4), weights, mask, aggregation="token").item() == pytest.approx(0.0)
    assert policy_loss(torch.zeros(2, 4), weights, mask, aggregation="sequence").item() == pytest.approx(-1.5)
    loss = policy_loss(torch.zeros(2, 4), weights + 1, mask, aggregation="constant", max_length=10)
    assert loss.item() == pytest.approx(-5 / 20)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("epsilon", [None, 0.2])
@pytest.mark.parametrize("use_old", [False, True])
def test_padding_never_matters(junk, epsilon, use_old, aggregation):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(3, 4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]
    results = []
    for filler in (0.0, junk):
        logprobs, weights, old = clean.masked_fill(~mask, filler)
        logprobs.requires_grad_()
        loss = policy_loss(
            logprobs,
            weights,
            mask,
            old_logprobs=old if use_old else None,
            epsilon=epsilon,
            aggregation=aggregation,
            max_length=5,
        )
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~mask].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [None, 0, 0.0, torch.tensor(0), 8])
@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (2, 0)])
def test_a06_no_row_left(shape, denominator, aggregation):
    logprobs = torch.full(shape, NAN, requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.ones(shape),
        torch.zeros(shape),
        aggregation=aggregation,
        denominator=denominator,
        max_length=3,
    )
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(logprobs.grad, torch.zeros(shape))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a06_every_completion_filtered(aggregation):
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss = policy_loss(logprobs, torch.zeros(2, 3), torch.ones(2, 3), aggregation=aggregation, max_length=3)
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(logprobs.grad, torch.zeros(2, 3))


def test_a07_masked_tokens_leave_both_sides_and_weightless_ones_do_not():
    mask = torch.ones(1, 30)
    mask[0, [2, 9, 10, 11, 29]] = 0
    weights = torch.ones(1, 30)
    assert policy_loss(torch.zeros(1, 30), weights, mask, aggregation="token").item() == pytest.approx(-1.0)
    weights[0, 0] = 0
    for aggregation in ("token", "sequence"):
        loss = policy_loss(torch.zeros(1, 30), weights, mask, aggregation=aggregation)
        assert loss.item() == pytest.approx(-24 / 25)


def test_a_row_of_weight_zero_stays_in_the_count_and_an_empty_one_does_not():
    weights = torch.tensor([[1.0, 1.0], [0.0, 0.0], [5.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    assert policy_loss(torch.zeros(3, 2), weights, mask).item() == pytest.approx(-0.5)
    assert policy_loss(torch.zeros(3, 2), weights, mask, aggregation="constant", max_length=4).item() == -0.25


def test_c11_value_zero_and_gradient_not():
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss = policy_loss(logprobs, torch.tensor([[0.5] * 3, [-0.5] * 3]), torch.ones(2, 3))
    assert loss.item() == pytest.approx(0.0, abs=1e-8)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1 / 12] * 3, [1 / 12] * 3]))


def test_g07_a_mean_over_completions():
    """The same completions twice, four times: the loss does not grow; half of it gives half the gradient."""
    values, weights = torch.randn(2, 2, 4).unbind()
    for copies in (1, 4):
        logprobs = values.repeat(copies, 1).requires_grad_()
        loss = policy_loss(logprobs, weights.repeat(copies, 1), torch.ones(2 * copies, 4))
        assert loss.item() == pytest.approx(-weights.mean().item(), abs=1e-6)
        (loss / 2).backward()
        torch.testing.assert_close(logprobs.grad, -weights.repeat(copies, 1) / (16 * copies))


def test_g11_the_shift_pushes_a_group_without_signal_down():
    logprobs = torch.zeros(2, 1, requires_grad=True)
    weights = torch.zeros(2, 1) - 0.1 * torch.tensor([[0.5], [0.3]])  # A = 0, γ = 0.1
    policy_loss(logprobs, weights, torch.ones(2, 1)).backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.025], [0.015]]))


def test_b09_epsilon_without_old_log_probs_has_no_effect():
    logprobs, weights = torch.randn(2, 3, 4)
    plain = policy_loss(logprobs, weights, torch.ones(3, 4))
    assert torch.equal(policy_loss(logprobs, weights, torch.ones(3, 4), epsilon=0.0), plain)


@pytest.mark.parametrize(
    ("ratio", "weight", "term", "slope"),
    [
        (1.5, 2.0, 2.4, 0.0),  # above 1 + ε and wanted more likely: clipped
        (1.5, -2.0, -3.0, -3.0),
        (0.5, 2.0, 1.0, 1.0),
        (0.5, -2.0, -1.8, 0.0),  # below 1 − ε and wanted less likely: clipped
        (1.1, 2.0, 2.2, 2.2),
        (0.95, -2.0, -1.9, -1.9),
    ],
)
def test_b10_g10_a_real_ratio_clipped_on_the_signed_weight(ratio, weight, term, slope):
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = policy_loss(logprobs, torch.tensor([[weight]]), torch.ones(1, 1), old_logprobs=old, epsilon=(0.1, 0.2))
    loss.backward()
    assert loss.item() == pytest.approx(-term, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "weight", "term", "slope"),
    [
        (3.0, -2.0, -5.0, 0.0),  # above δ and wanted less likely: bounded
        (2.4, -2.0, -4.8, -4.8),  # below δ: as without it
        (3.0, 2.0, 2.4, 0.0),  # a positive weight has its own bound, 1 + ε
        (0.5, -2.0, -1.8, 0.0),
        (1.1, -2.0, -2.2, -2.2),
    ],
)
def test_delta_bounds_the_ratio_of_negative_weights(ratio, weight, term, slope):
    old = torch.tensor([[-4.0]], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    options = {"old_logprobs": old, "epsilon": (0.1, 0.2), "delta": 2.5}
    loss = policy_loss(logprobs, torch.tensor([[weight]]), torch.ones(1, 1), **options)
    loss.backward()
    assert loss.item() == pytest.approx(-term, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-12)


def test_delta_works_without_epsilon_and_not_without_old_log_probs():
    logprobs = torch.tensor([[math.log(3.0), math.log(3.0), math.log(0.1), 200.0]], requires_grad=True)
    weights = torch.tensor([[-1.0, 1.0, -1.0, -1.0]])
    loss = policy_loss(logprobs, weights, torch.ones(1, 4), old_logprobs=torch.zeros(1, 4), delta=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(-2.0 + 3.0 - 0.1 - 2.0) / 4)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -3.0, 0.1, 0.0]]) / 4)
    plain = policy_loss(logprobs, weights, torch.ones(1, 4))
    assert torch.equal(policy_loss(logprobs, weights, torch.ones(1, 4), delta=2.0), plain)


def test_overflowing_ratios_do_not_become_nan():
    logprobs = torch.tensor([[0.0, 0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -200.0, -1.0]])
    weights = torch.tensor([[0.0, 1.0, 3.0]])  # one without weight, one clipped
    loss = policy_loss(logprobs, weights, torch.ones(1, 3), old_logprobs=old, epsilon=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-4.2 / 3)
    assert logprobs.grad.tolist() == [[0.0, 0.0, -1.0]]


def test_weights_and_old_log_probs_are_constants():
    logprobs, weights, old = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    policy_loss(logprobs, weights, torch.ones(2, 3), old_logprobs=old).backward()
    assert logprobs.grad is not None
    assert weights.grad is None
    assert old.grad is None


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float64, torch.float64), torch.float64),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.int64), torch.float32),
    ],
)
@pytest.mark.parametrize("use_old", [False, True])
def test_dtypes(dtypes, expected, use_old):
    logprobs = torch.zeros(1, 3000, dtype=dtypes[0])
    old = torch.zeros(1, 3000, dtype=torch.float16) if use_old else None
    weights = torch.ones(1, 3000, dtype=dtypes[1])
    loss = policy_loss(logprobs, weights, torch.ones(1, 3000), old_logprobs=old, aggregation="token")
    assert loss.dtype == expected
    assert loss.item() == pytest.approx(-1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"aggregation": "mean"}, "aggregation: 'mean'.*sequence.*token.*constant"),
        ({"aggregation": "constant"}, "max_length"),
        ({"aggregation": "constant", "max_length": 0}, "max_length"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": (0.1, -0.1)}, "epsilon"),
        ({"epsilon": (0.1, 0.2, 0.3)}, "epsilon"),
        ({"epsilon": NAN}, "epsilon"),
        ({"delta": 1.0}, "delta: 1.0.*here 1, or None"),
        ({"delta": 1.2, "epsilon": (0.5, 0.2)}, "delta: 1.2.*here 1.2, or None"),
        ({"delta": NAN}, "delta"),
        ({"delta": True, "epsilon": 0.0}, "delta"),
        ({"denominator": -1.0}, "denominator"),
        ({"weights": torch.zeros(2)}, "weights"),
        ({"completion_mask": torch.zeros(3, 2)}, "completion_mask"),
        ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
        ({"logprobs": torch.zeros(2)}, "logprobs"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {"logprobs": torch.zeros(2, 3), "weights": torch.zeros(2, 3), "completion_mask": torch.ones(2, 3)}
    arguments.update(change)
    with pytest.raises(ValueError, match=f"^{name}"):
        policy_loss(**arguments)


@pytest.mark.parametrize("epsilon", [0.2, (0.1, 0.5)])
def test_clip_counts(epsilon):
    low, high = (epsilon, epsilon) if isinstance(epsilon, float) else epsilon
    generator = torch.Generator().manual_seed(3)
    logprobs, old, weights = torch.randn(3, 5, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 0, 3, 1, 5])[:, None]
    expected = {"low": 0, "high": 0, "tokens": 15}
    for i, t in itertools.product(range(5), range(6)):
        if mask[i, t]:
            ratio = math.exp(logprobs[i, t] - old[i, t])
            expected["low"] += ratio < 1 - low and weights[i, t].item() < 0
            expected["high"] += ratio > 1 + high and weights[i, t].item() > 0
    assert expected["low"] > 0
    assert expected["high"] > 0
    for junk in (NAN, INF, -INF):
        counts = clip_counts(logprobs.masked_fill(~mask, junk), old, weights, mask, epsilon)
        assert {name: count.item() for name, count in counts.items()} == expected


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_clip_counts_with_delta(epsilon):
    ratios = torch.tensor([[3.0, 3.0, 2.0, 0.1, 3.0]])
    weights, mask = torch.tensor([[-1.0, 1.0, -1.0, -1.0, -1.0]]), torch.tensor([[1, 1, 1, 1, 0]])
    counts = clip_counts(ratios.log(), torch.zeros(1, 5), weights, mask, epsilon, 2.5)
    clipped = 0 if epsilon is None else 1
    assert {name: count.item() for name, count in counts.items()} == {
        "low": clipped, "high": clipped, "tokens": 4, "delta": 1,
    }  # fmt: skip


def test_b09_no_clipping_with_the_policy_that_sampled():
    logprobs, weights = torch.randn(2, 3, 4)
    counts = clip_counts(logprobs, logprobs, weights, torch.ones(3, 4), 0.2)
    assert (counts["low"].item(), counts["high"].item(), counts["tokens"].item()) == (0, 0, 12)
