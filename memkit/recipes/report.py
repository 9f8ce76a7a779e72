"""Write a report from a memory log: `memkit.report` builds the page, `memkit.predict` provides the table of GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memkit._core.errors import InputTypeError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._events.reader import EventLog
from memkit.predict.gpus import all_gpus, find_gpu
from memkit.recipes.words import REPORT_WORDS
from memkit.report.build import build_report
from memkit.report.cards import CatalogueRow
from memkit.report.nodes import Report, SectionMaker
from memkit.report.write import check_target, save_report

if TYPE_CHECKING:
    from memkit.memory.track import Tracker
    from memkit.predict.plan.plan import TrainingPlan


@guided(words=REPORT_WORDS)
def write_report(
    log: EventLog | Tracker | TrainingPlan,
    path: str | os.PathLike[str],
    *,
    baseline: EventLog | None = None,
    gpu: str | None = None,
    language: str = "en",
    sections: Sequence[SectionMaker] = (),
) -> None:
    """Write a human-readable report of a memory log. It needs neither torch nor a device.

    The page of a CUDA memory snapshot or of a `Tracker` has an interactive view of all allocations.

    Args:
        log: The log that `read_memory_events` returned; or a `Tracker`, whose block is then the run; or the plan of
            `plan_training`, with its curve.
        path: The file to write; its suffix sets the format: ``.html`` (one self-contained file), ``.md``, ``.txt`` or
            ``.json`` (sizes in bytes). The file is written atomically. An earlier report is replaced, any other file is
            left unchanged.
        baseline: Another log to compare this one with.
        gpu: Name of the GPU that the run used, as for `find_gpu`, if the log does not state its capacity.
        language: ``"en"``, or ``"zh"`` for Chinese.
        sections: Custom sections: callables that take the log and the language and return a
            ``memkit.report.nodes.Section``, or None for no section.

    Raises:
        InputTypeError: ``log`` or ``baseline`` is not a log, or a custom section is not a section.
        InputError: The log has no events; the path's directory does not exist, its suffix is not a known format, or its
            file is not a report; ``gpu`` is an unknown GPU.
        ConfigError: ``language`` is not supported.
        OSError: The file cannot be written.

    Memory:
        About the size of the log again in host memory; the file stays below 300 kB even for 100,000 events.

    Example:
        >>> import pathlib, tempfile
        >>> import memkit as mk
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "log.json").write_text(
        ...     '[{"event": "init", "peak_memory": 0}, {"event": "t5_loaded", "peak_memory": 11362869248}]'
        ... )
        >>> mk.write_report(mk.report.read_memory_events(folder / "log.json"), folder / "report.md")
        >>> "| t5 | 10.58 GiB |" in (folder / "report.md").read_text("utf-8")
        True
    """
    _check_order(log, path)
    check_target(path)  # before the work
    for maker in Checker("write_report").series("sections", sections):
        Checker("write_report").function("sections", maker)
    save_report(make_report(log, baseline=baseline, gpu=gpu, language=language, sections=sections), path)


def _check_order(log: object, path: object) -> None:
    """Refuse a path in place of the log, and a path argument that is not a path."""
    is_path = isinstance(path, (str, os.PathLike))
    if not is_path or isinstance(log, (str, os.PathLike)):
        read = "log" if isinstance(path, EventLog) else f"mk.report.read_memory_events({str(log)!r})"
        target = repr(str(path)) if is_path else repr(str(log)) if isinstance(path, EventLog) else "'report.html'"
        raise InputTypeError(
            "write_report(log, path)",
            got=f"a {type(log).__name__} and a {type(path).__name__}",
            expected="a log that was read, then the path to write",
            fix=f"write write_report({read}, {target}).",
        )


def make_report(
    log: EventLog | Tracker | TrainingPlan,
    *,
    baseline: EventLog | None = None,
    gpu: str | None = None,
    language: str = "en",
    sections: Sequence[SectionMaker] = (),
) -> Report:
    """Build a report without writing it; arguments and errors as for `write_report`."""
    if "memkit.predict.plan.plan" in sys.modules:  # without a plan its module, which needs torch, is not loaded
        from memkit.predict.plan.plan import TrainingPlan
        from memkit.recipes.plan_report import report_of

        if isinstance(log, TrainingPlan):
            return report_of(log, language)
    return build_report(
        _as_log(log),
        cards=[CatalogueRow(each.name, each.usable_bytes, each.confidence) for each in all_gpus()],
        baseline=baseline,
        total_bytes=None if gpu is None else find_gpu(gpu).total_bytes,
        language=language,
        sections=sections,
    )


def _as_log(log: Any) -> EventLog:
    """Return a tracker as a log. Without a tracker its module, which needs torch, is not loaded."""
    if "memkit.memory.track" in sys.modules:
        from memkit.memory.track import Tracker
        from memkit.recipes.recorded_log import log_of

        if isinstance(log, Tracker):
            return log_of(log)
    return log  # type: ignore[no-any-return]  # anything else is refused by its reader
