"""`suggest`: choose remedies from the facts about a run. Nothing here changes the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from memkit._advice.catalog import Horizon, remedy, symptom
from memkit._core.records import HostMemory
from memkit._core.units import GIB, format_bytes

_LARGE_PART = 0.25  # of the peak: a smaller part is not worth a code change
_LARGE_CACHE = 0.2  # of reserved bytes; below this, fixing fragmentation is not worth it
_TIGHT, _ROOMY = 0.1, 0.5  # of a device or the host, free
_GENERAL_NAME = "PYTORCH_ALLOC_CONF"

Standing: TypeAlias = tuple[bool, bool, bool, bool, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Known facts about a run. Unknown ones are None or empty, and advice that needs them is omitted.

    Attributes:
        peak_bytes: Peak bytes in tensors.
        reserved_bytes: Peak bytes that the allocator reserved.
        split_bytes: Cached bytes in partly used blocks, now.
        total_bytes: The device's capacity.
        settings: The environment variables of torch's allocators.
        has_expandable_segments: Whether the allocator is known to use them, by other means than these variables.
        host: The host's memory.
        others: Other processes that use the device.
        components: Name and bytes of each loaded component.
        loaded_bytes: Memory in use once all were loaded.
        growth_bytes: Bytes that each step keeps, if memory grows.
        growth_holder: The holder of these bytes, if it is known.
        unattributed_bytes: The part of the peak that belongs to no component, if the log has no other breakdown.
        lacks_stages: Whether the recorded peaks are those of the run, not of its stages.
        lacks_reserved: Whether the allocator's reserved bytes were not recorded.
    """

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    total_bytes: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    has_expandable_segments: bool = False
    host: HostMemory | None = None
    others: tuple[int, ...] = ()
    components: tuple[tuple[str, int], ...] = ()
    loaded_bytes: int | None = None
    growth_bytes: int | None = None
    growth_holder: str | None = None
    unattributed_bytes: int | None = None
    lacks_stages: bool = False
    lacks_reserved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """One remedy that the facts suggest.

    Attributes:
        remedy: Its key in the catalog.
        topic: Its topic, such as ``"fragmentation"`` or ``"host memory"``.
        evidence: The figures behind it.
        action: The suggested action, and when it does not help.
        horizon: How large a change it is, see `Remedy`.
        exact: Whether the results stay the same except for rounding; None if it does not touch them.
        saves_bytes: The most that it can take off the peak; None if the facts do not determine it.
    """

    remedy: str
    topic: str
    evidence: str
    action: str
    horizon: Horizon
    exact: bool | None
    saves_bytes: int | None

    def __str__(self) -> str:
        return f"{self.topic}: {self.evidence}. {self.action}"


def suggest(facts: Facts, language: str = "en") -> list[Tip]:
    """Return the advice that the facts suggest, best first (see `rank`).

    Args:
        facts: The known facts.
        language: ``"en"`` or ``"zh"``.
    """
    found = [tip for rule in _RULES for seen in rule(facts) for tip in seen.tips(language)]
    return sorted(found, key=lambda tip: rank(exact=tip.exact, saved_bytes=tip.saves_bytes))


def rank(
    *,
    exact: bool | None,
    saved_bytes: int | None,
    is_verified: bool = False,
    moves: bool = False,
    flops_ratio: float | None = None,
) -> Standing:
    """Return the sort key of all advice, best first.

    Advice that a run has verified comes first, then advice that keeps the numbers, then advice without transfers.
    Within these groups, a known saving comes before an unknown one, and a larger saving per operation first.
    """
    worth = (saved_bytes or 0) / (flops_ratio or 1)
    return not is_verified, not exact, moves, saved_bytes is None, -worth


class _Symptom(NamedTuple):
    """A symptom: its key in the catalog, its figures, and the remedies, each with the most that it can save."""

    key: str
    values: Mapping[str, object]
    remedies: Mapping[str, int | None]

    def tips(self, language: str) -> Iterator[Tip]:
        record, values = symptom(self.key), {name: _shown(value) for name, value in self.values.items()}
        for key, saves_bytes in self.remedies.items():
            named = remedy(key)
            values["code"] = named.full_code().format(**values)
            sentences = (each[language].format(**values) for each in (named.action, named.limit) if each)
            yield Tip(
                remedy=key,
                topic=record["topic"],
                evidence=record[language].format(**values),
                action=(" " if language == "en" else "").join(sentences),
                horizon=named.horizon,
                exact=named.exact,
                saves_bytes=saves_bytes,
            )


