"""Losses whose gradient is computed inside the forward: time and allocator peak against what one would write instead.

Two problems. A mean squared error over 50,000 rows through an MLP. And a linear layer with cross-entropy over a large
vocabulary, against torch's own chunked operator and Liger's method, whose algorithm is repeated here in plain torch, as
its kernels need a GPU. One step is forward and backward; all modes take turns, and a ratio is the median over rounds.

Run: python -m benchmarks.cases.chunked_loss   (2 minutes)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio, seconds_of
from benchmarks.twins import differences
from memkit.chunk.cross_entropy import choose_chunk_size, chunked_linear_cross_entropy
from memkit.chunk.loss import chunked_loss
from tests.allocations import trace_allocations

NUM_ROWS = 50_000
CHUNK_SIZE = 2048
ROUNDS = 5
IGNORED = 0.7  # share of the tokens whose targets are ignored, as prompts are where a model learns to answer
MUST = (1024, 128, 32_000)
SIZES = [MUST, *((t, h, v) for v in (1000, 32_000) for t in (256, 1024, 4096) for h in (128, 512) if (t, h, v) != MUST)]

Loss = Callable[[], Tensor]
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def row_losses() -> tuple[dict[str, Loss], list[Tensor]]:
    """The MLP 6 -> 128 -> 128 -> 128 -> 64 and its error over all rows."""
    widths = (6, 128, 128, 128, 64)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(NUM_ROWS, 6), torch.randn(NUM_ROWS, 64)
    chunks = list(zip(x.split(CHUNK_SIZE), y.split(CHUNK_SIZE), strict=True))

    def errors(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y, reduction="none")

    def part_sum(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y, reduction="sum")

    losses = {
        "plain": lambda: F.mse_loss(model(x), y),
        "loop over chunks": lambda: sum(part_sum(a, b) for a, b in chunks) / y.numel(),
        "checkpoint per chunk": lambda: (
            sum(checkpoint(part_sum, a, b, use_reentrant=False) for a, b in chunks) / y.numel()
        ),
        "memkit": lambda: chunked_loss(errors, x, y, chunk_size=CHUNK_SIZE, params=model.parameters()),
    }
    return losses, list(model.parameters())


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets)


def part_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets, reduction="sum")


def loop(x: Tensor, weight: Tensor, targets: Tensor, *, rows: int, recompute: bool) -> Tensor:
    part = functools.partial(checkpoint, part_cross_entropy, use_reentrant=False) if recompute else part_cross_entropy
    parts = zip(x.split(rows), targets.split(rows), strict=True)
    return sum(part(a, weight, b) for a, b in parts) / (targets != -100).sum()


def torchs(x: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None, policy: str = "auto") -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    if rows is not None:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None, acc_policy=policy)
    return F.linear_cross_entropy(x, weight, targets, options=options)


class LigersMethod(torch.autograd.Function):
    """Gradients in the forward, the mean's factor inside, one multiplication in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        of_x, of_weight, total = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        count = (targets != -100).sum()
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = x[part] @ weight.t()
            is_counted = (targets[part] != -100)[:, None]
            index = targets[part].clamp(min=0)[:, None]
            expected = logits.gather(1, index)
            highest = logits.amax(1, keepdim=True)
            normalizer = logits.sub_(highest).exp_().sum(1, keepdim=True)
            total += (normalizer.log() + highest - expected).masked_fill(~is_counted, 0).sum() / count
            logits.mul_(is_counted / (normalizer * count))
            logits.scatter_add_(1, index, -(is_counted / count))
            of_x[part] = logits @ weight
            torch.addmm(of_weight, logits.t(), x[part], out=of_weight)
        ctx.gradients = of_x, of_weight
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.gradients
        del ctx.gradients
        if bool(upstream != 1):
            of_x.mul_(upstream), of_weight.mul_(upstream)
        return of_x, of_weight, None, None


