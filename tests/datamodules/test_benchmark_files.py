"""The real benchmark files through the data modules, defined only where their folder lies next to the checkout."""

import json
from collections import Counter
from pathlib import Path

import pytest

from gtpo_lightning.datamodules import AIME2024, AIME2025, AMC2023, MATH500, HendrycksMATH, ProblemTable
from gtpo_lightning.rewards import extract_answer, is_equivalent

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def problems(kind, name, **kwargs):
    data = kind(source=str(DATA / name), **kwargs)
    data.setup("test")
    return data.test_problems


def number(gold):
    """The whole number a gold stands for; one of them is an angle."""
    value = int(gold.removesuffix(r"^\circ"))
    assert is_equivalent(gold, value)
    return value


if DATA.is_dir():

    @pytest.mark.parametrize(
        ("kind", "name", "count", "question", "answer"),
        [
            (AIME2024, "aime24.jsonl", 30, "problem", "answer"),
            (AIME2024, "aime24_maxwell_jia.jsonl", 30, "Problem", "Answer"),
            (AIME2025, "aime25.jsonl", 30, "problem", "answer"),
            (AIME2025, "aime25_opencompass.jsonl", 30, "question", "answer"),
            (AMC2023, "amc23.jsonl", 40, "problem", "answer"),
            (MATH500, "math500.jsonl", 500, "problem", "answer"),
        ],
    )
    def test_every_row_is_a_problem_with_the_files_gold(kind, name, count, question, answer, told):
        found, raw = problems(kind, name), rows(name)
        assert len(found) == len(raw) == count
        assert [one.id for one in found] == [f"{kind.name}/test/{i}" for i in range(count)]
        assert [one.question for one in found] == [row[question] for row in raw]
        for one, row in zip(found, raw, strict=True):
            assert isinstance(one.answer, str)
            assert one.answer == one.answer.strip() != ""
            if isinstance(row[answer], str):
                assert one.answer == row[answer]
            else:
                assert float(one.answer) == row[answer]
            assert is_equivalent(one.answer, row[answer])
        (line,) = told()
        assert line.startswith(f"{kind.name}/test: {count} problems from ")
        assert f"question from '{question}', answer from '{answer}'" in line
        assert told("WARNING") == []

    def test_all_aime_golds_are_whole_numbers_up_to_999():
        golds = {
            name: [number(one.answer) for one in problems(kind, name)]
            for kind, name in (
                (AIME2024, "aime24.jsonl"),
                (AIME2024, "aime24_maxwell_jia.jsonl"),
                (AIME2025, "aime25.jsonl"),
                (AIME2025, "aime25_opencompass.jsonl"),
            )
        }
        assert all(0 <= value <= 999 for values in golds.values() for value in values)
        assert Counter(golds["aime24.jsonl"]) == Counter(golds["aime24_maxwell_jia.jsonl"])
        assert Counter(golds["aime25.jsonl"]) == Counter(golds["aime25_opencompass.jsonl"])

    def test_amc_golds_are_written_without_a_decimal_point():
        golds = [one.answer for one in problems(AMC2023, "amc23.jsonl")]
        assert golds == [str(int(row["answer"])) for row in rows("amc23.jsonl")]

    def test_h26_math500_golds_equal_the_last_box_of_their_solutions():
        for one in problems(MATH500, "math500.jsonl"):
            assert is_equivalent(extract_answer(one.meta["solution"], style="boxed"), one.answer), one.id
            assert one.meta["level"] in range(1, 6)
        subjects = Counter(one.meta["subject"] for one in problems(MATH500, "math500.jsonl"))
        assert subjects == Counter(row["subject"] for row in rows("math500.jsonl"))

    def test_math_reads_the_same_rows_with_and_without_the_answer_column(tmp_path):
        """MATH's own way, the last box, gives the golds that MATH-500 lists."""
        bare = [{key: row[key] for key in ("problem", "solution", "level", "subject")} for row in rows("math500.jsonl")]
        path = tmp_path / "math.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in bare), encoding="utf-8")
        boxed = HendrycksMATH(source=str(path), val_size=100)
        listed = HendrycksMATH(source=str(DATA / "math500.jsonl"), val_size=100)
        for data in (boxed, listed):
            data.setup("fit")
        assert [len(boxed.train_problems), len(boxed.val_problems)] == [400, 100]
        for mine, theirs in zip(boxed.train_problems + boxed.val_problems, listed.train_problems + listed.val_problems,
                                strict=True):  # fmt: skip
            assert mine.id == theirs.id
            assert is_equivalent(mine.answer, theirs.answer)
        geometry = HendrycksMATH(source=str(path), val_size=0, subjects=["geometry"], levels=[5])
        geometry.setup("fit")
        expected = [row for row in bare if row["subject"] == "Geometry" and row["level"] == 5]
        assert [one.question for one in geometry.train_problems] == [row["problem"] for row in expected]

    def test_gsm8k_as_any_table():
        data = ProblemTable(name="any", test_source=str(DATA / "gsm8k_test.jsonl"), answer_style="gsm8k")
        data.setup("test")
        assert len(data.test_problems) == 1319
        assert data.test_problems[0].answer == "18"
