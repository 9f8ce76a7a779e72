"""What predictions, checks and retries put back: state that a loss function changes outside of the model."""

import array
import collections
import copy
import functools
import itertools
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit._recorder.attributes import Attributes, content_of
from tests.helpers import assert_same, one_in_product
from tests.toys import mean_square

STEP, MEAN = 0, torch.zeros(())


class Counted:
    """Counts on its class."""

    count = 0


class Losses:
    """Losses that depend on what each call changes, in every place where a program may keep it."""

    def __init__(self):
        global STEP
        STEP, Counted.count = 0, 0
        MEAN.zero_()
        self.step, self.center = 0, torch.zeros(())

    def of_global(self):
        def loss_fn(model, x):
            global STEP
            STEP += 1
            return STEP * model(x).square().mean()

        return loss_fn

    def of_closure(self):
        step, mean = 0, torch.zeros(())

        def loss_fn(model, x):
            nonlocal step, mean
            loss = model(x).square().mean()
            step, mean = step + 1, 0.9 * mean + 0.1 * loss.detach()
            return (step + mean) * loss

        return loss_fn

    def of_class(self):
        def loss_fn(model, x):
            Counted.count += 1
            return Counted.count * model(x).square().mean()

        return loss_fn

    def of_function(self):
        def loss_fn(model, x):
            loss_fn.count += 1
            return loss_fn.count * model(x).square().mean()

        loss_fn.count = 0
        return loss_fn

    def of_tensor(self):
        def loss_fn(model, x):
            MEAN.add_(1.0)
            return MEAN * model(x).square().mean()

        return loss_fn

    def of_array(self):
        counts, mean = array.array("d", [0.0]), np.zeros(3)

        def loss_fn(model, x):
            counts[0] += 1
            mean[1:] += counts[0]
            return float(mean[2]) * model(x).square().mean()

        return loss_fn

    def of_bound_method(self):
        log = [].append

        def loss_fn(model, x):
            log(1.0)
            return len(log.__self__) * model(x).square().mean()

        return loss_fn

    def of_partial(self):
        count = functools.partial({}.__setitem__, "count")

        def loss_fn(model, x):
            held = count.func.__self__
            count(held.get("count", 0) + 1)
            return held["count"] * model(x).square().mean()

        return loss_fn


PLACES = (
    *("of_global", "of_closure", "of_class", "of_function", "of_tensor", "of_array"),
    *("of_bound_method", "of_partial"),
)


def wrapper(model, optimizer, x, loss_fn, **settings):
    return mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings)


def checked(model, optimizer, x, loss_fn):
    assert mk.train.check_split(model, x, loss_fn).exact is False
    return wrapper(model, optimizer, x, loss_fn)


def estimated(model, optimizer, x, loss_fn):
    mk.estimate_memory_usage(model, x, loss_fn)
    return wrapper(model, optimizer, x, loss_fn)


def planned(model, optimizer, x, loss_fn):
    mk.plan_training(model, x, loss_fn, optimizer, budget="1GiB")
    return wrapper(model, optimizer, x, loss_fn)


def advised(model, optimizer, x, loss_fn):
    mk.advise(model, x, loss_fn, optimizer=optimizer)
    return wrapper(model, optimizer, x, loss_fn)


def prepared(model, optimizer, x, loss_fn):
    return mk.prepare(model, optimizer, x, loss_fn, budget="1GiB", target="cpu")


def budgeted(model, optimizer, x, loss_fn):
    return wrapper(model, optimizer, x, loss_fn, memory="100MiB")


def trained(place, make):
    torch.manual_seed(0)
    model, xs = nn.Linear(8, 8).double(), torch.randn(3, 32, 8, dtype=torch.float64)
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.01), getattr(Losses(), place)()
    if make is None:
        for x in xs:
            optimizer.zero_grad()
            loss_fn(model, x).backward()
            optimizer.step()
    else:
        with make(model, optimizer, xs[0], loss_fn) as trainer:
            for x in xs:
                assert trainer.train_step(x, loss_fn).sizes == (32,)
    return list(model.parameters())


