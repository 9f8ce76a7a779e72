"""Two gloo processes train as one: DDP and FSDP2, ragged data, unused parameters, buffers."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memkit as mk
from tests.helpers import assert_refused, assert_same
from tests.ranks import join, leave, load, spawn
from tests.toys import trainer_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8).eval()  # has buffers; in eval mode its statistics do not depend on the split
        self.sometimes = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x, *, extra):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(x + self.sometimes(x) if extra else x)


# (rows, uses the branch) of each micro-batch; rank 1 has fewer of them, and one without weight
BATCHES = [
    [(5, False), (1, False), (7, False), (2, False), (3, False), (4, False), (6, False)],
    [(2, True), (0, True), (3, True), (1, False)],
]
STEPS = 3


def data(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return [
        (torch.randn(max(rows, 1), 4, dtype=torch.float64, generator=generator), rows, extra)
        for rows, extra in BATCHES[rank]
    ]


def train(model, accumulator, batches):
    for x, rows, extra in batches:
        loss = model(x, extra=extra).pow(2).mean()
        accumulator.backward(loss if rows else loss * float("nan"), count=rows)
        accumulator.step()
    accumulator.flush()


def one_process(weigh=lambda rows, group: rows / sum(rows for _, rows, _ in group)):
    """The same groups in one process: group k holds the k-th group of every rank."""
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    queues = [data(0), data(1)]
    while any(queues):
        group = [batch for queue in queues for batch in queue[:STEPS] if batch[1]]
        queues = [queue[STEPS:] for queue in queues]
        optimizer.zero_grad()
        for x, rows, extra in group:
            (model(x, extra=extra).pow(2).mean() * weigh(rows, group)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def ddp_worker(rank, folder, **settings):
    join(rank, folder)
    plain = Model().double()
    model = DistributedDataParallel(plain, **settings)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    with mk.GradientAccumulator(optimizer, STEPS, max_grad_norm=0.5, model=model) as accumulator:
        assert model.require_backward_grad_sync is False
        train(model, accumulator, data(rank))
        assert accumulator.num_steps == 3
    assert model.require_backward_grad_sync is True
    assert model.static_graph is bool(settings)
    torch.save(plain.state_dict(), f"{folder}/{rank}.pt")
    leave()


def static_worker(rank, folder):
    ddp_worker(rank, folder, static_graph=True)


def buffer_worker(rank, folder):
    """BatchNorm in training mode: every rank continues with the first rank's statistics, as under plain DDP."""
    join(rank, folder)
    plain = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    model = DistributedDataParallel(plain)
    with mk.GradientAccumulator(torch.optim.SGD(plain.parameters(), lr=0.1), model=model) as accumulator:
        generator = torch.Generator().manual_seed(rank)
        accumulator.backward(model(torch.randn(8, 4, generator=generator)).pow(3).mean())
        torch.save(plain[1].running_mean.clone(), f"{folder}/before{rank}.pt")
        assert accumulator.step() is True
    torch.save(plain[1].running_mean, f"{folder}/after{rank}.pt")
    check_an_accumulator_without_the_model()
    leave()


def fsdp_worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    join(rank, folder)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = mk.GradientAccumulator(optimizer, 3, max_grad_norm=0.5)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    splits = [(9, 0, 5, 2), (1, 7, 2, 4)]  # rows of each rank's micro-batches; the last is a short group
    parts = x.split([*splits[0], *splits[1]])
    mine = parts[4 * rank : 4 * rank + 4]
    for part in mine:
        batch = part if len(part) else torch.ones(1, 4).double()
        accumulator.backward(model(batch).pow(2).mean(), count=len(part))
        accumulator.step()
    accumulator.flush()
    assert accumulator.num_steps == 2
    if rank == 0:
        with pytest.raises(mk.errors.InputError, match="backward\\(loss_sum, count=0"):
            accumulator.backward(torch.tensor(float("nan"), requires_grad=True), count=0)

    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for group in (torch.cat([*parts[0:3], *parts[4:7]]), torch.cat([parts[3], parts[7]])):
        plain.zero_grad()
        reference(group).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    torch.testing.assert_close(accumulator.grad_norm, norm, rtol=1e-14, atol=0)
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-13, atol=1e-15)
    Path(folder, f"{rank}.done").touch()
    leave()


