"""The sampler's other back ends: what numba takes, and whether every one gives NumPy's samples, bit for bit.

Times as in `grid_sampler`: one iteration (dense, half, single) on a million points, processor time on one thread, the
ways in turns, the median of the rounds; numba has compiled before. Triton runs in its interpreter, on the CPU.

Run: python -m benchmarks.cases.grid_backends
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.cases.grid_sampler import (
    MEAN,
    SCENES,
    Metadata,
    loop,
    memory_pass,
    milliseconds,
    sort_floats,
    source_v2,
    source_v2_as_it_runs,
)
from benchmarks.result import write_result
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.points.backends import are_identical
from tests.points.scenes import grid_size_for

NUM_POINTS = 1_000_000
ROUNDS, LOOP_ROUNDS = 25, 3


def speed(points: np.ndarray) -> dict[str, Any]:
    size = grid_size_for(points, MEAN)
    index = GridIndex.from_coords(points, size)
    scene = Metadata(index.cell_of_point())
    source = np.zeros(len(points), np.int32)
    compiled, plain = GridAwareSampler(backend="numba"), GridAwareSampler()
    ways: dict[str, Callable[[], object]] = {
        "loop": lambda: loop(scene),
        "source v2, as it runs": lambda: source_v2_as_it_runs(scene),
        "source v2, sampling": lambda: source_v2(scene),
        "global sort, float64": lambda: sort_floats(scene),
        "numpy": lambda: plain.sample_scenarios(index),
        "numba": lambda: compiled.sample_scenarios(index),
        "cold pass": lambda: memory_pass(source, cold=True),
        "index, numpy": lambda: GridIndex.from_coords(points, size),
        "index, numba": lambda: GridIndex.from_coords(points, size, backend="numba"),
    }
    for name, way in ways.items():
        if name != "loop":
            way()
    ms = milliseconds(ways, {name: LOOP_ROUNDS if name == "loop" else ROUNDS for name in ways})
    return {"ms": ms, "times_faster": {name: each / ms["numba"] for name, each in ms.items()}}


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backends = [each for each in ("numba", "torch", "triton") if each == "torch" or find_spec(each)]
    figures: dict[str, Any] = {"identical": {each: are_identical(each) for each in backends}}
    print(figures)
    for name, scene in SCENES.items():
        figures[f"{name}, {NUM_POINTS:,}"] = speed(scene(NUM_POINTS))
        print(name, figures[f"{name}, {NUM_POINTS:,}"])
    print(write_result("grid_backends", figures, peers=("numba", "triton", "nilearn")))


if __name__ == "__main__":
    main()
