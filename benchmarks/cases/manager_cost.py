"""Cost of an always-on MemoryManager: a training loop with phases and step() against the same loop bare.

All ways train the same model, four transformer blocks of width 64, 9 ms for a step, and are measured twice:

- ``"calls_us"``: the time inside the manager's calls, by clock readings around each of them, less what the readings
  themselves take there.
- ``"extra_us"``: processor time of single steps less that of a bare step beside each. It has what the calls cost the
  rest of the step, too, but only to within its ``"standard_error_us"``. ``"bare again"`` is the bare loop a second
  time: what it differs from itself is the error of the method.

Both are means without the largest and smallest fifth. Totals and events are computed, and written, a few times a second
for many steps at once: that time is measured by itself, and its share of a step (``"settling_us"``) is in both. Since
every other step is bare, managers wait twice as long until they write, so that it is after as many steps as in a real
loop. ``"alone"`` are the same calls with nothing between: in a training step they take several times longer, because
the step leaves nothing of them in the caches. How much longer depends on what else runs on the machine.

Run: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 python -m benchmarks.cases.manager_cost
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memkit as mk
from benchmarks.models import Task, transformer
from benchmarks.result import write_result
from benchmarks.timing import seconds_of

ROUNDS = 4
PAIRS = 150  # of a round
WARM_UP = 10
CUT = 5  # one of so many values at either end
CALLS = 20_000  # of a phase or a step alone

Phase = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Loop:
    """A model in training, whose step can be run with phases around its parts, or bare."""

    task: Task
    optimizer: torch.optim.Optimizer

    def bare(self) -> None:
        loss = self.task.loss_fn(self.task.model, self.task.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def with_step(self, _: Phase, end_step: Callable[[], object]) -> None:
        self.bare()
        end_step()

    def with_three_phases(self, phase: Phase, end_step: Callable[[], object]) -> None:
        with phase("forward"):
            loss = self.task.loss_fn(self.task.model, self.task.batch)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        end_step()

    def with_four_phases(self, phase: Phase, end_step: Callable[[], object]) -> None:
        with phase("step"):
            self.with_three_phases(phase, _nothing)
        end_step()


def _nothing() -> None:
    pass


class Stopwatch:
    """Sums up the time inside the calls of a manager."""

    def __init__(self, manager: mk.MemoryManager | None) -> None:
        self._manager = manager
        self.ns = 0

    def phase(self, name: str) -> _TimedPhase:
        return _TimedPhase(self, lambda: nullcontext() if self._manager is None else self._manager.phase(name))

    def step(self) -> None:
        self.timed(_nothing if self._manager is None else self._manager.step)

    def timed(self, call: Callable[..., Any], *arguments: object) -> Any:
        start = time.perf_counter_ns()
        result = call(*arguments)
        self.ns += time.perf_counter_ns() - start
        return result


class _TimedPhase:
    def __init__(self, stopwatch: Stopwatch, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._stopwatch, self._make = stopwatch, make

    def __enter__(self) -> None:
        self._phase = self._stopwatch.timed(self._begin)

    def _begin(self) -> AbstractContextManager[object]:
        phase = self._make()
        phase.__enter__()
        return phase

    def __exit__(self, *error: object) -> None:
        self._stopwatch.timed(self._phase.__exit__, *error)


class Settling:
    """Time in which managers compute the totals and events of many blocks."""

    def __init__(self, managers: Iterable[mk.MemoryManager]) -> None:
        self.seconds = 0.0
        for manager in managers:
            ledger = manager._ledger  # noqa: SLF001 - what the figures are about
            ledger.settle = partial(self._timed, ledger.settle)  # type: ignore[method-assign]

    def _timed(self, settle: Callable[[], None]) -> None:
        self.seconds += seconds_of(settle)


def extra_seconds(
    step: Callable[[], None], bare: Callable[[], None], settling: Settling
) -> tuple[list[float], list[float], float]:
    """Return each bare step's time, how much longer the step beside it takes without settling, and that, per step."""
    bares, extra, settled_s = [], [], 0.0
    for number in range(PAIRS + WARM_UP):
        if number == WARM_UP:
            settled_s = settling.seconds
        bare_s = seconds_of(bare) if number % 2 else None
        before_s = settling.seconds
        step_s = seconds_of(step) - (settling.seconds - before_s)
        bares.append(seconds_of(bare) if bare_s is None else bare_s)
        extra.append(step_s - bares[-1])
    return bares[WARM_UP:], extra[WARM_UP:], (settling.seconds - settled_s) / PAIRS


