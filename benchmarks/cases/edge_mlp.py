"""Edge MLP and reduction over nodes, forward and backward: plain, two loops over chunks, and memkit.

With GELU, and as graph networks have it with LayerNorm and SiLU, which memkit runs within 24 MiB. Each of the latter
has a process of its own, as a training has: there the system clears the pages of plain's large tensors anew at each
step, since glibc returns blocks above 32 MiB at once. "Pages kept" is the same with an allocator that is told to return
none (`PAGES_KEPT`): computing alone.

Peaks are the CPU allocator's, by profiler events, above what is there before: inputs, parameters and the upstream
gradient are not in it, the result and the parameters' gradients are. Times are processor times of one step, all ways in
turns in one process, the smallest of the rounds; the ratio is to plain. Errors are against float64, largest error over
largest value.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.edge_mlp   (8 minutes, 8 GB)
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.result import write_result
from benchmarks.timing import in_turns, seconds_of
from benchmarks.twins import differences
from memkit import ChunkedProcessor
from memkit.chunk.segments import chunked_segment_reduce
from tests.allocations import trace_allocations

NUM_INPUTS, NUM_OUTPUTS, EDGES_PER_NODE = 6, 64, 20


class Message(nn.Module):
    """(e, 6) and, where they are gathered, (e, 64) to (e, 64)."""

    def __init__(self, hidden: tuple[int, ...], *, has_norms: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((NUM_INPUTS, *hidden), hidden, strict=False):
            layers += [nn.Linear(before, after), *([nn.LayerNorm(after), nn.SiLU()] if has_norms else [nn.GELU()])]
        self.net = nn.Sequential(*layers, nn.Linear(hidden[-1], NUM_OUTPUTS))

    def forward(self, rows: Tensor, x_j: Tensor | None = None) -> Tensor:
        message = self.net(rows)
        return message if x_j is None else message * x_j


@dataclass
class Graph:
    """20 edges per node, sorted by node; node features need a gradient where they are gathered."""

    rows: Tensor
    weight: Tensor
    index: Tensor
    num_nodes: int
    x: Tensor | None
    src: Tensor
    reduce: str
    upstream: Tensor

    @classmethod
    def make(cls, num_edges: int, reduce: str, *, gather: bool) -> Graph:
        generator = torch.Generator().manual_seed(0)
        nodes = num_edges // EDGES_PER_NODE
        rows = torch.randn(num_edges, NUM_INPUTS, generator=generator)
        index = torch.randint(nodes, (num_edges,), generator=generator).sort().values
        src = torch.randint(nodes, (num_edges,), generator=generator)
        upstream = torch.randn(num_edges if reduce == "softmax" else nodes, NUM_OUTPUTS, generator=generator)
        x = torch.randn(nodes, NUM_OUTPUTS, generator=generator).requires_grad_() if gather else None
        return cls(rows, torch.rand(num_edges, generator=generator), index, nodes, x, src, reduce, upstream)

    def double(self) -> Graph:
        x = None if self.x is None else self.x.detach().double().requires_grad_()
        rows, weight, upstream = self.rows.double(), self.weight.double(), self.upstream.double()
        return Graph(rows, weight, self.index, self.num_nodes, x, self.src, self.reduce, upstream)

    def zeros(self) -> Tensor:
        return self.rows.new_zeros(self.num_nodes, NUM_OUTPUTS)

    def messages(self, module: nn.Module, rows: Tensor, weight: Tensor, src: Tensor) -> Tensor:
        return module(rows, *([] if self.x is None else [self.x[src]])) * weight[:, None]


def plain(module: nn.Module, graph: Graph) -> Tensor:
    message = graph.messages(module, graph.rows, graph.weight, graph.src)
    ids = graph.index[:, None].expand_as(message)
    match graph.reduce:
        case "sum":
            return graph.zeros().index_add_(0, graph.index, message)
        case "mean":
            counts = graph.index.bincount(minlength=graph.num_nodes).clamp(min=1)
            return graph.zeros().index_add_(0, graph.index, message) / counts[:, None]
        case "max":
            return graph.zeros().scatter_reduce(0, ids, message, "amax", include_self=False)
        case _:
            top = graph.zeros().scatter_reduce(0, ids, message.detach(), "amax", include_self=False)
            powers = (message - top[graph.index]).exp()
            return powers / graph.zeros().index_add_(0, graph.index, powers)[graph.index]


def loop(module: nn.Module, graph: Graph, chunk_size: int) -> Tensor:
    """Chunks without running them again."""
    out = graph.zeros()
    for rows, weight, index, src in parts(graph, chunk_size):
        out.index_add_(0, index, graph.messages(module, rows, weight, src))
    return out


def checkpointed(module: nn.Module, graph: Graph, chunk_size: int) -> Tensor:
    """A checkpoint around each chunk."""
    out = graph.zeros()
    for rows, weight, index, src in parts(graph, chunk_size):
        out.index_add_(0, index, checkpoint(graph.messages, module, rows, weight, src, use_reentrant=False))
    return out


def parts(graph: Graph, chunk_size: int) -> Any:
    return zip(*(each.split(chunk_size) for each in (graph.rows, graph.weight, graph.index, graph.src)), strict=True)


def memkit(module: nn.Module, graph: Graph, chunk_size: int) -> Tensor:
    return chunked_segment_reduce(
        module,
        graph.rows,
        index=graph.index,
        num_segments=graph.num_nodes,
        reduce=graph.reduce,  # type: ignore[arg-type]
        gather=None if graph.x is None else {"x_j": (graph.x, graph.src)},
        weight=graph.weight,
        chunk_size=chunk_size,
    )


class WithinBudget:
    """A processor of one module's calls."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self.processor: ChunkedProcessor | None = None

    def __call__(self, module: nn.Module, graph: Graph) -> Tensor:
        if self.processor is None:
            self.processor = ChunkedProcessor(module, memory_budget=self._budget_bytes)
        # In full, as in memkit above: each shows the call as a user writes it.
        return self.processor.segment_reduce(
            graph.rows,
            index=graph.index,
            num_segments=graph.num_nodes,
            reduce=graph.reduce,  # type: ignore[arg-type]
            gather=None if graph.x is None else {"x_j": (graph.x, graph.src)},
            weight=graph.weight,
        )


