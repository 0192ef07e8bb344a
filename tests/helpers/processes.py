"""Processes that start in a moment: copies of a server that has imported what they need, made for each of them anew."""

import multiprocessing

import torch.multiprocessing

# Imports are most of what a small two-process test takes. The server is a fresh interpreter that does nothing but these
# imports, so its copies share no state with the tests and inherit no threads.
PRELOADED = ["gtpo_lightning.cli", "torch.distributed.tensor", "lightning.pytorch.strategies", "pytest"]


def start(function, args, count):
    """Runs `function(rank, *args)` in `count` processes and waits for all; raises what one of them raises.

    `function` must be importable. The environment of the processes is that of the first call.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, args, nprocs=count, start_method="forkserver")
