"""The training loop: exact to the last bit against the loop by hand, stopped and gone on with, and without a trace."""

import contextlib
import copy
import gc
import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

import memkit as mk
from memkit._machine import devices
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.recipes.order import ResumableBatchSampler, ResumableLoader
from memkit.recipes.reducers import Accuracy
from memkit.recipes.state.files import list_states
from memkit.recipes.state.manager import TrainingStateManager
from memkit.recipes.validation import ValidationMonitor
from memkit.voxel.dataset import VoxelDataset
from tests.helpers import FunctionsEntered, assert_refused, one_in, one_in_product
from tests.recipes.loop_parts import StopAfter, digits, loader_of, make, train_in_child, weights
from tests.toys import classify, trainer_of


def scores_of(model, batch):
    scores = model(batch[0])
    return {"loss": F.cross_entropy(scores, batch[1], reduction="none"), "accuracy": (scores, batch[1])}


def test_learns_digits_and_reports(caplog):
    loop, model = make(
        loader_of(1500), val_loader=loader_of(300), val_fn=scores_of, reducers={"accuracy": Accuracy()}, report_every=10
    )
    with caplog.at_level(logging.INFO, logger="memkit"):
        result = loop.run(num_epochs=1)
    assert (result.ended_by, result.num_steps, result.num_skipped) == ("epochs", 94, 0)
    model.eval()
    images, classes = digits(300)
    expected = (model(images).argmax(1) == classes).double().mean().item()
    assert result.validation["accuracy"] == pytest.approx(expected)
    assert result.validation["accuracy"] > 0.8
    (report,) = [line for line in caplog.messages if line.startswith("epoch 1, step 50 of 94 (53%, ")]
    measured = (
        r"\d+ s left\): loss [\d.]+, lr [\d.]+; [\d.]+ ms a step: data \d+%, .*step \d+%; host resident .* [MG]iB"
    )
    assert re.search(measured, report)


def test_every_group_and_the_incomplete_last_one_is_exact():
    """52 rows in batches of 16, two micro-batches each: the last batch has four."""
    images, classes = digits()
    rows = list(zip(images[:52].double(), classes[:52], strict=True))
    loader = DataLoader(rows, batch_size=16)
    model = nn.Linear(64, 10).double()
    by_hand = copy.deepcopy(model)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.5), accumulation_steps=3
    )
    MemoryEfficientTrainLoop(trainer, loader, classify, progress=False).run()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for batch in loader:
        optimizer.zero_grad()
        classify(by_hand, batch).backward()
        optimizer.step()
    assert trainer.num_steps == 4
    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("every", [None, 5])
def test_a_validation_does_not_change_the_training(every):
    """Its loader draws from the global random state, as dropout does."""
    plain, expected = make()
    plain.run(num_epochs=2)
    loop, model = make(val_loader=loader_of(50), validate_every=every)
    result = loop.run(num_epochs=2)
    assert result.validation["loss"] < 2.0
    assert torch.equal(weights(model), weights(expected))
    assert model.training


def test_the_validation_is_the_exact_mean_of_the_loss():
    """Batches of 16 of 50 rows: the mean over batches is another number."""
    loop, model = make(val_loader=loader_of(50))
    result = loop.run(num_epochs=1)
    model.eval()
    images, classes = digits(50)
    assert result.validation["loss"] == pytest.approx(F.cross_entropy(model(images), classes).item(), rel=1e-6)


def orders(kind):
    if kind == "shuffled":
        return loader_of()
    if kind == "own generator":
        return loader_of(generator=torch.Generator().manual_seed(5))
    if kind == "workers":
        return loader_of(num_workers=1)
    if kind == "persistent workers":
        return loader_of(num_workers=1, persistent_workers=True)
    if kind == "persistent workers, own generator":
        return loader_of(num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(5))
    if kind == "distributed":
        data = torch.utils.data.TensorDataset(*digits())
        return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    batches = ResumableBatchSampler(200, 16, seed=3)
    return ResumableLoader(DataLoader(torch.utils.data.TensorDataset(*digits()), batch_sampler=batches))


PERSISTENT = ["persistent workers", "persistent workers, own generator"]


