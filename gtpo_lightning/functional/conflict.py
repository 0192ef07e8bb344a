"""λ: which tokens good and bad completions of a group share, and what they weigh."""

from __future__ import annotations

import torch
from torch import Tensor

from gtpo_lightning.functional._inputs import as_bool, check_choice, check_shape, result_dtype

__all__ = ["conflict_mask", "conflict_weights"]

_SCOPES = ("edges", "prefix", "suffix", "position")


def conflict_mask(
    completion_ids: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    *,
    scope: str = "edges",
    shift: int = 0,
) -> Tensor:
    """Marks the conflict tokens: same token, same position, in a row with A > 0 and a row with A < 0 of one group.

    It is judged token by token, each row among its group (the row itself counts), so the partners may change along a
    run. A run goes on while each of its tokens is in conflict.

    With a shift of k, beyond the paper, a position holds for k positions around it, and a run steps over k tokens in
    all that are in no conflict, which stay unmarked: what two rows share is found again behind a number that has up to
    k more tokens in one of them. A larger k never marks less.

    Costs a sort of the tokens, whatever k; nothing has the size of the vocabulary.

    Args:
        completion_ids: Token ids, (N, T) integers, any values. An end-of-sequence token is a token like any other.
        completion_mask: Ones, then zeros, (N, T). What stands in the padding never matters.
        advantages: A_i, (N,). Rows with A = 0 take no part and are never marked.
        group_ids: The group of each row, (N,) integers, any values.
        scope: `edges`: the run from the start and the run from the end, the latter with positions counted from each
            row's own last real token. `prefix`, `suffix`: one of the two. `position`: any position from the start, no
            run needed.
        shift: k, tokens, at least 0. Default 0, the paper's.

    Returns:
        True on conflict tokens, (N, T) bool.

    Raises:
        ValueError: `scope` is unknown, `shift` is no integer of at least 0, or the shapes do not fit.

    Source: Simoni et al., arXiv 2508.03772, the conflict-aware part of the objective.

    >>> ids = torch.tensor([[7, 8, 5, 2], [7, 9, 5, 2], [7, 5, 2, 0]])
    >>> mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
    >>> conflict_mask(ids, mask, torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0, 0, 0])).int().tolist()
    [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]
    >>> ids = torch.tensor([[7, 4, 2, 9], [7, 1, 9, 0]])  # 9 stands behind two tokens, and behind one
    >>> mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    >>> signs, groups = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    >>> conflict_mask(ids, mask, signs, groups, scope="prefix", shift=2).int().tolist()
    [[1, 0, 0, 1], [1, 0, 1, 0]]
    """
    check_choice("scope", scope, _SCOPES)
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift: {shift!r}; valid: an integer >= 0")
    if completion_ids.dim() != 2:
        raise ValueError(f"completion_ids: shape {tuple(completion_ids.shape)}; valid: (N, T)")
    rows, length = completion_ids.shape
    check_shape("completion_mask", completion_mask, (rows, length), "(N, T)")
    check_shape("advantages", advantages, (rows,), "(N,)")
    check_shape("group_ids", group_ids, (rows,), "(N,)")

    shift = min(shift, length)
    marked = torch.zeros(rows, length, dtype=torch.bool, device=completion_ids.device)
    real = as_bool(completion_mask)
    row, column = (real & ((advantages > 0) | (advantages < 0))[:, None]).nonzero(as_tuple=True)
    if len(row) == 0:
        return marked
    group = torch.unique(group_ids, return_inverse=True)[1][row]
    token = torch.unique(completion_ids[row, column], return_inverse=True)[1]
    good = (advantages > 0)[row]
    last = (real * torch.arange(length, device=real.device)).amax(dim=1)
    for wanted, position in (("suffix", last[row] - column), ("prefix", column)):
        if scope in (wanted, "edges") or (scope, wanted) == ("position", "prefix"):
            found = torch.zeros_like(marked)
            found[row, position] = _shared(group, position, token, good, shift)
            if scope != "position":
                found &= (~found).cumsum(dim=1, dtype=torch.int32) <= shift
            marked[row, column] |= found[row, position]
    return marked


def _shared(group: Tensor, position: Tensor, token: Tensor, good: Tensor, shift: int) -> Tensor:
    """Whether each token stands, up to `shift` positions away, in a row of the other sign; tensors and result (K,).

    Tokens become points on a line, a stretch for each (group, token) and the position within it; stretches lie further
    apart than the shift. Ids are dense here (at most K different ones), so that groups · K · 2T stays far below 2^63.
    """
    point = (group * (token.max() + 1) + token) * (position.max() + 1 + shift) + position
    point, order = point.sort()
    good = good[order]
    near = torch.zeros_like(good)
    for side in (good, ~good):  # the last point of this side before each one, and the first one after
        before = point.masked_fill(~side, -1 - shift).cummax(0).values
        after = point.masked_fill(~side, point[-1] + 1 + shift).flip(0).cummin(0).values.flip(0)
        near |= ~side & ((point - before <= shift) | (after - point <= shift))
    return torch.empty_like(near).index_copy_(0, order, near)


def conflict_weights(mask: Tensor, advantages: Tensor, *, positive: float = 2.0, negative: float = 0.0) -> Tensor:
    """λ_{i,t}: what each token weighs in the loss.

    Args:
        mask: Conflict tokens, (N, T), as `conflict_mask` gives them.
        advantages: A_i, (N,).
        positive: λ of a conflict token where A_i > 0; a token in both runs gets it once.
        negative: λ of a conflict token where A_i < 0.

    Returns:
        λ, (N, T): 1 off conflict and where A_i = 0; fp64 for fp64 advantages, else fp32.

    Raises:
        ValueError: The shapes do not fit.

    >>> conflict_weights(torch.tensor([[1, 0], [1, 0]]), torch.tensor([0.5, -0.5])).tolist()
    [[2.0, 1.0], [0.0, 1.0]]
    """
    if mask.dim() != 2:
        raise ValueError(f"mask: shape {tuple(mask.shape)}; valid: (N, T)")
    check_shape("advantages", advantages, (mask.shape[0],), "(N,)")
    on_conflict = torch.ones_like(advantages, dtype=result_dtype(advantages))
    on_conflict = on_conflict.masked_fill(advantages > 0, positive).masked_fill(advantages < 0, negative)
    return torch.where(as_bool(mask), on_conflict[:, None], 1.0)
