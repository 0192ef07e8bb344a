"""pass@k and maj@k against enumeration of every subset, in fractions."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from gtpo_lightning.functional import maj_at_k, maj_at_ks, pass_at_k


def mean(values):
    values = list(values)
    return float(Fraction(sum(values)) / len(values))


def enumerated_pass(correct, k):
    return mean(Fraction(any(drawn)) for drawn in itertools.combinations(correct, k))


def majority(answers):
    """The share of the right ones among the winning classes of (label, correct) pairs."""
    votes = [label for label, _ in answers if label != -1]
    winners = {label for label in votes if votes.count(label) == max(map(votes.count, votes))}
    right = {label for label, correct in answers if correct and label in winners}
    return Fraction(len(right), len(winners)) if winners else Fraction(0)


def enumerated_maj(labels, correct, k):
    return mean(map(majority, itertools.combinations(list(zip(labels, correct, strict=True)), k)))


def partitions(n, largest=None):
    """All ways to write n as a sum of sizes, largest first."""
    if n == 0:
        yield ()
    for size in range(min(n, largest or n), 0, -1):
        for rest in partitions(n - size, size):
            yield (size, *rest)


def kinds(n):
    """Every kind of n answers there is: how many are missing, sizes of the classes, which of them are right."""
    for missing in range(n + 1):
        for sizes in partitions(n - missing):
            labels = [-1] * missing + [label for label, size in enumerate(sizes) for _ in range(size)]
            for flags in itertools.product([False, True], repeat=len(sizes)):
                yield labels, [label != -1 and flags[label] for label in labels]


def shuffled(seed, labels, correct):
    order = random.Random(seed).sample(range(len(labels)), len(labels))
    return [labels[i] for i in order], [correct[i] for i in order]


class TestPassAtK:
    @pytest.mark.parametrize("n", range(1, 11))
    def test_every_count_and_k_up_to_ten_answers(self, n):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            assert pass_at_k(n, c, k) == enumerated_pass([True] * c + [False] * (n - c), k), (n, c, k)

    def test_k_01_one_right_of_four(self):
        scores = [1, 0, 0, 0]
        assert pass_at_k(len(scores), sum(scores), 4) == 1.0
        assert pass_at_k(len(scores), sum(scores), 1) == 0.25
        assert pass_at_k(len(scores), sum(scores), 2) == 0.5

    def test_k_02_more_drawn_than_there_are_is_an_error(self):
        with pytest.raises(ValueError, match=r"^k: 5; valid: an int from 1 to 2"):
            pass_at_k(2, 0, 5)
        with pytest.raises(ValueError, match=r"^k: 5; valid: an int from 1 to 2"):
            pass_at_k([8, 2], [0, 0], 5)

    def test_k_05b_the_mean_over_problems_is_not_the_value_of_pooled_counts(self):
        assert np.mean(pass_at_k(3, [3, 0], 2)) == 0.5
        assert pass_at_k(6, 3, 2) == 0.8

    def test_counts_beyond_the_range_of_floats(self):
        assert pass_at_k(4000, 1, 1000) == 0.25  # C(4000, 1000) has 975 digits
        assert pass_at_k(10**15, 1, 1) == 1e-15
        assert pass_at_k(10**6, 2, 3) == float(1 - Fraction((10**6 - 3) * (10**6 - 4), 10**6 * (10**6 - 1)))

    def test_what_comes_out_is_of_the_kind_that_went_in(self):
        assert type(pass_at_k(4, 1, 2)) is float
        assert type(pass_at_k(np.int64(4), 2.0, np.int32(1))) is float
        assert pass_at_k([4, 2], [1, 2], 1) == [0.25, 1.0]
        assert pass_at_k((4, 2), np.array([1, 2]), 1) == [0.25, 1.0]
        assert pass_at_k(4, [1, 2], 1) == pass_at_k([4, 4], [1, 2], 1) == [0.25, 0.5]
        assert pass_at_k([4, 2], 1, 1) == [0.25, 0.5]
        assert pass_at_k([], [], 1) == []

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.int64, torch.float32),
            (torch.uint8, torch.float32),
        ],
    )
    def test_tensors(self, dtype, expected):
        counts = torch.tensor([[0, 1], [2, 3]], dtype=dtype)
        result = pass_at_k(3, counts, 2)
        assert result.dtype == expected
        assert torch.equal(result, torch.tensor([[0, 2 / 3], [1, 1]], dtype=expected))
        assert torch.equal(pass_at_k(torch.full_like(counts, 3), counts, 2), result)
        assert pass_at_k(torch.tensor(3, dtype=dtype), torch.tensor(1), 2).shape == ()
        assert pass_at_k(counts[1], [1, 1], 1).tolist() == torch.tensor([1 / 2, 1 / 3], dtype=expected).tolist()

    @pytest.mark.parametrize(
        ("n", "c", "k", "message"),
        [
            (4, 5, 1, r"num_correct: 5; valid: whole numbers from 0 to 4"),
            (4, -1, 1, r"num_correct: -1; valid: whole numbers from 0 to 4"),
            (4, 1.5, 1, r"num_correct: 1\.5; valid"),
            (4, math.nan, 1, r"num_correct: nan; valid"),
            (1, True, 1, r"num_correct: True; valid"),
            (3, torch.tensor([True, False]), 1, r"num_correct: True; valid"),
            (0, 0, 1, r"num_samples: 0; valid: whole numbers from 1"),
            (math.inf, 0, 1, r"num_samples: inf; valid"),
            ("4", 0, 1, r"num_samples: '4'; valid"),
            ([4, 4], [1, 5], 1, r"num_correct: 5; valid: whole numbers from 0 to 4"),
            ([4, 4], [1, 1, 1], 1, r"num_correct: shape \(3,\); valid: \(2,\)"),
            (4, 1, 0, r"k: 0; valid: an int from 1 to 4"),
            (4, 1, 5, r"k: 5; valid: an int from 1 to 4"),
            (4, 1, 1.5, r"k: 1\.5; valid: an int from 1 to 4"),
            (4, 1, 2.0, r"k: 2\.0; valid: an int from 1 to 4"),
            (4, 1, True, r"k: True; valid: an int from 1 to 4"),
            (4, 1, None, r"k: None; valid: an int from 1 to 4"),
        ],
    )
    def test_refusals_name_argument_value_and_range(self, n, c, k, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            pass_at_k(n, c, k)


class TestMajAtK:
    @pytest.mark.parametrize("n", range(1, 8))
    def test_every_kind_of_up_to_seven_answers_and_every_k(self, n):
        for number, kind in enumerate(kinds(n)):
            labels, correct = shuffled(number, *kind)
            expected = [enumerated_maj(labels, correct, k) for k in range(1, n + 1)]
            assert maj_at_ks(labels, correct, range(1, n + 1)) == expected, (labels, correct)

    @pytest.mark.parametrize("n", [8, 9, 10])
    def test_random_labels_of_up_to_ten_answers_and_every_k(self, n):
        source = random.Random(n)
        for classes in range(1, n + 1):
            labels = [source.randrange(-1, classes) for _ in range(n)]
            right = {label for label in range(classes) if source.random() < 0.4}
            correct = [label in right for label in labels]
            for k in range(1, n + 1):
                assert maj_at_k(labels, correct, k) == enumerated_maj(labels, correct, k), (labels, correct, k)

    def test_k_07b_ties_are_shared_in_any_order(self):
        for labels in set(itertools.permutations([8, 2, 8, 2, 6])):
            assert maj_at_k(labels, [label == 2 for label in labels], 5) == 0.5

    def test_worked_by_hand(self):
        # of the 10 subsets of three: 3 hold both 2s, 3 both 8s, 4 one of each class
        assert maj_at_k([8, 2, 8, 2, 6], [False, True, False, True, False], 3) == 13 / 30
        # {7, 7}: right; {7, 3}, twice: a tie; {7, none}, twice: right; {3, none}: wrong
        assert maj_at_k([7, 7, 3, -1], [True, True, False, False], 2) == 4 / 6

    @pytest.mark.parametrize(("right", "wrong", "missing"), [(40, 24, 0), (20, 40, 4), (32, 32, 0), (1, 3, 60)])
    def test_two_classes_of_64_answers_by_the_hypergeometric_sum(self, right, wrong, missing):
        labels = [0] * right + [1] * wrong + [-1] * missing
        got = maj_at_ks(labels, [label == 0 for label in labels], range(1, 65))
        for k in range(1, 65):
            total = Fraction(0)
            for a, b in itertools.product(range(right + 1), range(wrong + 1)):
                if a + b and a >= b and k - a - b >= 0:
                    ways = math.comb(right, a) * math.comb(wrong, b) * math.comb(missing, k - a - b)
                    total += ways * (1 if a > b else Fraction(1, 2))
            assert got[k - 1] == float(total / math.comb(64, k)), k

    def test_64_different_answers_are_one_tie(self):
        labels = list(range(64))
        for right in (1, 5, 64):
            correct = [label < right for label in labels]
            assert maj_at_ks(labels, correct, range(1, 65)) == [right / 64] * 64

    def test_order_and_names_of_the_classes_do_not_matter(self):
        labels = [0] * 9 + [1] * 9 + [2] * 5 + [3] * 4 + [4, 5, 6] + [-1] * 4
        correct = [label == 1 for label in labels]
        expected = maj_at_ks(labels, correct, range(1, 35))
        for seed in range(5):
            mixed, flags = shuffled(seed, labels, correct)
            renamed = [label if label == -1 else 10**12 * (3 - label) + 7 for label in mixed]
            assert maj_at_ks(renamed, flags, range(1, 35)) == expected

    def test_missing_answers_never_vote_whatever_their_flag(self):
        for flag in (False, True):
            assert maj_at_ks([-1, -1, -1, 4], [flag, flag, flag, True], [1, 4]) == [0.25, 1.0]
            assert maj_at_ks([-1, -1, -1, 4], [flag, flag, flag, False], [1, 4]) == [0.0, 0.0]
            assert maj_at_ks([-1, -1], [flag, flag], [1, 2]) == [0.0, 0.0]

    def test_other_negative_labels_are_classes(self):
        assert maj_at_k([-2, -2, 5], [True, True, False], 3) == 1.0

    @pytest.mark.parametrize(
        ("labels", "correct"),
        [
            (torch.tensor([3, 3, 1]), torch.tensor([True, True, False])),
            (torch.tensor([3, 3, 1], dtype=torch.int16), [1, 1, 0]),
            ((3, 3, 1), torch.tensor([1.0, 1.0, 0.0])),
            (np.array([3, 3, 1]), np.array([True, True, False])),
            ([np.int64(3), torch.tensor(3), 1.0], [np.True_, torch.tensor(1), 0]),
        ],
    )
    def test_kinds_of_input(self, labels, correct):
        result = maj_at_k(labels, correct, 1)
        assert type(result) is float
        assert result == 2 / 3

    def test_several_k_come_in_their_order(self):
        assert maj_at_ks([0, 0, 1], [True, True, False], [3, 1, 3]) == [1.0, 2 / 3, 1.0]
        assert maj_at_ks([0, 0, 1], [True, True, False], []) == maj_at_ks([], [], []) == []

    @pytest.mark.parametrize(
        ("labels", "correct", "k", "message"),
        [
            ([4, 9, 4], [True, True, False], 1, r"correct: 1 of 2 answers of label 4; valid"),
            ([0, 1], [True], 1, r"correct: 1 flags; valid: 2"),
            ([0], [True, False], 1, r"correct: 2 flags; valid: 1"),
            ([], [], 1, r"k: 1; valid: an int from 1 to 0"),
            ([0, 1], [True, False], 0, r"k: 0; valid: an int from 1 to 2"),
            ([0, 1], [True, False], -1, r"k: -1; valid: an int from 1 to 2"),
            ([0, 1], [True, False], 3, r"k: 3; valid: an int from 1 to 2"),
            ([0, 1], [True, False], 1.5, r"k: 1\.5; valid: an int from 1 to 2"),
            ([0, 1], [True, False], 1.0, r"k: 1\.0; valid: an int from 1 to 2"),
            ([0, 1], [True, False], "1", r"k: '1'; valid: an int from 1 to 2"),
            ([0, 0.5], [True, False], 1, r"labels: 0\.5; valid: ints"),
            ([0, None], [True, False], 1, r"labels: None; valid: ints"),
            ([0, "a"], [True, False], 1, r"labels: 'a'; valid: ints"),
            ([0, 1], [True, None], 1, r"correct: None; valid: True and False"),
            ([0, 1], [0.5, 0.0], 1, r"correct: 0\.5; valid: True and False"),
            ([0, 1], [10, 0], 1, r"correct: 10; valid: True and False"),
            (torch.zeros(1, 2), [True, True], 1, r"labels: shape \(1, 2\); valid: \(n,\)"),
            (torch.tensor(0), [True], 1, r"labels: shape \(\); valid: \(n,\)"),
            ([0, 0], torch.ones(2, 1), 1, r"correct: shape \(2, 1\); valid: \(n,\)"),
        ],
    )
    def test_refusals_name_argument_value_and_what_is_valid(self, labels, correct, k, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            maj_at_k(labels, correct, k)
