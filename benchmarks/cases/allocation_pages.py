"""Cost of a page of a long CUDA memory snapshot, made by the command: seconds, memory, bytes of the page; 1 GB at most.

The peak is that of the generator's own count. Run: python -m benchmarks.cases.allocation_pages   (3 minutes)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.long_snapshot import Training, steps_for, write_snapshot
from benchmarks.result import write_result

SIZES = {"10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9}
_COMMAND = """
import resource, sys
from memkit.cli import main
code = main(["report", sys.argv[1], "--output", sys.argv[2]])
used = resource.getrusage(resource.RUSAGE_SELF)
print("MEASURED", code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def page_of(num_bytes: int, folder: Path) -> dict[str, Any]:
    """Write a snapshot and its page, and measure the command in a process of its own."""
    snapshot, page = folder / "run.pickle", folder / "page.html"
    num_actions = write_snapshot(snapshot, num_bytes)
    start = time.perf_counter()
    arguments = [sys.executable, "-c", _COMMAND, str(snapshot), str(page)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    found = re.search(r"MEASURED 0 (\S+) (\d+)", done.stdout)
    assert found
    peak = re.search(r'"peakBytes":(\d+)', page.read_text("utf-8"))
    assert peak
    return {
        "snapshot_bytes": snapshot.stat().st_size,
        "num_actions": num_actions,
        "page_bytes": page.stat().st_size,
        "peak_in_page_bytes": int(peak[1]),
        "peak_of_generator_bytes": peak_of(num_bytes),
        "seconds": seconds,
        "cpu_seconds": float(found[1]),
        "resident_bytes": int(found[2]),
    }


def peak_of(num_bytes: int) -> int:
    """Count the most that the training held, action by action."""
    held = highest = 0
    for action in Training(0).actions(steps_for(num_bytes, 0)):
        size = -(-action.num_bytes // 512) * 512
        held += {"alloc": size, "free_requested": -size}.get(action.kind, 0)
        highest = max(highest, held)
    return highest


def main() -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, num_bytes in SIZES.items():
            figures[name] = page_of(num_bytes, Path(folder))
            print(name, json.dumps(figures[name], indent=2))
    print(write_result("allocation_pages", figures))
    largest = figures["1 GB"]
    assert all(each["peak_in_page_bytes"] == each["peak_of_generator_bytes"] for each in figures.values())
    assert largest["page_bytes"] <= 10 * 10**6
    assert largest["resident_bytes"] <= 2 * 10**9
    assert largest["seconds"] <= 60


if __name__ == "__main__":
    main()
