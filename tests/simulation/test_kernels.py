"""The tables of CPU kernels against the kernels: workspace below its bound, results of the right size."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from memkit._recorder.recorder import Recorder
from memkit._recorder.workspace import WorkspaceMarks
from memkit._simulation.host import workspace_bound
from memkit._simulation.simulation import Host, Simulation
from tests.allocations import trace_allocations

NUMBERS = 64


class Bounds(WorkspaceMarks):
    """Notes next to each operator's workspace what it was expected to be at most."""

    def __init__(self):
        super().__init__()
        self.bounds = {}

    def around(self, func, run, moment):
        out = super().around(func, run, moment)
        _, _, args, _ = run.args
        self.bounds[id(self._calls[max(self._calls)])] = workspace_bound(func, args, out)
        return out


def conv(dims, *sizes, batch=2, length=12, transposed=False, **options):
    name = f"Conv{'Transpose' * transposed}{dims}d"
    layer = getattr(nn, name)(*sizes, **options)
    return lambda: layer(torch.randn(batch, sizes[0], *[length] * dims))


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def positive(size):
    root = torch.randn(size, size)
    return (root @ root.T / size + torch.eye(size)).requires_grad_()


def half(function):
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return function()

    return run


CALLS = {
    "conv1d": conv(1, 8, 24, 5),
    "conv2d": conv(2, 3, 24, 3, padding=1),
    "conv2d of 1x1": conv(2, 24, 24, 1),
    "conv2d, one row, small": conv(2, 3, 8, 3, batch=1),
    "conv2d, large kernel": conv(2, 3, 8, 7, length=32),
    "conv2d, depthwise": conv(2, 24, 24, 3, groups=24),
    "conv2d, groups": conv(2, 24, 48, 3, groups=3),
    "conv2d, depthwise, large kernel, channels last": lambda: nn.Conv2d(16, 16, 7, groups=16)(
        randn(2, 16, 12, 12).to(memory_format=torch.channels_last)
    ),
    "conv2d, dilated": conv(2, 4, 8, 3, dilation=2, batch=1),
    "conv2d, strided": conv(2, 20, 40, 3, stride=2),
    "conv3d": conv(3, 4, 8, 3),
    "conv3d, one row, small": conv(3, 4, 8, 3, batch=1),
    "conv3d, dilated": conv(3, 4, 8, 3, batch=1, dilation=2),
    "transposed 2d": conv(2, 8, 4, 4, transposed=True, stride=2),
    "transposed 2d, one row": conv(2, 8, 4, 4, transposed=True, stride=2, batch=1, length=6),
    "transposed 3d": conv(3, 8, 4, 2, transposed=True, stride=2),
    "transposed 3d, one row": conv(3, 8, 4, 2, transposed=True, stride=2, batch=1, length=6),
    "attention": lambda: F.scaled_dot_product_attention(*(randn(2, 4, 80, 32) for _ in range(3))),
    "attention, long": lambda: F.scaled_dot_product_attention(
        *(randn(1, 1, 900, 16) for _ in range(3)), is_causal=True
    ),
    "attention, masked": lambda: F.scaled_dot_product_attention(
        *(randn(2, 2, 50, 16) for _ in range(3)), attn_mask=torch.ones(50, 50).tril().bool()
    ),
    "linear": lambda: nn.Linear(300, 200)(randn(100, 300)),
    "matrix product of transposes": lambda: randn(50, 70).T @ randn(90, 50).T,
    "layer norm": lambda: nn.LayerNorm(200)(randn(100, 200)),
    "layer norm of a transpose": lambda: nn.LayerNorm(100)(randn(100, 200).T),
    "group norm": lambda: nn.GroupNorm(4, 32)(randn(4, 32, 10, 10)),
    "batch norm": lambda: nn.BatchNorm2d(32)(randn(4, 32, 10, 10)),
    "softmax of a transpose": lambda: randn(100, 200).T.softmax(-1),
    "cross entropy, channels last": lambda: F.cross_entropy(
        randn(4, 50, 9).transpose(1, 2), torch.zeros(4, 50).long() % 9
    ),
    "losses": lambda: F.mse_loss(randn(99, 9), randn(99, 9)) + F.huber_loss(randn(99), randn(99)),
    "mixed types": lambda: randn(100, 100) * (randn(100, 100) > 0) + randn(100, 100).to(torch.float64),
    "sum of truths": lambda: randn(1).sum() * (randn(100, 100) > 0).sum(),
    "pools": lambda: F.avg_pool2d(randn(2, 8, 32, 32), 2).sum() + F.max_pool2d(randn(2, 8, 32, 32), 2).sum(),
    "interpolation": lambda: F.interpolate(randn(2, 8, 16, 16), scale_factor=2, mode="bilinear"),
    "interpolation 3d": lambda: F.interpolate(randn(1, 4, 8, 8, 8), scale_factor=2, mode="trilinear"),
    "rows by mask": lambda: randn(100, 20)[torch.arange(100) % 2 == 0],
    "numbers by mask": lambda: randn(1000, 20)[(torch.arange(1000).unsqueeze(1) % 2 == 0).expand(1000, 20)],
    "rows written by mask": lambda: randn(1000, 20).index_put((torch.arange(1000) % 2 == 0,), randn(500, 20)),
    "selected numbers": lambda: randn(1000, 20).masked_select(torch.arange(1000).unsqueeze(1) % 2 == 0),
    "selected numbers of one row": lambda: randn(1, 20).masked_select(torch.arange(1000).unsqueeze(1) % 2 == 0),
    "scattered numbers": lambda: torch.zeros(1000, 20).masked_scatter(torch.arange(20) % 2 == 0, randn(1000, 10)),
    "embedding bag": lambda: nn.EmbeddingBag(500, 16)(torch.arange(300) % 77, torch.arange(0, 300, 7)),
    "distances": lambda: torch.cdist(randn(60, 3), randn(50, 3)),
    "lstm": lambda: nn.LSTM(20, 40, 2)(randn(9, 5, 20))[0],
    "matrix exponential": lambda: torch.matrix_exp(randn(120, 120) / 120),
    "eigenvalues": lambda: torch.linalg.eigvalsh(positive(120)),
    "eigenvalues of any matrix": lambda: torch.linalg.eigvals(randn(60, 60)).abs(),
    "singular values": lambda: torch.linalg.svdvals(randn(120, 60)),
    "pseudoinverse": lambda: torch.linalg.pinv(randn(120, 60)),
    "qr": lambda: torch.linalg.qr(randn(200, 100))[0],
    "cholesky": lambda: torch.cholesky_solve(randn(90, 20), torch.linalg.cholesky(positive(90))),
    "inverse": lambda: torch.linalg.inv(positive(120)) + torch.linalg.solve(positive(120), randn(120, 120)),
    "determinant": lambda: torch.linalg.slogdet(positive(90))[1] + torch.linalg.det(positive(30)),
    "triangular": lambda: torch.linalg.solve_triangular(positive(90).tril(), randn(90, 30), upper=False),
    "order statistics": lambda: randn(90, 90).kthvalue(3, dim=1)[0].sum() + randn(90, 90).median(),
    "members": lambda: torch.isin(torch.arange(9000), torch.arange(300)) * randn(9000),
    "distinct": lambda: randn(90, 90) * len((torch.rand(90, 90) * 9).long().unique()),
    "log of a sum": lambda: randn(90, 90).logsumexp(1).sum() + torch.dist(randn(90, 90), randn(90, 90)),
    "shifted windows": lambda: randn(4, 60, 60).roll((3, 3), (1, 2)) + randn(4, 60, 60).roll(3, 1),
    "warped volumes": lambda: F.grid_sample(randn(2, 3, 12, 12, 12), randn(2, 12, 12, 12, 3), align_corners=False),
    "warped images": lambda: F.grid_sample(randn(2, 3, 40, 40), randn(2, 40, 40, 2), align_corners=False),
    "padded": lambda: F.pad(randn(2, 3, 40, 40), (2, 2, 2, 2), mode="reflect"),
    "resized": lambda: F.interpolate(randn(2, 3, 40, 40).transpose(2, 3), scale_factor=2),
    "resized volumes": lambda: F.interpolate(randn(2, 3, 9, 9, 9), scale_factor=2),
    "resized by curves": lambda: F.interpolate(randn(2, 3, 40, 40), scale_factor=2, mode="bicubic"),
    "resized lines": lambda: F.interpolate(randn(2, 3, 90), scale_factor=2, mode="linear"),
    "made smaller": lambda: F.interpolate(randn(2, 3, 90, 90), size=(40, 40), mode="bilinear", antialias=True),
    "bilinear form": lambda: F.bilinear(randn(90, 20), randn(90, 30), randn(10, 20, 30)),
    "gathered": lambda: randn(90, 90).gather(1, torch.arange(8100).view(90, 90).T.remainder(90)),
    "unfolded": lambda: F.unfold(randn(2, 3, 40, 40).expand(2, 3, 40, 40), 3).sum() + randn(90).unfold(0, 8, 2).sum(),
    "inverse of a spectrum": lambda: torch.fft.irfft2(torch.fft.rfft2(randn(4, 60, 60))).square(),
    "soft margin": lambda: F.soft_margin_loss(randn(90, 90), torch.ones(90, 90)),
    "complex": lambda: torch.einsum("bik,iok->bok", torch.fft.rfft(randn(4, 8, 64)), randn(8, 8, 33) + 0j).abs(),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_workspace_stays_below_its_bound(precision, threads):
    over = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, call in CALLS.items():
            marks = Bounds()
            with Recorder(marks=marks):
                (half(call) if precision == "bfloat16" else call)().sum().backward()
            for found in marks._workspaces:
                if found.nbytes > marks.bounds[id(found.call)] + NUMBERS:
                    over[name, str(found.call.operator)] = found.nbytes, marks.bounds[id(found.call)]
    finally:
        torch.set_num_threads(num_threads)
    assert over == {}


def test_zero_bound_means_no_workspace():
    x, y = torch.randn(100, 100), torch.randn(100, 100)
    aten = torch.ops.aten
    assert workspace_bound(aten.mul.Tensor, (x, y), x * y) == workspace_bound(aten.mm.default, (x, y), x @ y) == 0
    assert workspace_bound(aten.mul.Tensor, (x, y > 0), x) == 4 * 100 * 100  # the truths become numbers first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(12, 4, 8, 16), (50, 32, 64, 128), (12, 4, 40, 16), (12, 4, 100, 256), (7, 8, 256, 64), (5, 3, 65, 65)]
)
def test_recurrent_layer_saved_tensors(sizes, dtype):
    num_steps, num_rows, width_in, width = sizes

    def kept():
        layer = nn.LSTM(width_in, width, dtype=dtype)
        x = torch.randn(num_steps, num_rows, width_in, dtype=dtype)
        state = torch.zeros(num_rows, width, dtype=dtype)
        arguments = (x, *layer._flat_weights, state, state, False, [], 2, width, 1, True, False, False, True)
        workspace = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)[3]
        return 0 if workspace is None else workspace.untyped_storage().nbytes()

    real = kept()
    assert real > 0
    with Host().make_tensors(None):
        assert kept() == real
    with torch.no_grad():
        assert kept() == 0
        with Host().make_tensors(None):
            assert kept() == 0


