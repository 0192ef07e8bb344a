"""Judging: who is right, classes of equal answers, and the scores of a problem by counting subsets."""

from fractions import Fraction
from itertools import combinations

import pytest
import torch

from gtpo_lightning import Problem, Prompts, Rollout
from gtpo_lightning.judging import Sample, judge, problem_scores, samples_of


def judged(texts, gold, style="auto"):
    (result,) = judge([(Problem("p", "q", gold), [Sample(text, len(text), False) for text in texts])], style=style)
    return result


def boxed(*answers):
    return ["nothing" if answer is None else rf"so \boxed{{{answer}}}" for answer in answers]


def test_equal_answers_are_one_class_however_they_are_written():
    result = judged(boxed("1/2", r"\frac{2}{4}", "0.5", "3", "3.0", None, "x+1", "1+x", "4"), r"\frac12")
    assert [a.label for a in result.answers] == [0, 0, 0, 1, 1, -1, 2, 2, 3]
    assert [a.correct for a in result.answers] == [True] * 3 + [False] * 6


def test_h_27b_a_missing_answer_is_never_right_and_never_votes():
    result = judged(boxed(None, None, "5"), "5")
    assert [(a.correct, a.label) for a in result.answers] == [(False, -1), (False, -1), (True, 0)]
    # Of the three pairs one has no vote, two have the vote for 5.
    assert problem_scores(result, [2])["maj@2"] == pytest.approx(2 / 3)


def test_k_10_a_full_format_with_a_wrong_answer_is_wrong():
    text = "<reasoning>r</reasoning><answer>{}</answer>"
    result = judged([text.format(4), "<answer>5</answer>"], "5")
    assert [(a.correct, a.format) for a in result.answers] == [(False, True), (True, False)]


def by_counting(labels, correct, k):
    """pass@k and maj@k over all k-subsets, with nothing but counting."""
    passed, majority, subsets = 0, Fraction(0), list(combinations(range(len(labels)), k))
    for subset in subsets:
        passed += any(correct[i] for i in subset)
        votes = {}
        for i in subset:
            if labels[i] >= 0:
                votes.setdefault(labels[i], []).append(correct[i])
        most = max(map(len, votes.values()), default=0)
        winners = [flags[0] for flags in votes.values() if len(flags) == most]
        majority += Fraction(sum(winners), len(winners)) if winners else 0
    return float(Fraction(passed, len(subsets))), float(majority / len(subsets))


def test_k_07b_scores_of_a_problem_are_those_of_counting_subsets():
    result = judged(boxed("8", "2", "8", "2", "6"), "2")
    labels, correct = [a.label for a in result.answers], [a.correct for a in result.answers]
    scores = problem_scores(result, [1, 2, 3, 5])
    for k in (1, 2, 3, 5):
        expected = by_counting(labels, correct, k)
        assert (scores[f"pass@{k}"], scores[f"maj@{k}"]) == pytest.approx(expected)
    assert scores["maj@5"] == 0.5
    assert scores["avg@5"] == pytest.approx(0.4)


def test_k_02_a_k_above_n_is_left_out():
    assert sorted(problem_scores(judged(boxed("1", "1"), "5"), [1, 5])) == [
        "avg@2",
        "format",
        "length",
        "maj@1",
        "pass@1",
    ]


def test_rows_of_a_problem_need_not_be_neighbours():
    rollout = Rollout(
        prompts=Prompts(torch.zeros(2, 1), torch.ones(2, 1), [Problem("a", "q", "1"), Problem("b", "q", "2")]),
        group_ids=torch.tensor([1, 0, 1]),
        completion_ids=torch.zeros(3, 4, dtype=torch.long),
        completion_mask=torch.ones(3, 4),
        lengths=torch.tensor([4, 2, 3]),
        truncated=torch.tensor([True, False, False]),
        texts=["x", "y", "z"],
    )
    found = {problem.id: samples for problem, samples in samples_of(rollout)}
    assert found == {"a": [Sample("y", 2, False)], "b": [Sample("x", 4, True), Sample("z", 3, False)]}


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="style"):
        judged(["x"], "1", style="box")
