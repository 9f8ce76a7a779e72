"""Rolling back buffers: the same objects with the values that they had, whoever owns them and whenever they came."""

import copy
import ctypes
import functools
import gc
import itertools
import random
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit._recovery import snapshot
from memkit._recovery.snapshot import Rollback, StateWatch, are_same
from memkit.train.checkpointing import Checkpointing
from tests.allocations import trace_allocations
from tests.helpers import Noted, assert_refused, assert_same
from tests.toys import mean_square, out_of_memory, trainer_of


class Late(nn.Module):
    """Buffers that change in every way that a version counter does not show."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("made_later", None)
        self.register_buffer("last", torch.zeros(4, 3))
        self.register_buffer("table", torch.arange(3.0))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.last = x.detach()  # another object, and it is the caller's
        if self.num_calls > 2:
            self.ema.data.lerp_(x.detach().mean(0), 0.5)
            self.made_later = x.detach().mean(0) if self.made_later is None else self.made_later + 1
        return self.norm(self.linear(x))


def values(module):
    return {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()} | dict(
        module.norm.named_buffers()
    )


def test_restores_everything_without_writing_caller_objects():
    torch.manual_seed(0)
    model = Late()
    watch = StateWatch(model)
    for _ in range(3):
        first = watch.snapshot()
        model(torch.randn(4, 3))
        watch.learn(first)
    snapshot = watch.snapshot()
    before = {name: value if value is None else value.clone() for name, value in values(model).items()}
    objects = dict(model._buffers)
    x = torch.ones(4, 3)
    model(x)
    assert not torch.equal(model.ema, before["ema"])
    snapshot.restore()
    assert_same(values(model), before)
    assert all(model._buffers[name] is buffer for name, buffer in objects.items())
    assert x.eq(1).all()


@pytest.mark.parametrize("size", [0, 1])
def test_restores_a_buffer_that_the_attempt_resized(size):
    """As an observer's first forward does; also where attributes are looked at no longer."""
    model = nn.Module()
    model.register_buffer("scale", torch.full((size,), 2.0))
    before, values = model.scale, model.scale.clone()
    watch = StateWatch(model)
    watch.changes_attributes = False
    rollback = Rollback(watch)
    model.scale.resize_(6).fill_(3.0)
    rollback.restore()
    assert model.scale is before
    assert_same(model.scale, values)


def test_removes_buffer_created_in_the_attempt():
    model = Late()
    model.num_calls = 2
    watch = StateWatch(model)
    snapshot = watch.snapshot()
    model(torch.ones(4, 3))
    assert model.made_later is not None
    snapshot.restore()
    assert model.made_later is None


def test_unchanged_large_buffers_are_copied_once_and_guarded():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(600, 600))
    watch = StateWatch(model)
    first = watch.snapshot()
    watch.learn(first)
    second = watch.snapshot()
    assert all(entry.copy is None for entry in second.entries.values())
    second.restore()
    model.mask[0] = 1
    assert_refused(lambda: second.restore(), mk.errors.StateError, "large buffer 'mask' of a Linear")


@pytest.mark.parametrize("shape", [(2**20,), (1, 2, 2**19), (2**19, 2)])
def test_large_buffers_are_compared_without_memory(shape):
    one = torch.randn(shape)
    other = one.clone()
    one.view(-1)[7] = other.view(-1)[7] = float("nan")
    found = []
    assert trace_allocations(lambda: found.append(are_same(one, other))).peak == 0
    other.view(-1)[-1] += 1
    assert trace_allocations(lambda: found.append(are_same(one, other))).peak == 0
    assert found == [True, False]


def test_the_first_step_takes_no_memory_to_find_that_a_large_buffer_stays():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.randn(2**19, 8))
    rollback = Rollback(StateWatch(model))
    num_copied = [each.copy is not None for each in rollback.buffers.entries.values()]
    assert trace_allocations(rollback.learn).peak <= 64  # its sums
    assert num_copied == [True]
    assert [each.copy is not None for each in rollback.buffers.entries.values()] == [False]


NUMBERS = [
    *(torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float16, torch.bfloat16),
    *(torch.float64, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_buffers_of_each_dtype_are_compared_by_their_bits(dtype):
    one = torch.tensor([[0, 1, 1], [0, 0, 1]]).to(dtype)
    other = one.clone()
    assert are_same(one, other)
    assert are_same(one[:, ::2], other[:, ::2])
    assert are_same(one[0, 1], other[0, 1])
    other[1, 2] = 0
    assert not are_same(one, other)
    assert not are_same(one[:, ::2], other[:, ::2])


def test_a_buffer_of_another_dtype_is_another_one():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(600, 600))
    rollback = Rollback(StateWatch(model))
    model.table.data = model.table.data.half()
    assert rollback.buffers.differ()
    rollback.learn()
    assert [each.copy is not None for each in rollback.buffers.entries.values()] == [True]


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_quantized_buffers_are_compared():
    one, other = (torch.quantize_per_tensor(torch.arange(4.0) + shift, 0.1, 0, torch.qint8) for shift in (0, 1))
    assert are_same(one, one.clone())
    assert not are_same(one, other)


def test_conjugated_buffers_are_compared():
    one = torch.randn(4, 2, dtype=torch.complex64)
    assert are_same(one.conj(), one.clone().conj())
    assert are_same(one.conj().imag, one.clone().conj().imag)
    assert not are_same(one.conj(), one)


def test_model_edits_between_steps():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.LazyBatchNorm1d())
    model.register_buffer("cache", torch.ones(2))
    watch = StateWatch(model)
    watch.snapshot().restore()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    model.cache = None
    model(torch.randn(4, 3))
    watch.snapshot().restore()
    assert model.cache is None


