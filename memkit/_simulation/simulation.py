"""A step on tensors without data: the place it runs in, its recording, and the result.

A `Place` is the CPU or a simulated GPU: it makes tensors without data and models the memory beneath them. A
`Simulation` runs the user's code there, a `Watch` records a part of it, and a `Record` holds its memory use. `simulate`
is the entry point for running a user's step: nothing that the step makes outlives it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitError, StateError, warn_user
from memkit._core.protocols import SimulatedGpu
from memkit._gradients.closures import refuse_closure
from memkit._gradients.loss import LossFn, call_loss_fn, detached
from memkit._machine import random_state
from memkit._machine.devices import allocator_settings
from memkit._recorder.attributes import Attributes
from memkit._recorder.recorder import UNSHARD, Recorder, StepPosition
from memkit._recorder.recording import Recording
from memkit._simulation.ctc import ctc_loss
from memkit._simulation.cuda.allocator import AllocatorSettings, CachingAllocator
from memkit._simulation.cuda.answers import answer_patches
from memkit._simulation.cuda.history import History
from memkit._simulation.cuda.memory import CudaMemory
from memkit._simulation.cuda.tensors import CudaTensors, on_cuda
from memkit._simulation.draws import Draws
from memkit._simulation.failures import note_failure
from memkit._simulation.guesses import READING, Guesses
from memkit._simulation.host import INSTEAD, RESULTS, HostKernels
from memkit._simulation.leftovers import Patches, Shared, leaving_nothing
from memkit._simulation.tensors import Tensors, copy_without_data, keeps_parameters, makes_one_hot, pads_packed
from memkit._torch.compiler import running_eagerly
from memkit._torch.cuda import Rules, rules_of
from memkit._torch.dispatch import fake_mode, no_dispatch
from memkit._torch.fake import FakeTensor, without_fake_log
from memkit._torch.graph import graph_behind
from memkit._torch.modules import APPLY, PAD_PACKED, rnn_functions
from memkit._torch.optimizers import skip_early_steps
from memkit._torch.pytree import children_of, tree_leaves
from memkit._torch.ranks import is_sharded

T = TypeVar("T")
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
_UNLIMITED = 2**60
_PRECISIONS = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


# ----------------------------------------------------------------------------------------------- places


class AllocatorFigures(NamedTuple):
    """An allocator's own figures.

    Attributes:
        allocated_bytes: Peak of allocated bytes.
        reserved_bytes: Peak of reserved bytes if memory is plentiful.
        find_least: Finds the least that it must be able to reserve: when memory runs short, it frees cached blocks.
        find_range: Finds the least and most that it reserves, for any amount held by libraries.
        context_interval: Least and most bytes outside the allocator.
        gpu: Name of the GPU.
        total_bytes: Memory of the GPU.
        convolves: Whether a convolution or a recurrent layer ran whose scratch memory is not fully known.
    """

    allocated_bytes: int
    reserved_bytes: int
    find_least: Callable[[], int]
    find_range: Callable[[], tuple[int, int]]
    context_interval: tuple[int, int]
    gpu: str
    total_bytes: int
    convolves: bool


class Place(Protocol):
    """Where steps are simulated."""

    @property
    def device_type(self) -> str:
        """Device type as autocast takes it."""

    @property
    def needs_warmup(self) -> bool:
        """Whether a step's memory depends on the previous step, as with an allocator that caches."""

    def make_tensors(self, selected_fraction: float | None) -> SimulatedTensors:
        """Make the mode that provides stand-ins for the user's tensors."""

    def make_recorder(self) -> Recorder:
        """Make the recorder of a block."""

    def active(self, tensors: Any) -> AbstractContextManager[Sequence[Patches]]:
        """Set up everything around these tensors; yield the patches to torch."""

    def figures(self) -> AllocatorFigures | None:
        """Return the allocator's figures for the latest recorder's block; None without an allocator."""


class SimulatedTensors(Protocol):
    """A place's stand-ins for the user's tensors: `memkit._simulation.tensors.Tensors`, or copies with data."""

    guesses: Guesses

    def standing_in(self, *values: Any, holders: Iterable[object] = ()) -> AbstractContextManager[tuple[Any, ...]]:
        """Replace the tensors that values and holders hold by stand-ins; see `StandIns.put`."""

    def was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor that a step meets was there before it."""

    def survivors(self) -> list[Tensor]:
        """Return the live tensors that must not outlive the simulation."""

    def block_bytes(self, device: torch.device) -> int:
        """Return what the allocator of an accelerator holds for the tensors that have stand-ins here."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> Any: ...


