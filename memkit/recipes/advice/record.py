"""Records of advice: one change with its predicted and measured effect, and a table of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from memkit._core.units import format_bytes
from memkit._events.reader import EventLog
from memkit.report.nodes import Cell, Paragraph, Section, Size, Table

TOLERANCE = 0.02  # of the measured value
_RATIO = "ratio of operations"
_BUDGET_VERDICTS = {
    "fits": "within the budget",
    "does not fit": "above the budget",
    "too close": "too close to the budget to tell",
    "not known": "whether it is within the budget is not known",
}
_HEADINGS = {
    "en": ("Verified advice", "change", "saves, predicted", "saves, measured", "FLOPs", "status", "code to write"),
    "zh": ("经验证的建议", "改动", "预测节省", "实测节省", "FLOPs", "状态", "写法"),
}
_SUMMARIES = {
    "en": ("plain step on {target}: peak {peak}, in {where}", ", measured {} on the CPU"),
    "zh": ("{target} 上未改动的训练步：峰值 {peak}，位于 {where}", "；CPU 实测 {}"),  # noqa: RUF001 - Chinese punctuation
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change of a training step. Savings are relative to the plain step; None means "unknown".

    Attributes:
        name: Short name of the change.
        change: Code to write.
        effect: Effect on gradients and step, in words.
        exact: Whether gradients and step stay the same except for rounding.
        status: ``"verified"``: measured, and within 2% of the expectation. ``"failed: ..."``: measured, but not
            verified. ``"not run: ..."``: not measured, with the reason.
        predicted_peak_bytes: Peak bytes in live tensors on the target.
        predicted_saved_bytes: Reduction of that peak.
        predicted_flops_ratio: Operations relative to the plain step: matrix products, convolutions, and attention on a
            GPU.
        expected_peak_bytes: The prediction for the run that was measured; on the CPU the same as predicted.
        expected_saved_bytes: The saving predicted for that run.
        expected_flops_ratio: The operations predicted for that run, relative to the plain step.
        measured_peak_bytes: Peak bytes in live tensors in the real run on this machine's CPU.
        measured_saved_bytes: Reduction of that peak.
        measured_flops_ratio: The ratio counted in that run.
        allocator_saved_bytes: The measured saving by the allocator's own events, which include the kernels' workspace.
        difference: Largest difference in the first step's gradients, or in its parameter updates if the change concerns
            those, relative to the largest value of the plain step.
        fits: Whether the step fits the budget; None without a budget, or if that is not known.
        budget_verdict: What `MemoryEstimate.verdict` says of the budget; None without one.

    Example:
        >>> import memkit as mk
        >>> each = mk.recipes.Advice(
        ...     name="bf16", change="precision='bf16-mixed'", effect="rounds", exact=False, status="not run: no time"
        ... )
        >>> print(each)
        bf16: not run: no time
    """

    name: str
    change: str
    effect: str
    exact: bool
    status: str
    predicted_peak_bytes: int | None = None
    predicted_saved_bytes: int | None = None
    predicted_flops_ratio: float | None = None
    expected_peak_bytes: int | None = None
    expected_saved_bytes: int | None = None
    expected_flops_ratio: float | None = None
    measured_peak_bytes: int | None = None
    measured_saved_bytes: int | None = None
    measured_flops_ratio: float | None = None
    allocator_saved_bytes: int | None = None
    difference: float | None = None
    fits: bool | None = None
    budget_verdict: str | None = None

    @property
    def is_verified(self) -> bool:
        """Whether the status is ``"verified"``."""
        return self.status == "verified"

    @property
    def meets_expectations(self) -> bool:
        """Whether all measurements are within 2% of the expectation."""
        return not self.deviations

    @property
    def deviations(self) -> list[str]:
        """The measurements that are further than 2% from the expectation, in words."""
        pairs: tuple[tuple[str, float | None, float | None], ...] = (
            ("peak", self.expected_peak_bytes, self.measured_peak_bytes),
            ("saving", self.expected_saved_bytes, self.measured_saved_bytes),
            (_RATIO, self.expected_flops_ratio, self.measured_flops_ratio),
        )
        found = []
        for name, expected, measured in pairs:
            if expected is None or measured is None or abs(expected - measured) <= TOLERANCE * abs(measured):
                continue
            is_size = name != _RATIO
            shown = [_size(int(each)) if is_size else f"{each:.2f}" for each in (measured, expected)]
            found.append(f"the {name} is {' instead of '.join(shown)}")
        return found

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        if self.predicted_peak_bytes is None:  # nothing was tried: what it would do is not to be recommended
            return lines[0]
        if self.predicted_saved_bytes is not None and self.predicted_peak_bytes is not None:
            whole_bytes = self.predicted_saved_bytes + self.predicted_peak_bytes
            lines.append(f"  predicted: saves {_size(self.predicted_saved_bytes)} of {_size(whole_bytes)}")
            if _size(self.expected_saved_bytes) != _size(self.predicted_saved_bytes):
                lines.append(f"  expected here: saves {_size(self.expected_saved_bytes)}")
        if self.measured_saved_bytes is not None:
            lines.append(f"  measured: saves {_size(self.measured_saved_bytes)}")
            if _size(self.allocator_saved_bytes) != _size(self.measured_saved_bytes):
                lines[-1] += f"; {_size(self.allocator_saved_bytes)} with the kernels' workspace"
        elif self.measured_peak_bytes is not None:
            lines.append(
                f"  measured: peak {_size(self.measured_peak_bytes)}, expected {_size(self.expected_peak_bytes)}"
            )
        if self.predicted_flops_ratio is not None:
            measured = "" if self.measured_flops_ratio is None else f", measured {self.measured_flops_ratio:.2f}"
            lines.append(f"  operations: {self.predicted_flops_ratio:.2f} times{measured}")
        difference = "" if self.difference is None else f"; measured difference {self.difference:.1e}"
        budget = "" if self.budget_verdict is None else f"; {_BUDGET_VERDICTS[self.budget_verdict]}"
        promise = "was to be: " if self.status.startswith("failed") else ""
        return "\n".join(
            [
                *lines,
                f"  {promise}{self.effect}{difference}{budget}",
                *(f"  > {line}" for line in self.change.splitlines()),
            ]
        )