def ligers_rows(num_rows: int, width: int, num_classes: int) -> int:
    """Liger's rule: as many chunks as the vocabulary is wider than the hidden state, rounded to a power of two."""
    rows = -(-num_rows // -(-num_classes // width))
    return 1 << max(rows - 1, 0).bit_length()


def head_losses(size: tuple[int, int, int], rows: int) -> dict[str, HeadLoss]:
    ours = {"plain": plain, "memkit": chunked_linear_cross_entropy}
    at_our_size: dict[str, HeadLoss] = {
        "torch, memkit's rows": functools.partial(torchs, rows=rows),
        "torch compact, memkit's rows": functools.partial(torchs, rows=rows, policy="compact"),
        "Liger's method, memkit's rows": lambda x, w, t: LigersMethod.apply(x, w, t, rows),
    }
    if size != MUST:
        return ours | at_our_size
    others: dict[str, HeadLoss] = {
        "memkit, torch's memory": functools.partial(chunked_linear_cross_entropy, chunk_size=2 * rows),
        "memkit, Liger's rows": functools.partial(chunked_linear_cross_entropy, chunk_size=ligers_rows(*size)),
        "loop over chunks": functools.partial(loop, rows=rows, recompute=False),
        "checkpoint per chunk": functools.partial(loop, rows=rows, recompute=True),
        "torch, its own rows": functools.partial(torchs, rows=None),
        "Liger's method, its own rows": lambda x, w, t: LigersMethod.apply(x, w, t, ligers_rows(*size)),
    }
    return ours | at_our_size | others


def measure(losses: dict[str, Loss], leaves: list[Tensor], rounds: int) -> dict[str, dict[str, float]]:
    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    def seconds_of_loss(loss: Loss) -> float:
        clear()
        return seconds_of(lambda: loss().backward())

    seconds = in_turns(losses, rounds, seconds_of_loss)
    figures, gradients = {}, {}
    for name, loss in losses.items():
        clear()
        peak = trace_allocations(lambda loss=loss: loss().backward()).peak
        gradients[name] = [leaf.grad.double() for leaf in leaves]
        figures[name] = {
            "peak_bytes": peak,
            "time_ratio": median_ratio(seconds[name], seconds["plain"]),
            "time_over_memkit": median_ratio(seconds[name], seconds["memkit"]),
            "gradient_difference": max(differences(gradients[name], gradients["plain"])),
        }
    return figures


def measure_head(size: tuple[int, int, int], ignored: float = 1 / 7) -> dict[str, object]:
    num_rows, width, num_classes = size
    x = torch.randn(num_rows, width, requires_grad=True)
    weight = (torch.randn(num_classes, width) * 0.02).requires_grad_()
    targets = torch.randint(num_classes, (num_rows,))
    targets[torch.arange(num_rows) * ignored % 1 < ignored] = -100
    rows = choose_chunk_size(num_rows, num_classes, width, itemsize=4)
    losses = {name: functools.partial(loss, x, weight, targets) for name, loss in head_losses(size, rows).items()}
    is_large = num_rows * width * num_classes > 6e9
    modes = measure(losses, [x, weight], 2 if is_large else ROUNDS)
    return {
        "rows": num_rows,
        "width": width,
        "num_classes": num_classes,
        "chunk_rows": rows,
        "ligers_rows": ligers_rows(*size),
        "gradient_bytes": x.nbytes + weight.nbytes,
        "modes": modes,
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {"rows": measure(*row_losses(), ROUNDS), "cross_entropy": [measure_head(size) for size in SIZES]}
    figures["prompts ignored"] = measure_head(MUST, IGNORED)
    for name, row in figures["rows"].items():
        print(f"{name:32} {row}")
    for each in (*figures["cross_entropy"], figures["prompts ignored"]):
        print({key: value for key, value in each.items() if key != "modes"})
        for name, row in each["modes"].items():
            print(f"    {name:32} {row}")
    print(write_result("chunked_loss", figures))


if __name__ == "__main__":
    main()
