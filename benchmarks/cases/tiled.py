"""tiled_apply on a real volume: peak, time and error of a training step and of inference, beside MONAI's windows.

The volume is the middle of the MNI152 brain template at 2 mm, from nilearn's wheel. Peaks are the allocator's events
above what was there before (input, parameters). Times are processor time on one thread, the ways in turns, the least of
the rounds, as a ratio to the plain call. MONAI is taken along where it is installed.

Run: python -m benchmarks.cases.tiled
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nilearn.datasets import load_mni152_template
from torch import Tensor, nn

from benchmarks.result import write_result
from benchmarks.timing import least_seconds
from benchmarks.twins import differences, largest_difference
from memkit.chunk.tiled import tiled_apply
from memkit.chunk.tileloop import TileJob, apply_tiles
from memkit.chunk.tiles import ExactAxis, Reach
from tests.allocations import trace_allocations

try:
    from monai.inferers import sliding_window_inference
except ImportError:
    sliding_window_inference = None

NO_CUT = 10_000
TILE_SIZES = {"slabs 32": (32, NO_CUT, NO_CUT), "slabs 16": (16, NO_CUT, NO_CUT), "cubes 40": (40, 40, 40)}
SMALL = 20  # tiles so small that torch's CPU convolution falls to a slow kernel; measured in inference only
HALO = 4  # of the network
WINDOW = 40
ROUNDS = 2
Run = Callable[[Tensor], Tensor]


def volume() -> Tensor:
    """(1, 1, 64, 80, 80), values in [0, 1]."""
    brain = torch.from_numpy(load_mni152_template(resolution=2).get_fdata()).float()
    return brain[17:81, 18:98, 7:87][None, None].contiguous()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for num_in in (1, 16, 16):
        layers += [nn.Conv3d(num_in, 16, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv3d(16, 4, 3, padding=1))


def training(net: nn.Module, x: Tensor) -> dict[str, dict[str, Any]]:
    ways: dict[str, Run] = {"plain": net}
    ways |= {name: lambda x, size=size: tiled_apply(net, x, size) for name, size in TILE_SIZES.items()}
    x = x.clone().requires_grad_()
    kept: dict[str, list[Tensor]] = {}

    def step(name: str) -> None:
        y = ways[name](x)
        kept[name] = list(torch.autograd.grad(y.square().mean(), [x, *net.parameters()]))

    rows = {}
    for name in ways:
        step(name)  # the halo is found here
        error = max(differences(kept[name], kept["plain"]))
        rows[name] = {"gradient_error": error}
    plain = kept.pop("plain")
    for name in ways:
        kept.clear()
        rows[name]["peak_bytes"] = trace_allocations(lambda name=name: step(name)).peak
    del plain
    times = least_seconds({name: partial(step, name) for name in ways}, ROUNDS)
    return {name: row | {"time_ratio": times[name] / times["plain"]} for name, row in rows.items()}


@torch.no_grad()
def inference(net: nn.Module, x: Tensor) -> dict[str, dict[str, Any]]:
    ways: dict[str, Run] = {"plain": net}
    ways |= {name: lambda x, size=size: tiled_apply(net, x, size) for name, size in TILE_SIZES.items()}
    ways[f"cubes {SMALL}"] = lambda x: tiled_apply(net, x, SMALL)
    ways["cubes 40, argmax online"] = lambda x: tiled_apply(net, x, 40, online_reduce=lambda y: y.argmax(1))
    for mode in ("constant", "gaussian"):
        if sliding_window_inference is not None:
            ways[f"MONAI {mode} windows {WINDOW}"] = lambda x, mode=mode: sliding_window_inference(
                x, WINDOW, 1, net, overlap=0.25, mode=mode
            )
    expected = net(x)
    rows: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        y = way(x)
        rows[name] = {"error": largest_difference(y, expected) if y.is_floating_point() else None}
        if not y.is_floating_point():
            rows[name]["share_of_equal_labels"] = float((y == expected.argmax(1)).double().mean())
        del y
        rows[name]["peak_bytes"] = trace_allocations(lambda way=way: way(x)).peak
    times = least_seconds({name: partial(way, x) for name, way in ways.items()}, 1)
    return {name: row | {"time_ratio": times[name] / times["plain"]} for name, row in rows.items()}


def float64_errors(x: Tensor) -> dict[str, float]:
    """The law on a part of the volume: with the halo that was found, and with one that is one short."""
    net = network().double()
    part = x[..., 20:44, 20:44, 20:44].double().requires_grad_()
    inputs = [part, *net.parameters()]
    expected = net(part)
    gradients = torch.autograd.grad(expected.square().mean(), inputs)
    errors = {}
    for name, halo in {"halo found": HALO, "halo one short": HALO - 1}.items():
        axes = tuple(ExactAxis.cut(size, 8, Reach(halo, halo)) for size in part.shape[2:])
        y = apply_tiles(TileJob(net, axes), part)
        found = torch.autograd.grad(y.square().mean(), inputs)
        errors[name] = max(differences((y, *found), (expected, *gradients)))
    return errors


def main() -> None:
    torch.set_num_threads(1)
    net, x = network(), volume()
    figures = {
        "volume": list(x.shape),
        "training": training(net, x),
        "inference": inference(net, x),
        "float64": float64_errors(x),
    }
    for part in ("training", "inference"):
        for name, row in figures[part].items():
            print(f"{part:10} {name:28} {row}")
    print(figures["float64"])
    print(write_result("tiled", figures, peers=("monai", "nilearn")))


if __name__ == "__main__":
    main()
