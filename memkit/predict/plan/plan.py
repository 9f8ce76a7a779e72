"""`TrainingPlan`: the chosen arrangement, its predicted memory and time, and the rejected candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memkit._charts.charts import Curve, Lines, unit_of
from memkit._charts.text import align, chart_lines
from memkit._core.units import format_bytes
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.plan.trial import Arrangement, PlannedTreatment, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """One way to run the step, tried on fake tensors.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        accumulation_steps: Micro-batches per optimizer step.
        precision: As for `MemoryEfficientTrainingWrapper`.
        checkpoint: Treatment of each treated block; empty if there are none.
        required_bytes: Bytes that must fit into the budget.
        seconds: Time of a step's operators, according to the plan's speeds.
        measured_seconds: Processor time of a step that was really run; None if none was.
        fits: Whether it fits.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> plan = mk.plan_training(model, torch.ones(8, 64), lambda m, x: m(x).square().mean(), budget="1GiB")
        >>> plan.candidates[0].fits, plan.candidates[0].treatment
        (True, '-')
    """

    micro_batch_size: int
    accumulation_steps: int
    precision: str | None
    checkpoint: Mapping[str, PlannedTreatment]
    required_bytes: int
    seconds: float
    measured_seconds: float | None
    fits: bool

    @classmethod
    def of(cls, trial: Trial, budget_bytes: int, measured_seconds: float | None) -> PlanCandidate:
        """Make a candidate from a trial."""
        arrangement = trial.arrangement
        return cls(
            micro_batch_size=arrangement.micro_batch_size,
            accumulation_steps=arrangement.accumulation_steps,
            precision=arrangement.precision,
            checkpoint=dict(arrangement.treatments),
            required_bytes=trial.required_bytes,
            seconds=trial.seconds,
            measured_seconds=measured_seconds,
            fits=trial.required_bytes <= budget_bytes,
        )

    @property
    def treatment(self) -> str:
        """Readable summary of the treatments, such as ``"3 full, 1 offload"``."""
        counts = Counter(self.checkpoint.values())
        return ", ".join(f"{count} {treatment}" for treatment, count in counts.items()) or "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A plan for running a step on the whole batch within a budget, with the gradient of the whole batch.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        accumulation_steps: Micro-batches per optimizer step.
        precision: As for `MemoryEfficientTrainingWrapper`.
        checkpoint: Treatment of each treated block, ``{"blocks.0": "full"}``; None if there are none.
        predicted_peak_bytes: Peak bytes in live tensors of the planned step, from its dry run.
        required_bytes: The peak plus scratch memory inside kernels; on a GPU, the memory that its allocator reserves
            plus the driver's context. This fits into the budget.
        budget_bytes: The budget.
        predicted_seconds: Time of the planned step's operators, according to `speeds`.
        predicted_slowdown: `predicted_seconds` divided by the time of the first candidate: the largest micro-batches
            allowed (the whole batch, if that may be chosen), no block treated, in the first precision.
        estimate: The planned step's memory, broken down by part.
        candidates: Everything that was tried, in that order.
        speeds: Source of the times.
        notes: What the plan could not check, and why; values answered without data.
        is_split_exact: Whether the micro-batches were found to give the gradient of the whole batch; None if that was
            not checked.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "123"))
        >>> plan = mk.plan_training(model, torch.ones(512, 64), lambda m, x: m(x).square().mean(), budget="1MiB")
        >>> plan.required_bytes <= plan.budget_bytes, plan.micro_batch_size * plan.accumulation_steps >= 512
        (True, True)
        >>> trainer = mk.MemoryEfficientTrainingWrapper(
        ...     model, torch.optim.AdamW(model.parameters()), **plan.wrapper_settings()
        ... )
    """

    micro_batch_size: int
    accumulation_steps: int
    precision: str | None
    checkpoint: Mapping[str, PlannedTreatment] | None
    predicted_peak_bytes: int
    required_bytes: int
    budget_bytes: int
    predicted_seconds: float
    predicted_slowdown: float
    estimate: MemoryEstimate
    candidates: tuple[PlanCandidate, ...]
    speeds: str
    notes: tuple[str, ...] = ()
    is_split_exact: bool | None = None

    @classmethod
    def of(
        cls,
        best: Trial,
        trials: Sequence[Trial],
        *,
        budget_bytes: int,
        measured: Mapping[Arrangement, float],
        speeds: str,
        notes: Sequence[str],
        is_split_exact: bool | None,
    ) -> TrainingPlan:
        """Make the plan from the trials of a search; the first trial is the step without a plan."""
        arrangement = best.arrangement
        return cls(
            micro_batch_size=arrangement.micro_batch_size,
            accumulation_steps=arrangement.accumulation_steps,
            precision=arrangement.precision,
            checkpoint=dict(arrangement.treatments) or None,
            predicted_peak_bytes=best.estimate.peak_bytes,
            required_bytes=best.required_bytes,
            budget_bytes=budget_bytes,
            predicted_seconds=best.seconds,
            predicted_slowdown=best.seconds / trials[0].seconds,
            estimate=best.estimate,
            candidates=tuple(PlanCandidate.of(each, budget_bytes, measured.get(each.arrangement)) for each in trials),
            speeds=speeds,
            notes=(
                *notes,
                *(f"Not known to hold: {each}." for each in best.estimate.doubts),
                *(f"Answered without data: {each}." for each in best.estimate.guesses),
            ),
            is_split_exact=is_split_exact,
        )

    def wrapper_settings(self) -> dict[str, Any]:
        """Return the keyword arguments for `MemoryEfficientTrainingWrapper`."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "precision": self.precision,
            "checkpoint": self.checkpoint,
        }

    def explain(self) -> str:
        """Return a readable report: every candidate and why it lost, and a plot of time against memory."""
        columns = ["rows x steps", "precision", "blocks", "needs", "time", ""]
        rows = [columns, *map(self._row, sorted(self.candidates, key=lambda each: each.seconds))]
        where = f"budget {format_bytes(self.budget_bytes)}; peak in {self.estimate.peak_where}"
        notes = [where, f"time: over that of the largest micro-batches, untreated, by {self.speeds}", *self.notes]
        return "\n".join([*align(rows, [False] * len(columns)), "", *chart_lines(self._chart()), "", *notes])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON."""
        figures = {**asdict(self), "estimate": self.estimate.as_dict(), "notes": list(self.notes)}
        return figures | {"candidates": [asdict(each) for each in self.candidates]}

    def _row(self, candidate: PlanCandidate) -> list[str]:
        return [
            f"{candidate.micro_batch_size} x {candidate.accumulation_steps}",
            candidate.precision or "-",
            candidate.treatment,
            format_bytes(candidate.required_bytes),
            f"{self._slowdown(candidate):.2f}",
            self._verdict(candidate),
        ]

    def _slowdown(self, candidate: PlanCandidate) -> float:
        return candidate.seconds / self.predicted_seconds * self.predicted_slowdown

    def _is_chosen(self, candidate: PlanCandidate) -> bool:
        same_size = candidate.accumulation_steps == self.accumulation_steps and candidate.precision == self.precision
        return same_size and candidate.checkpoint == (self.checkpoint or {})

    def _verdict(self, candidate: PlanCandidate) -> str:
        measured = "" if candidate.measured_seconds is None else f", {candidate.measured_seconds:.3g} s when run"
        if self._is_chosen(candidate):
            return f"<- chosen{measured}"
        if not candidate.fits:
            return f"{format_bytes(candidate.required_bytes - self.budget_bytes)} too much"
        return f"{candidate.seconds / self.predicted_seconds:.2f} times the time of the chosen one{measured}"

    def _chart(self) -> Lines:
        kinds: dict[str, list[PlanCandidate]] = {"chosen": [], "fits": [], "too large": []}
        for each in self.candidates:
            kinds["chosen" if self._is_chosen(each) else "fits" if each.fits else "too large"].append(each)
        curves = [
            Curve(
                name,
                [self._slowdown(each) for each in kind],
                [each.required_bytes for each in kind],
                style="crosses" if name == "too large" else "points",
            )
            for name, kind in kinds.items()
            if kind
        ]
        budget = (f"budget {format_bytes(self.budget_bytes)}", self.budget_bytes)
        return Lines(curves, "time", "Memory by time", "memory", unit_of(self.budget_bytes), [budget])
