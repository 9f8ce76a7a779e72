"""One iteration of density sampling (dense, half, single) against what people run, and against one pass over memory.

The ways: the loop over cells; the source project's own vectorized code with cached metadata, which keeps the first
points of each cell and so is no random sample (as it runs, with a dict of the cells' points made anew; its sampling
alone, with a list of 50,000 ``.item()`` calls; a best case without them); one global sort of random keys, the shortest
exact rewrite; and memkit. Indexes and metadata are made before, and the
dense scenario is the identity for all. A cold pass reads one int32 for each point and writes an int64 for every other
one into pages that the system has just given.

The heavy-tailed scene is a mesh scanned from 10 mm: a million points in some 47,000 cells, half of them with 12 points
or fewer, one in a hundred with more than 170, some with 900.

Times are processor time on one thread, the ways in turns and each round in another order, the median of the rounds.
Memory is what NumPy allocates in
one iteration of a new sampler, its workspace and the samples included (tracemalloc), and torch (allocator events).

Run: python -m benchmarks.cases.grid_sampler
"""

from __future__ import annotations

import mmap
import random
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.allocations import trace_allocations
from tests.points.scenes import close_up, grid_size_for, in_cube, on_mesh

MEAN = 20  # points in a cell
SIZES = {100_000: (25, 5), 1_000_000: (25, 5), 4_000_000: (7, 1)}  # rounds: of all ways, of the loop
SCENES = {"mesh": on_mesh, "uniform": in_cube}
HEAVY_MEAN = 1_000_000 / 47_000
LOW, HIGH = 0.3, 0.7


class Metadata:
    """The data of a scene that the vectorized ways keep."""

    def __init__(self, cells: Tensor) -> None:
        self.cells = cells
        self.counts = torch.bincount(cells)
        self.starts = self.counts.cumsum(0) - self.counts
        self.order = cells.argsort(stable=True)
        self.ordered_cells = cells[self.order]
        self.place = torch.arange(len(cells)) - self.starts.repeat_interleave(self.counts)

    def num_kept(self) -> Tensor:
        ratio = torch.rand(len(self.counts)) * (HIGH - LOW) + LOW
        return (ratio * self.counts).long().clamp(min=1)

    def single(self) -> Tensor:
        drawn = (torch.rand(len(self.counts)) * self.counts).long()
        return self.order[self.starts + torch.minimum(drawn, self.counts - 1)]


def loop(scene: Metadata) -> tuple[Tensor, Tensor]:
    half, single = [], []
    for cell in range(len(scene.counts)):
        start, num = scene.starts[cell].item(), scene.counts[cell].item()
        points = scene.order[start : start + num]
        ratio = torch.rand(1).item() * (HIGH - LOW) + LOW
        half.append(points[torch.randperm(num)[: max(1, int(ratio * num))]])
        single.append(points[torch.randint(0, num, (1,)).item()])
    return torch.cat(half), torch.stack(single)


def source_v2(scene: Metadata, *, best_case: bool = False) -> tuple[Tensor, Tensor]:
    kept = scene.num_kept()
    permutations = {num.item(): torch.randperm(num.item()) for num in scene.counts.unique()}
    if best_case:
        torch.cat([permutations[num] for num in scene.counts.tolist()])
    else:
        torch.cat([permutations[num.item()] for num in scene.counts])  # made, and not used: so the source does
    return scene.order[scene.place < kept.repeat_interleave(scene.counts)], scene.single()


def source_v2_as_it_runs(scene: Metadata) -> object:
    points_of_cell = dict(enumerate(scene.order.split(scene.counts.tolist())))
    return points_of_cell, source_v2(scene)


def sort_floats(scene: Metadata) -> tuple[Tensor, Tensor]:
    kept = scene.num_kept()
    order = torch.rand(len(scene.cells), dtype=torch.float64).add_(scene.ordered_cells).argsort()
    keep = scene.place < kept.repeat_interleave(scene.counts, output_size=len(order))
    return scene.order[order[keep]], scene.single()


def sort_ints(scene: Metadata) -> tuple[Tensor, Tensor]:
    kept = scene.num_kept()
    keys = torch.empty(len(scene.cells), dtype=torch.int64).random_(0, 2**31).add_(scene.ordered_cells << 31)
    keep = scene.place < kept.repeat_interleave(scene.counts, output_size=len(keys))
    return scene.order[keys.sort()[1][keep]], scene.single()


def memory_pass(source: np.ndarray, *, cold: bool) -> None:
    half = len(source) // 2
    target = np.frombuffer(mmap.mmap(-1, 8 * half), np.int64) if cold else np.empty(half, np.int64)
    np.copyto(target, source[:half])
    source[half:].max()


def milliseconds(ways: dict[str, Callable[[], object]], rounds: dict[str, int]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(max(rounds.values())):
        for name in order.sample(list(ways), len(ways)):
            if number < rounds[name]:
                times[name].append(1000 * seconds_of(ways[name]))
    return {name: median(each) for name, each in times.items()}


def extra_bytes(index: GridIndex) -> int:
    def iteration() -> object:
        return GridAwareSampler().sample_scenarios(index)

    iteration()
    tracemalloc.start()
    sample = iteration()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del sample
    return peak + trace_allocations(iteration).peak


def case(points: np.ndarray, rounds: int, loop_rounds: int, mean: float = MEAN) -> dict[str, Any]:
    size = grid_size_for(points, mean)
    index = GridIndex.from_coords(points, size)
    scene = Metadata(index.cell_of_point())
    sampler = GridAwareSampler((LOW, HIGH))
    source = np.zeros(len(points), np.int32)
    ways: dict[str, Callable[[], object]] = {
        "loop": lambda: loop(scene),
        "source v2, as it runs": lambda: source_v2_as_it_runs(scene),
        "source v2, sampling": lambda: source_v2(scene),
        "source v2, sampling, best case": lambda: source_v2(scene, best_case=True),
        "global sort, float64": lambda: sort_floats(scene),
        "global sort, int64": lambda: sort_ints(scene),
        "memkit": lambda: sampler.sample_scenarios(index),
        "cold pass": lambda: memory_pass(source, cold=True),
        "warm pass": lambda: memory_pass(source, cold=False),
        "index, cold": lambda: GridIndex.from_coords(points, size),
    }
    for name, way in ways.items():
        if name != "loop":
            way()
    times = milliseconds(ways, {name: loop_rounds if name == "loop" else rounds for name in ways})
    return {
        "num_cells": index.num_cells,
        "most_points_in_a_cell": int(index.counts.max()),
        "index_bytes_per_point": index.nbytes / len(points),
        "extra_bytes": extra_bytes(index),
        "ms": times,
        "times_faster": {name: ms / times["memkit"] for name, ms in times.items() if name != "memkit"},
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {}
    for num_points, (rounds, loop_rounds) in SIZES.items():
        for name, scene in SCENES.items():
            row = case(scene(num_points), rounds, loop_rounds)
            figures[f"{name}, {num_points:,}"] = row
            print(name, num_points, row)
    name, num_points = "heavy-tailed", 1_000_000
    figures[f"{name}, {num_points:,}"] = case(close_up(num_points), *SIZES[num_points], HEAVY_MEAN)
    print(name, figures[f"{name}, {num_points:,}"])
    print(write_result("grid_sampler", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
