"""Activations on the disk: peak memory, exactness and time against the plain step, and how well byte budgets are kept.

Activations are the allocator's events of forward and backward above their start, without the gradients of parameters,
which are there from the step before. The file is new and lies in the page cache: a disk that is slower than memory and
a cache that is full cost more time.

A budget is kept when, right after the forward, no more than it stays beside the loss; the whole peak is compared with
the budget and the peak of a budget of none, which is what single operators need.

Run: python -m benchmarks.cases.activation_offload   (4 minutes)
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.result import write_result
from memkit.train.offload import offload_activations
from tests.allocations import trace_allocations

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)
ROUNDS = 5
Context = contextlib.AbstractContextManager[Any]


def mlp(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)))


def transformer(depth: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def convolutions(depth: int, width: int) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(depth)
    ]
    return nn.Sequential(*blocks)


CASES = {
    "mlp, 16 blocks": (lambda: mlp(16, 512), (2048, 512)),
    "mlp, 32 blocks": (lambda: mlp(32, 256), (2048, 256)),
    "transformer, 8 layers": (lambda: transformer(8, 128), (8, 128, 128)),
    "transformer, 16 layers": (lambda: transformer(16, 128), (8, 64, 128)),
    "convolutions, 16 blocks": (lambda: convolutions(16, 16), (4, 16, 48, 48)),
}


class Run:
    """One model and batch, whose gradients are there already."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        build, shape = CASES[name]
        self.model, self.x = build(), torch.randn(shape)
        self.step(contextlib.nullcontext())

    def forward(self, context: Context) -> torch.Tensor:
        torch.manual_seed(1)
        with context:
            return self.model(self.x).square().mean()

    def step(self, context: Context) -> None:
        self.forward(context).backward()

    def gradients(self, context: Context) -> list[torch.Tensor]:
        self.model.zero_grad()
        self.step(context)
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def peak(self, context: Context) -> int:
        return trace_allocations(lambda: self.step(context)).peak

    def kept(self, context: Context) -> int:
        losses: list[torch.Tensor] = []
        return int(trace_allocations(lambda: losses.append(self.forward(context))).live[-1]) - 4


def measure(name: str) -> dict[str, Any]:
    run = Run(name)
    offload = offload_activations(to="disk", model=run.model)
    expected = [gradient.clone() for gradient in run.gradients(contextlib.nullcontext())]
    saved_bytes, plain_peak, floor = (
        run.kept(contextlib.nullcontext()),
        run.peak(contextlib.nullcontext()),
        run.peak(offload),
    )
    seconds: dict[str, list[float]] = {"plain": [], "offload": []}
    wall: dict[str, list[float]] = {"plain": [], "offload": []}
    for _ in range(ROUNDS):
        for how, context in (("plain", contextlib.nullcontext()), ("offload", offload)):
            start, began = time.process_time(), time.perf_counter()
            run.step(context)
            seconds[how].append(time.process_time() - start)
            wall[how].append(time.perf_counter() - began)
    budgets = []
    for share in SHARES:
        budget = int(share * saved_bytes)
        limited = offload_activations(to="disk", model=run.model, budget=budget, min_bytes=1024)
        kept, peak = run.kept(limited), run.peak(limited)
        budgets.append(
            {"budget_bytes": budget, "kept_bytes": kept, "peak_bytes": peak}
            | {"is_kept": kept <= budget + small_bytes(run), "peak_is_within": peak <= budget + floor}
            | {"bit_equal": all(map(torch.equal, run.gradients(limited), expected))}
        )
    return {
        "saved_bytes": saved_bytes,
        "plain_peak_bytes": plain_peak,
        "offload_peak_bytes": floor,
        "times_lower": plain_peak / floor,
        "bit_equal": all(map(torch.equal, run.gradients(offload), expected)),
        "cpu_time_ratio": statistics.median(b / a for a, b in zip(seconds["plain"], seconds["offload"], strict=True)),
        "wall_time_ratio": statistics.median(b / a for a, b in zip(wall["plain"], wall["offload"], strict=True)),
        "budgets": budgets,
    }


def small_bytes(run: Run) -> int:
    """Bytes of saved tensors below 1 KiB, which do not count."""
    small: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < 1024:
            small[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    run.forward(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
    return sum(small.values())


def main() -> None:
    torch.set_num_threads(1)
    cases = {}
    for name in CASES:
        cases[name] = measure(name)
        print(name, cases[name])
    budgets = [budget for case in cases.values() for budget in case["budgets"]]
    shares = {key: sum(budget[key] for budget in budgets) / len(budgets) for key in ("is_kept", "peak_is_within")}
    print(write_result("activation_offload", {"cases": cases, "num_budgets": len(budgets)} | shares))


if __name__ == "__main__":
    main()
