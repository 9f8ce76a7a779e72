"""The tracker's peaks against the allocator's, model by model, in bytes.

Truth is a run without the tracker under torch.profiler (Kineto), allocation events summed, plus what was there before
the block; every model from its first step on, two steps, CPU.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.track_vs_profiler   (15 seconds)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from benchmarks.result import write_result
from memkit.memory.track import Tracker
from tests.allocations import trace_allocations
from tests.memory.test_track_models import ALL_CASES, fresh, steps, there_before, track


def compare(name: str) -> dict[str, Any]:
    case = fresh(name)
    risen = trace_allocations(lambda: steps(case)).peak
    exact, without = track(name, workspace=True), track(name, workspace=False)
    truth = risen + there_before(exact.recording)
    return {
        "truth_bytes": truth,
        "with_workspace_minus_truth_bytes": exact.peak_bytes - truth,
        "without_minus_truth_bytes": without.peak_bytes - truth,
        "reached_by": str(exact.peak_where).rpartition(", at ")[0],
        "workspace_at_peak_bytes": exact.peak_by_category.get("workspace", 0),
    }


def sort_and_unique() -> dict[str, int]:
    numbers = torch.randint(0, 10**9, (2**22,))

    def run() -> None:
        numbers.sort().values.unique()

    truth = trace_allocations(run).peak
    with Tracker(device="cpu") as without:
        run()
    with Tracker(device="cpu", workspace=True) as tracker:
        run()
    peaks = {"without_bytes": without.peak_bytes, "with_workspace_bytes": tracker.peak_bytes}
    return {"truth_bytes": truth} | {name: peak - numbers.nbytes for name, peak in peaks.items()}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = {name: compare(name) for name in ALL_CASES}
    for name, row in models.items():
        print(f"{name:22} {row}")
    figures = {
        "num_models": len(models),
        "num_equal_with_workspace": sum(row["with_workspace_minus_truth_bytes"] == 0 for row in models.values()),
        "num_equal_without": sum(row["without_minus_truth_bytes"] == 0 for row in models.values()),
        "sort_and_unique": sort_and_unique(),
        "models": models,
    }
    print({name: value for name, value in figures.items() if name != "models"})
    print(write_result("track_vs_profiler", figures))


if __name__ == "__main__":
    main()
