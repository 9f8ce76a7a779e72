"""Result of `memkit.predict.profile_scaling`: points and laws, as a text table, CSV, JSON, or a plot."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from memkit._charts.charts import Figure, Lines, unit_of
from memkit._charts.pictures import save_picture
from memkit._charts.text import align
from memkit._core.printable import printable
from memkit._core.units import format_bytes
from memkit._machine.files import write_text
from memkit.predict.scaling.figures import peak_curves
from memkit.predict.scaling.law import Law, predicted
from memkit.predict.scaling.points import MODES, ScalingPoint, StepMode


@dataclass(frozen=True)
class ScalingResult:
    """Growth of a step's memory with its size.

    Attributes:
        points: By mode and size.
        law: The law of each mode that has one.
        guesses: Each ``"operator at line"`` that was answered without data while tracing the laws: 1 for a number,
            False for a truth value, a fraction of a mask.
        doubts: Why the laws may not hold: a guess may have become a size or decided a branch at this line.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> def build_step(num_rows):
        ...     layer, x = torch.nn.Linear(10, 10), torch.ones(num_rows, 10)
        ...     return lambda: layer(x).sum().backward()
        >>> result = mk.predict.profile_scaling(build_step, sizes=[100, 200], modes=("train",))
        >>> result.peaks("train")[200] == result.law["train"].predict(200)
        True
    """

    points: tuple[ScalingPoint, ...]
    law: Mapping[StepMode, Law]
    guesses: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def peaks(self, mode: StepMode) -> dict[int, int]:
        """Return the peak in bytes by size, for the points that have one."""
        return {p.size: p.peak_bytes for p in self.points if p.mode == mode and p.peak_bytes is not None}

    def ratio(self, n: int) -> float | None:
        """Return the ratio of training peak to inference peak at size ``n``, from the points or else the laws.

        Returns:
            The ratio; None if one of the two is unknown at that size.
        """
        train, inference = (self._peak(mode, n) for mode in MODES)
        return None if train is None or not inference else train / inference

    def scaling_factor(self, mode: StepMode) -> float | None:
        """Return the log-log slope from the smallest to the largest point, often called the scaling factor.

        It includes the constant part, so it is below the true power of ``n`` if the step holds anything that does not
        grow. `Law.order` excludes the constant part. None if fewer than two points have a peak above zero.
        """
        peaks = self._with_logarithm(mode)
        if len(peaks) < 2:
            return None
        first, last = min(peaks), max(peaks)
        return math.log(peaks[last] / peaks[first]) / math.log(last / first)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Return a readable table: laws, points, and the ratio of training to inference."""
        lines = [line for mode, law in self.law.items() for line in self._explain_law(mode, law)]
        modes = list(dict.fromkeys(point.mode for point in self.points))
        rows = [("n", *modes, "train / inference")]
        for size in sorted({point.size for point in self.points}):
            ratio = self.ratio(size)
            rows.append((str(size), *(self._cell(m, size) for m in modes), "-" if ratio is None else f"{ratio:.2f}"))
        lines += align(rows, [True] * len(rows[0]))
        for title, texts in (("not known, because", self.doubts), ("answered without data", self.guesses)):
            lines += ["", title, *(f"  {printable(text)}" for text in texts)] if texts else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return points, laws and guesses as plain types, ready for JSON; None means unknown."""
        laws = {mode: self._describe(mode, law) for mode, law in self.law.items()}
        points = [asdict(point) for point in self.points]
        return {"points": points, "law": laws, "guesses": list(self.guesses), "doubts": list(self.doubts)}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one row per point as CSV; empty fields mean unknown.

        Args:
            path: File to write as well, atomically; None writes nothing.

        Raises:
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(ScalingPoint)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in self.points)
        if path is not None:
            write_text(path, text.getvalue())
        return text.getvalue()

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict` as one JSON object, atomically; null means unknown.

        Raises:
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written.
        """
        write_text(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def plot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw points and laws on logarithmic axes.

        Args:
            path: File to write, ``.svg`` or ``.png`` (which needs matplotlib); None writes nothing.

        Returns:
            The picture as SVG text; as the last line of a notebook's cell it is shown.

        Raises:
            ConfigError: The path is a PNG and matplotlib is not installed, or the suffix is unknown.
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written.
        """
        return save_picture(self._figure(), path, "result.plot")

    def _figure(self) -> Figure:
        modes = {mode: [point for point in self.points if point.mode == mode] for mode in MODES}
        curves = [curve for mode in modes for curve in peak_curves(mode, modes[mode], self.law.get(mode))]
        notes = [f"Line, {mode}: {law.tier} law." for mode, law in self.law.items()]
        notes += ["Crosses: out of memory."] * any(curve.style == "crosses" for curve in curves)
        unit = unit_of(max((max(curve.y) for curve in curves), default=0))
        charts = [Lines(curves, "n", "By size", "peak", unit, scale="log")] if curves else []
        return Figure("Peak memory of one step", charts, notes)

    def _with_logarithm(self, mode: StepMode) -> dict[int, int]:
        """Return the peaks that are not zero."""
        return {size: peak for size, peak in self.peaks(mode).items() if peak}

    def _peak(self, mode: StepMode, n: int) -> int | None:
        """Return the peak from a point, or else from the law."""
        known = self.peaks(mode)
        return known[n] if n in known else predicted(self.law.get(mode), n)

    def _cell(self, mode: StepMode, size: int) -> str:
        at_size = [point for point in self.points if (point.mode, point.size) == (mode, size)]
        if not at_size:
            return "-"
        return at_size[0].status if at_size[0].peak_bytes is None else format_bytes(at_size[0].peak_bytes)

    def _describe(self, mode: StepMode, law: Law) -> dict[str, Any]:
        return {
            "tier": law.tier,
            "reason": law.reason,
            "order": law.order,
            "breakpoints": list(law.breakpoints),
            "held_out_error": law.held_out_error,
            "scaling_factor": self.scaling_factor(mode),
        }

    def _explain_law(self, mode: StepMode, law: Law) -> list[str]:
        parts = [f"{law.tier} law"]
        if law.order is not None:
            parts.append(f"grows with n^{law.order:g}")
        if law.held_out_error is not None:
            parts.append(f"held-out error {law.held_out_error:.2g}")
        factor = self.scaling_factor(mode)
        if factor is not None:
            parts.append(f"scaling factor {factor:.2f} (includes the constant part)")
        lines = [f"{mode}: " + ", ".join(parts)]
        if law.reason:
            lines.append(f"  not exact, because {law.reason}")
        largest = max(point.size for point in self.points)
        known = [point.peak_where for point in self.points if (point.mode, point.size) == (mode, largest)]
        if any(known):
            lines.append(f"  peak at n={largest}: {known[0]}")
        if law.breakpoints:
            lines.append(f"  the peak moves at n={', '.join(map(str, law.breakpoints))}")
        return lines
