"""The cases of `python -m benchmarks gpu`, each run in a process of its own.

A case asks `torch.cuda` for all that it shows, so that it runs on a virtual GPU as well; figures that need data are
left out there. Its figures are plain numbers and words, and no path, so that they can be sent to others.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from benchmarks.counting import EmptyMode
from benchmarks.gpu.models import TRAININGS, Task, decoder, numbers, regressing, unet2d, unit
from benchmarks.gpu.observe import Ledger, Operator, differing_operators, observe
from benchmarks.gpu.ranks import train_both
from benchmarks.tables import ROOT
from benchmarks.timing import in_turns
from memkit.chunk.cross_entropy import chunked_linear_cross_entropy
from memkit.chunk.segments import chunked_segment_reduce
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from memkit.predict.calibration import calibrate_gpu
from memkit.predict.gpus import write_gpus
from memkit.train.offload import offload_activations
from tests.simulation.allocator_replay import replay_events

SHARE = 0.7  # share of a plain step's reserved bytes: the limit of the recovery cases


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        work: Folder of files that cases leave for each other.
        virtual: Name of the virtual GPU; None on a GPU.
    """

    work: Path
    virtual: str | None = None

    @property
    def card_file(self) -> Path:
        return self.work / "gpu.json"

    def stem(self, case: str) -> Path:
        """Path without suffix of a case's files."""
        return self.work / "".join(letter if letter.isalnum() else "-" for letter in case)


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        run: Gives the figures.
        limit_s: Seconds after which its process is killed.
        num_gpus: Without so many it is skipped.
        hides_gpu: Whether its process does not see the GPU: it simulates one.
        needs_data: Whether it shows nothing on a virtual GPU, and is skipped there.
    """

    run: Callable[[Place], dict[str, Any]]
    limit_s: int = 120
    num_gpus: int = 1
    hides_gpu: bool = False
    needs_data: bool = False


# ---------------------------------------------------------------------------------------- the card, and its own tests


def card(place: Place) -> dict[str, Any]:
    """Which card this is, and memkit's row for it; what follows reads that row."""
    found = mk.find_gpu(place.virtual or "cuda")
    write_gpus(place.card_file, [found])
    own = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": own.name,
        "row": found.name,
        "compute_capability": f"{own.major}.{own.minor}",
        "total_bytes": total,
        "used_at_start_bytes": total - free,
        "predicted_context_bytes": found.context_bytes,
        "predicted_cublas_workspace_bytes": found.cublas_workspace_bytes,
    }


def tests(place: Place) -> dict[str, Any]:
    """`pytest -m gpu`; on a virtual GPU they are only collected."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE"]
    command += ["-p", "no:benchmark"]  # pytest-benchmark, where it is installed, warns
    command += ["--confcutdir=tests", "tests"]  # the root's conftest is for the docs' code, and needs more packages
    command += ["--collect-only"] if place.virtual else []
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1):  # neither passed nor failed: they did not run
        words = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(f"pytest ended with {done.returncode}: {words[-200:]}")
    failed = [line.partition(" - ")[0].split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"exit_code": done.returncode, "summary": lines[-1] if lines else "", "failed": failed}


def calibration(place: Place) -> dict[str, Any]:
    """Memory of a process outside torch's allocator, and cuBLAS's workspace: measured, and memkit's row."""
    del place
    row = mk.find_gpu("cuda")
    found = calibrate_gpu()
    return {
        "context_bytes": found.context_bytes,
        "row_context_bytes": row.context_bytes,
        "cublas_workspace_bytes": found.cublas_workspace_bytes,
        "row_cublas_workspace_bytes": row.cublas_workspace_bytes,
    }


# ------------------------------------------------------------------------------------------ predicted against measured


def measured(place: Place, name: str) -> dict[str, Any]:
    """Three steps of a training on the GPU; its operators and requests are left for `predicted`."""
    seen = observe(TRAININGS[name].start)
    stem = place.stem(f"measured/{name}")
    np.savez_compressed(stem.with_suffix(".npz"), events=seen.events)
    stem.with_suffix(".operators.json").write_text(json.dumps(seen.operators))
    return {
        "peak_bytes": seen.peak_bytes,
        "kept_bytes": seen.kept_bytes,
        "reserved_bytes": seen.reserved_bytes,
        "outside_bytes": seen.outside_bytes,
        "num_retries": seen.num_retries,
        "num_operators": len(seen.operators),
        "num_requests": len(seen.events),
    }


