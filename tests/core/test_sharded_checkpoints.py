"""Checkpoints in parts: resumed on other numbers of processes, exported, started from and judged on one process."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM

from gtpo_lightning.checkpoint_folders import read_parts
from gtpo_lightning.checkpoints import read_policy
from gtpo_lightning.cli import main
from gtpo_lightning.export import Export, export
from tests.core.test_sharding import PARTS, SETTINGS, made, whole
from tests.helpers.training import Sums, make_trainer, spawn

ROOT = Path(__file__).parents[2]


def in_parts(ranks):
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=True)


def fit(folder, settings, steps, ranks, ckpt_path=None):
    module = made(settings)
    flags = {"devices": ranks, "strategy": in_parts(ranks)} if ranks else {}
    trainer = make_trainer(folder, PARTS, max_steps=steps, max_epochs=-1, **flags)
    trainer.fit(module, Sums(train=16, batch_size=4 // max(ranks, 1), shuffle=False), ckpt_path=ckpt_path)
    return trainer, module


def _written(rank, folder):
    for name, settings in SETTINGS.items():
        path, weights = f"{folder}/{name}.ckpt", []
        for steps, ckpt_path in ((4, None), (2, None), (4, path)):
            trainer, module = fit(folder, settings, steps, 2, ckpt_path)
            if steps == 2:
                trainer.save_checkpoint(path)
            weights.append(whole(module))
        torch.save(weights, f"{folder}/{name}{rank}.pt")


def _alone(rank, folder):
    for name, settings in SETTINGS.items():
        torch.save(whole(fit(folder, settings, 4, 1, f"{folder}/{name}.ckpt")[1]), f"{folder}/{name}_alone.pt")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    spawn(_written, folder)
    return folder


def test_e_08_a_run_in_parts_goes_on_on_two_processes_and_on_one(written):
    spawn(_alone, written, ranks=1)
    for name in SETTINGS:
        unbroken, _, resumed = torch.load(written / f"{name}0.pt")
        assert (written / f"{name}.ckpt").is_dir()
        assert torch.equal(resumed, unbroken), name
        assert (torch.load(written / f"{name}_alone.pt") - unbroken).abs().max() < 1e-3, name


def test_the_parts_hold_the_weights_and_of_adapters_only_those(written):
    for name in SETTINGS:
        weights = read_policy(str(written / f"{name}.ckpt")).weights
        assert {"lora" in key for key in weights} == {name == "lora"}
    _, half, _ = torch.load(written / "full0.pt")
    weights = read_policy(str(written / "full.ckpt")).weights
    names = [key for key, _ in made({}).source.of_checkpoint(None).named_parameters()]
    assert torch.equal(torch.cat([weights[key].reshape(-1) for key in names]), half)
    assert read_parts(written / "full.ckpt")["global_step"] == 2


@pytest.mark.parametrize("name", list(SETTINGS))
def test_p_05_a_folder_of_parts_is_exported(name, written, tmp_path):
    folder = export(Export(str(written / f"{name}.ckpt"), str(tmp_path / "out")))
    model = AutoModelForCausalLM.from_pretrained(folder)
    module = made({**SETTINGS[name], "weights": str(written / f"{name}.ckpt")})
    module.configure_model()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = module.policy.eval().model(input_ids=ids).logits
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
        assert not torch.allclose(made({}).build_policy(None).model(input_ids=ids).logits, expected, atol=1e-2)


WORDS = [
    *("--config=configs/eval.yaml", "--config=configs/models/tiny.yaml", "--config=configs/data/arithmetic.yaml"),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.test_size=4"),
]


def test_a_folder_of_parts_is_judged_on_one_process(written, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    place = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", f"--evaluator.store={tmp_path}/kept"]
    cli = main(["test", *WORDS, *place, f"--ckpt_path={written}/full.ckpt"])
    assert cli.model.checkpoint_step == 2
    _, half, _ = torch.load(written / "full0.pt")
    assert torch.equal(whole(cli.model), half)


@pytest.mark.parametrize(
    ("command", "make", "message"),
    [
        ("fit", None, r"ckpt_path: .* optimizer state only a sharded strategy restores; valid: .*--model.weights"),
        ("test", "latest", r"ckpt_path: .* checkpoint of DeepSpeed.*convert_zero_checkpoint_to_fp32_state_dict"),
        ("test", "notes.txt", r"ckpt_path: .* is no file; valid: .* a folder of parts"),
    ],
)
def test_other_folders_are_refused_with_the_way_out(command, make, message, written, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = written / "full.ckpt"
    if make is not None:
        folder = tmp_path / "x.ckpt"
        folder.mkdir()
        (folder / make).write_text("checkpoint")
    words = WORDS if command == "test" else ["--config=configs/gtpo.yaml", *WORDS[1:-1]]
    with pytest.raises(ValueError, match=message):
        main([command, *words, f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={folder}"])
    if make == "latest":
        with pytest.raises(ValueError, match=message):
            export(Export(str(folder), str(tmp_path / "out")))
        with pytest.raises(ValueError, match=message.replace("ckpt_path", "weights")):
            made({"weights": str(folder)})
    assert os.getcwd() == str(ROOT)
