"""Choice of chunk sizes, from bytes measured on the function itself and never from timings.

Therefore the same call is cut the same way in every run, with the same rounding.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import ceil, inf, log
from typing import Any, Literal, Protocol, SupportsIndex, cast
from weakref import WeakKeyDictionary

from memkit._core.errors import ConfigError, InputTypeError
from memkit._core.settings import as_whole, nearest_word
from memkit._core.units import MIB, format_bytes, parse_bytes
from memkit._torch.dispatch import fake_mode

ChunkSize = SupportsIndex | Literal["auto"]

_FIRST_SIZE = 4  # a single row can take another code path: matrix-vector products
# Chunk memory without a budget. On a CPU a share of the last-level cache: measured, 4 to 64 MiB are equally fast. On an
# accelerator a chunk must outweigh the kernel launch overhead; not measured yet.
_CPU_BYTES, _ACCELERATOR_BYTES = 16 << 20, 256 << 20
_FILL = 0.97  # of a budget: the rest allows for allocator rounding
_MAX_REFINEMENTS = 3
_SAME = 0.9  # a measured size is reused if it is at least this fraction of the wanted size
_MAX_KINDS = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured memory of one chunk, forward and backward.

    Attributes:
        num_rows: Number of rows.
        forward_bytes: Peak in the forward, without the memory that the call holds regardless of chunking: the result,
            running sums.
        backward_bytes: Peak in the backward, without the result, running sums, and the gradients of the call.
        kept_bytes: Memory that its graph holds between forward and backward.
        segment_bytes: Additional memory of the call per segment of its result, in the forward and in the backward.
        product_bytes: Memory of its results of matrix products and convolutions, with which the backward recomputes
            only the rest.
    """

    num_rows: int
    forward_bytes: int
    backward_bytes: int = 0
    kept_bytes: int = 0
    segment_bytes: tuple[int, int] = (0, 0)
    product_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a call is cut.

    Attributes:
        chunk_size: Rows of a chunk.
        num_chunks: Number of chunks.
        num_kept: Number of chunks whose graphs are kept, which saves recomputing them in the backward.
        num_partly_kept: Number of chunks of which the results of matrix products and convolutions are kept, which saves
            recomputing these: most of the time in less memory.
        fixed_bytes: Memory that the call holds regardless of chunking: the gradients it creates, and running sums.
            Without the result.
        predicted_peak_bytes: Predicted peak memory of the call beyond its arguments and its result.
        measured_peak_bytes: Measured peak of a trial call with one such chunk, on the same terms.
    """

    chunk_size: int
    num_chunks: int
    num_kept: int
    num_partly_kept: int
    fixed_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int


def as_size(call: str, chunk_size: object, memory_budget: SupportsIndex | str | None) -> int | Sizer:
    """Read the two settings of a call.

    Args:
        call: The user's call, for messages.
        chunk_size: A number of rows, or ``"auto"``.
        memory_budget: Bytes or text, or None.

    Raises:
        ConfigError: The size is neither a number nor ``"auto"``, or a budget comes with a number.
    """
    if is_auto(chunk_size):
        return Sizer(memory_budget, call)
    size = check_chunk_size(call, chunk_size)
    if memory_budget is not None:
        raise ConfigError(
            call,
            got=f"memory_budget={memory_budget!r} with chunk_size={size}",
            expected="a memory_budget only with chunk_size='auto', which chooses a size within that budget",
            fix="omit chunk_size, or omit memory_budget.",
        )
    return size


def is_auto(chunk_size: object) -> bool:
    """Return whether the size must be chosen."""
    return isinstance(chunk_size, str) and chunk_size == "auto"


def check_chunk_size(call: str, chunk_size: object) -> int:
    """Return the number of rows; refuse an invalid one."""
    size = as_whole(chunk_size)
    if size is None or size < 1:
        raise ConfigError(
            call,
            got=f"chunk_size={chunk_size!r}",
            expected="a whole number of rows, at least 1, or 'auto'",
            fix=f"pass chunk_size={_meant(chunk_size)}.",
        )
    return size


def _meant(chunk_size: object) -> str:
    """Return the size that was probably meant."""
    if isinstance(chunk_size, str) and nearest_word(chunk_size, ["auto"]):
        return "'auto'"
    if isinstance(chunk_size, float | str) and not isinstance(chunk_size, bool):
        with contextlib.suppress(ValueError, OverflowError):
            if (number := float(chunk_size)) >= 1:
                return str(int(number))
    return "'auto', or for example 4096"


class Problem(Protocol):
    """A call whose chunk size is to be chosen.

    Attributes:
        name: The user's call, for messages.
        num_rows: Number of rows.
        is_on_cpu: Whether its tensors are in host memory.
        elsewhere: Text before the way out if not even one row fits, with an alternative; may be empty.
    """

    name: str
    num_rows: int
    is_on_cpu: bool
    elsewhere: str

    def kind(self) -> Hashable:
        """Return the key under which measurements are stored, independent of the number of rows."""

    def held_bytes(self, found: Measurement) -> tuple[int, int]:
        """Return bytes held regardless of chunking, in the forward and in the backward: running sums, gradients."""

    def measure(self, num_rows: int) -> Measurement:
        """Run a chunk of this many rows, forward and backward, as the call would."""


class _Learned:
    """Measurements of calls by their kind and number of rows, and how the last call was cut."""

    def __init__(self) -> None:
        self.kinds: OrderedDict[Hashable, dict[int, Measurement]] = OrderedDict()
        self.last: ChunkPlan | None = None


class Sizer:
    """Chooses how calls are cut, and remembers its measurements.

    Calls on tensors without data use what calls with data have measured. What they measure themselves is not exact
    (kernels run without their scratch memory): it is forgotten with their mode, and no call with data uses it.

    Args:
        budget: Peak memory of a call beyond its arguments and its result, in bytes, or text such as ``"512MiB"``; None
            for a chunk as large as is useful for speed.
        call: The user's call, for messages.

    Raises:
        ConfigError: The budget is zero or invalid.
        InputTypeError: It is not a size.
    """

    def __init__(self, budget: object, call: str = "ChunkedProcessor(fn)") -> None:
        if isinstance(budget, float) or (isinstance(budget, str) and budget.rstrip().endswith("%")):
            is_size = isinstance(budget, float) and MIB <= budget < inf
            raise InputTypeError(
                call,
                got=f"memory_budget={budget!r}",
                expected="bytes as an int, or text with a unit; not a fraction, since a call does not know its share",
                fix=f"pass memory_budget={int(float(budget)) if is_size else repr('512MiB')}.",
            )
        name = f"{call}: memory_budget"
        self.budget_bytes = None if budget is None else parse_bytes(cast("str", budget), name=name, is_large=True)
        if self.budget_bytes == 0:
            raise ConfigError(
                call,
                got=f"memory_budget={budget!r}",
                expected="a number of bytes above zero, or text such as '512MiB'",
                fix="omit memory_budget to choose chunks for speed alone.",
            )
        self._learned = _Learned()
        self._simulated: WeakKeyDictionary[Any, _Learned] = WeakKeyDictionary()  # by the mode

    def __getstate__(self) -> dict[str, Any]:
        """Leave the measurements out of a pickle or a copy: they name modules by their place in this process."""
        return {"budget_bytes": self.budget_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore without measurements."""
        vars(self).update(state, _learned=_Learned(), _simulated=WeakKeyDictionary())

    @property
    def last(self) -> ChunkPlan | None:
        """How the last call was cut."""
        return self._here().last

    def _here(self) -> _Learned:
        mode = fake_mode()
        return self._learned if mode is None else self._simulated.setdefault(mode, _Learned())

    def plan(self, problem: Problem) -> ChunkPlan:
        """Choose how one call is cut.

        Raises:
            ConfigError: Not even one row fits into the budget.
        """
        kind, here = problem.kind(), self._here()
        with_data = self._learned.kinds.get(kind, {})
        known = here.kinds.pop(kind, None)  # reinserted below as the newest
        if known is None:
            known = dict(with_data)
        try:
            here.last = plan = _Choice(problem, known, self.budget_bytes).make()
        finally:
            here.kinds[kind] = known
            if len(here.kinds) > _MAX_KINDS:
                here.kinds.popitem(last=False)
        guesses = getattr(fake_mode(), "guesses", None)
        if guesses is not None and plan.num_chunks > 1 and known.keys() - with_data.keys():
            guesses.cuts_rows(plan.chunk_size)
        return plan


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A measured size, with the memory the call always holds and the size-independent part of a chunk's backward."""

    found: Measurement
    held: tuple[int, int]
    base: int
    keeps_products: bool = True

    @property
    def num_rows(self) -> int:
        return self.found.num_rows

    @property
    def kept_bytes(self) -> int:
        return self.found.kept_bytes

    @property
    def product_bytes(self) -> int:
        """Memory in which its products are kept; 0 if they are not, or its graph is hardly larger."""
        is_smaller = self.found.product_bytes < _SAME * self.kept_bytes
        return self.found.product_bytes if self.keeps_products and is_smaller else 0

    @property
    def unit_bytes(self) -> int:
        """Memory that saves recomputing it, or most of it."""
        return self.product_bytes or self.kept_bytes

    @property
    def peak_bytes(self) -> int:
        """Memory it adds to the memory that the call always holds."""
        return max(self.grown(1.0), self.kept_bytes, 1)

    def grown(self, factor: float) -> int:
        """Return the memory of a chunk whose row-dependent part is ``factor`` times as large."""
        in_forward, in_backward = self.held
        found = self.found
        # Parameter gradients can hide the rows' backward memory: assume at least twice their forward memory.
        rows = max(found.backward_bytes - self.base, 2 * found.forward_bytes)
        backward = min(factor * found.backward_bytes, self.base + factor * rows)
        return int(max(in_forward + factor * found.forward_bytes, in_backward + backward)) - max(self.held)

    @property
    def least_bytes(self) -> int:
        """Memory it would add with zero rows."""
        in_forward, in_backward = self.held
        return max(in_forward, in_backward + self.base) - max(self.held)

    def rows_in(self, room: int, more: int = 0) -> int:
        """Return how many rows fit, with ``more`` equal chunks kept in addition, assuming linear growth."""
        total, found = room + max(self.held), self.found
        factors = [
            (total - held) / (taken + more * self.unit_bytes)
            for held, taken in zip(self.held, (found.forward_bytes, found.backward_bytes), strict=True)
            if taken > 0
        ]
        return max(1, int(self.num_rows * min(factors, default=1.0)))


