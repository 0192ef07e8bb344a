"""The first real run of the README: SmolLM2-135M on GSM8K, with miniature rows where the real file is not there."""

import json
from pathlib import Path

import pytest

from gtpo_lightning.cli import main

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.mark.slow
def test_smollm2_trains_two_steps_on_gsm8k_and_leaves_logs_and_a_checkpoint(tmp_path):
    source = REAL
    if not REAL.exists():
        rows = [f'{{"question": "{i} plus {i}?", "answer": "{i}+{i}={2 * i}\\n#### {2 * i}"}}' for i in range(100)]
        source = tmp_path / "gsm8k_train.jsonl"
        source.write_text("\n".join(rows) + "\n")
    configs = [str(ROOT / "configs" / name) for name in ("gtpo.yaml", "models/smollm2-135m.yaml", "data/gsm8k.yaml")]
    flags = [word for path in configs for word in ("-c", path)]
    cli = main(
        ["fit", *flags, f"--data.source={source}", "--trainer.max_steps=2", f"--trainer.logger.save_dir={tmp_path}",
         "--trainer.enable_progress_bar=false", "--data.batch_size=2", "--model.max_completion_length=48"]
    )  # fmt: skip
    folder = Path(cli.trainer.log_dir)
    assert cli.trainer.global_step == 2
    assert cli.model.policy.causal_lm.num_parameters() == 134_515_008
    assert list(folder.glob("events.out.tfevents*"))
    assert (folder / "hparams.yaml").exists()
    assert list((folder / "checkpoints").glob("*.ckpt"))
    lines = (folder / "completions.jsonl").read_text().splitlines()
    assert lines
    assert 0 < float(cli.trainer.callback_metrics["train/entropy"]) < 5


@pytest.mark.slow
def test_smollm2_is_judged_on_gsm8k_and_repeats_no_finished_problem(tmp_path):
    source = REAL.with_name("gsm8k_test.jsonl")
    if not source.exists():
        source = tmp_path / "gsm8k_test.jsonl"
        rows = [f'{{"question": "{i} plus {i}?", "answer": "#### {2 * i}"}}' for i in range(20)]
        source.write_text("\n".join(rows) + "\n")
    configs = [str(ROOT / "configs" / name) for name in ("eval.yaml", "models/smollm2-135m.yaml", "data/gsm8k.yaml")]
    flags = [word for path in configs for word in ("-c", path)]
    flags += [f"--data.source={source}", f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false",
              f"--evaluator.store={tmp_path}/completions", "--model.max_completion_length=32"]  # fmt: skip
    contents = []
    for problems in (2, 4, 4):
        cli = main(["test", *flags, f"--data.limit_test={problems}"])
        folder = Path(cli.trainer.log_dir) / "test"
        assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "results.csv", "results.json"]
        contents.append(json.loads((folder / "results.json").read_text())["datasets"]["gsm8k"])
    assert [content["problems"] for content in contents] == [2, 4, 4]
    assert contents[1]["answers"][:8] == contents[0]["answers"]
    assert contents[2] == contents[1]
    (kept,) = (tmp_path / "completions").iterdir()
    assert len(kept.read_text().splitlines()) == 16
    assert len({answer["completion"] for answer in contents[1]["answers"]}) > 8
