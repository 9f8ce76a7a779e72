"""Advice, budgets and the summary's text, from figures that only a large card has."""

import math

import pytest

import memkit as mk
from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.records import DeviceMemory, HostMemory, MemorySnapshot
from memkit._core.units import GIB, MIB, parse_budget
from memkit.memory.advice import find_tips
from memkit.memory.phases import PhaseTotals
from memkit.memory.summary import summarize
from tests.helpers import assert_refused

ROOMY = HostMemory(rss_bytes=2 * GIB, available_bytes=100 * GIB, total_bytes=128 * GIB, limited_by="machine")


def card(allocated, reserved, *, split=0):
    """A card between two steps: little is in tensors, and the allocator keeps the rest for the next step."""
    return DeviceMemory(
        allocated_bytes=2 * GIB,
        reserved_bytes=reserved,
        peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        inactive_split_bytes=split,
    )


def test_no_advice_on_cpu_or_for_reused_cache():
    assert find_tips(DeviceMemory(), ROOMY, {}, ()) == []
    assert find_tips(card(18 * GIB, 20 * GIB), ROOMY, {}, ()) == []  # 2 GiB now, but 18 in each step
    assert find_tips(card(100 * MIB, 900 * MIB), ROOMY, {}, ()) == []  # not worth a change


def test_fragmentation_advice_has_amount_and_setting():
    (advice,) = find_tips(card(12 * GIB, 20 * GIB, split=3 * GIB), ROOMY, {}, ())
    assert str(advice) == (
        "fragmentation: at most 12.00 GiB were in tensors at once, and 20.00 GiB were reserved; 3.00 GiB are free now "
        "in partly used blocks. Start the process with PYTORCH_ALLOC_CONF=expandable_segments:True in its "
        "environment, or use fewer different batch shapes. After the first use of the device the setting has no "
        "effect."
    )


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_does_not_advise_active_expandable_segments(name):
    settings = {name: "garbage_collection_threshold:0.8,expandable_segments:True"}
    (advice,) = find_tips(card(12 * GIB, 20 * GIB), ROOMY, settings, ())
    assert "already on" in advice.action


def test_contradictory_settings():
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
    }
    both, mixed = find_tips(DeviceMemory(), ROOMY, settings, ())
    assert both.action == "Keep PYTORCH_ALLOC_CONF and remove PYTORCH_CUDA_ALLOC_CONF."
    assert mixed.action == "Remove max_split_size_mb."
    assert find_tips(DeviceMemory(), ROOMY, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, ()) == []


def test_nearly_full_host_names_its_limit():
    host = HostMemory(rss_bytes=14 * GIB, available_bytes=GIB, total_bytes=16 * GIB, limited_by="cgroup")
    (advice,) = find_tips(DeviceMemory(), host, {}, ())
    assert advice.evidence == "1.00 GiB of 16.00 GiB are left, limited by the cgroup"


def test_others_on_the_card():
    assert "process 17 computes on it too" in str(find_tips(DeviceMemory(), ROOMY, {}, (17,))[0])
    assert "processes 17, 18 compute on it too" in str(find_tips(DeviceMemory(), ROOMY, {}, (17, 18))[0])


# ---- budget


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(1.0, 1000), (0.5, 500), ("22GB", 22 * 10**9), ("1.5 GiB", 3 * 2**29), ("7B", 7), (10**15, 10**15)],
)
def test_budget_forms(budget, expected):
    assert parse_budget(budget, 1000) == expected


@pytest.mark.parametrize("budget", [0, 0.0, 1.5, -0.1, math.nan, math.inf, "0GiB"])
def test_rejects_nonpositive_budgets(budget):
    words = "expected a size above zero, or a fraction in (0, 1]"
    assert_refused(lambda: mk.MemoryManager("cpu", budget=budget), ConfigError, words)


@pytest.mark.parametrize(
    ("budget", "error"),
    [(True, InputTypeError), ([1], InputTypeError), (-5, InputError), ("half", InputError), ("22", InputError)],
)
def test_rejects_budgets_that_are_not_sizes(budget, error):
    assert_refused(lambda: mk.MemoryManager("cpu", budget=budget), error, "budget=")


def test_a_fraction_of_an_unknown_capacity():
    assert_refused(lambda: parse_budget(0.5, None), ConfigError, "on a device whose capacity is unknown")
    assert parse_budget("1GiB", None) == GIB


# ---- text


def test_summary_text():
    snapshot = MemorySnapshot(
        allocated_bytes=2 * GIB,
        reserved_bytes=20 * GIB,
        peak_bytes=18 * GIB,
        free_bytes=3 * GIB,
        total_bytes=24 * GIB,
        host_rss_bytes=3 * GIB,
        host_peak_bytes=4 * GIB,
        host_available_bytes=50 * GIB,
        host_total_bytes=64 * GIB,
        host_limited_by="cgroup",
    )
    phases = {
        "open": PhaseTotals(),
        "step": PhaseTotals(3, 3_600_000_000, 2_000_000_000, 18 * GIB, 18 * GIB, 4 * GIB, 4 * GIB),
        "step/forward": PhaseTotals(3, 1_200_000_000, 500_000_000, 12 * GIB, 18 * GIB, None, 4 * GIB),
        "step/log": PhaseTotals(3, 90_000, 50_000, None, None, None, 4 * GIB),
    }
    assert summarize(snapshot, "cuda:0", phases, ["topic: evidence. action"]).splitlines() == [
        (
            "cuda:0: allocated 2.00 GiB, reserved 20.00 GiB, peak 18.00 GiB, of 24.00 GiB | host: process 3.00 GiB "
            "(peak 4.00 GiB), available 50.00 GiB (limited by cgroup)"
        ),
        "",
        "phase         calls  host time       mean    longest         peak of tensors  peak of process",
        "step              3     3.60 s     1.20 s     2.00 s               18.00 GiB         4.00 GiB",
        "step/forward      3     1.20 s  400.00 ms  500.00 ms  12.00 GiB to 18.00 GiB      <= 4.00 GiB",
        "step/log          3      90 us      30 us      50 us            not recorded      <= 4.00 GiB",
        "",
        "'<=': no block of the phase set a new record, so only an upper bound of its peak is known.",
        "'to': a block set a record, the first size; later ones did not, and stayed below the second.",
        "Times are by the host's clock: an accelerator may still be working when the host is done.",
        "- topic: evidence. action",
    ]
