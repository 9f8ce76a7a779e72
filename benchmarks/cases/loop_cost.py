"""Cost of MemoryEfficientTrainLoop: a few of its steps beside as many of a loop by hand.

The loop's batches come from a generator that now and then runs a few steps of another loop, so the two take turns, and
a busy machine disturbs both alike. The first of the steps in a row is left out: it follows a step of the other loop,
which no step of a real loop does. Processor time; everything that the loop does between two batches counts, reports
too. All train the same network, a step takes about 10 ms. Where a model lies in memory makes it faster
or slower by a per cent: so everything is made anew several times. The figure is the mean over those times, with its
standard error, of the mean difference without the largest and smallest tenth.

"train_step by hand" is the wrapper's step without the loop: what the loop has on top of that is its own cost. "by hand
again" is the error of the method. With on_oom="raise" the wrapper does not prepare to recover from out-of-memory, which
the other loops cannot.

Run: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 python -m benchmarks.cases.loop_cost
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

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


def make() -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    return wrapper_overhead.make(WIDTH, ROWS)


class Turns:
    """Batches, with a few steps of another loop before each few; notes what both took.

    Args:
        step: The other loop's.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step, self._batch = step, make()[2]
        self.others: list[float] = []
        self.loops: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(PAIRS + WARM_UP):
            self._step()
            start = time.process_time()
            for _ in range(IN_A_ROW - 1):
                self._step()
            self.others.append((time.process_time() - start) / (IN_A_ROW - 1))
            yield self._batch
            start = time.process_time()
            for _ in range(IN_A_ROW - 1):
                yield self._batch
            self.loops.append((time.process_time() - start) / (IN_A_ROW - 1))

    def extra(self) -> tuple[float, float]:
        """Return the other loop's seconds for a step, and how many more this one took."""
        differences = sorted(a - b for a, b in zip(self.loops[WARM_UP:], self.others[WARM_UP:], strict=True))
        return statistics.median(self.others[WARM_UP:]), statistics.mean(differences[PAIRS // 10 : -(PAIRS // 10)])


def by_hand() -> Callable[[], object]:
    model, optimizer, batch = make()
    return partial(Task(model, batch, mean_loss).step, optimizer)


def wrapped(on_oom: OnOom = "exact") -> Callable[[], object]:
    model, optimizer, batch = make()
    trainer = MemoryEfficientTrainingWrapper(model, optimizer, on_oom=on_oom)
    return lambda: trainer.train_step(batch, mean_loss)


def run_steps(turns: Turns, step: Callable[[], object]) -> None:
    for _ in turns:
        step()


def run_loop(turns: Turns, on_oom: OnOom = "exact") -> None:
    model, optimizer, _ = make()
    logging.getLogger("memkit").setLevel(logging.INFO)  # reports are made, as in a real run
    trainer = MemoryEfficientTrainingWrapper(model, optimizer, on_oom=on_oom)
    MemoryEfficientTrainLoop(trainer, turns, mean_loss, report_every=10).run()


def run_lightning(turns: Turns) -> None:
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer, _ = make()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch) -> Tensor:
            return mean_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(Module(), turns)


def measure_cost() -> dict[str, dict[str, float]]:
    ways: dict[str, tuple[Callable[[], Callable[[], object]], Callable[[Turns], object]]] = {
        "by hand again, over by hand": (by_hand, lambda turns: run_steps(turns, by_hand())),
        "train_step by hand, over by hand": (by_hand, lambda turns: run_steps(turns, wrapped())),
        "loop, over train_step by hand": (wrapped, run_loop),
        "loop, over by hand": (by_hand, run_loop),
        "loop with on_oom='raise', over by hand": (by_hand, lambda turns: run_loop(turns, "raise")),
        "lightning, over by hand": (by_hand, run_lightning),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, (make_step, run) in ways.items():
            turns = Turns(make_step())
            gc.collect()
            gc.disable()
            run(turns)
            gc.enable()
            found[name].append(turns.extra())
    figures = {}
    for name, pairs in found.items():
        ratios = [1 + more / other for other, more in pairs]
        figures[name] = {
            "step_ms": 1e3 * statistics.median(other for other, _ in pairs),
            "ratio": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / REPEATS**0.5,
        }
    return figures


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures = {"cost": measure_cost()}
    print(figures)
    print(write_result("loop_cost", figures, peers=("lightning",)))


if __name__ == "__main__":
    main()
