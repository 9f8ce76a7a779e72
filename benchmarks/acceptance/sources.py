"""Finds a project's repository in the folder of sources, and takes the files of its commit out of it."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks.acceptance.project import Project


def find_repository(folder: Path, project: Project) -> Path | None:
    """Find a clone, with or without a work tree, under the names that clones and mirrors have."""
    owner, name = project.repository.split("/")
    for place in (name, f"{owner}+{name}", f"{owner}+{name}/repo", project.repository, f"{name}.git"):
        path = folder / place
        if (path / ".git").exists() or (path / "objects").is_dir():
            return path
    return None


def how_to_get(project: Project) -> str:
    name = project.repository.split("/")[1]
    return f"git clone https://github.com/{project.repository} && git -C {name} checkout {project.commit}"


def extract(repository: Path, project: Project, destination: Path) -> None:
    """Write the project's files, as they are in its commit, whatever lies in a work tree."""
    command = ["git", "-C", str(repository), "archive", project.commit, "--", *project.files]
    archive = subprocess.run(command, check=False, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{project.name}: {archive.stderr.decode().strip()}\nHow to get it: {how_to_get(project)}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        # The filter came with Python 3.11.4; git's own archives have no paths that lead out.
        tar.extractall(destination, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def apply_patch(patch: Path, folder: Path) -> None:
    command = ["git", "apply", "--unidiff-zero", str(patch.resolve())]
    applied = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    if applied.returncode:
        raise SystemExit(f"{patch.name} does not apply: {applied.stderr.strip()}")
