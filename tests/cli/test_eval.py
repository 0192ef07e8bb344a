"""`test` and `predict` from the command line: any model, any set, no training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gtpo_lightning.cli import main

ROOT = Path(__file__).parents[2]
EVAL = ["-c", str(ROOT / "configs/eval.yaml")]
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false"]
DATA = ["--data=Arithmetic", "--data.test_size=4", "--data.val_size=4", "--data.size=8"]


def run(command, folder, *extra, model=("--model.model=tiny", "--model.max_completion_length=6")):
    place = [f"--trainer.logger.save_dir={folder}", f"--trainer.default_root_dir={folder}"]
    store = [f"--evaluator.store={folder}/completions"]
    return main([command, *EVAL, *model, *CPU, *DATA, *place, *store, *map(str, extra)])


def results(cli):
    return json.loads((Path(cli.trainer.log_dir) / "test" / "results.json").read_text())


def test_test_leaves_table_json_csv_and_figure(tmp_path, capsys):
    cli = run("test", tmp_path)
    folder = Path(cli.trainer.log_dir) / "test"
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "results.csv", "results.json"]
    content = results(cli)
    assert content["model"] == "tiny"
    assert content["datasets"]["arithmetic"]["problems"] == 4
    assert len(content["datasets"]["arithmetic"]["answers"]) == 16
    assert "test/arithmetic/maj@4" in capsys.readouterr().out


def test_a_second_run_samples_nothing_again_and_loses_nothing(tmp_path):
    first = run("test", tmp_path)
    (kept,) = (tmp_path / "completions").iterdir()
    before = kept.read_text()
    second = run("test", tmp_path)
    assert kept.read_text() == before
    assert first.trainer.log_dir != second.trainer.log_dir
    assert results(first)["datasets"] == results(second)["datasets"]


def fitted(folder, base="gtpo.yaml", *extra):
    configs = [
        word for name in (base, "models/tiny.yaml", "data/arithmetic.yaml") for word in ("-c", ROOT / "configs" / name)
    ]
    small = ["--data.size=4", "--data.batch_size=2", "--model.max_completion_length=6", "--trainer.max_steps=2"]
    cli = main(["fit", *map(str, configs), *small, *CPU, f"--trainer.logger.save_dir={folder}",
                "--trainer.limit_val_batches=0", *extra])  # fmt: skip
    return cli.trainer.checkpoint_callback.last_model_path or cli.trainer.checkpoint_callback.best_model_path


@pytest.mark.parametrize("base", ["gtpo.yaml", "sft.yaml"])
def test_a_checkpoint_says_which_model_it_is_and_how_it_was_prompted(tmp_path, base):
    path = fitted(tmp_path, base, "--model.prompt_template=Q {question}")
    cli = run("test", tmp_path, f"--ckpt_path={path}", model=())
    assert cli.model.model_name == "tiny"
    assert cli.model.codec.prompt_template == "Q {question}"
    assert cli.model.max_completion_length == 6
    assert results(cli)["checkpoint"] == path
    assert results(cli)["step"] == 2


def test_a_path_to_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"ckpt_path: '.*lost.ckpt' does not exist"):
        run("test", tmp_path, f"--ckpt_path={tmp_path}/lost.ckpt", model=())
    (tmp_path / "last.ckpt").write_text("")
    with pytest.raises(ValueError, match=r"is a folder; valid: one of the checkpoints in it, last.ckpt"):
        run("test", tmp_path, f"--ckpt_path={tmp_path}", model=())


def test_a_run_that_judges_nothing_says_so(tmp_path):
    flags = ["test", *EVAL, "--model.model=tiny", "--model.max_completion_length=6", *CPU, *DATA, "--evaluator=null"]
    with pytest.warns(UserWarning, match="evaluator: null, so test samples and judges nothing"):
        main([*flags, f"--trainer.logger.save_dir={tmp_path}"])


def test_a_folder_written_by_save_pretrained_is_a_model(tmp_path):
    first = run("test", tmp_path / "a")
    folder = tmp_path / "my-model"
    first.model.policy.causal_lm.save_pretrained(folder)
    first.model.codec.tokenizer.save_pretrained(folder)
    second = run("test", tmp_path / "b", model=(f"--model.model={folder}", "--model.max_completion_length=6"))
    assert results(second)["datasets"] == results(first)["datasets"]


def test_predict_writes_json_lines_and_goes_on(tmp_path, capsys):
    cli = run("predict", tmp_path, "--evaluator.num_samples=2")
    (path,) = (tmp_path / "completions").iterdir()
    assert str(path) in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert {"problem_id", "sample", "question", "completion", "length", "truncated"} <= set(lines[0])
    assert cli.trainer.predict_loop.predictions == []
    run("predict", tmp_path, "--evaluator.num_samples=3")  # the two that are there are not written again
    assert [json.loads(line) for line in path.read_text().splitlines()][:8] == lines
    assert len(path.read_text().splitlines()) == 12


def test_missing_model_and_data_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"model: None is empty; valid: .*smollm2-135m"):
        run("test", tmp_path, model=())
    with pytest.raises(SystemExit):
        main(["test", *EVAL, "--model.model=tiny", *CPU])
    assert "required: test.data" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"model.class_path: missing"):
        main(["fit", *EVAL, "--model.model=tiny", *DATA, *CPU])


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path):
    """The process is killed as by the machine, in the middle of the work."""
    flags = ["test", *EVAL, "--model.model=tiny", "--model.max_completion_length=64", *CPU, "--data=Arithmetic",
             "--data.test_size=400", "--data.val_batch_size=1", f"--trainer.logger.save_dir={tmp_path}",
             f"--evaluator.store={tmp_path}/completions", "--evaluator.num_samples=2"]  # fmt: skip
    child = subprocess.Popen([sys.executable, "main.py", *flags], cwd=ROOT, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    files, deadline = [], time.monotonic() + 120
    while time.monotonic() < deadline and not (files and files[0].read_bytes().count(b"\n") > 6):
        time.sleep(0.05)
        files = list((tmp_path / "completions").glob("*.jsonl"))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = files[0].read_bytes()
    assert 6 < before.count(b"\n") < 800
    main([*flags, "--data.test_size=8"])
    after = files[0].read_text().splitlines()
    whole = before.decode().splitlines()[: before.count(b"\n")]
    assert after[: len(whole)] == whole
    seen = [(line["problem_id"], line["sample"]) for line in map(json.loads, filter(is_json, after))]
    assert len(seen) == len(set(seen)) == max(16, len(whole))


def is_json(text):
    try:
        return bool(json.loads(text))
    except ValueError:
        return False


def test_the_saved_config_repeats_the_evaluation(tmp_path):
    first = run("test", tmp_path)
    saved = Path(first.trainer.log_dir) / "config.yaml"
    assert yaml.safe_load(saved.read_text())["evaluator"]["init_args"]["num_samples"] == 4
    again = main(["test", "-c", str(saved)])
    assert results(again)["datasets"] == results(first)["datasets"]
