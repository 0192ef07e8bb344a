"""Functions made inside other functions travel to a worker by value, so that no worker has to import this file."""

import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

import gtpo_lightning.rewards.dispatch as dispatch
from gtpo_lightning.rewards.pool import Outcome, WorkerPool, close_workers, grading_pool

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.3
MEMORY = 200 << 20


def doing():
    """Does what it is told to."""

    def do(task, value=None):
        import ctypes
        import os
        import signal
        import sys
        import threading
        import time

        if task == "tower":
            return 9**9**9**9
        if task == "sleep":
            time.sleep(value)
        elif task == "loop":
            while True:
                pass
        elif task == "exit":
            os._exit(value)
        elif task == "system exit":
            sys.exit("enough")
        elif task == "crash":
            ctypes.string_at(0)
        elif task == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif task == "memory":
            return len(bytearray(value))
        elif task == "raise":
            raise KeyError("why")
        elif task == "lock":
            return threading.Lock()
        elif task == "pid":
            return os.getpid()
        elif task == "iterator":
            return iter(value)
        return value

    return do


def tasks(*given):
    return [(task if isinstance(task, tuple) else (task,), {}) for task in given]


def values(outcomes):
    assert all(outcome.failure is None and outcome.message == "" for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def gone(pids, seconds=5.0):
    """Whether all these processes end within the time; one that nobody has waited for counts as ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def pool():
    with WorkerPool("functions", function=doing(), time_limit=LIMIT, memory_limit=MEMORY) as pool:
        yield pool


@pytest.fixture
def fresh():
    """Makes pools and closes them."""
    made = []

    def make(function=None, **kwargs):
        made.append(WorkerPool("functions", function=function or doing(), **{"time_limit": 5.0, **kwargs}))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


# What a task can do


def test_values_in_the_order_of_the_tasks(pool):
    given = [(("value", i), {}) for i in range(40)]
    assert values(pool.map(given)) == list(range(40))
    assert values(pool.map([(("value",), {"value": "by keyword"}), (("iterator", (1, 2)), {})])) == [
        "by keyword",
        [1, 2],
    ]
    assert pool.map([]) == []


def test_large_tasks_and_results(pool):
    text = "x" * (5 << 20)
    assert values(pool.map(tasks(("value", text), ("value", text + "y")))) == [text, text + "y"]


FAILING = [
    (("tower",), "timeout", "took longer than 0.3 s"),  # C code that never returns to Python
    (("exit", 3), "error", "the worker process ended with exit code 3"),
    (("raise",), "error", "KeyError: 'why'"),
    (("sleep", 60), "timeout", "took longer than 0.3 s"),
    (("loop",), "timeout", "took longer than 0.3 s"),
    (("exit", 0), "error", "the worker process ended with exit code 0"),
    (("crash",), "error", "the worker process ended by SIGSEGV"),
    (("killed",), "error", "the worker process ended by SIGKILL"),
    (("memory", 1 << 40), "error", "MemoryError"),
    (("system exit",), "error", "SystemExit: enough"),
    (("lock",), "error", "a result of type lock cannot be sent back"),
]
PLACED = [(position, *case) for case in FAILING[:3] for position in (0, 3)] + [(2, *case) for case in FAILING]


@pytest.mark.parametrize(("position", "task", "failure", "message"), PLACED, ids=[f"{p} {t[0]}" for p, t, *_ in PLACED])
def test_a_failing_task_and_its_neighbours(pool, position, task, failure, message):
    given = [("value", i) for i in range(4)]
    given[position] = task
    outcomes = pool.map(tasks(*given))
    bad = outcomes.pop(position)
    assert (bad.value, bad.failure) == (None, failure)
    assert bad.message.startswith(message)
    assert values(outcomes) == [i for i in range(4) if i != position]
    assert values(pool.map(tasks("pid", "pid")))  # works afterwards


def test_every_task_fails(pool):
    outcomes = pool.map(tasks(("sleep", 60), ("exit", 1), ("sleep", 60), ("raise",)))
    assert [outcome.failure for outcome in outcomes] == ["timeout", "error", "timeout", "error"]


def test_a_timeout_comes_at_the_limit(fresh):
    pool = fresh(time_limit=0.5)
    pool.map(tasks("pid", "pid"))
    start = time.monotonic()
    assert [outcome.failure for outcome in pool.map(tasks(("sleep", 60), ("sleep", 0.3)))] == ["timeout", None]
    assert 0.5 <= time.monotonic() - start < 1.0


def test_memory_has_a_limit_and_a_worker_that_met_it_is_replaced(fresh):
    pool = fresh(memory_limit=MEMORY, workers=1)
    (before,) = values(pool.map(tasks("pid")))
    assert values(pool.map(tasks(("memory", MEMORY // 4), "pid"))) == [MEMORY // 4, before]
    outcome, after = pool.map(tasks(("memory", 2 * MEMORY), "pid"))
    assert outcome.failure == "error"
    assert after.value != before
    assert values(fresh().map(tasks(("memory", 2 * MEMORY)))) == [2 * MEMORY]  # without a limit


def test_a_worker_whose_memory_grew_is_replaced_before_it_fails(fresh):
    kept = []

    def keep(size):
        import os

        kept.append(bytearray(size))
        return os.getpid()

    pool = fresh(keep, memory_limit=MEMORY, workers=1)
    pids = values(pool.map([((MEMORY // 4,), {})] * 12))
    assert 3 <= len(set(pids)) <= 6


def test_a_task_that_cannot_be_sent(pool):
    outcomes = pool.map([(("value", threading.Lock()), {}), (("value", 1), {})])
    assert outcomes[0].failure == "error"
    assert "cannot be sent" in outcomes[0].message
    assert outcomes[1] == Outcome(1, None, "")


def test_a_result_that_cannot_be_read(fresh):
    def make():
        class Odd:
            def __reduce__(self):
                return int, ("no number",)

        return Odd()

    assert fresh(make).map([((), {})])[0].message.startswith("the result cannot be read here (ValueError")


# What a worker is


def test_a_worker_stays_and_has_a_state(fresh):
    counts = []

    def count():
        counts.append(1)
        return len(counts)

    pool = fresh(count, workers=1)
    assert values(pool.map([((), {})] * 3)) == [1, 2, 3]
    assert values(pool.map([((), {})])) == [4]
    assert counts == []


def test_workers_at_most(fresh):
    assert len(set(values(fresh(workers=2).map(tasks(*["pid"] * 30))))) == 2
    assert len(set(values(fresh(workers=1).map(tasks(*["pid"] * 30))))) == 1


def test_a_worker_sees_the_parents_modules_and_none_of_its_own_folder(fresh, tmp_path, monkeypatch):
    (tmp_path / "only_on_the_path.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import importlib.util
        import os
        import sys

        import only_on_the_path

        heavy = {"torch", "gtpo_lightning", "numpy", "lightning"} & set(sys.modules)
        shadows = [name for name in ("numerals", "values", "format") if importlib.util.find_spec(name)]
        return only_on_the_path.answer, heavy, shadows, os.environ["OMP_NUM_THREADS"], os.getcwd()

    assert values(fresh(look).map([((), {})])) == [(42, set(), [], "1", os.getcwd())]


def test_an_imported_function_goes_by_reference(fresh):
    import statistics

    assert values(fresh(statistics.mean).map([(([1, 2, 6],), {})])) == [3]


def test_prints_and_reads_do_not_meet_the_protocol(fresh, capfd):
    def chatty(text):
        import os
        import sys

        sys.stdout.write(text + "\n")
        os.write(1, b"raw\n")
        os.system("echo from a child")
        return sys.stdin.read()

    assert values(fresh(chatty, workers=1).map([(("seen",), {}), (("again",), {})])) == ["", ""]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.split("\n")[:3] == ["seen", "raw", "from a child"]


def test_the_start_is_no_part_of_the_limit(fresh):
    class Slow:
        def __init__(self):
            self.loaded = False

        def __setstate__(self, state):
            import time

            time.sleep(0.8)

        def __call__(self):
            return "there"

    assert values(fresh(Slow(), time_limit=0.3).map([((), {})])) == ["there"]


def test_a_function_that_cannot_be_imported_there(fresh, monkeypatch):
    module = types.ModuleType("made_up_here")
    exec("def f(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    pool = fresh(module.f)
    for _ in range(3):  # the workers it failed with are not counted as in use
        with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*No module named 'made_up_here'"):
            pool.map([((), {})])


def test_a_worker_that_does_not_start_in_time(fresh, monkeypatch):
    class Stuck:
        def __init__(self):
            self.given = True

        def __setstate__(self, state):
            import time

            time.sleep(60)

        def __call__(self):
            return 1

    monkeypatch.setattr(dispatch, "_PATIENCE", 0.3)
    with pytest.raises(RuntimeError, match=r"not started within 0.3 s"):
        fresh(Stuck()).map([((), {})])


def test_a_system_that_starts_no_process(fresh, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool = fresh()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"cannot be started.*nowhere"):
            pool.map(tasks("pid"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "threads"}, "kind: 'threads'.*symbolic, functions"),
        ({"function": None}, "function: None"),
        ({"kind": "symbolic"}, "function: .*None for symbolic"),
        ({"function": threading.Lock().acquire}, "cannot be sent to another process.*pickle"),
        ({"workers": 0}, "workers: 0"),
        ({"workers": True}, "workers: True"),
        ({"time_limit": 0}, "time_limit: 0"),
        ({"time_limit": float("inf")}, "time_limit: inf"),
        ({"time_limit": float("nan")}, "time_limit: nan"),
        ({"time_limit": "5"}, "time_limit: '5'"),
        ({"memory_limit": -1}, "memory_limit: -1"),
        ({"idle_s": 0}, "idle_s: 0"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorkerPool(**{"kind": "functions", "function": len, **arguments})


# Nothing is lost, nothing is left


def test_an_idle_worker_ends_and_is_replaced(fresh):
    pool = fresh(idle_s=0.2)
    first = values(pool.map(tasks("pid", "pid")))
    assert gone(first, 3)
    assert set(values(pool.map(tasks("pid", "pid")))).isdisjoint(first)


def exist_not(pids, seconds=3.0):
    """Whether all these processes end and are waited for within the time."""
    until = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(psutil.pid_exists, pids))


def keepers():
    return [thread for thread in threading.enumerate() if thread.name == "idle workers"]


def test_an_idle_worker_is_waited_for_without_any_further_call(fresh):
    pool = fresh(idle_s=0.2)
    for _ in range(2):  # and again with the next ones
        pids = values(pool.map(tasks("pid", "pid", ("sleep", 0.05), ("sleep", 0.05))))[:2]
        assert exist_not(pids)
        assert not pool._idle


def test_a_worker_that_is_used_is_not_ended_as_idle(fresh):
    pool = fresh(idle_s=0.4, workers=1)
    (pid,) = values(pool.map(tasks("pid")))
    for _ in range(4):
        assert values(pool.map(tasks(("sleep", 0.25), "pid")))[1] == pid
    assert exist_not([pid])


def test_the_thread_that_ends_idle_workers_ends_with_the_last(fresh):
    before = keepers()
    pool, other = fresh(idle_s=600), WorkerPool("functions", function=doing())
    pool.map(tasks("pid"))
    other.map(tasks("pid"))
    (one, two) = (thread for thread in keepers() if thread not in before)
    pool.close()
    del other
    for thread in (one, two):
        thread.join(5)
        assert not thread.is_alive()
    (pid,) = values(pool.map(tasks("pid")))
    assert running(pid)


def test_a_worker_killed_while_idle_loses_no_task(fresh):
    pool = fresh(workers=1)
    for _ in range(5):
        (pid,) = values(pool.map(tasks("pid")))
        os.kill(pid, signal.SIGKILL)
    assert values(pool.map(tasks(("value", 1), ("value", 2)))) == [1, 2]


def test_children_of_a_task_end_with_it(fresh, tmp_path):
    def parent(path, ending):
        import os
        import subprocess
        import time
        from pathlib import Path

        Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        if ending == "exit":
            os._exit(1)
        time.sleep(60)

    pool = fresh(parent, time_limit=0.5)
    for ending in ("time", "exit"):
        pool.map([((str(tmp_path / ending), ending), {})])
        assert gone([int((tmp_path / ending).read_text())])


def test_several_threads_at_once(fresh):
    pool = fresh(time_limit=1.0)
    results = {}

    def work(number):
        given = [("value", (number, i)) for i in range(30)]
        given[7] = ("exit", 1) if number % 2 else ("raise",)
        results[number] = pool.map(tasks(*given))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        bad = results[number].pop(7)
        assert bad.failure == "error"
        assert values(results[number]) == [(number, i) for i in range(30) if i != 7]
    assert not pool._busy
    assert len(pool._idle) <= 2


def test_close_leaves_no_process_and_the_pool_starts_again(fresh):
    pool = fresh()
    for _ in range(2):
        pids = values(pool.map(tasks("pid", "pid")))
        assert all(map(running, pids))
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
    pool.close()


def test_close_from_another_thread_ends_a_task(fresh):
    pool = fresh(workers=1)
    (pid,) = values(pool.map(tasks("pid")))
    threading.Timer(0.2, pool.close).start()
    (outcome,) = pool.map(tasks(("sleep", 60)))
    assert outcome == Outcome(None, "error", "the worker process was ended, the pool was closed")
    assert not psutil.pid_exists(pid)


def test_close_workers_closes_all(fresh):
    pids = [pid for pool in (fresh(), fresh()) for pid in values(pool.map(tasks("pid", "pid")))]
    close_workers()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_forgotten_pool_ends_its_workers():
    pool = WorkerPool("functions", function=doing())
    pids = values(pool.map(tasks("pid", "pid")))
    del pool
    assert gone(pids)


def test_an_interrupt_ends_the_task_and_leaves_the_pool_usable(fresh):
    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    pool = fresh(workers=1, time_limit=30)
    (pid,) = values(pool.map(tasks("pid")))
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopError):
            pool.map(tasks(("sleep", 60)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not psutil.pid_exists(pid)
    assert values(pool.map(tasks(("value", 1)))) == [1]


def test_the_symbolic_kind_answers_lists_of_pairs():
    with WorkerPool("symbolic", time_limit=20) as pool:
        outcomes = pool.map([[("x+1", "1+x"), ("x", "y")], [], [("x", "x")], "no pairs"])
    assert values(outcomes[:3]) == [[True, False], [], [True]]
    assert outcomes[3].failure == "error"


def test_the_grading_pool_is_one():
    assert grading_pool() is grading_pool()
    assert grading_pool().time_limit == 5.0


# Other programs. They import the pool without the package around it, which would take seconds.

HEAD = f"""
import os, signal, sys, time, types
for name, folder in (("gtpo_lightning", ""), ("gtpo_lightning.rewards", "/rewards")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["{ROOT}/gtpo_lightning" + folder]
from gtpo_lightning.rewards.pool import WorkerPool
pid = lambda: os.getpid()
"""


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(HEAD + body)
    return [sys.executable, str(path)]


def output(tmp_path, body):
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split("\n")[:-1]


def test_a_script_without_a_guard_runs_once_and_leaves_nothing(tmp_path):
    lines = output(
        tmp_path,
        """
print("ran")
def double(x):
    return 2 * x, pid()
pool = WorkerPool("functions", function=double)
for outcome in pool.map([((i,), {}) for i in range(4)]):
    print(*outcome.value)
""",
    )
    assert lines[0] == "ran"
    assert [int(line.split()[0]) for line in lines[1:]] == [0, 2, 4, 6]
    assert not any(psutil.pid_exists(int(line.split()[1])) for line in lines[1:])


def test_a_forked_child_has_its_own_workers(tmp_path):
    lines = output(
        tmp_path,
        """
pool = WorkerPool("functions", function=pid, workers=1)
print(pool.map([((), {})])[0].value, flush=True)
child = os.fork()
print(pool.map([((), {})])[0].value, flush=True)
if child:
    os.waitpid(child, 0)
    print(pool.map([((), {})])[0].value, flush=True)
else:
    sys.exit()
""",
    )
    first, *others = lines
    assert sorted(others).count(first) == 2  # the parent's, before and after the child ended
    (own,) = set(others) - {first}
    assert gone([int(first), int(own)])


def test_a_forked_child_ends_its_own_idle_workers(tmp_path):
    lines = output(
        tmp_path,
        """
pool = WorkerPool("functions", function=pid, workers=1, idle_s=0.3)
def left(worker):
    until = time.monotonic() + 5
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < until:
        time.sleep(0.01)
    return os.path.exists(f"/proc/{worker}")
mine = pool.map([((), {})])[0].value
child = os.fork()
if not child:
    mine = pool.map([((), {})])[0].value
print(mine, left(mine), flush=True)
if child:
    os.waitpid(child, 0)
""",
    )
    assert sorted(line.split()[1] for line in lines) == ["False", "False"]
    assert len({line.split()[0] for line in lines}) == 2


def test_folders_of_the_path_in_a_folder_that_is_gone(tmp_path):
    lines = output(
        tmp_path,
        """
import tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
sys.path[:0] = ["", "relative"]
print(WorkerPool("functions", function=len).map([(("abc",), {})]), flush=True)
""",
    )
    assert lines == ["[Outcome(value=3, failure=None, message='')]"]


@pytest.mark.parametrize("streams", ["0<&-", "1>&-", "2>&-", "0<&- 2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("kind", ["functions", "symbolic"])
def test_a_daemon_without_standard_streams(tmp_path, streams, kind):
    body = f"""
def chatty(text):
    print(text, flush=True)
    os.write(2, b"error")
    return sys.stdin.read() + text
kept = open({str(tmp_path / "kept")!r}, "w")  # gets the lowest number that is free
pool = WorkerPool("{kind}", function=chatty if "{kind}" == "functions" else None)
task = (("seen",), {{}}) if "{kind}" == "functions" else [("x+1", "1+x")]
outcomes = pool.map([task, task])
pool.close()
kept.write(repr([outcome.value for outcome in outcomes]))
kept.close()
"""
    command = " ".join(script(tmp_path, body))
    subprocess.run(["sh", "-c", f"exec {command} {streams}"], timeout=60, check=True, capture_output=True)
    expected = ["seen", "seen"] if kind == "functions" else [[True], [True]]
    assert (tmp_path / "kept").read_text() == repr(expected)


@pytest.mark.parametrize(
    ("task", "seconds"),
    [
        ("9**9**9**9", 2.0),
        ("time.sleep(60)", 2.0),
        ("subprocess.run(['sleep', '60'])", 2.0),
        ("quiet() and 9**9**9**9", 6.0),  # without the signal of the pipe there is the timer: the limit and 3 s
    ],
)
def test_a_killed_parent_leaves_no_worker(tmp_path, task, seconds):
    body = f"""
def work():
    import fcntl, os, subprocess, time
    def quiet():
        for number in range(3, 30):
            try:
                flags = fcntl.fcntl(number, fcntl.F_GETFL)
                fcntl.fcntl(number, fcntl.F_SETFL, flags & ~os.O_ASYNC)
            except OSError:
                pass
        return True
    os.write(2, f"{{os.getpid()}}\\n".encode())
    {task}
WorkerPool("functions", function=work, time_limit=0.3 if "quiet" in "{task}" else 30.0).map([((), {{}})])
"""
    with subprocess.Popen(script(tmp_path, body), stderr=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stderr.readline())
        time.sleep(0.2)
        pids = [worker, *(child.pid for child in psutil.Process(worker).children())]
        assert all(map(running, pids))
        parent.kill()
        assert gone(pids, seconds)
