"""Steps that are whole: bit-identical to torch's, also after faults at every operator and inside real limits."""

import contextlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import memkit as mk
from memkit.train import chunked_steps
from memkit.train.chunked_steps import atomic_steps
from memkit.train.guard import StepGuard
from memkit.train.parameterwise import materialize_state, steps_parameterwise, writes_gradients
from tests.allocations import trace_allocations
from tests.helpers import FunctionsEntered, assert_same, one_in_product, run_python
from tests.train.faults import FailingOperator
from tests.train.interrupts import InterruptedLine

SHAPES = [(40, 30), (7,), (2, 1000), (), (1,), (3, 4, 5, 2)]
KINDS = {
    "adamw": lambda p, **k: optim.AdamW(p, lr=0.01, **k),
    "amsgrad": lambda p, **k: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, **k),
    "momentum": lambda p, **k: optim.SGD(p, lr=0.01, momentum=0.9, **k),
    "nesterov": lambda p, **k: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, **k),  # writes to its gradients
    "dampening": lambda p, **k: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True, **k),
    "sgd": lambda p, **k: optim.SGD(p, lr=0.01, **k),
    "rmsprop": lambda p, **k: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **k),
    "adagrad": lambda p, **k: optim.Adagrad(p, initial_accumulator_value=0.1, lr_decay=0.1, **k),
    "adamax": lambda p, **k: optim.Adamax(p, **k),
    "nadam": lambda p, **k: optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1, **k),
    "radam": lambda p, **k: optim.RAdam(p, weight_decay=0.1, **k),
    "adadelta": lambda p, **k: optim.Adadelta(p, **k),
    "asgd": lambda p, **k: optim.ASGD(p, weight_decay=0.1, **k),
    "rprop": lambda p, **k: optim.Rprop(p, **k),
    "adafactor": lambda p, **k: optim.Adafactor(p, **k),
    "muon": lambda p, **_: optim.Muon([each for each in p if each.dim() == 2]),
}
MUST = ("adamw", "momentum")


def make(kind, foreach):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    parameters[5].data = parameters[5].data.contiguous(memory_format=torch.channels_last)
    return parameters, KINDS[kind](parameters, foreach=foreach), generator


def give_gradients(parameters, generator, number):
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == 1 and parameter.dim() == 1 else gradient  # sometimes a branch is not used


def bits(tensors):
    return [tensor.detach().contiguous().view(-1).view(torch.int32) for tensor in tensors]


def everything(parameters, optimizer):
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return bits([*parameters, *(state[name] for state in states for name in sorted(state))])


def train(kind, foreach, num_steps=5, step=lambda optimizer, number: optimizer.step()):
    parameters, optimizer, generator = make(kind, foreach)
    for number in range(num_steps):
        give_gradients(parameters, generator, number)
        step(optimizer, number)
    return parameters, optimizer


def atomically(optimizer, number):
    with atomic_steps(optimizer):
        optimizer.step()


def guarded(optimizer):
    """As the accumulator and the wrapper do; also faults beside the chunks, in torch's own marks, are survived."""

    def step():
        optimizer.step()
        return True

    assert StepGuard([optimizer]).run(step)


OPTIM = str(Path(optim.__file__).parent)


def interrupted_at(kind, place, num_steps):
    """Interrupt the last step at a line of torch's optimizers, with no dispatch mode in the way, as on a GPU."""
    line = InterruptedLine(place, [OPTIM])

    def step(optimizer, number):
        if number < num_steps - 1:
            optimizer.step()
            return
        # torch's own lines turn gradients off and on.
        with torch.enable_grad(), contextlib.suppress(KeyboardInterrupt), line.around():
            guarded(optimizer)

    return everything(*train(kind, True, num_steps=num_steps, step=step)), line.num_lines


@pytest.mark.parametrize(
    "kind", [*MUST, *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS if each not in MUST)]
)
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new_state(kind):
    undone, done = (everything(*train(kind, True, num_steps=num)) for num in (2, 3))
    _, num_lines = interrupted_at(kind, None, 3)
    num_done = num_undone = 0
    for place in range(1, num_lines + 1):
        found, _ = interrupted_at(kind, place, 3)
        is_done, is_undone = (all(map(torch.equal, found, each)) for each in (done, undone))
        assert is_done or is_undone, place
        num_done, num_undone = num_done + is_done, num_undone + is_undone
    assert num_done > 3
    assert num_undone > 3


