"""Names of columns and splits as other owners write them."""

import pytest

from gtpo_lightning.datamodules.recognise import find_columns, find_only_split, find_split, split_words

ROLES = ("question", "answer")


def found(names, required=ROLES, optional=("solution",), **chosen):
    """Columns by role in a table of two rows whose columns all differ."""
    rows = [{name: f"{name} {number}" for name in names} for number in range(2)]
    arguments = {"question": None, "answer": None, "solution": None}
    return find_columns(rows, required, optional, chosen={**arguments, **chosen}, where="the table")


@pytest.mark.parametrize(
    ("names", "question", "answer", "solution"),
    [
        ("problem solution answer", "problem", "answer", "solution"),
        ("ID Problem Solution Answer", "Problem", "Answer", "Solution"),
        ("question answer", "question", "answer", None),
        ("Question final_answer", "Question", "final_answer", None),
        ("prompt expected_answer", "prompt", "expected_answer", None),
        ("prompt problem Answer", "problem", "Answer", None),
        ("PROBLEM Expected_Answer generated_solution", "PROBLEM", "Expected_Answer", None),
    ],
)
def test_columns_of_copies(names, question, answer, solution):
    expected = {"question": question, "answer": answer, "solution": solution}
    assert found(names.split()) == {role: name for role, name in expected.items() if name}


def test_a_name_may_have_spaces():
    assert found(["Question", "Final Answer"])["answer"] == "Final Answer"


def test_two_columns_of_one_role_are_taken_only_if_they_are_copies():
    rows = [{"problem": "1+1", "question": "1+1", "answer": "2"}, {"problem": "2", "question": "2", "answer": "2"}]
    chosen = {"question": None, "answer": None}
    assert find_columns(rows, ROLES, (), chosen=chosen, where="it")["question"] == "problem"
    rows[1]["question"] = "3"
    message = r"question_column: it has \['problem', 'question'\] among the columns \['problem', 'question', 'answer'\]"
    with pytest.raises(ValueError, match=message):
        find_columns(rows, ROLES, (), chosen=chosen, where="it")
    chosen["question"] = "question"
    assert find_columns(rows, ROLES, (), chosen=chosen, where="it")["question"] == "question"


def test_two_solutions_are_an_error_only_where_an_argument_chooses():
    with pytest.raises(ValueError, match=r"solution_column: the table has \['solution', 'Solution'\]"):
        found(["problem", "answer", "solution", "Solution"])
    rows = [{"problem": "1", "answer": "1", "year": "2024", "Year": "2025"}]
    assert find_columns(rows, ROLES, ("year",), chosen={}, where="it")["year"] == "year"


@pytest.mark.parametrize("names", [["text", "answer"], ["type", "answer"], ["problems", "answer"]])
def test_nothing_found_names_the_columns_and_the_argument(names):
    message = rf"question_column: the table has the columns \['{names[0]}', 'answer'\], none of .*'prompt'.*valid"
    with pytest.raises(ValueError, match=message):
        found(names)


def test_one_of_two_roles_is_enough():
    required = ("question", ("answer", "solution"))
    assert found(["problem", "solution"], required, ()) == {"question": "problem", "solution": "solution"}
    assert found(["problem", "answer"], required, ()) == {"question": "problem", "answer": "answer"}
    assert set(found(["problem", "answer", "solution"], required, ())) == {"question", "answer", "solution"}
    with pytest.raises(ValueError, match=r"answer_column or solution_column: the table has the columns \['problem'\]"):
        found(["problem"], required, ())


def test_a_chosen_column_wins_and_must_be_there():
    assert found(["problem", "answer", "gold"], answer="gold")["answer"] == "gold"
    assert found(["problem", "Gold"], answer="gold")["answer"] == "Gold"
    with pytest.raises(ValueError, match=r"answer_column: 'gold' is no column of the table; valid: problem, answer"):
        found(["problem", "answer"], answer="gold")
    with pytest.raises(
        ValueError, match=r"answer_column: 'gold' is no column of the table; valid: problem, GOLD, Gold"
    ):
        found(["problem", "GOLD", "Gold"], answer="gold")


def test_every_row_has_the_columns_that_are_needed():
    rows = [{"problem": "1", "answer": "2", "solution": "3"}, {"problem": "1", "answer": "2"}]
    assert "solution" in find_columns(rows, ROLES, ("solution",), chosen={}, where="it")
    del rows[1]["answer"]
    with pytest.raises(ValueError, match=r"it, row 2 has the columns \['problem'\] and lacks \['answer'\]"):
        find_columns(rows, ROLES, ("solution",), chosen={}, where="it")


# splits


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train", "test"], ("train", None, "test")),
        (["Train", "Validation", "TEST"], ("Train", "Validation", "TEST")),
        (["training", "dev"], ("training", "dev", None)),
        (["valid"], (None, "valid", None)),
        (["train", "test", "math500", "latest"], ("train", None, "test")),
        (["default"], (None, None, None)),
    ],
)
def test_splits_of_copies(names, expected):
    assert tuple(find_split(names, split, chosen=None, where="it") for split in ("train", "val", "test")) == expected


def test_several_validation_splits_are_an_error_until_one_is_chosen():
    names = ["train", "dev", "validation"]
    with pytest.raises(ValueError, match=r"val_split: it has the splits .*valid: one of \['dev', 'validation'\]"):
        find_split(names, "val", chosen=None, where="it")
    assert find_split(names, "val", chosen="Dev", where="it") == "dev"
    with pytest.raises(ValueError, match=r"val_split: 'val' is no split of it; valid: train, dev, validation"):
        find_split(names, "val", chosen="val", where="it")


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["train"], "train"), (["validation"], "validation"), (["test"], "test"), (["train", "test"], "test"), ([""], "")],
)
def test_the_split_of_a_set_with_one_purpose(names, expected):
    assert find_only_split(names, "test", chosen=None, where="it", argument="split") == expected


@pytest.mark.parametrize("names", [["train", "validation"], ["a", "b"], []])
def test_no_split_is_guessed(names):
    with pytest.raises(ValueError, match=r"split: it has the splits .*none is named test; valid: one of them"):
        find_only_split(names, "test", chosen=None, where="it", argument="split")


def test_words():
    assert split_words("gsm8k_Train-00000-of-00002") == {"train"}
    assert split_words("train.test") == {"train", "test"}
    assert split_words("latest") == split_words("testing") == split_words("constrained") == set()
