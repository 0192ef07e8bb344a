"""Entropies against hand-computed numbers and finite differences."""

import math

import pytest
import torch

from gtpo_lightning.functional import entropy_from_logits, entropy_keep_mask, entropy_threshold, mean_entropy
from gtpo_lightning.functional.recent import RecentThreshold

INF, NAN = float("inf"), float("nan")


class TestMeanEntropy:
    @pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
    def test_padding_never_counts(self, junk, mask_dtype):
        entropies = torch.tensor([[1.0, 2.0, junk], [junk, junk, junk], [3.0, 4.0, 8.0]], requires_grad=True)
        mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).to(mask_dtype)
        result = mean_entropy(entropies, mask)
        assert result.tolist() == [1.5, 0.0, 5.0]
        result.sum().backward()
        third = torch.tensor(1 / 3).item()
        assert entropies.grad.tolist() == [[0.5, 0.5, 0.0], [0.0] * 3, [third] * 3]

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.int64, torch.float32),
        ],
    )
    def test_dtypes(self, dtype, expected):
        result = mean_entropy(torch.ones(1, 3000, dtype=dtype), torch.ones(1, 3000))
        assert result.dtype == expected
        assert result.tolist() == [1.0]

    def test_shapes(self):
        assert mean_entropy(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)
        assert mean_entropy(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="completion_mask"):
            mean_entropy(torch.zeros(2, 3), torch.zeros(3, 2))
        with pytest.raises(ValueError, match="entropies"):
            mean_entropy(torch.zeros(2), torch.zeros(2))


class TestKeepMask:
    def test_g01_off_for_a_policy_that_starts_undecided(self):
        assert entropy_keep_mask(torch.full((3,), 0.8), initial_entropy=0.9).tolist() == [1.0] * 3

    def test_on_for_a_policy_that_starts_decided(self):
        result = entropy_keep_mask(torch.tensor([0.0, 0.5, 0.7, 5.0]), initial_entropy=0.5)
        assert result.tolist() == [1.0, 1.0, 0.0, 0.0]

    def test_both_thresholds_are_ln_2_itself(self):
        fair = torch.tensor([math.log(2), math.log(2) + 1e-6], dtype=torch.float64)
        assert entropy_keep_mask(fair, initial_entropy=math.log(2)).tolist() == [1.0, 0.0]
        assert entropy_keep_mask(fair, initial_entropy=math.log(2) + 1e-6).tolist() == [1.0, 1.0]
        assert entropy_keep_mask(fair.float(), initial_entropy=0.1).tolist() == [1.0, 0.0]

    def test_a_given_threshold_and_a_tensor(self):
        entropies = torch.tensor([0.2, 0.4])
        assert entropy_keep_mask(entropies, initial_entropy=torch.tensor(0.3), threshold=0.3).tolist() == [1.0, 0.0]
        assert entropy_keep_mask(entropies, initial_entropy=torch.tensor(0.31), threshold=0.3).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [(torch.float64, torch.float64), (torch.float16, torch.float32), (torch.int64, torch.float32)],
    )
    def test_dtypes(self, dtype, expected):
        assert entropy_keep_mask(torch.zeros(2, dtype=dtype), initial_entropy=0.0).dtype == expected
        assert entropy_keep_mask(torch.zeros(0, dtype=dtype), initial_entropy=0.0).shape == (0,)


class TestThreshold:
    @pytest.mark.parametrize("hundredths", [1, 7, 29, 50, 55, 56, 90, 99, 100])
    @pytest.mark.parametrize("count", [1, 2, 7, 100])
    def test_is_the_first_value_that_enough_do_not_exceed(self, hundredths, count):
        values = torch.randint(20, (count,), generator=torch.Generator().manual_seed(count)).double() / 8
        enough = [x for x in values.tolist() if 100 * sum(y <= x for y in values.tolist()) >= hundredths * count]
        assert entropy_threshold(values, hundredths / 100) == min(enough)

    @pytest.mark.parametrize(("quantile", "above"), [(0.9, 1), (0.55, 4), (0.5, 5), (0.01, 9), (1, 0)])
    def test_at_most_the_other_share_lies_above(self, quantile, above):
        values = torch.arange(10.0)
        assert int((values > entropy_threshold(values, quantile)).sum()) == above

    def test_the_share_is_the_decimal_it_is_written_as(self):
        values = torch.arange(100.0)
        assert [entropy_threshold(values, k / 100) for k in range(1, 101)] == values.tolist()

    def test_equal_values_have_none_above(self):
        assert entropy_threshold(torch.full((8,), 0.3, dtype=torch.float64), 0.5) == 0.3

    def test_wrong_arguments_are_named(self):
        for quantile in (0, 1.5, NAN):
            with pytest.raises(ValueError, match=f"quantile: {quantile}"):
                entropy_threshold(torch.ones(2), quantile)
        for values in (torch.ones(0), torch.ones(2, 2)):
            with pytest.raises(ValueError, match="mean_entropies: shape"):
                entropy_threshold(values, 0.5)


