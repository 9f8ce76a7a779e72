"""Live tensors at one instant: bytes by category, each storage once, and the holder of the largest."""

import gc

import pytest
import torch
from torch import nn

from memkit._core.units import MIB
from memkit.memory import census as census_module
from memkit.memory.census import take_census

SIZE = 512 * 512 * 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_leftovers_of_other_tests():
    gc.collect()


def grown(before):
    after = take_census(CPU, 20)
    names = {*before.by_category, *after.by_category}
    change = {name: after.by_category.get(name, 0) - before.by_category.get(name, 0) for name in names}
    return {name: nbytes for name, nbytes in change.items() if nbytes}, after


def test_every_byte_of_a_step_has_its_category():
    before = take_census(CPU, 0)
    net = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.BatchNorm1d(512, affine=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(512, 512)
    net(x).sum().backward()
    optimizer.step()
    loss = net(x).square().sum()
    change, _ = grown(before)
    # Saved: x for the weight's gradient, tanh's result, the two statistics of the batch, the normalized result.
    saved = 3 * SIZE + 2 * 512 * 4
    buffers = 2 * 512 * 4 + 8
    expected = {"parameter": SIZE, "gradient": SIZE, "optimizer": SIZE, "saved for backward": saved, "buffer": buffers}
    assert change == {**expected, "other": loss.nbytes}


def test_views_and_tied_weights_count_once():
    before = take_census(CPU, 0)
    whole = torch.ones(512, 512)
    views = [whole[:100], whole.t(), whole.view(-1)]
    one, two = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    two.weight = one.weight
    change, _ = grown(before)
    assert len(views) == 3
    assert change == {"parameter": SIZE, "other": SIZE}


class Trainer:
    def __init__(self):
        self.net = nn.Linear(1024, 1024, bias=False)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.history = [torch.ones(3 * MIB)]
        self.net(torch.ones(1, 1024)).sum().backward()
        self.optimizer.step()


def train_and_look():
    """Without an assert: pytest asks for the locals of functions that have one, and such frames are not read."""
    trainer = Trainer()
    return trainer, take_census(CPU, 5).largest


def test_names_holders_as_in_code():
    _, largest = train_and_look()
    holders = [(each.category, each.nbytes, each.holder) for each in largest]
    owner = "local `trainer` of function train_and_look"
    assert holders[0] == ("other", 12 * MIB, f"attribute `history[0]` of Trainer ({owner})")
    rest = {category: holder for category, _, holder in holders[1:]}
    assert "`_parameters['weight']` of Linear" in rest["parameter"]
    assert rest["gradient"] == f"gradient for {rest['parameter']}"
    assert rest["optimizer"] in [f"state['{key}'] of Adam for {rest['parameter']}" for key in ("exp_avg", "exp_avg_sq")]


def passes_over_all_objects(num_largest, monkeypatch):
    calls, get_referrers = [], gc.get_referrers
    with monkeypatch.context() as patch:
        patch.setattr(gc, "get_referrers", lambda *values: calls.append(1) or get_referrers(*values))
        largest = take_census(CPU, num_largest).largest
    return len(calls), [each.holder for each in largest]


def look_at_one_and_at_many(monkeypatch):
    net = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(10)))
    kept = {number: torch.ones(400, 400) for number in range(10)}
    found = [passes_over_all_objects(number, monkeypatch) for number in (1, 20)]
    return *found, net, kept


def test_the_holders_of_many_tensors_take_no_more_passes_over_all_objects(monkeypatch):
    (few, _), (many, holders), *_ = look_at_one_and_at_many(monkeypatch)
    assert many <= few + 4  # 40 and more where each is looked up alone
    assert sum("(layer `net." in each for each in holders) == 10
    assert sum("local `kept[" in each for each in holders) == 10


def test_names_graph_as_only_holder():
    x = torch.ones(4 * MIB, requires_grad=True)
    before = take_census(CPU, 0)
    loss = x.exp().sum()
    change, census = grown(before)
    assert change == {"saved for backward": x.nbytes, "other": 4}
    largest = next(each for each in census.largest if each.category == "saved for backward")
    assert (largest.nbytes, largest.holder) == (x.nbytes, "no variable: the autograd graph, or other C++ code")
    loss.backward()
    assert grown(before)[0] == {"gradient": x.nbytes, "other": 4}


def test_half_made_modules_and_optimizers_are_no_obstacle():
    module, optimizer = nn.Linear.__new__(nn.Linear), torch.optim.SGD.__new__(torch.optim.SGD)
    lazy, sparse, meta = nn.LazyLinear(4), torch.eye(100).to_sparse(), torch.empty(10**12, device="meta")
    before = take_census(CPU, 0)
    held = torch.ones(512, 512)
    change, _ = grown(before)
    assert change == {"other": held.nbytes}
    del module, optimizer, lazy, sparse, meta


def test_without_memory_for_the_search_the_bytes_are_still_known(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(census_module, "References", fail)
    held = torch.ones(16 * MIB)
    (largest,) = take_census(CPU, 1).largest
    assert (largest.nbytes, largest.holder) == (held.nbytes, None)


def test_another_devices_tensors_are_not_there():
    assert take_census(torch.device("cuda:3"), 5) == census_module.Census({}, ())


@pytest.mark.gpu
def test_the_bytes_on_a_card_are_the_allocators():
    device = torch.device("cuda", torch.cuda.current_device())
    net = nn.Linear(8192, 8192, device=device)
    loss = net(torch.ones(8192, 8192, device=device)).exp().sum()
    counted = sum(take_census(device, 0).by_category.values())
    workspaces = 4 * 33 * MIB  # of cuBLAS and cuBLASLt on Hopper, for handles of this thread and of earlier tests
    assert 0 <= torch.cuda.memory_allocated(device) - counted <= workspaces
    del loss
