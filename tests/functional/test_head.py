"""The head against dense log-softmax with autograd, on every setting."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gtpo_lightning.functional import head as head_module
from gtpo_lightning.functional import logprobs_and_entropies

INF = float("inf")


def dense(hidden, weight, targets, bias=None, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropies = -torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0))
    return logprobs[torch.arange(len(targets)), targets], entropies.sum(-1)


def inputs(tokens, vocabulary, width, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    return hidden, weight, bias, torch.randint(vocabulary, (tokens,), generator=generator)


def gradients(outputs, parameters, pull, entropy_grad):
    loss = (outputs[0] * pull[0]).sum() + ((outputs[1] * pull[1]).sum() if entropy_grad else 0)
    return torch.autograd.grad(loss, parameters)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Small tiles, so that small inputs meet the edges between them."""
    if request.param == "many tiles":
        monkeypatch.setattr(head_module, "_CPU_ROWS", 3)
        monkeypatch.setattr(head_module, "_CPU_TILE", 12)


SETTINGS = list(itertools.product([1.0, 0.7], [None, 1.5], [1.0, 0.3], [False, True]))


@pytest.mark.parametrize(("temperature", "softcap", "logit_scale", "entropy_grad"), SETTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 5, 1024])
@pytest.mark.usefixtures("tiles")
def test_equals_dense(temperature, softcap, logit_scale, entropy_grad, with_bias, chunk_size):
    hidden, weight, bias, targets = inputs(11, 17, 4)
    options = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    options["bias"] = bias if with_bias else None
    parameters = [hidden, weight, bias] if with_bias else [hidden, weight]
    result = logprobs_and_entropies(
        hidden, weight, targets, chunk_size=chunk_size, entropy_grad=entropy_grad, **options
    )
    expected = dense(hidden, weight, targets, **options)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert result[1].requires_grad == entropy_grad
    pull = torch.randn(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        gradients(result, parameters, pull, entropy_grad),
        gradients(expected, parameters, pull, entropy_grad),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize(("temperature", "softcap", "logit_scale", "entropy_grad"), SETTINGS)
@pytest.mark.usefixtures("tiles")
def test_gradcheck(temperature, softcap, logit_scale, entropy_grad):
    hidden, weight, bias, targets = inputs(4, 6, 3)

    def outputs(hidden, weight, bias):
        both = logprobs_and_entropies(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            entropy_grad=entropy_grad,
            softcap=softcap,
            logit_scale=logit_scale,
        )
        return both if entropy_grad else both[0]

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_only_wanted_gradients(needs, entropy_grad):
    *parameters, targets = inputs(5, 7, 3)
    for parameter, need in zip(parameters, needs, strict=True):
        parameter.requires_grad_(need)
    hidden, weight, bias = parameters
    result = logprobs_and_entropies(hidden, weight, targets, bias=bias, entropy_grad=entropy_grad)
    assert result[0].requires_grad == any(needs)
    if any(needs):
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        pull = torch.randn(2, 5, dtype=torch.float64)
        expected = gradients(dense(hidden, weight, targets, bias), wanted, pull, entropy_grad)
        torch.testing.assert_close(gradients(result, wanted, pull, entropy_grad), expected)


@pytest.mark.parametrize("chunk_size", [1, 37, 64, 1000])
def test_b12_large_vocabulary(chunk_size):
    hidden, weight, bias, targets = inputs(40, 151_936, 16, torch.float32)
    weight = (weight.detach() / 2).requires_grad_()
    result = logprobs_and_entropies(
        hidden, weight, targets, bias=bias, temperature=0.8, chunk_size=chunk_size, entropy_grad=True
    )
    # fp64, since dense fp32 is itself further off than 1e-5
    wide = [parameter.detach().double().requires_grad_() for parameter in (hidden, weight, bias)]
    expected = dense(*wide[:2], targets, bias=wide[2], temperature=0.8)
    torch.testing.assert_close([r.double() for r in result], list(expected), rtol=1e-6, atol=1e-5)
    pull = torch.ones(2, 40)
    got = gradients(result, [hidden, weight, bias], pull, True)
    torch.testing.assert_close(
        [g.double() for g in got], list(gradients(expected, wide, pull, True)), rtol=0, atol=1e-5
    )


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made, views of the inputs left out."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.inputs:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 8])
def test_b12_never_a_full_logits_tensor(chunk_size, entropy_grad):
    hidden, weight, _, targets = inputs(64, 5_003, 4, torch.float32)
    with Largest() as largest:
        logprobs, entropies = logprobs_and_entropies(
            hidden, weight, targets, chunk_size=chunk_size, entropy_grad=entropy_grad
        )
        (logprobs + entropies).sum().backward()
    assert largest.numel <= max(chunk_size * 5_003, weight.numel())
    assert largest.numel < 64 * 5_003 / 4


def test_b01_temperature_is_in_log_probs_and_entropy():
    logprobs, entropies = logprobs_and_entropies(
        torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]]), torch.tensor([0]), temperature=0.5
    )
    chance = 1 / (1 + math.exp(-4))
    assert logprobs.item() == pytest.approx(math.log(chance), abs=1e-6)
    assert logprobs.item() == pytest.approx(-0.018, abs=5e-4)
    other = -chance * math.log(chance) - (1 - chance) * math.log(1 - chance)
    assert entropies.item() == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("tiles")
