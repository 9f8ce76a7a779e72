"""Training in stages of growing resolution: every stage is planned and checked before the first step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit._core.settings import Checker, as_whole, check_version
from memkit._core.words import guided
from memkit._torch.modules import BatchNorm
from memkit.recipes.order import tell_epoch
from memkit.recipes.words import PROGRESSIVE_ABSENT, PROGRESSIVE_WORDS, STAGE_WORDS
from memkit.train.loader import to_device
from memkit.train.models import device_of, restore_modes, training_modes
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.split import count_rows, join_rows, take_rows

_LOGGER = logging.getLogger("memkit")
_VERSION = 1
_BATCH_NORMS = (BatchNorm,)


@guided(words=STAGE_WORDS)
@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of `ProgressiveTrainer`.

    Attributes:
        resolution: Passed to ``resize``: a side in pixels or voxels.
        batch_size: Rows per step.
        epochs: Passes over the data.

    Raises:
        ConfigError: A number is below 1.

    Example:
        >>> import memkit as mk
        >>> mk.recipes.Stage(resolution=32, batch_size=16, epochs=5)
        Stage(resolution=32, batch_size=16, epochs=5)
    """

    resolution: int
    batch_size: int
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            Checker(f"Stage({name}={getattr(self, name)!r})").whole(name, getattr(self, name), 1)


