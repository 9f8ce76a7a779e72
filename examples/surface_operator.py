"""An integral operator on the surface of a brain, within a memory budget: an MLP of every edge, averaged at every node.

The network sees only where the neighbors of a point lie, seen from that point. From the left hemisphere of fsaverage5
(in nilearn's wheel) it learns how the cortex is curved there, and is asked about the right one, which it never saw. One
step is taken twice, plainly and in pieces: the gradients are the same.

Run: pip install -c constraints.txt -e ".[test]" && python examples/surface_operator.py [--smoke]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import NamedTuple

import _hemisphere
import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

import memkit as mk
from memkit.memory import format_bytes

RADIUS_MM = 3.0 if "--smoke" in sys.argv else 6.0
BUDGET = "16MiB"


class Edges(NamedTuple):
    """Edges within a radius, as seen from their target: offsets (e, 5), dst (e,); curvature (n,), standardized."""

    offsets: Tensor
    dst: Tensor
    curvature: Tensor


def load(side: str) -> Edges:
    brain = _hemisphere.load(side)
    points, normals, curvature = brain.points, brain.normals, brain.curvature
    near = NearestNeighbors(radius=RADIUS_MM).fit(points).radius_neighbors_graph(points, mode="connectivity").tocoo()
    dst, src = (torch.from_numpy(each).long() for each in (near.row, near.col))
    offset = (points[src] - points[dst]) / RADIUS_MM
    height = (offset * normals[dst]).sum(1, keepdim=True)  # above the tangent plane
    facing = (normals[src] * normals[dst]).sum(1, keepdim=True)
    offsets = torch.cat([offset, height, facing], 1)
    return Edges(offsets, dst, (curvature - curvature.mean()) / curvature.std())


class Operator(nn.Module):
    """A kernel of each edge, averaged over the neighborhood, and a small network of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
        self.pieces = mk.ChunkedProcessor(self.kernel, memory_budget=BUDGET)

    def forward(self, edges: Edges, *, in_pieces: bool = True) -> Tensor:
        num_nodes = len(edges.curvature)
        if in_pieces:
            mean = self.pieces.segment_reduce(edges.offsets, index=edges.dst, num_segments=num_nodes, reduce="mean")
        else:
            messages = self.kernel(edges.offsets)
            mean = messages.new_zeros(num_nodes, messages.shape[1]).index_add(0, edges.dst, messages)
            mean = mean / edges.dst.bincount(minlength=num_nodes)[:, None]
        return self.head(mean).squeeze(1)


def gradients_and_peak(model: Operator, data: Edges, *, in_pieces: bool) -> tuple[list[Tensor], int]:
    memory = mk.MemoryManager("cpu")
    with memory.track() as tracker:
        loss = F.mse_loss(model(data, in_pieces=in_pieces), data.curvature)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    memory.close()
    return list(gradients), tracker.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="An integral operator on a real surface, in pieces.")
    parser.add_argument("--smoke", action="store_true", help="a few steps, neighbors within 3 mm")
    num_steps = 2 if parser.parse_args().smoke else 60
    torch.manual_seed(0)
    left, right = load("left"), load("right")
    model = Operator()
    print(f"{len(left.curvature):,} points, {len(left.dst):,} edges")

    # The same step in float64, plainly and in pieces.
    double = copy.deepcopy(model).double()
    exact = Edges(left.offsets.double(), left.dst, left.curvature.double())
    double(exact)  # measures chunk sizes
    (plain, plain_peak), (ours, our_peak) = (
        gradients_and_peak(double, exact, in_pieces=in_pieces) for in_pieces in (False, True)
    )
    error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(plain, ours, strict=True))
    print(f"plain {format_bytes(plain_peak)}, in pieces {format_bytes(our_peak)} in tensors at the peak")
    print(f"gradients differ by {error:.0e} of their largest value")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    start = time.perf_counter()
    for step in range(num_steps):
        loss = F.mse_loss(model(left), left.curvature)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == num_steps - 1:
            print(f"step {step:3}: {loss.item():.3f} of the variance is unexplained")
    with torch.no_grad():
        unseen = F.mse_loss(model(right), right.curvature)
    print(f"on the other hemisphere: {unseen.item():.3f}; {(time.perf_counter() - start) / num_steps:.2f} s a step")


if __name__ == "__main__":
    main()
