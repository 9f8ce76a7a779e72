"""Trainings that a GPU recorded, predicted again by this memkit: peaks, what is reserved, and where they differ.

`python -m benchmarks gpu` left the records in `benchmarks/results/gpu`: what each of three steps allocated, what all
reserved, and, beside it, each operator of a further step. "Then" is what the memkit that ran there predicted.

With `cudnn.benchmark` the first step is left out, and what is reserved: its trials take what is free.

Run: python -m benchmarks.cases.recorded_card   (3 minutes)
"""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import memkit as mk
from benchmarks.gpu import evidence
from benchmarks.gpu.models import TRAININGS
from benchmarks.gpu.observe import Operator, differing_operators, observe
from benchmarks.result import write_result

OPERATORS = ".operators.json.gz"
NEAR = 0.01  # what is farther off has a reason
SKIPPED = "the card's loss scaler skipped the first two steps, and with them the optimizer's state"
REASONS = {
    "resnet50, fp16, channels last": SKIPPED,
    "resnet50, fp16, channels last, tuned": SKIPPED,
}
NOT_EXPLAINED = "not explained"


def main() -> None:
    torch.set_num_threads(1)
    (path,) = evidence.FOLDER.glob(f"*{OPERATORS}")
    found = evidence.read(path.with_name(path.name.replace(OPERATORS, ".json")))
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    trainings = {name: again(found, name, recorded[name]) for name in recorded}
    figures = {
        "card": found.card.name,
        "torch": found.software.torch,
        "summary": {"all": summary(trainings)},
        "trainings": trainings,
        "cases": {
            name: found.cases[name].figures for name in ("losses", "edges in chunks", "offload", "recovery", "cost")
        },
    }
    print(write_result("recorded_card", figures))


def again(found: evidence.Evidence, name: str, recorded: list[list[Any]]) -> dict[str, Any]:
    """One training, beside its record."""
    cudnn = found.software.cudnn or 0
    card = mk.find_gpu(found.card.row)
    with mk.VirtualGPU(card, torch=found.software.torch, cudnn=f"{cudnn // 10000}.{cudnn // 100 % 100}"):
        seen = observe(TRAININGS[name].start)
    real, then = found.cases[f"measured/{name}"].figures, found.predictions()[name]
    first = int(TRAININGS[name].is_tuned)
    measured, predicted = max(real["peak_bytes"][first:]), max(seen.peak_bytes[first:])
    rows = differing_operators([Operator(*each) for each in recorded], seen.operators)
    error = predicted / measured - 1
    return {
        "measured_peak_bytes": measured,
        "peak_bytes": predicted,
        "peak_error": error,
        "peak_error_then": max(then.peak_bytes[first:]) / measured - 1,
        "measured_reserved_bytes": None if first else real["reserved_bytes"],
        "reserved_error": None if first else seen.reserved_bytes / real["reserved_bytes"] - 1,
        "reserved_error_then": None if first else then.reserved_error,
        "differs": [
            f"{each['operator']}: {each['kept_bytes']} kept, {each['inside_bytes']} inside" for each in rows[:4]
        ],
        "reason": "" if abs(error) <= NEAR else REASONS.get(name, NOT_EXPLAINED),
    }


def summary(trainings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    def of(name: str) -> list[float]:
        return [abs(row[name]) for row in trainings.values() if row[name] is not None]

    return {
        "num_trainings": len(trainings),
        **{
            f"{what}_{how}": number
            for what in ("peak_error", "peak_error_then", "reserved_error", "reserved_error_then")
            for how, number in {
                "median": statistics.median(of(what)),
                "worst": max(of(what)),
                "num_within_1_percent": sum(error <= NEAR for error in of(what)),
                "num": len(of(what)),
            }.items()
        },
    }


def keep_operators(work: Path, stem: str) -> None:
    """Put the operators of a run's trainings beside its results."""
    from benchmarks.gpu.cases import Place

    rows = {
        name: json.loads(Place(work).stem(f"measured/{name}").with_suffix(".operators.json").read_text())
        for name in TRAININGS
    }
    content = json.dumps(rows, separators=(",", ":")).encode()
    (evidence.FOLDER / f"{stem}{OPERATORS}").write_bytes(gzip.compress(content, 9, mtime=0))


if __name__ == "__main__":
    main()
