"""The virtual GPU against 79 published measurements of single operators on A100, H100 and B200.

The measured rows are in tests/data/liger_rows.json, the operators in tests/simulation/liger_rows.py.

Run: python -m benchmarks.cases.liger_rows   (5 seconds)
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch

from benchmarks.result import write_result
from tests.simulation.liger_rows import ROWS, as_printed, measured_bytes, peak_bytes


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    peaks = [peak_bytes(row) for row in rows]
    errors = [peak - measured_bytes(row) for row, peak in zip(rows, peaks, strict=True)]
    return {
        "num_rows": len(rows),
        "num_as_printed": sum(as_printed(peak) == row["measured_mib"] for row, peak in zip(rows, peaks, strict=True)),
        "largest_error_bytes": max(map(abs, errors)),
        "smallest_peak_bytes": min(map(measured_bytes, rows)),
        "largest_peak_bytes": max(map(measured_bytes, rows)),
    }


def main() -> None:
    torch.set_num_threads(1)
    kinds = groupby(sorted(ROWS, key=_kind), key=_kind)
    print(write_result("liger_rows", {f"{kernel}, {gpu}": figures_of(list(rows)) for (kernel, gpu), rows in kinds}))


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["kernel"], row["gpu"]


if __name__ == "__main__":
    main()
