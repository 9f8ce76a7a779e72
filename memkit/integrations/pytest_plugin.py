"""The pytest plugin: the marker `memory_limit`, the fixture `assert_no_leak`, the option ``--memkit-peaks``.

pytest loads this file at every start, so nothing here imports torch until a test needs it: `docs/track.md`.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from memkit._core.errors import MemkitError, MemkitWarning
from memkit._core.units import format_bytes
from memkit.integrations.pytest_limit import Limit, memory_limit

if TYPE_CHECKING:  # importing it imports torch
    from memkit.integrations.pytest_memory import AssertNoLeak, LimitWatch

_PROPERTY = "memkit_peak_bytes"
_HELP = (
    "memory_limit(limit, *, mode='tensors', device=None, gpu=None, selected_fraction=None): fail the test if tensors"
    " ever take more than `limit` ('64 MiB', or an int of bytes). mode='allocator' also counts operators' workspace;"
    " mode='fake' runs the test on tensors without data, with gpu='RTX 4090' on that GPU, and masks select the"
    " selected_fraction. device='cuda' counts only that device."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's option."""
    parser.getgroup("memkit").addoption(
        "--memkit-peaks",
        type=int,
        default=0,
        metavar="N",
        help="show the N memory_limit tests with the highest peaks",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _HELP)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker with invalid arguments before the test's fixtures are set up."""
    _limit_of(item)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a marked test and fail it above its limit. A test that fails by itself only gets a report section."""
    limit = _limit_of(item)
    if limit is None:
        return (yield)
    from memkit.integrations.pytest_memory import watch

    held = getattr(item, "obj", None), getattr(item, "funcargs", None)
    measured = watch(limit, *held)
    running = ExitStack()
    running.enter_context(measured.block)
    try:
        with running:
            result = yield
    except BaseException:
        item.add_report_section("call", "memkit", _note(item, limit, measured)[1])
        raise
    peak_bytes, text = _note(item, limit, measured)
    if peak_bytes > limit.num_bytes:
        pytest.fail(text, pytrace=False)
    _refuse_guesses(item, measured)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the highest peaks, if requested."""
    most: int = config.getoption("--memkit-peaks")
    peaks = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _PROPERTY
    }
    if most and peaks:
        terminalreporter.section("highest memory peaks")
        for nodeid in sorted(peaks, key=peaks.__getitem__, reverse=True)[:most]:
            terminalreporter.write_line(f"{format_bytes(peaks[nodeid]):>14}  {nodeid}")


@pytest.fixture
def assert_no_leak() -> AssertNoLeak:
    """``assert_no_leak(step, repeat=5, warmup=1)``: fail if calls of ``step`` leave more and more memory behind."""
    from memkit.integrations.pytest_memory import watch_for_leaks

    return watch_for_leaks


def _limit_of(item: pytest.Item) -> Limit | None:
    """Read a test's marker, the closest one if there are several."""
    marker = item.get_closest_marker("memory_limit")
    if marker is None:
        return None
    try:
        return memory_limit(*marker.args, **marker.kwargs)
    except (MemkitError, TypeError) as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def _refuse_guesses(item: pytest.Item, measured: LimitWatch) -> None:
    """Fail a test within its limit if it depends on values: tensors without data have none.

    Assertions in the code under test are assumed to hold, as in all predictions, with a warning.
    """
    estimate = measured.estimate() if measured.estimate is not None else None
    if estimate is None:
        return
    own = [each for each in estimate.assumptions if each.startswith(f"{item.path}:")]
    if own:
        text = "this test asserts on values, and its tensors have none (mode='fake')"
        fix = "assert on shapes, dtypes and devices here, and on values in a test without mode='fake'."
        pytest.fail("\n".join([f"{text}:", *(f"  {each}" for each in own), f"Way out: {fix}"]), pytrace=False)
    if estimate.doubts:
        text = "the memory peak is not known: it depends on values, and tensors have none (mode='fake')"
        fix = "make sizes and branches independent of values, or omit mode='fake'."
        lines = [f"  {each}" for each in estimate.doubts]
        pytest.fail("\n".join([f"{text}:", *lines, f"Way out: {fix}"]), pytrace=False)
    if estimate.assumptions:
        text = f"{item.nodeid} assumes: {'; '.join(estimate.assumptions)}"
        warnings.warn_explicit(text, MemkitWarning, str(item.path), (item.location[1] or 0) + 1)


def _note(item: pytest.Item, limit: Limit, measured: LimitWatch) -> tuple[int, str]:
    """Attach the peak to the test's report; return it with a readable text."""
    peak_bytes = measured.peak_bytes()
    item.user_properties.append((_PROPERTY, peak_bytes))
    lines = [
        f"memory peak {format_bytes(peak_bytes)}, limit {format_bytes(limit.num_bytes)}",
        f"{peak_bytes:,} B, limit {limit.num_bytes:,} B",
    ]
    if limit.mode == "fake":
        lines.append("This test ran on tensors without data (mode='fake'): values read from them are 1, or False.")
    return peak_bytes, "\n".join([*lines, "", measured.table()])
