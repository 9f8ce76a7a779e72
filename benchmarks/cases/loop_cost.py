"""Cost of MemoryEfficientTrainLoop: a few of its steps beside as many of a loop by hand.

The loop's batches come from a generator that now and then runs a few steps of another loop, so the two take turns, and
a busy machine disturbs both alike. The first of the steps in a row is left out: it follows a step of the other loop,
which no step of a real loop does. Processor time; everything that the loop does between two batches counts, reports
too. A step takes 10 to 20 ms. Where a network lies in memory makes it faster or slower by a per cent: so both loops
train the very same one with the same optimizer, and it is made anew several times. The figure is the mean over those
times, with its standard error, of the mean difference without the largest and smallest tenth.

That mean is known to half a per cent, since the operators' own time varies by more. So the benchmark takes, in other
turns, the time outside of them as well: that of the whole step less that inside of the loss function, the autograd
engine and the optimizer's functional form, which all loops call alike. How much more of it a loop has, over a step by
hand, is "own_ratio". It leaves out what the loop's code does to the operators' caches.

"train_step by hand" is the wrapper's step without the loop: what the loop has on top of that is its own cost. "by hand
again" is the error of the method. With on_oom="raise" the wrapper does not prepare to recover from out-of-memory, which
the other loops cannot.

Run: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 python -m benchmarks.cases.loop_cost
"""

from __future__ import annotations

import ctypes
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.optim.sgd as sgd_module
from torch import Tensor, nn
from torch.autograd import Variable

from benchmarks.cases import wrapper_overhead
from benchmarks.cases.wrapper_overhead import Batch, mean_loss
from benchmarks.models import Task
from benchmarks.result import write_result
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.train.wrapper import MemoryEfficientTrainingWrapper

REPEATS, PAIRS, WARM_UP = 8, 25, 3
IN_A_ROW = 4  # the first of them is not timed
WIDTH, ROWS = 384, 384

OnOom = Literal["exact", "raise"]


LossFn = Callable[[nn.Module, Batch], Tensor]
Setting = tuple[nn.Module, torch.optim.Optimizer, Batch, LossFn]
Step = Callable[[], object]


class Clock:
    """Processor time, less that inside of the functions that it was given.

    Recovery follows what a loss function changes in Python objects, with some work in each step, and this one changes
    nothing but its clock: so the sum is C's, which recovery does not read.
    """

    def __init__(self) -> None:
        self._inside = ctypes.c_double(0.0)

    def read(self) -> float:
        return time.process_time() - self._inside.value

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.value += time.process_time() - start

        return call


class Engine:
    """Autograd's engine, whose time does not count."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self._engine, self.run_backward = engine, clock.without(engine.run_backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextmanager
def outside_of_operators() -> Iterator[tuple[Clock, LossFn]]:
    """Yield a clock that leaves out torch's own work, and the loss function to use with it."""
    clock, engine, functional = Clock(), Variable._execution_engine, sgd_module.sgd  # noqa: SLF001 - no public access
    Variable._execution_engine = Engine(engine, clock)  # type: ignore[assignment]  # noqa: SLF001 - as above
    sgd_module.sgd = clock.without(functional)
    try:
        yield clock, clock.without(mean_loss)
    finally:
        Variable._execution_engine, sgd_module.sgd = engine, functional  # noqa: SLF001 - as above


class Turns:
    """Batches, with a few steps of another loop before each few; notes what both took.

    Args:
        step: The other loop's.
        batch: The batch of all steps.
        clock: Reads the time.
    """

    def __init__(self, step: Step, batch: Batch, clock: Callable[[], float]) -> None:
        self._step, self._batch, self._clock = step, batch, clock
        self.others: list[float] = []
        self.loops: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(PAIRS + WARM_UP):
            self._step()
            start = self._clock()
            for _ in range(IN_A_ROW - 1):
                self._step()
            self.others.append((self._clock() - start) / (IN_A_ROW - 1))
            yield self._batch
            start = self._clock()
            for _ in range(IN_A_ROW - 1):
                yield self._batch
            self.loops.append((self._clock() - start) / (IN_A_ROW - 1))

    def extra(self) -> tuple[float, float]:
        """Return the other loop's seconds for a step, and how many more this one took."""
        differences = sorted(a - b for a, b in zip(self.loops[WARM_UP:], self.others[WARM_UP:], strict=True))
        return statistics.median(self.others[WARM_UP:]), statistics.mean(differences[PAIRS // 10 : -(PAIRS // 10)])


def by_hand(setting: Setting) -> Step:
    model, optimizer, batch, loss_fn = setting
    return partial(Task(model, batch, loss_fn).step, optimizer)


def wrapped(setting: Setting) -> Step:
    model, optimizer, batch, loss_fn = setting
    trainer = MemoryEfficientTrainingWrapper(model, optimizer)
    return lambda: trainer.train_step(batch, loss_fn)


def run_steps(make_step: Callable[[Setting], Step], setting: Setting, turns: Turns) -> None:
    step = make_step(setting)
    for _ in turns:
        step()


def run_loop(setting: Setting, turns: Turns, on_oom: OnOom = "exact") -> None:
    model, optimizer, _, loss_fn = setting
    logging.getLogger("memkit").setLevel(logging.INFO)  # reports are made, as in a real run
    trainer = MemoryEfficientTrainingWrapper(model, optimizer, on_oom=on_oom)
    MemoryEfficientTrainLoop(trainer, turns, loss_fn, report_every=10).run()


def run_lightning(setting: Setting, turns: Turns) -> None:
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer, _, loss_fn = setting

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch) -> Tensor:
            return loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(Module(), turns)


def measure_cost() -> dict[str, dict[str, float]]:
    ways: dict[str, tuple[Callable[[Setting], Step], Callable[[Setting, Turns], object]]] = {
        "by hand again, over by hand": (by_hand, partial(run_steps, by_hand)),
        "train_step by hand, over by hand": (by_hand, partial(run_steps, wrapped)),
        "loop, over train_step by hand": (wrapped, run_loop),
        "loop, over by hand": (by_hand, run_loop),
        "loop with on_oom='raise', over by hand": (by_hand, partial(run_loop, on_oom="raise")),
        "lightning, over by hand": (by_hand, run_lightning),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        model, optimizer, batch = wrapper_overhead.make(WIDTH, ROWS)
        for name, (make_step, run) in ways.items():
            seconds, more = in_turns(make_step, run, (model, optimizer, batch, mean_loss), time.process_time)
            with outside_of_operators() as (clock, loss_fn):
                _, more_outside = in_turns(make_step, run, (model, optimizer, batch, loss_fn), clock.read)
            found[name].append((seconds, more, more_outside))
    figures = {}
    for name, rows in found.items():
        ratios, own_ratios = ([1 + row[column] / row[0] for row in rows] for column in (1, 2))
        figures[name] = {
            "step_ms": 1e3 * statistics.median(seconds for seconds, *_ in rows),
            "ratio": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / REPEATS**0.5,
            "own_ratio": statistics.mean(own_ratios),
            "own_standard_error": statistics.stdev(own_ratios) / REPEATS**0.5,
        }
    return figures


def in_turns(
    make_step: Callable[[Setting], Step],
    run: Callable[[Setting, Turns], object],
    setting: Setting,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the seconds of a step, and how many more it has in the other loop."""
    turns = Turns(make_step(setting), setting[2], clock)
    gc.collect()
    gc.disable()
    run(setting, turns)
    gc.enable()
    return turns.extra()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures = {"cost": measure_cost()}
    print(figures)
    print(write_result("loop_cost", figures, peers=("lightning",)))


if __name__ == "__main__":
    main()
