"""Adapters by peft on a policy's model: put on once, loaded, compared, switched off, and kept apart in checkpoints."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gtpo_lightning.checkpoints import Origin, misfit
from gtpo_lightning.lora import LoRA, peft_config

__all__ = [
    "Adapter",
    "adapter_dropouts",
    "adapter_of_folder",
    "adapter_of_state",
    "adapter_weights",
    "check_targets",
    "effective_weight",
    "load_adapter",
    "load_base",
    "put_on",
    "second_adapter",
    "seed_dropout",
    "untied",
    "with_second_adapter",
    "without_adapter",
]

_TRAINED, _SECOND = "default", "reference"
_PART = r"\.(lora_\w+|modules_to_save)"  # peft's places for an adapter's weights, each followed by its name


@dataclass
class Adapter:
    """What a policy knows about its adapter beside the weights.

    Args:
        lora: Its settings.
        base: Where the weights under it came from.
        untrained: Fingerprint of the adapter as it was put on, when it did nothing.
        start: Where the trained adapter that it started from came from; no source: it started untrained.
    """

    lora: LoRA
    base: Origin
    untrained: str
    start: Origin

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps, plain values."""
        return {"settings": self.lora.plain(), "base": self.base.plain()}


# Putting on


def put_on(model: PreTrainedModel, lora: LoRA, seed: int) -> nn.Module:
    """The model under fresh adapters in fp32, everything else frozen; with B = 0 it computes what it did before.

    A comes from a seed of its own, so that every process of a run starts from the same one and random numbers elsewhere
    do not move.

    Args:
        model: Changed in place.
        lora: The settings.
        seed: Of the run.

    Raises:
        ValueError: The model has adapters already, or lacks a module that the settings name.
    """
    from peft import get_peft_model

    if any(name.endswith("lora_A") for name, _ in model.named_modules()):
        raise ValueError(f"lora: {type(model).__name__} has adapters already; valid: a model without, or one wrap")
    check_targets(model, lora)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_seed("adapter", seed))
        return get_peft_model(model, peft_config(lora))


