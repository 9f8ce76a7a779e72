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

from benchmarks.cases.edge_mlp import Graph, Message, WithinBudget, forget, plain, smallest_times, step
from benchmarks.result import write_result
from tests.allocations import trace_allocations

MIB = 2**20
# edges, reduction, gathered node features, budgets in MiB, rounds
CASES: list[tuple[int, str, bool, tuple[int, ...], int]] = [
    (50_000, "sum", False, (4, 16, 64, 256), 5),
    (1_000_000, "sum", False, (4, 16, 64, 256, 1024), 2),
    *((1_000_000, reduce, True, (64, 1024), 1) for reduce in ("mean", "max", "softmax")),
]


def measure(num_edges: int, reduce: str, budgets: tuple[int, ...], rounds: int, *, gather: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    module, graph = Message((128,) * 3), Graph.make(num_edges, reduce, gather=gather)
    output_bytes = graph.upstream.nbytes
    ways: dict[str, Any] = {"plain": plain, "no budget": WithinBudget(None)}
    ways |= {f"{budget} MiB": WithinBudget(budget * MIB) for budget in budgets}
    rows: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        peaks = []
        for _ in range(1 if way is plain else 2):
            gc.collect()
            peaks.append(trace_allocations(lambda way=way: step(way, module, graph)).peak - output_bytes)
            forget(module, graph)
        rows[name] = {"first_peak_bytes": peaks[0], "peak_bytes": peaks[-1]}
        if way is not plain:
            plan = way.processor.last_plan
            rows[name] |= {
                key: getattr(plan, key)
                for key in ("chunk_size", "num_chunks", "num_kept", "num_partly_kept", "predicted_peak_bytes")
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