@pytest.mark.parametrize(
    ("place", "make"),
    one_in_product(5, PLACES, [wrapper, checked, estimated, planned, advised, prepared, budgeted]),
)
def test_training_is_that_of_the_plain_loop_wherever_a_loss_keeps_its_state(place, make):
    assert_same(trained(place, make), trained(place, None))


@pytest.mark.parametrize("place", PLACES)
def test_a_split_with_such_state_is_warned_of(place):
    """Each micro-batch would change it once."""
    model, loss_fn = nn.Linear(8, 8).double(), getattr(Losses(), place)()
    trainer = wrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), None, loss_fn, accumulation_steps=2)
    with pytest.warns(mk.errors.MemkitWarning, match="splitting the batch changes the gradient"):
        trainer.train_step(torch.randn(32, 8, dtype=torch.float64), loss_fn)


def test_a_changed_variable_is_named():
    attributes = Attributes([loss_fn := Losses().of_closure()])
    loss_fn(nn.Linear(8, 8), torch.ones(2, 8))
    assert attributes.differ()
    assert attributes.differences() == ["the variable mean", "the variable step"]
    attributes.restore()
    assert not attributes.differ()


@pytest.mark.parametrize("name", ["_parameters", "_buffers"])
def test_a_plain_object_may_have_a_list_by_a_modules_name(name):
    """Dreamer's optimizer keeps ``self._parameters = parameters``."""
    helper = types.SimpleNamespace(**{name: list(nn.Linear(2, 2).parameters())}, num_calls=0)
    attributes = Attributes([helper], content="saved")
    helper.num_calls += 1
    assert attributes.changed(set()) == ["SimpleNamespace.num_calls"]
    assert attributes.differences() == ["SimpleNamespace.num_calls"]
    attributes.restore()
    assert not attributes.differ()


def test_the_content_of_large_tensors_parameters_and_buffers_is_not_copied():
    model = nn.BatchNorm1d(4)
    model.small, model.large = torch.zeros(4), torch.zeros(2**19)
    held = Attributes([model], content="saved")._tensors
    copied = [each.tensor for each in held if each.content is not None]
    assert [id(each) for each in copied] == [id(model.small)]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_saved_tensor_is_compared_exactly(value):
    """The bits of 2048 ones sum up to a multiple of 2^64, like those of zeros."""
    model = nn.Module()
    model.counts = torch.full((2048,), value, dtype=torch.float64)
    attributes = Attributes([model], content="saved")
    model.counts.data.fill_(value)
    assert not attributes.differ()
    model.counts.data.fill_(1.0)
    assert attributes.differences() == ["Module.counts"]
    attributes.restore()
    torch.testing.assert_close(
        model.counts, torch.full((2048,), value, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )


# ---------------------------------------------------------------------------------------------------- the batch


class Writing(nn.Module):
    """Writes its results into its batch, as SchNetPack does, over the targets too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, batch):
        batch["hidden"] = torch.tanh(self.first(batch["x"]))
        batch["y"] = self.second(batch["hidden"])[:, 0]
        return batch["y"]


def writing_loss(model, batch):
    y = batch["y"]
    return (model(batch) - y).square().mean()


class Moving(nn.Module):
    """Moves the points that it is given, with a graph, as E(n)-equivariant networks do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, hidden, points):
        points += self.first(hidden).tanh()
        points[:, 1:] += self.second(hidden).tanh()[:, 1:]
        return points


def moved(model, batch):
    return model(*batch).square().mean()


def points(num_rows=32):
    return tuple(torch.randn(num_rows, 8, dtype=torch.float64) for _ in range(2))


