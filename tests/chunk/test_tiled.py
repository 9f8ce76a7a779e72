"""Tiles equal the whole in float64, forward and backward; a halo one short does not."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn

from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitWarning, StateError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.chunk.halo import find_reach
from memkit.chunk.sparse import SparsityAwareProcessor
from memkit.chunk.tiled import tiled_apply
from tests.allocations import trace_allocations
from tests.chunk.nets import UNet, exact_nets, refused_nets, same
from tests.helpers import assert_refused, assert_same, one_in_product


def gradients(y, inputs, upstream):
    """The result and the gradients, each as a share of its largest entry's size."""
    found = torch.autograd.grad(y, inputs, upstream, allow_unused=True)
    return [y.detach(), *found]


def largest_error(found, expected):
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(found, expected, strict=True)
    )


def both_ways(net, x, tile_size, **settings):
    """Largest error of result, input gradient and parameter gradients, tiles against the whole."""
    inputs = [x, *net.parameters()]
    y = net(x.clone())
    upstream = torch.randn_like(y)
    return largest_error(
        gradients(tiled_apply(net, x, tile_size, **settings), inputs, upstream), gradients(y, inputs, upstream)
    )


@pytest.mark.parametrize(("name", "tile_size"), one_in_product(2, exact_nets(), [5, (12, 9), (8, 99)]))
def test_equal_to_the_whole(name, tile_size):
    net, sizes = exact_nets()[name]
    x = torch.randn(2, 1, *sizes, dtype=torch.float64, requires_grad=True)
    assert both_ways(net.double(), x, tile_size) <= 1e-12


@pytest.mark.slow
def test_equal_to_the_whole_in_3d():
    net = UNet(nn.Conv3d, nn.ConvTranspose3d).double()
    x = torch.randn(1, 1, 24, 20, 26, dtype=torch.float64, requires_grad=True)
    assert both_ways(net, x, (6, 8, 8)) <= 1e-12
    assert both_ways(net, x, 8, dims=(-3,)) <= 1e-12
    assert both_ways(net, x, 8, dims=(2, 4)) <= 1e-12


