"""A ready-made training loop: batches, steps, validation, checkpoints and periodic reports."""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, warn_user
from memkit._core.printable import counted, described
from memkit._core.protocols import Composed, SavedTogether, Stateful
from memkit._core.settings import Checker, as_whole
from memkit._core.words import guided
from memkit._gradients.loss import LossFn
from memkit._machine.devices import allocator_counters
from memkit._recovery.attempt import Done, unless_failed
from memkit.memory.summary import memory_figures
from memkit.recipes.loss_state import UnsavedState, Validations, tell_of_order
from memkit.recipes.position import Position
from memkit.recipes.reducers import Reducer
from memkit.recipes.samplers import held_apart
from memkit.recipes.state.plain import Flattener
from memkit.recipes.stopping import StopSignal
from memkit.recipes.timeline import Timeline, memory_line
from memkit.recipes.validation import RowsOfLoss, ValidationFn, ValidationMonitor, metric_of, validate
from memkit.recipes.words import LOOP_ABSENT, LOOP_WORDS
from memkit.train.loader import to_device
from memkit.train.models import device_of
from memkit.train.owners import refuse_trainer
from memkit.train.wrapper import MemoryEfficientTrainingWrapper, StepResult

_LOGGER = logging.getLogger("memkit")
_END = object()
_CALL = "MemoryEfficientTrainLoop"
_EXPECTED = "a MemoryEfficientTrainingWrapper, which runs the steps"
EndedBy = Literal["epochs", "early stopping", "SIGTERM"]


class StateStore(Protocol):
    """Keeps the state of objects, such as `memkit.TrainingStateManager`."""

    def save(self, step: int, /, **objects: Any) -> None:
        """Save the state of all objects and the random state; ``metric`` is the monitor's figure at that step."""

    def restore(self, **objects: Any) -> int | None:
        """Restore the newest state; return None if there is none."""


class Plateau(Protocol):
    """A learning-rate schedule that follows a figure, such as `torch.optim.lr_scheduler.ReduceLROnPlateau`."""

    def step(self, metrics: Any, /) -> Any:
        """Note the figure of a validation."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore `state_dict`."""


