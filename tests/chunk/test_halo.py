"""A module's receptive field: the right numbers, no trace, and an error that names the module that sees too much."""

import contextlib
import copy
import itertools
import queue
import re

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.errors import InputError
from memkit.chunk import halo
from memkit.chunk.halo import find_reach
from memkit.chunk.tiles import Reach
from tests.allocations import trace_allocations
from tests.chunk.nets import HiddenStride, Padding, UNet, exact_nets, refused_nets
from tests.helpers import assert_refused, assert_same, one_in_product
from tests.toys import out_of_memory

CASES = {
    "stack": Reach(3, 3, 1, 1),
    "dilated": Reach(3, 3, 1, 1),
    "padding modes": Reach(2, 2, 1, 1),
    "no padding": Reach(0, 4, 1, 1),
    "more padding": Reach(2, 0, 1, 1),
    "strided, odd sizes": Reach(3, 2, 2, 1),
    "stride 3": Reach(0, 0, 3, 3),
    "stride without looking": Reach(0, 0, 2, 1),
    "transposed": Reach(2, 2, 1, 2),
    "2 in, 3 out": Reach(2, 0, 2, 3),
    "pooling": Reach(3, 3, 2, 1),
    "1x1": Reach(0, 0, 1, 1),
    "u-net": Reach(5, 5, 2, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_reach(name):
    net, sizes = exact_nets()[name]
    assert find_reach(net, torch.zeros(2, 1, *sizes), (-2,))[-2] == CASES[name]


def test_each_dimension_has_its_own_reach():
    net = nn.Conv3d(1, 2, (3, 5, 1), stride=(1, 2, 1), padding=(1, 2, 0))
    found = find_reach(net, torch.zeros(1, 1, 20, 20, 20), (-3, -2, -1))
    assert found == {-3: Reach(1, 1), -2: Reach(2, 1, 2, 1), -1: Reach(0, 0)}


def test_dead_layers_hide_nothing():
    """Gradients of these networks are zero, so a reach found from them would be zero, too."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    nn.init.zeros_(net[2].weight)
    nn.init.constant_(net[0].bias, -100.0)
    assert find_reach(net, torch.zeros(1, 1, 20, 20), (-1,))[-1] == Reach(2, 2)


def test_stride_hidden_by_wider_layer():
    found = find_reach(HiddenStride(), torch.zeros(1, 1, 64), (-1,))[-1]
    assert (found.period, found.step) == (4, 4)


def test_four_poolings():
    layers = [nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.MaxPool1d(2)) for _ in range(4)]
    net = nn.Sequential(*layers, nn.Upsample(scale_factor=16))
    assert find_reach(net, torch.zeros(1, 1, 160), (-1,))[-1] == Reach(15, 15, 16, 16)


@pytest.mark.parametrize("name", refused_nets())
def test_refusal_names_the_culprit(name):
    net, message = refused_nets()[name]
    caught = assert_refused(lambda: find_reach(net, torch.zeros(1, 1, 36, 28), (-2, -1)), InputError, message)
    assert re.search(r"eval\(\)|sliding_window_inference|move that part out", str(caught))


def test_a_layer_over_tokens_may_be_the_culprit():
    """As the shifted windows of SwinIR, whose tokens have no rows and columns."""

    class Shifted(nn.Linear):
        def forward(self, x):
            _, _, height, width = x.shape
            tokens = self.tokens(x.flatten(2).transpose(1, 2), height, width)
            return self.back(tokens, height, width)

    class Roll(nn.Module):
        def forward(self, tokens, height, width):
            return tokens.unflatten(1, (height, width)).roll(1, 1).flatten(1, 2)

    class Back(nn.Module):
        def forward(self, tokens, height, width):
            return tokens.transpose(1, 2).unflatten(2, (height, width))

    net = Shifted(1, 1)
    net.tokens, net.back = Roll(), Back()
    with pytest.raises(InputError, match=r"first in `back` \(Back\), or a layer before it that sees tokens"):
        find_reach(net, torch.zeros(1, 4, 48, 16), (-2,))


def test_module_rejecting_the_input():
    with pytest.raises(InputError, match="does not accept an input of shape"):
        find_reach(nn.Conv2d(3, 1, 3), torch.zeros(1, 1, 20, 20), (-1,))


@pytest.mark.parametrize("num_calls", range(1, 7))
def test_reports_out_of_memory(num_calls):
    """Wherever in the search memory runs out, it does not count against the module."""
    net, calls = nn.Conv1d(1, 1, 3, padding=1), itertools.count(1)  # a list would be put back

    def fail(*_):
        if next(calls) == num_calls:
            out_of_memory()

    net.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        find_reach(net, torch.zeros(1, 1, 64), (-1,))
    assert find_reach(net, torch.zeros(1, 1, 64), (-1,))[-1] == Reach(1, 1)


def test_no_trace():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4).eval(), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))
    x = torch.rand(1, 1, 30, 30, requires_grad=True)
    before = copy.deepcopy(net.state_dict())
    modes, random = [each.training for each in net.modules()], torch.get_rng_state()
    versions = [each._version for each in (*net.parameters(), *net.buffers())]
    find_reach(net, x, (-2, -1))
    assert_same(dict(net.state_dict()), dict(before))
    assert [each.training for each in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert [each._version for each in (*net.parameters(), *net.buffers())] == versions
    assert all(each.grad is None for each in (x, *net.parameters()))
    assert not any(each._forward_hooks for each in net.modules())


def test_found_once_until_the_module_changes():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(0.1))
    calls = queue.SimpleQueue()  # a list would be put back
    net.register_forward_hook(lambda *_: calls.put(1))
    x = torch.zeros(1, 1, 30, 30)
    first = find_reach(net, x, (-1,))
    num_calls = calls.qsize()
    assert num_calls > 0
    assert find_reach(net, x, (-1,)) == first
    assert calls.qsize() == num_calls
    net[0] = nn.Conv2d(1, 2, 5, padding=2)
    assert find_reach(net, x, (-1,))[-1] == Reach(2, 2)


def test_ignores_memory_used_before():
    """Dropout allocates uninitialized memory: a NaN left in it is not a dependency."""
    net = nn.Sequential(nn.Conv3d(2, 4, 1), nn.Dropout(0.5))
    x = torch.zeros(1, 2, 16, 16, 16)
    for _ in range(5):
        left = [torch.full((2, 4, 8 << each, 3, 3), torch.nan) for each in range(6)]
        del left
        assert find_reach(copy.deepcopy(net), x, (-3,))[-3] == Reach(0, 0)


def test_few_bytes():
    net = UNet(nn.Conv3d, nn.ConvTranspose3d, width=8)
    x = torch.zeros(1, 1, 96, 96, 96)
    probe = trace_allocations(lambda: find_reach(net, x, (-3, -2, -1)))
    with torch.no_grad():
        whole = trace_allocations(lambda: net(x))
    assert probe.peak < whole.peak / 4


class FarSeeing(nn.Module):
    """Four poolings: a halo of about a hundred voxels on each side."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU()) for _ in range(5))
        self.up = nn.ModuleList(nn.Conv2d(2, 1, 3, padding=1) for _ in range(4))

    def forward(self, x):
        skips = []
        for number, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x


class Resizing(nn.Module):
    """Pools, and resizes to the size before: by another factor than the pooling's if that leaves a remainder."""

    def __init__(self, pooling, mode):
        super().__init__()
        self.pooling, self.mode = pooling, mode
        self.first, self.inner, self.last = (nn.Conv1d(*each, padding=1) for each in ((1, 3, 3), (3, 3, 3), (6, 2, 3)))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        small = torch.tanh(self.inner(nn.functional.max_pool1d(x, self.pooling)))
        return self.last(torch.cat([x, nn.functional.interpolate(small, size=x.shape[2:], mode=self.mode)], 1))


@pytest.mark.parametrize("mode", ["nearest", "area", "linear"])
def test_resizing_to_a_size_with_a_remainder_is_equal_or_refused(mode):
    """A pooling by 3 and a remainder of 2; one of 1 shifts what is nearest alike in the whole and in each tile."""
    net = Resizing(3, mode).double()
    refused = {}
    for size in (51, 50, 52, 115, 117, 122):  # 115 is 51 and 64
        x = torch.randn(1, 1, size, dtype=torch.float64)
        try:
            torch.testing.assert_close(mk.tiled_apply(net, x, 24), net(x), rtol=0, atol=1e-12)
        except InputError as error:
            refused[size] = str(error)
    assert refused.keys() == ({50, 52, 115, 122} if mode == "linear" else {50, 122})
    for size, message in refused.items():
        assert "tiles differ from the whole" in message
        assert f"pad the volume from {size} to {size + -size % 3}" in message


def convolutions():
    return nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1)).double()


