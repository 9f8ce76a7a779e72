"""Data for a page's view of a device's allocations: columns over time, stacked by the source of the bytes.

A history of millions of events becomes a few hundred columns. Each one shows the moment with the most live bytes in its
range of events, so every column is exact and the peak is one of them. The largest blocks that are live at these moments
are listed individually, with their stacks; the page shows the rest of each column as a sum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memkit._core.printable import printable
from memkit._events.allocations import Allocations, Int64s
from memkit.report.nodes import clean

NUM_COLUMNS, NUM_BANDS = 480, 8
MOST_BLOCKS, MOST_NODES = 12_000, 40_000
LABELS = ("category", "line", "module", "operator", "phase")
_CLOSER, _LEAST_EVENTS, _MOST_SCOPES = 24, 64, 3  # _CLOSER: factor by which each view covers less than the one before
_LONGEST_FRAME = 160
_HIDDEN = re.compile(
    r"torch::(unwind|CapturedTraceback)|\b_?Py(Eval|Object|Function|Vectorcall|Run)|__libc_start|^_start$"
)
_Span = tuple[Int64s, Int64s]  # for each block, the first column in which it is live, and the first one after that


def view_of(found: Allocations) -> dict[str, Any]:
    """Return the data of the view, as plain JSON values."""
    levels = found.levels()
    peak = int(np.argmax(levels)) - 1
    scopes = [_Scope(found, levels, *ends) for ends in _windows(found.num_events, peak)]
    is_peak = found.is_live(peak)
    is_shown = np.any([scope.last > scope.first for scope in scopes], axis=0)
    kept = _largest(found.sizes, is_peak, is_shown)
    left = np.setdiff1d(np.arange(len(found.sizes)), kept, assume_unique=True)
    origins, owners = np.unique(found.origins[kept], return_inverse=True)
    frames, nodes, leaves = _trie(
        found, origins, np.bincount(owners, found.sizes[kept], len(origins)).astype(np.float64)
    )
    many = [name for name in LABELS if name in found.labels and len(found.labels[name][1]) > 1]
    labels = {}
    for name in many or ["line"]:
        codes, names = found.labels[name]
        bands = _bands(found, codes[found.origins], is_peak, scopes[0])
        labels[name] = {
            "names": [clean(names[code]) for code in bands],
            "sums": [scope.sums_of(codes[found.origins], bands).tolist() for scope in scopes],
            "ofOrigin": [bands.index(code) if code in bands else len(bands) for code in codes[origins].tolist()],
        }
    lines, texts = found.labels["line"]
    return {
        "peak": peak,
        "peakBytes": int(levels[peak + 1]),
        "numEvents": found.num_events,
        "numBlocks": len(found.sizes),
        "numShown": len(kept),
        "largestLeft": int(found.sizes[left].max(initial=0)),
        "shortages": [[each.event, each.asked_bytes] for each in found.shortages],
        "scopes": [scope.data() for scope in scopes],
        "labels": labels,
        "frames": frames,
        "nodes": nodes,
        "leaves": leaves,
        "lines": [clean(texts[code]) for code in lines[origins].tolist()],
        "births": found.births[kept].tolist(),
        "deaths": found.deaths[kept].tolist(),
        "sizes": found.sizes[kept].tolist(),
        "owners": owners.tolist(),
    }


def _windows(num_events: int, peak: int) -> list[tuple[int, int]]:
    """Return each scope's first moment and the one after its last: all, then fewer and fewer around the peak.

    Moment 0 is the start of the history.
    """
    windows, width = [(0, num_events + 1)], num_events + 1
    while width > NUM_COLUMNS and len(windows) < _MOST_SCOPES:
        width = max(_LEAST_EVENTS, width // _CLOSER)
        start = min(max(0, peak + 1 - width // 2), num_events + 1 - width)
        windows.append((start, start + width))
    return windows


class _Scope:
    """One view of the history: its columns, and in which of them each block is live.

    Attributes:
        events: The event of each column; -1 is the time before the first one.
        first: For each block, the first column in which it is live.
        last: For each block, the first later column in which it is no longer live.
    """

    def __init__(self, found: Allocations, levels: Int64s, start: int, end: int) -> None:
        edges = np.unique(np.linspace(start, end, min(NUM_COLUMNS, end - start) + 1, dtype=np.int64))
        self.events = np.asarray([low + int(np.argmax(levels[low:high])) - 1 for low, high in pairwise(edges.tolist())])
        self.first = np.searchsorted(self.events, found.births, side="left")
        self.last = np.searchsorted(self.events, found.deaths, side="left")
        self._found, self._levels, self._last_event = found, levels, end - 2
        self._lows = np.minimum.reduceat(levels[:end], edges[:-1])

    def sums_of(self, groups: Int64s, bands: Sequence[int]) -> Int64s:
        """Return the live bytes of some groups of blocks in each column: int64, shape ``(len(bands), num_columns)``."""
        rows = np.full(int(groups.max(initial=0)) + 1, -1, dtype=np.int64)
        rows[np.asarray(bands, dtype=np.int64)] = np.arange(len(bands))
        row = rows[groups]
        is_in = (row >= 0) & (self.last > self.first)
        return self._count(row[is_in], is_in, self._found.sizes[is_in], len(bands))

    def _count(self, row: Int64s, is_in: npt.NDArray[np.bool_], weights: Int64s, num_rows: int) -> Int64s:
        change = np.zeros((num_rows, len(self.events) + 1), dtype=np.int64)
        np.add.at(change, (row, self.first[is_in]), weights)
        np.subtract.at(change, (row, self.last[is_in]), weights)
        return np.cumsum(change, axis=1)[:, :-1]

    def data(self) -> dict[str, Any]:
        """Return the data that the page needs, without the bands."""
        found, is_in = self._found, self.last > self.first
        ones = np.ones(int(is_in.sum()), dtype=np.int64)
        seconds = None if found.seconds is None else found.seconds[np.maximum(self.events, 0)] - found.seconds[0]
        return {
            "events": self.events.tolist(),
            "lastEvent": self._last_event,
            "totals": self._levels[self.events + 1].tolist(),
            "lows": self._lows.tolist(),
            "counts": self._count(np.zeros_like(ones), is_in, ones, 1)[0].tolist(),
            "seconds": None if seconds is None else np.round(seconds, 6).tolist(),
            "reserved": None if found.reserved is None else found.reserved[self.events + 1].tolist(),
        }


def _largest(sizes: Int64s, is_peak: npt.NDArray[np.bool_], is_shown: npt.NDArray[np.bool_]) -> Int64s:
    """Return the blocks to list individually: up to half of them are the largest at the peak."""
    order = np.argsort(-sizes, kind="stable")
    peak = order[is_peak[order]][: MOST_BLOCKS // 2]
    others = order[is_shown[order] & ~np.isin(order, peak)]
    return np.sort(np.concatenate([peak, others[: MOST_BLOCKS - len(peak)]]))


def _bands(found: Allocations, groups: Int64s, is_peak: npt.NDArray[np.bool_], scope: _Scope) -> list[int]:
    """Return the groups that get a band of their own: the largest at the peak, and the largest over the run."""
    at_peak = np.bincount(groups[is_peak], found.sizes[is_peak], int(groups.max(initial=0)) + 1)
    over_run = np.bincount(groups, found.sizes * (scope.last - scope.first), len(at_peak))
    of_peak, of_run = (
        [code for code in np.argsort(-held, kind="stable").tolist() if held[code]] for held in (at_peak, over_run)
    )
    chosen = dict.fromkeys([*of_peak[: NUM_BANDS // 2 + 1], *of_run[: NUM_BANDS // 2], *of_peak])
    return sorted(list(chosen)[:NUM_BANDS], key=lambda code: -at_peak[code])


def _trie(
    found: Allocations, origins: Int64s, weights: npt.NDArray[np.float64]
) -> tuple[list[str], list[list[int]], list[int]]:
    """Return the frames of some origins, a tree of them (parent and frame of each node), and the leaf of each origin.

    The tree begins with the outermost frames. Stacks that no longer fit have no leaf (-1): those of the fewest bytes.
    """
    frames: dict[int, int] = {}
    nodes: dict[tuple[int, int], int] = {}
    leaves = [-1] * len(origins)
    shown = [_HIDDEN.search(frame) is None for frame in found.frames]
    for index in np.argsort(-weights, kind="stable").tolist():
        if len(nodes) > MOST_NODES:
            break
        node = -1
        for frame in reversed(found.stacks[int(origins[index])]):
            if shown[frame]:
                node = nodes.setdefault((node, frames.setdefault(frame, len(frames))), len(nodes))
        leaves[index] = node
    texts = [_short_frame(found.frames[frame]) for frame in frames]
    return texts, [[parent for parent, _ in nodes], [frame for _, frame in nodes]], leaves


def _short_frame(frame: str) -> str:
    place, space, name = frame.partition(" ")
    text = "/".join(place.replace("\\", "/").split("/")[-3:]) + space + name
    return printable(text if len(text) <= _LONGEST_FRAME else f"{text[: _LONGEST_FRAME - 1]}…")
