"""The command line: every YAML runs, each ablation removes one part, and what was typed wins."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from gtpo_lightning import GTPOModule
from gtpo_lightning.cli import PARTS, main, run
from gtpo_lightning.lora import LoRA

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = ["-c", str(CONFIGS / "models/tiny.yaml"), "-c", str(CONFIGS / "data/arithmetic.yaml")]
SMALL = [
    "--data.batch_size=2",
    "--data.val_batch_size=4",
    "--data.size=8",
    "--data.val_size=4",
    "--model.max_completion_length=6",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
]


def fit(folder, *extra, base="gtpo.yaml", small=SMALL, logger=True):
    place = [f"--trainer.logger.save_dir={folder}"] if logger else []
    place.append(f"--trainer.default_root_dir={folder}")
    return main(["fit", "-c", str(CONFIGS / base), *TINY, *small, *place, *map(str, extra)])


def saved(cli):
    return yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())


def switched_on(cli):
    found = [name for name, part in PARTS.items() if any(type(c) is part for c in cli.trainer.callbacks)]
    return [name for name in found if name in ("conflict_masking", "entropy_filter", "entropy_regularizer")]


ALL = ["conflict_masking", "entropy_filter", "entropy_regularizer"]


def test_the_main_config_trains_logs_and_saves(tmp_path):
    cli = fit(tmp_path, "--trainer.max_steps=2", "--model.group_size=4")
    folder = Path(cli.trainer.log_dir)
    assert switched_on(cli) == ALL
    assert list(folder.glob("events.out.tfevents*"))
    assert list(folder.glob("checkpoints/*.ckpt"))
    assert (folder / "completions.jsonl").stat().st_size > 0
    assert cli.trainer.global_step == 2
    shown = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert shown["group_size"] == 4
    assert shown["optimizer"]["init_args"]["lr"] == 1e-6
    assert shown["entropy_regularizer"]["init_args"]["gamma"] == 0.1
    assert shown["data"]["init_args"]["batch_size"] == 2
    group = cli.model.build_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (1e-6, 0.1)
    assert cli.trainer.gradient_clip_val == 0.1
    assert cli.model.build_lr_scheduler(torch.optim.SGD(cli.model.parameters(), lr=1.0)).warmup == 0.005


@pytest.mark.parametrize("overlay", sorted(path.name for path in (CONFIGS / "ablations").glob("*.yaml")))
def test_each_ablation_removes_exactly_one_part_and_is_saved_as_null(tmp_path, overlay):
    text = (CONFIGS / "ablations" / overlay).read_text().strip()
    cli = fit(tmp_path, "-c", CONFIGS / "ablations" / overlay, "--trainer.max_steps=1")
    removed = sorted(set(ALL) - set(switched_on(cli)))
    assert [f"{removed[0]}: null"] == text.splitlines()
    assert len(removed) == 1
    assert overlay == f"no_{removed[0]}.yaml"
    assert saved(cli)[removed[0]] is None


def test_there_is_an_ablation_for_each_part():
    assert sorted(path.stem for path in (CONFIGS / "ablations").glob("*.yaml")) == [f"no_{part}" for part in ALL]


@pytest.mark.parametrize("base", ["gtpo.yaml", "sft.yaml"])
@pytest.mark.parametrize("overlay", ["trainer/cpu.yaml", "trainer/ddp.yaml", "trainer/gpu.yaml"])
def test_trainer_overlays_run(tmp_path, base, overlay):
    # The GPU overlays are read whole; only the device is changed for this machine.
    fit(tmp_path, "-c", CONFIGS / overlay, "--trainer.accelerator=cpu", "--trainer.devices=1",
        "--trainer.fast_dev_run=true", base=base)  # fmt: skip


def test_grpo_is_the_same_module_without_the_parts(tmp_path):
    cli = fit(tmp_path, "-c", CONFIGS / "grpo.yaml", "--trainer.max_steps=1", f"--trainer.logger.save_dir={tmp_path}")
    assert switched_on(cli) == []
    assert cli.model.advantage_scale == "group"


def test_a_flag_switches_a_part_off_and_sets_it(tmp_path):
    cli = fit(tmp_path, "--conflict_masking=null", "--entropy_filter.keep_at_least=0.25", "--trainer.max_steps=1")
    assert switched_on(cli) == ["entropy_filter", "entropy_regularizer"]
    (part,) = (c for c in cli.trainer.callbacks if type(c) is PARTS["entropy_filter"])
    assert part.keep_at_least == 0.25
    assert saved(cli)["conflict_masking"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--entropy_filter.treshold=0.5"], "treshold"),
        (["--entropy_filtre=null"], "entropy_filtre"),
        (["--model.group_sise=4"], "group_sise"),
        (["--conflict_masking.scope=middle"], "middle"),
    ],
)
def test_misspelt_keys_and_choices_are_refused(tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit):
        fit(tmp_path, *flags)
    assert words in capsys.readouterr().err


def test_l_01_what_was_typed_wins_over_the_checkpoint(tmp_path):
    first = fit(tmp_path, "--model.optimizer.lr=1e-3", "--model.temperature=0.7", "--trainer.max_steps=1")
    path = first.trainer.checkpoint_callback.last_model_path
    assert path
    again = fit(tmp_path, "--ckpt_path", path, "--model.temperature=0.9", "--model.seed=3", "--trainer.max_steps=2")
    assert again.model.temperature == 0.9
    assert again.model.seed == 3
    assert again.trainer.global_step == 2


def bare(folder, *extra, model="gtpo_lightning.GTPOModule"):
    """A run without any config file, so that nothing is given but what is typed."""
    flags = [f"--model={model}", "--model.model=tiny", "--model.prompt_template={question}", "--data=Arithmetic"]
    return main(["fit", *flags, *SMALL, f"--trainer.default_root_dir={folder}", *map(str, extra)])


def test_l_01_the_checkpoint_fills_what_neither_file_nor_command_line_gave(tmp_path):
    first = bare(tmp_path, "--model.seed=5", "--model.temperature=0.9", "--trainer.max_steps=1")
    path = first.trainer.checkpoint_callback.best_model_path
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = bare(tmp_path, "--ckpt_path", path, "--trainer.max_steps=1", model="gtpo_lightning.module.GTPOModule")
    assert not any("settings differ" in str(warning.message) for warning in caught)
    assert again.model.seed == 5
    assert again.model.temperature == 0.9


def test_l_01_a_typed_learning_rate_wins_over_the_checkpoints(tmp_path):
    first = bare(tmp_path, "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=1e-3", "--trainer.max_steps=1")
    path = first.trainer.checkpoint_callback.best_model_path
    again = bare(tmp_path, "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.5", "--ckpt_path", path,
                 "--trainer.max_steps=2")  # fmt: skip
    assert again.trainer.global_step == 2
    assert again.trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_l_06b_lightnings_own_optimizer_flags_work(tmp_path):
    overlay = tmp_path / "adamw.yaml"
    overlay.write_text("optimizer:\n  class_path: torch.optim.AdamW\n  init_args: {lr: 0.1, betas: [0.8, 0.9]}\n")
    flags = [
        "-c",
        overlay,
        "--optimizer=SGD",
        "--optimizer.lr=0.2",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=1",
    ]
    cli = bare(tmp_path, *flags, "--trainer.max_steps=1")
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 0.2
    assert type(cli.trainer.lr_scheduler_configs[0].scheduler) is torch.optim.lr_scheduler.StepLR


def test_short_names_of_data_modules_work_in_a_fresh_process(tmp_path):
    code = "import sys; from gtpo_lightning.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "fit", "--model=GTPOModule", "--model.model=tiny", "--data=Arithmetic",
               "--print_config"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent, check=True)
    assert "class_path: gtpo_lightning.datamodules.Arithmetic" in done.stdout


def test_l_06b_another_optimizer_does_not_keep_the_first_ones_arguments(tmp_path):
    overlay = tmp_path / "adamw.yaml"
    overlay.write_text(
        "model:\n  init_args:\n    optimizer:\n      class_path: torch.optim.AdamW\n"
        "      init_args:\n        lr: 0.1\n        betas: [0.8, 0.9]\n"
    )
    cli = fit(
        tmp_path, "-c", overlay, "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.5",
        "--trainer.max_steps=1",
    )  # fmt: skip
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 0.5


def test_g_23_numbers_without_a_dot_are_floats_at_any_depth(tmp_path):
    overlay = tmp_path / "numbers.yaml"
    overlay.write_text(
        "model:\n  init_args:\n    rewards: {format: 1e-1}\n    optimizer:\n      init_args: {lr: 2e-4}\n"
        "entropy_regularizer: {gamma: 5e-2}\n"
    )
    cli = fit(tmp_path, "-c", overlay, "--trainer.max_steps=1")
    assert cli.trainer.optimizers[0].defaults["lr"] == 2e-4
    assert cli.model.reward_functions.weights == {"format": 0.1}
    (part,) = (c for c in cli.trainer.callbacks if type(c) is PARTS["entropy_regularizer"])
    assert part.gamma == 0.05


def test_a_second_run_in_one_folder_works(tmp_path):
    where = [f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.version=same"]
    for _ in range(2):
        cli = fit(tmp_path, *where, "--trainer.max_steps=1")
    assert Path(cli.trainer.log_dir).name == "same"


def test_g_20_no_logger_is_needed(tmp_path):
    cli = fit(tmp_path, "--trainer.logger=false",  "--trainer.max_steps=1",
              f"--trainer.default_root_dir={tmp_path}", logger=False)  # fmt: skip
    assert cli.trainer.global_step == 1
    assert (tmp_path / "completions.jsonl").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.fast_dev_run=true"],
        ["--trainer.limit_train_batches=1", "--trainer.max_epochs=2"],
        ["--trainer.max_epochs=-1", "--trainer.max_steps=5"],
        ["--trainer.overfit_batches=1", "--trainer.max_epochs=2", "--trainer.limit_val_batches=0"],
    ],
)
def test_l_16_lightnings_short_runs_work(tmp_path, flags):
    fit(tmp_path, *flags)


def test_sft_trains_on_targets(tmp_path):
    cli = fit(tmp_path, "--trainer.max_steps=2", base="sft.yaml")
    assert type(cli.model).__name__ == "SFTModule"
    assert float(cli.trainer.callback_metrics["train/loss"]) > 1


def test_validate_works_from_a_checkpoint(tmp_path):
    first = fit(tmp_path, "--trainer.max_steps=1")
    path = first.trainer.checkpoint_callback.last_model_path
    cli = main(["validate", "-c", str(CONFIGS / "gtpo.yaml"), *TINY, *SMALL, f"--trainer.logger.save_dir={tmp_path}",
                "--ckpt_path", path])  # fmt: skip
    assert "val/arithmetic/avg@1" in cli.trainer.callback_metrics


def test_e_08_resumed_from_the_command_line_equals_uninterrupted(tmp_path):
    overlay = tmp_path / "save.yaml"
    overlay.write_text(
        "trainer:\n  max_steps: 4\n  max_epochs: -1\n  callbacks:\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        "      init_args: {every_n_train_steps: 2, save_top_k: -1, filename: '{step}'}\n"
    )
    # 4 batches an epoch; the schedule is the paper's cosine, whose length the trainer tells.
    flags = ["-c", overlay, "--model.optimizer.lr=1e-2", "--data.size=8"]
    whole = fit(tmp_path / "a", *flags)
    path = Path(whole.trainer.log_dir) / "checkpoints" / "step=2.ckpt"
    again = fit(tmp_path / "b", *flags, "--ckpt_path", path)
    assert again.trainer.global_step == whole.trainer.global_step == 4
    states = [cli.model.policy.state_dict() for cli in (whole, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(
        states[0]["model.lm_head.weight"], torch.load(path)["state_dict"]["policy.model.lm_head.weight"]
    )


def test_a_checkpoint_of_another_module_is_refused_with_the_way_to_start_from_it(tmp_path):
    first = fit(tmp_path, "--trainer.max_steps=1", base="sft.yaml")
    path = first.trainer.checkpoint_callback.best_model_path
    with pytest.raises(ValueError, match=r"made by gtpo_lightning.SFTModule .* --model.weights"):
        fit(tmp_path, "--ckpt_path", path)
    assert fit(tmp_path, "--model.weights", path, "--trainer.max_steps=1").trainer.global_step == 1


def test_what_differs_from_the_checkpoint_is_said_and_its_first_weights_may_be_gone(tmp_path):
    start = tmp_path / "start.ckpt"
    first = fit(tmp_path, "--trainer.max_steps=1")
    Path(first.trainer.checkpoint_callback.last_model_path).rename(start)
    second = fit(tmp_path, "--model.weights", start, "--trainer.max_steps=1", "--model.temperature=0.8")
    start.unlink()
    with pytest.warns(UserWarning, match=r"temperature: 0.8 -> 1.0"):
        again = fit(
            tmp_path, "--model.weights", start, "--trainer.max_steps=2",
            "--ckpt_path", second.trainer.checkpoint_callback.last_model_path,
        )  # fmt: skip
    assert again.trainer.global_step == 2


def test_a_part_given_twice_is_refused(tmp_path):
    overlay = tmp_path / "twice.yaml"
    overlay.write_text("trainer:\n  callbacks+:\n    - class_path: gtpo_lightning.callbacks.ConflictMasking\n")
    with pytest.raises(ValueError, match="ConflictMasking given twice"):
        fit(tmp_path, "-c", overlay, "--trainer.max_steps=1")


def test_a_missing_module_is_refused_with_the_choices(tmp_path):
    with pytest.raises(ValueError, match=r"model.class_path: missing; valid: gtpo_lightning.GTPOModule"):
        main(["fit", *TINY, *SMALL, f"--trainer.default_root_dir={tmp_path}"])


def test_an_interrupted_run_leaves_a_checkpoint(tmp_path, monkeypatch):
    step = GTPOModule.training_step

    def interrupted(self, problems, batch_idx):
        if self.global_step == 2:
            raise ZeroDivisionError("as if the machine went away")
        return step(self, problems, batch_idx)

    monkeypatch.setattr(GTPOModule, "training_step", interrupted)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, "--trainer.max_steps=4")
    (path,) = tmp_path.rglob("last.ckpt")
    monkeypatch.undo()
    assert fit(tmp_path, "--trainer.max_steps=4", "--ckpt_path", path).trainer.global_step == 4


def test_the_installed_command_ends_with_success(tmp_path, monkeypatch):
    flags = ["fit", "-c", str(CONFIGS / "gtpo.yaml"), *TINY, *SMALL, "--trainer.fast_dev_run=true"]
    monkeypatch.setattr(sys, "argv", ["gtpo", *flags, f"--trainer.default_root_dir={tmp_path}"])
    assert run() is None


def test_own_reward_functions_are_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_parts.py").write_text(
        "def longer(completions):\n    return [float(len(c)) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    cli = bare(tmp_path, "--model.rewards={my_own_parts.longer: 0.5}", "--trainer.max_steps=1")
    assert cli.model.reward_functions.weights == {"longer": 0.5}


# Adapters


def weights(cli):
    return {name: p.detach() for name, p in cli.model.policy.named_parameters() if p.requires_grad}


LORA = ["--model.lora.rank=4", "--model.lora.targets=[q_proj,v_proj]", "--model.optimizer.lr=1e-2"]


def test_lora_is_read_from_the_command_line_and_misspelt_settings_are_refused(tmp_path, capsys):
    cli = fit(tmp_path, *LORA, "--model.lora.dropout=0.1", "--trainer.max_steps=1")
    assert cli.model.lora == LoRA(rank=4, targets=["q_proj", "v_proj"], dropout=0.1)
    shown = yaml.safe_load((Path(cli.trainer.log_dir) / "hparams.yaml").read_text())
    assert shown["lora"]["targets"] == ["q_proj", "v_proj"]
    assert fit(tmp_path, "--model.lora={}", "--trainer.max_steps=1").model.lora == LoRA()
    with pytest.raises(SystemExit):
        fit(tmp_path, "--model.lora.ranks=4")
    assert "ranks" in capsys.readouterr().err


def test_l_08_e_08_adapters_over_a_warm_start_resume_from_the_command_line(tmp_path):
    start = fit(tmp_path, "--trainer.max_steps=1", base="sft.yaml").trainer.checkpoint_callback.best_model_path
    overlay = tmp_path / "save.yaml"
    overlay.write_text(
        "trainer:\n  max_steps: 4\n  max_epochs: -1\n  callbacks:\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        "      init_args: {every_n_train_steps: 2, save_top_k: -1, filename: '{step}'}\n"
    )
    flags = ["-c", overlay, *LORA, "--data.size=8", "--kl_penalty.beta=0.1"]
    whole = fit(tmp_path / "a", *flags, f"--model.weights={start}")
    path = Path(whole.trainer.log_dir) / "checkpoints" / "step=2.ckpt"
    for given in ([f"--model.weights={start}"], []):  # the checkpoint knows where it started
        again = fit(tmp_path / "b", *flags, *given, "--ckpt_path", path)
        assert again.trainer.global_step == 4
        found, expected = weights(again), weights(whole)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    test = ["test", "-c", str(CONFIGS / "eval.yaml"), "-c", str(CONFIGS / "data/arithmetic.yaml"),
            "--data.val_size=4", "--data.batch_size=2", "--trainer.accelerator=cpu", "--ckpt_path", str(path),
            "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}", "--evaluator.num_samples=1",
            "--evaluator.store=null", "--trainer.enable_progress_bar=false", "--trainer.limit_test_batches=1",
            "--model.max_completion_length=6"]  # fmt: skip
    judged = main(test)
    assert judged.model.lora == whole.model.lora
    stored = torch.load(path, weights_only=True)["state_dict"]
    found = judged.model.policy.state_dict()
    assert all(torch.equal(found[name.removeprefix("policy.")], stored[name]) for name in stored)
    Path(start).unlink()
    with pytest.raises(ValueError, match=r"weights: .* is no file"):
        fit(tmp_path / "c", *flags, "--ckpt_path", path)


def test_p_01_a_trained_adapter_starts_a_run_and_its_folder_may_be_gone_when_it_goes_on(tmp_path):
    first = fit(tmp_path, *LORA, "--trainer.max_steps=1")
    folder = tmp_path / "adapter"
    main(["export", "--adapter_only", "--ckpt_path", first.trainer.checkpoint_callback.last_model_path,
          "--output", str(folder)])  # fmt: skip
    start = ["--model.adapter", folder, "--model.optimizer.lr=1e-2"]
    second = fit(tmp_path, *start, "--trainer.max_steps=1", "--kl_penalty.beta=0.1")
    assert float(second.trainer.callback_metrics["train/kl"]) == 0.0
    assert second.model.lora == first.model.lora
    path = second.trainer.checkpoint_callback.last_model_path
    folder.rename(tmp_path / "moved")
    again = fit(tmp_path, *start, "--trainer.max_steps=2", "--ckpt_path", path, "--model.lora.rank=4",
                "--model.lora.targets=[q_proj,v_proj]")  # fmt: skip
    assert again.trainer.global_step == 2
    with pytest.raises(ValueError, match="valid: lora with rank 4"):
        fit(tmp_path, *start, "--trainer.max_steps=2", "--ckpt_path", path)
