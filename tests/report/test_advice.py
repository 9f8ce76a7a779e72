"""A log's figures as facts for advice, and the section that shows it."""

import pytest

from memkit._core.units import GIB
from memkit._events.log import Event
from memkit.recipes.report import make_report
from memkit.report.advice import recommend
from memkit.report.figures import read_figures
from memkit.report.findings import find_findings
from memkit.report.nodes import Table
from memkit.report.words import Words
from tests.report.pages import first_log, log_of


def advice_of(log, total_bytes=None):
    figures = read_figures(log, total_bytes)
    return {tip.remedy: tip for tip in recommend(figures, find_findings(figures), Words("en"))}


def test_the_first_program():
    advice = advice_of(first_log())
    assert list(advice) == [  # remedies that keep the results, that change them, and that do not affect them
        "offload_component",
        "half_bits",
        "smaller_component",
        "reset_peaks",
        "track",
        "record_reserved",
    ]
    assert advice["offload_component"].evidence == "t5 takes 10.58 GiB, 45.7% of the peak"
    assert advice["half_bits"].saves_bytes == advice["offload_component"].saves_bytes // 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "expandable_segments"),
        ({"expandable_segments": False}, "expandable_segments"),
        ({"expandable_segments": True}, "fewer_shapes"),
    ],
)
def test_does_not_advise_segments_already_in_snapshot(config, expected):
    log = log_of(Event("end", peak_bytes=4 * GIB, reserved_peak_bytes=20 * GIB), config=config)
    advice = advice_of(log)
    assert set(advice) == {expected}
    assert advice[expected].saves_bytes == 16 * GIB
    assert advice[expected].topic == "fragmentation"


def test_a_full_card_and_an_empty_one():
    log = log_of(Event("end", peak_bytes=10 * GIB, reserved_peak_bytes=10 * GIB), total_bytes=None)
    advised = {size: set(advice_of(log, size * GIB)) for size in (11, 16, 48)}
    assert advised == {11: {"micro_batches", "larger_card"}, 16: set(), 48: {"larger_batch"}}
    assert advice_of(log) == {}  # the capacity is not known


def test_names_memory_beyond_loaded_components():
    log = log_of(
        Event("model_loaded", allocated_bytes=6 * GIB),
        Event("forward", peak_bytes=12 * GIB, reserved_peak_bytes=12 * GIB, allocated_bytes=6 * GIB),
    )
    advice = advice_of(log)
    assert set(advice) == {"checkpoint", "chunks"}
    assert advice["checkpoint"].saves_bytes == 6 * GIB
    assert advice["checkpoint"].evidence == "6.00 GiB are used on top of the loaded components, 50.0% of the peak"


def test_growth_advises_finding_holders():
    same = {"peak_bytes": 2 * GIB, "reserved_peak_bytes": 2 * GIB}
    steps = [Event(f"step_{n}", allocated_bytes=n * GIB // 10, **same) for n in range(1, 11)]
    advice = advice_of(log_of(*steps, total_bytes=None))
    assert set(advice) == {"find_leak"}
    assert advice["find_leak"].evidence == "memory grows by 102.40 MiB per step"


def test_the_section_says_whether_results_stay_the_same():
    section = next(each for each in make_report(first_log()).sections if each.title == "Advice")
    tables = [node for node in section.nodes if isinstance(node, Table)]
    assert [[row[2] for row in table.rows] for table in tables] == [["the same", "", ""], ["change"], ["change", ""]]