@pytest.mark.parametrize(("settings", "runs_through_python"), [({"foreach": True}, False), ({"fused": True}, True)])
def test_only_a_fused_steps_operators_run_through_python(settings, runs_through_python):
    parameters, _, generator = make("adamw", foreach=True)
    optimizer = optim.AdamW(parameters, **settings)
    for number in (0, 2):
        give_gradients(parameters, generator, number)
        with FunctionsEntered() as functions:
            guarded(optimizer)
    assert any(each.co_name == "__torch_dispatch__" for each in functions.own) == runs_through_python


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_bit_identical_to_the_plain_one(kind, in_slices, monkeypatch):
    if in_slices:
        monkeypatch.setattr(chunked_steps, "_SMALLEST_CHUNK_BYTES", 1024)
        monkeypatch.setattr(chunked_steps, "_SMALLEST_SLICE", 16)
    for foreach in (False, True):
        expected = everything(*train(kind, foreach))
        assert_same(everything(*train(kind, foreach, step=atomically)), expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_detects_optimizers_writing_gradients(kind, foreach):
    parameters, optimizer, generator = make(kind, foreach)
    for _ in range(2):
        give_gradients(parameters, generator, 0)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
    changed = not all(map(torch.equal, before, [parameter.grad for parameter in parameters]))
    assert writes_gradients(optimizer, optimizer.param_groups[0]) or not changed


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dampening"])
def test_materialized_state_equals_initial_state(kind):
    parameters, optimizer, generator = make(kind, foreach=True)
    materialize_state(optimizer)
    assert all(parameter.grad is None for parameter in parameters)
    names = {parameter: set(state) for parameter, state in optimizer.state.items()}
    for number in range(3):
        give_gradients(parameters, generator, 0)
        live = trace_allocations(optimizer.step).live
        assert live[-1] == 0, f"step {number} has made state"
    expected_parameters, expected, generator = make(kind, foreach=True)
    for _ in range(3):
        give_gradients(expected_parameters, generator, 0)
        expected.step()
    assert {parameter: set(state) for parameter, state in optimizer.state.items()} == names
    assert_same(everything(parameters, optimizer), everything(expected_parameters, expected))


def count_operators(kind, foreach, number, run=None):
    with FailingOperator() as counter:
        places = []

        def step(optimizer, current):
            start = counter.num_operators
            (run or guarded)(optimizer)
            places.append(counter.num_operators - start)

        train(kind, foreach, step=step, num_steps=number + 1)
    return places[number]


def one_fault(kind, foreach, number, *places):
    """Train with faults in one step; return how many there were and whether all is as without them."""
    faults = []

    def step(optimizer, current):
        with FailingOperator(*(places if current == number else ())) as fault:
            guarded(optimizer)
        faults.append(fault.num_failures)

    found = everything(*train(kind, foreach, step=step, num_steps=number + 2))
    return sum(faults), found


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", MUST)
def test_a_fault_at_any_operator_of_a_step_changes_nothing(kind, foreach, in_slices, monkeypatch):
    """Every operator in ``benchmarks/cases/step_faults.py``; here 120. The first step makes state, the third has it."""
    if in_slices:
        monkeypatch.setattr(chunked_steps, "_SMALLEST_CHUNK_BYTES", 2048)
    num_faults = 0
    for number in (0, 2):
        expected = everything(*train(kind, foreach, num_steps=number + 2))
        num_operators = count_operators(kind, foreach, number)
        for place in range(1, num_operators + 1, max(1, num_operators // 4)):
            failures, found = one_fault(kind, foreach, number, place)
            num_faults += failures
            assert_same(found, expected)
    assert num_faults >= 8


class Exhausted(FailingOperator):
    """From one operator on, all fail that take memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        takes_memory = any(each.alias_info is None and "Tensor" in str(each.type) for each in returns)
        if takes_memory and self.places and self.num_operators + 1 >= min(self.places):
            self.places.add(self.num_operators + 1)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", MUST)
def test_each_parameter_is_old_or_new_if_nothing_fits(kind, foreach, monkeypatch):
    monkeypatch.setattr(chunked_steps, "_SMALLEST_CHUNK_BYTES", 8 * 1024)
    old = everything_of_each(*train(kind, foreach, num_steps=2))
    new = everything_of_each(*train(kind, foreach, num_steps=3))
    seen = set()
    num_operators = count_operators(kind, foreach, 2, run=lambda optimizer: atomically(optimizer, 2))
    for place in range(2, num_operators, num_operators // 6):  # the first is torch's mark
        parameters, optimizer, generator = make(kind, foreach)
        for number in range(3):
            give_gradients(parameters, generator, number)
            if number < 2:
                optimizer.step()
        message = "6 of 6 parameters are stepped"
        with Exhausted(place), atomic_steps(optimizer):
            try:
                optimizer.step()
            except mk.MemkitOutOfMemoryError as error:
                message = str(error)
        found = everything_of_each(parameters, optimizer)
        is_old = [all(map(torch.equal, *pair)) for pair in zip(found, old, strict=True)]
        is_new = [all(map(torch.equal, *pair)) for pair in zip(found, new, strict=True)]
        assert all(map(bool.__or__, is_old, is_new))
        num_new = is_old.count(False)
        assert (f"{num_new} of 6 parameters are stepped" in message) if num_new else ("as they were" in message)
        seen.add(num_new)
    assert len(seen) > 1


def everything_of_each(parameters, optimizer):
    return [everything([parameter], optimizer) for parameter in parameters]


LIMITED = """
import resource, sys, torch
from memkit.train.chunked_steps import atomic_steps

def make():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n, 500)) for n in (1500, 20, 700, 6000, 1)]  # 16 MB, one of 12
    return parameters, torch.optim.AdamW(parameters, foreach=sys.argv[1] == "foreach")

