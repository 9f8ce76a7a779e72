"""Cost of an always-on MemoryManager: a training loop with phases and step() against the same loop bare.

Processor time of single steps, each beside a bare one, so that a busy machine disturbs both alike; the mean of the
differences without the largest and smallest fifth, with its standard error. Totals and events are computed, and
written, a few times a second for many steps at once: that time is measured by itself, and its share of a step added.
All ways train the same model, four transformer blocks of width 64, 9 ms for a step. ``"bare again"`` is the bare loop a
second time: what it differs from itself is the error of the method. Since every other step is bare, managers wait twice
as long until they write, so that it is after as many steps as in a real loop. ``"calls"`` are the same calls with
nothing between: in a training step they take several times longer, because the step leaves nothing of them in the
caches. How much longer depends on what else runs on the machine.

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


class Settling:
    """Time in which managers compute the totals and events of many blocks."""

    def __init__(self, managers: Iterable[mk.MemoryManager]) -> None:
        self.seconds = 0.0
        for manager in managers:
            ledger = manager._ledger  # noqa: SLF001 - what the figures are about
            ledger.settle = partial(self._timed, ledger.settle)  # type: ignore[method-assign]

    def _timed(self, settle: Callable[[], None]) -> None:
        self.seconds += seconds_of(settle)


def extra_seconds(step: Callable[[], None], bare: Callable[[], None], settling: Settling) -> tuple[list[float], float]:
    """How much longer than a bare step beside it each of some steps takes without settling, and that, per step."""
    extra, settled_s = [], 0.0
    for number in range(PAIRS + WARM_UP):
        if number == WARM_UP:
            settled_s = settling.seconds
        bare_s = seconds_of(bare) if number % 2 else None
        before_s = settling.seconds
        step_s = seconds_of(step) - (settling.seconds - before_s)
        extra.append(step_s - (seconds_of(bare) if bare_s is None else bare_s))
    return extra[WARM_UP:], (settling.seconds - settled_s) / PAIRS


def measure_loops(managers: dict[str, mk.MemoryManager]) -> dict[str, dict[str, float]]:
    task = transformer(num_blocks=4, width=64, length=32, rows=12)
    loop = Loop(task, torch.optim.AdamW(task.model.parameters(), lr=1e-3))
    empty: AbstractContextManager[None] = nullcontext()
    steps: dict[str, Callable[[], None]] = {
        "bare again": loop.bare,
        "3 empty contexts": lambda: loop.with_three_phases(lambda _: empty, _nothing),
    }
    for name, manager in managers.items():
        steps[f"{name}: step()"] = partial(_bare_then, loop, manager.step)
        steps[f"{name}: 3 phases, step()"] = partial(loop.with_three_phases, manager.phase, manager.step)
        steps[f"{name}: 4 phases, step()"] = partial(loop.with_four_phases, manager.phase, manager.step)
    bare_s = statistics.median(seconds_of(loop.bare) for _ in range(PAIRS))
    extra: dict[str, list[float]] = {name: [] for name in steps}
    settled_s = dict.fromkeys(steps, 0.0)
    settling = Settling(managers.values())
    for _ in range(ROUNDS):
        for name, step in steps.items():
            values, share_s = extra_seconds(step, loop.bare, settling)
            extra[name] += values
            settled_s[name] += share_s / ROUNDS
    rows = {"bare": {"us_per_step": round(1e6 * bare_s, 1)}}
    for name, values in extra.items():
        num_cut = len(values) // CUT
        middle = sorted(values)[num_cut:-num_cut]
        # Of a trimmed mean: from the values with the outer ones moved to the edge.
        moved = [middle[0]] * num_cut + middle + [middle[-1]] * num_cut
        error_s = statistics.stdev(moved) / (1 - 2 / CUT) / len(values) ** 0.5
        mean_s = statistics.fmean(middle) + settled_s[name]
        rows[name] = {
            "extra_us": round(1e6 * mean_s, 1),
            "settling_us": round(1e6 * settled_s[name], 1),
            "standard_error_us": round(1e6 * error_s, 1),
            "ratio": round(1 + mean_s / bare_s, 4),
        }
    return rows


def _bare_then(loop: Loop, end_step: Callable[[], object]) -> None:
    loop.bare()
    end_step()


def measure_calls(manager: mk.MemoryManager) -> dict[str, float]:
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
        figures["calls"] = {name: measure_calls(manager) for name, manager in managers.items()}
        for manager in managers.values():
            manager.close()
    for rows in figures.values():
        for name, row in rows.items():
            print(f"{name:40} {row}")
    print(write_result("manager_cost", figures))


if __name__ == "__main__":
    main()
