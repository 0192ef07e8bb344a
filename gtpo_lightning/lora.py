"""Settings of low-rank adapters, and the adapters of a folder written by peft."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["LoRA", "lora_of_folder", "lora_settings", "peft_config", "require_peft"]

_EXTRA = "install the extra with pip install 'gtpo-lightning[peft]', or lora: null and no adapter"
# What our settings say; the rest of a folder's configuration has to be at the defaults of peft.
_KNOWN = {"peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "modules_to_save"}
# What has no effect on a trained adapter.
_IDLE = {"base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"}
_IDLE |= {"fan_in_fan_out", "init_lora_weights"}


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: each target's weight W becomes W + alpha / rank · B·A, and only A and B are trained.

    Sources: Hu et al., arXiv 2106.09685; Kalajdzievski, arXiv 2312.03732 (`rslora`).

    Args:
        rank: Rows of A and columns of B, at least 1.
        alpha: Scale of the update.
        targets: Names of modules (`q_proj`, or a longer end of their path), `all-linear` (every linear layer but the
            head), or a regular expression of whole paths.
        dropout: Probability that an input of A is dropped, in [0, 1). Acts where a gradient is taken and never while
            sampling or in the reference; ratios and the KL of the first step are then no longer exactly 1 and 0.
        rslora: Whether the update is scaled by alpha / √rank, which keeps its size at high ranks.
        modules_to_save: Names of modules that are trained whole beside the adapters, such as `lm_head`.

    Raises:
        ValueError: A value outside its range.

    Example:
        >>> LoRA(rank=8).alpha
        32.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] | str = "all-linear"
    dropout: float = 0.0
    rslora: bool = False
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"lora.rank: {self.rank!r} is not valid; valid: an integer of at least 1")
        if not _is_number(self.alpha) or not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.alpha: {self.alpha!r} is not valid; valid: a finite number above 0")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout: {self.dropout!r} is not valid; valid: a number in [0, 1)")
        if not isinstance(self.rslora, bool):
            raise ValueError(f"lora.rslora: {self.rslora!r} is not valid; valid: true or false")
        text = isinstance(self.targets, str) and self.targets
        if not text and not _is_names(self.targets):
            raise ValueError(
                f"lora.targets: {self.targets!r} is not valid; valid: a list of module names, all-linear, or a regular "
                "expression of module paths"
            )
        if self.modules_to_save is not None and not _is_names(self.modules_to_save):
            raise ValueError(
                f"lora.modules_to_save: {self.modules_to_save!r} is not valid; valid: null or a list of module names"
            )

    @property
    def all_linear(self) -> bool:
        """Whether the targets are every linear layer but the head."""
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"

    def plain(self) -> dict[str, Any]:
        """Plain values, for a checkpoint that is read without running code."""
        return asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(name, str) and name for name in value)


def require_peft() -> None:
    """Refuses adapters where peft is not installed.

    Raises:
        ValueError: With what to install.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"lora: needs the package peft, which is not installed; valid: {_EXTRA}")


def lora_settings(lora: LoRA | Mapping[str, Any] | None, adapter: str | None = None) -> LoRA | None:
    """The settings of a run, from what was given and from the adapter it starts from.

    Args:
        lora: Settings, a mapping of them, or null for none.
        adapter: A folder with a trained adapter, which fills the settings in; those given must be its own.

    Raises:
        ValueError: An unknown setting, a value outside its range, an adapter that cannot be read or is of another
            kind, or settings that are not the adapter's. peft is not installed.
    """
    if isinstance(lora, Mapping):
        names = [field.name for field in fields(LoRA)]
        unknown = sorted(set(lora) - set(names))
        if unknown:
            raise ValueError(f"lora: {', '.join(map(str, unknown))} is not known; valid: {', '.join(names)}")
        lora = LoRA(**lora)
    if lora is not None and not isinstance(lora, LoRA):
        raise ValueError(f"lora: {lora!r} is not valid; valid: null, or settings such as {{rank: 16, alpha: 32}}")
    if lora is None and adapter is None:
        return None
    require_peft()
    if adapter is None:
        return lora
    trained = lora_of_folder(adapter)
    if lora is None:
        return trained
    for name in ("rank", "alpha", "rslora"):
        given, own = getattr(lora, name), getattr(trained, name)
        if given != own:
            raise ValueError(
                f"lora.{name}: {given!r}, but the adapter of {adapter!r} has {own!r}; valid: {own!r}, or lora: null "
                "for the adapter's own settings"
            )
    return lora


def peft_config(lora: LoRA) -> LoraConfig:
    """The settings in the words of peft."""
    from peft import LoraConfig, TaskType

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        modules_to_save=None if lora.modules_to_save is None else list(lora.modules_to_save),
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )


def lora_of_folder(folder: str) -> LoRA:
    """The settings of a trained adapter.

    Args:
        folder: With `adapter_config.json`, as peft's `save_pretrained` and our export write it.

    Raises:
        ValueError: No such folder, or an adapter of another kind: not LoRA, or with a feature that these settings do
            not have (trained biases, DoRA, ranks that differ between layers, an initialisation that changes W).
    """
    path = Path(folder) / "adapter_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"adapter: {folder!r} holds no adapter_config.json that can be read ({type(error).__name__}); valid: a "
            "folder written by peft's save_pretrained or by export --adapter_only"
        ) from error
    strange = _strange(config)
    if strange:
        raise ValueError(
            f"adapter: {folder!r} is of a kind that is not supported ({', '.join(strange)}); valid: LoRA with one "
            "rank, without biases, of W as it is"
        )
    targets = config["target_modules"]
    return LoRA(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=targets if isinstance(targets, str) else sorted(targets),
        dropout=config.get("lora_dropout", 0.0),
        rslora=config.get("use_rslora", False),
        modules_to_save=config.get("modules_to_save") or None,
    )


def _strange(config: Mapping[str, Any]) -> list[str]:
    """Settings of a folder's configuration that go beyond ours, as `name: value`."""
    from peft import LoraConfig

    if config.get("peft_type") != "LORA":
        return [f"peft_type: {config.get('peft_type')}"]
    usual = LoraConfig().to_dict()
    found = {name: value for name, value in config.items() if name not in _KNOWN | _IDLE}
    found = {name: value for name, value in found.items() if value and value != usual.get(name)}
    if config.get("init_lora_weights") not in (True, False, None, "gaussian"):
        found["init_lora_weights"] = config["init_lora_weights"]
    if not config.get("target_modules"):
        found["target_modules"] = config.get("target_modules")
    return [f"{name}: {value}" for name, value in sorted(found.items())]
