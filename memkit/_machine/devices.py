"""The single interface to the machine: accelerators through torch, host memory through psutil, /proc and cgroups."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import pickle
import platform
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from memkit._core.errors import ConfigError
from memkit._core.records import DeviceMemory, HostMemory
from memkit._machine.host import cgroups, read_text
from memkit._torch import machine

if sys.platform == "win32":

    def _read_usage() -> Any:
        return SimpleNamespace(ru_maxrss=psutil.Process().memory_info().peak_wset)
else:
    import resource

    # On Linux, a thread's counter gives the process's peak too, and is quicker: it skips every other thread.
    _read_usage = partial(
        resource.getrusage, resource.RUSAGE_THREAD if sys.platform == "linux" else resource.RUSAGE_SELF
    )

_PRESSURE = 0.1  # a device or host with less than this share free is under memory pressure
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 2**17  # glibc's number of the option, and the value it starts with
_WITHOUT_PEAK = frozenset({"cpu", "meta", "mps"})
USAGE_UNIT = 1 if sys.platform in ("darwin", "win32") else 1024
"""Bytes per unit of ``ru_maxrss``."""
_CGROUP_FILES = {  # by version: limit, use, and the key of the reclaimable cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_CGROUP_V1_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a huge page-aligned number


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Resolve ``"auto"``, a device name or a device to an available device.

    Args:
        device: ``"auto"`` selects the accelerator of this machine, or the CPU if there is none.

    Returns:
        The device; an accelerator without an index gets the current one.

    Raises:
        ConfigError: The name is not a device, or this machine does not have it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = {"cpu": math.inf, "meta": math.inf}  # number of devices
    if accelerator:
        there[accelerator.type] = torch.accelerator.device_count()
    resolved = (accelerator or torch.device("cpu")) if device == "auto" else _parse_device(device)
    if resolved is None or (resolved.index or 0) >= there.get(resolved.type, 0):
        names = ", ".join(name if math.isinf(count) else f"{name} ({count:.0f})" for name, count in there.items())
        shown = _shown(device)
        raise ConfigError(
            f"device={shown}",
            got=shown,
            expected=f"'auto' or a device of this machine: {names}",
            fix=_what_was_meant(device, resolved),
        )
    index: int | None = resolved.index  # torch's own stub forgets the None
    if index is None and accelerator and resolved.type == accelerator.type:
        return torch.device(resolved.type, torch.accelerator.current_device_index())
    return resolved


def _shown(device: object) -> str:
    return repr(device) if isinstance(device, (str, torch.device)) else f"a {type(device).__name__}"


def _what_was_meant(device: object, resolved: torch.device | None) -> str:
    if isinstance(device, str) and device.lower() in {"gpu", "nvidia"}:
        return "pass device='cuda', or device='auto' for the accelerator of this machine if it has one."
    if resolved is None:
        return "pass device='auto', or the name of a device such as 'cpu' or 'cuda:0'."
    return "pass device='auto', or run on a machine that has this device."


def _parse_device(device: str | torch.device) -> torch.device | None:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # ValueError: a number beyond 64 bits
        return None


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread launches work on an accelerator."""
    return torch.accelerator.current_stream(device)


def device_memory(device: torch.device) -> DeviceMemory:
    """Read the allocator and driver counters of an accelerator; all None for the CPU, which has no counters."""
    counters = allocator_counters(device)
    if device.type in _WITHOUT_PEAK:
        return counters
    free_bytes, total_bytes = machine.memory_info(device)
    return replace(counters, free_bytes=free_bytes, total_bytes=total_bytes)


