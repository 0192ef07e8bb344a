"""Conflict masks against a double loop over rows and tokens."""

import random
import time
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gtpo_lightning.functional import conflict_mask, conflict_weights

SCOPES = ["edges", "prefix", "suffix", "position"]


def reference(completions, advantages, groups, scope, shift=0):
    """Marks by definition; completions are lists without padding."""

    def clashes(row, place, rows):
        token = rows[row][place]
        signs = set()
        for other, tokens in enumerate(rows):
            if groups[other] == groups[row] and token in tokens[max(0, place - shift) : place + shift + 1]:
                signs.add((advantages[other] > 0) - (advantages[other] < 0))
        return {1, -1} <= signs

    def run(row, rows):
        places, missed = [], 0
        for place in range(len(rows[row])):
            if clashes(row, place, rows):
                places.append(place)
            else:
                missed += 1
            if missed > shift:
                break
        return places

    backwards = [tokens[::-1] for tokens in completions]
    marks = []
    for row, tokens in enumerate(completions):
        mark = [False] * len(tokens)
        if advantages[row] != 0:
            if scope == "position":
                mark = [clashes(row, place, completions) for place in range(len(tokens))]
            if scope in ("edges", "prefix"):
                for place in run(row, completions):
                    mark[place] = True
            if scope in ("edges", "suffix"):
                for place in run(row, backwards):
                    mark[len(tokens) - 1 - place] = True
        marks.append(mark)
    return marks


def padded(completions, length, filler):
    """Ids and mask; the padding holds whatever `filler` gives."""
    ids = [tokens + [filler() for _ in range(length - len(tokens))] for tokens in completions]
    mask = [[1] * len(tokens) + [0] * (length - len(tokens)) for tokens in completions]
    size = (len(completions), length)
    return torch.tensor(ids, dtype=torch.long).reshape(size), torch.tensor(mask).reshape(size)


def mark(completions, advantages, groups=None, scope="edges", **more):
    length = max(map(len, completions))
    ids, mask = padded(completions, length, lambda: 0)
    groups = torch.zeros(len(completions), dtype=torch.long) if groups is None else torch.tensor(groups)
    return conflict_mask(ids, mask, torch.tensor(advantages), groups, scope=scope, **more).int().tolist()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("seed", range(100))
def test_equals_the_double_loop(seed, scope):
    rng = random.Random(seed)
    rows, length = rng.randrange(1, 13), rng.randrange(1, 9)
    vocabulary = rng.choice([[1, 2], [-1, 0, 2], [-5, 2**31, 7, 2**31 - 1], [-(2**62), 2**62]])
    names = rng.choice([[0], [4, -9], [2**40, 0, 17]])
    completions = [[rng.choice(vocabulary) for _ in range(rng.randrange(length + 1))] for _ in range(rows)]
    groups = [rng.choice(names) for _ in range(rows)]
    advantages = [rng.choice([-1.5, -0.2, 0.0, 0.3, 2.0]) for _ in range(rows)]
    ids, mask = padded(completions, length, lambda: rng.choice(vocabulary))
    dtype = rng.choice([torch.bool, torch.int64, torch.float32])
    arguments = ids, mask.to(dtype), torch.tensor(advantages), torch.tensor(groups, dtype=torch.long)
    for shift in (0, 1, 2, 5, 2**70):
        result = conflict_mask(*arguments, scope=scope, shift=shift)
        expected = torch.zeros(rows, length, dtype=torch.bool)
        for row, marks in enumerate(reference(completions, advantages, groups, scope, shift)):
            expected[row, : len(marks)] = torch.tensor(marks, dtype=torch.bool)
        assert result.dtype == torch.bool
        assert torch.equal(result, expected)


