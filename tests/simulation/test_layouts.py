"""Strides and storages of results and gradients, without data, are those of the CPU's kernels in any layout."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._simulation.host import INSTEAD, RESULTS
from memkit._simulation.tensors import Tensors
from tests.allocations import trace_allocations
from tests.toys import mean_square


def normalized(x, *, training):
    num = x.shape[1]
    return F.batch_norm(x, torch.zeros(num), torch.ones(num), torch.ones(num), torch.zeros(num), training=training)


IMAGES, ROWS = (4, 6, 5, 3), (4, 6, 5)
# What torch's shape functions lay out in another way, or leave too small a storage.
CORRECTED = {
    "batch norm of rows": (lambda x: normalized(x, training=True), (4, 6)),
    "batch norm of sequences": (lambda x: normalized(x, training=True), ROWS),
    "batch norm of images": (lambda x: normalized(x, training=True), IMAGES),
    "batch norm in evaluation": (lambda x: normalized(x, training=False), IMAGES),
    "batch norm of volumes": (lambda x: normalized(x, training=True), (2, 3, 4, 5, 2)),
    "log sigmoid": (F.logsigmoid, ROWS),
    "log softmax": (lambda x: x.log_softmax(1), ROWS),
    "unfold": (lambda x: F.unfold(x, 2), IMAGES),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (4, 8, 4)),
    "mse": (lambda x: F.mse_loss(x, x.detach(), reduction="none"), ROWS),
    "smooth l1": (lambda x: F.smooth_l1_loss(x, x.detach(), reduction="none"), ROWS),
    "huber": (lambda x: F.huber_loss(x, x.detach(), reduction="none"), ROWS),
    "elu": (F.elu, ROWS),
    "softplus": (F.softplus, ROWS),
    "relu6": (F.relu6, IMAGES),
    "hardswish": (F.hardswish, ROWS),
    "hardsigmoid": (F.hardsigmoid, IMAGES),
}
OTHERS = {
    "relu": (F.relu, ROWS),
    "gelu": (F.gelu, IMAGES),
    "silu": (F.silu, ROWS),
    "leaky relu": (F.leaky_relu, ROWS),
    "glu": (lambda x: F.glu(x, 1), ROWS),
    "softmax": (lambda x: x.softmax(1), ROWS),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), ROWS),
    "group norm": (lambda x: F.group_norm(x, 2), IMAGES),
    "instance norm": (F.instance_norm, IMAGES),
    "linear": (lambda x: F.linear(x, torch.ones(3, x.shape[-1])), ROWS),
    "product": (lambda x: torch.bmm(x, x.transpose(1, 2)), ROWS),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), IMAGES),
    "convolution": (lambda x: F.conv2d(x, torch.ones(3, x.shape[1], 2, 2)), IMAGES),
    "transposed convolution": (lambda x: F.conv_transpose2d(x, torch.ones(x.shape[1], 3, 2, 2)), IMAGES),
    "max pooling": (lambda x: F.max_pool2d(x, 2), IMAGES),
    "average pooling": (lambda x: F.adaptive_avg_pool2d(x, 2), IMAGES),
    "interpolation": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGES),
    "padding": (lambda x: F.pad(x, (1, 1), "reflect"), ROWS),
    "cat": (lambda x: torch.cat([x, x], 1), ROWS),
    "index": (lambda x: x[:, torch.tensor([0, 2])], ROWS),
    "gather": (lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)), ROWS),
    "max": (lambda x: x.max(1)[0], ROWS),
    "sort": (lambda x: x.sort(1)[0], ROWS),
    "cumsum": (lambda x: x.cumsum(1), ROWS),
    "variance": (lambda x: x.var(1), ROWS),
    "norm": (lambda x: F.normalize(x, dim=1), ROWS),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, 5, dtype=torch.long), reduction="none"), ROWS),
}
# Known to differ: leaky_relu and threshold of expanded inputs, prod, rrelu, max_unpool2d, channel_shuffle.


def layouts_of(shape):
    """Strides in a dozen orders of the dimensions, with the channels last among them, and of each second element."""
    orders = list(itertools.permutations(range(len(shape))))
    for order in {*orders[:: max(len(orders) // 12, 1)], (0, *range(2, len(shape)), 1)}:
        strides, stride = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim], stride = stride, stride * shape[dim]
        yield tuple(strides)
    yield torch.empty([2 * size for size in shape])[(slice(None, None, 2),) * len(shape)].stride()


def form(tensor):
    return tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def forms(function, shape, strides):
    """Those of the result, and of the gradient for incoming ones that are contiguous, expanded and reversed."""
    x = torch.empty_strided(shape, strides).requires_grad_()
    with torch.no_grad():
        x.fill_(0.5)
    y = function(x)
    last_first = range(y.dim())[::-1]
    incoming = torch.ones(y.shape), torch.ones(()).expand(y.shape), torch.ones(y.shape[::-1]).permute(*last_first)
    return [form(y), *(form(torch.autograd.grad(y, x, each, retain_graph=True)[0]) for each in incoming)]


@pytest.mark.parametrize(
    "name",
    [*CORRECTED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_are_the_kernels(name):
    function, shape = (CORRECTED | OTHERS)[name]
    for strides in layouts_of(shape):
        real = forms(function, shape, strides)
        with Tensors(results=RESULTS, instead=INSTEAD):
            found = forms(function, shape, strides)
        assert found == real, strides


class Transposed(nn.Module):
    """Normalizes channels of a sequence that has them last, as PatchTST does; the layers after it copy their input."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(self.layers[3](x).transpose(1, 2)).transpose(1, 2)
        return self.layers[0](y) * self.layers[1](y) * self.layers[2](y)


def test_copies_of_what_a_kernel_lays_out_anew_are_foretold():
    model, x = Transposed(), torch.randn(12, 8, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), x))
    held += sum(each.nbytes for state in optimizer.state.values() for each in state.values())
    peak = trace_allocations(step).peak
    estimate = mk.estimate_memory_usage(model, x, loss_fn=mean_square, optimizer=optimizer)
    assert estimate.peak_bytes <= held + peak <= estimate.peak_interval[1]
    assert held + peak - estimate.peak_bytes <= 64  # numbers that C++ wraps in tensors
