"""Contents of a memory log: events, and the header of their run. Their validation defines the log format.

Every event or header object can be written and read back: the writer and the reader do not validate values again.
Neither torch nor NumPy is imported: logs are also read on machines that have neither.
"""

from __future__ import annotations

import math
import operator
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, get_args

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import short
from memkit._version import __version__

_LARGEST_INT = 2**63 - 1  # fits into a signed 64-bit integer of any other reader; no memory is larger
_LAST_SECOND = 10**11  # the year 5138; nanoseconds mistaken for seconds exceed it
_DEEPEST_NOTE = 32  # levels of lists and objects: far below the limit of JSON encoders

RecordKind = Literal["measured", "predicted", "sampled"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a number. None means "not recorded".

    Attributes:
        source: Its source: ``"cuda_allocator"``, ``"dispatch"``, ``"profiler"``, ``"fake"``, ``"nvml"``, ``"driver"``,
            ``"rss"``, ``"user"``, or another name.
        kind: ``"measured"`` (counted, exact), ``"predicted"`` (nothing ran), or ``"sampled"`` (read now and then: the
            true peak is at least this).
    """

    source: str | None = None
    kind: RecordKind | None = None

    def __post_init__(self) -> None:
        _check_origin("Origin()", self.source, self.kind)


@dataclass(frozen=True)
class Event:
    """One line of a memory log. Every number is optional, and None means "not recorded", never zero.

    Args:
        event: The event's name, such as ``"forward"`` or ``"step"``.
        time_ns: Monotonic clock in nanoseconds; comparable within one process.
        wall_s: Seconds since 1970; comparable between ranks as far as their clocks agree.
        phase: Path of the nested phases that the event belongs to, such as ``"train/forward"``.
        component: The part of the model that the event is about, such as ``"vae"``.
        step: Number of the training step.
        rank: The process in a distributed run; the reader takes it from the header if the event has none.
        duration_ns: Duration in nanoseconds of the host's clock.
        allocated_bytes: Bytes in live tensors, as rounded up by the allocator.
        requested_bytes: Bytes in live tensors, as requested.
        peak_bytes: Largest ``allocated_bytes`` since the previous event, or during the phase.
        peak_total_bytes: Largest ``allocated_bytes`` since the run began.
        reserved_bytes: Bytes that the allocator holds, live or cached.
        reserved_peak_bytes: Largest ``reserved_bytes`` since the run began.
        device_used_bytes: Bytes of the device in use by all processes, as counted by the driver.
        host_rss_bytes: Resident bytes of the process.
        host_peak_bytes: Largest resident bytes of the process.
        children_bytes: Bytes that its child processes, such as data loader workers, hold and do not share.
        incremental_bytes: Bytes that the event added, if only that is known.
        source: Source of this event's numbers, if different from the header's; see `Origin`.
        kind: Kind of this event's numbers, if different from the header's; see `Origin`.
        note: Anything else, as plain JSON values with text keys; copied.
        run: Index into `EventLog.headers` of the event's header; set by the reader, never written.

    Raises:
        InputTypeError: A value has the wrong type: a size must be an int, not a bool or a NumPy integer.
        InputError: A number is negative or above 2**63 - 1, the name is empty, or a note is not plain JSON.

    Example:
        >>> from memkit._events.log import Event
        >>> event = Event("forward", step=3, peak_bytes=35_122_176)
        >>> event.peak_bytes, event.reserved_bytes
        (35122176, None)
    """

    event: str
    _: KW_ONLY
    time_ns: int | None = None
    wall_s: float | None = None
    phase: str | None = None
    component: str | None = None
    step: int | None = None
    rank: int | None = None
    duration_ns: int | None = None
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    peak_bytes: int | None = None
    peak_total_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_used_bytes: int | None = None
    host_rss_bytes: int | None = None
    host_peak_bytes: int | None = None
    children_bytes: int | None = None
    incremental_bytes: int | None = None
    source: str | None = None
    kind: RecordKind | None = None
    note: dict[str, Any] | None = None
    run: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Only suspicious values get the full check, so that valid values cost no calls: logs are long.
        for name, value in self.__dict__.items():
            if type(value) is int:
                if not 0 <= value <= _LARGEST_INT:
                    _refuse_counts(self)
            elif value is not None and name in _COUNTS:
                _refuse_counts(self)
        if type(self.event) is not str or not self.event:
            _check_name("Event()", "event", self.event)
        if self.phase is not None and (type(self.phase) is not str or not self.phase):
            _check_name("Event()", "phase", self.phase)
        if self.component is not None or self.source is not None or self.kind is not None or self.note is not None:
            _check_rare(self)
        wall_s = self.wall_s
        if wall_s is not None and not (type(wall_s) is float and 0 <= wall_s <= _LAST_SECOND):
            _check_seconds("Event()", wall_s)


def _check_rare(event: Event) -> None:
    _check_text("Event()", "component", event.component)
    _check_origin("Event()", event.source, event.kind)
    if event.note is not None:
        object.__setattr__(event, "note", _plain_object("Event()", "note", event.note))


def event_of(values: dict[str, Any]) -> Event:
    """Return ``Event(**values)`` for values under its own names, in half of the time; the event keeps the dict.

    Raises:
        InputTypeError: As for `Event`.
        InputError: As for `Event`.
    """
    values.setdefault("event", None)
    event = object.__new__(Event)
    object.__setattr__(event, "__dict__", values)
    event.__post_init__()
    return event


EVENT_KEYS = tuple(each.name for each in fields(Event) if each.name != "run")
BYTE_FIELDS = tuple(name for name in EVENT_KEYS if name.endswith("_bytes"))
_COUNTS = dict.fromkeys(("time_ns", "step", "rank", "duration_ns", *BYTE_FIELDS))
_get_counts = operator.attrgetter(*_COUNTS)


@dataclass(frozen=True, slots=True)
class LoggedDevice:
    """The device that a run used.

    Attributes:
        name: Its name, as given by the driver.
        total_bytes: Its usable capacity.
        backend: ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, ``"cpu"``, ...
    """

    name: str | None = None
    total_bytes: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        _check_text("LoggedDevice()", "name", self.name)
        _check_text("LoggedDevice()", "backend", self.backend)
        if self.total_bytes is not None:
            require_count("LoggedDevice()", "total_bytes", self.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The first line of each run in a log. None means "not recorded". `LogHeader.new` fills in this process's values.

    Attributes:
        run_id: Text that is unique to the run.
        wall_s: Start of the run, in seconds since 1970. Only files of other programs omit it.
        time_ns: The monotonic clock at that instant, in nanoseconds.
        host: Name of the machine. It reveals your machine names to anyone who reads the log.
        rank: Rank of this process in the run.
        world_size: Number of processes in the run.
        device: The device that the run used.
        versions: Package to version, with ``"python"`` and ``"memkit"``.
        argv: The command line. It may contain passwords, tokens and user names: left out unless passed.
        git_commit: The commit of the user's code; memkit does not query git.
        config: The user's settings as plain JSON values. Everything in it is readable by anyone who has the log.
        fields: Origin of each kind of number (``allocated_bytes``, ...), for events that do not override it.

    Raises:
        InputTypeError: A value has the wrong type.
        InputError: A number is out of range, a text is empty, or ``fields`` names a number that events do not have.
    """

    run_id: str
    wall_s: float | None
    time_ns: int | None = None
    host: str | None = None
    rank: int = 0
    world_size: int = 1
    device: LoggedDevice | None = None
    versions: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] | None = None
    git_commit: str | None = None
    config: dict[str, Any] | None = None
    fields: dict[str, Origin] = field(default_factory=dict)

    @classmethod
    def new(
        cls,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: LoggedDevice | None = None,
        versions: Mapping[str, str] | None = None,
        argv: Iterable[str] | None = None,
        git_commit: str | None = None,
        config: Mapping[str, Any] | None = None,
        fields: Mapping[str, Origin] | None = None,
    ) -> LogHeader:
        """Create the header of a run that begins now in this process; for the arguments, see the attributes.

        Example:
            >>> from memkit._events.log import LogHeader, Origin
            >>> header = LogHeader.new(fields={"allocated_bytes": Origin("cuda_allocator", "measured")})
            >>> header.rank, header.argv, sorted(header.versions)
            (0, None, ['memkit', 'python'])
        """
        return cls(
            run_id=os.urandom(8).hex(),
            wall_s=time.time(),
            time_ns=time.monotonic_ns(),
            host=platform.node() or None,
            rank=rank,
            world_size=world_size,
            device=device,
            versions={"python": platform.python_version(), "memkit": __version__, **(versions or {})},
            argv=None if argv is None else tuple(argv),
            git_commit=git_commit,
            config=None if config is None else dict(config),
            fields=dict(fields or {}),
        )

    def __post_init__(self) -> None:
        call = "LogHeader()"
        _check_name(call, "run_id", self.run_id)
        _check_text(call, "host", self.host)
        _check_text(call, "git_commit", self.git_commit)
        if self.wall_s is not None:
            _check_seconds(call, self.wall_s)
        if self.time_ns is not None:
            require_count(call, "time_ns", self.time_ns)
        require_rank(call, self.rank, self.world_size)
        if self.device is not None and not isinstance(self.device, LoggedDevice):
            raise _refusal(call, "device", self.device, "a LoggedDevice")
        _check_argv(call, self.argv)
        versions = _plain_object(call, "versions", self.versions)
        if not all(type(each) is str for each in versions.values()):
            raise _refusal(call, "versions", versions, "package names and versions as text")
        if self.config is not None:
            object.__setattr__(self, "config", _plain_object(call, "config", self.config))
        _check_fields(call, self.fields)


