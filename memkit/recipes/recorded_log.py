"""Convert a `Tracker`'s recording to a log with allocations, so that it gets a report like any other run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from memkit._core.errors import InputError
from memkit._events.allocations import Allocations
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.reader import EventLog
from memkit._recorder.recording import IntArray, Recording
from memkit.memory.track import LABELS, Tracker

_NONE = "(none)"


def log_of(tracker: Tracker) -> EventLog:
    """Return a tracker's block of code as a log: an event for each part of a step, and every storage.

    Raises:
        InputError: No tensor was live on the device.
        StateError: The tracker has not been entered.
    """
    recording, device = tracker.recording, tracker.device
    if device is not None and device not in recording.devices:
        raise InputError(
            "write_report(tracker, path)",
            got=f"a tracker that recorded no tensors on {device}",
            expected="a block of code with tensors on that device",
            fix=f"track another device: it recorded tensors on {', '.join(recording.devices) or 'no device'}.",
        )
    allocations = _allocations(recording, device)
    header = LogHeader(
        run_id=f"tracker-{os.urandom(4).hex()}",
        wall_s=None,
        device=None if device is None else LoggedDevice(backend=device.partition(":")[0]),
        fields=dict.fromkeys(("allocated_bytes", "peak_bytes", "peak_total_bytes"), Origin("dispatch", "measured")),
    )
    return EventLog((header,), tuple(_events(recording, device)), allocations=(allocations,))


def _events(recording: Recording, device: str | None) -> Iterable[Event]:
    levels = recording.timeline(device)
    starts = [start for start, _ in recording.phases]
    peak = recording.peak_event(device)
    for (start, phase), end in zip(recording.phases, [*starts[1:], len(levels)], strict=True):
        if start == end:
            continue
        has_peak = start <= peak < end
        yield Event(
            phase,
            phase=phase,
            allocated_bytes=int(levels[end - 1]),
            peak_bytes=int(levels[start:end].max()),
            peak_total_bytes=int(levels[:end].max()),
            note={"peak_by_category": recording.peak_by("category", device)} if has_peak else None,
            rank=0,
            run=0,
        )


def _allocations(recording: Recording, device: str | None) -> Allocations:
    """Return the storages; one that changes its size is a new block from then on."""
    storages, changes = recording.event_storage, recording.event_bytes
    if device is not None:
        is_here = recording.codes["device"][storages] == recording.devices.index(device)
        storages, changes = storages[is_here], changes[is_here]
    order = np.argsort(storages, kind="stable")
    owners, held = storages[order], np.cumsum(changes[order])
    is_last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
    starts = np.append(0, held[is_last])[np.cumsum(np.append(0, is_last[:-1]))] if len(owners) else held
    sizes = held - starts
    deaths = np.where(is_last, len(owners), np.append(order[1:], 0)[: len(owners)])
    kept = sizes > 0
    codes = np.stack([recording.codes[label] for label in LABELS.values()], axis=1)[owners[kept]]
    origins, index = np.unique(codes, axis=0, return_inverse=True)
    texts = {name: [_short(each) or _NONE for each in recording.names[label]] for name, label in LABELS.items()}
    frames: dict[str, int] = {}
    stacks = [
        tuple(
            frames.setdefault(each, len(frames))
            for each in _stack({name: texts[name][code] for name, code in zip(LABELS, row, strict=True)})
        )
        for row in origins.tolist()
    ]
    return Allocations(
        num_events=len(owners),
        births=order[kept],
        deaths=deaths[kept],
        sizes=sizes[kept],
        origins=index.reshape(-1),
        labels={name: _grouped(origins[:, column], texts[name]) for column, name in enumerate(LABELS)},
        stacks=tuple(stacks),
        frames=tuple(frames),
    )


def _stack(of: dict[str, str]) -> list[str]:
    """Return the origin of a storage, innermost first, in place of a call stack, which was not recorded."""
    parts = of["module"].split(".")
    modules = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return [each for each in (of["operator"], of["line"], *modules, of["phase"]) if each != _NONE]


def _grouped(codes: IntArray, texts: list[str]) -> tuple[IntArray, tuple[str, ...]]:
    """Renumber codes so that equal texts share one code; return the codes and the texts."""
    names = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    return np.asarray([names[texts[code]] for code in codes.tolist()], dtype=np.int64), tuple(names)


def _short(text: str) -> str:
    """Shorten a path to its last two parts, which distinguish files."""
    return "/".join(text.replace("\\", "/").split("/")[-2:])
