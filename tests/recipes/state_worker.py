"""A training that is killed at random instants and started again, in forked children of a process that only imports.

Each child restores, trains and saves after every step. It notes a checksum of the weights after each step: all of them
must be those of a training that nobody stopped.

Run: python -m tests.recipes.state_worker <directory> <number of kills> <seed>   (prints one line of JSON)
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
import zlib
from array import array
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from memkit.recipes.order import ResumableBatchSampler, ResumableLoader
from memkit.recipes.state.manager import TrainingStateManager
from memkit.train.accumulate import GradientAccumulator

ROWS, BATCH, HIDDEN = 60, 8, 1024
LONGEST_S = 0.15  # from the end of a child's restore to its kill, at most
UNREADABLE = 3  # exit status


class Things:
    """All objects of a training; ``steps`` micro-batches make one optimizer step."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, 10)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.accumulator = GradientAccumulator(self.optimizer, steps)
        order = ResumableBatchSampler(ROWS, BATCH, seed=7)
        rows = torch.randn(ROWS, 64), torch.arange(ROWS) % 10
        data = torch.utils.data.TensorDataset(*rows)
        self.loader = ResumableLoader(DataLoader(data, batch_sampler=order, generator=torch.Generator()))

    def objects(self):
        return vars(self)

    def run(self, step):
        """Train on one micro-batch after the other, from ``step`` on; yield the number of those that are done."""
        for epoch in range(self.loader.epoch, sys.maxsize):
            self.loader.set_epoch(epoch)
            for x, y in self.loader:
                self.accumulator.backward(F.cross_entropy(self.model(x), y), count=len(x))
                if self.accumulator.step():
                    self.scheduler.step()
                step += 1
                yield step

    def digest(self):
        crc = 0
        for value in self.model.state_dict().values():
            crc = zlib.crc32(value.numpy(), crc)
        return crc


class Way(Protocol):
    """How states are saved and restored; made anew in each child."""

    lag: int  # how many saves may not be on the disk yet when `save` returns

    def __init__(self, directory: Path, things: Things) -> None: ...
    def save(self, step: int) -> None: ...
    def restore(self) -> int | None: ...
    def close(self) -> None: ...


class Memkit:
    lag, background = 0, False

    def __init__(self, directory, things):
        self.objects = things.objects()
        self.manager = TrainingStateManager(directory, keep=2, background=self.background)

    def save(self, step):
        self.manager.save(step, metric=-step, **self.objects)

    def restore(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a state that was passed over is one that could not be read
            return self.manager.restore(**self.objects)

    def close(self):
        self.manager.close()


class MemkitBackground(Memkit):
    lag, background = 1, True


class Child:
    """A child process that trains until it is killed, or for some steps."""

    def __init__(self, way, directory, log, steps, num_steps):
        # Whether it has restored, which step; whether it is saving; the last step whose state is on the disk.
        self.shared = memoryview(mmap.mmap(-1, 32)).cast("q")
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            status = self._train(way, directory, log, steps, num_steps)
        except BaseException:  # noqa: BLE001 - nothing may leave a forked child
            traceback.print_exc()
        finally:
            os._exit(status)

    def _train(self, way, directory, log, steps, num_steps):
        things = Things(steps)
        states = way(directory, things) if way else None
        try:
            start = (states.restore() if states else None) or 0
        except Exception:  # noqa: BLE001 - whatever it is, the state cannot be used
            return UNREADABLE
        with log.open("a") as file:
            file.write(f"{start} {things.digest()}\n")
            file.flush()
            self.shared[:2] = array("q", [start, 1])
            for step in things.run(start):
                file.write(f"{step} {things.digest()}\n")
                file.flush()
                if states:
                    self.shared[2] = 1
                    states.save(step)
                    self.shared[2:] = array("q", [0, step - states.lag])
                if step - start == num_steps:
                    break
        if states:
            states.close()
        return 0

    def exit_status(self, options=0):
        pid, status = os.waitpid(self.pid, options)
        return os.waitstatus_to_exitcode(status) if pid else None


def read_log(log):
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]  # a kill may have torn one


def kill_many(way, folder, num_kills, *, seed=0, steps=3):
    """Kill ``num_kills`` children, let a last one make ten steps, and compare all with a training left alone.

    Args:
        way: A `Way`.
        folder: An empty folder.
        steps: Micro-batches per optimizer step.

    Returns:
        Counts, and whether all weights were those of the training that nobody stopped.
    """
    torch.set_num_threads(1)
    Things(steps)  # what the first optimizer imports, the children need not
    chance = random.Random(seed)
    states, log = folder / "states", folder / "log"
    in_save = unreadable = lost = last_saved = 0
    for _ in range(num_kills):
        child = Child(way, states, log, steps, sys.maxsize)
        status = None
        while status is None and not child.shared[1]:
            time.sleep(0.001)
            status = child.exit_status(os.WNOHANG)
        if status is not None:
            if status != UNREADABLE:
                raise RuntimeError(f"the child ended with {status}")
            unreadable += 1
            shutil.rmtree(states)  # all that a user can do: begin anew
            last_saved = 0
            continue
        lost += child.shared[0] < last_saved
        time.sleep(chance.uniform(0, LONGEST_S))
        os.kill(child.pid, signal.SIGKILL)
        child.exit_status()
        in_save += child.shared[2]
        last_saved = max(child.shared[0], child.shared[3])
    last = Child(way, states, log, steps, 10).exit_status()
    seen = read_log(log)
    reference = folder / "reference"
    Child(None, states, reference, steps, max(step for step, _ in seen)).exit_status()
    expected = dict(read_log(reference))
    return {
        "kills": num_kills,
        "kills_in_save": in_save,
        "unreadable": unreadable + (last == UNREADABLE),
        "lost_saves": lost,
        "steps": max(expected),
        "other_weights": sum(digest != expected[step] for step, digest in seen),
        "entries_after_last_save": sorted(path.name for path in states.glob("*")),
    }


if __name__ == "__main__":
    print(json.dumps(kill_many(Memkit, Path(sys.argv[1]), int(sys.argv[2]), seed=int(sys.argv[3]))))
