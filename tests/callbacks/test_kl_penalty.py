"""The KL part: numbers by hand, the gradient against a dense forward, the reference in training and resuming."""

import itertools
import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from gtpo_lightning import GTPOModule
from gtpo_lightning.callbacks import EntropyRegularizer, KLPenalty
from gtpo_lightning.hooks import RLCallback
from tests.helpers.fakes import FakeModule, fake_trainer, rollout_of, warnings_of
from tests.helpers.training import Sums, adam, flat, gradient, make_module, make_trainer, spawn

NAN = float("nan")


def hand_made(**more):
    """Three rows of 2, 1 and 0 tokens; NaN in the padding of both log-probs."""
    rollout = rollout_of([0.5, 0.5, 0.5], [2, 1, 0], **more)
    rollout.logprobs = torch.tensor([[-1.0, -2.0], [-0.5, NAN], [NAN, NAN]], requires_grad=True)
    rollout.ref_logprobs = torch.tensor([[-1.5, -1.0], [-0.5, NAN], [NAN, NAN]])
    return rollout


# k3 of d = -0.5 and d = 1; the third token has d = 0
FIRST, SECOND = math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (FIRST + SECOND) / 2 / 2),
        ({"aggregation": "token"}, (FIRST + SECOND) / 3),
        ({"aggregation": "constant", "max_length": 10}, (FIRST + SECOND) / 20),
        ({"denominator": 8.0}, (FIRST + SECOND) / 2 / 8),
        ({"aggregation": "token", "denominator": 6.0}, (FIRST + SECOND) / 6),
        ({"aggregation": "constant", "max_length": 10, "denominator": 8.0}, (FIRST + SECOND) / 80),
    ],
)
def test_term_gradient_and_log_by_hand(settings, expected):
    rollout, module, losses = hand_made(**settings), FakeModule(), {"policy": torch.tensor(3.0)}
    rollout.sequence_weights *= 0  # no filter touches the KL
    part = KLPenalty(beta=0.3)
    part.on_before_loss(fake_trainer(), module, rollout)
    part.on_after_loss(fake_trainer(), module, rollout, losses)
    assert losses.pop("policy") == 3.0
    assert float(losses["kl"].detach()) == pytest.approx(0.3 * expected, rel=1e-6)
    assert module.logged == {"train/kl": pytest.approx((FIRST + SECOND) / 3, rel=1e-6)}
    losses["kl"].backward()
    # d k3 / d logp = 1 - exp(d)
    share = 0.3 * expected / (FIRST + SECOND)
    slopes = [[share * (1 - math.exp(-0.5)), share * (1 - math.e)], [0.0, 0.0], [0.0, 0.0]]
    assert torch.allclose(rollout.logprobs.grad, torch.tensor(slopes), rtol=1e-5, atol=1e-9)


def test_beta_0_measures_and_leaves_the_losses_alone():
    rollout, module, losses = hand_made(), FakeModule(), {}
    KLPenalty().on_after_loss(fake_trainer(), module, rollout, losses)
    assert losses == {}
    assert module.logged == {"train/kl": pytest.approx((FIRST + SECOND) / 3, rel=1e-6)}


def test_without_log_nothing_is_logged_and_with_beta_0_nothing_is_needed():
    module, losses = FakeModule(), {}
    KLPenalty(0.1, log=False).on_after_loss(fake_trainer(), module, hand_made(), losses)
    KLPenalty(0.0, log=False).on_after_loss(fake_trainer(), module, rollout_of([1.0]), losses)
    assert module.logged == {}
    assert list(losses) == ["kl"]


def test_it_adds_to_a_term_that_is_there():
    losses = {}
    for beta in (0.1, 0.3):
        KLPenalty(beta).on_after_loss(fake_trainer(), FakeModule(), hand_made(), losses)
    assert float(losses["kl"].detach()) == pytest.approx(0.4 * (FIRST + SECOND) / 4, rel=1e-6)


def test_a_06_without_completions_the_term_is_zero_and_attached():
    rollout, losses, module = rollout_of([0.5, 0.5], [0, 0]), {}, FakeModule()
    rollout.logprobs = torch.full((2, 1), NAN, requires_grad=True)
    rollout.ref_logprobs = torch.full((2, 1), NAN)
    KLPenalty(1.0).on_after_loss(fake_trainer(), module, rollout, losses)
    losses["kl"].backward()
    assert float(losses["kl"].detach()) == 0.0
    assert torch.equal(rollout.logprobs.grad, torch.zeros(2, 1))
    assert module.logged == {}


@pytest.mark.parametrize("beta", [-0.1, NAN, math.inf, "0.1", True])
def test_a_bad_beta_is_refused(beta):
    with pytest.raises(ValueError, match=r"^beta: "):
        KLPenalty(beta)