class Writer(Protocol):
    """Logs scalars, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Log one value for one step."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """How a run ended.

    Attributes:
        ended_by: ``"epochs"``, ``"early stopping"`` or ``"SIGTERM"``.
        num_epochs: Epochs finished so far, including those of earlier runs that were resumed.
        num_steps: Steps so far, counted the same way; a step skipped by mixed precision counts, and so does one of
            other ranks that this one joined without a batch.
        num_skipped: Steps of this run that the loss scaler skipped.
        validation: The figures of the last validation so far, which may be one of an earlier run that was resumed; None
            if there was none. A state has those that are numbers, text, tensors, or lists and dicts of them.

    Example:
        >>> import memkit as mk
        >>> result = mk.recipes.LoopResult("SIGTERM", num_epochs=3, num_steps=120, num_skipped=0, validation=None)
        >>> "asked to stop" if result.ended_by == "SIGTERM" else "done"
        'asked to stop'
    """

    ended_by: EndedBy
    num_epochs: int
    num_steps: int
    num_skipped: int
    validation: dict[str, Any] | None


@guided(words=LOOP_WORDS, absent=LOOP_ABSENT, methods={"run": {}, "run_step": {}, "validate": {}})
@final
class MemoryEfficientTrainLoop(Composed):
    """Trains with `MemoryEfficientTrainingWrapper`: one step per batch of the loader, whatever the micro-batch size.

    A SIGTERM ends the run after the current step, and the state is saved. A run with ``state`` resumes where the last
    one ended, even in the middle of an epoch, and is bit-for-bit equal to a run without the interruption. Validation
    does not affect training: it restores modes, the random state, attributes and buffers of the model, what ``loss_fn``
    holds, and the random generators of ``train_loader`` and its data; it warns of what else it sees changed.

    Memory cost: none beyond the step's; a validation keeps figures, not outputs, and copies of buffers and small
    tensors of the model and of what ``loss_fn`` holds, of 64 MiB each. Time cost: see ``docs/loops.md``.

    Args:
        trainer: Runs the steps. Its scheduler is stepped only after real optimizer steps.
        train_loader: The batches of an epoch. A smaller last batch is a step of its own, weighted by its own rows.
        loss_fn: ``loss_fn(model, micro_batch)``, as for `MemoryEfficientTrainingWrapper.train_step`.
        val_loader: Batches to validate on.
        val_fn: ``val_fn(model, batch)`` returns a mapping of figures, one row for each row of the batch:
            ``{"loss": losses, "accuracy": (scores, targets)}``. None: the mean of ``loss_fn`` as ``"loss"``.
        reducers: Reducer for each figure, by name; `Mean` for a figure without one.
        validate_every: Steps; None validates at the end of each epoch.
        monitor: Early stopping on its ``metric``.
        plateau: A schedule that steps with a figure, such as `torch.optim.lr_scheduler.ReduceLROnPlateau`: stepped
            after each validation, with the monitor's figure, or ``"loss"`` without a monitor.
        state: A `TrainingStateManager`, or any object with the same ``save`` and ``restore``. Saves the model,
            optimizers, wrapper, schedules, weight average, monitor, and the position in the data.
        objects: More objects to save, by name, each with ``state_dict`` and ``load_state_dict``.
        save_every: Steps; None saves at the end of each epoch. The end of a run is always saved. If the step was
            validated, the state's metric is the monitor's figure; when both are due, validation runs first, and a
            failing validation does not lose the state.
        report_every: Steps between two reports: a line with the progress and the time left (if the loader has a
            length), loss, learning rate, times and memory, at level INFO of the logger ``"memkit"``, and the same
            figures for ``writer``. Only a report synchronizes with the device.
        writer: A TensorBoard ``SummaryWriter``, or any object with the same ``add_scalar``.
        progress: Show a progress bar if tqdm is installed; otherwise only the log lines.

    Attributes:
        num_steps: Steps so far.

    Raises:
        ConfigError: A setting is invalid, or two settings conflict.
        InputTypeError: ``trainer`` is not a wrapper, a loader cannot be iterated, ``loss_fn`` or ``val_fn`` is not a
            function, ``plateau`` does not step with a figure, one of the ``objects`` has no state, or ``reducers``,
            ``monitor``, ``state`` or ``writer`` lacks the methods that the loop calls.

    Example:
        >>> import torch, memkit as mk
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model = torch.nn.Linear(3, 1)
        >>> trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loader = DataLoader(TensorDataset(torch.randn(50, 3), torch.zeros(50, 1)), batch_size=16, shuffle=True)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> loop = mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn, val_loader=loader, progress=False)
        >>> result = loop.run(num_epochs=10)
        >>> result.num_steps, result.ended_by, result.validation["loss"] < 0.01
        (40, 'epochs', True)
    """

    def __init__(
        self,
        trainer: MemoryEfficientTrainingWrapper,
        train_loader: Iterable[Any],
        loss_fn: LossFn,
        *,
        val_loader: Iterable[Any] | None = None,
        val_fn: ValidationFn | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        validate_every: int | None = None,
        monitor: ValidationMonitor | None = None,
        plateau: Plateau | None = None,
        state: StateStore | None = None,
        objects: Mapping[str, Any] | None = None,
        save_every: int | None = None,
        report_every: int = 100,
        writer: Writer | None = None,
        progress: bool = True,
    ) -> None:
        _check_parts(trainer, train_loader, loss_fn)
        check_helpers(_CALL, val_fn=val_fn, reducers=reducers, monitor=monitor, state=state, writer=writer)
        if val_loader is not None and not is_loader(val_loader):
            got, fix = f"a {type(val_loader).__name__} as val_loader", f"write {_CALL}(..., val_loader=val_loader)."
            _refuse_part(got, "batches to iterate over", fix)
        every = {"validate_every": validate_every, "save_every": save_every, "report_every": report_every}
        for name, steps in every.items():
            if steps is not None:
                Checker(_CALL).whole(name, steps, 1)
        if val_loader is None and (val_fn or reducers or validate_every or monitor or plateau is not None):
            raise ConfigError(
                f"{_CALL}(...)",
                got="val_fn, reducers, validate_every, monitor or plateau without val_loader",
                expected="val_loader=... whenever validation is configured",
                fix="pass val_loader=...",
            )
        _check_plateau(plateau, monitor)
        if (monitor is not None or plateau is not None) and trainer.num_ranks > 1:
            warn_user(
                f"{_CALL}({'plateau' if monitor is None else 'monitor'}=...) on {trainer.num_ranks} ranks: each rank "
                "decides by its own validation, so one may stop, keep a different best state, or lower its learning "
                "rate, while the others continue. Way out: validate on the same batches on every rank, or use a "
                "reducer that sums over the ranks."
            )
        use_mode = getattr(state, "use_mode", None)
        if monitor is not None and use_mode is not None:
            use_mode(monitor.mode)
        self.trainer = trainer
        self.num_steps = 0
        self._device = device_of(trainer.model)
        self._parts = trainer.parts() | ({} if plateau is None else {"plateau": plateau})
        self._objects = read_objects(f"{_CALL}(...)", objects, self._parts, ("loop", "monitor", "metric"))
        self._loss_fn, self._val_fn = loss_fn, val_fn or RowsOfLoss(loss_fn)
        self._validates_by_loss = val_fn is None
        self._val_loader, self._reducers, self._validate_every = val_loader, reducers, validate_every
        self._monitor, self._plateau = monitor, plateau
        self._state, self._save_every = state, save_every
        self._report_every, self._writer, self._progress = report_every, writer, progress
        self._busy_every = math.gcd(report_every, validate_every or 0, save_every or 0)  # no check is due in between
        self._loader = train_loader
        self._position = Position(train_loader)
        self._validations = Validations(f"{_CALL}.validate(...)", trainer.model, train_loader)
        self._timeline = Timeline()
        self._stop = StopSignal()
        self._looks_for_unsaved = True  # once: what changes does so in the first steps, or never
        self._unsaved: UnsavedState | None = None
        self._is_behind = True  # nothing ran yet, or the last run failed: the last save is restored
        self._saved_at: int | None = 0  # the step that was saved last; before the first one nothing needs saving
        self._validated_at: int | None = 0
        self._num_skipped = 0
        self._num_epochs = 0
        self._began = (0.0, 0)  # this run: its time, and the steps done before it
        self._figures: dict[str, Any] | None = None
        self._last: StepResult | None = None

    def run(self, num_epochs: int = 1) -> LoopResult:
        """Train until ``num_epochs`` epochs are done, including those of earlier calls and of a resumed run.

        The first call, and one after a call that has failed, restores the last save of ``state``; others go on with
        everything as it is, such as a learning rate that was changed in between.

        Raises:
            ConfigError: ``num_epochs`` is not a whole number.
            MemkitOutOfMemoryError: Not even one row fits.
            InputError: An epoch had no batches.
        """
        self._num_epochs = Checker(f"{_CALL}.run(...)").whole("num_epochs", num_epochs)
        self._num_skipped = 0
        if self._state is not None:
            if self._is_behind:
                self._state.restore(**self.objects())
            self._is_behind = True
            if self._looks_for_unsaved:
                data, saved = getattr(self._loader, "dataset", None), [*self._parts.values(), *self._objects.values()]
                functions = [self._loss_fn, *self.trainer.step_functions()]
                self._unsaved = UnsavedState(self.trainer.model, functions, data, self._position.samplers, saved)
        self._timeline.restart()
        self._began = time.monotonic(), self.num_steps
        with self._stop, self._make_bar(num_epochs) as bar:
            while self._position.epoch < num_epochs and self._end_reason() is None:
                self._run_epoch(bar)
        self._save_once()
        self._last, self._is_behind = None, False
        return LoopResult(
            ended_by=self._end_reason() or "epochs",
            num_epochs=self._position.epoch,
            num_steps=self.num_steps,
            num_skipped=self._num_skipped,
            validation=None if self._figures is None else dict(self._figures),
        )

    def run_step(self, batch: Any) -> StepResult:
        """Train on one batch, which may be on the host."""
        timeline = self._timeline
        timeline.start()
        batch = to_device(batch, self._device)
        timeline.lap("transfer")
        self._last = result = self.trainer.train_step(batch, self._loss_fn)
        timeline.lap("step")
        self.num_steps += 1
        self._position.num_batches += 1
        timeline.num_steps += 1
        self._num_skipped += not result.stepped
        if callable(note_step := getattr(self.trainer.memory, "step", None)):  # a MemoryManager's
            note_step()
        return result

    def validate(
        self, loader: Iterable[Any], fn: ValidationFn | None = None, reducers: Mapping[str, Reducer] | None = None
    ) -> dict[str, Any] | None:
        """Run a validation now and return its figures; None if a SIGTERM interrupted it.

        Warns:
            MemkitWarning: It has changed something that the training may depend on, and that cannot be restored.
        """
        self._timeline.start()
        is_of_loss = fn is None and self._validates_by_loss
        apart = self._validations.one(self._loss_fn, None if is_of_loss else fn or self._val_fn)
        with self.trainer.evaluation() as evaluate, apart:
            figures = validate(
                evaluate,
                loader,
                fn or self._val_fn,
                device=self._device,
                reducers=self._reducers if reducers is None else reducers,
                should_stop=lambda: self._stop.has_arrived,
            )
        self._timeline.lap("validation")
        return figures

    def objects(self) -> dict[str, Any]:
        """Return everything a resumed run needs, by name, each with ``state_dict`` and ``load_state_dict``."""
        own = {"loop": self, **self._parts} | ({"monitor": self._monitor} if self._monitor else {})
        return own | self._objects

    def __saved_together__(self) -> SavedTogether:
        return SavedTogether(self.objects(), "state.save(step, **loop.objects()), and state.restore(**loop.objects())")

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and step and figures of the last validation, as plain types and tensors."""
        return {
            "num_steps": self.num_steps,
            "validated_at": self._validated_at,
            "figures": None if self._figures is None else _plain_figures(self._figures),
            "position": self._position.state_dict(),
            "generators": [each.get_state() for each in self._generators()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            FileFormatError: The state has another version, or belongs to another object.
        """
        given: Any = state  # it may be another object's state
        is_own = isinstance(given, Mapping) and {"num_steps", "validated_at", "position"}.issubset(given)
        if not is_own or as_whole(given["num_steps"]) is None:
            raise FileFormatError(
                "loop.load_state_dict(state)",
                got=_keys_of(given),
                expected="the result of loop.state_dict(): num_steps, validated_at and position",
                fix="write loop.load_state_dict(state['loop']) for a state of all objects, or pass "
                "state=mk.TrainingStateManager(...) to the loop, which resumes by itself.",
            )
        self._position.load_state_dict(state["position"])
        generators, states = self._generators(), state["generators"]
        if len(generators) == len(states):
            for generator, each in zip(generators, states, strict=True):
                generator.set_state(each)
        else:
            warn_user(
                f"{_CALL}: the state was saved with {counted(len(states), 'generator')} of the model and loss_fn, and "
                f"now they hold {len(generators)}: these are left as they are, and what they draw differs from a run "
                "that was not stopped. Way out: build the model and loss_fn as they were when the state was saved."
            )
        self.num_steps = self._saved_at = state["num_steps"]
        self._validated_at, self._figures = state["validated_at"], state["figures"]

    def _generators(self) -> list[torch.Generator]:
        """Return the generators, but for the global ones, that the model and the functions of a step draw from."""
        return held_apart([self.trainer.model, self._loss_fn, *self.trainer.step_functions()]).torch_generators()

    def _run_epoch(self, bar: Any) -> None:
        batches, timeline = self._position.batches(), self._timeline
        self._validate_if_due(at_end=False)  # where the last run was stopped before it could validate
        is_over = False
        while not is_over and self._end_reason() is None:
            timeline.start()
            batch = next(batches, _END)
            timeline.lap("data")
            is_over = batch is _END
            if not is_over:
                self.run_step(batch)
                if bar is not None:
                    bar.update()
                if self.num_steps % self._busy_every == 0:
                    self._do_what_is_due(bar)
        num_steps = self.num_steps
        self._join_others(bar)
        if not is_over:
            return
        if self.num_steps == num_steps and self._position.num_batches == 0:
            self._save_once()
            raise InputError(
                f"{_CALL}.run(): epoch {self._position.epoch + 1}",
                got="no batch",
                expected="a train_loader that can be iterated once for every epoch",
                fix="pass a DataLoader or a list, because an iterator is exhausted after one epoch; check whether "
                "drop_last=True dropped the only batch.",
            )
        self._validate_if_due(at_end=True)
        if self._stop.has_arrived:
            return  # before the validation finished: the resumed run repeats it
        self._position.end_epoch()
        self._save_if_due(at_end=True)

    def _join_others(self, bar: Any) -> None:
        """Under DDP, take part in the steps, saves and validations of ranks that have more batches."""

        def count() -> None:
            self._timeline.lap("step")
            self.num_steps += 1
            self._timeline.num_steps += 1
            if bar is not None:
                bar.update()
            if self.num_steps % self._busy_every == 0:
                self._do_what_is_due(bar)
            self._timeline.start()

        self._timeline.start()
        self.trainer.flush(count)

    def _do_what_is_due(self, bar: Any) -> None:
        """Report, validate and save after a step; ranks that save together have counted as many steps."""
        self._report_if_due(bar)
        self._validate_if_due(at_end=False)
        self._save_if_due(at_end=False)

    def _end_reason(self) -> EndedBy | None:
        if self._stop.has_arrived:
            return "SIGTERM"
        return "early stopping" if self._monitor and self._monitor.should_stop else None

    def _validate_if_due(self, *, at_end: bool) -> None:
        is_time = self.num_steps % self._validate_every == 0 if self._validate_every else at_end
        if self._val_loader is None or not is_time or self._validated_at == self.num_steps:
            return
        try:
            figures = self.validate(self._val_loader)
            if figures is not None:
                self._follow(figures)
        except BaseException:
            self._save_if_due(at_end=at_end)  # a failing validation must not lose the run's state
            raise
        if figures is None:
            return
        self._figures, self._validated_at = figures, self.num_steps
        # Saved without this metric: save again when due. A state from before a validation makes up for it anyway.
        if self._monitor and self._saved_at == self.num_steps:
            self._saved_at = None
        _LOGGER.info("step %d, validation: %s", self.num_steps, _format_figures(figures))
        self._write("validation", figures)

    def _follow(self, figures: Mapping[str, Any]) -> None:
        """Give the figure that is watched to the monitor and the plateau; they are saved after it."""
        if self._monitor is not None:
            self._monitor.update(metric_of(figures, self._monitor), self.num_steps)
        if self._plateau is not None:
            name = "loss" if self._monitor is None else self._monitor.metric
            self._plateau.step(_figure_to_follow(figures, name))

    def _save_if_due(self, *, at_end: bool) -> None:
        if self.num_steps % self._save_every == 0 if self._save_every else at_end:
            self._save_once()

    def _save_once(self) -> None:
        if self._state is None or self._saved_at == self.num_steps:
            return
        metric = {}
        if self._monitor and self._figures and self._validated_at == self.num_steps:
            metric = {"metric": metric_of(self._figures, self._monitor)}
        if self._unsaved is not None:
            self._unsaved.tell(f"{_CALL}(state=...)", self._position.counted())
            self._looks_for_unsaved, self._unsaved = False, None
        if of_loaders := self._position.samplers.changed_loaders():
            tell_of_order(f"{_CALL}(state=...)", "the loader", of_loaders)
        self._timeline.start()
        self._state.save(self.num_steps, **metric, **self.objects())
        self._timeline.lap("save")
        self._saved_at = self.num_steps

    def _report_if_due(self, bar: Any) -> None:
        if self.num_steps % self._report_every or self._last is None:
            return
        if bar is None and self._writer is None and not _LOGGER.isEnabledFor(logging.INFO):
            self._timeline.restart()
            return
        figures = {"loss": self._last.loss.item(), "lr": self._parts["optimizer"].param_groups[0]["lr"]}
        memory, seconds = memory_figures(allocator_counters(self._device)), self._timeline.seconds
        _LOGGER.info(
            "epoch %d, step %d%s: %s; %s; %s",
            self._position.epoch + 1,
            self.num_steps,
            self._progress_text(),
            _format_figures(figures),
            self._timeline.line(),
            memory_line(memory),
        )
        if bar is not None:
            bar.set_postfix_str(_format_figures(figures))
        self._write("train", figures)
        self._write("memory", memory)
        self._write("seconds_per_step", {name: value / self._timeline.num_steps for name, value in seconds.items()})
        self._timeline.restart()

    def _write(self, group: str, figures: Mapping[str, Any]) -> None:
        if self._writer is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):  # a confusion matrix is not a curve
                    self._writer.add_scalar(f"{group}/{name}", value, self.num_steps)

    def _progress_text(self) -> str:
        """Say how far the run is and how long it will still take at its speed; empty for a loader without a length."""
        if not isinstance(self._loader, Sized):
            return ""
        total = max(self.num_steps, self._num_epochs * len(self._loader))
        began, num_before = self._began
        seconds = (time.monotonic() - began) / max(1, self.num_steps - num_before) * (total - self.num_steps)
        return f" of {total} ({self.num_steps / total:.0%}, {_format_seconds(seconds)} left)"

    def _make_bar(self, num_epochs: int) -> AbstractContextManager[Any]:
        try:
            tqdm = importlib.import_module("tqdm") if self._progress else None
        except ModuleNotFoundError:
            tqdm = None
        if tqdm is None:
            return nullcontext()
        total = num_epochs * len(self._loader) if isinstance(self._loader, Sized) else None
        bar: AbstractContextManager[Any] = tqdm.tqdm(total=total, initial=self.num_steps, unit="step", disable=None)
        return bar


def _check_parts(trainer: object, train_loader: object, loss_fn: object) -> None:
    """Refuse parts of the wrong type, and parts in the wrong order."""
    right = f"{_CALL}(trainer, train_loader, loss_fn)"
    if isinstance(trainer, nn.Module):
        _refuse_part(
            f"a model ({type(trainer).__name__})",
            _EXPECTED,
            f"write trainer = MemoryEfficientTrainingWrapper(model, optimizer), and {right}.",
        )
    if not isinstance(trainer, MemoryEfficientTrainingWrapper):
        refuse_trainer(trainer, call=right, expected=_EXPECTED)
        _refuse_part(f"a {type(trainer).__name__}", _EXPECTED, f"write {right}.")
    if callable(train_loader) and not isinstance(train_loader, Iterable) and isinstance(loss_fn, Iterable):
        _refuse_part("the function second and the batches third", "the batches, then the function", f"write {right}.")
    if not is_loader(train_loader):
        _refuse_part(f"a {type(train_loader).__name__} as train_loader", "batches to iterate over", f"write {right}.")
    if not callable(loss_fn):
        _refuse_part(
            f"a {type(loss_fn).__name__} as loss_fn",
            "a function loss_fn(model, batch)",
            f"write {_CALL}(trainer, train_loader, lambda model, batch: criterion(model(batch[0]), batch[1])).",
        )


def is_loader(value: object) -> bool:
    """Return whether batches can be iterated over."""
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def check_helpers(
    call: str, *, val_fn: object, reducers: object, monitor: object, state: object, writer: object = None
) -> None:
    """Refuse helpers of a loop that could not work: the run would only find out at its first validation or save.

    Args:
        call: The user's call, for messages.
        val_fn: The function to validate with, or None.
        reducers: Reducers by name, or None.
        monitor: A `ValidationMonitor`, or None.
        state: A `StateStore`, or None.
        writer: A `Writer`, or None.

    Raises:
        InputTypeError: One of them has another type.
    """
    if val_fn is not None:
        Checker(call).function("val_fn", val_fn)
    if reducers is not None and not isinstance(reducers, Mapping):
        fix = "pass reducers={'accuracy': mk.recipes.Accuracy()}."
        raise InputTypeError(
            f"{call}(reducers=...)", got=f"a {type(reducers).__name__}", expected="reducers by name", fix=fix
        )
    for name, reducer in (reducers or {}).items():
        made = f"{reducer.__name__}()" if isinstance(reducer, type) else "mk.recipes.Mean()"
        _check_methods(f"{call}(reducers=...)", reducer, "update result reset", f"pass reducers={{{name!r}: {made}}}.")
    path = repr(os.fspath(state)) if isinstance(state, str | os.PathLike) else "'states'"
    for name, helper, methods, made in (
        ("monitor", monitor, "update", "mk.ValidationMonitor(patience=5)"),
        ("state", state, "save restore", f"mk.TrainingStateManager({path})"),
        ("writer", writer, "add_scalar", "torch.utils.tensorboard.SummaryWriter()"),
    ):
        if helper is not None:
            _check_methods(f"{call}({name}=...)", helper, methods, f"pass {name}={made}.")


def _check_methods(call: str, thing: object, methods: str, fix: str) -> None:
    if isinstance(thing, type) or not all(callable(getattr(thing, each, None)) for each in methods.split()):
        expected = f"an object with {' and '.join(f'{each}()' for each in methods.split())}"
        raise InputTypeError(call, got=described(thing), expected=expected, fix=fix)


def _check_plateau(plateau: object, monitor: ValidationMonitor | None) -> None:
    """Refuse what does not step with a figure, and one that takes the monitor's figure the other way round."""
    if plateau is None:
        return
    of_steps = isinstance(plateau, LRScheduler) and not isinstance(plateau, ReduceLROnPlateau)
    if isinstance(plateau, type) or of_steps or not isinstance(plateau, Stateful) or not hasattr(plateau, "step"):
        raise InputTypeError(
            f"{_CALL}(plateau=...)",
            got=f"the class {plateau.__name__}" if isinstance(plateau, type) else f"a {type(plateau).__name__}",
            expected="a schedule that steps with a figure of the validation",
            fix="pass plateau=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer); a schedule of steps goes into "
            "the wrapper, MemoryEfficientTrainingWrapper(model, optimizer, scheduler=scheduler).",
        )
    mode = getattr(plateau, "mode", None)
    if monitor is not None and mode in ("min", "max") and mode != monitor.mode:
        raise ConfigError(
            f"{_CALL}(plateau=..., monitor=...)",
            got=f"a {type(plateau).__name__} with mode={mode!r} and a monitor with mode={monitor.mode!r}",
            expected=f"one mode, because both follow the figure {monitor.metric!r}",
            fix=f"write plateau={type(plateau).__name__}(optimizer, mode={monitor.mode!r}).",
        )


def read_objects(
    call: str, objects: Mapping[str, Any] | None, parts: Mapping[str, Any], others: Sequence[str]
) -> dict[str, Any]:
    """Return the user's objects to save, by name.

    Args:
        call: The user's call, for messages.
        objects: What the user has passed.
        parts: The loop's own parts, by name.
        others: More names that the loop uses.

    Raises:
        InputTypeError: They have no names, or one has no state.
        ConfigError: The loop uses a name itself.
    """
    if objects is not None and not isinstance(objects, Mapping):
        raise InputTypeError(
            call,
            got=f"objects, a {type(objects).__name__}",
            expected="objects to save, by name",
            fix="write objects={'criterion': criterion}.",
        )
    given = dict(objects or {})
    for name, each in given.items():
        if name in others or parts.get(name, each) is not each:
            raise ConfigError(
                call,
                got=f"objects={{{name!r}: ...}}",
                expected="names that the loop itself does not use",
                fix=f"write objects={{'my_{name}': ...}}.",
            )
        if not isinstance(each, Stateful) or isinstance(each, type):
            raise InputTypeError(
                call,
                got=f"objects={{{name!r}: {described(each)}}}",
                expected="objects with state_dict() and load_state_dict(state)",
                fix=f"write a class for {name} with these two methods, and objects={{{name!r}: {name}}}.",
            )
    return given


def _figure_to_follow(figures: Mapping[str, Any], name: str) -> float:
    """Return the number that a plateau steps with."""
    outcome = unless_failed((LookupError, TypeError, ValueError, RuntimeError), lambda: float(figures[name]))
    if isinstance(outcome, Done):
        return outcome.result
    raise InputError(
        f"{_CALL}(plateau=...)",
        got=f"a validation of {', '.join(f'{key} ({type(each).__name__})' for key, each in figures.items())}",
        expected=f"a validation with a number {name!r}, which the schedule follows",
        fix=f"let val_fn return {name!r}, or pass monitor=mk.ValidationMonitor(patience=None, mode=..., metric=...) "
        "with the name of another figure.",
    ) from outcome.error


def _refuse_part(got: str, expected: str, fix: str) -> NoReturn:
    raise InputTypeError(f"{_CALL}(...)", got=got, expected=expected, fix=fix)


def _plain_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that a state can hold: a reducer of the user's may return anything."""
    found = {}
    for name, each in figures.items():
        with suppress(InputTypeError):
            Flattener().plain(each, name)
            found[name] = each
    return found


def _keys_of(state: object) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a mapping with the keys {', '.join(map(str, state))}" if state else "an empty mapping"


def _format_seconds(seconds: float) -> str:
    """Return a duration with its two largest units, such as ``"2 h 05 min"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _format_figures(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))
