"""The tracker's own promises: what counts, splits, errors, nesting, threads, and that it leaves no trace."""

import gc
import inspect
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memkit._recorder.workspace as allocations
from benchmarks.cases import track_cost
from memkit._core.errors import ConfigError, InputError, StateError
from memkit._core.units import MIB
from memkit.memory.track import Tracker
from tests.allocations import trace_allocations
from tests.forked import run_python_forked
from tests.helpers import assert_refused
from tests.zoo import CASES, no_mark

BOTH = pytest.mark.parametrize("workspace", [False, True], ids=["default", "workspace"])


def sort_and_unique(x: torch.Tensor) -> torch.Tensor:
    return x.sort().values.unique()


def test_counts_workspace_only_on_request():
    numbers = torch.randint(0, 10**9, (MIB,))
    truth = trace_allocations(lambda: sort_and_unique(numbers)).peak + numbers.nbytes
    with Tracker(device="cpu") as without:
        sort_and_unique(numbers)
    with Tracker(device="cpu", workspace=True) as tracker:
        sort_and_unique(numbers)
    assert tracker.peak_bytes == truth
    assert without.peak_bytes <= truth - 8 * MIB  # the negative control: blind to what comes and goes in an operator
    assert "workspace" not in without.peak_by_category
    assert tracker.peak_by_category["workspace"] >= 8 * MIB
    assert tracker.peak_by_operator["aten._unique2.default"] >= 8 * MIB
    _, first = inspect.getsourcelines(sort_and_unique)
    assert tracker.peak_where.operator == "aten._unique2.default"
    assert tracker.peak_where.source == f"{__file__}:{first + 1} in sort_and_unique"
    (largest,) = (s for s in tracker.top(10) if s.category == "workspace")
    assert largest.nbytes == tracker.peak_by_category["workspace"]
    assert tracker.live_bytes == tracker.timeline[-1]


@BOTH
def test_splits_and_places_of_a_training_step(workspace):
    case = CASES["mlp"]()
    case.step(no_mark)
    with Tracker(device=None, workspace=workspace) as tracker:
        case.step(no_mark)
    splits = [tracker.peak_by_category, tracker.peak_by_module, tracker.peak_by_operator]
    for split in [*splits, tracker.peak_by_line, tracker.peak_by_phase]:
        assert sum(split.values()) == tracker.peak_bytes == tracker.timeline.max()
        assert list(split.values()) == sorted(split.values(), reverse=True)
    weights = sum(p.nbytes for p in case.model.parameters())
    assert tracker.peak_by_category["parameter"] == weights
    assert tracker.peak_by_category["optimizer"] >= 2 * weights
    assert tracker.peak_by_module["3"] > 2 * case.model[3].weight.nbytes  # weight, gradient, activations
    assert tracker.peak_where.phase == "backward"
    assert tracker.peak_where.module in tracker.peak_by_module
    assert [phase for _, phase in tracker.phases] == ["other", "forward", "backward", "other", "optimizer", "other"]
    (start, end) = (index for index, phase in tracker.phases if phase in {"backward", "optimizer"})
    assert start < tracker.timeline.argmax() < end
    phases_of_births = {tracker.recording.storages()[k].phase for k in tracker.recording.event_storage[start:end]}
    assert "backward" in phases_of_births
    assert "optimizer" not in phases_of_births


def test_workspaces_stay_in_the_phase_of_their_operators():
    case = CASES["resnet"]()
    with Tracker(device="cpu", workspace=True) as tracker:
        case.step(no_mark)
    recording = tracker.recording
    starts = [index for index, _ in recording.phases]
    spaces = [storage for storage in recording.storages() if storage.category == "workspace"]
    assert {storage.phase for storage in spaces} >= {"forward", "backward"}
    for storage in spaces:
        current = recording.phases[np.searchsorted(starts, storage.birth, side="right") - 1][1]
        assert (current, storage.death) == (storage.phase, storage.birth + 1)


def test_live_bytes_and_peak_can_be_read_inside_the_block():
    with Tracker(device="cpu") as tracker:
        x = torch.zeros(100)
        assert (tracker.live_bytes, tracker.peak_bytes) == (400, 400)
        y = x + 1
        del x
        assert (tracker.live_bytes, tracker.peak_bytes) == (400, 800)
        assert "live now 400 B" in tracker.summary()
    del y
    assert (tracker.live_bytes, tracker.peak_bytes) == (400, 800)
    assert "live at the end 400 B" in tracker.summary()


