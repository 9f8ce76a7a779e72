"""Modules run in forks of a process that has imported torch already, which takes most of a short run's time."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.multiprocessing as mp

from tests import ranks  # noqa: F401 - says what the process that is forked imports
from tests.helpers import ROOT


def run_module_forked(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module as `tests.helpers.run_module` does, where nothing depends on how the process began."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, each) for each in ("stdout", "stderr")]
        command = [name, *map(str, arguments)]
        code = run_forked(command, cwd=ROOT, env=os.environ | environment, outputs=outputs, timeout=300)
        done = subprocess.CompletedProcess(command, code, *(each.read_text() for each in outputs))
    assert done.returncode == 0, done.stderr
    return done


def run_forked(
    arguments: list[str], *, cwd: Path, env: dict[str, str], outputs: list[Path], timeout: float | None
) -> int:
    """Run ``python -m MODULE ...``, which writes to these two files; return its exit code."""
    child = mp.get_context("forkserver").Process(target=_run_module, args=(arguments, cwd, env, outputs))
    child.start()
    child.join(timeout)
    if child.is_alive():
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(arguments, timeout or 0)
    return child.exitcode or 0


def _run_module(arguments: list[str], cwd: Path, env: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # read from the environment again
    sys.argv, sys.path[:0] = arguments, [str(cwd)]
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
