"""Traps of running a function in pieces. Each test holds the naive way, which falls into the trap, next to memkit's."""

import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import memkit as mk
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same, warm_peak_bytes
from tests.toys import mlp

MIB = 1 << 20


# ---- memory


def test_a_checkpoint_around_everything_saves_nothing():
    module, x = mlp(6, 128, 16), torch.randn(16_384, 6)
    params = list(module.parameters())
    plain = warm_peak_bytes(lambda: module(x).sum().backward(), *params)
    whole = warm_peak_bytes(lambda: checkpoint(module, x, use_reentrant=False).sum().backward(), *params)
    ours = warm_peak_bytes(lambda: mk.chunked_map(module, x, chunk_size=1024).sum().backward(), *params)
    assert whole > 0.9 * plain
    assert ours < 0.25 * plain


def test_index_add_saves_all_messages_despite_checkpoints():
    module, num_edges = mlp(6, 32, 32), 32_768
    rows, index = torch.randn(num_edges, 6), torch.randint(500, (num_edges,))
    params = list(module.parameters())

    def naive():
        out = torch.zeros(500, 32)
        for part, ids in zip(rows.split(512), index.split(512), strict=True):
            out = out.index_add(0, ids, checkpoint(module, part, use_reentrant=False).exp())
        out.sum().backward()

    def ours():
        fn = functools.partial(lambda module, part: module(part).exp(), module)
        mk.chunked_segment_reduce(fn, rows, index=index, num_segments=500, chunk_size=512).sum().backward()

    messages = num_edges * 32 * 4
    assert warm_peak_bytes(naive, *params) > messages
    assert warm_peak_bytes(ours, *params) < messages / 4


def test_gather_in_the_graph_makes_full_gradient_per_chunk():
    num = 16_384
    x, pick = torch.randn(num, 32, requires_grad=True), torch.randperm(num)

    def naive():
        torch.cat([checkpoint(torch.sin, x[part], use_reentrant=False) for part in pick.split(512)]).sum().backward()

    def ours():
        out = mk.chunked_segment_reduce(
            torch.sin, index=pick, num_segments=num, gather={"input": (x, pick)}, chunk_size=512
        )
        out.sum().backward()

    result = x.nbytes
    assert warm_peak_bytes(naive, x) - result > 2 * x.nbytes
    assert warm_peak_bytes(ours, x) - result < 1.2 * x.nbytes


def budget_used(proc, x, params):
    """What a call takes beyond its result, forward and backward; the sizes are found before."""

    def step():
        out = proc(x)
        sizes.append(out.nbytes)
        out.backward(out.new_ones(()).expand_as(out))

    sizes = []
    step()
    return warm_peak_bytes(step, x, *params) - sizes[-1]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0].mean(1)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("name", ["complex", "recurrent"])
def test_trial_includes_backward(name):
    """Complex results have a gradient too. A GRU's peak is in its forward, which the backward runs again."""
    if name == "complex":
        module, x = mlp(8, 64, 8)[::2].to(torch.complex64), torch.randn(16_000, 8, dtype=torch.complex64)
    else:
        module, x = Recurrent(), torch.randn(3000, 10, 8)
    proc = mk.ChunkedProcessor(module, memory_budget=4 * MIB)
    assert 0.85 * 4 * MIB < budget_used(proc, x.requires_grad_(), module.parameters()) <= 4 * MIB


@pytest.mark.parametrize(("width", "budget_mib"), [(2048, None), (1024, 40)])
def test_a_gradient_of_many_parameters_does_not_make_chunks_short(width, budget_mib):
    """It is in every chunk's peak: by proportion to the rows, nothing longer than a few rows seemed to fit."""
    layers = [nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)]
    module, x = nn.Sequential(*layers), torch.randn(20_000, 64)
    proc = mk.ChunkedProcessor(module, memory_budget=budget_mib and budget_mib * MIB)
    found = trace_allocations(lambda: proc.plan(x)).peak
    assert proc.last_plan.chunk_size > 100
    assert budget_mib is None or found <= budget_mib * MIB  # nor do the trials take more


