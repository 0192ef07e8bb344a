import itertools
import logging

import pytest

from gtpo_lightning.datamodules import ProblemLoader
from gtpo_lightning.rollout import Problem


def problems(count):
    return [Problem(str(i), f"{i}+0=", str(i)) for i in range(count)]


def ids(loader):
    return [[problem.id for problem in batch] for batch in loader]


def test_unshuffled_batches_by_hand():
    assert ids(ProblemLoader(problems(5), batch_size=2)) == [["0", "1"], ["2", "3"], ["4"]]


@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 16])
@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 4), (2, 2), (4, 1), (3, 2)])
def test_d11_ranks_share_each_step_of_one_rank(count, ranks, per_rank):
    single = ids(ProblemLoader(problems(count), batch_size=ranks * per_rank, shuffle=True, seed=3))
    parts = [
        ids(ProblemLoader(problems(count), batch_size=per_rank, shuffle=True, seed=3, rank=r, world_size=ranks))
        for r in range(ranks)
    ]
    assert {len(part) for part in parts} == {len(single)}
    for step, whole in enumerate(single):
        shares = [part[step] for part in parts]
        assert list(itertools.chain(*shares)) == whole
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_epoch_shows_each_problem_once_and_epochs_differ():
    loader = ProblemLoader(problems(50), batch_size=4, shuffle=True, seed=1)
    epochs = [list(itertools.chain(*ids(loader))) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch, key=int) == [str(i) for i in range(50)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [str(i) for i in range(50)]


def test_order_is_keyed_by_seed_and_epoch_alone():
    first = ProblemLoader(problems(20), batch_size=4, shuffle=True, seed=1)
    ids(first)
    second = ProblemLoader(problems(20), batch_size=4, shuffle=True, seed=1)
    second.set_epoch(1)
    other = ProblemLoader(problems(20), batch_size=4, shuffle=True, seed=2)
    other.set_epoch(1)
    expected = ids(first)
    assert ids(second) == expected
    assert ids(other) != expected


def test_e02_ten_problems_four_a_step_lose_none():
    assert [len(batch) for batch in ids(ProblemLoader(problems(10), batch_size=4))] == [4, 4, 2]


def test_e02_dropping_a_tail_is_counted_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        loader = ProblemLoader(problems(10), batch_size=2, world_size=2, rank=1, drop_last=True)
    assert loader.dropped == 2
    assert "2 of 10 problems" in caplog.text
    assert ids(loader) == [["2", "3"], ["6", "7"]]
    assert len(loader) == 2


@pytest.mark.parametrize(("count", "batch_size", "ranks"), [(3, 4, 1), (3, 2, 2), (1, 2, 1)])
def test_e02_nothing_left_is_an_error(count, batch_size, ranks):
    with pytest.raises(ValueError, match=rf"drop_last: True leaves nothing of {count} problems .*valid"):
        ProblemLoader(problems(count), batch_size=batch_size, world_size=ranks, drop_last=True)
    assert len(ProblemLoader(problems(count), batch_size=batch_size, world_size=ranks)) == 1


def test_dropping_nothing_is_not_logged(caplog):
    assert ProblemLoader(problems(8), batch_size=4, drop_last=True).dropped == 0
    assert not caplog.records


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 2.0},
        {"batch_size": True},
        {"repeats": 0},
        {"window": 0},
        {"world_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"seed": -1},
    ],
)
def test_c15b_arguments_out_of_range_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}: {value!r}; valid: "):
        ProblemLoader(problems(3), **{"batch_size": 1, **wrong})


def test_c15b_no_problems():
    with pytest.raises(ValueError, match=r"problems: \[\].*valid: at least one"):
        ProblemLoader([], batch_size=1)


# repeats


def test_repeats_by_hand():
    loader = ProblemLoader(problems(4), batch_size=1, window=2, repeats=2)
    assert [batch[0] for batch in ids(loader)] == list("01012323")
    assert len(loader) == 8


def test_repeats_without_accumulation():
    assert [batch[0] for batch in ids(ProblemLoader(problems(3), batch_size=1, repeats=3))] == list("000111222")


def test_a_short_last_window_is_filled_with_empty_batches():
    loader = ProblemLoader(problems(3), batch_size=1, window=2, repeats=2)
    assert ids(loader) == [["0"], ["1"], ["0"], ["1"], ["2"], [], ["2"], []]
    assert len(loader) == 8


