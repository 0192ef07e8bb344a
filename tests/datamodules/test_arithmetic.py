import re
from collections import Counter
from random import Random

import pytest

from gtpo_lightning.datamodules import Arithmetic
from gtpo_lightning.datamodules.arithmetic import questions
from gtpo_lightning.datamodules.teacher import Teacher, solve

EXPRESSIONS = {1: r"\d\+\d=", 2: r"\d\d\+\d=", 3: r"\d\d\+\d\d=", 4: r"\d\*\d\+\d="}
FILLERS = "so|ok|now|then|we|get|let|hmm"
CLEAN = re.compile(r"<reasoning>([^<]*)</reasoning><answer>(\d+)</answer>")


def made(split="train", **kwargs):
    data = Arithmetic(**kwargs)
    data.setup()
    return {"train": data.train_problems, "val": data.val_problems, "test": data.test_problems}[split]


def texts(problems):
    return [(problem.id, problem.question, problem.answer, problem.meta) for problem in problems]


def test_every_row_is_right():
    """Questions against Python's own arithmetic, each worked step too."""
    for split in ("train", "val", "test"):
        for problem in made(split, size=2000):
            level = problem.meta["level"]
            assert re.fullmatch(EXPRESSIONS[level], problem.question)
            assert eval(problem.question[:-1]) == int(problem.answer)
            steps = problem.meta["solution"].split(",")
            for step in steps:
                left, right = step.split("=")
                assert eval(left) == int(right)
            assert steps[-1].split("=")[1] == problem.answer
            assert len(steps) == {1: 1, 2: 2, 3: 3, 4: 2}[level]
            target = f"<reasoning>{problem.meta['solution']}</reasoning><answer>{problem.answer}</answer>"
            assert problem.meta["target"] == target
            if level == 3:
                assert int(problem.answer) < 100


@pytest.mark.parametrize(
    ("level", "numbers", "steps", "answer"),
    [
        (1, (3, 4), "3+4=7", "7"),
        (1, (9, 8), "9+8=17", "17"),
        (2, (17, 5), "7+5=12,10+12=22", "22"),
        (2, (95, 7), "5+7=12,90+12=102", "102"),
        (3, (17, 25), "10+20=30,7+5=12,30+12=42", "42"),
        (4, (3, 4, 5), "3*4=12,12+5=17", "17"),
    ],
)
def test_worked_steps_by_hand(level, numbers, steps, answer):
    target = f"<reasoning>{steps}</reasoning><answer>{answer}</answer>"
    assert Teacher().write(solve(level, numbers), Random(0)) == (steps, answer)
    assert Teacher().target(solve(level, numbers), Random(0)) == target


def test_a_fifth_of_each_level_is_held_out_by_distinct_question():
    sizes = {1: 100, 2: 900, 3: sum(1 for a in range(10, 100) for b in range(10, 100) if a + b < 100), 4: 1000}
    assert sizes[3] == 3240
    for level, size in sizes.items():
        parts = [questions(level, split) for split in ("train", "val", "test")]
        assert [len(part) for part in parts] == [size * 8 // 10, size // 10, size // 10]
        assert len(set().union(*parts)) == size


@pytest.mark.parametrize("kinds", [["expression"], ["word"], ["expression", "word"]])
def test_splits_never_share_a_question(kinds):
    splits = {
        split: {one.question for one in made(split, size=5000, kinds=kinds)} for split in ("train", "val", "test")
    }
    assert not splits["train"] & splits["val"]
    assert not splits["train"] & splits["test"]
    assert not splits["val"] & splits["test"]


def test_c06_rows_are_problems_of_their_own():
    problems = made(size=3000, levels=[1])
    assert [problem.id for problem in problems] == [f"arithmetic/train/{i:06d}" for i in range(3000)]
    assert len({problem.question for problem in problems}) == 80


def test_held_out_questions_repeat_only_when_all_were_used():
    problems = made("val", val_size=1024)
    assert len(problems) == 1024
    for level, distinct in {1: 10, 2: 90, 3: 324, 4: 100}.items():
        counts = Counter(one.question for one in problems if one.meta["level"] == level)
        assert sum(counts.values()) == 256
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == min(256, distinct)


def test_training_rows_depend_on_the_seed_and_evaluation_does_not():
    noise = {"size": 50, "noise": 0.5, "filler": 0.4, "format_noise": 0.3}
    assert texts(made(seed=1, **noise)) == texts(made(seed=1, **noise))
    assert texts(made(seed=1, **noise)) != texts(made(seed=2, **noise))
    assert texts(made(seed=1, **{**noise, "size": 80}))[:50] == texts(made(seed=1, **noise))
    assert texts(made("val", seed=1, **noise)) == texts(made("val", seed=2))
    assert texts(made("test", seed=1, level_weights=[1, 1, 2, 2])) == texts(made("test", seed=2))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [(None, [0.25] * 4), ([1, 1, 2, 2], [1 / 6, 1 / 6, 1 / 3, 1 / 3]), ([0, 1, 0, 3], [0, 0.25, 0, 0.75])],
)
def test_levels_are_drawn_by_weight(weights, shares):
    """Within four standard errors of the share."""
    counts = Counter(one.meta["level"] for one in made(size=8000, level_weights=weights))
    for level, share in zip((1, 2, 3, 4), shares, strict=True):
        assert abs(counts[level] / 8000 - share) <= 4 * (share * (1 - share) / 8000) ** 0.5


