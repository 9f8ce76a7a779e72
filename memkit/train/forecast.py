"""Predict the largest micro-batch that fits, from two small runs of the step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, InputError, warn_user
from memkit._core.protocols import MemoryWatch
from memkit._core.recent import keep_newest
from memkit._core.units import format_bytes, parse_budget
from memkit._machine import devices
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import Recording
from memkit._recovery.attempt import Done, Result, attempt, insist
from memkit._recovery.loss_key import LossKinds
from memkit._torch import pytree
from memkit._torch.modules import all_parameters
from memkit._torch.tensors import bytes_held
from memkit.train.chunked_steps import changes_rows_alone
from memkit.train.gradients import list_parameters
from memkit.train.row_sizes import RowSizes, row_sizes, rows_in_turn
from memkit.train.samples import unmark_samples
from memkit.train.split import Surveyor, copied, pick_rows, take_rows
from memkit.train.step_kinds import state_of_step

# Not fewer rows, unless a batch has only 3: one row can take another path (BatchNorm refuses it, products become
# matrix-vector products).
_FEWER_ROWS, _MORE_ROWS = 2, 4
_NUM_FRESH = 2  # steps at which the size is chosen: the first one creates the optimizer's state
_MARGIN = 1 / 16  # of the available memory: alignment, and operators' internal workspace
_HARDLY = 1 / 20  # more than the least: where nothing fits, this is not worth more parts


class _Expected(NamedTuple):
    """The predicted and the largest allowed memory of a step.

    Attributes:
        key: Shape of its batch.
        added_bytes: Bytes that its largest micro-batch was predicted to add.
        allocated_bytes: Bytes allocated on the device before it.
        highest_bytes: The device's peak so far.
        most_bytes: The most that may be allocated.
    """

    key: str
    added_bytes: int
    allocated_bytes: int
    highest_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that a forward and backward add, for any number of rows.

    Memory at every moment of the run grows linearly with the rows, each at its own rate, so the peak is the maximum of
    many lines. It may occur at another moment than in the small runs. Lines that are never the highest are dropped.

    Attributes:
        num_rows: Rows of the smaller run.
        added_bytes: Bytes added at moments of that run: float64, shape ``(num_lines,)``.
        slopes: Bytes per additional row, same shape, ascending.
    """

    num_rows: int
    added_bytes: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64]

    @classmethod
    def between(cls, fewer: Recording, more: Recording, num_rows: tuple[int, int]) -> Forecast:
        """Fit the lines through two runs; if their events do not correspond, one line through the peaks.

        Args:
            fewer: The run with fewer rows.
            more: The run with more.
            num_rows: Rows of the two.
        """
        small, large = _added(fewer), _added(more)
        if _operators(fewer) != _operators(more):
            small, large = small.max(initial=0, keepdims=True), large.max(initial=0, keepdims=True)
        slopes = np.maximum(large - small, 0) / (num_rows[1] - num_rows[0])
        highest = _upper_envelope(small, slopes)
        return cls(num_rows[0], small[highest], slopes[highest])

    def peak_bytes(self, num_rows: int) -> int:
        """Return the bytes that a micro-batch of this many rows adds at its peak."""
        return math.ceil(float((self.added_bytes + (num_rows - self.num_rows) * self.slopes).max(initial=0)))

    def joined(self, other: Forecast) -> Forecast:
        """Return a forecast of the higher peak of the two."""
        heights = other.added_bytes + (self.num_rows - other.num_rows) * other.slopes
        heights = np.concatenate([self.added_bytes, heights])
        slopes = np.concatenate([self.slopes, other.slopes])
        highest = _upper_envelope(heights, slopes)
        return Forecast(self.num_rows, heights[highest], slopes[highest])

    def scaled(self, factor: float) -> Forecast:
        """Return a forecast of peaks that are this many times higher."""
        return Forecast(self.num_rows, factor * self.added_bytes, factor * self.slopes)

    def max_rows(self, available_bytes: int, at_most: int) -> int:
        """Return the most rows, between 1 and `at_most`, that fit into the available bytes; 1 if none do."""
        low, high = 1, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_bytes(middle) <= available_bytes:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(slots=True)
