"""Work on sparse volumes against the dense network: submanifold convolution, voxels as rows, tiles.

The volumes are surfaces of fsaverage5, from nilearn's wheel, in FreeSurfer's cube of 256 mm at 4 mm: 64 x 64 x 64
voxels with 16 channels. Peaks are the allocator's events above what was there before (input, parameters, upstream
gradient). Times are processor time on one thread, the ways in turns, the least of the rounds, as a ratio to the dense
way. A neighbor list is found once for a set of coordinates; its time and bytes are apart.

Run: python -m benchmarks.cases.sparse_voxels
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.result import write_result
from benchmarks.timing import least_seconds
from benchmarks.twins import differences
from memkit._core.sparse_voxels import SparseVoxels
from memkit.chunk.sparse import SparsityAwareProcessor
from memkit.chunk.submanifold import submanifold_conv3d
from tests.allocations import trace_allocations
from tests.chunk.scenes import cortex

SIZE, CHANNELS, ROUNDS = 64, 16, 7
SURFACES = {"infl_left": "inflated cortex", "white_left": "white matter surface", "pial_left": "pial surface"}
KERNEL, ALONE = (3, 3, 3), (1, 1, 1)


def scenes() -> dict[str, Tensor]:
    """Coordinates of surfaces, and of noise, which has fewer neighbors at the same occupancy."""
    generator = torch.Generator().manual_seed(0)
    found = {name: cortex(SIZE, surface) for surface, name in SURFACES.items()}
    noise = torch.rand((SIZE,) * 3, generator=generator)
    return found | {f"uniform noise, {share:.0%}": (noise < share).nonzero() for share in (0.01, 0.1, 0.3, 0.5)}


def scene(coords: Tensor, dtype: torch.dtype = torch.float32) -> SparseVoxels:
    return SparseVoxels.from_coords(
        coords, torch.randn(len(coords), CHANNELS, dtype=dtype, requires_grad=True), shape=(SIZE,) * 3
    )


def both_convolutions(
    coords: Tensor, dtype: torch.dtype
) -> tuple[SparseVoxels, Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """The voxels, and a forward and backward each way; both return what belongs to occupied voxels."""
    voxels, conv = scene(coords, dtype), nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1).to(dtype)
    upstream = torch.randn_like(voxels.features)
    volume, above = voxels.to_dense().detach().requires_grad_(), voxels.with_features(upstream).to_dense()
    places = voxels.coords.unbind(1)

    def sparse() -> list[Tensor]:
        y = submanifold_conv3d(voxels, conv.weight, conv.bias).features
        return [y, *torch.autograd.grad(y, [voxels.features, *conv.parameters()], upstream)]

    def dense() -> list[Tensor]:
        y = conv(volume)
        at_input, *others = torch.autograd.grad(y, [volume, *conv.parameters()], above)
        return [y.detach().movedim(1, -1)[places], at_input.movedim(1, -1)[places], *others]

    return voxels, sparse, dense


def convolution(coords: Tensor) -> dict[str, Any]:
    voxels, sparse, dense = both_convolutions(coords, torch.float32)
    error = max(differences(sparse(), dense()))
    _, exact_sparse, exact_dense = both_convolutions(coords, torch.float64)
    pairs = voxels.sites.pairs(KERNEL, ALONE)
    features = voxels.features
    ways: dict[str, Callable[[], object]] = {
        "dense": dense,
        "sparse": sparse,
        "neighbours": lambda: SparseVoxels.from_coords(
            coords, features, shape=voxels.shape
        ).sites.pairs(KERNEL, ALONE),
    }  # fmt: skip
    times = least_seconds(ways, ROUNDS)
    return {
        "occupancy": voxels.occupancy,
        "dense": {"peak_bytes": trace_allocations(dense).peak, "ms": 1000 * times["dense"]},
        "sparse": {"peak_bytes": trace_allocations(sparse).peak, "ratio": times["sparse"] / times["dense"]},
        "neighbours": {
            "bytes": sum(each.near.nbytes + each.far.nbytes for each in pairs),
            "ratio": times["neighbours"] / times["dense"],
        },
        "error": error,
        "error_float64": max(differences(exact_sparse(), exact_dense())),
    }


def networks() -> dict[str, nn.Module]:
    num = CHANNELS
    return {
        "1x1x1 convolutions, 16-64-16": nn.Sequential(nn.Conv3d(num, 64, 1), nn.GELU(), nn.Conv3d(64, num, 1)),
        "two 3x3x3 convolutions": nn.Sequential(
            nn.Conv3d(num, num, 3, padding=1), nn.GELU(), nn.Conv3d(num, num, 3, padding=1)
        ),
    }


def modes(net: nn.Module) -> dict[str, Any]:
    volume = scene(cortex(SIZE, "pial_left")).to_dense().detach()
    params, upstream = list(net.parameters()), torch.randn_like(volume)

    def step(processor: SparsityAwareProcessor) -> list[Tensor]:
        y = processor(volume)
        return [y.detach(), *torch.autograd.grad(y, params, upstream)]

    names = ["dense", "auto", "bbox", "blocks"]
    processors = {name: SparsityAwareProcessor(net, mode=name) for name in names}
    expected = step(processors["dense"])
    rows: dict[str, Any] = {}
    for name, processor in processors.items():
        rows[name] = {"error": max(differences(step(processor), expected))}
        assert processor.last_plan is not None
        rows[name] |= {
            "mode": processor.last_plan.mode,
            "computed": processor.last_plan.computed,
            "why": processor.last_plan.why,
        }
    del expected
    for name, processor in processors.items():
        rows[name]["peak_bytes"] = trace_allocations(lambda processor=processor: step(processor)).peak
    times = least_seconds({name: partial(step, processor) for name, processor in processors.items()}, ROUNDS)
    return {name: row | {"ratio": times[name] / times["dense"]} for name, row in rows.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {
        "size": SIZE,
        "channels": CHANNELS,
        "convolution": {name: convolution(coords) for name, coords in scenes().items()},
        "modes": {name: modes(net) for name, net in networks().items()},
    }
    for part in ("convolution", "modes"):
        for name, row in figures[part].items():
            print(name, row)
    print(write_result("sparse_voxels", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
