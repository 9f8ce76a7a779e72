"""Cost of the flight recorder in a training loop that never runs out of memory: `MemoryManager.recorded_step`.

Processor time of single steps, each beside a bare one, as in `benchmarks.cases.manager_cost`, with the same model. The
counters say the same without a clock: Python functions that a step enters, events and bytes that a thousand steps hold.

Run: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 python -m benchmarks.cases.flight_cost
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch

import memkit as mk
from benchmarks.cases.manager_cost import ROUNDS, Loop, Settling, _nothing, extra_seconds, middle_mean
from benchmarks.models import transformer
from benchmarks.result import write_result

RING = 1000  # events


def recorded(loop: Loop, memory: mk.MemoryManager, directory: str, step: Callable[[], None]) -> None:
    with memory.recorded_step(directory, loop.task.batch):
        step()


def measure(loop: Loop, memory: mk.MemoryManager, directory: str) -> dict[str, dict[str, float]]:
    ways = {
        "bare again": loop.bare,
        "recorded_step": partial(recorded, loop, memory, directory, loop.bare),
        "recorded_step, 3 phases": partial(
            recorded, loop, memory, directory, partial(loop.with_three_phases, memory.phase, _nothing)
        ),
    }
    settling = Settling([memory])
    rows = {}
    bare: dict[str, list[float]] = {name: [] for name in ways}
    extra: dict[str, list[float]] = {name: [] for name in ways}
    settled_s = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for name, step in ways.items():
            bares, values, share_s = extra_seconds(step, loop.bare, settling)
            bare[name] += bares
            extra[name] += values
            settled_s[name] += share_s / ROUNDS
    for name, values in extra.items():
        bare_s, (extra_s, error_s) = statistics.median(bare[name]), middle_mean(values)
        mean_s = extra_s + settled_s[name]
        rows[name] = {
            "extra_us": round(1e6 * mean_s, 1),
            "standard_error_us": round(1e6 * error_s, 1),
            "bare_us": round(1e6 * bare_s, 1),
            "ratio": round(1 + mean_s / bare_s, 4),
        }
    return rows


def count(loop: Loop, memory: mk.MemoryManager, directory: str) -> dict[str, int]:
    """Python functions that the recorder enters in one step, and what a thousand steps leave."""
    memory._ledger.due_ns = 2**62  # noqa: SLF001 - what is evaluated twice a second is not counted
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        recorded(loop, memory, directory, _nothing)
    finally:
        sys.setprofile(None)
    for _ in range(1000):
        recorded(loop, memory, directory, _nothing)
    own = [file for file in entered if file != __file__]
    return {"functions_entered": len(own), "events_after_1000_steps": len(memory.events)}


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    task = transformer(num_blocks=4, width=64, length=32, rows=12)
    loop = Loop(task, torch.optim.AdamW(task.model.parameters(), lr=1e-3))
    with tempfile.TemporaryDirectory() as directory:
        memory = mk.MemoryManager("cpu", max_events=RING)
        figures = {"loops": measure(loop, memory, directory), "counters": count(loop, memory, directory)}
    for name, row in figures["loops"].items():
        print(f"{name:40} {row}")
    print(figures["counters"])
    print(write_result("flight_cost", figures))


if __name__ == "__main__":
    main()
