import math

import pytest
import torch

from gtpo_lightning.functional import importance_ratio


def test_it_is_the_truncated_ratio_of_the_two_probabilities():
    generator = torch.Generator().manual_seed(0)
    policy, engine = (torch.rand(5, 7, generator=generator, dtype=torch.float64) * -4 for _ in range(2))
    mask = torch.rand(5, 7, generator=generator) < 0.7
    ratio = importance_ratio(policy, engine, mask, cap=1.5)
    for row in range(5):
        for t in range(7):
            plain = math.exp(policy[row, t]) / math.exp(engine[row, t])
            assert ratio[row, t].item() == pytest.approx(min(plain, 1.5) if mask[row, t] else 1.0, rel=1e-12)
    assert (ratio == 1.5).any()
    assert ratio.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_gives_fp32_and_no_gradient(dtype):
    policy = torch.tensor([[-1.0, -2.0]], dtype=dtype, requires_grad=True)
    ratio = importance_ratio(policy, torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2, dtype=torch.int), cap=10.0)
    assert ratio.dtype == torch.float32
    assert not ratio.requires_grad
    torch.testing.assert_close(ratio, torch.tensor([[math.exp(0.5), 1.0]]))


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_padding_never_matters(filler):
    policy, engine = torch.tensor([[-1.0, filler]]), torch.tensor([[-1.0, filler]])
    assert importance_ratio(policy, engine, torch.tensor([[1, 0]]), cap=0.5).tolist() == [[0.5, 1.0]]


def test_without_a_bound_nothing_is_cut():
    ratio = importance_ratio(torch.zeros(1, 1), torch.full((1, 1), -9.0), torch.ones(1, 1), cap=math.inf)
    assert ratio.item() == pytest.approx(math.exp(9), rel=1e-6)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_bound_that_is_none_is_refused(cap):
    with pytest.raises(ValueError, match=r"cap: .* above 0"):
        importance_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), cap=cap)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="sampled_logprobs"):
        importance_ratio(torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(1, 2))
    with pytest.raises(ValueError, match="completion_mask"):
        importance_ratio(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(2, 2))
