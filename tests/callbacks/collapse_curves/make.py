"""Makes the curves beside it: the quickstart's run, healthy and driven into collapse, one line an optimizer step.

python main.py fit -c configs/quickstart_sft.yaml
python -m tests.callbacks.collapse_curves.make runs/quickstart/sft/warm_start.ckpt [name ...]
"""

import csv
import sys
import tempfile
from pathlib import Path

from gtpo_lightning.callbacks._collapse_signals import measure
from gtpo_lightning.cli import main
from gtpo_lightning.hooks import RLCallback

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
COLUMNS = ("entropy", "undecided", "format", "reward", "accuracy", "equal_groups", "length", "kl")

GRPO = ["--conflict_masking=null", "--entropy_filter=null", "--entropy_regularizer=null"]
GRPO += ["--model.init_args.advantage_scale=group"]
FOUR = ["--data.init_args.batch_size=4"]  # prompts of a step, so 32 completions in place of 128
CUT = ["--model.init_args.top_p=0.8", "--entropy_regularizer.gamma=1.0"]
NO_FORMAT = ["--model.init_args.rewards.format=0.0"]


def rate(value):
    return [f"--model.init_args.optimizer.init_args.lr={value}"]


RUNS = {
    # the quickstart's own recipe: 16 prompts a step, learning rate 3e-4
    "healthy_gtpo_0": (0, 200, []),
    "healthy_gtpo_1": (1, 200, []),
    "healthy_grpo_0": (0, 200, GRPO),
    "healthy_gtpo_2": (2, 200, []),
    "healthy_grpo_1": (1, 200, GRPO),
    "healthy_grpo_2": (2, 200, GRPO),
    # with 4 prompts every share is a quarter as sharp
    "healthy_gtpo_small_0": (0, 300, FOUR),
    "healthy_gtpo_small_2": (2, 300, FOUR),
    "healthy_grpo_small_1": (1, 200, FOUR + GRPO),
    "healthy_grpo_small_2": (2, 300, FOUR + GRPO),
    "collapse_rate_gtpo_0": (0, 150, FOUR + rate(1e-3)),
    "collapse_rate_gtpo_1": (1, 150, FOUR + rate(1e-3)),
    "collapse_rate_grpo_0": (0, 150, FOUR + rate(1e-3) + GRPO),
    "collapse_high_rate_gtpo_0": (0, 150, FOUR + rate(2e-3)),
    "collapse_high_rate_gtpo_1": (1, 150, FOUR + rate(2e-3)),
    "collapse_no_format_gtpo_0": (0, 300, FOUR + rate(7e-4) + NO_FORMAT),
    "collapse_no_format_grpo_0": (0, 300, FOUR + rate(7e-4) + NO_FORMAT + GRPO),
    "collapse_no_format_grpo_1": (1, 150, FOUR + rate(7e-4) + NO_FORMAT + GRPO),
    # sampling is cut to the likeliest tokens and the regularizer pushes down what was sampled: the rest rises
    "collapse_regularizer_0": (0, 150, FOUR + CUT),
    "collapse_regularizer_1": (1, 150, FOUR + CUT),
}


class Record(RLCallback):
    """Writes what the detector reads of each step, and the share of right answers and the mean length beside it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.rows: list[list[str]] = []

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        values = {name: total / count for name, (total, count) in measure(rollout).items() if count}
        values["accuracy"] = float((rollout.reward_parts["correctness"] == 10).double().mean())
        values["length"] = float(rollout.lengths.double().mean())
        self.rows.append([f"{values[name]:.4g}" for name in COLUMNS])

    def on_train_end(self, trainer, pl_module):
        with self.path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *self.rows])


def make(name, warm_start):
    seed, steps, arguments = RUNS[name]
    config, folder = ROOT / "configs" / "quickstart.yaml", tempfile.mkdtemp()
    fixed = f"""
        fit -c {config} --seed_everything={seed} --model.init_args.weights={warm_start} --kl_penalty.beta=0
        --data.init_args.size=4800 --trainer.max_steps={steps} --trainer.limit_val_batches=0
        --evaluator=null --completion_log=null --trainer.logger=false --trainer.enable_progress_bar=false
        --trainer.enable_checkpointing=false --trainer.default_root_dir={folder}
        --trainer.callbacks=[] --trainer.callbacks+=tests.callbacks.collapse_curves.make.Record
        --trainer.callbacks.path={FOLDER / name}.csv
    """
    main([*fixed.split(), *arguments])


if __name__ == "__main__":
    for name in sys.argv[2:] or RUNS:
        make(name, sys.argv[1])
