"""Cost of the wrapper with everything off, over the loop written by hand; and host reads of a step.

Processor time of blocks of steps in turns, so that a busy machine disturbs both alike. Where a network lies in memory
makes it faster or slower by a per cent: so both train the very same one, and it is made anew several times. The figure
is the mean over those times of the median over rounds of the difference, per micro-batch, with its standard error.
Host reads are calls of ``aten::_local_scalar_dense``: on an accelerator each one waits.

The allocator is told to keep what it has: page faults, which vary by 200 us a step here, are not the wrapper's.

Run: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 python -m benchmarks.cases.wrapper_overhead
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from benchmarks.result import write_result
from benchmarks.timing import in_turns, seconds_of

NETWORKS, ROUNDS, WARM_UP = 8, 9, 40
MICROBATCHES = (1, 4)
# Width of the network, rows of a micro-batch, and micro-batches that are timed as one block: about 20 ms and 100 ms.
SIZES: dict[str, tuple[int, int, int]] = {"0.3 ms": (64, 32, 64), "10 ms": (384, 384, 8)}

Batch = tuple[Tensor, Tensor]
Setting = tuple[nn.Module, torch.optim.Optimizer, Batch]


class HostReads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
        return func(*args, **(kwargs or {}))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def summed_loss(model: nn.Module, batch: Batch) -> mk.Loss:
    """Sum over the valid elements, and their number as a tensor, as a padded batch gives it."""
    valid = batch[1] > 0
    return mk.Loss(sum=((model(batch[0]) - batch[1]).square() * valid).sum(), count=valid.sum())


def make(width: int, rows: int) -> Setting:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), (torch.randn(rows, width), torch.randn(rows, width))


def by_hand(setting: Setting, num_microbatches: int) -> Callable[[], None]:
    model, optimizer, (x, y) = setting
    rows = len(x) // num_microbatches

    def step() -> None:
        for micro in zip(x.split(rows), y.split(rows), strict=True):
            (mean_loss(model, micro) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wrapped(setting: Setting, num_microbatches: int, on_oom: Literal["raise", "exact"]) -> Callable[[], object]:
    model, optimizer, batch = setting
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=num_microbatches, on_oom=on_oom)
    return lambda: trainer.train_step(batch, mean_loss)


def measure_overhead(width: int, rows: int, num_steps: int, num_microbatches: int) -> dict[str, float]:
    def seconds_of_a_step(step: Callable[[], object]) -> float:
        return seconds_of(lambda: [step() for _ in range(num_steps)]) / num_steps

    hand: list[float] = []
    extra: dict[str, list[float]] = {"raise": [], "exact": []}
    for _ in range(NETWORKS):
        setting = make(width, rows * num_microbatches)
        steps = {
            "by hand": by_hand(setting, num_microbatches),
            "raise": wrapped(setting, num_microbatches, "raise"),
            "exact": wrapped(setting, num_microbatches, "exact"),
        }
        for step in steps.values():  # the first, second, fourth, … split batches are checked
            for _ in range(WARM_UP):
                step()
        seconds = in_turns(steps, ROUNDS, seconds_of_a_step)
        hand.append(statistics.median(seconds["by hand"]))
        for name, found in extra.items():
            found.append(statistics.median(a - b for a, b in zip(seconds[name], seconds["by hand"], strict=True)))
    us = 1e6 / num_microbatches
    row = {"by_hand_us_per_microbatch": us * statistics.mean(hand)}
    for name, found in extra.items():
        row |= {
            f"{name}_us_per_microbatch": us * statistics.mean(found),
            f"{name}_standard_error_us": us * statistics.stdev(found) / len(found) ** 0.5,
            f"{name}_ratio": 1 + statistics.mean(found) / statistics.mean(hand),
        }
    return row


def count_host_reads(loss_fn: Callable[[nn.Module, Any], Any], **settings: Any) -> int:
    """Reads of a warm step of four micro-batches."""
    model, optimizer, batch = make(16, 8)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=4, **settings)
    for _ in range(2):  # the first and the second split batch are checked
        trainer.train_step(batch, loss_fn)
    with HostReads() as reads:
        trainer.train_step(batch, loss_fn)
    return reads.num_reads


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    overhead = {
        f"{size} x {num}": measure_overhead(width, rows, num_timed // num, num)
        for size, (width, rows, num_timed) in SIZES.items()
        for num in MICROBATCHES
    }
    host_reads = {
        "mean loss": count_host_reads(mean_loss),
        "mean loss, clipping": count_host_reads(mean_loss, max_grad_norm=1.0),
        "mk.Loss(sum, count tensor)": count_host_reads(summed_loss),
        "fp16 scaler": count_host_reads(mean_loss, precision="fp16-mixed"),
    }
    for name, row in overhead.items():
        print(f"{name:26} {row}")
    print(host_reads)
    print(write_result("wrapper_overhead", {"overhead": overhead, "host_reads": host_reads}))


if __name__ == "__main__":
    main()
