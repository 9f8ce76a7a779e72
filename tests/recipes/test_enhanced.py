"""Foreign loops with validation, early stopping and resume added, and without a trace of it afterwards."""

import copy
import itertools
import logging
import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from memkit.recipes.enhanced import create_enhanced_train_loop
from memkit.recipes.foreign import Counters
from memkit.recipes.state.manager import TrainingStateManager
from memkit.recipes.validation import ValidationMonitor
from tests.helpers import assert_refused
from tests.recipes.loop_parts import digits, loader_of, make, weights
from tests.toys import SmallRoom


class Stream:
    """Endless batches ``(images, {})`` that know where they are."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        rows = torch.arange(self.position, self.position + 16) % 200
        self.position += 16
        return digits()[0][rows], {"classes": digits()[1][rows]}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Noise:
    """Learns to tell noise from images; draws noise, as a diffusion does."""

    def training_losses(self, model, images, times, model_kwargs):
        noise = torch.randn_like(images)
        return {"loss": F.mse_loss(model(images + times[:, None] * noise), noise, reduction="none").mean(1)}


class Times:
    def sample(self, num_rows, device):
        return torch.rand(num_rows, device=device), torch.ones(num_rows, device=device)


class TrainLoop:
    """The shape of improved-diffusion's loop, with its attribute names; ``step`` is counted in ``run_loop``."""

    counts_inside = False

    def __init__(self, num_steps):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.1), nn.Linear(32, 64))
        self.diffusion, self.schedule_sampler = Noise(), Times()
        self.data = Stream()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.lr, self.lr_anneal_steps = 1e-2, num_steps
        self.master_params = list(self.model.parameters())
        self.ema_params = [copy.deepcopy(self.master_params)]
        self.step = self.resume_step = 0
        self.saved = []

    def run_loop(self):
        while self.step < self.lr_anneal_steps:
            batch, cond = next(self.data)
            self.run_step(batch, cond)
            if not self.counts_inside:
                self.step += 1
        self.save()

    def run_step(self, batch, cond):
        self.opt.zero_grad()
        times, weight = self.schedule_sampler.sample(len(batch), batch.device)
        losses = self.diffusion.training_losses(self.model, batch, times, model_kwargs=cond)
        (losses["loss"] * weight).mean().backward()
        for group in self.opt.param_groups:
            group["lr"] = self.lr * (1 - self.step / self.lr_anneal_steps)
        self.opt.step()
        for average, parameter in zip(self.ema_params[0], self.master_params, strict=True):
            average.detach().mul_(0.9).add_(parameter.detach(), alpha=0.1)
        if self.counts_inside:
            self.step += 1

    def save(self):
        self.saved.append(self.step)


class ConsistencyLoop(TrainLoop):
    """The shape of consistency_models' loop, which counts in ``run_step``."""

    counts_inside = True


VALIDATION = [(digits(100)[0][rows], {"classes": digits(100)[1][rows]}) for rows in torch.arange(100).split(30)]
KINDS = pytest.mark.parametrize("kind", [TrainLoop, ConsistencyLoop])


def everything(loop):
    averages = torch.cat([each.detach().flatten() for each in loop.ema_params[0]])
    return torch.cat([weights(loop.model), averages]), loop.step, loop.opt.param_groups[0]["lr"]


def assert_same_loops(loop, expected):
    (found, *counts), (wanted, *wanted_counts) = everything(loop), everything(expected)
    assert torch.equal(found, wanted)
    assert counts == wanted_counts


@KINDS
def test_trains_like_the_plain_loop_and_leaves_no_trace(kind):
    plain = kind(20)
    plain.run_loop()
    base = kind(20)
    loop = create_enhanced_train_loop(
        base_train_loop=base, val_dataloader=VALIDATION, enable_validation=True, val_interval=5, memory_fraction=0.9
    )
    seen = []
    original = loop._validate_now
    loop._validate_now = lambda: seen.append(base.step) or original()
    assert loop.run_loop() == "epochs"
    assert_same_loops(base, plain)
    assert "run_step" not in vars(base)
    assert base.saved == [20]
    assert seen == ([5, 10, 15, 20] if kind.counts_inside else [4, 9, 14, 19])
    assert loop.num_steps == 20
    assert loop.figures["loss"] > 0


