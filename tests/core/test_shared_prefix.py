"""Decoding with each prompt's keys and values kept once: the numbers of plain attention, and no wait for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gtpo_lightning import Problem
from gtpo_lightning.engines import Sampling, local
from gtpo_lightning.engines.local import LocalEngine
from gtpo_lightning.engines.shared_prefix import SharedPrefixLayer, can_share, sharing_prefix
from gtpo_lightning.policy import Policy
from gtpo_lightning.rollout import Prompts
from tests.core.test_policy import NAMES, VOCAB, build

SHARING = {"llama", "llama-tied", "qwen2", "gpt2", "cohere-scaled", "granite-scaled"}


def make_prompts(lengths=(6, 2, 3)):
    ids, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long), torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = torch.arange(5, 5 + length) + row, 1
    return Prompts(ids, mask, [Problem(str(row), "?", "") for row in range(len(lengths))])


def sample(policy, prompts, group=4, length=12, eos=(2, 3, 7, 9, 20, 40, 41)):
    keys = [(0, problem.id, member) for problem in prompts.problems for member in range(group)]
    return LocalEngine(policy, eos, 0).generate(prompts, Sampling(group, length), keys)


def score(policy, prompts, out, group=4):
    rows = torch.arange(len(prompts)).repeat_interleave(group)
    with torch.no_grad():
        return policy.score(prompts.ids, prompts.mask, rows, out.ids, out.mask)


@pytest.mark.parametrize("name", NAMES)
def test_models_with_plain_attention_share_and_others_keep_their_kernel(name):
    model = build(name)
    assert can_share(model) == (name in SHARING)
    model.set_attn_implementation("eager")
    assert not can_share(model)


@pytest.mark.parametrize("lengths", [(6, 2, 3), (4, 4), (1,)])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_is_what_scoring_says(name, lengths):
    policy, prompts = Policy(build(name)), make_prompts(lengths)
    out = sample(policy, prompts)
    assert len(set(out.lengths.tolist())) > 1  # rows leave the batch one by one
    logprobs, entropies = score(policy, prompts, out)
    torch.testing.assert_close(out.logprobs, logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropies, entropies, rtol=0, atol=2e-5)


def test_a_group_costs_the_prompt_once(monkeypatch):
    seen = []
    attend = SharedPrefixLayer.attend

    def watched(self, query, keys, values, scaling):
        seen.append((len(query), len(self.prefix_keys), keys.shape[2]))
        return attend(self, query, keys, values, scaling)

    monkeypatch.setattr(SharedPrefixLayer, "attend", watched)
    sample(Policy(build("llama")), make_prompts((5, 3)), group=6, length=4, eos=())
    assert seen == [(12, 2, step) for step in (1, 2, 3) for _ in range(2)]


def test_rows_that_stay_are_equally_many_of_each_prompt():
    alive = torch.tensor([0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]).bool()
    assert local._rows_to_keep(alive, 4).tolist() == [[1, 2], [8, 9]]
    assert local._rows_to_keep(alive, 1).flatten().tolist() == [1, 2, 8]
    assert local._rows_to_keep(torch.zeros(4).bool(), 2).tolist() == [[0]]


def test_the_model_has_its_kernel_back_after_an_error():
    model = build("llama")
    with pytest.raises(RuntimeError, match="stop"), sharing_prefix(model):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"


class Waits(TorchDispatchMode):
    """Counts operations whose result the host has to know, for which it waits on an accelerator."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        self.count += by_mask or name.startswith(self.WAITING)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [(6, 2, 3), (4, 4)])
def test_no_generated_token_waits_for_the_device(lengths, monkeypatch):
    policy, prompts = Policy(build("llama")), make_prompts(lengths)

    def waits(length, every):
        monkeypatch.setattr(local, "_check_every", lambda device: every)
        with Waits() as waiting:
            sample(policy, prompts, length=length, eos=(VOCAB + 1,))
        return waiting.count

    assert waits(4, 1000) == waits(24, 1000) > 0
    assert waits(24, 1) > waits(24, 8) > waits(24, 1000)  # looks at finished rows are counted
