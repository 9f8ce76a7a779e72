"""Host resources other than memory: CPU cores and shared memory; and the cgroups that limit a process."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use: its affinity, and the container's quota (cgroup v1 and v2).

    Args:
        root: The file system root whose ``/proc`` and ``/sys`` are read; tests use another one.

    Returns:
        Whole cores, at least one; a quota of 1.5 cores counts as 2.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for level, _ in cgroups(root, "cpu") if (quota := _quota(level)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the free bytes of the shared memory through which DataLoader workers pass batches; None if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def cgroups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the version (1 or 2) of this process's cgroup of a controller, then those of its parents."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        # Inside a container the path can be the host's: then only the mount itself can be read.
        for level in (folder, *folder.parents):
            if level.is_relative_to(mount):
                yield level, 1 if controllers else 2


def _quota(folder: Path) -> float | None:
    """Return the cores that one cgroup allows; None without a limit."""
    words = read_text(folder / "cpu.max").split()
    if not words:
        words = [read_text(folder / "cpu.cfs_quota_us").strip(), read_text(folder / "cpu.cfs_period_us").strip()]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