@guided(words=PROGRESSIVE_WORDS, absent=PROGRESSIVE_ABSENT, methods=("run",))
@final
class ProgressiveTrainer:
    """Trains at growing resolutions; weights, optimizer state and schedule carry over from stage to stage.

    Memory grows with the resolution, so a run can fail after hours, in its last stage. This trainer plans the
    micro-batch of every stage and checks that it fits before the first step.

    Memory cost: one batch more than the step's, while rows are regrouped into a stage's batch size.

    Args:
        step_fn: ``step_fn(batch, micro_batch_size)`` trains one step on a resized batch on the model's device, such as
            ``lambda batch, rows: trainer.train_step(batch, loss_fn)``: a wrapper finds by itself how many rows fit.
        stages: In order; a dict with the fields of a `Stage` works too.
        resize: ``resize(batch, resolution)`` returns the batch at another resolution. It runs on the host batch, or
            wherever the loader left it.
        plan: ``plan(stage)`` returns how many rows fit in a micro-batch; None uses the stage's batch size.
        fits: ``fits(stage, micro_batch_size)`` says whether a stage will fit; None skips the check.
        model: Its BatchNorm statistics are re-estimated at the start of each stage but the first (they depend on the
            resolution), and batches go to its device. It is called with the batch, or the batch's first element. A
            BatchNorm in evaluation mode while others are in training mode counts as frozen and is left unchanged. None
            estimates nothing and moves no batch.
        bn_batches: Batches for that estimate; 0 turns it off.

    Raises:
        ConfigError: There are no stages, or one of them has no batch size.
        InputTypeError: ``step_fn``, ``resize``, ``plan`` or ``fits`` is not a function.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Conv2d(1, 1, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
        >>> def step(batch, rows):
        ...     trainer.train_step(batch, lambda model, micro: model(micro).square().mean())
        >>> progressive = mk.ProgressiveTrainer(
        ...     step, [mk.recipes.Stage(8, batch_size=8), mk.recipes.Stage(16, batch_size=4)],
        ...     resize=lambda batch, side: torch.nn.functional.interpolate(batch, side))
        >>> progressive.run([torch.randn(5, 1, 32, 32) for _ in range(4)])
        8
        >>> trainer.num_steps  # 20 rows: 3 steps of 8, 5 of 4
        8
    """

    def __init__(
        self,
        step_fn: Callable[[Any, int], Any],
        stages: Sequence[Stage | Mapping[str, Any]],
        *,
        resize: Callable[[Any, int], Any],
        plan: Callable[[Stage], int] | None = None,
        fits: Callable[[Stage, int], bool] | None = None,
        model: nn.Module | None = None,
        bn_batches: int = 16,
    ) -> None:
        if not stages:
            raise ConfigError(
                "ProgressiveTrainer(stages=[])",
                got="no stage",
                expected="at least one stage",
                fix="pass at least one stage in stages=[...].",
            )
        check = Checker("ProgressiveTrainer")
        _check_step_fn(step_fn)
        for name, function in (("resize", resize), ("plan", plan), ("fits", fits)):
            if function is not None or name == "resize":
                check.function(name, function)
        self._step_fn, self._resize, self._plan, self._fits = step_fn, resize, plan, fits
        self._stages = tuple(_as_stage(each, number) for number, each in enumerate(_listed(stages)))
        self._model, self._bn_batches = model, Checker("ProgressiveTrainer(...)").whole("bn_batches", bn_batches)
        self._device = None if model is None else device_of(model)
        self._done = (0, 0)  # stages done, and epochs done of the next one

    def run(self, loader: Iterable[Any]) -> int:
        """Run all stages, or those left after `load_state_dict`.

        Args:
            loader: Batches of any size, with the rows in dimension 0; iterated once per epoch. Samplers and datasets
                with a ``set_epoch`` are told the epoch, which keeps counting across stages.

        Returns:
            The number of steps in this run.

        Raises:
            ConfigError: A stage will not fit; nothing has been trained yet.
            InputError: The loader yielded no batches.
        """
        sizes = [self._checked_size(stage, number) for number, stage in enumerate(self._stages)]
        num_steps = 0
        first_stage, first_epoch = self._done
        for number, (stage, size) in enumerate(zip(self._stages, sizes, strict=True)):
            if number < first_stage:
                continue
            begun = first_epoch if number == first_stage else 0
            _LOGGER.info("stage %d: %s, %d rows at a time", number, stage, size)
            num_earlier = sum(each.epochs for each in self._stages[:number])
            if number and not begun:
                tell_epoch(loader, num_earlier)
                self._estimate_batch_norm(loader, stage)
            for epoch in range(begun, stage.epochs):
                tell_epoch(loader, num_earlier + epoch)
                num_before = num_steps
                for batch in self._batches(loader, stage):
                    self._step_fn(batch, size)
                    num_steps += 1
                if num_steps == num_before:
                    raise InputError(
                        f"ProgressiveTrainer.run(loader): stage {number}, epoch {epoch}",
                        got="no batch",
                        expected="a loader that can be iterated once for every epoch",
                        fix="pass a DataLoader or a list, not an iterator.",
                    )
                self._done = (number, epoch + 1) if epoch + 1 < stage.epochs else (number + 1, 0)
        return num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return how many stages and epochs are done."""
        return {"version": _VERSION, "done": list(self._done)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; `run` continues after the last finished epoch.

        Raises:
            FileFormatError: The state has another version.
        """
        check_version("ProgressiveTrainer.load_state_dict(state)", state, _VERSION)
        done = state.get("done")
        numbers = [as_whole(each) for each in done] if isinstance(done, (list, tuple)) else []
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            raise FileFormatError(
                "ProgressiveTrainer.load_state_dict(state)",
                got=f"done={done!r}",
                expected="the result of state_dict()",
                fix="write progressive.load_state_dict(saved), with saved = progressive.state_dict().",
            )
        self._done = (numbers[0], numbers[1])

    def _checked_size(self, stage: Stage, number: int) -> int:
        size = stage.batch_size if self._plan is None else self._plan(stage)
        call = f"ProgressiveTrainer.run(loader): stage {number}, {stage}"
        if not 1 <= size <= stage.batch_size:
            raise ConfigError(
                call,
                got=f"a plan of {size} rows at a time",
                expected=f"1 to {stage.batch_size} rows",
                fix="lower the resolution of this stage, or correct the plan function.",
            )
        if self._fits is not None and not self._fits(stage, size):
            raise ConfigError(
                call,
                got=f"{size} rows at a time, which do not fit into memory",
                expected="enough memory for every stage; no step has been trained yet",
                fix="lower this stage's resolution or its micro-batch, or set checkpoint='auto' on the wrapper.",
            )
        return size

    def _batches(self, loader: Iterable[Any], stage: Stage) -> Iterator[Any]:
        for batch in _regroup(loader, stage.batch_size):
            resized = self._resize(batch, stage.resolution)
            yield resized if self._device is None else to_device(resized, self._device)

    def _estimate_batch_norm(self, loader: Iterable[Any], stage: Stage) -> None:
        if self._model is not None and self._bn_batches:
            estimate_batch_norm(itertools.islice(self._batches(loader, stage), self._bn_batches), self._model)


