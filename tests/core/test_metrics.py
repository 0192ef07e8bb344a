"""PassAtK and MajAtK: each problem once, on one process and on two, whatever arrives where."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torchmetrics import MetricCollection

from gtpo_lightning.metrics import MajAtK, PassAtK
from tests.helpers.two_ranks import run_on_two_ranks

# id: (labels, correct), n = 4; by hand: pass@1 and pass@2, maj@1, maj@2 and maj@4 of each problem
PROBLEMS = {
    "p0": ([0, 1, 2, 3], [True, False, False, False]),  # 1/4, 1/2; 1/4, 1/4, 1/4
    "p1": ([5, 5, 5, 5], [False, False, False, False]),  # 0, 0; 0, 0, 0
    "p2": ([0, 9, 0, -1], [True, False, True, False]),  # 1/2, 5/6; 1/2, (1 + 2·1/2 + 2)/6 = 2/3, 1
}
PASS = {1: (1 / 4 + 0 + 1 / 2) / 3, 2: (1 / 2 + 0 + 5 / 6) / 3}
MAJ = {1: (1 / 4 + 0 + 1 / 2) / 3, 2: (1 / 4 + 0 + 2 / 3) / 3, 4: (1 / 4 + 0 + 1) / 3}


def samples(*names):
    """The three arguments of an update with all samples of these problems."""
    ids = [name for name in names for _ in PROBLEMS[name][0]]
    return (ids, *([value for name in names for value in PROBLEMS[name][part]] for part in (0, 1)))


def metrics():
    return PassAtK([1, 2]), MajAtK([1, 2, 4])


def near(expected):
    return pytest.approx(expected, abs=1e-15)


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestOneProcess:
    def test_means_over_problems(self):
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            metric.update(*samples("p0", "p1"))
            metric.update(*samples("p2"))
            assert metric.compute() == near(expected)
            assert list(metric.compute()) == list(expected)
            assert {type(key) for key in metric.compute()} == {int}
            assert {type(value) for value in metric.compute().values()} == {float}

    def test_k_03_problems_are_not_samples(self):
        ids = [f"problem {i}" for i in range(164)]
        for kind in (PassAtK, MajAtK):
            metric = kind([1, 10])
            metric.update(ids, [0] * 164, [True] * 41 + [False] * 123)
            assert metric.compute() == {1: 0.25}

    def test_k_05b_the_mean_is_over_problems_not_over_pooled_samples(self):
        for kind in (PassAtK, MajAtK):
            metric = kind(2)
            metric.update(["a"] * 3 + ["b"] * 3, [0] * 6, [True] * 3 + [False] * 3)
            assert metric.compute() == {2: 0.5}

    def test_k_07b_a_tie_is_shared(self):
        metric = MajAtK(5)
        metric.update(["a"] * 5, [8, 2, 8, 2, 6], [False, True, False, True, False])
        assert metric.compute() == {5: 0.5}

    def test_k_02_a_k_that_one_problem_has_too_few_samples_for_is_left_out(self):
        for kind in (PassAtK, MajAtK):
            metric = kind([8, 3, 2, 5])
            metric.update(["a"] * 8 + ["b"] * 3, [0] * 11, [False] * 8 + [True] * 3)
            assert metric.compute() == {3: 0.5, 2: 0.5}

    def test_m_02_a_problem_that_was_seen_is_ignored(self):
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            for names in (("p0", "p1"), ("p1", "p2"), ("p2",), ("p0", "p1", "p2")):
                metric.update(*samples(*names))
            metric.update(["p1"] * 2, [0, 0], [True, True])  # other samples, and too few for k = 4
            assert metric.compute() == near(expected)

    def test_m_07_reset_forgets_and_forward_counts_once(self):
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            assert metric(*samples("p0"))[1] == 0.25  # of what the call was given
            metric.update(*samples("p2"))
            assert metric(*samples("p1"))[1] == 0.0
            assert metric(*samples("p0"))[1] == 0.25
            assert metric.compute() == near(expected)
            metric.reset()
            metric.update(*samples("p2"))
            assert metric.compute()[1] == 0.5
            metric.reset()
            metric.update(*samples("p0", "p1", "p2"))
            assert metric.compute() == near(expected)

    def test_value_follows_later_updates(self):
        metric = PassAtK(1)
        metric.update(*samples("p0"))
        assert metric.compute() == {1: 0.25}
        metric.update(*samples("p1"))
        assert metric.compute() == {1: 0.125}

    def test_nothing_seen(self):
        for metric in metrics():
            with pytest.warns(UserWarning, match="before the ``update``"):  # torchmetrics' own
                assert metric.compute() == {}
            metric.update([], [], [])
            assert metric.compute() == {}
            assert metric([], [], []) == {}

    def test_samples_of_a_problem_need_not_be_neighbours(self):
        (_, labels, correct), order = samples("p0", "p2"), [0, 4, 1, 5, 2, 6, 3, 7]
        ids = ["p0"] * 4 + ["p2"] * 4
        for metric in metrics():
            metric.update(ids, labels, correct)
            expected = metric.compute()
            metric.reset()
            metric.update([ids[i] for i in order], [labels[i] for i in order], [correct[i] for i in order])
            assert metric.compute() == expected

    def test_order_of_the_problems_does_not_change_a_digit(self):
        ids = [str(i) for i in range(60) for _ in range(7)]
        right = [j < i % 8 for i in range(60) for j in range(7)]
        values = set()
        for shift in range(0, 420, 70):
            for kind in (PassAtK, MajAtK):
                metric = kind(3)
                metric.update(*(part[shift:] + part[:shift] for part in (ids, [int(r) for r in right], right)))
                values.add((kind, metric.compute()[3]))
        assert len(values) == 2

    def test_labels_are_compared_within_a_problem_only(self):
        metric = MajAtK(2)
        metric.update(["a", "a", "b", "b"], [0, 0, 0, 0], [True, True, False, False])
        assert metric.compute() == {2: 0.5}

    def test_pass_at_k_does_not_look_at_labels(self):
        metric = PassAtK([1, 2])
        metric.update(["a"] * 4, [-1, 0, 0, 0], [True, True, False, False])
        assert metric.compute() == near({1: 0.5, 2: 5 / 6})

    def test_tensors(self):
        ids, labels, correct = samples("p0", "p1", "p2")
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            metric.update(tuple(ids), torch.tensor(labels), torch.tensor(correct))
            assert metric.compute() == near(expected)

    def test_any_string_is_an_id(self):
        ids = ["", " ", "0", "00", "é", "e\u0301", "\ud800", "x" * 10_000, "p\0", "p"]
        metric = PassAtK(1)
        metric.update(ids, [0] * 10, [True] + [False] * 9)
        metric.update(ids, [0] * 10, [False] * 10)
        assert metric.compute() == {1: 0.1}

    def test_more_samples_than_half_precision_counts(self):
        metric = torch.nn.ModuleDict({"metric": PassAtK([1])}).to(torch.bfloat16)["metric"]
        for part in range(3):
            ids = [f"{part} {i}" for i in range(300)]
            metric.update(ids, [0] * 300, [i < 100 * part for i in range(300)])
        metric.update(["many"] * 3001, [0] * 3001, [True] * 3001)
        assert metric.compute() == near({1: 301 / 901})

    @pytest.mark.parametrize(
        "convert",
        [
            lambda module: module.to(torch.bfloat16),
            lambda module: module.half(),
            lambda module: module.double(),
            lambda module: module.type(torch.float16),
            lambda module: module["metric"].set_dtype(torch.float16),
        ],
    )
    @pytest.mark.parametrize("when", ["before", "between"])
    def test_precision_of_the_parent_does_not_matter(self, convert, when):
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            parent = torch.nn.ModuleDict({"metric": metric, "other": torch.nn.Linear(1, 1)})
            for step, names in enumerate((("p0", "p1"), ("p1", "p2"))):
                if step == (when == "between"):
                    convert(parent)
                metric.update(*samples(*names))
            assert metric.compute() == near(expected)
            assert {tensor.dtype for state in metric.metric_state.values() for tensor in state} == {torch.int64}

    @pytest.mark.parametrize("kind", [PassAtK, MajAtK])
    def test_ks(self, kind):
        assert kind(3).ks == kind([3, 3]).ks == (3,)
        assert kind(range(1, 4)).ks == (1, 2, 3)
        for bad in (0, -1, [], [1, 0], 1.5, 2.0, [2.0], True, None, "2", ["a"], [None], [[1]]):
            with pytest.raises(ValueError, match=r"^ks: .*; valid: an int from 1"):
                kind(bad)

    def test_refusals_add_nothing(self):
        ids, labels, correct = samples("p0", "p1")
        bad = [
            (PassAtK, (ids[:-1], labels, correct), "^problem_ids, labels, correct: lengths 7, 8, 8; valid"),
            (PassAtK, (ids, labels[:-1], correct), "^problem_ids, labels, correct: lengths 8, 7, 8; valid"),
            (MajAtK, (ids, labels, correct[:-1]), "^problem_ids, labels, correct: lengths 8, 8, 7; valid"),
            (PassAtK, ([*ids[:-1], 7], labels, correct), "^problem_ids: 7; valid: strings"),
            (PassAtK, (ids, labels, [*correct[:-1], 0.5]), "^correct: 0.5; valid"),
            (MajAtK, (ids, labels, [*correct[:-1], True]), "^correct: 1 of 4 answers of label 5; valid"),
            (MajAtK, (ids, [*labels[:-1], 0.5], correct), "^labels: 0.5; valid"),
        ]
        for kind, arguments, message in bad:
            metric = kind(1)
            with pytest.raises(ValueError, match=message):
                metric.update(*arguments)
            assert metric.compute() == {}


class TestAsAnyMetric:
    def test_pickle_clone_and_deepcopy_go_on_alone(self):
        for metric, expected in zip(metrics(), (PASS, MAJ), strict=True):
            metric.update(*samples("p0"))
            first = metric.compute()
            for other in (pickle.loads(pickle.dumps(metric)), metric.clone(), copy.deepcopy(metric)):
                other.update(*samples("p0", "p1", "p2"))
                assert other.compute() == near(expected)
            assert metric.compute() == first

    def test_state_goes_through_a_checkpoint_if_persistent(self):
        for metric, other, expected in zip(metrics(), metrics(), (PASS, MAJ), strict=True):
            metric.update(*samples("p0"))
            metric.update(*samples("p1"))
            assert metric.state_dict() == {}
            metric.persistent(True)
            file = io.BytesIO()
            torch.save(metric.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
            other.update(*samples("p1", "p2"))
            assert other.compute() == near(expected)

    def test_states_merge(self):
        for metric, other, expected in zip(metrics(), metrics(), (PASS, MAJ), strict=True):
            metric.update(*samples("p0", "p1"))
            other.update(*samples("p1", "p2"))
            metric.merge_state(other)
            assert metric.compute() == near(expected)

    @pytest.mark.parametrize("first", [(), ("p0",)])
    def test_collection(self, first):
        collection = MetricCollection({"pass": PassAtK([1]), "more": PassAtK([2]), "maj": MajAtK([1, 2, 4])})
        collection.update(*samples(*first))
        collection.update(*samples("p0", "p1", "p2"))
        expected = {"pass_1": PASS[1], "more_2": PASS[2]} | {f"maj_{k}": value for k, value in MAJ.items()}
        assert collection.compute() == near(expected)
        collection.reset()
        collection.update(*samples("p2"))
        assert collection.compute() == near(
            {"pass_1": 0.5, "more_2": 5 / 6, "maj_1": 0.5, "maj_2": 2 / 3, "maj_4": 1.0}
        )


# the problems in each update of rank 0 and of rank 1
SCENARIOS = {
    "k-12 the sampler repeats one": ([["p0"], ["p2"]], [["p1"], ["p0"]]),
    "m-01 rank 1 never updates": ([["p0", "p1"], ["p2"]], []),
    "m-01 rank 0 never updates": ([], [["p0", "p1"], ["p2"]]),
    "m-01 rank 1 gets nothing": ([["p0", "p1", "p2"]], [[]]),
    "m-02 everything twice": ([["p0", "p1", "p2"]], [["p0", "p1", "p2"]]),
    "m-02 in another order": ([["p0"], ["p1"], ["p2"]], [["p2", "p1"], ["p0"]]),
    "uneven": ([["p0"]], [["p1"], ["p1"], ["p2"]]),
}


def values_of(metric):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns on a rank without updates
        return metric.compute()


def run_scenarios(rank):
    found = {}
    for name, ranks in SCENARIOS.items():
        found[name] = []
        for metric in metrics():
            for names in ranks[rank]:
                metric.update(*samples(*names))
            found[name].append(values_of(metric))
    found["nothing"] = [values_of(metric) for metric in metrics()]
    found.update(short=short_of(rank), twice=twice(rank), conflict=conflict(rank), forward=forward(rank))
    found["half"] = half(rank)
    found["collection"] = collection(rank)
    return found


def short_of(rank):
    """Rank 1's only problem has two samples."""
    metric = PassAtK([1, 2, 3])
    metric.update(["a", "b"][rank : rank + 1] * (4 - 2 * rank), [0] * (4 - 2 * rank), [rank == 0] * (4 - 2 * rank))
    return metric.compute()