def test_restores_own_run_step_after_an_error():
    base = TrainLoop(5)

    def broken(batch, cond):
        raise ValueError("a bug of the loop")

    base.run_step = broken
    with pytest.raises(ValueError, match="a bug of the loop"):
        create_enhanced_train_loop(base).run_loop()
    assert base.run_step is broken


def test_validations_draw_equal_noise():
    base = TrainLoop(6)
    base.run_step = lambda batch, cond: torch.rand(3)  # draws, and changes no weight
    found = []
    loop = create_enhanced_train_loop(base, VALIDATION, val_interval=2)
    original = loop._validate_now
    loop._validate_now = lambda: found.append(original()) or found[-1]
    loop.run_loop()
    assert len(found) == 3
    assert found[0] == found[1] == found[2]


@KINDS
def test_early_stopping_leaves_the_loop_and_saves(kind):
    values = itertools.count(1.0)
    base = kind(1000)
    loop = create_enhanced_train_loop(
        base,
        VALIDATION,
        val_interval=4,
        monitor=ValidationMonitor(patience=2),
        val_fn=lambda model, batch: {"loss": torch.full((len(batch[0]),), next(values))},
    )
    assert loop.run_loop() == "early stopping"
    assert loop.num_steps == 12  # the first is the best, then two without a better one
    assert base.saved == [12 if kind.counts_inside else 11]  # the number that its own save in that step would have


@KINDS
@pytest.mark.parametrize("when", [1, 7, 8])
def test_a_killed_loop_goes_on_bit_by_bit(kind, when, tmp_path):
    plain = kind(20)
    plain.run_loop()

    class Killed(kind):
        def run_step(self, batch, cond):
            if loop.num_steps + 1 == when:
                os.kill(os.getpid(), signal.SIGTERM)
            super().run_step(batch, cond)

    before = signal.getsignal(signal.SIGTERM)
    with TrainingStateManager(tmp_path) as state:
        loop = create_enhanced_train_loop(Killed(20), VALIDATION, val_interval=4, state=state)
        assert loop.run_loop() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    base = kind(20)
    with TrainingStateManager(tmp_path) as state:
        again = create_enhanced_train_loop(base, VALIDATION, val_interval=4, state=state)
        assert again.run_loop() == "epochs"
    assert again.num_steps == 20
    assert_same_loops(base, plain)


def test_rejects_state_with_other_averages(tmp_path):
    with TrainingStateManager(tmp_path) as state:
        create_enhanced_train_loop(TrainLoop(2), state=state).run_loop()
        other = TrainLoop(2)
        other.ema_params = []
        with pytest.raises(
            mk.errors.FileFormatError, match=r"4 tensors of .* besides the model; expected version 1, 0 tensors"
        ):
            create_enhanced_train_loop(other, state=state).run_loop()
        other = TrainLoop(2)
        other.ema_params[0][3] = nn.Parameter(torch.zeros(1))  # a copy of 64 numbers into it is no way
        with pytest.raises(mk.errors.FileFormatError, match=r"expected version 1, 4 tensors of shapes .*, \(1,\)\."):
            create_enhanced_train_loop(other, state=state).run_loop()


class SecondMoments:
    """As improved_diffusion's LossSecondMomentResampler: draws those timesteps more often that have larger losses."""

    def __init__(self, num_rounds=2):
        self.losses, self.counts = np.ones((4, 3)), np.zeros(4, dtype=">i4")
        self.tensor, self.num_updates, self.num_rounds = torch.zeros(4, dtype=torch.float64), 0, num_rounds
        self.largest, self.table = np.float64(0.0), np.broadcast_to(1.0, (4, 3))

    def sample(self, num_rows, device):
        p = np.sqrt((self.losses**2).mean(1) + self.tensor.numpy() + self.largest)
        p = p * (1 + self.counts) / (1 + self.num_updates)
        times = np.random.choice(4, num_rows, p=p / p.sum())
        return torch.from_numpy(times).to(device), torch.from_numpy(1 / (4 * p[times] / p.sum())).to(device)

    def update(self, times, losses):
        for _ in range(self.num_rounds):
            for time, loss in zip(times.tolist(), losses.tolist(), strict=True):
                self.losses[time] = [*self.losses[time, 1:], loss]
                self.counts[time] += 1
                self.tensor[time] += loss
                self.largest = max(self.largest, np.float64(loss))
        self.num_updates += 1


