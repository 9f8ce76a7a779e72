"""Submanifold convolution is the dense one read at occupied voxels, in values and gradients, for less."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.chunk.submanifold import submanifold_conv3d
from tests.allocations import count_flops, trace_allocations
from tests.chunk.scenes import cortex


def dense(features, voxels, weight, bias, dilation):
    """The same by torch's convolution, read at the voxels."""
    padding = [(size - 1) // 2 * step for size, step in zip(weight.shape[2:], dilation, strict=True)]
    y = F.conv3d(voxels.with_features(features).to_dense(), weight, bias, padding=padding, dilation=dilation)
    return y.movedim(1, -1)[voxels.coords.unbind(1)]


def both_ways(coords, shape, kernel, dilation=(1, 1, 1), batch_size=1):
    """Largest error of result and gradients, as a share of the largest entry."""
    features = torch.randn(len(coords), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    voxels = SparseVoxels.from_coords(coords, features, shape=shape, batch_size=batch_size)
    upstream = torch.randn(len(coords), 2, dtype=torch.float64)
    sparse = submanifold_conv3d(voxels, weight, bias, dilation=dilation).features
    whole = dense(features, voxels, weight, bias, dilation)
    found, expected = (
        [y.detach(), *torch.autograd.grad(y, [features, weight, bias], upstream)] for y in (sparse, whole)
    )
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(found, expected, strict=True)
    )


@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    kernel=st.tuples(*[st.sampled_from([1, 3, 5])] * 3),
    dilation=st.tuples(*[st.integers(1, 3)] * 3),
    share=st.floats(0.05, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_equal_to_the_dense_convolution(sizes, kernel, dilation, share, seed):
    """Small volumes: most voxels are at a border, where a key without margin would find the row before."""
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(2, *sizes, generator=generator) < share).nonzero()
    coords = coords[torch.randperm(len(coords), generator=generator)]
    if len(coords):
        assert both_ways(coords, sizes, kernel, dilation, batch_size=2) <= 1e-12


@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3, 3), (1, 1, 1)), ((5, 3, 1), (1, 2, 1))])
def test_equal_on_a_real_surface(kernel, dilation):
    assert both_ways(cortex(32), (32, 32, 32), kernel, dilation) <= 1e-12


def test_neighbors_are_found_once_for_all_layers():
    voxels = SparseVoxels.from_coords(cortex(32), torch.randn(len(cortex(32)), 4), shape=(32, 32, 32))
    weight = torch.randn(4, 4, 3, 3, 3)
    once = submanifold_conv3d(voxels, weight)
    known = once.sites.pairs((3, 3, 3), (1, 1, 1))
    twice = submanifold_conv3d(once.with_features(once.features.relu()), weight)
    assert twice.sites is voxels.sites
    assert twice.sites.pairs((3, 3, 3), (1, 1, 1)) is known
    assert voxels.sites.pairs((3, 3, 3), (2, 1, 1)) is not known


def test_no_voxels():
    voxels = SparseVoxels.from_dense(torch.zeros(1, 3, 4, 4, 4))
    weight = torch.randn(2, 3, 3, 3, 3, requires_grad=True)
    y = submanifold_conv3d(voxels, weight, torch.ones(2))
    assert y.features.shape == (0, 2)
    (gradient,) = torch.autograd.grad(y.features.sum(), weight)
    assert not gradient.any()


def test_only_required_gradients_are_computed():
    features = torch.randn(len(cortex(32)), 2)
    voxels = SparseVoxels.from_coords(cortex(32), features, shape=(32, 32, 32))
    weight = torch.randn(2, 2, 3, 3, 3)
    assert not submanifold_conv3d(voxels, weight).features.requires_grad
    only = voxels.with_features(features.clone().requires_grad_())
    submanifold_conv3d(only, weight, torch.zeros(2)).features.sum().backward()
    assert only.features.grad is not None
    assert weight.grad is None


def test_half_precision_adds_up_in_float32():
    """A kernel of 125 places of ones: bfloat16 stops to count at 256."""
    coords = torch.ones(7, 7, 7).nonzero()
    voxels = SparseVoxels.from_coords(coords, torch.ones(343, 4, dtype=torch.bfloat16), shape=(7, 7, 7))
    y = submanifold_conv3d(voxels, torch.ones(1, 4, 5, 5, 5, dtype=torch.bfloat16))
    assert float(y.features.max()) == 500
    with torch.autocast("cpu", torch.bfloat16):
        y = submanifold_conv3d(voxels.with_features(torch.ones(343, 4)), torch.ones(1, 4, 5, 5, 5), torch.ones(1))
    assert y.features.dtype == torch.bfloat16
    assert float(y.features.max()) == 500  # 501 is no bfloat16


