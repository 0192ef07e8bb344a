"""How a policy is made: the model's own weights, those of a checkpoint over them, an adapter over those."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gtpo_lightning.adapters import (
    Adapter,
    adapter_of_folder,
    adapter_of_state,
    adapter_weights,
    check_targets,
    load_adapter,
    load_base,
    put_on,
)
from gtpo_lightning.attention import default_attention
from gtpo_lightning.checkpoints import Origin, StoredPolicy, fingerprint_of, load_weights, read_policy
from gtpo_lightning.lora import LoRA, require_peft
from gtpo_lightning.models import EMBEDDED, load_model, skeleton
from gtpo_lightning.policy import Policy
from gtpo_lightning.quantization import check_quantization

__all__ = ["PolicySource", "check_record", "settings_of"]

logger = logging.getLogger(__name__)


@dataclass
class PolicySource:
    """Makes policies of one model.

    Args:
        model: Hub id, folder or embedded name.
        dtype: How weights are kept; adapters are kept in fp32.
        attention: Attention kernel of transformers; None: flash attention or the default.
        gradient_checkpointing: Whether layers run again in the backward pass.
        lora: Settings of the adapter that is trained; None: the whole model is.
        adapter: A folder with the trained adapter to start from.
        quantization: `4bit` for frozen weights in 4 bits.
        seed: Of the first weights of an adapter.
        device: Type of the device that policies will be on.

    Raises:
        ValueError: 4 bits that cannot be had, or adapter settings that name modules which the model does not have; no
            weights are read for that.
    """

    model: str
    dtype: str = "float32"
    attention: str | None = None
    gradient_checkpointing: bool = False
    lora: LoRA | None = None
    adapter: str | None = None
    quantization: str | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_quantization(self.quantization, self.lora, embedded=self.model in EMBEDDED)
        if self.lora is None:
            return
        require_peft()
        if self.lora.modules_to_save or not self.lora.all_linear:
            check_targets(skeleton(self.model), self.lora)

    def start(self, weights: str | None) -> Policy:
        """The policy that training starts with.

        Args:
            weights: A checkpoint: of a whole policy, which an adapter is then put over, or of an adapter, which brings
                the place of what it lies over.

        Raises:
            ValueError: Weights or adapter that do not fit the model or the settings, or that are gone.
        """
        stored = None if weights is None else read_policy(weights)
        if stored is not None and stored.adapter is not None:
            check_record(self.lora, stored.adapter, f"weights: {stored.path!r}")
            if self.adapter is not None:
                raise ValueError(
                    f"adapter: {self.adapter!r} and the adapter of weights {weights!r} cannot both be the start; "
                    "valid: one of them"
                )
            return self._adapted(stored)
        policy = self._whole(stored)
        if self.lora is None:
            return policy
        adapter = self._put_on(policy, self.lora, Origin.of(weights, fingerprint_of(policy.state_dict())))
        if self.adapter is not None:
            tensors = adapter_of_folder(self.adapter)
            load_adapter(policy.model, tensors, "adapter", self.adapter)
            adapter.start = Origin.of(self.adapter, fingerprint_of(tensors))
        return policy

    def of_checkpoint(self, weights: str | None) -> Policy:
        """The policy of a checkpoint as it was trained, whatever this run's adapter is; None: the model's own."""
        return self._whole() if weights is None else self.of_stored(read_policy(weights))

    def of_stored(
        self, stored: StoredPolicy, argument: str = "weights", *, whole: Callable[[Any], Any] | None = None
    ) -> Policy:
        """The policy of a checkpoint that was read.

        Args:
            stored: What was read.
            argument: What errors name.
            whole: Changes the model before an adapter is put over it.
        """
        if stored.adapter is not None:
            return self._adapted(stored, argument, whole)
        return self._whole(stored, argument)

    def _whole(self, stored: StoredPolicy | None = None, argument: str = "weights") -> Policy:
        """The policy without an adapter, with the weights of a checkpoint that holds all of them or with its own."""
        if stored is not None and self.quantization is not None:
            raise ValueError(
                f"{argument}: {stored.path!r} holds dense weights, which cannot be read into 4 bits; valid: a folder "
                "that export makes of it as model, or quantization: null"
            )
        policy = Policy(self._load(), gradient_checkpointing=self.gradient_checkpointing)
        if stored is not None:
            load_weights(policy, stored, argument)
        return policy

    def _load(self) -> PreTrainedModel:
        attention = self.attention or default_attention(self.dtype, self.device)
        try:
            return load_model(self.model, dtype=self.dtype, attention=attention, quantization=self.quantization)
        except (ImportError, ValueError):
            if attention == self.attention:
                raise
            logger.info("%s cannot use %s; the default attention of transformers is used", self.model, attention)
        return load_model(self.model, dtype=self.dtype, quantization=self.quantization)

    def _adapted(
        self, stored: StoredPolicy, argument: str = "weights", whole: Callable[[Any], Any] | None = None
    ) -> Policy:
        """The policy of a checkpoint that holds adapter weights only."""
        base = stored.base
        policy = self._whole(None if base.source is None else self.read_base(base, stored.path, argument), argument)
        found = fingerprint_of(policy.state_dict())
        if base.fingerprint not in (None, found):
            raise ValueError(_other_base(argument, stored.path, base))
        if whole is not None:
            policy.model = whole(policy.model)
        adapter = self._put_on(policy, settings_of(stored), Origin(base.source, found))
        tensors = adapter_of_state(stored.weights)
        load_adapter(policy.model, tensors, argument, stored.path)
        adapter.start = Origin.of(stored.path, fingerprint_of(tensors))
        return policy

    def _put_on(self, policy: Policy, lora: LoRA, base: Origin) -> Adapter:
        """Puts a fresh adapter over a policy's model."""
        policy.model = put_on(policy.causal_lm, lora, self.seed)  # type: ignore[assignment]
        untrained = fingerprint_of(adapter_weights(policy.model))
        policy.adapter = Adapter(lora, base, untrained, start=Origin(None, base.fingerprint))
        return policy.adapter

    @staticmethod
    def read_base(base: Origin, path: str, argument: str) -> StoredPolicy:
        """The checkpoint of a whole policy that an adapter lies over.

        Raises:
            ValueError: It is gone.
        """
        assert base.source is not None
        if not Path(base.source).exists():
            raise ValueError(
                f"{argument}: {path} holds an adapter over the policy of {base.source}, and that file is gone; valid: "
                "the file where it was, or in a resumed run weights with its place now"
            )
        return read_policy(base.source, argument)

    def resume(self, policy: Policy, record: dict[str, Any] | None) -> None:
        """Makes sure that a restored adapter lies over what it was trained over.

        Args:
            policy: As this run made it; its base is replaced by the recorded one where that differs.
            record: What the checkpoint keeps beside the adapter's weights; None: it holds a whole policy.

        Raises:
            ValueError: Run and checkpoint differ in their adapters, or the base is gone or changed.
        """
        check_record(self.lora, record, "ckpt_path: the checkpoint", resumed=True)
        if record is None or policy.adapter is None:
            return
        wanted, have = Origin(**record["base"]), policy.adapter.base
        if wanted.fingerprint != have.fingerprint:
            stored = None if wanted.source is None else self.read_base(wanted, "the checkpoint", "ckpt_path")
            base = self._whole(stored, "ckpt_path")
            if fingerprint_of(base.state_dict()) != wanted.fingerprint:
                raise ValueError(_other_base("ckpt_path", "the checkpoint", wanted))
            load_base(policy.model, base.state_dict(), "ckpt_path", wanted.source or self.model)
        policy.adapter.base = wanted


