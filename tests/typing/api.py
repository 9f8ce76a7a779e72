"""The public API as users type it: checked by mypy --strict, never run."""

from __future__ import annotations

import torch
from torch import nn

import memkit as mk


def accumulate(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    acc = mk.GradientAccumulator(optimizer, steps=4, max_grad_norm=1.0, scaler=None, model=None)
    for x, y in batches:
        acc.backward((model(x) - y).pow(2).mean(), count=len(x))
        if acc.step():
            scheduler.step()
    return acc.flush()


def scaled(model: nn.Module) -> mk.GradientAccumulator:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return mk.GradientAccumulator(optimizers, scaler=torch.amp.GradScaler(), accumulate_dtype=torch.float32)


def sizes() -> tuple[int, str]:
    return mk.parse_bytes("24GiB"), mk.format_bytes(2**30)
