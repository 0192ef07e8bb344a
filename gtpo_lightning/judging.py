"""Judging sampled completions: extracted answers, who is right, classes of equal answers, scores of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_lightning.functional import maj_at_ks, pass_at_k
from gtpo_lightning.rewards import compare, extract_answer, format_reward
from gtpo_lightning.rewards.format import FULL_FORMAT
from gtpo_lightning.rollout import Problem, Rollout

__all__ = ["Answer", "JudgedProblem", "Sample", "judge", "problem_scores", "samples_of"]


@dataclass(frozen=True)
class Sample:
    """One completion of a problem, as an engine returned it.

    Args:
        completion: Its text.
        length: Its tokens.
        truncated: Whether the length limit cut it.
    """

    completion: str
    length: int
    truncated: bool


@dataclass(frozen=True)
class Answer(Sample):
    """One judged completion.

    Args:
        extracted: The answer in it; None if there is none.
        correct: Whether it equals the reference; never for a missing answer.
        format: Whether the completion is in full format.
        label: Class of equal answers within the problem: 0 for right ones, −1 for no answer.
        failure: `timeout` or `error` where the comparison with the reference ended so (and counts as wrong).
    """

    extracted: str | None
    correct: bool
    format: bool
    label: int
    failure: str | None = None


@dataclass(frozen=True)
class JudgedProblem:
    """A problem with its n judged completions."""

    problem: Problem
    answers: tuple[Answer, ...]


def samples_of(rollout: Rollout) -> list[tuple[Problem, list[Sample]]]:
    """The problems of a rollout with their completions, in the order of the rows."""
    problems: Sequence[Problem] = rollout.prompts.problems
    found: dict[int, list[Sample]] = {}
    columns = (rollout.group_ids, rollout.lengths, rollout.truncated)
    for text, group, length, cut in zip(rollout.texts, *(column.tolist() for column in columns), strict=True):
        found.setdefault(group, []).append(Sample(text, length, cut))
    return [(problems[group], samples) for group, samples in found.items()]


def judge(sampled: Sequence[tuple[Problem, Sequence[Sample]]], *, style: str = "auto") -> list[JudgedProblem]:
    """Judges completions of several problems; what needs a symbolic comparison is asked in one batch.

    Two answers are of one class if `is_equivalent` finds them equal; each wrong one is compared with the first of each
    class so far. All right answers are one class, since each equals the reference.

    Args:
        sampled: Problems with their completions.
        style: Where the answer stands, one of `ANSWER_STYLES`.

    Returns:
        The judged problems, in the same order.

    Raises:
        ValueError: Unknown `style`.

    Example:
        >>> texts = ["<answer>0.5</answer>", "<answer>7</answer>", "<answer>1/2</answer>", "7", "<answer>7.0</answer>"]
        >>> (judged,) = judge([(Problem("a", "1:2", "0.5"), [Sample(text, 3, False) for text in texts])])
        >>> [answer.correct for answer in judged.answers], [answer.label for answer in judged.answers]
        ([True, False, True, False, False], [0, 1, 0, -1, 1])
    """
    extracted = [[extract_answer(sample.completion, style=style) for sample in samples] for _, samples in sampled]
    golds = [problem.answer for problem, _ in sampled]
    grades = iter(
        compare([(answer, gold) for answers, gold in zip(extracted, golds, strict=True) for answer in answers])
    )
    judged = []
    for (problem, samples), answers in zip(sampled, extracted, strict=True):
        graded = [next(grades) for _ in samples]
        labels = _labels(answers, [grade.equal for grade in graded])
        judged.append(
            JudgedProblem(
                problem,
                tuple(
                    Answer(
                        sample.completion,
                        sample.length,
                        sample.truncated,
                        extracted=answer,
                        correct=grade.equal,
                        format=format_reward(sample.completion) == FULL_FORMAT,
                        label=label,
                        failure=grade.failure,
                    )
                    for sample, answer, grade, label in zip(samples, answers, graded, labels, strict=True)
                ),
            )
        )
    return judged


def _labels(answers: Sequence[str | None], correct: Sequence[bool]) -> list[int]:
    """Classes of equal answers: −1 for none, 0 for right ones, 1, 2, … for wrong ones in order of appearance."""
    wrong = [answer for answer, right in zip(answers, correct, strict=True) if answer is not None and not right]
    rest = list(dict.fromkeys(wrong))
    classes: dict[str, int] = {}
    while rest:
        first, others = rest[0], rest[1:]
        same = compare([(other, first) for other in others])
        label = 1 + max(classes.values(), default=0)
        classes |= {first: label} | {other: label for other, grade in zip(others, same, strict=True) if grade.equal}
        rest = [other for other in others if other not in classes]
    return [
        -1 if answer is None else 0 if right else classes[answer]
        for answer, right in zip(answers, correct, strict=True)
    ]


def problem_scores(judged: JudgedProblem, ks: Sequence[int]) -> dict[str, float]:
    """Scores of one problem; those of a set are their means over its problems.

    Args:
        judged: The problem with n answers.
        ks: Values of k; those above n are left out.

    Returns:
        `pass@{k}` and `maj@{k}` for each k, `avg@{n}` (share of right answers), `format` (share in full format) and
        `length` (mean, tokens).

    Example:
        >>> right, wrong = Answer("5", 1, False, "5", True, False, 0), Answer("6", 2, False, "6", False, False, 1)
        >>> problem_scores(JudgedProblem(Problem("a", "2+3=", "5"), (right, wrong)), [1, 2])
        {'pass@1': 0.5, 'pass@2': 1.0, 'maj@1': 0.5, 'maj@2': 0.5, 'avg@2': 0.5, 'format': 0.0, 'length': 1.5}
    """
    answers = judged.answers
    count = len(answers)
    ks = [k for k in ks if k <= count]
    correct = [answer.correct for answer in answers]
    majority = maj_at_ks([answer.label for answer in answers], correct, ks)
    scores = {f"pass@{k}": pass_at_k(count, sum(correct), k) for k in ks}
    scores |= {f"maj@{k}": value for k, value in zip(ks, majority, strict=True)}
    scores[f"avg@{count}"] = sum(correct) / count
    scores["format"] = sum(answer.format for answer in answers) / count
    scores["length"] = sum(answer.length for answer in answers) / count
    return scores