class ResamplingLoop(TrainLoop):
    def __init__(self, num_steps, **settings):
        super().__init__(num_steps)
        np.random.seed(0)
        self.model, self.master_params, self.ema_params = nn.Linear(64, 64, dtype=torch.float64), [], []
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.schedule_sampler = SecondMoments(**settings)

    def run_step(self, batch, cond):
        times, weight = self.schedule_sampler.sample(len(batch), batch.device)
        losses = (self.model(batch.double() * (1 + times[:, None])) - 1).square().mean(1)
        self.schedule_sampler.update(times, losses.detach())
        self.opt.zero_grad()
        (losses * weight).mean().backward()
        self.opt.step()


def test_the_losses_by_which_timesteps_are_drawn_go_on(tmp_path):
    whole = ResamplingLoop(12)
    whole.run_loop()
    for num_steps in (3, 7, 12):
        with TrainingStateManager(tmp_path) as state:
            loop = ResamplingLoop(num_steps)
            create_enhanced_train_loop(loop, state=state).run_loop()
    torch.testing.assert_close(loop.model.weight, whole.model.weight, rtol=0, atol=0)
    for name, value in vars(whole.schedule_sampler).items():
        np.testing.assert_array_equal(getattr(loop.schedule_sampler, name), value)


def test_settings_of_a_sampler_are_those_of_the_resumed_run_and_other_arrays_are_refused(tmp_path):
    with TrainingStateManager(tmp_path) as state:
        create_enhanced_train_loop(ResamplingLoop(2), state=state).run_loop()
        loop = ResamplingLoop(4, num_rounds=1)
        create_enhanced_train_loop(loop, state=state).run_loop()
        assert loop.schedule_sampler.num_rounds == 1
        assert loop.schedule_sampler.counts.sum() == 16 * (2 * 2 + 2 * 1)
        loop = ResamplingLoop(6)
        loop.schedule_sampler.losses = np.ones((5, 3))
        with pytest.raises(mk.errors.FileFormatError, match=r"\(4, 3\), \(4,\), \(4,\) .* of shapes \(5, 3\), "):
            create_enhanced_train_loop(loop, state=state).run_loop()


def test_a_sampler_with_a_state_of_its_own_saves_it(tmp_path):
    class Growing(Times):
        def __init__(self):
            self.history = np.zeros(0)

        def sample(self, num_rows, device):
            self.history = np.append(self.history, len(self.history))
            return torch.full((num_rows,), self.history.sum()), torch.ones(num_rows)

        def state_dict(self):
            return {"history": self.history.tolist()}

        def load_state_dict(self, state):
            self.history = np.array(state["history"])

    def run(num_steps, state=None):
        loop = TrainLoop(num_steps)
        loop.lr_anneal_steps = 100  # of the learning rate's schedule
        loop.schedule_sampler, loop.ema_params, loop.master_params = Growing(), [[]], []
        loop.run_loop = lambda: [loop.run_step(*next(loop.data)) or counted(loop) for _ in range(num_steps - loop.step)]
        create_enhanced_train_loop(loop, state=state).run_loop()
        return loop

    def counted(loop):
        loop.step += 1

    whole = run(6)
    with TrainingStateManager(tmp_path) as state:
        run(3, state)
        loop = run(6, state)
    np.testing.assert_array_equal(loop.schedule_sampler.history, np.arange(6))
    torch.testing.assert_close(weights(loop.model), weights(whole.model), rtol=0, atol=0)


