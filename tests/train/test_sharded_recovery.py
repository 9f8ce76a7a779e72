"""FSDP2: a rank that runs out of memory takes part in the others' collectives, and all start the batch over."""

import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from memkit.train.lockstep import Lockstep
from tests.helpers import is_same
from tests.ranks import TOGETHER, join, leave, spawn
from tests.toys import fits, mean_square, out_of_memory
from tests.train.faults import FailingOperator
from tests.train.limit_child import MIB, limit, mlp

STEPS, ROWS = 3, 8
SHARDING = {}  # options of fully_shard, for the whole process


class Fault(FailingOperator):
    """Not inside a collective: past the check for room, gloo's own part of it takes no memory that could be short."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" or func is torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Dropout draws random numbers; the buffer changes in each forward."""

    def __init__(self):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 6)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.detach().float().mean(), 0.1)
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Model(nn.Sequential):
    def forward(self, x, num_blocks=2):
        for block in list(self)[:num_blocks]:
            x = block(x)
        return self[2](x)


def make():
    torch.manual_seed(0)
    model = Model(Block(), Block(), nn.Linear(6, 1))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, **SHARDING)
    if SHARDING:
        model.set_modules_to_forward_prefetch([model[0], model[1]])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batches(rank):
    generator = torch.Generator().manual_seed(3 + rank)
    return torch.randn(STEPS, ROWS, 6, generator=generator)


def local(value):
    return value.to_local().clone() if hasattr(value, "to_local") else value.clone()


def state_of(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local(each) for each in (*model.parameters(), *model.buffers(), *states, torch.get_rng_state())]


def train(rank, faults, accumulation_steps=2):
    """Train with a fault at operator ``faults[step, n]`` of the n-th micro-batch tried, or of the ``"step"``."""
    model, optimizer = make()
    torch.manual_seed(100 + rank)
    sizes, num_ooms, num_operators = [], [], {}
    with mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=accumulation_steps, max_grad_norm=0.5, probe=False
    ) as trainer:
        for step, batch in enumerate(batches(rank)):
            number = 0 if step else -1  # the very first is the rehearsal
            for attempt in trainer.microbatches(batch):
                with attempt as micro, Fault(faults.get((step, number), 0)) as fault:
                    trainer.backward(mean_square(model, micro))
                num_operators[step, number] = fault.num_operators
                number += 1
            sizes.append(trainer._batch_run.sizes)
            num_ooms.append(trainer._batch_run.num_ooms)
            with Fault(faults.get((step, "step"), 0)) as fault:
                assert trainer.step()
            num_operators[step, "step"] = fault.num_operators
    return state_of(model, optimizer), sizes, num_ooms, num_operators


def undisturbed(rank, sizes):
    model, optimizer = make()
    torch.manual_seed(100 + rank)
    accumulator = mk.GradientAccumulator(optimizer, max_grad_norm=0.5)
    for batch, parts in zip(batches(rank), sizes, strict=True):
        for micro in batch.split(parts):
            accumulator.backward(mean_square(model, micro), count=len(micro))
        accumulator.flush()
    return state_of(model, optimizer)


def check(rank, scenarios):
    """Each scenario holds the faults of rank 0 and of rank 1, and how often all ranks start a batch over."""
    for *faults, expected_ooms in scenarios:
        state, sizes, num_ooms, _ = train(rank, faults[rank])
        assert num_ooms == expected_ooms, (faults, num_ooms)
        assert is_same(state, undisturbed(rank, sizes)), faults


