"""What a state holds: a training that is stopped anywhere and restored goes on bit for bit."""

import copy
import itertools
import random
import warnings
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from memkit._core.errors import FileFormatError, InputTypeError, MemkitWarning, StateError
from memkit.predict.virtual_gpu import VirtualGPU
from memkit.recipes.enhanced import create_enhanced_train_loop
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.recipes.order import ResumableBatchSampler, ResumableLoader
from memkit.recipes.state.manager import TrainingStateManager
from memkit.train.accumulate import GradientAccumulator
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.helpers import assert_refused


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.4), nn.Linear(16, 3))

    def forward(self, x):
        noise = np.random.standard_normal() + random.random()  # all random states take part
        return self.net(x) + 0.01 * noise


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(26, 5, generator=generator), torch.arange(26) % 3)


class Monitor:
    """Early stopping, as somebody writes it: NumPy's numbers among its values."""

    def __init__(self):
        self.best, self.bad, self.history = np.float64("inf"), 0, []

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)

    def update(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, np.float64(value))
        self.history = [*self.history, value]


class Training:
    """A training with everything: groups of three micro-batches, loss scale, schedule, average, early stopping."""

    def __init__(self, make_optimizer=torch.optim.AdamW, *, dtype=torch.float32):
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.02)
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=40, cycle_momentum=False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.average = AveragedModel(self.model)
        self.monitor = Monitor()
        self.accumulator = GradientAccumulator(
            self.optimizer, 3, max_grad_norm=1.0, scaler=self.scaler, check_weights=False
        )
        batches = ResumableBatchSampler(26, 4, seed=1)
        self.loader = ResumableLoader(DataLoader(data(), batch_sampler=batches, generator=torch.Generator()))
        self._dtype = dtype

    def objects(self):
        return {name: each for name, each in vars(self).items() if not name.startswith("_")}

    def run(self):
        for epoch in range(self.loader.epoch, 10):
            self.loader.set_epoch(epoch)
            for x, y in self.loader:
                loss = F.cross_entropy(self.model(x.to(self._dtype)), y)
                self.accumulator.backward(loss, count=len(x))
                if self.accumulator.step():
                    self.scheduler.step()
                    self.average.update_parameters(self.model)
                    self.monitor.update(loss.item())
                yield

    def states(self):
        return copy.deepcopy({name: each.state_dict() for name, each in self.objects().items()})


def assert_same_states(first, second):
    """Bit for bit, of any containers."""
    ones, others = pytree.tree_leaves_with_path(first), pytree.tree_leaves_with_path(second)
    assert len(ones) == len(others) > 0
    for (path, one), (its_path, other) in zip(ones, others, strict=True):
        assert path == its_path
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=str(path))
        else:
            assert one == other or one != one, path


def go_on_after(folder, stop, num_steps, make, **settings):
    """Train ``stop`` steps, save, forget everything, and train the rest with other objects."""
    whole, manager = make(), TrainingStateManager(folder, **settings)
    random.seed(5)
    np.random.seed(5)
    running = whole.run()
    for _ in itertools.islice(running, stop):
        pass
    manager.save(stop, **whole.objects())
    for _ in itertools.islice(running, num_steps - stop):
        pass
    manager.close()
    random.seed(99)
    np.random.seed(99)
    resumed = make()
    assert TrainingStateManager(folder).restore(**resumed.objects()) == stop
    for _ in itertools.islice(resumed.run(), num_steps - stop):
        pass
    return whole, resumed


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stop", [1, 6, 7, 11])  # in a group, between groups, at an epoch's end, in the second epoch
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path, stop, background):
    whole, resumed = go_on_after(tmp_path, stop, 20, Training, background=background)
    assert_same_states(resumed.states(), whole.states())
    assert resumed.accumulator.num_steps == 6
    assert len(resumed.monitor.history) == 6


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Muon"])
def test_optimizers(tmp_path, name):
    def make_optimizer(parameters, lr):
        return getattr(torch.optim, name)([each for each in parameters if name != "Muon" or each.ndim == 2], lr=lr)

    class Plain(Training):
        def __init__(self):
            super().__init__(make_optimizer)
            self.scheduler = lr_scheduler.ConstantLR(self.optimizer)

    whole, resumed = go_on_after(tmp_path, 7, 12, Plain)
    assert_same_states(resumed.states(), whole.states())


