"""States of several ranks: replicas are written once, shards by each rank, and an error on one is an error on all."""

import errno
import os
import random
import signal
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from memkit._core.errors import ConfigError, FileFormatError, MemkitWarning, StateError
from memkit.points.batches import BudgetBatchSampler
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.recipes.order import ResumableBatchSampler
from memkit.recipes.state.files import list_states
from memkit.recipes.state.manager import TrainingStateManager
from memkit.train.accumulate import GradientAccumulator
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.helpers import assert_refused, assert_same, gradients
from tests.ranks import join, leave, spawn
from tests.recipes.stateforge import forge, gadgets

STEPS, STOP = 6, 3  # in the middle of a group of two


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


class Replicated:
    def __init__(self):
        self.model = DistributedDataParallel(make())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.accumulator = GradientAccumulator(self.optimizer, 2, model=self.model)


class Sharded:
    def __init__(self):
        from torch.distributed.fsdp import fully_shard

        self.model = make()
        fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.accumulator = GradientAccumulator(self.optimizer, 2)


def step(training, number):
    loss = training.model(torch.full((3, 8), 0.1 * number + dist.get_rank())).square().mean()
    training.accumulator.backward(loss * (1 + 0.01 * random.random()))
    training.accumulator.step()


def whole_values(training):
    state = [training.model.state_dict(), training.optimizer.state_dict()["state"]]
    leaves = torch.utils._pytree.tree_leaves(state)
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in leaves]


def stop_and_go_on(rank, folder, kind):
    """Each rank has random numbers of its own; the resumed training ends with the same values, bit for bit."""
    training, manager = kind(), TrainingStateManager(folder)
    torch.manual_seed(rank)
    random.seed(rank)
    for number in range(STEPS):
        step(training, number)
        if number + 1 == STOP:
            manager.save(STOP, **vars(training))
    expected = whole_values(training)
    training.accumulator.close()
    random.seed(77)
    resumed = kind()
    assert manager.restore(**vars(resumed)) == STOP
    for number in range(STOP, STEPS):
        step(resumed, number)
    assert_same(whole_values(resumed), expected)
    assert manager.restore(**vars(resumed)) == STOP  # into tensors that are there


def go_on_without_an_accumulator(rank, folder):
    """A group by hand: the first micro-batch of each rank waits for the step, in gradients of this rank alone."""
    model, manager = DistributedDataParallel(make()), TrainingStateManager(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.no_sync():
        (model(torch.ones(3, 8)).sum() * (1 + rank)).backward()
    expected = gradients(model)
    manager.save(1, optimizer=optimizer, model=model)
    optimizer.zero_grad()
    assert manager.restore(optimizer=optimizer, model=model) == 1
    assert_same(gradients(model), expected)
    if rank == 1:  # a rank that ran out of data has no gradients, whatever rank 0 has
        optimizer.zero_grad()
    manager.save(2, optimizer=optimizer, model=model)
    assert manager.restore(optimizer=optimizer, model=model) == 2
    assert all((parameter.grad is None) == (rank == 1) for parameter in model.parameters())


def fail_on_one_rank(rank, folder):
    model, manager = nn.Linear(4, 4), TrainingStateManager(folder)
    with pytest.raises(ConfigError, match="got 2 ranks"):
        TrainingStateManager(folder, background=True).save(0, model=model)
    manager.save(1, model=model)
    manager.save(3, model=model)
    if rank == 0:
        (list_states(manager.directory)[0].path / "rank-1.pt").write_bytes(b"half")
    dist.barrier()
    with pytest.warns(MemkitWarning, match=r"skips .*step-3: rank-1\.pt does not match"):
        assert manager.restore(model=model) == 1
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, StateError), match="No space left") as raised:
        if rank == 1:
            patch.setattr("memkit.recipes.state.manager.write_file", fill_up)
        manager.save(4, model=model)
    assert isinstance(raised.value, OSError if rank == 1 else StateError)
    dist.barrier()
    assert manager.steps == (3, 1)
    assert len(list(manager.directory.iterdir())) == 2


def refuse_on_one_rank(rank, folder):
    """What one rank's object refuses, or a forged index, changes nothing on any rank, and keeps nobody waiting."""
    training, manager, canary = Sharded(), TrainingStateManager(f"{folder}/states"), Path(folder) / "canary"
    note = Note()
    manager.save(1, model=training.model, note=note)
    for parameter in training.model.parameters():
        nn.init.constant_(parameter, 7.0)
    note.value = "refused" if rank else "mine"
    with pytest.raises((FileFormatError, StateError), match=r"load_state_dict refuses|rank 1: FileFormatError"):
        manager.restore(model=training.model, note=note)
    assert note.value == ("refused" if rank else "mine")
    (saved,) = list_states(manager.directory)
    dist.barrier()
    if rank == 0:
        (saved.path / ".metadata").write_bytes(gadgets(canary)["protocol 4"])
        forge(saved.path)
    dist.barrier()
    assert_refused(lambda: manager.restore(1, model=training.model), FileFormatError, "pickle")
    assert not canary.exists()
    assert all(bool((each.full_tensor() == 7.0).all()) for each in training.model.parameters())


