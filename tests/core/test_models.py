"""Where models come from: embedded names, folders in any precision, and clear refusals."""

import pytest
import torch

from gtpo_lightning import GTPOModule, Problem
from gtpo_lightning.models import load_model, load_tokenizer, tiny_model, tiny_tokenizer
from tests.helpers.training import Sums, adam, make_trainer, vowels


def save(folder, dtype=torch.float32, extra=0):
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer) + extra)
    torch.nn.Module.to(model, dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_tiny_model_is_the_same_whatever_the_global_seed():
    torch.manual_seed(1)
    first = tiny_model(20).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = tiny_model(20).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_p_06_weights_are_kept_as_asked_whatever_the_folder_holds(tmp_path, saved, wanted):
    model = load_model(save(tmp_path / "m", saved), dtype=wanted)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, wanted)}


def test_half_precision_weights_sample_and_train_with_finite_losses(tmp_path):
    module = GTPOModule("tiny", 4, 6, dtype="bfloat16", prompt_template="{question}", rewards=vowels, optimizer=adam)
    trainer = make_trainer(tmp_path)
    with pytest.warns(UserWarning, match="fp32 masters"):
        trainer.fit(module, Sums(batch_size=2))
    assert next(module.policy.parameters()).dtype == torch.bfloat16
    assert torch.isfinite(trainer.callback_metrics["train/grad_norm"])


def test_a_folder_gives_the_same_prompts_and_logits_as_what_was_saved(tmp_path):
    folder = save(tmp_path / "m")
    ids = load_tokenizer(folder)("<answer>4 2</answer>").input_ids
    assert ids == tiny_tokenizer()("<answer>4 2</answer>").input_ids
    logits = [model(input_ids=torch.tensor([ids])).logits for model in (load_model(folder), load_model("tiny"))]
    assert torch.equal(*logits)


def test_a_vocabulary_wider_than_the_tokenizer_trains(tmp_path):
    module = GTPOModule(save(tmp_path / "m", extra=300), 4, 6, prompt_template="{question}", rewards=vowels)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, Sums(batch_size=2))
    assert trainer.global_step == 1


def test_a_tokenizer_wider_than_the_vocabulary_is_refused_by_name(tmp_path):
    module = GTPOModule(save(tmp_path / "m", extra=-30), 4, 6, prompt_template="{question}", rewards=vowels)
    module.configure_model()
    with pytest.raises(ValueError, match=r"token id .* of problem 'p'"):
        module.codec.prompts([Problem("p", "~~~", "1")])


@pytest.mark.parametrize("name", ["", "./nowhere", "a/b/c"])
def test_what_cannot_be_read_is_refused_with_the_valid_choices(name):
    with pytest.raises(ValueError, match="tiny, smollm2-135m"):
        GTPOModule(name)


def test_a_hub_id_that_cannot_be_reached_is_refused_with_the_valid_choices(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"no tokenizer can be read from 'nobody/nothing'"):
        GTPOModule("nobody/nothing")


@pytest.mark.parametrize(("name", "meant"), [("tinny", "tiny"), ("smollm2-135", "smollm2-135m"), ("Tiny", "tiny")])
def test_a_name_close_to_an_embedded_one_is_asked_about_at_once(name, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        GTPOModule(name)


def test_weights_of_another_kind_or_size_are_refused(tmp_path):
    text = tmp_path / "notes.md"
    text.write_text("no checkpoint")
    with pytest.raises(ValueError, match="is no checkpoint of this package"):
        GTPOModule("tiny", weights=str(text)).configure_model()
    other = GTPOModule(save(tmp_path / "m", extra=5), 4, 6, rewards=vowels)
    trainer = make_trainer(tmp_path)
    trainer.fit(other, Sums(batch_size=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"does not fit the model .*of another size \['model.lm_head.weight'"):
        GTPOModule("tiny", weights=str(tmp_path / "x.ckpt")).configure_model()


def test_an_optimizer_that_builds_nothing_is_refused():
    with pytest.raises(ValueError, match="optimizer: 'adam'"):
        GTPOModule("tiny", optimizer="adam")
