"""AIME 2024 and 2025 and AMC 2023 in the shapes that their copies have. All rows are made up."""

import pytest

from gtpo_lightning.datamodules import AIME2024, AIME2025, AMC2023
from tests.datamodules.conftest import write_table

SETS = [AIME2024, AIME2025, AMC2023]
LINK = "https://wiki.example/index.php/{year}_{name}_Problems/Problem_{number}"


def ready(kind, stage="test", **kwargs):
    data = kind(**kwargs)
    data.prepare_data()
    data.setup(stage)
    return data


def linked(year, number, name="AIME_I", answer="5"):
    url = LINK.format(year=year, name=name, number=number)
    return {"id": number, "problem": f"{year} {number}?", "solution": r"\boxed{5}", "answer": answer, "url": url}


def test_the_hubs_aime_2024(hub, told):
    rows = [{**linked(2024, i, answer=f"{i:03d}"), "year": "2024"} for i in range(3)]
    hub.sets["HuggingFaceH4/aime_2024"] = {"default": {"train": rows}}
    data = ready(AIME2024)
    assert [(one.id, one.answer) for one in data.test_problems] == [
        ("aime2024/test/0", "000"),
        ("aime2024/test/1", "001"),
        ("aime2024/test/2", "002"),
    ]
    assert data.test_problems[0].meta == {"solution": r"\boxed{5}"}
    assert set(hub.asked) == {("HuggingFaceH4/aime_2024", None, "train")}
    (line,) = told()
    assert line.startswith("aime2024/test: 3 problems from 'HuggingFaceH4/aime_2024' (split 'train'): ")
    assert "question from 'problem', answer from 'answer', solution from 'solution'" in line


def test_capital_columns_and_ids_with_the_year(hub, told):
    rows = [{"ID": f"2024-II-{i}", "Problem": f"{i}?", "Solution": "s", "Answer": i} for i in range(2)]
    rows.append({"ID": "2023-II-1", "Problem": "old?", "Solution": "s", "Answer": 1})
    hub.sets["my/aime"] = {"default": {"train": rows}}
    data = ready(AIME2024, source="my/aime")
    assert [one.answer for one in data.test_problems] == ["0", "1"]
    assert told() == [
        "aime2024/test: 2 problems from 'my/aime' (config 'default'; split 'train'): question from 'Problem', "
        "answer from 'Answer', solution from 'Solution', id from 'ID'",
        "aime2024/test: 1 of 3 rows are left out, they are not of 2024",
    ]


@pytest.mark.parametrize(("kind", "years"), [(AIME2024, (2022, 2023, 2024)), (AMC2023, (2022, 2023))])
def test_only_the_sets_year_is_kept_of_several_and_ids_stay(hub, told, kind, years):
    name = "AMC_12A" if kind is AMC2023 else "AIME_II"
    rows = [linked(year, number, name, 7.0) for number in range(2) for year in years]
    hub.sets["my/years"] = {"default": {"train": rows}}
    data = ready(kind, source="my/years")
    places = [place for place, row in enumerate(rows) if str(kind.year) in row["problem"]]
    assert [one.id for one in data.test_problems] == [f"{kind.name}/test/{place}" for place in places]
    assert {one.answer for one in data.test_problems} == {"7"}
    left = len(rows) - 2
    assert told()[-1] == f"{kind.name}/test: {left} of {len(rows)} rows are left out, they are not of {kind.year}"


def test_a_source_of_another_year_is_refused_and_one_that_says_nothing_is_taken(tmp_path):
    rows = [linked(2022, i) for i in range(2)]
    message = r"source: none of the 2 rows of .*old.jsonl' is of 2024; valid"
    with pytest.raises(ValueError, match=message):
        ready(AIME2024, source=write_table(tmp_path / "old.jsonl", rows))
    # A running number is no year, neither is a longer number.
    silent = [{"id": 2022, "problem": "?", "answer": 1, "url": "https://a.example/120232"}]
    assert len(ready(AIME2024, source=write_table(tmp_path / "silent.jsonl", silent)).test_problems) == 1


def test_the_papers_of_2025_are_joined(hub):
    for part, count in (("II", 2), ("I", 3)):
        rows = [{"question": f"{part} {i}?", "answer": f"{i}"} for i in range(count)]
        hub.sets.setdefault("opencompass/AIME2025", {})[f"AIME2025-{part}"] = {"test": rows}
    data = ready(AIME2025, source="opencompass/AIME2025")
    assert [one.question for one in data.test_problems] == ["I 0?", "I 1?", "I 2?", "II 0?", "II 1?"]
    assert [one.id for one in data.test_problems] == [f"aime2025/test/{i}" for i in range(5)]
    one = ready(AIME2025, source="opencompass/AIME2025", config="AIME2025-II")
    assert [problem.question for problem in one.test_problems] == ["II 0?", "II 1?"]


def test_the_papers_of_2025_in_a_local_folder(tmp_path):
    for part in ("I", "II"):
        write_table(tmp_path / f"AIME2025-{part}/test.jsonl", [{"question": f"{part}?", "answer": "1"}])
    data = ready(AIME2025, source=str(tmp_path))
    assert [one.question for one in data.test_problems] == ["I?", "II?"]