@pytest.mark.parametrize("size", [6, 3])
def test_rolls_back_other_networks_in_the_loss(size):
    """A GAN: the discriminator's loss runs the generator, whose BatchNorm must not see the failed attempt."""

    def run(capacity):
        torch.manual_seed(0)
        disc, gen = nn.Linear(4, 1), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        trainer = mk.MemoryEfficientTrainingWrapper(disc, torch.optim.SGD(disc.parameters(), lr=0.1), probe=False)
        failures = []

        def loss_fn(disc, noise):
            with torch.no_grad():
                fake = gen(noise + 0.1 * np.random.normal())
            if len(noise) > capacity:
                failures.append(len(noise))
                raise MemoryError
            return disc(fake).pow(2).mean()

        results = [trainer.train_step(torch.ones(6, 2), loss_fn) for _ in range(2)]
        return gen, [part for result in results for part in result.sizes], failures

    gen, sizes, failures = run(size)
    assert bool(failures) == (size < 6)
    assert int(gen[1].num_batches_tracked) == len(sizes)


def test_frozen_first_and_trained_later():
    """BatchNorm frozen while warming up, then not: the first out-of-memory after that is survived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    trainer = trainer_of(model, probe=False)
    capacity = 6

    def loss_fn(model, x):
        out = model(x)
        if len(x) > capacity:
            raise MemoryError
        return out.pow(2).mean()

    x = torch.randn(6, 3)
    for _ in range(2):
        trainer.train_step(x, loss_fn)
    model.train()
    trainer.train_step(x, loss_fn)
    capacity = 3
    result = trainer.train_step(x, loss_fn)
    assert result.sizes == (3, 3)
    assert int(model[1].num_batches_tracked) == 3


class Moody(nn.Module):
    """Holds generators of every kind, and leaves evaluation mode in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.noise = torch.Generator().manual_seed(1)
        self.others = {"numpy": np.random.default_rng(2), "legacy": np.random.RandomState(3)}
        self.python = random.Random(4)

    def forward(self, x):
        self.dropout.train()
        shift = self.others["numpy"].normal() + self.others["legacy"].normal() + self.python.random()
        return self.dropout(self.linear(x + torch.randn(x.shape, generator=self.noise) + shift))


@pytest.mark.parametrize("is_late", [False, True], ids=["from the start", "made by the first forward"])
def test_restores_generators_and_modes(is_late):
    """Two batches of eight rows; the second one runs out of memory whole, and goes through in two parts."""
    model = Moody()
    noise = model.__dict__.pop("noise") if is_late else model.noise
    trainer = trainer_of(model, probe=False)
    modes, capacity = [], 8

    def loss_fn(model, x):
        modes.append(model.dropout.training)
        model.noise = noise
        loss = model(x).pow(2).mean()
        if len(x) > capacity:
            raise MemoryError
        return loss

    for batch in (torch.ones(8, 3), torch.ones(8, 4)[:, 1:]):
        model.dropout.eval()
        trainer._driver.sizes.load_state_dict({})  # nothing is proven
        trainer.train_step(batch, loss_fn)
        capacity = 4
    assert modes == [False, False, False, True]  # at the failed whole, and at the two parts as in any loop
    twin = Moody()
    for rows in (8, 4, 4):
        twin.dropout.eval()
        twin(torch.ones(rows, 3))
    assert torch.equal(model.noise.get_state(), twin.noise.get_state())
    assert model.python.getstate() == twin.python.getstate()
    assert model.others["numpy"].bit_generator.state == twin.others["numpy"].bit_generator.state
    torch.testing.assert_close(model.others["legacy"].get_state()[1:], twin.others["legacy"].get_state()[1:])


def test_detects_large_buffer_written_through_data():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(600, 600))
    watch = StateWatch(model)
    watch.learn(watch.snapshot())
    snapshot = watch.snapshot()
    version = model.mask._version
    model.mask.data[5, 5] = 1
    assert model.mask._version == version  # nothing shows it but the values
    assert_refused(lambda: snapshot.restore(), mk.errors.StateError, "large buffer 'mask' of a Linear")


def test_recovery_in_one_thread_leaves_the_models_of_others_alone():
    """One runs out of memory while another one's forward is done: its BatchNorm is not the first one's to put back."""
    in_forward, other_is_done = threading.Event(), threading.Event()

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.01), probe=False)

    def loss_fn(model, x):
        loss = model(x).pow(2).mean()
        if not in_forward.is_set():
            in_forward.set()
            other_is_done.wait(20)
            raise MemoryError
        return loss

    one, other = make(), make()
    thread = threading.Thread(target=one.train_step, args=(torch.randn(8, 3), loss_fn))
    thread.start()
    in_forward.wait(20)
    other.train_step(torch.randn(8, 3), loss_fn)
    mean = other.model[1].running_mean.clone()
    other_is_done.set()
    thread.join()
    assert one.model[1].num_batches_tracked == 2  # the failed one was undone
    assert other.model[1].num_batches_tracked == 1
    assert_same(other.model[1].running_mean, mean)


