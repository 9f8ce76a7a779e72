"""Two gloo processes as the ranks of one run; each test's folder holds their store and what they save."""

from __future__ import annotations

import datetime as dt
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from memkit._torch.ranks import missing_for_lockstep
from tests.versions import lacks

TOGETHER = pytest.mark.skipif(
    bool(missing_for_lockstep()),
    reason=lacks("torch.distributed.fsdp.FSDPModule.reset_iter_state", "ranks cannot recover together"),
)
"""For tests of ranks of `fully_shard` that recover from out-of-memory."""

# Threads of the parent do not survive in a forked child, so children are forks of a process that has only imported.
# torch._dynamo is what the first optimizer imports, among much else.
mp.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "memkit.recipes.planned", "memkit.train.wrapper"])


def spawn(worker: Callable[..., None], folder: Path, *args: object, num_ranks: int = 2) -> None:
    """Run the worker as each rank; an error in one of them is an error here."""
    mp.start_processes(worker, (str(folder), *args), num_ranks, start_method="forkserver")


def join(rank: int, folder: object, timeout_s: int = 60, num_ranks: int = 2) -> None:
    """What a worker does first."""
    torch.set_num_threads(1)
    gc.freeze()  # a post-mortem looks at all objects: those of the imports are not of interest
    timeout = dt.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timeout
    )


def leave() -> NoReturn:
    """End a worker when all are done, without gloo's teardown, whose threads now and then abort the process."""
    dist.barrier()
    os._exit(0)


def load(folder: Path, name: str) -> list[Any]:
    """What the two ranks have saved as `<name><rank>.pt`."""
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in range(2)]
