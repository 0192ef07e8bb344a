r"""MATH in the shapes that its copies have. All rows are made up."""

import pytest

from gtpo_lightning.datamodules import MATH500, HendrycksMATH
from gtpo_lightning.datamodules.hendrycks_math import SUBJECTS, math_level
from tests.datamodules.conftest import write_table

NAMES = list(SUBJECTS.values())


def row(number, subject="Algebra", level="Level 1", gold=None):
    return {
        "problem": f"What is ${number}+1$?",
        "level": level,
        "type": subject,
        "solution": rf"Not \boxed{{0}}, so ${number}+1=\boxed{{{number + 1 if gold is None else gold}}}$.",
    }


def hub_of_seven(train=3, test=1):
    """A configuration for each subject: `train` rows of levels 1, 2, 3, ... and `test` rows."""
    sets = {}
    for place, (config, subject) in enumerate(SUBJECTS.items()):
        rows = [row(10 * place + i, subject, f"Level {1 + i % 5}") for i in range(train + test)]
        sets[config] = {"train": rows[:train], "test": rows[train:]}
    return sets


def ready(stage=None, **kwargs):
    data = HendrycksMATH(**{"val_size": 0, **kwargs})
    data.prepare_data()
    data.setup(stage)
    return data


def test_the_hubs_seven_configurations_are_joined_and_only_rows_are_asked_for(hub, told):
    hub.sets["EleutherAI/hendrycks_math"] = hub_of_seven()
    data = ready()
    assert {one[-1] for one in hub.asked} == {"train", "test"}
    assert [one.id for one in data.train_problems] == [f"math/train/{i}" for i in range(21)]
    assert [one.id for one in data.test_problems] == [f"math/test/{i}" for i in range(7)]
    assert data.val_problems == []
    problem = data.train_problems[4]
    assert (problem.question, problem.answer) == ("What is $11+1$?", "12")
    assert problem.meta == {
        "subject": "Counting & Probability",
        "level": 2,
        "solution": r"Not \boxed{0}, so $11+1=\boxed{12}$.",
    }
    (line,) = [text for text in told() if text.startswith("math/train: 21 problems from 'EleutherAI/hendrycks_math'")]
    assert "question from 'problem'" in line
    assert "solution from 'solution'" in line
    assert "subject from 'type'" in line


def test_rows_are_held_out_as_in_every_table(hub):
    hub.sets["EleutherAI/hendrycks_math"] = hub_of_seven()
    first, second = ready(val_size=6, seed=0), ready(val_size=6, seed=1)
    assert [len(first.train_problems), len(first.val_problems)] == [15, 6]
    assert [one.id for one in first.val_problems] == [one.id for one in second.val_problems]
    ids = {one.id for one in first.train_problems + first.val_problems}
    assert ids == {f"math/train/{i}" for i in range(21)}


@pytest.mark.parametrize("subjects", [["geometry", "algebra"], ["Geometry", "Algebra"]])
def test_subjects_are_chosen_and_ids_stay(hub, told, subjects):
    hub.sets["EleutherAI/hendrycks_math"] = hub_of_seven()
    data = ready("fit", subjects=subjects)
    assert [one.id for one in data.train_problems] == [f"math/train/{i}" for i in (0, 1, 2, 6, 7, 8)]
    assert {one.meta["subject"] for one in data.train_problems} == {"Algebra", "Geometry"}
    assert any("15 of 21 rows are left out, they are not of the subjects" in text for text in told())
    assert told("WARNING") == []