def test_parameter_gradients_do_not_shorten_loss_chunks():
    module, x = mlp(64, 4096, 1024), torch.randn(400, 64)
    proc = mk.ChunkedProcessor(module)
    proc.loss(x)
    assert proc.last_plan.chunk_size > 100


def test_autocast_keeps_a_converted_copy_of_each_weight():
    module, x = mlp(64, 512, 512), torch.randn(4000, 64)
    copies = sum(2 * each.numel() for each in module.parameters())
    proc = mk.ChunkedProcessor(module, memory_budget=16 * MIB)
    plain = proc.plan(x).fixed_bytes
    with torch.autocast("cpu", torch.bfloat16):
        assert proc.plan(x).fixed_bytes == plain + copies


# ---- rows that depend on each other


def test_probes_embeddings_of_integers_with_nan():
    module, ids = nn.Sequential(nn.Embedding(10, 4), nn.BatchNorm1d(4)), torch.randint(10, (64,))
    pieces = torch.cat([module(part) for part in ids.split(8)])
    assert not torch.allclose(pieces, module(ids), atol=1e-2)
    assert_refused(lambda: mk.chunked_map(module, ids, chunk_size=8), mk.errors.InputError, r"`1` \(BatchNorm1d\)")
    mk.chunked_map(module.eval(), ids, chunk_size=8)


def test_complex_rows_are_looked_at():
    x = torch.randn(32, 4, dtype=torch.complex64)
    with pytest.raises(mk.errors.InputError, match="depends on other rows"):
        mk.chunked_map(lambda rows: rows / rows.norm(), x, chunk_size=8)
    mk.chunked_map(lambda rows: rows / rows.norm(dim=1, keepdim=True), x, chunk_size=8)


def test_checks_each_method_separately():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def encode(self, x):
            return self.layer(x)

        def mix(self, x, *, dim=0):
            return self.layer(x).softmax(dim)

    net, x = Net(), torch.randn(32, 4)
    mk.chunked_map(net.encode, x, chunk_size=8)
    mk.chunked_map(functools.partial(net.mix, dim=1), x, chunk_size=8)
    for fn in (net.mix, functools.partial(net.mix, dim=0)):
        with pytest.raises(mk.errors.InputError, match="depends on other rows"):
            mk.chunked_map(fn, x, chunk_size=8)


@pytest.mark.parametrize("form", ["closure", "partial", "object", "helper"])
def test_names_batch_norm_and_keeps_its_statistics_clean(form):
    layer, norm, x = nn.Linear(4, 4), nn.BatchNorm1d(4), torch.randn(32, 4)

    def both(layer, norm, x):
        return norm(layer(x))

    def helper(x):
        return norm(x)

    class Object:
        def __init__(self):
            self.norm = norm

        def __call__(self, x):
            return self.norm(x)

    fn = {
        "closure": lambda x: norm(x),
        "partial": functools.partial(both, layer, norm),
        "object": Object(),
        "helper": lambda x: helper(x),
    }[form]
    with pytest.raises(mk.errors.InputError, match=r"first in `BatchNorm1d` \(BatchNorm1d\)"):
        mk.chunked_map(fn, x, chunk_size=8, params=[*layer.parameters(), *norm.parameters()])
    assert norm.running_mean.tolist() == [0, 0, 0, 0]
    assert norm.num_batches_tracked == 0


def test_rejects_buffer_changing_with_each_call():
    """Each chunk would find another one, and the backward others again."""
    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)).double()
    x = torch.randn(64, 6, dtype=torch.float64)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = []
    for step in (lambda: mk.chunked_map(module, x, chunk_size=8, check=False), lambda: module(x)):
        module.load_state_dict(before)
        (gradient,) = torch.autograd.grad(step().square().sum(), module.parametrizations.weight.original)
        found.append(gradient)
    assert (found[0] - found[1]).abs().max() > 1e-8 * found[1].abs().max()
    module.load_state_dict(before)
    with pytest.raises(mk.errors.InputError, match=r"changes its buffer `parametrizations\.weight\.0\._u`.*eval mode"):
        mk.chunked_map(module, x, chunk_size=8)
    assert_same(module.state_dict(), before)
    module.eval()
    out = [step() for step in (lambda: mk.chunked_map(module, x, chunk_size=8), lambda: module(x))]
    assert_close(out[0], out[1])


