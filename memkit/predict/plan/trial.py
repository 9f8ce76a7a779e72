"""One way to arrange a step, tried on fake tensors: what it holds at its peak, and how long its operators take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._gradients.loss import LossFn
from memkit._recorder.recording import Recording
from memkit._simulation.simulation import MakeOptimizer, Place, Record, Simulation, optimizer_maker, simulate
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.plan.operations import StepTimes
from memkit.predict.plan.speeds import Speeds

PlannedTreatment = Literal["selective", "full", "offload"]
_NUMBERS_BYTES = 64  # Python numbers in tensors, which a dry run does not see
# What treating a block takes in Python for each of its operators, in launches: as measured on tiny blocks on a CPU.
_PYTHON_LAUNCHES: dict[PlannedTreatment, int] = {"selective": 35, "full": 20, "offload": 5}


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How to take a step.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        accumulation_steps: Micro-batches per optimizer step.
        precision: As for `MemoryEfficientTrainingWrapper`.
        treatments: What is done with each treated block: names and treatments.
    """

    micro_batch_size: int
    accumulation_steps: int
    precision: str | None
    treatments: tuple[tuple[str, PlannedTreatment], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What treating a block is expected to do.

    Attributes:
        saved_bytes: What it takes off a micro-batch's saved activations.
        seen_seconds: What operators it adds to a step, which a trial with the treatment has.
        unseen_seconds: What else it adds.
    """

    saved_bytes: int
    seen_seconds: float
    unseen_seconds: float

    @property
    def seconds(self) -> float:
        """What it adds to a step."""
        return self.seen_seconds + self.unseen_seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of an arrangement.

    Attributes:
        arrangement: The arrangement.
        estimate: What the planned step holds at its peak.
        required_bytes: What must fit, with what kernels may take inside, and on the CPU the random state that the step
            and its treated blocks keep.
        seconds: What its operators take.
        block_costs: What each treatment of each block would save and cost, where the micro-batches are these.
    """

    arrangement: Arrangement
    estimate: MemoryEstimate
    required_bytes: int
    seconds: float
    block_costs: Mapping[str, Mapping[PlannedTreatment, BlockCost]]


# Takes the whole batch, and runs the first two micro-batches of it at most: a third finds what the second finds, but
# for what each leaves until the end of the step (its loss). Returns how many bytes that is.
TrainStep: TypeAlias = Callable[[Any, LossFn], int]
# Gives the training step of an arrangement for the block.
Arrange: TypeAlias = Callable[[nn.Module, Optimizer, Arrangement], AbstractContextManager[TrainStep]]


class _Recorded(NamedTuple):
    """A planned step as it was recorded, and how many bytes each micro-batch leaves until its end."""

    record: Record
    trace: StepTimes
    left_bytes: int
    device_type: str


@dataclass(frozen=True)
class StepTrials:
    """The user's step, and where it is rehearsed.

    Attributes:
        blocks: Modules that can be treated, by name.
        kept_operators: Those whose results a "selective" block keeps.
        num_rows: Rows of the batch.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer
    selected_fraction: float | None
    make_place: Callable[[], Place]
    arrange: Arrange
    speeds: Speeds
    blocks: Mapping[str, nn.Module]
    kept_operators: frozenset[Any]
    num_rows: int

    def run(self, arrangement: Arrangement, plain: Trial | None = None) -> Trial:
        """Run two steps as arranged on fake tensors, and record the second.

        Args:
            arrangement: How.
            plain: The trial of the same micro-batches without treatments; None where there are none.
        """
        record, trace, left_bytes, device_type = self._record(arrangement)
        estimate = MemoryEstimate.of(record)
        num_run = min(2, arrangement.accumulation_steps)
        required_bytes = estimate.required_bytes + (arrangement.accumulation_steps - num_run) * left_bytes
        if device_type == "cpu":
            required_bytes += torch.get_rng_state().nbytes * (1 + len(arrangement.treatments)) + _NUMBERS_BYTES
        seconds = self._seconds(trace.parts, arrangement)
        if plain is None:
            costs = self._block_costs(trace, record.recording, arrangement)
            return Trial(arrangement, estimate, required_bytes, seconds, costs)
        seconds += sum(plain.block_costs[name][treatment].unseen_seconds for name, treatment in arrangement.treatments)
        return Trial(arrangement, estimate, required_bytes, seconds, plain.block_costs)

    def _record(self, arrangement: Arrangement) -> _Recorded:
        place = self.make_place()
        simulation = Simulation(place, selected_fraction=self.selected_fraction)
        names = {block: name for name, block in self.blocks.items()}

        def run(model: nn.Module, given: Any, loss_fn: LossFn, batch: Any) -> _Recorded:
            optimizer = optimizer_maker(given)(model.parameters())
            with self.arrange(model, optimizer, arrangement) as train_step:
                for watch in simulation.passes():
                    trace = StepTimes(self.speeds, names, self.kept_operators)
                    with trace if watch.is_recording else nullcontext(), watch:
                        watch.hold(model, batch)
                        left_bytes = train_step(batch, _announced(loss_fn, trace))
            return _Recorded(watch.record(), trace, left_bytes, place.device_type)

        return simulate("plan_training", simulation, (self.model, self.optimizer, self.loss_fn, self.batch), run)

    def _seconds(self, parts: Sequence[float], arrangement: Arrangement) -> float:
        before, *micro_batches, after = parts
        num_steps = arrangement.accumulation_steps
        share = self.num_rows / (num_steps * arrangement.micro_batch_size)  # the last ones may be smaller
        return before + after + share * (micro_batches[0] + (num_steps - 1) * micro_batches[-1])

    def _block_costs(
        self, trace: StepTimes, recording: Recording, arrangement: Arrangement
    ) -> dict[str, dict[PlannedTreatment, BlockCost]]:
        costs: dict[str, dict[PlannedTreatment, BlockCost]] = {}
        num_run = min(2, arrangement.accumulation_steps)
        scale = arrangement.accumulation_steps / num_run
        for name, (saved_bytes, kept_bytes) in self._saved_bytes(recording).items():
            forward = trace.forwards[name]
            seen = {"selective": forward.light_seconds, "full": forward.seconds, "offload": 0.0}
            moving = {"selective": 0.0, "full": 0.0, "offload": 2 * saved_bytes / self.speeds.link_bandwidth}
            saved = {  # a block that runs again needs its inputs
                "selective": saved_bytes - kept_bytes,
                "full": max(0, saved_bytes - forward.input_bytes),
                "offload": saved_bytes,
            }
            python_seconds = forward.num_operators * self.speeds.operator_seconds
            costs[name] = {
                treatment: BlockCost(
                    saved_bytes=saved[treatment] // num_run,
                    seen_seconds=scale * seen[treatment],
                    unseen_seconds=scale * (moving[treatment] + launches * python_seconds),
                )
                for treatment, launches in _PYTHON_LAUNCHES.items()
            }
        return costs

    def _saved_bytes(self, recording: Recording) -> dict[str, tuple[int, int]]:
        """What each block's forward keeps for its backward: all of it, and what selective treatment leaves there."""
        saved = dict.fromkeys(self.blocks, (0, 0))
        kept_names = {str(each) for each in self.kept_operators}
        for storage in recording.storages():
            owner = next((name for name in saved if f"{storage.module}.".startswith(f"{name}.")), None)
            if owner is not None and storage.category == "activation":
                saved_bytes, kept_bytes = saved[owner]
                kept_bytes += storage.nbytes if storage.operator in kept_names else 0
                saved[owner] = saved_bytes + storage.nbytes, kept_bytes
        return saved


def _announced(loss_fn: LossFn, trace: StepTimes) -> LossFn:
    """A loss that says when a micro-batch begins."""

    def announced(model: Any, micro_batch: Any) -> Any:
        trace.begin_part()
        return loss_fn(model, micro_batch)

    return announced
