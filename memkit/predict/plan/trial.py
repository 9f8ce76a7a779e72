"""Trials of one way to arrange a step on fake tensors: its peak memory, and the time of its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import InputError
from memkit._gradients.loss import LossFn, call_loss_fn
from memkit._recorder.recording import IntArray, Recording
from memkit._simulation.simulation import (
    MakeOptimizer,
    Place,
    Record,
    SimulatedTensors,
    Simulation,
    Watch,
    is_own,
    note_others,
    noting_failures,
    optimizer_maker,
    simulate,
)
from memkit._tape.notes import ForwardNotes, noting_calls
from memkit._tape.plan import ForwardCounts, SavedTensorPlan
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.plan.operations import StepTimes
from memkit.predict.plan.speeds import OperatorTimes, num_flops
from memkit.predict.plan.tensors import TensorChoices

PlannedTreatment = Literal["selective", "full", "offload"]
_FEW_PARTS = 2  # A third starts from the same memory as the second, except for what each one keeps (its loss).
_MOST_PARTS = 64  # of a batch whose parts differ: each is run
_NUMBERS_BYTES = 64  # Python numbers in tensors, which a dry run does not see
# Python overhead of treating a block, in launches: per block and per operator in it, as measured in steps on a CPU.
_PYTHON_LAUNCHES: dict[PlannedTreatment, tuple[int, int]] = {
    "selective": (420, 5),
    "full": (280, 2),
    "offload": (0, 5),
}
_MOVE_LAUNCHES = 8  # for each tensor that is moved
# For each saved tensor under a plan, each operator under a tape, and each that runs again: in times of a dispatch mode
# that only follows an operator.
_SAVE_FOLLOWING, _TAPE_FOLLOWING, _RERUN_FOLLOWING = 1.0, 1.2, 4.5


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way to run a step.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        accumulation_steps: Micro-batches per optimizer step.
        precision: As for `MemoryEfficientTrainingWrapper`.
        treatments: Name and treatment of each treated block.
        tensors: What to do with each saved tensor; None keeps them.
    """

    micro_batch_size: int
    accumulation_steps: int
    precision: str | None
    treatments: tuple[tuple[str, PlannedTreatment], ...] = ()
    tensors: SavedTensorPlan | None = None


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Expected savings and cost of treating a block.

    Attributes:
        saved_bytes: Reduction of a micro-batch's saved activations.
        seen_seconds: Time of the operators it adds to a step, which a trial with the treatment includes.
        unseen_seconds: Other time it adds.
    """

    saved_bytes: int
    seen_seconds: float
    unseen_seconds: float

    @property
    def seconds(self) -> float:
        """Total time it adds to a step."""
        return self.seen_seconds + self.unseen_seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of trying an arrangement.

    Attributes:
        arrangement: The arrangement.
        estimate: Memory of the planned step at its peak.
        required_bytes: Bytes that must fit, including scratch memory inside kernels, copies that the first step keeps,
            and on the CPU the random state that the step and its treated blocks keep. On a card, all that the
            allocator would like to hold, or only what it needs, and what is there beside the step.
        seconds: Time of its operators.
        block_costs: Savings and cost of each treatment of each block, for micro-batches of this size.
        forwards: What its forwards have run or saved, where saved tensors are treated.
        beside_bytes: What this process holds on the card beside the step.
        first_step_bytes: The copies that the first step keeps.
    """

    arrangement: Arrangement
    estimate: MemoryEstimate
    required_bytes: int
    seconds: float
    block_costs: Mapping[str, Mapping[PlannedTreatment, BlockCost]]
    forwards: frozenset[ForwardCounts] = frozenset()
    beside_bytes: int = 0
    first_step_bytes: int = 0


class StepBytes(NamedTuple):
    """Bytes that the allocations of a planned step do not show.

    Attributes:
        left: Bytes that each micro-batch keeps until the end of the step.
        first_step: Bytes that the first step needs beside what later ones do.
    """

    left: int
    first_step: int


# Takes the whole batch and runs its first micro-batches.
TrainStep: TypeAlias = Callable[[Any, LossFn], StepBytes]


class Arrange(Protocol):
    """Provides the training step of an arrangement within a ``with`` block; it runs at most so many micro-batches."""

    def __call__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], arrangement: Arrangement, *, most_steps: int
    ) -> AbstractContextManager[TrainStep]:
        """Return the context."""


AroundForward: TypeAlias = Callable[[Watch], AbstractContextManager[Any]]


