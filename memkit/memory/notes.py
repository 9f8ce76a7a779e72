"""A log's notes on a tracked block: the split of its peak, the tensors it keeps, duplicate optimizer state."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memkit._recorder.recording import Label, Recording
from memkit.memory.holders import attributes, instances_of
from memkit.memory.kept import find_kept, groups_by_line
from memkit.memory.leaks import Leak

_SPLITS: dict[str, Label] = {"peak_by_category": "category", "peak_by_module": "module", "peak_by_line": "source"}
_MOST_PARTS = 20  # of a split
_BYTES_PER_STORAGE = 300  # host memory of a tracker; measured, as in its docstring


def note_of_peak(recording: Recording, device: str | None) -> dict[str, Any]:
    """Return the peak's splits, and the bytes of host memory that tracking took, which grow with each step."""
    splits = {name: _largest(recording.peak_by(label, device)) for name, label in _SPLITS.items()}
    return {**splits, "tracker_bytes": _BYTES_PER_STORAGE * recording.num_storages}


def note_of_kept(recording: Recording, device: str | None, number_of: Callable[[Tensor], int | None]) -> dict[str, Any]:
    """Return the kept tensors, the bytes of tensors made before the block, and the bytes of duplicate optimizer state.

    Empty entries are left out.
    """
    groups = groups_by_line(recording, device)
    if groups:
        gc.collect()  # tensors that only cycles keep have no holder
    objects = gc.get_objects()
    found = find_kept(groups, number_of, objects) if groups else []
    kept = [asdict(each) for each in found if not each.is_preloaded]
    for each in kept:
        each["made_at"], each["grows_at"] = short_line(each["made_at"]), short_line(each["grows_at"] or "") or None
        del each["is_preloaded"]
    note = {
        "kept": kept,
        "preloaded_bytes": sum(each.nbytes for each in found if each.is_preloaded),
        "optimizer_twice_bytes": twice_bytes(objects),
    }
    return {name: value for name, value in note.items() if value}


def noted_leak(leak: Leak) -> dict[str, Any]:
    """Return a leak in the form of an entry ``"kept"`` of `note_of_kept`."""
    return {
        "made_at": "",
        "num_tensors": leak.num_tensors,
        "nbytes": leak.nbytes,
        "is_graph": "graph" in leak.kind,
        "holder": leak.holder,
        "grows_at": short_line(leak.line or "") or None,
    }


def twice_bytes(objects: list[object]) -> int:
    """Return the bytes of optimizer state for parameters for which another optimizer also holds state."""
    held: dict[int, list[int]] = {}
    for optimizer in instances_of(torch.optim.Optimizer, objects):
        for parameter, state in dict(attributes(optimizer).get("state", {})).items():
            values = state.values() if isinstance(state, dict) else ()
            nbytes = sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim)
            held.setdefault(id(parameter), []).append(nbytes)
    return sum(sum(sizes) - max(sizes) for sizes in held.values())


def short_line(text: str) -> str:
    """Shorten the path in ``"/long/path/train.py:17 in step"`` to its last two parts, since logs are sent to others.

    Example:
        >>> from memkit.memory.notes import short_line
        >>> short_line("/home/me/work/train.py:17 in step")
        'work/train.py:17 in step'
    """
    path, colon, rest = text.rpartition(":")
    return "/".join(Path(path).parts[-2:]) + colon + rest


def _largest(split: dict[str, int]) -> dict[str, int]:
    """Return the largest parts, and one for the sum of the others, so that the total stays the same."""
    parts = list(split.items())
    shown = {short_line(name): 0 for name, _ in parts[:_MOST_PARTS]}
    for name, nbytes in parts[:_MOST_PARTS]:
        shown[short_line(name)] += nbytes
    rest = sum(nbytes for _, nbytes in parts[_MOST_PARTS:])
    return {**shown, **({f"({len(parts) - _MOST_PARTS} more)": rest} if rest else {})}
