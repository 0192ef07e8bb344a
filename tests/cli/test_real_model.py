"""The first real run of the README: SmolLM2-135M on GSM8K, with miniature rows where the real file is not there."""

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_lightning import PolicyModule, Problem
from gtpo_lightning.cli import main
from gtpo_lightning.models import load_model

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """The fields of the model file and its table of names: plain Python makes them in seconds, and every load anew."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield


def training_rows(folder):
    """The real file, or miniature rows of its columns."""
    if REAL.exists():
        return REAL
    rows = [f'{{"question": "{i} plus {i}?", "answer": "{i}+{i}={2 * i}\\n#### {2 * i}"}}' for i in range(100)]
    source = folder / "gsm8k_train.jsonl"
    source.write_text("\n".join(rows) + "\n")
    return source


@pytest.mark.slow
def test_smollm2_trains_two_steps_on_gsm8k_and_leaves_logs_and_a_checkpoint(tmp_path):
    source = training_rows(tmp_path)
    configs = [str(ROOT / "configs" / name) for name in ("gtpo.yaml", "models/smollm2-135m.yaml", "data/gsm8k.yaml")]
    flags = [word for path in configs for word in ("-c", path)]
    cli = main(
        ["fit", *flags, f"--data.source={source}", "--trainer.max_steps=2", f"--trainer.logger.save_dir={tmp_path}",
         "--trainer.enable_progress_bar=false", "--data.batch_size=2", "--model.max_completion_length=16"]
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


@pytest.mark.slow
def test_p_05_e_08_smollm2_trains_adapters_on_gsm8k_resumes_exactly_and_exports(tmp_path):
    overlay = tmp_path / "save.yaml"
    overlay.write_text(
        "trainer:\n  max_steps: 2\n  max_epochs: -1\n  callbacks:\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        "      init_args: {every_n_train_steps: 1, save_top_k: -1, filename: '{step}'}\n"
    )
    names = ("gtpo.yaml", "models/smollm2-135m.yaml", "data/gsm8k.yaml", "trainer/cpu.yaml", "options/lora.yaml")
    flags = [word for name in names for word in ("-c", str(ROOT / "configs" / name))]
    flags += ["-c", str(overlay), f"--data.source={training_rows(tmp_path)}", "--data.limit_train=8",
              "--data.val_size=2", "--data.batch_size=2", "--model.group_size=2",
              "--model.max_completion_length=12", "--model.optimizer.lr=1e-3", "--model.lora.rank=8",
              "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false",
              "--kl_penalty.beta=0.01", "--model.gradient_checkpointing=true"]  # fmt: skip
    whole = main(["fit", *flags, f"--trainer.logger.save_dir={tmp_path}/a"])
    path = Path(whole.trainer.log_dir) / "checkpoints" / "step=1.ckpt"
    assert path.stat().st_size < 12 * 2_500_000 + 1_000_000  # adapters of rank 8 and their moments, not 135 M weights
    again = main(["fit", *flags, f"--trainer.logger.save_dir={tmp_path}/b", "--ckpt_path", str(path)])
    policies = [cli.model.policy.eval() for cli in (whole, again)]
    states = [{n: p for n, p in policy.named_parameters() if p.requires_grad} for policy in policies]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert any(float(p.abs().max()) > 0 for name, p in states[0].items() if "lora_B" in name)

    last = Path(again.trainer.log_dir) / "checkpoints" / "step=2.ckpt"
    for extra in ([], ["--adapter_only"]):
        main(["export", "--ckpt_path", str(last), "--output", str(tmp_path / f"out{len(extra)}"), *extra])
    ids = torch.tensor([again.model.codec.prompt_ids(Problem("p", "1+2=", "3"))])
    with torch.no_grad():
        expected = policies[1].model(input_ids=ids).logits
        base = load_model("smollm2-135m")
        assert (base(input_ids=ids).logits - expected).abs().max() > 1e-2
        adapter = PeftModel.from_pretrained(base, tmp_path / "out1").eval()
        torch.testing.assert_close(adapter(input_ids=ids).logits, expected, atol=1e-5, rtol=0)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out0").eval()
        # Of the largest logit, about 39: fp32 itself is off by 1e-4 here, as two attention kernels on one model show.
        difference = (merged(input_ids=ids).logits - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
        # What merging rounded is less than that: the same two models in fp64.
        exact = policies[1].model.double()(input_ids=ids).logits
        assert (merged.double()(input_ids=ids).logits - exact).abs().max() <= 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out0")
    messages = [{"role": "user", "content": "1+2="}]
    ours = again.model.codec.tokenizer
    assert tokenizer.apply_chat_template(messages, tokenize=False) == ours.apply_chat_template(messages, tokenize=False)
    assert tokenizer("What is 1,024?").input_ids == ours("What is 1,024?").input_ids
    module = PolicyModule(str(tmp_path / "out0"))
    assert module.codec.eos_ids == again.model.codec.eos_ids
