"""What every scaling law answers, whatever it was made from."""

from __future__ import annotations

import numbers
from typing import Any, Literal, Protocol, TypeAlias

from memkit._core.errors import InputError, InputTypeError
from memkit.predict.gpus import CapacityLike

Tier: TypeAlias = Literal["structural", "deterministic", "noisy"]

FARTHEST = 4  # how many times the largest size a law without a structure may go


class Law(Protocol):
    """How the peak of a step grows with its size ``n``."""

    @property
    def tier(self) -> Tier:
        """How it was found.

        ``"structural"``: a polynomial per event of the step, exact. ``"deterministic"``: straight lines through exact
        points. ``"noisy"``: a curve fitted to points that scatter.
        """

    @property
    def reason(self) -> str:
        """Why it is of no higher tier, or why it is no law at all; empty where there is nothing to say."""

    @property
    def order(self) -> float | None:
        """The power of ``n`` that the peak grows with in the end; None where the tier cannot know."""

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The sizes from which on the peak is in another place than just below."""

    @property
    def held_out_error(self) -> float | None:
        """The largest ``|predicted / actual - 1|`` at sizes that the law was not made from; None where none was."""

    def predict(self, n: int) -> int:
        """Peak in bytes at size ``n``.

        Raises:
            InputError: The law does not reach to ``n``, or is none.
            InputTypeError: ``n`` is no int.
        """

    def interval(self, n: int) -> tuple[int, int | None]:
        """Lower and upper bound in bytes at size ``n``; None where there is no upper bound. Errors as `predict`."""

    def max_n(self, budget: CapacityLike) -> int | None:
        """The largest size whose predicted peak fits into a budget.

        Args:
            budget: Bytes as an int, text such as ``"24GiB"``, the name of a card, or a `GPU`.

        Returns:
            The size; 0 where not even the smallest fits, None where the peak does not grow: every size fits.

        Raises:
            InputError: The answer lies where the law does not reach, it is none, or ``budget`` is no size and no card.
            InputTypeError: ``budget`` is neither an int nor text.
        """

    def peak_where(self, n: int) -> str:
        """Module, operator, phase and source line of the peak at size ``n``; empty text where it is not known."""


def checked_size(n: Any, call: str) -> int:
    """Return ``n`` as Python's int if it is a size; NumPy's would overflow."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise InputTypeError(
            call, got=f"a {type(n).__name__}", expected="a size as an int", fix="pass a whole number such as 1000."
        )
    size = int(n)
    if size < 1:
        raise InputError(call, got=f"{n}", expected="a size of 1 or more", fix="pass a positive whole number.")
    return size


def too_far(call: str, n: str, largest: int) -> InputError:
    """The error of a law that does not reach."""
    return InputError(
        call,
        got=n,
        expected=f"a size up to {FARTHEST} times the largest one known, {largest}: beyond, this law is a guess",
        fix="add a larger size.",
    )
