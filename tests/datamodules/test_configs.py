"""The data overlays through the real command line, on the tiny model and rows made up for the purpose."""

import re
from pathlib import Path

import pytest
import yaml

from gtpo_lightning.cli import main
from tests.datamodules.conftest import write_table

CONFIGS = Path(__file__).parents[2] / "configs"
MATH = ("algebra", "number_theory")


def problems(name, count):
    return [{"problem": f"{name} {i}+1=", "answer": str(i + 1)} for i in range(count)]


def source(folder, name):
    """A local stand-in for the set of an overlay."""
    if name == "hendrycks_math":
        for split, count in (("train", 3), ("test", 1)):
            for subject in MATH:
                for i in range(count):
                    row = {
                        "problem": f"{subject} {split} {i}+1=",
                        "level": "Level 1",
                        "solution": rf"\boxed{{{i + 1}}}",
                    }
                    write_table(folder / name / split / subject / f"{i}.json", row)
        return str(folder / name)
    if name == "problem_table":
        write_table(folder / name / "train.jsonl", problems(name, 6))
        write_table(folder / name / "test.jsonl", problems(f"{name} test", 2))
        return str(folder / name)
    return write_table(folder / f"{name}.jsonl", problems(name, 3))


def run(command, folder, *overlays, base="gtpo.yaml"):
    """Runs the command with the overlays; words that are no .yaml are flags."""
    words = [word for name in (base, "models/tiny.yaml", "trainer/cpu.yaml") for word in ("-c", str(CONFIGS / name))]
    for word in overlays:
        words += ["-c", str(CONFIGS / word)] if str(word).endswith(".yaml") else [str(word)]
    small = ["--model.max_completion_length=4", "--trainer.enable_progress_bar=false"]
    return main(
        [command, *words, *small, f"--trainer.logger.save_dir={folder}", f"--trainer.default_root_dir={folder}"]
    )


@pytest.mark.parametrize(
    ("name", "command"), [("math500", "validate"), ("aime2024", "test"), ("aime2025", "validate"), ("amc2023", "test")]
)
def test_sets_for_evaluation_only(tmp_path, name, command):
    cli = run(command, tmp_path, f"data/{name}.yaml", f"--data.source={source(tmp_path, name)}")
    assert f"{'val' if command == 'validate' else 'test'}/{name}/avg@1" in cli.trainer.callback_metrics
    assert cli.datamodule.max_prompt_length is None


@pytest.mark.parametrize("name", ["hendrycks_math", "problem_table"])
def test_sets_with_training_rows(tmp_path, name):
    cli = run("fit", tmp_path, f"data/{name}.yaml", f"--data.source={source(tmp_path, name)}", "--data.val_size=2",
              "--trainer.fast_dev_run=true")  # fmt: skip
    data = cli.datamodule
    assert [len(data.train_problems), len(data.val_problems)] == [4, 2]
    assert cli.trainer.global_step == 1


def further(folder):
    """The overlay's three sets with local sources, as flags would be too many."""
    overlay = yaml.safe_load((CONFIGS / "data/out_of_distribution.yaml").read_text())
    for one in overlay["data"]["init_args"]["eval_sets"]:
        name = one["class_path"].rpartition(".")[2].lower()
        one["init_args"] = {"source": source(folder, name)}
    path = folder / "sets.yaml"
    path.write_text(yaml.safe_dump(overlay))
    return path


def test_out_of_distribution_sets_are_judged_beside_math_and_saved_with_the_run(tmp_path):
    math = f"--data.source={source(tmp_path, 'hendrycks_math')}"
    overlays = ["data/hendrycks_math.yaml", "data/out_of_distribution.yaml", further(tmp_path)]
    cli = run("fit", tmp_path, *overlays, math, "--data.val_size=2", "--data.batch_size=1", "--trainer.max_steps=1",
              "--trainer.val_check_interval=1")  # fmt: skip
    names = ["math", "math500", "aime2024", "aime2025"]
    assert cli.datamodule.eval_names("val") == names
    assert all(f"val/{name}/avg@1" in cli.trainer.callback_metrics for name in names)
    saved = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
    sets = saved["data"]["init_args"]["eval_sets"]
    assert [one["class_path"].rpartition(".")[2] for one in sets] == ["MATH500", "AIME2024", "AIME2025"]
    assert sets[1]["init_args"]["source"] == str(tmp_path / "aime2024.jsonl")

    config = Path(cli.trainer.log_dir) / "config.yaml"
    path = cli.trainer.checkpoint_callback.last_model_path
    again = main(["fit", "-c", str(config), "--ckpt_path", path, "--trainer.max_steps=2",
                  "--trainer.limit_val_batches=0"])  # fmt: skip
    assert again.trainer.global_step == 2
    assert again.datamodule.eval_names("val") == names


def test_further_sets_from_flags_alone(tmp_path):
    paths = {name: source(tmp_path, name) for name in ("hendrycks_math", "math500", "aime2024")}
    flags = ["--data=HendrycksMATH", f"--data.source={paths['hendrycks_math']}", "--data.val_size=2",
             "--data.eval_sets+=MATH500", f"--data.eval_sets.source={paths['math500']}",
             "--data.eval_sets+=AIME2024", f"--data.eval_sets.source={paths['aime2024']}"]  # fmt: skip
    cli = run("validate", tmp_path, *flags)
    assert cli.datamodule.eval_names("val") == ["math", "math500", "aime2024"]
    assert [one.source for one in cli.datamodule.eval_sets] == [paths["math500"], paths["aime2024"]]


def test_predict_goes_through_every_set(tmp_path):
    overlays = ["data/hendrycks_math.yaml", "data/out_of_distribution.yaml", further(tmp_path)]
    run("predict", tmp_path, *overlays, f"--data.source={source(tmp_path, 'hendrycks_math')}")
    (written,) = (tmp_path / "completions").iterdir()
    counts = {"math": 2, "math500": 3, "aime2024": 3, "aime2025": 3}
    expected = {f"{name}/test/{i}" for name, count in counts.items() for i in range(count)}
    assert set(re.findall(r"\w+/test/\d+", written.read_text())) == expected


def test_every_data_overlay_is_run():
    here = Path(__file__).read_text() + (Path(__file__).parents[1] / "cli/test_cli.py").read_text()
    names = [path.stem for path in sorted((CONFIGS / "data").glob("*.yaml"))]
    assert [name for name in names if name not in here and name != "gsm8k"] == []
