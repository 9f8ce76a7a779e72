"""Write a case's result file: figures, and the environment and commit that they came from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import memkit
from memkit._machine.files import write_text

FOLDER = Path(__file__).parent / "results"


def write_result(case: str, figures: dict[str, Any], *, peers: tuple[str, ...] = ()) -> Path:
    """Write ``benchmarks/results/<case>.json``.

    Args:
        case: Name of the case.
        figures: What was measured; plain types, sizes in bytes.
        peers: Packages whose versions belong to the figures.
    """
    path = FOLDER / f"{case}.json"
    result = {"case": case, "environment": environment(peers), "figures": figures}
    write_text(path, json.dumps(result, indent=2) + "\n")
    return path


def environment(peers: tuple[str, ...]) -> dict[str, Any]:
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"memkit": memkit.__version__} | {name: _version(name) for name in ("torch", "numpy", *peers)},
    }


def _commit() -> str | None:
    """The commit, "-dirty" where files differ from it; result files do not count: a run writes them."""
    commit = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--", ":/", f":(exclude){FOLDER}")
    return f"{commit}-dirty" if commit and changed else commit or None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=False, capture_output=True, text=True, cwd=FOLDER)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
