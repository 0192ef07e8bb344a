"""How tokens are drawn: settings, keyed uniforms, and the inverse of the cumulative distribution."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Sampling", "draw_inverse_cdf", "draw_tokens", "keyed_uniforms", "restrict_logits"]

_BLOCK = 128  # entries summed at once before the search inside one block
_CPU_ENTRIES = 2**19  # logits drawn from at once on a CPU, whose cache they should not leave


@dataclass(frozen=True)
class Sampling:
    """Every knob of sampling; the model's own generation settings are never read.

    Only `temperature` keeps log-probs and sampling the same distribution. `top_k`, `top_p` and `min_p` cut the
    distribution that is sampled and leave the log-probs those of the uncut one, so they warn.

    Args:
        num_samples: Completions of each prompt (G in training).
        max_completion_length: Tokens of a completion at most (T).
        temperature: Divides the logits.
        top_k: Keeps the k likeliest tokens; None keeps all.
        top_p: Keeps the likeliest tokens whose mass reaches p; 1 keeps all.
        min_p: Keeps tokens at least min_p times as likely as the likeliest; 0 keeps all.
        greedy: Takes the likeliest token; then one completion says it all, so `num_samples` must be 1.

    Raises:
        ValueError: A value outside its range.
    """

    num_samples: int = 1
    max_completion_length: int = 512
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        checks = {
            "num_samples": (_is_count(self.num_samples), "an integer of at least 1"),
            "max_completion_length": (_is_count(self.max_completion_length), "an integer of at least 1"),
            "temperature": (
                _is_number(self.temperature) and 0 < self.temperature < float("inf"),
                "a number above 0; greedy: true takes the likeliest",
            ),
            "top_k": (self.top_k is None or _is_count(self.top_k), "null or an integer of at least 1"),
            "top_p": (_is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            "min_p": (_is_number(self.min_p) and 0 <= self.min_p < 1, "a number of at least 0, below 1"),
        }
        for name, (fine, valid) in checks.items():
            if not fine:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not valid; valid: {valid}")
        if self.greedy and self.num_samples > 1:
            raise ValueError(
                f"num_samples: {self.num_samples} greedy completions would all be the same; valid: 1 with greedy: true"
            )
        if self.restricted and not self.greedy:
            warnings.warn(
                "top_k, top_p and min_p cut the distribution that is sampled; log-probs and entropies stay those of "
                "the uncut one, so training on such rollouts is off-policy. Only the temperature keeps both the same.",
                stacklevel=3,
            )

    @property
    def restricted(self) -> bool:
        """Whether the sampled distribution is cut."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def keyed_uniforms(keys: Sequence[tuple[object, ...]], length: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on nothing but their key and position, (len(keys), length) fp64.

    Each key seeds its own Philox stream, so a row draws the same numbers in any batch, process or run.

    Args:
        keys: One key a row, such as (seed, "train", epoch, problem id, member). Written out, they must differ.
        length: Numbers a row; the first ones are the same for any length.

    Example:
        >>> a = keyed_uniforms([(0, "train", 0, "p1", 0), (0, "train", 0, "p1", 1)], 3)
        >>> b = keyed_uniforms([(0, "train", 0, "p1", 1)], 2)
        >>> torch.equal(a[1, :2], b[0])
        True
    """
    out = np.empty((len(keys), length))
    for row, key in enumerate(keys):
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        out[row] = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(length)
    return torch.from_numpy(out)


def restrict_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with −inf where top-k, top-p or min-p leave a token out; at least one token stays, (n, V)."""
    if not sampling.restricted:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    drop = rank >= (sampling.top_k or logits.shape[-1])
    drop = drop | (probs.cumsum(dim=-1) - probs >= sampling.top_p) | (probs < sampling.min_p * probs[..., :1])
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))


def draw_inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row: the first whose cumulative mass exceeds the row's uniform number times the total mass.

    The sums run over blocks first and inside one block then, so the search reads the distribution once. Blocks are
    added up, and the block that is hit is searched, in fp64, so that unlikely tokens keep their share. A token of
    probability 0 is never drawn.

    Args:
        probs: Non-negative, not necessarily normalised, (n, V).
        uniforms: In [0, 1), (n,) fp64.

    Returns:
        Token ids, (n,) int64.

    Example:
        >>> draw_inverse_cdf(torch.tensor([[0.25, 0.5, 0.25]] * 3), torch.tensor([0.2, 0.3, 0.9]).double()).tolist()
        [0, 1, 2]
    """
    blocks = nn.functional.pad(probs, (0, -probs.shape[1] % _BLOCK)).view(len(probs), -1, _BLOCK)
    return _search(blocks, blocks.sum(dim=-1), uniforms)


def _search(blocks: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids (n,) from masses in blocks (n, blocks, entries) and the blocks' sums (n, blocks)."""
    size = blocks.shape[-1]
    block_ends = sums.double().cumsum(dim=-1)  # a sum of 128 in fp32 is right to some 1e-7
    target = uniforms.to(block_ends.device)[:, None] * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, target, right=True).clamp(max=block_ends.shape[1] - 1)
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, size))[:, 0].double()
    ends = before + inside.cumsum(dim=-1)
    index = torch.searchsorted(ends, target, right=True)
    # Rounding between the two sums may leave the target at a block's very end: then its last possible token is meant.
    last = size - 1 - (inside > 0).flip(-1).int().argmax(dim=-1, keepdim=True)
    return (block * size + torch.minimum(index, last))[:, 0]


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one token a row and says how likely it was.

    Args:
        logits: Untempered, (n, V) fp32.
        uniforms: In [0, 1), (n,) fp64.
        sampling: The settings.
        scratch: Numbers of the logits' dtype that are written over, at least n · (V + 127), so that a loop asks for no
            new memory.

    Returns:
        Token ids (n,), their log-probs (n,) and the entropies (n,) of the tempered, uncut distribution, in nats. For
        greedy sampling they are those at the same temperature.
    """
    rows, size = logits.shape
    padded = size + -size % _BLOCK
    powers = (logits.new_empty(rows * padded) if scratch is None else scratch[: rows * padded]).view(rows, padded)
    powers[:, size:] = 0.0
    blocks = powers.view(rows, -1, _BLOCK)
    sums = logits.new_empty(blocks.shape[:2])
    top, moment = logits.new_empty(2, rows, 1)
    most = max(1, _CPU_ENTRIES // size) if logits.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, most):
        part = slice(start, start + most)
        scaled = logits[part] if sampling.temperature == 1.0 else logits[part] / sampling.temperature
        top[part] = scaled.amax(dim=-1, keepdim=True)
        shifted = scaled - top[part]
        exps = torch.exp(shifted, out=powers[part, :size])
        torch.sum(blocks[part], dim=-1, out=sums[part])
        # A logit of −inf has p = 0 and adds nothing: 0 · −inf is NaN, which is left out.
        torch.nansum(shifted.mul_(exps), dim=-1, keepdim=True, out=moment[part])
    if sampling.greedy:
        tokens = logits.argmax(dim=-1)
    elif sampling.restricted:
        tokens = draw_inverse_cdf(restrict_logits(logits / sampling.temperature, sampling).softmax(dim=-1), uniforms)
    else:
        tokens = _search(blocks, sums, uniforms)
    total = sums.sum(dim=-1)
    norm = total.log()
    logprobs = logits.gather(1, tokens[:, None]) / sampling.temperature - top
    return tokens, logprobs[:, 0] - norm, norm - moment[:, 0] / total
