"""One rank on a virtual GPU: against the same rank on the CPU's stand-ins, and what its allocator must follow."""

import pytest
import torch
from torch import nn

from memkit._simulation.cuda.memory import CudaMemory
from memkit._simulation.shard import Shard
from memkit._simulation.simulation import Gpu
from memkit.predict.gpus import find_gpu
from memkit.predict.usage import estimate_memory_usage
from memkit.predict.virtual_gpu import VirtualGPU
from tests.predict.ranks import REPLICATED, SHARDED, build, rank_estimate
from tests.toys import mean_square

MIB = 2**20
WORKSPACES = 2 * 32 * MIB  # of the handles of forward and backward on an H100
BLOCK = 512
# Where CUDA runs other operators than a CPU: attention.
ATTENDING = {name for name in (*SHARDED, *REPLICATED) if name.startswith(("tied", "nested"))}

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def estimate(shard, num_layers=8, width=512, **options):
    """Layers of 1 MiB."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(num_layers)))
    options = {"target": "H100", "optimizer": "sgd"} | options
    return estimate_memory_usage(model, torch.empty(2, width), loss_fn=mean_square, shard=shard, **options)


def slow_but(*quick):
    """All cases; in the default run these."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in (*SHARDED, *REPLICATED)]


@pytest.mark.parametrize("name", slow_but("uneven", "odd, ddp"))
def test_rank_holds_equal_bytes_on_card_and_cpu(name):
    on_cpu = rank_estimate(name)
    on_h100 = rank_estimate(name, Gpu(find_gpu("H100")))
    assert on_h100.parameters_bytes == on_cpu.parameters_bytes
    num_counts = len(list(build(name).model.parameters()))  # an optimizer counts steps on the host, 4 bytes each
    assert 0 <= on_cpu.optimizer_bytes - on_h100.optimizer_bytes <= 4 * num_counts
    if on_h100.peak_where == on_cpu.peak_where and name not in ATTENDING:
        for part in ("gradients", "unsharded", "activations", "temporaries"):
            assert on_h100.as_dict()[f"{part}_bytes"] == on_cpu.as_dict()[f"{part}_bytes"], part
    assert on_cpu.peak_bytes < on_h100.peak_bytes <= on_h100.reserved_bytes
    assert on_h100.total_bytes == on_h100.reserved_bytes + find_gpu("H100").context_bytes


def rounding_and_workspaces(shard):
    found = estimate(shard)
    return found.other_bytes - 2 * 512 * 4  # without the batch


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "ddp", "zero1"])
def test_the_allocator_holds_the_tensors_and_no_more(kind):
    units = ("*",) if kind not in ("ddp", "zero1") else ()
    assert WORKSPACES <= rounding_and_workspaces(Shard(kind, 8, units)) <= WORKSPACES + 100 * BLOCK


def test_freed_parameters_must_reach_the_allocator(monkeypatch):
    """Negative control: they would be there until the end."""
    right = estimate(Shard("fsdp2", 8, ("*",)))
    monkeypatch.setattr(CudaMemory, "resize", lambda *_: None)
    assert estimate(Shard("fsdp2", 8, ("*",))).peak_bytes >= right.peak_bytes + 4 * MIB


def test_card_counts_tensors_kept_for_backward():
    freed, kept = (estimate(Shard(kind, 8, ("*",)), num_layers=12, width=1024) for kind in ("zero3", "zero2"))
    assert kept.peak_bytes > freed.peak_bytes + 25 * MIB
    assert kept.reserved_bytes > freed.reserved_bytes + 25 * MIB


def test_streams_share_no_cached_blocks():
    with VirtualGPU("H100") as card:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
        del x
        once = torch.cuda.memory_reserved()
        with torch.cuda.stream(side):
            x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == once
        del x
        y = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 2 * once
        assert y.nbytes == card.allocated_bytes


def test_precision_and_accumulation_go_with_ranks():
    """Autocast and fp16 are the card's own; gradients of the first micro-batch are there in the second."""
    plain, halves = (estimate(Shard("ddp", 2), precision=precision) for precision in (None, "fp16-mixed"))
    assert halves.parameters_bytes == plain.parameters_bytes
    assert halves.activations_bytes + halves.temporaries_bytes != plain.activations_bytes + plain.temporaries_bytes
    twice = estimate(Shard("fsdp2", 2, ("*",)), accumulation_steps=2)
    assert twice.peak_bytes > estimate(Shard("fsdp2", 2, ("*",))).peak_bytes
