"""Live bytes all along one training step of a 12-block transformer: plain, accumulated, accumulated and checkpointed.

Watched by `Tracker`, on the CPU, in a warm step. A curve keeps the smallest and the largest of each of 120 equal parts
of the step's events, in their order, so no peak is lost.

Run: python -m benchmarks.cases.step_timeline   (1 minute)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import memkit as mk
from benchmarks.cases.wrapper_memory import NUM_WARM_STEPS, SETTINGS, Run, total_bytes
from benchmarks.models import transformer
from benchmarks.result import write_result

NUM_PARTS = 120
WAYS = {"plain": None} | {name: SETTINGS[name] for name in ("accumulation", "accumulation + checkpointing")}


def measure(settings: dict[str, Any] | None) -> dict[str, Any]:
    run = Run(transformer(), settings)
    for _ in range(NUM_WARM_STEPS):
        run.step()
    with mk.Tracker(device="cpu") as tracker:
        run.step()
    # The timeline begins by booking, one by one, what was there before the step.
    states = [each for state in run.optimizer.state.values() for each in state.values()]
    there_bytes = total_bytes([*run.task.model.parameters(), *states])
    events = tracker.timeline[np.argmax(tracker.timeline >= there_bytes) :]
    curve: list[int] = []
    for part in np.array_split(events, NUM_PARTS):
        curve += [int(part[end]) for end in sorted((part.argmin(), part.argmax()))]
    return {"peak_bytes": tracker.peak_bytes, "num_events": len(events), "live_bytes": curve}


def main() -> None:
    torch.set_num_threads(1)
    figures = {name: measure(settings) for name, settings in WAYS.items()}
    for name, row in figures.items():
        print(f"{name:30} {row['peak_bytes'] / 1e6:.1f} MB, {row['num_events']} events")
    print(write_result("step_timeline", figures))


if __name__ == "__main__":
    main()