def predicted(place: Place, name: str) -> dict[str, Any]:
    """The same steps on a virtual GPU of the same kind, and where the two differ."""
    stem = place.stem(f"measured/{name}")
    real = json.loads(place.stem(f"measured/{name}").with_suffix(".json").read_text())["figures"]
    (row,) = json.loads(place.card_file.read_text())["gpus"]
    gpu = mk.find_gpu(row["name"], calibrated=place.card_file)
    with mk.VirtualGPU(gpu):
        seen = observe(TRAININGS[name].start)
    operators = [Operator(*each) for each in json.loads(stem.with_suffix(".operators.json").read_text())]
    with np.load(stem.with_suffix(".npz")) as arrays:
        found = replay_events(arrays["events"], *np.zeros((2, 0, 3), np.int64))
    return {
        "peak_bytes": seen.peak_bytes,
        "kept_bytes": seen.kept_bytes,
        "reserved_bytes": seen.reserved_bytes,
        "measured_peak_bytes": real["peak_bytes"],
        "measured_reserved_bytes": real["reserved_bytes"],
        "peak_error": max(seen.peak_bytes) / max(real["peak_bytes"]) - 1,
        "reserved_error": seen.reserved_bytes / real["reserved_bytes"] - 1,
        "differing_operators": differing_operators(operators, seen.operators),
        "allocations": {
            "num": found.num_allocations,
            "num_same_address": found.num_same_address,
            "num_other_decisions": len(found.differences),
        },
    }


# ------------------------------------------------------------------------------------------------ what makes it fit


def recovery(place: Place) -> dict[str, Any]:
    """Trainings in 70% of what they reserve: the plain loop runs out, the wrapper ends with the plain loop's losses."""
    return {
        "unet": recovered(place, partial(unet2d, 8)),
        "with BatchNorm": recovered(place, with_batch_norm),
    }


def with_batch_norm() -> Task:
    layers = [layer for width_in in (3, *6 * (64,)) for layer in unit(width_in, 64, 3)]
    return regressing(nn.Sequential(*layers, nn.Conv2d(64, 3, 1)), (8, 3, 192, 192))


def recovered(place: Place, build: Callable[[], Task]) -> dict[str, Any]:
    losses, reserved_bytes = losses_by_hand(build)
    limit_bytes = int(SHARE * reserved_bytes)
    with limited_to(limit_bytes):
        try:
            losses_by_hand(build)
            ran_out = False
        except torch.OutOfMemoryError:
            ran_out = True
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, batch, loss_fn = build_on_gpu(build)
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        results = [trainer.train_step(batch, loss_fn) for _ in range(3)]
        within_bytes = torch.cuda.max_memory_reserved()
    found = [float(result.loss) for result in results]
    return {
        "plain_reserved_bytes": reserved_bytes,
        "limit_bytes": limit_bytes,
        "plain_ran_out": ran_out,
        "num_ooms": sum(result.num_ooms for result in results),
        "reserved_bytes": within_bytes,
        "largest_difference": None if place.virtual else relative(found, losses),
    }


def losses_by_hand(build: Callable[[], Task]) -> tuple[list[float], int]:
    """Losses of three plain steps, and what they reserve; nothing of them stays on the GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, batch, loss_fn = build_on_gpu(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reserved_bytes = torch.cuda.max_memory_reserved()
    return losses, reserved_bytes


def build_on_gpu(build: Callable[[], Task]) -> Task:
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    return Task(model.cuda().train(), tuple(tensor.cuda() for tensor in batch), loss_fn)


@contextmanager
def limited_to(num_bytes: int) -> Iterator[None]:
    """Let torch's allocator reserve no more than so many bytes of the GPU."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def offload(place: Place) -> dict[str, Any]:
    """Activations on the host: peak, gradients, and how much of the copying the computing hides.

    In the decoder copying takes longer than computing, in wide layers it is the other way round.
    """
    return {"decoder": offloaded(place, decoder), "wide layers": offloaded(place, wide_layers)}


def wide_layers(width: int = 4096, rows: int = 4096) -> Task:
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return regressing(nn.Sequential(*layers), (rows, width))


