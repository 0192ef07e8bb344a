"""The collapse detector: what it measures, when it fires on recorded curves, and what its three actions do in a run."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from gtpo_lightning.callbacks import EntropyCollapse
from gtpo_lightning.callbacks import entropy_collapse as watched
from gtpo_lightning.callbacks._collapse_signals import measure
from gtpo_lightning.callbacks._good_state import GoodState, scale_learning_rate
from gtpo_lightning.functional.collapse import SIGNALS
from gtpo_lightning.hooks import RLCallback, StepWindow
from gtpo_lightning.schedulers import WarmupCosine
from tests.helpers.fakes import FakeModule, fake_trainer, rollout_of, warnings_of
from tests.helpers.training import Sums, adam, flat, make_module, make_trainer, spawn

NAN = float("nan")
FULL = "<reasoning>r</reasoning><answer>5</answer>"
CURVES = Path(__file__).parent / "collapse_curves"


# ------------------------------------------------------------------------------------------------------- what it reads


def scored(**more):
    """Two groups of three completions; hand-worked in the tests below."""
    settings = {
        "entropies": [[0.2, 0.4], 0.9, 0.1, 0.5, 0.5, 0.0],
        "lengths": [2, 1, 1, 1, 1, 0],
        "advantages": [1.0, -1.0, 0.0, 0.0, 0.0, 0.0],
        "group_ids": [3, 3, 3, 8, 8, 8],
        "rewards": torch.tensor([2.0, 1.0, NAN, 1.0, 1.0, NAN]),
        "texts": [FULL, "<answer>5</answer>", "", FULL, "x", "y"],
        **more,
    }
    return rollout_of(**settings)


def test_signals_of_a_rollout_by_hand():
    sums = measure(scored())
    assert sums["entropy"] == (pytest.approx(2.6, abs=1e-6), 6)
    assert sums["decided"] == sums["entropy"]
    assert sums["undecided"] == (1, 5)  # 0.9; the empty row does not count
    assert sums["format"] == (2, 6)
    assert sums["reward"] == (5, 4)
    assert sums["equal_groups"] == (1, 2)
    assert sums["kl"] == (0, 0)


def test_format_is_read_from_the_reward_where_there_is_one():
    assert measure(scored(reward_parts={"format": torch.tensor([10.0, 3.0, NAN, 10, 10, 1])}))["format"] == (3, 5)


def test_kl_is_read_where_a_reference_was_scored():
    rollout = scored(logprobs=torch.full((6, 2), -1.0))
    rollout.ref_logprobs = torch.where(rollout.completion_mask.bool(), -2.0, NAN)
    assert measure(rollout)["kl"] == (pytest.approx(6 * math.exp(-1), abs=1e-5), 6)


def test_without_rewards_or_completions_nothing_is_told():
    nothing = measure(scored(rewards=torch.full((6,), NAN), advantages=[0.0] * 6))
    assert (nothing["reward"], nothing["equal_groups"]) == ((0, 0), (0, 0))
    empty = rollout_of([], lengths=[], advantages=[], group_ids=[], rewards=torch.zeros(0))
    assert {count for _, count in measure(empty).values()} == {0}


def test_it_only_reads():
    rollout, before = scored(), scored()
    EntropyCollapse().on_after_loss(fake_trainer(), FakeModule(), rollout, losses := {})
    for name, value in vars(before).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(rollout, name).nan_to_num(7), value.nan_to_num(7)), name
    assert losses == {}


# ------------------------------------------------------------------------------------------------------ recorded curves


def curves(name):
    with (CURVES / f"{name}.csv").open() as file:
        rows = list(csv.reader(file))
    found = {column: [float(row[i]) for row in rows[1:]] for i, column in enumerate(rows[0])}
    return {**found, "decided": found["entropy"]}


def replay(monkeypatch, recorded, **settings):
    """The step it warns at (None: never), the warning, and the scores, with the defaults where nothing is given."""
    part, module, fired, scores = EntropyCollapse(**settings), FakeModule(), None, []
    for step in range(len(recorded["entropy"])):
        sums = {name: (recorded[name][step], 1.0) if name in recorded else (0.0, 0.0) for name in SIGNALS}
        monkeypatch.setattr(watched, "measure", lambda rollout, sums=sums: sums)
        texts = warnings_of(lambda: part.on_after_loss(fake_trainer(step), module, None, {}))  # noqa: B023
        scores.append(module.logged["gtpo/collapse_score"])
        if texts and fired is None:
            fired = step, texts[0]
    return (*(fired or (None, "")), scores)


def lost(values, allowed):
    """The first step at which the mean of ten steps has lost what is allowed of its best; None if it never does."""
    means = [sum(values[end - 10 : end]) / 10 for end in range(10, len(values) + 1)]
    return next((i + 9 for i, mean in enumerate(means) if mean < allowed(max(means[: i + 1]))), None)


def damage(recorded):
    """When the format rate has lost 10 points, or else accuracy half of what it had."""
    found = lost(recorded["format"], lambda best: best - 0.1)
    return lost(recorded["accuracy"], lambda best: best / 2) if found is None else found


def names(kind):
    return sorted(path.stem for path in CURVES.glob(f"{kind}_*.csv"))


def test_there_are_curves_of_both_kinds_and_the_collapsed_ones_are():
    assert (len(names("healthy")), len(names("collapse"))) == (10, 10)
    for name in names("healthy"):
        assert damage(curves(name)) is None, name
    for name in names("collapse"):
        assert damage(curves(name)) is not None, name


# Defaults were chosen on the curves of seed 0 (`_0`) and on `high_rate_gtpo_1`; those of other seeds were only checked.
@pytest.mark.parametrize("name", names("healthy"))
def test_it_is_silent_on_a_healthy_run(monkeypatch, name):
    fired, _, scores = replay(monkeypatch, curves(name))
    assert fired is None
    assert len(scores) >= 200


@pytest.mark.parametrize("name", names("collapse"))
def test_it_fires_on_a_collapse_before_the_damage_is_done(monkeypatch, name):
    fired, text, _ = replay(monkeypatch, curves(name))
    assert fired < damage(curves(name))
    assert "In the order they were seen" in text


# Where all is lost within some twenty steps of 32 completions, only the KL tells it in time.
LATE = {"rate_gtpo_0": 21, "rate_grpo_0": 21, "high_rate_gtpo_0": 33, "high_rate_gtpo_1": None}


@pytest.mark.parametrize("name", names("collapse"))
def test_without_a_measured_kl_it_is_late_on_the_fastest_collapses_only(monkeypatch, name):
    recorded = {column: values for column, values in curves(name).items() if column != "kl"}
    fired, _, _ = replay(monkeypatch, recorded)
    short = name.removeprefix("collapse_")
    if short in LATE:
        assert fired == LATE[short]
    else:
        assert fired < damage(recorded)


def test_entropy_that_climbs_from_its_lowest_value_fires_far_below_its_start(monkeypatch):
    """An entropy that falls all along, then climbs back to a value below its start: only the climb is news."""
    down = [0.4 * 0.97**step for step in range(100)]
    up = [down[-1] + 0.005 * step for step in range(60)]
    fired, text, scores = replay(monkeypatch, {"entropy": down + up})
    assert max(scores[:100]) == 0
    assert 100 < fired < 125
    assert up[fired - 100] < 0.2
    assert "token entropy" in text


# ----------------------------------------------------------------------------------------------------- counting a step


def feed(part, rows, step=0, trainer=None, module=None):
    module = FakeModule() if module is None else module
    texts = warnings_of(lambda: part.on_after_loss(trainer or fake_trainer(step), module, rows, {}))
    return module.logged, texts


def test_accumulated_micro_batches_are_one_step_also_where_they_are_uneven():
    halves, whole = EntropyCollapse(window=2), EntropyCollapse(window=2)
    module, trainer = FakeModule(), fake_trainer(accumulate_grad_batches=2)
    module.step_window = StepWindow()
    for high in (0.2, 0.6):
        module.step_window.clear()
        for entropies in ([0.2], [high, high, 0.4]):
            module.step_window.batches += 1
            assert halves.score.score == whole.score.score
            feed(halves, rollout_of(entropies), trainer=trainer, module=module)
        feed(whole, rollout_of([0.2, high, high, 0.4]))
        feed(whole, rollout_of([0.2, high, high, 0.4]))
        feed(halves, rollout_of([0.2, high, high, 0.4]))  # without a count of its own every call is a step
    assert halves.state_dict() == whole.state_dict()
    assert whole.score.scores["entropy"] > 0.5


def test_a_short_window_at_the_end_of_an_epoch_is_judged_when_the_optimizer_steps():
    part, module, trainer = EntropyCollapse(window=2), FakeModule(), fake_trainer(accumulate_grad_batches=4)
    module.step_window = StepWindow()
    for entropy in (0.2, 0.2, 0.5, 0.5):
        module.step_window.batches = 1
        feed(part, rollout_of([entropy]), trainer=trainer, module=module)
        part.on_before_optimizer_step(trainer, module, None)
    assert module.logged["gtpo/collapse_score"] == pytest.approx(0.3 / (0.3 + SIGNALS["entropy"].tolerance), abs=1e-6)


def test_a_step_that_tells_nothing_counts_for_nothing():
    part = EntropyCollapse(window=2, patience=3)
    for entropy in (0.2, 0.2, 0.5, 0.5):
        feed(part, rollout_of([entropy]))
    before = part.state_dict()
    for rows in (rollout_of([], lengths=[], advantages=[], group_ids=[]), rollout_of([0.9, 0.9], lengths=[0, 0])):
        logged, texts = feed(part, rows)
        assert logged == {"gtpo/collapse_score": before["trends"]["entropy"]["score"]}
        assert texts == []
        assert part.state_dict() == before
    assert len(feed(part, rollout_of([0.5]))[1]) == 1


def test_a_stale_score_does_not_fire():
    """The reward fell once and is then not scored any more: what is known of it does not get worse by that."""
    part = EntropyCollapse(window=2, patience=3)
    rewards = [2.0, 2.0, 0.0, 0.0, *[NAN] * 6]
    texts = [feed(part, rollout_of([0.2], rewards=torch.tensor([r])))[1] for r in rewards]
    assert part.score.signal == "reward"
    assert not any(texts)


def test_all_rewards_nan_from_the_start_is_no_collapse():
    part = EntropyCollapse(window=2, patience=1)
    for _ in range(6):
        logged, texts = feed(part, rollout_of([0.2, 0.2], rewards=torch.tensor([NAN, NAN])))
        assert texts == []
    assert part.score == (0.0, None, dict.fromkeys(SIGNALS, 0.0))
    measured = ("entropy", "undecided", "decided")
    assert set(logged) == {"gtpo/collapse_score", *(f"gtpo/collapse/{name}" for name in measured)}


def test_it_warns_once_a_collapse_naming_what_was_seen_since_when_and_what_to_try():
    part = EntropyCollapse(window=2, patience=2)
    rows = [(0.2, FULL)] * 3 + [(0.4, FULL)] * 2 + [(0.4, "x")] * 9 + [(0.2, FULL)] * 4 + [(0.5, FULL)] * 4
    texts = [feed(part, rollout_of([e], texts=[text]), step)[1] for step, (e, text) in enumerate(rows)]
    assert [step for step, found in enumerate(texts) if found] == [4, 19]
    (text,) = texts[4]
    assert "at optimizer step 4" in text
    assert "token entropy 0.4 (best 0.2) since step 3" in text
    for advice in ("lower learning rate", "`kl_penalty`", "`baseline: group`"):
        assert advice in text


def test_signals_that_fired_are_told_in_their_order():
    part, texts = EntropyCollapse(window=2, patience=4), []
    rows = [(0.2, FULL)] * 3 + [(0.2, "x")] * 2 + [(0.4, "x")] * 3
    for step, (entropy, completion) in enumerate(rows):
        texts += feed(part, rollout_of([entropy], texts=[completion]), step)[1]
    assert "full format 0 (best 1) since step 3; token entropy 0.4 (best 0.2) since step 5" in texts[0]


def test_only_the_signals_named_take_part():
    part = EntropyCollapse(window=2, patience=1, signals=["format"])
    for entropy in (0.2, 0.2, 3.0, 3.0):
        logged, texts = feed(part, rollout_of([entropy], texts=[FULL]))
        assert texts == []
    assert set(logged) == {"gtpo/collapse_score", "gtpo/collapse/format", "gtpo/format_frac"}


def test_another_tolerance_scores_another_drift():
    part = EntropyCollapse(window=2, tolerances={"entropy": 0.3})
    for entropy in (0.2, 0.2, 0.5, 0.5):
        feed(part, rollout_of([entropy]))
    assert part.score.score == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "halt"}, "action: 'halt'; valid: 'warn', 'stop', 'rollback'"),
        ({"signals": ["entropie"]}, "signals: 'entropie'; valid: 'entropy', 'undecided', 'decided', 'format', 'rew"),
        ({"signals": []}, "signals: \\[\\]; valid: null or a list of 'entropy'"),
        ({"signals": "entropy"}, "signals: 'entropy'; valid: null or a list"),
        ({"tolerances": {"kl_": 1.0}}, "tolerances: 'kl_'; valid: 'entropy'"),
        ({"tolerances": {"kl": 0}}, "tolerances\\['kl'\\]: 0; valid"),
        ({"tolerances": {"kl": -1.0}}, "tolerances\\['kl'\\]: -1.0; valid"),
        ({"window": 1}, "window: 1; valid: an integer >= 2"),
        ({"window": 2.5}, "window: 2.5; valid"),
        ({"patience": 0}, "patience: 0; valid: an integer >= 1"),
        ({"max_rollbacks": 0}, "max_rollbacks: 0; valid"),
        ({"action": "rollback", "keep_every": 7}, "keep_every: 7; valid: an integer >= 8"),
        ({"keep_every": 0}, "keep_every: 0; valid: an integer >= 1"),
        ({"threshold": 0}, "threshold: 0; valid: a number > 0 and < 1"),
        ({"threshold": 1.0}, "threshold: 1.0; valid: a number > 0 and < 1"),
        ({"noise": -1}, "noise: -1; valid"),
        ({"learning_rate_factor": 0.0}, "learning_rate_factor: 0.0; valid: a number > 0 and <= 1"),
        ({"learning_rate_factor": 2}, "learning_rate_factor: 2; valid"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EntropyCollapse(**arguments)


def test_deepspeed_is_refused_for_a_rollback_only():
    trainer = SimpleNamespace(strategy=type("DeepSpeedStrategy", (), {})())
    EntropyCollapse("stop").setup(trainer, None, "fit")
    with pytest.raises(ValueError, match="DeepSpeed"):
        EntropyCollapse("rollback").setup(trainer, None, "fit")


# ---------------------------------------------------------------------------------------------------------- good state


def test_a_copy_brings_weights_and_moments_back_bit_for_bit_and_stays_good():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])

    def step():
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        moments = [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]
        return [model.weight.detach().clone(), *moments]

    fresh = GoodState(model, [optimizer], 0)
    start = state()
    step()
    good, expected = GoodState(model, [optimizer], 1), state()
    for _ in range(2):
        step()
        step()
        assert not torch.equal(state()[0], expected[0])
        good.restore(model, [optimizer])
        assert all(map(torch.equal, state(), expected))
    step()
    after = state()
    good.restore(model, [optimizer])
    step()
    assert all(map(torch.equal, state(), after))
    fresh.restore(model, [optimizer])
    assert torch.equal(state()[0], start[0])
    assert len(state()) == 1  # no moments, as before the first step


def test_the_learning_rate_is_cut_now_and_for_the_rest_of_every_schedule():
    def schedules(optimizer):
        lr = torch.optim.lr_scheduler
        return [
            lambda: WarmupCosine(optimizer, warmup=2, total_steps=10),
            lambda: lr.CosineAnnealingLR(optimizer, 10),
            lambda: lr.OneCycleLR(optimizer, 0.1, total_steps=12, cycle_momentum=False),
            lambda: lr.SequentialLR(
                optimizer, [lr.LinearLR(optimizer, 0.2, total_iters=3), lr.ExponentialLR(optimizer, 0.9)], [3]
            ),
        ]

    def rates(index, cut_at):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler, found = schedules(optimizer)[index](), []
        for step in range(9):
            optimizer.step()
            scheduler.step()
            if step == cut_at:
                assert scale_learning_rate([optimizer], [scheduler], 0.5) == optimizer.param_groups[0]["lr"]
            found.append(optimizer.param_groups[0]["lr"])
        return found

    for index in range(4):
        plain = rates(index, None)
        for cut_at in (1, 6):
            expected = [rate * (0.5 if step >= cut_at else 1) for step, rate in enumerate(plain)]
            assert rates(index, cut_at) == pytest.approx(expected, rel=1e-9), (index, cut_at)


# ---------------------------------------------------------------------------------------------------------- real runs


class Wreck(RLCallback):
    """Empties the head before the steps given: every token is as likely as any, ln V nats."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in self.steps:
            with torch.no_grad():
                pl_module.policy.causal_lm.get_output_embeddings().weight.zero_()


