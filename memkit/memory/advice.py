"""Facts for advice from a manager's figures."""

from __future__ import annotations

from collections.abc import Mapping

from memkit._advice.suggest import Facts, Tip, suggest
from memkit._core.records import DeviceMemory, HostMemory


def find_tips(
    device: DeviceMemory, host: HostMemory, settings: Mapping[str, str], sharing: tuple[int, ...]
) -> list[Tip]:
    """Return the advice on the environment that the figures call for.

    Only the report judges how well the run fills the device: during a run the peak may be yet to come.

    Args:
        device: The device's counters, with the peaks of the whole run.
        host: The host's memory.
        settings: The environment variables of torch's allocators.
        sharing: Other processes that use the device.
    """
    return suggest(
        Facts(
            peak_bytes=device.peak_bytes,
            reserved_bytes=device.reserved_peak_bytes,
            split_bytes=device.inactive_split_bytes,
            settings=settings,
            host=host,
            others=sharing,
        )
    )