class Host:
    """The CPU."""

    device_type = "cpu"
    needs_warmup = False

    def make_tensors(self, selected_fraction: float | None) -> Tensors:
        """Make tensors without data on the CPU."""
        return Tensors(selected_fraction, results=RESULTS, instead=INSTEAD)

    def make_recorder(self) -> Recorder:
        """Make a recorder that knows the scratch memory of CPU kernels."""
        return Recorder(beneath=HostKernels())

    def active(self, tensors: Tensors) -> AbstractContextManager[Sequence[Patches]]:  # noqa: ARG002 - interface
        """Set up nothing: every machine has a CPU."""
        return nullcontext(())

    def figures(self) -> None:
        """Return None: the CPU's allocator keeps no statistics."""


class Gpu:
    """A simulated GPU.

    Args:
        card: The GPU.
        capacity_bytes: Its capacity. None: unlimited, so that a step that does not fit still runs to the end.
        settings: Settings of the allocator, "" for torch's own; None: those of this process's environment.
        rules: Rules of the simulated PyTorch version; None for the installed one.
        has_history: Whether the allocator's actions are kept.

    Attributes:
        memory: Memory of its tensors.
    """

    device_type = "cuda"
    needs_warmup = True

    def __init__(
        self,
        card: SimulatedGpu,
        *,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | str | None = None,
        rules: Rules | None = None,
        has_history: bool = False,
    ) -> None:
        is_limited = capacity_bytes is not None
        settings = _settings_here() if settings is None else settings
        allocator = CachingAllocator(
            _UNLIMITED if capacity_bytes is None else capacity_bytes,
            other_bytes=card.context_bytes if is_limited else 0,
            settings=settings,
        )
        history = History(allocator, f"{card.vendor} {card.name}") if has_history else None
        self._card, self._rules = card, rules or rules_of()
        self.memory = CudaMemory(card, allocator, self._rules, history)

    def make_tensors(self, selected_fraction: float | None) -> CudaTensors:
        """Make tensors without data on the GPU."""
        return CudaTensors(selected_fraction)

    def make_recorder(self) -> Recorder:
        """Make a recorder that the GPU's memory model follows."""
        recorder = Recorder(beneath=self.memory)
        self.memory.begin(recorder)
        return recorder

    def active(self, tensors: CudaTensors) -> AbstractContextManager[Sequence[Patches]]:
        """Make ``cuda`` mean this GPU."""
        answers = answer_patches(self._card, self.memory, tensors)
        return on_cuda(tensors, self._card.compute_capability or (0, 0), self._rules, answers)

    def figures(self) -> AllocatorFigures:
        """Return the peaks of allocated and reserved bytes since the latest recorder began."""
        allocator = self.memory.allocator
        return AllocatorFigures(
            allocator.peak_allocated_bytes,
            allocator.peak_reserved_bytes,
            self.memory.least_reserved(),
            self.memory.reserved_range(),
            self._card.context_interval,
            self._card.name,
            self._card.total_bytes,
            self.memory.convolves,
        )


def _settings_here() -> AllocatorSettings | str:
    """Return the allocator's settings in this process's environment; torch's own, with a warning, if not simulated."""
    name, text = next(((name, text) for name, text in allocator_settings().items() if text.strip()), ("", ""))
    try:
        return AllocatorSettings.parse(text) if text else ""
    except ConfigError as error:
        warn_user(
            f"What a GPU's allocator reserves is predicted without {name}={text!r}: got {error.got}, expected "
            f"{error.expected}. What is allocated barely depends on that, what is reserved and needed does. Way out: "
            "leave the variable out, or measure on the GPU."
        )
        return ""


# ------------------------------------------------------------------------------------------- simulations


def _reading() -> list[Patches]:
    values = {name: make(getattr(FakeTensor, name)) for name, make in READING.items()}
    converting = {APPLY: keeps_parameters(getattr(nn.Module, APPLY))}
    padding = {PAD_PACKED: pads_packed(getattr(rnn_functions, PAD_PACKED))}
    return [
        Patches(FakeTensor, "numbers that code reads from tensors without data are guessed and counted", values),
        Patches(FakeTensor, "tensors without data are copied", {"__deepcopy__": copy_without_data}),
        Patches(nn.Module, "modules convert parameters without data as those with data", converting),
        Patches(rnn_functions, "lengths of packed rows have data", padding),
        Patches(functional, "one-hot tensors are made as with data", {"one_hot": makes_one_hot(functional.one_hot)}),
        Patches(functional, "CTC loss reads its lengths", {"ctc_loss": ctc_loss}),
    ]


