import copy
import math
import pickle
import sys
import threading
import time
import types
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from gtpo_lightning.functional import group_advantages
from gtpo_lightning.rewards import Failure, Grade, RewardFunctions, SoftOverlong, functions
from gtpo_lightning.rewards.dispatch import WorkerStartError
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


def score(rewards, texts=("x", "y", "z"), problems=PROBLEMS, settings=None, **columns):
    return RewardFunctions(rewards, **(settings or {}))(list(texts), problems, **columns)


def failed(scores, name):
    """Rows that failed: {"error": [...], "timeout": [...]}."""
    return {kind: rows.nonzero().flatten().tolist() for kind, rows in scores.failures[name].items()}


# What is combined


def test_paper_default():
    total, parts, _ = score(None, [FULL, FULL, "<answer>2</answer>"])
    assert total.tolist() == [20.0, 10.0, 1.0]
    assert {name: part.tolist() for name, part in parts.items()} == {
        "format": [10.0, 10.0, 1.0],
        "correctness": [10.0, 0.0, 0.0],  # the paper's form: only with the full format
    }
    assert total.dtype == torch.float32
    assert all(part.dtype == torch.float32 and part.shape == (3,) for part in parts.values())


def test_weights_and_raw_parts():  # D-09b
    total, parts, _ = score({ones: 2, fours: 0.5})
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
    total, parts, _ = score([returns(nothing)])
    assert total.isnan().all()
    assert parts["bad"].isnan().all()
    total, _, _ = score([returns(nothing), ones])
    assert total.tolist() == [1.0] * 3


def test_partly_scored():  # F-01, C-12: the unscored take no part in the baseline
    problems = [Problem("a", "", "")] * 4
    total, _, _ = score(returns([1, None, 0, None]), ["", "", "", ""], problems)
    assert total[[0, 2]].tolist() == [1.0, 0.0]
    assert total[[1, 3]].isnan().all()
    assert group_advantages(total, torch.zeros(4, dtype=torch.long)).tolist() == [0.5, 0.0, -0.5, 0.0]


def test_the_sum_is_over_what_was_scored():
    total, _, _ = score({returns([1, None, None], "first"): 2.0, returns([3, 5, None], "second"): 0.5, ones: 0.0})
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


def test_no_completions():
    total, parts, failures = score(None, [], [])
    assert total.shape == parts["format"].shape == failures["format"]["error"].shape == (0,)


# Errors and time


def breaks_on(bad, error=KeyError):
    """Raises where a text is `bad`, else gives the number of texts it was called with."""

    def broken(completions):
        if bad in completions:
            raise error("why")
        return [float(len(completions))] * len(completions)

    return broken


def test_f_03b_an_exception_on_the_last_of_three():
    with pytest.warns(UserWarning, match=r"'broken' raised KeyError: 'why'.*rewards/broken/error_frac"):
        scores = score({"format": 1.0, breaks_on("z"): 2.0})
    assert scores.parts["broken"][:2].tolist() == [1.0, 1.0]
    assert scores.parts["broken"][2].isnan()
    assert scores.rewards.tolist() == [2.0, 2.0, 0.0]  # the format's 0 is left
    assert failed(scores, "broken") == {"error": [2], "timeout": []}
    assert failed(scores, "format") == {"error": [], "timeout": []}
    assert all(rows.dtype == torch.bool and rows.shape == (3,) for rows in scores.failures["broken"].values())


def test_f_03b_an_option_raises_instead():
    with pytest.raises(RuntimeError, match="reward function 'broken' raised KeyError: 'why'") as caught:
        score(["format", breaks_on("z")], settings={"on_error": "raise"})
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exit_is_an_error_and_an_interrupt_is_none():
    with pytest.warns(UserWarning, match=r"'broken' raised SystemExit: why"):
        scores = score(breaks_on("z", SystemExit))
    assert scores.parts["broken"][:2].tolist() == [1.0, 1.0]
    assert failed(scores, "broken") == {"error": [2], "timeout": []}
    with pytest.raises(RuntimeError, match="'broken' raised SystemExit: why"):
        score(breaks_on("z", SystemExit), settings={"on_error": "raise"})
    with pytest.raises(KeyboardInterrupt):
        score(breaks_on("z", KeyboardInterrupt))