def allocator_counters(device: torch.device) -> DeviceMemory:
    """Read only the allocator's counters, without querying the driver: cheap, and without device synchronization."""
    if device.type in {"cpu", "meta"}:
        return DeviceMemory()
    if device.type == "mps":
        return DeviceMemory(
            allocated_bytes=torch.mps.current_allocated_memory(),
            reserved_bytes=torch.mps.driver_allocated_memory(),
            total_bytes=torch.mps.recommended_max_memory(),
        )
    # Raw, in one call: each of torch's single-value getters flattens and sorts all of its hundred numbers.
    stats = torch.get_device_module(device).memory_stats_as_nested_dict(device)
    if not stats:  # before the first use
        return DeviceMemory(
            allocated_bytes=0, reserved_bytes=0, peak_bytes=0, reserved_peak_bytes=0, inactive_split_bytes=0
        )
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return DeviceMemory(
        allocated_bytes=allocated["current"],
        reserved_bytes=reserved["current"],
        peak_bytes=allocated["peak"],
        reserved_peak_bytes=reserved["peak"],
        # Intel's allocator does not count them.
        inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"] if "inactive_split_bytes" in stats else 0,
    )


def allocator_counter(device: torch.device) -> Callable[[], DeviceMemory] | None:
    """Return a function that reads `allocator_counters`; None if the device has none."""
    return None if device.type in {"cpu", "meta"} else lambda: allocator_counters(device)


def peak_bytes(device: torch.device) -> int | None:
    """Read the peak of allocated bytes of a device since the last reset; None if it has no such counter."""
    return None if device.type in _WITHOUT_PEAK else allocator_counters(device).peak_bytes


def reset_peak(device: torch.device) -> None:
    """Reset the peak counters of a device to the bytes allocated now, for all code in this process."""
    if device.type not in _WITHOUT_PEAK:
        machine.reset_allocator_peak(device)


def device_name(device: torch.device) -> str:
    """Return a device's name as given by its driver; for the CPU, its architecture."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return properties(device).name if properties and device.type != "cpu" else platform.machine()


def device_architecture(device: torch.device) -> str | None:
    """Return the compute capability of an NVIDIA GPU ("8.9") or AMD's name ("gfx90a"); None for other devices."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"{properties.major}.{properties.minor}"


def device_identity(device: torch.device) -> str | None:
    """Return an ID of a GPU that is unique across processes; None for the CPU, or if the driver gives none.

    An index is not unique: each process numbers the devices that it sees.
    """
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", None) if properties and device.type != "cpu" else None
    return None if uuid is None else str(uuid)


def allocator_settings() -> dict[str, str]:
    """Return the environment variables that configure torch's allocators."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return {name: os.environ[name] for name in names if name in os.environ}


def allocator_snapshot(device: torch.device) -> bytes | None:
    """Return the allocator's snapshot in the format of https://pytorch.org/memory_viz; None if there is none."""
    if device.type != "cuda":
        return None
    return pickle.dumps(machine.allocator_history())


def record_allocator_history(device: torch.device, max_entries: int) -> None:
    """Record the last actions of the allocator for `allocator_snapshot`, in the whole process; 0 stops it.

    Only CUDA's allocator has such a history.
    """
    if device.type == "cuda" and torch.cuda.is_available():  # a virtual GPU may be gone
        machine.keep_allocator_history(max_entries)


def prefers_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes faster in bfloat16 than in float32, in hardware and not by emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return machine.has_bfloat16_instructions()
    return device.type == "xpu"


def release_cached_memory() -> None:
    """Collect reference cycles, then return the free heap to the system, and the accelerator's cache to its driver."""
    gc.collect()
    trim_heap()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        machine.empty_cache(accelerator.type)


def process_rank() -> tuple[int, int]:
    """Return rank and world size, from torch.distributed or else from the launcher's environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size):
        return int(rank), int(world_size)
    return 0, 1


def trim_heap() -> None:
    """Return the C library's free heap to the system if it has a call for that (glibc); otherwise do nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def keep_heap_whole() -> None:
    """Have the C library (glibc) map each large block on its own from now on; otherwise do nothing.

    By default, glibc takes blocks of up to 32 MiB from its heap once one of that size was freed. The small blocks that
    stay between them leave gaps that serve no large block and that the system does not get back: in a limited address
    space, micro-batches then run out of memory at any size.

    Time cost: the system maps and clears the pages of each large block when it is made.
    """
    if sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def resident_bytes() -> int:
    """Read the resident bytes of this process in about 2 microseconds; psutil takes 15."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # reopened: after a fork, an old descriptor reads the parent
    except OSError:
        return int(psutil.Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def children_bytes() -> int | None:
    """Read the bytes that the children of this process hold and do not share; None without children.

    DataLoader workers are such children. A page shared with this process since the fork is not counted until a write
    copies it, so a list that every worker gradually copies becomes visible. Linux only; takes about a millisecond for
    each child of 1 GB.
    """
    total = None
    try:
        threads = os.listdir("/proc/self/task")  # noqa: PTH208 - read in training steps, where `Path` is slower
    except OSError:
        return None
    for thread in threads:
        for pid in _read(f"/proc/self/task/{thread}/children").split():
            text = read_text(Path("/proc", pid.decode(), "smaps_rollup"))  # empty if gone by now, or another user's
            kilobytes = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")]
            if kilobytes:
                total = (total or 0) + 1024 * sum(kilobytes)
    return total


def _read(path: str) -> bytes:
    """Read a kernel file; empty if it is gone. Between two steps, `Path` takes several times longer."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, 2**16), b""))
    except OSError:
        return b""
    finally:
        os.close(file)


