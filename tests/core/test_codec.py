"""Text to tokens and back: exactly one beginning, every end, tags that survive."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gtpo_lightning import Problem
from gtpo_lightning.codec import Codec, end_ids, render_target
from gtpo_lightning.datamodules import DataModule
from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.models import tiny_tokenizer
from tests.helpers.training import make_module, make_trainer

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITHOUT_BOS = CHAT.removeprefix("{{ bos_token }}")
CHAT_WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def words(adds_bos=True, chat=None, special=()):
    names = ["<s>", "</s>", "<pad>", "<unk>", *special, "what", "is", "1+1", "?", "yes", "Problem:", "be", "brief"]
    names += ["<|user|>", "<|system|>", "<|assistant|>", "<answer>", "</answer>", "2"]
    names = list(dict.fromkeys(names))
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", names.index("<s>"))]
        )
    extra = [*special, "<|user|>", "<|system|>", "<|assistant|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=extra,
        chat_template=chat,
    )


PROBLEM = Problem("p", "what is 1+1 ?", "2")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("chat", [None, CHAT, CHAT_WITHOUT_BOS, "{{ bos_token }}" + CHAT])
def test_a_11_exactly_one_bos(adds_bos, chat):
    codec = Codec(words(adds_bos, chat), system_prompt="be brief")
    ids = codec.prompt_ids(PROBLEM)
    bos = codec.tokenizer.bos_token_id
    starts_with_bos = adds_bos or (chat or "").startswith("{{ bos_token }}")
    assert ids.count(bos) == int(starts_with_bos)
    assert (ids[0] == bos) == starts_with_bos


def test_the_system_prompt_opens_the_users_turn_where_a_template_refuses_it():
    codec = Codec(words(chat=CHAT_WITHOUT_SYSTEM), system_prompt="be brief")
    assert codec.prompt_text(PROBLEM) == "<s><|user|>be brief\n\nwhat is 1+1 ?<|assistant|>"
    assert Codec(words(chat=CHAT), system_prompt="be brief").prompt_text(PROBLEM) == (
        "<s><|system|>be brief<|user|>what is 1+1 ?<|assistant|>"
    )
    assert Codec(words(chat=CHAT), system_prompt="").prompt_text(PROBLEM) == "<s><|user|>what is 1+1 ?<|assistant|>"


def test_a_question_with_braces_stays_as_it_is():
    codec = Codec(words(), system_prompt="s", prompt_template="{system}|{question}|")
    assert codec.prompt_text(Problem("b", r"\frac{1}{2} {system}", "")) == r"s|\frac{1}{2} {system}|"


def test_a_01_padding_may_share_the_eos_id():
    tokenizer = words(adds_bos=False)
    tokenizer.pad_token = tokenizer.eos_token
    codec = Codec(tokenizer, prompt_template="{question}")
    prompts = codec.prompts([PROBLEM, Problem("e", "yes </s>", "")])
    assert prompts.mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    ids, mask = codec.completions(["yes yes", "yes"])
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert ids[1, 1:].tolist() == [codec.eos_ids[0]] * 2


def test_a_12b_only_the_end_and_padding_are_removed():
    codec = Codec(words(adds_bos=False, special=("<answer>", "</answer>")))
    ids, mask = codec.completions(["<answer> 2 </answer>", "yes"])
    assert codec.decode(ids, mask.sum(dim=1)) == ["<answer> 2 </answer>", "yes"]
    assert codec.decode(ids, torch.tensor([2, 1])) == ["<answer> 2", "yes"]
    assert codec.decode(ids, torch.tensor([0, 0])) == ["", ""]


def test_a_02b_end_ids_are_the_union_of_all_sources():
    class Config:
        eos_token_id = [5, 9]

    class Nothing:
        eos_token_id = None

    tokenizer = words()
    assert end_ids(tokenizer, Config(), Nothing()) == sorted({tokenizer.eos_token_id, 5, 9})
    codec = Codec(tokenizer)
    codec.add_end_ids(Config())
    assert codec.eos_ids == sorted({tokenizer.eos_token_id, 5, 9})


def test_no_end_at_all_is_refused():
    tokenizer = words()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        Codec(tokenizer)


def test_an_empty_prompt_is_refused_by_id():
    codec = Codec(words(adds_bos=False), system_prompt="", prompt_template="{question}")
    with pytest.raises(ValueError, match="'empty'"):
        codec.prompts([Problem("empty", "", "")])


def test_the_tiny_tokenizer_takes_any_ascii_text_and_gives_it_back():
    tokenizer = tiny_tokenizer()
    text = "so <reasoning>10+20=30,hmm7+5=12</reasoning>\n<answer>42</answer> some more text!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<answer>").input_ids == [tokenizer.convert_tokens_to_ids("<answer>")]


def test_targets_are_rendered_in_the_answer_format_and_refused_where_there_is_none():
    assert render_target(Problem("a", "q", "7", {"solution": "3+4"})) == (
        "<reasoning>\n3+4\n</reasoning>\n<answer>\n7\n</answer>"
    )
    assert render_target(Problem("a", "q", "7", {"solution": "3+4", "target": "T"})) == "T"
    with pytest.raises(ValueError, match=r"'a'.*meta\['solution'\]"):
        render_target(Problem("a", "q", "7", {"level": 1}))


class Tagged(DataModule):
    """Questions of 3 and of 5 tokens; written out as characters they would be far longer."""

    def make_problems(self, split):
        questions = ["<answer>1</answer>", "<answer>1</answer>=2"]
        return [Problem(f"{split}/{i}", question, "1") for i, question in enumerate(questions)]


def test_a_13_a_prompt_over_the_limit_is_dropped_and_one_within_it_keeps_its_special_tokens(tmp_path):
    seen = []

    class Watch(RLCallback):
        def on_rollout_start(self, trainer, pl_module, prompts):
            seen.append((prompts.ids.tolist(), [problem.id for problem in prompts.problems]))

    module = make_module()
    tag, end = (module.codec.tokenizer.convert_tokens_to_ids(name) for name in ("<answer>", "</answer>"))
    one = module.codec.tokenizer.convert_tokens_to_ids("1")
    data = Tagged(batch_size=2, max_prompt_length=3, shuffle=False)
    make_trainer(tmp_path, [Watch()]).fit(module, data)
    assert seen == [([[tag, one, end]], ["train/0"])]
    assert [problem.id for problem in data.train_problems] == ["train/0"]
