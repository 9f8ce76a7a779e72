"""A plan as a report: the choices, time against memory, and every candidate."""

from __future__ import annotations

from collections.abc import Iterator

from memkit._core.errors import ConfigError
from memkit.predict.plan.plan import PlanCandidate, TrainingPlan
from memkit.report.nodes import Bars, Bullets, Node, Paragraph, Report, Section, Size, Table


def report_of(plan: TrainingPlan, language: str) -> Report:
    """Return a plan as a report.

    Raises:
        ConfigError: The language is not English.
    """
    if language != "en":
        raise ConfigError(
            f"write_report(plan, path, language={language!r})",
            got="a language other than English",
            expected="language='en': a plan's own texts are in English",
            fix="omit language.",
        )
    overview = plan._overview()  # noqa: SLF001 - as `print` shows it
    needs, budget = Size.of(plan.required_bytes), Size.of(plan.budget_bytes)
    sections = [
        Section("The plan", (Table(("setting", "choice"), tuple(overview.rows)), *_notes(plan))),
        Section("Time against memory", (plan.chart(front=plan.pareto.candidates), _candidates(plan))),
        Section("At the peak", (Bars(tuple(_parts(plan)), "Memory at that moment"),)),
    ]
    return Report(
        title="Plan of a training step",
        headline=overview.headline,
        severity="warning" if plan.estimate.doubts else "good",
        hints=(),
        verdict=f"{plan.predicted_slowdown:.2f} times the time of the largest micro-batches without treatment.",
        highlights=(("needs", needs), ("budget", budget), ("smallest candidate", Size.of(plan.least_bytes))),
        sections=tuple(sections),
        language=language,
        figures=plan.as_dict,
    )


def _notes(plan: TrainingPlan) -> list[Node]:
    notes: list[Node] = [Paragraph(f"Times are based on {plan.speeds}, memory on a dry run of each candidate.")]
    return [*notes, Bullets(plan.notes)] if plan.notes else notes


def _candidates(plan: TrainingPlan) -> Table:
    columns = ("rows x steps", "treated", "precision", "needs", "time", "fits")
    fastest = plan.predicted_seconds / plan.predicted_slowdown

    def row(each: PlanCandidate) -> tuple[str | Size, ...]:
        return (
            f"{each.micro_batch_size} x {each.accumulation_steps}",
            each.treatment,
            each.precision or "the model's own",
            Size.of(each.required_bytes),
            f"{each.seconds / fastest:.2f}",
            "yes" if each.fits else "no",
        )

    rows = sorted(plan.candidates, key=lambda each: each.seconds)
    return Table(columns, tuple(map(row, rows)), "All candidates, fastest first")


def _parts(plan: TrainingPlan) -> Iterator[tuple[str, int]]:
    """Yield the parts that add up to the peak of live tensors."""
    rest = plan.predicted_peak_bytes
    for name, size in plan.estimate.parts().items():
        if not rest:
            return
        if size:
            yield name, size
            rest -= size