class _Known:
    """The forecasts for steps of one kind.

    Attributes:
        forecasts: By the shape of the batch; None where the runs failed.
        num_rows: By shape, the rows of the widest batch that a forecast knows, up to those run.
        largest: By shape and kind of size, that of the largest row that a forecast knows.
        indifferent: Kinds of size on which memory does not depend.
        plans: By shape, the number of times planned, and the rows that fit.
    """

    forecasts: dict[str, Forecast | None] = field(default_factory=dict)
    num_rows: dict[str, int] = field(default_factory=dict)
    largest: dict[str, dict[Hashable, int]] = field(default_factory=dict)
    indifferent: set[Hashable] = field(default_factory=set)
    plans: dict[str, tuple[int, int]] = field(default_factory=dict)


class PartPlanner:
    """Chooses the number of parts of a batch so that each fits into the available memory, before any is run.

    Steps with another loss function, with parameters of other sizes or dtypes, with others of them trained, or with
    modules in other modes take other memory: they are predicted anew.

    Args:
        memory: A memory manager, or a budget; None turns prediction off.
        model: The model.
        optimizers: Its optimizers.
        device: The model's device.
        sum_dtype: Minimum dtype in which gradients of several parts add up; None uses their parameters' dtypes.
        ways_to_less: Returns what the user may still set to let a step take less, for messages.
        is_predictable: Whether batches have rows, and this process may run some of them on its own.

    Raises:
        ConfigError: A budget was given, but memory use cannot be predicted.
    """

    def __init__(
        self,
        memory: MemoryWatch | int | str | float | None,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        sum_dtype: torch.dtype | None,
        ways_to_less: Callable[[], Sequence[str]],
        is_predictable: bool,
    ) -> None:
        self._watch = None if memory is None or isinstance(memory, int | str | float) else memory
        if memory is not None and self._watch is None and not is_predictable:
            raise ConfigError(
                f"MemoryEfficientTrainingWrapper(memory={memory!r})",
                got="a memory budget for a step whose memory per micro-batch cannot be predicted",
                expected="batches with rows (no split_fn), no sharded parameters and no SyncBatchNorm over ranks",
                fix="omit memory=..., and set accumulation_steps.",
            )
        self.is_on = memory is not None and is_predictable
        self.has_manager = self._watch is not None
        self._available_bytes = None if memory is None else _reader(memory, model, optimizers, device)
        self._model, self._optimizers, self._ways_to_less = model, optimizers, ways_to_less
        self._device = device
        self._expected: _Expected | None = None
        self._sum_itemsize = sum_dtype.itemsize if sum_dtype else 0
        self._surveyor = Surveyor("MemoryEfficientTrainingWrapper(memory=...)")
        self._known = _Known()  # of the current kind of step
        self._kinds: dict[object, _Known] = {}  # the last ones, as loops alternate between losses, or networks
        self._losses = LossKinds()
        self._failure, self._has_warned, self._has_warned_of_a_row, self._has_warned_of_more = "", False, False, False
        self._has_warned_of_sparse = self._has_warned_of_losses = False

    def in_phase(self, name: str, run: Callable[..., Result], *args: Any) -> Result:
        """Call ``run(*args)`` in a phase of the manager, if there is one."""
        if self._watch is None:
            return run(*args)
        with self._watch.phase(name):
            return run(*args)

    def mark_ooms(self, num_ooms: int, sizes: Sequence[int]) -> None:
        """Report to the manager, if any, the out-of-memory errors that the step survived, and how it was split."""
        if self._watch is not None:
            self._watch.mark("oom", note={"num_ooms": num_ooms, "sizes": list(sizes)})

    def num_parts(self, batch: Any, loss_fn: object, at_least: int, rehearse: Callable[[Any], None]) -> int:
        """Choose how many parts to split a batch into.

        Args:
            batch: The batch.
            loss_fn: The loss function.
            at_least: Minimum number of parts.
            rehearse: Runs forward and backward on a part without side effects; called a few times for each new shape.
        """
        if self._failure and not self._has_warned:  # the step itself succeeded, since this is called again
            self._has_warned = True
            warn_user(f"MemoryEfficientTrainingWrapper: memory=... is ignored, because {self._failure}.")
        self._expected = None
        try:
            marked, num_rows, key, _ = self._surveyor.survey(batch)
        except InputError as error:  # it may stay whole; splitting it reports the error
            self._failure = (
                f"the batch cannot be cut: {error.got}. Way out: omit memory=..., {self._other_way(batch, error)}"
            )
            return at_least
        if num_rows:
            self._turn_to(loss_fn)
            self._learn(key, marked, num_rows, rehearse)
        forecast, plans = self._known.forecasts.get(key), self._known.plans
        if forecast is None or num_rows == 0:
            return at_least
        num_plans, max_rows = plans.get(key, (0, 0))
        if num_plans < _NUM_FRESH or num_rows > max_rows:
            max_rows = self._plan(forecast, num_rows, at_least)
            plans[key] = num_plans + 1, max_rows
        num_parts = max(at_least, math.ceil(num_rows / max_rows))
        self._expect(key, forecast.peak_bytes(math.ceil(num_rows / num_parts)))
        return num_parts

    def _other_way(self, batch: Any, error: InputError) -> str:
        """Return what to do with a batch that cannot be cut, and so has no micro-batch to predict."""
        if pytree.tree_leaves(batch):
            return f"set accumulation_steps, and {error.fix.rstrip('.')}"
        # (), for a loss that holds the data: no split_fn could cut it.
        ways = self._ways_to_less()
        setting = f"set {' or '.join(ways)}; or " * bool(ways)
        return f"and {setting}plan the step, memkit.prepare(model, optimizer, (), loss_fn, budget=...)"

    def _turn_to(self, loss_fn: object) -> None:
        """Turn to the forecasts for the current kind of step; begin with none if it is new."""
        kind = self._losses.kind_of(loss_fn), state_of_step(self._model, self._optimizers)
        self._known = self._kinds.get(kind) or _Known()
        keep_newest(self._kinds, kind, self._known)
        if self._losses.pools_objects and not self._has_warned_of_losses:
            self._has_warned_of_losses = True
            warn_user(
                "MemoryEfficientTrainingWrapper: for memory=... the steps of several loss objects were predicted, each "
                "by itself, and there are ever new ones. From now on they are predicted as if they were one, so a step "
                "may take more than memory=... allows. Way out: make each loss once, before the loop, and pass it to "
                "trainer.train_step(batch, loss_fn)."
            )

    def _expect(self, key: str, added_bytes: int) -> None:
        """Note what the next step may take, if it was predicted to fit and the device counts what it takes."""
        before = devices.allocator_counters(self._device)
        allocated, highest = before.allocated_bytes, before.peak_bytes
        # A manager's bytes are the device's own: a step that takes more of them runs out of memory.
        if self._available_bytes is None or self.has_manager or allocated is None or highest is None:
            return
        available_bytes = self._available_bytes()
        if added_bytes <= available_bytes:
            self._expected = _Expected(key, added_bytes, allocated, highest, allocated + available_bytes)

    def look_back(self) -> None:
        """After a step's micro-batches: if they took more than the budget, raise their forecast, and tell it once."""
        expected, self._expected = self._expected, None
        if expected is None:
            return
        peak_bytes, forecast = devices.peak_bytes(self._device) or 0, self._known.forecasts.get(expected.key)
        if forecast is None or peak_bytes <= max(expected.highest_bytes, expected.most_bytes):
            return
        more = (peak_bytes - expected.allocated_bytes) / max(1, expected.added_bytes)
        self._known.forecasts[expected.key] = forecast.scaled(max(1.0, more))
        self._known.plans.pop(expected.key, None)
        if not self._has_warned_of_more:
            self._has_warned_of_more = True
            warn_user(
                "MemoryEfficientTrainingWrapper: a step took "
                f"{format_bytes(peak_bytes - expected.most_bytes)} more than memory=... allows: its rows took more "
                "memory than the few that were run to predict it. Batches of these shapes are cut smaller from now on. "
                "Way out, if that comes too late: set accumulation_steps."
            )

    def _learn(self, key: str, marked: Any, num_rows: int, rehearse: Callable[[Any], None]) -> None:
        """Make a forecast with the largest rows of a batch, if its shape is new, or rows are larger than known ones."""
        found = insist(functools.partial(row_sizes, marked), "looking at a batch for its largest rows")
        of_kind = self._known
        sizes = [each for each in found if each.kind not in of_kind.indifferent]
        known, largest = of_kind.forecasts.get(key), of_kind.largest.setdefault(key, {})
        is_wider = min(num_rows, _MORE_ROWS) > of_kind.num_rows.get(key, 0)  # the first one, or after smaller batches
        if not is_wider and not any(_is_larger(each, largest.get(each.kind, 0)) for each in sizes):
            return
        of_kind.num_rows[key] = max(min(num_rows, _MORE_ROWS), of_kind.num_rows.get(key, 0))
        orders = [each.order() for each in sizes]

        def take(rows: int) -> Any:
            if not orders:
                return take_rows(marked, 0, rows, num_rows=num_rows)
            return pick_rows(marked, sorted(rows_in_turn(orders, rows)), num_rows=num_rows)

        forecast = self._forecast(take, rehearse, num_rows)
        of_kind.forecasts[key] = forecast if is_wider or forecast is None or known is None else forecast.joined(known)
        of_kind.plans.pop(key, None)
        for each in sizes:
            largest[each.kind] = max(each.largest, largest.get(each.kind, 0))
            if forecast is not None and _may_not_matter(each) and self._takes_the_same(each, marked, rehearse):
                of_kind.indifferent.add(each.kind)

    def _takes_the_same(self, sizes: RowSizes, marked: Any, rehearse: Callable[[Any], None]) -> bool:
        """Whether the largest and the smallest rows of a batch take the same memory at each moment."""
        order = sizes.order()

        def record(rows: Sequence[int]) -> Recording:
            return _recorded(pick_rows(marked, sorted(rows), num_rows=len(order)), rehearse)

        def is_same() -> bool:
            large, small = record(order[:_FEWER_ROWS]), record(order[-_FEWER_ROWS:])
            return np.array_equal(_added(large), _added(small)) and _operators(large) == _operators(small)

        outcome = attempt(is_same, others=(Exception,))
        return isinstance(outcome, Done) and outcome.result

    def _forecast(self, take: Callable[[int], Any], rehearse: Callable[[Any], None], num_rows: int) -> Forecast | None:
        """Make a forecast from runs of rows of a batch that has this many; None if they fail."""

        def record(rows: int) -> Recording:
            return _recorded(take(rows), rehearse)

        run = self._of_few if num_rows < _MORE_ROWS else self._of_many
        outcome = attempt(run, record, num_rows, others=(Exception,))
        if not isinstance(outcome, Done):  # the step itself reports the error
            self._failure = (
                "the memory of a micro-batch could not be predicted: running a few rows of a batch failed with "
                f"{outcome.description}. Way out: set accumulation_steps"
            )
            return None
        return outcome.result

    def _of_many(self, record: Callable[[int], Recording], _: int) -> Forecast:
        fewer = record(_FEWER_ROWS)
        alone = self._of_one_run(fewer, _FEWER_ROWS)
        if self._may_fit(alone, _MORE_ROWS):
            return Forecast.between(fewer, record(_MORE_ROWS), (_FEWER_ROWS, _MORE_ROWS))
        outcome = attempt(record, 1, others=(Exception,))  # it may be refused, as by a BatchNorm
        return Forecast.between(outcome.result, fewer, (1, _FEWER_ROWS)) if isinstance(outcome, Done) else alone

    def _of_few(self, record: Callable[[int], Recording], num_rows: int) -> Forecast:
        outcome = attempt(record, 1, others=(Exception,))
        if not isinstance(outcome, Done):
            return self._of_one_run(record(num_rows), num_rows)
        alone = self._of_one_run(outcome.result, 1)
        if num_rows == 1 or not self._may_fit(alone, num_rows):
            return alone
        return Forecast.between(outcome.result, record(num_rows), (1, num_rows))

    def _of_one_run(self, run: Recording, num_rows: int) -> Forecast:
        """Make a forecast in which all but the gradients grows with the rows."""
        peak_bytes = float(_added(run).max(initial=0))
        of_gradients = min(peak_bytes, sum(each.nbytes for each in list_parameters(self._optimizers)))
        return Forecast(num_rows, np.array([peak_bytes]), np.array([(peak_bytes - of_gradients) / num_rows]))

    def _may_fit(self, forecast: Forecast, num_rows: int) -> bool:
        return self._available_bytes is None or forecast.peak_bytes(num_rows) <= self._available_bytes()

    def _plan(self, forecast: Forecast, num_rows: int, at_least: int) -> int:
        """Return the most rows of a part of a batch that has this many, and is cut into at least so many parts."""
        assert self._available_bytes is not None  # noqa: S101 - there is a forecast
        budget_bytes = self._available_bytes()
        available = math.floor(budget_bytes * (1 - _MARGIN))
        self._warn_of_sparse(forecast.peak_bytes(num_rows), available)
        if forecast.peak_bytes(num_rows) <= available:
            return num_rows
        parameters = list_parameters(self._optimizers)
        # Of the parts' gradients, which a batch that stays whole does without. It is added to a run that holds all of
        # its own gradients, though a part holds each only until it is in the sum: cautious by up to as much.
        sum_bytes = sum(each.numel() * max(self._sum_itemsize, each.itemsize) for each in parameters)
        row_bytes = forecast.peak_bytes(1) + sum_bytes
        if row_bytes <= available:
            return forecast.max_rows(available - sum_bytes, num_rows)
        whole_bytes = forecast.peak_bytes(num_rows) + (sum_bytes if at_least > 1 else 0)
        least_bytes = min(row_bytes, whole_bytes)
        most_bytes = math.floor((1 + _HARDLY) * least_bytes)
        if least_bytes <= budget_bytes:  # it may fit if there is little beside it, so nothing larger is tried
            most_bytes = min(most_bytes, budget_bytes)
        max_rows = num_rows if whole_bytes <= most_bytes else forecast.max_rows(most_bytes - sum_bytes, num_rows)
        of_sum = f", and the sum of the parts' gradients {format_bytes(sum_bytes)} more" * (num_rows > 1)
        needed = f"{format_bytes(forecast.peak_bytes(1))}{of_sum}, but only {format_bytes(available)}"
        self._warn_of_a_row(needed, num_rows, max_rows)
        return max_rows

    def _warn_of_a_row(self, needed: str, num_rows: int, max_rows: int) -> None:
        """Warn, once, that not even one row may fit, and say in what parts the batch is tried."""
        if self._has_warned_of_a_row:
            return
        self._has_warned_of_a_row = True
        how = f" in {math.ceil(num_rows / max_rows)} parts: smaller ones would take hardly less"
        if max_rows == num_rows:
            how = ", and the batch is not cut for it: parts would take hardly less" * (num_rows > 1)
        elif max_rows == 1:
            how = " row by row"
        ways = " or ".join([*self._ways_to_less(), "a larger budget"])
        warn_user(
            f"MemoryEfficientTrainingWrapper: forward and backward of a single row are predicted to take {needed} are "
            f"available (memory=...). The step is tried anyway{how}. Way out: set {ways}."
        )

    def _warn_of_sparse(self, peak_bytes: int, available_bytes: int) -> None:
        """Warn, once, if what sparse gradients take beside forward and backward may not fit."""
        if self._has_warned_of_sparse:
            return
        # A sum of the parts has an entry for each row of them, and is put together anew; the step keeps the old rows.
        tables = _sparse_tables(self._model)
        table_bytes = sum(
            each.nbytes
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in tables and not changes_rows_alone(optimizer, group)
        )
        if tables and 2 * peak_bytes + table_bytes > available_bytes:
            self._has_warned_of_sparse = True
            warn_user(
                "MemoryEfficientTrainingWrapper: memory=... does not count all that the gradients of embeddings with "
                "sparse=True take: the sum over several parts is as large as for the whole batch, twice while a part "
                "is added, and the optimizer's step keeps a copy of what it changes. A step may take more. "
                "Way out: set sparse=False, or allow for "
                f"{format_bytes(2 * peak_bytes + table_bytes - available_bytes)} more."
            )