def test_values_wider_than_their_parameters_stay_wide(tmp_path):
    """torch's own `load_state_dict` rounds an optimizer's float32 values to the parameters' bfloat16."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                master = state.setdefault("master", parameter.float())
                parameter.copy_(master.sub_(parameter.grad.float(), alpha=0.01))

    def make():
        training = Training(Wide, dtype=torch.bfloat16)
        training.scheduler = lr_scheduler.ConstantLR(training.optimizer)
        return training

    whole, resumed = go_on_after(tmp_path, 7, 12, make)
    assert_same_states(resumed.states(), whole.states())
    assert resumed.optimizer.state_dict()["state"][0]["master"].dtype == torch.float32


def test_a_plain_loop_in_the_middle_of_its_group(tmp_path):
    """Without an accumulator the group's gradient lies in ``.grad``, which no state_dict has."""

    def start():
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = start()
    x = torch.randn(4, 5)
    model(x).sum().backward()
    manager = TrainingStateManager(tmp_path)
    manager.save(1, model=model, optimizer=optimizer)
    resumed, its_optimizer = start()
    manager.restore(model=resumed, optimizer=its_optimizer)
    for each, stepper in ((model, optimizer), (resumed, its_optimizer)):
        each(x + 1).sum().backward()
        stepper.step()
    assert_same_states(resumed.state_dict(), model.state_dict())
    optimizer.zero_grad()
    manager.save(2, model=model, optimizer=optimizer)
    manager.restore(model=resumed, optimizer=its_optimizer)  # and a gradient that was not there goes
    assert resumed.weight.grad is None


def test_the_wrapper_in_the_middle_of_a_batch(tmp_path):
    """Saved after two of four micro-batches: the resumed training takes the rows that are left, in two parts."""

    def start(num_parts):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=num_parts)

    def run(trainer, rows, *, after=lambda num_done: None):
        num_done = 0
        for attempt in trainer.microbatches(rows):
            with attempt as micro:
                trainer.backward(trainer.model(micro).square().mean())
            if attempt.is_check:
                assert_refused(lambda: trainer.state_dict(), StateError, "during the split check")
                continue
            num_done += 1
            after(num_done)

    x = torch.randn(8, 5)
    model, optimizer, trainer = start(4)
    manager = TrainingStateManager(tmp_path)

    def save(num_done):
        if num_done == 2:
            manager.save(0, model=model, optimizer=optimizer, trainer=trainer)

    run(trainer, x, after=save)
    assert trainer.step()
    resumed, its_optimizer, its_trainer = start(2)
    manager.restore(model=resumed, optimizer=its_optimizer, trainer=its_trainer)
    run(its_trainer, x[4:])
    assert its_trainer.step()
    assert_same_states(resumed.state_dict(), model.state_dict())


def test_restores_into_existing_tensors(tmp_path):
    training, manager = Training(), TrainingStateManager(tmp_path)
    next(training.run())
    manager.save(1, **training.objects())
    places = [each.data_ptr() for each in training.model.state_dict().values()]
    manager.restore(**training.objects())
    assert [each.data_ptr() for each in training.model.state_dict().values()] == places


def test_no_second_copy_on_the_device(tmp_path):
    """On a card that holds the model and its optimizer's values already, restoring them takes not a byte."""

    def start(device):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(1, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer}

    manager = TrainingStateManager(tmp_path)
    manager.save(1, **start("cpu"))
    with VirtualGPU("RTX 4090") as gpu:
        objects = start("cuda")
        before = gpu.allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        manager.restore(**objects)
        assert torch.cuda.max_memory_allocated() == gpu.allocated_bytes == before


def test_wrappers_of_a_model_are_not_in_its_state(tmp_path):
    model, manager = nn.Linear(2, 2), TrainingStateManager(tmp_path)
    manager.save(1, model=torch.compile(model, backend="eager"))
    plain = nn.Linear(2, 2)
    assert manager.restore(model=plain) == 1
    assert_same_states(plain.state_dict(), model.state_dict())
    assert manager.restore(model=torch.compile(nn.Linear(2, 2), backend="eager")) == 1


