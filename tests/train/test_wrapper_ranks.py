"""The wrapper on two ranks equals one process: under DistributedDataParallel a rank recovers alone, and under FSDP2."""

import contextlib
import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import memkit as mk
from memkit._core.errors import ConfigError, StateError
from memkit.report.figures import read_figures
from memkit.report.findings import find_findings
from tests.helpers import assert_same, relative_error
from tests.ranks import join, leave, spawn
from tests.toys import mean_square, out_of_memory, trainer_of
from tests.train.faults import FailingOperator
from tests.train.test_saved_tensors import everything, operators_of
from tests.versions import has

STEPS, ROWS = 4, 8


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(3)
    return model, torch.randn(STEPS, 2 * ROWS, 4, dtype=torch.float64, generator=generator)


def ddp_worker(rank, folder):
    join(rank, folder)
    plain, data = make()
    model = DistributedDataParallel(plain)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.AdamW(plain.parameters(), lr=0.05), max_grad_norm=1.0
    )
    num_ooms = 0

    def loss_fn(model, x):
        loss = model(x).pow(2).mean()
        if rank == 1 and len(x) > 3:
            out_of_memory()
        return loss

    for batch in data:
        num_ooms += trainer.train_step(batch[rank * ROWS : (rank + 1) * ROWS], loss_fn).num_ooms
    assert (num_ooms > 0) == (rank == 1)
    torch.save(plain.state_dict(), f"{folder}/{rank}.pt")
    trainer.close()
    check_uneven_batches(rank)
    check_the_first_forwards(rank)
    check_a_loop_with_batches_on_one_rank(rank, Path(folder))
    check_a_loop_saves_where_a_rank_has_fewer_batches(rank, Path(folder))
    check_a_budget_is_refused_where_ranks_exchange_statistics()
    check_a_bfloat16_model()
    check_gradients_are_seen_summed(rank, DistributedDataParallel)
    check_a_plan_for_saved_tensors(rank)
    check_a_plan_of_the_model_itself(rank, DistributedDataParallel, mk.plan_training)
    check_no_memory_to_convert_gradients_on_one_rank(rank)
    check_nothing_fits_on_one_rank(rank, Path(folder))
    check_an_error_on_one_rank_is_not_told_as_out_of_memory(rank)
    check_a_communication_hook_is_refused(rank)
    check_join_is_refused(rank)
    leave()


def sharded_worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    join(rank, folder)
    model, data = make()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
    for batch in data:
        trainer.train_step(batch[rank * ROWS : (rank + 1) * ROWS], mean_square)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(state, f"{folder}/{rank}.pt")
    check_gradients_are_seen_summed(rank, lambda model: fully_shard(model, mesh=mesh))
    check_a_plan_for_saved_tensors_is_refused(model, optimizer)
    blocks = functools.partial(mk.plan_training, treat="blocks")
    check_a_plan_of_the_model_itself(rank, lambda model: fully_shard(model, mesh=mesh), blocks)
    check_ignored_parameters(lambda model: fully_shard(model, mesh=mesh, ignored_params={model.scale}))
    leave()


def check_gradients_are_seen_summed(rank, spread):
    """What `on_gradients` sees is the gradient of both ranks' rows, though neither has the other's."""
    plain, data = make()
    plain(data[0]).pow(2).mean().backward()
    want = [parameter.grad for parameter in plain.parameters()]
    model, seen = make()[0], []
    trainer = trainer_of(
        spread(model),
        accumulation_steps=2,
        on_gradients=lambda it: seen.append([whole(each.grad) for each in it.parameters()]),
    )
    trainer.train_step(data[0][rank * ROWS : (rank + 1) * ROWS], mean_square)
    (found,) = seen
    assert max(map(relative_error, found, want)) <= 1e-14
    trainer.close()