def step(is_atomic):
    if is_atomic:
        with atomic_steps(optimizer):
            optimizer.step()
    else:
        optimizer.step()

for is_atomic in (True, False):
    (parameters, optimizer), (twins, twin) = make(), make()
    for number in range(3):
        for each in (*parameters, *twins):
            each.grad = torch.full_like(each, 1.0 + number)
        twin.step()
        if number == 2:
            data = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
            resource.setrlimit(resource.RLIMIT_DATA, (data + 2_500_000, resource.RLIM_INFINITY))
        try:
            step(is_atomic)
        except RuntimeError:
            print("failed")
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    same = [torch.equal(a, b) and all(torch.equal(optimizer.state[a][n], twin.state[b][n]) for n in twin.state[b])
            for a, b in zip(parameters, twins)]
    print("same" if all(same) else "torn")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as Linux does")
@pytest.mark.slow
@pytest.mark.parametrize("foreach", ["foreach", "single"])
def test_step_completes_in_a_limit_that_tears_plain_step(foreach):
    done = run_python(LIMITED, foreach, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.stdout.split() == ["same", "failed", "torn"]


@pytest.mark.parametrize(
    ("kind", "sizes"), one_in_product(4, [*MUST, "radam", "nadam"], [(64,) * 8, (512, 8), (1000,)])
)
def test_peak_is_a_tenth_above_model_and_state_at_most(kind, sizes):
    parameters = [nn.Parameter(torch.randn(size, 16_000)) for size in sizes]  # 33 to 64 MB
    optimizer = KINDS[kind](parameters, foreach=True)
    materialize_state(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    states = [value for state in optimizer.state.values() for value in state.values()]
    there = sum(tensor.nbytes for tensor in [*parameters, *parameters, *states])
    assert trace_allocations(lambda: atomically(optimizer, 0)).peak <= 0.1 * there


def test_hooks_schedules_scalers_and_closures_see_one_step():
    parameters, optimizer, generator = make("adamw", foreach=True)
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.ones(5))], "lr": 0.5, "weight_decay": 0.0})
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    optimizer.param_groups[0]["foreach"] = False
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda each, *_: calls.append(("after", len(each.param_groups))))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def closure():
        assert torch.is_grad_enabled()
        calls.append("closure")
        give_gradients(parameters, generator, 0)
        extra.grad = torch.ones(5)
        return "loss"

    with atomic_steps(optimizer):
        assert optimizer.step(closure) == "loss"
        assert optimizer.step(closure=closure) == "loss"
        schedule.step()  # warns unless the optimizer has stepped
        scaler.scale((extra * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert calls == ["before", "closure", ("after", 2)] * 2 + ["before", ("after", 2)]
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.005), 0.25]
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    assert optimizer.state[extra]["step"] == 3


SPARSE = [optim.SparseAdam, optim.Adagrad, optim.SGD, KINDS["momentum"], KINDS["nesterov"]]


def table_trained(kind, step, num_steps=3, num_rows=10):
    """Rows 1, 2 and 2 of a table get a gradient."""
    table = nn.Embedding(num_rows, 4, _weight=torch.arange(4.0 * num_rows).view(-1, 4), sparse=True)
    optimizer = kind(list(table.parameters()))
    for number in range(num_steps):
        optimizer.zero_grad()
        table(torch.tensor([1 + number, 2, 2])).square().sum().backward()
        step(optimizer, number)
    states = [value for _, value in sorted(optimizer.state[table.weight].items()) if isinstance(value, torch.Tensor)]
    return [each.to_dense() if each.is_sparse else each for each in (table.weight.detach(), *states)]


