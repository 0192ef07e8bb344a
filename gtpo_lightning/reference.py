"""The reference policy of the KL part: a frozen copy of the start policy, found again when a run is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from gtpo_lightning.policy import Policy

__all__ = ["Reference", "fingerprint", "ignore_missing_reference", "start_origin"]

_SAMPLED = 1024  # entries of each tensor that a fingerprint reads
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
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(policy.state_dict().items()):
        entries = value.detach().reshape(-1)
        entries = entries[:: max(1, -(-len(entries) // _SAMPLED))].float().cpu()
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(entries.numpy().tobytes())
    return digest.hexdigest()


class Reference(nn.Module):
    """π_ref: a policy that never changes, in evaluation mode, and in no checkpoint.

    It is a submodule, so the strategy places it as it places the policy. A checkpoint holds only where it came from and
    its fingerprint; a resumed run makes it again and compares. A policy with an adapter needs no second copy of the
    base where training started with a fresh adapter: the adapter switched off is the start policy. Where training
    started from a trained adapter, only the copy is.

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

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Adds nothing: a checkpoint would double in size."""
        return {} if destination is None else destination

    def origin(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it, plain values."""
        return _origin(self.source, self.fingerprint)

    def resume(self, origin: dict[str, str | None], build: Callable[[str | None], Policy]) -> None:
        """Becomes the reference of the run that is resumed, unless it is that already or was named by the user.

        Args:
            origin: What `origin` returned in that run, without a fingerprint where it had no reference.
            build: Makes the policy of the model with the weights of a checkpoint, or with its own.

        Raises:
            ValueError: The file of the start policy is gone, or it or the model has other weights now.
        """
        path, wanted = origin["source"], origin["fingerprint"]
        if self.given and wanted not in (None, self.fingerprint):
            rank_zero_warn(
                f"kl_penalty.reference: {self.source} has other weights than the reference of the run that is resumed; "
                "the one given holds, so train/kl starts from another value"
            )
        if self.given or self.fingerprint == wanted:
            self.source = self.source if self.given else path
            return
        if path is not None and not Path(path).is_file():
            raise ValueError(
                f"ckpt_path: the run to resume measures KL to the policy of {path}, and that file is gone; {_ELSE}"
            )
        policy = build(path)
        found = fingerprint(policy)
        if wanted not in (None, found):
            raise ValueError(
                "ckpt_path: the run to resume measures KL to the policy it started from, and "
                f"{path or 'the model'} has other weights now; {_ELSE}"
            )
        self.policy.load_state_dict(policy.state_dict())
        self.source, self.fingerprint = path, found


def _origin(source: str | None, mark: str | None) -> dict[str, str | None]:
    return {"source": None if source is None else str(Path(source).resolve()), "fingerprint": mark}


def start_origin(weights: str | None) -> dict[str, str | None]:
    """What a checkpoint keeps of the start policy in a run without a reference, so that a later one can have it."""
    return _origin(weights, None)


def ignore_missing_reference(module: nn.Module, incompatible_keys: Any) -> None:
    """A hook after `load_state_dict`: the reference is in no checkpoint, so nothing of it is missing."""
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not name.startswith("reference.")]
