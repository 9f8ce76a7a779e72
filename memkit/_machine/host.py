"""Host resources other than memory: CPU cores and shared memory."""

from __future__ import annotations

import math
import os
import shutil
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
    quotas = [quota for level in _cgroup_folders(root) if (quota := _quota(level)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the free bytes of the shared memory through which DataLoader workers pass batches; None if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the CPU cgroup of this process and all its parents, in both versions."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = mount / path.lstrip("/")
        folders += [level for level in (folder, *folder.parents) if level.is_relative_to(mount)]
    return folders


def _quota(folder: Path) -> float | None:
    """Return the cores that one cgroup allows; None without a limit."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