@pytest.mark.filterwarnings("ignore:.* has persistent workers")  # this data set draws no random numbers
@pytest.mark.parametrize(
    "kind", one_in(5, ["shuffled", "own generator", *PERSISTENT, "resumable", "workers", "distributed"])
)
def test_sigterm_saves_and_the_next_run_goes_on_bit_by_bit(kind, tmp_path):
    whole, expected = make(orders(kind), val_loader=loader_of(50), validate_every=7)
    result = whole.run(num_epochs=3)

    def stop_at(steps):
        def fn(model, batch):
            if loop.num_steps == steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return classify(model, batch)

        return fn

    before = signal.getsignal(signal.SIGTERM)
    for steps in (5, 20):  # in the first and in the second epoch, each resumed by new objects
        with TrainingStateManager(tmp_path) as state:
            loop, _ = make(orders(kind), val_loader=loader_of(50), validate_every=7, state=state)
            loop._loss_fn = stop_at(steps)
            assert loop.run(num_epochs=3).ended_by == "SIGTERM"
            assert loop.num_steps == steps + 1  # the step that was under way is done
    assert signal.getsignal(signal.SIGTERM) is before
    with TrainingStateManager(tmp_path) as state:
        loop, model = make(orders(kind), val_loader=loader_of(50), validate_every=7, state=state)
        torch.rand(3)  # whatever the new program drew
        resumed = loop.run(num_epochs=3)
    assert resumed == result
    assert torch.equal(weights(model), weights(expected))


def test_tells_that_what_persistent_workers_draw_cannot_be_resumed(tmp_path):
    for num_epochs, context in ((1, contextlib.nullcontext()), (2, pytest.warns(mk.MemkitWarning, match="persistent"))):
        with TrainingStateManager(tmp_path) as state, context:
            loop, _ = make(orders("persistent workers"), state=state)
            loop.run(num_epochs=num_epochs)


@pytest.mark.filterwarnings("ignore:.* has persistent workers")
@pytest.mark.parametrize("kind", one_in(2, ["shuffled", PERSISTENT[0], PERSISTENT[1], "own generator"]))
def test_goes_on_between_two_epochs(kind, tmp_path):
    whole, expected = make(orders(kind))
    whole.run(num_epochs=2)
    for num_epochs in (1, 2):
        with TrainingStateManager(tmp_path) as state:
            loop, model = make(orders(kind), state=state)
            loop.run(num_epochs=num_epochs)
    assert torch.equal(weights(model), weights(expected))