def twice(rank):
    """Values of two epochs, and of an epoch that goes on after its value was asked for."""
    metric, values = PassAtK(1), []
    metric.update(*samples(["p0", "p1"][rank]))
    values.append(metric.compute())
    if rank:
        metric.update(*samples("p2"))
    else:
        metric.update(*samples("p1"))
    values.append(metric.compute())
    metric.reset()
    metric.update(*samples("p2"))
    values.append(metric.compute())
    return values


def conflict(rank):
    """One id with other samples on each rank."""
    metric = PassAtK(1)
    metric.update(["a", "a"], [0, 0], [rank == 0, False])
    return metric.compute()


def forward(rank):
    """Values of the calls, each rank's own or, synchronised at each step, that of both; then of all."""
    values = []
    for together in (False, True):
        metric = PassAtK(1, dist_sync_on_step=together)
        values.append([metric(*samples(*names)) for names in ((["p0"], ["p1"])[rank], ([], ["p2"])[rank])])
        values[-1].append(metric.compute())
    return values


def half(rank):
    values = []
    for metric in metrics():
        parent = torch.nn.ModuleDict({"metric": metric})
        if not rank:
            metric.update(*samples("p0", "p1", "p2"))
        parent.to(torch.bfloat16)
        values.append(values_of(metric))
    return values


