"""Runs a function in two processes joined by gloo and returns what each rank returned."""

from datetime import timedelta
from pathlib import Path

import torch

from tests.helpers.processes import start


def run_on_two_ranks(function, folder):
    """`function(rank)` must be importable, and return something `torch.save` can write.

    Args:
        function: A module-level function of the rank.
        folder: An empty folder, for the meeting point and the results.

    Returns:
        [result of rank 0, result of rank 1]
    """
    start(_work, (function, str(folder)), 2)
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def _work(rank, function, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=180)
    )
    try:
        torch.save(function(rank), Path(folder) / f"rank{rank}.pt")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
