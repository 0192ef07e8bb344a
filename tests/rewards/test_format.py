import time

import pytest

from gtpo_lightning.rewards import format_reward
from gtpo_lightning.rewards.format import ends_with_answer

R, A = "<reasoning>2+3</reasoning>", "<answer>5</answer>"
EOS = ["<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<eos>", "<end_of_turn>", "<|end|>"]
EOS += ["<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|eom_id|>", "<|return|>"]


@pytest.mark.parametrize(
    "text",
    [
        R + A,
        f"Well. {R} so {A}\n",
        R + R + A,
        R + "<answer>4</answer>" + A,
        R + "<answer>" + A,
        A + R + A,
        R + "<answer>\nfive\n</answer>\n\n",
        "<reasoning></reasoning>" + R + A,
        f"<reasoning>{A}</reasoning>{A}",
    ],
)
def test_full_format(text):
    assert format_reward(text) == 10.0


@pytest.mark.parametrize("eos", EOS)
def test_end_of_sequence_may_follow(eos):  # G-19
    assert format_reward(R + A + eos) == 10.0
    assert format_reward(f"{R}{A}\n{eos} {eos}\n") == 10.0
    assert not ends_with_answer(f"{A}{eos} x")


@pytest.mark.parametrize(
    "tail", [".", "x", "<|im_start|>", "<|user|>", "</answer>", "<answer>", "<answer></answer>", R]
)
def test_nothing_else_may_follow(tail):
    # Reasoning pair with an answer tag; the answer pair is not at the end.
    assert format_reward(R + A + tail) == 1.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("5", 0.0),
        (R, 1.0),
        (A, 1.0),
        (R + "<answer>", 1.5),
        (R + "</answer>", 1.5),
        (R + "<answer>5", 1.5),
        ("<reasoning>" + A, 1.5),
        ("</reasoning>" + A, 1.5),
        ("<reasoning>2+3" + A, 1.5),
        (A + R, 1.5),  # the answer pair is not at the end
        (f"<answer>{R}5</answer>", 3.0),  # the reasoning pair closes within the answer
        ("<reasoning>x<answer>5</reasoning></answer>", 3.0),
        ("<reasoning></reasoning>" + A, 1.5),  # an empty pair is no pair
        ("<reasoning> \n</reasoning>" + A, 1.5),
        (R + "<answer></answer>", 1.5),
        (R + "<answer> </answer>", 1.5),
        ("<reasoning></reasoning><answer></answer>", 0.0),
        ("<answer>5</answer> so", 0.0),
        ("<Reasoning>x</Reasoning><Answer>5</Answer>", 0.0),
    ],
)
def test_partial_credit(text, expected):
    assert format_reward(text) == expected


HOSTILE = ["<answer>", "</answer>", "<answer></answer>", "<reasoning>", "</reasoning>", "<reasoning></reasoning>"]
HOSTILE += [" ", "<|", "<|im_end|>", "<|end", "</s>", "<|" + "e" * 30]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_takes_linear_time(piece):
    start = time.process_time()
    for text in (piece * 100_000, R + A + piece * 100_000 + "x", "<answer>" + piece * 100_000 + "</answer>"):
        format_reward(text)
    assert time.process_time() - start < 3.0  # quadratic: minutes