def _seed(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big")


def check_targets(model: nn.Module, lora: LoRA) -> None:
    """Refuses names of modules that the model does not have; peft is silent as long as one of a list is found.

    Raises:
        ValueError: With the names that there are.
    """
    names = [name for name, _ in model.named_modules() if name]
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    for setting, given in (("targets", lora.targets), ("modules_to_save", lora.modules_to_save or [])):
        if isinstance(given, str):
            if lora.all_linear or any(re.fullmatch(given, name) for name in names):
                continue
            wrong = [given]
        else:
            wrong = [one for one in given if not any(name == one or name.endswith(f".{one}") for name in names)]
        if wrong:
            known = sorted({name.rpartition(".")[2] for name in (linear if setting == "targets" else names)})
            raise ValueError(
                f"lora.{setting}: {', '.join(map(repr, wrong))} matches no module of {type(model).__name__}; valid: "
                f"{', '.join(name for name in known if not name.isdigit())}"
            )


# Weights


def adapter_weights(model: nn.Module, name: str = _TRAINED) -> dict[str, nn.Parameter]:
    """An adapter's own parameters, named as peft names them in a saved folder."""
    mine = re.compile(rf"{_PART}\.{name}(?=\.|$)")
    named = model.named_parameters(remove_duplicate=False)
    return {_saved_name(full, name): parameter for full, parameter in named if mine.search(full)}


def _saved_name(full: str, name: str = _TRAINED) -> str:
    short = re.sub(rf"{_PART}\.{name}(?=\.|$)", r".\1", full)
    return short.replace(".modules_to_save", "")


def adapter_of_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter in a checkpoint's policy, named as in a saved folder; what else is there is what it lies over."""
    mine = re.compile(rf"{_PART}\.{_TRAINED}(?=\.|$)")
    return {_saved_name(name.removeprefix("model.")): value for name, value in weights.items() if mine.search(name)}


def adapter_of_folder(folder: str) -> dict[str, Tensor]:
    """The weights in a folder that peft's `save_pretrained` or our export wrote.

    Raises:
        ValueError: There are none, or they cannot be read.
    """
    from safetensors.torch import load_file

    tensors, old = Path(folder) / "adapter_model.safetensors", Path(folder) / "adapter_model.bin"
    try:
        found = load_file(tensors) if tensors.is_file() else torch.load(old, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file of another kind makes the readers raise
        raise ValueError(
            f"adapter: {folder!r} holds no adapter_model.safetensors that can be read ({type(error).__name__}); valid: "
            "a folder written by peft's save_pretrained or by export --adapter_only"
        ) from error
    # peft adds the whole weight below an adapter of embeddings, which is the model's own.
    return {name: value for name, value in found.items() if not name.endswith(".base_layer.weight")}


@torch.no_grad()
def load_adapter(
    model: nn.Module, tensors: Mapping[str, Tensor], argument: str, path: str, *, name: str = _TRAINED
) -> None:
    """Puts an adapter's weights in place.

    Args:
        model: Under adapters.
        tensors: Named as `adapter_weights` names them.
        argument: What errors name.
        path: Where the weights came from.
        name: The adapter's.

    Raises:
        ValueError: They belong to an adapter of other modules or of another rank.
    """
    own = adapter_weights(model, name)
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    sizes = [key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape]
    if missing or unexpected or sizes:
        message = misfit(argument, path, missing, unexpected, sizes)
        raise ValueError(f"{message}, and lora.rank, targets and modules_to_save as there")
    for key, parameter in own.items():
        parameter.copy_(tensors[key])


@torch.no_grad()
def load_base(model: nn.Module, weights: Mapping[str, Tensor], argument: str, path: str) -> None:
    """Puts the weights of a whole model in place below the adapters.

    Args:
        model: Under adapters.
        weights: As `Policy.state_dict` of the model without adapters names them.
        argument: What errors name.
        path: Where the weights came from.

    Raises:
        ValueError: They are those of another model, or the model's are spread over processes.
    """
    base: Any = model.get_base_model()  # type: ignore[operator]
    own = {}
    for full, value in (*base.named_parameters(remove_duplicate=False), *base.named_buffers()):
        plain = "model." + full.replace(".base_layer.", ".").replace(".original_module.", ".")
        if not re.search(_PART, full) and plain in weights:
            own[plain] = value
    if any(hasattr(value, "to_local") for value in own.values()):
        raise ValueError(
            f"{argument}: the adapter lies over the policy of {path}, which has to be read before it is spread over "
            f"processes; valid: weights: {path}"
        )
    sizes = [name for name, value in own.items() if value.shape != weights[name].shape]
    missing = sorted(weights.keys() - own.keys())
    if missing or sizes:
        raise ValueError(misfit(argument, path, [], missing, sizes))
    for name, value in own.items():
        value.copy_(weights[name])


# Switching


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model as it is below the adapters, which are on again afterwards."""
    with model.disable_adapter():  # type: ignore[operator]
        yield


def second_adapter(model: nn.Module, tensors: Mapping[str, Tensor], argument: str, path: str) -> None:
    """Keeps a frozen adapter beside the trained one; the base is shared.

    Raises:
        ValueError: The weights do not fit.
    """
    peft: Any = model
    if _SECOND not in peft.peft_config:
        config = copy.deepcopy(peft.peft_config[_TRAINED])
        config.inference_mode = True
        peft.add_adapter(_SECOND, config)
        peft.set_adapter(_TRAINED)
    load_adapter(model, tensors, argument, path, name=_SECOND)
    for parameter in adapter_weights(model, _SECOND).values():
        parameter.requires_grad_(False)


@contextmanager
def with_second_adapter(model: nn.Module) -> Iterator[None]:
    """The model with the adapter that `second_adapter` keeps; the trained one is on again afterwards."""
    peft: Any = model
    peft.set_adapter(_SECOND, inference_mode=True)
    try:
        yield
    finally:
        peft.set_adapter(_TRAINED)


def effective_weight(layer: nn.Module) -> Tensor:
    """The weight that a linear layer computes with: W, or W + alpha / rank · B·A where an adapter is on, (V, D)."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return weight
    tuned: Any = layer
    for name in tuned.active_adapters:
        if name in tuned.lora_A:
            weight = weight + tuned.get_delta_weight(name)
    return weight


def seed_dropout(lora: LoRA | None, *key: object) -> None:
    """Seeds torch where adapters have dropout, so that a resumed run drops what an uninterrupted one would."""
    if lora is not None and lora.dropout > 0:
        torch.manual_seed(_seed("dropout", *key))


def adapter_dropouts(model: nn.Module) -> list[nn.Module]:
    """The modules that drop inputs of adapters."""
    places = (module.lora_dropout for module in model.modules() if hasattr(module, "lora_A"))
    return [dropout for place in places for dropout in place.values()]  # type: ignore[operator,union-attr]


def untied(model: PreTrainedModel) -> None:
    """Gives the head a weight of its own where it shares the embeddings' and an adapter changes one of the two.

    Merging would else change both, and a saved model would tie them again.
    """
    places = (model.get_input_embeddings(), model.get_output_embeddings())
    config = model.config.get_text_config(decoder=True)
    adapted = any(hasattr(place, "base_layer") or hasattr(place, "modules_to_save") for place in places)
    if not adapted or not config.tie_word_embeddings:
        return
    head: Any = places[1]
    head = getattr(head, "base_layer", getattr(head, "original_module", head))
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    config.tie_word_embeddings = model.config.tie_word_embeddings = False