@BOTH
def test_live_tensors_are_readable_after_error(workspace):
    def step():
        x = torch.zeros(1000)
        del x
        y = torch.zeros(300, requires_grad=True)
        z = y.exp()
        z.add(torch.empty(2**52))

    tracker = Tracker(device="cpu", workspace=workspace)
    with pytest.raises(RuntimeError, match="memory"), tracker:
        step()
    assert (tracker.live_bytes, tracker.peak_bytes) == (2400, 4000)
    assert tracker.live_by("operator") == {"aten.zeros.default": 1200, "aten.exp.default": 1200}
    assert [s.nbytes for s in tracker.top(at="end")] == [1200, 1200]
    assert tracker.top(1)[0].nbytes == 4000
    assert sum(tracker.live_by("line").values()) == 2400
    error = assert_refused(lambda: tracker.live_by("lines"), InputError, "pass label='line'.")
    assert error.call == "tracker.live_by(label)"


@BOTH
def test_leaves_no_trace(workspace):
    mark = nn.Linear(4, 4)
    with pytest.raises(KeyError), Tracker(device="cpu", workspace=workspace) as tracker:
        x = mark(torch.zeros(2, 4))
        died = weakref.ref(x)
        del x
        raise KeyError
    gc.collect()
    assert died() is None
    assert tracker.peak_bytes > 0
    assert not _profiler_enabled()
    assert not _get_current_dispatch_mode_stack()
    with profile(activities=[ProfilerActivity.CPU]) as prof:  # operators are recorded again
        torch.zeros(1)
    assert "aten::zeros" in {event.name for event in prof.events()}


def test_results_do_not_change():
    losses = []
    for context in (None, Tracker(), Tracker(workspace=True)):
        torch.manual_seed(0)
        case = CASES["encoder_dropout"]()
        for _ in range(2):
            if context is None:
                case.step(no_mark)
        if context is not None:
            with context:
                for _ in range(2):
                    case.step(no_mark)
        losses.append([p.detach().clone() for p in case.model.parameters()])
    for other in losses[1:]:
        torch.testing.assert_close(losses[0], other, rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True)])
def test_trackers_nest(kinds):
    with Tracker(device="cpu", workspace=kinds[0]) as outer:
        x = torch.zeros(100)
        with Tracker(device="cpu", workspace=kinds[1]) as inner:
            y = x + torch.ones(100)
        z = torch.zeros(1000)
    assert inner.timeline.tolist() == [400, 800, 1200, 800]  # x was there before, and the ones have died
    assert (inner.peak_bytes, outer.peak_bytes, outer.live_bytes) == (1200, 4800, 4800)
    assert (x.shape, y.shape, z.shape) == ((100,), (100,), (1000,))


def test_workspace_rejects_active_profiler():
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(StateError, match="leave that profiler"):
        Tracker(workspace=True).__enter__()
    with Tracker(workspace=True) as outer:
        with pytest.raises(StateError, match=r"or use track\(\)"), Tracker(workspace=True):
            pass
        x = torch.zeros(100)
    assert outer.live_bytes == x.nbytes


def test_a_profiler_in_another_thread_is_not_disturbed():
    events = []

    def work():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            torch.zeros(10)
        events.extend(prof.events())

    with Tracker(device="cpu", workspace=True) as tracker:
        x = torch.zeros(100)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "aten::zeros" in {event.name for event in events}
    assert tracker.peak_bytes == x.nbytes  # one thread's tensors


def test_errors_of_order():
    tracker = Tracker(workspace=True)
    assert_refused(lambda: tracker.peak_bytes, StateError, "a block of code")
    with tracker:
        assert tracker.live_bytes == 0
        assert_refused(lambda: tracker.peak_bytes, StateError, "after the block")
    with pytest.raises(StateError, match="create a new one"), tracker:
        pass
    assert_refused(lambda: Tracker(device="no such device"), ConfigError)