SETTINGS = [{}, {"probe": False}, {"memory": "100MiB"}, {"offload": {"activations"}}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_model_that_moves_its_batch_trains_as_in_a_plain_loop(settings, num_parts):
    def train(make_step):
        torch.manual_seed(0)
        model = Moving()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = make_step(model, optimizer)
        for _ in range(3):
            step(points())
        return list(model.parameters())

    def plain(model, optimizer):
        def step(batch):
            moved(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def wrapped(model, optimizer):
        parts = {} if "memory" in settings else {"accumulation_steps": num_parts}
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings, **parts)
        return lambda batch: trainer.train_step(batch, moved)

    torch.testing.assert_close(train(wrapped), train(plain))


def test_estimates_of_a_model_that_moves_its_batch_are_exact():
    model = Moving()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        moved(model, points(512)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with mk.Tracker(device="cpu", workspace=True) as tracker:
        step()
    estimate = mk.estimate_memory_usage(model, batch := points(512), loss_fn=moved, optimizer=optimizer)
    assert estimate.peak_bytes == tracker.peak_bytes
    plan = mk.plan_training(model, batch, moved, optimizer, budget="64MiB")
    assert plan.predicted_peak_bytes == tracker.peak_bytes
    assert not batch[1].requires_grad


class Graph:
    """As those of graph libraries: a step writes features into its dict, over those of the last step."""

    def __init__(self):
        self.features = {"x": torch.randn(64, 8)}


@pytest.mark.filterwarnings("ignore:advise.*the batch cannot be cut")
@pytest.mark.parametrize("is_detached", [True, False])
def test_a_step_that_replaces_what_its_batch_object_holds_is_estimated_in_the_middle_of_training(is_detached):
    model, graph = nn.Linear(8, 8), Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, graph):
        hidden = model(graph.features["x"])
        if "hidden" in graph.features:
            hidden = hidden + 0.1 * graph.features["hidden"].detach()
        graph.features["hidden"] = hidden.detach() if is_detached else hidden
        return hidden.square().mean()

    def step():
        loss_fn(model, graph).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    kept = graph.features["hidden"]
    with mk.Tracker(device="cpu", workspace=True) as tracker:
        step()
    graph.features["hidden"] = kept
    estimate = mk.estimate_memory_usage(model, graph, loss_fn=loss_fn, optimizer=optimizer)
    assert 0 <= estimate.peak_bytes - tracker.peak_bytes <= kept.nbytes  # what the step replaces counts to its end
    advice = mk.advise(model, graph, loss_fn, optimizer=optimizer)
    assert 0 <= advice.peak_bytes - tracker.peak_bytes <= kept.nbytes
    assert graph.features["hidden"] is kept


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"memory": "100MiB"}])
def test_a_retry_gets_the_batch_as_it_was(kind, settings):
    def run(num_failures):
        torch.manual_seed(0)
        model = Writing().double()
        failures = []  # in the second step: the first one is checked

        def loss_fn(model, batch):
            loss = writing_loss(model, batch)
            if failures:
                failures.pop()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
            return loss

        trainer = wrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, **settings)
        with trainer:
            for number in range(3):
                failures.extend(range(num_failures) if number == 1 else ())
                batch = kind(x=torch.randn(8, 8).double(), y=torch.randn(8).double())
                trainer.train_step(batch, loss_fn)
        return list(model.parameters())

    expected = run(0)
    with pytest.warns(mk.errors.MemkitWarning, match="out of memory"):
        found = run(2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    """Scales its outputs by counts that it keeps by module, by name and in a set, all of them weak."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = weakref.WeakKeyDictionary({self.layer: 0})
        self.used, self.named = weakref.WeakSet(), weakref.WeakValueDictionary()

    def forward(self, x):
        self.calls[self.layer] += 1
        self.used.add(self.layer)
        self.named["layer"] = self.layer
        return self.layer(x) * self.calls[self.layer]


def test_weak_containers_are_restored():
    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(8, 4, dtype=torch.float64)
    twin = copy.deepcopy(model.layer)
    mk.train.check_split(model, x, mean_square)
    assert (model.calls[model.layer], len(model.used), len(model.named)) == (0, 0, 0)
    with mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), memory="64MiB") as trainer:
        trainer.train_step(x, mean_square)
    mean_square(twin, x).backward()  # of the first call, which multiplies by 1
    expected = twin.weight - 0.1 * twin.weight.grad
    torch.testing.assert_close(model.layer.weight, expected, rtol=1e-12, atol=1e-12)


class Mesh:
    def __init__(self):
        self.count, self.edges = 3, np.empty(1, dtype=object)
        self.edges[0] = list(range(9))


def collapsing_loss(model, batch):
    """Collapses meshes in the batch, as a pooling does; a loader's collate function puts them in an array."""
    weights = [float(each.count * len(each.edges[0])) for each in batch["mesh"]]
    for each in batch["mesh"]:
        each.count -= 1
        each.edges[0].pop()
    return (model(batch["x"]) * torch.tensor(weights, dtype=torch.float64)[:, None]).square().mean()


MESH_CALLS = {
    "check of a split": lambda model, optimizer, batch: wrapper(
        model, optimizer, None, None, accumulation_steps=2
    ).train_step(batch, collapsing_loss),
    "out of memory": lambda model, optimizer, batch: wrapper(model, optimizer, None, None).train_step(
        batch, fails_once(collapsing_loss)
    ),
    "check_split": lambda model, _, batch: mk.train.check_split(model, batch, collapsing_loss),
    "estimate": lambda model, _, batch: mk.estimate_memory_usage(model, batch, loss_fn=collapsing_loss),
    "plan": lambda model, optimizer, batch: mk.plan_training(model, batch, collapsing_loss, optimizer, budget="8MiB"),
}


def fails_once(loss_fn):
    runs = itertools.count()

    def failing(model, batch):
        loss = loss_fn(model, batch)
        if next(runs) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return loss

    return failing


@pytest.mark.filterwarnings("ignore:.*out of memory")
@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("call", MESH_CALLS.values(), ids=MESH_CALLS)
def test_objects_of_a_batch_are_as_they_were_for_each_run_of_it(call, make):
    def start():
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = {"x": torch.randn(6, 4).double(), "mesh": make([Mesh() for _ in range(6)])}
        return model, optimizer, batch

    plain, optimizer, batch = start()
    collapsing_loss(plain, batch).backward()
    optimizer.step()
    model, optimizer, batch = start()
    call(model, optimizer, batch)
    is_step = not torch.equal(model.weight, start()[0].weight)
    left = {(each.count, len(each.edges[0])) for each in batch["mesh"]}
    assert left == ({(2, 8)} if is_step else {(3, 9)})
    if is_step:
        torch.testing.assert_close(model.weight, plain.weight)


@pytest.mark.parametrize("call", [mk.estimate_memory_usage, mk.advise])
def test_a_second_pass_gets_the_batch_as_it_was(call):
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8)}
    before = dict(batch)
    call(Writing(), batch, writing_loss)
    assert batch.keys() == before.keys()
    assert all(batch[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("batch", "has_content"),
    [
        (torch.zeros(1), False),
        ((torch.zeros(1), 3, "text"), False),
        ([torch.zeros(1)], True),
        (({"x": torch.zeros(1)}, [1]), True),
        (collections.UserDict(x=torch.zeros(1)), True),
    ],
)
def test_content_is_saved_of_what_can_be_written_to(batch, has_content):
    assert (content_of(batch) is not None) is has_content


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_large_tensors_that_a_trial_changes_are_told_of(make):
    """A copy of a replay buffer for each trial would cost more than the trial."""
    large, small = make(2**19 if make is torch.zeros else 2**24), make(4)

    def loss_fn(model, x):
        nonlocal large, small
        large[5] += 1
        small += 1
        return model(x).square().mean()

    model = nn.Linear(4, 4)
    trainer = wrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, memory="100MiB")
    with pytest.warns(
        mk.errors.MemkitWarning, match=rf"changed a tensor or an array in place .* of the shape \({len(large)},\)"
    ):
        trainer.train_step(torch.ones(8, 4), loss_fn)
    assert float(small.max()) == 1.0


