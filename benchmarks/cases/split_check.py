"""Cost of the first split check beside a plain step: bytes, floating point operations and time.

A transformer of 12 blocks on text and a 3D U-Net on brain volumes, cut into two parts; the plain step is forward,
backward and AdamW, by hand. Peaks are those of the allocator's own events, of a first step each; times are medians of
rounds in which look and step take turns.

Run: python -m benchmarks.cases.split_check   (3 minutes)
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import Task, transformer, unet
from benchmarks.result import write_result
from memkit._gradients.loss import read_loss
from memkit.train.split_check import Computation, Examination
from memkit.train.split_ways import ways_to_cut
from tests.allocations import trace_allocations

TASKS: dict[str, Callable[[], Task]] = {
    "transformer, 8 rows": transformer,
    "transformer, 64 rows": lambda: transformer(rows=64),
    "3D U-Net, 8 rows": unet,
}
ROUNDS = 5


def look(task: Task) -> None:
    """The first look at a batch in two parts."""
    parameters = list(task.model.parameters())
    ways = ways_to_cut(task.batch, num_parts=2, is_first=True)
    examination = Examination(task.model, Computation(lambda: parameters), [task.loss_fn], ways)
    for attempt in examination.attempts():
        with attempt as micro:
            attempt.backward(read_loss(task.loss_fn(task.model, micro), call="loss_fn"))
    assert examination.verdict.exact, examination.verdict


def by_hand(task: Task) -> Callable[[], None]:
    return partial(task.step, task.make_optimizer())


def count_flops(run: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def seconds(run: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(make: Callable[[], Task]) -> dict[str, Any]:
    plain_bytes = trace_allocations(by_hand(make())).peak
    task = make()
    look_bytes = trace_allocations(lambda: look(task)).peak
    plain = by_hand(task)
    plain()
    flops = count_flops(plain), count_flops(lambda: look(task))
    times = [(seconds(plain), seconds(lambda: look(task))) for _ in range(ROUNDS)]
    plain_seconds, look_seconds = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "plain_bytes": plain_bytes,
        "look_bytes": look_bytes,
        "plain_flops": flops[0],
        "look_flops": flops[1],
        "plain_seconds": round(plain_seconds, 4),
        "look_seconds": round(look_seconds, 4),
        "time_ratio": round(statistics.median(each / step for step, each in times), 2),
    }


def main() -> None:
    torch.set_num_threads(1)
    figures = {name: measure(make) for name, make in TASKS.items()}
    for name, found in figures.items():
        print(name, found)
    print(write_result("split_check", figures))


if __name__ == "__main__":
    main()
