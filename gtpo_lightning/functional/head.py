"""The language-model head: log-probs and entropies of tokens without ever holding their logits.

The logits (M, V) are worked through in tiles of rows × vocabulary entries. The vocabulary is the outer loop, so that in
half precision each piece of the weight is converted to fp32 once and only a piece of it at a time. Each row carries a
running maximum and two running sums, from which the log-sum-exp and the entropy follow. The backward pass makes the
same tiles again. On a CPU a tile fits the cache: all passes over it but the matrix products are almost free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtpo_lightning.functional._inputs import check_shape, result_dtype

__all__ = ["logprobs_and_entropies"]

_CPU_ROWS = 256  # enough for the matrix product to reach its speed
_CPU_TILE = 2**19  # logits of a tile for each thread: 2 MiB in fp32
_CPU_COLUMNS = 2**12  # so that few rows do not make long sums
_TILE = 2**26  # logits of a tile elsewhere: large products, few launches


def logprobs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_grad: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes log p(target) and H of p = softmax(logits), with logits = (hidden · weightᵀ + bias) / temperature.

    Everything is accumulated in fp32 or better, inside an autocast region too; bf16 log-softmax is off by up to 0.07
    nats. Rows whose incoming gradient is 0 (padding, masked tokens, groups without a signal) cost nothing in the
    backward pass. A vocabulary entry with bias −inf cannot be drawn and adds nothing.

    Args:
        hidden: Last hidden states, (M, D).
        weight: Output embedding, (V, D).
        targets: Token ids, (M,) integers in [0, V).
        bias: (V,).
        temperature: The temperature the tokens were sampled with, > 0.
        chunk_size: Bounds the extra memory to a small multiple of chunk_size · V numbers. The result does not depend
            on it beyond rounding.
        entropy_grad: Whether entropies are differentiable; else they are detached.
        softcap: c of c · tanh(logits / c), before the temperature (Gemma 2).
        logit_scale: Multiplies hidden · weightᵀ + bias, before `softcap` (Cohere, Granite).

    Returns:
        Log-probs (M,), differentiable once in hidden, weight and bias, and entropies (M,), both in nats; fp64 if one
        of hidden, weight and bias is fp64, else fp32.

    Raises:
        ValueError: The shapes do not fit, or `targets`, `temperature`, `chunk_size` or `softcap` is out of range.

    >>> logprobs, entropies = logprobs_and_entropies(torch.eye(1), torch.tensor([[2.0], [0.0]]), torch.tensor([0]),
    ...                                              temperature=0.5)
    >>> round(logprobs.item(), 4), round(entropies.item(), 4)
    (-0.0181, 0.0901)
    """
    settings = _Settings(float(temperature), chunk_size, entropy_grad, softcap, float(logit_scale))
    _check(hidden, weight, targets, bias, settings)
    return _Head.apply(hidden, weight, bias, targets, settings)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, settings: _Settings) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)}; valid: (M, D)")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; valid: (V, D) with D = {hidden.shape[1]}")
    check_shape("targets", targets, tuple(hidden.shape[:1]), "(M,)")
    if bias is not None:
        check_shape("bias", bias, tuple(weight.shape[:1]), "(V,)")
    if targets.is_floating_point():
        raise ValueError(f"targets: dtype {targets.dtype}; valid: integers")
    if targets.device.type == "cpu" and len(targets) and not 0 <= targets.min() <= targets.max() < len(weight):
        # Elsewhere the check would wait for the device; a target out of range has log-prob NaN there.
        raise ValueError(f"targets: {targets.min()} to {targets.max()}; valid: 0 to V - 1 = {len(weight) - 1}")
    if not settings.temperature > 0:
        raise ValueError(f"temperature: {settings.temperature}; valid: a number > 0")
    if settings.chunk_size < 1:
        raise ValueError(f"chunk_size: {settings.chunk_size}; valid: a whole number >= 1")
    if settings.softcap is not None and not settings.softcap > 0:
        raise ValueError(f"softcap: {settings.softcap}; valid: a number > 0, or None")


