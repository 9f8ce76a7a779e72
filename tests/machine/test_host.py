"""Cores and shared memory as containers limit them, read from made-up file systems."""

import os

import pytest

from memkit._machine import host
from tests.machine.test_devices import write


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "90000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_usable_cores(tmp_path, files, limit):
    there = len(os.sched_getaffinity(0))
    assert host.usable_cores(write(tmp_path, files)) == min(there, limit or there)


def test_missing_shared_memory_is_not_zero(tmp_path):
    assert host.shared_memory_free_bytes(tmp_path / "none") is None
    assert host.shared_memory_free_bytes(tmp_path) > 0
