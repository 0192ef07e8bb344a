"""Several processes from the command line: FSDP2, two nodes of one process each, one that dies, and going on alone."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gtpo_lightning.cli import main
from tests.helpers.training import spawn

ROOT = Path(__file__).parents[2]
SMALL = [
    *(word for name in ("gtpo.yaml", "models/tiny.yaml", "data/arithmetic.yaml") for word in ("-c", f"configs/{name}")),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--evaluator=null", "--completion_log=null"),
    *("--model.group_size=4", "--model.max_completion_length=8", "--data.batch_size=2", "--data.size=4000"),
    *("--data.val_size=4", "--model.rewards={'tests.helpers.training.vowels': 1.0}"),
]


def words(folder, *more):
    return ["fit", *SMALL, f"--trainer.logger.save_dir={folder}", f"--trainer.default_root_dir={folder}", *more]


def _sharded(rank, folder):
    os.chdir(ROOT)
    cli = main(words(folder, "-c", "configs/trainer/fsdp2.yaml", "--trainer.accelerator=cpu", "--trainer.max_steps=2"))
    strategy = cli.trainer.strategy
    torch.save((type(strategy).__name__, cli.model.policy.shares_weights, cli.trainer.global_step), f"{folder}/{rank}")


def test_the_fsdp2_overlay_trains_on_two_processes_and_leaves_one_file(tmp_path):
    spawn(_sharded, tmp_path)
    assert torch.load(tmp_path / "0") == torch.load(tmp_path / "1") == ("ModelParallelStrategy", True, 2)
    (path,) = tmp_path.rglob("last.ckpt")
    assert path.is_file()


def start(folder, rank, port, *more):
    """One node of two, told who it is as a cluster's start script would."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    nodes = ["-c", "configs/trainer/ddp.yaml", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    command = [sys.executable, "main.py", *words(folder, *nodes, "--trainer.num_nodes=2", *more)]
    with (Path(folder) / f"node{rank}.txt").open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env={**known, **place}, stdout=file, stderr=file)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_train_a_dead_one_ends_the_other_and_one_process_goes_on(tmp_path, monkeypatch):
    save = (
        '--trainer.callbacks=[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": '
        '{"every_n_train_steps": 5, "save_last": true}}]'
    )
    port = free_port()
    nodes = [start(tmp_path, rank, port, save, "--trainer.max_steps=5000") for rank in (0, 1)]
    try:
        ends = time.monotonic() + 200
        while not list(tmp_path.rglob("last.ckpt")):
            assert all(node.poll() is None for node in nodes), [f.read_text() for f in tmp_path.glob("node*.txt")]
            assert time.monotonic() < ends
            time.sleep(0.2)
        nodes[1].send_signal(signal.SIGKILL)
        assert nodes[0].wait(timeout=120) != 0
    finally:
        for node in nodes:
            node.kill()
    # Which of the two it is depends on whether the other was reading or writing when it died.
    assert re.search(r"Connection (closed|reset) by peer", (tmp_path / "node0.txt").read_text())
    (path,) = tmp_path.rglob("last.ckpt")
    step = torch.load(path, weights_only=True)["global_step"]
    assert step >= 5
    monkeypatch.chdir(ROOT)
    alone = words(tmp_path / "alone", "-c", "configs/trainer/cpu.yaml", f"--ckpt_path={path}")
    assert main([*alone, f"--trainer.max_steps={step + 2}"]).trainer.global_step == step + 2