def test_levels_are_chosen_and_a_row_without_level_is_of_none(hub):
    sets = hub_of_seven()
    sets["precalculus"]["train"].append(row(99, "Precalculus", "Level ?"))
    hub.sets["EleutherAI/hendrycks_math"] = sets
    assert ready("fit").train_problems[-1].meta["level"] is None
    data = ready("fit", levels=[2, 3])
    assert [one.meta["level"] for one in data.train_problems] == [2, 3] * 7
    both = ready("fit", levels=[3], subjects=["counting_and_probability"])
    assert [one.id for one in both.train_problems] == ["math/train/5"]
    with pytest.raises(
        ValueError, match=r"none of the 22 rows of .* is of the subjects \['algebra'\] and of the levels"
    ):
        ready("fit", subjects=["algebra"], levels=[5])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"subjects": ["arithmetic"]}, r"subjects: \['arithmetic'\]; valid: some of \['algebra', 'counting_and"),
        ({"subjects": []}, r"subjects: \[\]; valid"),
        ({"levels": [0]}, r"levels: \[0\]; valid: some of \[1, 2, 3, 4, 5\]"),
        ({"levels": ["Level 3"]}, r"levels: \['Level 3'\]; valid"),
        ({"levels": []}, r"levels: \[\]; valid"),
    ],
)
def test_unknown_subjects_and_levels_are_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        HendrycksMATH(**wrong)


def test_levels_in_every_spelling():
    spelled = ["Level 3", "level 3", 3, 3.0, "3", "Level ?", None, "", "Level 7", "Level 35"]
    assert [math_level(value) for value in spelled] == [3, 3, 3, 3, 3, None, None, None, None, None]


def test_g15_golds_are_the_last_box_with_balanced_braces(hub):
    golds = [r"\frac{1}{2}", r"\sqrt[3]{\frac{a}{b}}", "5"]
    rows = [row(i, gold=gold) for i, gold in enumerate(golds)]
    rows.append({**row(3), "solution": r"So \fbox{7}."})
    rows.append({**row(4), "solution": r"First $\boxed 8$ and then $\boxed 9$."})
    hub.sets["my/math"] = {"default": {"train": rows}}
    assert [one.answer for one in ready("fit", source="my/math").train_problems] == [*golds, "7", "9"]


def test_rows_without_a_box_are_left_out_with_the_reason(hub, told):
    rows = [row(i) for i in range(5)]
    rows[1]["solution"] = "It is 2."
    rows[3]["solution"] = r"It is \boxed{}."
    rows[4]["problem"] = " "
    hub.sets["my/math"] = {"default": {"train": rows}}
    data = ready("fit", source="my/math")
    assert [one.id for one in data.train_problems] == ["math/train/0", "math/train/2"]
    reasons = r"no \boxed in the solution (2), no text as question (1)"
    assert told("WARNING") == [f"math/train: 3 of 5 rows give no problem and are left out: {reasons}"]


# copies


def test_all_subjects_in_one_configuration(hub):
    hub.sets["my/lighteval"] = {"default": {"train": [row(i, name) for i, name in enumerate(NAMES)], "test": [row(9)]}}
    data = ready("fit", source="my/lighteval", subjects=["number_theory"])
    assert [(one.id, one.meta["subject"]) for one in data.train_problems] == [("math/train/4", "Number Theory")]


def test_a_copy_with_answers_subjects_and_levels_as_numbers(hub):
    rows = [
        {
            "problem": "1+1?",
            "solution": r"\boxed{3}",
            "answer": answer,
            "subject": "Algebra",
            "level": 4,
            "unique_id": "a",
        }
        for answer in ("2", "", None, " ")
    ]
    hub.sets["my/benchmark"] = {"default": {"train": rows, "test": rows[:1]}}
    data = ready(source="my/benchmark")
    assert [one.answer for one in data.train_problems] == ["2", "3", "3", "3"]
    assert data.test_problems[0].meta == {"subject": "Algebra", "level": 4, "solution": r"\boxed{3}"}


def test_a_copy_without_solutions(hub):
    hub.sets["my/short"] = {"default": {"train": [{"question": "1+1?", "answer": "2"}]}}
    (problem,) = ready("fit", source="my/short").train_problems
    assert (problem.answer, problem.meta) == ("2", {"subject": None, "level": None, "solution": None})
    hub.sets["my/none"] = {"default": {"train": [{"problem": "1+1?", "hint": "2"}]}}
    with pytest.raises(
        ValueError, match=r"answer_column or solution_column: 'my/none' .*columns \['problem', 'hint'\]"
    ):
        ready("fit", source="my/none")


