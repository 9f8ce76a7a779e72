"""A memory budget for an edge MLP: how much of it is used, and what the kept graphs buy back.

MLP [128, 128, 128] of 50,000 and of a million edges, forward and backward, as in `edge_mlp`; sum, and mean, max and
softmax with gathered node features. Peaks are the CPU allocator's, by profiler events, above inputs, parameters,
upstream gradient and the result; the first call's with its trials. Times are processor times, all budgets and plain in
turns in one process, the smallest of the rounds.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.chunk_budget   (10 minutes, 10 GB)
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.edge_mlp import Graph, Message, forget, plain, smallest_times, step
from benchmarks.result import write_result
from memkit import ChunkedProcessor
from tests.allocations import trace_allocations

MIB = 2**20
# edges, reduction, gathered node features, budgets in MiB, rounds
CASES: list[tuple[int, str, bool, tuple[int, ...], int]] = [
    (50_000, "sum", False, (4, 16, 64, 256), 5),
    (1_000_000, "sum", False, (4, 16, 64, 256, 1024), 2),
    *((1_000_000, reduce, True, (64, 1024), 1) for reduce in ("mean", "max", "softmax")),
]


class Way:
    """The processor's segment_reduce, for `edge_mlp.step`."""

    def __init__(self, module: nn.Module, budget: int | None) -> None:
        self.proc = ChunkedProcessor(module, memory_budget=None if budget is None else budget * MIB)

    def __call__(self, module: nn.Module, graph: Graph) -> Tensor:  # noqa: ARG002 - it is the processor's own
        # In full, as in edge_mlp.memkit: each case shows the call as a user writes it.
        return self.proc.segment_reduce(
            graph.rows,
            index=graph.index,
            num_segments=graph.num_nodes,
            reduce=graph.reduce,  # type: ignore[arg-type]
            gather=None if graph.x is None else {"x_j": (graph.x, graph.src)},
            weight=graph.weight,
        )


def measure(num_edges: int, reduce: str, budgets: tuple[int, ...], rounds: int, *, gather: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    module, graph = Message((128,) * 3), Graph.make(num_edges, reduce, gather=gather)
    output_bytes = graph.upstream.nbytes
    ways: dict[str, Any] = {"plain": plain, "no budget": Way(module, None)}
    ways |= {f"{budget} MiB": Way(module, budget) for budget in budgets}
    rows: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        peaks = []
        for _ in range(1 if way is plain else 2):
            gc.collect()
            peaks.append(trace_allocations(lambda way=way: step(way, module, graph)).peak - output_bytes)
            forget(module, graph)
        rows[name] = {"first_peak_bytes": peaks[0], "peak_bytes": peaks[-1]}
        if way is not plain:
            plan = way.proc.last_plan
            rows[name] |= {
                key: getattr(plan, key) for key in ("chunk_size", "num_chunks", "num_kept", "predicted_peak_bytes")
            }
    times = smallest_times(ways, module, graph, rounds)
    for name, row in rows.items():
        row["ratio"] = round(times[name] / times["plain"], 3)
    return {"edges": num_edges, "reduce": reduce, "gather": gather, "output_bytes": output_bytes, "ways": rows}


def main() -> None:
    torch.set_num_threads(1)
    figures = []
    for num_edges, reduce, gather, budgets, rounds in CASES:
        figures.append(measure(num_edges, reduce, budgets, rounds, gather=gather))
        print(num_edges, reduce, gather, flush=True)
        for name, row in figures[-1]["ways"].items():
            print(f"  {name:12} {row['peak_bytes'] / MIB:8.2f} MiB", row, flush=True)
    print(write_result("chunk_budget", {"cases": figures}))


if __name__ == "__main__":
    main()
