"""The acceptance kit: small patches, equal curves on file for every project, and a runner that sees a difference."""

import ast
import json
import re
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
import torch

from benchmarks.acceptance.compare import Run, describe, differences, judge, make_copy, measure, run
from benchmarks.acceptance.project import PATCHES, Project, all_projects, count_lines
from benchmarks.acceptance.sources import find_repository

PROJECTS = all_projects()
RESULTS = json.loads((Path(__file__).parents[1] / "benchmarks/results/acceptance.json").read_text())["figures"]
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(40, 6), torch.randn(40, 1)
for _ in range(100):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item()!r}")
"""


def make_project(**changes):
    values = {
        "name": "ours",
        "repository": "nobody/ours",
        "commit": "main",
        "licence": "",
        "files": ("train.py",),
        "folder": ".",
        "command": ("train.py",),
        "num_steps": 4,
        "loss": r"loss (\S+)",
        "prepare": lambda copy: None,
        "data": "",
        "shows": "",
    }
    return Project(**values | changes)


def write_script(root, script):
    root.mkdir()
    (root / "train.py").write_text(script)
    return root


def commit_script(root, script):
    write_script(root, script)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    return root


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.diff")), ids=lambda path: path.stem)
def test_patches_add_ten_lines_without_context(patch):
    text = patch.read_text()
    assert 0 < count_lines(text)[0] <= 10
    assert all(re.match(r"--- a/|\+\+\+ b/|@@ -\S+ \+\S+ @@$|[+-]", line) for line in text.splitlines())
    assert patch.name.split(".")[0] in PROJECTS


@pytest.mark.parametrize("path", sorted((PATCHES.parent / "projects").glob("*.py")), ids=lambda path: path.stem)
def test_listing_projects_needs_no_packages(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"benchmarks", "numpy", "torch"}


def test_lines_are_counted_without_the_headers():
    first = "--- a/f.py\n+++ b/f.py\n@@ -1 +1,3 @@\n-old\n+new\n+\n+++counter\n"
    second = "--- a/g.py\n+++ b/g.py\n@@ -2 +1,0 @@\n--flag\n"
    assert count_lines(first + second) == (3, 2)


def test_projects_have_equal_curves_and_ten_smaller_peaks():
    assert RESULTS.keys() == PROJECTS.keys()
    smaller = {name for name, entry in RESULTS.items() if entry["peak_bytes"]["memkit"] < entry["peak_bytes"]["plain"]}
    assert len(smaller) >= 10
    for name, entry in RESULTS.items():
        project = PROJECTS[name]
        assert {key: entry[key] for key in describe(project)} == describe(project)
        assert entry["exactness"]["num_steps"] == project.num_steps, name
        assert entry["exactness"]["stated"] == project.exactness, name
        assert max(entry["exactness"]["loss_difference"], entry["exactness"]["state_difference"]) <= project.exactness
        assert ("control" in entry) == bool(project.control) == project.control_patch.exists(), name
        if project.control:
            difference = entry["control"]["state_difference"]  # None: not even alike
            assert difference is None or difference > 1000 * project.exactness, name
        assert name in smaller or project.failed != "nothing"  # what saved nothing says so on the page
        assert entry["time_ratio"] > 0


@pytest.mark.slow
def test_detects_differences_in_losses_parameters_and_statistics(tmp_path):
    project = make_project()
    plain = run(project, write_script(tmp_path / "plain", SCRIPT), "state", "float64")
    assert len(plain.losses) == 4  # the run was ended after the fourth step, and its loss was printed
    start, end = plain.states
    assert len(start) == len(end) == 9  # the statistics of BatchNorm too
    assert judge(project, plain, plain)["is_equal"]

    assert end[-1].dtype == torch.float64
    moved = [value.clone() for value in end]
    moved[-1] += 1e-8
    steps = differences(plain, Run(plain.figures, plain.losses, [start, moved]))
    assert steps["loss_difference"] == 0
    assert 1e-10 < steps["state_difference"] < 1e-6
    counted = [value + 1 if value.dtype == torch.int64 else value for value in end]  # of batches
    assert differences(plain, Run(plain.figures, plain.losses, [start, counted]))["state_difference"] == float("inf")
    shorter = Run(plain.figures, plain.losses[:-1], plain.states)
    assert differences(plain, shorter) == {"loss_difference": float("inf"), "state_difference": 0}
    assert not judge(project, plain, shorter)["is_equal"]


@pytest.mark.slow
def test_peak_is_the_allocators_from_the_start(tmp_path):
    kept = "import torch\nkept = torch.zeros(10_000_000)\n" + SCRIPT
    figures = run(make_project(), write_script(tmp_path / "kept", kept), "peak", "float32").figures
    assert 40_000_000 < figures["warm_peak_bytes"] <= figures["peak_bytes"] < 40_200_000
    assert figures["num_steps"] == 4


def test_copies_commit_and_patches_before_preparing(tmp_path):
    source = commit_script(tmp_path / "ours", "x = 1\ny = 2\n")
    (source / "train.py").write_text("an edit that is not committed")
    patch = tmp_path / "ours.diff"
    patch.write_text("--- a/train.py\n+++ b/train.py\n@@ -2 +2 @@\n-y = 2\n+y = 3\n")
    project = make_project(prepare=lambda copy: copy.replace("train.py", "y =", "z =", "another name"))
    assert find_repository(tmp_path, project) == source
    assert make_copy(source, project, tmp_path / "copy", patch) == ["train.py: another name"]
    assert (tmp_path / "copy/train.py").read_text() == "x = 1\nz = 3\n"
    assert find_repository(tmp_path / "copy", project) is None
    patch.write_text(patch.read_text().replace("-y = 2", "-y = 4"))
    with pytest.raises(SystemExit, match=r"ours.diff does not apply: .*train.py"):
        make_copy(source, project, tmp_path / "other", patch)


@pytest.mark.slow
def test_a_project_is_measured_from_its_patch_to_its_time(tmp_path, monkeypatch):
    source = commit_script(tmp_path / "ours", SCRIPT)
    patched = SCRIPT.replace("import torch\n", "import memkit as mk\nimport torch\n")
    patched = patched.replace("optimizer.zero_grad()", "accumulator = mk.GradientAccumulator(optimizer)")
    patched = patched.replace("loss.backward()", "accumulator.backward(loss)")
    patched = patched.replace("optimizer.step()", "accumulator.step()")
    wrong = SCRIPT.replace("loss.backward()", "(loss / 2).backward()")
    for name, text in (("ours.diff", patched), ("ours.control.diff", wrong)):
        lines = unified_diff(
            SCRIPT.splitlines(keepends=True), text.splitlines(keepends=True), "a/train.py", "b/train.py", n=0
        )
        (tmp_path / name).write_text("".join(lines))
    monkeypatch.setattr("benchmarks.acceptance.project.PATCHES", tmp_path)
    entry = measure(source, make_project(control="half of the gradient"))
    assert (entry["lines_added"], entry["lines_removed"]) == (4, 3)
    assert entry["exactness"]["is_equal"]
    assert entry["exactness"]["num_steps"] == 4
    assert entry["control"]["state_difference"] > 1e-9  # Adam nearly hides it
    assert entry["losses"]["plain"] == entry["losses"]["memkit"]
    assert entry["peak_bytes"].keys() == {"plain", "memkit"}
    assert all(len(seconds) == 3 for seconds in entry["cpu_seconds"].values())