class Scaled(nn.Linear):
    """Has a buffer, which DistributedDataParallel sends around in its first forward, and in no later one of a step."""

    def __init__(self, scale=1.0):
        super().__init__(4, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.scale


def check_the_first_forwards(rank):
    """One rank runs out of memory in its first forward, or runs a trial that the other one does not: nobody waits."""
    data = torch.randn(2 * ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(7)
    start = Scaled().state_dict()

    def loss_fn(model, x):
        loss = model(x).square().mean()
        if rank == 1 and len(x) > 3:
            out_of_memory()
        return loss

    for num_rows, settings in ((ROWS, {}), (1, {"memory": "1GiB"})):  # of the second rank
        plain, model = Scaled(), Scaled()
        for each in (plain, model):
            each.load_state_dict(start)
        spread = DistributedDataParallel(model)
        model.scale.fill_(1.0 + rank)  # the first rank's counts
        rows = data[:ROWS] if rank == 0 else data[ROWS : ROWS + num_rows]
        with mk.MemoryEfficientTrainingWrapper(
            spread, torch.optim.SGD(model.parameters(), lr=0.1), probe=False, **settings
        ) as trainer:
            trainer.train_step(rows, loss_fn)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        mean_square(plain, data[: ROWS + num_rows]).backward()
        optimizer.step()
        assert_same([*model.parameters(), model.scale], [*plain.parameters(), plain.scale], 1e-14)


def check_a_plan_for_saved_tensors(rank):
    """A plan made for the model alone serves under DistributedDataParallel."""
    model, data = make()
    batch = data[0][rank * ROWS : (rank + 1) * ROWS]
    plan = everything(operators_of(lambda: mean_square(model, batch)))
    found = []
    for saved_tensors in (None, plan):
        twin = make()[0]
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        spread = DistributedDataParallel(twin)
        with mk.MemoryEfficientTrainingWrapper(spread, optimizer, saved_tensors=saved_tensors) as trainer:
            trainer.train_step(batch, mean_square)
        found.append(list(twin.parameters()))
    assert_same(*found)


def check_a_plan_of_the_model_itself(rank, spread, plan_training):
    """The way out where a model of ranks cannot be planned; it may be planned in their process group."""
    model, data = make()
    batch = data[0][rank * ROWS : (rank + 1) * ROWS]
    plan = plan_training(model, batch, mean_square, "sgd", micro_batch_size=2, budget="1MiB")
    model = spread(model)
    settings = plan.wrapper_settings() | {"probe": False}
    with mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings) as trainer:
        assert trainer.train_step(batch, mean_square).num_microbatches == ROWS // 2
    plain = make()[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mean_square(plain, data[0]).backward()
    optimizer.step()
    for each, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(each.detach()), expected.detach(), rtol=1e-13, atol=1e-15)


def check_a_plan_for_saved_tensors_is_refused(sharded, optimizer):
    with pytest.raises(ConfigError, match="sharded parameters"):
        mk.MemoryEfficientTrainingWrapper(sharded, optimizer, saved_tensors=everything(("aten.addmm.default",)))


class Rescaled(nn.Linear):
    def __init__(self, num_scales):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(num_scales))

    def forward(self, x):
        return super().forward(x) * self.scale


def check_ignored_parameters(shard):
    """Whole parameters beside sharded ones, with the same data on both ranks: as one process, clipped and not."""
    data = make()[1]
    for num_scales in (1, 4):
        for max_grad_norm in (None, 0.1):
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(Rescaled(num_scales).double())
            plain, model = models
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            trainer = trainer_of(shard(model), max_grad_norm=max_grad_norm, accumulation_steps=2)
            for batch in data[:2]:
                result = trainer.train_step(batch, mean_square)
                optimizer.zero_grad()
                mean_square(plain, batch).backward()
                norm = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
                if max_grad_norm is not None:
                    nn.utils.clip_grads_with_norm_(plain.parameters(), max_grad_norm, norm)
                    torch.testing.assert_close(result.grad_norm, norm, rtol=1e-12, atol=0.0)
                optimizer.step()
            trainer.close()
            found = [whole(each) for each in model.parameters()]
            torch.testing.assert_close(found, [each.detach() for each in plain.parameters()], rtol=1e-12, atol=1e-14)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def one_process(optimizer_of, max_grad_norm):
    model, data = make()
    optimizer = optimizer_of(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def ddp_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    spawn(ddp_worker, folder)
    return folder


def check_against_one_process(folder, optimizer_of, max_grad_norm):
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(dict(first), dict(second))
    torch.testing.assert_close(dict(first), one_process(optimizer_of, max_grad_norm), rtol=1e-10, atol=1e-13)


def test_two_ddp_ranks_equal_one_process(ddp_folder):
    check_against_one_process(ddp_folder, lambda parameters: torch.optim.AdamW(parameters, lr=0.05), 1.0)


def test_two_sharded_ranks_equal_one_process(tmp_path):
    spawn(sharded_worker, tmp_path)
    check_against_one_process(tmp_path, lambda parameters: torch.optim.SGD(parameters, lr=0.05), float("inf"))


def check_uneven_batches(rank):
    """Rank 0 has two batches more; rank 1 steps with it, in its schedule too, and both equal one process."""
    plain, data = make()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, scheduler=schedule) as trainer:
        for batch in data[:2] if rank else data:
            trainer.train_step(batch[rank * ROWS : (rank + 1) * ROWS], mean_square)
        assert trainer.flush() == bool(rank)
        assert trainer.num_steps == STEPS
    expected, data = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        mean_square(expected, batch if step < 2 else batch[:ROWS]).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(plain.state_dict(), expected.state_dict(), rtol=1e-13, atol=1e-15)


