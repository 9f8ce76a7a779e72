"""A state goes into all of its objects or into none: what does not fit is refused by name, before anything changes."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from memkit._core.errors import FileFormatError, InputTypeError, MemkitOutOfMemoryError, MemkitWarning
from memkit._machine import random_state
from memkit.recipes.state.manager import TrainingStateManager
from memkit.train.accumulate import GradientAccumulator
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.helpers import assert_refused, gradients, one_in
from tests.recipes.test_state import Holder, Monitor, assert_same_states

pytestmark = pytest.mark.usefixtures("no_flush")


def make_model(*, width=8, dtype=torch.float32, norm=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.Linear(width, 1)).to(
        dtype
    )


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def stepped(model, make, *, steps=2):
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.ones(4, 5, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved(folder, **objects):
    manager = TrainingStateManager(folder)
    manager.save(7, **objects)
    return manager


def check_refused(manager, match, **objects):
    """The state is refused, and no object has changed, nor any gradient, nor the random state."""
    before = copy.deepcopy([[each.state_dict() for each in objects.values()], 0])
    torch.rand(1)
    random = random_state.capture().state_dict()
    raised = assert_refused(lambda: manager.restore(**objects), FileFormatError, match)
    assert not hasattr(raised, "__notes__")
    assert "Way out: " in str(raised)
    assert_same_states([[each.state_dict() for each in objects.values()], 0], before)
    assert_same_states(random_state.capture().state_dict(), random)


# ---- optimizers


@pytest.mark.parametrize("theirs", one_in(2, OPTIMIZERS))
def test_only_its_own_class_takes_an_optimizers_state(tmp_path, theirs):
    model = make_model()
    manager = saved(tmp_path, model=model, optimizer=stepped(model, OPTIMIZERS[theirs]))
    for own, has_stepped in itertools.product(OPTIMIZERS, (False, True)):
        other, name = make_model(), own.split()[-1]
        optimizer = stepped(other, OPTIMIZERS[own], steps=2 * has_stepped)
        if theirs.split()[-1] == name:  # the hyper-parameters that were saved come with the values
            assert manager.restore(model=other, optimizer=optimizer) == 7
            other(torch.ones(4, 5)).sum().backward()
            optimizer.step()
        else:
            match = rf"restore\(optimizer=\.\.\.\).* expected that of a {name}"
            check_refused(manager, match, model=other, optimizer=optimizer)


def groups_of(model, *sizes):
    parameters = iter(list(model.parameters()))
    return [{"params": [next(parameters) for _ in range(size)]} for size in sizes]


def reordered(model):
    (first, *_, last), parameters = list(model.parameters()), list(model.parameters())
    parameters[0], parameters[-2] = parameters[-2], first
    assert last is parameters[-1]
    return parameters


OTHER_PARAMETERS = {
    "fewer": (lambda model: list(model.parameters())[:-1], r"SGD\.load_state_dict refuses: of 6 parameters"),
    "other groups": (lambda model: groups_of(model, 4, 2), r"SGD\.load_state_dict refuses: groups of \[6\]"),
    "more groups": (lambda model: groups_of(model, 1, 2, 3), r"groups of \[6\]; expected groups of \[1, 2, 3\]"),
    "another order": (
        lambda model: list(model.parameters())[::-1],
        r"model\.0\.weight as parameter 0, which is model\.2",
    ),
    "two exchanged": (reordered, r"model\.0\.weight as parameter 0, which is model\.2\.weight now"),
}


@pytest.mark.parametrize("name", OTHER_PARAMETERS)
def test_other_parameters_are_refused(tmp_path, name):
    choose, match = OTHER_PARAMETERS[name]
    model, other = make_model(width=5), make_model(width=5)  # so that some have one shape
    manager = saved(tmp_path, model=model, optimizer=stepped(model, OPTIMIZERS["SGD"]))
    check_refused(manager, match, model=other, optimizer=OPTIMIZERS["SGD"](choose(other)))


def test_without_the_model_shapes_and_dtypes_are_compared(tmp_path):
    model = make_model()
    manager = saved(tmp_path, optimizer=stepped(model, OPTIMIZERS["Adam"]))
    for settings, match in (
        ({"width": 9}, r"parameter 0 of shape \(8, 5\), here \(9, 5\)"),
        ({"dtype": torch.float16}, r"parameter 0 in torch\.float32, here torch\.float16"),
        ({"dtype": torch.float64}, r"parameter 0 in torch\.float32, here torch\.float64"),
    ):
        check_refused(manager, match, optimizer=OPTIMIZERS["Adam"](make_model(**settings).parameters()))
    assert manager.restore(optimizer=OPTIMIZERS["Adam"](make_model().parameters())) == 7


def test_parameters_with_several_names_or_owners(tmp_path):
    """Order is compared by any common name: tied weights, a model that is part of another."""

    def make():
        inner = make_model()
        outer = nn.Sequential(inner, inner)
        return inner, outer, torch.optim.SGD(inner.parameters(), lr=0.1)

    inner, outer, optimizer = make()
    manager = saved(tmp_path, inner=inner, outer=outer, optimizer=optimizer)
    inner, outer, optimizer = make()
    assert manager.restore(outer=outer, optimizer=optimizer, inner=inner) == 7
    assert manager.restore(7, optimizer=optimizer, outer=outer) == 7


def test_a_schedule_adds_entries_to_groups(tmp_path):
    """An optimizer without a schedule takes the state of one with it, and the reverse."""
    model = make_model()
    optimizer = stepped(model, OPTIMIZERS["AdamW"])
    plain = saved(tmp_path / "plain", optimizer=optimizer)
    scheduled = stepped(model, OPTIMIZERS["AdamW"])
    lr_scheduler.OneCycleLR(scheduled, 0.1, total_steps=9)
    manager = saved(tmp_path / "scheduled", optimizer=scheduled)
    assert manager.restore(optimizer=optimizer) == 7
    assert plain.restore(optimizer=scheduled) == 7


class OwnAdamW(torch.optim.AdamW):
    pass


def test_a_class_of_somebodys_own_is_warned_of(tmp_path):
    model = make_model()
    manager = saved(tmp_path, model=model, optimizer=stepped(model, OPTIMIZERS["AdamW"]))
    other = make_model()
    with pytest.warns(MemkitWarning, match="optimizer was a AdamW when it was saved, now it is a OwnAdamW"):
        assert manager.restore(model=other, optimizer=stepped(other, OwnAdamW)) == 7
    check = saved(tmp_path / "SGD", model=model, optimizer=stepped(model, OPTIMIZERS["SGD"]))
    check_refused(
        check,
        r"groups without betas, eps; expected those of a OwnAdamW",
        model=other,
        optimizer=OwnAdamW(other.parameters()),
    )


class Counting(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self):
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


def test_rejects_values_without_parameter(tmp_path):
    model, other = make_model(), make_model()
    manager = saved(tmp_path, model=model, optimizer=stepped(model, lambda parameters: Counting(parameters, lr=0.1)))
    optimizer = Counting(other.parameters(), lr=0.1)
    assert manager.restore(model=other, optimizer=optimizer) == 7
    assert optimizer.state["steps"] == 2


def test_gradients_of_other_shapes(tmp_path):
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    manager = saved(tmp_path, optimizer=optimizer)
    assert manager.restore(optimizer=torch.optim.SGD(other.parameters())) == 7
    assert_same_states(gradients(other), gradients(model))


# ---- models

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXACT = {
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float32),
    (torch.float16, torch.float64),
}


@pytest.mark.parametrize("theirs", FLOATS)
def test_model_accepts_exactly_representable_values(tmp_path, theirs):
    model = make_model(dtype=theirs)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    manager = saved(tmp_path, model=model)
    for own in FLOATS:
        other = make_model(dtype=own)
        if theirs != own and (theirs, own) not in EXACT:
            check_refused(manager, rf"0\.weight in {theirs}, here {own}", model=other)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert manager.restore(7, model=other) == 7  # on purpose
        if theirs != own:
            with pytest.warns(MemkitWarning, match=f"model holds values in {own} that were saved in {theirs}"):
                assert manager.restore(model=other) == 7
        for one, each in zip(model.parameters(), other.parameters(), strict=True):
            assert_same_states(each.to(torch.float64), one.to(torch.float64))


def integer_model():
    model = make_model()
    model[1].num_batches_tracked = model[1].num_batches_tracked.to(torch.int32)
    return model


OTHER_MODELS = {
    "another width": (lambda: make_model(width=9), r"size mismatch for 0\.weight: \(8, 5\), here \(9, 5\)"),
    "a layer more": (lambda: make_model().append(nn.Linear(1, 1)), r"no 3\.weight, no 3\.bias"),
    "a layer less": (lambda: make_model(norm=False), r"1\.weight, which the model does not have"),
    "on meta": (lambda: make_model().to("meta"), r"values for 0\.weight, which is on meta"),
    "whole numbers": (integer_model, r"1\.num_batches_tracked in torch\.int64"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused(tmp_path, name):
    make, match = OTHER_MODELS[name]
    model = make_model()
    manager, holder = saved(tmp_path, model=model, holder=Holder(1)), Holder(2)
    if name == "on meta":
        assert_refused(lambda: manager.restore(model=make(), holder=holder), FileFormatError, match)
    else:
        check_refused(manager, match, holder=holder, model=make())
    assert holder.value == 2


def test_many_problems_are_counted(tmp_path):
    manager = saved(tmp_path, model=make_model())
    check_refused(manager, r"1\.running_mean: \(8,\), here \(9,\) and 2 more|and \d more", model=make_model(width=9))


class Renames(nn.Module):
    """A module that reads its older form: its own `load_state_dict` says what it takes."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.new, self.fails = nn.Parameter(torch.zeros(2)), fails

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if self.fails:
            self.new.data.fill_(99.0)
            raise RuntimeError("not this one")
        state_dict[f"{prefix}new"] = state_dict.pop(f"{prefix}old", state_dict.get(f"{prefix}new"))
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_modules_with_a_form_of_their_own(tmp_path):
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.old = nn.Parameter(torch.ones(2))

    manager, model = saved(tmp_path, model=Renamed()), Renames()
    assert manager.restore(model=model) == 7
    assert model.new.tolist() == [1, 1]
    with pytest.raises(FileFormatError, match=r"Renames\.load_state_dict refuses: not this one"):
        manager.restore(model=(failing := Renames(fails=True)))
    assert failing.new.tolist() == [99, 99]  # it refuses what it had, too
    raised = assert_refused(lambda: manager.restore(model=failing), FileFormatError)
    assert raised.__notes__ == ["Already changed, at least in part: model."]