def test_rejects_foreign_state():
    with pytest.raises(mk.errors.FileFormatError, match=r"version None, 0 tensors beside"):
        Counters(TrainLoop(1)).load_state_dict({})


def test_our_own_loop_and_its_validation(tmp_path):
    expected, plain = make()
    expected.run(num_epochs=2)
    own, model = make()
    loop = create_enhanced_train_loop(own, loader_of(50), val_interval=13, num_epochs=2)
    assert loop.run_loop() == "epochs"
    assert torch.equal(weights(model), weights(plain))
    model.eval()
    images, classes = digits(50)
    assert loop.num_steps == 26
    assert loop.figures["loss"] == pytest.approx(F.cross_entropy(model(images), classes).item(), rel=1e-6)
    with TrainingStateManager(tmp_path) as state:
        own, _ = make()
        monitor = ValidationMonitor(patience=1, mode="max")  # a loss that falls is never better
        stopped = create_enhanced_train_loop(
            own, loader_of(50), val_interval=5, num_epochs=2, monitor=monitor, state=state
        )
        assert stopped.run_loop() == "early stopping"
        assert own.num_steps == stopped.num_steps < 26
        own, model = make()
        monitor = ValidationMonitor(patience=100, mode="max")
        longer = create_enhanced_train_loop(
            own, loader_of(50), val_interval=5, num_epochs=2, monitor=monitor, state=state
        )
        assert longer.run_loop() == "epochs"
    assert torch.equal(weights(model), weights(plain))


def test_reducers_reach_the_validation_of_our_own_loop():
    own, _ = make()
    figures_of = lambda model, batch: {"accuracy": (model(batch[0]), batch[1])}  # noqa: E731
    loop = create_enhanced_train_loop(
        own, loader_of(50), val_interval=13, val_fn=figures_of, reducers={"accuracy": mk.recipes.Accuracy()}
    )
    loop.run_loop()
    own.trainer.model.eval()
    images, classes = digits(50)
    assert loop.figures == {"accuracy": (own.trainer.model(images).argmax(1) == classes).double().mean().item()}


def test_the_state_of_the_best_validation_can_be_restored(tmp_path):
    base, values = TrainLoop(6), iter([3.0, 1.0, 2.0])
    averages = nn.Linear(1, 1)
    with TrainingStateManager(tmp_path) as state:
        create_enhanced_train_loop(
            base,
            [VALIDATION[0]],
            val_interval=2,
            val_fn=lambda model, batch: {"loss": torch.full((len(batch[0]),), next(values))},
            monitor=ValidationMonitor(),
            state=state,
            objects={"averages": averages},
        ).run_loop()
        assert state.restore("best", averages=averages) == 4


def test_releases_memory_above_the_fraction_and_logs_it(caplog):
    loop = create_enhanced_train_loop(TrainLoop(4), VALIDATION, val_interval=2, memory_fraction=1e-9)
    with caplog.at_level(logging.WARNING, logger="memkit"):
        loop.run_loop()
    assert "step 2: more than memory_fraction is in use" in caplog.text
    assert "release" in [event.event for event in loop.memory.events]


def test_failing_validation_loses_no_state(tmp_path):
    def val_fn(model, batch):
        raise KeyboardInterrupt

    with TrainingStateManager(tmp_path) as state:
        with pytest.raises(KeyboardInterrupt):
            create_enhanced_train_loop(TrainLoop(4), VALIDATION, val_interval=2, val_fn=val_fn, state=state).run_loop()
        assert state.steps == (2,)


@pytest.mark.parametrize(("given", "share"), [("1GiB", None), (1, 1.0), (0.5, 0.5)])
def test_memory_fraction_is_a_share_or_a_size(given, share):
    memory = create_enhanced_train_loop(TrainLoop(1), memory_fraction=given).memory
    assert memory.budget_bytes == (2**30 if share is None else mk.MemoryManager("cpu", share).budget_bytes)


