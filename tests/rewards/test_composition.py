import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from gtpo_lightning.functional import group_advantages
from gtpo_lightning.rewards import RewardFunctions, SoftOverlong
from gtpo_lightning.rewards.functions import correct_answer, tag_count
from gtpo_lightning.rollout import Problem

FULL = "<reasoning>2+3</reasoning><answer>5</answer>"
PROBLEMS = [
    Problem("a", "2+3?", "5"),
    Problem("b", "2+4?", "6", {"level": 2}),
    Problem("c", "1+1?", "2", {"topic": "+"}),
]


def ones(completions):
    return [1.0] * len(completions)


def fours(completions):
    return [4.0] * len(completions)


def constant(completions, value):
    return [value] * len(completions)


class Length:
    def __call__(self, completions, lengths):
        return lengths


class NeedsArguments:
    def __init__(self, limit):
        self.limit = limit


def named(name, function):
    function.__name__ = name
    return function


def returns(values, name="bad"):
    return named(name, lambda completions: values)


def score(rewards, texts=("x", "y", "z"), problems=PROBLEMS, **columns):
    return RewardFunctions(rewards)(list(texts), problems, **columns)


# What is combined


def test_paper_default():
    total, parts = score(None, [FULL, FULL, "<answer>2</answer>"])
    assert total.tolist() == [20.0, 10.0, 1.0]
    assert {name: part.tolist() for name, part in parts.items()} == {
        "format": [10.0, 10.0, 1.0],
        "correctness": [10.0, 0.0, 0.0],  # the paper's form: only with the full format
    }
    assert total.dtype == torch.float32
    assert all(part.dtype == torch.float32 and part.shape == (3,) for part in parts.values())


