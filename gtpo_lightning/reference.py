"""The reference policy of the KL part: the start policy, frozen, found again when a run is resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from gtpo_lightning.adapters import (
    adapter_of_folder,
    adapter_of_state,
    adapter_weights,
    second_adapter,
    with_second_adapter,
    without_adapter,
)
from gtpo_lightning.checkpoint_folders import in_parts
from gtpo_lightning.checkpoints import Origin, fingerprint_of, read_policy
from gtpo_lightning.policy import Policy

__all__ = [
    "AdapterReference",
    "Reference",
    "fingerprint",
    "ignore_missing_reference",
    "make_reference",
    "start_origin",
]

Build = Callable[[str | None], Policy]
"""Makes the policy of the model with the weights of a checkpoint, or with its own."""

_ELSE = (
    "valid: the file where it was, KLPenalty(reference=FILE) or --kl_penalty.reference FILE with a checkpoint of this "
    "package whose policy is the reference, or a run without the part (--kl_penalty null)"
)


def fingerprint(policy: nn.Module) -> str:
    """A hash of names, shapes and up to 1,024 evenly spaced entries of each tensor: other weights, another hash.

    Example:
        >>> one, two = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(two)
        (True, False)
    """
    return fingerprint_of(policy.state_dict())


def make_reference(
    policy: Policy, weights: str | None, given: str | None, build: Build
) -> Reference | AdapterReference:
    """The reference of a run that starts now.

    Args:
        policy: The start policy.
        weights: The checkpoint its weights came from; None: those of the model itself.
        given: A checkpoint whose policy is the reference in place of the start policy.
        build: Makes a policy.

    Raises:
        ValueError: `given` does not fit the model.
    """
    if given is not None:
        return _reference_of(given, policy, build, given=True)
    if policy.adapter is None:
        return Reference(copy.deepcopy(policy), weights)
    tensors, adapter = adapter_weights(policy.model), policy.adapter
    found = fingerprint_of(tensors)
    if found == adapter.untrained:
        return AdapterReference(policy, Origin(None, adapter.base.fingerprint))
    second_adapter(policy.model, tensors, "weights", adapter.start.source or "the module")
    return AdapterReference(policy, adapter.start if adapter.start.fingerprint == found else Origin(None, found))


def _reference_of(path: str, policy: Policy, build: Build, *, given: bool = False) -> Reference | AdapterReference:
    """The policy of a checkpoint, or of an adapter's folder; beside an adapter over the same base only an adapter."""
    if policy.adapter is not None:
        tensors = (
            adapter_of_folder(path) if Path(path).is_dir() and not in_parts(path) else _adapter_beside(path, policy)
        )
        if tensors is not None:
            second_adapter(policy.model, tensors, "reference", path)
            return AdapterReference(policy, Origin.of(path, fingerprint_of(tensors)), given=given)
    return Reference(build(path), path, given=given)


def _adapter_beside(path: str, policy: Policy) -> dict[str, Any] | None:
    """The adapter of a checkpoint if it is one of the policy's kind, over the policy's base."""
    assert policy.adapter is not None
    stored = read_policy(path, "reference")
    if stored.adapter is None or stored.base.fingerprint != policy.adapter.base.fingerprint:
        return None
    own, settings = policy.adapter.lora, stored.adapter["settings"]
    alike = all(settings[name] == getattr(own, name) for name in ("rank", "alpha", "rslora"))
    return adapter_of_state(stored.weights) if alike else None