def test_one_update_needs_no_filling():
    loader = ProblemLoader(problems(5), batch_size=1, window=4)
    assert len(ids(loader)) == len(loader) == 5


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_repeats_against_nested_loops(repeats, window, count):
    expected = []
    base = [[str(i)] for i in range(count)]
    for start in range(0, count, window):
        chunk = base[start : start + window]
        if repeats > 1:
            chunk = chunk + [[]] * (window - len(chunk))
        for _ in range(repeats):
            expected += chunk
    loader = ProblemLoader(problems(count), batch_size=1, repeats=repeats, window=window)
    assert ids(loader) == expected
    assert len(loader) == len(expected)


def test_d02_real_windows():
    loader = ProblemLoader(problems(5), batch_size=1, window=4)
    assert [loader.window_length(i) for i in range(5)] == [4, 4, 4, 4, 1]
    assert [loader.window_length(i, length=3) for i in range(3)] == [3, 3, 3]
    repeated = ProblemLoader(problems(5), batch_size=1, window=4, repeats=2)
    assert [repeated.window_length(i) for i in range(16)] == [4] * 8 + [1] * 8


def test_the_window_may_be_a_function():
    sizes = [2]
    loader = ProblemLoader(problems(4), batch_size=1, repeats=2, window=lambda: sizes[0])
    assert len(loader) == 8
    sizes[0] = 4
    assert [batch[0] for batch in ids(loader)] == list("01230123")


# state


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("repeats", "window"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_e03_a_state_from_anywhere_goes_on_with_the_next_batch(shuffle, repeats, window):
    def make():
        return ProblemLoader(problems(9), batch_size=2, shuffle=shuffle, seed=5, repeats=repeats, window=window)

    whole = make()
    flat = list(itertools.chain(*(ids(whole) for _ in range(4))))
    for stop in range(1, 2 * len(whole) + 1):
        first = make()
        for _, _ in zip(range(stop), itertools.chain(first, first), strict=False):
            pass
        resumed = make()
        resumed.load_state_dict(first.state_dict())
        rest = list(itertools.chain(*(ids(resumed) for _ in range(2))))
        assert rest == flat[stop : stop + len(rest)]
        assert len(rest) > len(whole) or stop % len(whole) == 0


def test_the_state_is_plain_data():
    loader = ProblemLoader(problems(4), batch_size=1, shuffle=True)
    next(iter(loader))

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return type(value) in (int, str, bool)

    assert plain(loader.state_dict())


def test_an_interrupted_epoch_is_not_gone_on_with_by_a_plain_loop():
    loader = ProblemLoader(problems(4), batch_size=1, shuffle=True, seed=1)
    next(iter(loader))
    again = ProblemLoader(problems(4), batch_size=1, shuffle=True, seed=1)
    again.set_epoch(1)
    assert ids(loader) == ids(again)


def test_iterators_that_are_never_asked_do_nothing():
    loader = ProblemLoader(problems(4), batch_size=1)
    iterator = iter(loader)
    iter(loader)
    loader.set_epoch(3)
    assert [batch[0].id for batch in iterator] == list("0123")
    assert loader.state_dict()["epoch"] == 3


def test_set_epoch_of_the_running_epoch_keeps_a_loaded_position():
    first = ProblemLoader(problems(5), batch_size=1)
    for _, _ in zip(range(3), first, strict=False):
        pass
    loader = ProblemLoader(problems(5), batch_size=1)
    loader.load_state_dict(first.state_dict())
    loader.set_epoch(0)
    assert ids(loader) == [["3"], ["4"]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"world_size": 2, "batch_size": 2}, {"world_size": 1, "batch_size": 4}),
        ({"world_size": 1, "batch_size": 4}, {"world_size": 4, "batch_size": 1}),
        ({"world_size": 1, "batch_size": 4}, {"world_size": 1, "batch_size": 2}),
        ({"world_size": 1, "batch_size": 4}, {"world_size": 4, "batch_size": 2}),
        ({"world_size": 2, "batch_size": 1, "repeats": 2}, {"world_size": 1, "batch_size": 4}),
        ({"world_size": 1, "batch_size": 4}, {"world_size": 1, "batch_size": 2, "repeats": 2, "window": 2}),
    ],
)
def test_a_state_goes_over_to_another_number_of_ranks(old, new):
    """8 of 20 problems are consumed: the rest comes once, whatever the ranks."""
    first = ProblemLoader(problems(20), shuffle=True, seed=2, **old)
    order = list(itertools.chain(*ids(ProblemLoader(problems(20), batch_size=20, shuffle=True, seed=2))))
    steps = 8 // (old["world_size"] * old["batch_size"]) * old.get("repeats", 1)
    for _, _ in zip(range(steps), first, strict=False):
        pass
    seen = []
    for rank in range(new["world_size"]):
        loader = ProblemLoader(problems(20), shuffle=True, seed=2, rank=rank, **new)
        loader.load_state_dict(first.state_dict())
        seen += list(itertools.chain(*ids(loader)))
    assert sorted(seen, key=order.index) == [one for one in order[8:] for _ in range(new.get("repeats", 1))]


