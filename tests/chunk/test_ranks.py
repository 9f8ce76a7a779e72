"""Pieces inside of models that are spread over two processes: DistributedDataParallel and FSDP2."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


class Classifier(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 5, bias=False)
        self.how = how

    def forward(self, rows, classes):
        hidden = self.body(rows)
        if self.how == "loss":
            return mk.chunk.chunked_loss(self.losses, hidden, classes, chunk_size=4, params=self.head.parameters())
        if self.how == "entropy":
            return mk.chunked_linear_cross_entropy(hidden, self.head.weight, classes, chunk_size=4)
        return self.losses(hidden, classes).mean()

    def losses(self, hidden, classes):
        return F.cross_entropy(self.head(hidden), classes, reduction="none")


def classified(how, rank, *, separately):
    """The gradients of one step of a model sharded as a whole, or the error where its head is sharded separately."""
    model, (rows, classes, _) = Classifier(how).double(), data(rank)
    if separately:
        fully_shard(model.head)
    fully_shard(model)
    try:
        model(rows, classes % 5).backward()
    except mk.errors.InputError as error:
        return str(error)
    return [p.grad.full_tensor() for p in model.parameters()]


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
    for how in ("loss", "entropy"):
        found |= {f"{how} whole": classified(how, rank, separately=False)}
        found |= {f"{how} head": classified(how, rank, separately=True)}
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


@pytest.mark.parametrize("how", ["loss", "entropy"])
def test_a_head_sharded_separately_is_refused_with_a_way_out(how, found):
    assert "call fully_shard on the module around it" in found[f"{how} head"]
    model = Classifier("plain").double()
    for rank in range(2):
        rows, classes, _ = data(rank)
        (model(rows, classes % 5) / 2).backward()
    for got, expected in zip(found[f"{how} whole"], gradients(model), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
