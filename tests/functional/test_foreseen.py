"""The head with foreseen gradients: whatever the guess, values and gradients are those of the plain head."""

import pytest
import torch

from gtpo_lightning.functional import foreseen as module
from gtpo_lightning.functional import head, logprobs_and_entropies
from gtpo_lightning.functional.foreseen import Tally, foreseen_logprobs_and_entropies

ROWS, WORDS, SIZE = 37, 211, 8


def inputs(dtype=torch.float64, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(ROWS, SIZE, dtype=dtype), torch.randn(WORDS, SIZE, dtype=dtype)
    offsets = torch.randn(WORDS, dtype=dtype) if bias else None
    return hidden, weight, offsets, torch.randint(WORDS, (ROWS,)), torch.randn(ROWS, dtype=dtype)


def gradients(function, given, hidden, weight, bias, targets, *args, times=1, **settings):
    """Values, and the gradients of Σ given · log p."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    offsets = leaves[2] if bias is not None else None
    for _ in range(times):
        logprobs, entropies = function(leaves[0], leaves[1], targets, *args, bias=offsets, **settings)
        (given * logprobs).sum().backward()
    return [logprobs.detach(), entropies, *(leaf.grad for leaf in leaves)]


GUESSES = {
    "right": lambda grad: grad,
    "scaled": lambda grad: -4 * grad,
    "zero": torch.zeros_like,
    "another": lambda grad: torch.randn(ROWS, dtype=grad.dtype),
    "one_off": lambda grad: torch.where(torch.arange(ROWS) == 5, 2 * grad, grad),
    "some_zero": lambda grad: torch.where(torch.arange(ROWS) % 3 == 0, 0, grad),
    "not_finite": lambda grad: torch.where(torch.arange(ROWS) % 4 == 0, torch.nan, grad),
    "infinite": lambda grad: torch.full_like(grad, torch.inf),
    "ones": torch.ones_like,
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"temperature": 0.7, "logit_scale": 0.3}, {"chunk_size": 2}])
@pytest.mark.parametrize("zeros", [False, True])
def test_any_guess_gives_the_gradients_of_the_plain_head(guess, settings, zeros):
    settings = dict(settings)
    *given, grad = inputs(bias=settings.pop("bias", True))
    if zeros:  # rows that the loss leaves out
        grad = torch.where(torch.arange(ROWS) % 2 == 0, 0.0, grad)
    right = gradients(logprobs_and_entropies, grad, *given, **settings)
    got = gradients(foreseen_logprobs_and_entropies, grad, *given, GUESSES[guess](grad), **settings)
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("guess", ["right", "scaled", "another", "some_zero"])
def test_in_fp32_they_are_equal_to_1e_5(guess):
    *given, grad = inputs(torch.float32)
    right = gradients(
        logprobs_and_entropies, grad.double(), *(x if x.dtype == torch.int64 else x.double() for x in given)
    )
    got = gradients(foreseen_logprobs_and_entropies, grad, *given, GUESSES[guess](grad))
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [2.0, 1024.0, -1.0, 0.0])
def test_d_10_a_scaled_loss_is_foreseen_and_scales_the_gradient(factor):
    *given, grad = inputs()
    right = gradients(logprobs_and_entropies, factor * grad, *given)
    tally = Tally()
    got = gradients(foreseen_logprobs_and_entropies, factor * grad, *given, grad, tally=tally)
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)
    assert (tally.rows, tally.missed) == (ROWS, 0)


def test_d_10_accumulated_backwards_and_a_second_one_over_the_same_graph():
    *given, grad = inputs()
    once = gradients(logprobs_and_entropies, grad, *given)[2:]
    twice = gradients(foreseen_logprobs_and_entropies, grad, *given, grad, times=2)[2:]
    hidden, weight, bias = (x.clone().requires_grad_() for x in given[:3])
    logprobs, _ = foreseen_logprobs_and_entropies(hidden, weight, given[3], grad, bias=bias)
    loss = (grad * logprobs).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for one, two, again in zip(once, twice, (hidden.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(again, 2 * one, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("guess", ["right", "ones", "zero"])
def test_a_row_without_a_gradient_may_hold_anything(guess):
    *given, grad = inputs()
    given[0][::3] = torch.tensor([torch.nan, torch.inf, -torch.inf]).double().repeat(ROWS)[: len(given[0][::3]), None]
    grad[::3] = 0

    def of_the_others(function, *args):
        hidden, weight, bias = (x.clone().requires_grad_() for x in given[:3])
        logprobs, _ = function(hidden, weight, given[3], *args, bias=bias)
        kept = grad != 0
        (grad[kept] * logprobs[kept]).sum().backward()
        return hidden.grad, weight.grad, bias.grad

    right = of_the_others(logprobs_and_entropies)
    for mine, theirs in zip(of_the_others(foreseen_logprobs_and_entropies, GUESSES[guess](grad)), right, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


class Watched(head._Tiles):
    made = 0

    def raw(self, hidden, weight, bias):
        type(self).made += hidden.shape[0] * weight.shape[0]
        return super().raw(hidden, weight, bias)


def made(monkeypatch, guess, grad, given):
    """Logits made by forward and backward."""
    for place in (head, module):
        monkeypatch.setattr(place, "_Tiles", Watched)
    Watched.made = 0
    gradients(foreseen_logprobs_and_entropies, grad, *given, guess)
    return Watched.made


def test_a_right_guess_makes_the_logits_once_and_a_wrong_row_only_its_own_again(monkeypatch):
    *given, grad = inputs()
    assert made(monkeypatch, grad, grad, given) == ROWS * WORDS
    assert made(monkeypatch, GUESSES["one_off"](grad), grad, given) == (ROWS + 1) * WORDS
    assert made(monkeypatch, 3 * grad * (1 + 1e-15), grad, given) == ROWS * WORDS
    assert made(monkeypatch, torch.zeros_like(grad), grad, given) == 2 * ROWS * WORDS


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_head_needs_no_size_of_the_guess(frozen, monkeypatch):
    hidden, weight, _, targets, grad = inputs()
    right = gradients(logprobs_and_entropies, grad, hidden, weight, None, targets)
    (hidden if frozen == "weight" else weight).requires_grad_()
    monkeypatch.setattr(module, "_Tiles", Watched)
    monkeypatch.setattr(head, "_Tiles", Watched)
    Watched.made = 0
    guess = torch.ones(ROWS) if frozen == "weight" else grad
    logprobs, _ = foreseen_logprobs_and_entropies(hidden, weight, targets, guess)
    (grad * logprobs).sum().backward()
    got, wanted = (hidden.grad, right[2]) if frozen == "weight" else (weight.grad, right[3])
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
    assert Watched.made == ROWS * WORDS


def test_in_half_precision_the_weight_has_its_gradient_in_its_own_dtype():
    *given, grad = inputs(torch.float32)
    half = [given[0].bfloat16(), given[1].bfloat16(), None, given[3]]
    right = gradients(logprobs_and_entropies, grad, *half)
    got = gradients(foreseen_logprobs_and_entropies, grad, *half, grad)
    assert [x.dtype for x in got] == [x.dtype for x in right]
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("settings", [{"entropy_grad": True}, {"softcap": 2.0}])
def test_what_is_not_foreseen_goes_the_plain_way(settings):
    *given, grad = inputs()
    right = gradients(logprobs_and_entropies, grad, *given, **settings)
    got = gradients(foreseen_logprobs_and_entropies, grad, *given, torch.ones(ROWS), **settings)
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_rows_and_a_guess_of_another_shape():
    hidden, weight = torch.randn(0, SIZE, requires_grad=True), torch.randn(WORDS, SIZE, requires_grad=True)
    logprobs, _ = foreseen_logprobs_and_entropies(hidden, weight, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    logprobs.sum().backward()
    assert weight.grad.eq(0).all()
    with pytest.raises(ValueError, match="foreseen: shape"):
        foreseen_logprobs_and_entropies(hidden, weight, torch.zeros(0, dtype=torch.long), torch.zeros(3))


def test_nothing_is_kept_where_no_gradient_is_taken():
    *given, grad = inputs()
    with torch.no_grad():
        got = foreseen_logprobs_and_entropies(given[0], given[1].requires_grad_(), given[3], grad)
    assert got[0].grad_fn is None
