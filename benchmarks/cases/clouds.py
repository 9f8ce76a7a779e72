"""Distances of clouds: memory and time against the table of all pairs, and values against other libraries.

Peaks are the CPU allocator's, by profiler events, of a Chamfer distance with its gradient; the k-d tree, whose memory
is SciPy's, is measured as the rise of the process's own peak in a fresh process. Times are processor times, one thread.
The clouds of the oracles are two hemispheres of a brain's surface (nilearn); the large ones are uniform and lidar-like.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.clouds   (3 minutes, 8 GB)
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit.voxel.clouds import chamfer_distance, hausdorff_distance
from memkit.voxel.nearest import nearest_points
from tests.allocations import trace_allocations
from tests.voxel.clouds import all_distances, two_clouds

BACKENDS = ("tiled", "pruned", "kdtree")
BUDGET = "8MiB"
_FRESH = """
import pathlib, sys, torch
torch.set_num_threads(1)
from benchmarks.cases.clouds import chamfer, uniform
def read(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
a, b = uniform(int(sys.argv[1]))
chamfer(*uniform(1000), backend=sys.argv[2]).backward()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
before = read("VmRSS")
chamfer(a, b, backend=sys.argv[2]).backward()
print(read("VmHWM") - before)
"""


def uniform(num_points: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    box = torch.tensor([100.0, 100.0, 4.0])
    return tuple((torch.rand(num_points, 3, generator=generator) * box - box / 2).requires_grad_() for _ in range(2))


def lidar_like(num_points: int) -> tuple[Tensor, Tensor]:
    """Density falls with the range; more than half of the points are ground."""
    generator = torch.Generator().manual_seed(0)

    def cloud() -> Tensor:
        angle, near, height, kind = torch.rand(4, num_points, generator=generator)
        reach = (3 / (near * 0.3 + 0.04)).clamp(max=75)
        ground = -1.8 + 0.02 * torch.randn(num_points, generator=generator)
        z = torch.where(kind < 0.6, ground, height * 4 - 1.8)
        turn = angle * 2 * torch.pi
        return torch.stack([reach * turn.cos(), reach * turn.sin(), z], 1).requires_grad_()

    return cloud(), cloud()


def chamfer(a: Tensor, b: Tensor, *, backend: str) -> Tensor:
    if backend == "all pairs":
        table = torch.cdist(a, b)
        return table.amin(1).square().mean() + table.amin(0).square().mean()
    return chamfer_distance(a, b, backend=backend, memory_budget=BUDGET)  # type: ignore[arg-type]


def memory_and_time(
    num_points: int, clouds: Callable[[int], tuple[Tensor, Tensor]], ways: tuple[str, ...]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for way in ways:
        a, b = clouds(num_points)

        def run(a: Tensor = a, b: Tensor = b, way: str = way) -> None:
            chamfer(a, b, backend=way).backward()

        peak_bytes = trace_allocations(run).peak
        gc.collect()
        figures[way] = {"peak_bytes": peak_bytes, "cpu_seconds": round(seconds_of(run), 3)}
    return figures


def process_peak(num_points: int, backend: str) -> int:
    command = [sys.executable, "-c", _FRESH, str(num_points), backend]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def far_away() -> list[dict[str, Any]]:
    """Clouds 1 cm apart, at a distance from the origin: relative errors of the mean distance."""
    rows = []
    for offset in (0.0, 50.0, 500.0):
        a = (two_clouds(5000, 1)[0] / 200 + offset).float()
        b = a + torch.tensor([0.0, 0.0, 0.01])
        truth = all_distances(a.double(), b.double()).amin(1).mean()
        found = {"torch.cdist": torch.cdist(a, b).amin(1).mean()}
        found |= {each: nearest_points(a, b, backend=each).distances()[0].mean() for each in BACKENDS}
        rows.append(
            {"offset_m": offset} | {name: abs(float(mean.double() / truth) - 1) for name, mean in found.items()}
        )
    return rows


def oracles() -> dict[str, Any]:
    """Largest relative difference from point-cloud-utils and MONAI on real clouds, and on their voxels."""
    import point_cloud_utils as pcu
    from monai.metrics.utils import get_surface_distance

    a, b = two_clouds(10_000, 9000)
    x, y = a.numpy(), b.numpy()
    differences = {
        "chamfer (point-cloud-utils)": (chamfer_distance(a, b, convention="open3d").item(), pcu.chamfer_distance(x, y)),
        "hausdorff (point-cloud-utils)": (hausdorff_distance(a, b).item(), pcu.hausdorff_distance(x, y)),
    }
    grids = [np.zeros((128, 128, 128), dtype=bool) for _ in range(2)]
    cells = [np.unique(((each + 128) // 2).astype(int), axis=0) for each in (x, y)]  # 2 mm
    for grid, cell in zip(grids, cells, strict=True):
        grid[tuple(cell.T)] = True
    directed = [get_surface_distance(grids[i], grids[1 - i], "euclidean") for i in range(2)]
    monai = max(float(np.percentile(np.asarray(each), 95)) for each in directed)
    ours = hausdorff_distance(*(torch.from_numpy(each).double() for each in cells), quantile=0.95).item()
    differences["hausdorff 95 of voxels (MONAI)"] = (ours, monai)
    return {
        name: {"memkit": mine, "other": float(other), "relative": abs(mine / float(other) - 1)}
        for name, (mine, other) in differences.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    figures = {
        "budget": BUDGET,
        "20k": memory_and_time(20_000, uniform, ("all pairs", *BACKENDS)),
        "200k uniform": memory_and_time(200_000, uniform, BACKENDS[1:]),
        "200k lidar-like": memory_and_time(200_000, lidar_like, BACKENDS[1:]),
        "kdtree_process_peak_bytes": {str(size): process_peak(size, "kdtree") for size in (20_000, 200_000)},
        "far_away": far_away(),
        "oracles": oracles(),
    }
    print(json.dumps(figures, indent=1))
    write_result("clouds", figures, peers=("scipy", "point-cloud-utils", "monai"))


if __name__ == "__main__":
    main()