class ResidentPeak:
    """Peak of the resident bytes of this process since its start, or since the counter was restarted.

    Attributes:
        read_usage: Returns a record whose ``ru_maxrss`` is the peak, in units of ``USAGE_UNIT`` bytes. It is looked up
            for each reading: as soon as it can be, it is the system call itself, which takes half a microsecond.
    """

    def __init__(self) -> None:
        self._own_from: float = math.inf  # from this value on, the quick counter is this process's own
        self._restart_pid: int | None = None
        self._restart_file = -1
        self.read_usage: Callable[[], Any] = self._tell_apart

    def read(self) -> int:
        """Read the peak in bytes."""
        return int(self.read_usage().ru_maxrss) * USAGE_UNIT

    def _tell_apart(self) -> Any:
        """Read the peak where the quick counter may not be this process's own.

        On Linux, that counter (``ru_maxrss``) starts at the value of the process that launched this program, which may
        have been larger: if the two cannot be distinguished, the process's own peak is read, in 15 microseconds.
        """
        usage = _read_usage()
        if usage.ru_maxrss >= self._own_from:
            return usage
        own = _status_bytes(Path("/"), "VmHWM")
        if own is not None and own < usage.ru_maxrss * USAGE_UNIT:
            return SimpleNamespace(ru_maxrss=own // USAGE_UNIT)
        self._own_from = usage.ru_maxrss
        if self._restart_pid is None:  # a counter that is never restarted does not fall below this again
            self.read_usage = _read_usage
        return usage

    def restart(self) -> bool:
        """Restart the kernel's counter from now; False if the system cannot."""
        try:
            if self._restart_pid != os.getpid():  # after a fork the file is still the parent's
                self._restart_file = os.open("/proc/self/clear_refs", os.O_WRONLY)
                weakref.finalize(self, os.close, self._restart_file)
                self._restart_pid = os.getpid()
            os.write(self._restart_file, b"5")
        except OSError:
            return False
        self.read_usage = self._tell_apart  # the launching process's value does not start again
        return True


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """Limit this process to ``num_bytes`` more than it holds now; the limit is enforced and permanent.

    On CUDA, torch's allocator enforces it. For the CPU on Linux, the kernel does: soft RLIMIT_DATA, which counts heaps,
    anonymous mappings and thread stacks, but not libraries. Start thread pools first.

    Args:
        device: The device to limit.
        num_bytes: Bytes that may still be allocated.

    Raises:
        ConfigError: This system has no such limit.
    """
    release_cached_memory()
    memory = device_memory(device)
    if device.type == "cuda" and memory.reserved_bytes is not None and memory.total_bytes is not None:
        torch.cuda.set_per_process_memory_fraction((memory.reserved_bytes + num_bytes) / memory.total_bytes, device)
        return
    used = _status_bytes(Path("/"), "VmData")
    if device.type != "cpu" or used is None:
        raise ConfigError(
            f"limit_memory({device})",
            got=f"{device.type} on {sys.platform}",
            expected="CUDA, or the CPU on Linux",
            fix="run it on such a machine.",
        )

    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, hard_limit))