def _refuse_counts(event: Event) -> None:
    for name, value in zip(_COUNTS, _get_counts(event), strict=True):
        if value is not None:
            require_count("Event()", name, value)


def require_count(call: str, name: str, value: object) -> None:
    """Reject anything but an integer from 0 to 2**63 - 1; a bool is rejected too."""
    if type(value) is not int or not 0 <= value <= _LARGEST_INT:
        raise _refusal(call, name, value, "an integer from 0 to 2**63 - 1", int)


def require_rank(call: str, rank: int, world_size: int) -> None:
    """Reject a rank that a run of ``world_size`` processes does not have."""
    require_count(call, "rank", rank)
    require_count(call, "world_size", world_size)
    if not 0 <= rank < world_size:
        raise _refusal(call, "rank", rank, f"a rank below world_size={world_size}", int)


def _refusal(call: str, name: str, value: object, expected: str, *types: type[object]) -> InputError | InputTypeError:
    """Create the error for a value: a type error unless the value has one of ``types``."""
    error = InputError if type(value) in types else InputTypeError
    return error(call, got=f"{name}={short(value)}", expected=expected, fix=f"pass {expected} as {name}.")


def _check_text(call: str, name: str, value: object) -> None:
    if value is not None:
        _check_name(call, name, value)


def _check_name(call: str, name: str, value: object) -> None:
    if type(value) is not str or not value:
        raise _refusal(call, name, value, "text that is not empty", str)


