"""SIGKILL at random instants: see `state_worker`. The temporary directory is on another file system."""

import json
from pathlib import Path

import pytest

from tests.helpers import run_module

OTHER_FILE_SYSTEM = Path("/dev/shm")


@pytest.mark.parametrize("num_kills", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_kills(tmp_path, num_kills):
    """No state that cannot be read, nothing left over, and all weights those of a training that nobody stopped."""
    temporary = OTHER_FILE_SYSTEM if OTHER_FILE_SYSTEM.is_dir() else tmp_path
    before = set(temporary.iterdir())
    done = run_module("tests.recipes.state_worker", tmp_path, num_kills, 1, TMPDIR=str(temporary))
    result = json.loads(done.stdout)
    assert result["kills"] == num_kills
    assert result["kills_in_save"] > num_kills // 4
    assert result["unreadable"] == 0
    assert result["lost_saves"] == 0
    assert result["other_weights"] == 0
    last = result["steps"]
    assert [name.split("-step-")[1] for name in result["entries_after_last_save"]] == [str(last - 1), str(last)]
    assert {path for path in set(temporary.iterdir()) - before if "memkit" in path.name} == set()
