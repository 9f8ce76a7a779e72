"""Human-readable reports of a manager's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memkit._charts.text import align
from memkit._core.records import DeviceMemory, MemorySnapshot
from memkit._core.units import format_bytes
from memkit._machine import devices
from memkit.memory.phases import PhaseTotals

_UNKNOWN = "not recorded"
_HEADER = ("phase", "calls", "host time", "mean", "longest", "peak of tensors", "peak of process")
_LEGEND = {
    "<=": "'<=': no block of the phase set a new record, so only an upper bound of its peak is known.",
    ">=": "'>=': not every block was watched, so the largest peak is at least this.",
    " to ": "'to': a block set a record, the first size; later ones did not, and stayed below the second.",
}


def summarize_line(snapshot: MemorySnapshot, where: str, watched_bytes: int | None = None) -> str:
    """Return one line: device and host memory now; for a device without counters, the bytes that trackers saw."""
    device = [
        f"{name} {format_bytes(value)}"
        for name, value in (
            ("allocated", snapshot.allocated_bytes),
            ("reserved", snapshot.reserved_bytes),
            ("peak", snapshot.peak_bytes),
        )
        if value is not None
    ]
    if not device and watched_bytes is not None:
        device = [f"tensors not counted now, peak {format_bytes(watched_bytes)} inside track()"]
    total = "" if snapshot.total_bytes is None else f", of {format_bytes(snapshot.total_bytes)}"
    return f"{where}: {', '.join(device) or f'tensors {_UNKNOWN}'}{total} | {summarize_host(snapshot)}"


def memory_figures(counters: DeviceMemory) -> dict[str, int]:
    """Return the known figures for a logger, in bytes: the device's counters, and the host's resident bytes."""
    figures = {
        "allocated_bytes": counters.allocated_bytes,
        "reserved_bytes": counters.reserved_bytes,
        "peak_bytes": counters.peak_bytes,
        "host_resident_bytes": devices.resident_bytes(),
    }
    return {name: value for name, value in figures.items() if value is not None}


def snapshot_rows(snapshot: MemorySnapshot, watched_bytes: int | None, *, is_cpu: bool) -> list[tuple[str, str]]:
    """Return the figures of a snapshot by name, with the reason for each unknown one."""
    unknown = "not counted on a CPU outside track()" if is_cpu else _UNKNOWN
    device = {
        "allocated": snapshot.allocated_bytes,
        "reserved": snapshot.reserved_bytes,
        "peak of tensors": snapshot.peak_bytes if snapshot.peak_bytes is not None else watched_bytes,
        "free": snapshot.free_bytes,
        "total": snapshot.total_bytes,
    }
    if is_cpu:  # it reserves nothing, and its free memory is the host's
        device = {name: device[name] for name in ("allocated", "peak of tensors")}
    rows = [(name, unknown if size is None else format_bytes(size)) for name, size in device.items()]
    process = f"{format_bytes(snapshot.host_rss_bytes)}, peak {format_bytes(snapshot.host_peak_bytes)}"
    available = format_bytes(snapshot.host_available_bytes)
    total = f"of {format_bytes(snapshot.host_total_bytes)}, limited by {snapshot.host_limited_by}"
    return [*rows, ("process", process), ("available on the host", f"{available} {total}")]


def summarize_host(snapshot: MemorySnapshot) -> str:
    """Return the part of `summarize_line` about host memory."""
    return (
        f"host: process {format_bytes(snapshot.host_rss_bytes)} (peak {format_bytes(snapshot.host_peak_bytes)}), "
        f"available {format_bytes(snapshot.host_available_bytes)} (limited by {snapshot.host_limited_by})"
    )


def summarize(
    snapshot: MemorySnapshot,
    where: str,
    phases: Mapping[str, PhaseTotals],
    notes: Iterable[object],
    watched_bytes: int | None = None,
) -> str:
    """Return the line, a table of the phases, and notes."""
    lines = [summarize_line(snapshot, where, watched_bytes)]
    rows = [_row(path, totals) for path, totals in phases.items() if totals.num_calls]
    if rows:
        lines += ["", *align([_HEADER, *rows]), ""]
        lines += [text for sign, text in _LEGEND.items() if any(sign in cell for row in rows for cell in row[5:])]
        lines.append("Times are by the host's clock: an accelerator may still be working when the host is done.")
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def _row(path: str, totals: PhaseTotals) -> tuple[str, ...]:
    return (
        path,
        str(totals.num_calls),
        _seconds(totals.duration_ns),
        _seconds(totals.duration_ns / totals.num_calls),
        _seconds(totals.longest_ns),
        _peak(totals.peak_bytes, totals.peak_at_most_bytes),
        _peak(totals.host_peak_bytes, totals.host_peak_at_most_bytes),
    )


def _peak(known: int | None, at_most: int | None) -> str:
    if known is None:
        return _UNKNOWN if at_most is None else f"<= {format_bytes(at_most)}"
    if at_most is None:
        return f">= {format_bytes(known)}"
    return format_bytes(known) if known == at_most else f"{format_bytes(known)} to {format_bytes(at_most)}"


def _seconds(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.2f} {unit}"
    return f"{nanoseconds / 1e3:.0f} us"
