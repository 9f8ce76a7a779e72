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


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {"tail_group": tail_group}


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
