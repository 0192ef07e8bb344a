"""GSM8K: grade-school word problems whose answers are integers (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from typing import Any

from gtpo_lightning.datamodules.table import TableDataModule
from gtpo_lightning.rollout import Problem

__all__ = ["GSM8K", "gold_answer", "worked_solution"]

_GOLD = re.compile(r"####\s*\$?\s*([-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
_ANNOTATION = re.compile(r"<<[^<>]*>>")


class GSM8K(TableDataModule):
    """GSM8K from the hub (`openai/gsm8k`, 7,473 training and 1,319 test rows) or from local files.

    The hub has no validation split: `val_size` training rows are held out for it. `meta["solution"]` is the worked text
    without the final line and without the `<<48/2=24>>` annotations. A row without a number after `####` is left out.

    Takes the arguments of `TableDataModule`, `TableReader` and `DataModule`.
    """

    name = "gsm8k"
    default_source = "openai/gsm8k"
    default_configs = ("main",)

    def to_problem(self, row: dict[str, Any], id: str) -> Problem | str:
        """A problem with its gold answer and its solution."""
        gold = gold_answer(row["answer"]) if isinstance(row["answer"], str) else None
        if gold is None:
            return "no number after #### in the answer"
        return Problem(id, row["question"], gold, {"solution": worked_solution(row["answer"])})


def gold_answer(text: str) -> str | None:
    """The number after the last `####`, without thousands separators; None if there is none.

    Example:
        >>> gold_answer("Half of 3,000 is <<3000/2=1500>>1,500. #### 1,500")
        '1500'
    """
    last = text.rfind("####")
    found = _GOLD.match(text, last) if last >= 0 else None
    return found[1].replace(",", "") if found else None


def worked_solution(text: str) -> str:
    """The text before the last `####`, without the calculator's annotations.

    Example:
        >>> worked_solution("Half of 8 is <<8/2=4>>4. #### 4")
        'Half of 8 is 4.'
    """
    return _ANNOTATION.sub("", text.rpartition("####")[0]).strip()
