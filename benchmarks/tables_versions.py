"""Tables of `torch_versions`: what passed on each version of PyTorch, what was skipped, where peaks differ."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from benchmarks.markdown import table

REFERENCE = "2.13.0"


def torch_versions(result: dict[str, Any]) -> str:
    rows = [
        [
            version,
            row["build"],
            row["commit"],
            row["python"],
            f"{row['num_passed']:,}",
            str(len(row["skipped"])),
            str(len(only_here(result["figures"], version))),
            str(len(row["failed"])),
        ]
        for version, row in result["figures"].items()
    ]
    return table(["version", "build", "commit", "Python", "passed", "skipped", "... for this version", "failed"], rows)


def only_here(figures: dict[str, Any], version: str) -> dict[str, str]:
    """What a version skips and the one that CI runs does not."""
    usual = figures.get(REFERENCE, {"skipped": {}})["skipped"]
    return {name: reason for name, reason in figures[version]["skipped"].items() if name not in usual}


def torch_versions_skipped(result: dict[str, Any]) -> str:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for version in result["figures"]:
        for reason in only_here(result["figures"], version).values():
            lack = re.sub(r"^PyTorch has no ", "", re.sub(r"^Skipped: ", "", reason)).partition(" (")[0]
            found[lack][version] = found[lack].get(version, 0) + 1
    rows = [
        [f"`{lack}`", ", ".join(f"{version} ({count})" for version, count in by_version.items())]
        for lack, by_version in sorted(found.items())
    ]
    return table(["what is missing", "versions (tests)"], rows) if rows else "None.\n"


def torch_versions_peaks(result: dict[str, Any]) -> str:
    figures = result["figures"]
    rows = []
    for place in ("cpu", "RTX 4090"):
        names = {name for row in figures.values() for name in row["peak_bytes"][place]}
        for name in sorted(names):
            of = {version: row["peak_bytes"][place].get(name) for version, row in figures.items()}
            if len(set(of.values())) > 1:
                rows.append(
                    [name, place, *(f"{each:,}" if isinstance(each, int) else str(each) for each in of.values())]
                )
    if not rows:
        return "None differs.\n"
    return table(["model", "on", *figures], rows)


RENDERERS = (torch_versions, torch_versions_skipped, torch_versions_peaks)
