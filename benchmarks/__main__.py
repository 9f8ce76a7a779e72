"""Remake the result files and every table, or check the committed counters: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import check_page, tables
from benchmarks.catalog import CASES, SOURCES
from benchmarks.counters import Figure, counters_of, differences
from benchmarks.gpu import command as gpu_command
from benchmarks.result import RESULTS, read_result, version_of
from benchmarks.tables import ROOT

OWN = {"memkit", "torch", "numpy"}
# What a child runs: a case whose result file goes into another folder.
CHILD = """
import runpy, sys
from pathlib import Path
from benchmarks import result
result.FOLDER = Path(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases: minutes, counters, peers, what they need")
    for name, text in (
        ("run", "run cases, write their result files, and remake every table of the docs"),
        ("check", "run cases, write nothing, and compare their counters with the committed ones"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("cases", nargs="*", metavar="CASE")
        command.add_argument("--all", action="store_true", help="every case")
        command.add_argument("--quick", action="store_true", help="every case of a minute or less")
        command.add_argument("--sources", type=Path, help="folder of public code, each repository as OWNER+NAME")
    gpu_command.add_to(commands.add_parser("gpu", help="the proof on this machine's GPU: docs/virtual-gpu-proof.md"))
    given = parser.parse_args(arguments)
    if given.command == "gpu":
        return gpu_command.run(given)
    if given.command == "list":
        print(listing())
        return 0
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; `list` has their names")
    names = [name for name in CASES if name in given.cases or given.all or (given.quick and CASES[name].is_quick)]
    if not names:
        parser.error("name cases, or say --quick or --all")
    if given.command == "check":
        return sum(not check(name, given.sources) for name in names) > 0
    failed = [name for name in sorted(names, key=lambda name: CASES[name].minutes) if not run(name, given.sources)]
    tables.main()
    check_page.PAGE.write_text(check_page.render(check_page.PAGE.read_text()))
    if failed:
        print(f"failed: {', '.join(failed)}; their tables are those of the result files that were there")
    return bool(failed)


def listing() -> str:
    lines = []
    for name, case in CASES.items():
        what = (ast.get_docstring(ast.parse(source_of(name).read_text())) or "").partition("\n")[0]
        needs = "".join(f"; {each}" for each in (", ".join(peers(name)), case.needs) if each)
        lines.append(f"{name:22} {case.minutes:4g} min  {num_counters(name):4} counters{needs}\n    {what}")
    return "\n".join(lines)


def source_of(name: str) -> Path:
    """The file that `python -m` runs."""
    path = ROOT.joinpath(*module_of(name).split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(name: str) -> str:
    return CASES[name].module or f"benchmarks.cases.{name}"


def run(name: str, sources: Path | None) -> bool:
    """Write a case's result file; say how it went."""
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    problem = run_into(RESULTS, name, sources)
    print(f"{name}: {problem or f'{(time.monotonic() - start) / 60:.1f} minutes'}", flush=True)
    return problem is None


def check(name: str, sources: Path | None) -> bool:
    """Run a case and compare its counters; say what differs."""
    if not CASES[name].counters:
        print(f"{name}: times only, not run")
        return True
    with tempfile.TemporaryDirectory() as folder:
        problem = run_into(Path(folder), name, sources)
        lines = [] if problem else compare(name, Path(folder), RESULTS)
    if problem:
        print(f"{name}: {problem}", flush=True)
        return False
    print(f"{name}: {len(lines)} of {num_counters(name)} counters differ", *lines, sep="\n    ", flush=True)
    return not lines


def run_into(folder: Path, name: str, sources: Path | None = None) -> str | None:
    """Run a case in its own process, its result file in a folder; what went wrong, in words."""
    case = CASES[name]
    if absent := [peer for peer in peers(name) if not version_of(peer)]:
        return f"needs {', '.join(absent)}"
    if case.takes_sources and sources is None:
        return f"needs {case.needs}: --sources FOLDER"
    arguments = [str(sources and sources.resolve()) if each == SOURCES else each for each in case.arguments]
    command = [sys.executable, "-c", CHILD, str(folder), module_of(name), *arguments]
    environment = os.environ | {"KINETO_LOG_LEVEL": "6"} | case.environment  # no line of the profiler for each profile
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        return "\n    ".join([f"failed with exit code {done.returncode}", *done.stderr.splitlines()[-8:]])
    return None


def compare(name: str, found: Path, expected: Path) -> list[str]:
    """A line for each counter that differs between the result files of two folders."""
    before, now = (
        counters_of(read_result(name, folder)["figures"], CASES[name].counters) for folder in (expected, found)
    )
    return differences(before, now)


def counters_in(name: str, folder: Path) -> dict[str, Figure]:
    return counters_of(read_result(name, folder)["figures"], CASES[name].counters)


def num_counters(name: str) -> int:
    return len(counters_in(name, RESULTS))


def peers(name: str) -> list[str]:
    """The packages besides memkit's own whose versions the committed file names."""
    return [package for package in read_result(name)["environment"]["versions"] if package not in OWN]


if __name__ == "__main__":
    sys.exit(main())
