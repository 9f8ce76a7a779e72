"""SIGKILL at random instants: see `state_worker`. The temporary directory is on another file system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_FILE_SYSTEM = Path("/dev/shm")


@pytest.mark.parametrize("num_kills", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_kills(tmp_path, num_kills):
    """No state that cannot be read, nothing left over, and all weights those of a training that nobody stopped."""
    command = [sys.executable, "-m", "tests.recipes.state_worker", str(tmp_path), str(num_kills), "1"]
    temporary = OTHER_FILE_SYSTEM if OTHER_FILE_SYSTEM.is_dir() else tmp_path
    before = set(temporary.iterdir())
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env=environment
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == num_kills
    assert result["kills_in_save"] > num_kills // 4
    assert result["unreadable"] == 0
    assert result["lost_saves"] == 0
    assert result["other_weights"] == 0
    last = result["steps"]
    assert [name.split("-step-")[1] for name in result["entries_after_last_save"]] == [str(last - 1), str(last)]
    assert {path for path in set(temporary.iterdir()) - before if "memkit" in path.name} == set()
