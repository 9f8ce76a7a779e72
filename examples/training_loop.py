"""A whole training on real data: handwritten digits, a schedule, validation, early stopping, and a stop in the middle.

The same training runs twice: once in one go, and once stopped by SIGTERM in the middle of an epoch and gone on with by
new objects. Both end with the same weights, bit by bit. Needs scikit-learn, for its data.

Run: pip install -c constraints.txt -e ".[test]" && python examples/training_loop.py [--smoke]
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import memkit as mk


def load() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """1,797 images of 8 x 8 pixels: 1,500 to train on, 297 to validate on."""
    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(classes))
    train, val = random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))
    return train, val


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def figures_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, object]:
    """One row for each row of the batch; the loop averages them."""
    scores = model(batch[0])
    return {"loss": F.cross_entropy(scores, batch[1], reduction="none"), "accuracy": (scores, batch[1])}


def train(folder: Path, num_epochs: int, stop_at: int | None = None) -> tuple[mk.recipes.LoopResult, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10)),
    )
    train_data, val_data = load()
    train_loader = mk.train.make_dataloader(train_data, batch_size=64, shuffle=True, num_workers=0)
    val_loader = mk.train.make_dataloader(val_data, batch_size=64, num_workers=0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(train_loader))
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, scheduler=schedule, max_grad_norm=1.0)

    def stopping_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if loop.num_steps == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does before it takes the machine
        return loss_fn(model, batch)

    with mk.TrainingStateManager(folder, keep=2) as state:
        loop = mk.MemoryEfficientTrainLoop(
            trainer,
            train_loader,
            stopping_loss,
            val_loader=val_loader,
            val_fn=figures_of,
            reducers={"accuracy": mk.recipes.Accuracy()},
            monitor=mk.ValidationMonitor(patience=3, mode="max", metric="accuracy"),
            state=state,
            report_every=25,
            progress=False,
        )
        return loop.run(num_epochs), model


def main() -> None:
    parser = argparse.ArgumentParser(description="A training loop that can be stopped at any time.")
    parser.add_argument("--smoke", action="store_true", help="two epochs only")
    num_epochs = 2 if parser.parse_args().smoke else 8
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        print("in one go")
        whole, expected = train(Path(folder) / "whole", num_epochs)
        print("\nstopped in the second epoch")
        stopped, _ = train(Path(folder) / "stopped", num_epochs, stop_at=30)
        print(f"{stopped.ended_by} after {stopped.num_steps} steps\n\ngone on with")
        resumed, model = train(Path(folder) / "stopped", num_epochs)

    is_same = all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    print(f"\naccuracy {whole.validation['accuracy']:.3f} in one go, {resumed.validation['accuracy']:.3f} with a stop")
    print(f"{resumed.num_steps} steps in both: {resumed.num_steps == whole.num_steps}; same weights: {is_same}")


if __name__ == "__main__":
    main()