def test_a_warning_comes_once():
    rewards = RewardFunctions(breaks_on("z"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rewards(["x", "y", "z"], PROBLEMS)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:reward function")
def test_every_completion_raises():
    scores = score(named("broken", lambda completions: 1 / 0))
    assert scores.rewards.isnan().all()
    assert failed(scores, "broken") == {"error": [0, 1, 2], "timeout": []}


def test_only_the_whole_batch_raises():
    def one_by_one(completions):
        assert len(completions) == 1
        return [float(ord(completions[0]))]

    scores = score(one_by_one)
    assert scores.rewards.tolist() == [120.0, 121.0, 122.0]
    assert failed(scores, "one_by_one") == {"error": [], "timeout": []}


@pytest.mark.filterwarnings("ignore:reward function")
def test_an_iterator_may_raise_and_a_call_may_spoil_its_columns():
    def lazy(completions, answer):
        texts, completions[:], answer[:] = list(completions), [], []
        for text in texts:
            if text == "y":
                raise OSError("gone")
            yield ord(text)

    scores = score(lazy)
    assert scores.parts["lazy"][[0, 2]].tolist() == [120.0, 122.0]
    assert failed(scores, "lazy") == {"error": [1], "timeout": []}


@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns([1.0]), "'bad' returned 1 values; expected 3"),
        (returns([1.0, "2", 3.0]), "'bad' returned '2'"),
        (returns([1.0, math.inf, 3.0]), "'bad' returned inf"),
        (Length(), "asks for lengths"),
    ],
)
def test_a_mistake_of_the_author_is_an_error_in_both_modes(function, message, mode):
    with pytest.raises(ValueError, match=message):
        score(function, settings={"on_error": mode})


def test_a_wrong_number_of_values_one_by_one():
    def broken(completions):
        if len(completions) > 1:
            raise KeyError
        return [1.0, 2.0]

    with pytest.raises(ValueError, match="'broken' returned 2 values; expected 1"):
        score(broken)


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_failure_is_counted_with_or_without_a_score(mode):
    values = [Failure("timeout", 0.5), Failure("error"), 2.0]
    scores = score({returns(values): 2.0}, settings={"on_error": mode})
    assert scores.rewards[[0, 2]].tolist() == [1.0, 4.0]
    assert scores.parts["bad"][[0, 2]].tolist() == [0.5, 2.0]
    assert scores.rewards[1].isnan()
    assert failed(scores, "bad") == {"error": [1], "timeout": [0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([Failure("late"), 1, 1], "'bad' returned Failure.*'late'.* at 0; valid kinds: error, timeout"),
        ([Failure("error", math.inf), 1, 1], "'bad' returned inf at 0"),
        (Failure("error"), "'bad' returned Failure"),
    ],
)
def test_refused_failures(values, message):
    with pytest.raises(ValueError, match=message):
        score(returns(values))


def test_f_02_one_of_a_batch_takes_60_seconds():
    def slow(completions, answer, lengths):
        import time

        if completions == ["y"]:
            time.sleep(60)
        return [float(answer[0]) + lengths[0]]

    start = time.monotonic()
    with pytest.warns(UserWarning, match=r"'slow' took too long: took longer than 0.5 s.*rewards/slow/timeout_frac"):
        scores = score({slow: 1.0, "tag_count": 0.5}, settings={"time_limit": 0.5}, lengths=[1, 2, 3])
    assert time.monotonic() - start < 5
    assert scores.parts["slow"][[0, 2]].tolist() == [6.0, 5.0]
    assert scores.rewards[[0, 2]].tolist() == [6.0, 5.0]
    assert scores.parts["slow"][1].isnan()
    assert failed(scores, "slow") == {"error": [], "timeout": [1]}


