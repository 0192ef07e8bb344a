"""pass@k and maj@k of a set of problems, as metrics that hold over ranks: each problem once, whoever sends it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from gtpo_lightning.functional import pass_at_k
from gtpo_lightning.functional._counts import as_flags, as_list, whole_number
from gtpo_lightning.functional.votes import Votes, count_votes, majority_curve

__all__ = ["MajAtK", "PassAtK"]


class _ScoreAtK(Metric):
    """Keeps a record of whole numbers for each problem; a subclass says which, and what they are worth.

    A record is (two halves of the id's hash, length of the rest, n, what the subclass counts). The records of an
    update are one int64 tensor, in a list that torchmetrics concatenates over ranks; a problem that comes twice is
    found when the value is asked for, so `forward`, `merge_state` and the ranks need nothing special.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    # Name of the state. Each class has its own: a metric collection shares states of equal name and content.
    _state: str

    def __init__(self, ks: int | Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ks = _check_ks(ks)
        self.add_state(self._state, default=[], dist_reduce_fx="cat")

    def update(
        self, problem_ids: Sequence[str], labels: Sequence[int] | Tensor, correct: Sequence[bool] | Tensor
    ) -> None:
        """Adds problems with all their samples.

        Args:
            problem_ids: The problem of each sample, (N,), str; samples of a problem need not be neighbours.
            labels: Class of each sample's answer among those of its problem, (N,): −1 for no answer. Comparable within
                this call only, which is why all samples of a problem must come in it.
            correct: Whether each answer is right, (N,): bools, or 0 and 1.

        Raises:
            ValueError: Unequal lengths, ids that are no strings, or what the function of the score refuses; nothing is
                added then.
        """
        numbers: list[int] = []
        for problem_id, names, flags in _by_problem(problem_ids, labels, correct):
            counts = [len(names), *self._count(names, flags)]
            numbers += [*_hashed(problem_id), len(counts), *counts]
        if numbers:
            getattr(self, self._state).append(torch.tensor(numbers, dtype=torch.int64, device=self.device))

    def compute(self) -> dict[int, float]:
        """The mean over all problems seen, of all ranks, for each k that no problem has too few samples for."""
        problems = list(self._problems().values())
        ks = [k for k in self.ks if problems and k <= min(n for n, *_ in problems)]
        scores = [self._scores(ks, *counts) for counts in problems]
        # fsum: the same value for any order of the problems, so for any number of ranks
        return {k: math.fsum(column) / len(problems) for k, column in zip(ks, zip(*scores, strict=True), strict=True)}

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gathers the records of all ranks; see torchmetrics.

        For a rank without any record torchmetrics would send floats, which do not fit the int64 of the others.
        """
        records = getattr(self, self._state)
        if isinstance(records, list) and not records:
            records.append(torch.empty(0, dtype=torch.int64, device=self.device))
        super().sync(*args, **kwargs)

    def set_dtype(self, dst_type: str | torch.dtype) -> Metric:
        """Changes nothing: hashes and counts are whole numbers and stay so."""
        return self

    def _problems(self) -> dict[tuple[int, int], list[int]]:
        """(n, counts of the subclass) by hashed id; of a problem that came more than once the first."""
        records = getattr(self, self._state)
        tensors = [records] if isinstance(records, Tensor) else records  # one tensor once gathered
        numbers = [number for tensor in tensors for number in tensor.tolist()]
        problems: dict[tuple[int, int], list[int]] = {}
        start = 0
        while start < len(numbers):
            high, low, length = numbers[start : start + 3]
            start += 3 + length
            problems.setdefault((high, low), numbers[start - length : start])
        return problems

    def _count(self, labels: Sequence[int], correct: Sequence[bool]) -> Sequence[int]:
        """What a problem's scores depend on besides n."""
        raise NotImplementedError

    def _scores(self, ks: Sequence[int], n: int, *counts: int) -> list[float]:
        """A problem's score for each k."""
        raise NotImplementedError


class PassAtK(_ScoreAtK):
    """Mean over problems of the chance that one of k answers is right.

        (1 / P) Σ_p [1 − C(n_p − c_p, k) / C(n_p, k)]

    See `gtpo_lightning.functional.pass_at_k`. `update(problem_ids, labels, correct)` takes problems with all their
    samples, `compute()` gives {k: value}. A problem id that comes again in a later update or on another rank, as
    from samplers that fill up with repeats, is ignored; the first one on the lowest rank counts. A k is left out if any
    problem has fewer samples, and nothing seen gives {}. Counts are whole numbers in any precision of the model.

    Args:
        ks: Values of k, from 1; an int or several.
        **kwargs: Those of `torchmetrics.Metric`.

    Raises:
        ValueError: `ks` is empty or holds something else than ints from 1.

    Example:
        >>> metric = PassAtK([1, 2, 8])
        >>> metric.update(["a", "a", "b", "b"], [0, 1, 0, 1], [True, False, False, False])
        >>> metric.update(["a", "a"], [0, 0], [True, True])  # seen
        >>> metric.compute()
        {1: 0.25, 2: 0.5}
    """

    _state = "pass_counts"

    def _count(self, labels: Sequence[int], correct: Sequence[bool]) -> Sequence[int]:
        """(c,); labels make no difference."""
        return [sum(correct)]

    def _scores(self, ks: Sequence[int], n: int, *counts: int) -> list[float]:
        return [pass_at_k(n, counts[0], k) for k in ks]


class MajAtK(_ScoreAtK):
    """Mean over problems of the chance that the majority of k answers is right.

    See `gtpo_lightning.functional.maj_at_k` for the score of a problem, and `PassAtK` for all else.

    Args:
        ks: Values of k, from 1; an int or several.
        **kwargs: Those of `torchmetrics.Metric`.

    Raises:
        ValueError: `ks` is empty or holds something else than ints from 1.

    Example:
        >>> metric = MajAtK(3)
        >>> metric.update(["a"] * 3 + ["b"] * 3, [0, 0, 1, -1, -1, 0], [True, True, False, False, False, True])
        >>> metric.compute()
        {3: 1.0}
    """

    _state = "vote_counts"

    def _count(self, labels: Sequence[int], correct: Sequence[bool]) -> Sequence[int]:
        """Sizes of the classes, those of wrong answers with a minus sign."""
        votes = count_votes(labels, correct)
        return [*votes.right, *(-size for size in votes.wrong)]

    def _scores(self, ks: Sequence[int], n: int, *counts: int) -> list[float]:
        right = tuple(size for size in counts if size > 0)
        wrong = tuple(-size for size in counts if size < 0)
        curve = majority_curve(Votes(n - sum(right) - sum(wrong), right, wrong))
        return [curve[k - 1] for k in ks]


def _check_ks(ks: Any) -> tuple[int, ...]:
    values = list(ks) if isinstance(ks, Sequence) else [ks]
    numbers = [whole_number("ks", k, "an int from 1, or a list of them") for k in values]
    if not numbers or min(numbers) < 1 or any(isinstance(k, float) for k in values):
        raise ValueError(f"ks: {ks!r}; valid: an int from 1, or a list of them")
    return tuple(dict.fromkeys(numbers))


def _by_problem(
    problem_ids: Sequence[str], labels: Sequence[int] | Tensor, correct: Sequence[bool] | Tensor
) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Each problem with the labels and flags of its samples."""
    names, flags = as_list("labels", labels), as_flags(correct)
    if not len(problem_ids) == len(names) == len(flags):
        raise ValueError(
            f"problem_ids, labels, correct: lengths {len(problem_ids)}, {len(names)}, {len(flags)}; valid: equal ones"
        )
    problems: dict[str, tuple[list[int], list[bool]]] = {}
    for problem_id, name, flag in zip(problem_ids, names, flags, strict=True):
        if not isinstance(problem_id, str):
            raise ValueError(f"problem_ids: {problem_id!r}; valid: strings")
        samples = problems.setdefault(problem_id, ([], []))
        samples[0].append(name)
        samples[1].append(flag)
    return ((problem_id, *samples) for problem_id, samples in problems.items())


def _hashed(problem_id: str) -> tuple[int, int]:
    """128 bits of an id, for a gather of numbers: two ids of a data set never meet in them by chance."""
    digest = hashlib.blake2b(problem_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big", signed=True), int.from_bytes(digest[8:], "big", signed=True)
