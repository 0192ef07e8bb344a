"""Finished completions on disk: written as they end, never twice, read by any number of processes."""

import json

import torch

from gtpo_lightning import Problem
from gtpo_lightning.completion_store import CompletionStore, append_lines, settings_key, weights_digest
from gtpo_lightning.judging import Sample

A, B = Problem("a", "1+1=", "2"), Problem("b", "2+2=", "4")


def prompt_ids(problem):
    return [ord(character) for character in problem.question]


def opened(path, n=2, rank=0):
    return CompletionStore(path, num_samples=n, prompt_ids=prompt_ids, rank=rank)


def test_a_problem_is_finished_with_all_its_samples_and_each_line_is_there_at_once(tmp_path):
    store = opened(tmp_path / "new" / "x.jsonl")
    store.add(A, 1, Sample("second", 3, True))
    assert not store.finished(A)
    (line,) = (tmp_path / "new" / "x.jsonl").read_text().splitlines()
    assert json.loads(line)["completion"] == "second"
    store.add(A, 0, Sample("first", 2, False))
    store.add(A, 0, Sample("again", 2, False))
    again = opened(tmp_path / "new" / "x.jsonl")
    assert again.finished(A)
    assert not again.finished(B)
    assert again.samples(A) == [Sample("first", 2, False), Sample("second", 3, True)]
    assert len(again) == 2


def test_fewer_samples_are_the_first_ones_and_more_are_missing(tmp_path):
    store = opened(tmp_path / "x.jsonl")
    for index in range(2):
        store.add(A, index, Sample(str(index), 1, False))
    assert opened(tmp_path / "x.jsonl", n=1).samples(A) == [Sample("0", 1, False)]
    assert not opened(tmp_path / "x.jsonl", n=3).finished(A)


def test_another_prompt_of_the_same_problem_is_sampled_again(tmp_path):
    opened(tmp_path / "x.jsonl", n=1).add(A, 0, Sample("x", 1, False))
    assert not opened(tmp_path / "x.jsonl", n=1).finished(Problem("a", "1 + 1 =", "2"))


def test_each_process_writes_its_own_file_and_reads_all(tmp_path):
    first, second = opened(tmp_path / "x.jsonl", n=1), opened(tmp_path / "x.jsonl", n=1, rank=1)
    first.add(A, 0, Sample("a", 1, False))
    second.add(B, 0, Sample("b", 1, False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.rank1.jsonl"]
    for rank in range(3):
        assert [opened(tmp_path / "x.jsonl", n=1, rank=rank).finished(problem) for problem in (A, B)] == [True, True]


def test_a_line_that_a_kill_cut_is_left_out_and_the_next_stands_by_itself(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    opened(path, n=1).add(A, 0, Sample("whole", 1, False))
    text = path.read_text()
    path.write_text(text + text[:30])
    store = opened(path, n=1)
    assert len(store) == 1
    assert "line 2" in caplog.text
    store.add(B, 0, Sample("next", 1, False))
    assert opened(path, n=1).samples(B) == [Sample("next", 1, False)]


def test_any_text_survives(tmp_path):
    for index, text in enumerate(["\u2028 \x85 \r\n", "\ud800 lone", "\x00", "日本 ∑"]):
        problem = Problem(f"p{index}", "q", "1")
        opened(tmp_path / "x.jsonl", n=1).add(problem, 0, Sample(text, 1, False))
        assert opened(tmp_path / "x.jsonl", n=1).samples(problem)[0].completion == text


def test_lines_are_appended_behind_an_unfinished_one(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1')
    append_lines(path, [{"b": 2}])
    assert path.read_text() == '{"a": 1\n{"b": 2}\n'


def test_the_digest_tells_weights_apart_and_nothing_else():
    torch.manual_seed(0)
    one = torch.nn.Linear(6, 4)
    same = torch.nn.Linear(6, 4)
    same.load_state_dict(one.state_dict())
    assert weights_digest(one) == weights_digest(same)
    with torch.no_grad():
        same.weight[0, 0] = torch.nextafter(same.weight[0, 0], torch.tensor(9.0))
    assert weights_digest(one) != weights_digest(same)
    swapped = torch.nn.Linear(6, 4)
    swapped.load_state_dict({"weight": one.weight.flip(0), "bias": one.bias})
    assert weights_digest(one) != weights_digest(swapped)
    assert weights_digest(one.to(torch.bfloat16)) != weights_digest(swapped)


def test_the_key_changes_with_each_setting_and_not_with_their_order():
    settings = {"temperature": 1.0, "seed": 0}
    assert settings_key(settings) == settings_key({"seed": 0, "temperature": 1.0})
    assert settings_key(settings) != settings_key({**settings, "seed": 1})