def test_epochs_of_a_distributed_sampler_differ():
    """A loop that forgets set_epoch trains on the same order in every epoch."""
    loader, seen = orders("distributed"), []
    loop, _ = make(loader)
    loop._loss_fn = lambda model, batch: (seen.append(batch[0].sum().item()), classify(model, batch))[1]
    loop.run(num_epochs=2)
    assert sorted(seen[: len(seen) // 2]) != sorted(seen[len(seen) // 2 :])


def test_a_memory_manager_learns_of_the_steps():
    model = nn.Linear(64, 10)
    with mk.MemoryManager("cpu") as memory:
        trainer = trainer_of(model, memory=memory)
        loop = MemoryEfficientTrainLoop(trainer, loader_of(48), classify, progress=False)
        loop.run(num_epochs=2)
        assert memory.num_steps == loop.num_steps > 2
    trainer.memory = SimpleNamespace(step=3)  # a user's own idea of a memory
    assert loop.run(num_epochs=3).num_steps > memory.num_steps


@pytest.mark.parametrize("kind", ["shuffled", "resumable"])
def test_epoch_dependent_data_set_gets_the_epoch(kind):
    volumes = [{"x": torch.arange(64.0).reshape(1, 4, 4, 4)}] * 4
    dataset = VoxelDataset(volumes, augmentation_config={"flip_prob": 0.5, "rotate_prob": 0.0, "noise_std": 0.1})
    subset, generator = Subset(dataset, range(4)), torch.Generator()
    if kind == "shuffled":
        loader = DataLoader(subset, batch_size=4, shuffle=True, generator=generator)
    else:
        order = ResumableBatchSampler(4, 4, seed=0)
        loader = ResumableLoader(DataLoader(subset, batch_sampler=order, generator=generator))
    loop, _ = make(loader)
    seen = []
    loop._loss_fn = lambda model, batch: (
        seen.append(batch["x"].sum().item()),
        next(model.parameters()).square().mean(),
    )[1]
    loop.run(num_epochs=2)
    dataset.set_epoch(0)
    assert sum(seen[:2]) == pytest.approx(sum(dataset[i]["x"].sum().item() for i in range(4)), rel=1e-6)
    dataset.set_epoch(1)
    assert sum(seen[-2:]) == pytest.approx(sum(dataset[i]["x"].sum().item() for i in range(4)), rel=1e-6)


def test_sigterm_in_validation_is_obeyed_and_validation_repeated(tmp_path):
    whole, expected = make(val_loader=loader_of(50), monitor=ValidationMonitor())
    result = whole.run(num_epochs=2)
    with TrainingStateManager(tmp_path) as state:
        loop, _ = make(val_loader=DataLoader(StopAfter(20), batch_size=8), monitor=ValidationMonitor(), state=state)
        stopped = loop.run(num_epochs=2)
        assert (stopped.ended_by, stopped.num_epochs, stopped.validation) == ("SIGTERM", 0, None)
        monitor = ValidationMonitor()
        loop, model = make(val_loader=loader_of(50), monitor=monitor, state=state)
        assert loop.run(num_epochs=2) == result
    assert torch.equal(weights(model), weights(expected))
    assert monitor.best == pytest.approx(min(monitor.best, result.validation["loss"]))
    assert monitor.plateau in (0, 1)


def test_early_stopping_ends_the_run_and_stays_ended(tmp_path):
    def worse(model, batch):
        worse.value += 1.0
        return {"loss": torch.full((len(batch[0]),), worse.value)}

    worse.value = 0.0
    with TrainingStateManager(tmp_path) as state:
        loop, _ = make(val_loader=loader_of(16), val_fn=worse, monitor=ValidationMonitor(patience=2), state=state)
        result = loop.run(num_epochs=10)
        assert (result.ended_by, result.num_epochs) == ("early stopping", 3)
        again, _ = make(val_loader=loader_of(16), val_fn=worse, monitor=ValidationMonitor(patience=2), state=state)
        assert again.run(num_epochs=10).num_steps == result.num_steps


@pytest.mark.filterwarnings("ignore:precision='fp16-mixed' on a CPU")
def test_schedule_does_not_count_skipped_steps():
    """An infinite loss in the third batch: float16's scaler skips that step, and the schedule must not move."""
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, precision="fp16-mixed", scheduler=schedule)
    scaler = trainer._precision.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})
    seen = itertools.count()

    def broken(model, batch):
        return classify(model, batch) * (float("inf") if next(seen) == 2 else 1.0)

    result = MemoryEfficientTrainLoop(trainer, loader_of(), broken, progress=False).run()
    assert (result.num_steps, result.num_skipped, trainer.num_steps) == (13, 1, 12)
    assert schedule.get_last_lr() == [pytest.approx(1.0 - 12 / 100)]


class Figures(dict):
    def add_scalar(self, tag, value, step):
        self.setdefault(tag, []).append((step, value))


def test_writer_gets_reported_figures():
    writer = Figures()
    loop, _ = make(val_loader=loader_of(50), writer=writer, report_every=5)
    result = loop.run(num_epochs=1)
    assert [step for step, _ in writer["train/loss"]] == [5, 10]
    assert writer["validation/loss"] == [(13, result.validation["loss"])]
    assert {"train/lr", "memory/host_resident_bytes", "seconds_per_step/step"} <= writer.keys()


def test_the_bar_needs_tqdm_and_the_loop_does_not(monkeypatch, capfd):
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread that outlives the test
    bars = []

    def shown(**settings):
        bars.append(tqdm.tqdm(**(settings | {"disable": False})))
        return bars[-1]

    fake = SimpleNamespace(tqdm=shown)  # as in a terminal
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    loop, _ = make(report_every=5)
    loop._progress = True
    loop.run(num_epochs=2)
    assert (bars[0].n, bars[0].total) == (26, 26)
    assert "26/26" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed
    again, _ = make()
    again._progress = True
    assert again.run(num_epochs=1).num_steps == 13
    assert capfd.readouterr().err == ""


def test_a_thread_trains_without_touching_the_signals():
    expected_loop, expected = make()
    expected_loop.run()
    before = signal.getsignal(signal.SIGTERM)
    loop, model = make()
    seen = []
    loop._loss_fn = lambda model, batch: (seen.append(signal.getsignal(signal.SIGTERM)), classify(model, batch))[1]
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join()
    assert set(seen) == {before}
    assert torch.equal(weights(model), weights(expected))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_child_processes_train_alike(method):
    loop, model = make(val_loader=loader_of(50))
    result = loop.run(num_epochs=2)
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        found, num_steps, loss = pool.submit(train_in_child).result(timeout=120)
    assert (num_steps, loss) == (result.num_steps, result.validation["loss"])
    assert torch.equal(torch.from_numpy(found), weights(model))


