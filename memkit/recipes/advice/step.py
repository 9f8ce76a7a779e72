"""One training step, as it is or changed by a remedy: on tensors without data, or for real on copies.

`observe_step` is the only way to run one, so predictions and measurements go through the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit._gradients.loss import LossFn
from memkit._recorder.attributes import Attributes
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import Recording
from memkit._recorder.workspace import WorkspaceMarks
from memkit._simulation.guesses import Guesses
from memkit._simulation.leftovers import Patches
from memkit._simulation.simulation import (
    MakeOptimizer,
    Place,
    Simulation,
    loss_of,
    noting_failures,
    optimizer_maker,
    simulate,
)
from memkit._simulation.tensors import StandIns, StorageCopies
from memkit._torch.dispatch import LeanDispatchMode, no_dispatch
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.plan.speeds import num_flops
from memkit.train.split import SplitFn
from memkit.train.wrapper import MemoryEfficientTrainingWrapper

AdvicePrecision: TypeAlias = Literal["bf16-mixed"] | None


@dataclass(frozen=True, slots=True)
class Training:
    """The user's training; the fields are the arguments of `memkit.advise`."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer]
    precision: AdvicePrecision
    selected_fraction: float | None
    split_fn: SplitFn | None = None


@dataclass(slots=True)
class AdvisedStep:
    """A step about to run. A remedy changes its fields, and pushes cleanup onto the stack.

    Attributes:
        model: Holds stand-ins; all changes to it are undone afterwards.
        make_optimizers: Called with the parameters once all remedies are applied.
        settings: Settings of the wrapper that runs the step; if empty, a plain loop runs it.
        has_data: Whether the tensors have values.
        split_fn: The wrapper's; None for a batch with rows.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    make_optimizers: Callable[[Iterable[nn.Parameter]], list[Optimizer]]
    precision: AdvicePrecision
    device_type: str
    has_data: bool
    split_fn: SplitFn | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def begin(self, optimizers: Sequence[Optimizer], stack: ExitStack) -> Callable[[], object]:
        """Return a function that runs the whole step once."""
        if not self.settings:
            return lambda: self._run_plainly(optimizers)
        settings: dict[str, Any] = {"precision": self.precision, "split_fn": self.split_fn} | self.settings
        # The probe is for the first batch and not part of a warm step.
        trainer = MemoryEfficientTrainingWrapper(self.model, optimizers, probe=False, **settings)
        stack.callback(trainer.close)
        return lambda: trainer.train_step(self.batch, self.loss_fn)

    def _run_plainly(self, optimizers: Sequence[Optimizer]) -> None:
        loss, _outputs = loss_of(self.model, self.batch, self.loss_fn, self.device_type, self.precision)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()


@dataclass(frozen=True, slots=True)
class Call:
    """How a module was called in a step.

    Attributes:
        shapes: Shapes of its tensor arguments.
        out_shape: Shape of its output; None unless that is a single tensor.
        num_calls: Number of calls in one step.
    """

    shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...] | None
    num_calls: int


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one step.

    Attributes:
        peak_bytes: Peak bytes in live tensors in the warm step.
        allocator_peak_bytes: With data: the same including the kernels' workspace, from the CPU allocator's own events.
        num_flops: Operations of the first step, by torch's counter: matrix products, convolutions, and attention on a
            GPU.
        recording: Recording of the warm step.
        calls: Calls by module name.
        optimizers: The optimizers' classes, each with the settings of its first group.
        estimate: Without data: the peak broken down.
        gradients: With data: gradients of the first step, by parameter name.
        updates: With data: the change of each parameter in the first step, by name.
        draws: With data: whether the step drew random numbers.
    """

    peak_bytes: int
    allocator_peak_bytes: int | None
    num_flops: int
    recording: Recording
    calls: Mapping[str, Call]
    optimizers: Mapping[type[Optimizer], Mapping[str, Any]]
    estimate: MemoryEstimate | None
    gradients: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]
    draws: bool


StepChange: TypeAlias = Callable[[AdvisedStep, ExitStack], None]


def observe_step(training: Training, change: StepChange, make_place: Callable[[], Place]) -> Observation:
    """Run two steps with a change applied, and record the second; the user's objects are restored afterwards.

    Args:
        training: The user's training.
        change: The change that a remedy makes to the step.
        make_place: Where it runs: `Host` and `Gpu` without data, `RealHost` with data.
    """
    simulation = Simulation(make_place(), selected_fraction=training.selected_fraction)
    values = training.model, training.optimizer, training.loss_fn, training.batch
    with noting_failures("advise", training.model, training.batch, simulation.tensors.guesses):
        return simulate("advise", simulation, values, partial(_observe, training, change, simulation))