def test_an_import_in_every_first_call_is_named_as_a_reason(tmp_path, monkeypatch):
    (tmp_path / "heavy_to_import.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports(completions):
        import heavy_to_import

        return [heavy_to_import.answer]

    with pytest.warns(UserWarning, match=r"took longer than 0.2 s.*import at the top of its module") as caught:
        scores = score(imports, settings={"time_limit": 0.2})
    assert failed(scores, "imports") == {"error": [], "timeout": [0, 1, 2]}
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:reward function")
def test_in_a_worker_it_may_raise_die_and_return_what_it_likes():
    def odd(texts):
        import os

        import numpy

        (text,) = texts
        if text == "raise":
            raise KeyError("why")
        if text == "die":
            os._exit(1)
        return {"array": numpy.array([1.0]), "none": None, "iterator": iter([2]), "list": [None]}[text]

    texts = ["raise", "array", "die", "none", "iterator", "list"]
    scores = score({odd: 1.0}, texts, [PROBLEMS[0]] * 6, settings={"time_limit": 20})
    assert scores.rewards[[1, 4]].tolist() == [1.0, 2.0]
    assert scores.rewards[[0, 2, 3, 5]].isnan().all()
    assert failed(scores, "odd") == {"error": [0, 2], "timeout": []}
    with pytest.raises(RuntimeError, match="reward function 'odd' raised KeyError: 'why'"):
        score(odd, texts, [PROBLEMS[0]] * 6, settings={"time_limit": 20, "on_error": "raise"})


def test_in_a_worker_mistakes_are_errors_too():
    with pytest.raises(ValueError, match="'bad' returned 3 values; expected 1"):
        score(returns([1.0, 1.0, 1.0]), settings={"time_limit": 20})


def test_a_worker_that_cannot_start_names_the_function(monkeypatch):
    module = types.ModuleType("made_up_here")
    exec("def reward(completions): return [1.0]", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    with pytest.raises(RuntimeError, match=r"(?s)reward function 'reward'.*No module named 'made_up_here'"):
        score(module.reward, settings={"time_limit": 20})


def test_with_a_limit_the_built_in_eachstay_here():
    rewards = RewardFunctions(["format", "tag_count", "correct_answer", SoftOverlong(100, 20)], time_limit=0.5)
    rewards([FULL], PROBLEMS[:1], lengths=[90])
    assert all(call._pool is None for call in rewards._calls.values())


def test_a_broken_grading_process_is_not_an_unscored_answer(monkeypatch):
    def broken(pairs):
        raise WorkerStartError("no sympy here")

    monkeypatch.setattr(functions, "compare", broken)
    with pytest.raises(RuntimeError, match="no sympy here"):
        score("correct_answer")


@pytest.mark.parametrize("name", ["correctness", "correct_answer"])
def test_a_failed_comparison_gives_zero_and_is_counted(monkeypatch, name):
    grades = [Grade(True, None), Grade(False, "timeout"), Grade(False, None), Grade(False, "error")]
    seen = []
    monkeypatch.setattr(functions, "compare", lambda pairs: seen.extend(pairs) or grades)
    texts = [FULL.replace("5", str(i)) for i in range(4)]
    scores = score(name, texts, [PROBLEMS[0]] * 4)
    assert seen == [(str(i), "5") for i in range(4)]
    assert scores.parts[name].tolist() == [10.0, 0.0, 0.0, 0.0]
    assert failed(scores, name) == {"error": [3], "timeout": [1]}


@pytest.mark.parametrize("alone", [True, False])
def test_f_05_a_tower_of_powers(alone):
    texts = (
        [r"\boxed{9^{9^{9^{9}}}}"] if alone else [r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{6}", r"\boxed{5}"]
    )
    start = time.monotonic()
    for _ in range(2):  # works afterwards
        scores = score("correct_answer", texts, [PROBLEMS[0]] * len(texts))
        assert scores.rewards.tolist() == ([0.0] if alone else [10.0, 0.0, 0.0, 10.0])
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_error": "ignore"}, "on_error: 'ignore'; valid: skip, raise"),
        ({"time_limit": 0}, "time_limit: 0; valid: null, or a number above 0"),
        ({"time_limit": math.nan}, "time_limit: nan"),
        ({"time_limit": True}, "time_limit: True"),
        ({"time_limit": "1"}, "time_limit: '1'"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardFunctions(None, **settings)


def test_a_function_that_cannot_be_pickled_is_refused_at_once():
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [1.0] * len(completions)

    with pytest.raises(ValueError, match=r"rewards: 'locked'.*process.*cannot be sent.*pickle"):
        RewardFunctions(locked, time_limit=1.0)
    assert score(locked).rewards.tolist() == [1.0] * 3  # without a limit it need not be


def test_pickle():
    rewards = RewardFunctions({"format": 2, ones: 0.5, SoftOverlong(100, 20): 1})
    again = pickle.loads(pickle.dumps(rewards))
    assert again.weights == rewards.weights
    assert again([FULL], PROBLEMS[:1], lengths=[90]).rewards.tolist() == [20.0]


def test_pickle_with_a_limit():
    rewards = RewardFunctions({copy.copy: 0.5}, time_limit=20)  # a worker imports it in no time; the texts are values
    again = pickle.loads(pickle.dumps(rewards))
    for each in (rewards, again):
        assert each([3.0, 4.0], PROBLEMS[:2]).rewards.tolist() == [1.5, 2.0]


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
    total, parts, _ = score(
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