class Holder:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"deep": [{"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["deep"][0]["value"]


@pytest.mark.parametrize(
    "value",
    [
        1, 2.5, float("nan"), 2**80, 1 + 2j, True, None, "text", b"bytes", (1, (2, [3])), {1, "a"}, {(1, 2): {3: 4}},
        Counter("aab"), OrderedDict(b=1, a=2), torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided,
        torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float8_e4m3fn).float(),
        torch.zeros(0), np.float32(0.1).item(), random.getstate(), np.random.default_rng(0).bit_generator.state,
        torch.Generator().get_state(), nn.Parameter(torch.ones(2)).data,
    ],
)  # fmt: skip
def test_plain_values_come_back(tmp_path, value):
    manager, there = TrainingStateManager(tmp_path), Holder()
    manager.save(0, holder=Holder(value))
    manager.restore(holder=there)
    assert type(there.value) is type(value)
    if isinstance(value, torch.Tensor):
        assert_same_states(there.value, value)
    assert repr(there.value) == repr(value)


def test_numbers_of_numpy_become_pythons(tmp_path):
    manager, there = TrainingStateManager(tmp_path), Holder()
    manager.save(0, holder=Holder(np.float64(0.1)))
    manager.restore(holder=there)
    assert type(there.value) is float
    assert there.value == 0.1


@pytest.mark.parametrize(
    "value", [np.ones(2), deque([1]), frozenset({1}), range(3), object(), torch.eye(2).to_sparse(), slice(1), Holder]
)
def test_rejects_other_values_by_name_before_writing(tmp_path, value):
    with pytest.raises(InputTypeError, match=r"save\(holder=\.\.\.\).* at holder\.deep\[0\]\.value"):
        TrainingStateManager(tmp_path).save(0, holder=Holder(value))
    assert not list(tmp_path.iterdir())


def test_sparse_gradients_in_a_group_name_their_way_out(tmp_path):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=True), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradientAccumulator(optimizer, accumulation_steps=2)
    x = torch.arange(24).view(8, 3)
    accumulator.backward(model(x).square().mean(), count=8)
    accumulator.step()
    manager = TrainingStateManager(tmp_path)
    with pytest.raises(InputTypeError, match="save after a whole batch, when its step is done"):
        manager.save(1, model=model, optimizer=optimizer, accumulator=accumulator)
    accumulator.backward(model(x).square().mean(), count=8)
    assert accumulator.step()
    manager.save(1, model=model, optimizer=optimizer, accumulator=accumulator)


class Kept:
    """Somebody's own class, whose state has parameters."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def state_dict(self):
        return {"parameters": list(self.parameters)}

    def load_state_dict(self, state):
        for own, saved in zip(self.parameters, state["parameters"], strict=True):
            own.data.copy_(saved)


def test_trained_parameters_that_nobody_saves_are_told_of_once(tmp_path):
    model, weights, frozen = nn.Linear(3, 1), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), False)
    optimizer = torch.optim.Adam([*model.parameters(), weights, frozen])
    state = TrainingStateManager(tmp_path)
    with pytest.warns(MemkitWarning, match=r"optimizer trains parameters .* of the shapes \(2,\)"):
        state.save(1, model=model, optimizer=optimizer)
    state.save(2, model=model, optimizer=optimizer)


def test_trained_parameters_that_another_object_saves_are_not_told_of(tmp_path):
    model, weights, flat = nn.Linear(3, 1), nn.Parameter(torch.ones(2)), torch.zeros(6)
    view = nn.Parameter(flat[2:4])
    optimizer = torch.optim.Adam([*model.parameters(), weights, view])
    state = TrainingStateManager(tmp_path)
    state.save(1, model=model, optimizer=optimizer, kept=Kept(weights), all=Kept(flat))  # a warning would be an error
    state.save(2, model=model, optimizer=optimizer, criterion=nn.ParameterList([weights, view]))
    TrainingStateManager(tmp_path / "other").save(1, optimizer=optimizer)  # the values are kept elsewhere


class KeptAs:
    """A parameter that is saved in another form, as SAC's temperature is."""

    def __init__(self, form, value):
        self.form, self.value = form, value

    def state_dict(self):
        return {"value": self.form(self.value), "rate": 0.1}

    def load_state_dict(self, state):
        self.value.data.copy_(torch.as_tensor(state["value"]))


