"""Result of a sweep as files and text: CSV, JSON, SVG and PNG under the source's names, and a readable summary."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memkit._charts.charts import Figure
from memkit._charts.pictures import to_png, to_svg
from memkit._charts.text import align
from memkit._core.printable import counted, printable
from memkit._core.units import format_bytes
from memkit._machine.files import write_bytes, write_text
from memkit.predict.scaling.points import StepMode
from memkit.recipes.memory_test.curves import Capacity, ScalingCurve
from memkit.recipes.memory_test.plots import Analysis, charts
from memkit.recipes.memory_test.suggestions import explain_ratio, suggest_room

_TITLES = {
    "full": "Memory of a neural operator by its number of edges",
    "core": "Memory of the edge MLP by its number of edges",
    "script": "Memory of a step by its size",
}
# Names of the plots and of the data, without suffix; the first two are the source's.
_STEMS = {
    "full": ("memory_analysis_results", "memory_analysis_data"),
    "core": ("edge_memory_analysis", "edge_memory_results"),
    "script": ("scaling_results", "scaling_data"),
}
_WIDTH = 80  # columns of a terminal


@dataclass(frozen=True, eq=False)
class MemoryTestResult:
    """All curves of a sweep. `explain` returns the text, `write` writes the files.

    Attributes:
        analysis: ``"full"`` or ``"core"``; ``"script"`` for the user's own step.
        device: The device measured on; None if everything is predicted.
        curves: In the order in which they ran.
        capacities: The GPUs with which they are compared.

    Example:
        >>> import memkit as mk
        >>> config = mk.MemoryTestConfig(num_test_points=2, max_edges=10_000, test_decoder=False)
        >>> len(mk.recipes.run_memory_test(config).curves)
        1
    """

    analysis: Analysis
    device: str | None
    curves: tuple[ScalingCurve, ...]
    capacities: tuple[Capacity, ...]

    @property
    def how(self) -> str:
        """Source of the figures, in one sentence."""
        if self.device is None:
            return "Predicted on tensors without data: no step ran on any device. Live bytes, as the CPU counts them."
        return f"Measured on {self.device}, each point in a process of its own, second step."

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, sizes in bytes; None means unknown."""
        return {
            "analysis": self.analysis,
            "device": self.device,
            "curves": [
                {
                    "curve": curve.name,
                    "mode": mode,
                    "tier": law.tier,
                    "order": law.order,
                    "breakpoints": list(law.breakpoints),
                    "reason": law.reason,
                    "held_out_error": law.held_out_error,
                    "scaling_factor_with_constant_part": curve.result.scaling_factor(mode),
                    "largest": {
                        each.card.name: curve.largest(mode, each.card.usable_bytes) for each in self.capacities
                    },
                }
                for curve in self.curves
                for mode, law in curve.result.law.items()
            ],
            "points": self.rows(),
            "guesses": list(self.guesses),
            "doubts": list(self.doubts),
        }

    @property
    def guesses(self) -> tuple[str, ...]:
        """Values that the laws' traces guessed for lack of data, without duplicates."""
        return tuple(dict.fromkeys(guess for curve in self.curves for guess in curve.result.guesses))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why the laws may not hold, without duplicates."""
        return tuple(dict.fromkeys(doubt for curve in self.curves for doubt in curve.result.doubts))

    def rows(self) -> list[dict[str, Any]]:
        """One row per point: the columns of the CSV file."""
        return [row for curve in self.curves for row in curve.rows()]

    def figure(self) -> Figure:
        """The plot as data."""
        notes = [self.how, "Dots: points. Crosses: out of memory. Lines: the law. Dotted: memory usable by torch."]
        notes += [self._others] * bool(self._others)
        cards = [each.card for each in self.capacities]
        drawn = charts(self.analysis, self.curves, self._shown, cards)
        return Figure(_TITLES[self.analysis], tuple(drawn), notes)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write CSV, JSON and SVG, and PNG if matplotlib is installed, each atomically.

        Args:
            folder: Created if missing. Files of an earlier run are replaced.

        Returns:
            The files, the PNG last.

        Raises:
            OSError: A file cannot be written.
        """
        plot, data = _STEMS[self.analysis]
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows, figure = self.rows(), self.figure()
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        texts = {
            f"{data}.csv": table.getvalue(),
            f"{data}.json": json.dumps(self.as_dict(), indent=2) + "\n",
            f"{plot}.svg": to_svg(figure),
        }
        for name, text in texts.items():
            write_text(folder / name, text)
        paths = [folder / name for name in texts]
        png = to_png(figure)
        if png is not None:
            paths.append(folder / f"{plot}.png")
            write_bytes(paths[-1], png)
        return paths

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Return a readable summary: laws, ratios, theory against actual, largest sizes by GPU, ways to make room."""
        own = f", {self.curves[0].name}" if self.analysis == "script" else ""
        parts = [[f"{_TITLES[self.analysis]}{own}", self.how], self._advice(), self._laws(), self._ratios()]
        parts += filter(None, [explain_ratio(self.curves), suggest_room(self.curves)])
        for title, rows in (("The laws may not hold, because", self.doubts), ("Guessed without data:", self.guesses)):
            parts += [[title, *map(printable, rows)]] if rows else []
        return "\n\n".join("\n".join(part) for part in parts)

    @property
    def _shown(self) -> tuple[ScalingCurve, ...]:
        """All curves; for the core analysis each MLP once, at the last of the dimensions."""
        if self.analysis != "core":
            return self.curves
        return tuple({curve.case.mlp: curve for curve in self.curves if curve.case}.values())

    @property
    def _others(self) -> str:
        """A remark about the curves that are not shown."""
        num_others = len(self.curves) - len(self._shown)
        if self.analysis != "core":
            return ""
        also = f" {counted(num_others, 'other combination')} {'is' if num_others == 1 else 'are'} in the CSV file."
        return f"Shown: {self._shown[0].name.partition(', ')[2]}.{also * bool(num_others)}"

    def _label(self, curve: ScalingCurve, mode: StepMode) -> str:
        """Name a row, without the part that all rows share."""
        if self.analysis == "script":
            return mode
        return f"{curve.name.partition(', ')[0] if self.analysis == 'core' else curve.name}, {mode}"

    def _advice(self) -> list[str]:
        """Return the table of the largest sizes by GPU; if it is too wide, it continues below."""
        has_classes, has_rule = bool(self.capacities[0].name), self.analysis != "script"
        shown = [(curve, mode) for curve in self._shown for mode in curve.result.law]
        names = ["largest size that fits", *["class of GPUs"] * has_classes]
        names += ["rule of thumb of GAOT-3D"] * (has_classes and has_rule)
        names += [self._label(curve, mode) for curve, mode in shown]
        columns = []
        for each in self.capacities:
            sizes = [curve.largest(mode, each.card.usable_bytes) for curve, mode in shown]
            column = [each.card.name, *[each.name] * has_classes]
            column += [f"{each.advised or 0:,}"] * (has_classes and has_rule)
            columns.append([*column, *("no limit known" if size is None else f"{size:,}" for size in sizes)])
        lines: list[str] = []
        while columns:
            num = 1
            while num < len(columns) and len(max(_table(names, columns[: num + 1]), key=len)) <= _WIDTH:
                num += 1
            lines += [*[""] * bool(lines), *_table(names, columns[:num])]
            columns = columns[num:]
        note = "by the law; for each class, the GPU with the least memory" if has_classes else "by the law"
        return [*lines, note]

    def _laws(self) -> list[str]:
        head = ("", "law", "factor*", "smallest", "largest")
        rows = [(self._label(curve, mode), *_law_row(curve, mode)) for curve in self._shown for mode in curve.modes]
        note = (
            "* the source's scaling factor, from the smallest to the largest point; it\n  includes the constant part."
        )
        return [*align([head, *rows], [False, False, True, True, True]), *filter(None, [self._others]), note]

    def _ratios(self) -> list[str]:
        head = ("", "training/inference", "actual/theory")
        shown = [(curve, mode) for curve in self._shown for mode in curve.modes]
        rows = [(self._label(curve, mode), *_ratio_row(curve, mode)) for curve, mode in shown]
        return align([head, *rows])


def _table(names: list[str], columns: list[list[str]]) -> list[str]:
    return align(list(zip(names, *columns, strict=True)))


def _law_row(curve: ScalingCurve, mode: StepMode) -> tuple[str, ...]:
    law, factor, peaks = curve.result.law.get(mode), curve.result.scaling_factor(mode), curve.result.peaks(mode)
    power = "" if law is None or law.order is None else f", n^{law.order:g}"
    ends = [format_bytes(peaks[end(peaks)]) if peaks else "-" for end in (min, max)]
    return "none" if law is None else law.tier + power, "-" if factor is None else f"{factor:.2f}", *ends


def _ratio_row(curve: ScalingCurve, mode: StepMode) -> tuple[str, str]:
    shares = [
        row["actual_over_theoretical"]
        for row in curve.rows()
        if row["mode"] == mode and row["actual_over_theoretical"] is not None
    ]
    return _span(list(curve.ratios().values())), _span(shares)


def _span(numbers: Sequence[float]) -> str:
    """The range of a list of numbers, or the only number."""
    ends = [f"{end:.2f}" for end in (min(numbers), max(numbers))] if numbers else ["-"]
    return " .. ".join(dict.fromkeys(ends))
