"""Intervals and verdicts against all recorded GPU runs together: how often they hold, and how much they leave open.

Reads the result files of the cases `recorded_convolutions`, `recorded_transformers`, `recorded_openmmlab` and
`recorded_timm`. What an allocator reserves has margins in `memkit.predict.estimate`, which grow with its elastic part.
They are judged in three ways. "factor": by how much all of them would have to grow to hold 95%, and whether a family,
or a GPU, holds with the margins that the others need. "chosen": the margins that the other families, or GPUs, choose
from a grid. "control": the width of intervals that hold 95% if runs swap their elastic parts, and with a share alone.

What the driver of a GPU tells has a part that is not the allocator's: kernels are loaded when they are needed. It is
the narrowest interval that holds half of what the runs of the other families took beyond what is predicted. Where it is
not known what a run did, its interval spans both that were tried: two lengths of a batch; one step, or more.

Run: python -m benchmarks.cases.recorded_intervals
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.recorded import held, narrowest, rebuilt
from benchmarks.recorded_xmem import NOT_EXPLAINED
from benchmarks.result import RESULTS, read_result, write_result
from memkit.predict.estimate import LESS, MORE, Margin

HELD = 0.95
REASONS = {  # what differs from the run, by the first part of a model's name
    "hrnet": "PyTorch 1.12 did not cast upsampling to float32",
    "sequencer2d": "what cuDNN's LSTM keeps is not known",
    "tnt": "timm has rewritten it since",
    "tresnet": "it had InplaceABN, timm's of today has not",
}
LENGTHS = "the lengths of its batches were not recorded"
FEWEST = 6  # runs of a family that is shown on its own
CHOICES = [  # margins on both sides
    (Margin(share, less), Margin(share, more))
    for share, less, more in product(
        (0.005, 0.01, 0.015, 0.02), (0.1, 0.2, 0.25, 0.3), (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    )
]
WORDS, ENDS = ("fits", "too close", "does not fit", "not known"), ((True, "ran"), (False, "ran out"))


def recorded() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with an interval, and those with a verdict; each has its source, family and card."""
    xmem = [
        row | {"source": f"xMem, {kind}", "reason": figures["misses"].get(name, {}).get("reason")}
        for kind in ("convolutions", "transformers")
        for figures in [read_result(f"recorded_{kind}", RESULTS)["figures"]]
        for name, row in figures["rows"].items()
    ]
    openmmlab = list(read_result("recorded_openmmlab", RESULTS)["figures"]["rows"].values())
    timm = read_result("recorded_timm", RESULTS)["figures"]
    intervals = [
        *of_xmem([row for row in xmem if not row["ran_out"]]),
        *({**row, "source": "OpenMMLab", "gpu": "V100 32GB"} for row in openmmlab),
        *(
            of_reserve(row, row["context_bytes"]) | {"source": "GPUMemNet", "gpu": "A100 40GB"}
            for row in timm["growth"]["totals"]
        ),
    ]
    verdicts = [
        *({**row, "ran": not row["ran_out"]} for row in xmem),
        *({**row, "source": "timm", "gpu": "RTX 3090"} for row in timm["brackets"]["rows"]),
    ]
    return intervals, verdicts


def of_reserve(row: dict[str, Any], fixed: Sequence[int]) -> dict[str, Any]:
    """A row of what an allocator reserved, with whether its interval holds."""
    ends = [*row["reserved_range"], *row.get("other_range", ())]
    row = row | {"reserved_range": [min(ends), max(ends)]}
    estimate = rebuilt(row)
    interval, within = estimate.reserved_interval, estimate.reserved_range
    assert interval is not None
    assert within is not None
    return row | {"fixed": fixed} | held(interval, within, row["recorded_bytes"], fixed=(fixed[0], fixed[1]))


