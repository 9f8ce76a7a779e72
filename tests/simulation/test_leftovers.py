"""A simulated step leaves no trace: values that the user's code keeps are restored, or their holder is named."""

import copy
import functools
import gc
import queue
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memkit as mk
from memkit._core.errors import StateError
from memkit._simulation.leftovers import Patches, Shared
from memkit.predict.scaling.profile import profile_scaling
from tests.helpers import assert_same, one_in_product
from tests.toys import mean_square

X = torch.arange(32.0).reshape(8, 4) / 32


def points(n):
    return torch.linspace(-1, 1, n)


# ------------------------------------------------------------------------------------------ places to keep things


@functools.lru_cache
def lru(n):
    return points(n)


@functools.cache
def pair(n):
    return lru(n), {"twice": 2 * lru(n)}


DICT, NESTED, LISTS, OLD = {}, {"by size": {}}, defaultdict(list), OrderedDict()
HISTORY, SEEN, RING = [], set(), deque(maxlen=2)
BY_MODULE = weakref.WeakKeyDictionary()
LOCAL, WAITING = threading.local(), queue.SimpleQueue()
LAST = None


def in_dict(n, x):
    if n not in DICT:
        DICT[n] = points(n)
    return DICT[n]


def in_nested_dict(n, x):
    return NESTED["by size"].setdefault(n, {"grid": (points(n), None)})["grid"][0]


def in_list_of_dict(n, x):
    if not LISTS[n]:
        LISTS[n].append(points(n))
    return LISTS[n][0]


def in_limited_dict(n, x):
    OLD[n] = points(n)
    while len(OLD) > 2:
        OLD.popitem(last=False)
    return OLD[n]


def in_list(n, x):
    HISTORY.append(x)
    return points(n)


def in_set(n, x):
    SEEN.add(x)
    return points(n)


def in_ring(n, x):
    RING.append(points(n))
    return RING[-1]


def in_global(n, x):
    global LAST
    LAST = x * 2
    return points(n)


def in_default(n, x, kept={}):  # noqa: B006 - under test
    return kept.setdefault(n, points(n))


def in_function(n, x):
    kept = vars(in_function).setdefault("kept", {})
    return kept.setdefault(n, points(n))


def memoized(function):
    kept = {}

    @functools.wraps(function)
    def wrapper(n):
        if n not in kept:
            kept[n] = function(n)
        return kept[n]

    return wrapper


in_closure = memoized(points)


@dataclass
class Record:
    grid: torch.Tensor | None = None
    all: list = field(default_factory=list)

    @functools.cached_property
    def ones(self):
        return torch.ones(4)


RECORD = Record()


class Slotted:
    __slots__ = ("grid",)


SLOTTED = Slotted()


class Kept:
    shared = {}  # noqa: RUF012 - under test
    latest = None

    def grid(self, n):
        type(self).latest = points(n)
        return self.shared.setdefault(n, points(n))


KEPT = Kept()


def in_record(n, x):
    if RECORD.grid is None:
        RECORD.grid = points(n)
        RECORD.all.append(RECORD.grid)
    return RECORD.grid * RECORD.ones


def in_slots(n, x):
    if not hasattr(SLOTTED, "grid"):
        SLOTTED.grid = points(n)
    return SLOTTED.grid


def in_weak_dict(n, x):
    return BY_MODULE.setdefault(ANCHOR, points(n))


def in_thread_local(n, x):
    if not hasattr(LOCAL, "grid"):
        LOCAL.grid = points(n)
    return LOCAL.grid


def in_pool(n, x):
    with ThreadPoolExecutor(1) as pool:
        DICT["pool"] = pool.submit(torch.sum, points(n).mul(x.detach())).result()
    return DICT["pool"]