SUMS = {
    "plain": plain,
    "loop over chunks of 4096": lambda module, graph: loop(module, graph, 4096),
    "checkpoint per chunk of 4096": lambda module, graph: checkpointed(module, graph, 4096),
}
MEMKIT = {f"memkit, chunks of {size}": lambda m, g, size=size: memkit(m, g, size) for size in (1024, 4096)}
Ways = dict[str, Callable[[nn.Module, Graph], Tensor]]
NUM_MIB = 24
# hidden layers, edges, reduction, gathered node features, ways, rounds
CASES: list[tuple[tuple[int, ...], int, str, bool, Ways, int]] = [
    ((128,) * 3, 50_000, "sum", False, SUMS | MEMKIT, 5),
    ((128,) * 3, 100_000, "sum", False, SUMS | MEMKIT, 3),
    ((128,) * 3, 1_000_000, "sum", False, SUMS | MEMKIT, 2),
    ((64,) * 2, 50_000, "sum", False, {"plain": plain} | MEMKIT, 5),
    ((64,) * 2, 1_000_000, "sum", False, {"plain": plain} | MEMKIT, 2),
    ((256,) * 3, 50_000, "sum", False, {"plain": plain} | MEMKIT, 3),
    ((256,) * 3, 1_000_000, "sum", False, {"plain": plain} | MEMKIT, 1),
    *(((128,) * 3, 100_000, reduce, True, {"plain": plain} | MEMKIT, 3) for reduce in ("mean", "max", "softmax")),
    *(((128,) * 3, 1_000_000, reduce, True, {"memkit, chunks of 1024": MEMKIT["memkit, chunks of 1024"]}, 0)
      for reduce in ("mean", "max", "softmax")),
]  # fmt: skip


# The same with LayerNorm and SiLU, each with a processor of its own: edges, reduction, pages kept, rounds.
WITH_NORMS: list[tuple[int, str, bool, int]] = [
    *((100_000, reduce, is_kept, 9) for reduce in ("sum", "mean", "max") for is_kept in (False, True)),
    (1_000_000, "sum", False, 1),
]
PAGES_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


def step(way: Callable[[nn.Module, Graph], Tensor], module: nn.Module, graph: Graph) -> None:
    way(module, graph).backward(graph.upstream)


def forget(module: nn.Module, graph: Graph) -> None:
    module.zero_grad()
    if graph.x is not None:
        graph.x.grad = None


