"""What the pytest plugin measures with: loaded by the first test that needs it, because it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

from memkit._core.errors import ConfigError
from memkit._core.units import KIB, format_bytes
from memkit._recorder.recorder import Recorder
from memkit.integrations.pytest_limit import Limit
from memkit.memory.leaks import LeakWatch
from memkit.memory.track import Tracker

if TYPE_CHECKING:  # it is made where a test runs without data, and read here
    from memkit.predict.estimate import MemoryEstimate

_SMALLEST_GROWTH_BYTES = KIB  # per call: numbers that a step logs stay below it
_ROWS = 8  # lines of code that are named where no holder is found


class LimitWatch(NamedTuple):
    """A block of code to be, and what can be asked when it is over.

    Attributes:
        block: What the code runs in.
        peak_bytes: The most bytes at once.
        table: What they were made of, for people.
        estimate: The simulated peak with its guesses; None where tensors have data.
    """

    block: AbstractContextManager[Any]
    peak_bytes: Callable[[], int]
    table: Callable[[], str]
    estimate: Callable[[], MemoryEstimate] | None = None


class AssertNoLeak(Protocol):
    """The type of the fixture's value, `watch_for_leaks`."""

    def __call__(self, step: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> None:
        """Fail the test if calls of ``step`` leave more and more behind."""


def watch(limit: Limit, *held: object) -> LimitWatch:
    """Make ready to measure a test as its marker says.

    Args:
        limit: The marker.
        held: The test function and its fixtures: on fake tensors they get stand-ins for their tensors.

    Raises:
        ConfigError: This machine has no such device.
    """
    if limit.mode != "fake":
        tracker = Tracker(device=limit.device, workspace=limit.mode == "allocator")

        def table() -> str:  # the summary names its own way to count more
            return tracker.summary().replace("track(workspace=True)", "mode='allocator'")

        return LimitWatch(tracker, lambda: tracker.peak_bytes, table)
    if limit.gpu is not None:
        from memkit.predict.virtual_gpu import VirtualGPU  # fake tensors are heavy: on demand

        card = VirtualGPU(limit.gpu, selected_fraction=limit.selected_fraction)
        return LimitWatch(card, lambda: card.peak_bytes, lambda: card.estimate().explain(), card.estimate)
    from memkit._simulation.leftovers import empty_caches
    from memkit._simulation.simulation import Host, Simulation, as_by_itself
    from memkit.predict.estimate import MemoryEstimate

    simulation = Simulation(Host(), selected_fraction=limit.selected_fraction)
    recorded = simulation.watch()

    @contextmanager
    def without_data() -> Iterator[None]:
        try:
            with as_by_itself(), simulation.running(*held), recorded:
                yield
        finally:
            empty_caches(simulation.tensors)

    def estimate() -> MemoryEstimate:
        return MemoryEstimate.of(recorded.record())

    return LimitWatch(without_data(), lambda: estimate().peak_bytes, lambda: estimate().explain(), estimate)


def watch_for_leaks(step: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> None:
    """Fail the test if calls of a function leave more and more behind.

    Two things are looked at after each call: what the leak watch names (`docs/leaks.md`), and the bytes of live tensors
    that the calls made or used. The first fails where it still names a holder after the last call; the second where at
    least 1 KiB was added by each call.

    Args:
        step: What to repeat, such as a training step. What it returns is dropped.
        repeat: Calls that are looked at, 3 or more.
        warmup: Calls before these: caches, the optimizer's state.

    Raises:
        ConfigError: Fewer than 3 calls, or a negative ``warmup``.
    """
    __tracebackhide__ = True
    if repeat < 3 or warmup < 0:
        raise ConfigError(
            f"assert_no_leak(step, repeat={repeat}, warmup={warmup})",
            got=f"{repeat} calls after {warmup}",
            expected="3 calls or more, after none or more: less shows no growth",
            fix="leave both out for 5 calls after 1.",
        )
    leak_watch = LeakWatch()
    with Recorder() as recorder:
        for _ in range(warmup):
            step()
        leaks = leak_watch.check()
        levels = [recorder.live_bytes()]
        for _ in range(repeat):
            step()
            leaks = leak_watch.check()
            levels.append(recorder.live_bytes())
    added = [after - before for before, after in pairwise(levels)]
    if leaks:
        pytest.fail("\n\n".join([_what_grew(repeat, added), *map(str, leaks)]))
    if min(added) >= _SMALLEST_GROWTH_BYTES:
        by_line = list(recorder.recording().live_by("source").items())[:_ROWS]
        rows = [f"{format_bytes(nbytes):>14}  {line or '(there before)'}" for line, nbytes in by_line]
        unnamed = "No holder was found. Live after the last call, by the line that made it:"
        pytest.fail("\n".join([_what_grew(repeat, added), "", unnamed, *rows]))


def _what_grew(repeat: int, added: list[int]) -> str:
    calls = ", ".join(map(format_bytes, added))
    return f"memory grows: {format_bytes(sum(added))} of live tensors more after {repeat} calls ({calls})"
