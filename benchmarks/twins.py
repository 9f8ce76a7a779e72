"""Ways to do the same work, the plain one first: allocator peak, FLOPs, difference of results, time by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import in_turns, median_ratio
from tests.allocations import trace_allocations

Way = Callable[[], Sequence[Tensor]]
LEAST_SHOWN_MS = 0.1


def step(leaves: Sequence[Tensor], forward: Callable[[], Tensor]) -> Way:
    """Forward and backward of the mean square; gives the output and the gradients of the leaves."""

    def run() -> list[Tensor]:
        out = forward()
        out.square().mean().backward()
        results = [out.detach(), *(leaf.grad for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None  # nothing is left for the next call, whose frees could not be told
        return results

    return run


def measure(ways: dict[str, Way], *, rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Figures of each way; the results that it returns are compared with the first way's.

    Peaks are the allocator's events above what was there before, results included. FLOPs are those that torch counts,
    of matrix products and convolutions. Time is the processor's, the ways in turns, the median ratio to the first. The
    same by operator shows where two ways differ; what is no operator's is Python's.
    """
    plain, *_ = ways
    wanted = ways[plain]()
    figures: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        # Before the peak is taken: what a way prepares in its first call is there in all others.
        difference = max(differences(way(), wanted))
        with FlopCounterMode(display=False) as flops:
            way()
        peak_bytes = trace_allocations(way).peak
        figures[name] = {"peak_bytes": peak_bytes, "flops": flops.get_total_flops(), "difference": difference}
    seconds = in_turns(ways, rounds)
    for name, taken in seconds.items():
        figures[name]["time_ratio"] = median_ratio(taken, seconds[plain])
    operators = in_turns(ways, rounds, milliseconds_of_operators)
    for name, found in operators.items():
        names = {operator for each in found for operator in each}
        least = {operator: min(each.get(operator, 0.0) for each in found) for operator in names}
        figures[name]["operator_ms"] = {
            operator: round(taken, 2) for operator, taken in sorted(least.items()) if taken >= LEAST_SHOWN_MS
        }
    return figures


def milliseconds_of_operators(way: Way) -> dict[str, float]:
    """Time of each operator without those that it calls, forward and backward."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        way()
    return {
        each.key: each.self_cpu_time_total / 1e3 for each in recorded.key_averages() if each.key.startswith("aten::")
    }


def differences(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    return [largest_difference(a, b) for a, b in zip(found, wanted, strict=True)]


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """As a share of the largest number wanted."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)).item()
