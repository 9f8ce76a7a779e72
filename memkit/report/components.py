"""The loaded components and their share of memory: differences between named events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkit._events.log import Event
from memkit.report.observed import Observed

_WHOLE = frozenset({"model_loaded", "models_loaded", "all_loaded"})


@dataclass(frozen=True, slots=True)
class Load:
    """One loaded component.

    Attributes:
        name: Such as ``"t5"``.
        num_bytes: Growth of memory; None if its event is missing.
        since: Name of the event from which the growth is counted; None if there is no earlier one, so that it includes
            memory that was in use already.
        is_record: Whether it is the growth of a running peak: loading may have briefly taken more than remained.
    """

    name: str
    num_bytes: int | None
    since: str | None
    is_record: bool


@dataclass(frozen=True, slots=True)
class Components:
    """The components loaded before the work began.

    Attributes:
        loads: In order of loading; those of missing events come last.
        before_bytes: Memory in use before the first one; zero if not recorded.
        whole_bytes: Memory in use once all were loaded; None without components.
        whole_event: Name of the event that reports it.
    """

    loads: tuple[Load, ...] = ()
    before_bytes: int = 0
    whole_bytes: int | None = None
    whole_event: str | None = None

    @property
    def named_bytes(self) -> int:
        """Bytes with a name: all components, plus the memory in use before."""
        return self.before_bytes + sum(load.num_bytes or 0 for load in self.loads)

    @property
    def unattributed_bytes(self) -> int | None:
        """Bytes in use once all were loaded that belong to no component."""
        return None if self.whole_bytes is None else self.whole_bytes - self.named_bytes


def find_components(observed: Sequence[Observed], *, missing: Sequence[str] = ()) -> Components:
    """Find the events that report a load, and the growth of memory at each.

    In a log with several runs or processes, the first one that loads anything is used.

    Args:
        observed: The events, with the ones before them.
        missing: Names of load events that are known to be missing: the report lists them without a size.
    """
    names = {each.event.event for each in observed}
    names = {name for name in names if name.endswith("loaded")}
    marks = [each for each in observed if each.event.event in names or each.event.incremental_bytes is not None]
    marks = [each for each in marks if _component(each.event) or each.event.event in _WHOLE]
    if not marks:
        return Components()
    marks = [each for each in marks if each.track == marks[0].track]
    loads: dict[str, Load] = {}
    for mark in marks:
        name = _component(mark.event)
        if name and name not in loads:
            loads[name] = _load(name, mark)
    for name in (each.removesuffix("_loaded") for each in missing):
        loads[name] = Load(name, None, None, is_record=True)
    whole = next((mark for mark in reversed(marks) if mark.event.event in _WHOLE), marks[-1])
    before = marks[0].before
    level = _level(whole.event)[0]
    return Components(
        tuple(loads.values()),
        before_bytes=0 if before is None or level is None else _level(before)[0] or 0,
        whole_bytes=level,
        whole_event=whole.event.event if level is not None else None,
    )


def _component(event: Event) -> str | None:
    """Return the name of the component that an event loads."""
    if event.event in _WHOLE:
        return None
    if event.event.endswith("_loaded") and len(event.event) > len("_loaded"):
        return event.component or event.event.removesuffix("_loaded")
    return event.component if event.event == "loaded" or event.incremental_bytes is not None else None


def _load(name: str, mark: Observed) -> Load:
    event, before = mark.event, mark.before
    if event.incremental_bytes is not None:
        return Load(name, event.incremental_bytes, None if before is None else before.event, is_record=False)
    level, is_record = _level(event)
    if level is None:
        return Load(name, None, None, is_record=False)
    if before is None:
        return Load(name, level, None, is_record=is_record)
    earlier, was_record = _level(before)
    if earlier is None or was_record != is_record:
        return Load(name, None, None, is_record=is_record)
    return Load(name, level - earlier, before.event, is_record=is_record)


def _level(event: Event) -> tuple[int | None, bool]:
    """Return the bytes in use at an event, and whether that is a running peak."""
    if event.allocated_bytes is not None:
        return event.allocated_bytes, False
    return event.peak_total_bytes, True
