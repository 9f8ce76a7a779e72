"""The largest features of point clouds, as in PointNet: a shared MLP, a maximum over each cloud, and its backward.

Four clouds of 10,242 points, which are fsaverage5's cortex surface (nilearn's wheel) in four directions; the MLP is
PointNet's last one, [64, 128, 1024]. A point that has no largest feature gets no gradient. Peers: PyG's
`global_max_pool`, and `torch.utils.checkpoint` around chunks of the MLP with their maximum.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.point_maxima   (1 minute)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import global_max_pool

import memkit as mk
from benchmarks.result import write_result
from benchmarks.twins import measure, step
from tests.chunk.scenes import vertices

NUM_CLOUDS, CHUNK_SIZE, BUDGET = 4, 1024, "64MiB"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    surface = vertices().float() / 100
    points = torch.cat([surface @ torch.linalg.qr(torch.randn(3, 3)).Q for _ in range(NUM_CLOUDS)])
    cloud = torch.arange(NUM_CLOUDS).repeat_interleave(len(surface))
    net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1024))
    processor = mk.ChunkedProcessor(net, memory_budget=BUDGET)

    def largest(rows: Tensor) -> Tensor:
        return net(rows).amax(0)  # type: ignore[no-any-return]  # torch leaves it untyped

    def in_checkpoints() -> Tensor:
        found = [
            [checkpoint(largest, part, use_reentrant=False) for part in torch.split(each, CHUNK_SIZE)]
            for each in torch.split(points, len(surface))
        ]
        return torch.stack([torch.stack(each).amax(0) for each in found])

    setting: dict[str, Any] = {"index": cloud, "num_segments": NUM_CLOUDS, "reduce": "max"}
    ways = {
        "plain": lambda: net(points).view(NUM_CLOUDS, len(surface), -1).max(1).values,
        "PyG": lambda: global_max_pool(net(points), cloud, NUM_CLOUDS),
        "torch, checkpoint per chunk": in_checkpoints,
        "memkit": lambda: mk.chunked_segment_reduce(net, points, **setting, chunk_size=CHUNK_SIZE),
        f"memkit, {BUDGET}": lambda: processor.segment_reduce(points, **setting),
    }
    leaves = list(net.parameters())
    figures = {
        "training": measure({name: step(leaves, forward) for name, forward in ways.items()}),
        "points": len(points),
        "points_with_gradient": num_with_gradient(net, points),
    }
    print(figures)
    print(write_result("point_maxima", figures, peers=("torch_geometric", "nilearn")))


def num_with_gradient(net: nn.Module, points: Tensor) -> int:
    x = points.clone().requires_grad_()
    net(x).view(NUM_CLOUDS, -1, 1024).max(1).values.square().mean().backward()
    assert x.grad is not None
    return int(x.grad.any(1).sum())


if __name__ == "__main__":
    main()
