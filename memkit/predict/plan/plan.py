"""`TrainingPlan`: the chosen arrangement, its predicted memory and time, and the rejected candidates."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, overload

from memkit._charts.charts import Curve, Figure, Lines, unit_of
from memkit._charts.overview import Overview, Overviewed
from memkit._charts.pictures import save_picture
from memkit._charts.text import align, chart_lines
from memkit._core.foreign import AS_DICT, PEAK, SUMMARY
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._tape.plan import SavedTensorPlan
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
        saved_tensors: What is done with each saved tensor; None if they all stay.
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
    saved_tensors: SavedTensorPlan | None
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
            saved_tensors=arrangement.tensors,
            required_bytes=trial.required_bytes,
            seconds=trial.seconds,
            measured_seconds=measured_seconds,
            fits=trial.required_bytes <= budget_bytes,
        )

    @property
    def treatment(self) -> str:
        """Readable summary of the treatments, such as ``"3 full, 1 offload"``, or ``"tensors: 40% kept"``."""
        if self.saved_tensors is not None:
            return f"tensors: {self.saved_tensors.kept_share:.0%} kept"
        counts = Counter(self.checkpoint.values())
        return ", ".join(f"{count} {treatment}" for treatment, count in counts.items()) or "-"

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON; what is done with saved tensors as a summary."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = None if self.saved_tensors is None else self.saved_tensors.summary
        return figures | {"checkpoint": dict(self.checkpoint), "saved_tensors": tensors}


@dataclass(frozen=True, slots=True)
class ParetoFront(Sequence[PlanCandidate]):
    """The candidates of a plan than which no other is both faster and smaller, fastest first.

    Attributes:
        plan: The plan.
        candidates: The candidates.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "123"))
        >>> plan = mk.plan_training(model, torch.ones(512, 64), lambda m, x: m(x).square().mean(), budget="1MiB")
        >>> front = plan.pareto
        >>> [each.required_bytes for each in front] == sorted((each.required_bytes for each in front), reverse=True)
        True
        >>> front.plot().startswith("<svg")
        True
    """

    plan: TrainingPlan = field(repr=False)
    candidates: tuple[PlanCandidate, ...]

    @classmethod
    def of(cls, plan: TrainingPlan) -> ParetoFront:
        """Choose from the candidates of a plan."""
        chosen: list[PlanCandidate] = []
        for each in sorted(plan.candidates, key=lambda each: (each.seconds, each.required_bytes)):
            if not chosen or each.required_bytes < chosen[-1].required_bytes:
                chosen.append(each)
        return cls(plan, tuple(chosen))

    @overload
    def __getitem__(self, place: int) -> PlanCandidate: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[PlanCandidate]: ...

    def __getitem__(self, place: int | slice) -> PlanCandidate | Sequence[PlanCandidate]:
        return self.candidates[place]

    def __len__(self) -> int:
        return len(self.candidates)

    def plot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the memory of every candidate by its time, the front as a line, and the budget.

        Args:
            path: File to write, ``.svg`` or ``.png`` (which needs matplotlib); None writes nothing.

        Returns:
            The picture as SVG text; as the last line of a notebook's cell it is shown.

        Raises:
            ConfigError: The path is a PNG and matplotlib is not installed, or the suffix is unknown.
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written.
        """
        chart = self.plan.chart(front=self.candidates)
        notes = [f"Time: over that of the largest micro-batches, untreated, by {self.plan.speeds}."]
        return save_picture(Figure("Time against memory of a step", [chart], notes), path, "plan.pareto.plot")


_ABSENT = {
    "plan.micro_batch_size": "batch_size micro_batch per_device_train_batch_size",
    "plan.accumulation_steps": "gradient_accumulation_steps accumulate_grad_batches num_micro_batches",
    "plan.predicted_peak_bytes": f"{PEAK} peak_bytes memory predicted_peak",
    "plan.predicted_slowdown": "slowdown cost",
    "plan.checkpoint": "checkpointing gradient_checkpointing",
    "plan.pareto.plot()": "plot show",
    "print(plan), or plan.explain() for every candidate": SUMMARY,
    "MemoryEfficientTrainingWrapper(model, optimizer, **plan.wrapper_settings())": "apply run train_step fit",
    "plan.as_dict()": AS_DICT,
}


