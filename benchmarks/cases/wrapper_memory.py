"""Memory of one training step on a 12-block transformer and a 3D U-Net: plain, and with each of the wrapper's settings.

One counter for all rows: allocator events of a warm step, summed. Activations are what is neither parameter, gradient
nor optimizer state, at their own peak. A batch of 8 rows; a plain step is a hand-written loop without memkit.

Run: python -m benchmarks.cases.wrapper_memory   (6 minutes)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import memkit as mk
from benchmarks.models import Task, transformer, unet
from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio
from memkit.train.split import split_batch
from tests.allocations import mark, trace_allocations

TASKS: dict[str, Callable[..., Task]] = {"transformer": transformer, "unet": unet}
SETTINGS: dict[str, dict[str, Any]] = {
    "wrapper": {},
    "accumulation": {"accumulation_steps": 4},
    "checkpointing": {"checkpoint": "auto"},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulation + checkpointing": {"accumulation_steps": 4, "checkpoint": "auto"},
    "all": {"accumulation_steps": 4, "checkpoint": "auto", "precision": "bf16-mixed"},
}
# The wrapper's first two steps keep a copy of the state, and the first one more set of gradients for unproven sizes.
NUM_WARM_STEPS = 2
ROUNDS = 5


class Run:
    """One training run of a task: plain without settings, else through the wrapper."""

    def __init__(self, task: Task, settings: dict[str, Any] | None) -> None:
        self.task = task
        self.optimizer = task.make_optimizer()
        self.trainer = None
        if settings is not None:
            # The probe of the first split batch is no part of a warm step.
            self.trainer = mk.MemoryEfficientTrainingWrapper(task.model, self.optimizer, probe=False, **settings)

    def step(self) -> None:
        if self.trainer is not None:
            self.trainer.train_step(self.task.batch, self.task.loss_fn)
            return
        self.task.step(self.optimizer)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.trainer.autocast() if self.trainer is not None else contextlib.nullcontext()


def total_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure_peaks(run: Run) -> dict[str, int]:
    """Peaks of a warm step: of everything but the batch, and of the activations and temporary results alone."""
    for _ in range(NUM_WARM_STEPS):
        run.step()
    parameters = list(run.task.model.parameters())
    states = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    state_bytes = total_bytes([*parameters, *run.task.model.buffers(), *states])

    def note_gradient(parameter: nn.Parameter) -> None:
        with mark(f"{id(parameter)} {parameter.grad.nbytes}"):
            pass

    handles = [parameter.register_post_accumulate_grad_hook(note_gradient) for parameter in parameters]
    trace = trace_allocations(run.step)
    for handle in handles:
        handle.remove()
    # A gradient lives from the first backward that makes it to the end of the step.
    made: dict[str, tuple[int, int]] = {}
    for name, _, end in trace.marks:
        key, num_bytes = name.split()
        made.setdefault(key, (end, int(num_bytes)))
    times = np.array([end for end, _ in made.values()])
    gradients = np.concatenate([[0], np.cumsum([num_bytes for _, num_bytes in made.values()])])
    activations = trace.live[1:] - gradients[np.searchsorted(times, trace.times, side="right")]
    return {"peak_bytes": state_bytes + trace.peak, "activation_bytes": int(activations.max())}


def measure_saved_bytes(run: Run) -> int:
    """Bytes that the forward of one micro-batch keeps for its backward, without parameters and batch."""
    parts = run.trainer._accumulation_steps if run.trainer is not None else 1  # noqa: SLF001
    there_before = [*run.task.model.parameters(), *tree_leaves(run.task.batch)]
    own = {t.untyped_storage().data_ptr() for t in there_before}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with run.autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.task.loss_fn(run.task.model, split_batch(run.task.batch, parts)[0][0])
    kept = total_bytes(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in own)
    del loss
    return kept


def measure_flops(run: Run) -> dict[str, int]:
    """Floating-point operations of forward and backward over the whole batch."""
    with run.autocast(), FlopCounterMode(display=False) as counter:
        loss = run.task.loss_fn(run.task.model, run.task.batch)
        forward = counter.get_total_flops()
        loss.backward()
    run.optimizer.zero_grad()
    return {"forward_flops": forward, "backward_flops": counter.get_total_flops() - forward}


def time_ratios(runs: dict[str, Run]) -> dict[str, float]:
    """Processor time over the plain step's, median over rounds."""
    seconds = in_turns({name: run.step for name, run in runs.items()}, ROUNDS)
    return {name: median_ratio(taken, seconds["plain"]) for name, taken in seconds.items()}


def measure(build: Callable[..., Task]) -> dict[str, dict[str, Any]]:
    runs = {"plain": Run(build(), None)} | {name: Run(build(), settings) for name, settings in SETTINGS.items()}
    rows = {
        name: measure_peaks(run) | {"saved_bytes": measure_saved_bytes(run)} | measure_flops(run)
        for name, run in runs.items()
    }
    for name, ratio in time_ratios(runs).items():
        rows[name]["time_ratio"] = ratio
    return rows


def main() -> None:
    torch.set_num_threads(1)
    figures = {}
    for task, build in TASKS.items():
        figures[task] = measure(build)
        for name, row in figures[task].items():
            print(f"{task:12} {name:30} {row}")
    print(write_result("wrapper_memory", figures))


if __name__ == "__main__":
    main()