class Record(RLCallback):
    """Weights, moments, learning rate and score before each optimizer step, and at its end."""

    def __init__(self, part):
        self.part, self.before, self.after, self.problems = part, [], [], []

    def state(self, trainer, pl_module):
        moments = [s["exp_avg"].flatten() for s in trainer.optimizers[0].state_dict()["state"].values()]
        return {
            "weights": flat(pl_module),
            "moments": torch.cat(moments) if moments else torch.zeros(0),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "score": self.part.score,
            "rollbacks": self.part.rollbacks,
        }

    def on_after_loss(self, trainer, pl_module, rollout, losses):
        self.problems.append([problem.id for problem in rollout.prompts.problems])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append(self.state(trainer, pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(self.state(trainer, pl_module))


def train(folder, steps, *wrecked, part=None, callbacks=(), module=None, ckpt_path=None, train=64, **settings):
    arguments = {"window": 3, "patience": 2, "keep_every": 3, "signals": ["entropy"], **settings}
    trainer_settings = {
        name: arguments.pop(name) for name in ("fast_dev_run", "accumulate_grad_batches") if name in arguments
    }
    part = part or EntropyCollapse(**arguments)
    record, module = Record(part), module or make_module(optimizer=adam)
    trainer = make_trainer(
        folder, [Wreck(*wrecked), part, record, *callbacks], max_steps=steps, max_epochs=-1, **trainer_settings,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    )  # fmt: skip
    texts = warnings_of(lambda: trainer.fit(module, Sums(train=train, batch_size=2), ckpt_path=ckpt_path))
    return SimpleNamespace(
        part=part, record=record, trainer=trainer, module=module,
        texts=[text for text in texts if text.startswith("EntropyCollapse")],
    )  # fmt: skip


def test_a_collapsed_policy_goes_back_to_its_good_state_bit_for_bit(tmp_path):
    run = train(tmp_path, 12, 6, action="rollback")
    before, after = run.record.before, run.record.after
    (back,) = [step for step in range(12) if after[step]["rollbacks"] > before[step]["rollbacks"]]
    # Wrecked before step 6: the median of three sees it at step 7, and again at 8. Copies are those of steps 0, 3 and
    # 6, and the last of them, wrecked already, has proved 3 only.
    assert back == 8
    assert "state before optimizer step 3 (rollback 1 of at most 3)" in run.texts[1]
    for name in ("weights", "moments"):
        assert torch.equal(after[back][name], before[3][name]), name
        assert not torch.equal(after[back][name], before[back][name]), name
    assert [state["lr"] for state in after] == [0.01] * 8 + [0.005] * 4
    assert run.trainer.global_step == 12
    assert len({tuple(ids) for ids in run.record.problems}) == 12  # the data went on
    assert not torch.equal(after[9]["weights"], after[8]["weights"])
    scores = [state["score"].score for state in after]
    assert scores[8:10] == [0, 0]  # afresh
    assert max(scores[8:]) < 0.25
    assert run.trainer.callback_metrics["gtpo/collapse_rollbacks"] == 1


def test_after_the_last_rollback_the_run_stops(tmp_path):
    run = train(tmp_path, 30, 6, 14, 22, action="rollback", max_rollbacks=2)
    assert "rollback 2 of at most 2" in run.texts[3]
    assert run.part.rollbacks == 2
    assert run.trainer.global_step == 25
    assert run.texts[-1].startswith("EntropyCollapse: the run stops at optimizer step")
    assert run.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0025, rel=1e-9)


def test_a_rollback_waits_until_the_collapsed_rollouts_are_used_up(tmp_path):
    module = make_module(optimizer=adam, updates_per_rollout=2, epsilon=0.2)
    run = train(tmp_path, 14, 6, module=module, action="rollback")
    (back,) = [step for step in range(14) if run.record.after[step]["rollbacks"] > run.record.before[step]["rollbacks"]]
    assert back == 9  # 8 is the first update of its rollout
    assert any(torch.equal(run.record.after[back]["weights"], state["weights"]) for state in run.record.before[:6])


def test_stop_stops_the_run_after_the_step(tmp_path):
    run = train(tmp_path, 20, 6, action="stop")
    assert run.trainer.global_step == 9
    assert run.trainer.should_stop
    assert len(run.texts) == 2


def test_warn_changes_nothing(tmp_path):
    run, plain = train(tmp_path, 10, 6), train(tmp_path, 10, 6, signals=["format"])
    assert torch.equal(run.record.after[-1]["weights"], plain.record.after[-1]["weights"])
    assert (len(run.texts), len(plain.texts)) == (1, 0)
    assert run.trainer.global_step == 10


def test_fast_dev_run_and_validation_do_nothing(tmp_path):
    run = train(tmp_path, 3, 0, fast_dev_run=2, action="stop")
    assert run.trainer.global_step == 2
    assert run.texts == []
    part = EntropyCollapse("stop", window=2, patience=1)
    make_trainer(tmp_path, [part], limit_val_batches=1).validate(make_module(), Sums(batch_size=2), verbose=False)
    assert part.state_dict() == EntropyCollapse("stop", window=2, patience=1).state_dict()


def test_accumulation_takes_the_same_copies_and_steps(tmp_path):
    run = train(tmp_path, 12, 6, action="rollback", accumulate_grad_batches=2)
    assert run.part.rollbacks == 1
    assert "state before optimizer step 3" in run.texts[1]
    back = next(i for i, state in enumerate(run.record.after) if state["rollbacks"])
    assert back == 2 * 8 + 1  # the second micro-batch of step 8
    assert torch.equal(run.record.after[back]["weights"], run.record.before[3]["weights"])


@pytest.mark.parametrize("stop", [4, 8, 10])
def test_a_resumed_run_scores_as_an_unbroken_one(tmp_path, stop):
    """Stopped before, within and after a collapse of which it only warns."""
    whole = train(tmp_path / "whole", 12, 6)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    first = train(tmp_path / "first", stop, 6, callbacks=[save])
    second = train(tmp_path / "second", 12, 6, ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
    scores = [state["score"] for run in (first, second) for state in run.record.after]
    assert scores == [state["score"] for state in whole.record.after]
    assert max(score.score for score in scores) > 0.5
    assert len(first.texts + second.texts) == len(whole.texts) == 1
    assert second.part.state_dict() == whole.part.state_dict()


def test_a_resumed_run_keeps_its_rollbacks_and_its_learning_rate_and_goes_back_to_its_checkpoint(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=12, save_top_k=-1)
    train(tmp_path / "first", 12, 6, callbacks=[save], action="rollback")
    path = str(tmp_path / "step=12.ckpt")
    second = train(tmp_path / "second", 20, 13, ckpt_path=path, action="rollback", keep_every=50)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert second.part.rollbacks == 2
    assert second.record.before[0]["lr"] == 0.005
    assert second.record.after[-1]["lr"] == 0.0025
    back = next(state for state in second.record.after if state["rollbacks"] == 2)
    expected = torch.cat([saved[f"policy.{name}"].reshape(-1) for name, _ in second.module.policy.named_parameters()])
    assert torch.equal(back["weights"], expected)


def two_ranks(rank, folder):
    module = make_module(optimizer=adam)
    part = EntropyCollapse("rollback", window=3, patience=2, keep_every=3, max_rollbacks=1, signals=["entropy"])
    record = Record(part)
    wreck = Wreck(*([6, 13] if rank == 0 else []))  # the policy of one rank alone
    trainer = make_trainer(folder, [wreck, part, record], max_steps=20, max_epochs=-1, devices=2, strategy="ddp")
    trainer.fit(module, Sums(train=64, batch_size=2))
    result = {
        "step": trainer.global_step,
        "scores": [state["score"].score for state in record.after],
        "rollbacks": [state["rollbacks"] for state in record.after],
        "good": [
            i for i, state in enumerate(record.before[:8]) if torch.equal(record.after[8]["weights"], state["weights"])
        ],
        "weights": record.after[8]["weights"],
    }
    torch.save(result, Path(folder) / f"rank{rank}.pt")


def test_two_ranks_go_back_and_stop_together_where_one_collapses(tmp_path):
    spawn(two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    weights = [rank.pop("weights") for rank in (first, second)]
    assert torch.equal(*weights)
    assert first == second
    assert first["rollbacks"] == [0] * 8 + [1] * 8
    assert first["good"] == [3]
    assert first["step"] == 16  # the second collapse, of step 13, stops the run
