"""Batches within a budget: how full, beside the naive way and sorting by size, and how long packing takes.

The samples are the syntax trees of all functions in the standard library's own modules, as graphs: nodes, and edges
along the tree (both ways) and to the next use of a name. The naive way takes samples in shuffled order and begins a
batch whenever one does not fit. Sorting by size fills batches too, but with samples of one size: "spread" is how much
the logarithm of sizes varies within a batch, as a share of how much it varies at all. Fill is the share of the fullest
budget. Means of three epochs; processor time.

Run: python -m benchmarks.cases.budget_batches
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit.points.batches import BudgetBatchSampler

BUDGETS = {
    "1,600 points": {"points": 1600},
    "4,000 points": {"points": 4000},
    "4,000 points, 8,200 edges": {"points": 4000, "edges": 8200},
}
EPOCHS = 3


def graphs() -> np.ndarray:
    """(S, 2) int64: nodes and edges of each function's syntax tree."""
    sizes = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes = list(ast.walk(function))
                names = [node.id for node in nodes if isinstance(node, ast.Name)]
                sizes.append((len(nodes), 2 * (len(nodes) - 1) + len(names) - len(set(names))))
    return np.array(sizes)


def next_fit(sizes: np.ndarray, limits: np.ndarray, order: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    used = np.zeros(len(limits), np.int64)
    for sample in order:
        used = used + sizes[sample]
        if (used > limits).any():
            batches.append([])
            used = sizes[sample]
        batches[-1].append(sample)
    return batches


def figures_of(sizes: np.ndarray, budgets: dict[str, int]) -> dict[str, Any]:
    limits = np.array(list(budgets.values()))
    columns = {name: sizes[:, place] for place, name in enumerate(budgets)}
    used = sizes[:, : len(limits)]

    def ours(epoch: int) -> list[list[int]]:
        batches = BudgetBatchSampler(columns, **{f"max_{name}": budget for name, budget in budgets.items()})
        batches.set_epoch(epoch)
        return list(batches)

    def shuffled(epoch: int) -> list[list[int]]:
        return next_fit(used, limits, np.random.default_rng(epoch).permutation(len(used)))

    by_size = next_fit(used, limits, used[:, 0].argsort(kind="stable"))
    ways: dict[str, Callable[[int], list[list[int]]]] = {
        "BudgetBatchSampler": ours,
        "shuffled, a new batch when full": shuffled,
        "sorted by size": lambda _: by_size,
    }
    logs = np.log(sizes[:, 0])
    rows = {"at best": {"num_batches": int(np.ceil((used.sum(axis=0) / limits).max()))}}
    for name, way in ways.items():
        runs = [way(epoch) for epoch in range(EPOCHS)]
        rows[name] = {
            "num_batches": mean(map(len, runs)),
            "fill": mean((used.sum(axis=0) / limits).max() / len(run) for run in runs),
            "spread": mean(mean(logs[batch].std() for batch in run) for run in runs) / logs.std(),
        }
    return rows


def microseconds(num_columns: int) -> float:
    """For each sample of 100,000 in one epoch."""
    rng = np.random.default_rng(0)
    points = rng.lognormal(7, 1, 100_000).astype(int).clip(1, 20_000)
    columns = {"points": points, "edges": (points * rng.uniform(5, 20, len(points))).astype(int)}
    budgets = {"max_points": 40_000, "max_edges": 500_000}
    names = list(columns)[:num_columns]
    batches = BudgetBatchSampler(
        {each: columns[each] for each in names}, **{f"max_{n}": budgets[f"max_{n}"] for n in names}
    )
    return 1e6 * seconds_of(lambda: batches.set_epoch(1)) / len(points)


def main() -> None:
    sizes = graphs()
    figures = {
        "num_samples": len(sizes),
        "mean_points": float(sizes[:, 0].mean()),
        "most_points": int(sizes[:, 0].max()),
        "cases": {name: figures_of(sizes, budgets) for name, budgets in BUDGETS.items()},
        "us_per_sample": {"one budget": microseconds(1), "two budgets": microseconds(2)},
    }
    print(write_result("budget_batches", figures))


if __name__ == "__main__":
    main()
