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
from memkit._core.printable import printable
from memkit._core.units import format_bytes
from memkit._machine.files import write_bytes, write_text
from memkit.predict.scaling.points import StepMode
from memkit.recipes.memory_test.curves import Capacity, ScalingCurve
from memkit.recipes.memory_test.plots import Analysis, charts
from memkit.recipes.memory_test.suggestions import explain_ratio, suggest_room

_TITLES = {
    "full": "Memory of a neural operator by its number of edges",
    "core": "Memory of the edges' MLP by its number of edges",
    "script": "Memory of a step by its size",
}
# Names of the plots and of the data, without suffix; the first two are the source's.
_STEMS = {
    "full": ("memory_analysis_results", "memory_analysis_data"),
    "core": ("edge_memory_analysis", "edge_memory_results"),
    "script": ("scaling_results", "scaling_data"),
}


@dataclass(frozen=True, eq=False)
class MemoryTestResult:
    """All curves of a sweep. `explain` returns the text, `write` writes the files.

    Attributes:
        analysis: ``"full"`` or ``"core"``; ``"script"`` for the user's own step.
        device: The device measured on; None if everything is predicted.
        curves: In the order they ran.
        capacities: The cards they are compared with.

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
        notes = [self.how, "Dots: points. Crosses: out of memory. Lines: the law. Dotted: what a card leaves torch."]
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

    def explain(self) -> str:
        """Return a readable summary: laws, ratios, theory against actual, what fits which cards, what makes room."""
        parts = [[f"{_TITLES[self.analysis]}. {self.how}"], self._laws(), self._advice()]
        parts += filter(None, [explain_ratio(self.curves), suggest_room(self.curves)])
        for title, rows in (("NOT KNOWN, because", self.doubts), ("Answered without data:", self.guesses)):
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
        """A remark on the curves that are not shown."""
        num_others = len(self.curves) - len(self._shown)
        if not num_others:
            return ""
        return f"Shown: {self._shown[0].name.partition(', ')[2]}. {num_others} other combinations are in the CSV file."

    def _laws(self) -> list[str]:
        head = ("", "law", "factor*", "smallest", "largest", "train/inf.", "actual/theory")
        rows = [head, *(_law_row(curve, mode) for curve in self._shown for mode in curve.modes)]
        lines = align(rows, [False, False, True, True, True, True, True])
        note = "* the source's scaling factor, from the smallest to the largest point; it includes the constant part."
        return [*lines, *filter(None, [self._others]), note]

    def _advice(self) -> list[str]:
        rows = [
            ("largest size that fits, by the law, on", *(each.card.name for each in self.capacities)),
            ("which holds least of the cards of", *(each.name for each in self.capacities)),
            ("rule of thumb of GAOT-3D", *(f"{each.advised or 0:,}" for each in self.capacities)),
        ]
        is_own = self.analysis == "script"
        rows = rows[:1] if not self.capacities[0].name else rows[:2] if is_own else rows
        for curve in self._shown:
            for mode in curve.result.law:
                sizes = [curve.largest(mode, each.card.usable_bytes) for each in self.capacities]
                known = ("no limit known" if size is None else f"{size:,}" for size in sizes)
                rows.append((f"{curve.name}, {mode}", *known))
        return align(rows)


def _law_row(curve: ScalingCurve, mode: StepMode) -> tuple[str, ...]:
    law, factor, peaks = curve.result.law.get(mode), curve.result.scaling_factor(mode), curve.result.peaks(mode)
    shares = [
        row["actual_over_theoretical"]
        for row in curve.rows()
        if row["mode"] == mode and row["actual_over_theoretical"] is not None
    ]
    power = "" if law is None or law.order is None else f", n^{law.order:g}"
    ends = [format_bytes(peaks[end(peaks)]) if peaks else "-" for end in (min, max)]
    return (
        f"{curve.name}, {mode}",
        "none" if law is None else law.tier + power,
        "-" if factor is None else f"{factor:.2f}",
        *ends,
        _span(list(curve.ratios().values())),
        _span(shares),
    )


def _span(numbers: Sequence[float]) -> str:
    """The range of a list of numbers, or the only number."""
    ends = [f"{end:.2f}" for end in (min(numbers), max(numbers))] if numbers else ["-"]
    return " .. ".join(dict.fromkeys(ends))
