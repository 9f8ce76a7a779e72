"""What was found out about a function is found out again when its settings have changed, and not more often."""

import functools
import queue
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import memkit as mk
from tests.helpers import assert_refused

ROWS, VOLUME = torch.randn(100, 3).double(), torch.randn(1, 2, 32, 16, 16).double()
MIXES, GLOBAL = "depends on other rows", "depends on the whole of dimension"


@dataclass
class Settings:
    depth: int = 1
    gate: str = "none"


class Grown(nn.Module):
    """Layers of which more and more are used, as in progressive growing."""

    def __init__(self, layer):
        super().__init__()
        self.layers, self.settings, self.kept = nn.ModuleList(layer() for _ in range(4)), Settings(), {"gate": False}
        self.is_centered, self.act = False, torch.sin

    def forward(self, x, norm="none"):
        for each in self.layers[: self.settings.depth]:
            x = self.act(each(x))
        if self.is_centered or self.kept["gate"] or self.settings.gate == "mean":
            x = x * x.mean()
        return x - x.mean(0) if norm == "batch" else x


def rowwise():
    return Grown(lambda: nn.Linear(3, 3)).double()


def spatial():
    return Grown(lambda: nn.Conv3d(2, 2, 3, padding=1)).double()


def softmax(x):
    return torch.softmax(x, 0)


