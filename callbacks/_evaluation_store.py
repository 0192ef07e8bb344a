"""Where an evaluation keeps finished completions: one file for each policy and its settings."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import cast

import lightning.pytorch as pl

from gtpo_lightning.completion_store import CompletionStore, settings_key, weights_digest
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.strategies import whole

_log = logging.getLogger(__name__)


def open_store(folder: str | Path, trainer: pl.Trainer, pl_module: pl.LightningModule) -> CompletionStore:
    """Opens the file whose completions the policy would sample again, token for token.

    Its name has a key of the weights themselves and of everything else that a completion depends on, so that neither
    other settings nor other weights under one path can mix. The number of samples is no part of it: more go on from
    fewer. `test` and `predict` share a file.

    Args:
        folder: Where the files lie.
        trainer: In the run that evaluates.
        pl_module: The module, with its weights.
    """
    module = cast(PolicyModule, pl_module)
    sampling = asdict(module.eval_sampling)
    samples = sampling.pop("num_samples")
    with whole(trainer, module.policy):
        digest = weights_digest(module.policy)
    settings = {
        **sampling,
        "seed": module.seed,
        "stage": "val" if trainer.state.fn == "validate" else "test",
        "engine": type(module.engine).__name__,
        "precision": str(trainer.precision),
        "weights": digest,
    }
    path = Path(folder) / f"{Path(module.model_name).name}-{settings_key(settings)}.jsonl"
    store = CompletionStore(path, num_samples=samples, prompt_ids=module.codec.prompt_ids, rank=trainer.global_rank)
    _log.info("completions are kept in %s, %d of this policy and these settings are there", path, len(store))
    return store


def check_folder(folder: str | Path) -> None:
    """Makes the folder, so that it fails before any work and not after the first completion.

    Raises:
        ValueError: It cannot be made or written to.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"store: {str(folder)!r} cannot be written to ({error}); valid: a folder, or null") from error
