"""Group-relative advantages against plain Python."""

import math
import random
import statistics

import pytest
import torch

from gtpo_lightning.functional import group_advantages

NAN = float("nan")


def one_group(rewards, dtype=torch.float32, scale="none"):
    rewards = torch.tensor(rewards, dtype=dtype)
    return group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), scale=scale)


def reference(rewards, groups, scale):
    scored = [r for r in rewards if not math.isnan(r)]
    batch_std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward):
            result.append(0.0)
            continue
        advantage = reward - math.fsum(members) / len(members)
        if abs(advantage) <= 1e-6 * max(1.0, max(abs(r) for r in members)):
            advantage = 0.0
        if scale == "group":
            advantage /= (statistics.stdev(members) if len(members) > 1 else 0.0) + 1e-4
        if scale == "batch":
            advantage /= batch_std + 1e-4
        result.append(advantage)
    return result


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("seed", range(20))
def test_equals_plain_python(seed, scale):
    rng = random.Random(seed)
    size = rng.randrange(0, 24)
    groups = [rng.choice([-7, 3, 2**40, 8]) for _ in range(size)]
    values = [0.0, 1.0, 0.35, -2.5, rng.gauss(0, 3), NAN]
    rewards = [rng.choice(values) for _ in range(size)]
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.long), scale=scale
    )
    expected = torch.tensor(reference(rewards, groups, scale), dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    assert ((result == 0) == (expected == 0)).all()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.35, 0.4, -0.7, 0.1, 1e4, 0.0, 1.0, 3.3333e-3])
@pytest.mark.parametrize("size", [1, 3, 4, 7, 8])
def test_c01_c10_constant_group_is_exactly_zero(value, size, dtype, scale):
    advantages = one_group([value] * size, dtype, scale)
    assert advantages.tolist() == [0.0] * size
    assert not torch.signbit(advantages).any()


def test_c01_rewards_equal_but_for_rounding():
    assert one_group([0.1 + 0.2, 0.3, 0.3], torch.float64).tolist() == [0.0] * 3
    assert one_group([1e6, 1e6 + 0.5]).tolist() == [0.0, 0.0]  # 0.25 off the mean, within 1e-6 of the rewards
    assert one_group([0.0, 1e-6], torch.float64).tolist() == [0.0, 0.0]
    assert one_group([0.0, 4e-6], torch.float64).tolist() == [-2e-6, 2e-6]


def test_the_tolerance_is_the_groups_own():
    rewards, groups = torch.tensor([1e6, 1e6 + 4, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, groups).tolist() == [-2.0, 2.0, -0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_middle_of_an_even_spread_has_no_sign(dtype):
    advantages = one_group([0.1, 0.2, 0.3], dtype)
    assert advantages[1].item() == 0.0
    torch.testing.assert_close(advantages, torch.tensor([-0.1, 0.0, 0.1], dtype=dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_c04_group_of_one_is_zero(scale):
    result = group_advantages(torch.tensor([5.0, 2.0, 0.0]), torch.tensor([1, 0, 0]), scale=scale)
    assert result[0].item() == 0.0
    assert result[1].item() > 0 > result[2].item()
    assert one_group([5.0], scale=scale).tolist() == [0.0]


def test_c06_identity_is_the_group_id():
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [0.5, -0.5, 1.0, -1.0]
    assert group_advantages(rewards, torch.tensor([5, 5, 5, 5])).tolist() == [-0.25, -1.25, 1.75, -0.25]


def test_c07b_uneven_groups_in_any_order():
    rewards, groups = torch.tensor([2.0, 0.0, 1.0, 4.0]), torch.tensor([3, 3, 3, 8])
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0])
    for seed in range(10):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(group_advantages(rewards[order], groups[order]), expected[order])


def test_c09_batch_scale_counts_all_scored_rewards():
    result = group_advantages(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), scale="batch")
    # std of [1, 1, 0, 1] with n - 1 is 0.5
    torch.testing.assert_close(result, torch.tensor([0.0, 0.0, -0.5 / 0.5001, 0.5 / 0.5001]), rtol=1e-6, atol=0)


def test_group_scale_by_hand():
    torch.testing.assert_close(one_group([1.0, 0.0, 2.0], scale="group"), torch.tensor([0.0, -1 / 1.0001, 1 / 1.0001]))


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_c12_unscored_rewards(scale):
    both = one_group([1.0, NAN, 0.0, NAN], scale=scale)
    alone = one_group([1.0, 0.0], scale=scale)
    assert both[[1, 3]].tolist() == [0.0, 0.0]
    assert torch.equal(both[[0, 2]], alone)
    assert one_group([NAN, NAN], scale=scale).tolist() == [0.0, 0.0]


def test_a10_a_row_without_tokens_stays_in_the_mean_unless_it_is_unscored():
    assert one_group([1.0, 0.0, 0.0, 3.0]).tolist() == [0.0, -1.0, -1.0, 2.0]
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.0])
    torch.testing.assert_close(one_group([1.0, 0.0, 0.0, NAN]), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes(dtype, expected):
    result = group_advantages(torch.tensor([1, 0], dtype=dtype), torch.tensor([0, 0], dtype=torch.int32))
    assert result.dtype == expected
    assert result.tolist() == [0.5, -0.5]


def test_half_precision_is_averaged_in_full():
    rewards = torch.tensor([256.0] * 300 + [255.0], dtype=torch.bfloat16)  # a bf16 sum would stop growing
    result = group_advantages(rewards, torch.zeros(301, dtype=torch.long))
    assert result[-1].item() == pytest.approx(-300 / 301, rel=1e-6)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_no_rows(scale):
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), scale=scale).shape == (0,)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
def test_infinite_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="rewards"):
        one_group([1.0, bad])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"scale: 'std'.*none.*group.*batch"):
        one_group([1.0, 0.0], scale="std")
    with pytest.raises(ValueError, match="group_ids"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="rewards"):
        group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long))
