"""Offloaded activations: same gradients, a tenth of the memory; views, in-place changes, full disks, kills."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F

import memkit as mk
from memkit._core.errors import ConfigError, StateError
from memkit._recorder.recorder import Recorder
from memkit._simulation.tensors import Tensors
from memkit.train import offload as offloading
from memkit.train.offload import WrittenAsideError, offload_activations
from memkit.train.offload_files import DiskStore, _Ranges
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same
from tests.toys import mean_square
from tests.train.faults import MODELS


def deep(depth=16, width=128):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)))


def gradients(model, x, offload):
    torch.manual_seed(1)
    model.zero_grad()
    with offload:
        loss = model(x).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def never():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [0, "500B", 10**9])
def test_gradients_are_bit_equal_without_leftovers(name, budget):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(13, 6)
    expected = gradients(model, x, never())
    offload = offload_activations(to="disk", budget=budget, min_bytes=1, model=model)
    assert_same(gradients(model, x, offload), expected)
    assert offload.held_bytes == 0
    assert not offload._records
    assert (offload.written_bytes > 0) == (budget != 10**9)


def test_activations_need_a_tenth_of_the_memory():
    model, x = deep(depth=24), torch.randn(1024, 128)
    offload = offload_activations(to="disk")
    expected = [gradient.clone() for gradient in gradients(model, x, never())]
    plain = trace_allocations(lambda: gradients(model, x, never())).peak
    assert trace_allocations(lambda: gradients(model, x, offload)).peak * 10 <= plain
    assert_same([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_forward_keeps_nearly_the_whole_budget(share):
    model, x = deep(), torch.randn(512, 128)
    kept = []

    def forward(offload):
        with offload:
            kept.append(model(x).mean())

    saved = int(trace_allocations(lambda: forward(never())).live[-1])
    kept.clear()
    budget = int(share * saved)
    live = trace_allocations(lambda: forward(offload_activations(to="disk", budget=f"{budget}B", min_bytes=64))).live
    largest = 512 * 128 * 4
    assert budget - largest <= live[-1] <= budget + 64


def test_views_of_a_storage_are_written_once_with_strides():
    x = torch.randn(64, 3, 128, requires_grad=True)
    offload = offload_activations(to="disk", min_bytes=64)
    seen = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            base = x * 2
            ctx.save_for_backward(base, base[:, 1], base.transpose(0, 2), base.view(torch.int32), base[5:7, :, ::2])
            return base.sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return gradient.expand(64, 3, 128)

    with offload:
        loss = Saves.apply(x)
    assert offload.written_bytes == x.nbytes
    trace = trace_allocations(loss.backward)
    assert trace.peak <= 2 * x.nbytes + 4  # read once; the gradient of x, and where it starts
    base = x.detach() * 2
    for found, expected in zip(
        seen, [base, base[:, 1], base.transpose(0, 2), base.view(torch.int32), base[5:7, :, ::2]], strict=True
    ):
        assert_same(found, expected)
        assert found.stride() == expected.stride()
    assert len({tensor.untyped_storage().data_ptr() for tensor in seen}) == 1


def test_a_small_view_of_a_large_storage_is_written_alone():
    data = torch.randn(1000, 64)
    w = torch.ones(64, requires_grad=True)
    offload = offload_activations(to="disk", min_bytes=64)
    with offload:
        loss = (data[3:7] * w).sum() + (data[500:504] * w).sum()
    assert offload.written_bytes <= 2 * (4 * 64 * 4 + 16) + 64 * 4
    loss.backward()
    torch.testing.assert_close(w.grad, data[3:7].sum(0) + data[500:504].sum(0))


def test_parameters_and_buffers_stay():
    model = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(30, 30, bias=False), nn.BatchNorm1d(8)).eval()
    x = torch.randn(2, 8, 32)
    model[2].running_mean.requires_grad_(False)
    for given_model, at_most in ((model, 0), (None, 64)):
        offload = offload_activations(to="disk", min_bytes=1, model=given_model)
        expected = gradients(model, x, never())
        assert_same(gradients(model, x, offload), expected)
        activations = x.nbytes + 2 * 2 * 8 * 30 * 4
        assert activations <= offload.written_bytes <= activations + 2 * 2 * 8 * 30 * 4 + at_most


@pytest.mark.parametrize("budget", [0, "1MB"])
@pytest.mark.parametrize("twice", ["retain_graph", "second_order"])
def test_a_graph_can_be_used_twice(budget, twice):
    x = torch.randn(50, 50, requires_grad=True)
    results = []
    for context in (never(), offload_activations(to="disk", budget=budget, min_bytes=1)):
        with context:
            loss = (x.tanh().exp() * x).sum()
            first = torch.autograd.grad(loss, x, retain_graph=True, create_graph=twice == "second_order")[0]
            second = torch.autograd.grad(loss if twice == "retain_graph" else first.sum(), x)[0]
        results.append((first.detach(), second))
    assert_same(results[0], results[1])


def test_in_place_change_is_rejected_or_harmless():
    x = torch.randn(100, requires_grad=True)
    with offload_activations(to="disk", budget="1MB", min_bytes=1):
        y = x * 2
        loss = y.pow(2).sum()
        y.add_(1)
    with pytest.raises(mk.errors.StateError, match=r"changed in place after it was saved for PowBackward0"):
        loss.backward()
    with offload_activations(to="disk", budget="500B", min_bytes=1):  # changed while it stays, then pushed out
        y = x * 2
        loss = y.pow(2).sum()
        y.add_(1)
        loss = loss + x.exp().sum()
    assert_refused(lambda: loss.backward(), mk.errors.StateError, "changed in place")
    with offload_activations(to="disk", budget=0, min_bytes=1):
        y = x * 2
        loss = y.pow(2).sum()
        y.add_(1)
        loss = loss + y.pow(2).sum()  # the same storage, with other values
    loss.backward()
    torch.testing.assert_close(x.grad, 8 * x + 4 * (2 * x + 1))


def test_a_failed_or_forgotten_graph_leaves_nothing():
    model, x = deep(depth=3), torch.randn(256, 128)
    offload = offload_activations(to="disk", budget="200KiB")
    with pytest.raises(RuntimeError, match="shapes"), offload:
        nn.Sequential(model, nn.Linear(3, 3))(x)
    with offload:
        model(x)
    assert offload.held_bytes == 0
    assert not offload._records


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_full_disk_is_out_of_memory_and_keeps_earlier_tensors(monkeypatch):
    model, x = deep(depth=4), torch.randn(512, 128)
    expected = gradients(model, x, never())
    offload = offload_activations(to="disk")
    with offload:
        loss = model(x).square().mean()  # in the true file
    store = offload._stores[torch.device("cpu")]
    true_file = store._file
    with Path("/dev/full").open("r+b", buffering=0) as full:
        monkeypatch.setattr(store, "_file", full)
        with (
            pytest.raises(mk.MemkitOutOfMemoryError, match=r"No space left on device for \d+ bytes") as caught,
            offload,
        ):
            model(x)
        monkeypatch.setattr(store, "_file", true_file)
    assert mk.is_out_of_memory(caught.value)  # so that the wrapper takes a smaller micro-batch
    model.zero_grad()
    loss.backward()
    del loss
    assert_same(gradients(model, x, offload), expected)


KILLED = """
import os, signal, sys, tempfile, torch
from memkit.train.offload import offload_activations
tempfile.tempdir = sys.argv[1]
x = torch.randn(1000, 1000, requires_grad=True)
offload = offload_activations(to="disk")
with offload:
    loss = x.exp().sum()