reading = Shared(_reading)
# It checks for fake tensors, and builds masks for them that it would otherwise leave out.
TRANSFORMERS_UTILS = "transformers.utils.import_utils"


class Simulation:
    """Runs the user's code in a place.

    Args:
        place: The place to run in.
        selected_fraction: As for `memkit.estimate_memory_usage`.

    Attributes:
        place: The place to run in.
        tensors: Stand-ins for the user's tensors.
        note_draws: Notes random numbers that could not be followed.
    """

    def __init__(self, place: Place, *, selected_fraction: float | None = None) -> None:
        self.place = place
        self.tensors = place.make_tensors(selected_fraction)
        self.note_draws: Callable[[], None] = lambda: None

    @contextmanager
    def running(self, *values: Any, holders: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Simulate within the block, with stand-ins for the tensors that values and holders hold.

        Yields:
            The values.
        """
        with (
            reading(),
            self.place.active(self.tensors),
            running_eagerly(self.tensors.guesses.runs_compiled),
            _fake_check_disabled(),
            without_fake_log(),
            self.tensors.standing_in(*values, holders=holders) as stand_ins,
            self.tensors,
        ):
            yield stand_ins

    def watch(self) -> Watch:
        """Make the watch that records a block from its start."""
        return Watch(self, self.place.make_recorder())

    def passes(self, optimizers: Sequence[Optimizer]) -> Iterator[Watch]:
        """Yield watches for two passes over a step: the first one warms up, the second is recorded.

        Args:
            optimizers: Those of the step. The second pass takes the place of all later ones, the largest included.
        """
        yield self.first_watch()
        for each in optimizers:
            skip_early_steps(each)
        yield self.watch()

    def first_watch(self) -> Watch:
        """Make the watch of the first of two passes: it records only if the allocator needs it."""
        return self.watch() if self.place.needs_warmup else Watch(self, None)


class Watch:
    """Records a block of a simulation, or lets it pass unrecorded.

    Attributes:
        is_recording: Whether it records.
    """

    def __init__(self, simulation: Simulation, recorder: Recorder | None) -> None:
        self._recorder, self.is_recording = recorder, recorder is not None
        self._simulation = simulation
        self._has_gradient: dict[str, bool] = {}  # by the line that calls the optimizer's step
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._recorder is None:
            return self
        with ExitStack() as stack:
            # Register these hooks before the recorder's, whose hook ends the step.
            stack.callback(register_optimizer_step_post_hook(self._note_gradients).remove)
            stack.enter_context(self._recorder)
            stack.callback(register_optimizer_step_pre_hook(self._note_gradients).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    def hold(self, model: nn.Module, batch: Any, gradients: Sequence[Tensor] = ()) -> None:
        """Count the model, the batch and DDP's flat gradients, even if no operator touches them."""
        if self._recorder is not None:
            hold(self._recorder, model, batch, gradients)

    def record(self) -> Record:
        """Return the record of the block."""
        guesses = self._simulation.tensors.guesses
        self._simulation.note_draws()
        recording = self.recorder.recording()
        return Record(
            recording=recording,
            figures=self._simulation.place.figures(),
            highest_bytes=int(self.recorder.events_since(0).bounds.max(initial=0)),
            guesses=tuple(f"{count} x {guess}" for guess, count in guesses.items()),
            doubts=(*guesses.doubts, *self.steps_without_gradients()),
            assumptions=tuple(guesses.assumptions),
            selected_fraction=guesses.selected_fraction,
            caller=str(StepPosition().place().line),
        )

    def steps_without_gradients(self) -> tuple[str, ...]:
        """Return the optimizer steps that never saw a gradient, a sign that the run did not train as intended."""
        return tuple(f"{line}, but no parameter had a gradient" for line, has in self._has_gradient.items() if not has)

    @property
    def recorder(self) -> Recorder:
        """The recorder of the block.

        Raises:
            ValueError: The block is not recorded.
        """
        if self._recorder is None:
            raise ValueError("a block that is not recorded")
        return self._recorder

    def _note_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        has_gradient = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        line = f"{self.recorder.moment().place.line or 'the step'} steps {type(optimizer).__name__}"
        self._has_gradient[line] = self._has_gradient.get(line, False) or has_gradient


def hold(recorder: Recorder, model: nn.Module, batch: Any, gradients: Sequence[Tensor] = ()) -> None:
    """Register a step's initial tensors with a recorder, even if no operator touches them."""
    recorder.label(list(model.parameters()), "parameter")
    recorder.label(list(model.buffers()), "buffer")
    recorder.label(_leaves(batch), "input")
    recorder.label(gradients, "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Memory use of a block of a simulation.

    Attributes:
        recording: Storages, from allocation to free.
        figures: The allocator's figures; None without an allocator.
        highest_bytes: Peak of the live bytes plus the scratch memory that the running kernel may use.
        guesses: Values answered without data: ``"2 x operator at line"``.
        doubts: Why its memory is uncertain; empty if it is certain.
        assumptions: Conditions assumed to hold.
        caller: The line that requested the simulation, which is removed from the recorded source lines.
        reads_values: Whether the forward or backward of a step read values that a tensor has, such as lengths.
        selected_fraction: The share that masks were assumed to select; None if no size depends on such a share.
    """

    recording: Recording
    figures: AllocatorFigures | None
    highest_bytes: int
    guesses: tuple[str, ...]
    doubts: tuple[str, ...]
    assumptions: tuple[str, ...]
    caller: str
    reads_values: bool = False
    selected_fraction: float | None = None

    @property
    def confidence(self) -> Literal["exact", "workspace", "guessed"]:
        """How sure the memory is: see `memkit.predict.MemoryEstimate`."""
        if self.guesses or self.doubts:
            return "guessed"
        return "workspace" if self.workspace_bytes else "exact"

    @property
    def workspace_bytes(self) -> int:
        """How far the peak may rise through scratch memory inside kernels."""
        return max(0, self.highest_bytes - self.recording.peak_bytes())

    @property
    def unsharded_bytes(self) -> int | None:
        """Bytes of parameters gathered from other ranks and live at the peak; None if nothing is sharded."""
        at_peak = self.recording.peak_by("operator").get(UNSHARD, 0)
        return at_peak if UNSHARD in self.recording.names["operator"] else None


def check_not_simulated(call: str) -> None:
    """Refuse a simulation inside another one, whose tensors have no data to make stand-ins of.

    Args:
        call: The user's call, for errors.

    Raises:
        StateError: Operators are simulated now.
    """
    if fake_mode() is not None:
        raise StateError(
            call,
            got="the call inside `with VirtualGPU(...)`, or in a step that another call simulates",
            expected="one simulation at a time",
            fix=f"call {call}(...) before the block or the step, or after it.",
        )


def simulate(
    call: str,
    simulation: Simulation,
    values: Sequence[Any],
    run: Callable[..., T],
    *,
    roots: Sequence[object] | None = None,
) -> T:
    """Run user code in a simulation and restore everything afterwards.

    Args:
        call: The user's call, for errors.
        simulation: The simulation to run in.
        values: The user's objects that hold tensors.
        run: Called with stand-ins for these; its result must not hold tensors.
        roots: Objects whose code is searched for caches; None for the values.

    Raises:
        StateError: Some object holds a tensor without data and cannot be made to release it; or this is called in a
            simulation.
    """
    check_not_simulated(call)
    roots = values if roots is None else roots
    before = Attributes(list(roots), content="saved", gradients_but_of=(), with_optimizers=True)
    # Networks, optimizers and tensors in objects that the loss function holds, which are not among the values.
    holders, draws = before.holders(), Draws(simulation.tensors.guesses)
    simulation.note_draws = lambda: draws.note_unseen(have_others_drawn=before.have_drawn())

    def simulated() -> T:
        with default_modes(), draws.followed(), simulation.running(*values, holders=holders) as stand_ins:
            return run(*stand_ins)

    try:
        return leaving_nothing(call, roots, simulation.tensors, simulated)
    finally:
        before.restore()


@contextmanager
def noting_failures(call: str, model: object, batch: object, guesses: Guesses) -> Iterator[None]:
    """Add a note to an error of the user's code; see `memkit._simulation.failures.note_failure`."""
    try:
        yield
    except Exception as error:
        note_failure(call, error, model, batch, guesses)
        raise


@contextmanager
def default_modes() -> Iterator[None]:
    """Run independently of the caller's modes: gradients enabled, random state restored."""
    with random_state.preserved(), torch.inference_mode(mode=False), torch.enable_grad():
        yield


@contextmanager
def _fake_check_disabled() -> Iterator[None]:
    """Make Transformers, if loaded, take the same path as with real data."""
    utils: Any = sys.modules.get(TRANSFORMERS_UTILS)
    if not hasattr(utils, "is_fake_tensor"):
        yield
        return
    original = utils.is_fake_tensor
    utils.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        utils.is_fake_tensor = original


def _leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch, including those in containers that torch's pytrees do not enter."""
    children = None if isinstance(batch, Tensor) else children_of(batch)
    return [batch] if children is None else [leaf for child in children for leaf in _leaves(child)]


# ------------------------------------------------------------------------------------------ training steps


class RankPart(NamedTuple):
    """One rank's part of a step: its model, its optimizer, and flat gradients that persist between steps.

    Attributes:
        is_all: Whether there is one rank, whose loss trains the model's parameters themselves.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    buckets: Sequence[Tensor]
    is_all: bool = False


Spread: TypeAlias = Callable[
    [nn.Module, "str | MakeOptimizer | Optimizer | Sequence[Optimizer]", str], AbstractContextManager[RankPart]
]


@contextmanager
def in_one_process(
    model: nn.Module,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer],
    device_type: str,  # noqa: ARG001 - interface
) -> Iterator[RankPart]:
    """Run everything in one process."""
    yield RankPart(model, optimizer_maker(optimizer)(model.parameters()), (), is_all=True)


@dataclass(frozen=True)
class TrainingStep:
    """A user's step; the fields are the arguments of `memkit.estimate_memory_usage`."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw"
    precision: str | None = None
    accumulation_steps: int = 1
    selected_fraction: float | None = None

    def record(self, place: Place, *, spread: Spread = in_one_process, call: str = "estimate_memory_usage") -> Record:
        """Run two steps and record the second.

        Args:
            place: The place to run in.
            spread: How the step is distributed over ranks: `in_one_process`, or
                `memkit._simulation.ranks.as_first_rank`.
            call: The user's call, for errors.
        """
        check_model(call, self.model, self.batch, self.optimizer)
        simulation = Simulation(place, selected_fraction=self.selected_fraction)
        guesses = simulation.tensors.guesses

        def run(model: nn.Module, optimizer: Any, loss_fn: LossFn, batch: Any) -> Record:
            with noting_failures(call, model, batch, guesses), spread(model, optimizer, place.device_type) as part:
                with no_dispatch():  # tensors of an object that has no stand-ins are real
                    given = Attributes([batch])
                for watch in simulation.passes(part.optimizers):
                    num_before = guesses.num_true
                    with watch:
                        watch.hold(part.model, batch, part.buckets)
                        num_true = self._run(part, batch, given, loss_fn, place.device_type, simulation.tensors)
            return replace(watch.record(), reads_values=num_true > num_before)

        return simulate(call, simulation, (self.model, self.optimizer, self.loss_fn, self.batch), run)

    def _run(
        self,
        part: RankPart,
        batch: Any,
        given: Attributes,
        loss_fn: LossFn,
        device_type: str,
        tensors: SimulatedTensors,
    ) -> int:
        """Run a step; return how many true values were read before the optimizer reads its own count of steps."""
        outputs: list[Any] = []  # held as long as the result of a real step
        for number in range(self.accumulation_steps):
            if number > 1 and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(outputs)):
                break  # a third micro-batch starts from the same memory as the second
            with no_dispatch():
                given.restore()  # an earlier pass may have left its results in the batch; each real step has its own
            loss, kept = loss_of(part.model, batch, loss_fn, device_type, self.precision)
            if part.is_all and not is_own(self.optimizer):
                note_others(loss, part.model, batch, tensors)
            outputs.append(kept)
            if self.accumulation_steps > 1:
                loss = loss / self.accumulation_steps
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        num_true = tensors.guesses.num_true
        for each in part.optimizers:
            each.step()
        for each in part.optimizers:
            each.zero_grad()
        return num_true


def loss_of(
    model: nn.Module, batch: Any, loss_fn: LossFn, device_type: str, precision: str | None
) -> tuple[Tensor, Any]:
    """Return the mean loss of a batch, and the outputs that a step's result keeps."""
    dtype = None if precision is None else _PRECISIONS[precision]
    with torch.autocast(device_type, dtype) if dtype else nullcontext():
        loss = call_loss_fn(loss_fn, model, batch, call="loss_fn(model, sample_batch)")
    return loss.average(), None if loss.outputs is None else detached(loss.outputs)


def note_others(loss: Tensor, model: nn.Module, batch: Any, tensors: SimulatedTensors) -> None:
    """Note what a loss trains besides the model and the batch, beside an optimizer that has the model's alone."""
    own = {*map(id, model.parameters()), *map(id, _leaves(batch))}
    others = [each for each in graph_behind([loss])[0] if id(each) not in own and tensors.was_there(each)]
    if others:
        tensors.guesses.trains_others(others)


def check_model(call: str, model: object, batch: object = None, optimizer: object = None) -> None:
    """Refuse a model that is not a module or exchanges data with other ranks, and a loader instead of a batch.

    Args:
        call: Name of the user's call.
        model: The value passed as the model.
        batch: The value passed as the sample batch.
        optimizer: The value passed as the optimizer, for the message.

    Raises:
        InputTypeError: ``model`` is not a module, or ``batch`` is a loader.
        InputError: The model is in DistributedDataParallel, or `fully_shard` was called on it.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"{call}({type(model).__name__}, ...)",
            got=f"a {type(model).__name__}",
            expected="a torch.nn.Module as the model",
            fix=_instead_of_a_model(call, model, batch, optimizer),
        )
    if isinstance(batch, DataLoader):
        raise InputTypeError(
            f"{call}(model, sample_batch)",
            got=f"a {type(batch).__name__}",
            expected="one of its batches",
            fix=f"write {call}(model, next(iter(loader)), loss_fn, ...).",
        )
    for name, module in model.named_modules(prefix="model"):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            _refuse_ranks(call, f"{name} in DistributedDataParallel", _for_replicas(call, name))
        if is_sharded(module):
            _refuse_ranks(call, f"{name} after fully_shard", _for_shards(call))


def _refuse_ranks(call: str, got: str, fix: str) -> NoReturn:
    raise InputError(
        f"{call}(model, ...)",
        got=got,
        expected="the model itself: what ranks hold and exchange is not in a run on tensors without data",
        fix=fix,
    )


def _for_replicas(call: str, name: str) -> str:
    """Return the way out for a part of the model that DistributedDataParallel holds."""
    instead = f"{name}.module in place of {name}"
    if call == "prepare":
        return (
            f"write plan = plan_training(model, sample_batch, loss_fn, optimizer, ...) with {instead}, and "
            "MemoryEfficientTrainingWrapper(model, optimizer, **plan.wrapper_settings())."
        )
    ranks = "; with its buckets: shard=Shard('ddp', ranks), in a process without a process group"
    return f"pass {instead}{ranks if call == 'estimate_memory_usage' else ''}."


def _for_shards(call: str) -> str:
    """Return the way out for a model that is sharded."""
    if call in ("prepare", "plan_training"):
        return (
            "write plan = plan_training(model, sample_batch, loss_fn, ..., treat='blocks') before fully_shard, and "
            "MemoryEfficientTrainingWrapper(model, optimizer, **plan.wrapper_settings()) after it."
        )
    ranks = ", with shard=Shard('fsdp2', ranks) in a process without a process group"
    whole = f"call {call} before fully_shard, or build the model again under torch.device('meta')"
    return f"{whole}{ranks if call == 'estimate_memory_usage' else ''}."


def _instead_of_a_model(call: str, model: object, batch: object, optimizer: object) -> str:
    """Return the way out for a value that is not a model."""
    if call == "find_worst_batch":
        return "write find_worst_batch(loader, model, loss_fn)."
    right = f"write {call}(model, "
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"write model = {model.__name__}(...) first, and {call}(model, ...)."
    if isinstance(model, Optimizer) or any(isinstance(each, nn.Module) for each in (batch, optimizer)):
        return f"{right}optimizer, sample_batch, loss_fn, ...)." if call == "prepare" else f"{right}sample_batch, ...)."
    if isinstance(model, (list, tuple)) and any(isinstance(each, nn.Module) for each in model):
        return f"write {call}(torch.nn.ModuleList(models), ...)."
    kinds = {(each.__module__.partition(".")[0], each.__name__) for each in type(model).__mro__}
    if kinds & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")}:
        return f"write {call}(module, ...) with the LightningModule passed to trainer.fit(module)."
    if isinstance(getattr(model, "model", None), nn.Module):  # a trainer of Hugging Face, of memkit, or the user's own
        return f"write {call}(trainer.model, ...)."
    if isinstance(model, Mapping):
        return f"load it into a model, model.load_state_dict(state), and write {call}(model, ...)."
    return f"write {call}(model, ...); several models go into torch.nn.ModuleList([...])."


# ---------------------------------------------------------------------------------------------- optimizers

_NAMES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
}


def _made(kind: MakeOptimizer, parameters: Iterable[Any]) -> Optimizer:
    """Make an optimizer, or refuse a model that has nothing for it."""
    parameters = list(parameters)
    if not parameters:
        raise InputError(
            "a step on tensors without data",
            got="a model without parameters: its optimizer has nothing to train",
            expected="a model that has all trained parameters as its own",
            fix="pass them as one module, torch.nn.ModuleList([model, other]), with a loss_fn that calls both; weights "
            "in buffers or plain attributes are not trained.",
        )
    return kind(parameters)


def is_own(optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer]) -> bool:
    """Return whether these are optimizers of the user's, rather than what to make one by."""
    return isinstance(optimizer, (Optimizer, list, tuple))


def optimizer_maker(
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer],
) -> Callable[[Iterable[nn.Parameter]], list[Optimizer]]:
    """Return a function of the parameters that makes the optimizers; for the user's own it returns these.

    Raises:
        ConfigError: No optimizer has that name.
        InputTypeError: It is not a name, class, factory, optimizer or list of optimizers, or a factory that cannot be
            called with the parameters alone.
    """
    if isinstance(optimizer, (Optimizer, list, tuple)):
        own = _listed(optimizer)
        return lambda _: own
    if isinstance(optimizer, str):
        maker = _NAMES.get(optimizer.lower())
        if maker is None:
            near = difflib.get_close_matches(optimizer.lower(), _NAMES, n=1)
            raise ConfigError(
                f"optimizer={optimizer!r}",
                got=repr(optimizer),
                expected=f"the name of a class in torch.optim: {', '.join(sorted(_NAMES))}",
                fix=(f"did you mean {near[0]!r}? " if near else "")
                + "For any other optimizer pass its class, a function of the parameters, or the optimizer itself.",
            )
        return lambda parameters: [_made(maker, parameters)]
    if not callable(optimizer):
        raise _not_one(f"optimizer={optimizer!r}", f"a {type(optimizer).__name__}")
    call = f"optimizer={getattr(optimizer, '__name__', optimizer)}"

    def make(parameters: Any) -> list[Optimizer]:
        try:
            made: Any = optimizer(parameters)
        except MemkitError:
            raise
        except Exception as error:  # loss_fn, of which notes on other errors speak, has no part in it
            raise InputTypeError(
                call,
                got=f"a function that raises {type(error).__name__} when it is called with the parameters: {error}",
                expected="a function of the parameters, model.parameters(), alone",
                fix="write optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3); or, if it needs the "
                "model, call it yourself and pass its result: optimizer=make_optimizer(model).",
            ) from error
        if not callable(getattr(made, "step", None)):
            raise _not_one(call, f"a function that returns a {type(made).__name__}")
        refuse_closure(made, call, "optimizer='adamw'")
        return [made]

    return make


def _listed(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the user's own optimizers, each of which steps without a closure."""
    own = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for each in own:
        if not isinstance(each, Optimizer):
            raise _not_one("optimizer=[...]", f"a {type(optimizer).__name__} with a {type(each).__name__}")
        refuse_closure(each, f"optimizer={type(each).__name__}(...)", "optimizer='adamw'")
    if not own:
        raise _not_one("optimizer=[]", "no optimizer")
    return own


def _not_one(call: str, got: str) -> InputTypeError:
    return InputTypeError(
        call,
        got=got,
        expected="a name, a class, a function of the parameters that returns one Optimizer, an Optimizer, or a list of "
        "Optimizers",
        fix="pass for example 'adamw', lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), or the optimizers "
        "themselves: optimizer=[first, second].",
    )
