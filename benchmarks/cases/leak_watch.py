"""The leak watch on scripts with a planted leak and on clean ones: leaks named, false alarms, time of a check.

Run: python -m benchmarks.cases.leak_watch   (2 minutes)
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit.memory.leaks import LeakWatch
from tests.memory.leak_clean import CLEAN
from tests.memory.leak_scripts import PLANTED, Outcome, run_script

NUM_TIMED = 7
NUM_OBJECTS = 300_000


def outcome_of(source: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_script(source, Path(folder))
        line = outcome.line and Path(outcome.line).name
        return Outcome(
            [[(x.holder, x.kind, x.line and Path(x.line).name) for x in leaks] for leaks in outcome.found], line
        )


def planted() -> dict[str, dict[str, Any]]:
    rows = {}
    for name, script in PLANTED.items():
        found, line = outcome_of(script.source)
        expected = (script.holder, script.kind, line)
        rows[name] = {
            "holder": script.holder,
            "named": found[-1] == [expected],
            "first_named_at_check": next((n for n, leaks in enumerate(found, start=1) if expected in leaks), None),
            "other_reports": sum(each != expected for leaks in found for each in leaks),
        }
    return rows


def clean() -> dict[str, int]:
    return {name: sum(map(len, outcome_of(source)[0])) for name, source in CLEAN.items()}


def median_ms(run: Callable[[], object]) -> float:
    return round(sorted(seconds_of(run) for _ in range(NUM_TIMED))[NUM_TIMED // 2] * 1e3, 1)


def costs() -> dict[str, Any]:
    """CPU milliseconds of a check in a process with many objects, and of the collection that is part of it."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(100)])
    filler = [{"row": [number]} for number in range(max(0, (NUM_OBJECTS - len(gc.get_objects())) // 2))]
    watch, kept = LeakWatch(), []

    def step(*, leak: bool) -> Callable[[], object]:
        def run() -> object:
            loss = net(torch.ones(4, 16)).sum()
            if leak:
                kept.append(loss)
            return watch.check()

        return run

    collect_ms = median_ms(gc.collect)
    step(leak=False)(), step(leak=False)()
    without_ms = median_ms(step(leak=False))
    with_ms = median_ms(step(leak=True))
    assert watch.check() == []
    return {
        "objects": len(gc.get_objects()),
        "filler": len(filler),
        "collect_ms": collect_ms,
        "check_without_suspects_ms": without_ms,
        "check_with_a_leak_ms": with_ms,
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    figures = {"costs": costs(), "planted": planted(), "clean": clean()}
    named = sum(row["named"] for row in figures["planted"].values())
    alarms = sum(count > 0 for count in figures["clean"].values())
    others = sum(row["other_reports"] for row in figures["planted"].values())
    summary = {
        "named": named,
        "planted": len(PLANTED),
        "other_reports": others,
        "false_alarms": alarms,
        "clean": len(CLEAN),
    }
    print(summary, figures["costs"])
    print(write_result("leak_watch", {"summary": summary} | figures))


if __name__ == "__main__":
    main()