class Reference(nn.Module):
    """π_ref: a policy that never changes, in evaluation mode, and in no checkpoint.

    It is a submodule, so the strategy places it as it places the policy. A checkpoint holds only where it came from and
    its fingerprint; a resumed run makes it again and compares.

    Args:
        policy: The frozen policy; its parameters lose their gradient here.
        source: The checkpoint its weights came from; None: those of the model itself.
        given: Whether the user named `source` as the reference; then a resumed run does not replace it.
    """

    def __init__(self, policy: Policy, source: str | None, *, given: bool = False) -> None:
        super().__init__()
        self.policy = policy.requires_grad_(False)
        self.source = source
        self.given = given
        self.fingerprint = fingerprint(policy)

    @contextmanager
    def reading(self) -> Iterator[Policy]:
        """The policy to score with."""
        yield self.policy

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Adds nothing: a checkpoint would double in size."""
        return {} if destination is None else destination

    def origin(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it, plain values."""
        return Origin.of(self.source, self.fingerprint).plain()

    def resume(self, origin: dict[str, str | None], build: Build) -> Reference | AdapterReference:
        """Becomes the reference of the run that is resumed, unless it is that already or was named by the user.

        Args:
            origin: What `origin` returned in that run, without a fingerprint where it had no reference.
            build: Makes a policy.

        Returns:
            The reference from now on: this one.

        Raises:
            ValueError: The file of the start policy is gone, or it or the model has other weights now.
        """
        path, wanted = origin["source"], origin["fingerprint"]
        _warn_of_another(self.given, self.source, self.fingerprint, wanted)
        if self.given or self.fingerprint == wanted:
            self.source = self.source if self.given else path
            return self
        _check_there(path)
        policy = build(path)
        found = fingerprint(policy)
        _check_same(path, wanted, found)
        self.policy.load_state_dict(policy.state_dict())
        self.source, self.fingerprint = path, found
        return self


class AdapterReference:
    """π_ref where an adapter is trained: the same base, with the adapter switched off or with a frozen second one.

    A fresh adapter does nothing, so the policy without it is the start policy and nothing is copied. Where training
    starts from a trained adapter, only that adapter is kept a second time. Neither is in a checkpoint.

    Args:
        policy: The policy that is trained; the same object, read differently.
        origin: Where the reference's adapter came from; with the fingerprint of the base: no adapter at all.
        given: Whether the user named the source as the reference; then a resumed run does not replace it.
    """

    def __init__(self, policy: Policy, origin: Origin, *, given: bool = False) -> None:
        self.policy = policy
        self.start = origin
        self.given = given

    @property
    def fingerprint(self) -> str | None:
        """Of the second adapter's weights, or of the base's where there is none."""
        return self.start.fingerprint

    @contextmanager
    def reading(self) -> Iterator[Policy]:
        """The policy to score with; the trained adapter is on again afterwards."""
        assert self.policy.adapter is not None
        off = self.fingerprint == self.policy.adapter.base.fingerprint
        with (without_adapter if off else with_second_adapter)(self.policy.model):
            yield self.policy

    def origin(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it, plain values."""
        return self.start.plain()

    def resume(self, origin: dict[str, str | None], build: Build) -> Reference | AdapterReference:
        """As `Reference.resume`.

        Returns:
            The reference from now on: this one, or one of another kind.
        """
        wanted = Origin(**origin)
        _warn_of_another(self.given, self.start.source, self.fingerprint, wanted.fingerprint)
        if self.given or self.fingerprint == wanted.fingerprint:
            self.start = self.start if self.given else wanted
            return self
        _check_there(wanted.source)
        if wanted.source is None:
            assert self.policy.adapter is not None
            reference = AdapterReference(self.policy, Origin(None, self.policy.adapter.base.fingerprint))
        else:
            reference = _reference_of(wanted.source, self.policy, build)  # type: ignore[assignment]
        _check_same(wanted.source, wanted.fingerprint, reference.fingerprint)
        return reference


def _warn_of_another(given: bool, source: str | None, found: str | None, wanted: str | None) -> None:
    if given and wanted not in (None, found):
        rank_zero_warn(
            f"kl_penalty.reference: {source} has other weights than the reference of the run that is resumed; the one "
            "given holds, so train/kl starts from another value"
        )


def _check_there(path: str | None) -> None:
    if path is not None and not Path(path).exists():
        raise ValueError(
            f"ckpt_path: the run to resume measures KL to the policy of {path}, and that file is gone; {_ELSE}"
        )


def _check_same(path: str | None, wanted: str | None, found: str | None) -> None:
    if wanted not in (None, found):
        raise ValueError(
            "ckpt_path: the run to resume measures KL to the policy it started from, and "
            f"{path or 'the model'} has other weights now; {_ELSE}"
        )


def start_origin(weights: str | None, policy: Policy) -> dict[str, str | None]:
    """What a checkpoint keeps of the start policy in a run without a reference, so that a later one can have it."""
    return (Origin.of(weights) if policy.adapter is None else policy.adapter.start).plain()


def ignore_missing_reference(module: nn.Module, incompatible_keys: Any) -> None:
    """A hook after `load_state_dict`: the reference is in no checkpoint, so nothing of it is missing."""
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not name.startswith("reference.")]