def _sparse_tables(model: nn.Module) -> set[int]:
    """Return the ids of the tables that get sparse gradients."""
    tables = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse]
    return {id(each.weight) for each in tables if each.weight.requires_grad}


def _reader(
    memory: MemoryWatch | int | str | float, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> Callable[[], int]:
    """Return a function for the bytes that tensors may still take: the manager's own, or the rest of a budget.

    A budget counts the bytes allocated on the device; on the CPU, which has no counter, the model, its gradients and
    the optimizers' state.
    """
    if not isinstance(memory, int | str | float):
        if device.type != "cpu":
            return memory.available_bytes
        first: int | None = None

        def available() -> int:
            # The C library keeps memory that a step has freed, and a later reading would count it as used.
            nonlocal first
            held, now = _held_bytes(model, optimizers), memory.available_bytes()
            first = held + now if first is None else first
            return max(now, first - held)

        return available
    total = devices.host_memory().total_bytes if device.type == "cpu" else devices.device_memory(device).total_bytes
    budget_bytes = parse_budget(memory, total, name="memory")

    def left() -> int:
        allocated = devices.allocator_counters(device).allocated_bytes
        return max(0, budget_bytes - (_held_bytes(model, optimizers) if allocated is None else allocated))

    return left


def _held_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    parameters = all_parameters(model)
    held: list[Any] = [*parameters, *model.buffers(), *(each.grad for each in parameters)]
    held += pytree.tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
    return sum({id(each): bytes_held(each) for each in held if isinstance(each, torch.Tensor)}.values())


def _recorded(part: Any, rehearse: Callable[[Any], None]) -> Recording:
    part = copied(unmark_samples(part))  # the model may write to it
    with Recorder() as recorder:
        rehearse(part)
    return recorder.recording()


def _is_larger(sizes: RowSizes, known: int) -> bool:
    """Whether a batch has a larger row than is known; the largest that there can be is not read again."""
    return known < sizes.limit and sizes.largest > known


def _may_not_matter(sizes: RowSizes) -> bool:
    """Whether rows are worth a comparison: samples of different sizes surely take other memory, like rows may not."""
    return isinstance(sizes.entry, torch.Tensor) and sizes.largest < sizes.limit and sizes.is_wide


def _added(recording: Recording) -> npt.NDArray[np.float64]:
    """Return the bytes in storages that the run created, after each event."""
    is_older = recording.is_older[recording.event_storage]
    return np.cumsum(np.where(is_older, 0, recording.event_bytes), dtype=np.float64)


def _upper_envelope(heights: npt.NDArray[np.float64], slopes: npt.NDArray[np.float64]) -> list[int]:
    """Return the indices of the lines that are highest somewhere, by slope: a few of a run's thousands."""
    kept: list[tuple[float, float, int]] = []
    for i in np.lexsort((heights, slopes)).tolist():
        height, slope = float(heights[i]), float(slopes[i])
        while kept:
            last_height, last_slope, _ = kept[-1]
            if last_slope < slope:
                if len(kept) == 1:
                    break
                first_height, first_slope, _ = kept[-2]
                # Is the last line above the intersection of the new line and the second to last?
                if (first_height - height) * (last_slope - first_slope) > (first_height - last_height) * (
                    slope - first_slope
                ):
                    break
            kept.pop()
        kept.append((height, slope, i))
    return [i for _, _, i in kept]


def _operators(recording: Recording) -> list[str]:
    names = recording.names["operator"]
    return [names[code] for code in recording.codes["operator"][recording.event_storage].tolist()]
