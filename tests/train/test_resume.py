"""A step interrupted between two of its operators resumes there, without copies, with a bit-identical result."""

import contextlib
import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn, optim

from memkit import MemoryEfficientTrainingWrapper
from memkit._core.errors import StateError
from memkit.train import chunked_steps
from memkit.train.guard import StepGuard
from memkit.train.resume import StepJournal
from tests.helpers import assert_same
from tests.toys import mean_square
from tests.train.faults import FailingOperator, Short

SHAPES = [(30, 20), (7,), (), (3, 4, 5)]
SETTINGS = {
    "sgd": (optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    "momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adamw": (optim.AdamW, {}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "nadam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {"weight_decay": 0.1}),
    "rprop": (optim.Rprop, {}),
}

TOGETHER = ", all at once"  # as is the default on a GPU
FUSED = ", fused"
SETTINGS |= {
    **{f"{name}{TOGETHER}": (kind, settings | {"foreach": True}) for name, (kind, settings) in SETTINGS.items()},
    **{
        f"{name}{FUSED}": (kind, settings | {"fused": True})
        for name, (kind, settings) in SETTINGS.items()
        if name in ("sgd", "nesterov", "adam", "adamw", "amsgrad")
    },
}


SHORT = [f"{name}{way}" for name in ("sgd", "nesterov") for way in (TOGETHER, FUSED)]  # steps of two or three operators
MUST = "adamw", "nesterov", *(name for number, name in enumerate(SETTINGS) if "," in name and not number % 2)
SLOW = pytest.mark.slow


def make(name, num_steps=6):
    """An optimizer that has made so many steps: RAdam takes another path from the sixth one on."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    kind, settings = SETTINGS[name]
    optimizer = kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03}], lr=0.01, **settings)
    for _ in range(num_steps):
        give_gradients(parameters)
        optimizer.step()
    give_gradients(parameters)
    return parameters, optimizer


def give_gradients(parameters):
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)


def bits(parameters, optimizer):
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    tensors = [state[name] for state in states for name in sorted(state) if state[name] is not None]
    return [each.detach().clone() for each in (*parameters, *tensors)]


def guarded(optimizer, guard=None):
    def step():
        optimizer.step()
        return True

    guard = guard or StepGuard([optimizer])
    guard.forget()
    return guard.run(step)


class Interrupting(FailingOperator):
    """Ctrl-C in place of an out-of-memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError:
            raise KeyboardInterrupt from None


def expected(name):
    parameters, optimizer = make(name)
    optimizer.step()
    after = bits(parameters, optimizer)
    give_gradients(parameters)
    optimizer.step()
    return after, bits(parameters, optimizer)


def every(name):
    parameters, optimizer = make(name)
    with FailingOperator() as counter:
        guarded(optimizer)
    assert_same(bits(parameters, optimizer), expected(name)[0])
    return range(1, counter.num_operators + 1)


@pytest.mark.parametrize("fault", [FailingOperator, Interrupting])
@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW) if each not in MUST else each for each in SETTINGS])
def test_step_interrupted_at_any_operator_ends_bit_equal(name, fault):
    after, later = expected(name)
    before = bits(*make(name))
    num_faults = num_steps = 0
    for place in every(name):
        parameters, optimizer = make(name)
        groups = optimizer.param_groups
        guard = StepGuard([optimizer])
        with fault(place) as planted:
            try:
                assert guarded(optimizer, guard)
            except KeyboardInterrupt:
                assert fault is Interrupting
        num_faults += planted.num_failures
        assert "step" not in vars(optimizer)
        assert optimizer.param_groups is groups
        if fault is Interrupting and not guard.has_stepped:
            assert_same(bits(parameters, optimizer), before)
            continue
        num_steps += 1
        assert_same(bits(parameters, optimizer), after)
        give_gradients(parameters)
        guarded(optimizer, guard)
        assert_same(bits(parameters, optimizer), later)
    assert num_faults > num_steps - 1 >= num_faults // 2 - (name in SHORT)


@pytest.mark.parametrize(
    "name",
    ["adamw", f"adamw{TOGETHER}", pytest.param("nesterov", marks=SLOW), pytest.param("nadam", marks=SLOW)],
)
def test_continues_in_slices_if_the_whole_does_not_fit(name, monkeypatch):
    monkeypatch.setattr(chunked_steps, "_SMALLEST_SLICE", 16)
    after, _ = expected(name)
    num_refused = 0
    for place in every(name):
        parameters, optimizer = make(name)
        with Short(place, 100) as short:  # the largest has 600
            assert guarded(optimizer)
        num_refused += short.num_refused
        assert_same(bits(parameters, optimizer), after)
    assert num_refused


@pytest.mark.parametrize("name", ["adamw", f"adamw{TOGETHER}", f"amsgrad{TOGETHER}"])
def test_several_faults_in_one_step(name):
    after, _ = expected(name)
    for place in every(name)[:: 1 if TOGETHER in name else 3]:
        parameters, optimizer = make(name)
        with FailingOperator(place, place + 9) as planted:
            assert guarded(optimizer)
        assert planted.num_failures >= 1
        assert_same(bits(parameters, optimizer), after)


