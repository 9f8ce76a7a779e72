"""The wrapper on two ranks equals one process: under DistributedDataParallel a rank recovers alone, and under FSDP2."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memkit as mk
from tests.train.test_ranks import join, leave

STEPS, ROWS = 4, 8


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(3)
    return model, torch.randn(STEPS, 2 * ROWS, 4, dtype=torch.float64, generator=generator)


def ddp_worker(rank, folder):
    join(rank, folder)
    plain, data = make()
    model = DistributedDataParallel(plain)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.AdamW(plain.parameters(), lr=0.05), max_grad_norm=1.0
    )
    num_ooms = 0

    def loss_fn(model, x):
        loss = model(x).pow(2).mean()
        if rank == 1 and len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    for batch in data:
        num_ooms += trainer.train_step(batch[rank * ROWS : (rank + 1) * ROWS], loss_fn).num_ooms
    assert (num_ooms > 0) == (rank == 1)
    torch.save(plain.state_dict(), f"{folder}/{rank}.pt")
    leave()


def sharded_worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    join(rank, folder)
    model, data = make()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
    for batch in data:
        trainer.train_step(batch[rank * ROWS : (rank + 1) * ROWS], lambda model, x: model(x).pow(2).mean())
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(state, f"{folder}/{rank}.pt")
    leave()


def one_process(optimizer_of, max_grad_norm):
    model, data = make()
    optimizer = optimizer_of(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("worker", "optimizer_of", "max_grad_norm"),
    [
        (ddp_worker, lambda parameters: torch.optim.AdamW(parameters, lr=0.05), 1.0),
        (sharded_worker, lambda parameters: torch.optim.SGD(parameters, lr=0.05), float("inf")),
    ],
)
def test_two_ranks_equal_one_process(worker, optimizer_of, max_grad_norm, tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    torch.testing.assert_close(dict(first), dict(second), rtol=0, atol=0)
    torch.testing.assert_close(dict(first), one_process(optimizer_of, max_grad_norm), rtol=1e-10, atol=1e-13)