def collection(rank):
    metric = MetricCollection({"pass": PassAtK(1), "more": PassAtK(2), "maj": MajAtK(4)})
    metric.update(*samples(*(["p0", "p1"], [])[rank]))
    metric.update(*samples(*([], ["p1", "p2"])[rank]))
    return metric.compute()


class TestTwoProcesses:
    @pytest.fixture(scope="class")
    def ranks(self, tmp_path_factory):
        return run_on_two_ranks(run_scenarios, tmp_path_factory.mktemp("ranks"))

    @pytest.mark.parametrize("name", list(SCENARIOS))
    def test_k_12_m_01_m_02_each_problem_once_wherever_it_is(self, ranks, name):
        for rank in ranks:
            assert rank[name] == [near(PASS), near(MAJ)]

    def test_ranks_agree_to_the_last_digit(self, ranks):
        for name in SCENARIOS:
            assert ranks[0][name] == ranks[1][name]
            assert ranks[0][name] == ranks[0]["m-02 everything twice"]

    def test_nothing_seen_by_any_rank(self, ranks):
        assert [rank["nothing"] for rank in ranks] == [[{}, {}]] * 2

    def test_a_k_that_a_problem_of_the_other_rank_is_too_short_for_is_left_out(self, ranks):
        assert [rank["short"] for rank in ranks] == [{1: 0.5, 2: 0.5}] * 2

    def test_m_07_epochs_go_on_and_are_forgotten(self, ranks):
        assert [rank["twice"] for rank in ranks] == [[{1: 0.125}, {1: 0.25}, {1: 0.5}]] * 2

    def test_of_two_reports_of_a_problem_the_lowest_rank_counts(self, ranks):
        assert [rank["conflict"] for rank in ranks] == [{1: 0.5}] * 2

    def test_m_07_forward_counts_once(self, ranks):
        assert ranks[0]["forward"] == [[{1: 0.25}, {}, {1: 0.25}], [{1: 0.125}, {1: 0.5}, {1: 0.25}]]
        assert ranks[1]["forward"] == [[{1: 0.0}, {1: 0.5}, {1: 0.25}], [{1: 0.125}, {1: 0.5}, {1: 0.25}]]

    def test_m_01_in_half_precision(self, ranks):
        assert [rank["half"] for rank in ranks] == [[near(PASS), near(MAJ)]] * 2

    def test_collection(self, ranks):
        assert [rank["collection"] for rank in ranks] == [near({1: PASS[1], 2: PASS[2], 4: MAJ[4]})] * 2