def test_b05b_masked_vocabulary(entropy_grad, dtype):
    hidden, weight, bias, targets = inputs(6, 9, 3, dtype)
    bias = bias.detach().clone()
    bias[[0, 1, 2, 3, 8]] = -INF
    bias.requires_grad_()
    targets = targets % 4 + 4
    result = logprobs_and_entropies(hidden, weight, targets, bias=bias, entropy_grad=entropy_grad, temperature=0.5)
    kept = [parameter.detach()[4:8].double().requires_grad_() for parameter in (weight, bias)]
    wide = hidden.detach().double().requires_grad_()
    expected = dense(wide, kept[0], targets - 4, kept[1], temperature=0.5)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    values = min(tolerance, 2e-5)
    torch.testing.assert_close([r.double() for r in result], list(expected), rtol=values, atol=values)
    pull = torch.ones(2, 6)
    got = gradients(result, [hidden, weight, bias], pull, entropy_grad)
    right = gradients(expected, [wide, *kept], pull, entropy_grad)
    torch.testing.assert_close(got[0].double(), right[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1][4:8].double(), right[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[2][4:8].double(), right[2], rtol=tolerance, atol=tolerance)
    assert not got[1][[0, 1, 2, 3, 8]].any()
    assert not got[2][[0, 1, 2, 3, 8]].any()


def test_b05b_all_but_one_masked_and_a_masked_target():
    bias = torch.tensor([-INF, 0.0, -INF], requires_grad=True)
    hidden = torch.randn(2, 2, requires_grad=True)
    logprobs, entropies = logprobs_and_entropies(
        hidden, torch.randn(3, 2), torch.tensor([1, 0]), bias=bias, entropy_grad=True
    )
    assert logprobs.tolist() == [0.0, -INF]
    assert entropies.tolist() == [0.0, 0.0]
    (logprobs[0] + entropies.sum()).backward()
    assert not hidden.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_d10_the_given_gradient_counts(entropy_grad):
    hidden, weight, _, targets = inputs(5, 7, 3)

    def grad(factor, times):
        for _ in range(times):
            logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, entropy_grad=entropy_grad)
            (factor * (logprobs + entropies).sum()).backward()
        result = hidden.grad.clone(), weight.grad.clone()
        hidden.grad = weight.grad = None
        return result

    once = grad(1.0, 1)
    assert once[1].abs().max() > 0.1
    torch.testing.assert_close(grad(2.0, 1), tuple(2 * g for g in once), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(1.0, 2), tuple(2 * g for g in once), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(1024.0, 1), tuple(1024 * g for g in once), rtol=1e-12, atol=1e-14)
    assert all(g.eq(0).all() for g in grad(0.0, 1))


def test_rows_without_a_gradient_do_not_matter():
    hidden, weight, _, targets = inputs(6, 7, 3)
    keep = torch.tensor([1, 4])
    pull = torch.randn(2, dtype=torch.float64)
    right = torch.autograd.grad((dense(hidden[keep], weight, targets[keep])[0] * pull).sum(), [hidden, weight])
    spoiled = hidden.detach().clone()
    spoiled[[0, 2, 3, 5]] = float("nan")
    spoiled.requires_grad_()
    logprobs, _ = logprobs_and_entropies(spoiled, weight, targets)
    got = torch.autograd.grad((logprobs[keep] * pull).sum(), [spoiled, weight])
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)