def test_a_reference_that_is_no_file_and_a_rollout_without_log_probs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^reference: .*is no file"):
        KLPenalty(reference=str(tmp_path / "nothing.ckpt"))
    rollout = rollout_of([1.0])
    rollout.logprobs = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"rollout\.ref_logprobs: None"):
        KLPenalty(0.1).on_after_loss(fake_trainer(), FakeModule(), rollout, {})


# In training


class Record(RLCallback):
    """What came by, and how often the reference was asked."""

    def __init__(self):
        self.rollouts, self.refs, self.losses, self.asked = [], [], [], 0

    def setup(self, trainer, pl_module, stage):
        score = pl_module.reference_logprobs

        def counted(rollout):
            self.asked += 1
            return score(rollout)

        pl_module.reference_logprobs = counted

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        self.refs.append(rollout.ref_logprobs)
        self.rollouts.append(rollout.completion_ids.tolist())
        self.losses.append({name: loss.detach().clone() for name, loss in losses.items()})


def elsewhere(folder, name="elsewhere.ckpt", size=0.05):
    """A checkpoint of a policy near the one of `make_module`."""
    module = make_module()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    state = {f"policy.{key}": value for key, value in module.policy.state_dict().items()}
    torch.save({"state_dict": state}, folder / name)
    return str(folder / name)


def equal_rewards(completions):
    return [1.0] * len(completions)


def dense_kl(path, aggregation, temperature):
    """Gradient of the KL term at the start, and the mean over tokens, completion by completion from the definition."""
    module, other = make_module(temperature=temperature), make_module()
    state = torch.load(path)["state_dict"]
    other.policy.load_state_dict({name.removeprefix("policy."): value for name, value in state.items()})
    problems = Sums(batch_size=4, shuffle=False).make_problems("train")[:4]
    module.trainer = make_trainer(".", ())
    module.trainer.strategy.connect(module)
    rollout = module.sample(module.codec.prompts(problems), module.sampling, "train")
    total, values, tokens = torch.tensor(0.0), [], int(rollout.lengths.sum())
    for i, length in enumerate(rollout.lengths.tolist()):
        prompt = module.codec.prompt_ids(problems[i // 4])
        completion = rollout.completion_ids[i, :length].tolist()

        def logp(policy, prompt=prompt, completion=completion):
            logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]

        d = logp(other.policy).detach() - logp(module.policy)
        kl = d.exp() - d - 1
        total = (
            total + kl.sum() * {"sequence": 1 / (16 * length), "token": 1 / tokens, "constant": 1 / 160}[aggregation]
        )
        values += kl.tolist()
    module.policy.zero_grad()
    total.backward()
    return torch.cat([p.grad.reshape(-1) for p in module.policy.parameters()]), sum(values) / len(values)


def step(folder, path, batch_size=4, aggregation="sequence", beta=0.5, temperature=1.0, micro=None, **trainer):
    """Gradient of one step of the KL term alone (all rewards are equal), and what was logged."""
    module = make_module(
        aggregation=aggregation, temperature=temperature, micro_batch_size=micro, rewards={equal_rewards: 1.0}
    )
    data = Sums(batch_size=batch_size, shuffle=False)
    grad = gradient(folder, [KLPenalty(beta, reference=path)], data, module, **trainer)
    return grad, float(module.trainer.callback_metrics["train/kl"])


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max() <= tolerance * max(1e-3, float(b.abs().max()))


SPLITS = [
    {"micro": 3},
    {"batch_size": 2, "accumulate_grad_batches": 2},
    {"batch_size": 1, "accumulate_grad_batches": 4, "micro": 1},
]


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_d_01_the_term_is_that_of_the_dense_forward_for_any_split(tmp_path, aggregation):
    path = elsewhere(tmp_path)
    temperature = 0.7
    expected, mean = dense_kl(path, aggregation, temperature)
    assert expected.abs().max() > 1e-3
    for split in [{}, *SPLITS]:
        grad, logged = step(tmp_path, path, aggregation=aggregation, temperature=temperature, **split)
        assert close(grad, 0.5 * expected), split
        assert logged == pytest.approx(mean, rel=1e-5), split


def test_d_02_a_short_last_window_counts_what_it_holds(tmp_path):
    path = elsewhere(tmp_path)
    grads = []
    for batch_size, accumulate in ((2, 2), (1, 4)):
        # 2 problems: the only window is half full
        module = make_module(rewards={equal_rewards: 1.0})
        data = Sums(train=2, batch_size=batch_size, shuffle=False)
        parts = [KLPenalty(0.5, reference=path)]
        grads.append(gradient(tmp_path, parts, data, module, accumulate_grad_batches=accumulate))
    assert grads[0].abs().max() > 1e-3
    assert close(grads[0], grads[1])


def _ddp(rank, folder):
    path = f"{folder}/elsewhere.ckpt"
    results = [step(folder, path, 2, aggregation, devices=2, strategy="ddp") for aggregation in ("sequence", "token")]
    torch.save(results, f"{folder}/{rank}.pt")


def test_d_06_two_processes_give_the_term_and_the_log_of_one(tmp_path):
    path = elsewhere(tmp_path)
    spawn(_ddp, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, aggregation in enumerate(("sequence", "token")):
        grad, logged = step(tmp_path, path, aggregation=aggregation)
        for rank in ranks:
            assert close(rank[i][0], grad)
            assert rank[i][1] == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3, "temperature": 0.7}])