ANCHOR = nn.Linear(1, 1)
WAYS = {
    "lru_cache": lambda n, x: lru(n),
    "cache of a cache": lambda n, x: pair(n)[1]["twice"],
    "closure": lambda n, x: in_closure(n),
    "class": lambda n, x: KEPT.grid(n),
    **{
        way.__name__: way
        for way in (
            in_dict, in_nested_dict, in_list_of_dict, in_limited_dict, in_list, in_set, in_ring, in_global, in_default,
            in_function, in_record, in_slots, in_weak_dict, in_thread_local, in_pool,
        )
    },
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way
        self.state = Record()

    def forward(self, x):
        out = self.linear(x)
        if self.state.grid is None:
            self.state.grid = out.detach()
        for way in WAYS if self.way == "all" else filter(None, [self.way]):
            out = out * WAYS[way](4, out)
        return out


def count_fakes():
    gc.collect()
    return sum(type(each) is FakeTensor for each in gc.get_objects())


def estimate(model, loss_fn, **options):
    mk.estimate_memory_usage(model, X, loss_fn, **options)


def plan(model, loss_fn):
    mk.plan_training(model, X, loss_fn, budget="1GiB")


def advise(model, loss_fn):
    mk.advise(model, X, loss_fn)


def scaling(model, loss_fn):
    def build_step(n):
        x = torch.ones(n, 4)
        return lambda: loss_fn(model, x).backward()

    profile_scaling(build_step, sizes=[16], modes=("train",))


def assert_nothing_left(model):
    loss = mean_square(model, X)
    assert type(loss) is torch.Tensor
    loss.backward()
    assert model.linear.weight.grad.abs().sum() > 0


def kept():
    """What this file's containers hold now."""
    lists = HISTORY, SEEN, RING, DICT.values(), OLD.values(), BY_MODULE.values(), *LISTS.values()
    return [LAST, RECORD.grid, KEPT.latest, *KEPT.shared.values(), *(each for kept in lists for each in kept)]


def forget():
    """All containers as a script starts with them."""
    for each in (HISTORY, SEEN, RING, DICT, OLD, BY_MODULE, LISTS, KEPT.shared, NESTED["by size"], RECORD.all):
        each.clear()
    vars(RECORD).pop("ones", None)
    vars(in_function).clear()
    in_default.__defaults__[0].clear()
    RECORD.grid = KEPT.latest = globals()["LAST"] = None
    for cache in (lru, pair):
        cache.cache_clear()


def test_user_caches_hold_real_tensors_afterwards():
    forget()
    RING.append(ring := points(4))
    model = Model("all")
    estimate(model, mean_square)
    assert [type(each) for each in kept() if each is not None] == [torch.Tensor]
    assert RING[0] is ring
    assert_nothing_left(model)
    assert count_fakes() == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_keep_something(way):
    forget()
    model = Model(way)
    estimate(model, mean_square)
    assert not any(type(each) is FakeTensor for each in kept())
    assert_nothing_left(model)


def test_does_not_keep_guessed_numbers():
    @functools.lru_cache
    def extent(n):
        return points(n).abs().max().item()

    def loss_fn(model, x):
        loss = model(x).square().mean() * extent(4)
        HISTORY.append(("loss", loss.item()))
        RECORD.all.append({"count": (x > 0).sum().item()})
        return loss

    HISTORY[:], RECORD.all[:] = [0.5], []
    estimate(Model(None), loss_fn)
    assert (HISTORY, RECORD.all) == ([0.5], [])
    assert extent.cache_info().currsize == 0


@pytest.mark.parametrize("call", [plan, advise, scaling], ids=lambda call: call.__name__)
def test_every_simulating_entry_point(call):
    forget()
    model = Model("lru_cache" if call is advise else "in_dict")
    call(model, mean_square)
    assert_nothing_left(model)
    assert count_fakes() == 0


def test_a_loss_object_keeps_nothing():
    class Loss:
        def __init__(self):
            self.seen, self.last = [], None

        def __call__(self, model, x):
            self.last = model(x)
            self.seen.append(self.last)
            return self.last.square().mean()

    loss, model = Loss(), Model(None)
    estimate(model, loss)
    assert (loss.seen, loss.last) == ([], None)
    estimate(model, loss.__call__)
    assert (loss.seen, loss.last) == ([], None)
    assert_nothing_left(model)


class Grumpy:
    """As pydantic's stand-in for a serializer that is not built yet: without a dict, and no attribute is missing."""

    __slots__ = ("_made", "_unmade")

    def __init__(self):
        self._made = 1

    def __getitem__(self, place):
        raise IndexError(place)

    def __getattr__(self, name):
        raise RuntimeError(name)


GRUMPY = Grumpy()


def test_objects_that_refuse_questions_are_passed_by():
    def loss_fn(model, x):
        return model(x).square().mean() * (GRUMPY is not None)

    model = Model(None)
    estimate(model, loss_fn)
    assert_nothing_left(model)
    model = nn.Linear(4, 4)
    model.grumpy = GRUMPY
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.train_step(X, loss_fn).num_microbatches == 1


def test_earlier_cache_entries_work_and_stay():
    ways = ["lru_cache", "in_dict", "closure", "in_list_of_dict"]
    real = [WAYS[way](4, X) for way in ways]

    def loss_fn(model, x):
        return sum((model(x) * WAYS[way](4, x)).square().mean() for way in ways)

    estimate(Model(None), loss_fn)
    again = [WAYS[way](4, X) for way in ways]
    assert all(each.equal(points(4)) for each in again)
    assert all(one is other for one, other in zip(real[1:], again[1:], strict=True))  # a lru_cache may be filled anew


def test_restored_dict_keeps_other_values():
    DICT.clear()
    DICT[7] = kept = points(7)
    estimate(Model("in_dict"), mean_square)
    assert list(DICT) == [7]
    assert DICT[7] is kept


def test_virtual_gpu_leaves_no_trace():
    @functools.lru_cache
    def grid(n, device):
        return torch.linspace(-1, 1, n, device=device)

    model = Model(None)
    estimate(model, lambda model, x: (model(x) * grid(4, x.device)).sum(), target="RTX 4090")
    assert_nothing_left(model)
    assert grid(4, X.device).equal(points(4))


def test_an_error_inside_leaves_nothing():
    def loss_fn(model, x):
        model(x)
        raise KeyError("of mine")

    forget()
    model = Model("all")
    with pytest.raises(KeyError, match="of mine"):
        estimate(model, loss_fn)
    assert type(mean_square(model, X)) is torch.Tensor


def test_shared_patches_that_cannot_be_applied_at_first_are_applied_by_the_next_block():
    target, errors = types.SimpleNamespace(value=1), [KeyboardInterrupt()]

    def make():
        if errors:
            raise errors.pop()
        return [Patches(target, "a test", {"value": 2})]

    shared = Shared(make)
    with pytest.raises(KeyboardInterrupt), shared():
        pass
    with shared(), shared():
        assert target.value == 2
    assert target.value == 1


def test_a_cache_of_another_package_is_emptied(monkeypatch):
    package = types.ModuleType("a_package")
    package.__file__ = str(Path(torch.__file__).parents[1] / "a_package.py")
    exec("import functools, torch\n@functools.lru_cache\ndef grid(n): return torch.linspace(-1, 1, n)", vars(package))
    monkeypatch.setitem(sys.modules, "a_package", package)
    model = Model(None)
    estimate(model, lambda model, x: (model(x) * package.grid(4)).sum())
    assert_nothing_left(model)
    assert package.grid(4).equal(points(4))


def batches():
    kept = points(4)
    while True:
        yield kept


def test_error_names_holder_that_cannot_release():
    generator, model = batches(), Model(None)

    def loss_fn(model, x):
        return (model(x) * next(generator)).sum()

    with pytest.raises(StateError, match=r"held after the step, by .*loss_fn's variable generator; .*Way out: empty"):
        estimate(model, loss_fn)
    with pytest.raises(StateError, match="on a tensor without data"):  # whoever uses it all the same
        model(X) * next(generator)
    generator.close()


def test_error_names_module_of_the_holder(monkeypatch):
    monkeypatch.setitem(globals(), "WAITING", queue.SimpleQueue())  # a new one: the tests freeze what is there

    def loss_fn(model, x):
        loss = model(x).sum()
        WAITING.put(loss)
        return loss

    with pytest.raises(StateError, match=r"by tests\.simulation\.test_leftovers\.WAITING.*empty tests\.simulation\."):
        estimate(Model(None), loss_fn)


class Critic:
    """A loss in an object, which holds another network, a state and a generator."""

    def __init__(self):
        self.network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.center, self.num_calls, self.chance = torch.zeros(16), 0, np.random.default_rng(0)

    def __call__(self, model, x):
        self.num_calls += 1
        hidden = self.network[1](self.network[0](model(x)))
        loss = (hidden - self.center).square().mean() + self.chance.normal() * self.network(x).mean()
        self.center = 0.9 * self.center + 0.1 * hidden.detach().mean(0)
        return loss

    def as_default(self):
        return lambda model, x, critic=self: critic(model, x)


CALLS = {
    "estimate": lambda model, loss_fn: mk.estimate_memory_usage(model, X, loss_fn=loss_fn, optimizer="sgd"),
    "estimate for a card": lambda model, loss_fn: mk.estimate_memory_usage(
        model, X, loss_fn=loss_fn, optimizer="sgd", target="RTX 4090"
    ),
    "plan": lambda model, loss_fn: mk.plan_training(model, X, loss_fn, "sgd", budget="64MiB"),
    "plan, measured": lambda model, loss_fn: mk.plan_training(
        model, X, loss_fn, "sgd", budget="64MiB", measure=True, micro_batch_size=len(X)
    ),
    "worst batch": lambda model, loss_fn: mk.predict.find_worst_batch([X, X[:4]], model, loss_fn),
    "advice": lambda model, loss_fn: mk.advise(model, X, loss_fn),
}


@pytest.mark.parametrize(("name", "way"), one_in_product(2, CALLS, ["itself", "a default argument", "a variable"]))
@pytest.mark.filterwarnings("ignore::memkit.errors.MemkitWarning")  # the loss draws and mixes rows
def test_what_the_loss_function_holds_is_as_before(name, way):
    torch.manual_seed(0)
    model, critic = nn.Linear(4, 4), Critic()
    loss_fn = {
        "itself": critic,
        "a default argument": critic.as_default(),
        "a variable": lambda model, x: critic(model, x),
    }[way]
    before = {key: value.clone() for key, value in critic.network.state_dict().items()}
    center, state = critic.center, critic.chance.bit_generator.state
    CALLS[name](model, loss_fn)
    assert_same(dict(critic.network.state_dict()), before)
    assert critic.num_calls == 0
    assert critic.center is center
    assert not center.any()
    assert critic.chance.bit_generator.state == state
    assert all(each.grad is None for each in (*critic.network.parameters(), *model.parameters()))


@pytest.mark.parametrize("target", ["cpu", "RTX 4090"])
def test_a_network_in_an_object_counts_as_one_in_a_closure(target):
    network = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1))

    class Task:
        def __init__(self):
            self.network = network

        def loss(self, model, x):
            return self.network(model(x)).square().mean()

        def __call__(self, model, x):
            return self.loss(model, x)

    task, model = Task(), nn.Linear(4, 4)
    ways = [task, task.loss, lambda model, x: task(model, x), lambda model, x, task=task: task.loss(model, x)]
    ways.append(lambda model, x: network(model(x)).square().mean())
    found = {mk.estimate_memory_usage(model, X, loss_fn=each, target=target).peak_bytes for each in ways}
    assert len(found) == 1


