"""The local engine: decoding with the policy itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from tqdm import tqdm

from gtpo_lightning.engines.base import Completions, Engine, OnFinished, check_keys, check_length
from gtpo_lightning.engines.cache import growing_cache
from gtpo_lightning.engines.sampling import Sampling, draw_tokens, keyed_uniforms
from gtpo_lightning.engines.shared_prefix import can_share, shared_prefix_cache, sharing_prefix
from gtpo_lightning.policy import Policy, eval_mode
from gtpo_lightning.rollout import Prompts

__all__ = ["LocalEngine"]

_ROOM = 256  # tokens of cache reserved at once
_COMPACT_BELOW = 0.875  # share of unfinished rows below which the batch is cut down to them
_CHECK_EVERY = 8  # steps between looks at finished rows on an accelerator, where a look waits for the device


class LocalEngine(Engine):
    """Samples with the policy's own weights, in evaluation mode, with a key-value cache.

    Each prompt is read once and its cache repeated for its completions; finished rows leave the batch; a token is drawn
    by inverting the cumulative distribution with one uniform number a row and step, keyed by what the row is, so that a
    rollout depends neither on the batch it is sampled in nor on the number of processes.

    Args:
        policy: The policy that samples.
        eos_ids: Every token that ends a completion.
        pad_id: What stands behind a finished completion.
        batch_size: Prompts sampled at once; None samples all together.
    """

    exact = True

    def __init__(self, policy: Policy, eos_ids: Sequence[int], pad_id: int, batch_size: int | None = None) -> None:
        self.policy = policy
        self.eos_ids = tuple(sorted(eos_ids))
        self.pad_id = pad_id
        self.batch_size = batch_size

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        keys: Sequence[tuple[object, ...]],
        *,
        show_progress: bool = False,
        on_finished: OnFinished | None = None,
    ) -> Completions:
        """Samples `sampling.num_samples` completions of each prompt; see `Engine.generate`.

        Raises:
            ValueError: Prompt and completion do not fit the model's positions, or the number of keys is wrong.
        """
        rows = len(prompts.ids) * sampling.num_samples
        check_keys(keys, rows)
        check_length(prompts, sampling, self.policy.max_positions)
        uniforms = keyed_uniforms(keys, sampling.max_completion_length).to(prompts.ids.device)
        out = Completions.empty(rows, sampling.max_completion_length, self.pad_id, prompts.ids.device)
        with eval_mode(self.policy.model):
            self.policy(self._generate, prompts, sampling, uniforms, out, show_progress, on_finished)
        return out.trim()

    def _generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        uniforms: Tensor,
        out: Completions,
        show_progress: bool,
        on_finished: OnFinished | None,
    ) -> None:
        """Decodes chunk by chunk; processes that share the weights take part in as many chunks as any has."""
        size = self.batch_size or max(len(prompts.ids), 1)
        for chunk in range(self.policy.most(-(-len(prompts.ids) // size))):
            start = chunk * size
            mask = prompts.mask[start : start + size].bool()
            if not len(mask):
                self._accompany(prompts, sampling)
                continue
            width = int(mask.sum(dim=1).max())  # a chunk needs no more padding than its own longest prompt
            ids = prompts.ids[start : start + size, -width:]
            first = start * sampling.num_samples
            self._decode(ids, mask[:, -width:], sampling, uniforms, out, first, show_progress, on_finished)

    def _accompany(self, prompts: Prompts, sampling: Sampling) -> None:
        """Takes part in a chunk of other processes that share the weights: decodes a token's prompt for nobody."""
        device = prompts.ids.device
        out = Completions.empty(sampling.num_samples, sampling.max_completion_length, self.pad_id, device)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        uniforms = torch.zeros(sampling.num_samples, sampling.max_completion_length, dtype=torch.float64, device=device)
        self._decode(ids, torch.ones_like(ids).bool(), sampling, uniforms, out, 0, False, None)

    def _decode(
        self,
        ids: Tensor,
        mask: Tensor,
        sampling: Sampling,
        uniforms: Tensor,
        out: Completions,
        first: int,
        show_progress: bool,
        on_finished: OnFinished | None,
    ) -> None:
        """Decodes one chunk of prompts into rows `first`, `first + 1`, … of `out`, which has room for entropies."""
        out_entropies: Tensor = out.entropies  # type: ignore[assignment]
        group, length = sampling.num_samples, sampling.max_completion_length
        state, layers = self.policy.prefill(ids, mask)
        shares = can_share(self.policy.causal_lm)
        room = min(_ROOM, length)
        cache = shared_prefix_cache(layers, mask, group, room) if shares else growing_cache(layers, group, room)
        head = self.policy.head.upcast()
        logits = head.logits(state).repeat_interleave(group, dim=0)
        scratch = logits.new_empty(2, logits.numel() + 127 * len(logits))
        lengths = mask.sum(dim=1).repeat_interleave(group)
        rows = torch.arange(first, first + len(logits), device=ids.device)
        # Rows of one length need no mask at all; a mask costs an attention kernel its fast path.
        seen = None if shares or bool(mask.all()) else _with_room(mask.repeat_interleave(group, dim=0), length)
        alive = torch.ones(len(rows), dtype=torch.bool, device=ids.device)
        members = group if shares else 1  # neighbours of which equally many stay in the batch
        open_rows = rows  # not reported to `on_finished` yet
        eos = torch.tensor(self.eos_ids, device=ids.device)
        check_every = _check_every(ids.device)
        reading = sharing_prefix(self.policy.causal_lm) if shares else nullcontext()
        bar = tqdm(total=length, desc="Sampling", unit="token", leave=False, delay=5, disable=not show_progress)
        for step in range(length):
            tokens, logprobs, entropies = draw_tokens(logits, uniforms[rows, step], sampling, scratch[0])
            out.ids[rows, step] = torch.where(alive, tokens, self.pad_id)
            out.logprobs[rows, step] = torch.where(alive, logprobs, 0.0).to(out.logprobs.dtype)
            out_entropies[rows, step] = torch.where(alive, entropies, 0.0).to(out_entropies.dtype)
            out.lengths[rows] += alive
            ended = alive & torch.isin(tokens, eos)
            out.truncated[rows] &= ~ended
            alive = alive & ~ended
            bar.update()
            if step + 1 == length:
                break
            if (step + 1) % check_every == 0:
                left = int(alive.sum())
                if on_finished is not None and left < len(open_rows):
                    on_finished(open_rows[~torch.isin(open_rows, rows[alive])].tolist(), out)
                    open_rows = rows[alive]
                if self.policy.most(left) == 0:
                    break
                keep = _rows_to_keep(alive, members)
                if keep.numel() < _COMPACT_BELOW * len(alive):
                    members, keep = keep.shape[1], keep.flatten()
                    cache.batch_select_indices(keep)
                    rows, tokens, lengths, alive = rows[keep], tokens[keep], lengths[keep], alive[keep]
                    seen = None if seen is None else seen[keep]
            visible = None if seen is None else seen[:, : ids.shape[1] + step + 1]
            with reading:
                state = self.policy.hidden(tokens[:, None], visible, (lengths + step)[:, None], cache)
            logits = head.logits(state[:, -1], scratch[1])
        bar.close()
        if on_finished is not None and len(open_rows):
            on_finished(open_rows.tolist(), out)


def _check_every(device: torch.device) -> int:
    """Steps between looks at finished rows; on an accelerator each look waits for it."""
    return 1 if device.type == "cpu" else _CHECK_EVERY


def _rows_to_keep(alive: Tensor, members: int) -> Tensor:
    """All unfinished rows, and finished ones where a group has fewer unfinished than another, (groups, rows each).

    Args:
        alive: Whether a row is unfinished, (n,) bool.
        members: Neighbouring rows that are a group; a group without unfinished rows goes, unless all have none.
    """
    groups = alive.view(-1, members)
    counts = groups.sum(dim=1)
    most = max(int(counts.max()), 1)
    first = (~groups).long().argsort(dim=1, stable=True)[:, :most].sort(dim=1).values
    rows = first + torch.arange(0, len(alive), members, device=alive.device)[:, None]
    return rows[counts > 0] if bool(counts.any()) else rows[:1]


def _with_room(mask: Tensor, room: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, room), value=True)