def _check_step_fn(step_fn: object) -> None:
    """Refuse anything but a function of a batch and a number of rows, such as a model or a wrapper."""
    if isinstance(step_fn, nn.Module) or not callable(step_fn):
        raise InputTypeError(
            "ProgressiveTrainer(step_fn, ...)",
            got=f"a {type(step_fn).__name__}",
            expected="a function step_fn(batch, micro_batch_size) that trains one step",
            fix="write step_fn=lambda batch, rows: trainer.train_step(batch, loss_fn), with "
            "trainer = MemoryEfficientTrainingWrapper(model, optimizer).",
        )


def _listed(stages: Any) -> Sequence[Any]:
    return [stages] if isinstance(stages, (Stage, Mapping)) else stages


def _as_stage(value: Any, number: int) -> Stage:
    """Return a stage, which may be given as a dict of its fields."""
    if isinstance(value, Stage):
        return value
    if isinstance(value, Mapping):
        return Stage(**value)
    fields = value if isinstance(value, (list, tuple)) and 2 <= len(value) <= 3 else (value, "...")
    names = ("resolution", "batch_size", "epochs")
    written = ", ".join(f"{name}={each}" for name, each in zip(names, fields, strict=False))
    raise ConfigError(
        f"ProgressiveTrainer(stages=...): stage {number}",
        got=repr(value),
        expected="a Stage, with its resolution and batch size",
        fix=f"write mk.recipes.Stage({written}).",
    )


@torch.no_grad()
def estimate_batch_norm(batches: Iterable[Any], model: nn.Module) -> None:
    """Re-estimate the running statistics of a model's BatchNorms as the mean over some batches.

    Torch's own `update_bn` puts the whole model into training mode and leaves it there: norms that the user froze would
    be re-estimated too, and trained from then on.
    """
    modes = training_modes(model)
    norms = [each for each, training in modes if isinstance(each, _BATCH_NORMS) and (training or not model.training)]
    norms = [each for each in norms if each.running_mean is not None]
    if not norms:
        return
    before = [{name: buffer.clone() for name, buffer in each.named_buffers(recurse=False)} for each in norms]
    momenta = [each.momentum for each in norms]
    has_batch = is_done = False
    try:
        if not model.training:  # the whole model is in eval mode, such as after a validation
            model.train()
        for each in norms:
            each.reset_running_stats()
            each.momentum = None  # the mean over all batches, each with the same weight
        for batch in batches:
            has_batch = True
            model(batch[0] if isinstance(batch, list | tuple) else batch)
        is_done = has_batch
    finally:
        for each, momentum, buffers in zip(norms, momenta, before, strict=True):
            each.momentum = momentum
            for name, buffer in buffers.items() if not is_done else ():
                each.get_buffer(name).copy_(buffer)
        restore_modes(modes)


def _regroup(loader: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """Yield the same rows in batches of another size; the last one holds the remainder."""
    waiting: list[Any] = []
    num_waiting = 0
    for batch in loader:
        marked = mark_samples(batch)
        start, num_rows = 0, count_rows(marked)
        while num_rows - start >= batch_size - num_waiting:
            stop = start + batch_size - num_waiting
            yield unmark_samples(join_rows([*waiting, take_rows(marked, start, stop, num_rows=num_rows)]))
            waiting, num_waiting, start = [], 0, stop
        if start < num_rows:
            waiting.append(take_rows(marked, start, num_rows, num_rows=num_rows))
            num_waiting += num_rows - start
    if waiting:
        yield unmark_samples(join_rows(waiting))
