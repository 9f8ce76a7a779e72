"""Real out-of-memory: children under a soft RLIMIT_DATA, 21 limits, each ends bit for bit as undisturbed."""

import json
from pathlib import Path

import pytest

from tests.helpers import run_module, run_python

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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Requires: [Linux]")
def test_parts_fit_in_a_limited_address_space_with_glibc_as_it_comes():
    """Freed blocks once stayed in the heap, in pieces too small for the next part, down to parts of a few rows."""
    done = run_python("""
        import resource
        import torch
        import memkit as mk

        torch.set_num_threads(1)
        x, y = torch.randn(200_000, 8), torch.randn(200_000, 4)
        loss_fn = lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])
        net = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Tanh(), torch.nn.Linear(128, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss_fn(net, (x[:8], y[:8])).backward()
        optimizer.zero_grad()
        trainer = mk.MemoryEfficientTrainingWrapper(net, optimizer)
        room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 50 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        sizes = trainer.train_step((x, y), loss_fn).sizes
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(max(sizes), sum(sizes))
        """).stdout
    largest, total = map(int, done.split())
    assert total == 200_000
    assert largest > 4000