def sum_over_ranks(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def check_a_communication_hook_is_refused(rank):
    """It would not run. Without it, as the error says, both ranks train as one process; a later one is refused, too."""
    plain, data = make()
    expected = make()[0]
    mean_square(expected, data[0]).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    model, optimizer = DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.register_comm_hook(None, sum_over_ranks)
    with pytest.raises(ConfigError, match=r"sum_over_ranks.*would never run"):
        mk.MemoryEfficientTrainingWrapper(model, optimizer)
    with pytest.raises(ConfigError, match=r"GradientAccumulator.*sum_over_ranks"):
        mk.GradientAccumulator(optimizer, model=model)
    assert model.require_backward_grad_sync
    model = DistributedDataParallel(plain)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
        trainer.train_step(data[0][rank * ROWS : (rank + 1) * ROWS], mean_square)
        model.register_comm_hook(None, sum_over_ranks)
        with pytest.raises(ConfigError, match=r"sum_over_ranks.*would never run"):
            trainer.train_step(data[1][rank * ROWS : (rank + 1) * ROWS], mean_square)
    torch.testing.assert_close(plain.state_dict(), expected.state_dict(), rtol=1e-13, atol=1e-15)


def check_join_is_refused(rank):
    """A rank that has joined would answer another exchange than memkit's; `flush` does what Join is for."""
    plain, data = make()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine = [batch[rank * ROWS : (rank + 1) * ROWS] for batch in (data[:2] if rank else data)]
    with mk.MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
        with Join([model]), pytest.raises(ConfigError, match=r"Join.*trainer\.flush\(\) on all ranks"):
            trainer.train_step(mine[0], mean_square)
        with Join([model], enable=False):
            for batch in mine:
                trainer.train_step(batch, mean_square)
        trainer.flush()
    expected, data = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        mean_square(expected, batch if step < 2 else batch[:ROWS]).backward()
        optimizer.step()
    torch.testing.assert_close(plain.state_dict(), expected.state_dict(), rtol=1e-13, atol=1e-15)


def check_a_loop_with_batches_on_one_rank(rank, folder):
    """The rank without any takes part in the steps and the save of the other one, which waits for it."""
    plain, data = make()
    model = DistributedDataParallel(plain)
    with mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(plain.parameters(), lr=0.1)) as trainer:
        with mk.TrainingStateManager(folder / "states") as state:
            batches = [] if rank else list(data)
            mk.MemoryEfficientTrainLoop(trainer, batches, mean_square, state=state, progress=False).run()
            assert state.steps == (STEPS,)
        assert trainer.num_steps == STEPS


def check_a_loop_saves_where_a_rank_has_fewer_batches(rank, folder):
    """Rank 0 has 3 batches of an epoch, rank 1 has 5: they save together in steps of which rank 0 has no batch.

    A SIGTERM to both finds rank 0 waiting for the others' steps; the run goes on from there.
    """
    plain, data = make()[0], torch.randn(2, 5, ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    whole_run = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for number in range(5):
            whole_run.zero_grad()
            mean_square(plain, data[:, number].flatten(0, 1) if number < 3 else data[1, number]).backward()
            whole_run.step()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())

    def stopping(model, x):
        if torch.equal(x, data[1, 3]):  # of rank 1 alone
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        return mean_square(model, x)

    ended = []
    for loss_fn in (stopping, mean_square):
        model = DistributedDataParallel(make()[0])
        with (
            mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trainer,
            mk.TrainingStateManager(folder / "uneven") as state,
        ):
            batches = list(data[rank][: 5 if rank else 3])
            loop = mk.MemoryEfficientTrainLoop(trainer, batches, loss_fn, state=state, save_every=2, progress=False)
            result = loop.run(num_epochs=2)
            ended.append((result.ended_by, result.num_steps, state.steps))
    assert ended == [("SIGTERM", 4, (4, 2)), ("epochs", 10, (10, 8, 6))]
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict(), rtol=1e-13, atol=1e-15)