def _check_seconds(call: str, value: object) -> None:
    # NaN fails the comparison as well.
    if type(value) not in (int, float) or not 0 <= value <= _LAST_SECOND:  # type: ignore[operator]
        raise _refusal(call, "wall_s", value, "seconds since 1970", int, float)


def _check_origin(call: str, source: object, kind: object) -> None:
    _check_text(call, "source", source)
    if kind is not None and kind not in get_args(RecordKind):
        raise _refusal(call, "kind", kind, f"one of {', '.join(get_args(RecordKind))}", str)


def _check_argv(call: str, value: object) -> None:
    if value is not None and not (isinstance(value, tuple) and all(type(each) is str for each in value)):
        raise _refusal(call, "argv", value, "a tuple of text")


def _check_fields(call: str, value: object) -> None:
    if not isinstance(value, dict):
        raise _refusal(call, "fields", value, "a dict of Origin")
    for name, origin in value.items():
        if name not in BYTE_FIELDS:
            raise _refusal(call, "fields", name, f"names among {', '.join(BYTE_FIELDS)}", str)
        if not isinstance(origin, Origin):
            raise _refusal(call, f"fields[{name!r}]", origin, "an Origin")


def with_text_for_nan(note: Any, levels: int = _DEEPEST_NOTE) -> Any:
    """Return a note whose numbers that JSON does not have are texts: NaN, and infinity, such as a loss that diverged.

    Example:
        >>> from memkit._events.log import with_text_for_nan
        >>> with_text_for_nan({"losses": [0.5, float("nan")]})
        {'losses': [0.5, 'nan']}
    """
    if isinstance(note, float):
        return note if type(note) is not float or math.isfinite(note) else str(note)
    if not levels or not isinstance(note, (dict, list, tuple)):
        return note  # what is too deep is refused later
    if isinstance(note, dict):
        return {key: with_text_for_nan(each, levels - 1) for key, each in note.items()}
    return [with_text_for_nan(each, levels - 1) for each in note]


def _plain_object(call: str, name: str, value: object) -> dict[str, Any]:
    copy = _plain_copy(call, name, value, _DEEPEST_NOTE)
    if not isinstance(copy, dict):
        raise _refusal(call, name, value, "a dict")
    return copy


def _plain_copy(call: str, name: str, value: object, levels: int) -> object:
    """Copy plain JSON values; tuples become lists."""
    if levels == 0:
        raise _refusal(call, name, value, f"at most {_DEEPEST_NOTE} levels of lists and objects", type(value))
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise _refusal(call, f"a key in {name}", key, "text keys")
        return {key: _plain_copy(call, f"{name}[{short(key)}]", each, levels - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_copy(call, name, each, levels - 1) for each in value]
    if type(value) is int and abs(value) > _LARGEST_INT:
        raise _refusal(call, name, value, "integers below 2**63", int)
    if type(value) is float and not math.isfinite(value):
        raise _refusal(call, name, value, "finite numbers", float)
    if value is not None and type(value) not in (str, bool, int, float):
        raise _refusal(call, name, value, "plain JSON values: dict, list, text, number, bool or None")
    return value