def check_an_accumulator_without_the_model():
    """It would take DDP's mean over the ranks for this rank's gradient; with a plain model all is well."""
    line = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
    with pytest.warns(mk.MemkitWarning, match=r"one of 2 processes.*GradientAccumulator\(optimizer, model=model\)"):
        mk.GradientAccumulator(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mk.GradientAccumulator(optimizer, model=line)


def info_nce(model, x):
    z = model(x, extra=True)
    return torch.nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def with_padding(model, batch):
    x, labels = batch
    return torch.nn.functional.cross_entropy(model(x, extra=True), labels)


def checked_worker(rank, folder):
    """A correct split gives no warning; others are warned of or refused on each rank, and no rank waits."""
    join(rank, folder)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    labels = torch.tensor([0, 1, -100, -100, 1, 0, -100, 1])

    def wrapped():
        model = DistributedDataParallel(Model(), find_unused_parameters=True)
        return trainer_of(model, accumulation_steps=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = wrapped()
        for _ in range(2):
            trainer.train_step(x, lambda model, x: model(x, extra=True).pow(2).mean())
    assert_refused(lambda: wrapped().train_step(x, info_nce), mk.errors.ConfigError, "when the batch is split")
    with pytest.warns(mk.MemkitWarning, match="mean over something other than rows"):
        wrapped().train_step((x, labels), with_padding)
    weights = [torch.empty_like(trainer.model.module.first.weight) for _ in range(2)]
    dist.all_gather(weights, trainer.model.module.first.weight.detach())
    assert_same(*weights)
    leave()


@pytest.mark.parametrize("worker", [ddp_worker, pytest.param(static_worker, marks=pytest.mark.slow)])
def test_two_ddp_ranks_with_ragged_data_equal_one_process(worker, tmp_path):
    spawn(worker, tmp_path)
    first, second = load(tmp_path, "")
    assert_same(first, second)
    torch.testing.assert_close(first, one_process(), rtol=1e-13, atol=1e-15)
    assert_same(first["never"], torch.ones(3).double())  # no gradient, no decay


def test_averaging_over_ranks_and_micro_batches_is_wrong():
    """Negative control: equal weights for all micro-batches, which is what unequal ranks get from plain DDP."""
    naive = one_process(weigh=lambda rows, group: 1 / len(group))
    error = (naive["last.weight"] - one_process()["last.weight"]).abs().max()
    assert error > 1e-3


def test_splits_are_checked_on_each_of_two_ranks(tmp_path):
    spawn(checked_worker, tmp_path)


def test_buffers_follow_the_first_rank(tmp_path):
    spawn(buffer_worker, tmp_path)
    first, second = load(tmp_path, "before")
    assert not torch.equal(first, second)
    assert_same(load(tmp_path, "after"), [first, first])


def test_two_sharded_ranks_equal_one_process(tmp_path):
    spawn(fsdp_worker, tmp_path)
    assert {path.name for path in tmp_path.glob("*.done")} == {"0.done", "1.done"}


@pytest.fixture
def lone_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard_heads(steps):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}).bfloat16()
    for head in model.values():
        fully_shard(head, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mk.GradientAccumulator(optimizer, steps, accumulate_dtype=torch.float32, check_weights=False)


def sharded_loss(model, heads):
    x = torch.ones(4, 8).bfloat16()
    return sum(model[head](x).float().pow(2).mean() for head in heads)


@pytest.mark.usefixtures("lone_rank")
def test_bfloat16_shards_survive_late_parameter_and_dropped_group():
    model, accumulator = shard_heads(steps=4)
    seen = []
    accumulator._sum.optimizers[0].register_step_pre_hook(lambda *_: seen.append(model["b"].weight.grad.full_tensor()))
    for heads in ("a", "a", "a"):
        accumulator.backward(sharded_loss(model, heads), count=4)
    accumulator.discard()
    for heads in ("a", "a", "b", "ab"):  # b's first gradient comes after the sums have become float32
        accumulator.backward(sharded_loss(model, heads), count=4)
    assert model["b"].weight.grad.dtype == torch.float32
    assert accumulator.step()
    reference = shard_heads(steps=1)[0]
    sharded_loss(reference, "b").backward()
    torch.testing.assert_close(seen[0], reference["b"].weight.grad.full_tensor() / 2, rtol=2**-7, atol=0)


@pytest.mark.usefixtures("lone_rank")
def test_shards_without_a_gradient_do_not_go_on_in_silence():
    _, accumulator = shard_heads(steps=1)
    accumulator.backward(torch.ones((), requires_grad=True) * 2)
    assert_refused(lambda: accumulator.step(), mk.errors.StateError, "no gradient on any rank")


def test_one_process_needs_no_ranks():
    model = nn.Linear(2, 2)
    accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert accumulator._sum.ranks is None