class TestRecent:
    def test_a_step_sees_the_steps_before_it_within_the_window(self):
        recent, seen = RecentThreshold(0.75, window=3), []
        generator = torch.Generator().manual_seed(3)
        for step in range(12):
            sizes = torch.randint(0, 4, (3,), generator=generator).tolist()  # three micro-batches, some empty
            micro_batches = [torch.rand(size, generator=generator).tolist() for size in sizes]
            every = sorted(value for values in [v for v in seen if v][-3:] for value in values)
            expected = every[math.ceil(0.75 * len(every)) - 1] if every else None
            assert [recent.update(step, values) for values in micro_batches] == [expected] * 3
            seen.append([value for values in micro_batches for value in values])

    def test_steps_without_values_take_no_place(self):
        recent = RecentThreshold(1.0, window=1)
        assert [recent.update(step, values) for step, values in enumerate([[0.4], [], [], [0.1], [0.2]])] == [
            None, 0.4, 0.4, 0.4, 0.1,
        ]  # fmt: skip

    def test_a_state_goes_on_and_is_cut_to_the_window(self):
        first, second, shorter = RecentThreshold(1.0, 3), RecentThreshold(1.0, 3), RecentThreshold(1.0, 1)
        for step, value in enumerate([0.9, 0.5, 0.2, 0.3]):
            first.update(step, [value])
        state = first.state_dict()
        first.update(3, [0.4])  # a state is no view of what goes on
        for other in (second, shorter):
            other.load_state_dict(state)
        assert (second.update(3, [0.4]), shorter.update(3, [0.4])) == (0.9, 0.2)
        assert second.state_dict() == first.state_dict()
        assert [other.update(4, []) for other in (first, second, shorter)] == [0.5, 0.5, 0.4]


class TestFromLogits:
    @pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
    def test_equals_the_sum_over_the_vocabulary(self, shift):
        logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + shift
        result = entropy_from_logits(logits)
        for row, value in zip(logits.view(-1, 7).tolist(), result.view(-1).tolist(), strict=True):
            weights = [math.exp(z - max(row)) for z in row]
            expected = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
            assert value == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(
        ("logits", "expected"),
        [
            ([1.0, -INF], 0.0),
            ([-INF, -INF, 5.0, -INF], 0.0),
            ([2.0, -INF, 2.0], math.log(2)),
            ([0.0, -1e4], 0.0),
            ([3.0, 3.0, 3.0, 3.0], math.log(4)),
        ],
    )
    def test_b05b_impossible_tokens(self, logits, expected):
        logits = torch.tensor(logits, requires_grad=True)
        entropy = entropy_from_logits(logits)
        assert entropy.item() == pytest.approx(expected, abs=1e-6)
        entropy.backward()
        torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-6)

    def test_b05b_gradient_beside_impossible_tokens(self):
        full = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        entropy_from_logits(full).backward()
        holed = torch.tensor([0.3, -INF, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        entropy_from_logits(holed).backward()
        torch.testing.assert_close(holed.grad[[0, 2, 3]], full.grad, rtol=1e-12, atol=1e-15)
        assert holed.grad[1].item() == 0.0

    def test_gradient(self):
        logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(entropy_from_logits, logits)
        assert torch.autograd.gradgradcheck(entropy_from_logits, logits)

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.int64, torch.float32)],
    )
    def test_dtypes(self, dtype, expected):
        result = entropy_from_logits(torch.zeros(1000, dtype=dtype))
        assert result.dtype == expected
        assert result.item() == pytest.approx(math.log(1000), rel=1e-6)