def with_teacher(how, *, through_data=False, is_frozen=True):
    """A loss that moves an EMA teacher, another network, in place, as Mean Teacher, FixMatch, SAC and TD3 do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    teacher = copy.deepcopy(model).requires_grad_(not is_frozen)
    failures = []

    def loss_fn(model, x):
        with torch.no_grad():
            for mine, own in zip(teacher.parameters(), model.parameters(), strict=True):
                (mine.data if through_data else mine).mul_(0.9).add_(own, alpha=0.1)
            target = teacher(x)
        if how == "out of memory" and len(failures) < 1:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return (model(x) - target).square().mean() + model(x).square().mean()

    settings = {"memory": "100MiB"} if how == "memory" else {}
    with wrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, **settings) as trainer:
        for x in torch.randn(3, 8, 4, dtype=torch.float64):
            trainer.train_step(x, loss_fn)
    return [*model.parameters(), *model.buffers(), *teacher.parameters(), *teacher.buffers()]


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_teacher_that_the_loss_moves_is_restored_after_a_trial_and_told_of_after_a_failure(through_data, is_frozen):
    settings = {"through_data": through_data, "is_frozen": is_frozen}
    assert_same(with_teacher("memory", **settings), with_teacher("plain", is_frozen=is_frozen))
    told = r"changed what loss_fn holds \(.*Linear\.bias.*\), and that stays changed"
    with pytest.warns(mk.errors.MemkitWarning, match=told):
        with_teacher("out of memory", **settings)


class Centered:
    """Moves its center, through `.data` or by another tensor, and runs out of memory in its first call."""

    def __init__(self, *, through_data=False):
        self.center, self.through_data = torch.zeros(4), through_data
        self.calls = itertools.count()

    def __call__(self, y):
        loss = (y - self.center.clone()).square().mean()
        if self.through_data:
            self.center.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        else:
            self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
        if next(self.calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return loss


def made_by_the_same_lines(criterion):
    return lambda model, x: criterion(model(x))


@pytest.mark.parametrize("before", [None, nn.Identity()])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_center_is_told_of_whatever_ran_before(before, through_data):
    """Another loss from the same factory, which changes nothing, says nothing about this one."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "123"))
    with wrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None) as trainer:
        if before is not None:
            trainer.train_step(torch.randn(8, 4), made_by_the_same_lines(lambda y: before(y).square().mean()))
        with pytest.warns(
            mk.errors.MemkitWarning, match=r"changed what loss_fn holds \(.*Centered\.center.*\), and that"
        ):
            trainer.train_step(torch.randn(8, 4), made_by_the_same_lines(Centered(through_data=through_data)))


