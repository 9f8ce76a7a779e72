"""One point of a scaling curve: what a step of one size takes, or why that is not known."""

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
        size: What the step was built for: edges, tokens, rows, side length, width.
        mode: ``"train"`` or ``"inference"``.
        status: ``"ok"``; ``"oom"`` where memory ran out; ``"skipped"`` where a smaller size ran out; ``"error"``.
        peak_bytes: Most bytes in live tensors during the second (warm) step; None where it did not finish.
        peak_where: Module, operator, phase and source line of the peak; for ``"error"`` what was raised. Empty text
            means "not recorded".
        source: ``"fake"`` (a dry run without data) or ``"measured"``.
        requested_bytes: Size of the request that could not be met, where memory ran out.
        seconds: How long a measured step took on a CPU; None of a dry run, and on accelerators.

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