def test_levels_and_kinds_can_be_chosen():
    problems = made(size=400, levels=[4, 2], kinds=["word", "expression"], kind_weights=[3, 1])
    assert {one.meta["level"] for one in problems} == {2, 4}
    assert 260 < sum(one.meta["kind"] == "word" for one in problems) < 340


# the noisy teacher


def parse(target):
    """Steps as (operands, operator, result) and the answer of a well-formed expression target; else None."""
    match = CLEAN.fullmatch(target)
    if match is None:
        return None
    steps = []
    for step in match[1].split(","):
        a, operator, b, result = re.fullmatch(rf"(?:{FILLERS})*(\d+)([+*])(\d+)=(\d+)", step).groups()
        steps.append((int(a), operator, int(b), int(result)))
    return steps, int(match[2])


def test_the_noise_is_that_of_the_recipe():
    """Rates within four standard errors, from the texts alone: q per result and answer, q_f, and the ways to break."""
    problems = made(size=12000, noise=0.2, format_noise=0.1, filler=0.4)
    wrong = written = broken = fillers = steps_seen = 0
    offsets = Counter()
    ways = Counter()
    for problem in problems:
        parsed = parse(problem.meta["target"])
        if parsed is None:
            broken += 1
            target = problem.meta["target"]
            missing = [tag for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>") if tag not in target]
            if missing:
                assert len(missing) == 1
                ways[missing[0]] += 1
            elif target.endswith("</answer></answer>"):
                ways["doubled"] += 1
            else:
                assert re.search(r"<answer>(\d+)</answer>\1$", target)
                ways["repeated"] += 1
            continue
        steps, answer = parsed
        fillers += len(re.findall(FILLERS, problem.meta["target"].removeprefix("<reasoning>").split("<")[0]))
        steps_seen += len(steps)
        previous = None
        for a, operator, b, result in steps:
            exact = a * b if operator == "*" else a + b
            written += 1
            if result != exact:
                wrong += 1
                if exact >= 10:
                    offsets[result - exact] += 1
            previous = result
        written += 1
        if answer != previous:
            wrong += 1
            if previous >= 10:
                offsets[answer - previous] += 1
        assert problem.meta["solution"].split("=")[-1] == problem.answer

    def near(count, total, share):
        assert abs(count / total - share) < 4 * (share * (1 - share) / total) ** 0.5

    near(wrong, written, 0.2)
    near(broken, len(problems), 0.1)
    assert set(offsets) == {-10, -2, -1, 1, 2, 10}
    for offset in offsets:
        near(offsets[offset], sum(offsets.values()), 1 / 6)
    near(ways["doubled"], broken, 0.2)
    near(ways["repeated"], broken, 0.2)
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        near(ways[tag], broken, 0.15)
    # Words come as long as a draw falls below 0.4: 0.4 / 0.6 words a step, with variance 0.4 / 0.36.
    assert abs(fillers / steps_seen - 2 / 3) < 4 * (0.4 / 0.36 / steps_seen) ** 0.5


def test_later_steps_go_on_from_the_written_number_and_none_is_negative():
    problems = made(size=3000, levels=[4], noise=0.5)
    followed = 0
    for problem in problems:
        (a, _, b, first), (carried, _, _, second) = parse(problem.meta["target"])[0]
        assert carried == first
        followed += first != a * b
        assert min(first, second) >= 0
    assert followed > 1000


def test_every_row_has_its_own_draw():
    problems = made(size=4000, levels=[1], noise=0.3, filler=0.4)
    ((question, count),) = Counter(one.question for one in problems).most_common(1)
    targets = {one.meta["target"] for one in problems if one.question == question}
    assert count > 50
    assert len(targets) > 25


def test_held_out_targets_stay_clean():
    for split in ("val", "test"):
        for one in made(split, size=10, noise=0.9, format_noise=0.9, filler=0.9):
            assert one.meta["target"] == f"<reasoning>{one.meta['solution']}</reasoning><answer>{one.answer}</answer>"


def test_completions_fit_the_recipes_length():
    """28 tokens: tags and filler words are one token each, characters the others, plus the end: 21 to 22 on average."""
    token = re.compile(rf"</?reasoning>|</?answer>|{FILLERS}|[\d+*=,]")
    lengths = []
    for one in made(size=8000, noise=0.2, format_noise=0.1, filler=0.4):
        assert token.sub("", one.meta["target"]) == ""
        lengths.append(len(token.findall(one.meta["target"])) + 1)
        assert len(token.findall(one.question)) <= 7
    assert 21 <= sum(lengths) / len(lengths) < 22.5
    assert max(lengths) <= 48


# word problems


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_word_problems_hold_the_numbers_that_give_the_answer(level):
    problems = made(size=300, levels=[level], kinds=["word"])
    assert len({problem.question for problem in problems}) > 250
    for problem in problems:
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert problem.question.endswith("?")
        assert "{" not in problem.question
        assert not re.search(r"\b1 \w+s\b|\b(0|[2-9]|\d\d+) (apple|coin|bag|tin)\b", problem.question)
        answer = numbers[0] * numbers[1] + numbers[2] if level == 4 else sum(numbers)
        assert len(numbers) == (3 if level == 4 else 2)
        assert answer == int(problem.answer)
        for step in problem.meta["solution"].split(", "):
            left, right = step.split(" = ")
            assert eval(left) == int(right)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size: 0; valid"),
        ({"val_size": -1}, "val_size: -1; valid"),
        ({"test_size": 1.5}, "test_size: 1.5; valid"),
        ({"levels": []}, r"levels: \[\]; valid: some of \[1, 2, 3, 4\]"),
        ({"levels": [1, 5]}, r"levels: \[1, 5\]; valid"),
        ({"levels": [1, 1]}, r"levels: \[1, 1\]; valid"),
        ({"kinds": ["sums"]}, r"kinds: \['sums'\]; valid: some of \['expression', 'word'\]"),
        ({"level_weights": [1]}, r"level_weights: \[1\]; valid: 4 numbers"),
        ({"level_weights": [0, 0, 0, 0]}, "level_weights: .*valid: 4 numbers >= 0, not all 0"),
        ({"level_weights": [1, 1, 1, -1]}, "level_weights: .*valid"),
        ({"noise": 1.1}, "noise: 1.1; valid: 0 to 1"),
        ({"format_noise": -0.1}, "format_noise: -0.1; valid"),
        ({"filler": 1.0}, "filler: 1.0; valid"),
        ({"batch_size": 0}, "batch_size: 0; valid"),
    ],
)
def test_c15b_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**wrong)


def test_no_validation_rows_are_possible():
    data = Arithmetic(size=3, val_size=0, test_size=0)
    data.setup()
    assert data.val_problems == data.test_problems == []
