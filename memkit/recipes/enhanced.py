"""create_enhanced_train_loop: add validation, early stopping, memory checks and resume to an unmodified loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, final

from torch import nn

from memkit._core.errors import ConfigError, InputTypeError
from memkit._core.protocols import Composed, SavedTogether
from memkit._core.settings import Checker
from memkit._core.units import parse_bytes
from memkit._core.words import guided
from memkit._machine import random_state
from memkit._recovery.sizes import SizeMemory
from memkit.memory.manager import MemoryManager
from memkit.recipes.foreign import Counters, diffusion_losses, images_and_condition, stateful_parts
from memkit.recipes.loop import (
    EndedBy,
    LoopResult,
    MemoryEfficientTrainLoop,
    StateStore,
    check_helpers,
    is_loader,
    read_objects,
)
from memkit.recipes.loss_state import Validations
from memkit.recipes.order import repeat_epoch
from memkit.recipes.reducers import Reducer
from memkit.recipes.stopping import StopSignal
from memkit.recipes.validation import ValidationFn, ValidationMonitor, metric_of, validate
from memkit.recipes.words import ENHANCED_ABSENT, ENHANCED_WORDS
from memkit.train.evaluation import Evaluation
from memkit.train.models import device_of, evaluating

_LOGGER = logging.getLogger("memkit")
_CALL = "create_enhanced_train_loop(...)"
_OWN_NAMES = ("enhanced", "counters", "early_stopping", "metric")  # in a state, besides the loop's parts


class _Ended(BaseException):
    """Ends another library's loop between two steps; an ``except Exception`` inside the loop does not catch it."""


