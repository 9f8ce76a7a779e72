"""`fits` against what people reported: runs that ran out of memory on a named card, and runs that did not."""

import json
from pathlib import Path

import pytest

from memkit._core.units import GIB, parse_bytes
from memkit.predict.gpus import find_gpu
from tests.predict.estimates import estimate_with

REPORTS = json.loads((Path(__file__).parents[1] / "data" / "reported_fits.json").read_text("utf-8"))


def estimate(num_bytes, context_bytes):
    """An estimate that knows what the report says: so much in torch's allocator, so much outside."""
    return estimate_with(parameters_bytes=num_bytes, reserved_bytes=num_bytes, context_bytes=context_bytes)


def held(report):
    names = ("reserved", "allocated", "unallocated", "process")
    return sum(parse_bytes(report[name]) for name in names if name in report)


def identify(report):
    return f"{report['card']} {report['source']} {report.get('what', '')}"


def asked(report):
    """The total need of the process: the table's context is added where the report does not count it."""
    context_bytes = 0 if "process" in report else find_gpu(report["card"]).context_bytes
    return estimate(held(report) + parse_bytes(report["tried"]), context_bytes)


def test_has_enough_distinct_reports():
    failed, fitted = REPORTS["out_of_memory"], REPORTS["fits"]
    assert len({(row["source"], row["tried"]) for row in failed}) == len(failed) >= 50
    assert len({json.dumps(row) for row in fitted}) == len(fitted) >= 50
    assert len({find_gpu(row["card"]).name for row in failed}) >= 30


@pytest.mark.parametrize("report", REPORTS["out_of_memory"], ids=identify)
def test_reported_out_of_memory_does_not_fit(report):
    assert not asked(report).fits(report["card"])


@pytest.mark.parametrize("report", REPORTS["fits"], ids=identify)
def test_reported_fit_fits(report):
    gpu = find_gpu(report["card"])
    if "whole" in report:  # with the context
        assert estimate(parse_bytes(report["whole"]), 0).fits(report["card"])
    else:
        assert estimate(parse_bytes(report["allocated"]), gpu.context_bytes).fits(report["card"])


@pytest.mark.parametrize("report", REPORTS["shared"], ids=identify)
def test_shared_card_counts_other_processes(report):
    """Alone the process would have fitted; with what the message shows outside of it, it does not."""
    assert asked(report).fits(report["card"])
    outside_bytes = parse_bytes(report["total"]) - parse_bytes(report["free"]) - held(report)
    assert not estimate(held(report) + parse_bytes(report["tried"]), outside_bytes).fits(report["card"])


@pytest.mark.parametrize(
    "report", [row for name in ("out_of_memory", "shared") for row in REPORTS[name] if "total" in row], ids=identify
)
def test_the_total_in_a_message_lies_in_the_interval_of_the_table(report):
    lowest, highest = find_gpu(report["card"]).total_interval
    rounding = 0.005 * GIB
    assert lowest - rounding <= parse_bytes(report["total"]) <= highest + rounding


def test_the_number_on_the_box_would_be_wrong():
    """The purpose of the table: without it the verdict on these reports would have been "fits"."""
    promised = [
        report
        for report in REPORTS["out_of_memory"]
        if asked(report).reserved_bytes <= find_gpu(report["card"]).box_bytes
    ]
    assert len(promised) >= 20