def test_a_copy_with_the_seven_and_one_for_all_counts_nothing_twice(hub):
    seven = hub_of_seven(train=1)
    every = [one for config in seven.values() for one in config["train"]]
    hub.sets["my/both"] = {"all": {"train": every, "test": every}, **seven}
    assert len(ready("fit", source="my/both").train_problems) == 7
    hub.sets["my/all"] = {"all": {"train": every}, "amps": {"train": every}}
    assert len(ready("fit", source="my/all").train_problems) == 7
    assert len(ready("fit", source="my/both", config="geometry").train_problems) == 1


@pytest.mark.parametrize(
    "place",
    [
        "{split}/{subject}/{number}.json",
        "MATH/{split}/{subject}/{number}.json",
        "{subject}/{split}/{number}.json",
        "{subject}/{split}.jsonl",
        "{subject}/{split}-00000-of-00001.parquet",
        "{split}/{subject}.jsonl",
        "{split}.jsonl",
    ],
)
def test_local_layouts(tmp_path, place):
    """The original archive has a file a problem; others a folder a subject, a split, or both."""
    tables = {}
    for split, count in (("train", 2), ("test", 1)):
        for config in SUBJECTS:
            for number in range(count):
                path = place.format(split=split, subject=config, number=number)
                tables.setdefault(path, []).append(row(number, SUBJECTS[config]))
    for path, rows in tables.items():
        write_table(tmp_path / path, rows[0] if path.endswith(".json") else rows)
    data = ready(source=str(tmp_path))
    assert [len(data.train_problems), len(data.test_problems)] == [14, 7]
    assert [one.id for one in data.train_problems] == [f"math/train/{i}" for i in range(14)]
    assert {one.meta["subject"] for one in data.test_problems} == set(NAMES)
    assert [one.meta["subject"] for one in ready(source=str(tmp_path), subjects=["geometry"]).test_problems] == [
        "Geometry"
    ]


def test_the_subject_is_the_folders_where_rows_have_none(tmp_path):
    for config in ("algebra", "number_theory"):
        short = {key: value for key, value in row(1).items() if key != "type"}
        write_table(tmp_path / f"train/{config}/1.json", short)
    data = ready("fit", source=str(tmp_path))
    assert [one.meta["subject"] for one in data.train_problems] == ["Algebra", "Number Theory"]
    assert len(ready("fit", source=str(tmp_path), subjects=["number_theory"]).train_problems) == 1


def test_a_folder_of_subjects_alone_is_the_training_rows(tmp_path):
    write_table(tmp_path / "train/algebra/1.json", row(1))
    write_table(tmp_path / "train/geometry/1.json", row(2))
    data = ready("fit", source=str(tmp_path / "train"))
    assert [one.id for one in data.train_problems] == ["math/train/0", "math/train/1"]


# MATH-500


def test_math500_has_the_same_golds_and_columns(hub, tmp_path):
    rows = [
        {
            "problem": "1+1?",
            "solution": r"\boxed{2}",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "t/1",
        },
        {
            "problem": "2+1?",
            "solution": r"\boxed{3}",
            "answer": None,
            "subject": "Geometry",
            "level": 5,
            "unique_id": "t/2",
        },
    ]
    hub.sets["HuggingFaceH4/MATH-500"] = {"default": {"test": rows}}
    local = MATH500(source=write_table(tmp_path / "math.jsonl", rows))
    for data in (MATH500(), local):
        data.prepare_data()
        data.setup()
        assert data.train_problems == []
        assert data.val_problems == data.test_problems
        assert [(one.id, one.answer) for one in data.test_problems] == [
            ("math500/test/0", "2"),
            ("math500/test/1", "3"),
        ]
        assert data.test_problems[1].meta == {"subject": "Geometry", "level": 5, "solution": r"\boxed{3}"}
    assert hub.asked[0] == ("HuggingFaceH4/MATH-500", None, "test")
