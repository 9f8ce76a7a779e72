"""Out-of-memory on some ranks at random places of an epoch: do all ranks finish, and with what parameters?

Two gloo processes, float64, under DistributedDataParallel and FSDP2. A place is a rank, a step, a phase (forward,
backward, clipping with what comes before it, the optimizer's step) and the number of an operator in it. Every third run
has a second place in the same step, on any rank. Counted are runs in which every planted fault fired. Parameters are
compared with the run without fault; with dropout, whose random numbers depend on how rows are grouped, with a run
without fault in micro-batches of the same sizes. A rank that waits for longer than the group's timeout ends the case.

Then a fault at every third operator of one rank's epoch, one after the other.

Run: python -m benchmarks.cases.rank_faults   (15 minutes)
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.result import write_result
from memkit._torch.ranks import missing_for_lockstep
from memkit.train.accumulate import GradientAccumulator
from memkit.train.ranks import local_part
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.train.faults import FailingOperator

KINDS = ("ddp",) if missing_for_lockstep() else ("ddp", "fsdp2")
BETWEEN = "between"  # memkit's own work around them: rollback, agreement, joining the others' collectives
NUM_BETWEEN = 20
PHASES = ("forward", "backward", "clipping", "step")
NUM_PLACES = 60  # of each kind
STRIDE = 3  # of the operators of one rank
TIMEOUT_S = 30
NAIVE_STEPS, NAIVE_PLACES = 3, (("forward", 5), ("backward", 5), ("backward", 40))
# Rows of each rank's batches: the last of the epoch are short, and under DDP one rank has a batch more.
ROWS = {"ddp": ((16, 16, 13, 5), (14, 16, 12)), "fsdp2": ((16, 16, 11), (16, 12, 5))}
ACCUMULATION = {"ddp": (1, 3), "fsdp2": (2, 2)}  # FSDP2's ranks have equally many micro-batches


class Place(NamedTuple):
    """Where an operator fails: the number counts a rank's operators in a phase of one step."""

    rank: int
    step: int
    phase: str
    number: int


class Faults(FailingOperator):
    """Fails at planned places. Gloo's own part of a collective, and copies, take no memory that could be short."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self.planned = {(each.step, each.phase, each.number) for each in places if each.rank == dist.get_rank()}
        self.counts: Counter[tuple[int, str]] = Counter()
        self.step, self.phase = 0, BETWEEN

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" or func is torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        before, here = self.num_operators, (self.step, self.phase)
        self.places = {before + 1} if (*here, self.counts[here] + 1) in self.planned else set()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.counts[here] += self.num_operators - before

    @contextlib.contextmanager
    def at(self, phase: str) -> Iterator[None]:
        self.phase = phase
        try:
            yield
        finally:
            self.phase = BETWEEN


class Model(nn.Module):
    """Embedding, convolution, normalization, dropout, a branch that some batches skip, and one that all skip."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Dropout(dropout))
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
        self.never = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor, *, branch: bool) -> torch.Tensor:
        hidden = self.conv(self.embed(tokens).mT).mean(2)
        logits: torch.Tensor = self.head(hidden + self.sometimes(hidden) if branch else hidden)
        return logits


def build(kind: str, dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plain = Model(dropout).double()
    model: nn.Module = plain
    if kind == "ddp":
        model = DistributedDataParallel(plain, find_unused_parameters=True)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for module in (plain.conv, plain.head, plain):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)


def batches(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randint(11, (rows, 5), generator=generator), torch.randint(3, (rows,), generator=generator))
        for rows in ROWS[kind][rank]
    ]


def loss_of(kind: str, model: nn.Module, step: int, micro: Any) -> torch.Tensor:
    tokens, labels = micro
    # Under FSDP2 all micro-batches must run the same collectives: there the branch is always taken.
    return nn.functional.cross_entropy(model(tokens, branch=kind == "fsdp2" or step % 2 == 0), labels)