@pytest.mark.parametrize(
    "form", [lambda value: value.detach().clone(), lambda value: value.double().cpu(), torch.Tensor.tolist]
)
def test_trained_parameters_that_are_saved_as_copies_are_not_told_of(tmp_path, form):
    model, weights = nn.Linear(3, 1), torch.tensor([1.5, 2.5], requires_grad=True)
    optimizer, kept = torch.optim.Adam([*model.parameters(), weights]), KeptAs(form, weights)
    TrainingStateManager(tmp_path).save(1, model=model, optimizer=optimizer, kept=kept)  # a warning would be an error
    kept.form = lambda value: (value + 1).tolist()
    with pytest.warns(MemkitWarning, match=r"trains parameters .* of the shapes \(2,\)"):
        TrainingStateManager(tmp_path / "other").save(1, model=model, optimizer=optimizer, kept=kept)


def scheduled_wrapper():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule, average = lr_scheduler.CosineAnnealingLR(optimizer, 10), AveragedModel(model)
    return MemoryEfficientTrainingWrapper(model, optimizer, scheduler=schedule, average=average)


def test_what_a_wrapper_steps_and_nobody_saves_is_told_of_once(tmp_path):
    trainer = scheduled_wrapper()
    parts, state = trainer.parts(), TrainingStateManager(tmp_path)
    some = {name: parts[name] for name in ("model", "optimizer", "trainer")}
    with pytest.warns(MemkitWarning) as caught:
        state.save(1, **some)
    state.save(2, **some)  # a warning would be an error
    (told,) = caught
    assert "trainer, a MemoryEfficientTrainingWrapper, steps" in str(told.message)
    assert "(scheduler, average)" in str(told.message)
    assert str(told.message).endswith(
        "write state.save(step, **trainer.parts()), and state.restore(**trainer.parts())."
    )
    with pytest.warns(MemkitWarning, match=r"steps .* \(model, optimizer, scheduler, average\)"):
        TrainingStateManager(tmp_path / "alone").save(1, trainer=trainer)


class Together:
    """Somebody's own class that saves several objects."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return {name: each.state_dict() for name, each in self.parts.items()}

    def load_state_dict(self, state):
        for name, each in self.parts.items():
            each.load_state_dict(state[name])


def test_what_a_wrapper_steps_and_somebody_saves_is_not_told_of(tmp_path):
    trainer = scheduled_wrapper()
    parts = trainer.parts()
    schedule, average = parts.pop("scheduler"), parts.pop("average")
    names = iter("abcd")

    def save(**objects):  # a warning would be an error
        TrainingStateManager(tmp_path / next(names)).save(1, **objects)

    save(**trainer.parts())
    save(**parts, rate=schedule, smooth=average)
    save(**parts, other=Together(schedule=schedule), both=nn.ModuleList([average]))
    del parts["model"]
    save(**parts, other=Together(schedule=schedule, average=average))  # the model is saved elsewhere


def test_what_an_accumulator_and_a_loop_step_and_nobody_saves_is_told_of(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradientAccumulator(optimizer, scaler=torch.amp.GradScaler("cpu"))
    with pytest.warns(MemkitWarning, match=r"\(scaler\).*optimizer=optimizer, scaler=scaler, accumulator=accumulator"):
        TrainingStateManager(tmp_path / "sum").save(1, model=model, optimizer=optimizer, sum=accumulator)
    plain = GradientAccumulator(optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    TrainingStateManager(tmp_path / "plain").save(1, model=model, optimizer=optimizer, sum=plain)
    loop = MemoryEfficientTrainLoop(scheduled_wrapper(), [torch.ones(2, 3)], lambda model, x: model(x).mean())
    with pytest.warns(MemkitWarning, match=r"trainer, optimizer, scheduler, .*write .*\*\*loop\.objects\(\)"):
        TrainingStateManager(tmp_path / "loop").save(1, model=loop.trainer.model, loop=loop)
    TrainingStateManager(tmp_path / "whole").save(1, **loop.objects())
    enhanced = create_enhanced_train_loop(loop)
    with pytest.warns(MemkitWarning, match=r"write create_enhanced_train_loop\(\.\.\., state=state\)"):
        TrainingStateManager(tmp_path / "enhanced").save(1, enhanced=enhanced)


class Slow(torch.optim.SGD):
    """Keeps slow weights, as Lookahead does, in an attribute."""

    def __init__(self, params, **settings):
        super().__init__(params, lr=0.1, **settings)
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]
        self.rate, self.views = torch.ones(1), list(self.param_groups[0]["params"])


class SlowInState(Slow):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        for each, slow in zip(self.param_groups[0]["params"], self.slow[0], strict=True):
            self.state[each]["slow"] = slow


class SlowCopied(Slow):
    def state_dict(self):
        return {**super().state_dict(), "slow": [each.clone() for each in self.slow[0]]}


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, whose state is not in its own."""

    def __init__(self, params, kind):
        super().__init__(params, {})
        self.base = kind(self.param_groups)
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()