def test_validation_changes_nothing_in_the_model_of_a_foreign_loop():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    def run(*, validates):
        loop = TrainLoop(6)
        loop.model = Counting(64, 64, dtype=torch.float64)
        loop.master_params, loop.ema_params = [], []
        loop.opt = torch.optim.SGD(loop.model.parameters(), lr=1e-2)
        loop.run_step = lambda batch, _: (
            loop.opt.zero_grad() or (loop.model(batch.double()).square().mean().backward() or loop.opt.step())
        )
        batches = [digits()[0][:20].double()]
        mk.create_enhanced_train_loop(
            loop, batches, validates, 2, val_fn=lambda model, batch: {"loss": model(batch).square()}
        ).run_loop()
        return loop.model.weight.detach(), loop.model.calls

    (found, num_calls), (expected, num_expected) = run(validates=True), run(validates=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert num_calls == num_expected == 6


def test_a_validation_that_changes_a_foreign_loop_is_told_of():
    base = TrainLoop(2)
    base.mean, base.losses = 0.0, []

    def val_fn(model, batch):
        loss = model(batch[0]).square().mean(1)
        base.mean = 0.9 * base.mean + 0.1 * loss.mean().item()
        base.losses.append(base.mean)
        return {"loss": loss}

    with pytest.warns(mk.MemkitWarning, match=r"what the training loop holds \(TrainLoop\.mean\), and that stays"):
        create_enhanced_train_loop(base, VALIDATION, val_interval=1, val_fn=val_fn).run_loop()
    assert len(base.losses) == 2 * len(VALIDATION)


def test_oversized_validation_is_split():
    base = TrainLoop(2)
    base.model = SmallRoom(64, 64)
    base.run_step = lambda batch, cond: None
    values = lambda model, batch: {"loss": model(batch[0]).square().mean(1)}  # noqa: E731
    loop = create_enhanced_train_loop(base, VALIDATION, val_interval=1, val_fn=values)
    loop.run_loop()
    expected = base.model.whole(digits(100)[0]).square().mean().item()
    assert loop.figures["loss"] == pytest.approx(expected, rel=1e-6)


class Plain:
    def __init__(self, model):
        self.model = model

    def run_step(self, batch): ...
    def run_loop(self): ...


class Slotted:
    __slots__ = ("model",)

    def run_step(self, batch): ...
    def run_loop(self): ...


@pytest.mark.parametrize(
    ("base", "settings", "error", "text"),
    [
        (object(), {}, mk.errors.InputTypeError, "a object without a per-step hook; expected run_step and run_loop"),
        (nn.Linear(1, 1), {}, mk.errors.InputTypeError, "a Linear without a per-step hook"),
        (Slotted(), {}, mk.errors.InputTypeError, "can be replaced"),
        (lambda batch: None, {}, mk.errors.InputTypeError, "a function without a per-step hook"),
        (Plain(None), {}, mk.errors.ConfigError, "a loop without a model"),
        (TrainLoop(1), {"val_interval": 0}, mk.errors.ConfigError, "val_interval=0"),
        (
            TrainLoop(1),
            {"val_dataloader": VALIDATION, "num_val_batches": -1},
            mk.errors.ConfigError,
            "num_val_batches=-1",
        ),
        (TrainLoop(1), {"memory_fraction": 90}, mk.errors.ConfigError, "memory_fraction=90"),
        (TrainLoop(1), {"memory_fraction": 0}, mk.errors.ConfigError, "got memory_fraction=0;.*above zero"),
        (TrainLoop(1), {"memory_fraction": "0GiB"}, mk.errors.ConfigError, "got memory_fraction='0GiB'"),
        (TrainLoop(1), {"memory_fraction": "much"}, mk.errors.InputError, "the text 'much'"),
        (TrainLoop(1), {"objects": {"model": nn.Linear(1, 1)}}, mk.errors.ConfigError, "my_model"),
        (TrainLoop(1), {"objects": {"counters": nn.Linear(1, 1)}}, mk.errors.ConfigError, "my_counters"),
        (TrainLoop(1), {"objects": {"early_stopping": None}}, mk.errors.ConfigError, "my_early_stopping"),
        (
            TrainLoop(1),
            {
                "val_dataloader": VALIDATION,
                "monitor": ValidationMonitor(),
                "state": TrainingStateManager("none", mode="max"),
            },
            mk.errors.ConfigError,
            "the same mode in the manager and the monitor",
        ),
        (TrainLoop(1), {"monitor": ValidationMonitor()}, mk.errors.ConfigError, "pass val_dataloader"),
        (TrainLoop(1), {"val_dataloader": iter(VALIDATION)}, mk.errors.ConfigError, "an iterator as val_dataloader"),
        (Plain(nn.Linear(1, 1)), {"val_dataloader": VALIDATION}, mk.errors.ConfigError, "pass val_fn"),
    ],
)
def test_rejects_impossible_settings_at_once(base, settings, error, text):
    assert_refused(lambda: create_enhanced_train_loop(base, **settings), error, text)


class Conditioned(nn.Module):
    """A diffusion's model: images, times, classes."""

    def __init__(self):
        super().__init__()
        self.net, self.classes = nn.Linear(64, 64), nn.Embedding(10, 64)

    def forward(self, x, timesteps, y=None):
        return self.net(x + timesteps[:, None]) + self.classes(y)


class Diffusion:
    def training_losses(self, model, images, times, model_kwargs):
        return {"loss": (model(images, times, **model_kwargs) - images).square().mean(1)}


class ConditionedLoop(TrainLoop):
    """Its own step takes classes as a tensor."""

    def __init__(self, num_steps):
        super().__init__(num_steps)
        self.model = Conditioned()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.master_params, self.ema_params, self.diffusion = [], [[]], Diffusion()

    def run_step(self, batch, cond):
        super().run_step(batch, {"y": cond["classes"]})


def pairs(condition):
    images, classes = digits(100)
    return [(images[rows], condition(classes[rows])) for rows in torch.arange(100).split(30)]


class TestConditions:
    @pytest.mark.parametrize("condition", [lambda classes: classes, lambda classes: {"y": classes}])
    @pytest.mark.parametrize("is_stream", [False, True])
    def test_tensor_condition_reaches_the_model(self, condition, is_stream):
        figures = []
        for each in (condition, lambda classes: {"y": classes}):
            batches = pairs(each)
            base = ConditionedLoop(4)
            loop = create_enhanced_train_loop(
                base, iter(batches * 2) if is_stream else batches, val_interval=2, num_val_batches=4
            )
            assert loop.run_loop() == "epochs"
            figures.append(loop.figures)
        assert figures[0] == figures[1]

    @pytest.mark.parametrize(
        ("batches", "match"),
        [
            (pairs(lambda classes: [classes]), "a condition that is a list, for a model that takes y"),
            ([digits(30)[0]], "a batch that is a Tensor"),
            ([[digits(30)[0]]], "a batch that is a list of 1"),
        ],
    )
    def test_rejects_other_loops_before_first_step(self, batches, match):
        base = ConditionedLoop(4)
        loop = create_enhanced_train_loop(base, batches, val_interval=2)
        with pytest.raises(mk.errors.InputTypeError, match=match + r".*\(images, \{'y': labels\}\), or pass val_fn"):
            loop.run_loop()
        assert base.step == 0

    def test_a_tensor_for_a_model_of_several_arguments(self):
        base = ConditionedLoop(4)
        base.model.forward = lambda x, timesteps, y=None, low_res=None: x
        loop = create_enhanced_train_loop(base, pairs(lambda classes: classes), val_interval=2)
        assert_refused(lambda: loop.run_loop(), mk.errors.InputTypeError, "a Tensor, for a model that takes y, low_res")

    def test_looking_draws_nothing(self):
        images, classes = digits(100)
        loader = DataLoader(TensorDataset(images, classes), batch_size=30, shuffle=True)
        plain, watched = ConditionedLoop(4), ConditionedLoop(4)
        watched.model.load_state_dict(plain.model.state_dict())
        torch.manual_seed(1)
        plain.run_loop()
        torch.manual_seed(1)
        create_enhanced_train_loop(watched, loader, val_interval=2).run_loop()
        assert torch.equal(weights(watched.model), weights(plain.model))
