"""The memory test of the neural operator (GAOT-3D) without a GPU: how long it takes, and whether it is right.

The whole sweep is run as a user runs it, `memkit profile --all`, and its processor time is counted, imports, plots and
files included. Then three sizes of every part and every MLP are run for real, in both modes: the peak of the second
step by the CPU allocator's own events (torch.profiler, summed) against the prediction.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.s0_sweep   (2 minutes, 2 GB)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import write_result
from memkit.predict.scaling.profile import profile_scaling
from memkit.recipes.memory_test.config import MemoryTestConfig
from memkit.recipes.memory_test.reference import core_cases, full_cases
from tests.predict.scaling.families import allocated_peak

SIZES = (5_000, 20_000, 100_000)


def whole_sweep() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.perf_counter()
        command = [sys.executable, "-m", "memkit", "profile", "--all", "--output-dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        wall, after = time.perf_counter() - start, os.times()
        files = sorted(path.name for path in Path(folder).iterdir())
        rows = sum(len(path.read_text().splitlines()) - 1 for path in Path(folder).glob("*.csv"))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu_seconds": round(cpu, 1), "wall_seconds": round(wall, 1), "num_points": rows, "files": files}


def main() -> None:
    torch.set_num_threads(1)
    sweep = whole_sweep()
    print(sweep)
    config = MemoryTestConfig(test_full_model=True)
    widest = [case for case in core_cases(config) if (case.coord_dim, case.feature_dim) == (3, 128)]
    rows, at_one_million = [], {}
    for case in (*full_cases(config), *widest):
        # The law is traced at small sizes: none of those that are measured.
        law = profile_scaling(case.build_step, [500, 1_000], config.modes).law
        name = f"{case.part} {'x'.join(map(str, case.mlp))}"
        at_one_million[name] = {mode: law[mode].predict(1_000_000) for mode in config.modes}
        for mode in config.modes:
            build_step = partial(case.build_step, mode=mode)
            for size in SIZES:
                allocated_peak(build_step, 100, mode)  # caches of the first call
                predicted, measured = law[mode].predict(size), allocated_peak(build_step, size, mode)
                rows.append(
                    {
                        "part": case.part,
                        "mlp": list(case.mlp),
                        "mode": mode,
                        "edges": size,
                        "predicted_bytes": predicted,
                        "allocator_bytes": measured,
                        "difference_bytes": predicted - measured,
                    }
                )
                print(*rows[-1].values(), flush=True)
    differences = [abs(row["difference_bytes"]) for row in rows]
    figures = {
        "sweep": sweep,
        "num_compared": len(rows),
        "num_equal": differences.count(0),
        "largest_difference_bytes": max(differences),
        "bytes_at_one_million_edges": at_one_million,
        "points": rows,
    }
    print(write_result("s0_sweep", figures, peers=("matplotlib",)))


if __name__ == "__main__":
    main()
