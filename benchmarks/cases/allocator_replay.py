"""The allocator model against recorded runs of real GPUs: addresses, segments, running out of memory, and time.

The truth is in tests/data/allocator_traces. For each trace: how many blocks the model put at the GPU's own address, how
many of the segments it took and gave back when the GPU did. The wrong models of the tests, each wrong in one rule,
show what a trace tells apart. Time is processor time for the requests of all traces on one empty allocator each.

Run: python -m benchmarks.cases.allocator_replay   (10 seconds)
"""

from __future__ import annotations

import statistics
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit._simulation.cuda.allocator import CachingAllocator
from tests.simulation.allocator_replay import ALLOC, FOLDER, FREE_COMPLETED, FREE_REQUESTED, TRACES, replay
from tests.simulation.test_allocator import WRONG, is_faithful

ROUNDS = 9


def figures_of(name: str) -> dict[str, Any]:
    found = replay(name)
    return {
        "what": TRACES[name]["what"],
        "faithful": found.is_faithful(name),
        "num_allocations": found.num_allocations,
        "num_same_address": found.num_same_address,
        "num_segment_events": found.num_segment_events,
        "num_other_decisions": len(found.differences),
        "num_retries": found.num_retries,
        "num_out_of_memory": found.num_ooms,
        "num_cache_flushes": found.num_flushes,
    }


def wrong_models() -> dict[str, list[str]]:
    """For each wrong rule the traces that it cannot follow."""
    missed = {}
    for wrong, (_, change) in WRONG.items():
        if isinstance(change, tuple):
            with mock.patch.object(*change):
                missed[wrong] = [name for name in TRACES if not is_faithful(name)]
        else:
            missed[wrong] = [name for name in TRACES if not is_faithful(name, change)]
    return missed


def requests(name: str) -> list[list[int]]:
    """The requests of a trace that need no state before it."""
    events = np.load(FOLDER / f"{name}.npz")["events"].tolist()
    kept, live = [], set()
    for event in events:
        if event[0] == ALLOC:
            live.add(event[1])
        if event[0] in {ALLOC, FREE_REQUESTED, FREE_COMPLETED} and event[1] in live:
            kept.append(event)
        if event[0] == FREE_COMPLETED:
            live.discard(event[1])
    return kept


def play(tapes: list[list[list[int]]]) -> None:
    for tape in tapes:
        gpu = CachingAllocator(2**50)
        blocks = {}
        for kind, address, size, stream in tape:
            if kind == ALLOC:
                blocks[address] = gpu.allocate(size, stream)
            elif kind == FREE_REQUESTED:
                gpu.request_free(blocks[address])
            else:
                gpu.complete_free(blocks[address])


def main() -> None:
    tapes = [requests(name) for name in TRACES]
    num_events = sum(map(len, tapes))
    times = [seconds_of(lambda: play(tapes)) for _ in range(ROUNDS)]
    traces = {name: figures_of(name) for name in TRACES}
    figures = {
        "num_allocations": sum(trace["num_allocations"] for trace in traces.values()),
        "num_same_address": sum(trace["num_same_address"] for trace in traces.values()),
        "num_segment_events": sum(trace["num_segment_events"] for trace in traces.values()),
        "num_other_decisions": sum(trace["num_other_decisions"] for trace in traces.values()),
        "seconds_per_100k_events": round(statistics.median(times) / num_events * 1e5, 3),
        "traces": traces,
        "traces_that_a_wrong_model_cannot_follow": wrong_models(),
    }
    print(write_result("allocator_replay", figures))


if __name__ == "__main__":
    main()