def worker(rank, folder):
    join(rank, folder)
    state, sizes, num_ooms, num_operators = train(rank, {})
    assert sizes == [(4, 4)] * 3
    assert num_ooms == [0, 0, 0]
    assert is_same(state, undisturbed(rank, sizes))
    last = num_operators[0, 0]
    step_places = (2, 6, 8, 70)  # normalizing, before and after the norm's collective, in the optimizer
    check(
        rank,
        [
            ({(0, 0): 20}, {}, [1, 0, 0]),  # forward, the first micro-batch of all
            ({}, {(1, 1): last - 30}, [0, 1, 0]),  # backward, a later one
            ({(0, 1): last}, {(0, 0): last // 2}, [1, 0, 0]),  # both ranks, at different places
            ({(0, 0): 30}, {(0, 3): 100}, [2, 0, 0]),  # again, when all have started over
            *(({}, {(1, "step"): place}, [0, 0, 0]) for place in step_places),
        ],
    )
    check_manners(rank)
    check_refusals(rank)
    check_state_of_code(rank)
    check_written_batches(rank)
    check_a_count_by_hand(rank)
    leave()


@TOGETHER
def test_two_ranks_recover_together_or_report_failure(tmp_path):
    spawn(worker, tmp_path)


class Warming(nn.Module):
    """Its result depends on how often it was called; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.line, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)
        self.num_calls, self.state = 0, {"last": 0.0}

    def forward(self, x):
        self.num_calls += 1
        self.state["last"] = self.state["last"] + 0.1
        return self.line(x) * self.scale * (1 + self.state["last"] + 0.1 * self.num_calls)


class Annealed:
    """A loss with a count and a generator of its own, and a network that it runs, which has a count too."""

    def __init__(self):
        self.num_calls, self.generator, self.other = 0, torch.Generator().manual_seed(0), Warming().double()
        self.other.requires_grad_(False)

    def __call__(self, model, x):
        self.num_calls += 1
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return self.other(model(x + noise)).square().mean() * min(1.0, self.num_calls / 10)


def train_with_state(rank, *, sizes, fails, is_annealed, reshards):
    """Train in memkit's wrapper; with `sizes` in a plain loop over micro-batches of these."""
    torch.manual_seed(0)
    model = nn.Sequential(Warming(), Warming()).double()
    for module in (model[0], model):
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), reshard_after_forward=reshards)
    loss_fn = Annealed() if is_annealed else lambda _, x: mean_square(model, x)  # with a model in its closure
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(STEPS, ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    found = []
    if sizes is None:
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
            with trainer.evaluation():
                model(data[0])  # which leaves parameters gathered
            for step, batch in enumerate(data):
                fail_now = fails and rank == 1 and step == 1
                found.append(trainer.train_step(batch, fits(ROWS - 1, loss_fn) if fail_now else loss_fn).sizes)
    else:
        with torch.no_grad():
            model(data[0])
        for batch, parts in zip(data, sizes, strict=True):
            for micro in batch.split(parts):
                (loss_fn(model, micro) * len(micro) / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for module in (model[0], model):
        module.reshard()
    counts = [(each.num_calls, each.state["last"]) for each in model]
    counts += [(loss_fn.num_calls, loss_fn.other.num_calls)] if is_annealed else []
    return found, counts, [each.full_tensor() for each in model.parameters()]


def check_state_of_code(rank):
    """Attributes and what the loss holds: the rehearsal leaves no trace, nor does a failed attempt in the model."""
    for how in (
        {"fails": False, "is_annealed": True, "reshards": True},
        {"fails": True, "is_annealed": False, "reshards": True},
        {"fails": True, "is_annealed": False, "reshards": False},
    ):
        sizes, counts, parameters = train_with_state(rank, sizes=None, **how)
        assert [len(each) for each in sizes] == ([1, 2, 2] if how["fails"] else [1, 1, 1])
        _, plain_counts, plain = train_with_state(rank, sizes=sizes, **how)
        assert counts == plain_counts
        torch.testing.assert_close(parameters, plain, rtol=1e-12, atol=1e-14)


def shifted(model, batch):
    batch["x"] -= 3.0
    return (model(batch["x"]) - batch.pop("y")).square().mean()


def written_data(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return {name: torch.randn(6, 4, dtype=torch.float64, generator=generator) for name in "xy"}


def make_line():
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4).double(), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain_steps(rank, *loss_fns):
    model, optimizer = make_line()
    for step, loss_fn in enumerate(loss_fns):
        loss_fn(model, written_data(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.full_tensor() for each in model.parameters()]


def assert_trained(model, want):
    torch.testing.assert_close([each.full_tensor() for each in model.parameters()], want, rtol=1e-12, atol=1e-14)


def check_written_batches(rank):
    """A forward that writes to its batch trains on it once; one that would run again on what it wrote is refused."""

    def fails(model, batch):
        loss = shifted(model, batch)
        return out_of_memory() if rank else loss

    def popped(model, batch):
        return (model(batch["x"]) - batch.pop("y")).square().mean()

    def popped_in_parts(model, batch):
        loss = popped(model, batch)  # the rank with memory has then taken out its entry
        return out_of_memory() if rank and len(batch["x"]) == 6 else loss

    model, optimizer = make_line()
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
        for step in range(2):
            trainer.train_step(written_data(rank, step), shifted)
        assert_trained(model, plain_steps(rank, shifted, shifted))
        with pytest.raises(mk.MemkitOutOfMemoryError, match=r"all ranks must start over.*in place"):
            trainer.train_step(written_data(rank, 2), fails)
        assert trainer.train_step(written_data(rank, 2), popped_in_parts).num_ooms == 1
        assert_trained(model, plain_steps(rank, shifted, shifted, popped))
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False) as trainer:
        few = {name: each[: 1 if rank else 6] for name, each in written_data(rank, 3).items()}
        with pytest.raises(mk.errors.InputError, match=r"a rank has 1 rows for 2 parts.*in place"):
            trainer.train_step(few, shifted)


def check_a_count_by_hand(rank):
    """In a loop of the user's own the rehearsal's rows do not count."""
    model, optimizer = make_line()
    num_rows = []
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
        for step in range(2):
            for attempt in trainer.microbatches(written_data(rank, step)):
                with attempt as micro:
                    trainer.backward(shifted(model, micro))
                assert attempt.is_check is not attempt.counts
                num_rows += [len(micro["x"])] if attempt.counts else []
            trainer.step()
    assert num_rows == [6, 6]
    assert_trained(model, plain_steps(rank, shifted, shifted))


def check_growth(rank):
    """After clean steps the size grows back, on both ranks at once."""
    batch = batches(rank)[0]
    with mk.MemoryEfficientTrainingWrapper(*make(), probe=False) as trainer:
        fails_once = fits(ROWS - 1, mean_square) if rank else mean_square
        assert trainer.train_step(batch, mean_square).num_ooms == 0
        assert trainer.train_step(batch, fails_once).num_ooms == 1
        num_parts = [trainer.train_step(batch, mean_square).num_microbatches for _ in range(42)]
        assert num_parts == [2] * 40 + [1] * 2


def everywhere_worker(rank, folder):
    join(rank, folder)
    check_growth(rank)
    last = train(rank, {})[3][0, 1]
    places = range(1, last + 1, 5)
    check(rank, [({(0, 1): place}, {}, [1, 0, 0]) for place in places])
    check(rank, [({(1, 0): place}, {(1, 1): last + 1 - place}, [0, 1, 0]) for place in places])
    leave()


def layouts_worker(rank, folder):
    join(rank, folder)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for SHARDING["reshard_after_forward"], SHARDING["mp_policy"] in ((False, MixedPrecisionPolicy()), (True, half)):
        last = train(rank, {})[3][0, 1]
        places = range(1, last + 1, 25)
        check(rank, [({(0, 1): place}, {(0, 0): last + 1 - place}, [1, 0, 0]) for place in places])
    leave()


@TOGETHER
@pytest.mark.slow
@pytest.mark.parametrize("worker", [everywhere_worker, layouts_worker])
def test_faults_everywhere(worker, tmp_path):
    spawn(worker, tmp_path)


def check_manners(rank):
    """What a clean batch costs, what is left behind, batches of different sizes, and when nothing fits."""
    model, optimizer = make()
    batch = batches(rank)[0]
    own = [type(group._all_gather_comm) for group in groups_of(model)]
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=4, probe=False) as trainer:
        trainer.train_step(batch, mean_square)
        with Collectives() as with_memkit:
            trainer.train_step(batch, mean_square)
        with Collectives() as plain:
            accumulator = mk.GradientAccumulator(optimizer)
            accumulator._sum.agree_on_weight(2)
            for micro in batch.split(2):
                accumulator.backward(mean_square(model, micro), count=2)
            accumulator.flush()
        assert len(with_memkit.names) == len(plain.names)  # one to agree, but none on the first weight
        result = trainer.train_step(batch[: 8 if rank else 2], mean_square)
        assert result.sizes == ((4, 4) if rank else (1, 1))
        assert result.num_ooms == 0
        assert trainer.train_step(batch, mean_square).num_microbatches == 4
        before = [local(each) for each in model.parameters()]
        with trainer.evaluation():
            model(batch)  # FSDP leaves the root's parameters gathered, and a rank that fails must not gather them anew

        with pytest.raises(mk.MemkitOutOfMemoryError, match="8 micro-batches"):
            trainer.train_step(batch, out_of_memory if rank else mean_square)
        assert is_same(before, [local(each) for each in model.parameters()])
    assert [type(group._all_gather_comm) for group in groups_of(model)] == own

    large = nn.Linear(256, 256)  # shards that the guard of the first steps keeps in files
    fully_shard(large, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    trainer = mk.MemoryEfficientTrainingWrapper(large, torch.optim.SGD(large.parameters()))
    assert trainer.train_step(torch.randn(4, 256), mean_square).stepped


def groups_of(model):
    states = [module._get_fsdp_state() for module in (model[0], model[1], model)]
    return [state._fsdp_param_group for state in states]


def check_refusals(rank):
    """Where a failed rank cannot stay in step, all ranks are warned, and errors pass through as before."""

    def with_collective(model, x):
        loss = mean_square(model, x)
        dist.all_reduce(loss.detach().clone())
        return loss

    def step(trainer, loss_fn):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train_step(batches(rank)[0], loss_fn)
        return [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]

    trainer = mk.MemoryEfficientTrainingWrapper(*make(), accumulation_steps=2, probe=False)
    [message] = step(trainer, with_collective)
    assert "communicates outside FSDP" in message
    assert "c10d::allreduce_" in message
    assert step(trainer, mean_square) == []

    with pytest.raises(torch.OutOfMemoryError):
        trainer.train_step(batches(rank)[0], out_of_memory)

    trainer = mk.MemoryEfficientTrainingWrapper(*make(), accumulation_steps=2, probe=False)
    assert step(trainer, mean_square) == []
    [message] = step(trainer, lambda model, x: model(x, num_blocks=1).mean())
    assert "its micro-batches do not all run the same collectives" in message

    with pytest.warns(mk.MemkitWarning, match="no recovery from out-of-memory here: the ranks exchange parameters"):
        mk.MemoryEfficientTrainingWrapper(*make(), split_fn=lambda batch, n: list(batch.chunk(n)))
    model, optimizer = make()
    with pytest.MonkeyPatch.context() as another_torch:
        another_torch.delattr("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
        with pytest.warns(mk.MemkitWarning, match="this torch version shards differently"):
            mk.MemoryEfficientTrainingWrapper(model, optimizer)


def absent_worker(rank, folder):
    """Negative control: the rank that failed stays away, as a plain retry would."""
    join(rank, folder, timeout_s=2)
    Lockstep.join = lambda self, start=0: (time.sleep(6), os._exit(0))
    with pytest.raises(RuntimeError, match=r"Timed out|closed"):
        train(rank, {(1, 1): 20} if rank else {})
    os._exit(0)


def leftover_worker(rank, folder):
    """Negative control: torch's own reset alone leaves what a half-done backward has added to gathered parameters."""
    join(rank, folder)
    last = train(rank, {})[3][0, 1]

    def drop_out(self):
        for state, module in self._states.items():
            if state._is_root:
                module.reset_iter_state()

    Lockstep.drop_out = drop_out
    same = []
    for place in range(last // 2, last, 10):
        state, sizes, _, _ = train(rank, {(1, 1): place} if rank else {})
        same.append(is_same(state, undisturbed(rank, sizes)))
    assert not all(same)
    leave()


@TOGETHER
@pytest.mark.slow
@pytest.mark.parametrize("control", [absent_worker, leftover_worker])
def test_negative_controls(control, tmp_path):
    spawn(control, tmp_path)


def limited_worker(rank, folder):
    """A real limit on one of the ranks, while micro-batches run."""
    join(rank, folder)
    torch.backends.mkldnn.enabled = False  # oneDNN crashes in backward when memory is short

    def make_large():
        torch.manual_seed(0)
        model = mlp()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for module in (*model[1:-1], model):
            fully_shard(module, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    data = torch.randn(2, 256, 1024, generator=torch.Generator().manual_seed(5 + rank))

    def reconstruction(model, x):
        return nn.functional.mse_loss(model(x), x)

    def run(headroom_bytes):
        model, optimizer = make_large()
        torch.manual_seed(9 + rank)
        sizes, num_ooms = [], 0
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
            for batch in data:
                if rank:
                    limit(headroom_bytes)
                for attempt in trainer.microbatches(batch):
                    with attempt as micro:
                        trainer.backward(reconstruction(model, micro))
                limit(None)
                sizes.append(trainer._batch_run.sizes)
                num_ooms += trainer._batch_run.num_ooms
                trainer.step()
        return state_of(model, optimizer), sizes, num_ooms

    run(None)  # thread pools and caches exist from here on
    state, sizes, num_ooms = run(80 * MIB)
    model, optimizer = make_large()
    torch.manual_seed(9 + rank)
    accumulator = mk.GradientAccumulator(optimizer)
    for batch, parts in zip(data, sizes, strict=True):
        for micro in batch.split(parts):
            accumulator.backward(reconstruction(model, micro), count=len(micro))
        accumulator.flush()
    row = {"num_ooms": num_ooms, "sizes": sizes, "is_same": is_same(state, state_of(model, optimizer))}
    Path(folder, f"{rank}.json").write_text(json.dumps(row))
    leave()


@TOGETHER
@pytest.mark.slow
def test_a_real_limit_on_one_rank(tmp_path):
    spawn(limited_worker, tmp_path)
    rows = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(row["is_same"] and row["num_ooms"] > 0 for row in rows)
    assert rows[0]["sizes"] == rows[1]["sizes"]
