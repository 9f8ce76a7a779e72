"""A convolutional network on the voxels of a brain's surface only: 2 mm, 128 x 128 x 128, half a percent occupied.

Submanifold convolutions learn from the left hemisphere of fsaverage5 (in nilearn's wheel) how the cortex is curved,
from the directions in which it faces, and are asked about the right one. The weights are those of torch's layers: the
same weights, run over the whole volume instead, are another model, and take ninety times the memory.

Run: pip install -c constraints.txt -e ".[test]" && python examples/sparse_surface.py [--smoke]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import _hemisphere
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk

SIZE, VOXEL_MM = 128, 2.0


def load(side: str) -> tuple[mk.voxel.SparseVoxels, Tensor]:
    """Voxels with a one and the mean normal (N, 4), and the mean curvature (N, 1) in each, standardized."""
    brain = _hemisphere.load(side)
    curvature = (brain.curvature - brain.curvature.mean()) / brain.curvature.std()
    values = torch.cat([brain.normals, curvature[:, None]], 1)

    coords, voxel = (brain.points / VOXEL_MM + SIZE / 2).floor().long().unique(dim=0, return_inverse=True)
    means = torch.zeros(len(coords), 4).index_add(0, voxel, values) / voxel.bincount()[:, None]
    features = torch.cat([torch.ones(len(coords), 1), means[:, :3]], 1)
    return mk.voxel.SparseVoxels.from_coords(coords, features, shape=(SIZE,) * 3), means[:, 3:]


class Network(nn.Module):
    """Three submanifold convolutions, and a linear layer for each voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv3d(num_in, 16, 3, padding=1) for num_in in (4, 16, 16))
        self.last = nn.Conv3d(16, 1, 1)

    def forward(self, voxels: mk.voxel.SparseVoxels) -> mk.voxel.SparseVoxels:
        for conv in self.convs:
            voxels = mk.chunk.submanifold_conv3d(voxels, conv.weight, conv.bias)
            voxels = voxels.with_features(F.gelu(voxels.features))
        return mk.chunk.submanifold_conv3d(voxels, self.last.weight, self.last.bias)

    def dense(self) -> nn.Module:
        """Return the dense network of the same weights."""
        layers = [layer for conv in self.convs for layer in (conv, nn.GELU())]
        return nn.Sequential(*layers, self.last)


def peak_of_a_step(run: Callable[..., mk.voxel.SparseVoxels], voxels: mk.voxel.SparseVoxels, target: Tensor) -> str:
    memory = mk.MemoryManager("cpu")
    with memory.track() as tracker:
        F.mse_loss(run(voxels).features, target).backward()
    memory.close()
    return mk.memory.format_bytes(tracker.peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Submanifold convolutions on a real surface.")
    parser.add_argument("--smoke", action="store_true", help="a few steps, without the dense network")
    is_smoke = parser.parse_args().smoke
    num_steps = 2 if is_smoke else 100
    (left, curvature), (right, unseen) = load("left"), load("right")
    torch.manual_seed(0)
    net = Network()
    print(f"{len(left.coords):,} of {SIZE**3:,} voxels are occupied: {left.occupancy:.2%}")
    print(f"a step on them: {peak_of_a_step(net, left, curvature)} in tensors at the peak")
    if not is_smoke:
        dense = mk.SparsityAwareProcessor(net.dense(), mode="dense")
        print(f"on the whole volume: {peak_of_a_step(dense, left, curvature)}")

    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    start = time.perf_counter()
    for step in range(num_steps):
        loss = F.mse_loss(net(left).features, curvature)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == num_steps - 1:
            print(f"step {step:3}: {(loss / curvature.var()).item():.3f} of the variance is unexplained")
    took = (time.perf_counter() - start) / num_steps
    with torch.no_grad():
        error = F.mse_loss(net(right).features, unseen) / unseen.var()
    print(f"on the other hemisphere: {error.item():.3f}; {took:.3f} s a step")


if __name__ == "__main__":
    main()