@dataclass(frozen=True, slots=True)
class AdviceTable(Sequence[Advice]):
    """Advice about one step, sorted by saving per operation; also a section for `write_report`.

    Attributes:
        target: The device that the step is meant for.
        peak_bytes: Predicted peak of the plain step on the target.
        peak_where: Where in the step that peak is.
        measured_peak_bytes: Measured peak of the plain step on the CPU; None if it did not fit.
        items: The advice.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
        >>> table = mk.advise(model, torch.ones(64, 8), lambda model, x: model(x).square().mean())
        >>> table.peak_bytes == table.measured_peak_bytes
        True
    """

    target: str
    peak_bytes: int
    peak_where: str
    measured_peak_bytes: int | None
    items: tuple[Advice, ...]

    @overload
    def __getitem__(self, index: int) -> Advice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Advice, ...]: ...
    def __getitem__(self, index: int | slice) -> Advice | tuple[Advice, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.items)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Return everything as readable text."""
        return "\n".join([self._summary("en"), *map(str, self.items)])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON; sizes in bytes."""
        return asdict(self) | {"items": [asdict(each) for each in self.items]}

    def __call__(self, log: EventLog, language: str) -> Section:  # noqa: ARG002 - signature of a section maker
        """Make the report section: `write_report(log, path, sections=[advice])`."""
        title, *columns = _HEADINGS[language]
        rows: list[tuple[Cell, ...]] = [
            (
                each.name,
                Size.of(each.predicted_saved_bytes),
                Size.of(each.measured_saved_bytes),
                None if each.measured_flops_ratio is None else f"{each.measured_flops_ratio:.2f}",
                each.status,
                each.change,
            )
            for each in self.items
        ]
        return Section(title, (Paragraph(self._summary(language)), Table(tuple(columns), tuple(rows))))

    def _summary(self, language: str) -> str:
        plain, measured = _SUMMARIES[language]
        text = plain.format(target=self.target, peak=_size(self.peak_bytes), where=self.peak_where)
        return text if self.measured_peak_bytes is None else text + measured.format(_size(self.measured_peak_bytes))


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "an unknown amount"
    return format_bytes(num_bytes) if num_bytes >= 0 else f"-{format_bytes(-num_bytes)}"