def test_weights_and_raw_parts():  # D-09b
    total, parts = score({ones: 2, fours: 0.5})
    assert total.tolist() == [4.0] * 3
    assert parts["ones"].tolist() == [1.0] * 3
    assert parts["fours"].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        (None, {"format": 1.0, "correctness": 1.0}),
        ("tag_count", {"tag_count": 1.0}),
        (["format", "gtpo_lightning.rewards.functions.tag_count", ones], {"format": 1, "tag_count": 1, "ones": 1}),
        ({"format": 1, "correct_answer": "1e-1"}, {"format": 1.0, "correct_answer": 0.1}),  # G-23: YAML's string
        ({"format": 0}, {"format": 0.0}),
        (ones, {"ones": 1.0}),
        ((ones, fours), {"ones": 1.0, "fours": 1.0}),
        (Length(), {"Length": 1.0}),
        ([Length], {"Length": 1.0}),
        ([partial(constant, value=2.0)], {"constant": 1.0}),
        ([SoftOverlong(100, 20)], {"SoftOverlong": 1.0}),
        ("statistics.mean", {"mean": 1.0}),
    ],
)  # fmt: skip
def test_forms(rewards, weights):
    functions = RewardFunctions(rewards)
    assert functions.weights == weights
    assert functions.names == list(weights)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("formt", "'formt'.*format, correctness, correct_answer, tag_count"),
        (["no.such.module"], "no.such.module"),
        ("gtpo_lightning.rewards.functions.missing", "missing"),
        ("math.pi", "cannot be called"),
        (".format", "cannot be found"),
        ({"format": math.nan}, "weight nan of 'format'.*finite"),
        ({"format": math.inf}, "weight inf"),
        ({"format": "much"}, "'much'"),
        ({"format": None}, "None"),
        ({"format": True}, "True"),
        ([], "empty"),
        ({}, "empty"),
        (5, "5"),
        ([5], "5"),
        (NeedsArguments, "needs arguments"),
        (["format", "format"], "both named 'format'"),
        ([ones, named("ones", lambda completions: None)], "both named 'ones'"),
        ([Length(), Length()], "both named 'Length'"),
    ],
)
def test_refused_at_construction(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardFunctions(rewards)


# What a function gets


def test_all_columns_for_keyword_arguments():
    seen = {}

    def spy(completions, **columns):
        seen.update(columns, completions=completions)
        return [0.0] * len(completions)

    score(
        spy,
        completion_ids=[[1, 2], [3], []],
        lengths=torch.tensor([2, 1, 0]),
        truncated=torch.tensor([True, False, False]),
    )
    assert seen == {
        "completions": ["x", "y", "z"],
        "prompts": ["2+3?", "2+4?", "1+1?"],
        "question": ["2+3?", "2+4?", "1+1?"],
        "answer": ["5", "6", "2"],
        "id": ["a", "b", "c"],
        "completion_ids": [[1, 2], [3], []],
        "lengths": [2, 1, 0],
        "truncated": [True, False, False],
        "level": [None, 2, None],
        "topic": [None, None, "+"],
    }
    assert all(type(column) is list for column in seen.values())


def test_declared_columns_only():
    def picky(completions, level, *, lengths, unknown=7):
        return [float(level is not None) + n + u for level, n, u in zip(level, lengths, [unknown] * 3, strict=True)]

    assert score(picky, completion_ids=[[1, 2], [3], []])[0].tolist() == [9.0, 9.0, 7.0]


def test_completions_by_position_or_not_at_all():
    assert score(named("f", lambda texts: [float(len(t)) for t in texts]), ["x", "yy", ""])[0].tolist() == [
        1.0,
        2.0,
        0.0,
    ]
    assert score(
        named("f", lambda texts, answer: [float(t == a) for t, a in zip(texts, answer, strict=True)]), ["5", "5", "2"]
    )[0].tolist() == [1.0, 0.0, 1.0]
    assert score(named("f", lambda answer: [float(a) for a in answer]))[0].tolist() == [5.0, 6.0, 2.0]
    assert score(named("f", lambda *, completions, **_: [1.0] * len(completions)))[0].tolist() == [1.0] * 3


def test_a_function_cannot_change_what_the_next_one_sees():
    def vandal(completions, answer):
        completions[:] = ["spoilt"] * 3
        answer.clear()
        return [0.0] * 3

    assert score([vandal, "correct_answer"], [r"\boxed{5}"] * 3)[1]["correct_answer"].tolist() == [10.0, 0.0, 0.0]


def test_a_column_there_is_not():
    with pytest.raises(ValueError, match=r"'Length' asks for lengths.*answer, completions, id, level"):
        score(Length())


@pytest.mark.parametrize("columns", [{"completion_ids": [[1]]}, {"lengths": [1, 2]}, {"truncated": [True]}])
def test_columns_of_unequal_length(columns):
    with pytest.raises(ValueError, match=next(iter(columns))):
        score(None, **columns)


def test_problems_of_another_number():
    with pytest.raises(ValueError, match=r"problems: 1 entries.*3 completions"):
        score(None, problems=PROBLEMS[:1])


# What a function returns


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, True],
        (1, 2.5, 1),
        torch.tensor([1, 2.5, 1]),
        torch.tensor([1, 2.5, 1], dtype=torch.bfloat16, requires_grad=True),
        np.array([1, 2.5, 1]),
        [np.float32(1), torch.tensor(2.5), np.int64(1)],
        iter([1, 2.5, 1]),
    ],
    ids=["list", "tuple", "tensor", "half tensor", "array", "scalars", "iterator"],
)
def test_numbers_of_any_kind(values):
    assert score(returns(values))[0].tolist() == [1.0, 2.5, 1.0]


@pytest.mark.parametrize("nothing", [None, [None] * 3, [math.nan] * 3])
def test_nothing_scored(nothing):  # F-01
    total, parts = score([returns(nothing)])
    assert total.isnan().all()
    assert parts["bad"].isnan().all()
    total, _ = score([returns(nothing), ones])
    assert total.tolist() == [1.0] * 3


def test_partly_scored():  # F-01, C-12: the unscored take no part in the baseline
    problems = [Problem("a", "", "")] * 4
    total, _ = score(returns([1, None, 0, None]), ["", "", "", ""], problems)
    assert total[[0, 2]].tolist() == [1.0, 0.0]
    assert total[[1, 3]].isnan().all()
    assert group_advantages(total, torch.zeros(4, dtype=torch.long)).tolist() == [0.5, 0.0, -0.5, 0.0]