@pytest.mark.parametrize(
    ("multiple", "is_centered", "mode"),
    one_in_product(5, [2, 3, 5, 7, 9, 16], [False, True], ["constant", "replicate"]),
)
def test_padding_to_a_multiple_decides_about_the_period(multiple, is_centered, mode):
    """NaN shows a period of 1, but what is beyond the ends depends on the remainder by the multiple."""
    torch.manual_seed(0)
    net = Padding(convolutions(), multiple, is_centered=is_centered, mode=mode)
    for size in (61, 62, 63, 64, 100, 131):
        x = torch.randn(1, 1, size, dtype=torch.float64)
        for tile in (8, 12, 17, 20):
            torch.testing.assert_close(mk.tiled_apply(net, x, tile), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("multiple", [5, 9, 17])
def test_padding_at_the_beginning_is_exact_or_refused(multiple):
    """Most sizes would pass with parts that have the remainders by other multiples alone."""
    num_exact = 0
    for size in (2 * multiple + 5, 343, 156, 193):
        torch.manual_seed(0)
        net = Padding(nn.Conv1d(1, 1, 5, padding=2).double(), multiple, is_centered=True, mode="replicate")
        x = torch.randn(1, 1, size, dtype=torch.float64)
        with contextlib.suppress(InputError):
            torch.testing.assert_close(mk.tiled_apply(net, x, size - 8), net(x), rtol=0, atol=1e-12)
            num_exact += 1
    assert num_exact > 1


@pytest.mark.parametrize(
    ("of_size", "pool"),
    one_in_product(3, [(9, 155, 51), (5, 204, 51), (6, 222, 60), (12, 228, 60)], [nn.MaxPool1d, nn.AvgPool1d]),
)
def test_pooling_after_padding_at_the_beginning(of_size, pool):
    multiple, size, tile = of_size
    """The grid begins where the padding does: the reach is that of volumes with the same remainder."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(4, 2, 3, padding=1)

        def forward(self, x):
            rest = -x.shape[-1] % multiple
            y = torch.tanh(self.first(nn.functional.pad(x, (rest, 0), mode="reflect")))
            low = nn.functional.interpolate(torch.tanh(pool(multiple)(y)), scale_factor=multiple)
            return torch.tanh(self.last(torch.cat([low, y], 1)))[..., rest:]

    for seed in range(3):
        torch.manual_seed(seed)
        net, x = Pooled().double(), torch.randn(1, 1, size, dtype=torch.float64)
        torch.testing.assert_close(mk.tiled_apply(net, x, tile), net(x), rtol=0, atol=1e-12)


def test_tiles_with_remainders_of_their_own_would_be_wrong(monkeypatch):
    """The negative control."""
    net, x = Padding(convolutions(), 4), torch.randn(1, 1, 61, dtype=torch.float64)
    monkeypatch.setattr("memkit.chunk.halo._fitted", lambda module, x, dim, reach, *_: reach)
    assert (mk.tiled_apply(net, x, 8) - net(x)).abs().max() > 1e-3


def test_unets_padded_to_more_than_their_poolings():
    """Three poolings, and a volume padded to a multiple of 32."""
    layers = [nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Tanh(), nn.AvgPool1d(2)) for _ in range(3)]
    net = Padding(nn.Sequential(*layers, nn.Upsample(scale_factor=8), nn.Conv1d(1, 1, 3, padding=1)), 32).double()
    for size in (300, 301, 310, 320):
        x = torch.randn(1, 1, size, dtype=torch.float64, requires_grad=True)
        y, whole = mk.tiled_apply(net, x, 64), net(x)
        torch.testing.assert_close(y, whole, rtol=0, atol=1e-12)
        assert_same(*(torch.autograd.grad(each.square().sum(), x)[0].round(decimals=10) for each in (y, whole)))


def test_says_to_pad_a_volume_that_is_too_small_for_the_period():
    """The halo is 14 + 14, so that a period of 16 needs the whole volume."""
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 1, 15, padding=7), nn.Tanh(), nn.Conv1d(1, 1, 15, padding=7)
    net = Padding(nn.Sequential(*layers).double(), 16)
    x = torch.randn(1, 1, 47, dtype=torch.float64)
    with pytest.raises(InputError, match=r"tiles differ .* Way out: pad the volume from 47 to 48 before the call"):
        mk.tiled_apply(net, x, 5)


def test_a_part_that_the_module_does_not_accept_is_refused():
    class AtLeast(nn.Conv1d):
        def forward(self, x):
            if x.shape[-1] not in (8, 16, 32, 100, 200):
                raise ValueError("not of these sizes")
            return super().forward(x)

    net = AtLeast(1, 1, 1)
    with pytest.raises(InputError, match=r"does not run on a part of 50 positions of dimension -1 \(not of these"):
        mk.tiled_apply(net, torch.randn(1, 1, 200), 50)


def test_tiles_with_a_result_of_another_size_are_refused():
    with pytest.raises(InputError, match=r"tiles give a result of another size|no halo up to"):
        mk.tiled_apply(Resizing(4, "linear"), torch.randn(1, 1, 163), 32)


@pytest.mark.slow
def test_search_stops_early_at_whole_volume(monkeypatch):
    net, seen = FarSeeing(), queue.SimpleQueue()  # a list would be put back after each search
    net.register_forward_hook(lambda module, inputs, output: seen.put(inputs[0].numel()))

    def taken():
        return [seen.get() for _ in range(seen.qsize())]

    small, large = torch.rand(1, 1, 48, 48), torch.rand(1, 1, 560, 560)
    with torch.no_grad():
        with pytest.warns(mk.MemkitWarning, match=r"\(48 or more, 48 or more\) is as large as the volume"):
            whole = mk.tiled_apply(net, small, 16)
        torch.testing.assert_close(whole, net(small))
        assert len(taken()) - 1 <= 16
        # The same remainders of sizes: what was found for the small volume is not taken for the large one's.
        torch.testing.assert_close(mk.tiled_apply(net, large, 128), net(large))
        assert sum(size < large.numel() for size in taken()) > 20
        # The negative control: without the early end, the same search takes several times as many forwards.
        monkeypatch.setattr(halo, "_least_reach", lambda *_: 0)
        again = FarSeeing()
        again.register_forward_hook(lambda module, inputs, output: seen.put(inputs[0].numel()))
        find_reach(again, small, [-2, -1])
        assert len(taken()) > 60


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.keeps, self.aux = nn.Conv3d(2, 2, 3, padding=1), True, None

    def forward(self, x):
        y = self.conv(x)
        self.aux = y.square().mean() if self.keeps else y.square().mean().detach()
        return y


@pytest.mark.parametrize("call", ["tiles", "occupied parts"])
def test_a_loss_kept_in_an_attribute_is_warned_of_once_and_the_ways_out_work(call):
    net, x = nn.Sequential(WithLoss()).double(), torch.zeros(1, 2, 24, 24, 24, dtype=torch.float64)
    x[:, :, 4:7, 4:7, 4:7] = 1
    processor = mk.SparsityAwareProcessor(net)
    run = processor if call == "occupied parts" else lambda x: mk.tiled_apply(net, x, 8)
    with torch.no_grad():
        run(x)
    with pytest.warns(mk.errors.MemkitWarning, match=r"'0.aux'.*part of the volume.*self.aux = result.detach\(\)\.$"):
        y = run(x)
    ours = torch.autograd.grad(run(x).square().mean(), net[0].conv.weight)  # computed from the result
    net(x)
    torch.testing.assert_close(ours, torch.autograd.grad(net[0].aux, net[0].conv.weight))
    net[0].keeps = False
    torch.testing.assert_close(run(x), y)