def live_tensors():
    gc.collect()
    # By type, not isinstance: other tests leave objects of torch's behind that warn when they are asked.
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def run_steps(num_steps):
    """Train so many steps on one warm loop; return live tensors and resident bytes gained."""
    loop, _ = make(val_loader=loader_of(48), validate_every=100, report_every=50, writer=Ignore())
    per_epoch = 13
    loop.run(num_epochs=-(-num_steps // per_epoch // 2))  # warm: half of it
    tensors, resident = live_tensors(), devices.resident_bytes()
    begun = loop.num_steps
    loop.run(num_epochs=-(-(begun + num_steps) // per_epoch))
    assert loop.num_steps - begun >= num_steps
    return live_tensors() - tensors, devices.resident_bytes() - resident


class Ignore:
    def add_scalar(self, tag, value, step):
        pass


@pytest.mark.slow
def test_500_steps_leave_no_tensor_more():
    assert run_steps(500)[0] == 0


@pytest.mark.slow
def test_10_000_steps_leave_no_tensor_and_no_mebibyte():
    tensors, resident = run_steps(10_000)
    assert tensors == 0
    assert resident < 2**20


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="pass val_loader"):
        make(monitor=ValidationMonitor())
    assert_refused(lambda: make(report_every=0), mk.errors.ConfigError, r"report_every=0.* 1 or more")
    state, monitor = TrainingStateManager(tmp_path, mode="min"), ValidationMonitor(mode="max")
    with pytest.raises(
        mk.errors.ConfigError, match=r"TrainingStateManager\(mode='min'\): got a monitor with mode='max'"
    ):
        make(val_loader=loader_of(16), monitor=monitor, state=state)
    loop, _ = make(val_loader=loader_of(16), monitor=ValidationMonitor(metric="iou", mode="max"))
    with pytest.raises(ValueError, match=r"a validation of loss; expected a validation with the figure 'iou'"):
        loop.run()
    with pytest.raises(mk.errors.FileFormatError, match=r"version 9; expected version 4"):
        loop.load_state_dict(loop.state_dict() | {"position": {"version": 9}})


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ({"validate_every": 2, "save_every": 2}, [(2, 2), (4, 4), (6, 0), (8, 2), (10, 4)]),
        ({"save_every": 5}, [(5, None), (5, 5), (10, None), (10, 4)]),  # at the epochs' ends: first without a figure
        ({"validate_every": 4}, [(5, None), (10, None)]),
    ],
)
def test_a_state_has_the_figure_of_its_own_step(every, expected, tmp_path):
    """So that the best one can be restored. The figure of step 5 is the best; 5 steps an epoch."""
    with TrainingStateManager(tmp_path, keep=10) as manager:  # the mode is the monitor's
        loop, _ = make(
            loader_of(80),
            val_loader=[torch.zeros(1)],
            val_fn=lambda model, batch: {"score": torch.tensor([loop.num_steps % 6.0])},
            monitor=ValidationMonitor(mode="max", metric="score", patience=None),
            state=manager,
            **every,
        )
        loop.run(num_epochs=2)
        saved = [(each.step, each.read_manifest()["metric"]) for each in reversed(list_states(tmp_path))]
        best = manager.best_step
    assert saved == expected
    assert best == {2: 4, 5: 5}.get(every.get("save_every"))


@pytest.mark.parametrize("at", [3, 13])  # in the middle of an epoch, and at its last batch
def test_warns_of_restore_inside_a_run(tmp_path, at):
    """The running epoch would go on with its own batches, and count them as the state's."""
    loop, _ = make(report_every=1, writer=(writer := Restoring(at)))
    manager = TrainingStateManager(tmp_path)
    manager.save(0, **loop.objects())
    writer.restore = lambda: manager.restore(**loop.objects())
    with pytest.raises(mk.errors.StateError, match=r"TrainLoop\.load_state_dict\(state\): got a state that was loaded"):
        loop.run(2)
    loop.run(1)  # the state's own epoch
    assert loop.state_dict()["position"]["epoch"] == 1


class Restoring:
    def __init__(self, at):
        self.at, self.num_calls = at, 0

    def add_scalar(self, tag, value, step):
        if step == self.at and not self.num_calls:
            self.num_calls += 1
            self.restore()


@pytest.mark.parametrize("on_oom", ["raise", "exact"])
def test_the_loop_enters_few_functions_beside_its_step(on_oom):
    """Each takes about a microsecond or two in a large model, whose tensors have taken the processor's caches."""
    trainer = trainer_of(nn.Linear(4, 4), on_oom=on_oom)
    batch, monitor, seen = [torch.ones(8, 4), torch.ones(8, 4)], ValidationMonitor(), FunctionsEntered()

    class Batches:
        def __iter__(self):
            yield from [batch] * 6
            with seen:
                yield batch

    def mean_loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    MemoryEfficientTrainLoop(
        trainer, Batches(), mean_loss, val_loader=[batch], validate_every=100, monitor=monitor, progress=False
    ).run()
    with FunctionsEntered() as alone:
        trainer.train_step(batch, mean_loss)
    assert len(seen.own) - len(alone.own) <= 13


def train_by_plateau(folder, num_epochs, stop_after=None, **settings):
    """Return the weights, and the learning rate of each epoch; as if killed right after that save."""
    data = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2) for i in range(4)]
    torch.manual_seed(0)
    model, rates, num_saves = nn.Linear(4, 2), [], itertools.count(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)

    def loss_fn(model, batch):
        rates.append(optimizer.param_groups[0]["lr"])
        return classify(model, batch)

    with TrainingStateManager(folder) as state:

        class Saves:
            restore = state.restore

            def save(self, step, **objects):
                state.save(step, **objects)
                if next(num_saves) == stop_after:
                    raise KeyboardInterrupt

        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.9)
        loop = MemoryEfficientTrainLoop(
            mk.MemoryEfficientTrainingWrapper(model, optimizer), data, loss_fn,
            val_loader=data, plateau=plateau, state=Saves(), progress=False, **settings,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            loop.run(num_epochs=num_epochs)
    return weights(model), [*dict.fromkeys(rates)]


@pytest.mark.parametrize(
    ("every", "stop_after"),
    one_in_product(2, [{}, {"save_every": 4}, {"save_every": 2, "validate_every": 2}], [1, 2, 3]),
)
def test_a_plateau_goes_on_as_if_the_run_had_not_been_stopped(every, stop_after, tmp_path):
    whole, rates = train_by_plateau(tmp_path / "whole", 5, **every)
    assert len(rates) > 1  # it has lowered the learning rate
    train_by_plateau(tmp_path / "parts", 5, stop_after, **every)
    resumed, _ = train_by_plateau(tmp_path / "parts", 5, **every)
    assert torch.equal(resumed, whole)


def test_a_plateau_follows_the_figure_of_the_monitor():
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def make_loop(plateau, **settings):
        settings = {"val_loader": loader_of(16), "val_fn": scores_of, "progress": False} | settings
        settings["reducers"] = {"accuracy": Accuracy()}
        return MemoryEfficientTrainLoop(
            mk.MemoryEfficientTrainingWrapper(model, optimizer), loader_of(), classify, plateau=plateau, **settings
        )

    best, plateaus = ValidationMonitor(mode="max", metric="accuracy"), torch.optim.lr_scheduler.ReduceLROnPlateau
    plateau = plateaus(optimizer, mode="max")
    figures = make_loop(plateau, monitor=best).run().validation
    assert plateau.best == figures["accuracy"]
    refused = (
        mk.errors.ConfigError,
        r"mode='min' and a monitor with mode='max'.* plateau=ReduceLROnPlateau\(optimizer, mode='max'",
    )
    assert_refused(lambda: make_loop(plateaus(optimizer), monitor=best), *refused)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert_refused(
        lambda: make_loop(steps), mk.errors.InputTypeError, r"got a StepLR.*Wrapper\(model, optimizer, scheduler="
    )
    loop = make_loop(plateau, val_fn=lambda model, batch: {"score": model(batch[0])}, reducers=None)
    loop._reducers = None
    assert_refused(loop.run, mk.errors.InputError, r"a validation of score \(float\).* let val_fn return 'loss'")
    with pytest.raises(mk.errors.ConfigError, match="or plateau without val_loader"):
        make(plateau=plateau)


def test_objects_of_the_user_are_saved(tmp_path):
    for value in (1.0, 2.0):
        average = nn.Linear(1, 1, bias=False)
        nn.init.constant_(average.weight, value)
        with TrainingStateManager(tmp_path) as state:
            loop, _ = make(loader_of(16), state=state, objects={"average": average})
            loop.run()
        assert average.weight.item() == 1.0
    with pytest.raises(mk.errors.ConfigError, match=r"got objects=\{'monitor': \.\.\.\}"):
        make(objects={"monitor": average})
    refused = mk.errors.InputTypeError, r"objects={'clip': a function}; .* a class for clip .*objects={'clip': clip}"
    assert_refused(lambda: make(objects={"clip": classify}), *refused)
    assert_refused(lambda: make(objects=[average]), mk.errors.InputTypeError, "got objects, a list; .*{'criterion'")


class DrawingByEpoch:
    """A data set that draws from seed, epoch and index, as docs/loops.md advises."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image, label = (each[index] for each in digits())
        noise = np.random.default_rng((0, self.epoch, index)).normal(0.0, 0.1, image.shape)
        return image + torch.from_numpy(noise).float(), label


@pytest.mark.slow
def test_what_is_drawn_by_epoch_in_workers_is_the_same_after_a_stop(tmp_path):
    def train(folder, stop_at=None):
        calls = itertools.count(1)
        order = ResumableBatchSampler(64, 8, seed=0)
        loader = DataLoader(DrawingByEpoch(), batch_sampler=order, num_workers=2)

        def loss_fn(model, batch):
            if next(calls) == stop_at:
                raise ArithmeticError
            return classify(model, batch)

        with TrainingStateManager(folder) as state, contextlib.suppress(ArithmeticError):
            loop, model = make(loader, state=state, save_every=3)
            loop._loss_fn = loss_fn
            loop.run(num_epochs=2)
        return weights(model)

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", stop_at=24)  # two micro-batches a step: in the second epoch
    assert torch.equal(train(tmp_path / "parts"), whole)


class Spread:
    """A reducer whose result no state can hold."""

    def reset(self):
        self.most = 0.0

    def update(self, values):
        self.most = values.max().item()

    def result(self):
        return SimpleNamespace(most=self.most)


def test_a_finished_run_that_is_started_again_returns_its_last_validation(tmp_path):
    def run():
        settings = {"val_fn": lambda model, batch: scores_of(model, batch) | {"spread": model(batch[0])}}
        settings["reducers"] = {"accuracy": Accuracy(), "spread": Spread()}
        with TrainingStateManager(tmp_path) as state:
            loop, _ = make(loader_of(32), val_loader=loader_of(50), state=state, **settings)
            figures = loop.run(num_epochs=2).validation
            figures["lr"] = 0.1  # the user's own, for a log
            return figures, loop.run(num_epochs=2).validation

    (first, at_once), (again, _) = run(), run()
    assert first.keys() == {"loss", "accuracy", "spread", "lr"}
    assert at_once.keys() == {"loss", "accuracy", "spread"}
    assert again == {name: each for name, each in first.items() if name != "spread"}


@pytest.mark.parametrize("keeps_state", [False, True])
def test_what_changes_between_two_runs_stays(keeps_state, tmp_path):
    """A schedule that needs a figure of the validation is stepped there."""
    data = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,))) for _ in range(4)]

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train(by_hand):
        torch.manual_seed(0)
        model, rates = nn.Linear(4, 2).double(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
        loop = mk.MemoryEfficientTrainLoop(
            mk.MemoryEfficientTrainingWrapper(model, optimizer), data, loss_fn, val_loader=data, progress=False,
            state=mk.TrainingStateManager(tmp_path) if keeps_state and not by_hand else None,
        )  # fmt: skip
        for epoch in range(4):
            if by_hand:
                for batch in data:
                    optimizer.zero_grad()
                    loss_fn(model, batch).backward()
                    optimizer.step()
                with torch.no_grad():
                    figure = sum(loss_fn(model, batch).item() for batch in data) / 4
            else:
                figure = loop.run(num_epochs=epoch + 1).validation["loss"]
            rates.append(optimizer.param_groups[0]["lr"])
            plateau.step(figure)
        return model.weight.detach(), rates

    (found, rates), (wanted, wanted_rates) = train(by_hand=False), train(by_hand=True)
    assert rates == wanted_rates
    assert rates[-1] < 1.0
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
