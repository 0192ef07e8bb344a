import time

import pytest

from gtpo_lightning.rewards import extract_answer
from gtpo_lightning.rewards.extraction import ANSWER_STYLES

BOXED = [
    (r"\boxed{5}. That is wrong … \boxed{7}", "7"),  # H-02
    (r"\fbox{5}", "5"),  # H-04
    (r"so \fbox{1} but \boxed{2}", "2"),
    (r"so \boxed{1} but \fbox{2}", "2"),
    (r"$\boxed 4$", "4"),  # H-05b
    (r"\boxed 4 and so on", "4"),
    (r"\boxed 12", "12"),
    (r"\boxed{\frac{7}{9}", None),  # H-06b
    (r"\boxed{7} and then \boxed{\frac{7}{9}", "7"),
    (r"\boxed{1} \boxed{ {2 }", "1"),
    (r"\boxed{}", None),
    (r"\boxed{5} \boxed{ }", None),
    (r"\boxed", None),
    (r"\boxed{5} \boxed ", "5"),
    (r"\boxed{5} \boxed $x$", None),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # G-15
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"} } \boxed{ 3 } {", "3"),
    (r"{ \boxed{3}", "3"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\\boxed{5}", "5"),
    (r"a\\\boxed{5}", "5"),
    (r"\boxedtext{5}", None),
    ("\\boxed\n{5}", "5"),
    ("I think 18 or 20, maybe 5.", None),  # H-25
    (r"$$\boxed{11}$$</answer>", "11"),  # H-28b
    ("", None),
]

ANSWER_TAG = [
    ("<answer>5</answer><|im_end|>", "5"),  # G-19
    ("<answer>3</answer> no, <answer> 5\n</answer>", "5"),  # G-19
    ("<answer>5</answer> and <answer>6", "5"),
    ("<answer>5</answer></answer>", "5"),
    ("<answer>1<answer>2</answer>", "2"),
    ("</answer>5<answer>", None),
    ("<answer>5", None),
    ("5</answer>", None),
    ("<answer>5</answer><answer> </answer>", None),
    (r"<answer>$\boxed{11}$</answer>", "11"),  # H-28b
    (r"<answer>so it is \boxed{\frac{1}{2}}, done</answer>", r"\frac{1}{2}"),
    (r"<answer>$\boxed 4$</answer>", "4"),
    (r"<answer>\boxed{1} or \boxed{2}</answer>", r"\boxed{1} or \boxed{2}"),
    (r"<answer>\boxed{}</answer>", None),
    (r"<answer>\boxed{5</answer>", r"\boxed{5"),
    (r"$$\boxed{11}$$</answer>", None),
    (r"\boxed{3} <answer>4</answer>", "4"),
]

GSM8K = [
    ("#### 7" + " and so on" * 60, "7"),  # H-14b
    ("#### $18", "18"),  # H-15
    (r"#### \$18", "18"),
    ("####18", "18"),
    ("The answer is 18", None),
    ("#### 18.", "18"),
    ("#### 1,080", "1,080"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### 0.25", "0.25"),
    ("#### .5", ".5"),
    ("#### 3/4", "3/4"),
    ("#### 1\n#### 2", "2"),
    ("#### 1\n#### Conclusion", None),
    ("#### eighteen", None),
    ("####", None),
]

FLEXIBLE = [
    ("The total is 72 clips, altogether.", "72"),  # H-08
    ("The answer is 18", "18"),  # H-15
    ("It costs $1,080.50.", "1,080.50"),
    ("first 3, then 4,5", "5"),
    ("a range of 10-20", "20"),
    ("down to -20", "-20"),
    ("that is 3/4 of it", "3/4"),
    ("a part of 5/1,000 then", "5/1,000"),
    ("a part of 1,234/5,678.", "1,234/5,678"),
    ("1/2,34", "34"),
    ("about .5", ".5"),
    ("12,34", "34"),
    ("8{,}000", "8{,}000"),
    ("no number, none", None),
    ("<answer>3</answer> of 4", "3"),
    (r"\boxed{3} of 4", "3"),
    ("#### 3 of 4", "3"),
]

AUTO = [
    (r"#### 1 \boxed{2} <answer>3</answer>", "3"),
    (r"#### 1 \boxed{2} <answer>3", "2"),
    (r"#### 1 \boxed{2", "1"),
    ("The answer is 18", None),
]


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        (style, text, expected)
        for style, table in (
            ("boxed", BOXED),
            ("answer_tag", ANSWER_TAG),
            ("gsm8k", GSM8K),
            ("flexible", FLEXIBLE),
            ("auto", AUTO),
        )
        for text, expected in table
    ],
)
def test_extracts(style, text, expected):
    assert extract_answer(text, style=style) == expected


def test_answer_tag_is_the_default():
    assert extract_answer(r"\boxed{1} <answer>2</answer> #### 3") == "2"


def test_unknown_style_names_the_choices():
    with pytest.raises(ValueError, match=r"style: 'box'.*answer_tag, boxed, gsm8k, auto, flexible"):
        extract_answer("5", style="box")


@pytest.mark.parametrize("text", [None, 5, b"5"])
@pytest.mark.parametrize("style", ANSWER_STYLES)
def test_what_is_no_text_is_refused(text, style):
    with pytest.raises(ValueError, match=rf"text: {text!r}; valid: a str"):
        extract_answer(text, style=style)


HOSTILE = ["<answer>", "</answer>", "<answer></answer>", r"\boxed{", r"\boxed", r"\boxed{}", r"\boxed ", "{", "}", "\\"]
HOSTILE += ["####", "1", "1,", "1,111,", "-", "$", " ", "#### $", "{,}", r"\,111", "1/", "1.", "1/1,111,", "/1"]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("style", ANSWER_STYLES)
def test_hostile_text_takes_linear_time(piece, style):
    start = time.process_time()
    extract_answer(piece * 100_000, style=style)
    assert time.process_time() - start < 2.0  # quadratic: minutes
