import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_lightning.rewards import extract_answer, is_correct, is_equivalent, symbolic_equivalent

EQUAL = [
    (r"\boxed{\frac{1}{2}}", r"\frac12"),
    ("$29.00", "29"),  # H-07
    ("29.", "29"),  # H-07
    ("29.0", "29"),  # H-07
    (r"\$29", "29"),  # H-07
    ("8,000", "8000"),  # H-10
    ("8{,}000", "8000"),  # H-10
    (r"8\,000", "8000"),  # H-10
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\sqrt[4]{16}", "2"),  # H-12b
    ("033", "33"),  # H-13
    (r"\text{9}", "9"),  # H-18b
    (r"\dfrac{5}{3}", "5/3"),  # H-18b
    (r"10\%", "10"),  # H-19
    (r"10\%", "10%"),
    ("10 percent", r"10\%"),
    (r"\text{Evelyn}", "Evelyn"),  # H-21
    ("(C)", "C"),  # H-21
    (r"\text{(C)}", "C"),
    (r"\textbf{(C)}", "(c)"),
    ("(4, 1)", "(4,1)"),  # H-22b
    ("n=12", "12"),  # H-23b
    ("12", "n = 12"),  # H-23b
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90°"),
    ("90 degrees", r"90^\circ"),
    ("5 cm", "5"),
    ("5cm", "5"),
    (r"5 \text{ m}", "5"),
    ("5 m", "5m"),
    (r"864 \mbox{ inches}^2", "864"),
    ("864 square inches", r"864 \mbox{ inches}^2"),
    (r"15\mbox{ cm}^2", "15 cm^2"),
    (r"15 \text{cm}^2", "15"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"1\frac{4}{5}", "9/5"),
    (r"137 \frac{1}{2}", "137.5"),
    ("1 3/4", "7/4"),
    (r"-1\frac{1}{2}", "-1.5"),
    ("52_8", "52_{8}"),
    ("1,-2", "-2,1"),
    ("1,2", "2, 1"),
    (r"\{1,2\}", "{2,1}"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
    (r"1 \pm \sqrt{19}", r"1 - \sqrt{19}, 1+\sqrt{19}"),
    ("3, 5, 7", "3,5,7"),
    ("3, 5, and 7", "7,5,3"),
    ("(3,4]", r"\left( 3, 4 \right]"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("y = 2x+3", "2x+3"),
    ("y=2x + 3", "y=3+2x"),
    ("x=5", "5"),
    ("x=1,2", "1,2"),
    (r"x=1 \text{ or } x=2", "2,1"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix}-\frac13\\\frac23\end{pmatrix}"),
    ("72 clips", "72"),
    ("$18 dollars", "18"),
    (r"\$18.90", "18.9"),
    (r"\$32,\!348", "32348"),
    ("6 - 5i", "-5i+6"),
    (r"0.\overline{3}", "1/3"),
    (r"3\sqrt{13}", r"\sqrt{117}"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (".0000672", "6.72e-5"),
    (r"6.72 \times 10^{-5}", ".0000672"),
    ("5 million", "5,000,000"),
    ("x^5 - x^4 + 1", "1+x^5-x^4"),
    ("(a+5)(b+2)", "(b+2)(a+5)"),
    (r"\frac{3\sqrt{3}}{4}", r"\frac{3}{4}\sqrt3"),
    (r"-\frac{\pi}{6}", r"\frac{-\pi}{6}"),
    ("$$11$$", "11"),
    ("$5$ cm", "5"),
    ("**72**", "72"),
    ("-$5", "-5"),
    ("20 °C", "20"),
    (r"20^\circ C", "20 °C"),
    (r"\text{no solution}", "No solution."),
    ("1/2", "0.5"),
    (r"\frac{1,000}{3}", "1000/3"),
    (r"x = \{1,2\}", "2,1"),
    (r"\left(\frac{3}{5},\frac{8}{3}\right]", "(0.6, 8/3]"),
    ("(x,y)=(1,2)", "(1,2)"),
    (r"\pi", "π"),
    ("√3", r"\sqrt{3}"),
    (r"288 \pi", "288π"),
    ("½", "0.5"),
    ("-0", "0"),
    ("10 miles per hour", "10 miles/hour"),
    ("$5/hour", "5"),
    (r"\infty", "infinity"),
    (r"\frac 59", "5/9"),
    (r"\frac9{19}", "9/19"),
    (r"16 \text{ and } 3", "3,16"),
    ("{5}", "5"),
    (r"\fbox{5}", "5"),
    (r"5\,\text{cm}", "5 cm"),
    (r"\$ 5", "5"),
    (r"336^\circ", "336"),
    (r"(-\infty, 0]", "(-∞,0]"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\mathrm{A}", "A"),
    (r"12\text{ cm}, 13\text{ cm}", "13, 12"),
    (r"2\pi\text{ cm}", r"2\pi"),
    (r"\text{Area} = 5", "5"),
    (r"\text{Area: }5", "5"),
    (r"\emptyset", r"\{\}"),
    ("(5)", "5"),
    ("5!", "5!"),
    ("1,234,567.50", "1234567.5"),
    ("5 apples.", "5"),
    (r"\[5\]", "5"),
    (r"\(5\)", "5"),
    ("016", "16"),
    ("$5$ dollars", "5"),
    (r"\pm 2", "2, -2"),
    (r"3 \pm 2\sqrt{2}", r"3-\sqrt8, 3+\sqrt8"),
    ("x^2", "x^{2}"),
    (r"\frac{1}{1+\sqrt2}", r"\sqrt2-1"),
    ("i^2", "-1"),
    (r"\sqrt{-4}", "2i"),
    (r"\sqrt[3]{-27}", "-3"),
    ("2^{10}", "1024"),
    (r"\{(1,2),(3,4)\}", "(3,4), (1,2)"),
    ("((1,2),3)", "((1,2), 3)"),
    ("Évariste", "évariste"),
    ("1A_{16}", "1a_{16}"),
    ("11111 base 2", "11111_2"),
    ("+5", "5"),
    (r"1,\!000", "1000"),
    (r"\$1,000", "1000"),
]

DIFFERENT = [
    (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}"),  # H-01
    ("12", "1"),  # G-16
    ("118", "18"),  # G-16
    ("1 23", "123"),
    ("8 000", "8000"),
    (r"\text{1 2}", "12"),
    (r"1\,23", "123"),
    ("1{,}2", "12"),
    (r"1234\,567", "1234567"),
    ("not 7 but 8", "7"),  # G-16
    ("18.005", "18"),  # G-17, H-24
    ("1000.009", "1000"),  # G-17
    ("27", "(2,7)"),  # H-11b
    ("46", "4,6"),  # H-11b
    ("0.1", r"10\%"),  # H-19
    (r"50\%", "0.5"),  # H-19
    ("11111", "11111_2"),  # H-20
    ("11_3", "11"),  # H-20
    ("11_3", "11_2"),
    (r"\text{even}", "odd"),  # H-21
    ("(1,4)", "(4,1)"),  # H-22b
    ("[4,1]", "(4,1)"),  # H-22b
    ("(1,2)", "1,2"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", r"\{1,2\}"),
    ("0.333", "1/3"),  # H-24
    ("0.333333", "1/3"),  # H-24
    ("0.333...", "1/3"),
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    ("x=5", "y=5"),
    ("5x", "5"),
    ("2k", "2"),
    ("5m", "5"),
    ("5!", "5"),
    ("5 or 6", "5"),
    ("I think 18 or 20, maybe 5.", "5"),  # H-25
    ("", "5"),  # H-27b
    ("$$", "5"),
    (r"\text{}", "5"),
    (".", "."),
    (r"\boxed{}", "5"),
    (r"\boxed{9^{9^{9^{9}}}}", "5"),  # F-05
    ("13/4", "1 3/4"),
    ("1,2", "12"),
    ("100,20", "10020"),
    ("8 000", "8"),
    ("5 million", "5"),
    ("$5", "€5"),
    ("$5", "5 cm"),
    ("5%", "5 cm"),
    ("(3,4)", "(3,4]"),
    (r"\sqrt{2}", "1.414"),
    ("1/0", "1/0.0"),
    ("xy", "yx"),
    ("p - q", "q - p"),
    ("x=1,x=2", "y=1,y=2"),
    ("2 to 5", "2"),
    ("-5", "5"),
    (r"\text{not }5", "5"),
    ("x>5", "5"),
    (r"x \le 5", "5"),
    ("1,1,2", "1,2"),
    (r"5\alpha", "5"),
    ("3:4", "3/4"),
    ("Paris", "London"),
    (r"5 \pm 1", "5"),
    (r"\frac{1}{2}x", r"\frac12"),
    ("2^{10}", "20"),
    ("1e5", "15"),
    ("5 and 6", "5"),
    ("x=5 and y=6", "5"),
    ("1234_5", "1234_6"),
    (r"\sqrt{3}", "3"),
    (r"\sqrt{12}", r"\sqrt{13}"),
    ("((1,2),3)", "(1,(2,3))"),
    ("[1,2)", "[1,2]"),
    ("1A_{16}", "1A_{12}"),
    (r"5 \cdot 3", "5"),
    ("Yes", "No"),
    ("A", "B"),
    ("nan", "5"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("5 a.m.", "5 p.m."),
    ("1/2/3", "1/2"),
    ("1 3/4", "1"),
    ("3/4 cup", "3/4 pint"),
]


PIECES = r"\frac \sqrt \text \left \right \boxed { } ( ) [ ] \{ \} 1 2 , ; . / ^ _ - + = $ \pm \cup % x a or"
PIECES = [*PIECES.split(), " "]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal(left, right):
    assert is_equivalent(left, right)
    assert is_equivalent(right, left)
    assert is_equivalent(left, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different(left, right):
    assert not is_equivalent(left, right)
    assert not is_equivalent(right, left)


@pytest.mark.parametrize("gold", ["5", "", " ", "None", 0, 1, 0.0, "\\emptyset", None, float("nan")])
@pytest.mark.parametrize("missing", [None, "", "  \n", "$$", "\\text{}", ".", "\\boxed{}", "{}"])
def test_a_missing_answer_is_never_right(missing, gold):  # H-27b
    if missing == "{}" and gold == "\\emptyset":
        assert is_equivalent(missing, gold)  # the empty set is an answer
    else:
        assert not is_equivalent(missing, gold)


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("033", 33, True),  # H-13: the gold is an int
        ("33.0", 33, True),
        ("27", 27.0, True),
        ("27", 27.5, False),
        ("0.1", 0.1, True),
        ("1/10", 0.1, True),
        ("0.0000001", 1e-7, True),
        ("-1", -1.0, True),
        ("34", 33, False),
    ],
)
def test_gold_that_is_a_number(prediction, gold, expected):
    assert is_equivalent(prediction, gold) is expected


def test_gold_that_is_a_huge_int():
    assert is_equivalent("9" * 5000, 10**5000 - 1)
    assert not is_equivalent("9" * 5000, 10**5000 - 2)


@pytest.mark.parametrize("digits", [50, 4299, 4301, 9000, 50_000])
def test_numbers_of_any_size(digits):
    big = "7" * digits
    assert is_equivalent(big, "0" + big + ".0")
    assert not is_equivalent(big, big[:-1] + "8")
    assert is_equivalent("0." + big, "0." + big + "0")
    assert not is_equivalent("0." + big, "0." + big + "1")
    assert is_equivalent(f"\\frac{{{big}}}{{3}}", f"\\frac{{{big}}}{{3}}")
    if digits < 10_000:  # larger fractions compare as strings
        assert is_equivalent(f"\\frac{{{big}0}}{{70}}", "1" * digits)
        assert not is_equivalent(f"\\frac{{{big}0}}{{70}}", "1" * (digits - 1) + "2")


def spellings(value):
    """Ways to write a rational, made by integer arithmetic only."""
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    texts = [
        f"{sign}{top}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{sign}{top * 3}}}{{{bottom * 3}}}",
    ]
    if bottom == 1:
        texts += [
            f"{sign}{top}",
            f"{sign}{top:,}",
            f"{sign}00{top}.00",
            rf"\text{{{sign}{top}}}",
            rf"${sign}{top}$",
            f"x={sign}{top}",
        ]
    elif top > bottom:
        texts += [
            f"{sign}{top // bottom} {top % bottom}/{bottom}",
            rf"{sign}{top // bottom}\tfrac{{{top % bottom}}}{{{bottom}}}",
        ]
    if 10**6 % bottom == 0:
        whole, rest = divmod(top * (10**6 // bottom), 10**6)
        texts.append(f"{sign}{whole}.{rest:06d}")
    return texts


rationals = st.builds(
    Fraction,
    st.integers(-(10**9), 10**9),
    st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 64, 125, 999]) | st.integers(1, 10**6),
)


@settings(max_examples=150, deadline=None)
@given(rationals, rationals, st.integers(-3, 3))
def test_rationals_agree_with_fractions(first, other, near):
    for second in (first, other, first + Fraction(near, first.denominator)):
        for left in spellings(first):
            for right in spellings(second):
                assert is_equivalent(left, right) is (first == second), (left, right)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-40, 40),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(-40, 40),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_surds_agree_with_their_squares(a, b, n, c, d, m):
    """a√n/b = c√m/d exactly if signs and squares agree."""
    expected = (a > 0) == (c > 0) and (a < 0) == (c < 0) and a * a * n * d * d == c * c * m * b * b
    assert symbolic_equivalent(rf"\frac{{{a}\sqrt{{{n}}}}}{{{b}}}", rf"{c}\sqrt{{{m}}}/{d}") is expected


@pytest.mark.parametrize(
    "text", [r"\sin x", "9^{9^{9^{9}}}", "((((" * 50, "x" * 5000, r"\frac{1}{0}", "", "5!", "x_1", "^", "²²"]
)
def test_what_the_algebra_does_not_know_equals_nothing(text):
    assert not symbolic_equivalent(text, "5")
    assert not symbolic_equivalent(text, text)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(PIECES),
        max_size=25,
    ).map("".join)
    | st.text(max_size=40),
    st.sampled_from(["5", "1,2", r"\sqrt{2}", "x"]),
)
def test_no_text_raises(text, gold):  # and every answer equals itself, or is blank or no answer in either order
    assert is_equivalent(text, gold) is is_equivalent(gold, text)
    assert isinstance(symbolic_equivalent(text, gold), bool)


HOSTILE = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "\\{",
    "\\boxed{",
    "\\boxed",
    "\\frac",
    "\\frac{",
    "\\frac12",
    "\\text{",
    "\\sqrt",
    "1",
    "1,",
    "1,111,",
]
HOSTILE += [
    "1 ",
    "1/",
    "9^",
    "9^{",
    " ",
    "\n",
    "$",
    "\\",
    "\\,",
    "{,}",
    "1{,}",
    "x=",
    "x,",
    "1 or ",
    "\\pm",
    "1\\pm1,",
    "(1)\\cup",
    "_",
    "1_2,",
]
HOSTILE += [
    "\\begin{pmatrix}",
    "&",
    "\\\\ ",
    "%",
    "°",
    "5 cm, ",
    ".",
    "1.",
    "-",
    "\\sqrt{2},",
    "2\\pi,",
    "\ud800",
    "\x01",
    "e",
    "1e9",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_neither_raises_nor_hangs(piece):
    start = time.process_time()
    for text in (piece * 20_000, "(" + piece * 20_000 + ")", piece * 20_000 + "}" * 20_000, "5 " + piece * 20_000):
        is_equivalent(text, "5")
        is_equivalent(text, text + "1")
    assert time.process_time() - start < 5.0  # quadratic: minutes


def test_power_tower_among_other_answers():  # F-05
    answers = ["5", r"\boxed{9^{9^{9^{9}}}}", "6", "5.0"]
    assert [is_equivalent(answer, "5") for answer in answers] == [True, False, False, True]


def test_works_in_any_thread():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(is_equivalent(r"\sqrt{12}", r"2\sqrt 3"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_gsm8k_answers_are_fast():
    pairs = [("72", "72"), ("$1,080", "1080"), ("18.0", "18"), ("12", "1"), ("72 clips", "72")] * 400
    start = time.process_time()
    for prediction, gold in pairs:
        is_equivalent(prediction, gold)
    assert len(pairs) / (time.process_time() - start) > 10_000  # 50,000 on an idle core


@pytest.mark.parametrize(
    ("text", "gold", "style", "expected"),
    [
        ("I think 18 or 20, maybe 5.", "5", "boxed", False),  # H-25
        (r"$$\boxed{11}$$</answer>", "11", "boxed", True),  # H-28b
        (r"<answer>$\boxed{11}$</answer>", 11, "answer_tag", True),
        ("so <answer>8,000</answer>", 8000, "auto", True),
        ("#### 18.", "18", "gsm8k", True),
        ("5", "5", "auto", False),
        ("5", "5", "flexible", True),
        ("<answer></answer>", "None", "auto", False),  # H-27b
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", "auto", False),  # H-06b
        ("<answer>5</answer><|im_end|>", "5", "auto", True),  # G-19
    ],
)
def test_is_correct(text, gold, style, expected):
    assert is_correct(text, gold, style=style) is expected


def test_gold_is_read_with_balanced_braces():  # G-15
    gold = extract_answer(r"Therefore, $x = \boxed{\frac{1}{2}}$.", style="boxed")
    assert gold == r"\frac{1}{2}"
    assert is_equivalent("0.5", gold)
    assert not is_equivalent("1", gold)


def test_is_correct_refuses_an_unknown_style():
    with pytest.raises(ValueError, match="style"):
        is_correct("5", "5", style="last")


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("5 mph", "5 miles per hour", True),
        ("5 kph", "5 km/h", True),
        ("5 mph", "5 kph", False),
        ("FF_{16}", "ff_{16}", True),
        ("FF_{16}", "FE_{16}", False),
        ("FF_{16}", "255", False),
        ("x_1", "x_2", False),
    ],
)
def test_compound_units_and_numerals_that_begin_with_a_letter(prediction, gold, equal):
    assert is_equivalent(prediction, gold) is equal
    assert is_equivalent(gold, prediction) is equal
