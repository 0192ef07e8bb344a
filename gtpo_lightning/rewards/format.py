"""Whether a completion has the form `<reasoning>…</reasoning><answer>…</answer>`."""

from __future__ import annotations

import re

__all__ = ["FORMAT_TAGS", "FULL_FORMAT", "ends_with_answer", "format_reward"]

FULL_FORMAT = 10.0
FORMAT_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# End-of-sequence strings, told by their kind: `<|name|>` (also with the wide bars of some tokenizers) whose name speaks
# of an end (end, eos, eot, eom, eod, return, stop), and the bare `</s>`, `<eos>`, `<eot>`, `<end_of_…>`, `<endoftext>`.
_TRAILER = re.compile(
    r"(?:\s|<[|｜](?=[^<>|｜\s]{0,40}(?:end|eo[stmd]|return|stop))[^<>|｜\s]{1,48}[|｜]>"
    r"|</s>|<(?:eo[stmd]|endoftext|end_of_[a-z]{1,20})>)*\Z",
    re.IGNORECASE,
)


def _last_pair(text: str, tag: str, before: int | None = None) -> tuple[int, int] | None:
    """Start and end of the last non-empty `<tag>…</tag>` that closes at or before `before`."""
    opening, closing, limit = f"<{tag}>", f"</{tag}>", len(text) if before is None else before
    while True:
        close = text.rfind(closing, 0, limit)
        start = text.rfind(opening, 0, max(close, 0))
        if start < 0:
            return None
        # The pair is closed by the first closing tag behind its opening one.
        inner = start + len(opening)
        close = text.index(closing, inner)
        if not _is_blank(text, inner, close):
            return start, close + len(closing)
        limit = start


def _is_blank(text: str, start: int, end: int) -> bool:
    return not text[start:end].strip()


def _ends(text: str, pair: tuple[int, int] | None) -> bool:
    return pair is not None and _TRAILER.match(text, pair[1]) is not None


def ends_with_answer(text: str) -> bool:
    """Whether the last non-empty `<answer>…</answer>` ends the text; white space and EOS strings may follow.

    Args:
        text: A completion.

    Returns:
        True or False.

    Example:
        >>> ends_with_answer("<answer>5</answer><|im_end|>"), ends_with_answer("<answer>5</answer> or so")
        (True, False)
    """
    return _ends(text, _last_pair(text, "answer"))


def format_reward(text: str) -> float:
    """The paper's format reward of one completion, with the order of the two parts as part of the format.

    10 if a `<reasoning>…</reasoning>` pair closes before the last `<answer>…</answer>` pair, which ends the text. White
    space and EOS strings may follow it; text before and between is allowed; an empty pair is no pair. Else partial
    credit: a reasoning pair 1.0 (1.5 with any answer tag in the text) plus an answer pair at the end 1.0 (1.5 with any
    reasoning tag).

    Args:
        text: A completion.

    Returns:
        10.0, or 0.0 to 3.0.

    Example:
        >>> format_reward("<reasoning>2+3</reasoning><answer>5</answer>")
        10.0
        >>> format_reward("<answer>5</answer><reasoning>2+3</reasoning>"), format_reward("<answer>5</answer>")
        (1.5, 1.0)
    """
    answer = _last_pair(text, "answer")
    at_end = _ends(text, answer)
    if at_end and answer is not None and _last_pair(text, "reasoning", before=answer[0]) is not None:
        return FULL_FORMAT
    score = 0.0
    if _last_pair(text, "reasoning") is not None:
        score += 1.5 if "<answer>" in text or "</answer>" in text else 1.0
    if at_end:
        score += 1.5 if "<reasoning>" in text or "</reasoning>" in text else 1.0
    return score
