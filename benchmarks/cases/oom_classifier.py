"""How many of the corpus messages memkit, accelerate and Lightning take for out-of-memory.

memkit's table was written from this corpus, so its own count is a check against going back, not a score; the peers'
counts show which of these messages each one knows, not how often users meet them.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.oom_classifier
"""

from __future__ import annotations

import json
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size
from lightning.pytorch.utilities.memory import is_oom_error

import memkit as mk
from benchmarks.result import write_result

CORPUS = json.loads((Path(__file__).parents[2] / "tests" / "data" / "oom_corpus.json").read_text())
CERTAIN = [entry for entry in CORPUS["positive"] if entry["certain"]]
AMBIGUOUS = [entry for entry in CORPUS["positive"] if not entry["certain"]]
JUDGES: dict[str, Callable[[Any], bool]] = {
    "accelerate": should_reduce_batch_size,
    "lightning": is_oom_error,
    "memkit": lambda exc: mk.is_out_of_memory(exc, under_pressure=False),
    "memkit_under_pressure": lambda exc: mk.is_out_of_memory(exc, under_pressure=True),
}


def build(entry: dict[str, Any]) -> BaseException:
    kind: Any = pydoc.locate(entry["type"])
    return kind(*[entry[key] for key in ("errno", "message") if entry.get(key)])


def figures_of(judge: Callable[[Any], bool]) -> dict[str, Any]:
    missed = [entry["message"][:80] for entry in CERTAIN if not judge(build(entry))]
    return {
        "certain_recognised": len(CERTAIN) - len(missed),
        "ambiguous_recognised": sum(judge(build(entry)) for entry in AMBIGUOUS),
        "false_positives": sum(judge(build(entry)) for entry in CORPUS["negative"]),
        "certain_missed": missed,
    }


def main() -> None:
    sizes = {"certain": len(CERTAIN), "ambiguous": len(AMBIGUOUS), "negative": len(CORPUS["negative"])}
    figures: dict[str, Any] = {name: figures_of(judge) for name, judge in JUDGES.items()}
    for name, row in figures.items():
        print(
            f"{name:22} {row['certain_recognised']} of {sizes['certain']} certain, {row['ambiguous_recognised']} of "
            f"{sizes['ambiguous']} ambiguous, {row['false_positives']} of {sizes['negative']} other errors"
        )
    print(write_result("oom_classifier", {"corpus": sizes, "judges": figures}, peers=("accelerate", "lightning")))


if __name__ == "__main__":
    main()
