"""Runs a project plain and with memkit, each in processes of its own, and compares curves, states, peaks and times."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.acceptance.project import FOLDER, Copy, Project, count_lines
from benchmarks.acceptance.sources import apply_patch, extract

ROOT = FOLDER.parents[1]
ROUNDS = 3  # of the timing, plain and memkit in turn


@dataclass
class Run:
    """Results of one run of a script."""

    figures: dict[str, Any]
    losses: list[float]
    states: list[list[Tensor]]  # before the first step and after the last; empty unless they were asked for


def run(project: Project, root: Path, what: str, dtype: str) -> Run:
    """Run the project's script in a copy; see runner.py for what is recorded."""
    record = root.parent / f"{root.name}-{what}"
    runner = [sys.executable, str(FOLDER / "runner.py"), str(record), what, dtype, str(project.num_steps)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    ran = subprocess.run(
        [*runner, *project.command],
        check=False,
        capture_output=True,
        text=True,
        cwd=root / project.folder,
        env=environment,
    )
    if ran.returncode:
        ended = f"{project.name}, {root.name}, {what}: ended with {ran.returncode}"
        raise SystemExit(f"{ended}\n{ran.stdout[-1000:]}\n{ran.stderr[-4000:]}")
    found = re.findall(project.loss, ran.stdout)
    losses = [float(number) for match in found for number in (match if isinstance(match, tuple) else (match,))]
    assert losses, f"{project.name}: the script prints nothing that {project.loss!r} finds:\n{ran.stdout[-1000:]}"
    states = torch.load(f"{record}.pt", weights_only=True) if what == "state" else []
    return Run(json.loads(Path(f"{record}.json").read_text()), losses, states)


def loss_difference(plain: Run, other: Run) -> float:
    """The largest relative difference of two curves; infinite where they are not of the same length."""
    if len(plain.losses) != len(other.losses):
        return float("inf")
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(plain.losses, other.losses, strict=True))


def state_difference(plain: Run, other: Run) -> float:
    """How far two trained states lie apart, relative to how far training moved the plain one from its start."""
    start, end = plain.states
    if [value.shape for value in end] != [value.shape for value in other.states[1]]:
        return float("inf")
    if any(not torch.equal(a, b) for a, b in zip(end, other.states[1], strict=True) if not a.is_floating_point()):
        return float("inf")
    return _distance(end, other.states[1]) / _distance(start, end)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x.is_floating_point()]
    return float(torch.stack([(x - y).square().sum() for x, y in pairs]).sum().sqrt())


def differences(plain: Run, other: Run) -> dict[str, float]:
    return {"loss_difference": loss_difference(plain, other), "state_difference": state_difference(plain, other)}


def make_copy(repository: Path, project: Project, root: Path, patch: Path | None) -> list[str]:
    """Take the files, patch them as a user would patch a clone, and prepare them; return what was prepared."""
    extract(repository, project, root)
    if patch:
        apply_patch(patch, root)
    copy = Copy(root)
    project.prepare(copy)
    return copy.changes


def measure(repository: Path, project: Project) -> dict[str, Any]:
    """Everything that the result file says of one project."""
    with tempfile.TemporaryDirectory() as folder:
        roots = {name: Path(folder) / name for name in ("plain", "memkit")}
        changes = make_copy(repository, project, roots["plain"], None)
        make_copy(repository, project, roots["memkit"], project.patch)
        exact = {name: run(project, root, "state", project.dtype) for name, root in roots.items()}
        metered = {name: run(project, root, "peak", "float32") for name, root in roots.items()}
        timed = [{name: run(project, root, "time", "float32") for name, root in roots.items()} for _ in range(ROUNDS)]
        result = describe(project) | {"changed_to_run_here": changes}
        result["exactness"] = judge(project, exact["plain"], exact["memkit"])
        if project.control:
            control = Path(folder) / "control"
            make_copy(repository, project, control, project.control_patch)
            wrong = run(project, control, "state", project.dtype)
            found = differences(exact["plain"], wrong)
            result["control"] = {name: value if math.isfinite(value) else None for name, value in found.items()}
    seconds = {name: [round_[name].figures["cpu_seconds"] for round_ in timed] for name in roots}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return result | {
        "losses": {name: metered[name].losses for name in roots},
        "float32_loss_difference": loss_difference(metered["plain"], metered["memkit"]),
        "peak_bytes": {name: metered[name].figures["peak_bytes"] for name in roots},
        "warm_peak_bytes": {name: metered[name].figures["warm_peak_bytes"] for name in roots},
        "cpu_seconds": seconds,
        "time_ratio": medians["memkit"] / medians["plain"],
    }


def describe(project: Project) -> dict[str, Any]:
    added, removed = count_lines(project.patch.read_text())
    return {
        "repository": project.repository,
        "commit": project.commit,
        "command": " ".join(("python", *project.command)),
        "lines_added": added,
        "lines_removed": removed,
    }


def judge(project: Project, plain: Run, memkit: Run) -> dict[str, Any]:
    found = differences(plain, memkit)
    steps = plain.figures["num_steps"], memkit.figures["num_steps"]
    is_equal = steps[0] == steps[1] and all(value <= project.exactness for value in found.values())
    return {"dtype": project.dtype, "num_steps": steps[0], "stated": project.exactness} | found | {"is_equal": is_equal}