def make_views(kind, settings, what):
    """An optimizer whose parameters, or whose states, are views of one tensor: these share a version."""

    def views_of(tensors):
        parts = torch.cat([each.detach().flatten() for each in tensors]).split([each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in SHAPES]
    parameters = [nn.Parameter(each) for each in (views_of(values) if what == "parameters" else values)]
    optimizer = kind(parameters, lr=0.01, **settings)
    for _ in range(2):
        give_gradients(parameters)
        optimizer.step()
    if what == "states":
        states = [optimizer.state[each] for each in parameters]
        for name in states[0]:
            for state, view in zip(states, views_of([each[name] for each in states]), strict=True):
                state[name] = view
    give_gradients(parameters)
    return parameters, optimizer


@pytest.mark.parametrize("what", ["parameters", "states"])
@pytest.mark.parametrize("name", ["adamw", "momentum", f"adamw{TOGETHER}"])
def test_tensors_that_share_a_version(name, what):
    parameters, optimizer = make_views(*SETTINGS[name], what)
    with FailingOperator() as counter:
        optimizer.step()
    after = bits(parameters, optimizer)
    for place in range(1, counter.num_operators + 1, 3):
        parameters, optimizer = make_views(*SETTINGS[name], what)
        with FailingOperator(place):
            assert guarded(optimizer)
        assert_same(bits(parameters, optimizer), after)


def test_without_copies_and_with():
    """The negative control: torch's own step is torn, and steps that cannot be resumed use copies."""
    parameters, optimizer = make("adamw")
    with FailingOperator(9), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    found, (after, _) = bits(parameters, optimizer), expected("adamw")
    assert not all(map(torch.equal, found, after))


class Counting(FailingOperator):
    """Counts copies."""

    def __init__(self):
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_copies += "clone" in str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def num_copies(parameters, optimizer, guard):
    give_gradients(parameters)
    with Counting() as counter:
        guarded(optimizer, guard)
    return counter.num_copies


class TestCopies:
    def test_none_if_step_can_resume(self):
        parameters, optimizer = make("adamw")
        guard = StepGuard([optimizer])
        assert [num_copies(parameters, optimizer, guard) for _ in range(3)] == [0, 0, 0]

    def test_in_first_step_creating_state(self):
        parameters, optimizer = make("adamw", num_steps=0)
        guard = StepGuard([optimizer])
        assert num_copies(parameters, optimizer, guard)
        assert not num_copies(parameters, optimizer, guard)

    @pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
    def test_none_for_steps_of_all_tensors_at_once(self, name):
        """Which would be cut into 32 steps, at some 20 ms on a GPU."""
        parameters, optimizer = make(f"{name}{TOGETHER}")
        guard = StepGuard([optimizer])
        assert [num_copies(parameters, optimizer, guard) for _ in range(3)] == [0, 0, 0]

    @pytest.mark.parametrize("name", ["rprop", "nesterov"])
    def test_where_steps_at_once_cannot_be_resumed(self, name):
        """Rprop overwrites what it still reads; Nesterov's momentum goes into the gradients."""
        parameters, optimizer = make(f"{name}{TOGETHER}")
        assert num_copies(parameters, optimizer, StepGuard([optimizer]))

    @pytest.mark.parametrize("kind", ["parameters", "state"])
    def test_where_a_group_has_several_kinds_of_tensors(self, kind):
        """They are stepped kind by kind, in no known order, or, with state of another kind, one after the other."""
        parameters, optimizer = make(f"adamw{TOGETHER}")
        state = optimizer.state[parameters[0]]
        if kind == "parameters":
            parameters[0].grad = None
            parameters[0].data = parameters[0].data.double()
            parameters[0].grad = torch.randn(SHAPES[0], dtype=torch.float64)
        optimizer.state[parameters[0]] = {name: each.double() if each.dim() else each for name, each in state.items()}
        assert StepJournal.of(optimizer) is None

    def test_once_memory_has_run_out_in_a_step(self):
        parameters, optimizer = make("adamw")
        guard = StepGuard([optimizer])
        give_gradients(parameters)
        with FailingOperator(9):
            guarded(optimizer, guard)
        assert num_copies(parameters, optimizer, guard)

    def test_another_state_is_noted_anew_and_the_old_one_is_let_go(self):
        parameters, optimizer = make("adamw")
        guard = StepGuard([optimizer])
        assert not num_copies(parameters, optimizer, guard)
        journal = next(iter(guard._chunked))._journal
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not journal.begin(optimizer)  # its tensors are gone
        give_gradients(parameters)
        twins, twin = make("adamw")
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for ours, theirs in zip(parameters, twins, strict=True):
            theirs.data, theirs.grad = ours.detach().clone(), ours.grad.clone()
        twin.step()
        with FailingOperator(12):
            guarded(optimizer, guard)
        assert_same(bits(parameters, optimizer), bits(twins, twin))

    def test_rejects_replaced_state_after_interrupted_step(self):
        """The progress of the step is unknown."""
        parameters, optimizer = make("adamw")
        guard = StepGuard([optimizer])
        assert not num_copies(parameters, optimizer, guard)
        held = optimizer.state[parameters[0]]["exp_avg"]
        optimizer.state[parameters[0]]["exp_avg"] = held.clone()
        give_gradients(parameters)
        with FailingOperator(12), pytest.raises(StateError, match="'exp_avg' was replaced by a new tensor"):
            guarded(optimizer, guard)

    def test_parameters_that_are_stepped_at_once_need_one_look(self):
        """At the first of each group: to read the versions of all would take longer than the rest of the journal."""
        parameters, optimizer = make(f"adamw{TOGETHER}")
        alone, together = (StepJournal.of(make(name)[1]) for name in ("adamw", f"adamw{TOGETHER}"))
        assert len(alone._first_places) == len(parameters)
        assert len(alone._state) == 3 * len(parameters)
        assert len(together._first_places) == len(optimizer.param_groups)
        assert len(together._state) == 3 * len(optimizer.param_groups)

    def test_replaced_state_of_a_parameter_that_others_speak_for(self):
        after, _ = expected(f"adamw{TOGETHER}")
        for place in every(f"adamw{TOGETHER}"):
            parameters, optimizer = make(f"adamw{TOGETHER}")
            guard = StepGuard([optimizer])
            guard.run(lambda: True)
            state = optimizer.state[parameters[1]]
            state["exp_avg"] = state["exp_avg"].clone()
            with FailingOperator(place):
                guarded(optimizer, guard)
            assert_same(bits(parameters, optimizer), after)

    def test_parameter_with_late_first_gradient(self):
        parameters, optimizer = make("adamw", num_steps=0)
        guard = StepGuard([optimizer])
        for number in range(4):
            give_gradients(parameters)
            if number < 2:
                parameters[3].grad = None
            elif number == 2:
                assert not next(iter(guard._chunked))._journal.begin(optimizer)
            guarded(optimizer, guard)
        assert optimizer.state[parameters[3]]["step"] == 2


def replace_first(parameters, optimizer):
    """As densification does: another parameter, with the same state. The old one is returned."""
    old = parameters[0]
    parameters[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(old.detach().clone())
    parameters[0].grad = old.grad
    if old in optimizer.state:
        optimizer.state[parameters[0]] = optimizer.state.pop(old)
    return old


@pytest.mark.parametrize("way", ["in one piece", "in chunks", "out of memory"])
@pytest.mark.parametrize("name", ["sgd", "adamw", f"adamw{TOGETHER}"])
def test_a_replaced_parameter_is_let_go_before_the_next_step(name, way):
    parameters, optimizer = make(name, num_steps=0 if way == "in chunks" else 6)
    guard = StepGuard([optimizer])
    with FailingOperator(2) if way == "out of memory" else contextlib.nullcontext():
        guarded(optimizer, guard)
    assert guard.has_stepped
    old = weakref.ref(replace_first(parameters, optimizer))
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_with_a_replaced_parameter_resumes(name):
    def stepped(is_guarded, place=None):
        parameters, optimizer = make(name)
        guard = StepGuard([optimizer])
        step = functools.partial(guarded, optimizer, guard) if is_guarded else optimizer.step
        step()
        old = replace_first(parameters, optimizer)  # it stays, so that nothing else gets its place
        give_gradients(parameters)
        with FailingOperator(place) if is_guarded else contextlib.nullcontext() as counter:
            step()
        assert old is not parameters[0]
        return bits(parameters, optimizer), counter

    after, _ = stepped(is_guarded=False)
    whole, counter = stepped(is_guarded=True)
    assert_same(whole, after)
    for place in range(1, counter.num_operators + 1):
        assert_same(stepped(is_guarded=True, place=place)[0], after)


def test_parameters_swap_between_steps():
    """Torch refuses to swap what has a weak reference: `load_state_dict` and `to` with `swap_module_params` set."""
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizers = [optim.AdamW(each.parameters()) for each in (model, twin)]
    trainer = MemoryEfficientTrainingWrapper(model, optimizers[0])
    for number in range(3):
        x = torch.randn(4, 3)
        trainer.train_step(x, mean_square)
        mean_square(twin, x).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if number == 1:
            for each in (model, twin):
                torch.utils.swap_tensors(each.weight, nn.Parameter(each.weight.detach() * 2))
    assert_same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("kind", [optim.Adadelta, optim.ASGD, optim.Adafactor, optim.SparseAdam])
def test_copies_unresumable_optimizers(kind):
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(4, 4).to_sparse(1) if kind is optim.SparseAdam else torch.ones(4, 4)
    optimizer.step()
    assert StepJournal.of(optimizer) is None
