"""Trace of a step on fake tensors at one size: live bytes at its start and after every allocation and free."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from memkit._core.errors import InputError, InputTypeError, MemkitError, of_call
from memkit._recorder.recorder import OperatorPlace
from memkit._recorder.recording import IntArray
from memkit._simulation.guesses import Guesses
from memkit._simulation.simulation import Host, Simulation, Watch, simulate
from memkit._simulation.tensors import CALL
from memkit.predict.scaling.points import ScalingPoint, StepMode

BuiltStep: TypeAlias = Callable[[], object]
BuildStep: TypeAlias = Callable[..., BuiltStep]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """Trace of the second (warm) step at one size.

    Attributes:
        size: The size that the step was built for.
        mode: ``"train"`` or ``"inference"``.
        live: int64, shape ``(num_events + 1,)``: live bytes at the start of the step and after each event.
        bounds: int64, shape ``(num_kernels,)``: for each kernel that may use scratch memory, the live bytes plus the
            upper bound of that memory.
        events: For each event the operator that allocated the storage, and whether the storage was allocated or grew
            (or else was freed or shrank).
        places: For each event the place where its storage was allocated.
        guesses: Each ``"operator at line"`` that was answered without data.
        doubts: Why the memory is not known, as in a `MemoryEstimate`.
    """

    size: int
    mode: StepMode
    live: IntArray
    bounds: IntArray
    events: tuple[tuple[str, bool], ...]
    places: tuple[OperatorPlace, ...]
    guesses: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes."""
        return int(self.live.max())

    def where(self, moment: int) -> str:
        """Return module, operator, phase and source line of the last event at a moment; 0 is the start of the step."""
        if moment == 0:
            return "the start of the step"
        place = self.places[moment - 1]
        parts = place.module, self.events[moment - 1][0], place.phase, str(place.line or "")
        return ", ".join(part for part in parts if part)

    def point(self) -> ScalingPoint:
        """Return the peak and its place, as a point of a scaling curve."""
        return ScalingPoint(self.size, self.mode, "ok", self.peak_bytes, self.where(int(self.live.argmax())), "fake")


def trace_step(
    build_step: BuildStep,
    size: int,
    mode: StepMode,
    *,
    selected_fraction: float | None = None,
    guessed: dict[str, None] | None = None,
) -> StepTrace:
    """Build a step, run it twice on fake tensors, and record the second run.

    Tensors left alive by building the step count, whether an operator touches them or not. The arguments are those of
    `memkit.predict.profile_scaling`; ``guessed`` collects what was answered without data, also if the step fails.

    Raises:
        InputTypeError: ``build_step`` did not return a function.
        InputError: The step needs data that a fake tensor does not have.
    """
    simulation = Simulation(Host(), selected_fraction=selected_fraction)
    guesses = simulation.tensors.guesses
    call = f"build_step({size}), traced for mode={mode!r}"
    run = partial(_trace, simulation, size, mode, call, takes_mode(build_step))
    try:
        return simulate(call, simulation, (build_step, _named_in(build_step)), run, roots=(build_step,))
    except MemkitError as error:
        if error.call == CALL:  # put the user's call in its place
            raise of_call(call, error) from error
        raise
    except RuntimeError as error:
        if mode == "train" or takes_mode(build_step) or guesses.doubts:
            raise
        raise InputError(
            call,
            got=f"{type(error).__name__}: {error}",
            expected="a training step that also runs without gradients, where loss.backward() has no effect",
            fix="give build_step a parameter named `mode` and return the step for that mode, or pass modes=('train',).",
        ) from error
    finally:
        if guessed is not None:
            guessed |= dict.fromkeys(guesses)


def _trace(
    simulation: Simulation,
    size: int,
    mode: StepMode,
    call: str,
    tells_mode: bool,  # noqa: FBT001 - bound by name
    build: BuildStep,
    _: object,
) -> StepTrace:
    with _noting_doubts(call, simulation.tensors.guesses), _without_collector(), simulation.watch() as watch:
        step = build(size, mode=mode) if tells_mode else build(size)
        if not callable(step):
            raise InputTypeError(
                call,
                got=f"a {type(step).__name__}",
                expected="a function without arguments that runs one step",
                fix="define `def step(): ...` inside build_step, and return it.",
            )
        with nullcontext() if mode == "train" else forward_alone():
            step()
            start = watch.recorder.num_events()
            step()
        return _since(start, watch, simulation, size, mode)


@contextmanager
def _noting_doubts(call: str, guesses: Guesses) -> Iterator[None]:
    """Add a note to an error of a step in which a guessed number may have decided something."""
    try:
        yield
    except Exception as error:
        if guesses.doubts:
            error.add_note(
                f"memkit: {call}, ran without data, and may run with data: {'; '.join(guesses.doubts)}. Way out: "
                "pass such numbers as Python numbers, or use measure_scaling, which runs on real values."
            )
        raise


def takes_mode(build_step: BuildStep) -> bool:
    """Whether a function that builds steps has a parameter named ``mode``.

    Raises:
        InputTypeError: It takes no size.
    """
    parameters = inspect.signature(build_step).parameters
    if not parameters.keys() - {"mode"}:
        raise InputTypeError(
            "profile_scaling(build_step, sizes)",
            got="a build_step without a parameter for the size",
            expected="build_step(n), which returns a step",
            fix="write `def build_step(n):`.",
        )
    return "mode" in parameters


@contextmanager
def forward_alone() -> Iterator[None]:
    """Run a training step as inference: no graph, and `Tensor.backward` does nothing.

    No parameter then has a gradient, and optimizers skip parameters without one.
    """
    with torch.no_grad(), _NoBackward():
        yield


class _NoBackward(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is torch.Tensor.backward else func(*args, **(kwargs or {}))


def _since(start: int, watch: Watch, simulation: Simulation, size: int, mode: StepMode) -> StepTrace:
    events, guesses = watch.recorder.events_since(start), simulation.tensors.guesses
    return StepTrace(
        size,
        mode,
        events.live,
        events.bounds,
        events=tuple(zip(events.operators, events.is_growth, strict=True)),
        places=events.places,
        guesses=tuple(guesses),
        doubts=(*guesses.doubts, *(watch.steps_without_gradients() if mode == "train" else ())),
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's cycle collector: its timing depends on earlier code, and two traces would differ."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _named_in(build_step: BuildStep) -> list[nn.Module | Optimizer]:
    """Find the module-level models and optimizers that the function, or functions of its module, refer to."""
    whole = build_step.func if isinstance(build_step, partial) else build_step
    whole = getattr(whole, "__func__", whole)
    functions = [whole] if isinstance(whole, FunctionType) else []
    found = []
    for function in functions:
        for value in (function.__globals__.get(name) for name in _names(function.__code__)):
            if isinstance(value, (nn.Module, Optimizer)):
                found.append(value)
            elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                functions += [] if value in functions else [value]
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function defined inside
            yield from _names(constant)
