"""Peaks and times of blocks that nest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class IntervalPeak(NamedTuple):
    """The largest bytes of a block, as far as they are known.

    Attributes:
        known: The peak itself; None where it is not known.
        at_most: What it did not exceed; None where even that is not known.
    """

    known: int | None
    at_most: int | None


_UNKNOWN = IntervalPeak(None, None)


def peak_by_record(first: int | None, last: int | None) -> IntervalPeak:
    """Tell a block's peak from a counter of the largest bytes that nobody restarts: what it said at the block's ends.

    A block that set a new record reached it; any other is known to be at most the record. Where somebody did restart
    the counter inside the block, what it counted before is gone; that shows only where it ends lower than it began.
    """
    if first is None or last is None or last < first:  # no counter, or it was restarted
        return _UNKNOWN
    return IntervalPeak(last if last > first else None, last)


class RestartedPeaks:
    """Peaks of blocks that overlap in any way, all exact: the counter is restarted at the beginning of each block.

    Nobody else can use the counter then.

    Args:
        restart: Lets the counter of the largest bytes start again from what is held now, and returns that.
    """

    def __init__(self, restart: Callable[[], int | None]) -> None:
        self._restart = restart
        self._open: dict[object, int | None] = {}  # the largest bytes of each block so far

    def begin(self, block: object, peak: int | None) -> None:
        """Begin a block; the counter says so much now."""
        self._fold(peak)
        self._open[block] = self._restart()

    def end(self, block: object, peak: int | None) -> IntervalPeak:
        """End a block; the counter says so much now."""
        self._fold(peak)
        largest = self._open.pop(block)
        return IntervalPeak(largest, largest)

    def _fold(self, peak: int | None) -> None:
        for block in tuple(self._open):
            self._open[block] = larger(self._open[block], peak)


@dataclass(slots=True)
class PhaseTotals:
    """All blocks of one path together.

    Attributes:
        num_calls: How many there were.
        duration_ns: Their time by the host's clock, together. An accelerator may still work when the host is done.
        longest_ns: The longest one.
        peak_bytes: Largest peak of allocated bytes that is known; None where no block's is.
        peak_at_most_bytes: What no block exceeded, and equal to ``peak_bytes`` where that is the largest of all; None
            where some block's peak is not bounded either.
        host_peak_bytes: The same for resident bytes of the process.
        host_peak_at_most_bytes: The same.
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
        self.peak_bytes = larger(self.peak_bytes, peak.known)
        self.peak_at_most_bytes = _larger_if_both(self.peak_at_most_bytes, peak.at_most)
        self.host_peak_bytes = larger(self.host_peak_bytes, host_peak.known)
        self.host_peak_at_most_bytes = _larger_if_both(self.host_peak_at_most_bytes, host_peak.at_most)


def _larger_if_both(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def larger(a: int | None, b: int | None) -> int | None:
    """Return the larger of two numbers, of which None is unknown."""
    return b if a is None else a if b is None else max(a, b)