def gradients(way: Callable[[nn.Module, Graph], Tensor], module: nn.Module, graph: Graph) -> list[Tensor]:
    tensors = [*module.parameters(), *([] if graph.x is None else [graph.x])]
    out = way(module, graph)
    return [out, *torch.autograd.grad(out, tensors, graph.upstream)]


def add_errors(rows: dict[str, dict[str, Any]], module: Message, graph: Graph, ways: Ways) -> None:
    """The truth is plain torch's in float64; of a million edges memkit's, whose tests hold it to plain's to 1e-11."""
    truth = copy.deepcopy(module).double()
    exact = gradients(plain if len(graph.rows) <= 100_000 else MEMKIT["memkit, chunks of 1024"], truth, graph.double())
    for name, way in ways.items():
        found = gradients(way, module, graph)
        errors = differences(found, exact)
        rows[name] |= {"output_error": errors[0], "gradient_error": max(errors[1:])}


def smallest_times(ways: Ways, module: nn.Module, graph: Graph, rounds: int) -> dict[str, float]:
    """Processor time of a step, of all ways in turns."""

    def seconds(way: Any) -> float:
        gc.collect()
        taken = seconds_of(lambda: step(way, module, graph))
        forget(module, graph)
        return taken

    return {name: min(values, default=0.0) for name, values in in_turns(ways, rounds, seconds).items()}


def measure(
    hidden: tuple[int, ...],
    num_edges: int,
    reduce: str,
    ways: Ways,
    rounds: int,
    *,
    gather: bool,
    norms: bool = False,
    pages_kept: bool = False,
) -> Any:
    torch.manual_seed(1)
    module, graph = Message(hidden, has_norms=norms), Graph.make(num_edges, reduce, gather=gather)
    rows: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        if isinstance(way, WithinBudget):  # its trials are made once
            step(way, module, graph)
            forget(module, graph)
        rows[name] = {"peak_bytes": trace_allocations(lambda way=way: step(way, module, graph)).peak}
        forget(module, graph)
    times = smallest_times(ways, module, graph, rounds)
    for name, row in rows.items():
        if rounds:
            row |= {"seconds": round(times[name], 3), "ratio": round(times[name] / times["plain"], 3)}
    if "plain" in ways:
        add_errors(rows, module, graph, ways)
    outputs = 4 * graph.upstream.numel()
    return {
        "hidden": list(hidden), "edges": num_edges, "nodes": graph.num_nodes, "reduce": reduce, "gather": gather,
        "norms": norms, "output_bytes": outputs, "pages_kept": pages_kept, "ways": rows,
    }  # fmt: skip


def with_norms(number: int) -> Any:
    """Measure a case of `WITH_NORMS` in this process."""
    num_edges, reduce, is_kept, rounds = WITH_NORMS[number]
    ways: Ways = {"plain": plain, f"memkit, {NUM_MIB} MiB": WithinBudget(NUM_MIB << 20)}
    how = {"gather": reduce != "sum", "norms": True, "pages_kept": is_kept}
    return measure((128,) * 3, num_edges, reduce, ways, rounds, **how)


def alone(number: int) -> Any:
    """Measure a case of `WITH_NORMS` in a process of its own."""
    environment = os.environ | (PAGES_KEPT if WITH_NORMS[number][2] else {})
    command = [sys.executable, "-m", "benchmarks.cases.edge_mlp", str(number)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(json.dumps(with_norms(int(sys.argv[1]))))
        return
    figures = []
    runs: list[Callable[[], Any]] = [
        partial(measure, hidden, num_edges, reduce, ways, rounds, gather=gather)
        for hidden, num_edges, reduce, gather, ways, rounds in CASES
    ]
    runs += [partial(alone, number) for number in range(len(WITH_NORMS))]
    for run in runs:
        start = time.perf_counter()
        case = run()
        figures.append(case)
        print({key: value for key, value in case.items() if key != "ways"}, f"{time.perf_counter() - start:.0f} s")
        for name, row in case["ways"].items():
            print(
                f"  {name:30} {row['peak_bytes'] / 2**20:8.1f} MiB", {k: v for k, v in row.items() if k != "peak_bytes"}
            )
    print(write_result("edge_mlp", {"cases": figures}))


if __name__ == "__main__":
    main()