def test_entropy_alone_pulls():
    hidden, weight, _, targets = inputs(5, 7, 3)
    got = torch.autograd.grad(
        logprobs_and_entropies(hidden, weight, targets, entropy_grad=True)[1].sum(), [hidden, weight]
    )
    right = torch.autograd.grad(dense(hidden, weight, targets)[1].sum(), [hidden, weight])
    torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_accumulated_in_full(dtype, autocast):
    hidden, weight, _, targets = inputs(300, 600, 64, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = logprobs_and_entropies(hidden, weight, targets)
        assert [r.dtype for r in result] == [torch.float32] * 2
        result[0].sum().backward()
    wide = [parameter.detach().double().requires_grad_() for parameter in (hidden, weight)]
    expected = dense(*wide, targets)
    expected[0].sum().backward()
    torch.testing.assert_close([r.double() for r in result], list(expected), rtol=1e-5, atol=1e-5)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    digits = torch.finfo(dtype).eps
    torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=digits, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=digits, atol=1e-4)


def test_autocast_does_not_reach_full_precision():
    hidden, weight, _, targets = inputs(20, 30, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = logprobs_and_entropies(hidden, weight, targets)
        got = torch.autograd.grad(result[0].sum(), [hidden, weight])
    right = torch.autograd.grad(dense(hidden, weight, targets)[0].sum(), [hidden, weight])
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_mixed_dtypes():
    hidden, weight, _, targets = inputs(4, 5, 3, torch.float32)
    assert logprobs_and_entropies(hidden.double(), weight, targets)[0].dtype == torch.float64
    logprobs = logprobs_and_entropies(hidden.bfloat16(), weight, targets)[0]
    torch.testing.assert_close(logprobs, dense(hidden.bfloat16().float(), weight, targets)[0])


@pytest.mark.parametrize("size", [1e-4, 1.0, 80.0])
def test_peaked_and_flat_distributions(size):
    hidden, weight, _, targets = inputs(50, 101, 8, torch.float32)
    result = logprobs_and_entropies(hidden * size, weight, targets)
    expected = dense(hidden.double() * size, weight.double(), targets)
    torch.testing.assert_close([r.double() for r in result], list(expected), rtol=3e-6, atol=3e-6)
    assert (result[1] >= 0).all()
    assert (result[0] <= 0).all()


@pytest.mark.usefixtures("tiles")
def test_no_tokens():
    hidden, weight, bias, targets = inputs(0, 5, 3)
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, bias=bias, entropy_grad=True)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, 3)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_without_gradients_nothing_is_kept():
    hidden, weight, _, targets = inputs(4, 5, 3)
    with torch.no_grad():
        results = logprobs_and_entropies(hidden, weight, targets, entropy_grad=True)
    frozen = logprobs_and_entropies(hidden.detach(), weight.detach(), targets)
    for result in (*results, *frozen):
        assert result.grad_fn is None
        assert not result.requires_grad


def test_a_frozen_weight_gets_no_buffer():
    hidden, weight, _, targets = inputs(4, 4_001, 16, torch.float32)
    logprobs, _ = logprobs_and_entropies(hidden, weight.detach(), targets, chunk_size=1)
    with Largest(hidden, weight) as largest:
        logprobs.sum().backward()
    assert 0 < largest.numel <= 4_001


def test_changed_weights_are_noticed():
    hidden, weight, _, targets = inputs(4, 5, 3)
    logprobs, _ = logprobs_and_entropies(hidden, weight, targets)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_ids_in_int32_and_strided_inputs():
    hidden, weight, _, targets = inputs(6, 7, 4)
    right = dense(hidden[::2], weight, targets[::2])
    wide = weight.detach().T.contiguous().T
    got = logprobs_and_entropies(hidden[::2], wide, targets[::2].int())
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden": torch.zeros(3)}, "hidden"),
        ({"weight": torch.zeros(5, 3)}, "weight"),
        ({"weight": torch.zeros(0, 2)}, "weight"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, "targets"),
        ({"targets": torch.zeros(3)}, "targets"),
        ({"targets": torch.tensor([0, 5, 0])}, "targets"),
        ({"targets": torch.tensor([0, -100, 0])}, "targets"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"softcap": 0.0}, "softcap"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {"hidden": torch.zeros(3, 2), "weight": torch.zeros(5, 2), "targets": torch.zeros(3, dtype=torch.long)}
    arguments.update(change)
    with pytest.raises(ValueError, match=f"^{name}: "):
        logprobs_and_entropies(**arguments)