def plainly(optimizer, _):
    optimizer.step()


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(kind):
    assert_same(table_trained(kind, lambda optimizer, _: guarded(optimizer)), table_trained(kind, plainly))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_fault_at_any_operator_of_a_step_with_a_sparse_gradient_changes_nothing(kind):
    """The rows of the gradient are kept, where the step changes no others."""
    expected = table_trained(kind, plainly)
    for number in (0, 2):
        place = num_failures = 1
        while num_failures:

            def step(optimizer, current):
                nonlocal num_failures
                with FailingOperator(*([place] if current == number else [])) as fault:  # noqa: B023
                    guarded(optimizer)
                if current == number:  # noqa: B023
                    num_failures = fault.num_failures

            assert_same(table_trained(kind, step), expected)
            place += 1
        assert place > 4


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_step_that_does_not_fit_leaves_a_table_as_it_was(kind):

    def step(optimizer, number):
        nonlocal fits
        if number < 2:
            optimizer.step()
            return
        # The last operator of a step is torch's own mark.
        errors = (mk.MemkitOutOfMemoryError, torch.OutOfMemoryError)
        with Exhausted(place), atomic_steps(optimizer), contextlib.suppress(*errors):
            optimizer.step()
            fits = True

    old, new = (table_trained(kind, plainly, num_steps=each) for each in (2, 3))
    place, fits, num_old = 2, False, 0
    while not fits:
        found = table_trained(kind, step)
        is_old, is_new = (all(map(torch.equal, found, each)) for each in (old, new))
        assert is_old or is_new, place
        place, num_old = place + 1, num_old + is_old
    assert num_old > 2


@pytest.mark.parametrize("kind", SPARSE[:3])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_of_a_table_with_a_sparse_gradient_only_rows_are_copied(kind):
    """The negative control is momentum, which moves rows of earlier gradients."""

    def peak(kind, step):
        table = nn.Embedding(100_000, 16, sparse=True)
        optimizer = kind(list(table.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.arange(100)).square().sum().backward()
            rose = trace_allocations(lambda: step(optimizer)).peak
        return rose

    table_bytes = 4 * 16 * 100_000
    assert peak(kind, guarded) < 100_000 + peak(kind, lambda optimizer: optimizer.step())
    assert peak(KINDS["nesterov"], guarded) > table_bytes


def test_other_optimizers_are_refused_by_name():
    class Mine(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(2))]
    for optimizer in (optim.LBFGS(parameters), Mine(parameters)):
        with pytest.raises(mk.errors.ConfigError, match=r"RAdam, .*register_parameterwise\("), atomic_steps(optimizer):
            pass
        with pytest.raises(mk.errors.ConfigError, match=type(optimizer).__name__) as error:
            materialize_state(optimizer)
        assert "Adafactor" in str(error.value)
        assert "SparseAdam" not in str(error.value)  # makes its state in its step


