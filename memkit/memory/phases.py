"""Peaks and times of nested blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class IntervalPeak(NamedTuple):
    """Peak bytes of a block, as far as known.

    Attributes:
        known: The peak itself; None if unknown.
        at_most: Upper bound of the peak; None if even that is unknown.
    """

    known: int | None
    at_most: int | None


_UNKNOWN = IntervalPeak(None, None)


@lru_cache(maxsize=64)  # a counter of peaks seldom changes: most blocks begin and end with the same
def peak_by_record(first: int | None, last: int | None) -> IntervalPeak:
    """Infer a block's peak from the values at its ends of a peak counter that is never reset.

    A block that set a new record reached that value; any other block is bounded by the record. If other code did reset
    the counter inside the block, the earlier count is lost; this is detectable only if the counter ends lower than it
    began.
    """
    if first is None or last is None or last < first:  # no counter, or it was reset
        return _UNKNOWN
    return IntervalPeak(last if last > first else None, last)


class RestartedPeaks:
    """Exact peaks of blocks that overlap in any way: the counter is reset at the beginning of each block.

    No other code can use the counter meanwhile.

    Args:
        restart: Resets the peak counter to the bytes held now, and returns them.
    """

    def __init__(self, restart: Callable[[], int | None]) -> None:
        self._restart = restart
        self._open: dict[object, int | None] = {}  # the largest bytes of each block so far

    def begin(self, block: object, peak: int | None) -> None:
        """Begin a block; ``peak`` is the counter's value now."""
        self._fold(peak)
        self._open[block] = self._restart()

    def end(self, block: object, peak: int | None) -> IntervalPeak:
        """End a block; ``peak`` is the counter's value now."""
        self._fold(peak)
        largest = self._open.pop(block)
        return IntervalPeak(largest, largest)

    def _fold(self, peak: int | None) -> None:
        for block in tuple(self._open):
            self._open[block] = larger(self._open[block], peak)


@dataclass(slots=True)
class PhaseTotals:
    """Totals of all blocks of one path.

    Attributes:
        num_calls: Number of blocks.
        duration_ns: Their total time by the host's clock. An accelerator may still be working when the host is done.
        longest_ns: Time of the longest block.
        peak_bytes: Largest known peak of allocated bytes; None if no block's peak is known.
        peak_at_most_bytes: Upper bound for all blocks, equal to ``peak_bytes`` if that is the largest of all; None if
            some block's peak is not even bounded.
        host_peak_bytes: The same as ``peak_bytes``, for resident bytes of the process.
        host_peak_at_most_bytes: The same as ``peak_at_most_bytes``, for resident bytes of the process.
    """

    num_calls: int = 0
    duration_ns: int = 0
    longest_ns: int = 0
    peak_bytes: int | None = None
    peak_at_most_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_peak_at_most_bytes: int | None = None

    def add(self, duration_ns: int, peak: IntervalPeak, host_peak: IntervalPeak) -> None:
        """Add one block."""
        if self.num_calls == 0:
            self.peak_at_most_bytes, self.host_peak_at_most_bytes = peak.at_most, host_peak.at_most
        self.num_calls += 1
        self.duration_ns += duration_ns
        if duration_ns > self.longest_ns:
            self.longest_ns = duration_ns
        if peak.known is not None:
            self.peak_bytes = larger(self.peak_bytes, peak.known)
        if self.peak_at_most_bytes != peak.at_most:
            self.peak_at_most_bytes = _larger_if_both(self.peak_at_most_bytes, peak.at_most)
        if host_peak.known is not None:
            self.host_peak_bytes = larger(self.host_peak_bytes, host_peak.known)
        if self.host_peak_at_most_bytes != host_peak.at_most:
            self.host_peak_at_most_bytes = _larger_if_both(self.host_peak_at_most_bytes, host_peak.at_most)


def _larger_if_both(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def larger(a: int | None, b: int | None) -> int | None:
    """Return the larger of two numbers; None means unknown."""
    return b if a is None else a if b is None else max(a, b)