def offloaded(place: Place, build: Callable[[], Task]) -> dict[str, Any]:
    model, batch, loss_fn = build_on_gpu(build)
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "plain again": nullcontext,  # whether the model's own kernels give the same bits twice
        "offload": lambda: offload_activations(to="host", model=model),
        "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
    }

    def step(way: str) -> None:
        with ways[way]():
            loss = loss_fn(model, batch)
        loss.backward()

    figures: dict[str, dict[str, Any]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for way in ways:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        step(way)
        figures[way] = {"peak_bytes": torch.cuda.max_memory_allocated()}
        gradients[way] = [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None]
    times = milliseconds_of({way: partial(step, way) for way in ways})
    for way in figures:
        equal = all(map(torch.equal, gradients[way], gradients["plain"])) if place.virtual is None else None
        figures[way] |= {"is_bit_equal": equal, "ms": times[way]}
    return figures


def losses(place: Place) -> dict[str, Any]:
    """Cross-entropy over a large vocabulary: memkit's chunks, PyTorch's, Liger's kernels, and the plain loss."""
    num_rows, width, num_words = 8192, 1024, 32_000
    torch.manual_seed(0)
    x = torch.randn(num_rows, width, device="cuda", requires_grad=True)
    weight = (torch.randn(num_words, width, device="cuda") / width**0.5).requires_grad_()
    labels = torch.arange(num_rows, device="cuda") * 7919 % num_words
    ways: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: F.cross_entropy(x @ weight.t(), labels),
        "memkit": lambda: chunked_linear_cross_entropy(x, weight, labels),
    }
    if hasattr(F, "linear_cross_entropy"):  # from PyTorch 2.13 on
        ways["torch"] = lambda: F.linear_cross_entropy(x, weight, labels, options=nn.LinearCrossEntropyOptions())
    if find_spec("liger_kernel") and not place.virtual:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        ways["liger"] = partial(LigerFusedLinearCrossEntropyLoss(), weight, x, labels)

    def step(way: str) -> None:
        x.grad = weight.grad = None
        ways[way]().backward()

    figures: dict[str, dict[str, Any]] = {}
    expected: Tensor | None = None
    for way in ways:
        step(way)  # the libraries' workspaces are there before the peak is taken
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(way)
        figures[way] = {"peak_bytes": torch.cuda.max_memory_allocated() - before}
        assert weight.grad is not None
        expected = weight.grad.clone() if expected is None else expected
        difference = (weight.grad - expected).abs().max() / expected.abs().max()
        figures[way]["difference"] = None if place.virtual else difference.item()
    times = milliseconds_of({way: partial(step, way) for way in ways})
    return {way: row | {"ms": times[way]} for way, row in figures.items()}


def plans(place: Place) -> dict[str, Any]:
    """Trainings planned for a limit of 70% of what they reserve, and run in it: bytes, losses and time, as planned."""
    return {
        "decoder": planned(place, decoder),
        "unet": planned(place, partial(unet2d, 8)),
        "with BatchNorm": planned(place, with_batch_norm),
    }


