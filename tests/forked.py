"""Code runs in forks of a process that has imported torch already, which takes most of a short run's time."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch.multiprocessing as mp

from tests import ranks  # noqa: F401 - says what the process that is forked imports
from tests.helpers import ROOT


def run_module_forked(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module as `tests.helpers.run_module` does, where nothing depends on how the process began."""
    return _run(["-m", name, *map(str, arguments)], expected=0, environment=environment)


def run_python_forked(
    code: str, *arguments: object, expected: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code as `tests.helpers.run_python` does; the process ends with the exit code, minus the number of a signal.

    It ends as a fork does: functions registered with `atexit` are not called.
    """
    return _run(["-c", textwrap.dedent(code), *map(str, arguments)], expected=expected, environment=environment)


def _run(command: list[str], *, expected: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, each) for each in ("stdout", "stderr")]
        code = run_forked(command, cwd=ROOT, env=os.environ | environment, outputs=outputs, timeout=300)
        done = subprocess.CompletedProcess(command, code, *(each.read_text() for each in outputs))
    assert done.returncode == expected, done.stderr
    return done


def run_forked(
    arguments: list[str], *, cwd: Path, env: dict[str, str], outputs: list[Path], timeout: float | None
) -> int:
    """Run ``python -m MODULE ...`` or ``-c CODE ...``, which writes to these two files; return its exit code."""
    child = mp.get_context("forkserver").Process(target=_run_child, args=(arguments, cwd, env, outputs))
    child.start()
    child.join(timeout)
    if child.is_alive():
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(arguments, timeout or 0)
    return child.exitcode or 0


def _run_child(arguments: list[str], cwd: Path, env: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # read from the environment again
    option, program, *rest = arguments
    sys.argv, sys.path[:0] = [program if option == "-m" else option, *rest], [str(cwd)]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
