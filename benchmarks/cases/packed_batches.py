"""Packed batches cut between graphs and scenes: what cutting takes, how even the parts are, what a step then holds.

Patches of the cortex of fsaverage5 (nilearn's wheel), by cubes of three sizes. "PyG" cuts the same batch by
``Batch.from_data_list(batch[first:last])``. Even: the largest of 4 parts over the mean of 4, in shuffled batches of 16
graphs, and the same for parts of 4 graphs each. Held: live bytes at the peak of a training step over those before it
(three GraphConv layers of width 64, all patches in one batch). Bytes from the profiler, processor time interleaved.

Run: python -m benchmarks.cases.packed_batches   (1 minute)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv

from benchmarks.result import write_result
from benchmarks.timing import in_turns
from memkit._gradients.loss import Loss
from memkit.integrations.torch_geometric import split_graphs
from memkit.points.packed import split_packed
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.allocations import trace_allocations
from tests.points.patches import collate, patches, scene_of

ROUNDS = 9
CUBES = {"large": 45.0, "middle": 20.0, "small": 9.0}  # mm


def graphs(cube: float) -> list[Data]:
    found = []
    for patch in patches(cube):
        faces, pos = patch["faces"], patch["coord"].float()
        ends = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).unique(dim=0).T
        length = (pos[ends[0]] - pos[ends[1]]).norm(dim=1)
        found.append(Data(x=pos, edge_index=ends, edge_weight=length, y=(patch["depth"] > 0).long()))
    return found


def milliseconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(each) for name, each in in_turns(ways, ROUNDS).items()}


def cutting(cube: float) -> dict[str, Any]:
    own = graphs(cube)
    batch = Batch.from_data_list(own)
    scenes = collate([scene_of(patch, number) for number, patch in enumerate(patches(cube))])
    quarter = -(-len(own) // 4)
    ways: dict[str, Callable[[], object]] = {
        "split_graphs": lambda: split_graphs(batch, 4),
        "pyg": lambda: [Batch.from_data_list(batch[start : start + quarter]) for start in range(0, len(own), quarter)],
        "split_packed": lambda: split_packed(scenes, 4),
    }
    kept: list[object] = []
    return {
        "num_graphs": len(own),
        "num_nodes": batch.num_nodes,
        "num_edges": batch.num_edges,
        "graphs_bytes": sum(value.nbytes for value in batch.to_dict().values()),
        "scenes_bytes": sum(value.nbytes for value in scenes.values() if isinstance(value, torch.Tensor)),
        "peak_bytes": {name: trace_allocations(lambda way=way: kept.append(way())).peak for name, way in ways.items()},
        "milliseconds": milliseconds(ways),
    }


def evenness(cube: float) -> dict[str, float]:
    own = graphs(cube)
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0)).tolist()
    ratios: dict[str, list[float]] = {"split_graphs": [], "four graphs each": []}
    for start in range(0, len(own) - 15, 16):
        chosen = [own[place] for place in order[start : start + 16]]
        total = sum(graph.num_nodes + graph.num_edges for graph in chosen)
        by_size = [part.num_nodes + part.num_edges for part in split_graphs(Batch.from_data_list(chosen), 4)]
        by_number = [sum(g.num_nodes + g.num_edges for g in chosen[place : place + 4]) for place in range(0, 16, 4)]
        ratios["split_graphs"].append(max(by_size) / (total / 4))
        ratios["four graphs each"].append(max(by_number) / (total / 4))
    return {name: statistics.mean(each) for name, each in ratios.items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphConv(3, 64), GraphConv(64, 64), GraphConv(64, 64)])
        self.head = nn.Linear(64, 2)

    def forward(self, data: Data) -> torch.Tensor:
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edge_index, data.edge_weight).relu()
        return self.head(x)


def loss_fn(model: nn.Module, data: Any) -> Loss:
    return Loss(sum=F.cross_entropy(model(data), data.y, reduction="sum"), count=len(data.y))


def held(num_parts: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = Batch.from_data_list(graphs(CUBES["large"]))
    with MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=num_parts, split_fn=split_graphs
    ) as trainer:
        for _ in range(2):  # they make the optimizer's state, and check the split, which takes twice a part
            trainer.train_step(batch, loss_fn)
        results: list[Any] = []
        peak = trace_allocations(lambda: results.append(trainer.train_step(batch, loss_fn))).peak
    return {"num_microbatches": results[0].num_microbatches, "peak_bytes": peak}


def main() -> None:
    torch.set_num_threads(1)
    figures = {
        "cutting": {name: cutting(cube) for name, cube in CUBES.items()},
        "evenness": {name: evenness(cube) for name, cube in CUBES.items()},
        "held": {str(num_parts): held(num_parts) for num_parts in (1, 2, 4, 8)},
    }
    print(write_result("packed_batches", figures, peers=("torch_geometric",)))


if __name__ == "__main__":
    main()
