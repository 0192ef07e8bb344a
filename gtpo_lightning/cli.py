"""The command line: `LightningCLI` with a named, optional slot for each part of the method."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

# Loaded for their names: `--data Arithmetic` finds only classes that are imported.
from gtpo_lightning import datamodules  # noqa: F401
from gtpo_lightning.callbacks import (
    CompletionLog,
    ConflictMasking,
    EntropyCollapse,
    EntropyFilter,
    EntropyRegularizer,
    Evaluator,
    KLPenalty,
)
from gtpo_lightning.checkpoint_folders import in_parts, read_record, with_folders
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.strategies import check_folder, check_strategy

__all__ = ["GTPOCLI", "PARTS", "check", "main", "run"]

PARTS: dict[str, type[pl.Callback]] = {
    "conflict_masking": ConflictMasking,
    "entropy_filter": EntropyFilter,
    "entropy_regularizer": EntropyRegularizer,
    "kl_penalty": KLPenalty,
    "entropy_collapse": EntropyCollapse,
    "evaluator": Evaluator,
    "completion_log": CompletionLog,
}
"""Every part and the key it has in YAML and on the command line; null switches it off."""


_TOOLS = {
    "ablate": "gtpo_lightning.ablation",
    "report": "gtpo_lightning.report",
    "export": "gtpo_lightning.export",
}


class GTPOCLI(LightningCLI):
    """`LightningCLI` with slots for the parts, and a command line that wins over a checkpoint's hyper-parameters."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds one optional argument for each part."""
        for name, part in PARTS.items():
            summary = (part.__doc__ or name).strip().splitlines()[0]
            slot: Any = part | None
            parser.add_argument(f"--{name}", type=slot, default=None, help=f"{summary} null: off.")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the arguments, and keeps apart what was really given in files and on the command line."""
        parse: Any = parser.parse_object if isinstance(args, (dict, Namespace)) else parser.parse_args
        self.config = parse(args)
        self._given = parse(args, defaults=False)

    def _parse_ckpt_path(self) -> None:
        """Takes hyper-parameters from the checkpoint only where neither file nor command line gave them."""
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not _is_checkpoint(path):
            return
        trainer = self.config[subcommand].trainer
        if Path(path).is_dir():
            check_folder(path, trainer, fit=subcommand == "fit")
            if not in_parts(path):
                return
        checkpoint = read_record(path)
        stored = checkpoint.get("hyper_parameters", {})
        given = self._given[subcommand].get("model") or {}
        trained, asked = stored.pop("_class_path", None), given.get("class_path")
        if trained is None or asked is None:
            return
        if subcommand == "fit" and import_object(trained) is not import_object(asked):
            raise ValueError(
                f"ckpt_path: {path} was made by {trained} and this run is of {asked}; valid: a checkpoint of the "
                f"same module, or --model.weights {path} to start a new run from its policy"
            )
        init_args = self.config[subcommand].model.init_args
        _forget_start(init_args, checkpoint.get("adapter"))
        explicit = set(vars(given.get("init_args") or Namespace()))
        self._tell_changes({name: value for name, value in stored.items() if name in explicit}, init_args)
        arguments = set(signature(import_object(asked)).parameters)
        missing = {name: value for name, value in stored.items() if name in arguments - explicit}
        if missing:
            model = {"class_path": given["class_path"], "init_args": missing}
            self.config = self.parser.parse_object({subcommand: {"model": model}}, self.config)

    @staticmethod
    def _tell_changes(stored: dict[str, Any], given: Namespace) -> None:
        """Names settings whose value differs from that of the run which made the checkpoint."""
        plain = (str, int, float, bool)
        changed = [
            f"{name}: {old} -> {given[name]}"
            for name, old in stored.items()
            if isinstance(old, plain) and isinstance(given.get(name), plain) and given[name] != old
        ]
        if changed:
            rank_zero_warn(
                f"ckpt_path: settings differ from the checkpoint's, and this run's hold: {'; '.join(changed)}"
            )

    def instantiate_classes(self) -> None:
        """Builds everything, and adds data, parts and optimizer to the hyper-parameters that loggers show."""
        check_strategy((self.config[self.subcommand] if self.subcommand else self.config).trainer)
        super().instantiate_classes()
        self._dump_config()
        shown = {name: self.config_dump.get(name) for name in ("data", *PARTS)}
        built = self.config_dump["model"].get("init_args", {})
        shown |= {name: built.get(name) for name in ("optimizer", "lr_scheduler")}
        self.model.save_hyperparameters({name: value for name, value in shown.items() if value is not None})

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Lets `--optimizer` and `--lr_scheduler` replace the module's own, built once there are parameters."""
        optimizer, scheduler = (self._get(self.config_init, name) for name in ("optimizer", "lr_scheduler"))
        if optimizer:
            self.model.build_optimizer = partial(instantiate_class, init=optimizer)
        if scheduler:
            self.model.build_lr_scheduler = partial(instantiate_class, init=scheduler)

    def before_instantiate_classes(self) -> None:
        """Refuses a run without a module that can do it; predictions go to a file, not to memory.

        Raises:
            ValueError: `model` was left out, or training was asked of a module that does not train.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        model = config.model
        if model is None or (self.subcommand in (None, "fit") and import_object(model.class_path) is PolicyModule):
            raise ValueError(
                "model.class_path: missing; valid: gtpo_lightning.GTPOModule or gtpo_lightning.SFTModule, as "
                "configs/gtpo.yaml and configs/sft.yaml give it"
            )
        if self.subcommand == "predict" and config.get("return_predictions") is None:
            config["return_predictions"] = False
        if self.subcommand in ("validate", "test") and config.evaluator is None:
            rank_zero_warn(f"evaluator: null, so {self.subcommand} samples and judges nothing")
        elif self.subcommand in ("validate", "test"):
            # The evaluator has a table of its own.
            config["verbose"] = self._given[self.subcommand].get("verbose", False)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Builds the trainer with the parts that are switched on."""
        parts = [self._get(self.config_init, name) for name in PARTS]
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        config["plugins"] = with_folders(config.get("plugins"))
        return self._instantiate_trainer(config, [part for part in parts if part is not None])


