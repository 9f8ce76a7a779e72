"""Reports of damaged logs: a report or one line, never half a file; and what a report of a long log costs.

`tests/cli/test_report.py` runs a part of it.

Run: python -m benchmarks.cases.report_pages   (8 minutes)
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases.log_fuzz import damaged, foreign_files, header, real_logs, typical_event
from benchmarks.result import write_result
from memkit._events.reader import read_memory_events
from memkit._events.writer import save_events
from memkit.cli import main as shell
from memkit.recipes.report import write_report
from memkit.report.write import MARK, SUFFIXES

NUM_LOGS = 50_000
NUM_SPEED_EVENTS, NUM_SIZE_EVENTS = 10_000, 100_000
NUM_ROUNDS = 15
S1 = Path(__file__).parents[2] / "tests" / "data" / "report_s1.json"


def judge(log: Path, target: Path) -> int:
    """Make a report by the command, and check: exit 0 and a whole file, or 2, one error on stderr and no file."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = shell(["report", "--log", str(log), "--output", str(target)])
    files = [path.name for path in target.parent.iterdir()]
    if code == 0:
        assert files == [target.name]
        text = target.read_text("utf-8")
        assert MARK in text[:4096]
        assert text.rstrip().endswith({".html": "</html>", ".json": "}", ".md": "*", ".txt": ""}[target.suffix])
        assert not err.getvalue()
        target.unlink()
    else:
        assert (code, files, out.getvalue()) == (2, [], "")
        assert err.getvalue().startswith("memkit: error: ")
        first, *rest = err.getvalue().splitlines()
        assert first.startswith("memkit: error: ")
        assert all(line.startswith("  ") for line in rest)  # it is folded, and its way out begins a line
    return code


def fuzz(num_logs: int, seed: int = 0) -> dict[str, int]:
    """Judge damaged logs; the same seed gives the same logs."""
    chance, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        logs = [*real_logs(Path(folder)), *foreign_files(), S1.read_bytes()]
        log, target = Path(folder, "damaged"), Path(folder, "out")
        target.mkdir()
        for _ in range(num_logs):
            log.write_bytes(damaged(logs, chance))
            try:
                code = judge(log, target / f"report{chance.choice(SUFFIXES)}")
            except Exception as error:  # noqa: BLE001 - this is what must not happen; it is counted and shown
                counts["anything else"] += 1
                print(repr(error)[:300], file=sys.stderr)
            else:
                counts["reports" if code == 0 else "one line"] += 1
    return {"num_logs": num_logs, **{name: counts[name] for name in ("reports", "one line", "anything else")}}


def save_log(path: Path, num_events: int) -> None:
    """Write a log of phases and steps whose figures wander."""
    chance, events = random.Random(0), []
    for number in range(num_events):
        event = replace(
            typical_event(number // 5),
            wall_s=1.75e9 + number / 100,
            allocated_bytes=(held := chance.randrange(9 * 10**9, 11 * 10**9)),
            peak_bytes=held + chance.randrange(10**9),
        )
        if number % 5 == 4:
            event = replace(event, event=f"step_{number // 5}", phase=None, duration_ns=None)
        events.append(event)
    save_events(path, header(), events)


def cost() -> dict[str, float]:
    """CPU milliseconds of reading and reporting 10,000 events, here and as a command; file sizes.

    Other programs on the machine, and its clock, change them by a half within minutes. The least of 15 is the one that
    they changed least; the time of json.loads alone, taken in turns with it, says how fast the machine was.

    The command finds memkit compiled, as an installation leaves it, whatever PYTHONDONTWRITEBYTECODE says here.
    """
    here, command, loads = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled")),
        }
        log, page = Path(folder, "log.jsonl"), Path(folder, "report.html")
        save_log(log, NUM_SPEED_EVENTS)
        lines = log.read_text("utf-8").splitlines()
        for _ in range(NUM_ROUNDS + 1):
            start = time.process_time()
            for line in lines:
                json.loads(line)
            loads.append(1e3 * (time.process_time() - start))
            start = time.process_time()
            write_report(read_memory_events(log), page)
            here.append(1e3 * (time.process_time() - start))
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            arguments = ["report", "--log", str(log), "--output", str(page), "--force"]
            in_shell = [sys.executable, "-m", "memkit", *arguments]
            subprocess.run(in_shell, check=True, stdout=subprocess.DEVNULL, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            command.append(1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
        save_log(log, NUM_SIZE_EVENTS)
        write_report(read_memory_events(log), page)
        size = page.stat().st_size
    return {
        "num_events": NUM_SPEED_EVENTS,
        "read_and_report_ms": statistics.median(here[1:]),
        "least_read_and_report_ms": min(here[1:]),
        "json_loads_ms": statistics.median(loads[1:]),
        "least_json_loads_ms": min(loads[1:]),
        "command_ms": statistics.median(command[1:]),  # the first one compiles
        "html_bytes_of_100k_events": size,
    }


def main() -> None:
    figures: dict[str, Any] = {"cost": cost(), "fuzz": fuzz(NUM_LOGS)}
    print(json.dumps(figures, indent=2))
    print(write_result("report_pages", figures))
    assert figures["fuzz"]["anything else"] == 0
    assert figures["cost"]["html_bytes_of_100k_events"] <= 300_000


if __name__ == "__main__":
    main()
