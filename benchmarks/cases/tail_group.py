"""The gradient of the last, incomplete group: 52 samples, micro-batches of 4, 4 per step, so the last group has one.

Each library accumulates in its own documented way; what the optimizer is handed is divided by the gradient of the same
samples in one batch. 1 is right.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.tail_group
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from benchmarks.result import write_result

SAMPLES, MICRO_BATCH, STEPS = 52, 4, 4


def make() -> tuple[nn.Module, DataLoader, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    loader = DataLoader(TensorDataset(torch.randn(SAMPLES, 3, dtype=torch.float64)), batch_size=MICRO_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[torch.Tensor] = []
    return model, loader, optimizer, seen


def record(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[torch.Tensor]) -> None:
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def plain() -> list[torch.Tensor]:
    model, loader, optimizer, seen = make()
    record(model, optimizer, seen)
    for i, (x,) in enumerate(loader, start=1):
        (loss_of(model, x) / STEPS).backward()
        if i % STEPS == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return seen


def memkit() -> list[torch.Tensor]:
    model, loader, optimizer, seen = make()
    record(model, optimizer, seen)
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=STEPS)
    for (x,) in loader:
        accumulator.backward(loss_of(model, x), count=len(x))
        accumulator.step()
    accumulator.flush()
    return seen


def accelerate() -> list[torch.Tensor]:
    from accelerate import Accelerator

    model, loader, optimizer, seen = make()
    record(model, optimizer, seen)
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def lightning() -> list[torch.Tensor]:
    import lightning as pl

    model, loader, optimizer, seen = make()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return loss_of(self.model, batch[0])

        def on_before_optimizer_step(self, _: object) -> None:  # after the closure that holds the backward
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_epochs=1,
        accumulate_grad_batches=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)
    return seen


def ratios(run: Callable[[], list[torch.Tensor]]) -> dict[str, float]:
    gradients = run()
    model, loader, _, _ = make()
    groups = torch.cat([x for (x,) in loader]).split(MICRO_BATCH * STEPS)
    assert len(groups) == len(gradients)
    norms = []
    for got, group in zip(gradients, groups, strict=True):
        model.zero_grad()
        loss_of(model, group).backward()
        norms.append((got.norm() / torch.cat([p.grad.flatten() for p in model.parameters()]).norm()).item())
    return {"whole_groups_mean_ratio": sum(norms[:-1]) / len(norms[:-1]), "last_group_ratio": norms[-1]}


def main() -> None:
    warnings.simplefilter("ignore")
    figures = {run.__name__: ratios(run) for run in (plain, accelerate, lightning, memkit)}
    for name, row in figures.items():
        print(
            f"{name:12} whole groups {row['whole_groups_mean_ratio']:.12f}   last group {row['last_group_ratio']:.12f}"
        )
    print(write_result("tail_group", figures, peers=("accelerate", "lightning")))


if __name__ == "__main__":
    main()
