"""The head where the gradient of each log-prob is foreseen: the forward pass leaves the gradients, too.

The plain head makes the tiles of the logits twice, once forward and once for the gradients. Here the forward pass works
through a block of rows at a time and keeps exp(z − top) of the block, (rows, V). While a tile is in the cache it is
multiplied by the weight, which gives d log p / d hidden up to a factor; once the block's sums are known, the kept tiles
give the weight's gradient for the gradients foreseen. The backward pass multiplies, and makes tiles again only for rows
whose gradient came out differently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtpo_lightning.functional._inputs import check_shape
from gtpo_lightning.functional.head import (
    _backward,
    _check,
    _forward,
    _Head,
    _logprobs,
    _rows,
    _Running,
    _Settings,
    _Sums,
    _Tiles,
)

__all__ = ["Tally", "foreseen_logprobs_and_entropies"]

_CPU_ROWS = 256  # rows whose tiles are kept
_TOLERANCE = 32.0  # units in the last place by which a row's gradient may miss what was foreseen


class Tally:
    """Counts, over backward passes, the rows whose gradient was foreseen and those among them that were missed."""

    def __init__(self) -> None:
        self.rows = 0
        self.missed = 0


def foreseen_logprobs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    foreseen: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_grad: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropies` for known gradients: same values and gradients, at 3/4 of the matrix products.

    A guess is never wrong, only of no use: gradients are those of what comes in. The guess counts up to a common
    factor (loss scaling, accumulation, the loss times 2). A row that was guessed as 0 and comes in as 0 costs no
    gradient at all; one whose gradient misses the factor times its guess by more than 32 units in the last place makes
    its tiles again. Where the weight has no gradient the size of a guess does not matter, only whether it is 0.

    Beside the tiles it keeps the gradient of the weight, (V, D), and one of hidden, (M, D), both in fp32 or better,
    from the forward to the backward pass. A second backward pass over a retained graph makes the weight's again. With
    `entropy_grad` or `softcap`, and where no gradient is taken, this is `logprobs_and_entropies` itself.

    Args:
        hidden: Last hidden states, (M, D).
        weight: Output embedding, (V, D).
        targets: Token ids, (M,) integers in [0, V).
        foreseen: A guess of dL / d log-prob up to a common factor, (M,). NaN and ±inf count as 0.
        bias: (V,).
        temperature: The temperature the tokens were sampled with, > 0.
        chunk_size: Bounds the extra memory to a small multiple of chunk_size · V numbers.
        entropy_grad: Whether entropies are differentiable; else they are detached.
        softcap: c of c · tanh(logits / c), before the temperature (Gemma 2).
        logit_scale: Multiplies hidden · weightᵀ + bias (Cohere, Granite).
        tally: Counts what was foreseen and what was missed.

    Returns:
        Log-probs (M,), differentiable once in hidden, weight and bias, and entropies (M,), both in nats; fp64 if one
        of hidden, weight and bias is fp64, else fp32.

    Raises:
        ValueError: As `logprobs_and_entropies`, or `foreseen` does not fit.

    >>> hidden, weight = torch.eye(1, requires_grad=True), torch.tensor([[2.0], [0.0]])
    >>> logprobs, _ = foreseen_logprobs_and_entropies(hidden, weight, torch.tensor([0]), torch.ones(1))
    >>> (3 * logprobs.sum()).backward()
    >>> round(logprobs.item(), 4), round(hidden.grad.item(), 4)  # 3 · (2 − 2 · 0.8808)
    (-0.1269, 0.7152)
    """
    settings = _Settings(float(temperature), chunk_size, entropy_grad, softcap, float(logit_scale))
    _check(hidden, weight, targets, bias, settings)
    check_shape("foreseen", foreseen, tuple(hidden.shape[:1]), "(M,)")
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    if entropy_grad or softcap is not None or not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return _Head.apply(hidden, weight, bias, targets, settings)
    return _Foreseen.apply(hidden, weight, bias, targets, foreseen.detach(), settings, tally)


class _Formed(NamedTuple):
    """Gradients of the forward pass; None where not needed."""

    unit: Tensor | None  # d log p / d hidden of the foreseen rows, (m, D)
    weight: Tensor | None  # of Σ guess · log p, (V, D)
    bias: Tensor | None  # the same, (V,)


