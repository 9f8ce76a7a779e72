"""Measures that the tests of several packages share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.allocations import trace_allocations


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the expected value."""
    return ((got - want).norm() / want.norm()).item()


def warm_peak_bytes(step: Callable[[], object]) -> int:
    """Peak bytes of a step's second run: the first one makes what stays."""
    step()
    return trace_allocations(step).peak