class ActNorm(nn.Module):
    """Puts tensors made from its first batch in the place of its parameters and its flag, as nflows does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_ready", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        if not self.is_ready:
            self.scale.data = 1 / x.detach().std(0)
            self.is_ready.data = torch.tensor(True)
        return x * self.scale


def test_storages_that_a_failed_attempt_has_replaced_are_back():
    def run(capacity):
        torch.manual_seed(0)
        model = nn.Sequential(ActNorm(), nn.Linear(4, 2, dtype=torch.float64))
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)
        parts = []

        def loss_fn(model, x):
            loss = model(x).square().mean()
            if len(x) > capacity:
                raise MemoryError
            parts.append(len(x))
            return loss

        x = torch.randn(8, 4, dtype=torch.float64)
        with torch.no_grad():
            first = 1 / x[:4].std(0)
        trainer.train_step(x, loss_fn)
        return model, first, parts

    model, first, parts = run(capacity=4)
    assert parts == [4, 4]
    torch.testing.assert_close(model[0].scale, first, rtol=0.2, atol=0.2)  # of the first part, and stepped since
    assert model[0].is_ready


def test_a_check_sees_storages_that_are_replaced():
    torch.manual_seed(0)
    model = nn.Sequential(ActNorm(), nn.Linear(4, 2, dtype=torch.float64))
    x = torch.randn(32, 4, dtype=torch.float64) * torch.arange(1, 5)
    verdict = mk.train.check_split(model, x, lambda model, x: (model(x) ** 4).mean())
    assert verdict.exact is False
    assert not model[0].is_ready
    assert bool((model[0].scale == 1).all())


class Kept:
    def __init__(self):
        self.mean, self.written = 0.0, []

    def __call__(self, model, x):
        y = model(x)
        self.mean = 0.5 * self.mean + 0.5 * float(y.detach().mean())
        self.written.append(float(y.detach().sum()))
        if len(x) > 4:
            raise MemoryError
        return (y - self.mean).square().mean()


def test_what_a_failed_attempt_has_changed_in_the_loss_is_told():
    model, loss_fn = nn.Linear(3, 2), Kept()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)
    with pytest.warns(mk.errors.MemkitWarning, match=r"changed what loss_fn holds \(Kept\.mean\), and that stays"):
        trainer.train_step(torch.ones(8, 3), loss_fn)


class Moments:
    """What a hook of the model keeps, and the loss reads."""

    def __init__(self, num_rows):
        self.square, self.starts = torch.zeros(num_rows, 4), Noted()

    def take(self, _, inputs):
        self.square.mul_(0.5).add_(inputs[0].detach().square().mean(0))

    def __call__(self, model, x):
        start = len(x), float(self.square[0, 0])
        loss = model(x).square().mean() + 0 * self.square.sum()
        self.starts.append(start)
        return loss


@pytest.mark.parametrize(("memory", "num_rows"), [(None, 1), ("1GiB", 1), ("1GiB", 2**17)], ids=str)
def test_moments_of_a_hook_that_the_loss_reads_are_restored_in_silence(memory, num_rows):
    model, moments, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), Moments(num_rows), itertools.count()
    model[0].register_forward_pre_hook(moments.take)
    if memory is None:
        model[1].register_forward_pre_hook(lambda *_: out_of_memory() if next(calls) == 1 else None)
    trainer = trainer_of(model, memory=memory, probe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Training continues")
        for _ in range(2):
            trainer.train_step(torch.ones(8, 4), moments)
    expected = [(8, 0.0), (4, 1.0), (4, 1.5)] if memory is None else [(8, 0.0), (8, 1.0)]
    assert moments.starts.take()[-len(expected) :] == expected


class Remembering(nn.Module):
    """A criterion with a target for each sample, as early-learning regularization has, in plain attributes."""

    def __init__(self):
        super().__init__()
        self.targets, self.seen = torch.full((16, 3), 0.5, dtype=torch.float64), []
        self.targets[-1] = torch.nan  # of a sample that is not in the data
        self.counts = np.zeros(16)

    def forward(self, output, index):
        self.targets[index] = 0.3 * self.targets[index] + 0.7 * output.detach().softmax(1)
        np.add.at(self.counts, index.numpy(), 1)
        self.seen.append(len(index))
        return (output.softmax(1) * self.targets[index]).sum(1).log().neg().mean()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_what_a_failed_attempt_has_changed_in_a_criterion_that_is_a_module_is_undone(num_before, is_compiled):
    def trained(capacity):
        torch.manual_seed(0)
        model, criterion = nn.Linear(4, 3, dtype=torch.float64), Remembering()
        model = torch.compile(model, backend="eager") if is_compiled else model
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.5), probe=False)
        num_calls = itertools.count()

        def loss_fn(model, batch):
            loss = criterion(model(batch[0]), batch[1])
            if next(num_calls) >= num_before and len(batch[0]) > capacity:
                raise MemoryError
            return loss

        for _ in range(4):
            trainer.train_step((torch.randn(8, 4, dtype=torch.float64), torch.randperm(15)[:8]), loss_fn)
        return [*model.parameters(), criterion.targets[:-1]], criterion

    (whole, plain), (parts, criterion) = trained(8), trained(4)
    assert_same(parts, whole, 1e-15)
    np.testing.assert_array_equal(criterion.counts, plain.counts)
    assert criterion.seen == [8] * num_before + [4, 4] * (4 - num_before)


class Following(Remembering):
    """The same, with a total in a buffer, if it follows; else it keeps nothing."""

    def __init__(self, follows):
        super().__init__()
        self.follows = follows
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, output, index):
        if not self.follows:
            return output.softmax(1).square().mean()
        self.total += output.detach().square().sum()
        return super().forward(output, index)

    def loss(self, model, batch):
        return self(model(batch[0]), batch[1])

    def __call__(self, *args):
        return self.loss(*args) if isinstance(args[0], nn.Linear) else super().__call__(*args)


@pytest.mark.parametrize("how", ["closure", "partial", "method", "object"])
def test_a_criterion_is_looked_at_though_another_one_of_its_class_changed_nothing(how):
    def called(criterion, model, batch):
        return criterion(model(batch[0]), batch[1])

    make = {
        "closure": lambda criterion: lambda model, batch: criterion(model(batch[0]), batch[1]),
        "partial": lambda criterion: functools.partial(called, criterion),
        "method": lambda criterion: criterion.loss,
        "object": lambda criterion: criterion,
    }[how]

    def trained(fails):
        torch.manual_seed(0)
        model, criteria = nn.Linear(4, 3, dtype=torch.float64), (Following(follows=False), Following(follows=True))
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.5), probe=False)

        def count(_):
            if fails and next(num_failures) == 4:
                raise MemoryError

        num_failures = itertools.count()
        model.register_forward_hook(lambda _, __, output: output.register_hook(count) and None)
        for step in range(6):
            batch = torch.randn(8, 4, dtype=torch.float64), torch.randperm(15)[:8]
            trainer.train_step(batch, make(criteria[step > 2]))
        return [*model.parameters(), criteria[1].targets[:-1], criteria[1].total]

    assert_same(trained(fails=True), trained(fails=False), 1e-15)


@pytest.mark.parametrize("is_own_loop", [False, True])
@pytest.mark.parametrize("fails", range(5))
def test_a_criterion_that_is_a_module_is_as_before_the_attempt_or_the_batch_that_runs_again(is_own_loop, fails):
    """A backward that fails in the second micro-batch leaves torn sums: the whole batch runs again."""

    def trained(fails):
        torch.manual_seed(0)
        model, criterion = nn.Linear(4, 3, dtype=torch.float64), Remembering()
        optimizer, num_calls = torch.optim.SGD(model.parameters(), lr=0.5), itertools.count()
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)

        def count(_):
            if next(num_calls) == fails:
                raise MemoryError

        def loss_fn(model, batch):
            output = model(batch[0])
            if output.requires_grad:
                output.register_hook(count)
            return criterion(output, batch[1])

        for _ in range(3):
            batch = torch.randn(8, 4, dtype=torch.float64), torch.randperm(15)[:8]
            if not is_own_loop:
                trainer.train_step(batch, loss_fn)
                continue
            for attempt in trainer.microbatches(batch):
                with attempt as part:
                    trainer.backward(loss_fn(model, part))
            trainer.step()
        return [*model.parameters(), criterion.targets[:-1], torch.from_numpy(criterion.counts)]

    assert_same(trained(fails), trained(None), 1e-15)


def test_an_attribute_that_a_failed_attempt_has_set_to_an_equal_value_is_not_told_of():
    class Decoder(nn.Linear):
        last_shape = None

        def forward(self, x):
            self.last_shape = (*x.shape,)
            return super().forward(x)

    model, decoder, calls = nn.Linear(3, 2), Decoder(2, 2), (ctypes.c_longlong * 1)()

    def loss_fn(model, x):
        loss = decoder(model(x)).square().mean()
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError
        return loss

    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)
    for _ in range(2):
        trainer.train_step(torch.ones(8, 3), loss_fn)
    assert calls[0] > 2


class Codebook(nn.Module):
    """A codebook that moves with what it sees, through `.data`, as in VQ-VAE; a plain attribute of the model."""

    def __init__(self, num_bytes):
        super().__init__()
        self.linear, self.codes = nn.Linear(8, 8).double(), torch.zeros(num_bytes // 8, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x) + self.codes[:8]
        if self.training:
            self.codes.data.mul_(0.9).add_(0.1 * y.detach().mean())
        return y


@pytest.mark.parametrize("num_bytes", [2**19, 2**21])
def test_a_trial_leaves_no_trace_in_a_codebook_written_through_data(num_bytes):
    def train(**settings):
        torch.manual_seed(0)
        model = Codebook(num_bytes)
        with trainer_of(model, **settings) as trainer:
            for x in torch.randn(3, 16, 8, dtype=torch.float64):
                trainer.train_step(x, mean_square)
        return [*model.parameters(), model.codes]

    assert_same(train(memory="100MiB"), train())


class Bank(nn.Module):
    """A frozen parameter that keeps a value per sample, which each forward updates."""

    def __init__(self, num_rows, *, through_data=False):
        super().__init__()
        self.body, self.through_data = nn.Linear(8, 4).double(), through_data
        self.bank = nn.Parameter(torch.zeros(num_rows, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        p = self.body(x).softmax(1)
        bank = self.bank.data if self.through_data else self.bank
        bank[: len(x)] = 0.5 * bank[: len(x)] + 0.5 * p.detach()
        return self.bank[: len(x)] * p


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("num_rows", [100, 100_000])
def test_a_trial_leaves_no_trace_in_a_frozen_parameter_of_any_size(num_rows, through_data):
    def train(**settings):
        torch.manual_seed(0)
        model = Bank(num_rows, through_data=through_data)
        with trainer_of(model, **settings) as trainer:
            for x in torch.randn(3, 16, 8, dtype=torch.float64):
                trainer.train_step(x, mean_square)
        return list(model.parameters())

    assert_same(train(memory="1GiB"), train())


@pytest.mark.parametrize("through_data", [False, True])
def test_a_trial_tells_of_a_frozen_parameter_that_is_too_large_to_be_saved(monkeypatch, through_data):
    monkeypatch.setattr(snapshot, "_MOST_FROZEN_BYTES", 2**20)
    told = r"memory=.* is ignored, .*\(100000, 4\) that forward changes in place, and that stays changed"
    with trainer_of(Bank(100_000, through_data=through_data), memory="1GiB") as trainer:
        trainer.train_step(torch.randn(16, 8, dtype=torch.float64), mean_square)
        with pytest.warns(mk.errors.MemkitWarning, match=told):
            trainer.train_step(torch.randn(16, 8, dtype=torch.float64), mean_square)


@pytest.mark.parametrize("through_data", [False, True])
def test_restored_parameters_of_a_model_in_the_closure_of_the_loss_are_not_told_of(through_data):
    def train(*failures):
        torch.manual_seed(0)
        model, calls = Bank(40, through_data=through_data), itertools.count()

        def loss_fn(_, x):
            loss = model(x).square().mean()
            if next(calls) in failures:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss

        with trainer_of(model) as trainer:
            for x in torch.randn(3, 16, 8, dtype=torch.float64):
                trainer.train_step(x, loss_fn)
        return list(model.parameters())

    assert_same(train(0), train())  # without a warning


def test_a_trial_tells_once_of_a_model_in_the_closure_of_the_loss_that_sets_its_own_parameters():
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
            self.register_buffer("is_set", torch.tensor(False))

        def forward(self, x):
            if not self.is_set:
                self.scale.data.copy_(1 / x.std(0))
                self.is_set.fill_(True)
            return x * self.scale

    def train(**settings):
        torch.manual_seed(0)
        model = ActNorm()
        with trainer_of(model, **settings) as trainer:
            for x in torch.randn(3, 16, 8, dtype=torch.float64):
                trainer.train_step(x, lambda _, x: model(x).square().mean())
        return list(model.parameters())

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_same(train(memory="1GiB"), train())
    (told,) = [str(each.message) for each in seen if "stay" in str(each.message)]
    assert "unless the forward sets them anew" in told


@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_a_large_codebook_written_through_data_does_not_run_again_in_silence(treatment):
    """Its values from before are gone, and it would move twice."""
    model = nn.Sequential(nn.Sequential(Codebook(2**21)))
    with Checkpointing(model, {"0": treatment}):
        loss = mean_square(model, torch.randn(16, 8, dtype=torch.float64))
        with pytest.raises(
            mk.errors.StateError, match=r"large tensor .*of shape .* that forward .*, and that stays changed"
        ):
            loss.backward()


class Stateful(nn.Module):
    """State in places that hold tensors, which each forward moves in place."""

    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where
        start = torch.zeros(4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))
        holders = {
            "tuple": lambda: (start, "h"),
            "tuple in a list": lambda: [(start,)],
            "namespace": lambda: types.SimpleNamespace(state=start),
            "read-only dict": lambda: types.MappingProxyType({"state": start}),
        }
        self.held = holders.get(where, lambda: None)()
        self.state = start if where == "hook" else None
        if where == "hook":
            statistics = Statistics(start)
            self.linear.register_forward_pre_hook(statistics)
            self.linear.register_forward_hook(statistics.count)

    def now(self):
        if self.where == "gradient of a buffer":
            return torch.zeros(4) if self.count.grad is None else self.count.grad
        if self.where == "hook":
            return next(iter(self.linear._forward_pre_hooks.values())).state
        held = self.held
        while not isinstance(held, torch.Tensor):
            held = (
                held.state if isinstance(held, types.SimpleNamespace) else held["state" if "read" in self.where else 0]
            )
        return held

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.where == "gradient of a buffer":
            if self.count.grad is None:
                self.count.grad = torch.zeros_like(self.count)
            self.count.grad.add_(mean)
            scale = self.count.grad
        elif self.where == "hook":
            scale = self.now()
        else:
            self.now().mul_(0.5).add_(mean)
            scale = self.now()
        return self.linear(x) * (1 + scale.clone())


class Statistics:
    def __init__(self, state):
        self.state, self.num_calls = state, 0

    def __call__(self, module, args):
        self.state.mul_(0.5).add_(args[0].detach().mean(0))

    def count(self, module, args, out):
        self.num_calls += 1


PLACES = ["tuple", "tuple in a list", "namespace", "read-only dict", "hook", "gradient of a buffer"]


def after_three_steps(where, *, oom_in=None, **settings):
    torch.manual_seed(0)
    model, state = Stateful(where).double(), (ctypes.c_longlong * 2)()

    def loss_fn(model, x):
        loss = model(x).square().mean()
        if oom_in == state[0] and not state[1]:
            state[1] = 1
            raise MemoryError
        return loss

    with trainer_of(model, **settings) as trainer:
        for step in range(3):
            state[0] = step
            trainer.train_step(torch.randn(8, 4, dtype=torch.float64), loss_fn)
    return [model.now(), *model.parameters()]


@pytest.mark.filterwarnings("ignore:.* memory=... is ignored")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "settings", [{"oom_in": 0}, {"oom_in": 2}, {"memory": "1GiB"}, {"checkpoint": ["linear"]}], ids=str
)
def test_state_in_places_that_hold_tensors(where, settings):
    assert_same(after_three_steps(where, **settings), after_three_steps(where))


@pytest.mark.parametrize("where", PLACES)
def test_checks_and_predictions_leave_state_as_it_was(where):
    model, x = Stateful(where).double(), torch.ones(8, 4, dtype=torch.float64)

    def loss_fn(model, x):
        return model(x).square().mean()

    mk.train.check_split(model, x, loss_fn)
    mk.estimate_memory_usage(model, x, loss_fn=loss_fn)
    assert model.now().count_nonzero() == 0


def test_a_trial_tells_of_parameters_that_a_forward_trains():
    class Trains(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731 - of the test
    trainer = trainer_of(Trains(4, 4), memory="1GiB")
    with pytest.warns(mk.MemkitWarning, match="has moved parameters that the model's forward trains itself"):
        trainer.train_step(torch.ones(8, 4), loss_fn)


class TrainsItself(nn.Module):
    """Trains its codebook in each forward, as vector quantization with an optimizer in place does."""

    def __init__(self):
        super().__init__()
        self.linear, self.codebook = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.inner = torch.optim.SGD([self.codebook], lr=0.1)

    def forward(self, x):
        z = self.linear(x)
        (z.detach() - self.codebook[z.argmax(1)]).square().mean().backward()
        self.inner.step()
        self.inner.zero_grad()
        return z + self.codebook.detach()[z.argmax(1)]


@pytest.mark.parametrize("fails", [0, 1, 4])
@pytest.mark.parametrize("counts", [False, True])
def test_parameters_that_a_failed_attempt_has_moved_are_told_of_in_any_step(fails, counts):
    model, num_calls, counter = TrainsItself(), itertools.count(), {"calls": 0}
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False)

    def loss_fn(model, x):
        loss = model(x).square().mean()
        counter["calls"] += counts  # told of by a warning of its own
        if next(num_calls) == fails:
            raise MemoryError
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x in torch.randn(6, 8, 4):
            trainer.train_step(x, loss_fn)
    texts = [str(each.message) for each in told]
    assert sum("had moved parameters that the model's forward trains itself" in each for each in texts) == 1
    assert sum("had changed what loss_fn holds" in each for each in texts) == counts


@pytest.mark.filterwarnings("ignore:.*out of memory with:memkit.MemkitWarning")
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_schedule_that_a_failed_attempt_has_stepped_is_told_of(fails):
    """That of a critic or a temperature; as the way out says, it is stepped after the step."""

    def train(fails, *, steps_inside=True):
        torch.manual_seed(0)
        model, num_calls = nn.Linear(4, 4).double(), itertools.count()
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
        other.step()

        def loss_fn(model, x):
            if steps_inside:
                schedule.step()
            loss = model(x).square().mean() * other.param_groups[0]["lr"]
            if next(num_calls) == fails:
                out_of_memory()
            return loss

        with trainer_of(model) as trainer:
            for x in torch.randn(3, 8, 4, dtype=torch.float64):
                trainer.train_step(x, loss_fn)
                if not steps_inside:
                    schedule.step()
        return list(model.parameters())

    with pytest.warns(
        mk.MemkitWarning, match=r"had changed what loss_fn holds \(ExponentialLR\._last_lr.*after the step"
    ):
        train(fails)
    torch.testing.assert_close(train(fails, steps_inside=False), train(None, steps_inside=False), rtol=0, atol=1e-12)


def test_a_loss_that_reads_a_schedule_is_found_to_change_nothing():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    watch = StateWatch(model)
    watch.loss_fn = lambda model, x: model(x).sum() * schedule.get_last_lr()[0] * optimizer.param_groups[0]["lr"]
    rollback = Rollback(watch)
    watch.loss_fn(model, torch.ones(2, 4)).backward()
    assert not rollback.held.differ()
    rollback.learn()
    assert rollback.held is None


class StatisticsOfLayers(torch.optim.SGD):
    """Fills its attributes in hooks of the model, as K-FAC does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_calls, self.factors, self._total = 0, {}, torch.zeros(())

    def note(self, module, inputs, output):
        if torch.is_grad_enabled():
            self.num_calls += 1
            self.factors[module] = 0.9 * self.factors.get(module, 0.0) + inputs[0].detach().square().mean(0)
            self._total += inputs[0].detach().square().sum()


