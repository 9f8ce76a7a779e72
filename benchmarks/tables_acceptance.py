"""Tables of the acceptance kit: memkit in public training code."""

from __future__ import annotations

from typing import Any

from benchmarks.acceptance.project import all_projects
from benchmarks.markdown import table

_JOINED = "&nbsp;"  # a figure and its unit stay on one line
_SHORT = {
    "nanogpt": "logits and their loss in chunks, exact accumulation",
    "improved_diffusion": "its micro-batches, with exact weights",
    "nerf": "rays and points in chunks, backward too",
    "dcgan": "the generator's activations wait on the disk",
    "vae": "a batch in 8 parts, for a loss that is a sum",
}


def acceptance(result: dict[str, Any]) -> str:
    rows = [
        [
            f"[{name}](https://github.com/{entry['repository']}/tree/{entry['commit']})",
            _lines(entry),
            _peaks(entry["peak_bytes"]),
            f"{entry['time_ratio']:.2f}",
            _difference(entry["exactness"]["loss_difference"]),
            _difference(entry["exactness"]["state_difference"]),
            f"{entry['exactness']['dtype']}, {entry['exactness']['stated']:.0e}",
            f"{entry['exactness']['num_steps']}",
        ]
        for name, entry in result["figures"].items()
    ]
    header = [
        "project",
        "lines",
        "peak",
        "time",
        "losses differ by",
        "state differs by",
        "compared in, allowed",
        "steps",
    ]
    return table(header, rows)


def acceptance_short(result: dict[str, Any]) -> str:
    """A few for the README, one of each kind."""
    rows = [
        [
            f"[{name}](https://github.com/{entry['repository']})",
            _SHORT[name],
            _lines(entry),
            _peaks(entry["peak_bytes"]),
            f"{entry['time_ratio']:.2f}",
            _difference(entry["exactness"]["loss_difference"]),
        ]
        for name, entry in result["figures"].items()
        if name in _SHORT
    ]
    return table(["project", "what memkit does in it", "lines", "peak", "time", "losses differ by"], rows)


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


def _difference(value: float | None) -> str:
    if value is None:
        return "not alike"  # other shapes or counts
    return f"{value:.0e}" if value else "0"


def _lines(entry: dict[str, Any]) -> str:
    return f"+{entry['lines_added']}{_JOINED}-{entry['lines_removed']}"


def _peaks(peaks: dict[str, int]) -> str:
    plain, memkit = peaks["plain"], peaks["memkit"]
    return f"{plain / 1e6:.0f}{_JOINED}MB → {memkit / 1e6:.0f}{_JOINED}MB ({memkit / plain - 1:+.0%})"


RENDERERS = (acceptance, acceptance_controls, acceptance_patches, acceptance_short)