class Note:
    value = "saved"

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.value == "refused" and state["value"] == "saved":
            raise ValueError("no")
        self.value = state["value"]


def batches_for_whom(rank):
    """Batches that nobody has shared out would be the same on all ranks: they are refused, early or late."""
    for make_order in (lambda **ranks: ResumableBatchSampler(8, 2, **ranks), lambda **ranks: budgeted(8, **ranks)):
        with pytest.raises(ConfigError, match=r"got 2 processes without num_replicas.*rank=torch.distributed.get_rank"):
            make_order()
        with pytest.raises(ConfigError, match=r"got num_replicas=2, and no rank"):
            make_order(num_replicas=2)
        taken = [None, None]
        dist.all_gather_object(taken, [*chain(*make_order(num_replicas=2, rank=rank))])
        assert sorted(chain(*taken)) == list(range(8))
        assert len(list(make_order(num_replicas=1))) == 4  # meant


def budgeted(num_samples, **ranks):
    return BudgetBatchSampler([1] * num_samples, max_points=2, **ranks)


def fill_up(path, write):
    raise OSError(errno.ENOSPC, "No space left on device")


def worker(rank, folder):
    early = ResumableBatchSampler(8, 2)
    join(rank, folder)
    assert_refused(lambda: next(iter(early)), ConfigError, "2 processes without num_replicas")
    batches_for_whom(rank)
    stop_and_go_on(rank, f"{folder}/replicated", Replicated)
    stop_and_go_on(rank, f"{folder}/sharded", Sharded)
    go_on_without_an_accumulator(rank, f"{folder}/by_hand")
    fail_on_one_rank(rank, f"{folder}/failing")
    refuse_on_one_rank(rank, f"{folder}/refusing")
    leave()


def test_two_ranks_go_on_bit_for_bit(tmp_path):
    spawn(worker, tmp_path)
    (saved,) = list_states(tmp_path / "replicated")
    states = [torch.load(saved.path / f"rank-{rank}.pt", weights_only=True)["objects"] for rank in range(2)]
    assert set(states[0]) == {"model", "optimizer", "accumulator"}
    assert set(states[1]) == {"accumulator", "optimizer"}  # the model is the same on all ranks
    assert list(states[1]["optimizer"]) == ["memkit gradients"]  # in the middle of a group they are a rank's own
    assert list(states[0]["model"]) == list(make().state_dict())  # without DDP's prefix
    (saved,) = list_states(tmp_path / "sharded")
    files = saved.read_manifest()["files"]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "rank-0.pt", "rank-1.pt"} == set(files)
    saved.check_files(files)


def one_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store1", rank=0, world_size=1)
    training = Sharded()
    with pytest.warns(MemkitWarning, match="was saved on 2 ranks, and now there are 1"):
        assert TrainingStateManager(f"{folder}/states").restore(**vars(training)) == STOP
    assert training.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().shape == (16, 8)
    torch.save([each.full_tensor() for each in training.model.parameters()], f"{folder}/one.pt")
    leave()


def save_after_training(rank, folder):
    join(rank, folder)
    training = Sharded()
    for number in range(STOP + 1):
        step(training, number)
    TrainingStateManager(f"{folder}/states").save(STOP, **vars(training))
    values = [each.full_tensor() for each in training.model.parameters()]
    if rank == 0:
        torch.save(values, f"{folder}/two.pt")
    leave()


@pytest.mark.slow
def test_shards_of_two_ranks_go_on_in_one(tmp_path):
    spawn(save_after_training, tmp_path)
    spawn(one_rank, tmp_path, num_ranks=1)
    one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    assert_same(one, two)


def line_in_a_group(batches, folder, *, saves):
    """Train in groups of two micro-batches, from the saved state if there is one."""
    torch.manual_seed(0)
    line = nn.Linear(4, 2).double()
    model, manager = DistributedDataParallel(line), TrainingStateManager(folder)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
    with GradientAccumulator(optimizer, accumulation_steps=2, model=model) as accumulator:
        parts = {"model": model, "optimizer": optimizer, "accumulator": accumulator}
        if not saves:
            with pytest.warns(MemkitWarning, match=r"pending gradients \(accumulator, optimizer\) are dropped"):
                manager.restore(**parts)
        for batch in batches:
            accumulator.backward(model(batch).square().mean(), count=len(batch))
            accumulator.step()
        if saves:
            manager.save(1, **parts)
    return line


def save_in_a_group(rank, folder):
    join(rank, folder)
    line_in_a_group([torch.full((3, 4), 1.0 + rank, dtype=torch.float64)], f"{folder}/states", saves=True)
    leave()


