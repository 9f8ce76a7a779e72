"""Draws the figures of the docs from committed result files; the same file gives the same bytes.

Each figure is one SVG beside this script, with a ground of its own that is light or dark as the reader's system is, so
that it can be read on any page.

Run: python docs/figures/make.py
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"
WIDTH = 480
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b2330}.soft{fill:#5a6577}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".head{font-weight:600}.page{fill:#fff;stroke:#dfe4eb}.rule{stroke:#dfe4eb}"
    "polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}"
    ".c0{--c:#c2500a}.c1{--c:#0072b2}.c2{--c:#007a5a}.line{stroke:var(--c)}.fill{fill:var(--c)}"
    "@media(prefers-color-scheme:dark){text{fill:#e6eaf0}.soft{fill:#9aa7b8}.page{fill:#181e27;stroke:#2b3441}"
    ".rule{stroke:#2b3441}.c0{--c:#f0a04b}.c1{--c:#5ab4f0}.c2{--c:#3ecfa5}}"
)


def figures_of(case: str) -> dict[str, Any]:
    """Read the figures of a case."""
    return json.loads((RESULTS / f"{case}.json").read_text())["figures"]


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Write a text that starts (or ends, or has its middle) at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a thin line."""
    return f'<line class="rule" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def picture(height: int, title: str, parts: list[str]) -> str:
    """Put the parts of a figure on their ground."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 5 // 4}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(14, 24, title, "head"),
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def step_timeline() -> str:
    """One curve for each way of the same step: live bytes from its start to its end."""
    figures = figures_of("step_timeline")
    left, right, top, bottom = 46, WIDTH - 14, 92, 272
    most = 150e6
    parts = []
    for megabytes in (0, 50, 100, 150):
        y = bottom - (bottom - top) * megabytes * 1e6 / most
        parts += [rule(left, y, right, y), text(left - 8, y + 4, str(megabytes), "soft end")]
    for number, (name, row) in enumerate(figures.items()):
        curve = row["live_bytes"]
        places = " ".join(
            f"{left + (right - left) * (each + 0.5) / len(curve):.1f},{bottom - (bottom - top) * size / most:.1f}"
            for each, size in enumerate(curve)
        )
        y = 44 + 16 * number
        parts += [
            f'<polyline class="line c{number}" points="{places}"/>',
            f'<rect class="fill c{number}" x="14" y="{y - 7}" width="18" height="4"/>',
            text(38, y, f"{name}: peak {row['peak_bytes'] / 1e6:.1f} MB", "soft"),
        ]
    parts.append(text((left + right) / 2, bottom + 20, "one training step, allocation by allocation", "soft mid"))
    return picture(306, "Live bytes in one step of a 12-block transformer, MB", parts)


def chunk_loop() -> str:
    """Bars: an edge MLP's step, plain, in a loop over chunks, and with the forward of each chunk run again."""
    case = next(
        each
        for each in figures_of("edge_mlp")["cases"]
        if each["hidden"] == [128, 128, 128] and each["edges"] == 1_000_000 and each["reduce"] == "sum"
    )
    left, right = 14, WIDTH - 14
    most = max(row["peak_bytes"] for row in case["ways"].values())
    parts = []
    ways = [
        ("plain", "all edges at once", 0),
        ("loop over chunks of 4096", "loop over chunks of 4,096", 0),
        ("checkpoint per chunk of 4096", "loop, each chunk checkpointed", 1),
        ("memkit, chunks of 4096", "memkit, chunks of 4,096", 2),
    ]
    for number, (way, name, color) in enumerate(ways):
        y = 46 + 46 * number
        num_bytes = case["ways"][way]["peak_bytes"]
        width = max(2.0, (right - left) * num_bytes / most)
        parts += [
            text(left, y + 8, name),
            text(right, y + 8, f"{num_bytes / 2**20:,.1f} MiB", "end"),
            f'<rect class="fill c{color}" x="{left}" y="{y + 14}" width="{width:.1f}" height="14" rx="2"/>',
        ]
    return picture(236, "Peak of forward and backward, a million edges", parts)


def accumulation_error() -> str:
    """Dots on a logarithmic scale: each group's gradient error over one epoch."""
    figures = figures_of("accumulation_error")
    left, right, top, bottom = 58, WIDTH - 14, 76, 262
    lowest, highest = -17, 0

    def height(error: float) -> float:
        return bottom - (bottom - top) * (math.log10(error) - lowest) / (highest - lowest)

    parts = []
    for exponent in (0, -4, -8, -12, -16):
        y = height(10.0**exponent)
        parts += [rule(left, y, right, y), text(left - 6, y + 4, f"1e{exponent}" if exponent else "1", "soft end")]
    for number, (way, color) in enumerate((("loss / steps", 0), ("memkit", 2))):
        row = figures[way]
        for group, error in enumerate(row["errors"]):
            x = left + (right - left) * (group + 0.5) / len(row["errors"])
            parts.append(f'<circle class="fill c{color}" cx="{x:.1f}" cy="{height(error):.1f}" r="3"/>')
        y = 44 + 16 * number
        parts += [
            f'<circle class="fill c{color}" cx="20" cy="{y - 4}" r="4"/>',
            text(32, y, f"{way}: median {row['median']:.1e}, last group {row['last']:.1e}", "soft"),
        ]
    parts.append(text((left + right) / 2, bottom + 20, "optimizer steps of one epoch", "soft mid"))
    return picture(296, "Relative error of the accumulated gradient", parts)


FIGURES = (step_timeline, chunk_loop, accumulation_error)


if __name__ == "__main__":
    for figure in FIGURES:
        (FOLDER / f"{figure.__name__}.svg").write_text(figure(), "utf-8")