class WithTarget(nn.Module):
    """Moves a target network in its forward, whose parameters require a gradient, as those of a copy do."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "123"))
        self.target, self.failures = copy.deepcopy(self.online), itertools.count()

    def forward(self, x):
        for mine, own in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.copy_(0.9 * mine.data + 0.1 * own.data + 0.1)
        with torch.no_grad():
            y = self.target(x)
        if next(self.failures) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return self.online(x) - y


def test_a_target_network_that_a_failed_forward_has_moved_is_told_of():
    model = WithTarget()
    trainer = wrapper(model, torch.optim.SGD(model.online.parameters(), lr=0.1), None, None)
    with pytest.warns(mk.errors.MemkitWarning, match=r"had moved parameters .* requires_grad_\(False\)"):
        trainer.train_step(torch.randn(8, 4), lambda model, x: model(x).square().mean())


def with_probe(how, *, begins_with=None):
    """A loss that runs the backward of an online probe, as those of DINO and MAE do; the loop steps the probe."""
    torch.manual_seed(0)
    model, probe = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    calls = itertools.count()
    optimizer, own = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, probe))

    def fail(where):
        if how == where and next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")

    def loss_fn(model, x):
        features = model(x)
        fail("out of memory before")
        (probe(features.detach()).flatten() - x.sum(1)).square().mean().backward()
        fail("out of memory after")
        return features.std(0).sum()  # compares rows: it is never cut

    batches = torch.randn(3, 8, 4, dtype=torch.float64)
    if how == "prepare":
        trainer = mk.prepare(model, optimizer, batches[0], loss_fn, budget="64MiB")
    else:
        trainer = wrapper(model, optimizer, None, None, **({"memory": "64MiB"} if how == "memory" else {}))
    with trainer:
        for x in batches:
            probe.weight.grad = None if begins_with is None else begins_with.clone()
            if how == "a plain loop":
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                optimizer.step()
            else:
                trainer.train_step(x, loss_fn)
            own.step()
            own.zero_grad()
    return [*model.parameters(), *probe.parameters()]


@pytest.mark.parametrize("how", ["memory", "prepare", "out of memory before", "out of memory after"])
@pytest.mark.filterwarnings("ignore:.*(out of memory|splitting|could not be checked)")
def test_gradients_of_a_probe_are_those_of_the_plain_loop(how):
    assert_same(with_probe(how), with_probe("a plain loop"))


@pytest.mark.filterwarnings("ignore:.*(out of memory with|splitting|could not be checked)")
def test_a_gradient_to_which_a_failed_attempt_has_added_is_told_of():
    begins_with = torch.ones(1, 3, dtype=torch.float64)
    assert_same(with_probe("memory", begins_with=begins_with), with_probe("a plain loop", begins_with=begins_with))
    with pytest.warns(mk.errors.MemkitWarning, match=r"changed what loss_fn holds \(.*\), and that stays changed"):
        with_probe("out of memory after", begins_with=begins_with)


def test_a_sampler_that_the_loss_holds_draws_as_in_the_plain_loop():
    coords = torch.rand(500, 3, generator=torch.Generator().manual_seed(0))
    index, sampler = mk.GridIndex.from_coords(coords, 0.25), mk.GridAwareSampler(seed=0)

    def loss_fn(model, x):
        return model(x[sampler.sample_half_density(index).indices]).square().mean()

    model = nn.Linear(3, 2)
    mk.train.check_split(model, coords, loss_fn)
    mk.estimate_memory_usage(model, coords, loss_fn=loss_fn)
    mk.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), coords, loss_fn, budget="64MiB").close()
    assert sampler.state_dict()["num_draws"] == 0


NUM_SEEN = 0


class Schedule:
    step = 0


class Counts(nn.Module):
    """Counts its calls outside of itself, and scales its output by them."""

    shared = [0]  # noqa: RUF012 - a list of the class is what is tested

    def __init__(self, place):
        super().__init__()
        self.place, self.layer = place, nn.Linear(4, 3).double()
        self.layer.weight.num_calls = 0

    def count(self):
        global NUM_SEEN
        if self.place == "a global":
            NUM_SEEN += 1
        elif self.place == "another class":
            Schedule.step += 1
        elif self.place == "a list of the class":
            self.shared[0] += 1
        else:
            self.layer.weight.num_calls += 1

    def counted(self):
        return NUM_SEEN + Schedule.step + self.shared[0] + self.layer.weight.num_calls

    def forward(self, x):
        self.count()
        return self.layer(x) * (1 + 0.1 * self.counted())


def compares_rows(model, x):
    return model(x).std(0).sum()


RUNS = {
    "check": lambda model, optimizer, x: mk.train.check_split(model, x, compares_rows),
    "estimate": lambda model, optimizer, x: mk.estimate_memory_usage(model, x, loss_fn=compares_rows),
    "prepare": lambda model, optimizer, x: mk.prepare(model, optimizer, x, compares_rows, budget="64MiB").close(),
    "memory": lambda model, optimizer, x: wrapper(model, optimizer, None, None, memory="64MiB").train_step(
        x, compares_rows
    ),
    "out of memory": lambda model, optimizer, x: out_of_memory_first(model, optimizer).train_step(x, compares_rows),
}


def out_of_memory_first(model, optimizer):
    calls = itertools.count()

    def fail(module, args, output):
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")

    model.register_forward_hook(fail)  # when the forward has counted
    return wrapper(model, optimizer, None, None)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("place", ["a global", "another class", "a list of the class", "a parameter's attribute"])
@pytest.mark.filterwarnings("ignore:.*(out of memory with|splitting|could not be checked)")
def test_what_a_forward_counts_elsewhere_is_undone(run, place):
    model, x = Counts(place), torch.randn(8, 4, dtype=torch.float64)
    before = model.counted()
    RUNS[run](model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    assert model.counted() - before == (run in {"memory", "out of memory"})


class Registering(nn.Module):
    """Registers a hook in its first forward, as extractors of hidden layers do; one removes itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.has_hook = nn.Linear(4, 3).double(), False
        self.once = self.layer.register_forward_hook(lambda *_: self.once.remove())

    def forward(self, x):
        if not self.has_hook:
            self.layer.register_forward_hook(lambda module, args, output: 2 * output)
            self.has_hook = True
        return self.layer(x)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:.*(out of memory with|splitting|could not be checked)")