def _shown(value: object) -> str:
    """Format a value: ints are bytes, floats are shares."""
    return format_bytes(value) if isinstance(value, int) else f"{value:.1%}" if isinstance(value, float) else str(value)


def _about_components(facts: Facts) -> Iterator[_Symptom]:
    peak = facts.peak_bytes or 0
    for name, num_bytes in facts.components:
        if num_bytes >= _LARGE_PART * peak > 0:
            values = {"name": name, "size": num_bytes, "share": num_bytes / peak}
            savings = {"offload_component": num_bytes, "half_bits": num_bytes // 2, "smaller_component": None}
            yield _Symptom("component", values, savings)


def _about_work(facts: Facts) -> Iterator[_Symptom]:
    """Advise on memory besides the loaded components: activations and temporaries."""
    if facts.peak_bytes is None or facts.loaded_bytes is None:
        return
    work = facts.peak_bytes - facts.loaded_bytes
    if work >= _LARGE_PART * facts.peak_bytes > 0:
        values = {"size": work, "share": work / facts.peak_bytes, "module": "module", "rows": "'auto'"}
        yield _Symptom("work", values, {"checkpoint": work, "chunks": work})


def _about_growth(facts: Facts) -> Iterator[_Symptom]:
    if facts.growth_bytes is not None:
        values = {"size": facts.growth_bytes, "holder": facts.growth_holder}
        yield _Symptom("growth", values, {"find_leak" if facts.growth_holder is None else "empty_holder": None})


def _about_cache(facts: Facts) -> Iterator[_Symptom]:
    """Compare peaks: bytes that are reserved now but not in tensors are a cache, which the next step reuses."""
    peak, reserved = facts.peak_bytes, facts.reserved_bytes
    if peak is None or reserved is None or reserved - peak < max(GIB, _LARGE_CACHE * reserved):
        return
    is_on = facts.has_expandable_segments or any(map(_expands, facts.settings.values()))
    values = {"peak": peak, "reserved": reserved, "split": facts.split_bytes}
    savings = {"fewer_shapes" if is_on else "expandable_segments": reserved - peak}
    yield _Symptom("split" if facts.split_bytes else "cache", values, savings)


def _about_settings(facts: Facts) -> Iterator[_Symptom]:
    older = ", ".join(name for name in facts.settings if name != _GENERAL_NAME)
    if older and _GENERAL_NAME in facts.settings:
        yield _Symptom("two_variables", {"removed": older, "kept": _GENERAL_NAME}, {"one_variable": None})
    for name, text in facts.settings.items():
        if "max_split_size_mb" in text and _expands(text):
            yield _Symptom("two_settings", {"variable": name}, {"no_split_limit": None})


def _expands(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower()


def _about_room(facts: Facts) -> Iterator[_Symptom]:
    held = max((each for each in (facts.peak_bytes, facts.reserved_bytes) if each is not None), default=None)
    if held is None or not facts.total_bytes:
        return
    free = 1 - held / facts.total_bytes
    values = {"share": free, "size": facts.total_bytes}
    if free < _TIGHT:
        yield _Symptom("room", values, {"micro_batches": None, "larger_card": None})
    elif free > _ROOMY and facts.growth_bytes is None:  # memory that grows will fill it
        yield _Symptom("room", values, {"larger_batch": None})


def _about_surroundings(facts: Facts) -> Iterator[_Symptom]:
    host = facts.host
    if host is not None and host.available_bytes < _TIGHT * host.total_bytes:
        values = {"free": host.available_bytes, "size": host.total_bytes, "limited_by": host.limited_by}
        yield _Symptom("host", values, {"lighter_loader": None})
    if facts.others:
        values = {"processes": ", ".join(map(str, facts.others))}
        yield _Symptom("others" if len(facts.others) > 1 else "other", values, {"own_card": None})


def _about_log(facts: Facts) -> Iterator[_Symptom]:
    if facts.lacks_stages:
        yield _Symptom("cumulative", {}, {"reset_peaks": None})
    peak, unattributed = facts.peak_bytes, facts.unattributed_bytes
    if peak and unattributed is not None and unattributed >= _LARGE_PART * peak:
        yield _Symptom("unattributed", {"size": unattributed, "share": unattributed / peak}, {"track": None})
    if facts.lacks_reserved:
        yield _Symptom("no_reserved", {}, {"record_reserved": None})


_RULES: tuple[Callable[[Facts], Iterator[_Symptom]], ...] = (
    _about_components,
    _about_cache,
    _about_settings,
    _about_growth,
    _about_work,
    _about_room,
    _about_surroundings,
    _about_log,
)