def planned(place: Place, build: Callable[[], Task]) -> dict[str, Any]:
    del place
    losses, reserved_bytes = losses_by_hand(build)
    limit_bytes = int(SHARE * reserved_bytes)
    context_bytes = mk.find_gpu("cuda").context_bytes
    model, batch, loss_fn = build_on_gpu(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def by_hand() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    times = milliseconds_of({"by hand": by_hand})  # not in turns with the planned step: in the limit it runs out
    model, batch, loss_fn = build_on_gpu(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with limited_to(limit_bytes):
        start = time.perf_counter()
        trainer = mk.prepare(model, optimizer, batch, loss_fn, micro_batch_size=len(batch[0]))
        planning_s = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        results = [trainer.train_step(batch, loss_fn) for _ in range(3)]
        peak_bytes, within_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        times |= milliseconds_of({"planned": partial(trainer.train_step, batch, loss_fn)})
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    estimate = trainer.plan.estimate
    return {
        "plain_reserved_bytes": reserved_bytes,
        "limit_bytes": limit_bytes,
        "predicted_least_bytes": trainer.plan.required_bytes - context_bytes,
        "reserved_bytes": within_bytes,
        "num_later_retries": retries,
        "predicted_peak_bytes": estimate.peak_bytes,
        "peak_bytes": peak_bytes,
        "num_ooms": sum(result.num_ooms for result in results),
        "largest_difference": relative([float(result.loss) for result in results], losses),
        "plan": str(trainer.plan.saved_tensors or "").partition("\n")[0],
        "planning_s": planning_s,
        "ratio": times["planned"] / times["by hand"],
        "predicted_ratio": trainer.plan.predicted_slowdown,
    }


def edges_in_chunks(place: Place) -> dict[str, Any]:
    """An edge MLP over a million edges: plain, a checkpoint for each chunk, and memkit's chunks."""
    del place
    num_nodes, num_edges, width, size = 50_000, 1_000_000, 128, 65_536
    torch.manual_seed(0)
    layers = [(nn.Linear(a, width), nn.LayerNorm(width), nn.SiLU()) for a in (6, width, width)]
    net = nn.Sequential(*(layer for each in layers for layer in each), nn.Linear(width, 64)).cuda()
    rows, index = numbers(num_edges, 6).cuda(), (torch.arange(num_edges) * 7919 % num_nodes).cuda()
    upstream = numbers(num_nodes, 64).cuda()

    def plain() -> Tensor:
        return rows.new_zeros(num_nodes, 64).index_add_(0, index, net(rows))

    def checkpointed() -> Tensor:
        out = rows.new_zeros(num_nodes, 64)
        for part, ids in zip(rows.split(size), index.split(size), strict=True):
            out = out.index_add(0, ids, checkpoint(net, part, use_reentrant=False))
        return out

    processor = mk.ChunkedProcessor(net, memory_budget="256MiB")
    ways: dict[str, Callable[[], Tensor]] = {
        "plain": plain,
        "checkpoints": checkpointed,
        "memkit, 256 MiB": partial(processor.segment_reduce, rows, index=index, num_segments=num_nodes),
        "memkit, chunks of 65,536": partial(
            chunked_segment_reduce, net, rows, index=index, num_segments=num_nodes, chunk_size=size
        ),
    }

    def step(way: str) -> None:
        net.zero_grad()
        ways[way]().backward(upstream)

    figures: dict[str, dict[str, Any]] = {}
    expected: list[Tensor] = []
    for way in ways:
        step(way)
        net.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(way)
        found = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
        expected = expected or found
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        figures[way] = {
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "difference": off,
        }
    times = milliseconds_of({way: partial(step, way) for way in ways})
    return {way: row | {"ms": times[way]} for way, row in figures.items()}


def step_in_phases(
    memory: mk.MemoryManager,
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss_fn: Callable[[nn.Module, tuple[Tensor, ...]], Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """A step by hand in a manager's phases."""
    with memory.phase("forward"):
        loss = loss_fn(model, batch)
    with memory.phase("backward"):
        loss.backward()
    with memory.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    memory.step()


def tracked(place: Place) -> dict[str, Any]:
    """A step in a tracker and a memory manager's phases: their peaks beside the allocator's, and the tracker's time.

    A dispatch mode that does nothing takes the least time that a tracker can.
    """
    del place
    model, batch, loss_fn = build_on_gpu(partial(decoder, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory = mk.MemoryManager()
    step = partial(step_in_phases, memory, model, batch, loss_fn, optimizer)

    def in_tracker() -> mk.Tracker:
        with memory.track() as tracker:
            step()
        return tracker

    def in_empty_mode() -> None:
        with EmptyMode():
            step()

    step()  # the optimizer's state, and the libraries' workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    phases = memory.phases
    times = milliseconds_of({"bare": step, "tracked": in_tracker, "empty mode": in_empty_mode}, rounds=15)
    return {
        "peak_bytes": peak_bytes,
        "tracked_peak_bytes": in_tracker().peak_bytes,
        "phase_peak_bytes": {name: each.peak_bytes for name, each in phases.items()},
        "ratio": times["tracked"] / times["bare"],
        "empty_mode_ratio": times["empty mode"] / times["bare"],
    }


# -------------------------------------------------------------------------------------------------------- what it costs


def cost(place: Place) -> dict[str, Any]:
    """A step of some milliseconds by hand, in the wrapper without and with recovery, and with a manager's phases."""
    model, batch, loss_fn = build_on_gpu(partial(decoder, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory = mk.MemoryManager()

    def by_hand() -> None:
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with_phases = partial(step_in_phases, memory, model, batch, loss_fn, optimizer)
    # The same step twice: what they differ by is the error of the others.
    ways: dict[str, Callable[[], object]] = {"by hand": by_hand, "by hand, again": by_hand}
    ways["manager, 3 phases"] = with_phases
    for word in ("raise", "exact"):
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, on_oom=word)
        ways[f"wrapper, on_oom={word!r}"] = partial(trainer.train_step, batch, loss_fn)
    taken = each_milliseconds_of(ways, rounds=10 if place.virtual else 120)
    bare_ms = statistics.median(taken["by hand"])
    return {
        way: {"ms": statistics.median(times), **more_than(taken["by hand"], times, bare_ms)}
        for way, times in taken.items()
    }


def more_than(bare: list[float], times: list[float], bare_ms: float) -> dict[str, float]:
    """Mean difference to the bare steps of the same rounds without its largest and smallest tenth, and its error."""
    differences = sorted(mine - theirs for mine, theirs in zip(times, bare, strict=True))
    kept = differences[len(differences) // 10 : -(len(differences) // 10)]
    return {
        "ratio": 1 + statistics.mean(kept) / bare_ms,
        "standard_error": statistics.stdev(kept) / len(kept) ** 0.5 / bare_ms,
    }


def milliseconds_of(ways: Mapping[str, Callable[[], object]], rounds: int = 7, num_calls: int = 4) -> dict[str, float]:
    """Median time of one call."""
    return {name: statistics.median(taken) for name, taken in each_milliseconds_of(ways, rounds, num_calls).items()}


def each_milliseconds_of(
    ways: Mapping[str, Callable[[], object]], rounds: int, num_calls: int = 4
) -> dict[str, list[float]]:
    """Time of one call in each round, in turns, each waiting for the GPU; a virtual GPU's times say nothing."""

    def measure(way: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            way()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / num_calls

    in_turns(ways, 1, measure)  # what the first calls alone do
    return in_turns(ways, rounds, measure)


def sampler(place: Place) -> dict[str, Any]:
    """A million points in the sampler's back ends: the same samples, and their time."""
    from tests.points.backends import are_identical  # needs nilearn, which is missing on many machines with a GPU

    del place
    points = np.random.default_rng(0).random((1_000_000, 3), dtype=np.float32)
    index = GridIndex.from_coords(points, 0.028)  # some 46,000 cells
    found = [name for name in ("numba", "triton") if find_spec(name)]
    devices = {"numpy": "cpu", "numba": "cpu", "torch": "cuda", "triton": "cuda"}
    samplers = {name: GridAwareSampler(backend=name, device=devices[name]) for name in ("numpy", "torch", *found)}
    ways = {name: partial(each.sample_scenarios, index) for name, each in samplers.items()}
    times = milliseconds_of(ways, num_calls=1)
    return {name: {"ms": times[name], "is_identical": are_identical(name, devices[name])} for name in ways}


# ----------------------------------------------------------------------------------------------- cuDNN's convolutions

SHAPES = {  # input, weight, stride, groups
    "stem 7x7": ((16, 3, 224, 224), (64, 3, 7, 7), 2, 1),
    "first 3x3": ((16, 3, 224, 224), (64, 3, 3, 3), 1, 1),
    "3x3, 64": ((16, 64, 56, 56), (64, 64, 3, 3), 1, 1),
    "3x3, 64, one row": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1),
    "3x3, 64, large": ((16, 64, 224, 224), (64, 64, 3, 3), 1, 1),
    "3x3, 128, stride 2": ((16, 128, 56, 56), (128, 128, 3, 3), 2, 1),
    "3x3, 256": ((16, 256, 28, 28), (256, 256, 3, 3), 1, 1),
    "3x3, 512": ((16, 512, 14, 14), (512, 512, 3, 3), 1, 1),
    "5x5, 64": ((16, 64, 56, 56), (64, 64, 5, 5), 1, 1),
    "1x1, 256": ((16, 64, 56, 56), (256, 64, 1, 1), 1, 1),
    "1x1, 256, stride 2": ((16, 64, 56, 56), (256, 64, 1, 1), 2, 1),
    "1x1, odd widths": ((16, 63, 56, 56), (255, 63, 1, 1), 1, 1),
    "depthwise 3x3": ((16, 128, 56, 56), (128, 1, 3, 3), 1, 128),
    "depthwise 7x7": ((16, 96, 56, 56), (96, 1, 7, 7), 1, 96),
    "in 4 groups": ((16, 128, 56, 56), (128, 32, 3, 3), 1, 4),
    "1-D, 9": ((16, 64, 65536), (64, 64, 9), 1, 1),
    "3-D, 16": ((1, 16, 64, 64, 64), (16, 16, 3, 3, 3), 1, 1),
    "3-D, 64": ((1, 64, 32, 32, 32), (64, 64, 3, 3, 3), 1, 1),
}
IMAGES = 4  # dimensions
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPERATORS = {"aten.convolution.default": "forward", "aten.convolution_backward.default": "backward"}
LAYOUTS = {"": torch.contiguous_format, "channels last": torch.channels_last}


def workspaces(place: Place, *, is_tuned: bool) -> dict[str, Any]:
    """Scratch memory of cuDNN's convolutions, by shape, dtype and layout: forward and backward.

    Without and with ``cudnn.benchmark`` are two cases: PyTorch keeps the algorithm that a process has once used.
    """
    del place
    torch.backends.cudnn.benchmark = is_tuned
    rows = {}
    for (name, shape), dtype, layout in product(SHAPES.items(), DTYPES, LAYOUTS):
        if layout and len(shape[0]) != IMAGES:
            continue
        words = (name, str(dtype).removeprefix("torch."), layout)
        rows[", ".join(filter(None, words))] = workspace(*shape, dtype, LAYOUTS[layout])
    return rows


def workspace(
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: int,
    groups: int,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> dict[str, Any]:
    """Bytes inside a convolution beside what it returns: in the first call, where algorithms are tried, and later."""
    torch.cuda.empty_cache()
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(x_shape) - 3]
    pad = tuple(side // 2 for side in weight_shape[2:])
    x = torch.randn(x_shape, device="cuda", dtype=dtype)
    weight = torch.randn(weight_shape, device="cuda", dtype=dtype)
    if len(x_shape) == IMAGES:
        x, weight = x.to(memory_format=memory_format), weight.to(memory_format=memory_format)
    x.requires_grad_()
    weight.requires_grad_()
    row: dict[str, Any] = {"input": x_shape, "weight": weight_shape, "stride": stride, "groups": groups}
    row |= {"dtype": str(dtype).removeprefix("torch."), "is_channels_last": memory_format is torch.channels_last}
    for when in ("first", "later"):
        with Ledger() as ledger:
            y = conv(x, weight, stride=stride, padding=pad, groups=groups)
            y.backward(torch.ones_like(y))
        x.grad = weight.grad = None
        for operator, what in OPERATORS.items():
            (call,) = (each for each in ledger.operators if each.name == operator)
            row[f"{what}_{when}_bytes"] = call.most - call.kept
    return row


def ranks(place: Place) -> dict[str, Any]:
    """Two ranks; see `train_both`."""
    return train_both("cpu" if place.virtual else "cuda")


CASES: dict[str, Case] = {
    "card": Case(card),
    "tests": Case(tests, limit_s=300),
    "calibration": Case(calibration, needs_data=True),
    **{f"measured/{name}": Case(partial(measured, name=name)) for name in TRAININGS},
    **{f"predicted/{name}": Case(partial(predicted, name=name), hides_gpu=True) for name in TRAININGS},
    "recovery": Case(recovery),
    "offload": Case(offload),
    "losses": Case(losses),
    "plans": Case(plans, needs_data=True, limit_s=180),
    "edges in chunks": Case(edges_in_chunks, needs_data=True),
    "tracked": Case(tracked),
    "cost": Case(cost),
    "sampler": Case(sampler, needs_data=True),
    "workspaces": Case(partial(workspaces, is_tuned=False), limit_s=300),
    "workspaces, tuned": Case(partial(workspaces, is_tuned=True), limit_s=300),
    "ranks": Case(ranks, num_gpus=2, limit_s=180, needs_data=True),
}
