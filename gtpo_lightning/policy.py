"""The policy: a causal language model split into its body and its head, read with a prompt shared by a group.

A causal language model is a body (token ids to hidden states) and a head (hidden states to logits). Both are used
apart here: the head runs in chunks so that no (N, T, V) tensor exists, and the body reads each prompt once, whatever
the number of completions that follow it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from gtpo_lightning.adapters import Adapter, adapter_dropouts, effective_weight
from gtpo_lightning.buffers import FullBuffers
from gtpo_lightning.engines.cache import KeyValues, export_cache, prefix_cache, recording_cache
from gtpo_lightning.functional import logprobs_and_entropies
from gtpo_lightning.functional.foreseen import foreseen_logprobs_and_entropies
from gtpo_lightning.layer_checkpointing import checkpoint_layers
from gtpo_lightning.lm_head import Head

__all__ = ["Policy", "eval_mode", "position_ids"]

logger = logging.getLogger(__name__)

_HEAD_TOLERANCE = 1e-3  # relative; half-precision models round in the full forward and not here


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switches every submodule to evaluation (no dropout) and restores each one's own mode afterwards."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that left padding shifts nothing, (B, P).

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1]])).tolist()
        [[0, 0, 0, 1]]
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


class Policy(FullBuffers):
    """A causal language model that samples and is scored.

    Args:
        model: Any `AutoModelForCausalLM` whose attention keeps keys and values.
        gradient_checkpointing: Whether the model's layers run again in the backward pass and keep no activations.

    Raises:
        ValueError: The model's cache is not made of keys and values (a recurrent state), its head is not a linear map
            with an optional scale and soft cap, or it has no layers to checkpoint.
    """

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        self.adapter: Adapter | None = None
        """What is known of the adapter on the model, if it has one."""
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            checkpoint_layers(model)
        self._check_cache()
        self._cache_keyword = (
            "cache" if "cache" in inspect.signature(self.body.forward).parameters else "past_key_values"
        )
        self._check_head()
        self.most: Callable[[int], int] = int
        """The largest of all processes' counts where they share the weights; else the count itself."""
        self.shares_weights = False
        """Whether weights are split over processes, whose forward calls then have to be equally many."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function that reads the weights.

        Sampling and scoring go through here, since this is where weights that are split over processes are gathered:
        those around the layers for as long as the function runs, those of a layer while it runs.
        """
        return function(*args, **kwargs)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, also below an adapter."""
        base = getattr(self.model, "get_base_model", None)
        return base() if callable(base) else self.model

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        return self.causal_lm.base_model

    @property
    def head(self) -> Head:
        """The head's weights and its scale and soft cap, as the model's configuration names them."""
        layer = self.causal_lm.get_output_embeddings()
        config = self.causal_lm.config.get_text_config(decoder=True)
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        weight = effective_weight(layer)
        return Head(weight, getattr(layer, "bias", None), scale, None if softcap is None else float(softcap))

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was built for, in tokens; None where it has no limit."""
        config = self.causal_lm.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        return int(limit) if limit else None

    def _check_cache(self) -> None:
        layers = DynamicCache(config=self.causal_lm.config).layers
        strange = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"})
        if strange:
            raise ValueError(
                f"model: {type(self.causal_lm).__name__} keeps {', '.join(strange)} beside keys and values; valid: "
                "models whose every layer is attention, since a recurrent state cannot be shared by a group"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """One forward of four tokens tells whether the head really is what `Head` describes."""
        weight = self.causal_lm.get_output_embeddings().weight
        if weight.is_meta:
            return
        ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]
        with eval_mode(self.model):
            expected = self.causal_lm(input_ids=ids).logits[0].float()
            got = self.head.logits(self.hidden(ids)[0]).float()
        scale = expected.abs().max().clamp(min=1.0)
        tolerance = _HEAD_TOLERANCE if weight.dtype == torch.float32 else 0.05
        if not torch.allclose(got / scale, expected / scale, atol=tolerance, rtol=0):
            raise ValueError(
                f"model: the head of {type(self.causal_lm).__name__} is not a linear map of the last hidden state "
                f"(logits differ by {(got - expected).abs().max():.3g}); valid: a linear head with an optional bias, "
                "logit scale and soft cap"
            )

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Last hidden states of the body, (n, L, D); the cache, if given, is extended in place."""
        extra = {} if cache is None else {self._cache_keyword: cache}
        out = self.body(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=cache is not None, **extra
        )
        return out.last_hidden_state

    def prefill(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, KeyValues]:
        """Reads each prompt once.

        Args:
            ids: Left-padded prompts, (B, P).
            mask: 1 on prompt tokens, (B, P).

        Returns:
            The hidden state after the last prompt token, (B, D), and each layer's keys and values, (B, heads, P, d).
        """
        # Layers that run again in the backward pass must not extend the cache a second time.
        cache = recording_cache() if self.gradient_checkpointing else DynamicCache()
        padded = not bool(mask.all())
        hidden = self.hidden(ids, mask if padded else None, position_ids(mask), cache)
        return hidden[:, -1], export_cache(cache)

    def score(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        row_prompts: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        entropy_grad: bool = False,
        foreseen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of completions under this policy, at the temperature they were sampled with.

        The prompts are read once and their keys and values repeated for the completions of each, so a step costs
        P + G·T tokens a group instead of G·(P + T). With `micro_batch_size` the rows go through in chunks under
        activation checkpointing, which bounds memory at the cost of one more forward of the body. The head reads all
        rows at once, in tiles: of a chunk its last hidden states are kept, (n, T, D).

        Args:
            prompt_ids: Left-padded prompts, (B, P).
            prompt_mask: 1 on prompt tokens, (B, P).
            row_prompts: The prompt of each row, (N,) int64 in [0, B).
            completion_ids: (N, T).
            completion_mask: Ones, then zeros, (N, T).
            temperature: Divides the logits; log-probs and entropies are those of the tempered distribution.
            micro_batch_size: Rows a chunk; None reads all rows at once and keeps their activations.
            entropy_grad: Whether the entropies carry a gradient.
            foreseen: A guess of dL / d log-prob up to a common factor, (N, T), with which the head forms its gradients
                in the forward pass; any guess gives the same numbers.

        Returns:
            Log-probs (N, T) with gradient and entropies (N, T), both nats and 0 on padding.
        """
        batch = prompt_ids, prompt_mask, row_prompts, completion_ids, completion_mask.bool()
        return self(self._score, *batch, micro_batch_size, temperature, entropy_grad, foreseen)  # type: ignore[no-any-return]

    def _score(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        row_prompts: Tensor,
        completion_ids: Tensor,
        real: Tensor,
        micro_batch_size: int | None,
        temperature: float,
        entropy_grad: bool,
        foreseen: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, total = completion_ids.shape
        own = int(real.sum(dim=1).max()) if real.numel() else 0
        length = self.most(own)
        if length == 0 and not self.shares_weights:
            zero = torch.zeros(completion_ids.shape, device=completion_ids.device) + self.zero()
            return zero, zero if entropy_grad else zero.detach()
        # A first token needs no forward of its own; where another process has longer rows, this one takes part in it.
        own = max(own, min(length, 2), 1)
        ids, real = _of_size(completion_ids, 1, own), _of_size(real, 1, own)
        if self.shares_weights:
            prompt_ids, prompt_mask = self.even_prompts(prompt_ids, prompt_mask)
            count = max(self.most(rows), 1)
            row_prompts, ids, real = (_of_size(x, 0, count) for x in (row_prompts, ids, real))
        chunked = micro_batch_size is not None and torch.is_grad_enabled()
        run = partial(checkpoint, use_reentrant=False) if chunked else _call
        size = micro_batch_size or max(len(ids), len(prompt_ids))
        prompts = zip(prompt_ids.split(size), prompt_mask.split(size), strict=True)
        last, layers = _joined([run(self._read_prompts, *chunk) for chunk in prompts])
        chunks = zip(row_prompts.split(size), ids.split(size), real.split(size), strict=True)
        states = torch.cat([run(self._read_completions, last, layers, prompt_mask, *chunk) for chunk in chunks])
        if foreseen is not None:
            foreseen = _of_size(_of_size(foreseen, 1, own), 0, len(ids))
        with self._scoring_mode():
            logprobs, entropies = self._read_head(states, ids, real, temperature, entropy_grad, foreseen)
        if len(logprobs) > rows:  # rows of padding are 0, and stay attached so that their backward pass runs, too
            logprobs, entropies = (x[:rows] + x[rows:].sum() for x in (logprobs, entropies))
        return _of_size(logprobs, 1, total), _of_size(entropies, 1, total)

    def even_prompts(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Adds prompts of one token, so that processes that share the weights have equally many, and at least one.

        Args:
            ids: Left-padded prompts, (B, P).
            mask: 1 on prompt tokens, (B, P).
        """
        count = max(self.most(len(ids)), 1)
        own, width = len(ids), max(ids.shape[1], 1)
        ids, mask = (_of_size(_of_size(x, 1, width), 0, count) for x in (ids, mask))
        mask = torch.where(torch.arange(count, device=mask.device)[:, None] < own, mask, 0)
        mask[own:, -1] = 1
        return ids, mask

    @contextmanager
    def _scoring_mode(self) -> Iterator[None]:
        """Without dropout, but for that of an adapter where a gradient is taken."""
        with_dropout = self.adapter is not None and self.adapter.lora.dropout > 0 and torch.is_grad_enabled()
        dropouts = adapter_dropouts(self.model) if with_dropout else []
        with eval_mode(self.model):
            for dropout in dropouts:
                dropout.training = True
            try:
                yield
            finally:
                for dropout in dropouts:
                    dropout.training = False

    def _read_prompts(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, KeyValues]:
        with self._scoring_mode():  # here and not outside, since a checkpointed chunk runs again in the backward pass
            return self.prefill(ids, mask)

    def _read_completions(
        self,
        last: Tensor,
        layers: KeyValues,
        prompt_mask: Tensor,
        prompts: Tensor,
        ids: Tensor,
        real: Tensor,
    ) -> Tensor:
        """Last hidden states (n, T, D): completions attend to the repeated cache of their prompt.

        Position t is predicted by the state before it.
        """
        with self._scoring_mode():
            states = last.index_select(0, prompts)[:, None]
            if ids.shape[1] > 1:
                cache = prefix_cache([(k.index_select(0, prompts), v.index_select(0, prompts)) for k, v in layers])
                rows_mask = prompt_mask[prompts].bool()
                inputs = torch.where(real, ids, 0)[:, :-1]  # padding may hold anything
                # Padding stands behind every real token, so only the prompt's left padding has to be masked.
                padded = not bool(rows_mask.all())
                mask = torch.cat([rows_mask, torch.ones_like(real[:, :-1])], dim=1) if padded else None
                start = rows_mask.long().sum(dim=1, keepdim=True)
                positions = start + torch.arange(inputs.shape[1], device=ids.device)
                states = torch.cat([states, self.hidden(inputs, mask, positions, cache)], dim=1)
            return states

    def _read_head(
        self,
        states: Tensor,
        ids: Tensor,
        real: Tensor,
        temperature: float,
        entropy_grad: bool,
        foreseen: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        head = self.head
        read: Callable[..., tuple[Tensor, Tensor]] = logprobs_and_entropies
        if foreseen is not None:
            read = partial(foreseen_logprobs_and_entropies, foreseen=foreseen[real])
        logprobs, entropies = read(
            states[real],
            head.weight,
            ids[real],
            bias=head.bias,
            temperature=temperature,
            entropy_grad=entropy_grad,
            logit_scale=head.scale,
            softcap=head.softcap,
        )
        shape = torch.zeros(real.shape, dtype=logprobs.dtype, device=real.device)
        return shape.masked_scatter(real, logprobs), shape.masked_scatter(real, entropies)

    def zero(self) -> Tensor:
        """0, attached to every trainable parameter: the loss of a rank without work."""
        terms = [p.reshape(-1)[:1].sum() * 0.0 for p in self.parameters() if p.requires_grad]
        return torch.stack([term.float() for term in terms]).sum() if terms else torch.zeros(())


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _of_size(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut, or padded with zeros behind, to a size of one dimension."""
    if x.shape[dim] >= size:
        return x if x.shape[dim] == size else x.narrow(dim, 0, size)
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


def _joined(parts: list[tuple[Tensor, KeyValues]]) -> tuple[Tensor, KeyValues]:
    """Chunks of prompts as one batch: last states (B, D), and each layer's keys and values."""
    if len(parts) == 1:
        return parts[0]
    layers = zip(*(layers for _, layers in parts), strict=True)
    joined = [(torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in layers]
    return torch.cat([last for last, _ in parts]), joined
