"""Children killed by SIGKILL at random instants, most of them while they save: memkit and others under the same kills.

A training saves after every micro-batch and is killed up to 0.15 seconds after it has restored. What is counted:
states that could not be read, states that were saved and are gone, weights that differ from those of a training that
nobody stopped, and files that are left over in the end. The temporary directory is on another file system; for
Lightning, which writes there first, also on the same one.

Run: python -m benchmarks.cases.kill_nine [kills]   (300 kills each, 6 minutes; needs accelerate and lightning)
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.fabric import Fabric

from benchmarks.result import write_result
from tests.recipes.state_worker import Memkit, MemkitBackground, Things, kill_many

OTHER_FILE_SYSTEM = Path("/dev/shm")


class TorchSave:
    """One file, written over; with the random state, as a careful user does."""

    lag = 0

    def __init__(self, directory: Path, things: Things) -> None:
        self.path, self.objects = directory / "state.pt", things.objects()

    def save(self, step: int) -> None:
        states = {name: each.state_dict() for name, each in self.objects.items()}
        self.write({"step": step, "random": torch.get_rng_state(), **states})

    def restore(self) -> int | None:
        self.path.parent.mkdir(exist_ok=True)
        if not self.path.exists():
            return None
        state = self.read()
        for name, each in self.objects.items():
            each.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        return state["step"]

    def close(self) -> None:
        """Nothing is under way."""

    def write(self, state: dict[str, Any]) -> None:
        torch.save(state, self.path)

    def read(self) -> dict[str, Any]:
        return torch.load(self.path, weights_only=True)


class Lightning(TorchSave):
    def __init__(self, directory: Path, things: Things) -> None:
        super().__init__(directory, things)
        self.fabric = Fabric(accelerator="cpu", devices=1)

    def write(self, state: dict[str, Any]) -> None:
        self.fabric.save(self.path, state)

    def read(self) -> dict[str, Any]:
        return self.fabric.load(self.path)


class Accelerate:
    """`save_state` into numbered folders, of which two are kept."""

    lag = 0

    def __init__(self, directory: Path, things: Things) -> None:
        self.folder = directory / "checkpoints"
        project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        objects = things.objects()
        self.accelerator.prepare(objects["model"], objects["optimizer"])
        self.accelerator.register_for_checkpointing(*(objects[key] for key in ("scheduler", "accumulator", "loader")))

    def save(self, step: int) -> None:
        self.accelerator.project_configuration.iteration = step
        self.accelerator.save_state()

    def restore(self) -> int | None:
        numbers = [int(path.name.rpartition("_")[2]) for path in self.folder.glob("*")]
        if not numbers:
            return None
        self.accelerator.load_state(str(self.folder / f"checkpoint_{max(numbers)}"))
        return max(numbers)

    def close(self) -> None:
        """Nothing is under way."""


WAYS = {
    "memkit": (Memkit, True),
    "memkit, in the background": (MemkitBackground, True),
    "torch.save": (TorchSave, True),
    "Lightning": (Lightning, True),
    "Lightning, temporary files on the same file system": (Lightning, False),
    "accelerate": (Accelerate, True),
}


def main() -> None:
    logging.disable(logging.WARNING)  # accelerate tells of each folder that it removes
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    figures = {}
    for name, (way, elsewhere) in WAYS.items():
        with (
            tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
            tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM if elsewhere else Path.cwd()) as temporary,
        ):
            tempfile.tempdir = temporary
            figures[name] = kill_many(way, Path(folder), num_kills)
            figures[name]["temporary_files_left"] = len(list(Path(temporary).iterdir()))
            tempfile.tempdir = None
        print(name, figures[name])
    print(write_result("kill_nine", figures, peers=("lightning", "accelerate")))


if __name__ == "__main__":
    main()