def check_a_budget_is_refused_where_ranks_exchange_statistics():
    """One rank would run a micro-batch alone to predict its memory, and wait for the others for ever."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8)))
    model.module.append(nn.SyncBatchNorm(8))  # now: DistributedDataParallel wants a GPU for it
    with (
        pytest.warns(mk.MemkitWarning, match="batch statistics"),
        pytest.raises(mk.errors.ConfigError, match="SyncBatchNorm"),
    ):
        trainer_of(model, memory="1GiB")


def check_a_bfloat16_model():
    """One rank adds up two micro-batches in float32, the other has one in bfloat16: they must exchange one dtype."""
    if not has("torch.Tensor.grad_dtype"):  # refused, as tests/train/test_accumulate.py says
        return
    plain, data = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = DistributedDataParallel(plain.bfloat16())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in plain.parameters()))
    with mk.GradientAccumulator(optimizer, 2, model=model, accumulate_dtype=torch.float32) as accumulator:
        for rows in data[0].bfloat16().split(4)[: 1 if dist.get_rank() else 2]:
            accumulator.backward(model(rows).pow(2).mean(), count=len(rows))
        assert accumulator.flush()
    expected = make()[0].double()
    rows = data[0].bfloat16().double()
    expected(torch.cat([rows[:8], rows[:4]])).pow(2).mean().backward()
    for got, parameter in zip(seen, expected.parameters(), strict=True):
        torch.testing.assert_close(got.double(), parameter.grad, rtol=0.1, atol=0.02)


def check_no_memory_to_convert_gradients_on_one_rank(rank):
    """The other one is told, where it would wait in the sum."""
    if not has("torch.Tensor.grad_dtype"):  # likewise
        return
    plain = nn.Linear(4, 2).bfloat16()
    model, optimizer = DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
    with mk.GradientAccumulator(optimizer, model=model, accumulate_dtype=torch.float32) as accumulator:
        accumulator.backward(model(torch.ones(3, 4).bfloat16()).sum())
        match = "converting the gradients: got out of memory, twice" if rank else "out of memory on 1 of the 2 ranks"
        fails = FailingOperator(1, 2) if rank else contextlib.nullcontext()
        with pytest.raises(mk.MemkitOutOfMemoryError, match=match), fails:
            accumulator.step()
        accumulator.backward(model(torch.ones(3, 4).bfloat16()).sum())
        assert accumulator.step()


def read_findings(path):
    return [each.kind for each in find_findings(read_figures(mk.report.read_memory_events(path), None))]


def check_nothing_fits_on_one_rank(rank, folder):
    """Both ranks are told in the same step, leave a post-mortem each, and may go on."""
    plain, data = make()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with mk.MemoryManager("cpu", log=folder / "events.jsonl") as memory:

        def never_fits(model, x):
            with memory.phase("loss"):
                out_of_memory()

        batch = data[0][rank * ROWS : (rank + 1) * ROWS]
        own, told = "a micro-batch of 1 rows: .*CUDA out of memory", "out of memory on 1 of the 2 ranks"
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
        with (
            pytest.raises(mk.MemkitOutOfMemoryError, match=own if rank else told),
            trainer,
            memory.post_mortem(folder / "last"),
            memory.phase("step"),
        ):
            trainer.train_step(batch, never_fits if rank else mean_square)
        findings = read_findings(folder / f"events.rank{rank}.jsonl")
        assert findings == (["oom"] if rank else ["oom_elsewhere"])
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
        for attempt in trainer.microbatches(batch):  # each out-of-memory that is recovered, where it is asked for
            with attempt as micro, memory.post_mortem(folder / "recovered"):
                trainer.backward((never_fits if rank and len(micro) == ROWS else mean_square)(model, micro))
        assert trainer.step()
    torch.save(plain.state_dict(), folder / f"after{rank}.pt")


def check_an_error_on_one_rank_is_not_told_as_out_of_memory(rank):
    plain, data = make()
    trainer = mk.MemoryEfficientTrainingWrapper(
        DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1), accumulation_steps=2
    )
    before = plain[0].weight.detach().clone()

    def loss_fn(model, x):  # on rank 1 it compares rows
        return model(x).std() if rank else mean_square(model, x)

    kind, words = (ConfigError, "is split") if rank else (StateError, "an error on 1 of the 2 ranks")
    with trainer, pytest.raises(kind, match=words):
        trainer.train_step(data[0][:ROWS], loss_fn)
    torch.testing.assert_close(plain[0].weight.detach(), before, rtol=0, atol=0)


def test_fatal_out_of_memory_reaches_all_ranks(ddp_folder):
    for rank in range(2):
        record = json.loads((ddp_folder / "last" / f"out-of-memory.rank{rank}.json").read_text())
        assert (record["rank"], record["world_size"]) == (rank, 2)
        assert any(f"rank {rank}" in line for line in record["text"])
        assert ("CUDA out of memory" in record["error"]) == (rank == 1)
        log = mk.report.read_memory_events(ddp_folder / f"events.rank{rank}.jsonl")
        assert [header.rank for header in log.headers] == [rank]
        phases = [event.phase for event in log.events if event.event == "out_of_memory"]
        assert phases == (["step/loss", "loss"] if rank else ["step"])
        assert record["phase"] == phases[0]
    written = {path.name for path in (ddp_folder / "recovered").iterdir()}
    assert written == {"out-of-memory.rank1.json", "out-of-memory.rank1.jsonl"}
    first, second = (torch.load(ddp_folder / f"after{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(dict(first), dict(second))
    assert not torch.equal(first["0.weight"], make()[0].state_dict()["0.weight"])
