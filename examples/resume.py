"""A training that is killed again and again ends with exactly the weights of one that was never stopped.

A small network with dropout learns scikit-learn's 1797 digits, augmented with random noise, in groups of three
micro-batches. It saves its state after every tenth micro-batch. One process runs to its end; the other is killed with
SIGKILL at random instants, and started anew each time.

Run: pip install -c constraints.txt -e ".[test]" && python examples/resume.py [--smoke]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk

BATCH, GROUP, SAVE_EVERY = 32, 3, 10


def train(folder: Path, num_epochs: int) -> None:
    """Begin, or go on where the last state stands; at the end note the loss and a fingerprint of the weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = load_digits()
    dataset = TensorDataset(torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target))
    order = mk.recipes.ResumableBatchSampler(len(dataset), BATCH, seed=0)
    loader = mk.recipes.ResumableLoader(DataLoader(dataset, batch_sampler=order, generator=torch.Generator()))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(loader) // GROUP)
    accumulator = mk.GradientAccumulator(optimizer, GROUP)

    objects = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "accumulator": accumulator,  # in the middle of a group: the gradient so far, and what it weighs
        "loader": loader,  # epoch, and how many of its batches are done
    }
    state = mk.TrainingStateManager(folder / "states", keep=2)
    step = state.restore(**objects) or 0
    with (folder / "starts").open("a") as file:
        file.write(f"{step} ")

    loss = torch.tensor(float("nan"))
    for epoch in range(loader.epoch, num_epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
            accumulator.backward(loss, count=len(x))
            if accumulator.step():
                schedule.step()
            step += 1
            if step % SAVE_EVERY == 0:
                state.save(step, **objects)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    (folder / "result").write_text(f"{loss.item():.6f} {hashlib.sha256(weights).hexdigest()[:16]}")


def run(folder: Path, num_epochs: int, num_kills: int) -> tuple[str, list[str]]:
    """Train in a process that is killed ``num_kills`` times; return its result, and the steps it started from."""
    folder.mkdir()
    chance, processes = random.Random(0), multiprocessing.get_context("spawn")
    for number in range(num_kills + 1):
        process = processes.Process(target=train, args=(folder, num_epochs))
        process.start()
        if number < num_kills:
            while process.is_alive() and len(read_starts(folder)) <= number:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.05, 0.6))
            process.kill()
        process.join()
    return (folder / "result").read_text(), read_starts(folder)


def read_starts(folder: Path) -> list[str]:
    path = folder / "starts"
    return path.read_text().split() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description="A training that survives kill -9.")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs and kills")
    num_epochs, num_kills = (4, 1) if parser.parse_args().smoke else (20, 8)
    with tempfile.TemporaryDirectory() as folder:
        left_alone, _ = run(Path(folder) / "left_alone", num_epochs, 0)
        killed, starts = run(Path(folder) / "killed", num_epochs, num_kills)
    print("             loss     weights")
    print(f"left alone   {left_alone}")
    print(f"killed       {killed}   started from steps {', '.join(starts)}")
    if killed != left_alone:
        raise SystemExit("the two differ")


if __name__ == "__main__":
    main()