def test_hooks_that_a_forward_registers_are_undone_with_its_flag(run):
    model, x = Registering(), torch.randn(8, 4, dtype=torch.float64)
    RUNS[run](model, torch.optim.SGD(model.parameters(), lr=0.0), x)
    is_step = run in {"memory", "out of memory"}
    assert model.has_hook is is_step
    assert len(model.layer._forward_hooks) == 1  # its own hook after a step, before one that which removes itself
    assert_same([model(x)], [2 * nn.functional.linear(x, model.layer.weight, model.layer.bias)])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("run", [*RUNS, "out of memory in backward", "parts"])
@pytest.mark.filterwarnings("ignore:.*(out of memory|splitting|could not be checked|post_accumulate)")
def test_what_hooks_on_parameters_count_is_undone(run, register):
    """A warm-up of one layer's gradient would run ahead of the steps."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer, num_calls, backwards = torch.optim.SGD(model.parameters(), lr=0.1), 0, itertools.count()

    def count(_):
        nonlocal num_calls
        num_calls += 1

    def fail(*_):
        if next(backwards) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")

    getattr(model[1].weight, register)(count)  # its gradient is there before the first layer's
    if run == "parts":
        wrapper(model, optimizer, None, None, accumulation_steps=2).train_step(x, mean_square)
    elif run == "out of memory in backward":
        model[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        wrapper(model, optimizer, None, None).train_step(x, compares_rows)
        assert next(backwards) > 1
    else:
        RUNS[run](model, optimizer, x)
    assert num_calls == {"check": 0, "estimate": 0, "prepare": 0, "parts": 2}.get(run, 1)


@pytest.mark.parametrize(
    "make",
    [
        random.SystemRandom,
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3))),
    ],
    ids=["no state", "nested", "scripted"],
)
@pytest.mark.parametrize("run", ["estimate", "prepare", "memory", "check"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*(splitting|could not be checked)")
def test_what_has_no_state_that_can_be_read_is_left_alone(run, make):
    model = nn.Linear(4, 3).double()
    model.held = [make()]
    RUNS[run](model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4, dtype=torch.float64))


def test_a_class_whose_module_is_a_descriptor_is_no_error():
    """As Cython's metaclasses have one; extensions that are written in it have such classes among their globals."""

    class Compiled:
        pass

    Compiled.__module__ = property(lambda self: "extension")
    before = Attributes([lambda: (Compiled, Compiled())], content="saved")
    assert not before.differ()
