"""Real out-of-memory: children under a soft RLIMIT_DATA, 21 limits, each ends bit for bit as undisturbed."""

import json
from pathlib import Path

import pytest

from tests.helpers import run_module

HEADROOMS = {"mlp": [20, 24, 32, 40, 48, 56, 64], "conv": [14, 16, 18, 20, 22, 26, 30],
             "transformer": [16, 20, 24, 32, 40, 48, 60]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Requires: [Linux]")
@pytest.mark.parametrize("name", HEADROOMS)
def test_survives_and_equals_the_undisturbed_run(name):
    chosen = HEADROOMS[name]
    # Every tensor above 64 KiB is its own mapping, given back when it is freed: a limit means what it says.
    done = run_module("tests.train.limit_child", name, *chosen, MALLOC_MMAP_THRESHOLD_="65536")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(chosen)
    for row in rows:
        assert row["plain_dies"], row
        assert row["num_ooms"] > 0, row
        assert row["is_same"], row
        assert [sum(parts) for parts in row["sizes"]] == [256, 256]