@BOTH
def test_a_device_without_tensors_has_zero_and_nothing(workspace):
    with Tracker(device="meta", workspace=workspace) as tracker:
        torch.zeros(100).sort()
    assert (tracker.peak_bytes, tracker.live_bytes, tracker.peak_where) == (0, 0, None)
    assert (tracker.peak_by_category, tracker.top(), tracker.phases, len(tracker.timeline)) == ({}, (), (), 0)
    assert "reached by nothing" in tracker.summary()


def test_devices_are_counted_apart_and_together():
    with Tracker(device="cpu") as on_cpu, Tracker(device="meta") as on_meta, Tracker(device=None) as on_all:
        x, y = torch.zeros(100), torch.zeros(50, device="meta")
    assert (on_cpu.peak_bytes, on_meta.peak_bytes, on_all.peak_bytes) == (x.nbytes, y.nbytes, x.nbytes + y.nbytes)


class Allocation:
    """An event as torch's profiler hands it out; there is no accelerator here to make a real one."""

    def __init__(self, kind: str, name: str = "", cpu: int = 0, cuda: int = 0) -> None:
        self.kind, self.name = (lambda: kind), (lambda: name)
        self.cpu_memory_usage, self.cuda_memory_usage = (lambda: cpu), (lambda: cuda)


def test_memory_of_a_gpu_and_of_the_host_rise_apart():
    def span(number: int, *allocations: Allocation) -> list[Allocation]:
        return [Allocation("push", f"memkit-operator:{number}"), *allocations, Allocation("pop")]

    nested = [Allocation("push", "aten::x"), Allocation("memory_alloc", cuda=512), Allocation("pop")]
    events = [
        Allocation("memory_alloc", cpu=10**9),  # between operators
        *span(4, Allocation("memory_alloc", cpu=8), *nested, Allocation("memory_alloc", cuda=-512)),
        *span(5, Allocation("memory_alloc", cpu=-100), Allocation("memory_alloc", cpu=60), *nested),
        *span(6, Allocation("memory_alloc", cpu=50), Allocation("memory_alloc", cpu=-50)),
    ]
    assert list(allocations._risen(events)) == [(4, "accelerator", 512), (6, "cpu", 50)]


def test_summary_adds_up_and_names_omissions():
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
    with Tracker(device="cpu") as tracker:
        x = torch.ones(4, 8)
        for layer in model:
            x = layer(x)
    text = tracker.summary()
    assert text.startswith(f"peak {tracker.peak_bytes / 1024:.2f} KiB of live tensors on cpu\nreached by aten.addmm")
    assert f"({len(tracker.peak_by_module) - 8} more)" in text
    for table in text.split("\n\n")[1:4]:
        shares = [float(row.split("%")[0].split()[-1]) for row in table.splitlines()[1:]]
        assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "track(workspace=True)" in text
    assert "parameter" in text


def test_workspace_prints_nothing():
    code = (
        "import torch; from memkit.memory.track import Tracker\n"
        "with Tracker(workspace=True) as tracker: torch.zeros(1000).sort()\n"
        "assert tracker.peak_by_category['workspace']"
    )
    done = run_python_forked(code)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_costs_at_most_half_of_a_real_step(monkeypatch):
    monkeypatch.setattr(track_cost, "ROUNDS", 5)
    figures = track_cost.measure(*track_cost.SIZES["medium: 4 blocks of 192"])
    assert figures["track()"]["whole_ratio"] <= 1.5


def peaks_of_steps(step):
    peaks = []
    for num_steps in (1, 2):
        with Tracker(device="cpu") as tracker:
            for _ in range(num_steps):
                step()
        peaks.append(tracker.peak_bytes)
    return peaks


def test_one_step_counts_weights_that_are_averaged_after_it():
    model = nn.Linear(300, 300)
    average, optimizer = torch.optim.swa_utils.AveragedModel(model), torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    step()
    one, two = peaks_of_steps(step)
    assert 0 <= two - one <= 64  # a number or two more
    parameters = 4 * 300 * 301
    assert one > 5 * parameters  # weights, average, gradients, two moments


def test_one_step_counts_the_gradients_of_the_step_before():
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(torch.ones(4, 300)).square().mean()
        torch.ones(300, 300, 3).mean()  # the peak: while the old gradients are there
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    one, two = peaks_of_steps(step)
    assert one == two
    assert one > 4 * (2 * 300 * 301 + 3 * 300 * 300)