assert offload.written_bytes == x.nbytes
print(len(os.listdir(sys.argv[1])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
def test_a_killed_process_leaves_no_file(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == "0"
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=60))
def test_ranges_never_overlap_and_are_used_again(actions):
    ranges, taken = _Ranges(), []
    for take, number in actions:
        if take or not taken:
            place = ranges.take(number)
            assert all(place[0] >= sum(other) or sum(place) <= other[0] for other in taken)
            taken.append(place)
        else:
            ranges.give_back(taken.pop(number % len(taken)))
    for place in taken:
        ranges.give_back(place)
    assert ranges.take(1) == (0, 1)
    assert (ranges._end, ranges._free) == (1, [])


def test_the_file_does_not_grow_from_step_to_step():
    model, x = deep(depth=4), torch.randn(256, 128)
    offload = offload_activations(to="disk")
    sizes = set()
    for _ in range(4):
        gradients(model, x, offload)
        sizes.add(os.fstat(offload._stores[torch.device("cpu")]._file.fileno()).st_size)
    assert len(sizes) == 1


@pytest.mark.parametrize("checkpoint", [None, ["1", "2"]])
def test_the_wrapper_offloads_on_request(checkpoint):
    x = torch.randn(64, 128)
    results = []
    for offload in ((), ("activations",)):
        model = deep(depth=4)
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, torch.optim.AdamW(model.parameters()), accumulation_steps=2, checkpoint=checkpoint, offload=offload
        )
        torch.manual_seed(1)
        for _ in range(2):
            trainer.train_step(x, mean_square)
        results.append([parameter.detach() for parameter in model.parameters()])
        assert bool(trainer._offload and trainer._offload.written_bytes) == bool(offload)
    assert_same(results[0], results[1])


