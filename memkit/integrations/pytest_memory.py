"""Measuring code of the pytest plugin: imported by the first test that needs it, because it imports torch."""

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

if TYPE_CHECKING:  # it is only imported if a test runs without data
    from memkit.predict.estimate import MemoryEstimate

_SMALLEST_GROWTH_BYTES = KIB  # per call: numbers that a step logs take less
_ROWS = 8  # lines of code to show if no holder is found


class LimitWatch(NamedTuple):
    """A context for code to measure, and functions that return the results afterwards.

    Attributes:
        block: The context manager to run the code in.
        peak_bytes: Returns the peak bytes.
        table: Returns the breakdown of the peak, as readable text.
        estimate: Returns the simulated peak with its guesses; None if the tensors have data.
    """

    block: AbstractContextManager[Any]
    peak_bytes: Callable[[], int]
    table: Callable[[], str]
    estimate: Callable[[], MemoryEstimate] | None = None


class AssertNoLeak(Protocol):
    """The type of the value of the fixture `assert_no_leak`: `watch_for_leaks`."""

    def __call__(self, step: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> None:
        """Fail the test if calls of ``step`` leave more and more memory behind."""


def watch(limit: Limit, *held: object) -> LimitWatch:
    """Prepare to measure a test with the settings of its marker.

    Args:
        limit: The marker.
        held: The test function and its fixtures: on fake tensors they get stand-ins for their tensors.

    Raises:
        ConfigError: This machine does not have the device.
    """
    if limit.mode != "fake":
        tracker = Tracker(device=limit.device, workspace=limit.mode == "allocator")

        def table() -> str:  # the summary names its own option to show more
            return tracker.summary().replace("track(workspace=True)", "mode='allocator'")

        return LimitWatch(tracker, lambda: tracker.peak_bytes, table)
    if limit.gpu is not None:
        from memkit.predict.virtual_gpu import VirtualGPU  # fake tensors are heavy: on demand

        card = VirtualGPU(limit.gpu, selected_fraction=limit.selected_fraction)
        return LimitWatch(card, lambda: card.peak_bytes, lambda: card.estimate().explain(), card.estimate)
    from memkit._simulation.leftovers import empty_caches
    from memkit._simulation.simulation import Host, Simulation, default_modes
    from memkit.predict.estimate import MemoryEstimate

    simulation = Simulation(Host(), selected_fraction=limit.selected_fraction)
    recorded = simulation.watch()

    @contextmanager
    def without_data() -> Iterator[None]:
        try:
            with default_modes(), simulation.running(*held), recorded:
                yield
        finally:
            empty_caches(simulation.tensors)

    def estimate() -> MemoryEstimate:
        return MemoryEstimate.of(recorded.record())

    return LimitWatch(without_data(), lambda: estimate().peak_bytes, lambda: estimate().explain(), estimate)


def watch_for_leaks(step: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> None:
    """Fail the test if calls of a function leave more and more memory behind.

    Two things are checked after each call: the holders that the leak watch reports (`docs/memory-manager.md`), and the
    bytes of live tensors that the calls created or used. The first fails if a holder is still reported after the last
    call; the second if every call added at least 1 KiB.

    Args:
        step: The function to repeat, such as a training step. Its result is dropped.
        repeat: Number of measured calls, 3 or more.
        warmup: Calls before them, for caches and the optimizer's state.

    Raises:
        ConfigError: There are fewer than 3 calls, or ``warmup`` is negative.
    """
    __tracebackhide__ = True
    if repeat < 3 or warmup < 0:
        raise ConfigError(
            f"assert_no_leak(step, repeat={repeat}, warmup={warmup})",
            got=f"{repeat} calls after {warmup}",
            expected="repeat of at least 3 and warmup of at least 0: fewer calls cannot show growth",
            fix="omit both for repeat=5, warmup=1.",
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
        pytest.fail("\n\n".join([_describe_growth(repeat, added), *map(str, leaks)]))
    if min(added) >= _SMALLEST_GROWTH_BYTES:
        by_line = list(recorder.recording().live_by("source").items())[:_ROWS]
        rows = [f"{format_bytes(nbytes):>14}  {line or '(created before)'}" for line, nbytes in by_line]
        unnamed = "No holder was found. Live bytes after the last call, by the line that created them:"
        pytest.fail("\n".join([_describe_growth(repeat, added), "", unnamed, *rows]))


def _describe_growth(repeat: int, added: list[int]) -> str:
    calls = ", ".join(map(format_bytes, added))
    if sum(added) <= 0:
        return f"memory grows over {repeat} calls, by tensors that this thread's operators did not create:"
    return f"memory grows: {format_bytes(sum(added))} more in live tensors after {repeat} calls ({calls})"