def train(kind: str, dropout: float, places: Sequence[Place] = ()) -> tuple[list[torch.Tensor], list[Any], Faults]:
    """Return this rank's parameters after the epoch, the sizes of its micro-batches, and what failed."""
    (model, optimizer), data = build(kind, dropout), batches(kind)
    torch.manual_seed(100 + dist.get_rank())
    faults, sizes = Faults(places), []
    optimizer.register_step_pre_hook(lambda *_: setattr(faults, "phase", "step"))
    with (
        MemoryEfficientTrainingWrapper(
            model,
            optimizer,
            accumulation_steps=ACCUMULATION[kind][dist.get_rank()],
            max_grad_norm=0.5,
            probe=kind != "fsdp2",  # the split of sharded parameters is not checked
        ) as trainer,
        faults,
    ):
        faults.step = -1 if kind == "fsdp2" else 0  # the rehearsal is spared: it cannot be recovered from
        for step, batch in enumerate(data):
            for attempt in trainer.microbatches(batch):
                with attempt as micro:
                    with faults.at("forward"):
                        loss = loss_of(kind, model, step, micro)
                    with faults.at("backward"):
                        trainer.backward(loss)
                faults.step = step
            sizes.append(trainer._batch_run.sizes)  # noqa: SLF001 - train_step returns them, but has no phases
            with faults.at("clipping"):
                trainer.step()
            faults.step = step + 1
        with faults.at("clipping"):
            trainer.flush()
    return local_parameters(model), sizes, faults


def train_without_fault(kind: str, dropout: float, sizes: list[Any]) -> list[torch.Tensor]:
    """Return the parameters of a run whose micro-batches have these sizes."""
    model, optimizer = build(kind, dropout)
    torch.manual_seed(100 + dist.get_rank())
    with GradientAccumulator(optimizer, max_grad_norm=0.5, model=model) as accumulator:
        for step, (batch, parts) in enumerate(zip(batches(kind), sizes, strict=True)):
            accumulator.expect(len(batch[0]))
            accumulator.accumulation_steps = len(parts)
            for micro in zip(*(tensor.split(parts) for tensor in batch), strict=True):
                accumulator.backward(loss_of(kind, model, step, micro), count=len(micro[0]))
                accumulator.step()
        accumulator.flush()
    return local_parameters(model)


def local_parameters(model: nn.Module) -> list[torch.Tensor]:
    return [local_part(parameter.detach()).clone() for parameter in model.parameters()]


def draw_places(numbers: random.Random, counts: Sequence[Counter[tuple[int, str]]], index: int) -> list[Place]:
    """Draw one place, its phase in turn; for every third run a second one, on any rank, there or in the recovery."""
    rank, phase = numbers.randrange(2), PHASES[index % len(PHASES)]
    step = numbers.choice(
        [key[0] for key, number in counts[rank].items() if key[0] >= 0 and key[1] == phase and number]
    )
    places = [Place(rank, step, phase, numbers.randint(1, counts[rank][step, phase]))]
    if index % 3 == 2:
        rank, phase = numbers.randrange(2), numbers.choice(("forward", "backward", BETWEEN))
        places.append(Place(rank, step, phase, numbers.randint(1, counts[rank][step, phase] or NUM_BETWEEN)))
    return places


def gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel())


