"""Argument checks of `TrainingStateManager`: steps, metrics, objects, and which state."""

from __future__ import annotations

import operator
from collections.abc import Collection
from numbers import Integral

from memkit._core.errors import InputError, InputTypeError
from memkit.recipes.state.manifest import LARGEST_STEP


def check_given(step: int, objects: Collection[str]) -> None:
    """Refuse a state without objects."""
    if not objects:
        raise InputError(
            f"TrainingStateManager.save({step})",
            got="no object",
            expected="what the next step depends on",
            fix="write save(step, model=model, optimizer=optimizer, ...).",
        )


def as_step(step: object) -> int:
    """Return the step as an int."""
    try:
        number = operator.index(step)  # type: ignore[arg-type] # also a NumPy integer; anything else is refused here
    except TypeError:
        raise InputTypeError(
            f"TrainingStateManager.save({step!r})",
            got=type(step).__name__,
            expected="a whole number",
            fix="count the optimizer steps from the start of the training.",
        ) from None
    if not 0 <= number <= LARGEST_STEP:
        raise InputError(
            f"TrainingStateManager.save({number})",
            got=str(number),
            expected="a step of 0 or more" if number < 0 else "a step of at most 18 digits",
            fix="count the optimizer steps from the start of the training.",
        )
    return number


def as_metric(step: object, metric: object) -> float | None:
    """Return the metric as a float."""
    try:
        return None if metric is None else float(metric)  # type: ignore[arg-type] # non-numbers are refused here
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"TrainingStateManager.save({step!r}, metric=...)",
            got=type(metric).__name__,
            expected="a number, or a tensor with one",
            fix="pass metric=loss.item(), or leave it out.",
        ) from None


def check_which(which: object) -> None:
    """Refuse an invalid choice of state."""
    if which not in ("latest", "best") and not isinstance(which, Integral):
        raise InputError(
            f"TrainingStateManager.restore({which!r})",
            got=repr(which),
            expected="'latest', 'best', or a step as a whole number",
            fix="restore() without it takes the newest.",
        )
