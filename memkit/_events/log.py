"""What a memory log holds: events, and the header of the run that they belong to. Their checks are the log's law.

An event or header that exists can be written and read back: the writer and the reader check no value again. Neither
torch nor NumPy is imported: logs are also read on machines that have neither.
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

_LARGEST_INT = 2**63 - 1  # what a signed 64-bit integer of any other reader holds; no memory is larger
_LAST_SECOND = 10**11  # the year 5138; nanoseconds taken for seconds are beyond it
_DEEPEST_NOTE = 32  # levels of lists and objects: far from what makes a JSON encoder fail

RecordKind = Literal["measured", "predicted", "sampled"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a number comes from. None means "not recorded".

    Attributes:
        source: Who said it: ``"cuda_allocator"``, ``"dispatch"``, ``"profiler"``, ``"fake"``, ``"nvml"``, ``"driver"``,
            ``"rss"``, ``"user"``, or another name.
        kind: ``"measured"`` (counted, exact), ``"predicted"`` (nothing ran), or ``"sampled"`` (looked at now and then:
            a peak is at least this).
    """

    source: str | None = None
    kind: RecordKind | None = None

    def __post_init__(self) -> None:
        _check_origin("Origin()", self.source, self.kind)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a memory log. Every number is optional, and None means "not recorded", never zero.

    Args:
        event: The event's name, such as ``"forward"`` or ``"step"``.
        time_ns: Monotonic clock in nanoseconds; comparable within one process.
        wall_s: Seconds since 1970; comparable between ranks as far as their clocks agree.
        phase: Path of the nested phases that the event belongs to, such as ``"train/forward"``.
        component: The part of the model that it is about, such as ``"vae"``.
        step: Number of the training step.
        rank: The process in a distributed run; the reader takes it from the header where the event has none.
        duration_ns: How long it took, in nanoseconds of the host's clock.
        allocated_bytes: Bytes in live tensors, as the allocator rounded them up.
        requested_bytes: Bytes in live tensors, as they were asked for.
        peak_bytes: Largest ``allocated_bytes`` since the event before, or during the phase.
        peak_total_bytes: Largest ``allocated_bytes`` since the run began.
        reserved_bytes: Bytes that the allocator holds, live or cached.
        reserved_peak_bytes: Largest ``reserved_bytes`` since the run began.
        device_used_bytes: Bytes of the device in use by all processes, by the driver's count.
        host_rss_bytes: Resident bytes of the process.
        host_peak_bytes: Largest resident bytes of the process.
        incremental_bytes: What the event added, where only that is known.
        source: Who said this event's numbers, where it is not who the header names; see `Origin`.
        kind: How this event's numbers came about, where it is not as the header says; see `Origin`.
        note: Anything else, as plain JSON values with text keys; copied.
        run: Which of `EventLog.headers` it stands under; set by the reader, never written.

    Raises:
        InputTypeError: A value has the wrong type: a size must be an int, and a bool or a NumPy integer is none.
        InputError: A number is negative or above 2**63 - 1, the name is empty, a note holds no plain JSON.

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
    incremental_bytes: int | None = None
    source: str | None = None
    kind: RecordKind | None = None
    note: dict[str, Any] | None = None
    run: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Whatever may be wrong is looked at twice, so that what is right costs no calls: logs are long.
        for value in _get_counts(self):
            if value is not None and (type(value) is not int or not 0 <= value <= _LARGEST_INT):
                _refuse_counts(self)
        _check_name("Event()", "event", self.event)
        if self.phase is not None:
            _check_name("Event()", "phase", self.phase)
        if self.component is not None:
            _check_name("Event()", "component", self.component)
        if self.source is not None or self.kind is not None:
            _check_origin("Event()", self.source, self.kind)
        if self.wall_s is not None:
            _check_seconds("Event()", self.wall_s)
        if self.note is not None:
            object.__setattr__(self, "note", _plain_object("Event()", "note", self.note))


EVENT_KEYS = tuple(each.name for each in fields(Event) if each.name != "run")
BYTE_FIELDS = tuple(name for name in EVENT_KEYS if name.endswith("_bytes"))
_COUNTS = ("time_ns", "step", "rank", "duration_ns", *BYTE_FIELDS)
_get_counts = operator.attrgetter(*_COUNTS)


@dataclass(frozen=True, slots=True)
class LoggedDevice:
    """The device that a run used.

    Attributes:
        name: As the driver calls it.
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
        run_id: Text that no other run has.
        wall_s: When the run began, in seconds since 1970. Only files of other programs leave it open.
        time_ns: The monotonic clock at that instant, in nanoseconds.
        host: Name of the machine. It tells whoever reads the log how your machines are called.
        rank: This process among the run's.
        world_size: Number of processes in the run.
        device: What the run computed on.
        versions: Package to version, with ``"python"`` and ``"memkit"``.
        argv: The command line. It may hold passwords, tokens and user names: left out unless it is passed.
        git_commit: The commit of the user's code; memkit does not ask git.
        config: The user's settings as plain JSON values. Whatever is put here is in the log for all to read.
        fields: Origin of each kind of number (``allocated_bytes``, ...), for events that do not say otherwise.

    Raises:
        InputTypeError: A value has the wrong type.
        InputError: A number is out of range, a text is empty, or ``fields`` names what no event has.
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
        """Make the header of a run that begins now in this process; arguments as the attributes say.

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
    """Refuse what is no integer from 0 to 2**63 - 1; a bool is none."""
    if type(value) is not int or not 0 <= value <= _LARGEST_INT:
        raise _refusal(call, name, value, "an integer from 0 to 2**63 - 1", int)


def require_rank(call: str, rank: int, world_size: int) -> None:
    """Refuse a rank that a run of ``world_size`` processes does not have."""
    require_count(call, "rank", rank)
    require_count(call, "world_size", world_size)
    if not 0 <= rank < world_size:
        raise _refusal(call, "rank", rank, f"a rank below world_size={world_size}", int)


def _refusal(call: str, name: str, value: object, expected: str, *types: type[object]) -> InputError | InputTypeError:
    """Make the error for a value: it is the type's fault unless the value has one of ``types``."""
    error = InputError if type(value) in types else InputTypeError
    return error(call, got=f"{name}={short(value)}", expected=expected, fix=f"pass such a {name}, or leave it out.")


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
