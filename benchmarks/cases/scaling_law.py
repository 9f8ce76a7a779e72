"""The scaling laws: far extrapolation on many kinds of steps, real runs, cost; and the noisy law by Monte Carlo.

Each family of `tests/predict/scaling/families.py` gets its structural law in both modes. It is compared with a dry run
at 100 times the largest size that it was traced at, and with the CPU allocator (torch.profiler) during the second step
of a real run at a size that fits. Beside it: the straight line of logarithms and the secant, both from five exact peaks
up to a hundredth of that size. Time is processor time of the law with all of its traces; memory is the most that the
allocator held meanwhile.

The noisy law sees 8 or 12 points from 5 thousand to 1 million, `constant + n ** power` with relative scatter, and is
asked for 4 million. Bias and coverage are of the power; the errors and the share that is called a law follow.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.scaling_law   (10 minutes)
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.result import write_result
from memkit.predict.scaling.noisy import noisy_law
from memkit.predict.scaling.points import MODES, StepMode
from memkit.predict.scaling.structural import structural_law
from memkit.predict.scaling.traces import trace_step
from tests.allocations import trace_allocations
from tests.predict.scaling.families import FAMILIES, Family
from tests.predict.scaling.test_law_structural import allocated_peak
from tests.predict.scaling.test_noisy import FAR, Truth

NUM_DRAWS = 100
NUM_TIMINGS = 3
TRUTHS = {
    "no constant": Truth(share=0.0),
    "constant 3 times the smallest": Truth(share=3.0),
    "constant 30 times the smallest": Truth(),
    "power 0.7": Truth(power=0.7),
    "power 1.5, no constant": Truth(share=0.0, power=1.5),
    "power 2": Truth(power=2.0),
    "scatter of 3 %": Truth(scatter=0.03),
    "one point 25 % off": Truth(outlier=1.25),
    "plateau": Truth(share=3.0, plateau=0.1),
}


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


def monte_carlo(truth: Truth, num_points: int) -> dict[str, float | None]:
    far = float(truth.at(FAR))
    powers, naive, errors, is_covered, is_law, errors_of_laws, is_far_covered = [], [], [], [], [], [], []
    for seed in range(NUM_DRAWS):
        sizes, peaks = truth.draw(seed, num_points)
        law = noisy_law(sizes, peaks)
        curves = law.curves
        admitted = curves.powers[curves.admitted()]
        powers.append(float(curves.powers[curves.best]))
        naive.append(float(np.polyfit(np.log(sizes), np.log(peaks), 1)[0]))
        errors.append(abs(float(curves.at(FAR)[curves.best]) / far - 1))
        is_covered.append(admitted[0] - 1e-3 <= truth.power <= admitted[-1] + 1e-3)
        is_law.append(not law.reason)
        if not law.reason:
            low, high = law.interval(FAR)
            errors_of_laws.append(errors[-1])
            is_far_covered.append(low <= far <= (high or 0))
    return {
        "bias_of_power": round(float(np.mean(powers)) - truth.power, 4),
        "bias_of_naive_slope": round(float(np.mean(naive)) - truth.power, 4),
        "coverage_of_power": round(float(np.mean(is_covered)), 3),
        "median_error_at_4_times": round(float(np.median(errors)), 4),
        "called_a_law": round(float(np.mean(is_law)), 3),
        "largest_error_at_4_times_of_laws": round(max(errors_of_laws), 4) if errors_of_laws else None,
        "coverage_at_4_times_of_laws": round(float(np.mean(is_far_covered)), 3) if errors_of_laws else None,
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
    noisy = {
        f"{name}, {num_points} points": monte_carlo(truth, num_points)
        for name, truth in TRUTHS.items()
        for num_points in (8, 12)
    }
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
        "noisy_num_draws": NUM_DRAWS,
        "noisy": noisy,
    }
    print(write_result("scaling_law", figures))


if __name__ == "__main__":
    main()