def test_lazy_modules_take_their_shapes(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    lazy = nn.Sequential(nn.LazyLinear(2))
    assert saved(tmp_path, model=model).restore(model=lazy) == 7
    assert_same_states(lazy.state_dict(), model.state_dict())


def test_an_average_of_another_model(tmp_path):
    manager = saved(tmp_path, average=AveragedModel(make_model()))
    assert manager.restore(average=AveragedModel(make_model())) == 7
    check_refused(manager, r"size mismatch for module\.0\.weight", average=AveragedModel(make_model(width=3)))
    check_refused(manager, r"no 0\.weight", average=make_model())


# ---- schedules and scalers


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def make_schedule(name, *, num_groups=1, steps=0):
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(num_groups)]
    scheduler = SCHEDULES[name](torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for _ in range(steps):
        next_rate(scheduler)
    return scheduler


def next_rate(scheduler):
    scheduler.optimizer.step()
    scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    return scheduler.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(tmp_path, name):
    schedule, again = make_schedule(name, steps=1), make_schedule(name)
    manager = saved(tmp_path, optimizer=schedule.optimizer, scheduler=schedule)
    manager.restore(optimizer=again.optimizer, scheduler=again)
    assert [next_rate(again) for _ in range(4)] == [next_rate(schedule) for _ in range(4)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_its_own_class_takes_a_schedules_state(tmp_path, name):
    manager = saved(tmp_path, scheduler=make_schedule(name, steps=3))
    for other in SCHEDULES:
        if other == name:
            assert manager.restore(scheduler=make_schedule(name)) == 7
            assert manager.restore(scheduler=make_schedule(name, steps=5)) == 7
        else:
            check_refused(manager, f"the state of a {name}; expected that of a {other}", scheduler=make_schedule(other))


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "SequentialLR"])
def test_a_schedule_of_other_groups_is_refused(tmp_path, name):
    manager = saved(tmp_path, scheduler=make_schedule(name))
    check_refused(manager, "a different number of base_lrs", scheduler=make_schedule(name, num_groups=2))


