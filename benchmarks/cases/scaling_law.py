"""The scaling laws: far extrapolation on many kinds of steps, real runs, and cost.

Each family of `tests/predict/scaling/families.py` gets its structural law in both modes. It is compared with a dry run
at 100 times the largest size that it was traced at, and with the CPU allocator (torch.profiler) during the second step
of a real run at a size that fits. Beside it: the straight line of logarithms and the secant, both from five exact peaks
up to a hundredth of that size. Time is processor time of the law with all of its traces; memory is the most that the
allocator held meanwhile.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.scaling_law   (10 minutes)
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.result import write_result
from memkit.predict.scaling.points import MODES, StepMode
from memkit.predict.scaling.structural import structural_law
from memkit.predict.scaling.traces import trace_step
from tests.allocations import trace_allocations
from tests.predict.scaling.families import FAMILIES, Family
from tests.predict.scaling.test_law_structural import allocated_peak

NUM_TIMINGS = 3


def peers(trace: Any, smallest: int, farthest: int, truth: int) -> dict[str, float]:
    """Predicted over actual of two laws of points, from five sizes up to a hundredth of the size asked for."""
    sizes = [smallest * 2**k for k in (3, 4, 5, 6, 7)]
    peaks = [trace(size).peak_bytes for size in sizes]
    slope, start = np.polyfit(np.log(sizes), np.log(peaks), 1)
    secant = peaks[-1] + (peaks[-1] - peaks[-2]) * (farthest - sizes[-1]) / (sizes[-1] - sizes[-2])
    return {"log_log_over_actual": float(np.exp(start) * farthest**slope / truth), "secant_over_actual": secant / truth}


def measure(family: Family, mode: StepMode) -> dict[str, Any]:
    seconds = []
    for _ in range(NUM_TIMINGS):
        trace = cache(partial(trace_step, family.build, mode=mode))
        start = time.process_time()
        law = structural_law(trace, [family.smallest])
        seconds.append(time.process_time() - start)
    fresh = cache(partial(trace_step, family.build, mode=mode))
    taken = trace_allocations(lambda: structural_law(fresh, [family.smallest])).peak
    figures: dict[str, Any] = {"n": family.what, "seconds": round(min(seconds), 3), "tensor_bytes_while_tracing": taken}
    if isinstance(law, str):
        return figures | {"tier": "deterministic", "reason": law.partition(", /")[0]}
    farthest = 100 * max(law.checked)
    truth = trace(farthest).peak_bytes
    low, high = law.interval(family.real)
    real = allocated_peak(family.build, family.real, mode)
    return figures | {
        "tier": law.tier,
        "order": law.order,
        "grain": law.grain,
        "traced": law.traced,
        "checked": law.checked,
        "breakpoints": law.breakpoints,
        "asked_for": farthest,
        "predicted_bytes": law.predict(farthest),
        "dry_run_bytes": truth,
        "predicted_over_dry_run": law.predict(farthest) / truth,
        **peers(trace, family.smallest, farthest, truth),
        "real_n": family.real,
        "real_bytes": real,
        "predicted_at_real_n_bytes": low,
        "predicted_over_real": low / real,
        "interval_at_real_n": [low, high],
        "real_is_in_interval": None if high is None else low - 64 <= real <= high + 64,  # numbers that C++ wraps
    }


def main() -> None:
    torch.set_num_threads(1)
    trace_step(FAMILIES["VAE"].build, 8, "train")  # torch imports on first use
    families = {}
    for name, family in FAMILIES.items():
        families[name] = {mode: measure(family, mode) for mode in MODES}
        print(
            name,
            families[name]["train"].get("predicted_over_dry_run"),
            families[name]["train"].get("predicted_over_real"),
        )
    exact = [each for modes in families.values() for each in modes.values() if each["tier"] == "structural"]
    figures = {
        "num_structural_families": sum(modes["train"]["tier"] == "structural" for modes in families.values()),
        "worst_predicted_over_dry_run": max(
            (each["predicted_over_dry_run"] for each in exact), key=lambda r: abs(r - 1)
        ),
        "most_seconds": max(each["seconds"] for modes in families.values() for each in modes.values()),
        "most_tensor_bytes_while_tracing": max(
            each["tensor_bytes_while_tracing"] for modes in families.values() for each in modes.values()
        ),
        "num_real_runs": len(exact),
        "num_real_runs_within_1e_6": sum(abs(each["predicted_over_real"] - 1) <= 1e-6 for each in exact),
        "num_real_runs_in_interval": sum(bool(each["real_is_in_interval"]) for each in exact),
        "families": families,
    }
    print(write_result("scaling_law", figures))


if __name__ == "__main__":
    main()
