"""The sampler's other back ends: what numba takes, and whether every one gives NumPy's samples, bit for bit.

And what that costs: the time for random bits for a million points, which must be the same on every device, against
that of NumPy's own generators.

Times as in `grid_sampler`: one iteration (dense, half, single) on a million points, processor time on one thread, the
ways in turns, the median of the rounds; numba has compiled before. Triton runs in its interpreter, on the CPU.

Run: python -m benchmarks.cases.grid_backends
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.cases.grid_sampler import (
    HEAVY_MEAN,
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
from memkit.points.bits import WordBlocks
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.points.backends import are_identical
from tests.points.scenes import close_up, grid_size_for

NUM_POINTS = 1_000_000
ROUNDS, LOOP_ROUNDS = 25, 5


def speed(points: np.ndarray, mean: float = MEAN) -> dict[str, Any]:
    size = grid_size_for(points, mean)
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


def bits() -> dict[str, float]:
    """Milliseconds for 16 bits for each of a million points, in blocks of the size that draws use."""
    num_words, blocks = NUM_POINTS // 4, WordBlocks()

    def ours() -> None:
        blocks.start(num_words, 1)
        for start in range(0, num_words, WordBlocks.SIZE):
            blocks.next(min(WordBlocks.SIZE, num_words - start))

    def theirs(generator: np.random.BitGenerator) -> None:
        for start in range(0, num_words, WordBlocks.SIZE):
            generator.random_raw(min(WordBlocks.SIZE, num_words - start))

    ways: dict[str, Callable[[], object]] = {"memkit": ours}
    for kind in (np.random.SFC64, np.random.PCG64DXSM, np.random.Philox):
        ways[kind.__name__] = functools.partial(theirs, kind(1))
    return milliseconds(ways, dict.fromkeys(ways, 10 * ROUNDS))


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backends = [each for each in ("numba", "torch", "triton") if each == "torch" or find_spec(each)]
    figures: dict[str, Any] = {"identical": {each: are_identical(each) for each in backends}}
    figures["bits"] = bits()
    print(figures)
    for name, scene in SCENES.items():
        figures[f"{name}, {NUM_POINTS:,}"] = speed(scene(NUM_POINTS))
        print(name, figures[f"{name}, {NUM_POINTS:,}"])
    figures[f"heavy-tailed, {NUM_POINTS:,}"] = speed(close_up(NUM_POINTS), HEAVY_MEAN)
    print("heavy-tailed", figures[f"heavy-tailed, {NUM_POINTS:,}"])
    print(write_result("grid_backends", figures, peers=("numba", "triton", "nilearn")))


if __name__ == "__main__":
    main()
