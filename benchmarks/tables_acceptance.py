"""Tables of the acceptance kit: memkit in public training code."""

from __future__ import annotations

from typing import Any

from benchmarks.acceptance.project import all_projects
from benchmarks.markdown import table


def acceptance(result: dict[str, Any]) -> str:
    rows = [
        [
            f"[{name}](https://github.com/{entry['repository']}/tree/{entry['commit']})",
            f"+{entry['lines_added']} -{entry['lines_removed']}",
            f"{entry['exactness']['num_steps']}",
            _difference(entry["exactness"]["loss_difference"]),
            _difference(entry["exactness"]["state_difference"]),
            f"{entry['exactness']['dtype']}, {entry['exactness']['stated']:.0e}",
            _peaks(entry["peak_bytes"]),
            f"{entry['time_ratio']:.2f}",
        ]
        for name, entry in result["figures"].items()
    ]
    header = [
        "project",
        "lines",
        "steps",
        "losses differ by",
        "state differs by",
        "compared in, allowed",
        "peak",
        "time",
    ]
    return table(header, rows)


def acceptance_patches(result: dict[str, Any]) -> str:
    chosen = [project for name, project in all_projects().items() if name in result["figures"]]
    rows = [[project.name, project.shows, project.data, project.failed] for project in chosen]
    return table(["project", "what memkit does in it", "trained on", "what failed"], rows)


def acceptance_controls(result: dict[str, Any]) -> str:
    rows = [
        [
            project.name,
            project.control or "",
            _difference(result["figures"][project.name]["control"]["loss_difference"]),
            _difference(result["figures"][project.name]["control"]["state_difference"]),
        ]
        for project in all_projects().values()
        if "control" in result["figures"].get(project.name, {})
    ]
    return table(["project", "wrong on purpose", "losses differ by", "state differs by"], rows)


def _difference(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _peaks(peaks: dict[str, int]) -> str:
    plain, memkit = peaks["plain"], peaks["memkit"]
    return f"{plain / 1e6:.0f} MB → {memkit / 1e6:.0f} MB ({memkit / plain - 1:+.0%})"


RENDERERS = (acceptance, acceptance_controls, acceptance_patches)
