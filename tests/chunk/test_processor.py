"""ChunkedProcessor: the function's own result and gradients, inside of a budget that is never exceeded."""

import copy
import pickle
import queue

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memkit as mk
from memkit._core.units import parse_bytes
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same, assert_same_compiled, one_in

MIB = 1 << 20
NUM_ROWS, NUM_NODES = 20_000, 1000


@pytest.fixture
def mlp():
    layers = [nn.Linear(6, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, 16))


@pytest.fixture
def edges():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, 6, generator=generator)
    dst, src = torch.randint(NUM_NODES, (2, NUM_ROWS), generator=generator)
    return rows, dst, src.int()


def forms(proc, mlp, edges, x):
    """Every form of a call, with what it equals."""
    rows, dst, src = edges
    zeros = rows.new_zeros(NUM_NODES, 16)
    yield proc(rows), lambda: mlp(rows)
    yield proc.loss(rows), lambda: mlp(rows).mean()
    yield proc.loss(rows, reduction="sum"), lambda: mlp(rows).sum()
    yield (
        proc.segment_reduce(rows, index=dst, num_segments=NUM_NODES, weight=rows[:, 0]),
        lambda: zeros.index_add(0, dst, mlp(rows) * rows[:, :1]),
    )
    gathering = mk.ChunkedProcessor(lambda r, x_j: mlp(r) * x_j, memory_budget="4MiB", params=mlp.parameters())
    yield (
        gathering.segment_reduce(rows, index=dst, num_segments=NUM_NODES, gather={"x_j": (x, src)}, reduce="mean"),
        lambda: zeros.index_add(0, dst, mlp(rows) * x[src]) / dst.bincount(minlength=NUM_NODES).clamp(min=1)[:, None],
    )


def test_every_form_equals_the_function_in_float64(mlp, edges):
    mlp.double()
    rows, dst, src = edges
    x = torch.randn(NUM_NODES, 16, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    proc = mk.ChunkedProcessor(mlp, memory_budget="4MiB")
    for out, plain in forms(proc, mlp, (rows.double(), dst, src), x):
        expected = plain()
        assert_same(out, expected, 1e-11)
        upstream = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad(each, inputs, upstream, allow_unused=True) for each in (out, expected))
        assert_same(found, wanted, 1e-11)
        assert proc.last_plan is not None
        assert proc.last_plan.num_chunks > 2


WAYS = {
    "map": lambda proc, rows, dst, x, src: proc(rows),
    "sum": lambda proc, rows, dst, x, src: proc.segment_reduce(rows, index=dst, num_segments=NUM_NODES),
    "mean": lambda proc, rows, dst, x, src: proc.segment_reduce(rows, index=src, num_segments=NUM_NODES, reduce="mean"),
    "max": lambda proc, rows, dst, x, src: proc.segment_reduce(rows, index=dst, num_segments=NUM_NODES, reduce="max"),
    "softmax": lambda proc, rows, dst, x, src: proc.segment_reduce(
        rows, index=dst, num_segments=NUM_NODES, reduce="softmax"
    ),
    "gather": lambda proc, rows, dst, x, src: proc.segment_reduce(
        index=dst, num_segments=NUM_NODES, gather={"input": (x, src)}
    ),
    "loss": lambda proc, rows, dst, x, src: proc.loss(rows),
}


def used(way, proc, mlp, edges):
    """Bytes of a call, forward and backward, without its result; gradients are made anew."""
    rows, dst, src = edges
    x = torch.randn(NUM_NODES, 6, requires_grad=True)
    num_result_bytes = 0

    def run():
        nonlocal num_result_bytes
        out = WAYS[way](proc, rows, dst, x, src)
        out.backward(torch.empty_strided(out.shape, [0] * out.dim()).fill_(1.0) if out.dim() else None)
        num_result_bytes = out.nbytes

    peak = trace_allocations(run).peak
    for parameter in mlp.parameters():
        parameter.grad = None
    return peak - num_result_bytes


@pytest.mark.parametrize("way", WAYS)
def test_without_chunks_no_budget_below_would_hold(way, mlp, edges):
    assert used(way, mk.ChunkedProcessor(mlp, chunk_size=NUM_ROWS), mlp, edges) > 40 * MIB