def test_a_sequence_of_other_schedules_is_refused(tmp_path):
    manager = saved(tmp_path, scheduler=make_schedule("SequentialLR"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    parts = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    check_refused(manager, "step_size", scheduler=lr_scheduler.SequentialLR(optimizer, parts, [2]))
    parts = [lr_scheduler.ConstantLR(optimizer) for _ in range(3)]
    check_refused(
        manager, "a different number of _schedulers", scheduler=lr_scheduler.SequentialLR(optimizer, parts, [2, 3])
    )


def test_rejects_state_of_disabled_scaler(tmp_path):
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    check_refused(
        saved(tmp_path / "on", scaler=on), "expected no entries, as in a GradScaler with the same arguments", scaler=off
    )
    check_refused(saved(tmp_path / "off", scaler=off), r"got no .*growth_factor", scaler=on)
    assert saved(tmp_path / "both", scaler=off).restore(scaler=off) == 7


# ---- all or none


class Fails(Holder):
    """Takes a part of its state, and then refuses; what it had, it takes back."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.value == "bad":
            torch.rand(3)
            raise ValueError("no")


def test_refusing_object_leaves_all_unchanged(tmp_path):
    model = make_model()
    manager = saved(
        tmp_path,
        model=model,
        optimizer=stepped(model, OPTIMIZERS["AdamW"]),
        first=Holder(1),
        second=Holder("bad"),
        third=Holder(3),
    )
    other = make_model()
    objects = {
        "model": other,
        "optimizer": stepped(other, OPTIMIZERS["AdamW"], steps=1),
        "first": Holder("own"),
        "third": Holder(torch.ones(2)),
    }
    with pytest.warns(MemkitWarning, match="second was a Holder when it was saved, now it is a Fails"):
        check_refused(manager, "Fails.load_state_dict refuses: no", **objects, second=Fails(0))


def test_out_of_memory_is_not_a_file_error(tmp_path):
    class Small(Holder):
        def load_state_dict(self, state):
            if self.value == 0:
                raise MemkitOutOfMemoryError("load", got="1 GiB", expected="room", fix="none.")

    with pytest.warns(MemkitWarning, match="now it is a "), pytest.raises(MemkitOutOfMemoryError):
        saved(tmp_path, holder=Holder(1)).restore(holder=Small(0))


def test_interrupt_leaves_all_unchanged(tmp_path):
    class Interrupted(Holder):
        def load_state_dict(self, state):
            if self.value == 0:
                raise KeyboardInterrupt

    manager, first = saved(tmp_path, first=Holder(1), last=Holder(2)), Holder(0)
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        warnings.simplefilter("ignore", MemkitWarning)
        manager.restore(first=first, last=Interrupted(0))
    assert first.value == 0


def test_warns_of_objects_of_other_class(tmp_path):
    manager = saved(tmp_path, monitor=Monitor())

    class Stopper(Monitor):
        pass

    with pytest.warns(MemkitWarning, match="monitor was a Monitor when it was saved, now it is a .*Stopper"):
        manager.restore(monitor=Stopper())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.restore(7, monitor=Stopper())


def test_an_accumulator_of_other_parameters(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradientAccumulator(optimizer, 2)
    accumulator.backward(model(torch.ones(4, 5)).sum())
    manager = saved(tmp_path, optimizer=optimizer, accumulator=accumulator)
    other = GradientAccumulator(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), 2)
    check_refused(manager, r"expected the gradients of 1 parameters", optimizer=optimizer, accumulator=other)


# ---- random states


def test_random_states_of_missing_accelerators(tmp_path, monkeypatch):
    manager, capture = TrainingStateManager(tmp_path), random_state.capture

    def with_a_card():
        state = capture()
        return random_state.RandomState(state.cpu, state.cpu, state.host, {1: state.cpu})

    monkeypatch.setattr(random_state, "capture", with_a_card)
    manager.save(1, holder=Holder(1))
    monkeypatch.undo()
    with pytest.warns(MemkitWarning, match="random states of 2 accelerators, but 0 are in use now"):
        manager.restore(holder=Holder(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.restore(1, holder=Holder(0))


@pytest.mark.parametrize("key", ["cpu", "numpy", "python", "version"])
def test_unrestorable_random_state(tmp_path, monkeypatch, key):
    manager, state = TrainingStateManager(tmp_path), random_state.capture().state_dict()
    monkeypatch.setattr(random_state.RandomState, "state_dict", lambda _: {**state, key: torch.ones(3)})
    manager.save(1, holder=Holder(1))
    monkeypatch.undo()
    check_refused(manager, "random state|RandomState|Error", holder=Holder(0))


# ---- what is saved


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, device="meta"),
        {torch.ones(1): 1},
        {"memkit sharded tensor": 1},
    ],
    ids=["meta", "a tensor as a key", "our own mark"],
)
def test_rejects_values_that_do_not_round_trip(tmp_path, value):
    with pytest.raises(InputTypeError, match=r"save\(holder=\.\.\.\)"):
        TrainingStateManager(tmp_path).save(0, holder=Holder(value))
    assert not list(tmp_path.iterdir())


def test_levels(tmp_path):
    """What can be saved can be read back."""
    value, inside = [], Holder()
    for _ in range(90):
        value = [value]
    manager = saved(tmp_path, holder=Holder(value))
    manager.restore(holder=inside)
    assert repr(inside.value) == repr(value)
    value.append(value)
    assert_refused(lambda: manager.save(8, holder=Holder(value)), InputTypeError, "up to 100 levels")


@pytest.mark.parametrize(
    "value",
    [
        2**3000,
        -(2**70),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3).expand(4, 3),
        "\ud800",
        {(1, (2,)): {3}},
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2, dtype=torch.uint16),
        torch.sparse_coo,
    ],
)
def test_more_values_come_back(tmp_path, value):
    there = Holder()
    assert saved(tmp_path, holder=Holder(value)).restore(holder=there) == 7
    assert repr(there.value) == repr(value)


def test_warns_of_wrapper_with_other_precision(tmp_path):
    def make(precision):
        model = make_model(norm=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemkitWarning)  # float16 on a CPU
            return MemoryEfficientTrainingWrapper(model, OPTIMIZERS["AdamW"](model.parameters()), precision=precision)

    half, plain = make("fp16-mixed"), make(None)
    with pytest.warns(MemkitWarning, match="it has a loss scale, which is not used"):
        saved(tmp_path / "half", **half.parts()).restore(**plain.parts())
    with pytest.warns(MemkitWarning, match="it has no loss scale, which starts afresh"):
        saved(tmp_path / "plain", **plain.parts()).restore(**half.parts())
