"""Result of a Recorder as plain immutable data: events, storages, and queries on them.

Nothing here needs torch: a recording can be pickled and read in another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from memkit._core.errors import InputError
from memkit._core.settings import Checker

IntArray: TypeAlias = npt.NDArray[np.int64]
Category: TypeAlias = Literal["parameter", "buffer", "gradient", "optimizer", "input", "activation", "temporary"]
StepPhase: TypeAlias = Literal["forward", "backward", "optimizer", "other"]
Label: TypeAlias = Literal["category", "device", "module", "operator", "phase", "source"]
Moment: TypeAlias = Literal["peak", "end"]


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One storage shared by one or more tensors, from birth to death. Empty text means "not recorded".

    Attributes:
        id: Number of the storage, in the order in which the recorder saw them.
        nbytes: Its largest size in bytes.
        device: Its device, for example ``"cuda:0"``.
        category: Its purpose, such as a parameter or an activation.
        module: Dotted name of the module whose forward or backward created it. The root's name is its class name.
        operator: The operator that created it, for example ``"aten.mm.default"``; empty if it existed before.
        phase: Part of the step in which it was created.
        source: Line of the user's code that created it, as ``"file:line in function"``.
        birth: Index of the event at which it was created.
        death: Index of the event at which it was freed, or None if it was live at the end.
    """

    id: int
    nbytes: int
    device: str
    category: str
    module: str
    operator: str
    phase: str
    source: str
    birth: int
    death: int | None