@pytest.mark.parametrize("way", one_in(2, WAYS))
@pytest.mark.parametrize("budget", [4, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (16, 40))])
def test_a_budget_is_never_exceeded_and_is_used(way, budget, mlp, edges):
    def fresh():
        return mk.ChunkedProcessor(mlp, memory_budget=budget * MIB)

    assert used(way, fresh(), mlp, edges) <= budget * MIB  # with its trials
    proc = fresh()
    WAYS[way](proc, *edges[:2], torch.randn(NUM_NODES, 6, requires_grad=True), edges[2])  # without a profiler
    peak = used(way, proc, mlp, edges)
    plan = proc.last_plan
    assert peak <= plan.predicted_peak_bytes + 1024  # a few numbers
    assert plan.predicted_peak_bytes <= budget * MIB
    is_in_backward = plan.num_kept + plan.num_partly_kept < plan.num_chunks - 1
    if is_in_backward and way not in ("loss", "max"):  # where few rows win, the others do not run again
        assert peak >= 0.85 * budget * MIB


def test_kept_graphs_are_not_run_again(mlp, edges):
    """For a budget that holds all products, but not all graphs."""
    seen = []
    mlp.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    proc = mk.ChunkedProcessor(mlp, memory_budget="44MiB", check=False)
    proc(edges[0])
    seen.clear()
    proc(edges[0]).sum().backward()
    plan = proc.last_plan
    assert plan.num_kept > 1
    assert plan.num_kept + plan.num_partly_kept == plan.num_chunks - 1
    assert sum(seen) == NUM_ROWS + NUM_ROWS - (plan.num_kept - 1) * plan.chunk_size - (
        NUM_ROWS - (plan.num_chunks - 1) * plan.chunk_size
    )


def test_two_processors_cut_alike_and_reuse_measurements(mlp, edges):
    rows = edges[0]
    first, second = (mk.ChunkedProcessor(mlp, memory_budget="8MiB") for _ in range(2))
    assert first.plan(rows) == second.plan(rows)
    calls = queue.SimpleQueue()  # a list would be put back
    mlp.register_forward_hook(lambda *_: calls.put(1))
    plan = first.plan(rows)
    assert calls.empty()
    assert first.plan(rows[:15_000]).chunk_size == plan.chunk_size
    assert calls.empty()
    with torch.no_grad():
        assert first.plan(rows).chunk_size > plan.chunk_size  # another kind: no graph
    assert not calls.empty()


def test_planning_changes_nothing(edges):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(6, 32), nn.Dropout(0.5)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, rows):
            self.calls += 1
            return self.drop(self.layer(rows))

    module = Counting()
    module.layer.weight.register_hook(lambda gradient: pytest.fail("a trial is no backward"))
    before = torch.get_rng_state()
    mk.ChunkedProcessor(module, memory_budget="1MiB").plan(edges[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert module.calls == 0
    assert module.layer.weight.grad is None


def test_dropout_is_replayed_around_kept_graphs(edges):
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 4)).double()
    rows = edges[0].double().requires_grad_()
    proc = mk.ChunkedProcessor(module, memory_budget="6MiB")
    plan = proc.plan(rows)
    assert 0 < plan.num_kept < plan.num_chunks
    torch.manual_seed(1)
    out = proc(rows)
    torch.manual_seed(1)
    expected = torch.cat([module(part) for part in rows.split(plan.chunk_size)])
    assert_same(out, expected, 1e-11)
    found, wanted = (torch.autograd.grad(each.square().sum(), [rows, *module.parameters()]) for each in (out, expected))
    assert_same(found, wanted, 1e-11)


def test_modes_are_other_kinds(edges):
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    proc = mk.ChunkedProcessor(module, memory_budget="6MiB")
    training = proc.plan(edges[0])
    module.eval()
    assert proc.plan(edges[0]).chunk_size != training.chunk_size  # no mask


