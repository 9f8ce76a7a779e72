"""A real step on the CPU with all allocator events, compared with the dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from memkit._gradients.loss import Loss, detached
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import Recording
from memkit._recorder.workspace import WorkspaceMarks
from memkit._simulation.simulation import Host, Record, TrainingStep, hold
from memkit.predict.estimate import MemoryEstimate
from tests.allocations import trace_allocations
from tests.predict.step import Step

# Python numbers that C++ wraps in tensors, inside of operators and for the backward.
NUMBERS = 64


def dry_run(step: Step) -> Record:
    return TrainingStep(
        step.model, step.batch, step.loss_fn, step.optimizer, step.precision, step.accumulation_steps
    ).record(Host())


def estimate_of(step: Step) -> MemoryEstimate:
    return MemoryEstimate.of(dry_run(step))


def real_step(step: Step):
    """The plain loop that the estimate is about, after its first steps: RAdam's take less memory up to the fifth."""
    run = plain_step(step)
    for _ in range(6 if step.optimizer == "radam" else 1):
        run()
    return run


def plain_step(step: Step):
    """A step of the plain loop."""
    named = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "nadam": torch.optim.NAdam,
             "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax}  # fmt: skip
    optimizers = step.optimizer if isinstance(step.optimizer, list) else [step.optimizer]
    if not isinstance(optimizers[0], torch.optim.Optimizer):
        optimizers = [named.get(each, each)(step.model.parameters()) for each in optimizers]

    def run():
        outputs = []
        for _ in range(step.accumulation_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=step.precision is not None):
                loss = step.loss_fn(step.model, step.batch)
            if isinstance(loss, Loss):
                outputs.append(detached(loss.outputs))
                loss = loss.average()
            if step.accumulation_steps > 1:
                loss = loss / step.accumulation_steps
            loss.backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()

    return run


def allocated_peak(run: Callable[[], object], model: nn.Module, batch: Any) -> int:
    """Most bytes of the allocator during a step, with the model and the batch."""
    with Recorder() as recorder:
        hold(recorder, model, batch)
        run()
    there_before = sum(storage.nbytes for storage in recorder.recording().storages() if not storage.operator)
    return there_before + trace_allocations(run).peak


def levels(recording: Recording) -> list[int]:
    """Live bytes at each turning point: what dies together (autocast's copies) may die in any order."""
    timeline = recording.timeline()
    turns = np.flatnonzero(np.sign(recording.event_bytes[1:]) != np.sign(recording.event_bytes[:-1]))
    return [*timeline[turns].tolist(), recording.live_bytes()]


def assert_equals_the_real_step(
    make_step: Callable[[], Step], *, is_other_order: bool = False, draws: str = ""
) -> None:
    """Live bytes at every turning point, the peak by module and category, and the interval around the workspace.

    Args:
        make_step: Makes the same step each time.
        is_other_order: Blocks may die in another order than in the real step.
        draws: The function of NumPy whose numbers the step draws: the only guess.
    """
    step = make_step()
    run = real_step(step)
    with Recorder(marks=WorkspaceMarks()) as truth:
        hold(truth, step.model, step.batch)
        run()
    real = truth.live_recording()

    step = make_step()
    record = dry_run(step)
    fake = record.recording
    if not is_other_order:
        assert fake.peak_by("module") == real.peak_by("module")
        if step.accumulation_steps <= 2:
            assert levels(fake) == levels(real)
    assert fake.peak_bytes() == real.peak_bytes()
    assert fake.peak_by("category") == real.peak_by("category")

    predicted = MemoryEstimate.of(record)
    assert predicted.guesses == ((f"1 x draws from {draws}",) if draws else ())
    low, high = predicted.peak_interval
    assert low == real.peak_bytes()
    assert low <= truth.recording().peak_bytes() <= high + NUMBERS