def allocator_limit_bytes(device: str) -> int | None:
    """Return the most that torch's allocator may reserve; None if there is no limit below the device's memory.

    Args:
        device: Name of a device; others, such as a GPU's, have none.
    """
    name, _, index = device.partition(":")
    if name != "cuda" or not torch.cuda.is_available():
        return None
    number = int(index) if index else torch.cuda.current_device()
    fraction = machine.memory_fraction(number)
    total_bytes: int = torch.cuda.get_device_properties(number).total_memory
    return None if fraction is None or fraction >= 1 else int(fraction * total_bytes)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Return whether this much memory can be allocated in one block; it is freed at once.

    For the CPU, the block comes from the system, bypassing torch's allocator: a large block that is allocated and freed
    would make the C library keep other blocks. Without a limit on the process, the system always says yes.
    """
    try:
        if device.type == "cpu":
            private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
            mmap.mmap(-1, max(1, num_bytes), **private).close()
        else:
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError):
        return False
    return True


def under_memory_pressure(backend: str) -> bool:
    """Return whether a backend is nearly full, to interpret an ambiguous error message.

    Args:
        backend: ``"cpu"`` or ``"host"`` for this process's host memory, otherwise the type of an accelerator.

    Returns:
        True when less than a tenth of the memory is free (cached blocks of torch's own allocator count as free).
        False if the backend is absent or has no counters: unknown does not count as pressure.
    """
    if backend in {"cpu", "host"}:
        host = host_memory()
        return host.available_bytes < _PRESSURE * host.total_bytes
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != ("cuda" if backend == "hip" else backend):
        return False
    memory = device_memory(resolve_device())
    if memory.total_bytes is None or memory.allocated_bytes is None or memory.reserved_bytes is None:
        return False
    if memory.free_bytes is None:  # MPS: memory held by this process, relative to the driver's recommended maximum
        return memory.total_bytes - memory.reserved_bytes < _PRESSURE * memory.total_bytes
    free_bytes = memory.free_bytes + memory.reserved_bytes - memory.allocated_bytes
    return free_bytes < _PRESSURE * memory.total_bytes


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the host memory available to this process: machine, container (cgroup v1 and v2) and resource limits.

    Args:
        root: The file system root whose ``/proc`` and ``/sys`` are read; tests use another one.

    Returns:
        The reading. The tightest limit determines the available bytes.
    """
    machine = psutil.virtual_memory()
    available = [(machine.available, "machine")]
    totals = [machine.total]
    for name, limit_bytes, used_bytes in (*_cgroup_limits(root), *_resource_limits(root)):
        available.append((max(0, limit_bytes - used_bytes), name))
        totals.append(limit_bytes)
    available_bytes, limited_by = min(available)
    return HostMemory(
        rss_bytes=psutil.Process().memory_info().rss,
        available_bytes=available_bytes,
        total_bytes=min(totals),
        limited_by=limited_by,
    )


def _cgroup_limits(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, limit, used without reclaimable cache) for the process's memory cgroup and each of its parents."""
    for level, version in cgroups(root, "memory"):
        limit_file, used_file, cache_key = _CGROUP_FILES[version]
        limit, used = read_text(level / limit_file).strip(), read_text(level / used_file).strip()
        if limit.isdecimal() and used.isdecimal() and int(limit) < _CGROUP_V1_UNLIMITED:
            yield "cgroup", int(limit), max(0, int(used) - _stat_value(level, cache_key))


def _stat_value(cgroup: Path, key: str) -> int:
    for line in read_text(cgroup / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _resource_limits(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, soft limit, used) for RLIMIT_DATA and RLIMIT_AS if they are set."""
    if sys.platform == "win32":
        return
    for name, limit_id, field in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
    ):
        soft_limit = resource.getrlimit(limit_id)[0]
        used = _status_bytes(root, field)
        if soft_limit != resource.RLIM_INFINITY and used is not None:
            yield name, soft_limit, used


def _status_bytes(root: Path, field: str) -> int | None:
    status = dict(line.split(":", 1) for line in read_text(root / "proc/self/status").splitlines() if ":" in line)
    return int(status[field].split()[0]) * 1024 if field in status else None


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; no number can be read from the device meanwhile."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