class AroundShared(Around):
    def __init__(self, params, kind):
        super().__init__(params, kind)
        self.base.state = self.state


def stepped(make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("make", "name"), [(Slow, "Slow.slow"), (lambda params: Around(params, torch.optim.Adam), "Around.base")]
)
def test_tensors_that_an_optimizer_keeps_beside_its_state_are_told_of_once(make, name, tmp_path):
    objects, state = stepped(make), TrainingStateManager(tmp_path)
    with pytest.warns(MemkitWarning, match=rf"optimizer keeps tensors .* \({name}\) that its state_dict\(\) does not"):
        state.save(1, **objects)
    state.save(2, **objects)  # a warning would be an error


OPTIMIZERS = [SlowInState, SlowCopied, lambda params: AroundShared(params, torch.optim.Adam)]
for kind in list(vars(torch.optim).values()):
    if isinstance(kind, type) and kind.__name__ not in ("Optimizer", "LBFGS", "Muon", "SparseAdam"):
        OPTIMIZERS += [kind, type(f"Derived{kind.__name__}", (kind,), {"__module__": __name__})]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_whose_state_is_whole_is_not_told_of(make, tmp_path):
    TrainingStateManager(tmp_path).save(1, **stepped(make))  # a warning would be an error


def test_objects_without_a_state_are_refused(tmp_path):
    manager = TrainingStateManager(tmp_path)
    assert_refused(lambda: manager.save(0, history=[1]), InputTypeError, r"save\(history=\.\.\.\): got list")
    manager.save(0, holder=Holder(1))
    assert_refused(lambda: manager.restore(holder=1), InputTypeError, r"restore\(holder=\.\.\.\): got int")
    assert_refused(
        lambda: manager.save(0, opt=torch.optim.AdamW), InputTypeError, "got the class AdamW.*AdamW that trains"
    )


def test_names_and_kinds_are_compared(tmp_path):
    manager, model = TrainingStateManager(tmp_path), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.save(3, model=model, optimizer=optimizer)
    with pytest.raises(FileFormatError, match=r"restore\(net=\.\.\.\): got a state of model, optimizer"):
        manager.restore(net=model)
    with pytest.warns(MemkitWarning, match="the state has optimizer too"):
        assert manager.restore(model=model) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.restore(3, model=model) == 3  # a part, on purpose
    with pytest.raises(FileFormatError, match=r"(?s)Linear\.load_state_dict refuses.*size mismatch"):
        manager.restore(3, model=nn.Linear(3, 2))
    other = torch.optim.SGD([*model.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(FileFormatError, match=r"SGD\.load_state_dict refuses"):
        manager.restore(model=model, optimizer=other)


def test_a_save_within_a_save_is_refused(tmp_path):
    manager = TrainingStateManager(tmp_path)

    class Nested(Holder):
        def state_dict(self):
            manager.save(1)

    assert_refused(lambda: manager.save(0, nested=Nested()), StateError, "while this manager saves")
    manager.save(2, holder=Holder(1))  # and nothing is stuck
    assert manager.steps == (2,)


def test_shared_and_partial_storages(tmp_path):
    """Tied weights are written once, and of a small part of a large tensor only the part."""
    manager = TrainingStateManager(tmp_path)
    large = torch.zeros(1_000_000)
    manager.save(0, holder=Holder(large[:10]))
    assert next(tmp_path.glob("*/rank-0.pt")).stat().st_size < 20_000
    for background in (False, True):
        with TrainingStateManager(tmp_path / str(background), background=background) as each:
            each.save(0, holder=Holder([large, large]))
        assert next((tmp_path / str(background)).glob("*/rank-0.pt")).stat().st_size < 1.1 * large.nbytes