CHANGES = {
    "a flag": lambda net: setattr(net, "is_centered", True),
    "in a dict": lambda net: net.kept.update(gate=True),
    "in settings": lambda net: setattr(net.settings, "gate", "mean"),
    "another child": lambda net: net.layers.__setitem__(0, nn.Softmax(0)),
    "a function": lambda net: setattr(net, "act", softmax),
    "another child's child": lambda net: net.layers.__setitem__(0, nn.Sequential(nn.Softmax(0))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_checked_again_when_the_module_has_changed(name):
    net = rowwise()
    mk.chunked_map(net, ROWS, chunk_size=16)
    CHANGES[name](net)
    assert_refused(lambda: mk.chunked_map(net, ROWS, chunk_size=16), mk.errors.InputError, MIXES)


def test_rows_are_checked_again_with_other_arguments():
    net = rowwise()
    mk.chunked_map(net, ROWS, chunk_size=16)
    mk.chunked_map(net, ROWS, "none", chunk_size=16)
    assert_refused(lambda: mk.chunked_map(net, ROWS, "batch", chunk_size=16), mk.errors.InputError, MIXES)


def test_rows_are_checked_again_when_an_object_of_the_function_has_changed():
    class Renderer:
        def __init__(self):
            self.net, self.is_centered = rowwise(), False

        def shade(self, x):
            return x - x.mean(0) if self.is_centered else x

        def render(self, x):
            return self.shade(self.net(x))

    renderer = Renderer()

    def call():
        mk.chunked_map(renderer.render, ROWS, chunk_size=16, params=renderer.net.parameters())

    call()
    renderer.is_centered = True
    assert_refused(call, mk.errors.InputError, MIXES)


class Config:
    is_centered = False


class Reads(nn.Module):
    """Reads settings of its class, of another class, and of a file."""

    is_centered = False

    def __init__(self):
        super().__init__()
        self.net = rowwise()

    def forward(self, x):
        x = self.net(x)
        return x - x.mean(0) if self.is_centered or Config.is_centered or types.is_centered else x


@pytest.mark.parametrize("owner", [Config, types, Reads], ids=["class", "file", "its class"])
@pytest.mark.parametrize("is_module", [False, True], ids=["function", "module"])
def test_rows_are_checked_again_when_a_setting_of_a_class_or_file_has_changed(owner, is_module, monkeypatch):
    monkeypatch.setattr(types, "is_centered", False, raising=False)
    module = Reads()

    def function(x):
        x = module.net(x)
        return x - x.mean(0) if Reads.is_centered or Config.is_centered or types.is_centered else x

    def call():
        mk.chunked_map(module if is_module else function, ROWS, chunk_size=16, params=module.parameters())

    call()
    monkeypatch.setattr(owner, "is_centered", True)
    assert_refused(call, mk.errors.InputError, MIXES)


def test_a_module_defined_in_a_file_without_a_name():
    space = {"nn": nn}
    exec("class Unnamed(nn.Linear):\n    def forward(self, x): return super().forward(x)", space)
    module = space["Unnamed"](3, 2).double()
    assert_close(mk.chunked_map(module, ROWS, chunk_size=16), module(ROWS))


def test_tiles_see_farther_when_the_module_does():
    net = spatial()
    mk.tiled_apply(net, VOLUME, 8)
    net.settings.depth = 4
    assert_close(mk.tiled_apply(net, VOLUME, 8), net(VOLUME))
    net.is_centered = True
    assert_refused(lambda: mk.tiled_apply(net, VOLUME, 8), mk.errors.InputError, GLOBAL)


def test_occupied_parts_see_farther_when_the_module_does():
    volume, net = torch.zeros(1, 2, 24, 24, 24).double(), spatial()
    volume[:, :, 4:7, 4:7, 4:7] = 1
    processor = mk.SparsityAwareProcessor(net)
    for net.settings.depth in (1, 3):
        assert_close(processor(volume), net(volume))
        assert processor.last_plan.mode == "bbox"


class Field(nn.Module):
    """A neural field that evaluates several samples for each row."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.num_samples = 1

    def forward(self, rows):
        return several(self.net, rows, self.num_samples)


def several(net, rows, num_samples):
    return net(rows.repeat(1, num_samples).view(-1, 8)).view(len(rows), num_samples, 8).mean(1)


def attribute():
    field = Field()
    return field, lambda number: setattr(field, "num_samples", number)


def variable():
    net, number = Field().net, 1

    def change(other):
        nonlocal number
        number = other

    return lambda rows: several(net, rows, number), change


def entry():
    net, settings = Field().net, {"num_samples": 1}
    return lambda rows: several(net, rows, settings["num_samples"]), lambda number: settings.update(num_samples=number)


def own():
    field = types.SimpleNamespace(net=Field().net, num_samples=1)

    def render(self, rows):
        return several(self.net, rows, self.num_samples)

    return types.MethodType(render, field), lambda number: setattr(field, "num_samples", number)


@pytest.mark.parametrize("make", [attribute, variable, entry, own])
def test_a_budget_holds_when_a_number_has_changed(make):
    fn, change = make()
    x = torch.randn(5000, 8)
    processor = mk.ChunkedProcessor(fn, memory_budget="2MiB")
    for number in (1, 32):
        change(number)
        with torch.no_grad(), mk.Tracker(device="cpu") as tracker:
            y = processor(x)
        assert tracker.peak_bytes - x.nbytes - y.nbytes <= 2 * 2**20


class Matching(nn.Module):
    """Compares rows with keys, of which there may be more later: a memory bank, a codebook that grows."""

    def __init__(self, place):
        super().__init__()
        self.place, self.project = place, nn.Linear(8, 16)
        self.grow(20)

    def grow(self, num_keys):
        keys = torch.randn(num_keys, 16)
        if self.place == "buffer":
            self.register_buffer("keys", keys)
        else:
            self.keys = nn.Parameter(keys) if self.place == "parameter" else keys

    def forward(self, x):
        return (self.project(x) @ self.keys.T).softmax(1).square().sum(1, keepdim=True)


@pytest.mark.parametrize("place", ["parameter", "buffer", "attribute"])
def test_a_budget_holds_when_a_tensor_has_grown(place):
    net, x = Matching(place), torch.randn(5000, 8)
    processor = mk.ChunkedProcessor(net, memory_budget="1MiB")
    for num_keys in (20, 1000):
        net.grow(num_keys)
        with torch.no_grad(), mk.Tracker(device="cpu") as tracker:
            y = processor(x)
        assert tracker.peak_bytes - x.nbytes - y.nbytes - net.keys.nbytes <= 2**20


def test_rows_are_checked_again_when_a_norm_has_lost_its_statistics():
    net, x = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval(), torch.randn(300, 5)
    processor = mk.ChunkedProcessor(net, chunk_size=64)
    processor(x)
    net[1].running_mean = net[1].running_var = None
    assert_refused(lambda: processor(x), mk.errors.InputError, MIXES)


@pytest.mark.slow
def test_a_budget_holds_after_a_number_had_many_values():
    field, x = Field(), torch.randn(2000, 8)
    processor = mk.ChunkedProcessor(field, memory_budget="1MiB")
    for field.num_samples in (*range(1, 20), 64):
        with torch.no_grad(), mk.Tracker(device="cpu") as tracker:
            y = processor(x)
    assert tracker.peak_bytes - x.nbytes - y.nbytes <= 2**20


def counted(net):
    calls = queue.SimpleQueue()  # a list would be put back
    net.register_forward_hook(lambda *_: calls.put(1))
    return calls


class Counting(nn.Module):
    """Changes attributes of its own in each call."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.num_calls, self.last, self.seen = layer, 0, None, {}

    def forward(self, x):
        self.num_calls += 1
        self.last, self.newest = tuple(x.shape), x.detach()
        self.seen[len(x)] = x.detach()
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.*keeps a result in the attribute 'seen':memkit.errors.MemkitWarning")
def test_what_calls_change_themselves_is_not_looked_at():
    net = Counting(nn.Linear(3, 3).double())
    calls, num_calls = counted(net), []
    for _ in range(3):
        mk.chunked_map(net, ROWS, chunk_size=50)
        num_calls.append(calls.qsize())
    assert num_calls == [4, 6, 8]  # two to check, once
    net = Counting(nn.Conv3d(2, 2, 3, padding=1).double())
    calls = counted(net)
    with torch.no_grad():
        mk.tiled_apply(net, VOLUME, (16, 16, 16))
        before = calls.qsize()
        mk.tiled_apply(net, VOLUME, (16, 16, 16))
    assert calls.qsize() == before + 2


def test_variables_that_calls_change_themselves_are_not_looked_at():
    net, number = nn.Linear(3, 3).double(), 0

    def fn(x):
        nonlocal number
        number += 1
        return net(x)

    calls = counted(net)
    processor = mk.ChunkedProcessor(fn, params=net.parameters(), check=False)
    for _ in range(2):  # the first measurement shows that it is changed
        processor(ROWS)
    before = calls.qsize()
    processor(ROWS)
    assert calls.qsize() == before + 1


def test_the_number_of_the_step_is_not_looked_at_forever():
    net = rowwise()
    calls = counted(net)
    for net.step in range(40):
        mk.chunked_map(net, ROWS, chunk_size=100)
    assert calls.qsize() == 40 + 2 * 16  # two to check, for each of the first 16 values
    net.is_centered = True
    assert_refused(lambda: mk.chunked_map(net, ROWS, chunk_size=16), mk.errors.InputError, MIXES)


def test_answers_for_earlier_settings_are_kept():
    net = rowwise()
    calls = counted(net)
    for net.settings.depth in (1, 2, 1, 2):
        mk.chunked_map(functools.partial(net, norm="none"), ROWS, chunk_size=100)
    assert calls.qsize() == 4 + 2 * 2
