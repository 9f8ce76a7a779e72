"""Events that the program behind the older JSON arrays always records, so that a missing one can be reported."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

_LOADS = ("t5_loaded", "vae_loaded", "dit_loaded")
_STAGES = ("init", "model_loaded", "forward_pass", "inference_end")


def missing_loads(names: AbstractSet[str]) -> tuple[str, ...]:
    """Return the loads that a log lacks; empty if it has none of them, since another program may write such arrays."""
    return () if names.isdisjoint(_LOADS) else tuple(each for each in _LOADS if each not in names)


def missing_stages(names: AbstractSet[str]) -> tuple[str, ...]:
    """Return the stages of a run that a log lacks."""
    return tuple(each for each in _STAGES if each not in names)
