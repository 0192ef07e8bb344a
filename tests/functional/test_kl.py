"""The k3 estimator."""

import math

import pytest
import torch

from gtpo_lightning.functional import kl_k3


def test_values_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64)
    reference = torch.tensor([[-2.0, -1.0], [-0.5, -3.25]], dtype=torch.float64)
    expected = [[math.exp(-1), math.e - 2], [0.0, math.exp(-0.25) + 0.25 - 1]]
    torch.testing.assert_close(
        kl_k3(logprobs, reference), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15
    )


def test_p01_equal_policies_have_exactly_no_kl():
    logprobs = torch.randn(4, 5)
    assert torch.equal(kl_k3(logprobs, logprobs.clone()), torch.zeros(4, 5))


def test_small_differences_keep_their_digits():
    difference = torch.tensor([2**-10, 3 * 2**-11, -5 * 2**-12])
    result = kl_k3(torch.zeros(3), difference)
    torch.testing.assert_close(result, difference**2 / 2 + difference**3 / 6, rtol=1e-4, atol=0)
    assert (kl_k3(torch.zeros(1000), torch.linspace(-3, 3, 1000)) >= 0).all()


def test_unbiased_for_kl_over_the_vocabulary():
    logits, other = torch.randn(2, 9, dtype=torch.float64)
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_k3(policy, reference)).sum(), exact, rtol=1e-12, atol=1e-12)


def test_gradient():
    logprobs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_k3(x, reference), logprobs)


def test_dtypes_and_shapes():
    half = torch.zeros(2, dtype=torch.bfloat16)
    assert kl_k3(half, half).dtype == torch.float32
    assert kl_k3(half, half.double()).dtype == torch.float64
    assert kl_k3(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="ref_logprobs"):
        kl_k3(torch.zeros(2), torch.zeros(3))
