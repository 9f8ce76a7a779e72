"""Event journal of a run: the last events in memory, and all of them in a file if one is given."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from memkit._core.errors import InputTypeError, StateError, warn_user
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.writer import EventWriter, parse_event, rank_path, save_events
from memkit._machine import devices


@guided(
    absent={
        "memory.events.save('memory_events.jsonl')": "write dump export to_json",
        "list(memory.events)": "events list",
    },
    methods={"save": {"path": "file filename output"}},
)
class EventJournal:
    """The events of a `MemoryManager`. Iteration yields those in memory, oldest first.

    Memory cost: about 0.2 kB of host memory for each event, up to ``max_events``.

    Args:
        header: Header that describes the run.
        path: The run's log file, which every event is appended to; with several ranks, each has its own (see
            `memkit._events.writer.rank_path`). None keeps them in memory only. The file belongs to the process that
            opened it: a forked process, such as a DataLoader worker, keeps its own events in memory, and warns once.
        max_events: Maximum number of events in memory; older ones are dropped from it.

    Attributes:
        num_dropped: Number of events dropped from memory.

    Raises:
        ConfigError: ``max_events`` is negative.
        InputError: The log's directory does not exist.
        OSError: The log file cannot be opened.
        StateError: Another manager, in this process or another one, is writing to this log.
        FileFormatError: The file is not an event log; it is left unchanged.

    Example:
        >>> import memkit as mk
        >>> memory = mk.MemoryManager("cpu")
        >>> memory.mark("model_loaded")
        >>> [event.event for event in memory.events]
        ['model_loaded']
    """

    def __init__(self, header: LogHeader, *, path: str | os.PathLike[str] | None, max_events: int) -> None:
        Checker("MemoryManager(...)").whole("max_events", max_events, fix="pass max_events=0 to keep no events.")
        self.num_dropped = 0
        self._header = header
        self._events: deque[str] = deque(maxlen=max_events)
        self._writer: EventWriter | None = None
        if path is not None and not isinstance(path, str | os.PathLike):
            raise InputTypeError(
                "MemoryManager(...)",
                got=f"log={path!r}",
                expected="the path of a file, or None",
                fix="pass log='memory_events.jsonl'.",
            )
        if path is not None:
            self._writer = EventWriter(rank_path(path, header.rank, header.world_size), header)

    def __iter__(self) -> Iterator[Event]:
        return map(parse_event, tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    @property
    def is_written(self) -> bool:
        """Whether the events go to a log file."""
        return self._writer is not None

    def add(self, events: Sequence[str]) -> None:
        """Add events, each as its `memkit._events.writer.event_text`, and write them."""
        held = len(self._events)
        self._events.extend(events)
        self.num_dropped += held + len(events) - len(self._events)
        if self._writer is None:
            return
        try:
            self._writer.write_texts(events)
        except StateError:
            self.close()  # this process's copy
            warn_user(
                f"Process {os.getpid()} was forked from the process that writes the memory log, so its own events "
                "are kept in memory and not written. Way out: create a MemoryManager with another log file in the "
                "forked process."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events in memory atomically to a log file that `memkit.report.read_memory_events` reads.

        Args:
            path: The file; an existing one is replaced. Its directory must exist.

        Raises:
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written; an existing file is unchanged.
        """
        first = [Event("events_dropped", note={"num_dropped": self.num_dropped})] if self.num_dropped else []
        save_events(path, self._header, [*first, *self])

    def close(self) -> None:
        """Close the log file; later events are kept in memory only."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def header_of(device: torch.device, total_bytes: int | None) -> LogHeader:
    """Create the header of a run: the process, the device, and the source of each counter."""
    names = ["allocated_bytes", "peak_bytes"]
    if device.type == "cpu":
        counted = Origin("dispatch", "measured")
    else:
        counted = Origin(f"{device.type}_allocator", "measured")
        names += ["peak_total_bytes", "reserved_bytes", "reserved_peak_bytes"]
    rank, world_size = devices.process_rank()
    return LogHeader.new(
        rank=rank,
        world_size=world_size,
        device=LoggedDevice(devices.device_name(device), total_bytes, device.type),
        versions={"torch": str(torch.__version__)},
        fields={
            **dict.fromkeys(names, counted),
            **dict.fromkeys(("host_rss_bytes", "host_peak_bytes"), Origin("rss", "measured")),
        },
    )