def _forget_start(init_args: Namespace, adapter: dict[str, Any] | None) -> None:
    """Takes away what a run started from: the checkpoint has the weights, and their first source may be gone.

    A checkpoint of adapters needs what they lie over, and has its place if that is no longer where it was given.
    """
    for name in ("weights", "adapter"):
        given = init_args.get(name)
        if given is not None and (adapter is None or not Path(given).exists()):
            init_args[name] = None
    if adapter is not None and init_args.get("weights") is None:
        init_args["weights"] = adapter["base"]["source"]


def _is_checkpoint(path: str) -> bool:
    """Whether a checkpoint is a file or a folder; what else Lightning knows is left to it, nothing there is refused.

    Raises:
        ValueError: There is no such file or folder, or a folder that holds checkpoints and is none.
    """
    place = Path(path)
    if str(path) in ("best", "last", "hpc", "registry") or ":" in str(path):
        return False
    if not place.exists():
        raise ValueError(f"ckpt_path: {path!r} does not exist; valid: a checkpoint written by a run of this package")
    within = sorted(file.name for file in place.glob("*.ckpt")) if place.is_dir() else []
    if within:
        raise ValueError(f"ckpt_path: {path!r} is a folder; valid: one of the checkpoints in it, {', '.join(within)}")
    return True


def import_object(path: str) -> Any:
    """What a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class _Parser(GTPOCLI):
    """Parses and checks a command line; builds nothing and runs nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses once; what was given matters to a run only."""
        parse: Any = parser.parse_args
        self.config = self._given = parse(args)

    def _set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        """Builds nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def main(args: list[str] | None = None) -> GTPOCLI | None:
    """Runs the command line.

    Args:
        args: Arguments; None takes those of the process.

    Returns:
        The command line after its run, with `trainer`, `model` and `datamodule`; None after `ablate`, `report` and
        `export`, which run and read whole grids or convert a checkpoint, and end the process where they fail.
    """
    words = sys.argv[1:] if args is None else args
    if words[:1] and words[0] in _TOOLS:
        _run_tool(*words)
        return None
    _show_log()
    # A tokenizer's own threads deadlock after a fork, and the loaders here need none.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _see_current_folder()
    return _parse(GTPOCLI, args)


def check(args: list[str]) -> None:
    """Parses a command line and runs nothing.

    Raises:
        ValueError: With the parser's own words, where the command line would be refused.
    """
    said = io.StringIO()
    _see_current_folder()
    try:
        with redirect_stderr(said):
            _parse(_Parser, args)
    except SystemExit as error:
        raise ValueError(said.getvalue().rpartition("error: ")[2].strip()) from error


def _parse(kind: type[GTPOCLI], args: list[str] | None) -> GTPOCLI:
    return kind(
        PolicyModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        parser_kwargs={
            "epilog": "Also: ablate runs a grid of runs, report shows runs on a page, export makes a folder of a "
            "checkpoint that other programs load; each has --help."
        },
        args=args,
    )


def _run_tool(name: str, *args: str) -> None:
    """Runs one of the other commands; a failure ends the process with its exit code."""
    tool: Any = import_module(_TOOLS[name])
    code = tool.main(list(args), check) if name == "ablate" else tool.main(list(args))
    if code:
        raise SystemExit(code)


def _see_current_folder() -> None:
    """Finds reward functions and data modules of the user's own."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _show_log() -> None:
    """Shows what this package logs, from the first process; a program that set up logging of its own keeps it."""
    logger = logging.getLogger("gtpo_lightning")
    if getattr(rank_zero_only, "rank", 0) == 0 and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def run() -> None:
    """The installed command `gtpo`: `main` without its return value, which a shell would take for a failure."""
    main()