def settings_of(stored: StoredPolicy) -> LoRA:
    """The settings that an adapter was trained with."""
    assert stored.adapter is not None
    return LoRA(**stored.adapter["settings"])


def check_record(lora: LoRA | None, record: dict[str, Any] | None, what: str, *, resumed: bool = False) -> None:
    """Refuses a checkpoint whose adapter is not of a run's settings.

    Args:
        lora: Of the run.
        record: What the checkpoint keeps beside an adapter's weights; None: it holds a whole policy.
        what: Argument and file, which the message starts with.
        resumed: Whether the checkpoint is resumed, so that a whole policy is no start for a new adapter.

    Raises:
        ValueError: Only one of them has an adapter, or they differ in what the weights are multiplied by.
    """
    if record is None:
        if resumed and lora is not None:
            raise ValueError(
                f"{what} holds a whole policy, and this run has lora; valid: lora: null, or the file as weights to "
                "train an adapter over it"
            )
        return
    settings = record["settings"]
    if lora is None:
        raise ValueError(
            f"{what} holds an adapter over a frozen model, and this run has none; valid: lora with rank "
            f"{settings['rank']} and alpha {settings['alpha']:g}, or a folder that export makes of it as model"
        )
    for name in ("rank", "alpha", "rslora"):
        if getattr(lora, name) != settings[name]:
            raise ValueError(
                f"{what} holds an adapter with lora.{name} {settings[name]!r}, and this run has "
                f"{getattr(lora, name)!r}; valid: {settings[name]!r}"
            )


def _other_base(argument: str, path: str, base: Origin) -> str:
    return (
        f"{argument}: {path} holds an adapter over {base.source or 'the model'}, which has other weights now, or this "
        "run keeps them in another dtype; valid: the weights it was trained over"
    )