def test_wrong_settings():
    for settings in ({"to": "tape"}, {"to": "disk", "budget": "much"}, {"to": "disk", "min_bytes": -1}):
        with pytest.raises(mk.MemkitError):
            offload_activations(**settings)
    model = nn.Linear(2, 2)
    with pytest.raises(mk.errors.ConfigError, match="activations"):
        mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters()), offload="activations")


def test_host_tensors_stay_on_the_host():
    offload = offload_activations(to="host")
    with pytest.warns(mk.MemkitWarning, match=r"\(to='host'\) moves tensors of an accelerator"):
        gradients(deep(depth=2), torch.randn(64, 128), offload)
    assert offload.written_bytes == 0


def test_the_folder_is_the_callers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    store = DiskStore(tmp_path)
    handle = store.write(torch.arange(10, dtype=torch.uint8))
    torch.testing.assert_close(store.read(handle, torch.device("cpu")).wait(), torch.arange(10, dtype=torch.uint8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
def test_graph_break_does_not_compile_the_hooks():
    """It runs a layer as written when a dispatch mode is on, and would from then on compile what the layer calls."""
    found = []
    for compiles in (False, True):
        model, x = deep(depth=3), torch.randn(64, 128)
        if compiles:
            for block in model:
                block[0] = torch.compile(block[0], backend="aot_eager")
            with Recorder():
                model(x)
        found.append(gradients(model, x, offload_activations(to="disk")))
    assert_same(*found)


def test_fake_tensors_move_without_being_written():
    """A dry run holds as much as the real run: moved tensors are freed, and come back in new memory."""
    held = []
    for mode in (contextlib.nullcontext(), Tensors()):
        with mode:
            model, x = deep(depth=3), torch.randn(512, 128)
            offload = offload_activations(to="disk", model=model)
            gradients(model, x, offload)
            with Recorder() as recorder:
                gradients(model, x, offload)
        recording = recorder.recording()
        held.append((recording.peak_bytes(), recording.live_bytes(), offload.written_bytes))
        assert len(offload._stores) == isinstance(mode, contextlib.nullcontext)
    assert held[0] == held[1]


def test_threads_in_blocks_of_their_own_keep_their_own_buffers():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.ones(4096))

        def forward(self, x):
            return x * self.factor  # saves the buffer alone

    offload, both_inside = offload_activations(to="disk", min_bytes=1024), threading.Barrier(2)

    def work():
        model = Scale()
        with offload.within(model):
            both_inside.wait(10)
            model(torch.ones(4096, requires_grad=True)).sum().backward()
            both_inside.wait(10)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert offload.written_bytes == 0


class Fill(torch.autograd.Function):
    """Writes a stage into a scratch tensor through `.data`, as torchdiffeq's Runge-Kutta solvers do."""

    @staticmethod
    def write(scratch, value, stage):
        scratch.data[stage] = value

    @classmethod
    def forward(cls, ctx, scratch, value, stage):
        ctx.stage = stage
        Fill.write(scratch, value, stage)
        return scratch

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient[ctx.stage], None


def integrate(model, x, num_stages=3):
    scratch, y = torch.zeros(num_stages, *x.shape, dtype=x.dtype, device=x.device), x
    for stage in range(num_stages):
        scratch = Fill.apply(scratch, model(y).tanh(), stage)
        y = x + (scratch[: stage + 1] * model.weight[0, 0]).sum(0)  # the product saves a part of the scratch tensor
    return y


@pytest.mark.parametrize("budget", [0, "50kB", 10**9])
def test_storages_written_through_data_are_written_out_again(budget):
    """Such a write makes no new version: a copy moved out before it does not have what a later view shows."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32).double(), torch.randn(64, 32, dtype=torch.float64)
    found = []
    for around in (contextlib.nullcontext(), offload_activations(to="disk", budget=budget, model=model)):
        model.zero_grad()
        with around:
            loss = integrate(model, x).square().mean()
        loss.backward()
        found.append([each.grad.clone() for each in model.parameters()])
    assert_same(found[1], found[0])


@pytest.fixture
def as_on_a_card(monkeypatch):
    """Checksums that are compared in backward."""
    monkeypatch.setattr(offloading, "_compares_in_backward", lambda _: True)


@pytest.mark.usefixtures("as_on_a_card")
def test_checksums_that_differ_are_found_in_each_backward_and_go_with_the_graph(monkeypatch):
    """Of a kernel's write, which nothing tells of; here NumPy's."""

    def write(scratch, value, stage):
        scratch.detach().numpy()[stage] = value.detach().numpy()

    monkeypatch.setattr(Fill, "write", staticmethod(write))
    model, x = nn.Linear(32, 32), torch.randn(64, 32)
    offload = offload_activations(to="disk", min_bytes=0, model=model)
    with offload:
        loss = integrate(model, x).square().mean()
    for _ in range(2):
        with pytest.raises(WrittenAsideError, match=r"written through \.data"):
            loss.backward(retain_graph=True)
    assert not offload._checks


class Masked(nn.Module):
    """Masks its result through `.data` after a layer has saved it, as Tacotron 2 masks what lies beyond the end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        y = self.first(x).tanh()
        z = y + self.second(y)
        y.data.masked_fill_(y > 0.1, 0.0)
        return z * y


def offloaded(model):
    return offload_activations(to="disk", min_bytes=0, model=model)


def offloaded_blocks(model):
    return mk.train.Checkpointing(model, {"second": "offload"})


@pytest.mark.parametrize("is_on_a_card", [False, True])
@pytest.mark.parametrize("goes_on", ["after the block", "inside the block"])
@pytest.mark.parametrize(
    "around", [lambda model: offload_activations(to="disk", min_bytes=0, model=model), offloaded_blocks]
)
def test_backward_reads_what_was_written_through_data_like_the_plain_one(around, goes_on, is_on_a_card, monkeypatch):
    monkeypatch.setattr(offloading, "_compares_in_backward", lambda _: is_on_a_card)
    torch.manual_seed(0)
    model, x = Masked().double(), torch.randn(512, 6, dtype=torch.float64)
    model(x).sum().backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    with around(model):
        loss = model(x).sum()
        if goes_on == "inside the block":
            loss.backward()
    if goes_on == "after the block":
        loss.backward()
    assert_same([each.grad for each in model.parameters()], expected)
    assert "data" not in vars(torch.Tensor)


def test_only_writes_that_autograd_does_not_see_are_saved_again():
    """A look through `.data`, and a change that autograd sees, after which it refuses what it has saved."""
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    offload = offload_activations(to="disk", min_bytes=0)
    with offload:
        y = x.tanh()
        loss = (y * y).sum()
        written_bytes = offload.written_bytes
        assert y.data.max() <= 1
    loss.backward()
    assert offload.written_bytes == written_bytes
    z = x.detach()
    torch.testing.assert_close(x.grad, 2 * z.tanh() * (1 - z.tanh() ** 2))


@pytest.mark.usefixtures("as_on_a_card")
@pytest.mark.parametrize("name", MODELS)
def test_checksums_that_agree_change_nothing(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(13, 6)
    expected = gradients(model, x, never())
    offload = offload_activations(to="disk", min_bytes=1, model=model)
    assert_same(gradients(model, x, offload), expected)
    assert not offload._checks


@pytest.fixture
def reads(monkeypatch):
    """Reads ahead from a file, as from host memory; for each read, what had been read and was still there."""
    found, there, read = [], weakref.WeakSet(), DiskStore.read

    def noting(self, *given):
        found.append(len(there))
        arriving = read(self, *given)
        there.add(arriving.memory.untyped_storage())
        return arriving

    monkeypatch.setattr(DiskStore, "read", noting)
    monkeypatch.setattr(DiskStore, "reads_ahead", True)
    return found


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(32, 32), nn.Tanh()))).double()


