"""Every mode gives the whole network's result and gradients; a network that cannot be cut is refused, or run whole."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.autograd import forward_ad

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.chunk.sparse import SparsityAwareProcessor
from tests.allocations import count_flops, trace_allocations
from tests.chunk.nets import Padding, UNet
from tests.chunk.scenes import brain_mask, cortex
from tests.helpers import assert_refused, assert_same, one_in, one_in_product
from tests.toys import out_of_memory

conv = nn.Conv3d


def same(num_in, num_out, **kwargs):
    return conv(num_in, num_out, 3, padding=1, **kwargs)


def pointwise_net():
    return nn.Sequential(conv(2, 8, 1), nn.BatchNorm3d(8).eval(), nn.GELU(), conv(8, 3, 1))


def make_nets():
    act = nn.GELU
    return {
        "stack": nn.Sequential(same(2, 3), act(), conv(3, 3, 5, padding=2), act(), conv(3, 2, 1)),
        "reflect": nn.Sequential(same(2, 3, padding_mode="reflect"), act(), same(3, 2, padding_mode="replicate")),
        "no padding, stride": nn.Sequential(conv(2, 3, (3, 5, 1)), act(), conv(3, 2, 3, stride=2, padding=1)),
        "transposed": nn.Sequential(same(2, 3), act(), nn.ConvTranspose3d(3, 2, 4, 2, 1)),
        "u-net": nn.Sequential(conv(2, 1, 1), UNet(nn.Conv3d, nn.ConvTranspose3d)),
        "without background": nn.Sequential(same(2, 3, bias=False), act(), same(3, 2, bias=False)),
    }


torch.manual_seed(0)
NETS = {name: net.double() for name, net in make_nets().items()}  # one of each: margins are looked for once


SLOW = {"transposed", "u-net"}


def brain(channels=2):
    """(1, channels, 28, 24, 26), float64: a part of a real mask, empty around."""
    mask = brain_mask(8)[:, :, 1:]
    assert mask.shape[0] >= 24
    volume = torch.zeros(1, channels, 28, 24, 26, dtype=torch.float64)
    corner = mask[:12, 6:14, 4:14]
    volume[0, :, 8:20, 9:17, 7:17] = torch.randn(channels, *corner.shape, dtype=torch.float64) * corner
    return volume


def errors(net, volume, **choices):
    """Largest error of the result, and of each parameter's gradient, against the whole volume; and the plan."""
    processor = SparsityAwareProcessor(net, **choices)
    params = list(net.parameters())
    expected, found = net(volume), processor(volume)
    upstream = torch.randn_like(expected)
    pairs = zip(
        (found.detach(), *torch.autograd.grad(found, params, upstream)),
        (expected.detach(), *torch.autograd.grad(expected, params, upstream)),
        strict=True,
    )
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs], processor.last_plan


def test_pointwise_equals_the_whole():
    found, plan = errors(pointwise_net().double(), brain())
    assert max(found) <= 1e-12
    assert plan.mode == "pointwise"
    assert plan.computed == plan.occupancy < 0.05
    assert plan.why.startswith("it computes")


def test_filling_empty_space_with_zeros_is_wrong():
    """The naive way: the network of zero is not zero, and empty voxels have a share in the parameters' gradient."""
    net, volume = pointwise_net().double(), brain()
    voxels = SparseVoxels.from_dense(volume)
    params = list(net.parameters())
    whole = net(volume)
    naive = voxels.with_features(net(voxels.features.t()[None, :, :, None, None])[0, :, :, 0, 0].t()).to_dense()
    assert float((naive - whole).detach().abs().max()) > 0.1
    expected, found = (torch.autograd.grad(y.square().mean(), params) for y in (whole, naive))
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)) > 0.5


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *one_in_product(3, [each for each in NETS if each not in SLOW], ["blocks", "bbox"]),
        *[pytest.param(*each, marks=pytest.mark.slow) for each in itertools.product(sorted(SLOW), ["blocks", "bbox"])],
    ],
)
def test_parts_equal_the_whole(name, mode):
    found, plan = errors(NETS[name], brain(), mode=mode, block_size=6)
    assert max(found) <= 1e-12
    assert plan.mode == mode


def test_a_box_without_margin_is_wrong():
    net, volume = NETS["stack"], brain()
    naive = net(volume[:, :, 8:20, 9:17, 7:17])
    assert (naive - net(volume)[:, :, 8:20, 9:17, 7:17]).detach().abs().max() > 1e-2