@pytest.mark.parametrize(
    ("consumed", "old", "new"),
    [
        (4, {"batch_size": 4}, {"batch_size": 8}),
        (3, {"batch_size": 1}, {"batch_size": 1, "repeats": 2, "window": 2}),
        (3, {"batch_size": 1, "repeats": 2}, {"batch_size": 1}),
    ],
)
def test_a_state_without_a_boundary_for_the_new_layout_is_refused(consumed, old, new):
    first = ProblemLoader(problems(16), **old)
    for _, _ in zip(range(consumed // old["batch_size"]), first, strict=False):
        pass
    with pytest.raises(ValueError, match=r"state: .* no boundary .*valid"):
        ProblemLoader(problems(16), **new).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    "other",
    [
        {"problems": problems(9)},
        {"problems": [Problem(f"x{i}", "", "") for i in range(8)]},
        {"seed": 1},
        {"shuffle": False},
    ],
)
def test_another_data_set_is_refused_in_mid_epoch_and_told_at_the_end(other, caplog):
    arguments = {"problems": problems(8), "batch_size": 2, "shuffle": True, "seed": 0}
    first = ProblemLoader(**arguments)
    iterator = iter(first)
    next(iterator)
    with pytest.raises(ValueError, match=r"state: the checkpoint has .*middle of an epoch \(batch 1\)"):
        ProblemLoader(**{**arguments, **other}).load_state_dict(first.state_dict())
    list(iterator)
    resumed = ProblemLoader(**{**arguments, **other})
    resumed.load_state_dict(first.state_dict())
    assert "other data" in caplog.text
    fresh = ProblemLoader(**{**arguments, **other})
    fresh.set_epoch(1)
    assert ids(resumed) == ids(fresh)


class Counted:
    """A trainer's count, set by hand."""

    def __init__(self, processed, is_last_batch=False):
        self.processed, self.is_last_batch, self.moved = processed, is_last_batch, 0

    def shift(self, batches):
        self.moved += batches


def test_e06_what_was_not_trained_on_was_not_consumed():
    """However many batches a consumer fetched ahead, the state has those it worked on."""
    progress = Counted(2)
    loader = ProblemLoader(problems(6), batch_size=1, progress=progress)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    resumed = ProblemLoader(problems(6), batch_size=1)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == [["2"], ["3"], ["4"], ["5"]]


def test_a_state_from_inside_a_window_goes_back_to_its_start():
    loader = ProblemLoader(problems(8), batch_size=1, window=4)
    for _, _ in zip(range(6), loader, strict=False):
        pass
    progress = Counted(6)
    resumed = ProblemLoader(problems(8), batch_size=1, window=4, progress=progress)
    resumed.load_state_dict(loader.state_dict())
    assert progress.moved == -2
    assert ids(resumed)[0] == ["4"]
    ended = ProblemLoader(problems(8), batch_size=1, window=4, progress=Counted(6, is_last_batch=True))
    ended.load_state_dict(loader.state_dict())
    assert ended.position == 6


def test_lightning_takes_it_for_a_stateful_sized_loader_and_never_for_a_data_loader():
    from lightning.fabric.utilities.data import sized_len
    from lightning.fabric.utilities.types import _Stateful
    from torch.utils.data import DataLoader

    loader = ProblemLoader(problems(5), batch_size=2)
    assert isinstance(loader, _Stateful)
    assert sized_len(loader) == 3
    assert not isinstance(loader, DataLoader)
    assert not hasattr(loader, "sampler")