def _observe(
    training: Training, change: StepChange, simulation: Simulation, model: nn.Module, optimizer: Any, *others: Any
) -> Observation:
    loss_fn, batch = others
    has_data, device_type = isinstance(simulation.place, RealHost), simulation.place.device_type
    first = simulation.first_watch()
    with ExitStack() as stack:
        make = optimizer_maker(optimizer)
        step = AdvisedStep(
            model, batch, loss_fn, make, training.precision, device_type, has_data, split_fn=training.split_fn
        )
        seen = _Seen(model, has_data=has_data)  # before names change
        change(step, stack)
        made = step.make_optimizers(step.model.parameters())
        run = step.begin(made, stack)
        with no_dispatch():  # tensors of an object that has no stand-ins are real
            given = Attributes([step.batch])
        with first:
            first.hold(model, step.batch)
            with Operations() as operations, seen.watching(made):
                run()
        with no_dispatch():
            given.restore()
        second = simulation.watch()
        with second:
            second.hold(model, step.batch)
            run()
    recording = second.recorder.live_recording()
    estimate = None if has_data else MemoryEstimate.of(second.record())
    return Observation(
        peak_bytes=recording.peak_bytes() if estimate is None else estimate.peak_bytes,
        allocator_peak_bytes=second.record().recording.peak_bytes() if has_data else None,
        num_flops=operations.num_flops,
        recording=recording,
        calls=seen.calls,
        optimizers={
            type(each): {name: value for name, value in each.param_groups[0].items() if name != "params"}
            for each in made
        },
        estimate=estimate,
        gradients=seen.gradients,
        updates=seen.updates,
        draws=seen.draws,
    )


class Operations(LeanDispatchMode):
    """Counts floating point operations by torch's formulas.

    torch's own `FlopCounterMode` also tracks modules, which fails if one backward runs inside another (chunks).

    Attributes:
        num_flops: The count so far.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.num_flops += num_flops(func, args, kwargs, out)
        return out


class RealTensors:
    """Copies with data, in CPU memory, that stand in for the user's tensors: operators run normally."""

    def __init__(self) -> None:
        self.guesses = Guesses()  # stays empty: all values are known

    @contextmanager
    def standing_in(self, *values: Any, holders: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Swap the tensors within the block."""
        copies, made = StorageCopies(), dict[int, tuple[Tensor, Tensor]]()

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                copy = copies.view(tensor.detach(), "cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                copy = nn.Parameter(copy) if is_parameter else copy
                made[id(tensor)] = tensor, copy.requires_grad_(tensor.requires_grad)
            return made[id(tensor)][1]

        with StandIns(copied).put(*values, holders=holders) as replaced:
            yield replaced

    def was_there(self, tensor: Tensor) -> bool:
        """Return False: what is trained here is not looked at."""
        del tensor
        return False

    def survivors(self) -> list[Tensor]:
        """Return nothing: these tensors have data, so there are no survivors to look for."""
        return []

    def block_bytes(self, device: torch.device) -> int:
        """Return 0: steps with data run on the CPU."""
        del device
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: this is not a mode."""


class RealHost:
    """The CPU, with data: recorded by its allocator's own events, which include the kernels' workspace."""

    device_type = "cpu"
    needs_warmup = False

    def make_tensors(self, selected_fraction: float | None) -> RealTensors:  # noqa: ARG002 - the signature of all places
        """Return copies with data."""
        return RealTensors()

    def make_recorder(self) -> Recorder:
        """Return a recorder that sees inside kernels."""
        return Recorder(marks=WorkspaceMarks())

    def active(self, tensors: RealTensors) -> AbstractContextManager[Sequence[Patches]]:  # noqa: ARG002 - as above
        """Patch nothing: the step runs on a real device."""
        return nullcontext(())

    def figures(self) -> None:
        """Return nothing: the CPU allocator keeps no statistics."""


class _Seen:
    """Observations of the first step."""

    def __init__(self, model: nn.Module, *, has_data: bool) -> None:
        self.calls: dict[str, Call] = {}
        self.gradients: dict[str, Tensor] = {}
        self.updates: dict[str, Tensor] = {}
        self.draws = False
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters()) if has_data else {}

    @contextmanager
    def watching(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Watch one step with these optimizers."""
        before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        random_state = torch.get_rng_state() if self._parameters else None
        with ExitStack() as stack:
            for module in self._names:  # a global hook with keyword arguments leaves a trace in torch
                stack.callback(module.register_forward_hook(self._note_call, with_kwargs=True).remove)
            for each in optimizers:
                own = {id(parameter) for group in each.param_groups for parameter in group["params"]}
                stack.callback(each.register_step_pre_hook(partial(self._note_gradients, own)).remove)
            yield
        if random_state is not None:
            self.draws = not torch.equal(random_state, torch.get_rng_state())
        self.updates = {name: p.detach() - before[name] for name, p in self._parameters.items()}

    def _note_gradients(self, own: Container[int], *_: object) -> None:
        """Note the gradients of an optimizer's own parameters: step_in_backward has freed those of the others."""
        self.gradients |= {
            name: parameter.grad.detach().clone()
            for name, parameter in self._parameters.items()
            if id(parameter) in own and parameter.grad is not None
        }

    def _note_call(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return
        shapes = tuple(tuple(each.shape) for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        out_shape = tuple(output.shape) if isinstance(output, Tensor) else None
        earlier = self.calls[name].num_calls if name in self.calls else 0
        self.calls[name] = Call(shapes, out_shape, earlier + 1)