@pytest.mark.parametrize(("mode", "size"), one_in_product(6, ["blocks", "bbox"], [26, 28, 30]))
def test_padding_to_a_multiple(mode, size):
    """Parts have the remainders of the volume by the multiple to which the module pads."""
    torch.manual_seed(0)
    net = Padding(nn.Sequential(same(1, 4), nn.Tanh(), same(4, 1)).double(), 4, is_centered=size == 30)
    processor = SparsityAwareProcessor(net, mode=mode, block_size=5)
    for last in range(8, size, 3):
        volume = torch.zeros(1, 1, size, size, size, dtype=torch.float64)
        volume[..., 6 : last + 1, 6 : last + 1, last - 2 : last + 1] = 1
        assert_same(processor(volume), net(volume), 1e-12)


@pytest.mark.slow
@given(
    sizes=st.sampled_from([(9, 12, 17), (8, 16, 11)]),
    block_size=st.integers(1, 9),
    places=st.lists(st.tuples(*[st.integers(0, 16)] * 3), max_size=4),
    name=st.sampled_from(["stack", "no padding, stride"]),
    mode=st.sampled_from(["blocks", "bbox"]),
)
@settings(max_examples=25, deadline=None)
def test_any_position_of_voxels(sizes, block_size, places, name, mode):
    """At borders, in corners, one in each sample, or none."""
    volume = torch.zeros(2, 2, *sizes, dtype=torch.float64)
    for number, place in enumerate(places):
        volume[number % 2, :, place[0] % sizes[0], place[1] % sizes[1], place[2] % sizes[2]] = 1.0 + number
    found, _ = errors(NETS[name], volume, mode=mode, block_size=block_size)
    assert max(found) <= 1e-12


@pytest.mark.parametrize("mode", one_in(2, ["pointwise", "bbox", "blocks", "dense", "auto"]))
def test_sparse_voxels_give_sparse_voxels(mode):
    net = pointwise_net().double() if mode == "pointwise" else NETS["stack"]
    volume = brain()
    voxels = SparseVoxels.from_dense(volume)
    voxels = voxels.with_features(voxels.features.detach().requires_grad_())
    processor = SparsityAwareProcessor(net, mode=mode)
    y = processor(voxels)
    whole = net(voxels.to_dense()).movedim(1, -1)[voxels.coords.unbind(1)]
    upstream, inputs = torch.randn_like(whole), [voxels.features, *net.parameters()]
    assert_same(y.features, whole, 1e-12)
    for a, b in zip(*(torch.autograd.grad(z, inputs, upstream) for z in (y.features, whole)), strict=True):
        assert_same(a, b, 1e-11)
    assert y.sites is voxels.sites


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = same(2, 4), nn.BatchNorm3d(4), conv(4, 2, 3, padding="same", dilation=2)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("mode", ["auto", "blocks", "bbox", "dense"])
def test_empty_volume(mode):
    net, volume = NETS["stack"], torch.zeros(2, 2, 16, 16, 16, dtype=torch.float64)
    processor = SparsityAwareProcessor(net, mode=mode)
    assert processor(SparseVoxels.from_dense(volume)).features.shape == (0, 2)
    assert_same(processor(volume), net(volume), 1e-12)
    assert processor.last_plan.occupancy == 0
    pointwise = SparsityAwareProcessor(pointwise_net().double())
    assert pointwise(SparseVoxels.from_dense(volume)).features.shape == (0, 3)


def test_half_precision_adds_the_empty_part_up_in_float32():
    """32768 empty voxels with a gradient of 1: bfloat16 stops to count at 256."""
    net = conv(1, 1, 3, padding=1).to(torch.bfloat16)
    volume = torch.zeros(1, 1, 32, 32, 32, dtype=torch.bfloat16)
    volume[0, 0, 3, 3, 3] = 1
    SparsityAwareProcessor(net, mode="blocks")(volume).sum().backward()
    assert float(net.bias.grad) == pytest.approx(32768, rel=0.01)


