"""The interface of every scaling law."""

from __future__ import annotations

import numbers
from typing import Any, Literal, Protocol, TypeAlias

from memkit._core.errors import InputError, InputTypeError
from memkit.predict.gpus import CapacityLike

Tier: TypeAlias = Literal["structural", "deterministic"]

FARTHEST = 4  # multiple of the largest size up to which a law that is not structural may extrapolate


class Law(Protocol):
    """A law for the growth of a step's peak with its size ``n``."""

    @property
    def tier(self) -> Tier:
        """The method that found the law.

        ``"structural"``: a polynomial per event of the step, exact. ``"deterministic"``: straight lines through exact
        points.
        """

    @property
    def reason(self) -> str:
        """Why it is not of a higher tier; empty if there is nothing to report."""

    @property
    def order(self) -> float | None:
        """The power of ``n`` that the peak grows with asymptotically; None if the tier cannot know it."""

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Sizes from which on the peak is in a different place than just below."""

    @property
    def held_out_error(self) -> float | None:
        """Largest ``|predicted / actual - 1|`` at sizes that the law was not fitted to; None if there were none."""

    def predict(self, n: int) -> int:
        """Return the peak in bytes at size ``n``.

        Raises:
            InputError: The law does not extend to ``n``.
            InputTypeError: ``n`` is not an int.
        """

    def interval(self, n: int) -> tuple[int, int | None]:
        """Return lower and upper bound in bytes at size ``n``; None means no upper bound. Raises as `predict` does."""

    def max_n(self, budget: CapacityLike) -> int | None:
        """Return the largest size whose predicted peak fits into a budget.

        Args:
            budget: Bytes as an int, text such as ``"24GiB"``, the name of a GPU, or a `GPU`.

        Returns:
            The size; 0 if not even the smallest fits, None if the peak does not grow, so that every size fits.

        Raises:
            InputError: The answer is beyond the range of the law, or ``budget`` is neither a size nor a GPU.
            InputTypeError: ``budget`` is neither an int nor text.
        """

    def peak_where(self, n: int) -> str:
        """Return module, operator, phase and source line of the peak at size ``n``; empty if unknown."""


def predicted(law: Law | None, n: int) -> int | None:
    """Return the peak in bytes at size ``n``; None if there is no law, or it does not extend to ``n``."""
    try:
        return None if law is None else law.predict(n)
    except InputError:
        return None


def checked_size(n: Any, call: str) -> int:
    """Check that ``n`` is a size, and return it as a Python int; NumPy's would overflow."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise InputTypeError(
            call, got=f"a {type(n).__name__}", expected="a size as an int", fix="pass a whole number such as 1000."
        )
    size = int(n)
    if size < 1:
        raise InputError(
            call, got=f"{n}", expected="a size of at least 1", fix="pass a positive whole number such as 1000."
        )
    return size


def too_far(call: str, n: str, largest: int) -> InputError:
    """Make the error for a size beyond the range of a law."""
    return InputError(
        call,
        got=n,
        expected=f"a size up to {FARTHEST} times the largest known one, {largest}: beyond that, this law is a guess",
        fix="add a larger size to sizes=[...].",
    )
