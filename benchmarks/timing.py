"""Time of ways to do the same work. They take turns, so that a busy machine disturbs all of them alike.

Each round has another order, since what ran just before makes a way up to two per cent faster or slower. Garbage is
collected before each round and not in it, where it would hit whichever way allocates the most objects.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def seconds_of(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def in_turns(ways: Mapping[Any, Any], rounds: int, measure: Callable[[Any], Any] = seconds_of) -> dict[Any, list[Any]]:
    """Measurements of each way in each round."""
    found: dict[Any, list[Any]] = {name: [] for name in ways}
    order, chance = list(ways), random.Random(0)
    was_on = gc.isenabled()
    try:
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            for name in order:
                found[name].append(measure(ways[name]))
            chance.shuffle(order)
    finally:
        if was_on:
            gc.enable()
    return found


def least_seconds(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of each way's rounds: other programs on the machine only add to it."""
    return {name: min(each) for name, each in in_turns(ways, rounds).items()}


def median_ratio(seconds: list[float], of: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, of, strict=True))