@pytest.mark.filterwarnings("ignore:.*out of memory:memkit.MemkitWarning")
@pytest.mark.parametrize(
    ("fails", "settings"), [(None, {"memory": "50MiB"}), (2, {}), (None, {"accumulation_steps": 1})]
)
def test_what_hooks_write_to_an_optimizer_is_put_back(fails, settings):
    def train(fails, **settings):
        torch.manual_seed(0)
        model, num_calls = nn.Sequential(nn.Linear(4, 4)).double(), itertools.count()
        optimizer = StatisticsOfLayers(model.parameters(), lr=0.1)
        model[0].register_forward_hook(optimizer.note)

        def loss_fn(model, x):
            loss = model(x).square().mean()
            if next(num_calls) == fails:
                raise MemoryError
            return loss

        with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **settings) as trainer:
            for x in torch.randn(4, 8, 4, dtype=torch.float64):
                trainer.train_step(x, loss_fn)
        return optimizer.num_calls, optimizer._total, optimizer.factors[model[0]]

    num_calls, total, factor = train(None)
    found = train(fails, **settings)
    assert found[0] == num_calls + (0 if fails is None else 2)  # halves from then on
    torch.testing.assert_close(found[1], total)
    if fails is None:
        torch.testing.assert_close(found[2], factor, rtol=0, atol=0)


