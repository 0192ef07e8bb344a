"""The least a part's hooks may need: a trainer with a step and a reduction, a module with `log`."""

import warnings
from types import SimpleNamespace

import torch

from gtpo_lightning.rollout import Rollout


def fake_trainer(global_step=0, **more):
    return SimpleNamespace(global_step=global_step, strategy=SimpleNamespace(reduce=lambda t, *a, **k: t), **more)


class FakeModule:
    def __init__(self):
        self.logged = {}

    def log(self, name, value, **kwargs):
        self.logged[name] = float(value)


def warnings_of(function):
    """The texts of all warnings the call gives, repeated ones too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def rollout_of(entropies, lengths=None, advantages=None, group_ids=None, ids=None, **more):
    """A rollout whose row i has `lengths[i]` tokens, each of entropy `entropies[i]` (a number or a list)."""
    rows = len(entropies)
    lengths = [2] * rows if lengths is None else lengths
    width = max([*lengths, 1])
    mask = torch.zeros(rows, width)
    values = torch.full((rows, width), float("nan"))  # padding may hold anything
    for row, (value, length) in enumerate(zip(entropies, lengths, strict=True)):
        mask[row, :length] = 1
        values[row, :length] = torch.tensor(value)
    return Rollout(
        prompts=None,
        group_ids=torch.zeros(rows, dtype=torch.long) if group_ids is None else torch.tensor(group_ids),
        completion_ids=torch.zeros(rows, width, dtype=torch.long) if ids is None else torch.tensor(ids),
        completion_mask=mask,
        advantages=torch.zeros(rows) if advantages is None else torch.tensor(advantages),
        entropies=values,
        **more,
    )


def random_rollout(seed, groups=3, size=8, length=6, vocabulary=2):
    """Few token kinds and many conflicts, groups interleaved, some empty rows, some A = 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(0, length + 1, (rows,), generator=generator)
    return Rollout(
        prompts=None,
        group_ids=torch.arange(rows)[torch.randperm(rows, generator=generator)] % groups + 5,
        completion_ids=torch.randint(0, vocabulary, (rows, length), generator=generator),
        completion_mask=(torch.arange(length) < lengths[:, None]).float(),
        advantages=torch.tensor([-1.5, -0.02, 0.0, 0.03, 0.7])[torch.randint(0, 5, (rows,), generator=generator)],
        entropies=torch.rand(rows, length, generator=generator) * 1.4,
        logprobs=-torch.rand(rows, length, generator=generator),
    )
