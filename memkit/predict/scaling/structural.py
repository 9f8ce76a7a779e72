"""The structural law: a polynomial for the live bytes after every event of a step, exact at every size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from memkit._core.errors import InputError
from memkit._recorder.recording import IntArray
from memkit.predict.gpus import CapacityLike, capacity_bytes
from memkit.predict.scaling.law import Tier, checked_size
from memkit.predict.scaling.polynomials import (
    Polynomial,
    beyond_roots,
    envelope,
    interpolation,
    minus,
    switches,
    trimmed,
    undominated,
    value,
)
from memkit.predict.scaling.traces import StepTrace

_DEGREES = range(2, 7)  # 6: attention over all voxels of a cube, by its side
# One check is at this multiple of the smallest size: a polynomial through sizes that are padded to blocks of up to this
# many misses by then.
_FAR = 129


@dataclass(frozen=True)
class Stretch:
    """Sizes over which the peak stays in one place.

    Attributes:
        first: Number of the first size, in grains.
        polynomial: Bytes times the law's scale, as a polynomial in grains.
        where: The place.
    """

    first: int
    polynomial: Polynomial
    where: str


@dataclass(frozen=True)
class StructuralLaw:
    """The maximum of the polynomials that describe the live bytes after each event of the step.

    Attributes:
        grain: The law is known to hold for multiples of this; 1 means every size.
        traced: The sizes that the polynomials go through.
        checked: The sizes at which every polynomial was compared with a further trace.
        scale: Divisor of the polynomials' integer coefficients.
        stretches: The highest polynomial over consecutive sizes.
        above: The same including the upper bound of scratch memory inside kernels; empty if that is not a polynomial.
    """

    tier: ClassVar[Tier] = "structural"
    reason: ClassVar[str] = ""
    held_out_error: ClassVar[float] = 0.0  # if a checked size is off by one byte, there is no such law

    grain: int
    traced: tuple[int, ...]
    checked: tuple[int, ...]
    scale: int
    stretches: tuple[Stretch, ...]
    above: tuple[Stretch, ...]

    @property
    def order(self) -> int:
        """The power of ``n`` that the peak grows with asymptotically."""
        return max(0, len(self.stretches[-1].polynomial) - 1)

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Sizes from which on the peak is in a different place than just below."""
        return tuple(b.first * self.grain for a, b in pairwise(self.stretches) if a.where != b.where)

    def predict(self, n: int) -> int:
        """Return the peak in bytes at size ``n``: exact, as long as the step runs the same operators at that size."""
        return self._height(self.stretches, self._grains(n, "predict"))

    def interval(self, n: int) -> tuple[int, int | None]:
        """Return the prediction without and, where its bound is known, with the scratch memory inside kernels."""
        m = self._grains(n, "interval")
        low = self._height(self.stretches, m)
        return low, max(low, self._height(self.above, m)) if self.above else None

    def peak_where(self, n: int) -> str:
        """Return module, operator, phase and source line of the peak at size ``n``."""
        return _at(self.stretches, self._grains(n, "peak_where")).where

    def max_n(self, budget: CapacityLike) -> int | None:
        """Return the exact largest size that fits; 0 if size 1 does not fit, None if every size does."""
        most: Polynomial = (capacity_bytes(budget, is_large=False) * self.scale,)
        end: int | None = None
        for stretch in reversed(self.stretches):
            excess = minus(stretch.polynomial, most)
            last = max(stretch.first, beyond_roots(excess)) if end is None else end
            if value(excess, last) <= 0:
                return None if end is None else last * self.grain
            turns = switches(excess, stretch.first, last)
            if turns:
                return (turns[-1] - 1) * self.grain
            end = stretch.first - 1
        return 0

    def _height(self, stretches: tuple[Stretch, ...], m: int) -> int:
        return -(-value(_at(stretches, m).polynomial, m) // self.scale)

    def _grains(self, n: int, asked: str) -> int:
        call = f"law.{asked}({n!r})"
        grains, rest = divmod(checked_size(n, call), self.grain)
        if rest:
            raise InputError(
                call,
                got=f"{n}",
                expected=f"a multiple of {self.grain}: other sizes were not traced, or run other operators",
                fix=f"ask for {(grains + 1) * self.grain}, or profile sizes with a smaller common divisor.",
            )
        return grains


def _at(stretches: tuple[Stretch, ...], m: int) -> Stretch:
    return stretches[bisect_right(stretches, m, key=lambda each: each.first) - 1]


def structural_law(trace: Callable[[int], StepTrace], sizes: Sequence[int]) -> StructuralLaw | str:
    """Trace as many sizes as the degree needs, and check the law at the others.

    Args:
        trace: Traces a size. It should cache its results.
        sizes: Ascending. The polynomials go through the first multiples of the first size; the others check them, as
            does one far multiple.

    Returns:
        The law, or the reason why there is none, as text.
    """
    smallest = sizes[0]
    first = trace(smallest)
    where = ""
    for degree in _DEGREES:
        traced = [smallest * k for k in range(1, degree + 2)]
        checked = sorted({*sizes, smallest * _FAR} - {*traced})
        traces = {}
        for size in (*traced, *checked):
            try:
                traces[size] = trace(size)
            except Exception as error:  # noqa: BLE001 - user code may raise anything at a size it was not given
                notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))  # whether a guess decided
                return f"the step could not be traced at n={size}: {type(error).__name__}: {error}{notes}"
            if traces[size].events != first.events:
                return _difference(first, traces[size])
        curves = _Curves(traced, [traces[size].live for size in traced])
        missed = [
            (size, moment) for size in checked if (moment := curves.first_miss(size, traces[size].live)) is not None
        ]
        if not missed:
            holds_between = _holds_between(trace, smallest + 1, first, curves)
            grain = 1 if holds_between else math.gcd(smallest, *checked)
            if grain == 1 and not holds_between:
                return f"n={smallest + 1} does not follow the law of the sizes around it"
            return StructuralLaw(
                grain,
                tuple(traced),
                tuple(checked),
                curves.scale,
                tuple(Stretch(start, curve, first.where(moment)) for start, curve, moment in curves.highest(grain)),
                _above(traced, traces, grain),
            )
        size, moment = missed[0]
        where = f"at n={size}, from {traces[size].where(moment)}{_doubted(traces[size])}"
    return f"bytes do not follow a polynomial of n of degree {_DEGREES[-1]} or less: {where}"


