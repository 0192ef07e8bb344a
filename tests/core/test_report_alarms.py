"""`report`: leads and false alarms of hand-made runs, and differences between variants seed by seed."""

from pathlib import Path

import pytest

from gtpo_lightning import report
from gtpo_lightning.report.alarms import Damage, damage_of, lead_text, outcomes
from gtpo_lightning.report.reading import RunData
from gtpo_lightning.report.statistics import accuracy_names, fired_at
from tests.core.test_report import T2, log, recorded, results, written

STEPS = 100


def steps(values):
    return dict(enumerate(values))


def run(name, *, format_frac=(), accuracy=None, settings=None, **scores):
    scalars = {f"gtpo/collapse/{signal}": steps(values) for signal, values in scores.items()}
    scalars["gtpo/format_frac"] = steps(format_frac)
    if accuracy is not None:
        scalars["val/sums/pass@1"] = accuracy
    return RunData(Path(name), scalars=scalars, settings=settings or {})


def from_step(first, value=0.9):
    return [0.0] * first + [value] * (STEPS - first)


# 1.0 for 40 steps, then 0: the mean of 15 steps is 14/15 at step 40 and 13/15, 0.133 below its best, at step 41.
FALLING = [1.0] * 40 + [0.0] * (STEPS - 40)
STEADY = [0.9, 1.0] * (STEPS // 2)


def test_format_is_lost_when_the_mean_of_fifteen_steps_is_ten_points_below_its_best():
    assert damage_of(run("a", format_frac=FALLING)) == Damage(41, None)
    assert damage_of(run("a", format_frac=STEADY)) == Damage(None, None)
    # exactly ten points count, nine do not
    assert damage_of(run("a", format_frac=[1.0] * 40 + [0.9] * 15)).format == 54
    assert damage_of(run("a", format_frac=[1.0] * 40 + [0.91] * 60)).format is None


def test_an_odd_first_step_is_no_best():
    assert damage_of(run("a", format_frac=[1.0] + [0.8] * 99)).format is None


def test_accuracy_is_lost_at_the_evaluation_ten_points_below_the_best_so_far():
    assert damage_of(run("a", accuracy={0: 0.9, 50: 0.81, 100: 0.8, 150: 0.2})) == Damage(None, 100)
    assert damage_of(run("a", accuracy={0: 0.2, 50: 0.9, 100: 0.85})) == Damage(None, None)


def test_leads_of_each_signal_and_false_alarms_of_runs_without_damage():
    runs = [
        run("early", format_frac=FALLING, entropy=from_step(20), kl=from_step(10)),  # fire at 22 and 12, damage at 41
        run("late", format_frac=FALLING, entropy=from_step(60), kl=from_step(100)),  # fires at 62; never
        run("healthy", format_frac=STEADY, entropy=from_step(100), kl=from_step(98)),  # two steps are not three
        run("false", format_frac=STEADY, entropy=from_step(97), kl=from_step(100)),
    ]
    seen = {outcome.signal: outcome for outcome in outcomes(runs)}
    assert list(seen) == ["all", "all but kl", "entropy", "kl"]
    assert seen["entropy"].leads == {"format": [19, -21], "accuracy": []}
    assert seen["kl"].leads == {"format": [29, None], "accuracy": []}
    assert seen["all"].leads["format"] == [29, -21]
    assert seen["all but kl"].leads["format"] == [19, -21]
    assert [(seen[name].false_alarms, seen[name].healthy) for name in seen] == [(1, 2), (1, 2), (1, 2), (0, 2)]


def test_the_rule_is_that_of_the_run():
    strict = {"entropy_collapse": {"init_args": {"threshold": 0.95, "patience": 1}}}
    (silent,) = (o for o in outcomes([run("a", format_frac=STEADY, kl=from_step(50), settings=strict)]) if o[0] == "kl")
    assert silent.false_alarms == 0
    loose = {"entropy_collapse": {"init_args": {"threshold": 0.9, "patience": 1}}}
    (loud,) = (o for o in outcomes([run("a", format_frac=STEADY, kl=from_step(99), settings=loose)]) if o[0] == "kl")
    assert loud.false_alarms == 1


def test_a_score_at_the_threshold_counts_and_a_gap_starts_over():
    assert fired_at({1: 0.6, 2: 0.1, 3: 0.5, 4: 0.7}, 0.5, 2) == 4
    assert fired_at({1: 0.6, 2: 0.1, 3: 0.5}, 0.5, 2) is None


@pytest.mark.parametrize(
    ("leads", "text"),
    [
        ([], "no run"),
        ([40, 20, -5, None], "2 of 4, 30 steps (20 to 40); late 1, silent 1"),
        ([0], "0 of 1; late 1"),  # with the damage is not before it
        ([7, 3], "2 of 2, 5 steps (3 to 7)"),
    ],
)
def test_leads_in_words(leads, text):
    assert lead_text(leads) == text


def test_a_run_without_a_detector_is_in_no_row():
    assert outcomes([RunData(Path("a"), scalars={"train/reward": {0: 1.0}})]) == []


def test_accuracy_is_pass_at_1_or_the_average_of_samples():
    names = ["val/b/avg@4", "val/b/format", "val/a/pass@1", "val/a/avg@1", "test/c/pass@1", "train/loss"]
    assert accuracy_names(names) == ["val/a/pass@1", "val/b/avg@4"]


def test_the_page_has_alarms_of_all_regimes_and_differences_by_seed(tmp_path):
    for regime in ("calm", "rough"):
        for seed, (base, other) in enumerate([(0.5, 0.625), (0.75, 0.875), (0.25, 0.5)]):
            for label, value in (("gtpo", base), ("grpo", other)):
                folder = tmp_path / regime / label / f"seed{seed}"
                falling = FALLING if regime == "rough" else STEADY
                log(
                    folder,
                    {"gtpo/format_frac": falling, "gtpo/collapse/kl": from_step(20 if regime == "rough" else 100)},
                )
                log(folder, {"gtpo/collapse_score": from_step(20 if regime == "rough" else 100)})
                results(folder, {"pass@1": value, "length": 9.0})
                recorded(folder, regime=regime, variant=label, label=label, seed=seed)
    page = written(tmp_path)[0]
    overall = page.row(0, "kl")
    assert overall["before the format was lost"] == "6 of 6, 19 steps (19 to 19)"
    assert overall["before accuracy was lost"] == "no run"
    assert overall["fired without damage"] == "0 of 6"
    # differences 1/8, 1/8, 1/4: mean 1/6, deviation 0.0722, times T2 / sqrt(3)
    half = T2 * 0.0721688 / 3**0.5
    assert page.row(2, "grpo") == {"variant": "grpo", "val/sums/pass@1": f"+0.167 ± {half:.3f}"}
    text = (tmp_path / "report_tables.md").read_text()
    assert "## Collapse alarms over all regimes" in text
    table = f"| variant | val/sums/pass@1 |\n| --- | --- |\n| grpo | +0.167 ± {half:.3f} |\n"
    assert f"## rough: differences from gtpo\n\n{table}" in text
    heads = [table[0] for table in page.tables]
    assert sum("fired without damage" in head for head in heads) == 3


def test_another_baseline(tmp_path, capsys):
    for label, value in (("a", 0.5), ("b", 0.25)):
        folder = tmp_path / label / "seed0"
        log(folder, {"train/reward": [1.0]})
        results(folder, {"pass@1": value})
        recorded(folder, variant=label, label=label)
    page = written(tmp_path, "--baseline", "b")[0]
    assert page.row(1, "a")["val/sums/pass@1"] == "+0.250"
    page = written(tmp_path, "--variants", "[b]")[0]
    assert [row[0] for row in page.tables[0][1:]] == ["b"]
    assert report.main([str(tmp_path), "--variants", "[a, d]"]) == 2
    assert "variants: 'd' is no variant of these runs; valid: a, b" in capsys.readouterr().err
    assert report.main([str(tmp_path), "--baseline", "c"]) == 2
    assert "baseline: 'c' is no variant of these runs; valid: a, b" in capsys.readouterr().err
