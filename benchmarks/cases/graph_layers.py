"""Layers of PyG and neuraloperator, forward and backward, beside `ChunkedProcessor` around the same message.

The graph is the 12 nearest neighbors of each of scikit-learn's digits. PyG's `EdgeConv`: its own forward, and with a
checkpoint around its message; 1,797 digits. neuraloperator's `IntegralTransform`: its own forward, which reduces node
by node in Python where torch_scatter is not installed, as here; 500 digits, whose first three principal components are
their places. A processor's sizes are measured in its first call, which is not among those counted.

Each layer has a process of its own, as a training is one. There glibc returns blocks above 32 MiB at once, and the
system clears their pages at the next request, which makes a step of any way up to half as long again. With "pages kept"
the allocator is told to return nothing: what remains is computing.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.graph_layers   (12 minutes)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from neuralop.layers.integral_transform import IntegralTransform
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import EdgeConv

import memkit as mk
from benchmarks.catalog import STEADY_HEAP
from benchmarks.result import write_result
from benchmarks.twins import measure, step

BUDGETS = ("4MiB", "16MiB")
ROUNDS = 36


def graph(num_digits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features (n, 64), places (n, 3), edges (2, e) from neighbor to center, in the order of the centers."""
    digits = load_digits().data[:num_digits] / 16
    near = NearestNeighbors(n_neighbors=12).fit(digits).kneighbors_graph(mode="connectivity").tocoo()
    edges = torch.stack([torch.from_numpy(near.col).long(), torch.from_numpy(near.row).long()])
    places = PCA(3, svd_solver="full").fit_transform(digits)
    return torch.from_numpy(digits).float().requires_grad_(), torch.from_numpy(places).float(), edges


def edge_convolution(reduce: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x, _, edges = graph(1797)
    src, dst = edges
    mlp = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
    layer = EdgeConv(mlp, aggr=reduce)

    class Checkpointed(EdgeConv):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return checkpoint(super().message, x_i, x_j, use_reentrant=False)

    checkpointed = Checkpointed(mlp, aggr=reduce)
    processors = {budget: mk.ChunkedProcessor(layer.message, memory_budget=budget) for budget in BUDGETS}

    def by_hand() -> Tensor:
        message = layer.message(x[dst], x[src])
        zeros = x.new_zeros(len(x), message.shape[1])
        if reduce == "sum":
            return zeros.index_add(0, dst, message)
        return zeros.scatter_reduce(0, dst[:, None].expand_as(message), message, "amax", include_self=False)

    def in_pieces(processor: mk.ChunkedProcessor) -> Tensor:
        gather = {"x_i": (x, dst), "x_j": (x, src)}
        return processor.segment_reduce(index=dst, num_segments=len(x), gather=gather, reduce=reduce)

    ways = {"plain": by_hand, "PyG": lambda: layer(x, edges), "PyG, checkpoint": lambda: checkpointed(x, edges)}
    ways |= {f"memkit, {budget}": lambda each=each: in_pieces(each) for budget, each in processors.items()}
    return measure({name: step([x, *mlp.parameters()], forward) for name, forward in ways.items()}, rounds=ROUNDS)


def integral_transform() -> dict[str, Any]:
    torch.manual_seed(0)
    x, places, edges = graph(500)
    src, dst = edges
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), dst.bincount(minlength=len(x)).cumsum(0)])
    layer = IntegralTransform(
        channel_mlp_layers=[6, 128, 128, 64], transform_type="linear", reduction="mean", use_torch_scatter=False
    )

    def message(y_j: Tensor, x_i: Tensor, f_j: Tensor) -> Tensor:
        return layer.channel_mlp(torch.cat([y_j, x_i], dim=-1)) * f_j

    processor = mk.ChunkedProcessor(message, memory_budget=BUDGETS[0], params=layer.parameters())

    def by_hand() -> Tensor:
        messages = message(places[src], places[dst], x[src])
        return x.new_zeros(len(x), 64).index_add(0, dst, messages) / ptr.diff()[:, None]

    def theirs() -> Tensor:
        return layer(y=places, neighbors={"neighbors_index": src, "neighbors_row_splits": ptr}, f_y=x)

    def in_pieces() -> Tensor:
        gather = {"y_j": (places, src), "x_i": (places, dst), "f_j": (x, src)}
        return processor.segment_reduce(ptr=ptr, reduce="mean", gather=gather)

    ways = {"plain": by_hand, "neuraloperator": theirs, f"memkit, {BUDGETS[0]}": in_pieces}
    return measure({name: step([x, *layer.parameters()], forward) for name, forward in ways.items()}, rounds=ROUNDS)


LAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    "EdgeConv, sum": partial(edge_convolution, "sum"),
    "EdgeConv, max": partial(edge_convolution, "max"),
    "IntegralTransform, mean": integral_transform,
}


def alone(layer: str, environment: dict[str, str]) -> dict[str, Any]:
    """Measure a layer in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cases.graph_layers", layer]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(layer, environment, {name: each["time_ratio"] for name, each in figures.items()})
    return figures


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(json.dumps(LAYERS[sys.argv[1]]()))
        return
    figures = {}
    for layer in LAYERS:
        figures[layer] = alone(layer, {})
        figures[f"{layer}, pages kept"] = alone(layer, STEADY_HEAP)
    print(write_result("graph_layers", figures, peers=("torch_geometric", "neuraloperator", "scikit-learn")))


if __name__ == "__main__":
    main()
