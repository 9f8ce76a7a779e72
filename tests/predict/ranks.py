"""Steps that are spread over ranks, and the gloo processes in which they run for real."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memkit._recorder.recorder import Recorder
from memkit._simulation.ranks import as_first_rank
from memkit._simulation.shard import Shard
from memkit._simulation.simulation import Host, TrainingStep, hold, optimizer_maker
from memkit.predict.estimate import MemoryEstimate
from tests.predict.step import Step, classify, labels, language, momentum, regress
from tests.predict.steps import STEPS
from tests.predict.truth import real_step
from tests.ranks import join, leave, spawn


@dataclass
class Case:
    """A step, how it is spread, and which modules the real run shards, inner ones first, without the model itself."""

    build: Callable[[], Step]
    shard: Shard
    units: tuple[str, ...] = ()


def odd():
    """Sizes that two ranks cannot share evenly; batch statistics, which DDP sends around."""
    model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.GELU(), nn.Linear(65, 31), nn.Linear(31, 7))
    return Step(model, (torch.randn(5, 33), torch.randn(5, 7)), regress)


def wide():
    """Few rows: parameters weigh more than activations."""
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((301, 257), (257, 401), (401, 101), (101, 3))))
    return Step(model, (torch.randn(3, 301), labels(3, 3)), classify, optimizer=momentum, accumulation_steps=2)


class Tied(nn.Module):
    """A decoder whose head is its embedding; blocks with a unit inside."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 50, dropout=0.0) for _ in range(3))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied():
    return Step(Tied(), (labels(37, 2, 9), labels(37, 2, 9)), language)


def frozen():
    """An encoder that is not trained; one layer of the trained part is frozen too."""
    model = nn.Sequential(nn.Sequential(nn.Linear(20, 63), nn.Tanh()), nn.Linear(63, 63), nn.Linear(63, 5))
    for parameter in (*model[0].parameters(), model[1].bias):
        parameter.requires_grad_(False)
    return Step(model, (torch.randn(4, 20), labels(5, 4)), classify)


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17), nn.ReLU(), nn.Conv2d(17, 8, 3), nn.Flatten())
    model.append(nn.Linear(8 * 16, 5))
    return Step(model, (torch.randn(2, 3, 8, 8), labels(5, 2)), classify)


REPLICATING = ("ddp", "zero1")
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
HALVES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
SHARDED = {
    "one unit": Case(odd, Shard("fsdp2", 2)),
    "uneven": Case(odd, Shard("fsdp2", 2, ("0", "3", "4")), ("0", "3", "4")),
    "accumulated": Case(wide, Shard("fsdp2", 2, ("*",)), ("0", "1", "2", "3")),
    "kept until the backward": Case(wide, Shard("zero2", 2, ("*",)), ("0", "1", "2", "3")),
    "always freed": Case(wide, Shard("zero3", 2, ("*",)), ("0", "1", "2", "3")),
    "tied": Case(tied, Shard("fsdp2", 2, ("blocks.*",)), BLOCKS),
    "nested": Case(
        tied,
        Shard("fsdp2", 2, ("blocks.*", "blocks.*.linear?")),
        (*(f"{block}.linear{k}" for block in BLOCKS for k in (1, 2)), *BLOCKS),
    ),
    "tied, bfloat16": Case(tied, Shard("fsdp2", 2, ("blocks.*",), **HALVES), BLOCKS),
    "accumulated, bfloat16": Case(wide, Shard("zero2", 2, ("1",), param_dtype=torch.bfloat16), ("1",)),
    "frozen": Case(frozen, Shard("fsdp2", 2, ("0", "1")), ("0", "1")),
    "convolutions": Case(convolutions, Shard("fsdp2", 2, ("0", "3")), ("0", "3")),
}
REPLICATED = {
    f"{build.__name__}, {kind}{', views' * views}": Case(build, Shard(kind, 2, gradient_as_bucket_view=views))
    for build in (odd, wide, tied)
    for kind, views in (("ddp", False), ("ddp", True), ("zero1", False))
}
FOUR = {
    "four ranks, uneven": Case(odd, Shard("fsdp2", 4, ("0", "3", "4")), ("0", "3", "4")),
    "four ranks, kept by two": Case(wide, Shard("fsdp2", 4, ("*",), reshard_after_forward=2), ("0", "1", "2", "3")),
}
MORE = {
    f"{name}, {shard.kind}": Case(STEPS[name], shard)
    for name in STEPS
    if name not in ("frozen_backbone", "physics_informed")  # its optimizer is an instance; a gradient of gradients
    for shard in (Shard("fsdp2", 2), Shard("zero2", 2), Shard("ddp", 2))
}
CASES = {**SHARDED, **REPLICATED, **FOUR, **MORE}