@pytest.mark.parametrize("sizes", [(50, 32, 64, 128), (200, 8, 32, 64), (12, 4, 100, 256), (1, 1, 1, 1)])
def test_recurrent_layer_workspace_without_graph(sizes):
    num_steps, num_rows, width_in, width = sizes
    layer, x = nn.LSTM(width_in, width), torch.randn(num_steps, num_rows, width_in)
    with torch.no_grad():
        layer(x)
        real = trace_allocations(lambda: layer(x)).peak
        simulation = Simulation(Host())
        with simulation.running(layer, x) as (fake_layer, fake_x), simulation.watch() as watch:
            fake_layer(fake_x)
        record = watch.record()
    held = x.nbytes + sum(each.nbytes for each in layer.parameters())
    assert record.recording.peak_bytes() - held <= real <= record.highest_bytes - held


RESULTS = {
    **{
        f"{loss.__name__}, {reduction}": functools.partial(
            lambda loss, reduction: loss(torch.rand(20, 3), torch.rand(20, 3), reduction=reduction), loss, reduction
        )
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy,
                     F.soft_margin_loss, F.binary_cross_entropy_with_logits)
        for reduction in ("none", "mean", "sum")
    },
    **{
        f"grouped product, {name}, {dtype}": functools.partial(
            lambda x, y, offsets, dtype: torch.ops.aten._grouped_mm(
                torch.randn(x, dtype=dtype), torch.randn(y, dtype=dtype).mT, offsets and torch.tensor(offsets).int()
            ),
            x, y, offsets, dtype,
        )
        for dtype in (torch.float32, torch.bfloat16)
        for name, (x, y, offsets) in {
            "rows": ((20, 64), (3, 90, 64), [5, 5, 20]),
            "both": ((4, 9, 64), (4, 90, 64), None),
            "depth": ((40, 32), (64, 32), [8, 8, 32]),
        }.items()
    },
    "ctc": lambda: torch.ops.aten._ctc_loss(
        torch.randn(9, 2, 6), torch.ones(2, 7).long(), torch.tensor([9, 8]), torch.tensor([4, 7])
    ),
    "selected numbers": lambda: torch.randn(20, 20).masked_select(torch.arange(20).unsqueeze(1) % 3 == 0),
    "embedding bag": lambda: torch.ops.aten._embedding_bag(
        torch.randn(9, 4), torch.arange(9), torch.arange(0, 9, 3), False, 1
    ),
    **{
        f"{name}, {dtype}": functools.partial(
            lambda norm, dtype: norm(torch.randn(4, 8, 6).to(dtype)), norm, dtype
        )
        for dtype in (torch.float32, torch.bfloat16)
        for name, norm in {
            "layer norm": lambda x: torch.ops.aten.native_layer_norm(x, [6], torch.ones(6), torch.ones(6), 1e-5),
            "layer norm, plain": lambda x: torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5),
            "group norm": lambda x: torch.ops.aten.native_group_norm(x, torch.ones(8), torch.ones(8), 4, 8, 6, 2, 1e-5),
            "batch norm": lambda x: torch.ops.aten.native_batch_norm(
                x, torch.ones(8), torch.ones(8), torch.ones(8), torch.ones(8), True, 0.1, 1e-5
            ),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_as_large_as_the_kernels_make_them(name):
    def sizes():
        return [tensor.untyped_storage().nbytes() for tensor in tree_leaves(RESULTS[name]())]

    real = sizes()
    with Host().make_tensors(None):
        assert sizes() == real
