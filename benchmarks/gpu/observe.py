"""A step's use of the GPU, seen in three ways: the peaks, each operator by itself, and each request to the allocator.

All of it asks `torch.cuda` alone, so a real GPU and a virtual one are seen by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

NUM_STEPS = 3
MOST_EVENTS = 1_000_000
MOST_ALIGNED = 3000  # operators
ACTIONS = (  # the numbers of tests/simulation/allocator_replay.py
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot", "segment_map",
    "segment_unmap",
)  # fmt: skip


class Operator(NamedTuple):
    """One call of an operator.

    Attributes:
        name: As torch prints it, such as ``aten.convolution.default``.
        before: Allocated bytes when it began.
        kept: How many more there were when it ended.
        most: How many more there were at its peak.
    """

    name: str
    before: int
    kept: int
    most: int


class Ledger(TorchDispatchMode):
    """Enters each operator that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        kept, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        self.operators.append(Operator(str(func), before, kept, most))
        return result


class Observation(NamedTuple):
    """Observations of a training.

    Attributes:
        peak_bytes: ``max_memory_allocated`` of each step.
        kept_bytes: ``memory_allocated`` after each step.
        reserved_bytes: ``max_memory_reserved`` of all steps.
        outside_bytes: Used of the GPU and not reserved: contexts, libraries, and whatever else is on it.
        num_retries: How often the allocator gave back its cache for want of room.
        operators: Of one further step.
        events: (requests, 4) int64 of all steps before: number in `ACTIONS`, address, bytes, stream.
    """

    peak_bytes: list[int]
    kept_bytes: list[int]
    reserved_bytes: int
    outside_bytes: int
    num_retries: int
    operators: list[Operator]
    events: NDArray[np.int64]


def observe(start: Callable[[], Callable[[], None]]) -> Observation:
    """Run the steps of a training in a process that has not used the GPU yet."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)  # noqa: SLF001 - documented so
    step = start()
    peaks, kept, reserved = [], [], []
    for _ in range(NUM_STEPS):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        kept.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    events = events_of(torch.cuda.memory._snapshot())  # noqa: SLF001 - documented so
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 - documented so
    num_retries = torch.cuda.memory_stats()["num_alloc_retries"]
    with Ledger() as ledger:
        step()
    return Observation(peaks, kept, max(reserved), outside, num_retries, ledger.operators, events)


def events_of(snapshot: dict[str, Any]) -> NDArray[np.int64]:
    """The requests that a snapshot of `torch.cuda.memory` holds, (N, 4)."""
    rows = [
        (
            ACTIONS.index(entry["action"]),
            entry["device_free"] if entry["action"] == "oom" else entry["addr"],
            entry["size"],
            entry["stream"],
        )
        for entry in snapshot["device_traces"][0]
        if entry["action"] in ACTIONS
    ]
    return np.array(rows, np.int64).reshape(-1, 4)


def differing_operators(measured: list[Operator], predicted: list[Operator], most: int = 8) -> list[dict[str, Any]]:
    """The operators that took other memory than predicted, those with the largest difference first.

    Each row has the operator, how often it differed, and the difference in bytes, measured minus predicted, of what it
    keeps and of what it takes for itself; an operator that only one side ran counts with all that it kept.
    """
    names = [[row.name for row in rows] for rows in (measured, predicted)]
    times: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    # All against all takes minutes where a recurrent layer runs step by step; then only rare operators are anchors.
    is_long = min(map(len, names)) > MOST_ALIGNED
    for what, a, end_a, b, end_b in SequenceMatcher(None, *names, autojunk=is_long).get_opcodes():
        if what == "equal":
            for real, virtual in zip(measured[a:end_a], predicted[b:end_b], strict=True):
                if (real.kept, real.most) != (virtual.kept, virtual.most):
                    times[real.name] += 1
                    kept[real.name] += real.kept - virtual.kept
                    inside[real.name] = max(inside[real.name], real.most - virtual.most, key=abs)
            continue
        for sign, rows in ((1, measured[a:end_a]), (-1, predicted[b:end_b])):
            for row in rows:
                name = f"{row.name} ({'not predicted' if sign > 0 else 'predicted only'})"
                times[name] += 1
                kept[name] += sign * row.kept
                inside[name] = max(inside[name], sign * row.most, key=abs)
    worst = sorted(times, key=lambda name: -max(abs(kept[name]), abs(inside[name])))[:most]
    return [
        {"operator": name, "times": times[name], "kept_bytes": kept[name], "inside_bytes": inside[name]}
        for name in worst
    ]