def plan_of(problem: Problem, chunk_size: int) -> ChunkPlan:
    """Return the plan of a call whose size is given."""
    found = problem.measure(max(1, min(chunk_size, problem.num_rows)))
    chunk = _Chunk(found, problem.held_bytes(found), 0)
    peak = max(chunk.held) + chunk.peak_bytes
    return ChunkPlan(chunk_size, max(1, -(-problem.num_rows // chunk_size)), 0, 0, max(chunk.held), peak, peak)


class _Choice:
    """A choice among sizes that were measured.

    Sizes grow by a factor of four or two, as long as the measurements so far do not predict that the next one exceeds
    the limit. Kernels change with the size, so only measured sizes are used. The last k chunks keep their graphs, and
    take ``peak + (k - 1) * kept`` together: the backward of the last one begins while the other graphs still exist.
    If the room holds the matrix products and convolutions of all chunks, but not all graphs, chunks keep these alone.
    With a budget the size is then adjusted so that whole graphs, or products, fill it.

    Args:
        problem: The call to cut.
        known: Earlier measurements by number of rows; new ones are added.
        budget_bytes: Limit that may not be exceeded and is worth filling; None for a chunk as large as is useful for
            speed.
    """

    def __init__(self, problem: Problem, known: dict[int, Measurement], budget_bytes: int | None) -> None:
        self._problem, self._known, self._num_rows = problem, known, max(problem.num_rows, 1)
        self._budget, self._keeps_products = budget_bytes, True
        self._first_size = min(_FIRST_SIZE, self._num_rows)
        first = self._measured(self._first_size)
        self._held, self._base = problem.held_bytes(first), 0
        if self._first_size > 1:
            half = self._measured(self._first_size // 2)
            per_row = (first.backward_bytes - half.backward_bytes) / (first.num_rows - half.num_rows)
            self._base = max(0, int(first.backward_bytes - per_row * first.num_rows))

    def make(self) -> ChunkPlan:
        """Choose a plan."""
        fixed, best = max(self._held), self._try(self._first_size)
        target = _CPU_BYTES if self._problem.is_on_cpu else _ACCELERATOR_BYTES
        base = best.least_bytes  # parameter gradients, for example: longer chunks do not make them larger
        room = base + target if self._budget is None else int(_FILL * self._budget) - fixed
        tried = [best]
        while best.peak_bytes > room and best.num_rows > 1:
            best = self._try(best.num_rows // 2)
            tried.append(best)
        if self._budget is None:  # without a budget one row may take more
            room = max(room, best.peak_bytes)
        elif best.peak_bytes > room:  # one row can take more than several: kernels change with the size
            self._refuse(min(tried, key=lambda each: each.peak_bytes), room, fixed)
        # Large chunks and a few graphs are faster than small chunks and many graphs: measured on a CPU.
        rest = room - base
        limit = room if rest <= 2 * target else base + target
        # Products save more time per byte than graphs: if half of the room holds those of all rows, it is reserved for
        # them. Those of some rows save less than larger chunks do: measured on a CPU.
        self._keeps_products = 0 < best.product_bytes * self._num_rows <= rest // 2 * best.num_rows
        if self._keeps_products:
            limit = base + min(rest, target, max(rest, target) // 2)
        best = self._try(best.num_rows)
        best = self._largest(best, room, max(limit, best.peak_bytes))
        num_chunks = max(1, -(-self._num_rows // best.num_rows))
        num_kept, num_partly_kept, peak = self._keep(best, room, num_chunks)
        return ChunkPlan(
            chunk_size=best.num_rows,
            num_chunks=num_chunks,
            num_kept=num_kept,
            num_partly_kept=num_partly_kept,
            fixed_bytes=fixed,
            predicted_peak_bytes=fixed + peak,
            measured_peak_bytes=fixed + best.peak_bytes,
        )

    def _largest(self, best: _Chunk, room: int, limit: int) -> _Chunk:
        """Return the largest size within the limit, or one that fills the room with whole graphs."""
        growth = 1.0
        while factor := _factor(best, self._num_rows, growth, limit):
            found = self._near(min(best.num_rows * factor, self._num_rows))
            if found.num_rows == best.num_rows:
                break
            if found.peak_bytes > limit:  # another kernel: earlier sizes did not predict it
                return best
            growth = max(1.0, _growth(best, found))
            best = found
        if self._budget is None:
            return best
        for _ in range(_MAX_REFINEMENTS):
            unit = best.unit_bytes * best.rows_in(limit) // best.num_rows
            more = -(-(room - limit) // unit) if unit > 0 else 0
            size = min(best.rows_in(room, more), best.rows_in(limit), self._num_rows)
            found = self._near(size)
            if found.num_rows == best.num_rows or found.peak_bytes > limit:
                break
            best = found
        return best

    def _near(self, size: int) -> _Chunk:
        """Return the size itself, or the largest already measured size that is slightly smaller."""
        if size in self._known:
            return self._try(size)
        return self._try(max((rows for rows in self._known if _SAME * size <= rows <= size), default=size))

    def _keep(self, chunk: _Chunk, room: int, num_chunks: int) -> tuple[int, int, int]:
        """Return for how many chunks the graphs fit, for how many others the products, and the peak with both."""
        kept, part = chunk.kept_bytes, chunk.product_bytes
        if kept <= 0:
            return 0, 0, chunk.peak_bytes
        # The last chunk may be short. Its backward comes first, then that of a full chunk.
        last = self._num_rows - (num_chunks - 1) * chunk.num_rows
        short = min(self._try(size).peak_bytes for size in list(self._known) if size >= last)
        short = min(short, chunk.peak_bytes)
        # The first chunk's products are not kept: a function may compute more in its first call.
        most = min(num_chunks - 2, (room - chunk.peak_bytes) // part) if part and num_chunks > 2 else 0

        def plan(count: int) -> tuple[int, int, int]:
            num_parts = min(most, num_chunks - 1 - count)
            peak = max(chunk.peak_bytes + max(count - 2, 0) * kept, short + (count - 1) * kept)
            return count, max(num_parts, 0), peak + max(num_parts, 0) * part

        # If the products of all chunks fit, graphs replace products.
        step = kept - part if most == num_chunks - 2 else kept
        rest = room - most * part
        count = max(1, min(1 + (rest - short) // step, 2 + (rest - chunk.peak_bytes) // step, num_chunks))
        while count > 1 and plan(count)[-1] > room:
            count -= 1
        return plan(count)

    def _refuse(self, least: _Chunk, room: int, fixed: int) -> None:
        rows, peak = least.num_rows, format_bytes(least.peak_bytes)
        taken = f"1 row takes {peak}" if rows == 1 else f"{rows} rows take {peak}, and fewer rows take no less"
        raise ConfigError(
            self._problem.name,
            got=f"memory_budget={format_bytes(self._budget or 0)}, which leaves {format_bytes(max(room, 0))} for "
            f"chunks, where {taken}",
            expected=f"room for the forward and backward of a chunk, besides {format_bytes(fixed)} for gradients and "
            "running sums, which do not shrink with the chunk size",
            fix=f"{self._problem.elsewhere}pass a memory_budget of at least "
            f"{_written(ceil((fixed + least.peak_bytes + 1) / _FILL))}.",
        )

    def _try(self, size: int) -> _Chunk:
        return _Chunk(self._measured(size), self._held, self._base, self._keeps_products)

    def _measured(self, size: int) -> Measurement:
        if size not in self._known and size == self._num_rows:
            # For calls with ever-changing numbers of rows, a measurement of slightly more rows is good enough.
            larger = min((rows for rows in self._known if size < rows <= 2 * size), default=size)
            if larger > size:
                return replace(self._known[larger], num_rows=size)
        if size not in self._known:
            self._known[size] = self._problem.measure(size)
        return self._known[size]


def _written(num_bytes: int) -> str:
    """Format a size for messages, rounded up so that the text is not smaller than the number."""
    text = format_bytes(num_bytes)
    unit = parse_bytes(f"1 {text.rpartition(' ')[2]}")
    return text if parse_bytes(text) >= num_bytes else format_bytes(num_bytes + unit // 100 + 1)


def _factor(best: _Chunk, num_rows: int, growth: float, limit: int) -> int:
    """Return the factor to the next size; 0 if no larger size is allowed."""
    if best.num_rows >= num_rows:
        return 0
    return next((factor for factor in (4, 2) if best.grown(factor**growth) <= limit), 0)


def _growth(before: _Chunk, after: _Chunk) -> float:
    """Return the exponent with which the peak grew in the number of rows."""
    less, more = (each.peak_bytes - each.least_bytes for each in (before, after))
    if before.num_rows == after.num_rows or less <= 0 or more <= 0:
        return -inf
    return log(more / less) / log(after.num_rows / before.num_rows)