def middle_mean(values: list[float]) -> tuple[float, float]:
    """The mean without the outer values, and its standard error: from the values with the outer ones at the edge."""
    num_cut = len(values) // CUT
    middle = sorted(values)[num_cut:-num_cut]
    moved = [middle[0]] * num_cut + middle + [middle[-1]] * num_cut
    return statistics.fmean(middle), statistics.stdev(moved) / (1 - 2 / CUT) / len(values) ** 0.5


def inner_seconds(
    run: Callable[[Phase, Callable[[], object]], None], manager: mk.MemoryManager, settling: Settling
) -> list[float]:
    """Time inside the calls of a manager without settling, in each of some steps, less that of the clock readings."""
    watch, idle = Stopwatch(manager), Stopwatch(None)
    inner = []
    for _ in range(PAIRS + WARM_UP):
        before_s, watch.ns, idle.ns = settling.seconds, 0, 0
        run(idle.phase, idle.step)
        run(watch.phase, watch.step)
        inner.append((watch.ns - idle.ns) / 1e9 - (settling.seconds - before_s))
    return inner[WARM_UP:]


def measure_loops(managers: dict[str, mk.MemoryManager]) -> dict[str, dict[str, float]]:
    task = transformer(num_blocks=4, width=64, length=32, rows=12)
    loop = Loop(task, torch.optim.AdamW(task.model.parameters(), lr=1e-3))
    empty: AbstractContextManager[None] = nullcontext()
    runs = {
        "step()": loop.with_step,
        "3 phases, step()": loop.with_three_phases,
        "4 phases, step()": loop.with_four_phases,
    }
    steps: dict[str, Callable[[], None]] = {
        "bare again": loop.bare,
        "3 empty contexts": lambda: loop.with_three_phases(lambda _: empty, _nothing),
    }
    watched: dict[str, Callable[[], list[float]]] = {}
    settling = Settling(managers.values())
    for name, manager in managers.items():
        for kind, run in runs.items():
            steps[f"{name}: {kind}"] = partial(run, manager.phase, manager.step)
            watched[f"{name}: {kind}"] = partial(inner_seconds, run, manager, settling)
    bare: dict[str, list[float]] = {name: [] for name in steps}
    extra: dict[str, list[float]] = {name: [] for name in steps}
    inner: dict[str, list[float]] = {name: [] for name in watched}
    settled_s = dict.fromkeys(steps, 0.0)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            bares, values, share_s = extra_seconds(step, loop.bare, settling)
            bare[name] += bares
            extra[name] += values
            settled_s[name] += share_s / ROUNDS
            if name in watched:
                inner[name] += watched[name]()
    rows = {}
    for name, values in extra.items():
        bare_s, (extra_s, error_s) = statistics.median(bare[name]), middle_mean(values)
        figures = {
            "bare_us": bare_s,
            "settling_us": settled_s[name],
            "extra_us": extra_s + settled_s[name],
            "standard_error_us": error_s,
        }
        if name in inner:
            figures["calls_us"] = middle_mean(inner[name])[0] + settled_s[name]
        rows[name] = {key: round(1e6 * seconds, 1) for key, seconds in figures.items()}
        rows[name]["extra_ratio"] = round(1 + figures["extra_us"] / bare_s, 4)
        if name in inner:
            rows[name]["calls_ratio"] = round(1 + figures["calls_us"] / bare_s, 4)
    return rows


def measure_alone(manager: mk.MemoryManager) -> dict[str, float]:
    """Microseconds of a phase and of a step() with nothing between."""

    def phase() -> None:
        with manager.phase("phase"):
            pass

    row = {}
    for name, call in {"phase": phase, "step": manager.step}.items():
        start = time.process_time()
        for _ in range(CALLS):
            call()
        row[f"{name}_us"] = round(1e6 * (time.process_time() - start) / CALLS, 1)
    return row


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        managers = {
            "memory only": mk.MemoryManager("cpu"),
            "log file": mk.MemoryManager("cpu", log=Path(folder, "memory_events.jsonl")),
            "reset_peaks": mk.MemoryManager("cpu", reset_peaks=True),
        }
        for manager in managers.values():
            manager._ledger.interval_ns *= 2  # noqa: SLF001 - every other step is bare
        figures = {"loops": measure_loops(managers)}
        figures["alone"] = {name: measure_alone(manager) for name, manager in managers.items()}
        for manager in managers.values():
            manager.close()
    for rows in figures.values():
        for name, row in rows.items():
            print(f"{name:40} {row}")
    print(write_result("manager_cost", figures))


if __name__ == "__main__":
    main()
