"""Exports: what transformers and peft load gives the checkpoint's logits, and nothing half-written stays."""

import json
import re
import shutil

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gtpo_lightning import GTPOModule, PolicyModule, SFTModule
from gtpo_lightning.cli import main
from gtpo_lightning.export import Export, export
from gtpo_lightning.model_card import hub_name, without_places
from gtpo_lightning.models import load_model, tiny_model, tiny_tokenizer
from tests.helpers.training import Sums, adam, make_trainer, vowels

SMALL = {"rank": 4, "alpha": 8.0}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def made(kind=GTPOModule, **kwargs):
    settings = {"model": "tiny", "max_completion_length": 8, "prompt_template": "{question}", "optimizer": adam}
    extra = {"group_size": 4, "rewards": {vowels: 1.0}} if kind is GTPOModule else {}
    return kind(**{**settings, **extra, **kwargs})


def trained(folder, module=None, name="x.ckpt", steps=2, **trainer):
    """A checkpoint of a run whose weights all moved."""
    module = module or made()
    fit = make_trainer(folder, max_steps=steps, max_epochs=-1, **trainer)
    fit.fit(module, Sums(batch_size=4))
    with torch.no_grad():
        for parameter in module.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    fit.save_checkpoint(folder / name)
    return module, str(folder / name)


def logits(model):
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


def same_logits(model, module, tolerance=1e-5):
    torch.testing.assert_close(logits(model), logits(module.policy.model), atol=tolerance, rtol=0)


