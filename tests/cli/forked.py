"""The process of `memkit dryrun` as a fork; see `tests.forked`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.forked import run_forked


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
    _, *arguments = command
    assert arguments[0] == "-m"
    outputs = [Path(json.loads(arguments[-1])["folder"], name) for name in ("stdout", "stderr")]
    code = run_forked(arguments, cwd=cwd, env=env, outputs=outputs, timeout=timeout)
    for path, to in zip(outputs, (stdout, 2 if stderr is None else stderr), strict=True):
        if to != subprocess.DEVNULL:
            os.write(to, path.read_bytes())
    return subprocess.CompletedProcess(command, code)
