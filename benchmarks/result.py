"""A case's result file: figures, and the environment and commit that they came from."""

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

RESULTS = Path(__file__).parent / "results"  # the committed ones
FOLDER = RESULTS  # where a case writes; `python -m benchmarks check` takes another one


def write_result(case: str, figures: dict[str, Any], *, peers: tuple[str, ...] = ()) -> Path:
    """Write ``benchmarks/results/<case>.json``.

    Args:
        case: Name of the case.
        figures: The measured figures; plain types, sizes in bytes.
        peers: Packages whose versions belong to the figures.
    """
    path = FOLDER / f"{case}.json"
    result = {"case": case, "environment": environment(peers), "figures": figures}
    write_text(path, json.dumps(result, indent=2) + "\n")
    return path


def read_result(case: str, folder: Path | None = None) -> dict[str, Any]:
    """A result file; one without figures for a case that has not run yet."""
    path = (folder or FOLDER) / f"{case}.json"
    return json.loads(path.read_text()) if path.exists() else {"environment": {"versions": {}}, "figures": {}}


def environment(peers: tuple[str, ...]) -> dict[str, Any]:
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"memkit": memkit.__version__} | {name: version_of(name) for name in ("torch", "numpy", *peers)},
    }


def commit() -> str | None:
    """The commit, "-dirty" where files differ from it; result files do not count: a run writes them."""
    found = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--", ":/", f":(exclude){RESULTS}")
    return f"{found}-dirty" if found and changed else found or None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=False, capture_output=True, text=True, cwd=RESULTS)
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """None where the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
