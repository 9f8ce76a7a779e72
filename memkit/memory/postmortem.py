"""Out-of-memory post-mortem file: live tensors, their holders, and the events before the error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from memkit._core.printable import printable_json
from memkit._core.records import MemorySnapshot
from memkit._core.units import format_bytes
from memkit._events.log import EVENT_KEYS, Event
from memkit._events.writer import POST_MORTEM, rank_path
from memkit._machine import devices
from memkit._machine.files import write_bytes, write_text
from memkit._recovery.errors import describe_error
from memkit.memory.census import Census, take_census
from memkit.memory.summary import summarize_host
from memkit.memory.track import Tracker

_Result = TypeVar("_Result")
_NUM_LARGEST = 20
_NUM_EVENTS = 50


def evidence_path(directory: str | os.PathLike[str]) -> Path:
    """Return this rank's ``out-of-memory.json`` in a directory, which is created if missing."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    return rank_path(folder / "out-of-memory.json", *devices.process_rank())


def write_post_mortem(
    path: Path,
    error: BaseException,
    *,
    device: torch.device,
    phase: str | None,
    snapshot: MemorySnapshot,
    events: Iterable[Event],
    tracker: Tracker | None,
) -> None:
    """Write ``out-of-memory.json`` (with ranks, ``out-of-memory.rank3.json``) while the error's frames are alive.

    A part that cannot be produced, usually because too little memory is left, is None; ``problems`` says why.

    Args:
        path: The file, from `evidence_path`. It replaces the file of an earlier error.
        error: The out-of-memory error.
        device: The device being watched.
        phase: The phase in which the error was raised; None outside all phases.
        snapshot: Device and host memory now.
        events: The run's events; the last ones are written.
        tracker: The tracker of the block that failed, if any; with it, the categories are exact.

    Raises:
        OSError: The file cannot be written.
        MemoryError: There is not enough memory even for the minimal file.
    """
    rank, world_size = devices.process_rank()
    problems: list[str] = []
    census = _attempt(lambda: take_census(device, _NUM_LARGEST), problems)
    tracked = None if tracker is None else _attempt(lambda: _tracked(tracker), problems)
    allocator = _attempt(lambda: devices.allocator_snapshot(device), problems)
    record: dict[str, Any] = {
        "schema": POST_MORTEM,
        "text": _describe(error, f"{device}, rank {rank}" if world_size > 1 else str(device), phase, snapshot, census),
        "error": describe_error(error),
        "rank": rank,
        "world_size": world_size,
        "device": str(device),
        "phase": phase,
        "snapshot": asdict(snapshot),
        "by_category_bytes": None if census is None else census.by_category,
        "largest": None if census is None else [asdict(each) for each in census.largest],
        "tracked": tracked,
        "events": [_plain(event) for event in list(events)[-_NUM_EVENTS:]],
        "allocator_snapshot": None if allocator is None else path.with_suffix(".pickle").name,
        "problems": problems,
    }
    if allocator is not None:
        write_bytes(path.with_suffix(".pickle"), allocator)
    write_text(path, printable_json(json.dumps(record, indent=1, ensure_ascii=False)) + "\n")


def _attempt(fn: Callable[[], _Result], problems: list[str]) -> _Result | None:
    try:
        return fn()
    except Exception as problem:  # noqa: BLE001 - usually too little memory; the other parts are still worth writing
        problems.append(describe_error(problem))
        return None


def _describe(
    error: BaseException, where: str, phase: str | None, snapshot: MemorySnapshot, census: Census | None
) -> list[str]:
    """Return the most important facts for a human reader, one per line."""
    place = f"in phase {phase}" if phase else "outside all phases"
    lines = [describe_error(error), place, summarize_host(snapshot)]
    if census is None:
        return [*lines, f"the tensors on {where} could not be inspected: see problems"]
    counted = sum(census.by_category.values())
    lines.append(f"tensors on {where} reachable from Python: {format_bytes(counted)}")
    lines += [f"  {format_bytes(nbytes):>12}  {name}" for name, nbytes in census.by_category.items()]
    unreachable = (snapshot.allocated_bytes or 0) - counted
    if unreachable >= 0:  # a tracker's total lacks what no operator of its block has touched
        lines.append(f"  {format_bytes(unreachable):>12}  unreachable, or rounding")
    lines.append("largest:")
    for each in census.largest[:10]:
        shape = "" if each.shape is None else f" {each.dtype}{list(each.shape)}"
        holder = "" if each.holder is None else f", held by {each.holder}"
        lines.append(f"  {format_bytes(each.nbytes):>12}  {each.category}{shape}{holder}")
    return lines


def _tracked(tracker: Tracker) -> dict[str, Any]:
    """Return the bytes that were live at the failure, as tracked."""
    return {
        "live_bytes": tracker.live_bytes,
        "by_category_bytes": tracker.live_by("category"),
        "by_module_bytes": dict(islice(tracker.live_by("module").items(), _NUM_LARGEST)),
        "by_line_bytes": dict(islice(tracker.live_by("line").items(), _NUM_LARGEST)),
    }


def _plain(event: Event) -> dict[str, Any]:
    return {name: value for name in EVENT_KEYS if (value := getattr(event, name)) is not None}
