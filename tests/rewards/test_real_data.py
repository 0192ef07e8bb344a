"""Checks on the real benchmark files, defined only where their folder lies next to the checkout."""

import json
from fractions import Fraction
from pathlib import Path

from gtpo_lightning.rewards import compare, extract_answer, is_correct, is_equivalent

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


if DATA.is_dir():

    def test_every_gsm8k_gold_equals_itself_only():  # H-26
        for row in rows("gsm8k_train.jsonl") + rows("gsm8k_test.jsonl"):
            gold = extract_answer(row["answer"], style="gsm8k")
            number = Fraction(row["answer"].rpartition("####")[2].replace(",", ""))
            assert gold is not None
            assert is_equivalent(gold, gold)
            assert is_equivalent(f"${float(number):.2f}", gold)
            assert is_correct(row["answer"], gold, style="auto")
            assert not is_equivalent(str(number + 1), gold)
            assert not is_equivalent(str(10 * number + 1), gold)

    def test_every_math500_solution_earns_its_gold():  # H-26, G-15
        for row in rows("math500.jsonl"):
            answer = extract_answer(row["solution"], style="boxed")
            assert is_equivalent(answer, row["answer"]), (answer, row["answer"])
            assert is_correct(row["solution"], row["answer"])

    def test_math500_golds_differ_from_each_other():
        golds = sorted({row["answer"] for row in rows("math500.jsonl") if not row["answer"].lstrip("-").isdigit()})
        same = {(a, b) for i, a in enumerate(golds) for b in golds[:i] if is_equivalent(a, b)}
        # One list in another order, one fraction without braces, one root with a space: read by eye.
        assert same == {("1,-2", "-2,1"), (r"\frac{1}{4}", r"\frac14"), (r"2\sqrt{5}", r"2 \sqrt{5}")}

    def test_math500_golds_in_other_spellings():
        golds = {row["answer"] for row in rows("math500.jsonl")}
        spellings = [
            lambda gold: rf"${gold}$.",
            lambda gold: rf"\[\boxed{{{gold}}}\]",
            lambda gold: gold.replace(r"\frac", r"\dfrac").replace(r"\sqrt", r"\sqrt "),
            lambda gold: gold.replace("(", r"\left( ").replace(")", r" \right)"),
            lambda gold: gold.replace("-", "−").replace(r"\pi", "π").replace(r"\cdot", r"\times"),
        ]
        pairs = [pair for gold in golds for spell in spellings for pair in ((spell(gold), gold), (gold, spell(gold)))]
        assert [pair for pair, grade in zip(pairs, compare(pairs), strict=True) if not grade.equal] == []

    def test_math500_golds_with_one_character_changed():
        pairs = []
        for gold in {row["answer"] for row in rows("math500.jsonl")}:
            for at, char in enumerate(gold):
                changed = (
                    str((int(char) + 1) % 10) if char.isdigit() else {"+": "-", "-": "+", "(": "[", "]": ")"}.get(char)
                )
                if changed:
                    pairs.append((gold[:at] + changed + gold[at + 1 :], gold))
        assert len(pairs) > 900
        assert [pair for pair, grade in zip(pairs, compare(pairs), strict=True) if grade.equal] == []

    def test_competition_golds():  # H-13
        for name, key in (("aime24.jsonl", "answer"), ("aime25.jsonl", "answer"), ("amc23.jsonl", "answer")):
            for row in rows(name):
                number = int(row[key])
                for spelled in (f"{number:03d}", str(number), f"{number}.0", rf"\boxed{{{number}}}", f"${number}$"):
                    assert is_equivalent(spelled, row[key])
                assert not is_equivalent(str(number + 1), row[key])
