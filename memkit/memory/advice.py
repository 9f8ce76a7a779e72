"""Advice on the environment, with the figures behind it. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memkit._core.records import DeviceMemory, HostMemory
from memkit._core.units import GIB, format_bytes

_LARGE_SHARE = 0.2  # of reserved bytes; below this, fixing fragmentation is not worth it
_TIGHT = 0.1  # of the host's memory
_GENERAL_NAME = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, slots=True)
class Tip:
    """One suggested change.

    Attributes:
        topic: ``"fragmentation"``, ``"allocator settings"``, ``"host memory"`` or ``"shared device"``.
        evidence: The figures behind it.
        action: The suggested action, and when to take it.
    """

    topic: str
    evidence: str
    action: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.evidence}. {self.action}"


def find_tips(
    device: DeviceMemory, host: HostMemory, settings: Mapping[str, str], sharing: tuple[int, ...]
) -> list[Tip]:
    """Return the advice that the figures call for.

    Args:
        device: The device's counters, with the peaks of the whole run.
        host: The host's memory.
        settings: The environment variables of torch's allocators.
        sharing: Other processes that use the device.
    """
    return [
        *_about_fragmentation(device, settings),
        *_about_settings(settings),
        *_about_host(host),
        *advise_about_sharing(sharing),
    ]


def _about_fragmentation(device: DeviceMemory, settings: Mapping[str, str]) -> list[Tip]:
    """Compare peaks: bytes that are reserved now but not in tensors are a cache, which the next step reuses."""
    allocated, reserved = device.peak_bytes, device.reserved_peak_bytes
    if allocated is None or reserved is None or reserved - allocated < max(GIB, _LARGE_SHARE * reserved):
        return []
    evidence = f"at most {format_bytes(allocated)} were in tensors at once, and {format_bytes(reserved)} were reserved"
    if device.inactive_split_bytes:
        evidence += f"; {format_bytes(device.inactive_split_bytes)} lie free now in blocks that are in use in part"
    if any("expandable_segments:true" in text.lower() for text in settings.values()):
        action = (
            "Expandable segments are on already: let batches have fewer different shapes, or call release() between "
            "phases of different sizes."
        )
    else:
        action = (
            f"Start the process with {_GENERAL_NAME}=expandable_segments:True in its environment: after the first use "
            "of the device it has no effect."
        )
    return [Tip("fragmentation", evidence, action)]


def _about_settings(settings: Mapping[str, str]) -> list[Tip]:
    topic = "allocator settings"
    found = []
    older = ", ".join(name for name in settings if name != _GENERAL_NAME)
    if older and _GENERAL_NAME in settings:
        evidence = f"{older} and {_GENERAL_NAME} are both set, and parts of torch prefer the one or the other"
        found.append(Tip(topic, evidence, f"Keep {_GENERAL_NAME} and remove {older}."))
    for name, text in settings.items():
        if "max_split_size_mb" in text and "expandable_segments:true" in text.lower():
            evidence = f"{name} sets max_split_size_mb, which is for segments that do not grow, and expandable_segments"
            found.append(Tip(topic, evidence, "Remove max_split_size_mb."))
    return found


def _about_host(host: HostMemory) -> list[Tip]:
    if host.available_bytes >= _TIGHT * host.total_bytes:
        return []
    evidence = (
        f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} are left, limited by the "
        f"{host.limited_by}"
    )
    action = "Use fewer DataLoader workers, a smaller prefetch_factor, or less pinned memory; or raise the limit."
    return [Tip("host memory", evidence, action)]


def advise_about_sharing(sharing: tuple[int, ...]) -> list[Tip]:
    """Return advice about other processes that use the device, if there are any."""
    if not sharing:
        return []
    several = len(sharing) > 1
    evidence = (
        f"process{'es' if several else ''} {', '.join(map(str, sharing))} compute{'' if several else 's'} on it too"
    )
    action = (
        "Its free memory is less than its size. If that is a mistake of the launcher, give each process a card of its "
        "own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)."
    )
    return [Tip("shared device", evidence, action)]
