"""A virtual GPU's history as a snapshot: the form of real ones, torch's own viewer, and the card's own figures."""

import pickle

import pytest
import torch
from torch.cuda import _memory_viz as viewer

from memkit._events.reader import read_memory_events
from memkit.predict.virtual_gpu import VirtualGPU
from memkit.report.figures import read_figures
from tests.report.foreign import judge_snapshot


@pytest.fixture(scope="module", params=["", "expandable_segments:True"])
def run(request, tmp_path_factory):
    """Two steps and one that does not fit: the card, snapshots in the block and after it, and what was held then."""
    folder = tmp_path_factory.mktemp("run")
    with VirtualGPU("RTX 4090", allocator_settings=request.param) as gpu:
        model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 1000)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.memory._dump_snapshot(str(folder / "inside.pickle"))
        gpu.save_snapshot(folder / "before.pickle")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**40, device="cuda")
    gpu.save_snapshot(folder / "run.pickle")
    return gpu, folder, gpu.allocated_bytes


def load(path):
    return pickle.loads(path.read_bytes())


def test_snapshot_opens_in_torch_viewer(run):
    _, folder, _ = run
    data = load(folder / "run.pickle")
    judge_snapshot(data)
    assert "total_reserved" in viewer.segsum(data)
    assert "raise OutOfMemoryError # 4.0TiB requested" in viewer.trace(data)
    blocks = viewer.memory(data, format_flamegraph=str)
    assert "aten._to_copy.default" in blocks
    assert "test_history.py" in blocks
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "snapshot.pickle" in plot(data)


def test_a_block_is_given_back_on_its_own_stream():
    with VirtualGPU("RTX 4090") as gpu:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            beside = torch.ones(1000, device="cuda")
        address = beside.untyped_storage()
        torch.ones(1000, device="cuda")
        del address, beside
        snapshot = torch.cuda.memory._snapshot()
    (first, *_, requested, completed) = [
        each for each in snapshot["device_traces"][0] if "segment" not in each["action"]
    ]
    assert [each["action"] for each in (first, requested, completed)] == ["alloc", "free_requested", "free_completed"]
    assert first["stream"] == requested["stream"] == completed["stream"] == side.cuda_stream
    assert gpu.allocated_bytes == 0


def test_torchs_own_call_inside_the_block_writes_the_same(run):
    _, folder, _ = run
    assert load(folder / "inside.pickle") == load(folder / "before.pickle")


def test_the_report_of_the_snapshot_has_the_cards_own_figures(run):
    gpu, folder, allocated_bytes = run
    log = read_memory_events(folder / "run.pickle")
    figures = read_figures(log, None)
    assert figures.peak.num_bytes == gpu.peak_bytes
    assert (figures.peak.origin.kind, figures.peak.is_exact) == ("predicted", True)
    assert figures.layers.requested_bytes < gpu.peak_bytes  # 1,000 floats take a kilobyte more than asked for
    assert figures.layers.reserved_bytes == gpu.reserved_peak_bytes
    assert figures.layers.device_used_bytes == gpu.reserved_peak_bytes + gpu.gpu.context_bytes
    assert figures.layers.total_bytes == gpu.gpu.total_bytes
    assert log.events[-1].allocated_bytes == allocated_bytes
    (shortage,) = figures.shortages
    assert shortage.asked_bytes == 2**42
    assert "test_history.py" in shortage.event
    (split,) = figures.splits
    assert split.whole_bytes == max(event.allocated_bytes for event in log.events)
    levels = gpu.timeline.tolist()
    seen = [event.allocated_bytes for event in log.events if not event.event.startswith("segment_")]
    assert max(seen) == max(levels)