class _Settings(NamedTuple):
    temperature: float
    chunk_size: int
    entropy_grad: bool
    softcap: float | None
    logit_scale: float

    @property
    def inner(self) -> float:
        """Factor of hidden · weightᵀ + bias: up to the tanh, or all of it where there is none."""
        return self.logit_scale / (self.temperature if self.softcap is None else self.softcap)

    @property
    def outer(self) -> float:
        """Factor of the tanh."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature


class _Tiles:
    """Cuts the logits of M rows into tiles and makes them, in buffers that are used again."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings, most_rows: int | None = None
    ) -> None:
        self.hidden, self.weight, self.bias, self.settings = hidden, weight, bias, settings
        self.dtype = result_dtype(hidden, weight, bias)
        cpu = hidden.device.type == "cpu"
        most = _CPU_COLUMNS if cpu else len(weight)
        area = min(_CPU_TILE * torch.get_num_threads() if cpu else _TILE, settings.chunk_size * len(weight))
        most_rows = most_rows or (_CPU_ROWS if cpu else settings.chunk_size)
        self.rows = max(1, min(len(hidden), most_rows, area))
        self.columns = max(1, min(len(weight), most, area // self.rows))
        self._buffers: list[Tensor] = []

    def scratch(self, index: int, rows: int, columns: int) -> Tensor:
        """The front of buffer `index` as a matrix; its content is whatever was left there."""
        while len(self._buffers) <= index:
            self._buffers.append(self.hidden.new_empty(self.rows * self.columns, dtype=self.dtype))
        return self._buffers[index][: rows * columns].view(rows, columns)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Pieces of the vocabulary: where, their weight (v, D) and bias (v,), converted; none without rows."""
        lowest = -(torch.finfo(self.dtype).max ** 0.5)  # stands for −inf, which would make 0 · inf in the entropy
        for start in range(0, len(self.weight) if len(self.hidden) else 0, self.columns):
            where = slice(start, min(start + self.columns, len(self.weight)))
            bias = None if self.bias is None else self.bias[where].to(self.dtype).clamp(min=lowest)
            yield where, self.weight[where].to(self.dtype), bias

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pieces of the rows: where, and their hidden states (m, D), converted."""
        for start in range(0, len(self.hidden), self.rows):
            where = slice(start, start + self.rows)
            yield where, self.hidden[where].to(self.dtype)

    def raw(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The tile (m, v) in buffer 0: logits, or the tanh that `outer` turns into logits."""
        out, inner = self.scratch(0, len(hidden), len(weight)), self.settings.inner
        if bias is not None:
            torch.addmm(bias, hidden, weight.t(), beta=inner, alpha=inner, out=out)
        else:
            torch.mm(hidden if inner == 1.0 else hidden * inner, weight.t(), out=out)
        return out if self.settings.softcap is None else out.tanh_()


class _Sums(NamedTuple):
    """What the forward pass leaves of each row's logits z, (M,) each: log p(target) = target − top − log(total)."""

    target: Tensor  # z of the target
    top: Tensor  # max z
    total: Tensor  # Σ exp(z − top)
    entropies: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Log p(target), (M,)."""
        return self.target - self.top - self.total.log()


class _Running:
    """The sums of each row over the tiles seen so far; they are rescaled whenever the row's maximum grows."""

    def __init__(self, tiles: _Tiles, targets: Tensor) -> None:
        self.tiles, self.targets = tiles, targets
        self.target, self.top, self.total, self.moment = tiles.hidden.new_zeros(4, len(targets), dtype=tiles.dtype)
        self.target.fill_(float("nan"))
        self.top.fill_(torch.finfo(tiles.dtype).min / 4)

    def add(self, chunk: slice, block: slice, raw: Tensor, out: Tensor) -> Tensor:
        """Adds a tile of `raw`, which is lost; leaves exp(z − top) in `out`, returns what earlier sums shrink by."""
        logits = _scaled(raw, self.tiles.settings.outer)
        inside, column = _inside(self.targets[chunk], block)
        self.target[chunk] = torch.where(inside, logits.gather(1, column[:, None])[:, 0], self.target[chunk])
        highest = torch.maximum(logits.amax(dim=1), self.top[chunk])
        powers = torch.exp(logits.sub_(highest[:, None]), out=out)
        shift = self.top[chunk] - highest
        decay = shift.exp()
        moment = (self.moment[chunk] + self.total[chunk] * shift) * decay
        self.moment[chunk] = moment + torch.linalg.vecdot(powers, logits)
        self.total[chunk] = self.total[chunk] * decay + powers.sum(dim=1)
        self.top[chunk] = highest
        return decay

    def sums(self) -> _Sums:
        return _Sums(self.target, self.top, self.total, self.total.log() - self.moment / self.total)


def _forward(tiles: _Tiles, targets: Tensor) -> _Sums:
    """One pass over all tiles."""
    running = _Running(tiles, targets)
    for block, weight, bias in tiles.blocks():
        for chunk, hidden in tiles.chunks():
            raw = tiles.raw(hidden, weight, bias)
            running.add(chunk, block, raw, tiles.scratch(1, *raw.shape))
    return running.sums()


def _backward(
    tiles: _Tiles, targets: Tensor, rows: Tensor, d_weight: Tensor | None, d_bias: Tensor | None, *, with_hidden: bool
) -> Tensor | None:
    """The gradient of hidden, if wanted, from the tiles made again; adds those of weight and bias to what is given.

    A weight in half precision gets its gradient piece by piece, each summed over all rows in fp32. `rows` is what
    `_rows` says.
    """
    d_hidden = torch.zeros_like(tiles.hidden, dtype=tiles.dtype) if with_hidden else None
    for block, weight, bias in tiles.blocks():
        piece = None if d_weight is None else torch.zeros_like(weight)
        piece_bias = None if d_bias is None else weight.new_zeros(len(weight))
        for chunk, hidden in tiles.chunks():
            residual = _residual(tiles, tiles.raw(hidden, weight, bias), _inside(targets[chunk], block), rows[:, chunk])
            factor = rows[0, chunk]
            if d_hidden is not None:
                d_hidden[chunk] += residual @ weight  # not addmm_: some BLAS kernels would add up V terms one by one
            if piece is not None:
                piece.addmm_(residual.t(), hidden * factor[:, None])
            if piece_bias is not None:
                piece_bias.addmv_(residual.t(), factor)
        if d_weight is not None and piece is not None:
            d_weight[block] += piece
        if d_bias is not None and piece_bias is not None:
            d_bias[block] += piece_bias
    return None if d_hidden is None else d_hidden.mul_(rows[0][:, None])


def _rows(sums: Tensor, grad: Tensor, grad_entropy: Tensor | None, slope: float) -> Tensor:
    """What `_residual` needs of each row: factor, top, peak, and for the entropy two coefficients, (3 or 5, M).

    With p = softmax(z), u = exp(z − top) = p · total and the incoming gradients g (log-prob) and e (entropy),
    dL/dz = g (onehot − p) − e p (log p + H). What is common to a row becomes a factor of the small matrices, so that
    no pass over the tile is spent on it.
    """
    top, total, entropies = sums
    factor = -slope / total
    if grad_entropy is None:
        return torch.stack([factor * grad, top, total])
    offset = grad + grad_entropy * (entropies - total.log())
    return torch.stack([factor, top, total * grad, grad_entropy, offset])


def _residual(tiles: _Tiles, raw: Tensor, target: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    """dL/draw of a tile without the rows' factor, in place: u − total · onehot, or its like with the entropy."""
    _, top, peak, *entropy = rows[..., None]
    bend = None
    if tiles.settings.softcap is not None:
        bend = torch.mul(raw, raw, out=tiles.scratch(2, *raw.shape)).neg_().add_(1.0)  # derivative of tanh
    shifted = _scaled(raw, tiles.settings.outer).sub_(top)
    if entropy:
        powers = torch.exp(shifted, out=tiles.scratch(1, *raw.shape))
        residual = shifted.mul_(entropy[0]).add_(entropy[1]).mul_(powers)
    else:
        residual = shifted.exp_()
    inside, column = target
    residual.scatter_add_(1, column[:, None], torch.where(inside[:, None], -peak, 0.0))
    return residual if bend is None else residual.mul_(bend)


def _inside(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this block of the vocabulary, and their column there; any column for the others."""
    column, width = targets - block.start, block.stop - block.start
    return (column >= 0) & (column < width), column.clamp(0, width - 1)


def _logprobs(sums: _Sums, targets: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
    """Log p(target), (M,): −inf where the bias of the target is."""
    if bias is None or settings.softcap is not None:
        return sums.logprobs
    return sums.logprobs.masked_fill_(bias[targets] == -torch.inf, -torch.inf)


def _scaled(tile: Tensor, factor: float) -> Tensor:
    """In place; a factor of 1 costs nothing."""
    return tile if factor == 1.0 else tile.mul_(factor)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        targets = targets.long()
        with torch.autocast(hidden.device.type, enabled=False):
            sums = _forward(_Tiles(hidden, weight, bias, settings), targets)
            logprobs = _logprobs(sums, targets, bias, settings)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, targets, torch.stack(sums[1:]))
        ctx.set_materialize_grads(False)
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(sums.entropies)
        return logprobs, sums.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        settings = ctx.settings
        grad = torch.zeros_like(sums[0]) if grad is None else grad
        active = (grad != 0) if grad_entropy is None else (grad != 0) | (grad_entropy != 0)
        slope = settings.logit_scale / settings.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _rows(sums, grad, grad_entropy, slope)
            some = active.nonzero()[:, 0]
            every = len(some) == len(active)
            needs = ctx.needs_input_grad
            d_weight = torch.zeros_like(weight) if needs[1] else None
            d_bias = torch.zeros_like(bias) if needs[2] else None
            d_hidden = _backward(
                _Tiles(hidden if every else hidden[some], weight, bias, settings),
                targets if every else targets[some],
                rows if every else rows[:, some],
                d_weight,
                d_bias,
                with_hidden=needs[0],
            )
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
            d_hidden = d_hidden if every else torch.zeros_like(hidden).index_copy_(0, some, d_hidden)
        return d_hidden, d_weight, d_bias, None, None
