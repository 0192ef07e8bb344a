"""Decoding with each prompt's keys and values kept once, whatever the number of completions that follow it.

A step of decoding reads all keys and values. Kept once for each row of a group, the prompt's are G times as many bytes
as there is information in them, and each row's product with them is a vector times a matrix. Kept once for the group,
they are read once, by one product of all the group's queries with them. The scores of both parts, the prompt's and the
row's own tokens, go through one softmax, so the numbers are those of plain attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from gtpo_lightning.engines.cache import GrowingLayer, KeyValues

__all__ = ["SharedPrefixLayer", "can_share", "shared_prefix_cache", "sharing_prefix"]

_NAME = "gtpo_shared_prefix"
_KERNELS = ("sdpa", "flash_attention_2", "flash_attention_3")  # what it stands in for


class SharedPrefixLayer(GrowingLayer):
    """A layer that holds B prompts, and for each of them the tokens of its rows.

    Args:
        keys: The prompts' keys, (B, heads, P, d).
        values: The prompts' values, (B, heads, P, d).
        hidden: −inf on the prompts' padding and 0 elsewhere, (B, 1, 1, P); None where there is no padding.
        group: Rows of each prompt, which are neighbours.
        room: Tokens to reserve; more is reserved when it runs out.
    """

    def __init__(self, keys: Tensor, values: Tensor, hidden: Tensor | None, group: int, room: int) -> None:
        rows = len(keys) * group
        own_keys, own_values = (x.new_empty(rows, x.shape[1], 0, x.shape[3]) for x in (keys, values))
        super().__init__(own_keys, own_values, room)
        self.prefix_keys, self.prefix_values, self.hidden = keys, values, hidden

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds a token to each row and returns the rows' own keys and values; the keys know the layer they are of."""
        keys, values = super().update(key_states, value_states)
        keys.shared_prefix = self  # type: ignore[attr-defined]  # how the attention finds the prompts
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens that a row has behind it, its prompt included."""
        return self.prefix_keys.shape[2] + self.keys.shape[2]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only some rows: equally many of each prompt that is kept, in order."""
        group = len(self.keys) // len(self.prefix_keys)
        prompts = torch.unique_consecutive(indices // group)
        super().batch_select_indices(indices)
        if len(prompts) < len(self.prefix_keys):
            self.prefix_keys, self.prefix_values = self.prefix_keys[prompts], self.prefix_values[prompts]
            self.hidden = None if self.hidden is None else self.hidden[prompts]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of one token a row to its prompt and to its own tokens.

        Args:
            query: (n, query heads, 1, d).
            keys: Of the rows' own tokens, (n, heads, t, d).
            values: As `keys`.
            scaling: Factor of the scores.

        Returns:
            (n, query heads, 1, d).
        """
        rows, query_heads, _, size = query.shape
        prompts, heads, length, _ = self.prefix_keys.shape
        group, repeats = rows // prompts, query_heads // heads

        def of_prompts(x: Tensor) -> Tensor:  # (n, heads, repeats, …) to (B, heads, group · repeats, …)
            return (
                x.view(prompts, group, heads, repeats, -1).transpose(1, 2).reshape(prompts, heads, group * repeats, -1)
            )

        def of_rows(x: Tensor) -> Tensor:
            return x.view(prompts, heads, group, repeats, -1).transpose(1, 2).reshape(rows, heads, repeats, -1)

        own = query.reshape(rows, heads, repeats, size) * scaling
        before = of_prompts(own) @ self.prefix_keys.transpose(-1, -2)
        if self.hidden is not None:
            before += self.hidden
        scores = torch.cat([of_rows(before), own @ keys.transpose(-1, -2)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        out = of_rows(of_prompts(weights[..., :length]) @ self.prefix_values)
        return (out + weights[..., length:] @ values).reshape(rows, query_heads, 1, -1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls in place of its kernel; (n, 1, heads, d)."""
    layer: SharedPrefixLayer = key.shared_prefix  # type: ignore[attr-defined]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, key, value, scale).transpose(1, 2), None


AttentionInterface.register(_NAME, _attention)


def can_share(model: PreTrainedModel) -> bool:
    """Whether a model's attention can be replaced while it decodes: all of it has to be plain, over the whole context.

    Sliding windows, soft caps of scores, and eager or flexible attention keep their own way.
    """
    config = model.config.get_text_config(decoder=True)
    layers = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and config._attn_implementation in _KERNELS
        and layers <= {"DynamicLayer"}
        and getattr(config, "attn_logit_softcapping", None) is None
        and not getattr(config, "use_sliding_window", False)
        and "chunked_attention" not in (getattr(config, "layer_types", None) or ())
    )


def shared_prefix_cache(layers: KeyValues, mask: Tensor, group: int, room: int) -> Cache:
    """A cache for decoding `group` completions of each prompt.

    Args:
        layers: The prompts' keys and values.
        mask: True on prompt tokens, (B, P).
        group: Rows of each prompt.
        room: Tokens to reserve for each row.
    """
    hidden = None
    if not bool(mask.all()):
        hidden = torch.zeros(mask.shape, dtype=layers[0][0].dtype, device=mask.device)
        hidden = hidden.masked_fill(~mask, -torch.inf)[:, None, None]
    return Cache(layers=[SharedPrefixLayer(keys, values, hidden, group, room) for keys, values in layers])


class sharing_prefix:  # a context that can be entered again and again
    """Has a model's layers attend by what is in a `shared_prefix_cache`, and gives them their kernel back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.before: str = self.config._attn_implementation

    def __enter__(self) -> None:
        self.config._attn_implementation = _NAME

    def __exit__(self, *_: object) -> None:
        self.config._attn_implementation = self.before