class Probe:
    """A loss that trains a network of its own on detached features, with a schedule, as an online probe does."""

    def __init__(self):
        self.network = nn.Linear(4, 64)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.network.bias.grad = torch.ones(64)

    def __call__(self, model, x):
        features = model(x)
        self.optimizer.zero_grad()
        self.network(features.detach()).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        return features.square().mean()

    def state(self):
        """Return all that the next call depends on."""
        gradients = [each.grad for each in self.network.parameters()]
        parts = (self.network, self.optimizer, self.schedule)
        return copy.deepcopy([*(each.state_dict() for each in parts), gradients])


PROBE = Probe()
OF_PROBES = {
    "an object": lambda: ((probe := Probe()), probe),
    "a closure": lambda: ((probe := Probe()), lambda model, x: probe(model, x)),
    "a list": lambda: ((held := [Probe()])[0], lambda model, x: held[0](model, x)),
    "the module": lambda: (PROBE, lambda model, x: PROBE(model, x)),
}


@pytest.mark.parametrize(("name", "way"), one_in_product(3, [*CALLS, "a check"], OF_PROBES))
def test_an_optimizer_that_the_loss_function_steps_is_as_before(name, way):
    calls = CALLS | {"a check": lambda model, loss_fn: mk.train.check_split(model, X, loss_fn)}
    probe, loss_fn = OF_PROBES[way]()
    before = probe.state()
    calls[name](nn.Linear(4, 4), loss_fn)
    torch.testing.assert_close(probe.state(), before, rtol=0, atol=0)
    loss_fn(nn.Linear(4, 4), X)
    assert probe.state()[1] != before[1]


@pytest.mark.parametrize("way", OF_PROBES)
def test_an_optimizer_that_the_loss_function_steps_counts(way):
    """Its moments are 1.25 KiB each."""
    model = nn.Linear(4, 4)
    probe, loss_fn = OF_PROBES[way]()
    predicted = mk.estimate_memory_usage(model, X, loss_fn=loss_fn, optimizer="sgd").peak_bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe.optimizer.state.clear()
    with mk.Tracker() as tracker:
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn(model, X).backward()
            optimizer.step()
    assert predicted == tracker.peak_bytes
