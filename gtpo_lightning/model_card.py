"""The model card of an export: what was trained from what, with which settings, and how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from gtpo_lightning.checkpoints import StoredPolicy

__all__ = ["hub_name", "model_card", "without_places"]

_HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What embedded models are called on the hub; `tiny` is in this package only."""

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
# Sections of a run's config.yaml that a card shows beside the hyper-parameters, which the checkpoint has.
_SECTIONS = ("seed_everything", "data", "trainer")
# What says where and how a run was watched, and nothing about the weights.
_IDLE = (
    "logger",
    "callbacks",
    "default_root_dir",
    "enable_progress_bar",
    "enable_model_summary",
    "profiler",
    "barebones",
)


def hub_name(model: str) -> str:
    """What a model is called where others find it: a hub id as it is, of a folder its last part."""
    if model in _HUB:
        return _HUB[model]
    return PurePosixPath(model).name if _is_place(model) or Path(model).is_dir() else model


def model_card(stored: StoredPolicy, model: str, *, adapter: bool) -> str:
    """The text of README.md, with its YAML header.

    Args:
        stored: The checkpoint; the run's `config.yaml` is looked for beside it.
        model: Hub id, folder or embedded name of what was trained.
        adapter: Whether the folder holds an adapter only.
    """
    settings = dict(stored.hyper_parameters)
    method = str(settings.pop("_class_path", "")).rpartition(".")[2].removesuffix("Module").lower()
    settings |= {
        name: value for name, value in _config(stored.path).items() if name not in settings or name == "trainer"
    }
    base = hub_name(model)
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gtpo-lightning", *([method] if method else []), *(["lora"] if stored.adapter is not None else [])],
    }
    if base != "tiny" and not Path(model).is_dir():
        header = {"base_model": base, **header}
    data = _data_set(settings.get("data"))
    if data is not None:
        header["datasets"] = [data]
    shown = without_places({name: value for name, value in settings.items() if value is not None})
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n",
            f"# {base}, trained with gtpo_lightning\n",
            _history(stored, base, method, adapter=adapter) + "\n",
            (_LOAD_ADAPTER.replace("BASE", base) if adapter else _LOAD),
            "## Settings of the run\n",
            f"```yaml\n{yaml.safe_dump(shown, sort_keys=True, allow_unicode=True)}```",
            "",
        ]
    )


def _history(stored: StoredPolicy, base: str, method: str, *, adapter: bool) -> str:
    """What was done, in two or three sentences."""
    how = {"sft": " by supervised fine-tuning", "gtpo": " by group-relative policy optimisation"}.get(method, "")
    said = f"`{base}`{how}, after {stored.step:,} optimizer steps (epoch {stored.epoch})."
    if stored.adapter is None:
        return f"{said} All weights were trained."
    what = "This folder holds the adapter only" if adapter else "The adapter is merged into the weights"
    over = stored.base.source
    under = f" It lies over the policy of `{Path(over).name}`, not over the model itself." if over else ""
    return f"{said} Low-rank adapters were trained. {what}.{under}"


def _config(checkpoint: str) -> dict[str, Any]:
    """Of the run's config.yaml, if it lies beside the checkpoint or one folder up, what a card shows."""
    for folder in list(Path(checkpoint).resolve().parents)[:2]:
        path = folder / "config.yaml"
        if path.is_file():
            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError):
                return {}
            kept = {name: found[name] for name in _SECTIONS if isinstance(found, dict) and found.get(name) is not None}
            if isinstance(kept.get("trainer"), dict):
                kept["trainer"] = {k: v for k, v in kept["trainer"].items() if v is not None and k not in _IDLE}
            return kept
    return {}


def _data_set(data: Any) -> str | None:
    """The hub id of the training data, if it came from the hub."""
    source = (data.get("init_args") or {}).get("source") if isinstance(data, dict) else None
    is_hub = isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()
    return source if is_hub and not Path(str(source)).suffix.startswith(".json") else None


def without_places(value: Any) -> Any:
    """Plain values for YAML, in which a path of this machine is only its last part.

    Example:
        >>> without_places({"source": "/data/sets/train.jsonl", "lr": 0.1, "name": "a/b"})
        {'source': 'train.jsonl', 'lr': 0.1, 'name': 'a/b'}
    """
    if isinstance(value, Mapping):
        return {str(key): without_places(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(item) for item in value]
    if isinstance(value, str):
        return PureWindowsPath(value).name if _is_place(value) else value
    return value if isinstance(value, (int, float, bool, type(None))) else str(value)


def _is_place(text: str) -> bool:
    """Whether a text is a path that means something on one machine only."""
    absolute = text.startswith(("/", "~", "..")) or PureWindowsPath(text).is_absolute()
    return absolute and "\n" not in text and len(text) > 1