def of_xmem(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with whether their interval holds; what the first sample held already is not in the record."""
    for row in rows:
        low, high = narrowest(
            other["recorded_bytes"] - other["predicted_bytes"] for other in rows if other["family"] != row["family"]
        )
        before = row["first_sample_bytes"]
        yield of_reserve(row, (low - before, high - before))


def reason_of(row: Mapping[str, Any]) -> str:
    """Why an interval does not hold, as far as it is known."""
    return row.get("reason") or (LENGTHS if "other_lengths" in row else NOT_EXPLAINED)


def needed(times: Sequence[float]) -> float:
    """By how much all margins have to grow for 95% of the rows to hold, as split conformal prediction counts them."""
    return sorted(times)[min(len(times), math.ceil(HELD * (len(times) + 1))) - 1]


def held_by_others(rows: list[dict[str, Any]], key: str) -> float:
    """The share of rows that hold with the margins that the rows of all other groups need."""
    chosen = {
        group: needed([row["needed_factor"] for row in rows if row[key] != group])
        for group in {row[key] for row in rows}
    }
    return statistics.mean(row["needed_factor"] <= chosen[row[key]] for row in rows)


def with_margins(
    row: Mapping[str, Any], less: Margin, more: Margin, elastic_bytes: int | None = None
) -> tuple[float, float, float]:
    """How many times these margins a row needs, and its width without them and by them, as shares of the record."""
    (low, high), fixed, recorded = row["reserved_range"], row["fixed"], row["recorded_bytes"]
    if elastic_bytes is None:
        elastic_bytes = elastic_of(row)
    below, above = less.bytes_of(low, elastic_bytes), more.bytes_of(high, elastic_bytes)
    missing = max((low + fixed[0] - recorded) / below, (recorded - high - fixed[1]) / above, 0.0)
    return missing, (high + fixed[1] - low - fixed[0]) / recorded, (below + above) / recorded


def elastic_of(row: Mapping[str, Any]) -> int:
    """What the allocator reserved beyond what it needs."""
    return max(0, int(row["reserved_bytes"]) - int(row["least_reserved_bytes"]))


def chosen_by_others(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """The share of rows that hold, and the median width, where the rows of all other groups choose the margins.

    They choose the narrowest that hold 95% of them, or that come next to it.
    """
    tried = [[with_margins(row, *choice) for row in rows] for choice in CHOICES]
    holds, widths = [], []
    for group in {row[key] for row in rows}:
        others = [number for number, row in enumerate(rows) if row[key] != group]
        best = min(
            tried,
            key=lambda each: (
                max(1.0, needed([each[number][0] for number in others])),
                statistics.median(sum(each[number][1:]) for number in others),
            ),
        )
        mine = [best[number] for number, row in enumerate(rows) if row[key] == group]
        holds += [times <= 1 for times, *_ in mine]
        widths += [sum(parts) for _, *parts in mine]
    return {"held": statistics.mean(holds), "median_width": statistics.median(widths)}


def width_needed(rows: list[dict[str, Any]], elastic_shares: Sequence[float]) -> float:
    """The median width with which 95% of the rows hold, if these were the elastic parts, as shares of the reserves."""
    found = [
        with_margins(row, LESS, MORE, int(share * row["reserved_bytes"]))
        for row, share in zip(rows, elastic_shares, strict=True)
    ]
    times = needed([each for each, *_ in found])
    return statistics.median(certain + times * margins for _, certain, margins in found)


def controls(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How wide intervals have to be for 95% of the rows to hold, with elastic parts of their own and without."""
    own = [elastic_of(row) / row["reserved_bytes"] for row in rows]
    half = len(rows) // 2
    return {
        "median_width": width_needed(rows, own),
        "median_width_with_elastic_parts_swapped": width_needed(rows, [*own[half:], *own[:half]]),
        "median_width_by_a_share_alone": width_needed(rows, [0.0] * len(rows)),
    }


def held_shuffled(rows: list[dict[str, Any]]) -> float:
    """The share of rows that hold where each has another row's interval."""
    rotated = [*rows[len(rows) // 2 :], *rows[: len(rows) // 2]]
    return statistics.mean(
        other["interval_bytes"][0] <= row["recorded_bytes"] <= other["interval_bytes"][1]
        for row, other in zip(rows, rotated, strict=True)
    )


def grouped(rows: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row[key] == name] for name in sorted({row[key] for row in rows})}


def of_intervals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "num_rows": len(rows),
        "held": statistics.mean(row["holds"] for row in rows),
        "median_width": statistics.median(row["width"] for row in rows),
        "held_shuffled": held_shuffled(rows),
    }


def of_verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    said = Counter((row["verdict"], row["ran"]) for row in rows)
    right = said["fits", True] + said["does not fit", False]
    answered = right + said["fits", False] + said["does not fit", True]
    return {
        "num_rows": len(rows),
        "share_too_close": sum(said["too close", ran] for ran, _ in ENDS) / len(rows),
        "share_right": right / answered if answered else None,
        **{f"{word}, {end}": said[word, ran] for word in WORDS for ran, end in ENDS},
    }


def main() -> None:
    intervals, verdicts = recorded()
    reserves = [row for row in intervals if "reserved_range" in row]
    sources = dict.fromkeys(row["source"] for row in intervals)
    cards = sorted({row["gpu"] for row in verdicts})
    sizes = Counter(row["family"] for row in verdicts)
    shown = sorted(family for family, count in sizes.items() if count >= FEWEST)
    figures = {
        "margins": {"less": LESS._asdict(), "more": MORE._asdict()},
        "factor": {"needed": needed([row["needed_factor"] for row in intervals])}
        | {f"held_by_others_by_{key}": held_by_others(intervals, key) for key in ("family", "gpu")},
        "chosen": {f"by_{key}": chosen_by_others(reserves, key) for key in ("family", "gpu")},
        "control": controls(reserves),
        "intervals": {"all": of_intervals(intervals)}
        | {source: of_intervals([row for row in intervals if row["source"] == source]) for source in sources},
        "intervals_by_card": {gpu: of_intervals(rows) for gpu, rows in grouped(intervals, "gpu").items()},
        "intervals_by_family": {family: of_intervals(rows) for family, rows in grouped(intervals, "family").items()},
        "missed": [
            {"source": row["source"], "model": row.get("model", row.get("config")), "batch": row.get("batch")}
            | {"needed_factor": row["needed_factor"], "reason": reason_of(row)}
            for row in intervals
            if not row["holds"]
        ],
        "verdicts": {"all": of_verdicts(verdicts)}
        | {card: of_verdicts([row for row in verdicts if row["gpu"] == card]) for card in cards}
        | {family: of_verdicts([row for row in verdicts if row["family"] == family]) for family in shown}
        | {"other families": of_verdicts([row for row in verdicts if row["family"] not in shown])},
        "wrong": [
            {name: row.get(name) for name in ("gpu", "family", "model", "layout", "batch", "verdict", "ran")}
            | {"reason": REASONS.get(row["family"], NOT_EXPLAINED)}
            for row in verdicts
            if (row["verdict"] == "fits" and not row["ran"]) or (row["verdict"] == "does not fit" and row["ran"])
        ],
    }
    print(write_result("recorded_intervals", figures))


if __name__ == "__main__":
    main()
