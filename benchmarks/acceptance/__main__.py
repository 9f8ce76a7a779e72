"""Puts memkit into public training code and compares: python -m benchmarks.acceptance --sources FOLDER [PROJECT ...]

FOLDER holds clones or mirrors of the projects' repositories, as NAME or OWNER+NAME. A project without sources is
skipped. The entries of the projects that ran are written to benchmarks/results/acceptance.json; the others stay.
--list says which projects there are and how to get them. One project takes one to three minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.acceptance.compare import measure
from benchmarks.acceptance.project import Project, all_projects
from benchmarks.acceptance.sources import find_repository, how_to_get
from benchmarks.result import environment, read_result, write_result


def run_project(folder: Path, project: Project) -> bool:
    """Measure a project and write its entry; False where its curves are not equal."""
    repository = find_repository(folder, project)
    if repository is None:
        print(f"{project.name}: skipped, no sources. How to get them: {how_to_get(project)}")
        return True
    entry = measure(repository, project) | {"environment": environment(project.peers)}
    figures = read_result("acceptance")["figures"] | {project.name: entry}
    write_result("acceptance", dict(sorted(figures.items())))
    peaks = entry["peak_bytes"]
    print(
        f"{project.name}: {entry['lines_added']} lines, exactness {entry['exactness']}, "
        f"peak {peaks['plain'] / 1e6:.1f} MB -> {peaks['memkit'] / 1e6:.1f} MB, time x{entry['time_ratio']:.2f}"
    )
    return bool(entry["exactness"]["is_equal"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("projects", nargs="*", help="names; all of them when there are none")
    parser.add_argument("--sources", type=Path, help="folder with the repositories")
    parser.add_argument("--list", action="store_true", help="list the projects and how to get them")
    arguments = parser.parse_args()
    projects = all_projects()
    if unknown := set(arguments.projects) - set(projects):
        parser.error(f"no such project: {', '.join(sorted(unknown))}; there are {', '.join(projects)}")
    if arguments.list:
        for project in projects.values():
            print(f"{project.name}: {project.shows}\n    {how_to_get(project)}")
        return
    if arguments.sources is None:
        parser.error("--sources FOLDER is needed")
    chosen = [project for name, project in projects.items() if name in (arguments.projects or projects)]
    unequal = [project.name for project in chosen if not run_project(arguments.sources, project)]
    if unequal:
        sys.exit(f"not equal within what the project states: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