def test_the_hubs_aime_2025_and_amc_2023(hub):
    hub.sets["math-ai/aime25"] = {"default": {"test": [{"problem": "?", "answer": 70, "id": "0"}]}}
    hub.sets["AI-MO/aimo-validation-amc"] = {"default": {"train": [linked(2023, 1, "AMC_12A", 27.0)]}}
    assert ready(AIME2025).test_problems[0].answer == "70"
    assert ready(AMC2023).test_problems[0].answer == "27"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (27.0, "27"),
        ("27.0", "27"),
        (-1.0, "-1"),
        (33, "33"),
        ("033", "033"),
        (" 204 ", "204"),
        ("336^\\circ", "336^\\circ"),
    ],
)
def test_h13_golds_are_strings_as_the_source_has_them_except_floats(tmp_path, answer, gold):
    path = write_table(tmp_path / "rows.jsonl", [{"problem": "?", "answer": answer}])
    assert ready(AMC2023, source=path).test_problems[0].answer == gold


def test_rows_without_an_answer_are_counted(tmp_path, told):
    rows = [{"problem": "?", "answer": answer} for answer in (1, None, float("nan"), "")]
    data = ready(AIME2025, source=write_table(tmp_path / "rows.jsonl", rows))
    assert [one.id for one in data.test_problems] == ["aime2025/test/0"]
    assert "aime2025/test: 3 of 4 rows give no problem and are left out: no answer" in told("WARNING")


# splits and stages


@pytest.mark.parametrize("split", ["train", "test", "validation", "aime"])
def test_the_only_split_of_a_copy_is_taken(hub, split):
    hub.sets["my/copy"] = {"default": {split: [{"problem": "?", "answer": 1}]}}
    assert len(ready(AIME2025, source="my/copy").test_problems) == 1


def test_of_several_splits_test_is_taken_or_one_is_chosen(hub):
    rows = [{"problem": "?", "answer": 1}]
    hub.sets["my/copy"] = {"default": {"train": rows * 2, "test": rows}}
    assert len(ready(AIME2025, source="my/copy").test_problems) == 1
    assert len(ready(AIME2025, source="my/copy", split="train").test_problems) == 2
    hub.sets["my/other"] = {"default": {"train": rows, "validation": rows}}
    with pytest.raises(ValueError, match=r"split: 'my/other' .*splits \['train', 'validation'\].*valid: one of them"):
        ready(AIME2025, source="my/other")
    with pytest.raises(ValueError, match=r"split: 'dev' is no split of 'my/other' .*valid: train, validation"):
        ready(AIME2025, source="my/other", split="dev")


@pytest.mark.parametrize("kind", SETS)
def test_validate_test_and_predict_show_the_same_problems_and_fit_is_refused(lightning, tmp_path, kind):
    rows = [{"problem": f"{i}?", "answer": i} for i in range(3)]
    path = write_table(tmp_path / "rows.jsonl", rows)

    def data(**kwargs):
        return kind(source=path, val_batch_size=2, **kwargs)

    module = lightning.Recorder()
    lightning.trainer().validate(module, data(), verbose=False)
    lightning.trainer().test(module, data(), verbose=False)
    lightning.trainer().predict(module, data())
    ids = [[f"{kind.name}/test/0", f"{kind.name}/test/1"], [f"{kind.name}/test/2"]]
    assert module.validated == module.tested == module.predicted == ids
    limited = data(limit_val=1, limit_test=2)
    limited.setup()
    assert [len(limited.val_problems), len(limited.test_problems)] == [1, 2]
    message = (
        rf"train: {kind.name} is for evaluation only .*valid: validate, test or predict, or {kind.__name__} as one"
    )
    with pytest.raises(ValueError, match=message):
        lightning.fit(data())


def test_arguments_of_training_tables_are_unknown():
    with pytest.raises(TypeError, match="val_size"):
        AIME2024(val_size=3)


def test_a_file_of_another_set_is_refused_or_its_size_is_said(tmp_path, told):
    worked = [{"question": f"{i}?", "answer": f"First {i}, then {i + 1}.\n#### {i}"} for i in range(3)]
    with pytest.raises(ValueError, match=r"gives a problem of aime2024 \(an answer that is no whole number"):
        AIME2024(source=write_table(tmp_path / "worked.jsonl", worked)).setup("test")
    short = [{"problem": f"{i}?", "answer": f"{i}^\\circ"} for i in range(3)]
    AIME2024(source=write_table(tmp_path / "short.jsonl", short)).setup("test")
    assert any("aime2024 has 30 problems" in line and "gives 3" in line for line in told("WARNING"))


def test_limit_test_holds_where_validation_shows_the_same_rows(tmp_path):
    rows = [{"problem": f"{i}?", "answer": i} for i in range(30)]
    data = AIME2024(source=write_table(tmp_path / "rows.jsonl", rows), limit_test=4)
    data.setup("validate")
    assert len(data.val_problems) == 4
