"""One point of a scaling curve: the memory of a step at one size, or why it is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

StepMode: TypeAlias = Literal["train", "inference"]
Status: TypeAlias = Literal["ok", "oom", "skipped", "error"]

MODES: tuple[StepMode, StepMode] = ("train", "inference")


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The peak of one step at one size.

    Attributes:
        size: The size that the step was built for: edges, tokens, rows, side length, width.
        mode: ``"train"`` or ``"inference"``.
        status: ``"ok"``; ``"oom"`` if memory ran out; ``"skipped"`` if a smaller size ran out; ``"error"``.
        peak_bytes: Peak bytes in live tensors during the second (warm) step; None if it did not finish.
        peak_where: Module, operator, phase and source line of the peak; for ``"error"`` the exception. Empty text means
            "not recorded".
        source: ``"fake"`` (a dry run without data) or ``"measured"``.
        requested_bytes: Size of the failed request, if memory ran out.
        seconds: Duration of a measured step on a CPU; None for a dry run, and on accelerators.

    Example:
        >>> import memkit as mk
        >>> point = mk.predict.ScalingPoint(5000, "train", "ok", 25_274_568, "optimizer", "measured")
        >>> mk.predict.ScalingResult((point,), {}).peaks("train")
        {5000: 25274568}
    """

    size: int
    mode: StepMode
    status: Status
    peak_bytes: int | None
    peak_where: str
    source: Literal["fake", "measured"]
    requested_bytes: int | None = None
    seconds: float | None = None