def test_a_shift_finds_the_shared_end_behind_answers_of_another_length():
    # 1 text, 3 and 4 the tags of the answer, 2 the end; the answers have two tokens and one
    completions = [[1, 8, 3, 5, 6, 4, 2], [1, 9, 3, 7, 4, 2]]
    marks = [mark(completions, [1.0, -1.0], scope="suffix", shift=shift) for shift in (0, 1, 2)]
    assert marks[0] == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 0]]
    # one step over 7 reaches the tag in the short row, the long row has to step over two tokens
    assert marks[1] == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1, 0]]
    assert marks[2] == [[0, 0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1, 0]]


def test_a_run_steps_over_as_many_tokens_in_all_not_in_a_row():
    completions = [[1, 8, 2, 8, 3, 8, 4], [1, 9, 2, 9, 3, 9, 4]]
    for shift, expected in enumerate([[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 0]]):
        assert mark(completions, [1.0, -1.0], scope="prefix", shift=shift) == [expected] * 2


def test_a_shift_reaches_exactly_so_far_and_not_into_another_token_or_group():
    completions = [[5, 6, 7, 8], [1, 2, 3, 5]]
    for shift, found in ((2, 0), (3, 1)):
        marks = mark(completions, [1.0, -1.0], scope="position", shift=shift)
        assert marks == [[found, 0, 0, 0], [0, 0, 0, found]]
        assert mark(completions, [1.0, -1.0], [0, 1], scope="position", shift=shift) == [[0] * 4] * 2


