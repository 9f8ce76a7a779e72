"""Generated inputs for every metric of clouds and grids: a result that obeys the metric's laws, or a typed error.

Run: python -m benchmarks.cases.metric_fuzz   (3 minutes); `tests/voxel/test_metric_fuzz.py` runs a part of it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.result import write_result
from memkit._core.errors import MemkitError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.clouds import chamfer_distance, hausdorff_distance
from memkit.voxel.grids import feature_mae, voxel_scores
from memkit.voxel.recall import precision_recall

NUM_INPUTS = 50_000
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
_ODD = (None, [], (), 3, 1.5, "cloud", {}, [[0.0, 0.0]], float("nan"))


def any_cloud(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.05:
        return chance.choice(_ODD)
    rows, columns = chance.choice([0, 1, 2, 7, 40, 70]), chance.choice([0, 1, 2, 3, 3, 3, 5])
    shape = (rows, columns) if kind < 0.8 else chance.choice([(rows,), (2, rows, columns), (rows, columns, 2), ()])
    values = torch.rand(shape) * chance.choice([1.0, 1e-30, 1e4, 1e30]) + chance.choice([0.0, 500.0])
    values = values.round() if chance.random() < 0.3 else values
    cloud = values.to(chance.choice(_DTYPES[:2] if chance.random() < 0.7 else _DTYPES))
    if chance.random() < 0.05 and cloud.is_floating_point() and cloud.numel():
        cloud.view(-1)[0] = chance.choice([float("nan"), float("inf")])
    return [cloud, cloud[:1]] if chance.random() < 0.05 and cloud.dim() == 2 else cloud


def any_grid(chance: random.Random) -> Any:
    if chance.random() < 0.05:
        return chance.choice(_ODD)
    side = chance.choice([0, 1, 2, 4])
    shape = chance.choice([(side,) * 3, (2, side, 2, 2), (2, 1, side, 2, 2), (1, 2, 2, 2, 2), (2,), (3, 3)])
    grid = (torch.rand(shape) * chance.choice([0.0, 1.0, 2.0])).to(chance.choice(_DTYPES))
    if grid.dim() == 5 and grid.is_floating_point() and chance.random() < 0.4:
        return SparseVoxels.from_dense(grid)
    return grid


def obeys(name: str, found: Any) -> bool:
    """A distance is not negative and a share is in [0, 1]; nan never."""
    values = [float(each) for each in (found if isinstance(found, tuple) else (found,)) for each in each.flatten()]
    most = 1 + 1e-6 if name in {"precision_recall", "voxel_scores"} else math.inf
    return all(0 <= value <= most for value in values)


def run_cloud(chance: random.Random) -> tuple[str, Any]:
    name, metric = chance.choice(list(CLOUDS.items()))
    a, b = any_cloud(chance), any_cloud(chance)
    if chance.random() < 0.4 and isinstance(a, torch.Tensor):
        b = a[:1] if a.dim() and chance.random() < 0.3 else a
    options = {"backend": chance.choice(["auto", "tiled", "pruned", "kdtree"])}
    if name == "precision_recall":
        options["threshold"] = chance.choice([0.1, 1, [0.1, 2.0], 0, "a", None, [], float("nan")])
    return name, metric(a, b, **options)


def run_grid(chance: random.Random) -> tuple[str, Any]:
    name, metric = chance.choice(list(GRIDS.items()))
    a = any_grid(chance)
    return name, metric(a, a if chance.random() < 0.5 else any_grid(chance))


CLOUDS: dict[str, Callable[..., Any]] = {
    "chamfer_distance": chamfer_distance,
    "hausdorff_distance": hausdorff_distance,
    "precision_recall": precision_recall,
}
GRIDS: dict[str, Callable[..., Any]] = {"voxel_scores": voxel_scores, "feature_mae": feature_mae}


def fuzz(num_inputs: int, seed: int = 0) -> tuple[dict[str, int], list[str]]:
    """Counts of results and typed errors, and everything else in words; the same seed gives the same inputs."""
    chance, counts, others = random.Random(seed), Counter[str](), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number in range(num_inputs):
            try:
                name, found = chance.choice([run_cloud, run_cloud, run_grid])(chance)
            except MemkitError:
                counts["typed error"] += 1
            except Exception as error:  # noqa: BLE001 - this is what must not happen; it is told
                others.append(f"input {number}: {error!r}"[:300])
            else:
                counts["result"] += 1
                if not obeys(name, found):
                    others.append(f"input {number}: {name} gave {found}"[:300])
    return dict(counts), others


def main() -> None:
    torch.set_num_threads(1)
    counts, others = fuzz(NUM_INPUTS)
    print(counts, *others[:20], sep="\n")
    write_result("metric_fuzz", {"num_inputs": NUM_INPUTS, "counts": counts, "anything_else": others})
    assert not others


if __name__ == "__main__":
    main()
