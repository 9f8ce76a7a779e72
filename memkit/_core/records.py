"""Records shared by the packages: frozen, with plain numbers. None means "not recorded", never zero."""

from __future__ import annotations

from dataclasses import dataclass

from memkit._core.foreign import AS_DICT, PEAK
from memkit._core.words import guided


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Counters of one device's allocator and driver. A counter that the backend does not have is None.

    Attributes:
        allocated_bytes: Bytes in live tensors.
        reserved_bytes: Bytes that the allocator holds, live or cached.
        peak_bytes: Largest ``allocated_bytes`` since the last reset.
        reserved_peak_bytes: Largest ``reserved_bytes`` since the last reset.
        inactive_split_bytes: Cached bytes in partly used blocks, which cannot be returned to the driver.
        free_bytes: Bytes that the driver can still hand out, to any process.
        total_bytes: The device's usable capacity.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    inactive_split_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory available to this process.

    Attributes:
        rss_bytes: Resident bytes of this process.
        available_bytes: Bytes that this process can still allocate before it hits the tightest limit.
        total_bytes: The tightest capacity: machine, container or resource limit.
        limited_by: The limit behind ``available_bytes``: ``"machine"``, ``"cgroup"``, ``"RLIMIT_DATA"`` or
            ``"RLIMIT_AS"``.
    """

    rss_bytes: int
    available_bytes: int
    total_bytes: int
    limited_by: str


@guided(
    absent={
        "snapshot.allocated_bytes": "allocated used current memory_allocated",
        "snapshot.reserved_bytes": "reserved cached memory_reserved",
        "snapshot.peak_bytes": PEAK,
        "snapshot.free_bytes": "free available",
        "snapshot.total_bytes": "total",
        "snapshot.host_rss_bytes": "rss host host_used",
        "dataclasses.asdict(snapshot)": f"{AS_DICT} [] as_dict",
    }
)
@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Device and host memory at one instant.

    Attributes:
        allocated_bytes: Bytes in live tensors on the device; on the CPU only inside `MemoryManager.track`.
        reserved_bytes: Bytes that the device's allocator holds, live or cached.
        peak_bytes: Largest ``allocated_bytes`` of the run.
        free_bytes: Bytes that the device can still hand out: to any process; on the CPU, to this one.
        total_bytes: The device's usable capacity; on the CPU the tightest of machine, container and resource limits.
        host_rss_bytes: Resident bytes of this process.
        host_peak_bytes: Largest resident bytes of this process.
        host_available_bytes: Bytes that this process can still allocate on the host before it hits the tightest limit.
        host_total_bytes: The tightest host capacity.
        host_limited_by: The tightest limit: ``"machine"``, ``"cgroup"``, ``"RLIMIT_DATA"`` or ``"RLIMIT_AS"``.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    host_rss_bytes: int
    host_peak_bytes: int
    host_available_bytes: int
    host_total_bytes: int
    host_limited_by: str