@pytest.mark.parametrize("budget", [0, "50kB"])
def test_one_storage_is_read_ahead(budget, reads):
    model, x = chain(), torch.randn(64, 32, dtype=torch.float64)
    expected = gradients(model, x, never())
    offload = offload_activations(to="disk", budget=budget, min_bytes=0, model=model)
    assert_same(gradients(model, x, offload), expected)
    assert len(reads) == offload.written_bytes // x.nbytes  # once each
    assert len(reads) >= 4
    assert reads[0] == 0
    assert reads[1:] == [1] * (len(reads) - 1)  # each begins while the one before it is there


def test_a_storage_that_does_not_fit_is_not_read_ahead(reads, monkeypatch):
    model, x = chain(), torch.randn(64, 32, dtype=torch.float64)
    expected = gradients(model, x, never())
    read = DiskStore.read

    def failing(self, *given):
        arriving = read(self, *given)
        if reads[-1]:
            raise torch.OutOfMemoryError("a simulated one")
        return arriving

    monkeypatch.setattr(DiskStore, "read", failing)
    assert_same(gradients(model, x, offload_activations(to="disk", min_bytes=0, model=model)), expected)


@pytest.mark.gpu
def test_storages_written_through_data_are_refused_on_a_card():
    model, x = nn.Linear(64, 64).cuda(), torch.randn(256, 64, device="cuda")
    with offload_activations(to="host", model=model):
        loss = integrate(model, x).square().mean()
    assert_refused(loss.backward, StateError, r"written through \.data", "torch.stack")


