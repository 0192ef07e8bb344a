"""Every variant of the shipped grids trains from the command line, with the tiny model in place of its own."""

import shlex
from pathlib import Path

import pytest
import torch
import yaml

from gtpo_lightning.ablation.plan import make_plan
from gtpo_lightning.ablation.settings import read_settings
from gtpo_lightning.callbacks import ConflictMasking, EntropyFilter, EntropyRegularizer, KLPenalty
from gtpo_lightning.cli import main

ROOT = Path(__file__).parents[2]
SMALL = """
    -c configs/models/tiny.yaml -c configs/data/arithmetic.yaml -c configs/trainer/cpu.yaml --data.size=8
    --data.val_size=4 --data.batch_size=4 --data.val_batch_size=4 --trainer.max_steps=2 --trainer.val_check_interval=2
    --trainer.enable_progress_bar=false --model.max_completion_length=8 --model.weights=null
"""
PAPER = ConflictMasking, EntropyFilter, EntropyRegularizer
# The paper's comparison: the parts each variant has, and its scaling of the advantage; None: no reinforcement learning.
EXPECTED = {
    "sft": None,
    "grpo": ((KLPenalty,), "group"),
    "grpo_kl": ((KLPenalty,), "group"),
    "gtpo": ((*PAPER, KLPenalty), "none"),
    "only_masking": ((ConflictMasking, KLPenalty), "none"),
    "only_filter": ((EntropyFilter, KLPenalty), "none"),
    "only_regularizer": ((EntropyRegularizer, KLPenalty), "none"),
    "no_masking": ((EntropyFilter, EntropyRegularizer, KLPenalty), "none"),
    "no_filter": ((ConflictMasking, EntropyRegularizer, KLPenalty), "none"),
    "no_regularizer": ((ConflictMasking, EntropyFilter, KLPenalty), "none"),
}


def plan(name, folder):
    grid, _ = read_settings(["-c", str(ROOT / f"configs/{name}.yaml"), f"--folder={folder}", "--seeds=[0]"])
    return make_plan(grid)


def name_of(run):
    return "/".join(filter(None, (run.regime, run.label)))


def names(grid):
    given = yaml.safe_load((ROOT / f"configs/{grid}.yaml").read_text())
    assert given["variants"]
    return [name_of(run) for run in plan(grid, "runs")]


def fit(run):
    """Runs a command of a grid; what makes it small comes last, so it wins."""
    command, *words = run.words
    small = [*shlex.split(SMALL), "--model.optimizer.init_args.weight_decay=0"]  # only a gradient moves a weight
    if "configs/sft.yaml" not in words:
        small += ["--model.group_size=4", '--model.rewards={"tests.helpers.training.vowels": 1.0}']
    return main([command, *words, *small])


def start_and_end(cli):
    fresh = cli.model.build_policy(None)
    names, ends = zip(*cli.model.policy.named_parameters(), strict=True)
    starts = dict(fresh.named_parameters())
    return [(starts[name], end) for name, end in zip(names, ends, strict=True)]


@pytest.mark.parametrize("name", names("ablation"))
def test_each_variant_of_the_papers_comparison_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (run,) = (run for run in plan("ablation", tmp_path) if name_of(run) == name)
    cli = fit(run)
    assert cli.trainer.global_step == 2
    assert (run.folder / "fit/results.json").is_file()
    assert any(not torch.equal(start, end) for start, end in start_and_end(cli))
    expected = EXPECTED["gtpo" if name.startswith("gtpo") else name]
    if expected is None:
        assert type(cli.model).__name__ == "SFTModule"
        return
    parts = [type(callback) for callback in cli.trainer.callbacks if type(callback) in (*PAPER, KLPenalty)]
    assert set(parts) == set(expected[0])
    assert cli.model.advantage_scale == expected[1]
    (kl,) = (callback for callback in cli.trainer.callbacks if type(callback) is KLPenalty)
    assert kl.beta == (1e-6 if name == "grpo_kl" else 0)
    if run.key:
        (part,) = (callback for callback in cli.trainer.callbacks if type(callback) is EntropyRegularizer)
        assert part.gamma == run.value


OPTIONS = {
    "conflict_position": (ConflictMasking, {"scope": "position"}),
    "conflict_shift": (ConflictMasking, {"shift": 2}),
    "adaptive_threshold": (EntropyFilter, {"adaptive": 0.9}),
    "group_baseline": (EntropyRegularizer, {"baseline": "group"}),
    "gamma_warmup": (EntropyRegularizer, {"warmup_steps": 100}),
    "keep_at_least": (EntropyFilter, {"keep_at_least": 0.25}),
}


@pytest.mark.parametrize("name", [f"off_policy/{option}" for option in OPTIONS])
@pytest.mark.filterwarnings("ignore:loss_temperature")
def test_each_option_of_the_toy_grid_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (run,) = (run for run in plan("ablation_toy", tmp_path) if name_of(run) == name)
    cli = fit(run)
    assert cli.trainer.global_step == 2
    assert (cli.model.temperature, cli.model.loss_temperature) == (0.6, 1.0)
    part, settings = OPTIONS[run.variant]
    (found,) = (callback for callback in cli.trainer.callbacks if type(callback) is part)
    assert {key: getattr(found, key) for key in settings} == settings


def test_the_toy_grid_has_what_the_papers_comparison_has():
    found = {name.split("/")[1] for name in names("ablation_toy")}
    paper = {"sft", "grpo", "grpo_kl", "gtpo", "only_masking", "only_filter", "only_regularizer"}
    assert paper | set(OPTIONS) | {f"gtpo_gamma-gamma={gamma}" for gamma in (0, 0.01, 0.1, 1)} == found
