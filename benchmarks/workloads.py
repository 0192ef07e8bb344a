"""What the benchmarks do: models, prompts, lengths, each under a name that the command lines and reports use.

`a`, `b`: a Llama with random weights; `c`: SmolLM2-135M on GSM8K; `growth`: `b` with other groups and vocabularies;
`gpu_0.5b`, `gpu_1.5b`, `gpu_3b`: random weights in the shape of Qwen2 models, in bf16. In none of them a completion
ends early: the end-of-sequence id lies outside the vocabulary, so neither side pays for suppressing a token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "VOCABULARIES", "WORKLOADS", "Workload", "build", "growth", "read_prompts"]

GSM8K_ROWS = "gsm8k_train.jsonl"
GROUPS = (4, 8, 16, 32)
VOCABULARIES = (32_000, 49_152, 100_352, 151_936)


@dataclass(frozen=True)
class Workload:
    """One training step: B prompts, G completions of each, T tokens a completion, one AdamW update.

    Args:
        name: How reports call it.
        family: `llama` or `qwen2`, made here with random weights, or `smollm2`, read from its package.
        prompts: B.
        group: G.
        prompt_tokens: P; of `smollm2`, whose prompts are rows of GSM8K, a typical number.
        completion_tokens: T.
        vocabulary: V.
        hidden: D.
        intermediate: Width of the gated feed-forward layers.
        layers: Decoder layers.
        heads: Query heads, each D / heads wide.
        kv_heads: Key and value heads.
        tied: Whether the output embedding is the input embedding.
        dtype: Of weights and products: `float32` or `bfloat16`.
    """

    name: str
    family: str
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = True
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        """N = B·G."""
        return self.prompts * self.group

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the weights."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def key_value_width(self) -> int:
        """Entries of the keys of one token in one layer; those of its values are as many."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def body_weights(self) -> int:
        """Entries of the weights that every token is multiplied with: projections of attention, feed-forward."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value_width
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Trained numbers, without norms and biases."""
        return self.body_weights + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def describe(self) -> str:
        """One line for reports."""
        return (
            f"{self.prompts} prompts of {'about ' if self.family == 'smollm2' else ''}{self.prompt_tokens} tokens, "
            f"{self.group} completions of {self.completion_tokens} tokens each, {self.family} with "
            f"{self.parameters / 1e6:.0f} M parameters and a vocabulary of {self.vocabulary:,}, {self.dtype}, one "
            "AdamW update; nothing ends early"
        )

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def _qwen2(name: str, hidden: int, intermediate: int, layers: int, heads: int, tied: bool = True) -> Workload:
    return Workload(
        name,
        "qwen2",
        prompts=4,
        group=8,
        prompt_tokens=256,
        completion_tokens=128,
        vocabulary=151_936,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=2,
        tied=tied,
        dtype="bfloat16",
    )


_A = Workload("a", "llama", 4, 8, 32, 128, 49_152, 256, 688, 6, 4, 4)
_B = replace(_A, name="b", prompt_tokens=256, completion_tokens=64)
_C = Workload("c", "smollm2", 2, 8, 100, 96, 49_152, 576, 1536, 30, 9, 3)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _A,
        _B,
        _C,
        _qwen2("gpu_0.5b", 896, 4864, 24, 14),
        _qwen2("gpu_1.5b", 1536, 8960, 28, 12),
        _qwen2("gpu_3b", 2048, 11008, 36, 16),
    )
}


def growth(axis: str) -> list[Workload]:
    """The workloads that show how cost grows, each differing from `b` in one number.

    Args:
        axis: `group`: G at fixed prompts; `vocabulary`: V at a fixed body.
    """
    values = {"group": GROUPS, "vocabulary": VOCABULARIES}[axis]
    return [replace(_B, name=f"b_{axis}_{value}", **{axis: value}) for value in values]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ building


def build(workload: Workload, folder: str, prompts: int, data: Path, seed: int = 0) -> None:
    """Saves model, tokenizer and prompts to a folder that both sides read.

    Args:
        workload: Whose.
        folder: Is made.
        prompts: How many texts `prompts.json` gets, no two alike.
        data: Folder with GSM8K's rows; only `smollm2` reads it.
        seed: Of the random weights.

    Raises:
        FileNotFoundError: The rows are missing.
        ValueError: There are fewer rows than prompts.
    """
    if workload.family == "smollm2":
        texts = _save_smollm2(workload, folder, prompts, data)
    else:
        _save_random(workload, folder, seed)
        texts = [_words(workload, index) for index in range(prompts)]
    Path(folder, "prompts.json").write_text(json.dumps(texts), encoding="utf-8")


def read_prompts(folder: str) -> list[str]:
    """The texts that `build` saved, which the tokenizer turns into prompts without anything around them."""
    texts: list[str] = json.loads(Path(folder, "prompts.json").read_text(encoding="utf-8"))
    return texts


def _words(workload: Workload, index: int) -> str:
    """Prompt number `index`: as many words of the tokenizer as the prompt has tokens."""
    most = workload.vocabulary - 2
    return " ".join(f"w{2 + (index * 977 + position * 31) % most}" for position in range(workload.prompt_tokens))


def _save_random(workload: Workload, folder: str, seed: int) -> None:
    """A model with random weights, and a tokenizer whose words are `w2`, `w3`, ..."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    size = workload.vocabulary
    settings: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": workload.hidden,
        "intermediate_size": workload.intermediate,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": workload.kv_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": workload.tied,
        "bos_token_id": None,
        "eos_token_id": size,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    # A Qwen2 configuration would make transformers load its own kind of tokenizer in place of the one saved here. A
    # Llama with biases in its attention has the same layers.
    config = LlamaConfig(**settings, attention_bias=workload.family == "qwen2")
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype)).save_pretrained(folder)
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, size)}, "<eos>": size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)


def _save_smollm2(workload: Workload, folder: str, prompts: int, data: Path) -> list[str]:
    """SmolLM2 with an end that never comes; returns questions in its chat template, which the tokenizer then loses."""
    from gtpo_lightning.models import load_model, load_tokenizer

    path = data / GSM8K_ROWS
    if not path.is_file():
        raise FileNotFoundError(f"--data: {data} lacks {GSM8K_ROWS}, whose rows have a `question`")
    with path.open(encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for _, line in zip(range(prompts), file, strict=False)]
    if len(questions) < prompts:
        raise ValueError(f"--data: {path} has {len(questions)} rows; {prompts} are needed")
    model = load_model("smollm2-135m", dtype=workload.dtype)
    tokenizer = load_tokenizer("smollm2-135m")
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        )
        for question in questions
    ]
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.padding_side = "left"
    never = tokenizer.eos_token_id
    assert isinstance(never, int), "the tokenizer has no end of sequence"
    assert never >= workload.vocabulary, "the end-of-sequence id can be drawn"
    for config in (model.config, model.generation_config):
        config.eos_token_id = never
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return texts