def test_memory_and_flops_at_a_real_surface():
    """The committed figures are in benchmarks/results/sparse_voxels.json; this guards against losing them by far."""
    coords = cortex(64, "infl_left")
    features = torch.randn(len(coords), 16, requires_grad=True)
    voxels = SparseVoxels.from_coords(coords, features, shape=(64, 64, 64))
    assert 0.0165 < voxels.occupancy < 0.0175
    conv = torch.nn.Conv3d(16, 16, 3, padding=1)
    volume, upstream = voxels.to_dense().detach().requires_grad_(), torch.randn_like(features)
    above = voxels.with_features(upstream).to_dense()

    def sparse():
        y = submanifold_conv3d(voxels, conv.weight, conv.bias)
        torch.autograd.grad(y.features, [features, *conv.parameters()], upstream)

    def whole():
        torch.autograd.grad(conv(volume), [volume, *conv.parameters()], above)

    sparse()  # finds the neighbors
    neighbors = sum(each.near.nbytes + each.far.nbytes for each in voxels.sites.pairs((3, 3, 3), (1, 1, 1)))
    assert trace_allocations(whole).peak >= 50 * (trace_allocations(sparse).peak + neighbors)
    assert count_flops(whole) > 30 * count_flops(sparse)


def test_second_derivatives_are_refused():
    voxels = SparseVoxels.from_coords(torch.tensor([[0, 0, 0]]), torch.ones(1, 1, requires_grad=True), shape=(1, 1, 1))
    y = submanifold_conv3d(voxels, torch.ones(1, 1, 3, 3, 3))
    with pytest.raises(StateError, match="create_graph=True"):
        torch.autograd.grad(y.features.sum(), voxels.features, create_graph=True)


def test_rejects_invalid_arguments():
    voxels = SparseVoxels.from_coords(torch.tensor([[0, 0, 0]]), torch.ones(1, 4), shape=(2, 2, 2))
    with pytest.raises(ConfigError, match=r"\(1, 4, 2, 2, 2\).*odd kernel sizes"):
        submanifold_conv3d(voxels, torch.ones(1, 4, 2, 2, 2))
    with pytest.raises(InputTypeError, match=r"got a Tensor; expected SparseVoxels.*from_dense"):
        submanifold_conv3d(torch.zeros(1, 4, 3, 3, 3), torch.zeros(1, 4, 3, 3, 3))
    with pytest.raises(ConfigError, match=r"dilation=0.*at least 1"):
        submanifold_conv3d(voxels, torch.ones(1, 4, 3, 3, 3), dilation=0)
    with pytest.raises(InputError, match=r"for features of 4 channels.*groups are not supported"):
        submanifold_conv3d(voxels, torch.ones(4, 2, 3, 3, 3))
    with pytest.raises(InputError, match=r"a bias of shape \(2,\)"):
        submanifold_conv3d(voxels, torch.ones(1, 4, 3, 3, 3), torch.ones(2))


def test_transforms_are_refused_and_the_way_out_works():
    coords, features = torch.tensor([[0, 0, 0], [1, 1, 1]]), torch.randn(2, 3, dtype=torch.float64)
    voxels = SparseVoxels.from_coords(coords, features, shape=(4, 4, 4))
    weight = torch.randn(2, 3, 3, 3, 3, dtype=torch.float64)

    def ours(weight):
        return submanifold_conv3d(voxels, weight).features.square().sum()

    def way_out(weight):
        return dense(features, voxels, weight, None, (1, 1, 1)).square().sum()

    message = r"inside a transform of torch.func.*conv3d on voxels.to_dense\(\), with padding\.$"
    for transform in (torch.func.grad, torch.func.jacrev, lambda fn: torch.func.vmap(fn, in_dims=0)):
        given = weight[None] if transform not in (torch.func.grad, torch.func.jacrev) else weight
        with pytest.raises(StateError, match=message):
            transform(ours)(given)
    tangent = torch.randn_like(weight)
    with pytest.raises(StateError, match=message):
        torch.func.jvp(ours, (weight,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, tangent)
        with pytest.raises(StateError, match="a tensor with a tangent"):
            ours(dual)
    leaf = weight.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(way_out)(weight), *torch.autograd.grad(ours(leaf), leaf))
