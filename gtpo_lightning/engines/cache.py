"""Key-value caches over the layer classes of transformers: growing in place, starting from a prefix, or recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["GrowingLayer", "KeyValues", "export_cache", "growing_cache", "prefix_cache", "recording_cache"]

KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (B, heads, length, d)."""


class PrefixLayer(DynamicLayer):
    """A layer that already holds keys and values; new ones are concatenated, so gradients reach the prefix.

    It is read once and keeps what it had: activation checkpointing runs a layer again in the backward pass, which must
    find the same prefix then.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The prefix and the new keys and values behind it, (n, heads, P + L, d)."""
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


class RecordingLayer(DynamicLayer):
    """A layer for one forward from an empty cache; a checkpointed run of it again changes nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps the first keys and values it is given, and returns those given."""
        if not self.is_initialized:
            self.keys, self.values = key_states, value_states
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
        return key_states, value_states


class GrowingLayer(PrefixLayer):
    """A layer with room for the tokens to come: a step writes its keys in place instead of copying all before it.

    Args:
        keys: The prompt's keys, (n, heads, P, d).
        values: The prompt's values, (n, heads, P, d).
        room: Tokens to reserve beyond the prompt; more is reserved when it runs out.
    """

    def __init__(self, keys: Tensor, values: Tensor, room: int) -> None:
        super().__init__(keys, values)
        self._store(keys, values, room)

    def _store(self, keys: Tensor, values: Tensor, room: int) -> None:
        rows, heads, length, _ = keys.shape
        self._keys = keys.new_empty(rows, heads, length + room, keys.shape[-1])
        self._values = values.new_empty(rows, heads, length + room, values.shape[-1])
        self._keys[:, :, :length], self._values[:, :, :length] = keys, values
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values behind the ones held and returns all of them."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._keys.shape[2]:
            self._store(self.keys, self.values, max(end // 2, end - start))
        self._keys[:, :, start:end], self._values[:, :, start:end] = key_states, value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only some rows, with the room they had."""
        room = self._keys.shape[2] - self.keys.shape[2]
        self._store(self.keys[indices], self.values[indices], room)


def export_cache(cache: Cache) -> KeyValues:
    """The keys and values that a forward left in a cache."""
    layers: Any = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def recording_cache() -> Cache:
    """An empty cache for one forward whose layers may run again in the backward pass."""
    return Cache(layer_class_to_replicate=RecordingLayer)


def prefix_cache(layers: KeyValues) -> Cache:
    """A cache that starts from given keys and values, without copying them."""
    return Cache(layers=[PrefixLayer(keys, values) for keys, values in layers])


def growing_cache(layers: KeyValues, repeats: int, room: int) -> Cache:
    """A cache for decoding in which each prompt stands `repeats` times, with room for `room` more tokens."""
    repeated = [
        (keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0)) for keys, values in layers
    ]
    return Cache(layers=[GrowingLayer(keys, values, room) for keys, values in repeated])