class _Recorded(NamedTuple):
    """A recorded planned step.

    Attributes:
        record: Its memory.
        trace: Its time.
        num_bytes: See `StepBytes`.
        device_type: Where it ran.
        live: int64, shape ``(num_events + 1,)``: live bytes, by the recorder's count of events.
        highest: The same with scratch memory inside kernels.
        beside_bytes: What this process holds on the card beside the step.
        num_run: Micro-batches that were run.
    """

    record: Record
    trace: StepTimes
    num_bytes: StepBytes
    device_type: str
    live: IntArray
    highest: IntArray
    beside_bytes: int
    num_run: int


@dataclass(frozen=True)
class StepTrials:
    """Tries arrangements of the user's step in a simulation.

    Attributes:
        call: Name of the user's call, for messages.
        blocks: Modules that can be treated, by name.
        kept_operators: Operators whose results a "selective" block keeps.
        may_offload: Whether saved tensors may wait elsewhere.
        num_rows: Rows of the batch.
        frees_cache: Whether only what the allocator needs must fit: when a card has no more, it frees its cache.
        has_unlike_rows: Whether micro-batches of as many rows may differ by their sizes, as lists of samples do.
        held: A card of this machine, and what its allocator holds for this process now: tensors that the step does not
            use, and workspaces of libraries, stay beside it. None if the step is not planned for such a card.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer]
    selected_fraction: float | None
    make_place: Callable[[], Place]
    arrange: Arrange
    speeds: OperatorTimes
    blocks: Mapping[str, nn.Module]
    kept_operators: frozenset[Any]
    may_offload: bool
    num_rows: int
    frees_cache: bool = False
    has_unlike_rows: bool = False
    held: tuple[torch.device, int] | None = None
    call: str = "plan_training"

    def run(self, arrangement: Arrangement, plain: Trial | None = None) -> Trial:
        """Run two steps of an arrangement on fake tensors and record the second.

        Micro-batches of as many rows take the same memory, so the first ones are enough, unless the forward reads
        values of the batch, such as lengths, or the rows have different sizes: then all are run.

        Args:
            arrangement: The arrangement.
            plain: The trial of the same micro-batches without treatments; None if the arrangement has none.
        """
        forwards: list[ForwardCounts] = []
        counting = None if arrangement.tensors is None else lambda _: noting_calls(forwards)
        recorded = self._record(arrangement, counting)
        record, trace, num_bytes, device_type, *_, beside_bytes, num_run = recorded
        estimate = MemoryEstimate.of(record)
        if self._may_differ(recorded) and num_run < arrangement.accumulation_steps:
            doubt = f"micro-batches differ, and only {num_run} of {arrangement.accumulation_steps} were tried"
            estimate = replace(estimate, doubts=(*estimate.doubts, doubt))
        required_bytes = estimate.least_required_interval[1] if self.frees_cache else estimate.required_bytes
        required_bytes += (arrangement.accumulation_steps - num_run) * num_bytes.left + beside_bytes
        required_bytes += num_bytes.first_step
        tensors = arrangement.tensors
        if device_type == "cpu":
            num_states = 1 + len(arrangement.treatments) + (0 if tensors is None else tensors.num_random)
            required_bytes += torch.get_rng_state().nbytes * num_states + _NUMBERS_BYTES
        seconds = self._seconds(trace.parts, arrangement, num_run)
        of_memory = {"beside_bytes": beside_bytes, "first_step_bytes": num_bytes.first_step}
        if plain is None:
            block_costs = self._block_costs(recorded, arrangement)
            return Trial(arrangement, estimate, required_bytes, seconds, block_costs, frozenset(forwards), **of_memory)
        seconds += sum(plain.block_costs[name][treatment].unseen_seconds for name, treatment in arrangement.treatments)
        if tensors is not None:
            if len(set(forwards)) > 1:
                arrangement = replace(arrangement, tensors=replace(tensors, rehearsed=frozenset(forwards)))
            unseen = self.speeds.moving_seconds(tensors.offloaded_bytes)
            unseen += _MOVE_LAUNCHES * len(tensors.offloaded) * self.speeds.operator_seconds
            following = trace.following[num_run]  # of the last micro-batch
            unseen += _SAVE_FOLLOWING * following.mean_seconds * (tensors.last_save or len(tensors.saves))
            if tensors.needs_tape:
                share = tensors.last_operator / len(tensors.operators) if tensors.last_operator else 1.0
                unseen += _TAPE_FOLLOWING * following.seconds * share
                unseen += _RERUN_FOLLOWING * following.mean_seconds * len(tensors.recomputed)
            seconds += arrangement.accumulation_steps * unseen
        costs = plain.block_costs
        return Trial(arrangement, estimate, required_bytes, seconds, costs, frozenset(forwards), **of_memory)

    def tensor_choices(self, arrangement: Arrangement) -> TensorChoices:
        """Return what can be done with the tensors that a micro-batch of an arrangement saves."""
        all_notes: list[ForwardNotes] = []

        def noting(watch: Watch) -> AbstractContextManager[None]:
            all_notes.append(ForwardNotes(watch.recorder.num_events, self.speeds.seconds, num_flops))
            return all_notes[-1].forward()

        recorded = self._record(arrangement, noting)
        # Of the micro-batch that saves most; the last of them, which begins with gradients.
        latest = all_notes[-recorded.num_run :]
        place = max(range(len(latest)), key=lambda each: (latest[each].saved_bytes, each))
        notes, following = latest[place], recorded.trace.following[1 + place]
        for each in notes.operators:
            within = recorded.highest[each.begin : each.end + 1]
            each.scratch_bytes = max(0, int(within.max() - recorded.live[each.end]))
        return TensorChoices(
            notes.operators,
            notes.values,
            notes.saves,
            base=recorded.highest,
            random_state_bytes=torch.get_rng_state().nbytes if recorded.device_type == "cpu" else 0,
            may_offload=self.may_offload,
            moving_seconds=self._moving_seconds,
            operator_seconds=_RERUN_FOLLOWING * following.mean_seconds,
            saving_seconds=_SAVE_FOLLOWING * following.mean_seconds,
            tape_seconds=_TAPE_FOLLOWING * following.seconds / max(1, len(notes.operators)),
        )

    def _moving_seconds(self, num_bytes: int) -> float:
        """Return the time to move a saved tensor of so many bytes elsewhere and back."""
        return self.speeds.moving_seconds(num_bytes) + _MOVE_LAUNCHES * self.speeds.operator_seconds

    def _record(self, arrangement: Arrangement, around: AroundForward | None = None) -> _Recorded:
        """Record a step, with a context around the forward of each of its micro-batches."""
        few = self._record_parts(arrangement, around, _FEW_PARTS)
        is_enough = few.num_run == arrangement.accumulation_steps or not self._may_differ(few)
        return few if is_enough else self._record_parts(arrangement, around, _MOST_PARTS)

    def _may_differ(self, recorded: _Recorded) -> bool:
        """Whether micro-batches of as many rows may take other memory."""
        return self.has_unlike_rows or recorded.record.reads_values

    def _record_parts(self, arrangement: Arrangement, around: AroundForward | None, most_steps: int) -> _Recorded:
        """Record a step of at most so many micro-batches."""
        place = self.make_place()
        simulation = Simulation(place, selected_fraction=self.selected_fraction)
        names = {block: name for name, block in self.blocks.items()}

        def run(model: nn.Module, given: Any, loss_fn: LossFn, batch: Any) -> _Recorded:
            optimizers = optimizer_maker(given)(model.parameters())
            guesses = simulation.tensors.guesses
            num_reads: list[int] = []  # in each forward
            noting = noting_failures(self.call, model, batch, guesses)
            with noting, self.arrange(model, optimizers, arrangement, most_steps=most_steps) as train_step:
                for watch in simulation.passes(optimizers):
                    trace = StepTimes(self.speeds, names, self.kept_operators)
                    with trace if watch.is_recording else nullcontext(), watch:
                        watch.hold(model, batch)
                        watched = loss_fn
                        if around is not None and watch.is_recording:
                            watched = _within(partial(around, watch), loss_fn)
                        noted = _noting_reads(watched, simulation.tensors, num_reads, has_own_optimizers=is_own(given))
                        num_bytes = train_step(batch, _announced(noted, trace))
            num_run = min(most_steps, arrangement.accumulation_steps)
            if len(trace.parts) == 1 + num_run:
                self._refuse_idle_step()
            events = watch.recorder.events_since(0)
            beside_bytes = 0
            if self.held is not None:
                device, held_bytes = self.held
                beside_bytes = max(0, held_bytes - simulation.tensors.block_bytes(device))
            return _Recorded(
                replace(watch.record(), reads_values=any(num_reads)),
                trace,
                num_bytes,
                place.device_type,
                events.live,
                events.highest(),
                beside_bytes,
                num_run,
            )

        return simulate(self.call, simulation, (self.model, self.optimizer, self.loss_fn, self.batch), run)

    def _refuse_idle_step(self) -> NoReturn:
        raise InputError(
            f"{self.call}(...)",
            got="a step that trains nothing: no parameter of the optimizer got a gradient from the loss",
            expected="a loss computed from the optimizer's parameters, which require gradients before and after it",
            fix="compute the loss from them, and unfreeze them before this call rather than in loss_fn: "
            "model.requires_grad_(True).",
        )

    def _seconds(self, parts: Sequence[float], arrangement: Arrangement, num_run: int) -> float:
        num_steps = arrangement.accumulation_steps
        if num_run == num_steps:
            return sum(parts)
        micro_batches, others = parts[1 : num_run + 1], (parts[0], *parts[num_run + 1 :])
        share = self.num_rows / (num_steps * arrangement.micro_batch_size)  # the last ones may be smaller
        return sum(others) + share * (micro_batches[0] + (num_steps - 1) * micro_batches[-1])

    def _block_costs(
        self, recorded: _Recorded, arrangement: Arrangement
    ) -> dict[str, dict[PlannedTreatment, BlockCost]]:
        costs: dict[str, dict[PlannedTreatment, BlockCost]] = {}
        recording, trace, num_run = recorded.record.recording, recorded.trace, recorded.num_run
        scale = arrangement.accumulation_steps / num_run
        for name, (saved_bytes, kept_bytes) in self._saved_bytes(recording).items():
            forward = trace.forwards[name]
            seen = {"selective": forward.light_seconds, "full": forward.seconds, "offload": 0.0}
            moving = {"selective": 0.0, "full": 0.0, "offload": self.speeds.moving_seconds(saved_bytes)}
            saved = {  # a block that runs again needs its inputs
                "selective": saved_bytes - kept_bytes,
                "full": max(0, saved_bytes - forward.input_bytes),
                "offload": saved_bytes,
            }
            launches = {
                treatment: num_run * per_block + forward.num_operators * per_operator
                for treatment, (per_block, per_operator) in _PYTHON_LAUNCHES.items()
            }
            costs[name] = {
                treatment: BlockCost(
                    saved_bytes=saved[treatment] // num_run,
                    seen_seconds=scale * seen[treatment],
                    unseen_seconds=scale * (moving[treatment] + number * self.speeds.operator_seconds),
                )
                for treatment, number in launches.items()
                if self.may_offload or treatment != "offload"
            }
        return costs

    def _saved_bytes(self, recording: Recording) -> dict[str, tuple[int, int]]:
        """Bytes that each block's forward saves for its backward: in total, and under selective treatment."""
        saved = dict.fromkeys(self.blocks, (0, 0))
        kept_names = {str(each) for each in self.kept_operators}
        for storage in recording.storages():
            owner = next((name for name in saved if f"{storage.module}.".startswith(f"{name}.")), None)
            if owner is not None and storage.category == "activation":
                saved_bytes, kept_bytes = saved[owner]
                kept_bytes += storage.nbytes if storage.operator in kept_names else 0
                saved[owner] = saved_bytes + storage.nbytes, kept_bytes
        return saved


