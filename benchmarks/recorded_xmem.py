"""Shared by the cases of xMem's recorded runs: a run on its virtual GPU, its score, and the other predictors'.

xMem (Stone-ResearchLife/xMem, Middleware 25) trained models for four steps on three cards, with PyTorch 2.6 and cuDNN
9.1 in float32. It recorded the most memory in use on the GPU, whether a run ran out, and runs under caps.

What was recorded is less than what the allocator reserved, where the model was already on the card when the first
sample was taken: the sampling thread starts right before the model is moved, and the first sample is subtracted from
all (`exp/trainer/train_loop.py`, `exp/trainer/plugins/monitor/runner.py` and `_get_ground_truth` in `exp/run.py`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import memkit as mk
from benchmarks.recorded import leave_one_family_out, roomy, shuffled_error, told_on
from memkit._core.units import MIB
from memkit.predict.gpus import GPU

PEERS = ("xMem", "DNNMem", "SchedTune")
VERSIONS = {"torch": "2.6", "cudnn": "9.1"}
MISS = 0.05  # from here on an error is explained, or named as not explained
NOT_EXPLAINED = "not explained"
OFFSET_SPREAD = 4 * MIB
Train = Callable[[dict[str, Any]], int]  # returns what the first sample holds already


def card_of(row: Mapping[str, Any]) -> GPU:
    name = row["gpu"]
    return mk.find_gpu(" ".join(name.split()[:2]) if name.startswith("RTX") else "A100 40GB")


def figures_of(row: dict[str, Any], train: Train) -> dict[str, Any]:
    """The record, the prediction, and the verdict on the row's own card.

    Where the card has less than what a run would reserve, it reserves what fits: this is run on the card as it was.
    """
    card, total = card_of(row), row["gpu_total_bytes"]
    least_context, _ = contexts = card.context_interval
    with mk.VirtualGPU(roomy(card), **VERSIONS) as gpu:
        before = train(row)
    free = estimate = gpu.estimate()
    least = free.least_reserved_bytes
    assert least is not None
    assert free.reserved_bytes is not None
    if least <= total - least_context < free.reserved_bytes:
        own = replace(card, total_interval=(total, total), context_interval=(least_context, least_context))
        with mk.VirtualGPU(own, **VERSIONS) as gpu:
            train(row)
        estimate = gpu.estimate()
    reserved = estimate.reserved_bytes
    assert reserved is not None
    peak = None if row["oom"] else row["peak_bytes_nvml"]
    survived = [run["cap_bytes"] for run in row["capped_runs"] if run["survived"]]
    return {
        "family": row["family"],
        "model": row["model"],
        "gpu": card.name,
        "optimizer": row["optimizer"],
        "batch": row["batch"],
        "ran_out": row["oom"],
        "recorded_bytes": peak,
        "reserved_bytes": reserved,
        "reserved_range": estimate.reserved_range,
        "first_sample_bytes": before,
        "predicted_bytes": reserved - before,
        "least_reserved_bytes": least,
        "least_interval": [end - context for end, context in zip(free.least_required_interval, contexts, strict=True)],
        "error": None if peak is None else (reserved - before) / peak - 1,
        "error_without_first_sample": None if peak is None else reserved / peak - 1,
        "ran_in_bytes": min(survived + ([] if peak is None else [peak + before]), default=None),
        "ran_out_in_bytes": row["infeasible_at"],
        "verdict": told_on(card, total, free),
        "peer_errors": {
            peer: row["estimates"][peer] / peak - 1 for peer in PEERS if peak and row["estimates"].get(peer)
        },
    }


def respects(row: Mapping[str, Any]) -> bool:
    """Whether the least, as an interval, lies between what a run is known to have run in and to have run out in."""
    ran, ran_out, (low, high) = row["ran_in_bytes"], row["ran_out_in_bytes"], row["least_interval"]
    return (ran is None or low <= ran + OFFSET_SPREAD) and (ran_out is None or high > ran_out)


def spread(errors: Iterable[float]) -> dict[str, Any]:
    sizes = sorted(map(abs, errors))
    return {
        "num_rows": len(sizes),
        "median_error": statistics.median(sizes) if sizes else None,
        "worst_error": max(sizes, default=None),
        "within_5_percent": sum(size <= MISS for size in sizes) / len(sizes) if sizes else None,
    }


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    said = Counter((row["verdict"], row["ran_out"]) for row in rows)
    ended = [row for row in rows if row["error"] is not None]
    return spread(row["error"] for row in ended) | {
        "num_rows": len(rows),
        "num_ended": len(ended),
        "median_error_without_first_sample": spread(row["error_without_first_sample"] for row in ended)["median_error"],
        "bracket_respected": sum(map(respects, rows)) / len(rows),
        "verdicts": {
            f"{word}, {what}": said[word, ran_out]
            for word in ("fits", "too close", "does not fit", "not known")
            for what, ran_out in (("ran", False), ("ran out", True))
        },
    }


def shared_offset(rows: Iterable[Mapping[str, Any]], predicted: str) -> dict[str, int]:
    """The offset of the record that the most rows share to within `OFFSET_SPREAD`, and how many do.

    What the driver takes for kernels and handles is in the record as well, and is the same in each run.
    """
    offsets = [row["recorded_bytes"] - row[predicted] for row in rows]
    sharing = {each: sum(abs(other - each) <= OFFSET_SPREAD for other in offsets) for each in offsets}
    most = max(sharing.values())
    return {"offset_bytes": statistics.median_low(each for each in offsets if sharing[each] == most), "num_rows": most}


def scores(rows: dict[str, dict[str, Any]], reasons: Mapping[str, str]) -> dict[str, Any]:
    """The summaries of the rows, the other predictors' errors on the same rows, and the reason of each larger miss."""
    ended = [row for row in rows.values() if row["error"] is not None]
    groups = {
        "all": rows.values(),
        **{
            name: [row for row in rows.values() if row[key] == name]
            for key in ("family", "gpu")
            for name in sorted({row[key] for row in rows.values()})
        },
    }
    predictors = {"memkit": [row["error"] for row in ended]} | {
        peer: [row["peer_errors"][peer] for row in ended if peer in row["peer_errors"]] for peer in PEERS
    }
    half = len(ended) // 2
    of_another = [
        abs((row["reserved_bytes"] - other["first_sample_bytes"]) / row["recorded_bytes"] - 1)
        for row, other in zip(ended, [*ended[half:], *ended[:half]], strict=True)
    ]
    missed = {name: row for name, row in rows.items() if row["error"] is not None and abs(row["error"]) > MISS}
    return {
        "summary": {name: summary(each) for name, each in groups.items()},
        "predictors": {name: spread(errors) for name, errors in predictors.items()},
        "misses": {
            name: {"error": row["error"], "reason": reasons.get(name, NOT_EXPLAINED)} for name, row in missed.items()
        },
        "controls": {
            "leave_one_family_out": leave_one_family_out(ended, ("error", "error_without_first_sample")),
            "median_error_with_first_sample_of_another_row": statistics.median(of_another),
            "median_error_shuffled": shuffled_error(ended, "predicted_bytes", "recorded_bytes"),
            "shared_offset": shared_offset(ended, "predicted_bytes"),
            "shared_offset_without_first_sample": shared_offset(ended, "reserved_bytes"),
        },
        "rows": rows,
    }
