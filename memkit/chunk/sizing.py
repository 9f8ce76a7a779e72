"""How many rows make a chunk: measured on the function itself, fast enough, and within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memkit._errors import ConfigError
from memkit._units import format_bytes

_FIRST_SIZE = 128
_WORTH = 0.95  # a larger chunk must take at most this share of the time for each row
_MAX_MISSES = 2
_FILL = 0.97  # of the budget: the rest is for what a larger call adds, such as another piece of a gradient


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one chunk took, forward and backward.

    Attributes:
        num_rows: Its rows.
        peak_bytes: Its peak, without the result and the gradients of the call.
        kept_bytes: What its graph holds between forward and backward.
        seconds: Its time.
    """

    num_rows: int
    peak_bytes: int
    kept_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a call will be cut.

    Attributes:
        chunk_size: Rows of a chunk.
        num_chunks: How many there are.
        num_kept: Of how many the graph is kept, to save running them again in the backward.
        predicted_peak_bytes: What the call will take beyond its result and gradients.
        measured_peak_bytes: What one chunk of this size took when it was tried; None where the size was given.
    """

    chunk_size: int
    num_chunks: int
    num_kept: int = 0
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None


def choose_plan(
    measure: Callable[[int], Measurement], num_rows: int, budget_bytes: int | None, *, call: str, may_keep: bool
) -> ChunkPlan:
    """Choose a chunk size by trying sizes, each twice the one before.

    A size is taken while it fits into the budget and makes a row at least 5% cheaper. Nothing is extrapolated: kernels
    change with the size, and so does their workspace. What the budget leaves then buys time: the graphs of some chunks
    are kept.

    Args:
        measure: Tries a chunk of so many rows.
        num_rows: Rows of the call.
        budget_bytes: What the call may take beyond its result and gradients; None for no limit.
        call: The user's call, for the message.
        may_keep: Whether there is a backward.

    Raises:
        ConfigError: Not even one row fits.
    """
    size = max(1, min(_FIRST_SIZE, num_rows))
    best = measure(size)
    while budget_bytes is not None and best.peak_bytes > budget_bytes:
        if size == 1:
            raise ConfigError(
                call,
                got=f"memory_budget={format_bytes(budget_bytes)} where one row takes {format_bytes(best.peak_bytes)}",
                expected="a budget for one row's forward and backward, and the parameters' gradients",
                fix="raise memory_budget, or make the function smaller.",
            )
        size = max(1, size // 4)
        best = measure(size)
    misses, last = 0, best
    while last.num_rows < num_rows and misses < _MAX_MISSES:
        size = min(2 * last.num_rows, num_rows)
        if budget_bytes is not None and _grown(last, size) > budget_bytes:  # not even tried
            break
        last = measure(size)
        if budget_bytes is not None and last.peak_bytes > budget_bytes:
            break
        if last.seconds / last.num_rows <= _WORTH * best.seconds / best.num_rows:
            best, misses = last, 0
        else:
            misses += 1
    num_chunks = -(-num_rows // best.num_rows) if num_rows else 1
    num_kept = 0
    if budget_bytes is not None and may_keep and best.kept_bytes:
        room = int(_FILL * budget_bytes) - best.peak_bytes
        num_kept = max(0, min(num_chunks, room // best.kept_bytes))
    return ChunkPlan(
        chunk_size=best.num_rows,
        num_chunks=num_chunks,
        num_kept=num_kept,
        predicted_peak_bytes=best.peak_bytes + num_kept * best.kept_bytes,
        measured_peak_bytes=best.peak_bytes,
    )


def _grown(last: Measurement, num_rows: int) -> int:
    """At least what a larger chunk takes, if its graph grows with the rows and nothing else does."""
    return last.peak_bytes + last.kept_bytes * (num_rows - last.num_rows) // last.num_rows
