"""Exact gradient accumulation against the usual one, on real text: the standard library's own source files.

Each line of code is one row; lines have different lengths, so micro-batches have different numbers of characters, and
the data does not divide into whole groups. Both loops train the same small model from the same start, and each
group's gradient is compared with that of the whole group in one batch.

Run: python examples/exact_accumulation.py [--smoke]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk

IGNORED = -100
MICRO_BATCH, STEPS = 8, 4  # 8 lines per micro-batch, 4 micro-batches per optimizer step


def read_lines(num_lines: int, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Read lines of Python as bytes: inputs and next-byte targets (N, T), targets padded with -100."""
    source = (Path(argparse.__file__).parent / "argparse.py").read_bytes().splitlines()
    lines = [line[: width + 1] for line in source if len(line) > 1][:num_lines]
    inputs = torch.zeros(len(lines), width, dtype=torch.long)
    targets = torch.full((len(lines), width), IGNORED)
    for row, line in enumerate(lines):
        codes = torch.tensor(list(line)).clamp(max=127)
        inputs[row, : len(codes) - 1] = codes[:-1]
        targets[row, : len(codes) - 1] = codes[1:]
    return inputs, targets


class CharModel(nn.Module):
    """A causal one-layer GRU over characters: (N, T) -> logits (N, T, 128)."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, channels)
        self.rnn = nn.GRU(channels, channels, batch_first=True)
        self.head = nn.Linear(channels, 128)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(codes))[0])


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def train(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], *, exact: bool) -> list[float]:
    """Train one epoch; return each group's gradient error against the whole group in one batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    errors: list[float] = []
    group: list[torch.Tensor] = []

    def compare(*_: object) -> None:  # called by the optimizer just before it steps
        got, rows = flat_gradient(model), torch.cat(group)
        whole = copy.deepcopy(model)
        whole.zero_grad()
        mean_loss(whole, data[0][rows], data[1][rows]).backward()
        want = flat_gradient(whole)
        errors.append(((got - want).norm() / want.norm()).item())
        group.clear()

    optimizer.register_step_pre_hook(compare)
    micro_batches = torch.arange(len(data[0])).split(MICRO_BATCH)
    if exact:
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=STEPS)
        for rows in micro_batches:
            group.append(rows)
            inputs, targets = data[0][rows], data[1][rows]
            accumulator.backward(mean_loss(model, inputs, targets), count=(targets != IGNORED).sum())
            accumulator.step()
        accumulator.flush()
    else:  # what most loops do
        for i, rows in enumerate(micro_batches, start=1):
            group.append(rows)
            (mean_loss(model, data[0][rows], data[1][rows]) / STEPS).backward()
            if i % STEPS == 0 or i == len(micro_batches):
                optimizer.step()
                optimizer.zero_grad()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact gradient accumulation against the usual one.")
    parser.add_argument("--smoke", action="store_true", help="a few groups only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = CharModel().double()
    data = read_lines(70 if arguments.smoke else 1000)
    print(f"{len(data[0])} lines of argparse.py, micro-batches of {MICRO_BATCH}, {STEPS} per optimizer step\n")
    print(f"{'':22}{'gradient error, median':>24}{'largest':>10}{'last group':>12}{'loss after':>12}")
    for name, exact in (("usual: loss / steps", False), ("memkit", True)):
        model = copy.deepcopy(start)
        errors = train(model, data, exact=exact)
        with torch.no_grad():
            loss = mean_loss(model, *data).item()
        median = sorted(errors)[len(errors) // 2]
        print(f"{name:22}{median:24.1e}{max(errors):10.1e}{errors[-1]:12.1e}{loss:12.4f}")
    print("\nThe error is |gradient - gradient of the whole group in one batch| / |that|, in float64.")


if __name__ == "__main__":
    main()