def build(name):
    torch.manual_seed(0)
    return CASES[name].build()


def rank_run(name, place=None):
    step = build(name)
    run = TrainingStep(step.model, step.batch, step.loss_fn, step.optimizer, step.precision, step.accumulation_steps)
    return run.record(place or Host(), spread=partial(as_first_rank, CASES[name].shard))


def rank_estimate(name, place=None):
    return MemoryEstimate.of(rank_run(name, place))


def figures(recording):
    """The figures by which two recordings are compared."""
    parts = recording.peak_by("category")
    unsharded = recording.peak_by("operator").get("fsdp.unshard", 0)
    return {"peak": recording.peak_bytes(), "unsharded": unsharded, **parts}


def spread(name):
    """Set up a step in a process group as a training script does; return the warm step and its objects."""
    step, case = build(name), CASES[name]
    shard, model = case.shard, step.model
    make = optimizer_maker(step.optimizer)
    if shard.kind in REPLICATING:
        model = DistributedDataParallel(model, gradient_as_bucket_view=shard.gradient_as_bucket_view)
    else:
        policy = MixedPrecisionPolicy(param_dtype=shard.param_dtype, reduce_dtype=shard.reduce_dtype)
        reshard = {"zero2": False, "zero3": True}.get(shard.kind, shard.reshard_after_forward)
        mesh = dist.device_mesh.init_device_mesh("cpu", (shard.ranks,))
        for module in (*map(model.get_submodule, case.units), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    (optimizer,) = [sharing(make, model)] if shard.kind == "zero1" else make(model.parameters())
    return real_step(replace(step, model=model, optimizer=optimizer)), model, step.batch


def sharing(make, model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported for the first time

    return ZeroRedundancyOptimizer(model.parameters(), lambda parameters: make(parameters)[0])


def real_figures(name):
    """The recorded figures of a warm step; under FSDP2 of the lowest of some.

    A buffer that gloo's threads let go late adds to the peak, or passes for an activation.
    """
    run, model, batch = spread(name)
    if CASES[name].shard.kind in REPLICATING:
        return figures(recorded(run, model, batch)[0])  # the second step: DDP makes its buckets anew in it
    steps = [figures(without_gloo(*recorded(run, model, batch))) for _ in range(6)]
    return min(steps, key=lambda step: (step["peak"], step.get("activation", 0)))


def recorded(run, model, batch):
    """Record a step; return with it how many storages were there before."""
    with Recorder() as recorder:
        hold(recorder, model, batch)
        num_held = recorder.recording().num_storages
        run()
    return recorder.recording(), num_held


def without_gloo(recording, num_held):
    """Without gloo's copies of the tensors to reduce, which are invisible until it reads the sum from them."""
    later = recording.storages()[num_held:]
    copies = [storage.id for storage in later if storage.category == "input" and not storage.operator]
    return without(recording, copies)


def without(recording, storages):
    is_left = ~np.isin(recording.event_storage, storages)
    return replace(
        recording, event_storage=recording.event_storage[is_left], event_bytes=recording.event_bytes[is_left]
    )


def outcome(measure, name):
    """Figures, or torch's error for a step that cannot be distributed this way."""
    try:
        return measure(name)
    except Exception as error:  # noqa: BLE001 - a complex parameter, a module that DDP hides, another memory order
        return type(error).__name__


def worker(rank, folder, names, world_size):
    join(rank, folder, num_ranks=world_size)
    results = {name: outcome(real_figures, name) for name in names}
    with open(f"{folder}/{rank}.json", "w") as file:  # noqa: PTH123
        json.dump(results, file)
    leave()


def run_for_real(folder, names, world_size=2):
    """The figures of each process, by name of the case."""
    spawn(worker, folder, list(names), world_size, num_ranks=world_size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