@pytest.mark.parametrize("budget", [0, "100kB"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_parts_with_versions_of_their_own_are_written_alone(kind, budget):
    """PyTorch's GRU on a CPU changes parts made by `unsafe_chunk`; another part's version does not show it."""
    torch.manual_seed(0)
    model, x = kind(16, 64, 2), torch.randn(6, 8, 16)

    def gradient_under(context):
        model.zero_grad()
        with context:
            loss = model(x)[0].square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradient_under(contextlib.nullcontext())
    offload = offload_activations(to="disk", budget=budget, min_bytes=0, model=model)
    assert_same(gradient_under(offload), expected)
    assert offload.written_bytes > 0 or budget


def test_zeros_of_forward_mode_have_no_memory_to_move():
    """What would be read of them differs from run to run."""
    layer, x = nn.Linear(6, 6).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    offload = offload_activations(to="disk", min_bytes=0)

    def found(around):
        with around:
            rows = x.tanh()
            value, tangent = torch.func.jvp(lambda rows: layer(rows).sin(), (rows,), (rows.cos(),))
            loss = (value * tangent).square().mean()
        return torch.autograd.grad(loss, [x, *layer.parameters()])

    assert_same(found(offload), found(contextlib.nullcontext()))
    assert offload.pack(torch._efficientzerotensor(64, 64)).unpack()._is_zerotensor()


def test_transforms_that_take_gradients_are_refused_with_a_way_out():
    """Torch's own error names neither the hooks' owner nor a way out."""
    layer, x = nn.Linear(6, 6), torch.randn(5, 6)
    offload = offload_activations(to="disk")

    def run():
        with offload:
            torch.func.jacrev(layer)(x)

    assert_refused(run, ConfigError, "with offload_activations", "torch.func.grad", "create_graph=True")
    with offload:  # the hooks are gone, and come again
        loss = layer(x).square().mean()
    torch.func.grad(lambda x: layer(x).sum())(x)
    loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_refuses_noise_that_was_moved_before_it_was_drawn(inplace):
    x = torch.randn(64, 64, requires_grad=True)
    with offload_activations(to="disk", min_bytes=0):
        loss = F.rrelu(x * 1, training=True, inplace=inplace).sum()
    assert_refused(loss.backward, StateError, "the noise of rrelu.*leaky_relu")


def test_noise_within_the_budget_is_right():
    x = torch.randn(64, 64, requires_grad=True)
    found = []
    for offload in (offload_activations(to="disk", budget="1MiB", min_bytes=0), contextlib.nullcontext()):
        torch.manual_seed(0)
        with offload:
            loss = F.rrelu(x * 1, training=True).sum()
        found += torch.autograd.grad(loss, x)
    assert torch.equal(*found)