@pytest.mark.parametrize("others", [[], [EntropyRegularizer(0.1, differentiable=True)]])
def test_p_01_the_kl_of_the_first_step_is_exactly_0_and_then_is_not(tmp_path, settings, others):
    record, module = Record(), make_module(optimizer=adam, **settings)
    make_trainer(tmp_path, [*others, KLPenalty(0.1), record], max_steps=2).fit(module, Sums(batch_size=4))
    first, second = (float(losses["kl"]) for losses in record.losses)
    assert first == 0.0
    assert second > 1e-5


def test_p_01_a_run_from_other_weights_starts_from_their_kl_of_0(tmp_path):
    path = elsewhere(tmp_path)
    module = make_module(weights=path)
    gradient(tmp_path, [KLPenalty(0.1)], module=module)
    assert float(module.trainer.callback_metrics["train/kl"]) == 0.0
    plain = make_module()
    gradient(tmp_path, [KLPenalty(0.1, reference=path)], module=plain)
    assert float(plain.trainer.callback_metrics["train/kl"]) > 1e-3


def test_a_step_on_the_term_alone_lowers_the_kl(tmp_path):
    path = elsewhere(tmp_path)
    module = make_module(rewards={equal_rewards: 1.0}, optimizer=lambda params: torch.optim.SGD(params, lr=1e-2))
    values = []

    class Watch(RLCallback):
        def on_train_batch_end(self, trainer, *args):
            values.append(float(trainer.callback_metrics["train/kl"]))

    module.updates_per_rollout = module.store.updates = 6  # the same completions, so only the policy differs
    data = Sums(batch_size=8, shuffle=False)
    make_trainer(tmp_path, [KLPenalty(1.0, reference=path), Watch()], max_steps=6).fit(module, data)
    assert len(values) == 6
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_beta_0_trains_to_the_same_bits_and_measures(tmp_path):
    results = []
    for parts in ([], [KLPenalty(0.0)], [KLPenalty(0.0, log=False)]):
        module = make_module(optimizer=adam)
        make_trainer(tmp_path, parts, max_steps=2).fit(module, Sums(batch_size=4))
        results.append((flat(module), module.trainer.callback_metrics.get("train/kl"), module.reference))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][0], results[2][0])
    assert results[1][1] > 1e-5
    assert results[0][1:] == results[2][1:] == (None, None)  # no copy


def test_the_reference_is_frozen_apart_and_in_no_checkpoint(tmp_path):
    module = make_module(optimizer=adam)
    start = flat(module).clone()
    trainer = make_trainer(tmp_path, [KLPenalty(0.1)], max_steps=2)
    said = warnings_of(lambda: trainer.fit(module, Sums(batch_size=4)))
    assert not any("in eval mode" in text for text in said)  # Lightning would tell the user of it at every start
    frozen = list(module.reference.parameters())
    assert torch.equal(torch.cat([p.reshape(-1) for p in frozen]), start)
    assert not torch.equal(flat(module), start)
    assert not any(p.requires_grad for p in frozen)
    assert not any(child.training for child in module.reference.policy.modules())
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert held.isdisjoint(id(p) for p in frozen)
    assert held == {id(p) for p in module.policy.parameters()}
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in checkpoint["state_dict"]} == {"policy"}
    again = GTPOModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(flat(again), flat(module))
    assert again.reference is None


def test_validation_alone_makes_no_reference(tmp_path):
    module = make_module()
    make_trainer(tmp_path, [KLPenalty(0.1)], limit_val_batches=1).validate(module, Sums(batch_size=2), verbose=False)
    assert module.reference is None


# Resuming


def run(folder, steps, ckpt_path=None, save_at=None, updates=1, module=None, part=None):
    record = Record()
    module = module or make_module(optimizer=adam, updates_per_rollout=updates, epsilon=0.2)
    callbacks = [part or KLPenalty(0.2), record]
    if save_at:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1))
    trainer = make_trainer(folder, callbacks, max_steps=steps, max_epochs=-1, enable_checkpointing=bool(save_at))
    trainer.fit(module, Sums(train=10, batch_size=2), ckpt_path=ckpt_path)
    return flat(module), record


