"""The virtual GPU against recorded runs of real GPUs: peaks, reserve, and the allocations one by one.

The runs and what the GPUs held are in tests/simulation/public_runs.py. Each run is played whole: five steps, then
the recorded one. Bytes are those of the virtual GPU; the GPU's stand beside them.

Run: python -m benchmarks.cases.public_runs   (4 minutes)
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.result import write_result
from tests.simulation.public_runs import RUNS, CourseRun, num_alike


def figures_of(run: CourseRun) -> dict[str, Any]:
    start = time.process_time()
    played = run.play()
    seconds = time.process_time() - start
    alike, recorded = num_alike(run, played) if run.trace else (None, None)
    return {
        "precision": "bf16 autocast" if run.autocast else "fp32",
        "peak_bytes": played.peak_bytes,
        "gpu_peak_bytes": run.peak_bytes,
        "reserved_bytes": played.reserved_bytes,
        "gpu_reserved_bytes": run.reserved_bytes,
        "num_allocations_alike": alike,
        "num_gpu_allocations": recorded,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    torch.set_num_threads(1)
    print(write_result("public_runs", {run.name: figures_of(run) for run in RUNS}))


if __name__ == "__main__":
    main()
