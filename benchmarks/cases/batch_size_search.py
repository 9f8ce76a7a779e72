"""Out of memory at a batch size: what each library tries, how often it calls, and what a failed call still holds.

The step is forward and backward of an MLP on scikit-learn's digits; above a limit its forward ends with
`torch.OutOfMemoryError`, as an allocator ends it, while its hidden layer hangs on a reference cycle, as closures and
modules make them. The first try is 256 rows; Lightning's `BatchSizeFinder` searches upward from 2 before training,
three steps a try. Counted over all limits: calls and their rows, the largest size found as a share of the limit, and
the most bytes of failed tries' hidden layers that are still alive when a try begins.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.batch_size_search
"""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import tempfile
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import lightning as pl
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.callbacks import BatchSizeFinder
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from benchmarks.result import write_result

FIRST = 256
LIMITS = (12, 40, 100, 200)
WIDTH = 512


class Step:
    """One training step, which counts its calls and runs out of memory above a limit."""

    def __init__(self, limit: int) -> None:
        torch.manual_seed(0)
        digits = load_digits()
        self.x, self.y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
        self.model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        self.limit, self.sizes, self.left_bytes = limit, list[int](), list[int]()
        self.failed: list[weakref.ref[Tensor]] = []

    def __call__(self, batch_size: int) -> int:
        self.loss(self.x[:batch_size], self.y[:batch_size]).backward()
        return batch_size

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.left_bytes.append(sum(hidden.nbytes for failed in self.failed if (hidden := failed()) is not None))
        hidden = self.model[:2](x)
        if len(x) > self.limit:
            cycle: list[Any] = [hidden]
            cycle.append(cycle)
            self.failed.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.cross_entropy(self.model[2](hidden), y)


def by_hand(step: Step) -> int:
    batch_size = FIRST
    while True:
        try:
            return step(batch_size)
        except torch.OutOfMemoryError:
            batch_size //= 2


def accelerate(step: Step) -> int:
    return find_executable_batch_size(step, starting_batch_size=FIRST)()


def memkit_by_tenths(step: Step) -> int:
    """accelerate's sizes."""
    sizes = [FIRST]
    while sizes[-1] > 1:
        sizes.append(int(sizes[-1] * 0.9))
    return mk.recover_from_oom(step, sizes)


class Module(pl.LightningModule):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.model, self.batch_size = step, step.model, 2

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.step.loss(*batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.step.x, self.step.y), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Searched(Exception):  # noqa: N818 - not an error
    """The search is over; training would begin."""


class OnlySearch(BatchSizeFinder):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        raise Searched


def lightning(step: Step, mode: str) -> int:
    module = Module(step)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with tempfile.TemporaryDirectory() as folder:
        search = OnlySearch(mode=mode)
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[search], default_root_dir=folder, **quiet)
        with contextlib.suppress(Searched):
            trainer.fit(module)
    return module.batch_size


WAYS: dict[str, Callable[[Step], int]] = {
    "plain": by_hand,
    "memkit": lambda step: mk.recover_from_oom(step, FIRST),
    "memkit, sizes by tenths": memkit_by_tenths,
    "accelerate": accelerate,
    "Lightning, power": lambda step: lightning(step, "power"),
    "Lightning, binsearch": lambda step: lightning(step, "binsearch"),
}


def measure(way: Callable[[Step], int]) -> dict[str, Any]:
    steps = [Step(limit) for limit in LIMITS]
    gc.freeze()  # the libraries' own modules, at which each collection would look
    gc.disable()  # Python's own collections come when they like
    found = [way(step) for step in steps]
    gc.enable()
    return {
        "num_calls": sum(len(step.sizes) for step in steps),
        "num_rows": sum(sum(step.sizes) for step in steps),
        "sizes_found": found,
        "share_of_limit": statistics.mean(size / limit for size, limit in zip(found, LIMITS, strict=True)),
        "left_bytes": max(max(step.left_bytes) for step in steps),
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "memkit"):
        logging.getLogger(name).setLevel(logging.ERROR)
    figures = {"limits": list(LIMITS), "ways": {name: measure(way) for name, way in WAYS.items()}}
    for name, row in figures["ways"].items():
        print(f"{name:24} {row}")
    print(write_result("batch_size_search", figures, peers=("accelerate", "lightning", "scikit-learn")))


if __name__ == "__main__":
    main()
