"""Cost of watching a training step: memkit's tracker, torch's MemTracker and torch.profiler, over the bare loop.

Processor time of blocks of steps, each block watched in one way, the ways in turns in one process; the median over
rounds of the ratio to the bare block of the same round. "Steps" is the time inside the block, "whole" adds entering,
leaving and reading the peak once. A block has as many steps as somebody would watch.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.track_cost   (4 minutes)
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from benchmarks.counting import EmptyMode
from benchmarks.models import Task, transformer
from benchmarks.result import write_result
from memkit.memory.track import Tracker

ROUNDS = 15


@dataclass
class Loop:
    task: Task
    optimizer: torch.optim.Optimizer
    num_steps: int  # of a block


def mlp() -> Task:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    batch = torch.randn(32, 64), torch.randn(32, 64)
    return Task(nn.Sequential(*layers), batch, lambda model, xy: (model(xy[0]) - xy[1]).square().mean())


SIZES: dict[str, tuple[Callable[[], Task], int]] = {
    "tiny: 6 linear layers": (mlp, 60),
    "small: 4 blocks of 64": (lambda: transformer(num_blocks=4, width=64, length=32, rows=4), 5),
    "medium: 4 blocks of 192": (lambda: transformer(num_blocks=4, width=192, length=128, rows=8), 2),
}


def mem_tracker(loop: Loop) -> MemTracker:
    tracker = MemTracker()
    tracker.track_external(loop.task.model, loop.optimizer)
    return tracker


def profiler_peak(prof: profile) -> int:
    events = prof.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@dataclass
class Way:
    """A way to watch a block."""

    enter: Callable[[Loop], AbstractContextManager[Any]]
    end_step: Callable[[Any], object] = lambda _: None
    peak: Callable[[Any], object] = lambda _: None  # after the block


WAYS = {
    "bare": Way(lambda _: nullcontext()),
    "track()": Way(lambda _: Tracker(), peak=lambda tracker: tracker.peak_bytes),
    "track(workspace=True)": Way(lambda _: Tracker(workspace=True), peak=lambda tracker: tracker.peak_bytes),
    "an empty dispatch mode": Way(lambda _: EmptyMode()),
    "torch.profiler, memory": Way(
        lambda _: profile(activities=[ProfilerActivity.CPU], profile_memory=True), peak=profiler_peak
    ),
    # It refuses a second step unless its module statistics are cleared.
    "torch MemTracker": Way(
        mem_tracker, MemTracker.reset_mod_stats, lambda tracker: tracker.get_tracker_snapshot("peak")
    ),
}


def seconds(way: Way, loop: Loop) -> tuple[float, float]:
    """Processor time of the steps alone, and with entering, leaving and reading the peak."""
    gc.collect()
    begin = time.process_time()
    with way.enter(loop) as watcher:
        start = time.process_time()
        for _ in range(loop.num_steps):
            loop.task.step(loop.optimizer)
            way.end_step(watcher)
        end = time.process_time()
    way.peak(watcher)
    return end - start, time.process_time() - begin


def measure(make_task: Callable[[], Task], num_steps: int) -> dict[str, dict[str, float]]:
    task = make_task()
    loop = Loop(task, torch.optim.AdamW(task.model.parameters(), lr=1e-3), num_steps)
    for way in WAYS.values():
        seconds(way, loop)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            times[name].append(seconds(way, loop))
    row = {}
    for name, pairs in times.items():
        ratios = [(steps / base, whole / base) for (steps, whole), (base, _) in zip(pairs, times["bare"], strict=True)]
        row[name] = {
            "ms_per_step": round(1e3 * statistics.median(steps for steps, _ in pairs) / num_steps, 2),
            "steps_ratio": round(statistics.median(steps for steps, _ in ratios), 3),
            "whole_ratio": round(statistics.median(whole for _, whole in ratios), 3),
        }
    return row


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    figures = {}
    for size, (make_task, num_steps) in SIZES.items():
        figures[size] = {"steps_per_block": num_steps, "ways": measure(make_task, num_steps)}
        for name, row in figures[size]["ways"].items():
            print(f"{size:26} {name:24} {row}")
    print(write_result("track_cost", figures))


if __name__ == "__main__":
    main()
