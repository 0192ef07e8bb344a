"""Text to tokens and back: prompts by the chat template, completions up to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from gtpo_lightning.models import EMBEDDED, load_tokenizer
from gtpo_lightning.rollout import Problem, Prompts

__all__ = ["PLAIN_TEMPLATE", "SYSTEM_PROMPT", "Codec", "end_ids", "render_target"]

SYSTEM_PROMPT = (
    "Think the problem through step by step between <reasoning> and </reasoning>. Then give only the final answer "
    "between <answer> and </answer>. Write nothing after the answer."
)
PLAIN_TEMPLATE = "{system}\n\nProblem: {question}\n\n"


def render_target(problem: Problem) -> str:
    r"""The completion that supervised fine-tuning teaches.

    Args:
        problem: With `meta["target"]` (the whole text) or `meta["solution"]` (worked steps, put into the answer
            format).

    Raises:
        ValueError: The problem has neither.

    Example:
        >>> render_target(Problem("a", "1+1=", "2", {"solution": "1 and 1"}))
        '<reasoning>\n1 and 1\n</reasoning>\n<answer>\n2\n</answer>'
    """
    target = problem.meta.get("target")
    if target is not None:
        return str(target)
    solution = problem.meta.get("solution")
    if solution is None:
        raise ValueError(
            f"problem {problem.id!r}: supervised fine-tuning needs meta['solution'] or meta['target']; its columns are "
            f"{sorted(problem.meta)}"
        )
    return f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n{problem.answer}\n</answer>"


def end_ids(tokenizer: PreTrainedTokenizerBase, *configs: object) -> list[int]:
    """Every token that ends a completion: the tokenizer's and those of model and generation configurations, sorted."""
    found: set[int] = set()
    for source in (tokenizer, *configs):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return sorted(int(token) for token in found)


class Codec:
    """Turns problems into prompts and completions into text.

    Args:
        tokenizer: The model's.
        system_prompt: Instruction that asks for the answer format; empty for none.
        prompt_template: Prompt of tokenizers without a chat template, with `{system}` and `{question}`.
        extra_eos: Further sources of end-of-sequence ids, such as the model's and its generation configuration.

    Raises:
        ValueError: The template lacks `{question}`, or no end-of-sequence id is known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str = SYSTEM_PROMPT,
        prompt_template: str = PLAIN_TEMPLATE,
        extra_eos: Iterable[object] = (),
    ) -> None:
        if not isinstance(system_prompt, str):
            raise ValueError(f"system_prompt: {system_prompt!r} is not valid; valid: a text, empty for none")
        if not isinstance(prompt_template, str) or "{question}" not in prompt_template:
            raise ValueError(
                f"prompt_template: {prompt_template!r} lacks the question; valid: a text with {{question}}"
            )
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.eos_ids = end_ids(tokenizer, *extra_eos)
        if not self.eos_ids:
            raise ValueError(
                "model: neither tokenizer nor generation config names an end-of-sequence token; valid: one"
            )
        pad = tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad is None else int(pad)
        self.vocab_size: int | None = None
        """Entries of the model's vocabulary, once its weights are read."""
        self._adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]

    @classmethod
    def of_model(cls, model: str, *, system_prompt: str, prompt_template: str) -> Codec:
        """The codec of a model, of which only the tokenizer and the configurations are read.

        Args:
            model: Hub id, folder, or an embedded name.
            system_prompt: Instruction that asks for the answer format; empty for none.
            prompt_template: Prompt of tokenizers without a chat template.
        """
        sources: list[object] = []
        if model not in EMBEDDED:
            for read in (AutoConfig, GenerationConfig):
                try:
                    sources.append(read.from_pretrained(model))
                except (OSError, ValueError):  # not every folder has both; the model's own are read with its weights
                    continue
        tokenizer = load_tokenizer(model)
        return cls(tokenizer, system_prompt=system_prompt, prompt_template=prompt_template, extra_eos=sources)

    def add_end_ids(self, *configs: object) -> None:
        """Adds the end-of-sequence ids that further configurations name."""
        self.eos_ids = sorted({*self.eos_ids, *end_ids(self.tokenizer, *configs)})

    def prompt_text(self, problem: Problem) -> str:
        """The prompt as text: by the chat template if the tokenizer has one, else by the plain template."""
        if not self.tokenizer.chat_template:
            return self.prompt_template.replace("{system}", self.system_prompt).replace("{question}", problem.question)
        user = {"role": "user", "content": problem.question}
        if not self.system_prompt:
            return self._apply_template([user])
        try:
            return self._apply_template([{"role": "system", "content": self.system_prompt}, user])
        except TemplateError:  # some templates refuse a system turn; the instruction then opens the user's
            return self._apply_template([{"role": "user", "content": f"{self.system_prompt}\n\n{problem.question}"}])

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of a prompt, with exactly one beginning-of-sequence token where the tokenizer uses one."""
        ids = list(self.tokenizer(self.prompt_text(problem), add_special_tokens=False).input_ids)
        bos = self.tokenizer.bos_token_id
        starts = 0
        while bos is not None and starts < len(ids) and ids[starts] == bos:
            starts += 1
        if starts > 1:
            return ids[starts - 1 :]
        return [bos, *ids] if starts == 0 and self._adds_bos else ids

    def prompts(self, problems: Sequence[Problem], device: torch.device | str = "cpu") -> Prompts:
        """Left-padded prompts; the mask comes from lengths, so padding and end-of-sequence may share an id.

        Raises:
            ValueError: A prompt has no token, or one that the model does not know.
        """
        rows = [self.prompt_ids(problem) for problem in problems]
        for problem, row in zip(problems, rows, strict=True):
            if not row:
                raise ValueError(f"problem {problem.id!r}: its prompt has no token; valid: at least one")
            if self.vocab_size is not None and max(row) >= self.vocab_size:
                raise ValueError(
                    f"model: token id {max(row)} of problem {problem.id!r} is outside the model's vocabulary of "
                    f"{self.vocab_size}; valid: a tokenizer that belongs to the model"
                )
        ids, mask = _pad(rows, self.pad_id, left=True)
        return Prompts(ids.to(device), mask.to(device), list(problems))

    def completions(self, texts: Sequence[str], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Right-padded ids and mask of given texts, each ended by the end-of-sequence token, (N, T)."""
        eos = self.tokenizer.eos_token_id
        end = self.eos_ids[0] if eos is None else int(eos)
        rows = [[*self.tokenizer(text, add_special_tokens=False).input_ids, end] for text in texts]
        ids, mask = _pad(rows, self.pad_id, left=False)
        return ids.to(device), mask.to(device)

    def decode(self, ids: Tensor, lengths: Tensor) -> list[str]:
        """Texts of completions: without padding and the end-of-sequence token, with every other special token."""
        texts = []
        for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            real = row[:length]
            if real and real[-1] in self.eos_ids:
                real = real[:-1]
            text = self.tokenizer.decode(real, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            texts.append(str(text) if real else "")
        return texts


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=1)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, where] = torch.tensor(row, dtype=torch.long)
        mask[index, where] = 1
    return ids, mask