def _form(tiles: _Tiles, targets: Tensor, guess: Tensor, needs: tuple[bool, bool, bool]) -> tuple[_Sums, _Formed]:
    """Sums and gradients of rows, by one pass over all tiles and one more over those of a block, which are kept."""
    running, slope = _Running(tiles, targets), tiles.settings.inner
    like = tiles.hidden
    unit = like.new_zeros(like.shape, dtype=tiles.dtype) if needs[0] else None
    d_weight = like.new_zeros(tiles.weight.shape, dtype=tiles.dtype) if needs[1] else None
    d_bias = like.new_zeros(len(tiles.weight), dtype=tiles.dtype) if needs[2] else None
    keeps = needs[1] or needs[2]
    kept = like.new_empty(tiles.rows * len(tiles.weight), dtype=tiles.dtype) if keeps else None
    for chunk, hidden in tiles.chunks():
        tops, rows = [], len(hidden)
        for block, weight, bias in tiles.blocks():
            raw = tiles.raw(hidden, weight, bias)
            powers = tiles.scratch(1, *raw.shape) if kept is None else _kept(kept, rows, block)
            decay = running.add(chunk, block, raw, powers)
            tops.append((block, running.top[chunk].clone()))
            if unit is not None:
                unit[chunk] = torch.addcmul(powers @ weight, unit[chunk], decay[:, None])
        if kept is None:
            continue
        factor = -slope * guess[chunk] / running.total[chunk]
        for block, top in tops:
            powers, each = _kept(kept, rows, block).t(), factor * (top - running.top[chunk]).exp()
            if d_weight is not None:
                d_weight[block].addmm_(powers, hidden * each[:, None])
            if d_bias is not None:
                d_bias[block].addmv_(powers, each)
    sums = running.sums()
    scaled = slope * guess
    if unit is not None:
        unit = unit.div_(-sums.total[:, None]).add_(tiles.weight[targets]).mul_(slope)
    if d_weight is not None:
        d_weight.index_add_(0, targets, tiles.hidden.to(tiles.dtype) * scaled[:, None])
    if d_bias is not None:
        d_bias.index_add_(0, targets, scaled)
    return sums, _Formed(unit, d_weight, d_bias)


def _kept(kept: Tensor, rows: int, block: slice) -> Tensor:
    return kept[rows * block.start : rows * block.stop].view(rows, block.stop - block.start)


def _factor(grad: Tensor, guess: Tensor) -> tuple[float, Tensor]:
    """What most gradients are of their guess, both (m,), and which rows miss it, (m,) bool; 0 where there is none."""
    factor = float((grad / guess).nanmedian()) if len(guess) else 0.0
    if factor == 0.0 or factor - factor != 0.0:
        return 0.0, grad != 0
    expected = factor * guess
    tolerance = _TOLERANCE * torch.finfo(grad.dtype).eps
    return factor, ~((grad - expected).abs() <= tolerance * expected.abs())


class _Foreseen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        foreseen: Tensor,
        settings: _Settings,
        tally: Tally | None,
    ) -> tuple[Tensor, Tensor]:
        targets = targets.long()
        with torch.autocast(hidden.device.type, enabled=False):
            # A row of hidden states that are not finite would leave its NaN in sums over rows; the plain head skips it
            # where its gradient is 0, and so does the backward pass here.
            known = foreseen.isfinite() & (foreseen != 0) & hidden.isfinite().all(dim=1)
            some, others = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
            most = min(settings.chunk_size, _CPU_ROWS) if hidden.device.type == "cpu" else settings.chunk_size
            tiles = _Tiles(hidden[some], weight, bias, settings, most)
            guess = foreseen[some].to(tiles.dtype)
            sums, formed = _form(tiles, targets[some], guess, ctx.needs_input_grad[:3])
            if len(others):
                rest = _forward(_Tiles(hidden[others], weight, bias, settings), targets[others])
                every = torch.stack(sums).new_empty(4, len(targets))
                every[:, some], every[:, others] = torch.stack(sums), torch.stack(rest)
                sums = _Sums(*every)
            logprobs = _logprobs(sums, targets, bias, settings)
        ctx.settings, ctx.tally, ctx.formed = settings, tally, formed[1:]
        ctx.save_for_backward(hidden, weight, bias, targets, torch.stack(sums[1:]), some, others, guess, formed.unit)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sums.entropies)
        return logprobs, sums.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums, some, others, guess, unit = ctx.saved_tensors
        grad = torch.zeros_like(sums[0]) if grad is None else grad.to(sums.dtype)
        settings, needs = ctx.settings, ctx.needs_input_grad
        (d_weight, d_bias), ctx.formed = ctx.formed, (None, None)  # used up here: the gradient keeps their memory
        given = grad[some]
        factor, missed = 1.0, torch.zeros_like(some, dtype=torch.bool)
        if needs[1] or needs[2]:
            fresh = d_weight is None and d_bias is None  # a second backward pass over a retained graph
            factor, missed = (0.0, given != 0) if fresh else _factor(given, guess)
            d_weight = _times(d_weight, factor, weight, sums.dtype) if needs[1] else None
            d_bias = _times(d_bias, factor, bias, sums.dtype) if needs[2] else None
        if ctx.tally is not None:
            ctx.tally.rows += len(some)
            ctx.tally.missed += int(missed.sum())
        late = others[grad[others] != 0]
        again = torch.cat([some[missed], late])
        remade = None
        if len(again):
            rest = torch.cat([given[missed] - factor * guess[missed], grad[late]])
            slope = settings.logit_scale / settings.temperature
            with torch.autocast(hidden.device.type, enabled=False):
                tiles = _Tiles(hidden[again], weight, bias, settings)
                rows = _rows(sums[:, again], rest, None, slope)
                remade = _backward(tiles, targets[again], rows, d_weight, d_bias, with_hidden=needs[0])
        d_hidden = None
        if needs[0]:
            d_hidden = torch.zeros_like(hidden, dtype=sums.dtype)
            d_hidden[some] = unit * given[:, None]
            if remade is not None:
                d_hidden[late] = remade[len(again) - len(late) :]
            d_hidden = d_hidden.to(hidden.dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _times(formed: Tensor | None, factor: float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """In place; zeros where nothing was formed or the factor is 0, which also forgets what is not finite."""
    if formed is None or factor == 0.0:
        return torch.zeros_like(like, dtype=dtype)
    return formed if factor == 1.0 else formed.mul_(factor)