def test_the_sum_is_over_what_was_scored():
    total, _ = score({returns([1, None, None], "first"): 2.0, returns([3, 5, None], "second"): 0.5, ones: 0.0})
    assert total[:2].tolist() == [3.5, 2.5]
    assert total[2].isnan()  # weight 0 is evaluated and logged, it does not score


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "'bad' returned 2 values; expected 3"),
        ([1.0] * 4, "'bad' returned 4 values; expected 3"),
        (1.0, "'bad' returned float 1.0; expected 3"),
        ("abc", "'bad' returned str"),
        ({"a": 1, "b": 2, "c": 3}, "'bad' returned dict"),
        (torch.tensor(1.0), "'bad' returned float"),
        (torch.ones(3, 1), r"'bad' returned \[1.0\] at 0"),
        ([1.0, "2", 3.0], "'bad' returned '2' at 1; expected a finite number"),
        ([1.0, [2.0], 3.0], "'bad' returned .* at 1"),
        ([1.0, 2j, 3.0], "'bad' returned 2j at 1"),
        ([1.0, math.inf, 3.0], "'bad' returned inf at 1"),
        ([1.0, -math.inf, 3.0], "'bad' returned -inf at 1"),
        ([1.0, 1e39, 3.0], "'bad' returned 1e[+]39 at 1"),
        ([1.0, 10**400, 3.0], "'bad' returned 1000"),
    ],
)
def test_refused_values(values, message):
    with pytest.raises(ValueError, match=message):
        score(returns(values))


def test_an_exception_names_the_function():
    def broken(completions):
        raise KeyError("why")

    with pytest.raises(RuntimeError, match="reward function 'broken' raised KeyError: 'why'") as caught:
        score(["format", broken])
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_completions():
    total, parts = score(None, [], [])
    assert total.shape == (0,)
    assert parts["format"].shape == (0,)


def test_pickle():
    rewards = RewardFunctions({"format": 2, ones: 0.5, SoftOverlong(100, 20): 1})
    again = pickle.loads(pickle.dumps(rewards))
    assert again.weights == rewards.weights
    assert again([FULL], PROBLEMS[:1], lengths=[90])[0].tolist() == [20.0]


# The functions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FULL, 1.0),
        ("<answer>5</answer><reasoning>2+3</reasoning>", 0.5),
        ("<reasoning>2+3</reasoning><answer>5", 0.375),
        ("<answer>5</answer>", 0.25),
        ("<answer>5</answer></answer>", 0.125),
        (FULL + "5", 0.5),
        (FULL + "</answer>", 0.375),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_tag_count(text, expected):
    assert tag_count([text]) == [expected]


def test_correct_answer_asks_for_no_format():
    texts = [FULL, "<answer>5</answer>", r"\boxed{5}", "#### 5", "5", "<answer>55</answer>"]
    assert correct_answer(texts, ["5"] * 6) == [10.0, 10.0, 10.0, 10.0, 0.0, 0.0]


def test_soft_overlong():  # F-07
    total, parts = score(
        SoftOverlong(maximum=100, cache=20), [""] * 6, [PROBLEMS[0]] * 6, lengths=[80, 90, 100, 101, 79, 5000]
    )
    assert total.tolist() == [0.0, -0.5, -1.0, -1.0, 0.0, -1.0]
    assert list(parts) == ["SoftOverlong"]


@pytest.mark.parametrize(
    ("maximum", "cache", "message"),
    [(0, 1, "maximum: 0"), (10, 0, "cache: 0"), (10, 11, "cache: 11"), (1.5, 1, "maximum"), (10, True, "cache")],
)
def test_soft_overlong_refuses(maximum, cache, message):
    with pytest.raises(ValueError, match=message):
        SoftOverlong(maximum, cache)


def test_no_logger_is_needed(monkeypatch, tmp_path):  # G-20
    monkeypatch.chdir(tmp_path)
    assert score(None)[0].tolist() == [0.0] * 3
    assert list(tmp_path.iterdir()) == []
