"""Two GPUs as the ranks of one run: DistributedDataParallel and FSDP2 in the wrapper, one rank short of memory."""

from __future__ import annotations

import datetime as dt
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memkit as mk

KINDS = ("ddp", "fsdp2")
NUM_STEPS, ROWS, WIDTH = 3, 64, 512


def train_both(device: str, *, width: int = WIDTH, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Losses of two ranks against those of one process, and whether a rank that runs out takes the other along."""
    with tempfile.TemporaryDirectory() as folder:
        expected = train(net(width).to(device), *data(width, device))
        figures: dict[str, Any] = {}
        mp.start_processes(worker, (folder, device, width, kinds), 2, start_method="spawn")
        for kind in kinds:
            found = [json.loads(Path(folder, f"{kind}{rank}.json").read_text()) for rank in range(2)]
            means = [sum(each["losses"][step] for each in found) / 2 for step in range(NUM_STEPS)]
            figures[kind] = {
                "largest_difference": max(abs(a / b - 1) for a, b in zip(means, expected["losses"], strict=True)),
                "num_ooms": [each["num_ooms"] for each in found],
                "peak_bytes": [each["peak_bytes"] for each in found],
            }
    return figures


def worker(rank: int, folder: str, device: str, width: int, kinds: Sequence[str]) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=60))
    x, y = data(width, here)
    for kind in kinds:
        model = spread(kind, net(width).to(here))
        found = train(model, x.chunk(2)[rank], y.chunk(2)[rank], is_short=rank == 1)
        Path(folder, f"{kind}{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if backend == "gloo":
        os._exit(0)  # without its teardown, whose threads now and then abort the process
    dist.destroy_process_group()


def spread(kind: str, model: nn.Module) -> nn.Module:
    """The model over the two ranks."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (2,))
    for layer in (*(layer for layer in model.children() if isinstance(layer, nn.Linear)), model):
        fully_shard(layer, mesh=mesh)
    return model


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())))


def data(width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, width, generator=generator).to(device) for _ in range(2))


def train(model: nn.Module, x: Tensor, y: Tensor, *, is_short: bool = False) -> dict[str, Any]:
    """Some steps in the wrapper; a short rank runs out in the first forward of the whole batch."""
    # Sharded parameters leave no way to check a split; the rows of this loss do not know each other.
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)
    losses, num_ooms = [], 0
    for _ in range(NUM_STEPS):
        has_failed = not is_short

        def loss_fn(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal has_failed
            found = F.mse_loss(model(rows[0]), rows[1])
            if not has_failed and len(rows[0]) == len(x):
                has_failed = True
                torch.empty(2**50, dtype=torch.uint8, device=rows[0].device)  # more than any device has
            return found

        result = trainer.train_step((x, y), loss_fn)
        losses.append(float(result.loss))
        num_ooms += result.num_ooms
    peak = torch.cuda.max_memory_allocated() if x.is_cuda else None
    return {"losses": losses, "num_ooms": num_ooms, "peak_bytes": peak}