class Follows(nn.Module):
    """A frozen network that each forward moves toward another, as Dreamer's slow target."""

    def __init__(self, net):
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(requires_grad=False)
        self.num_calls = 0

    @torch.no_grad()
    def forward(self, online, x):
        self.num_calls += 1
        for old, new in zip(self.net.parameters(), online.parameters(), strict=True):
            old.lerp_(new, 0.1)
        return self.net(x)


@pytest.mark.parametrize("is_method", [False, True])
def test_a_network_outside_of_the_model_that_a_failed_attempt_has_moved_is_told_of(is_method):
    model, num_calls = nn.Linear(4, 4), itertools.count()
    target = Follows(model)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)

    def loss_fn(model, x):
        loss = (model(x) - target(model, x) - x).square().mean()
        if next(num_calls) == 1:
            raise MemoryError
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x in torch.randn(3, 8, 4):
            if is_method:
                trainer.train_step(x, loss_fn)
                continue
            for attempt in trainer.microbatches(x):
                with attempt as micro:
                    trainer.backward(loss_fn(model, micro))
            trainer.step()
    texts = [str(each.message) for each in told]
    what = "what loss_fn holds" if is_method else "tensors of a Follows outside of the model"
    assert sum(f"had changed {what} (Linear.bias, Linear.weight)" in each for each in texts) == 1
    assert target.num_calls == 1 + 2 + 2  # the failed attempt at the whole batch does not count