def own_folder(folder, tied=False):
    """A model folder as a user has one, with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer), tie_word_embeddings=tied).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": SMALL},
        {"lora": {**SMALL, "rslora": True, "targets": ["q_proj", "lm_head", "embed_tokens"]}},
        {"lora": {**SMALL, "targets": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}},
        {"lora": {**SMALL, "dropout": 0.5}},
    ],
)
def test_p_05_a_merged_export_loads_plainly_with_the_checkpoints_logits(tmp_path, settings):
    module, path = trained(tmp_path, made(**settings))
    assert not torch.allclose(logits(module.policy.model), logits(load_model("tiny")), atol=1e-2)
    folder = export(Export(path, str(tmp_path / "out")))
    same_logits(AutoModelForCausalLM.from_pretrained(folder), module)
    again = PolicyModule(str(folder))
    again.configure_model()
    same_logits(again.policy.model, module)
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), tiny_tokenizer()
    text = "<answer>4 2</answer>"
    assert tokenizer(text).input_ids == ours(text).input_ids
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (ours.pad_token_id, ours.eos_token_id)
    assert again.codec.eos_ids == module.codec.eos_ids
    assert "adapter_config.json" not in {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head"], ["embed_tokens", "q_proj"]])
def test_p_05_tied_embeddings_stay_what_they_were_in_the_run(tmp_path, targets):
    name = own_folder(tmp_path / "model", tied=True)
    for adapters in ({"targets": targets}, {"targets": ["q_proj"], "modules_to_save": [targets[0]]}):
        if adapters.get("modules_to_save") == ["q_proj"]:
            continue
        module, path = trained(tmp_path, made(model=name, lora={**SMALL, **adapters}))
        folder = export(Export(path, str(tmp_path / f"out{len(adapters)}")))
        same_logits(AutoModelForCausalLM.from_pretrained(folder), module)


@pytest.mark.parametrize(
    "lora", [SMALL, {**SMALL, "targets": ["q_proj", "lm_head"]}, {**SMALL, "modules_to_save": ["lm_head"]}]
)
def test_p_05_an_adapter_alone_loads_by_peft_over_the_model(tmp_path, lora):
    module, path = trained(tmp_path, made(lora=lora))
    folder = export(Export(path, str(tmp_path / "out"), adapter_only=True))
    same_logits(PeftModel.from_pretrained(load_model("tiny"), folder), module)
    assert not list(folder.glob("model*.safetensors"))
    assert (folder / "adapter_model.safetensors").stat().st_size < 200_000
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    again = made(adapter=str(folder))  # and trains on here
    again.configure_model()
    same_logits(again.policy.model, module)
    assert again.lora.rank == 4


def test_a_supervised_run_and_its_adapter_over_another_run_export_too(tmp_path):
    sft, start = trained(tmp_path, made(SFTModule), "sft.ckpt", steps=0)
    same_logits(AutoModelForCausalLM.from_pretrained(export(Export(start, str(tmp_path / "sft")))), sft)
    module, path = trained(tmp_path, made(weights=start, lora=SMALL))
    whole = export(Export(path, str(tmp_path / "whole")))
    same_logits(AutoModelForCausalLM.from_pretrained(whole), module)
    adapter = export(Export(path, str(tmp_path / "adapter"), adapter_only=True))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    same_logits(PeftModel.from_pretrained(base, adapter), module)
    assert "It lies over the policy of `sft.ckpt`" in (adapter / "README.md").read_text()
    moved = (tmp_path / "sft.ckpt").rename(tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=r"ckpt_path: .*sft.ckpt, and that file is gone"):
        export(Export(path, str(tmp_path / "gone")))
    again = export(Export(path, str(tmp_path / "again"), weights=str(moved)))
    same_logits(AutoModelForCausalLM.from_pretrained(again), module)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02), (None, 1e-5)])
def test_weights_are_written_in_the_dtype_asked_for(tmp_path, dtype, tolerance):
    module, path = trained(tmp_path, made(lora=SMALL))
    folder = export(Export(path, str(tmp_path / "out"), dtype=dtype))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype or "float32")}
    assert json.loads((folder / "config.json").read_text())["dtype"] == (dtype or "float32")
    same_logits(model, module, tolerance)


def test_an_adapter_is_merged_into_a_bf16_base_in_fp32_and_rounded_once(tmp_path):
    module, path = trained(tmp_path, made(lora=SMALL, dtype="bfloat16"))
    folder = export(Export(path, str(tmp_path / "out")))
    layer = module.policy.causal_lm.model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    written = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight
    assert written.dtype == torch.bfloat16
    assert (written != exact.to(torch.bfloat16)).float().mean() < 1e-3  # a tie of rounding at most


# The folder


def tree(folder):
    return {path.name for path in folder.iterdir()}


def test_a_chat_template_is_kept(tmp_path):
    name = own_folder(tmp_path / "model")
    module, path = trained(tmp_path, made(model=name))
    tokenizer = AutoTokenizer.from_pretrained(export(Export(path, str(tmp_path / "out"))))
    messages = [{"role": "user", "content": "1+1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<user>1+1<a>"
    again = PolicyModule(str(tmp_path / "out"))
    problem = Sums().make_problems("train")[0]
    assert again.codec.prompt_ids(problem) == module.codec.prompt_ids(problem)


def test_a_folder_in_use_is_refused_unless_it_is_an_earlier_export(tmp_path):
    _, path = trained(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    export(Export(path, str(out)))  # empty is fine
    first = tree(out)
    with pytest.raises(ValueError, match=r"output: .* is not empty; valid: .*--overwrite"):
        export(Export(path, str(out)))
    (out / "stale.txt").write_text("of before")
    export(Export(path, str(out), overwrite=True))
    assert tree(out) == first
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds something else than an export"):
        export(Export(path, str(mine), overwrite=True))
    with pytest.raises(ValueError, match="is a file"):
        export(Export(path, path))
    shutil.copy(path, out / "inside.ckpt")
    with pytest.raises(ValueError, match="holds something else than an export"):
        export(Export(str(out / "inside.ckpt"), str(out), overwrite=True))
    assert (out / "inside.ckpt").exists()
    assert tree(tmp_path) == {"x.ckpt", "out", "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_half_written_stays(tmp_path, monkeypatch, overwrite):
    _, path = trained(tmp_path)
    out = tmp_path / "deep" / "out"
    if overwrite:
        export(Export(path, str(out)))
    before = {file.name: file.read_bytes() for file in out.iterdir()} if overwrite else None

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("gtpo_lightning.export.model_card", broken)
    with pytest.raises(KeyboardInterrupt):
        export(Export(path, str(out), overwrite=overwrite))
    assert tree(out.parent) == ({"out"} if overwrite else set())
    if overwrite:
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_what_cannot_be_exported_is_refused_by_name(tmp_path):
    _, path = trained(tmp_path)
    out = str(tmp_path / "out")
    text = tmp_path / "notes.md"
    text.write_text("no checkpoint")
    torch.save({"state_dict": {}}, tmp_path / "bare.ckpt")
    for wanted, words in (
        (Export(path, out, adapter_only=True), "adapter_only: .* holds a whole policy"),
        (Export(path, out, dtype="int8"), "dtype: 'int8' is not valid; valid: float32, bfloat16, float16"),
        (Export(str(tmp_path), out), "ckpt_path: .* is no file"),
        (Export(str(text), out), "ckpt_path: .* is no checkpoint of this package"),
        (Export(str(tmp_path / "bare.ckpt"), out), "ckpt_path: .* does not say which model"),
        (Export(path, out, model="./nowhere"), "model: './nowhere' is no folder"),
    ):
        with pytest.raises(ValueError, match=words):
            export(wanted)
    assert tree(tmp_path) == {"x.ckpt", "notes.md", "bare.ckpt"}


def test_a_checkpoint_in_parts_as_fsdp1_names_them_is_read(tmp_path):
    """Its weights are under another name than those of FSDP2; that of FSDP2 is in test_sharded_checkpoints.py."""
    import torch.distributed.checkpoint as dcp

    module, path = trained(tmp_path, made(lora=SMALL))
    content = torch.load(path, weights_only=True)
    parts = tmp_path / "parts.ckpt"
    frozen = {f"policy.{name}": value for name, value in module.policy.state_dict().items()}
    dcp.save({"model": {**frozen, **content.pop("state_dict")}}, checkpoint_id=parts, no_dist=True)
    torch.save({name: value for name, value in content.items() if name != "optimizer_states"}, parts / "meta.pt")
    same_logits(AutoModelForCausalLM.from_pretrained(export(Export(str(parts), str(tmp_path / "out")))), module)


# The card


def card_of(folder):
    header, body = re.fullmatch(r"---\n(.*?)---\n(.*)", (folder / "README.md").read_text(), re.DOTALL).groups()
    return yaml.safe_load(header), body, yaml.safe_load(re.search(r"```yaml\n(.*?)```", body, re.DOTALL).group(1))


def test_the_card_has_the_runs_settings_and_no_place_of_this_machine(tmp_path):
    name = own_folder(tmp_path / "place" / "my-model")
    flags = [f"--model.model={name}", "--model.lora.rank=4", "--model.max_completion_length=6", "--data=Arithmetic",
             "--model.prompt_template={question}", "--data.size=8", "--data.val_size=4", "--data.batch_size=4",
             "--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
             "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=3e-4", "--conflict_masking={}",
             "--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", f"--trainer.logger.save_dir={tmp_path}",
             "--trainer.limit_val_batches=0", f"--trainer.default_root_dir={tmp_path}"]  # fmt: skip
    cli = main(["fit", "--model=gtpo_lightning.GTPOModule", *flags])
    path = cli.trainer.checkpoint_callback.best_model_path
    folder = export(Export(path, str(tmp_path / "out")))
    header, body, settings = card_of(folder)
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gtpo-lightning", "gtpo", "lora"],
    }
    assert "after 1 optimizer steps" in body
    assert settings["model"] == "my-model"
    assert settings["lora"]["rank"] == 4
    assert settings["optimizer"]["init_args"]["lr"] == 3e-4
    assert settings["data"]["init_args"]["batch_size"] == 4
    assert settings["trainer"]["max_steps"] == 1
    assert settings["seed_everything"] == 0
    assert settings["conflict_masking"]["init_args"]["scope"] == "edges"
    for file in folder.rglob("*"):
        if file.suffix in (".json", ".md", ".jinja"):
            assert str(tmp_path) not in file.read_text(), file.name
            assert "/" + "work/" not in file.read_text(), file.name


def test_the_card_of_an_adapter_names_the_base_and_how_to_load_it(tmp_path):
    _, path = trained(tmp_path, made(lora=SMALL))
    folder = export(Export(path, str(tmp_path / "out"), adapter_only=True))
    header, body, settings = card_of(folder)
    assert header["library_name"] == "peft"
    assert "This folder holds the adapter only" in body
    assert "PeftModel.from_pretrained" in body
    assert settings["group_size"] == 4
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
        ("/models/mine", "mine"),
        ("./mine", "./mine"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_a_model_is_called_what_others_can_find(name, expected):
    assert hub_name(name) == expected


def test_places_are_cut_at_any_depth_and_texts_are_not():
    value = {"a": [{"b": "/x/y/z.jsonl"}, "~/w"], "c": "C:\\data\\rows.json", "d": "/a\nb", "e": "runs/x", "f": None}
    assert without_places(value) == {
        "a": [{"b": "z.jsonl"}, "w"], "c": "rows.json", "d": "/a\nb", "e": "runs/x", "f": None
    }  # fmt: skip


def test_the_command_exports_and_ends_with_its_message(tmp_path, capsys):
    module, path = trained(tmp_path, made(lora=SMALL))
    assert main(["export", "--ckpt_path", path, "--output", str(tmp_path / "out"), "--dtype", "float16"]) is None
    assert "MiB" in capsys.readouterr().out
    same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module, 0.02)
    main(["export", "--ckpt_path", path, "--output", str(tmp_path / "out"), "--adapter_only", "--overwrite"])
    assert (tmp_path / "out" / "adapter_config.json").exists()
    with pytest.raises(SystemExit) as ended:
        main(["export", "--ckpt_path", path, "--output", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "export: output: " in capsys.readouterr().err


def test_the_tiny_model_itself_can_be_a_folder(tmp_path):
    """Zero steps: the embedded model as it is, which then has a place that other programs read."""
    module = made(PolicyModule)
    module.configure_model()
    trainer = make_trainer(tmp_path)
    trainer.strategy.connect(module)
    _, path = trained(tmp_path, made(), steps=1)
    folder = export(Export(path, str(tmp_path / "out")))
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), LlamaForCausalLM)
    assert LlamaConfig.from_pretrained(folder).num_hidden_layers == 2
    again = made(model=str(folder))
    make_trainer(tmp_path).fit(again, Sums(batch_size=4))
    assert again.trainer.global_step == 1
