"""Write the docs' tables from the committed result files.

A table stands between ``<!-- result: CASE -->`` and ``<!-- end -->``. Run: python -m benchmarks.tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TABLE = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tail_group(result: dict[str, Any]) -> str:
    versions = result["environment"]["versions"]
    names = {"plain": "plain loop, `loss / steps`", "memkit": "memkit"}
    rows = [
        [
            names.get(name, f"{name} {versions.get(name)}"),
            f"{row['whole_groups_mean_ratio']:.4f}",
            f"{row['last_group_ratio']:.4f}",
        ]
        for name, row in result["figures"].items()
    ]
    return table(["library", "whole groups", "last group"], rows)


def megabytes(num_bytes: int, of: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" + (f" ({num_bytes / of - 1:+.0%})" if num_bytes != of else "")


def wrapper_memory(result: dict[str, Any]) -> str:
    models = {"transformer": "transformer, 12 blocks", "unet": "3D U-Net"}
    rows = [
        [
            models[task],
            setting,
            *(megabytes(row[key], settings["plain"][key]) for key in ("peak_bytes", "activation_bytes", "saved_bytes")),
            f"{row['backward_flops'] / row['forward_flops']:.2f}",
            f"{row['time_ratio']:.2f}",
        ]
        for task, settings in result["figures"].items()
        for setting, row in settings.items()
    ]
    header = ["model", "setting", "peak", "activations", "saved for backward", "backward / forward FLOPs", "time"]
    return table(header, rows)


def wrapper_overhead(result: dict[str, Any]) -> str:
    figures = result["figures"]
    rows = [
        [
            f"{name} micro-batches",
            *(
                f"{row[f'{mode}_us_per_microbatch']:.0f} us ({row[f'{mode}_ratio'] - 1:+.1%})"
                for mode in ("raise", "split")
            ),
        ]
        for name, row in figures["overhead"].items()
    ]
    reads = [[name, str(num)] for name, num in figures["host_reads"].items()]
    overhead = table(["step", 'per micro-batch, `on_oom="raise"`', 'per micro-batch, `on_oom="split"`'], rows)
    return overhead + "\n" + table(["loss", "host reads per step"], reads)


def hygiene(result: dict[str, Any]) -> str:
    rows = [
        [name, row["claim"], f"{row['saving']:.0%}", f"{row['bad_bytes'] / 1e6:.1f} MB", row["note"]]
        for name, row in result["figures"].items()
    ]
    return table(["habit", "claimed", "saves", "of", "note"], rows)


def track_cost(result: dict[str, Any]) -> str:
    sizes = result["figures"]
    ways = [way for way in next(iter(sizes.values()))["ways"] if way != "bare"]
    rows = [
        [
            f"`{way}`" if way.startswith("track") else way,
            *(
                f"{size['ways'][way]['steps_ratio']:.2f} ({size['ways'][way]['whole_ratio']:.2f})"
                for size in sizes.values()
            ),
        ]
        for way in ways
    ]
    return table(
        ["way", *(f"{name}, {size['ways']['bare']['ms_per_step']:.1f} ms" for name, size in sizes.items())], rows
    )


def first_step(result: dict[str, Any]) -> str:
    def ooms(row: dict[str, Any]) -> str:
        return str(row["num_ooms"][0]) if "num_ooms" in row else "died"

    cases = result["figures"]["cases"]
    shares = [f"{limit['share']:.0%}" for limit in next(iter(cases.values()))["limits"]]
    rows = [
        [name, way, *(ooms(limit[key]) for limit in case["limits"])]
        for name, case in cases.items()
        for way, key in (("foreseen", "with"), ("tried", "without"))
    ]
    return table(["model", "size", *shares], rows)


def edge_mlp(result: dict[str, Any]) -> str:
    rows = []
    for case in result["figures"]["cases"]:
        what = case["reduce"] + (", gathered" if case["gather"] else "")
        name = f"{case['hidden']}, {case['edges']:,} edges, {what}"
        for way, row in case["ways"].items():
            peak = f"{row['peak_bytes'] / 2**20:,.1f} MiB"
            error = f"{row['gradient_error']:.1e}" if "gradient_error" in row else ""
            rows.append([name, way, peak, f"{row['ratio']:.2f}" if "ratio" in row else "", error])
            name = ""
    return table(["hidden layers, edges, reduction", "way", "peak", "time", "gradient error"], rows)


def manager_cost(result: dict[str, Any]) -> str:
    loops = result["figures"]["loops"]
    ways = {"memory only": "memory only", "log file": "log file", "reset_peaks": "`reset_peaks=True`"}
    rows = [
        [
            name.replace("step()", "`step()`").replace(", ", " and "),
            *(
                f"{loops[f'{way}: {name}']['extra_us']:.0f} us ({loops[f'{way}: {name}']['percent_of_9_ms']:.1f}%)"
                for way in ways
            ),
        ]
        for name in ("step()", "3 phases, step()", "4 phases, step()")
    ]
    return table(["in each training step", *ways.values()], rows)


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    render_case.__name__: render_case
    for render_case in (
        tail_group,
        wrapper_memory,
        wrapper_overhead,
        hygiene,
        track_cost,
        first_step,
        edge_mlp,
        manager_cost,
    )
}


def render(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{match[2]}.json").read_text())
        return match[1] + RENDERERS[match[2]](result) + match[3]

    return _TABLE.sub(replace, text)


def main() -> None:
    for path in DOCS:
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