@pytest.mark.parametrize("scope", SCOPES)
def test_a_larger_shift_never_marks_less(scope):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(12, (24, 20), generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.0]).repeat(8)
    masks = [conflict_mask(ids, ids < 99, advantages, torch.arange(24) // 12, scope=scope, shift=k) for k in range(22)]
    assert torch.equal(masks[0], conflict_mask(ids, ids < 99, advantages, torch.arange(24) // 12, scope=scope))
    assert all(bool((less <= more).all()) for less, more in pairwise(masks))
    assert int(masks[0].sum()) < int(masks[2].sum()) < int(masks[21].sum())


def test_partners_may_change_along_a_run():
    completions = [[1, 2, 3], [1, 9, 9], [8, 2, 7]]  # row 0 shares 1 with row 1, then 2 with row 2
    assert mark(completions, [1.0, -1.0, -1.0], scope="prefix") == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_a_run_ends_at_the_first_token_without_conflict():
    completions = [[1, 5, 3], [1, 6, 3]]
    assert mark(completions, [1.0, -1.0], scope="prefix") == [[1, 0, 0], [1, 0, 0]]
    assert mark(completions, [1.0, -1.0], scope="suffix") == [[0, 0, 1], [0, 0, 1]]
    assert mark(completions, [1.0, -1.0], scope="position") == [[1, 0, 1], [1, 0, 1]]


def test_suffix_counts_from_each_rows_last_token():
    completions = [[4, 5, 6, 7, 2], [9, 7, 2]]
    assert mark(completions, [1.0, -1.0], scope="suffix") == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]
    assert mark(completions, [1.0, -1.0], scope="position") == [[0] * 5, [0] * 5]


def test_a_token_in_both_runs_weighs_two_once():
    advantages = torch.tensor([1.0, -1.0])
    ids = torch.tensor([[1, 2], [1, 2]])
    marks = conflict_mask(ids, torch.ones(2, 2), advantages, torch.zeros(2, dtype=torch.long))
    assert conflict_weights(marks, advantages).tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_same_sign_and_zero_advantages_make_no_conflict():
    completions = [[1, 2], [1, 2], [1, 2]]
    assert mark(completions, [1.0, 2.0, 0.0]) == [[0, 0]] * 3
    assert mark(completions, [0.0, -0.0, 0.0]) == [[0, 0]] * 3
    assert mark(completions, [1.0, -2.0, 0.0]) == [[1, 1], [1, 1], [0, 0]]


def test_groups_do_not_mix():
    completions = [[1, 2], [1, 2], [1, 2], [1, 2]]
    assert mark(completions, [1.0, -1.0, 1.0, 1.0], [5, 9, 5, 5]) == [[0, 0]] * 4
    assert mark(completions, [1.0, 1.0, -1.0, 1.0], [5, 9, 5, 9]) == [[1, 1], [0, 0], [1, 1], [0, 0]]


def test_a01_pad_and_eos_share_one_id():
    eos = 2
    completions = [[7, 8, eos], [7, 8, 9, eos]]
    for filler in (eos, 7, 99):
        ids, mask = padded(completions, 6, lambda filler=filler: filler)
        marks = conflict_mask(ids, mask, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
        assert marks.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]]


def test_empty_rows_take_no_part():
    ids = torch.ones(3, 2, dtype=torch.long)
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    groups = torch.zeros(3, dtype=torch.long)
    assert not conflict_mask(ids, mask, torch.tensor([1.0, -1.0, 1.0]), groups).any()
    assert conflict_mask(ids, mask, torch.tensor([1.0, 1.0, -1.0]), groups).int().tolist() == [[1, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(shape, scope):
    ids = torch.zeros(shape, dtype=torch.long)
    advantages = torch.tensor([1.0, -1.0, 0.5])[: shape[0]]
    assert conflict_mask(ids, ids, advantages, ids.sum(1), scope=scope).shape == shape


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("scope", SCOPES)
def test_g14_no_table_of_vocabulary_and_positions(scope, shift):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(151_936, (8, 5_000), generator=generator)
    ids[:, :100] = ids[:1, :100]
    ids[0, 0], ids[1, 1] = 0, 151_935
    advantages = torch.tensor([1.0, -1.0] * 4)
    with Largest() as largest:
        conflict_mask(ids, torch.ones_like(ids), advantages, torch.zeros(8, dtype=torch.long), scope=scope, shift=shift)
    assert largest.bytes <= 2 * ids.numel() * 8


def test_speed():
    ids = torch.randint(151_936, (16, 4_096), generator=torch.Generator().manual_seed(0))
    arguments = ids, torch.ones_like(ids), torch.tensor([1.0, -1.0] * 8), torch.zeros(16, dtype=torch.long)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        conflict_mask(*arguments)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1  # some 10 ms; a Python loop over 65,536 tokens takes longer


def test_wrong_arguments_are_named():
    ids, row = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"scope: 'both'.*edges.*prefix.*suffix.*position"):
        conflict_mask(ids, ids, row, row, scope="both")
    for shift in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match=rf"shift: {shift}; valid: an integer >= 0"):
            conflict_mask(ids, ids, row, row, shift=shift)
    with pytest.raises(ValueError, match="completion_mask"):
        conflict_mask(ids, ids[:, :2], row, row)
    with pytest.raises(ValueError, match="advantages"):
        conflict_mask(ids, ids, row[:1], row)
    with pytest.raises(ValueError, match="group_ids"):
        conflict_mask(ids, ids, row, row[:1])
    with pytest.raises(ValueError, match="completion_ids"):
        conflict_mask(row, row, row, row)


class TestWeights:
    def test_values(self):
        mask = torch.tensor([[1, 0], [1, 0], [1, 1]])
        advantages = torch.tensor([0.1, -0.1, 0.0])
        assert conflict_weights(mask, advantages).tolist() == [[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
        assert conflict_weights(mask, advantages, positive=3.0, negative=0.5)[:, 0].tolist() == [3.0, 0.5, 1.0]

    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float16])
    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.int64, torch.float32)],
    )
    def test_dtypes(self, dtype, expected, mask_dtype):
        result = conflict_weights(torch.ones(1, 2).to(mask_dtype), torch.tensor([-1]).to(dtype))
        assert result.dtype == expected
        assert result.tolist() == [[0.0, 0.0]]

    def test_shapes(self):
        assert conflict_weights(torch.zeros(0, 3), torch.zeros(0)).shape == (0, 3)
        with pytest.raises(ValueError, match="advantages"):
            conflict_weights(torch.zeros(2, 3), torch.zeros(3))
        with pytest.raises(ValueError, match="mask"):
            conflict_weights(torch.zeros(3), torch.zeros(3))