class Lion(optim.Optimizer):
    """Another people's optimizer, which steps each parameter by itself."""

    def __init__(self, params, lr=1e-3, **settings):
        super().__init__(params, {"lr": lr, "beta": 0.9, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.grad.add_(parameter, alpha=0.01)  # decay, in place of the gradient
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.add_((average * group["beta"] + 0.1 * parameter.grad).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)


def registered(base, **members):
    """A class of its own, since a registration is for good."""
    return mk.train.register_parameterwise(type("Registered", (base,), members))


def train_small(kind, guarded, num_steps=4, faults=()):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        model(torch.ones(2, 300)).square().mean().backward()
        with atomic_steps(optimizer) if guarded else contextlib.nullcontext(), FailingOperator(*faults) as fault:
            optimizer.step()
        assert fault.num_failures == len(faults)
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


class TestRegisteredOptimizers:
    def test_step_in_chunks_as_they_do_alone(self):
        assert_same(train_small(registered(Lion), True), train_small(Lion, False))

    def test_are_put_back_and_go_on_after_an_out_of_memory(self):
        kind = registered(Lion)
        for place in (3, 9, 20):  # the first is the profiler's
            found = train_small(kind, guarded=True, faults=[place])
            assert_same(found, train_small(Lion, False))

    @pytest.mark.parametrize("way", ["data", "set_", "state.set_", "gradient dropped", "noise"])
    @pytest.mark.parametrize("fails_at", [2, 6, 7])
    def test_are_put_back_whatever_their_step_does_to_a_parameter(self, way, fails_at):
        """Give it another storage, as geoopt's do, drop its gradient, or draw random numbers, as Langevin dynamics."""
        updates = itertools.count(1)

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    noise = torch.randn_like(parameter) if way == "noise" else 0
                    if next(updates) == fails:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted).")
                    new = parameter - 0.1 * (average + noise)
                    if way == "data":
                        parameter.data = new
                    elif way == "set_":
                        parameter.set_(new)
                    else:
                        parameter.copy_(new)
                    if way == "state.set_":
                        average.set_(average * 1.5)
                    elif way == "gradient dropped":
                        parameter.grad = None

        def train():
            return [*train_small(registered(optim.SGD, step=step), guarded=True), torch.get_rng_state()]

        fails = fails_at
        found = train()
        fails = None
        assert_same(found, train())

    def test_may_call_inherited_step(self):
        """Torch calls the hooks around it once more."""

        def step(self, closure=None):
            return super(kind, self).step(closure)

        kind = registered(optim.AdamW, step=step)
        calls = []
        assert_same(train_small(kind, True), train_small(optim.AdamW, False))
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter])
        parameter.grad = torch.ones(3)
        with atomic_steps(optimizer):
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == [parameter]
        assert calls

    @pytest.mark.parametrize("where", ["group", "attribute", "state"])
    def test_rejects_those_keeping_other_state(self, where):
        def step(self, closure=None):
            Lion.step.__wrapped__(self) if hasattr(Lion.step, "__wrapped__") else Lion.step(self)
            if where == "group":
                self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            elif where == "attribute":
                self.k = getattr(self, "k", 0) + 1
            else:
                self.state["total"] = self.state.get("total", 0) + 1

        kind = registered(Lion, step=torch.no_grad()(step))
        with pytest.raises(mk.errors.ConfigError, match="keeps values outside of the per-parameter state"):
            train_small(kind, guarded=True)

    def test_rejects_non_optimizer_classes(self):
        for wrong in (Lion([nn.Parameter(torch.ones(2))]), nn.Linear, "Lion"):
            with pytest.raises(mk.errors.InputTypeError, match=r"register_parameterwise\(type\(optimizer\)\)"):
                mk.train.register_parameterwise(wrong)


class Named(optim.SGD):
    """Only built, shown and saved in its own way."""

    def __init__(self, params, name="mine", **settings):
        super().__init__(params, lr=1e-2, momentum=0.9, nesterov=True)
        self.name = name

    def __repr__(self):
        return self.name

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=set_to_none)


class Mixin:
    def helper(self):
        return 1


class Replacing:
    def _init_group(self, *args):
        raise AssertionError


class TestSubclasses:
    @pytest.mark.parametrize(
        "kind", [type("Plain", (optim.Adam,), {}), Named, type("Mixed", (Mixin, optim.AdamW), {}), optim.SGD]
    )
    def test_inherit_rules_without_own_step(self, kind):
        plain = {"Plain": optim.Adam, "Mixed": optim.AdamW}.get(kind.__name__)
        assert steps_parameterwise(kind([nn.Parameter(torch.ones(2))], lr=1e-2))
        assert steps_parameterwise(kind([nn.Parameter(torch.ones(2))], lr=1e-2))  # torch has put its own around step
        found = train_small(kind, guarded=True)
        assert_same(found, train_small(plain or kind, guarded=False))

    @pytest.mark.parametrize(
        "kind",
        [
            type("Stepping", (optim.Adam,), {"step": lambda self, closure=None: None}),
            type("Making", (Replacing, optim.Adam), {}),
            type("Grouping", (optim.Adam,), {"param_groups": property(lambda self: [], lambda self, value: None)}),
        ],
    )
    def test_are_unknown_with_own_step(self, kind):
        assert not steps_parameterwise(kind([nn.Parameter(torch.ones(2))]))


def test_oversized_state_is_not_partly_created():
    parameters, optimizer, _ = make("amsgrad", foreach=True)
    for place in range(1, 20, 5):
        with FailingOperator(*itertools.islice(itertools.count(place), 200)), pytest.raises(mk.MemkitOutOfMemoryError):
            materialize_state(optimizer)
        assert not optimizer.state
        assert all(parameter.grad is None for parameter in parameters)
    with FailingOperator(4):  # a single fault is survived
        materialize_state(optimizer)
    assert len(optimizer.state) == len(parameters)