def drop_the_group(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store1", rank=0, world_size=1)
    batches = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    line = line_in_a_group(batches, f"{folder}/states", saves=False)
    torch.manual_seed(0)
    plain = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(batches.flatten(0, 1)).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(line.state_dict(), plain.state_dict(), rtol=1e-13, atol=1e-15)
    leave()


def test_another_number_of_ranks_does_not_step_with_the_pending_gradients_of_one(tmp_path):
    spawn(save_in_a_group, tmp_path)
    spawn(drop_the_group, tmp_path, num_ranks=1)


ROWS = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ON_2 = "was saved on 2 ranks, and now there are 1"


def loop_over(kind, folder, *, num_ranks, rank=0, num_rows=12, loss_fn=None):
    """A loop with global batches of so many rows, or of 2 for each rank where a DistributedSampler divides them."""
    torch.manual_seed(0)
    line = nn.Linear(4, 2).double()
    if kind == "own":
        order = ResumableBatchSampler(24, num_rows // num_ranks, num_replicas=num_ranks, rank=rank)
        loader = DataLoader(ROWS, batch_sampler=order, generator=torch.Generator())
    else:
        loader = DataLoader(ROWS, batch_size=2, sampler=DistributedSampler(ROWS, num_ranks, rank))
    model = DistributedDataParallel(line) if num_ranks > 1 else line
    trainer = MemoryEfficientTrainingWrapper(model, torch.optim.SGD(line.parameters(), lr=0.1))
    return MemoryEfficientTrainLoop(
        trainer, loader, loss_fn or mean_square, state=TrainingStateManager(folder), progress=False
    )


def mean_square(model, rows):
    return model(rows).square().mean()


def stopping(model, rows):
    os.kill(os.getpid(), signal.SIGTERM)
    return mean_square(model, rows)


def stop_in_the_first_epoch(rank, folder, kind):
    join(rank, folder)
    result = loop_over(kind, f"{folder}/states", num_ranks=2, rank=rank, loss_fn=stopping).run(num_epochs=1)
    assert (result.ended_by, result.num_steps) == ("SIGTERM", 1)
    leave()


def test_another_number_of_ranks_trains_on_the_rest_of_an_epoch(tmp_path):
    spawn(stop_in_the_first_epoch, tmp_path, "own")
    loop = loop_over("own", tmp_path / "states", num_ranks=1)
    with pytest.warns(MemkitWarning, match=ON_2):
        assert loop.run(num_epochs=1).num_steps == 2
    torch.manual_seed(0)
    plain = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in ResumableBatchSampler(24, 12):
        optimizer.zero_grad()
        plain(ROWS[batch]).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(loop.trainer.model.state_dict(), plain.state_dict(), rtol=1e-13, atol=1e-15)


def test_another_number_of_ranks_is_told_of_samples_that_a_distributed_sampler_leaves_out(tmp_path):
    spawn(stop_in_the_first_epoch, tmp_path, "torch's")
    loop = loop_over("torch's", tmp_path / "states", num_ranks=1)
    with (
        pytest.warns(MemkitWarning, match=ON_2),
        pytest.warns(
            MemkitWarning, match=r"after 1 batches of epoch 1 on each of 2 ranks, and now there are 1\. If the"
        ),
    ):
        assert loop.run(num_epochs=1).num_steps == 12


def test_refuses_other_global_batches_and_its_way_out_works(tmp_path):
    spawn(stop_in_the_first_epoch, tmp_path, "own")
    loop = loop_over("own", tmp_path / "states", num_ranks=1, num_rows=8)
    with pytest.warns(MemkitWarning, match=ON_2):
        refused = assert_refused(
            lambda: loop.run(num_epochs=1), FileFormatError, "batches of 12 over", "state.restore("
        )
    assert "another directory" in str(refused)
    anew = loop_over("own", tmp_path / "others", num_ranks=1, num_rows=8)
    before = {name: each.clone() for name, each in anew.trainer.model.state_dict().items()}
    with pytest.warns(MemkitWarning, match=ON_2):
        assert TrainingStateManager(tmp_path / "states").restore(1, **anew.trainer.parts()) == 1
    assert not torch.equal(anew.trainer.model.weight, before["weight"])
    assert anew.run(num_epochs=1).num_steps == 3


def train_divided(rank, folder):
    """Two saves: torch keeps the state that was gathered for the first one."""
    join(rank, folder)
    model, optimizer = divided()
    manager = TrainingStateManager(f"{folder}/states")
    for number in (0, 12):
        optimizer.zero_grad()
        mean_square(model, ROWS[number + 6 * rank : number + 6 * rank + 6]).backward()
        optimizer.step()
        manager.save(number, model=model, optimizer=optimizer)
    resumed, other = divided()
    assert manager.restore(model=resumed, optimizer=other) == 12
    other.zero_grad()
    mean_square(resumed, ROWS[12 * rank : 12 * rank + 12]).backward()
    other.step()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    expected = torch.optim.Adam(plain.parameters(), lr=0.1)
    for rows in (ROWS[:12], ROWS[12:], ROWS):
        expected.zero_grad()
        mean_square(plain, rows).backward()
        expected.step()
    torch.testing.assert_close(resumed.module.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-13)
    leave()


def divided():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)


def test_an_optimizer_that_divides_its_state_over_the_ranks_goes_on(tmp_path):
    spawn(train_divided, tmp_path)