def plant(kind: str, num_places: int, seed: int) -> dict[str, Any]:
    """Run with random faults until enough of them fired; all ranks return the same figures."""
    numbers = random.Random(seed)
    expected, sizes, faults = train(kind, 0.0)
    counts = gather(faults.counts)
    row: dict[str, Any] = {"drawn": 0, "finished": 0, "faults": 0, "by_phase": Counter(), "on_both_ranks": 0}
    differences = {"without dropout": 0.0, "with dropout, same sizes": 0.0}
    while row["finished"] < num_places:
        places = draw_places(numbers, counts, row["drawn"])
        dropout = 0.3 * ((row["drawn"] + row["drawn"] // len(PHASES)) % 2)  # each phase with and without
        row["drawn"] += 1
        found, sizes, faults = train(kind, dropout, places)
        reference = train_without_fault(kind, dropout, sizes) if dropout else expected
        reports = gather((faults.num_failures, largest_difference(found, reference)))
        if sum(fired for fired, _ in reports) < len(places):
            continue  # a fault that did not fire is none
        row["finished"] += 1
        row["faults"] += len(places)
        row["by_phase"].update(place.phase for place in places)
        row["on_both_ranks"] += all(fired for fired, _ in reports)
        name = list(differences)[bool(dropout)]
        differences[name] = max(differences[name], *(difference for _, difference in reports))
    return row | {"largest_difference": differences}


def plant_all(num_places: int, seed: int) -> dict[str, Any]:
    return {kind: plant(kind, num_places, seed) for kind in KINDS}


def plant_everywhere(stride: int) -> dict[str, Any]:
    """Run with a fault at operators of one rank's epoch, one after the other; without dropout."""
    return {kind: plant_on_one_rank(kind, stride) for kind in KINDS}


def plant_on_one_rank(kind: str, stride: int) -> dict[str, Any]:
    expected, _, faults = train(kind, 0.0)
    counts = gather(faults.counts)[1]
    places = [
        Place(1, step, phase, number)
        for (step, phase), most in sorted(counts.items())
        if step >= 0
        for number in range(1, most + 1)
    ][::stride]
    row: dict[str, Any] = {"places": len(places), "fired": 0, "largest_difference": 0.0}
    for place in places:
        found, _, faults = train(kind, 0.0, [place])
        reports = gather((faults.num_failures, largest_difference(found, expected)))
        row["fired"] += sum(fired for fired, _ in reports)
        row["largest_difference"] = max(row["largest_difference"], *(difference for _, difference in reports))
    return row


def train_naively(place: Place | None) -> list[torch.Tensor]:
    """Plain DDP with a try and except on each rank: a rank splits alone, and synchronizes in each backward."""
    model, optimizer = build("ddp", 0.0)
    with Faults([place] if place else []) as faults:
        for faults.step, (tokens, labels) in enumerate(batches("ddp")[:NAIVE_STEPS]):
            parts = [(tokens, labels)]
            while parts:
                micro = parts.pop()
                try:
                    with faults.at("forward"):
                        loss = loss_of("ddp", model, faults.step, micro)
                    with faults.at("backward"):
                        (loss * len(micro[0]) / len(tokens)).backward()
                except torch.OutOfMemoryError:
                    parts += zip(*(tensor.chunk(2) for tensor in micro), strict=True)
            optimizer.step()
            optimizer.zero_grad()
    return local_parameters(model)


def control(phase: str, number: int) -> dict[str, Any]:
    """Negative control: how a naive run ends."""
    expected = train_naively(None)
    try:
        found = train_naively(Place(1, 1, phase, number))
    except RuntimeError as error:  # the group's timeout, or the other rank has met it
        return {"ends": f"error: {str(error).rpartition('] ')[2].split('. ')[0][:80]}"}
    return {"ends": "finished", "largest_difference": largest_difference(found, expected)}


def work(rank: int, folder: str, job: str, args: Sequence[Any], timeout_s: float) -> None:
    """A process of the case."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=dt.timedelta(seconds=timeout_s)
    )
    gc.collect()
    gc.freeze()  # each survived fault collects cycles: not among all that was imported
    result = JOBS[job](*args)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    with contextlib.suppress(RuntimeError):  # the other rank is gone
        dist.barrier()
    os._exit(0)  # without gloo's teardown, whose threads now and then abort the process


def on_two_ranks(job: str, *args: Any, timeout_s: float = TIMEOUT_S, limit_s: float = 600) -> list[Any]:
    """Run a job in two processes and return what each returns.

    Raises:
        ProcessRaisedException: One failed; also where it waited for the other for longer than `timeout_s`.
        TimeoutError: They did not come to an end within `limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(work, (folder, job, args, timeout_s), nprocs=2, join=False, start_method="spawn")
        deadline = time.monotonic() + limit_s
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{job}{args} did not end within {limit_s} s")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


JOBS = {"plant": plant_all, "everywhere": plant_everywhere, "control": control}


def main() -> None:
    faults, others = on_two_ranks("plant", NUM_PLACES, 0)
    assert faults == others
    print(faults)
    everywhere, others = on_two_ranks("everywhere", STRIDE, limit_s=3600)
    assert everywhere == others
    print(everywhere)
    controls = {}
    for phase, number in NAIVE_PLACES:
        controls[f"{phase}, operator {number}"] = on_two_ranks("control", phase, number, timeout_s=5)
    print(controls)
    print(write_result("rank_faults", {"faults": faults, "everywhere": everywhere, "naive": controls}))


if __name__ == "__main__":
    main()