@guided(absent=ENHANCED_ABSENT)
@final
class EnhancedTrainLoop(Composed):
    """A training loop with extra work after each step; created by `create_enhanced_train_loop`.

    Attributes:
        num_steps: Steps of this loop, including resumed ones.
        figures: The figures of the last validation; None before the first one.
        memory: The `MemoryManager` that watches the device.
    """

    def __init__(
        self,
        base: Any,
        run: Callable[[], Any],
        *,
        validate_now: Callable[[], dict[str, Any] | None] | None,
        look: Callable[[], None] | None,
        val_interval: int,
        memory: MemoryManager,
        monitor: ValidationMonitor | None,
        state: StateStore | None,
        objects: Mapping[str, Any],
        stop: StopSignal,
    ) -> None:
        self._base, self._run = base, run
        self._validate_now, self._look, self._interval = validate_now, look, val_interval
        self._monitor, self._state = monitor, state
        self._counters = Counters(base)
        self._objects = {**objects, "enhanced": self, "counters": self._counters}
        if monitor is not None:
            self._objects["early_stopping"] = monitor
        self._stop = stop
        self._saved_at: int | None = None  # the step that was saved last
        self._validated_at: int | None = None
        self._draws = random_state.capture()  # every validation draws the same noise, so its figures can be compared
        self.memory = memory
        self.num_steps = 0
        self.figures: dict[str, Any] | None = None

    def run_loop(self) -> EndedBy:
        """Run the loop from its saved state, if any; the loop object is unmodified again afterwards.

        Returns:
            Why it ended: ``"epochs"`` (by itself), ``"early stopping"`` or ``"SIGTERM"``.

        Raises:
            InputTypeError: Before the first step: ``val_dataloader`` yields batches that a diffusion loop cannot
                validate on.
        """
        if self._state is not None:
            self._state.restore(**self._objects)
        if self._look is not None:
            self._look()
        ended_by, is_early = self._end_reason(), False
        if ended_by is None:
            result = None
            with self._stop, self._hooked(), contextlib.suppress(_Ended):
                result = self._run()
            # Our own loop handles the signals itself while it runs.
            ended_by = result.ended_by if isinstance(result, LoopResult) else self._end_reason()
            is_early = ended_by is not None
        self._save_once()
        if is_early and callable(getattr(self._base, "save", None)):
            self._base.save()  # as the loop would have done at its own end
        return ended_by or "epochs"

    def __saved_together__(self) -> SavedTogether:
        call = "create_enhanced_train_loop(..., state=state), whose run_loop() saves and restores"
        return SavedTogether(self._objects, call)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the random state of the validations."""
        return {"num_steps": self.num_steps, "draws": self._draws.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.num_steps = self._saved_at = state["num_steps"]
        self._draws = random_state.RandomState.from_state_dict(state["draws"])

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """Hook this one object, not its class."""
        run_step = self._base.run_step

        def hooked(*args: Any, **kwargs: Any) -> Any:
            self._counters.note_begin()
            result = run_step(*args, **kwargs)
            self._counters.note_end()
            self._after_step()
            return result

        before = vars(self._base).get("run_step")
        self._base.run_step = hooked
        try:
            yield
        finally:
            if before is None:
                del self._base.run_step
            else:
                self._base.run_step = before

    def _after_step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._interval == 0:
            try:
                self._validate()
            finally:  # a failing validation must not lose the run's state
                self._save_once()
        if self._end_reason() is not None:
            raise _Ended

    def _validate(self) -> None:
        if self._validate_now is None:
            return
        with self.memory.phase("validation"), random_state.preserved():
            random_state.restore(self._draws)
            figures = self._validate_now()
        if figures is not None:
            metric: Any = None if self._monitor is None else metric_of(figures, self._monitor)
            self._validated_at = self.num_steps
            _LOGGER.info("step %d, validation: %s", self.num_steps, figures)
            if self._monitor is not None:
                self._monitor.update(metric, self.num_steps)
        self.figures = figures
        if self.memory.available_bytes() == 0:
            released = self.memory.release()
            _LOGGER.warning(
                "step %d: more than memory_fraction is in use, %d bytes released; %s",
                self.num_steps,
                released,
                self.memory.line(),
            )

    def _end_reason(self) -> EndedBy | None:
        if self._stop.has_arrived:
            return "SIGTERM"
        return "early stopping" if self._monitor is not None and self._monitor.should_stop else None

    def _save_once(self) -> None:
        if self._state is None or self.num_steps in (0, self._saved_at):
            return
        metric = {}
        if self._monitor and self.figures and self._validated_at == self.num_steps:
            metric = {"metric": metric_of(self.figures, self._monitor)}
        self._state.save(self.num_steps, **metric, **self._objects)
        self._saved_at = self.num_steps


@guided(words=ENHANCED_WORDS)
def create_enhanced_train_loop(
    base_train_loop: Any,
    val_dataloader: Iterable[Any] | None = None,
    enable_validation: bool = True,  # noqa: FBT001, FBT002 - users pass it by position
    val_interval: int = 1000,
    memory_fraction: float | str = 0.9,
    *,
    val_fn: ValidationFn | None = None,
    reducers: Mapping[str, Reducer] | None = None,
    num_val_batches: int | None = None,
    monitor: ValidationMonitor | None = None,
    state: StateStore | None = None,
    objects: Mapping[str, Any] | None = None,
    num_epochs: int = 1,
) -> EnhancedTrainLoop:
    """Add validation, early stopping, memory checks and resume to a training loop, without changing its code.

    While `run_loop` runs, memkit's work follows each call of the object's own ``run_step``; afterwards the object is
    unmodified again. An early end happens between two steps and calls the loop's own ``save()``, if it has one.

    Args:
        base_train_loop: An object with ``run_step`` and ``run_loop``, such as the ``TrainLoop`` of improved-diffusion,
            guided-diffusion and consistency_models; or a `MemoryEfficientTrainLoop`.
        val_dataloader: Batches to validate on.
        enable_validation: False turns validation off, whatever else is passed.
        val_interval: Steps between two validations, and between two saves.
        memory_fraction: Share of the device that the process should stay within, or a size such as ``"20GiB"``. If a
            validation finds more in use, unused memory is released and a warning is logged. It is not a hard limit.
        val_fn: ``val_fn(model, batch)`` returns figures by name, one row for each row of the batch. None: a diffusion
            loop's own losses, with the same noise each time; the ``loss_fn`` of a `MemoryEfficientTrainLoop`.
        reducers: As for `MemoryEfficientTrainLoop`; None: the reducers of that loop, if it is the base loop.
        num_val_batches: Number of batches per validation; for a ``val_dataloader`` that never ends.
        monitor: Early stopping.
        state: A `TrainingStateManager`. It saves the loop's ``model``, ``opt``, averages, master weights, counters, the
            arrays, tensors and changed numbers of its ``schedule_sampler``, and its ``data`` if that has a
            ``state_dict``; a generator as data starts over. With a monitor, a state that was validated has the
            monitor's figure as its metric.
        objects: More objects to save, under names that the loop's parts do not use, each with ``state_dict`` and
            ``load_state_dict``.
        num_epochs: Passes over the data, for a `MemoryEfficientTrainLoop`.

    Returns:
        A loop with ``run_loop()``.

    Raises:
        InputTypeError: The object has no ``run_step``, its ``run_step`` cannot be replaced, ``val_dataloader`` cannot
            be iterated, ``val_fn`` is not a function, one of the ``objects`` has no state, or ``reducers``,
            ``monitor`` or ``state`` lacks the methods that the loop calls.
        ConfigError: An argument is missing, or two settings conflict.

    Memory cost: none beyond the loop's; a validation that runs out of memory is split, as in
    `MemoryEfficientTrainingWrapper.evaluation`.

    Example:
        >>> import torch, memkit as mk
        >>> class TrainLoop:  # an existing loop
        ...     def __init__(self):
        ...         self.model = torch.nn.Linear(3, 1)
        ...         self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ...     def run_step(self, batch):
        ...         self.opt.zero_grad()
        ...         self.model(batch).square().mean().backward()
        ...         self.opt.step()
        ...     def run_loop(self):
        ...         for batch in torch.randn(10, 8, 3):
        ...             self.run_step(batch)
        >>> loop = mk.create_enhanced_train_loop(
        ...     TrainLoop(), [torch.randn(8, 3)], val_interval=5,
        ...     val_fn=lambda model, batch: {"loss": model(batch).square()})
        >>> loop.run_loop(), loop.num_steps, sorted(loop.figures)
        ('epochs', 10, ['loss'])
    """
    check = Checker(_CALL)
    check.whole("val_interval", val_interval, 1)
    if isinstance(memory_fraction, str):
        budget: int | float = parse_bytes(memory_fraction, name="memory_fraction")
    else:  # a number is a share, even 1
        budget = check.number("memory_fraction", memory_fraction, 0, 1)
    if not budget:
        raise check.refusal(
            "memory_fraction", memory_fraction, "a fraction or a size above zero", fix="write memory_fraction=0.9."
        )
    check.flag("enable_validation", enable_validation)
    check.whole("num_epochs", num_epochs)
    check_helpers(_CALL, val_fn=val_fn, reducers=reducers, monitor=monitor, state=state)
    base, run = base_train_loop, _runner(base_train_loop, num_epochs)
    is_own = isinstance(base, MemoryEfficientTrainLoop)
    model = base.trainer.model if is_own else getattr(base, "model", None)
    if not isinstance(model, nn.Module):
        _refuse(
            "a loop without a model",
            "a loop with a module in its attribute `model`",
            "set it first: loop.model = model",
        )
    stop = StopSignal()
    validate_now = look = None
    if enable_validation and val_dataloader is not None:
        _check_batches(val_dataloader, num_val_batches)
        if is_own:
            validate_now = _own_validation(base, val_dataloader, num_val_batches, val_fn, reducers)
        else:
            fn = val_fn or diffusion_losses(base)
            if fn is None:
                _refuse(
                    "a loop that does not report its losses",
                    "a function val_fn=... to validate with",
                    "pass val_fn=...",
                )
            batches = _Batches(val_dataloader, num_val_batches)
            validate_now = _validation(base, batches, fn, reducers, stop)
            if val_fn is None:
                look = functools.partial(batches.look, functools.partial(images_and_condition, model))
    elif monitor is not None:
        _refuse(
            "a monitor without validation", "val_dataloader=... and enable_validation=True", "pass val_dataloader=..."
        )
    parts = base.objects() if is_own else stateful_parts(base) | {"model": model}
    objects = read_objects(_CALL, objects, parts, _OWN_NAMES)
    use_mode = getattr(state, "use_mode", None)
    if monitor is not None and use_mode is not None:
        use_mode(monitor.mode)
    return EnhancedTrainLoop(
        base,
        run,
        validate_now=validate_now,
        look=look,
        val_interval=val_interval,
        memory=MemoryManager(device_of(model), budget),
        monitor=monitor,
        state=state,
        objects=parts | objects,
        stop=stop,
    )


def _runner(base: Any, num_epochs: int) -> Callable[[], Any]:
    """Return the function that runs a loop whose ``run_step`` can be hooked."""
    if isinstance(base, MemoryEfficientTrainLoop):
        return lambda: base.run(num_epochs)
    if not callable(getattr(base, "run_step", None)) or not callable(getattr(base, "run_loop", None)):
        _refuse_base(base, "run_step and run_loop, or a MemoryEfficientTrainLoop")
    try:
        vars(base)
    except TypeError:  # __slots__: no attribute can be set on the object alone
        _refuse_base(base, "an object whose attribute run_step can be replaced")
    run: Callable[[], Any] = base.run_loop
    return run


def _check_batches(loader: Iterable[Any], num_batches: int | None) -> None:
    if not is_loader(loader):
        got = f"a {type(loader).__name__} as val_dataloader"
        fix = "pass val_dataloader=val_dataloader, a DataLoader or a list."
        raise InputTypeError(_CALL, got=got, expected="batches to iterate over", fix=fix)
    if num_batches is not None:
        Checker(_CALL).whole("num_val_batches", num_batches, 1)
    elif isinstance(loader, Iterator):
        _refuse(
            "an iterator as val_dataloader",
            "batches that can be iterated for every validation",
            "pass a DataLoader or a list, or pass num_val_batches=... to use the next batches each time.",
        )


class _Batches:
    """The batches of each validation: the loader's first ones, or the next ones of an iterator."""

    def __init__(self, loader: Iterable[Any], num_batches: int | None) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __iter__(self) -> Iterator[Any]:
        repeat_epoch(self._loader)
        return itertools.islice(self._loader, self._num_batches)

    def look(self, check: Callable[[Any], Any]) -> None:
        """Check a batch now rather than at the first validation, hours later; an iterator yields it again."""
        with random_state.preserved():
            batches = iter(self._loader)
            for first in itertools.islice(batches, 1):
                check(first)
                if isinstance(self._loader, Iterator):
                    self._loader = itertools.chain([first], batches)


