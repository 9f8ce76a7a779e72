"""Charts as plain data: bars, curves on a pair of axes, and several of these as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from memkit._core.errors import InputError
from memkit._core.units import GIB, KIB, MIB, format_bytes

Style: TypeAlias = Literal["line", "dashed", "points", "crosses"]
Scale: TypeAlias = Literal["linear", "log-x", "log"]
Unit: TypeAlias = Literal["KiB", "MiB", "GiB", ""]
_UNITS: dict[Unit, int] = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "": 1}


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart of sizes of one kind, one bar each.

    Attributes:
        rows: Name and bytes.
        caption: Caption of the chart.
        whole_bytes: Bytes of a full bar; None uses the largest row.
    """

    rows: tuple[tuple[str, int], ...]
    caption: str
    whole_bytes: int | None = None

    @property
    def full_bytes(self) -> int:
        """Bytes of a full bar, above zero."""
        return self.whole_bytes or max((size for _, size in self.rows), default=0) or 1


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve: positions on the axis, values (mostly bytes), and a label for each point.

    Attributes:
        name: Name in the legend. Curves of one name share a color and an entry, such as a law and its points.
        x: Positions.
        y: Values, one for each x.
        labels: Text for each point, shown when a page's reader points at it; may be empty.
        style: A line, a dashed line, dots, or crosses.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: tuple[str, ...] = ()
    style: Style = "line"

    @property
    def is_line(self) -> bool:
        """Whether its points are joined."""
        return self.style in ("line", "dashed")


@dataclass(frozen=True, slots=True)
class Strip:
    """When something ran: a row of bars along the horizontal axis, in a page.

    Attributes:
        name: Name of the row.
        spans: Begin and end of each bar, as positions on the axis.
        is_marked: Whether it stands out.
    """

    name: str
    spans: tuple[tuple[float, float], ...]
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves on one pair of axes.

    Attributes:
        lines: The curves, in drawing order.
        x_name: Label of the horizontal axis, with its unit.
        caption: Caption of the chart.
        y_name: Label of the vertical axis, without its unit.
        unit: Unit in which values, in bytes, are shown; empty for plain numbers.
        levels: Name and height of horizontal lines; of those above all values, only the lowest is shown.
        scale: Which axes are logarithmic. A linear vertical axis includes zero.
        strips: Rows below the axis that say when something ran; in a page only.

    Raises:
        InputError: There is no curve; a curve has no point, or not one value for each position; or a position or value
            on a logarithmic axis is not above zero.
    """

    lines: Sequence[Curve]
    x_name: str
    caption: str
    y_name: str = ""
    unit: Unit = "GiB"
    levels: Sequence[tuple[str, float]] = ()
    scale: Scale = "linear"
    strips: Sequence[Strip] = ()

    def __post_init__(self) -> None:
        if not self.lines:
            self._refuse("no curves", "at least one curve", "omit the chart")
        for line in self.lines:
            if not len(line.x) or len(line.x) != len(line.y):
                got = f"{len(line.x)} x and {len(line.y)} y in {line.name!r}"
                self._refuse(got, "at least one point, each with a value", "pass as many y as x, or omit the curve")
            positive = [*line.x, *line.y] if self.scale == "log" else line.x if self.scale == "log-x" else ()
            if any(each <= 0 for each in positive):
                got = f"{min(positive):g} in {line.name!r}"
                self._refuse(got, "numbers above zero on a logarithmic axis", "omit that point")

    def _refuse(self, got: str, expected: str, fix: str) -> None:
        raise InputError(f"the chart {self.caption!r}", got=got, expected=expected, fix=f"{fix}.")

    @property
    def factor(self) -> int:
        """Size of one unit, in bytes; 1 for plain numbers."""
        return _UNITS[self.unit]

    @property
    def colors(self) -> dict[str, int]:
        """Number of the color of each name."""
        return {name: number for number, name in enumerate(dict.fromkeys(line.name for line in self.lines))}

    def text(self, value: float) -> str:
        """Return a value with two decimals, or bytes with a suitable unit."""
        return format_bytes(round(value)) if self.unit else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Charts of curves, two in a row, under a title, with notes below."""

    title: str
    charts: Sequence[Lines]
    notes: Sequence[str] = ()


def unit_of(num_bytes: float) -> Unit:
    """Return the unit that suits a size and the smaller sizes beside it."""
    return "GiB" if num_bytes >= GIB else "MiB" if num_bytes >= MIB else "KiB"