class _Curves:
    """Levels at every moment of a step, as polynomials of the size.

    Args:
        sizes: The sizes that the polynomials go through.
        levels: The bytes at every moment for each size: int64, shape ``(num_moments,)``.
    """

    def __init__(self, sizes: Sequence[int], levels: Sequence[IntArray]) -> None:
        rows, self._moments, self._row_of = np.unique(
            np.stack(levels, axis=1), axis=0, return_index=True, return_inverse=True
        )
        basis, self.scale = interpolation(sizes)
        self._polynomials = [
            trimmed(
                sum(each * part[power] for each, part in zip(row, basis, strict=True)) for power in range(len(sizes))
            )
            for row in rows.tolist()
        ]

    def first_miss(self, size: int, levels: IntArray) -> int | None:
        """Return the first moment at which another size differs from the polynomials; None if there is none."""
        predicted = [value(each, size) for each in self._polynomials]
        moments = enumerate(zip(self._row_of.tolist(), levels.tolist(), strict=True))
        return next((moment for moment, (row, level) in moments if predicted[row] != level * self.scale), None)

    def highest(self, grain: int) -> list[tuple[int, Polynomial, int]]:
        """Return ``(first size, polynomial, moment)`` of each stretch with one highest polynomial, in grains."""
        order = np.argsort(self._moments)  # among equal heights the earliest is the peak
        rows = [int(order[k]) for k in undominated([self._polynomials[row] for row in order])]
        in_grains = [tuple(each * grain**power for power, each in enumerate(self._polynomials[row])) for row in rows]
        return [(start, in_grains[k], int(self._moments[rows[k]])) for start, k in envelope(in_grains)]


def _above(traced: Sequence[int], traces: Mapping[int, StepTrace], grain: int) -> tuple[Stretch, ...]:
    """Fit the law of the kernels' bounds and of the step's initial bytes; empty if they are not polynomial."""
    bounds = {size: np.append(trace.bounds, trace.live[0]) for size, trace in traces.items()}
    if len({len(each) for each in bounds.values()}) > 1:
        return ()
    curves = _Curves(traced, [bounds[size] for size in traced])
    if any(curves.first_miss(size, each) is not None for size, each in bounds.items()):
        return ()
    return tuple(Stretch(start, polynomial, "") for start, polynomial, _ in curves.highest(grain))


def _holds_between(trace: Callable[[int], StepTrace], size: int, first: StepTrace, curves: _Curves) -> bool:
    """Return whether the polynomials hold at a size that shares no divisor with the sizes they go through."""
    try:
        other = trace(size)
    except Exception:  # noqa: BLE001 - a model that accepts only certain sizes may raise anything
        return False
    return other.events == first.events and curves.first_miss(size, other.live) is None


def _doubted(trace: StepTrace) -> str:
    """Say that a trace may differ from the step with data, if a guess may have decided something."""
    return f" (traced without data: {'; '.join(trace.doubts)})" if trace.doubts else ""


def _difference(first: StepTrace, other: StepTrace) -> str:
    """Describe where two traces diverge."""
    parts = f"the step runs other operators at n={other.size} than at n={first.size}{_doubted(other)}"
    for moment, (a, b) in enumerate(zip(first.events, other.events, strict=False), start=1):
        if a != b:
            return f"{parts}: {other.where(moment)}, not {first.where(moment)}"
    shorter, longer = sorted((first, other), key=lambda trace: len(trace.events))
    return f"{parts}: one ends where the other goes on to {longer.where(len(shorter.events) + 1)}"
