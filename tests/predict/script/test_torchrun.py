"""The first rank of a torchrun job on a virtual GPU: what scripts ask for, and what they put on the card."""

import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from memkit._torch.fake_ranks import FakeStore
from memkit.predict.script.torchrun import launched_as_first_rank
from memkit.predict.virtual_gpu import VirtualGPU

CARD = torch.device("cuda", 0)
BLOCK = 512  # the allocator's


@contextmanager
def first_of(num_ranks):
    excepthook = sys.excepthook  # torch wraps it
    with VirtualGPU("H100") as card, launched_as_first_rank(num_ranks):
        dist.init_process_group("nccl")
        try:
            yield card
        finally:
            dist.destroy_process_group()
            sys.excepthook = excepthook


def layers():
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def shard_bytes(model, num_ranks):
    return sum(-(-each.nbytes // num_ranks // BLOCK) * BLOCK for each in model.parameters())


def test_there_are_as_many_accelerators_as_ranks():
    with first_of(2):
        assert torch.accelerator.device_count() == torch.cuda.device_count() == 2
        assert f"{torch.accelerator.current_accelerator()}:1" == "cuda:1"  # as scripts write it


# ------------------------------------------------------------------------------------------------------- FSDP2


def test_deferred_initialization_of_shards_takes_their_memory():
    with first_of(2) as card:
        with torch.device("meta"):
            model = layers()
        parameters = list(sharded(model).parameters())
        model.to_empty(device="cuda")
        for layer in model:
            layer.reset_parameters()
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert {device for each in parameters for device in (each.device, each.to_local().device)} == {CARD}
        assert all(each.is_cuda for each in parameters)
        # Nothing of a whole parameter's size was there in between.
        assert card.allocated_bytes == shard_bytes(layers(), 2)
        assert card.peak_bytes - card.allocated_bytes <= BLOCK  # PyTorch 2.8 needs one for a moment
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        states = [each for state in optimizer.state.values() for each in (state["exp_avg"], state["exp_avg_sq"])]
        assert sum(each.to_local().nbytes for each in states) == sum(each.nbytes for each in layers().parameters())


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # torch's own, on a CPU
def test_shards_drawn_outside_know_nothing_of_a_card():
    with first_of(2):
        nn.init.uniform_(sharded(layers())[0].weight)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.zeros(4, 4, dtype=torch.float64), init_device_mesh("cpu", (1,)), [Shard(0)])
        torch.manual_seed(3)
        nn.init.uniform_(shard)
        torch.manual_seed(3)
        torch.testing.assert_close(shard.to_local(), torch.rand(4, 4, dtype=torch.float64))
    finally:
        dist.destroy_process_group()


def test_shards_draw_from_a_generator_of_the_card():
    with first_of(2) as card:
        model = sharded(layers())
        before = card.allocated_bytes
        for each in model.parameters():
            nn.init.uniform_(each, generator=torch.Generator("cuda"))
        assert card.allocated_bytes == before


def test_the_norm_of_sharded_gradients_takes_no_whole_parameter():
    with first_of(8) as card:
        model = sharded(layers())
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        before = card.allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert card.peak_bytes - before < 64 * BLOCK < 512 * 512 * 4


# --------------------------------------------------------------------------------------------------------- DDP


@pytest.mark.parametrize("options", [{"device_ids": [0]}, {"device_ids": [CARD]}])
def test_ddp_moves_its_inputs_to_its_card(options):
    seen = []

    class Layer(nn.Linear):
        def forward(self, x, *, scale):
            seen.extend((x.device.type, scale.device.type))
            return super().forward(x) * scale

    def allocated(make_input, **options):
        with first_of(2) as card:
            replica = DistributedDataParallel(Layer(64, 64).to(0), **options)
            before = card.allocated_bytes
            out = replica(make_input(), scale=make_input())
            out.sum().backward()
            return card.allocated_bytes - before

    on_card = allocated(lambda: torch.ones(256, 64, device="cuda"))
    assert allocated(lambda: torch.ones(256, 64), **options) == on_card
    assert set(seen) == {"cuda"}


def test_ddp_without_a_card_of_its_own_moves_nothing():
    with first_of(2):
        replica = DistributedDataParallel(nn.Linear(4, 4).cuda())
        with pytest.raises(RuntimeError, match=r"two devices, cpu and cuda:0|two different devices cpu, cuda:0"):
            replica(torch.ones(2, 4))