def test_rejects_weight_cached_before():
    """The trial of independence ran without gradients: it left a weight without a graph, and nobody got a gradient."""
    module, x = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), torch.randn(32, 6)
    with nn.utils.parametrize.cached(), pytest.raises(mk.errors.InputError, match=r"a tensor of shape \(4, 6\)"):
        mk.chunked_map(module, x, chunk_size=8)


# ---- where a call is made


@pytest.mark.parametrize("form", ["map", "loss"])
def test_trials_do_not_count_in_a_checkpoint_around_the_call(form):
    """The forward tries sizes, the second one knows them: torch counts what both save, and refuses a difference."""
    module, x = mlp(6, 64, 16).double(), torch.randn(4000, 6, dtype=torch.float64, requires_grad=True)
    proc = mk.ChunkedProcessor(module, memory_budget=2 * MIB)

    def run(rows):
        return proc(2 * rows).square().mean() if form == "map" else proc.loss(2 * rows)

    checkpoint(run, x, use_reentrant=False).backward()
    out = module(2 * x)
    (expected,) = torch.autograd.grad((out.square() if form == "map" else out).mean(), x)
    assert_close(x.grad, expected, rtol=1e-11, atol=1e-14)


def test_inference_tensors_through_a_frozen_function():
    module = mlp(6, 64, 16).requires_grad_(False)
    with torch.inference_mode():
        x = torch.randn(32, 6)
    assert_close(mk.chunked_map(module, x, chunk_size=8), module(x))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_module_has_no_length():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 64, 16)

        def forward(self, x):
            return self.net(x)

    block, x = Block().double(), torch.randn(100, 6, dtype=torch.float64)
    compiled = torch.compile(block, backend="eager", dynamic=True)
    for out in (mk.chunked_map(compiled, x, chunk_size=32), mk.chunk.chunked_loss(compiled, x, chunk_size=32)):
        grads = [torch.autograd.grad(each.mean(), block.parameters()) for each in (out, block(x))]
        assert_close(*grads, rtol=1e-11, atol=1e-14)


def test_a_loss_may_take_a_rows_own_gradient():
    module, x = mlp(3, 16, 1).double(), torch.randn(32, 3, dtype=torch.float64, requires_grad=True)

    def force_error(rows):
        (force,) = torch.autograd.grad(module(rows).sum(), rows, create_graph=True)
        return force.square()

    loss = mk.chunk.chunked_loss(force_error, x, chunk_size=8, params=module.parameters())
    params = [each for each in module.parameters() if each.dim() > 1]
    grads = [torch.autograd.grad(each, params) for each in (loss, force_error(x).mean())]
    assert_close(*grads, rtol=1e-11, atol=1e-14)


class Decaying(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def test_rejects_function_changing_its_parameters():
    """Each chunk, and its repetition in the backward, would change them once more."""
    module = nn.Sequential(Decaying(3, 3), nn.Tanh())
    with pytest.raises(mk.errors.InputError, match=r"changes its parameter `0\.weight` each time"):
        mk.ChunkedProcessor(module, chunk_size=4)(torch.randn(12, 3))


@pytest.mark.parametrize("make", [lambda: nn.Embedding(9, 3, max_norm=0.5), lambda: nn.LazyLinear(3)])
def test_accepts_function_changing_parameters_once(make):
    first = make()
    rows = torch.arange(8) if isinstance(first, nn.Embedding) else torch.randn(8, 3)
    module = nn.Sequential(first, nn.Tanh())
    out = mk.ChunkedProcessor(module, chunk_size=4)(rows)
    assert torch.allclose(out, module(rows))
