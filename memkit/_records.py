"""Nouns that rooms share: frozen records of plain numbers. None means "not recorded", never zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device's allocator and driver say. A figure that the backend does not count is None.

    Attributes:
        allocated_bytes: Bytes in live tensors.
        reserved_bytes: Bytes that the allocator holds, live or cached.
        peak_bytes: Largest ``allocated_bytes`` since the last reset.
        free_bytes: Bytes that the driver would still hand out, to any process.
        total_bytes: The device's usable capacity.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory as this process may use it.

    Attributes:
        rss_bytes: Resident bytes of this process.
        available_bytes: Bytes that this process can still take before the tightest limit stops it.
        total_bytes: The tightest capacity: machine, container or resource limit.
        limited_by: What sets ``available_bytes``: ``"machine"``, ``"cgroup"``, ``"RLIMIT_DATA"`` or ``"RLIMIT_AS"``.
    """

    rss_bytes: int
    available_bytes: int
    total_bytes: int
    limited_by: str