class OwnNoise(nn.Module):
    """Draws from a generator that it holds."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(1, generator=self.generator).item()


class DropoutByHand(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x)


def test_detects_noise_from_module_generator():
    net = nn.Sequential(same(2, 4), OwnNoise())
    processor = SparsityAwareProcessor(net)
    processor(brain().float())
    assert processor.last_plan.mode == "dense"
    state = net[1].generator.get_state()
    assert not torch.equal(state, torch.Generator().get_state())  # the run itself has drawn
    net[1].generator = torch.Generator()
    net(brain().float())
    assert torch.equal(net[1].generator.get_state(), state)  # and nothing else


def test_mostly_full_volume_runs_dense():
    net, volume = NETS["stack"], brain()
    auto = SparsityAwareProcessor(net)
    auto(volume)
    assert auto.last_plan.mode == "dense"
    assert auto.last_plan.why == "bbox would compute 64% of the volume"


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(same(2, 4), nn.GroupNorm(2, 4)), "depends on the whole of dimension"),
        (nn.Sequential(same(2, 4), nn.BatchNorm3d(4)), "changes its buffer `1.running_mean`"),
        (nn.Sequential(conv(2, 4, 1), nn.Dropout(0.5)), r"draws random numbers \(dropout\)"),
        (nn.Sequential(same(2, 4), DropoutByHand()), r"draws random numbers \(dropout\)"),
    ],
    ids=["GroupNorm", "BatchNorm", "Dropout", "dropout by hand"],
)
def test_unsplittable_network_runs_whole_or_is_rejected(net, reason):
    volume = brain().float()
    processor = SparsityAwareProcessor(net)
    state = torch.get_rng_state()
    y = processor(volume)
    assert processor.last_plan.mode == "dense"
    assert reason.replace("\\", "") in processor.last_plan.why
    torch.set_rng_state(state)
    assert_same(y, net(volume))
    assert_refused(lambda: SparsityAwareProcessor(net, mode="blocks")(volume), InputError, reason)


class Choosy(nn.Module):
    """Rejects the input of the probe, as layers that check their input do."""

    def __init__(self, num_samples=1, refused=None):
        super().__init__()
        self.layer, self.num_samples, self.refused = same(2, 4), num_samples, refused

    def forward(self, x):
        assert len(x) >= self.num_samples
        if x.shape[-1] == self.refused:
            raise ValueError("not so")
        return self.layer(x)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.Conv3d(2, 4, 16, stride=16), nn.InstanceNorm3d(4)).double(), "depends on the whole"),
        (Choosy(num_samples=2).double(), "does not run on a small volume"),
        (Choosy(refused=10).double(), r"does not run on a part of 10 positions of dimension -1 \(not so\)"),
    ],
    ids=["InstanceNorm", "an assertion", "a size"],
)
def test_net_rejecting_small_volumes_runs_whole(net, reason):
    volume = torch.zeros(2, 2, 32, 32, 32, dtype=torch.float64)
    volume[:, :, :3, :3, :3] = 1
    processor = SparsityAwareProcessor(net)
    assert_same(processor(volume), net(volume))
    assert processor.last_plan.mode == "dense"
    assert re.search(reason, processor.last_plan.why)


class Starved(Choosy):
    """Runs out of memory, on volumes of some lengths alone."""

    def forward(self, x):
        if self.refused is not None and x.shape[-1] == self.refused:
            out_of_memory()
        return self.layer(x)


@pytest.mark.parametrize("length", [16, 8, 10], ids=["where it is run", "where it is looked at", "of a part"])
def test_out_of_memory_does_not_mark_net_unsplittable(length):
    volume = torch.zeros(1, 2, 32, 32, 32, dtype=torch.float64)
    volume[:, :, :3, :3, :3] = 1
    processor = SparsityAwareProcessor(net := Starved(refused=length).double(), mode="blocks")
    with pytest.raises(torch.OutOfMemoryError):
        processor(volume)
    net.refused = None
    torch.testing.assert_close(processor(volume), net(volume))


def test_checks_layer_added_later():
    net = nn.Sequential(conv(2, 2, 3)).double()
    processor = SparsityAwareProcessor(net, mode="bbox")
    volume = brain()
    processor(volume)
    net[0] = conv(2, 2, 7).double()
    torch.testing.assert_close(processor(volume), net(volume))


def test_rejects_volume_requiring_gradient():
    """Empty voxels have a gradient too: parts would lose it."""
    net, volume = NETS["stack"], brain().requires_grad_()
    processor = SparsityAwareProcessor(net)
    (found,) = torch.autograd.grad(processor(volume).square().sum(), volume)
    (expected,) = torch.autograd.grad(net(volume).square().sum(), volume)
    torch.testing.assert_close(found, expected)
    assert found[volume == 0].any()
    assert "requires a gradient" in processor.last_plan.why
    with pytest.raises(InputError, match="which covers its empty voxels too"):
        SparsityAwareProcessor(net, mode="bbox")(volume)
    with torch.no_grad():
        SparsityAwareProcessor(net, mode="bbox")(volume)


def test_volumes_with_tangents_run_whole():
    """Those of empty voxels would be lost."""
    net, volume = NETS["stack"], brain()
    processor, tangent = SparsityAwareProcessor(net), torch.ones_like(volume)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(volume, tangent)
        found, expected = (forward_ad.unpack_dual(fn(dual)).tangent for fn in (processor, net))
        torch.testing.assert_close(found, expected)
        with pytest.raises(InputError, match="which covers its empty voxels too"):
            SparsityAwareProcessor(net, mode="bbox")(dual)


def test_auto_chooses_least_computed_volume():
    net = NETS["stack"]
    processor = SparsityAwareProcessor(net)
    corners = torch.zeros(1, 2, 40, 40, 40, dtype=torch.float64)
    corners[0, :, :3, :3, :3] = corners[0, :, -3:, -3:, -3:] = 1
    processor(corners)
    assert processor.last_plan.mode == "blocks"  # a box around both is the whole
    assert processor.last_plan.computed < 0.2
    one = corners.clone()
    one[0, :, -3:] = 0
    processor(one)
    assert processor.last_plan.mode == "bbox"
    processor(torch.ones_like(one))
    assert processor.last_plan.mode == "dense"
    assert "would compute" in processor.last_plan.why


def test_other_refusals():
    net, volume = NETS["stack"], brain()
    with pytest.raises(InputError, match=r"covers 3 \+ 3 voxels \(stride 1\)"):
        SparsityAwareProcessor(net, mode="pointwise")(volume)
    y = SparsityAwareProcessor(net, mode="bbox")(volume)
    with pytest.raises(StateError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), list(net.parameters()), create_graph=True)
    with pytest.raises(InputError, match="results of the volume's size"):
        SparsityAwareProcessor(NETS["no padding, stride"], mode="bbox")(SparseVoxels.from_dense(volume))
    with pytest.raises(InputTypeError, match=r"a floating point volume \(B, C, D, H, W\), or SparseVoxels"):
        SparsityAwareProcessor(net)(volume[0])
    with pytest.raises(InputTypeError, match=r"got a function; expected an nn\.Module"):
        SparsityAwareProcessor(lambda x: x)
    for settings_ in ({"mode": "sparse"}, {"block_size": 0}, {"block_size": "8"}, {"dense_threshold": 1.5}):
        with pytest.raises(ConfigError, match=rf"got {next(iter(settings_))}=.*; expected"):
            SparsityAwareProcessor(net, **settings_)


def test_memory_and_flops_follow_computed_volume():
    torch.manual_seed(0)
    net = nn.Sequential(conv(4, 64, 1), nn.GELU(), conv(64, 4, 1))
    voxels = SparseVoxels.from_coords(cortex(48), torch.randn(len(cortex(48)), 4), shape=(48, 48, 48))
    volume, processor = voxels.to_dense(), SparsityAwareProcessor(net)
    upstream = torch.randn_like(volume)

    def step(run):
        torch.autograd.grad(run(volume), list(net.parameters()), upstream)

    step(processor)
    assert trace_allocations(lambda: step(net)).peak > 10 * trace_allocations(lambda: step(processor)).peak
    assert count_flops(lambda: step(net)) > 10 * count_flops(lambda: step(processor))


@pytest.mark.parametrize("mode", ["auto", "pointwise", "blocks", "bbox"])
def test_an_empty_batch_runs_whole(mode):
    conv, volume = nn.Conv3d(1, 2, 3, padding=1), torch.zeros(0, 1, 8, 8, 8)
    processor = SparsityAwareProcessor(conv, mode=mode)
    assert_same(processor(volume), conv(volume))
    assert processor.last_plan.mode == "dense"


@pytest.mark.parametrize("mode", ["auto", "pointwise", "blocks", "bbox"])
def test_inside_of_transforms_the_whole_volume_runs_or_the_call_is_refused(mode):
    net, volume = (pointwise_net() if mode == "pointwise" else same(2, 3)).double(), brain()
    processor = SparsityAwareProcessor(net, mode=mode)

    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return processor(x)

    through = Through()
    weights = {name: each.detach() for name, each in through.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(through, weights, (volume,)).square().mean()

    if mode == "auto":
        found = torch.func.grad(loss)(weights)
        expected = torch.autograd.grad(net(volume).square().mean(), list(net.parameters()))
        torch.testing.assert_close(list(found.values()), list(expected))
        assert "inside a transform of torch.func" in processor.last_plan.why
    else:
        with pytest.raises(InputError, match=r'inside a transform of torch.func.*pass mode="dense"\.$'):
            torch.func.grad(loss)(weights)
    processor(volume)  # nothing of it was kept
    assert processor.last_plan.mode == ("bbox" if mode == "auto" else mode)
