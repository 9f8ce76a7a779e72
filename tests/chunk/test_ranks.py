"""Pieces inside of models that are spread over two processes: DistributedDataParallel and FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memkit as mk
from tests.helpers import assert_same, gradients
from tests.ranks import join, leave, spawn
from tests.toys import mlp


class Operator(nn.Module):
    def __init__(self, *, in_pieces):
        super().__init__()
        torch.manual_seed(0)
        self.kernel = mlp(3, 16, 4)
        self.head = nn.Linear(4, 2)
        self.in_pieces = in_pieces

    def forward(self, rows, index, targets):
        num_nodes = len(targets)
        if self.in_pieces:
            nodes = mk.chunked_segment_reduce(self.kernel, rows, index=index, num_segments=num_nodes, chunk_size=16)
            return mk.chunk.chunked_loss(self.errors, nodes, targets, chunk_size=3)
        nodes = rows.new_zeros(num_nodes, 4).index_add(0, index, self.kernel(rows))
        return self.errors(nodes, targets).mean()

    def errors(self, nodes, targets):
        return (self.head(nodes) - targets).square()


def data(rank):
    """Other numbers of edges on every rank, as graphs have: other numbers of chunks."""
    generator = torch.Generator().manual_seed(rank)
    num_edges, num_nodes = (100, 10) if rank == 0 else (40, 7)
    rows = torch.randn(num_edges, 3, dtype=torch.float64, generator=generator)
    index = torch.randint(num_nodes, (num_edges,), generator=generator)
    return rows, index, torch.randn(num_nodes, 2, dtype=torch.float64, generator=generator)


KINDS = ["ddp", "fsdp", "fsdp kernel"]


def outcome(kind, rank):
    """The gradients of one step, or the error."""
    model = Operator(in_pieces=True).double()
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        if kind == "fsdp kernel":
            fully_shard(model.kernel)
        wrapped = fully_shard(model)
    try:
        wrapped(*data(rank)).backward()
    except mk.errors.InputError as error:
        return str(error)
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def worker(rank, folder):
    join(rank, folder)
    found = {kind: outcome(kind, rank) for kind in KINDS}
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of two processes, by kind: starting them takes longer than all steps."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(worker, folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_with_other_numbers_of_chunks_equal_one_process(kind, found):
    model = Operator(in_pieces=False).double()
    sum(model(*data(rank)) / 2 for rank in range(2)).backward()
    assert_same(found[kind], gradients(model), 1e-12)


def test_rejects_function_that_gathers_parameters(found):
    """It would be gathered for each chunk; ranks with different numbers of chunks would deadlock."""
    assert "call fully_shard on the module around it" in found["fsdp kernel"]
