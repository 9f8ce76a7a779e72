"""Shared by the cases of recorded GPU runs: rows, a card with room, and whether an estimate covers a run."""

from __future__ import annotations

import json
import math
import statistics
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")


def read_rows(folder: Path, source: str) -> list[dict[str, Any]]:
    """The rows of one source in ``recorded_gpu_runs.json``."""
    rows = json.loads((folder / "recorded_gpu_runs.json").read_text())["rows"]
    return [row for row in rows if row["source"] == source]


def roomy(card: GPU) -> GPU:
    """The same card with more memory than any row needs, so that a run shows what it would take."""
    return replace(card, total_interval=(10 * card.total_bytes, 10 * card.total_bytes))


def told_on(card: GPU, total_bytes: int, estimate: MemoryEstimate) -> str:
    """The estimate's verdict for a card with this total, as torch reported it."""
    return str(estimate.verdict(replace(card, total_interval=(total_bytes, total_bytes))))


def held(
    interval: tuple[int, int],
    within: tuple[int, int],
    recorded: int,
    *,
    fixed: tuple[int, int] = (0, 0),
    rounded_by: int = 0,
) -> dict[str, Any]:
    """Whether an interval covers the record, how wide it is, and how wide its margins would have to be.

    Args:
        interval: In bytes, with its margins.
        within: Without its margins.
        recorded: Bytes that were recorded.
        fixed: Least and most bytes of what was recorded that the interval leaves out: a driver's context.
        rounded_by: How far the recorded figure may be from what was measured.
    """
    low, high = interval
    least, most = recorded - fixed[1] - rounded_by, recorded - fixed[0] + rounded_by
    below, above = max(0, within[0] - most), max(0, least - within[1])
    return {
        "recorded_bytes": recorded,
        "interval_bytes": [low + fixed[0], high + fixed[1]],
        "holds": low <= most and least <= high,
        "width": (high + fixed[1] - low - fixed[0]) / recorded,
        "needed_factor": max(
            missing / margin if missing else 0.0
            for missing, margin in ((below, within[0] - low), (above, high - within[1]))
        ),
    }


def rebuilt(row: Mapping[str, Any]) -> MemoryEstimate:
    """An estimate with what a row says of the allocator, from which intervals follow."""
    parts = dict.fromkeys((f"{part}_bytes" for part in PARTS), 0)
    return MemoryEstimate(
        **parts,
        peak_where="",
        confidence="workspace",
        reserved_bytes=row["reserved_bytes"],
        _find_least=lambda: int(row["least_reserved_bytes"]),
        _find_range=lambda: (row["reserved_range"][0], row["reserved_range"][1]),
    )


def narrowest(values: Iterable[int], share: float = 1 / 2) -> tuple[int, int]:
    """The narrowest interval with this share of the values."""
    ordered = sorted(values)
    count = math.ceil(share * len(ordered))
    return min(zip(ordered, ordered[count - 1 :], strict=False), key=lambda ends: ends[1] - ends[0])


def leave_one_family_out(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> float:
    """The median error where for each family the other families choose among the ways: each is a key of an error."""
    errors = []
    for family in {row["family"] for row in rows}:
        others = [row for row in rows if row["family"] != family]
        chosen = min(ways, key=lambda way: statistics.median(abs(row[way]) for row in others))
        errors += [abs(row[chosen]) for row in rows if row["family"] == family]
    return statistics.median(errors)


def shuffled_error(rows: Sequence[dict[str, Any]], predicted: str, recorded: str) -> float:
    """The median error where each row gets another row's prediction: what a prediction of nothing would reach."""
    rotated = [*rows[len(rows) // 2 :], *rows[: len(rows) // 2]]
    return statistics.median(
        abs(other[predicted] / row[recorded] - 1) for row, other in zip(rows, rotated, strict=True)
    )


def let_torchvision_be_imported() -> None:
    """Its own operators are missing beside a build of PyTorch for the CPU, and no model here needs them."""
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
