"""The settings of torch's CUDA allocator, read from the text of ``PYTORCH_ALLOC_CONF``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memkit._errors import ConfigError
from memkit._settings import Checker
from memkit._units import MIB

_LEAST_SEGMENT_MB = 11  # above what one request takes for itself: 10 MiB and more
_SMALLEST_INTERVAL_BITS = 20  # roundup_power2_divisions has one number for each power of two from 1 MiB to 32 GiB
_NUM_INTERVALS = 16
_OPTION = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")
_FORM = "key:value,key:value, with a list as key:[a:1,b:2]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the CUDA caching allocator is set up; the defaults are those of torch.

    Attributes:
        expandable_segments: One growing segment for each stream and pool, in place of one segment for each request.
        max_split_bytes: Blocks of this size and more are never split, and kept for requests of this size and more.
            None: every block may be split.
        max_non_split_rounding_bytes: How much larger such a block may be than the request that it serves. None: by
            the large segment.
        large_segment_bytes: The segment for a request of over 1 MiB and under 10 MiB; with expandable segments, the
            page of the large pool.
        garbage_collection_threshold: Above this part of the memory that the process is allowed, old cached segments
            are given back before a new one is asked for. It needs a ``memory_fraction`` below 1: torch looks at
            it only where a limit is set. None: never.
        memory_fraction: The part of the card that the process is allowed. 1.0: no limit but the card.
        roundup_power2_divisions: For requests from 1 MiB, 2 MiB, ... 32 GiB on: into how many steps the way to the
            next power of two is divided. 0: round to 512 bytes.

    Raises:
        ConfigError: A value is not one that torch would take.

    Example:
        >>> import memkit as mk
        >>> mk.AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = 20 * MIB
    garbage_collection_threshold: float | None = None
    memory_fraction: float = 1.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * _NUM_INTERVALS

    def __post_init__(self) -> None:
        """Refuse what torch would: as `parse` does of the text."""
        check = Checker("AllocatorSettings(...)")
        check.flag("expandable_segments", self.expandable_segments)
        segment_bytes = check.whole("large_segment_bytes", self.large_segment_bytes, _LEAST_SEGMENT_MB * MIB)
        for name in ("max_non_split_rounding_bytes", "max_split_bytes"):
            if getattr(self, name) is not None:
                check.whole(name, getattr(self, name), segment_bytes)
        check.number("memory_fraction", self.memory_fraction, 0, 1)
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < check.number("garbage_collection_threshold", threshold) < 1:
            raise check.refuse("garbage_collection_threshold", threshold, "a number between 0 and 1, without the ends")
        for each in check.items("roundup_power2_divisions", self.roundup_power2_divisions, _NUM_INTERVALS):
            if check.whole("roundup_power2_divisions", each) & (each - 1):
                raise check.refuse("roundup_power2_divisions", each, "0 or a power of two for each size")

    @classmethod
    def of(cls, settings: AllocatorSettings | str | None) -> AllocatorSettings:
        """Settings as they come from a user: as they are, as text for `parse`, or None for torch's defaults."""
        if isinstance(settings, AllocatorSettings):
            return settings
        if settings is not None and not isinstance(settings, str):
            raise Checker("CachingAllocator(...)").refuse("settings", settings, "an AllocatorSettings, text, or None")
        return cls.parse(settings or "")

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of ``PYTORCH_ALLOC_CONF``.

        Args:
            text: For example ``"expandable_segments:True,max_split_size_mb:128"``. Spaces do not count. Options of
                pinned host memory are checked and have no effect here.

        Raises:
            ConfigError: An option is unknown, given twice or has a wrong value (torch refuses it too, or silently
                reads something else), or it asks for what the model does not do: ``backend:cudaMallocAsync``,
                ``throw_on_cudamalloc_oom:True``.

        Source:
            c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.

        Example:
            >>> import memkit as mk
            >>> settings = mk.AllocatorSettings.parse("max_split_size_mb:128,roundup_power2_divisions:4")
            >>> settings.max_split_bytes, settings.round_up(5 * 2**20 + 1)
            (134217728, 6291456)
        """
        options = _options("".join(text.split()))
        segment_mb = options.pop("large_segment_size_mb", 20)  # first: it is the smallest value of two others
        sizes = {}
        for name in ("max_non_split_rounding_mb", "max_split_size_mb"):
            megabytes = options.pop(name, None)
            if megabytes is not None and megabytes < segment_mb:
                raise _refusal(name, str(megabytes), f"at least the large segment: {segment_mb}", "raise it")
            sizes[name] = None if megabytes is None else megabytes * MIB
        known = {"expandable_segments", "garbage_collection_threshold", "roundup_power2_divisions"}
        fields = {name: value for name, value in options.items() if name in known}
        return cls(
            max_split_bytes=sizes["max_split_size_mb"],
            max_non_split_rounding_bytes=sizes["max_non_split_rounding_mb"],
            large_segment_bytes=segment_mb * MIB,
            memory_fraction=options.get("per_process_memory_fraction", 1.0),
            **fields,
        )

    def round_up(self, num_bytes: int) -> int:
        """The size of the block that a request of ``num_bytes`` gets, before what is left over by splitting."""
        interval = min(max(num_bytes.bit_length() - 1 - _SMALLEST_INTERVAL_BITS, 0), _NUM_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        step = 512
        if divisions > 1 and num_bytes > step * divisions:
            step = (1 << (num_bytes.bit_length() - 1)) // divisions
        return -(-num_bytes // step) * step

    def too_large_bytes(self, size: int) -> float:
        """From which size on a cached block does not serve a request of ``size`` rounded bytes."""
        if self.max_split_bytes is None:
            return math.inf
        if size < self.max_split_bytes:
            return self.max_split_bytes
        return size + (self.max_non_split_rounding_bytes or self.large_segment_bytes)


def _options(text: str) -> dict[str, Any]:
    """Split the text into options and read each value."""
    found: dict[str, Any] = {}
    position = 0
    while position < len(text):
        option = _OPTION.match(text, position)
        if option is None:
            raise ConfigError(
                "AllocatorSettings.parse(text)",
                got=f"{text[position:]!r}",
                expected=_FORM,
                fix="write one colon between key and value, and a comma between options.",
            )
        name, value = option.groups()
        if name not in _READERS:
            raise ConfigError(
                "AllocatorSettings.parse(text)",
                got=f"the option {name!r}, which torch does not know",
                expected=f"one of {', '.join(sorted(_READERS))}",
                fix="correct or remove it.",
            )
        if name in found:
            raise _refusal(name, "the option twice", "each option once", "remove one")
        found[name] = _READERS[name](name, value)
        position = option.end()
    return found


def _refusal(name: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(f"AllocatorSettings.parse({name!r})", got=got, expected=expected, fix=f"{fix}.")


def _boolean(name: str, value: str) -> bool:
    if value not in {"True", "False"}:
        raise _refusal(name, value, "True or False, written so", "write True or False")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise _refusal(name, value, "a whole number", "write digits only")
    return int(value)


def _whole_from(least: int) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        if (number := _whole(name, value)) < least:
            raise _refusal(name, value, f"at least {least}", "raise it")
        return number

    return read


def _fraction(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise _refusal(name, value, "a number from 0 to 1", "write a fraction such as 0.8")
    return number


def _threshold(name: str, value: str) -> float:
    number = _fraction(name, value)
    if number in {0, 1}:
        raise _refusal(name, value, "a number between 0 and 1, without the ends", "write a fraction such as 0.8")
    return number


def _power_of_two(name: str, value: str, *, or_zero: bool = False) -> int:
    number = _whole(name, value)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise _refusal(name, value, f"a power of two{' or 0' * or_zero}", "write for example 4")
    return number


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """Read ``4``, for all sizes, or ``[256:1,512:2,>:4]``: up to 512 MiB, from there on, from 1 GiB on."""
    if not value.startswith("["):
        return (_power_of_two(name, value),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = 0
    is_first = True
    for entry in filter(None, value[1:-1].split(",")):
        start, _, number = entry.partition(":")
        num_divisions = _power_of_two(name, number, or_zero=True)
        if start == ">":
            divisions[last + 1 :] = [num_divisions] * (_NUM_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(name, start).bit_length() - 1, _NUM_INTERVALS - 1)
        if is_first:  # it also counts for all that is smaller
            divisions[:last] = [num_divisions] * last
            is_first = False
        divisions[last] = num_divisions
    return tuple(divisions)


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value not in allowed:
            raise _refusal(name, value, f"{' or '.join(allowed)}: memkit models nothing else", "remove the option")
        return value

    return read


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "expandable_segments": _boolean,
    "max_split_size_mb": _whole,
    "max_non_split_rounding_mb": _whole,
    "large_segment_size_mb": _whole_from(_LEAST_SEGMENT_MB),
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _divisions,
    "per_process_memory_fraction": _fraction,
    "backend": _one_of("native"),
    "throw_on_cudamalloc_oom": _one_of("False"),
    # No effect on which memory is taken on the card.
    "release_lock_on_cudamalloc": _boolean,
    "release_lock_on_hipmalloc": _boolean,
    "graph_capture_record_stream_reuse": _boolean,
    "pinned_use_cuda_host_register": _boolean,
    "pinned_use_hip_host_register": _boolean,
    "pinned_use_background_threads": _boolean,
    "pinned_free_catch_all": _boolean,
    "pinned_num_register_threads": _power_of_two,
    "pinned_reserve_segment_size_mb": _whole_from(1),
    "pinned_max_round_threshold_mb": _whole,
    "pinned_max_cached_size_mb": _whole,
}