def test_a_workspace_counts(edges):
    """A convolution's workspace is in no tensor: without it the budget would be exceeded."""
    conv = nn.Sequential(nn.Conv1d(4, 8, 5, padding=2), nn.GELU(), nn.Conv1d(8, 4, 5, padding=2))
    rows = torch.randn(4000, 4, 64)
    proc = mk.ChunkedProcessor(conv, memory_budget="8MiB")
    proc.plan(rows)  # outside of the profiler, which would hide it from the trial

    def run():
        out = proc(rows)
        out.sum().backward()

    peak = trace_allocations(run).peak - rows.nbytes  # the result is as large
    assert 0.8 * 8 * MIB <= peak <= 8 * MIB


def test_a_given_size_is_measured_on_request(mlp, edges):
    proc = mk.ChunkedProcessor(mlp, chunk_size=1000)
    plan = proc.plan(edges[0])
    assert (plan.chunk_size, plan.num_chunks, plan.num_kept) == (1000, 20, 0)
    assert abs(used("map", proc, mlp, edges) / plan.measured_peak_bytes - 1) < 0.1
    assert proc.last_plan is None


def test_refusals_name_the_processor(mlp, edges):
    rows = edges[0]
    proc = mk.ChunkedProcessor(mlp, chunk_size=4)
    for call in (proc, proc.loss, lambda *given: proc.segment_reduce(*given, index=torch.zeros(len(rows)).long())):
        with pytest.raises(mk.errors.InputError) as refused:
            call(rows, rows[:3])
        assert refused.value.call.startswith("ChunkedProcessor(Sequential)")


def test_rejects_uncuttable_input_before_measuring(mlp, edges):
    rows = edges[0]
    with pytest.raises(mk.errors.InputError, match=r"depends on other rows, first in `1` \(BatchNorm1d\)"):
        mk.ChunkedProcessor(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))(rows)
    with pytest.raises(mk.errors.InputError, match="depends on other rows"):
        mk.ChunkedProcessor(lambda r: F.softmax(r, dim=0)).loss(rows)
    with pytest.raises(mk.errors.InputError, match=r"`mlp.0.weight` of shape \(128, 6\)"):
        mk.ChunkedProcessor(lambda r: mlp(r), memory_budget="4MiB")(rows)
    with pytest.raises(mk.errors.ConfigError, match=r"besides 150.* for gradients and running sums.*at least"):
        mk.ChunkedProcessor(mlp, memory_budget="64KiB")(rows)


@pytest.mark.parametrize("grad", [False, True])
def test_suggested_budget_is_sufficient_and_necessary(grad):
    fn = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))
    volume = torch.randn(3, 1, 16, 16, 16, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        refused = assert_refused(lambda: mk.ChunkedProcessor(fn, memory_budget="10kB")(volume), mk.errors.ConfigError)
        needed = refused.fix.rpartition("at least ")[2].rstrip(".")
        proc = mk.ChunkedProcessor(fn, memory_budget=needed)
        torch.testing.assert_close(proc(volume), fn(volume))
        assert proc.plan(volume).predicted_peak_bytes <= parse_bytes(needed)
        with pytest.raises(mk.errors.ConfigError, match="at least"):
            mk.ChunkedProcessor(fn, memory_budget=f"{int(parse_bytes(needed) / 1.1)}B")(volume)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_few_rows(num_rows, mlp):
    rows = torch.randn(num_rows, 6, requires_grad=True)
    out = mk.ChunkedProcessor(mlp, memory_budget="4MiB")(rows)
    assert out.shape == (num_rows, 16)
    out.sum().backward()
    assert rows.grad.shape == rows.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
def test_a_plan_inside_a_compiled_function():
    x = torch.rand(100, 3, dtype=torch.float64)
    assert_same_compiled(lambda x: x * mk.ChunkedProcessor(torch.sin, chunk_size=16).plan(x).num_chunks, x)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_model_that_holds_a_processor_can_be_saved_after_a_call(mlp, way):
    net = nn.Module()
    net.layers, net.rows = mlp, mk.ChunkedProcessor(mlp, memory_budget="4MiB")
    x = torch.ones(2000, 6)
    y = net.rows(x)
    same = way(net)
    assert_same([same.rows(x)], [y], 1e-6)
    assert same.rows.last_plan == net.rows.last_plan
