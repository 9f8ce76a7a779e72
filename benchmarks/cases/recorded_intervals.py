"""Intervals and verdicts against all recorded GPU runs together: how often they hold, and how much they leave open.

Reads the result files of the cases `recorded_convolutions`, `recorded_transformers`, `recorded_openmmlab` and
`recorded_timm`. An estimate's interval has a spread where convolutions run, `memkit.predict.estimate.SPREAD`. "needed"
is the one with which 95% of the rows would hold, and next to it how many rows of each family hold with what the other
families need; a control gives each row another row's interval.

What the driver of a GPU tells has a part that is not the allocator's: kernels are loaded when they are needed. It is
the narrowest interval that holds two thirds of what the runs of the other families took beyond what is predicted.

Run: python -m benchmarks.cases.recorded_intervals
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.recorded import held, narrowest
from benchmarks.recorded_xmem import NOT_EXPLAINED
from benchmarks.result import RESULTS, read_result, write_result
from memkit.predict.estimate import SPREAD

HELD = 0.95
REASONS = {  # what differs from the run, by the first part of a model's name
    "hrnet": "PyTorch 1.12 did not cast upsampling to float32",
    "sequencer2d": "what cuDNN's LSTM keeps is not known",
    "tnt": "timm has rewritten it since",
    "tresnet": "it had InplaceABN, timm's of today has not",
}
LENGTHS = "the lengths of its batches were not recorded"
FEWEST = 6  # runs of a family that is shown on its own
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
        *({**row, "source": "OpenMMLab"} for row in openmmlab),
        *({**row, "source": "GPUMemNet"} for row in timm["growth"]["totals"]),
    ]
    verdicts = [
        *({**row, "ran": not row["ran_out"]} for row in xmem),
        *({**row, "source": "timm", "gpu": "RTX 3090"} for row in timm["brackets"]["rows"]),
    ]
    return intervals, verdicts


def of_xmem(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with whether their interval holds; what the first sample held already is not in the record."""
    for row in rows:
        low, high = narrowest(
            other["recorded_bytes"] - other["predicted_bytes"] for other in rows if other["family"] != row["family"]
        )
        before = row["first_sample_bytes"]
        fixed = low - before, high - before
        interval = tuple(row["reserved_interval"])
        yield row | held(interval, row["recorded_bytes"], spread=row["spread"], fixed=fixed)


def reason_of(row: Mapping[str, Any]) -> str:
    """Why an interval does not hold, as far as it is known."""
    return row.get("reason") or (LENGTHS if "other_lengths" in row else NOT_EXPLAINED)


def needed(rows: Iterable[dict[str, Any]]) -> float:
    """The spread with which 95% of the rows hold, as split conformal prediction counts them."""
    spreads = sorted(row["needed_spread"] for row in rows)
    return spreads[min(len(spreads), math.ceil(HELD * (len(spreads) + 1))) - 1]


def held_by_others(rows: list[dict[str, Any]]) -> float:
    """The share of rows that hold with the spread that the rows of all other families need."""
    families = {row["family"] for row in rows}
    chosen = {family: needed(row for row in rows if row["family"] != family) for family in families}
    return statistics.mean(row["needed_spread"] <= chosen[row["family"]] for row in rows)


def held_shuffled(rows: list[dict[str, Any]]) -> float:
    """The share of rows that hold where each has another row's interval."""
    rotated = [*rows[len(rows) // 2 :], *rows[: len(rows) // 2]]
    return statistics.mean(
        other["interval_bytes"][0] <= row["recorded_bytes"] <= other["interval_bytes"][1]
        for row, other in zip(rows, rotated, strict=True)
    )


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
    sources = dict.fromkeys(row["source"] for row in intervals)
    cards = sorted({row["gpu"] for row in verdicts})
    sizes = Counter(row["family"] for row in verdicts)
    shown = sorted(family for family, count in sizes.items() if count >= FEWEST)
    figures = {
        "spread": {
            "used": SPREAD,
            "needed": needed(intervals),
            "held_with_that_of_other_families": held_by_others(intervals),
        },
        "intervals": {"all": of_intervals(intervals)}
        | {source: of_intervals([row for row in intervals if row["source"] == source]) for source in sources},
        "missed": [
            {"source": row["source"], "model": row.get("model", row.get("config")), "batch": row.get("batch")}
            | {"needed_spread": row["needed_spread"], "reason": reason_of(row)}
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
