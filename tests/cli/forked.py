"""The process of `memkit dryrun` as a fork of one that has imported torch already, which takes most of a run's time."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.multiprocessing as mp

from tests import ranks  # noqa: F401 - says what the process that is forked imports


def run(
    command: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    stdout: int,
    stderr: int | None,
    timeout: float | None,
    check: bool,
) -> subprocess.CompletedProcess[bytes]:
    """Stand in for `subprocess.run` of ``python -m MODULE ORDER``."""
    _, option, *arguments = command
    assert option == "-m"
    outputs = [Path(json.loads(arguments[-1])["folder"], name) for name in ("stdout", "stderr")]
    child = mp.get_context("forkserver").Process(target=_run_module, args=(arguments, cwd, env, outputs))
    child.start()
    child.join(timeout)
    if child.is_alive():
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(command, timeout or 0)
    for path, to in zip(outputs, (stdout, 2 if stderr is None else stderr), strict=True):
        if to != subprocess.DEVNULL:
            os.write(to, path.read_bytes())
    return subprocess.CompletedProcess(command, child.exitcode or 0)


def _run_module(arguments: list[str], cwd: Path, env: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # read from the environment again
    sys.argv, sys.path[:0] = arguments, [str(cwd)]
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