def _validation(
    base: Any,
    batches: Iterable[Any],
    fn: ValidationFn,
    reducers: Mapping[str, Reducer] | None,
    stop: StopSignal,
) -> Callable[[], dict[str, Any] | None]:
    model: nn.Module = base.model
    sizes, device = SizeMemory(), device_of(model)
    validations = Validations(_CALL, model, getattr(base, "data", None))

    def run() -> dict[str, Any] | None:
        evaluate = Evaluation(model, sizes, can_split=True)
        with evaluating(model), validations.one(base, fn):
            return validate(
                evaluate, batches, fn, device=device, reducers=reducers, should_stop=lambda: stop.has_arrived
            )

    return run


def _own_validation(
    loop: MemoryEfficientTrainLoop,
    loader: Iterable[Any],
    num_batches: int | None,
    fn: ValidationFn | None,
    reducers: Mapping[str, Reducer] | None,
) -> Callable[[], dict[str, Any] | None]:
    batches = _Batches(loader, num_batches)
    return lambda: loop.validate(batches, fn, reducers)


def _refuse(got: str, expected: str, fix: str) -> NoReturn:
    raise ConfigError(_CALL, got=got, expected=expected, fix=fix)


def _refuse_base(base: object, expected: str) -> NoReturn:
    raise InputTypeError(
        "create_enhanced_train_loop(base_train_loop=...)",
        got=f"a {type(base).__name__} without a per-step hook",
        expected=expected,
        fix="give the loop a method run_step(batch), which run_loop() calls, or use MemoryEfficientTrainLoop.",
    )
