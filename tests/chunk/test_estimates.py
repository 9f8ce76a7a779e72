"""Estimates of steps that use chunked components: their checks of the first call need data, and wait for it."""

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.chunk import chunked_loss
from tests.helpers import assert_same

ROWS, INDEX = torch.randn(500, 6), torch.arange(500) % 50
STEPS = {
    "map": lambda model, x: mk.chunked_map(model, x, chunk_size=64).square().mean(),
    "segments": lambda model, x: (
        mk.chunked_segment_reduce(model, x, index=INDEX, num_segments=50, reduce="sum", chunk_size=64).square().mean()
    ),
    "loss": lambda model, x: chunked_loss(
        lambda rows: model(rows).square(), x, chunk_size=64, params=list(model.parameters())
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_first_call_may_be_an_estimate(name):
    step = STEPS[name]
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
    first = mk.estimate_memory_usage(model, ROWS, step, optimizer="sgd")
    step(model, ROWS).backward()
    model.zero_grad()
    assert first.doubts == ()
    assert first.peak_bytes == mk.estimate_memory_usage(model, ROWS, step, optimizer="sgd").peak_bytes


def test_an_estimate_does_not_stand_for_the_check():
    model = nn.Sequential(nn.Linear(6, 32), nn.Softmax(dim=0))
    mk.estimate_memory_usage(model, ROWS, STEPS["map"], optimizer="sgd")
    with pytest.raises(mk.errors.InputError, match="depends on other rows"):
        STEPS["map"](model, ROWS)


def tile(model, x):
    return mk.tiled_apply(model, x, 8).square().mean()


def convolutions(*head):
    return nn.Sequential(*head, nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.GELU()).eval()


@pytest.mark.parametrize("target", ["cpu", "T4"])
def test_tiles_may_be_estimated_before_any_call(target):
    """What they read around them is found on noise on the host, which is not counted."""
    x, model = torch.randn(1, 1, 16, 16, 16), convolutions()
    before = [each.clone() for each in (*model.parameters(), *model.buffers())]
    first = mk.estimate_memory_usage(model, x, tile, optimizer="sgd", target=target)
    assert_same(before, [*model.parameters(), *model.buffers()])
    tile(model, x)
    assert first.peak_bytes == mk.estimate_memory_usage(model, x, tile, optimizer="sgd", target=target).peak_bytes


@pytest.mark.parametrize("run", [lambda *args: mk.tiled_apply(*args, 8), lambda f, x: mk.SparsityAwareProcessor(f)(x)])
def test_a_volume_that_the_loss_holds(run):
    """Then the parameters alone have no data."""
    x, model = torch.randn(1, 1, 16, 16, 16), convolutions()
    estimate = mk.estimate_memory_usage(model, torch.zeros(1), lambda model, _: run(model, x).mean(), optimizer="sgd")
    assert estimate.peak_bytes > 0


def test_tiles_of_a_module_with_indices_are_doubted():
    """They decide what a result depends on, and have no data in an estimate."""

    class Picked(nn.Conv3d):
        def __init__(self):
            super().__init__(2, 1, 3, padding=1)
            self.register_buffer("channels", torch.tensor([1, 0]))

        def forward(self, x):
            return super().forward(x[:, self.channels])

    model, x = Picked(), torch.randn(1, 2, 16, 16, 16)
    first = mk.estimate_memory_usage(model, x, tile, optimizer="sgd")
    assert "buffers of integers, which have no data" in first.doubts[0]
    tile(model, x)
    assert mk.estimate_memory_usage(model, x, tile, optimizer="sgd").doubts == ()


def test_tiles_run_on_a_virtual_gpu():
    def peak(run):
        with mk.VirtualGPU("T4") as gpu:
            model, x = convolutions().cuda(), torch.randn(1, 1, 96, 96, 96, device="cuda")
            run(model, x).square().mean().backward()
            assert model[0].weight.grad.device.type == "cuda"
        return gpu.estimate().peak_bytes

    assert peak(lambda model, x: mk.tiled_apply(model, x, 24)) < 0.8 * peak(lambda model, x: model(x))


def test_an_estimate_of_tiles_does_not_stand_for_the_check():
    class Bright(nn.Module):
        def forward(self, x):
            return x / (1 + (x > 100).sum())

    model, x = convolutions(Bright()), torch.randn(1, 1, 16, 16, 16)
    x[..., 3:5] = 300
    mk.estimate_memory_usage(model, x, tile, optimizer="sgd")
    with pytest.raises(mk.errors.InputError, match="tiles differ from the whole"):
        tile(model, x)


@pytest.mark.parametrize("mode", ["auto", "bbox", "blocks", "dense"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_mostly_empty_volume_is_counted_as_full_and_doubted(mode, is_sparse):
    """How full it is is not known without data, and nothing of the estimate stays with the processor."""
    x = torch.zeros(1, 1, 24, 24, 24)
    x[..., 3:6, 2:5, 2:5] = 1
    batch = mk.voxel.SparseVoxels.from_dense(x) if is_sparse else x
    coords, features = (batch.coords, batch.features) if is_sparse else (None, x)
    model = convolutions()
    processor = mk.SparsityAwareProcessor(model, mode=mode)

    def step(model, batch):
        if not is_sparse:
            return processor(batch[1]).square().mean()
        voxels = mk.voxel.SparseVoxels.from_coords(*batch, shape=(24, 24, 24), batch_size=1)
        return processor(voxels).features.square().mean()

    estimate = mk.estimate_memory_usage(model, (coords, features), step, optimizer="sgd")
    if not is_sparse:
        whole = mk.estimate_memory_usage(model, x, lambda model, x: model(x).square().mean(), optimizer="sgd")
        assert estimate.peak_bytes == whole.peak_bytes
    assert bool(estimate.doubts) is (mode != "dense")
    assert mode == "dense" or ("counted: how full it is" in estimate.doubts[0] and not estimate.fits("1GiB"))
    assert processor.last_plan is None
    processor(x)
    assert processor.last_plan.mode == ("bbox" if mode == "auto" else mode)


class Cut(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
        self.rows = mk.ChunkedProcessor(self.mlp, **how)

    def forward(self, x):
        return self.rows(x).square().mean()


def cut_step(model, x):
    return model(x)


def real_peak(model, x):
    for _ in range(2):
        with mk.Tracker(device="cpu") as tracker:
            cut_step(model, x).backward()
            model.zero_grad()
    return tracker.peak_bytes


def test_dropout_in_chunks_decides_nothing_in_an_estimate():
    """No number is guessed, and no data of stand-ins is read, of which torch would warn."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 4))
    processor = mk.ChunkedProcessor(model, memory_budget="1MiB")
    estimate = mk.estimate_memory_usage(
        model, torch.randn(5000, 16), lambda model, x: processor(x).square().mean(), optimizer="sgd"
    )
    assert len(estimate.doubts) == 1
    assert "measures chunks without data" in estimate.doubts[0]


def test_chunks_that_only_an_estimate_has_measured_are_doubted():
    x, model = torch.randn(4096, 16), Cut(memory_budget="1MiB")
    first = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert first.confidence == "guessed"
    assert "call it once with data before, or pass chunk_size=" in first.doubts[0]
    assert model.rows.last_plan is None

    peak, plan = real_peak(model, x), model.rows.last_plan
    assert plan == Cut(memory_budget="1MiB").rows.plan(x)  # as without the estimate
    then = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert (then.peak_bytes, then.confidence, then.doubts) == (peak, "exact", ())
    assert model.rows.last_plan is plan


@pytest.mark.parametrize(("how", "num_rows"), [({"memory_budget": "64MiB"}, 64), ({"chunk_size": 2048}, 6000)])
def test_other_chunks_are_estimated_exactly(how, num_rows):
    """All rows in one chunk, or a size that is given; the second backward leaves out the last product."""
    x, model = torch.randn(num_rows, 16), Cut(**how)
    first = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert (first.peak_bytes, first.confidence, first.doubts) == (real_peak(model, x), "exact", ())