@settings(max_examples=25)
@given(
    layers=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    size=st.integers(40, 75),
    tile=st.integers(1, 60),
)
@example(layers=[(3, 2, 1, 1, False), (4, 2, 1, 1, True)], size=41, tile=7)
def test_any_stack_of_convolutions(layers, size, tile):
    modules = []
    for kernel, stride, dilation, padding, is_transposed in layers:
        if is_transposed:
            modules.append(nn.ConvTranspose1d(1, 1, kernel, stride, 0, dilation=dilation))
        else:
            modules.append(nn.Conv1d(1, 1, kernel, stride, padding, dilation))
        modules.append(nn.GELU())
    net = nn.Sequential(*modules).double()
    x = torch.randn(1, 1, size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(tiled_apply(net, x, tile), net(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["stack", "dilated", "depthwise", "padding modes", "batch norm"])
def test_a_halo_one_short_is_wrong(name, monkeypatch):
    net, sizes = exact_nets()[name]
    x = torch.randn(2, 1, *sizes, dtype=torch.float64, requires_grad=True)
    found = find_reach(net.double(), x, (-2, -1))
    assert both_ways(net, x, 9) <= 1e-12
    short = {dim: replace(reach, before=reach.before - 1, after=reach.after - 1) for dim, reach in found.items()}
    monkeypatch.setattr("memkit.chunk.tiled.find_reach", lambda *_: short)
    assert both_ways(net, x, 9) > 1e-5


def test_padding_the_volume_by_the_halo_is_wrong():
    """The naive way: layers inside pad with zeros of their own, which a padded volume does not have."""
    net, sizes = exact_nets()["stack"]
    x = torch.randn(1, 1, *sizes)
    with torch.no_grad():
        naive = net(nn.functional.pad(x, [3] * 4))[..., 3:-3, 3:-3]
        assert (naive - net(x)).abs().max() > 1e-2
        torch.testing.assert_close(tiled_apply(net, x, 9), net(x))


def test_all_tiles_have_one_shape():
    """A small tile at the border may fall to a kernel that is slow and takes much memory."""
    net, sizes = exact_nets()["stack"]
    x = torch.randn(1, 1, *sizes, requires_grad=True)
    find_reach(net, x, (-2, -1))
    shapes = []
    net.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    tiled_apply(net, x, 9).sum().backward()
    assert len(set(shapes)) == 1
    assert len(shapes) == 2 * 5 * 4  # 37 and 30 places in tiles of at most 9, forward and backward


def test_dropout_is_repeated_in_backward():
    """With x the mask's own input, the gradient of the sum is the mask; another draw would give another."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(1, 1, 1, bias=False)).double()
    x = torch.ones(1, 1, 20, 20, dtype=torch.float64, requires_grad=True)
    y = tiled_apply(net, x, 8)
    torch.rand(7)
    after_forward = torch.get_rng_state()
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach(), rtol=0, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert 0.3 < (y == 0).double().mean() < 0.7


def test_autocast_is_repeated_in_backward():
    net = nn.Sequential(same(1, 4), nn.GELU(), same(4, 2))
    x = torch.randn(1, 1, 30, 30, requires_grad=True)
    dtypes = []
    net[1].register_forward_hook(lambda _, inputs, __: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled_apply(net, x, 10)
        assert y.dtype == torch.bfloat16
        dtypes.clear()
        plain = net(x)  # the weights' cast in this block still has its graph
    plain.float().sum().backward()
    expected = net[0].weight.grad.clone()
    net.zero_grad()
    dtypes.clear()
    y.float().sum().backward()
    assert set(dtypes) == {torch.bfloat16}
    torch.testing.assert_close(net[0].weight.grad, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_parameters_get_one_gradient_per_call():
    """DDP counts gradients: a second one for the same parameter is an error there."""
    net = nn.Sequential(same(1, 2), nn.GELU(), same(2, 2))
    net.unused = nn.Parameter(torch.zeros(3))
    net[2].bias.requires_grad_(False)
    runs, posts = [], []
    net[0].weight.register_hook(lambda gradient: runs.append(gradient))
    net[0].weight.register_post_accumulate_grad_hook(lambda _: posts.append(1))
    x = torch.randn(1, 1, 30, 30)
    tiled_apply(net, x, 8).sum().backward()
    assert len(runs) == len(posts) == 1
    assert net.unused.grad is None
    assert net[2].bias.grad is None
    torch.testing.assert_close(runs[0], net[0].weight.grad)


def test_gradients_of_half_precision_add_up_in_float32():
    net = nn.Conv2d(1, 1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(net.weight)
    x = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
    tiled_apply(net, x, 2).sum().backward()
    assert net.weight.grad.item() == 4096  # tile by tile in bfloat16 it stops at 1024


def test_second_derivatives_are_refused():
    net, sizes = exact_nets()["stack"]
    x = torch.randn(1, 1, *sizes, requires_grad=True)
    with pytest.raises(StateError, match=r"create_graph=True.*call module\(x\)"):
        torch.autograd.grad(tiled_apply(net, x, 9).sum(), x, create_graph=True)


def test_takes_memory_of_one_tile():
    net = nn.Sequential(same(1, 16), nn.GELU(), same(16, 16), nn.GELU(), same(16, 2))
    x = torch.randn(1, 1, 256, 256, requires_grad=True)
    with torch.no_grad():
        tiled_apply(net, x, 32)  # the first call looks for the reach

    def step(run):
        run(x).sum().backward()
        x.grad = None
        net.zero_grad()

    plain = trace_allocations(lambda: step(net)).peak
    tiled = trace_allocations(lambda: step(lambda x: tiled_apply(net, x, 32))).peak
    floor = 4 * 256 * 256 * (1 + 2)  # the input's gradient and the result
    assert tiled - floor < (plain - floor) / 15


@torch.no_grad()
def test_inference_with_online_reduction_on_another_device():
    net = nn.Sequential(same(1, 8), nn.GELU(), same(8, 40))
    x = torch.randn(1, 1, 128, 128)
    whole = net(x)
    labels = tiled_apply(net, x, 32, online_reduce=lambda y: y.argmax(1), output_device="cpu")
    assert torch.equal(labels, whole.argmax(1))
    assert tiled_apply(net, x, 32, output_device="meta").device.type == "meta"
    tracked = trace_allocations(lambda: tiled_apply(net, x, 32, online_reduce=lambda y: y.argmax(1)))
    assert tracked.peak < whole.nbytes / 2
    with pytest.raises(InputError, match="unchanged spatial dimensions"):
        tiled_apply(net, x, 32, online_reduce=lambda y: y.mean((2, 3)))


class Centered(nn.Conv2d):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


def test_a_dimension_that_no_tile_cuts_may_count_as_a_whole():
    net = Centered(1, 2, 3, padding=1).double()
    x = torch.rand(1, 1, 60, 8, dtype=torch.float64, requires_grad=True)
    assert both_ways(net, x, (16, 64)) <= 1e-12
    with pytest.raises(InputError, match="depends on the whole of dimension -1"):
        tiled_apply(net, x, (16, 4))


def test_a_tile_as_large_as_the_volume_is_one_call():
    net, _ = refused_nets()["group norm"]
    x = torch.randn(1, 1, 20, 20)
    assert_same(tiled_apply(net, x, 20), net(x))
    stack, _ = exact_nets()["stack"]
    with pytest.warns(MemkitWarning, match=r"halo \(3 \+ 3, 3 \+ 3\) is as large as the volume \(12, 12\)"):
        tiled_apply(stack, torch.randn(1, 1, 12, 12), 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": (-3,)}, r"distinct spatial dimensions out of \(-2, -1\)"),
        ({"dims": (-1, 3)}, "distinct spatial dimensions"),
        ({"tile_size": (1, 2, 3)}, "one int for each of the 2 dimensions"),
        ({"tile_size": 0}, "1 or more"),
        ({"tile_size": 8.5}, "1 or more"),
        ({"tile_size": "8"}, "1 or more"),
        ({"tile_size": np.array(8.5)}, "1 or more"),
        ({"online_reduce": lambda y: y}, "records gradients"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiled_apply(same(1, 2), torch.zeros(1, 1, 20, 20), **({"tile_size": 8} | settings))


def test_sizes_of_numpy_are_sizes():
    net, x = same(1, 2), torch.randn(1, 1, 20, 20)
    torch.testing.assert_close(tiled_apply(net, x, np.int64(8)), net(x))
    torch.testing.assert_close(tiled_apply(net, x, np.array([8, 4])), net(x))
    torch.testing.assert_close(tiled_apply(net, x, iter((8, 4))), net(x))


def test_forms():
    x = torch.zeros(1, 1, 20, 20)
    assert_refused(lambda: tiled_apply(torch.relu, x, 8), InputTypeError, r"an nn\.Module")
    assert_refused(lambda: tiled_apply(same(1, 2), x.long(), 8), InputTypeError, r"\(B, C, \*spatial\)")
    with pytest.raises(InputTypeError, match=r"pass a batch, of one: tiled_apply\(module, x\[None\], tile\)\[0\]"):
        tiled_apply(nn.Conv3d(1, 2, 3, padding=1), torch.rand(1, 9, 9, 9), 4)
    with pytest.raises(InputTypeError, match=r"returns a Tensor of shape \(1, 144\)"):
        tiled_apply(nn.Sequential(same(1, 1), nn.Flatten()), x[..., :12, :12], 8)


def test_rejects_tensor_without_gradient_path():
    net = nn.Sequential(same(1, 2))
    net.scale = torch.ones(1, requires_grad=True)
    with pytest.raises(InputError, match="attribute `scale` requires grad"):
        tiled_apply(net, torch.zeros(1, 1, 20, 20), 8)


class Foreground(nn.Module):
    """Normalizes by the mean and the deviation of what is above a threshold, as for CT in Hounsfield units."""

    def forward(self, x):
        above = x > 100
        return (x - x[above].mean()) / x[above].std() if above.any() else x


class Count(nn.Module):
    def forward(self, x):
        return x / (1 + (x > 100).sum())


class Window(nn.Module):
    """Looks at each voxel alone."""

    def forward(self, x):
        return torch.where(x > 100, x.log1p(), x.exp())


def net_after(head):
    layers = (nn.Conv3d(1, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1))
    return nn.Sequential(head, *layers).double()


def volume_with(num_bright, value=300.0):
    torch.manual_seed(0)
    volume = torch.zeros(1, 1, 24, 24, 24, dtype=torch.float64)
    places = torch.randperm(12**3)[:num_bright]
    box = torch.zeros(12**3, dtype=torch.float64)
    box[places] = value + torch.randn(num_bright, dtype=torch.float64)
    volume[0, 0, 4:16, 4:16, 4:16] = box.view(12, 12, 12)
    return volume


@pytest.mark.parametrize("head", [Foreground, Count])
@pytest.mark.parametrize("num_bright", [2, 800])
def test_modules_that_compute_over_a_foreground_are_refused(head, num_bright):
    net, volume = net_after(head()), volume_with(num_bright)
    assert_refused(lambda: tiled_apply(net, volume, 8), InputError, "tiles differ from the whole by")
    voxels = SparseVoxels.from_dense(volume)
    for run in (lambda processor: processor(volume), lambda processor: processor(voxels)):
        processor = SparsityAwareProcessor(net_after(head()), mode="blocks", block_size=4)
        assert_refused(functools.partial(run, processor), InputError, "tiles differ from the whole by")


@pytest.mark.parametrize("value", [300.0, 1e4])
def test_modules_with_a_threshold_for_each_voxel_are_not_refused(value):
    """With values of 1e4, exponentials of what lies below the threshold are numbers, and those above are not taken."""
    net, volume = net_after(Window()), volume_with(800, value)
    torch.testing.assert_close(tiled_apply(net, volume, 8), net(volume), rtol=1e-12, atol=1e-12)


def test_modules_that_overflow_between_the_values_are_not_refused():
    class Exponential(nn.Module):
        def forward(self, x):
            return x.exp() - 1

    net, volume = net_after(Exponential()), volume_with(800, 1e3)
    y = tiled_apply(net, volume, 8)
    torch.testing.assert_close(y, net(volume), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_volumes_of_one_value_and_volumes_with_nan_are_not_refused(value):
    net, volume = net_after(nn.Tanh()), volume_with(0)
    volume[..., 3, 5, 7] = value
    y = tiled_apply(net, volume, 8)
    torch.testing.assert_close(y, net(volume), rtol=1e-12, atol=1e-12, equal_nan=True)


MIXING_VOXELS = {
    "a scaling by the largest": lambda y: (y - y.min()) / (y.max() - y.min()),
    "a softmax over space": lambda y: y.flatten(2).softmax(2).view_as(y),
    "above the mean": lambda y: y > y.mean(),
    "smoothing": lambda y: nn.functional.avg_pool2d(y, 3, 1, 1, count_include_pad=False),
}


@pytest.mark.parametrize("reduce", MIXING_VOXELS.values(), ids=MIXING_VOXELS)
@torch.no_grad()
def test_a_reduction_that_compares_voxels_is_refused(reduce):
    net, x = nn.Conv2d(1, 3, 3, padding=1).double(), torch.randn(2, 1, 23, 17, dtype=torch.float64)
    assert_refused(
        lambda: tiled_apply(net, x, 8, online_reduce=reduce), InputError, "each voxel by itself", "result of"
    )


@torch.no_grad()
def test_reductions_of_channels_are_checked_without_a_trace():
    net, x = nn.Conv2d(1, 3, 3, padding=1).double(), torch.randn(2, 1, 23, 17, dtype=torch.float64)
    seen = []

    def labels(y):
        seen.append(y.shape)
        return y.sigmoid_().argmax(1)

    assert torch.equal(tiled_apply(net, x, 8, online_reduce=labels), net(x).argmax(1))
    assert len(seen) == 9  # tiles
    for reduce in (lambda y: y.softmax(1), lambda y: torch.stack([y.amax(1), y.sum(1)], 1), lambda y: y > 0):
        torch.testing.assert_close(tiled_apply(net, x, 8, online_reduce=reduce), reduce(net(x)))
    tiled_apply(net, x, 8, online_reduce=lambda y: torch.bernoulli(y.sigmoid()))  # random: cannot be compared
    several = lambda y: (y.argmax(1), y.amax(1))  # noqa: E731 - used once
    assert_refused(lambda: tiled_apply(net, x, 8, online_reduce=several), InputError, "tuple", "one tensor")