@guided(absent=_ABSENT)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Overviewed):
    """A plan for running a step on the whole batch within a budget, with the gradient of the whole batch.

    It prints as a short table; `explain` lists every candidate and `pareto` those worth choosing.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        accumulation_steps: Micro-batches per optimizer step.
        precision: As for `MemoryEfficientTrainingWrapper`.
        checkpoint: Treatment of each treated block, ``{"blocks.0": "full"}``; None if there are none.
        saved_tensors: What is done with each tensor that autograd saves, for `treat_saved_tensors`; None if they stay.
        predicted_peak_bytes: Peak bytes in live tensors of the planned step, from its dry run.
        required_bytes: The peak plus scratch memory inside kernels. On a GPU, the driver's context plus what the
            allocator must be able to hold, or in a part of a card what it would like to hold. This fits into the
            budget.
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
    saved_tensors: SavedTensorPlan | None
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
            saved_tensors=arrangement.tensors,
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
            "saved_tensors": self.saved_tensors,
        }

    @property
    def least_bytes(self) -> int:
        """The least that any candidate needs; with ``curve=True`` the least that the step can take."""
        return min(each.required_bytes for each in self.candidates)

    @property
    def pareto(self) -> ParetoFront:
        """The candidates that no other one beats in both time and memory; ``plan.pareto.plot()`` draws them."""
        return ParetoFront.of(self)

    def _overview(self) -> Overview:
        needs, budget = format_bytes(self.required_bytes), format_bytes(self.budget_bytes)
        num_fitting = sum(each.fits for each in self.candidates)
        treated = Counter((self.checkpoint or {}).values())
        blocks = ", ".join(f"{count} {treatment}" for treatment, count in treated.items()) or "kept as they are"
        tensors = self.saved_tensors
        rows = [
            ("micro-batches", f"{self.accumulation_steps} of at most {self.micro_batch_size} rows"),
            ("precision", self.precision or "as the model is"),
            ("blocks", blocks),
            ("saved tensors", "kept as they are" if tensors is None else tensors.summary),
            ("needs", needs),
            ("budget", budget),
            ("peak of live tensors", format_bytes(self.predicted_peak_bytes)),
            ("peak in", self.estimate.peak_where),
            ("time", f"{self.predicted_slowdown:.2f} times that of the largest micro-batches, untreated"),
            ("candidates", f"{len(self.candidates)} tried, {num_fitting} fit"),
        ]
        headline = f"fits into {budget}: it needs at most {needs}{self.estimate.condition}"
        if self.estimate.doubts:
            headline = f"not known whether it fits into {budget}: {'; '.join(self.estimate.doubts)}"
        return Overview(headline, rows, self.notes)

    def explain(self) -> str:
        """Return a readable report: every candidate and why it lost, and a plot of time against memory."""
        columns = ["rows x steps", "precision", "treated", "needs", "time", ""]
        rows = [columns, *map(self._row, sorted(self.candidates, key=lambda each: each.seconds))]
        where = f"budget {format_bytes(self.budget_bytes)}; peak in {self.estimate.peak_where}"
        notes = [where, f"time: over that of the largest micro-batches, untreated, by {self.speeds}", *self.notes]
        return "\n".join([*align(rows, [False] * len(columns)), "", *chart_lines(self.chart()), "", *notes])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = None if self.saved_tensors is None else self.saved_tensors.as_dict()
        figures |= {"estimate": self.estimate.as_dict(), "notes": list(self.notes), "saved_tensors": tensors}
        return figures | {"candidates": [each.as_dict() for each in self.candidates]}

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
        is_treated_so = candidate.checkpoint == (self.checkpoint or {})
        return same_size and is_treated_so and candidate.saved_tensors == self.saved_tensors

    def _verdict(self, candidate: PlanCandidate) -> str:
        measured = "" if candidate.measured_seconds is None else f", {candidate.measured_seconds:.3g} s when run"
        if self._is_chosen(candidate):
            return f"<- chosen{measured}"
        if not candidate.fits:
            return f"{format_bytes(candidate.required_bytes - self.budget_bytes)} more than the budget"
        return f"{candidate.seconds / self.predicted_seconds:.2f} times the time of the chosen one{measured}"

    def chart(self, front: Sequence[PlanCandidate] = ()) -> Lines:
        """Return memory by time of all candidates as data, with a line through those of a front."""
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
        if len(front) > 1:
            times, sizes = [self._slowdown(each) for each in front], [each.required_bytes for each in front]
            curves.insert(0, Curve("no other is faster and smaller", times, sizes, style="dashed"))
        most = max(each.required_bytes for each in self.candidates)
        budget = (f"budget {format_bytes(self.budget_bytes)}", self.budget_bytes)
        lines = [budget] if self.budget_bytes <= 2 * most else []  # it would press the candidates together
        return Lines(curves, "time", "Memory by time", "memory", unit_of(most), lines)