def test_parameters_are_compared_until_a_forward_has_left_them():
    model = nn.Linear(4, 2)
    watch = StateWatch(model)
    for num_watched in (2, 0):
        rollback = Rollback(watch)
        assert len(rollback._trained) == num_watched
        model(torch.ones(3, 4))
        rollback.learn()


class Normalized(nn.Module):
    """Writes to a buffer in place what has a graph, once, and reads its number, as CRD's memory does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("constant", torch.tensor([-1.0]))

    def forward(self, x):
        out = self.linear(x).exp()
        if self.constant.item() < 0:
            self.constant[0] = out.mean()
        return out / self.constant.detach().item()


def test_a_buffer_with_a_graph_is_trained_in_silence():
    """PyTorch warns if such a tensor is asked for its gradient."""
    with trainer_of(Normalized()) as trainer:
        for x in torch.randn(3, 4, 4):
            trainer.train_step(x, mean_square)


def test_a_buffer_lets_go_of_the_graph_that_a_failed_attempt_wrote_to_it():
    model, has_graph = Normalized(), []

    def loss_fn(model, x):
        has_graph.append(model.constant.grad_fn is not None)
        loss = mean_square(model, x)
        if len(x) > 2:
            raise MemoryError
        return loss

    with trainer_of(model, probe=False) as trainer:
        trainer.train_step(torch.randn(4, 4), loss_fn)
    assert has_graph == [False, False, True]


class Critic(nn.Sequential):
    """Normalizes its weights by hooks, which compute them anew before each forward."""

    def __init__(self, normalize):
        super().__init__(*(normalize(nn.Linear(64, 64)) for _ in range(3)))


class Recurrent(nn.LSTM):
    """An LSTM whose weight is normalized; it also holds its weights in a list."""

    def __init__(self):
        super().__init__(64, 64)
        nn.utils.weight_norm(self, "weight_hh_l0")

    def forward(self, x):
        return super().forward(x)[0]


NORMALIZED = {
    "weight_norm": lambda: Critic(nn.utils.weight_norm),
    "spectral_norm": lambda: Critic(nn.utils.spectral_norm),
    "LSTM": Recurrent,
}
with_normalized = pytest.mark.parametrize("make", NORMALIZED.values(), ids=NORMALIZED)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("is_other", [True, False], ids=["in the loss", "in the model"])
@with_normalized
def test_weights_that_hooks_compute_anew_are_not_held_during_the_step(make, is_other):
    critic = make()
    model = nn.Sequential(nn.Linear(64, 64), nn.Identity() if is_other else critic)
    before = []

    def loss_fn(model, x):
        loss = (critic(model(x)) if is_other else model(x)).square().mean()
        assert not any(each() is not None for each in before)
        return loss

    with trainer_of(model) as trainer:
        for _ in range(3):
            before[:] = [weakref.ref(each) for each in map(weight_of, critic.modules()) if each is not None]
            trainer.train_step(torch.randn(8, 64), loss_fn)


def weight_of(module):
    return module.weight_hh_l0 if isinstance(module, nn.LSTM) else getattr(module, "weight", None)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@with_normalized
def test_weights_that_hooks_compute_anew_are_not_told_of(make):
    """The other network trains elsewhere: its weights differ from those of the last step."""
    critic = make()
    model = nn.Linear(64, 64)

    def loss_fn(model, x):
        loss = critic(model(x)).square().mean()
        if len(x) > 4:
            raise MemoryError
        return loss

    with trainer_of(model, probe=False) as trainer, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*what loss_fn holds")
        assert trainer.train_step(torch.randn(8, 64), loss_fn).sizes == (4, 4)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@with_normalized
def test_a_trial_leaves_weights_that_hooks_compute_anew(make):
    critic = make()
    watch = StateWatch(critic)
    before = [*map(weight_of, critic.modules())]
    with Rollback(watch, is_trial=True).undone():
        critic(torch.randn(8, 64))
    assert all(now is each for now, each in zip(map(weight_of, critic.modules()), before, strict=True))


class Counter(nn.Module):
    """Counts its forwards, and normalizes a weight itself, which is an attribute then."""

    def __init__(self):
        super().__init__()
        self.own_weight, self.num_calls = nn.Parameter(torch.randn(3, 3)), 0
        self.weight = self.own_weight.data

    def forward(self, x):
        self.num_calls += 1
        self.weight = self.own_weight / self.own_weight.norm()
        return x @ self.weight


def test_attributes_of_other_networks_in_the_loss_are_as_they_were():
    model, network = nn.Linear(3, 3), Counter()
    before, num_calls, are_first = network.weight, [], []

    def loss_fn(model, x):
        num_calls.append(network.num_calls)
        are_first.append(network.weight is before)
        loss = network(model(x)).square().mean()
        if len(x) > 4:
            raise MemoryError
        return loss

    with trainer_of(model, probe=False) as trainer, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*what loss_fn holds")
        assert trainer.train_step(torch.randn(8, 3), loss_fn).sizes == (4, 4)
    assert num_calls == [0, 0, 1]
    assert are_first == [True, True, False]


def test_draws_that_cannot_be_replayed_leave_the_random_state():
    class Full(random.Random):
        has_room = True

        def setstate(self, state):
            if not self.has_room:
                self.has_room = True
                raise MemoryError
            super().setstate(state)

    own = Full(0)
    numbers = snapshot.RandomNumbers([own], of_torch=False)
    random.random(), own.random()
    now = random.getstate(), own.getstate()
    own.has_room = False
    with pytest.raises(MemoryError), numbers.again():
        pass
    assert (random.getstate(), own.getstate()) == now


def test_networks_that_a_loss_makes_anew_are_not_kept():
    """In forwards of ever new lengths, each of which is watched: a metric with a large table, made where it is used."""
    made, model = [], nn.Linear(3, 3)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def loss_fn(model, x):
        metric = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(requires_grad=False)
        metric.register_buffer("table", torch.ones(2**19))
        made.append(weakref.ref(metric))
        return metric(model(x).flatten(0, 1)).square().mean()

    for length in range(1, 21):
        x = torch.randn(2, length, 3)
        if length % 2:
            trainer.train_step(x, loss_fn)
        else:
            for attempt in trainer.microbatches(x):
                with attempt as micro:
                    trainer.backward(loss_fn(model, micro))
            trainer.step()
    gc.collect()
    assert [each() for each in made] == [None] * 20
    Rollback(watch := trainer._driver.state_watch)
    assert list(watch.owners) == [model]
    assert len(watch._found) == len(watch.restless) == 0
    assert len(watch._still) <= 1


def test_a_network_that_a_forward_has_found_stays_watched_as_long_as_it_is_there():
    model, other = nn.Linear(3, 3), nn.BatchNorm1d(3)
    watch = StateWatch(model)
    with Rollback(watch).discover():
        other(torch.randn(4, 3))
    assert list(watch.owners) == [model, other]
    before = [each.clone() for each in other.buffers()]
    with Rollback(watch).undone():
        other(torch.randn(4, 3))
        other.eval()
    assert_same(list(other.buffers()), before)
    assert other.training