@dataclass(frozen=True, eq=False)
class Recording:
    """Births, deaths and resizes of storages, in order.

    An event adds ``event_bytes[k]`` (negative for a death) to the storage ``event_storage[k]``. A storage that existed
    before the recorder saw it is born at the first event from which it is counted.

    Attributes:
        event_storage: int64, shape ``(num_events,)``: number of the storage.
        event_bytes: int64, shape ``(num_events,)``: change of its size in bytes.
        codes: For each label, an int64 array of shape ``(num_storages,)``: indices into ``names[label]``.
        names: For each label, its texts.
        phases: ``(event index, phase)`` at each change of phase: events from that index on belong to it.
        untracked: ``"operator: layout"`` of tensors whose memory cannot be seen, such as opaque oneDNN tensors.
    """

    event_storage: IntArray
    event_bytes: IntArray
    codes: Mapping[Label, IntArray]
    names: Mapping[Label, tuple[str, ...]]
    phases: tuple[tuple[int, StepPhase], ...]
    untracked: tuple[str, ...]

    @property
    def num_storages(self) -> int:
        """Number of storages seen."""
        return len(self.codes["device"])

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that held at least one storage, in order of appearance."""
        return self.names["device"]

    @property
    def is_older(self) -> npt.NDArray[np.bool_]:
        """For each storage, whether it existed before the recording: no operator of the recording created it."""
        is_nameless = np.asarray([not name for name in self.names["operator"]], dtype=np.bool_)
        return is_nameless[self.codes["operator"]]

    def timeline(self, device: str | None = None) -> IntArray:
        """Return live bytes after each event.

        Args:
            device: One device's bytes; None for all devices together.

        Returns:
            int64, shape ``(num_events,)``. An event of another device repeats the value before it.

        Raises:
            InputError: The recording has no storage on ``device``.
        """
        return np.cumsum(self._changes(device))

    def peak_event(self, device: str | None = None) -> int:
        """Return the index of the first event at which live bytes were highest; -1 if nothing was recorded."""
        return int(np.argmax(self.timeline(device))) if len(self.event_bytes) else -1

    def peak_bytes(self, device: str | None = None) -> int:
        """Return the peak of live bytes on one device, or on all devices together."""
        return int(self.timeline(device).max(initial=0))

    def live_bytes(self, device: str | None = None) -> int:
        """Return live bytes at the end of the recording."""
        return int(self._changes(device).sum())

    def peak_by(self, label: Label, device: str | None = None) -> dict[str, int]:
        """Split the peak: bytes per category, module, operator, source line, phase of birth, or device.

        Args:
            label: The label to group by.
            device: One device's peak; None for all devices together.

        Returns:
            Bytes per name, largest first, without names at zero; the values add up to ``peak_bytes(device)``.

        Raises:
            InputError: The recording has no storage on ``device``, or the label is unknown.
        """
        return self._split("peak_by", label, self._held_at("peak", device))

    def live_by(self, label: Label, device: str | None = None) -> dict[str, int]:
        """Split live bytes at the end, as `peak_by` splits the peak; the values add up to ``live_bytes(device)``."""
        return self._split("live_by", label, self._held_at("end", device))

    def peak_storage(self, device: str | None = None) -> StorageRecord | None:
        """Return the storage that brought live bytes to their peak; None if nothing was recorded."""
        event = self.peak_event(device)
        return self._records(self.event_storage[event : event + 1])[0] if event >= 0 else None

    def top(self, count: int, device: str | None = None, *, at: Moment = "peak") -> tuple[StorageRecord, ...]:
        """Return the ``count`` largest storages that were live at the peak or at the end, largest first.

        Raises:
            ConfigError: ``count`` is not an int of 0 or more, or ``at`` is unknown.
            InputError: The recording has no storage on ``device``.
        """
        check = Checker("top(...)")
        count = check.whole("count", count)
        check.choice("at", at, get_args(Moment))
        held = self._held_at(at, device)
        order = np.argsort(-held, kind="stable")[:count]
        return self._records(order[held[order] > 0])

    def storages(self) -> tuple[StorageRecord, ...]:
        """Return all storages by id. Builds one object per storage: prefer `peak_by` and `top` for large recordings."""
        return self._records(np.arange(self.num_storages))

    def _split(self, method: str, label: Label, held: IntArray) -> dict[str, int]:
        """Sum up ``held`` per name of a label, largest first."""
        if label not in self.codes:
            raise InputError(
                f"{method}({label!r})",
                got=repr(label),
                expected=f"one of {', '.join(self.codes)}",
                fix="pick one of these labels.",
            )
        per_name = np.zeros(len(self.names[label]), dtype=np.int64)
        np.add.at(per_name, self.codes[label], held)
        order = np.argsort(-per_name, kind="stable")
        return {self.names[label][k]: int(per_name[k]) for k in order if per_name[k]}

    def _changes(self, device: str | None) -> IntArray:
        if device is None:
            return self.event_bytes
        if device not in self.devices:
            raise InputError(
                f"device={device!r}",
                got=repr(device),
                expected=f"a device of this recording: {', '.join(self.devices) or 'it has none'}",
                fix="read `recording.devices`.",
            )
        on_device = self.codes["device"][self.event_storage] == self.devices.index(device)
        return np.where(on_device, self.event_bytes, 0)

    def _held_at(self, moment: Moment, device: str | None) -> IntArray:
        """Return the bytes that each storage holds at a moment: int64, shape ``(num_storages,)``."""
        until = self.peak_event(device) + 1 if moment == "peak" else len(self.event_bytes)
        held = np.zeros(self.num_storages, dtype=np.int64)
        np.add.at(held, self.event_storage[:until], self._changes(device)[:until])
        return held

    def _records(self, ids: IntArray) -> tuple[StorageRecord, ...]:
        births, deaths = lifetimes(self.event_storage, self.event_bytes, self.num_storages)
        sizes = _largest_sizes(self.event_storage, self.event_bytes, self.num_storages)
        end = len(self.event_bytes)

        def text(label: Label, storage: int) -> str:
            return self.names[label][int(self.codes[label][storage])]

        return tuple(
            StorageRecord(
                id=k,
                nbytes=int(sizes[k]),
                device=text("device", k),
                category=text("category", k),
                module=text("module", k),
                operator=text("operator", k),
                phase=text("phase", k),
                source=text("source", k),
                birth=int(births[k]),
                death=None if deaths[k] == end else int(deaths[k]),
            )
            for k in ids.tolist()
        )


def encoded(texts: Sequence[str], known: Sequence[str] = ()) -> tuple[IntArray, tuple[str, ...]]:
    """Return texts as indices into a table, and the table: the ``known`` texts, then the new ones."""
    table = {text: code for code, text in enumerate(dict.fromkeys((*known, *texts)))}
    return np.asarray([table[text] for text in texts], dtype=np.int64), tuple(table)


def lifetimes(event_storage: IntArray, event_bytes: IntArray, num_storages: int) -> tuple[IntArray, IntArray]:
    """Return first and last event of each storage; the last is ``len(event_storage)`` for storages never freed."""
    end = len(event_storage)
    index = np.arange(end)
    births = np.full(num_storages, end)
    births[event_storage[::-1]] = index[::-1]
    deaths = np.full(num_storages, end)
    deaths[event_storage] = index
    at_end = np.zeros(num_storages, dtype=np.int64)
    np.add.at(at_end, event_storage, event_bytes)
    deaths[at_end > 0] = end
    return births, deaths


def resolve_categories(
    known: Mapping[int, Category],
    *,
    born_in: Sequence[str],
    was_before: Sequence[int],
    lifetimes: tuple[IntArray, IntArray],
    backwards: Sequence[int],
    end: int,
) -> list[Category]:
    """Assign a category to every storage: from `known`, or else by phase of birth and lifetime.

    Args:
        known: Categories resolved by identity.
        born_in: Phase of birth of each storage.
        was_before: Storages that existed before the recorder saw them.
        lifetimes: Result of `lifetimes`.
        backwards: Indices of the events at which a backward begins.
        end: Number of events.
    """
    births, deaths = lifetimes
    starts = np.asarray([*backwards, end], dtype=np.int64)
    outlook = starts[np.searchsorted(starts[:-1], births, side="right")]  # the next backward, or the end
    lasts = deaths >= outlook
    result: list[Category] = ["temporary"] * len(births)
    for number in np.flatnonzero(lasts).tolist():
        if born_in[number] == "forward":
            result[number] = "activation"
        elif born_in[number] == "other" and outlook[number] < end:
            result[number] = "input"
    for number in was_before:
        result[number] = "input"
    for number, category in known.items():
        result[number] = category
    return result


def _largest_sizes(event_storage: IntArray, event_bytes: IntArray, num_storages: int) -> IntArray:
    """Return the largest size of each storage: a running sum per storage, over events sorted by storage."""
    order = np.argsort(event_storage, kind="stable")
    owners, running = event_storage[order], np.cumsum(event_bytes[order])
    starts = np.searchsorted(owners, np.arange(num_storages))
    before = np.concatenate([[0], running])[starts]
    sizes = np.zeros(num_storages, dtype=np.int64)
    np.maximum.at(sizes, owners, running - before[owners])
    return sizes