def made(weights=None, **kwargs):
    """As `make_module`, without a change of weights in code: they are those of the model or of the checkpoint."""
    settings = {"model": "tiny", "group_size": 4, "max_completion_length": 10, "prompt_template": "{question}"}
    rewards = {"rewards": "tests.helpers.training.vowels", "optimizer": adam}
    return GTPOModule(**settings, **rewards, weights=weights, **kwargs)


@pytest.mark.parametrize(("stop", "updates"), [(2, 1), (3, 2)])
def test_e_08_e_05_two_steps_resume_two_steps_equals_four(tmp_path, stop, updates):
    whole, record = run(tmp_path / "whole", stop + 2, updates=updates)
    assert record.asked == math.ceil((stop + 2) / updates)  # once a rollout
    run(tmp_path / "first", stop, save_at=stop, updates=updates)
    path = str(tmp_path / "first" / f"step={stop}.ckpt")
    again, resumed = run(tmp_path / "second", stop + 2, ckpt_path=path, updates=updates)
    assert torch.equal(again, whole)
    assert resumed.rollouts == record.rollouts[-2:]
    assert all(torch.equal(a, b) for a, b in zip(resumed.refs, record.refs[-2:], strict=True))
    if updates == 2:
        assert resumed.asked == 1  # the rollout that was in use brought its own


def test_e_08_a_run_from_weights_resumes_with_their_policy_as_the_reference(tmp_path):
    start = elsewhere(tmp_path)
    whole, _ = run(tmp_path / "whole", 4, module=made(start))
    run(tmp_path / "first", 2, save_at=2, module=made(start))
    first = str(tmp_path / "first" / "step=2.ckpt")
    # as the command line resumes: without `weights`; then once more from the resumed run
    again, _ = run(tmp_path / "second", 4, ckpt_path=first, module=made())
    assert torch.equal(again, whole)
    run(tmp_path / "third", 3, ckpt_path=first, module=made(), save_at=3)
    third, _ = run(tmp_path / "third", 4, ckpt_path=str(tmp_path / "third" / "step=3.ckpt"), module=made())
    assert torch.equal(third, whole)
    # a module that already holds the trained policy does not take that for the reference
    loaded = GTPOModule.load_from_checkpoint(first, optimizer=adam, rewards="tests.helpers.training.vowels")
    assert torch.equal(run(tmp_path / "fourth", 4, ckpt_path=first, module=loaded)[0], whole)


def test_a_start_policy_that_is_gone_or_changed_is_told_and_can_be_given(tmp_path):
    start = elsewhere(tmp_path)
    whole, _ = run(tmp_path / "whole", 4, module=made(start))
    run(tmp_path / "first", 2, save_at=2, module=made(start))
    path = str(tmp_path / "first" / "step=2.ckpt")
    moved = (tmp_path / "elsewhere.ckpt").rename(tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=r"elsewhere.ckpt, and that file is gone; valid: .*kl_penalty.reference"):
        run(tmp_path / "gone", 4, ckpt_path=path, module=made())
    elsewhere(tmp_path, size=0.06)
    with pytest.raises(ValueError, match=r"elsewhere\.ckpt has other weights now"):
        run(tmp_path / "changed", 4, ckpt_path=path, module=made())
    given, _ = run(tmp_path / "given", 4, ckpt_path=path, module=made(), part=KLPenalty(0.2, reference=str(moved)))
    assert torch.equal(given, whole)
    with pytest.warns(UserWarning, match="has other weights than the reference of the run that is resumed"):
        run(tmp_path / "other", 3, ckpt_path=path, module=made(), part=KLPenalty(0.2, reference=start))
    run(tmp_path / "off", 4, ckpt_path=path, module=made(), part=KLPenalty(0.0, log=False))  # needs no reference


def test_the_part_switched_on_in_a_resumed_run_measures_to_the_start(tmp_path):
    start = elsewhere(tmp_path)
    off = KLPenalty(0.0, log=False)
    run(tmp_path / "first", 2, save_at=2, module=made(start), part=off)
    path = str(tmp_path / "first" / "step=2.ckpt")
    run(tmp_path / "second", 3, ckpt_path=path, save_at=3, module=made(), part=off)  # passes on where it started
    module = made()
    run(tmp_path / "third", 4, ckpt_path=str(tmp_path / "second" / "step=3.ckpt"), module=module)
    kept = torch.cat([p.reshape(-1) for p in module.reference.parameters()])
    origin = made(start)
    origin.configure_model()
    assert torch.equal(kept, flat(origin))
    assert float(module.trainer.callback_metrics["train/kl"]) > 1e-5