def _within(context: Callable[[], AbstractContextManager[Any]], loss_fn: LossFn) -> LossFn:
    """Wrap a loss function so that each micro-batch runs within a context."""

    def within(model: Any, micro_batch: Any) -> Any:
        with context():
            return call_loss_fn(loss_fn, model, micro_batch, call="loss_fn(model, sample_batch)")

    return within


def _noting_reads(
    loss_fn: LossFn, tensors: SimulatedTensors, num_reads: list[int], *, has_own_optimizers: bool
) -> LossFn:
    """Wrap a loss function so that it notes how many values of the batch it reads, such as lengths.

    It also notes what it trains besides the model, unless the optimizers are the user's own.
    """

    def noting(model: Any, micro_batch: Any) -> Any:
        guesses = tensors.guesses
        num_before = guesses.num_true
        loss = call_loss_fn(loss_fn, model, micro_batch, call="loss_fn(model, sample_batch)")
        num_reads.append(guesses.num_true - num_before)
        if not has_own_optimizers:
            note_others(loss.value, model, micro_batch, tensors)
        return loss

    return noting


def _announced(loss_fn: LossFn, trace: StepTimes) -> LossFn:
    """Wrap a loss function so that it announces each micro-batch."""

    def announced(model: Any, micro_batch: Any) -> Any:
        trace.begin_part()
        return call_loss_fn(loss_fn, model, micro_batch, call="loss_fn(model, sample_batch)")

    return announced
