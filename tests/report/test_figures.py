"""Figures that a log contains or does not contain: own peaks and bounds, components, trends, ranks."""

import random

import pytest

from memkit._events.log import Event
from memkit._events.reader import EventLog
from memkit.recipes.report import write_report
from memkit.report.comparing import compare_figures
from memkit.report.figures import read_figures
from memkit.report.finding import ReportFinding
from memkit.report.findings import find_findings, headline
from memkit.report.rating import CAPS, RULES, rate
from memkit.report.words import Words
from tests.report.pages import log_of

GIB, MIB = 2**30, 2**20


def old(*pairs):
    """A log of the older form: name and record, or name and increment."""
    keys = {"peak": "peak_total_bytes", "added": "incremental_bytes"}
    return EventLog((), tuple(Event(name, **{keys[key]: value}) for name, key, value in pairs), form="array")


def peaks(log):
    return {stage.name: (stage.peak.low, stage.peak.high) for stage in read_figures(log, None).stages}


def test_stage_below_record_has_only_a_bound():
    log = old(("a", "peak", 5), ("b", "peak", 9), ("c", "peak", 9), ("d", "peak", 12))
    assert peaks(log) == {"a": (5, 5), "b": (9, 9), "c": (None, 9), "d": (12, 12)}
    assert read_figures(log, None).is_cumulative


def test_falling_record_means_reset():
    log = old(("a", "peak", 9), ("b", "peak", 4), ("c", "peak", 6), ("d", "peak", 6))
    assert peaks(log) == {"a": (9, 9), "b": (4, 4), "c": (6, 6), "d": (None, 6)}


def test_phases_of_our_own_logs():
    log = log_of(
        Event("f", phase="step/f", duration_ns=10, peak_bytes=7, peak_total_bytes=7),
        Event("f", phase="step/f", duration_ns=10, allocated_bytes=3, peak_total_bytes=7),
        Event("g", phase="step/g", duration_ns=5, allocated_bytes=3, peak_total_bytes=7),
        Event("h", phase="h", duration_ns=5),
    )
    assert peaks(log) == {"step/f": (7, 7), "step/g": (3, 7), "h": (None, None)}
    assert not read_figures(log, None).is_cumulative
    assert read_figures(log, None).stages[0].host_ns == 20


def test_own_peaks_alone_bound_the_peak_of_the_run_from_below():
    assert read_figures(log_of(Event("a", peak_bytes=7)), None).peak.is_exact is False
    assert read_figures(log_of(Event("a", peak_total_bytes=7)), None).peak.is_exact is True
    assert read_figures(log_of(Event("a", host_rss_bytes=7)), None).peak is None


def test_predictions_do_not_mix_with_measurements():
    log = log_of(Event("a", peak_bytes=7), Event("guess", peak_bytes=900, kind="predicted"))
    figures = read_figures(log, None)
    assert (figures.peak.num_bytes, figures.num_predicted) == (7, 1)
    figures = read_figures(log_of(Event("guess", peak_bytes=900), kind="predicted"), None)
    assert (figures.peak.num_bytes, figures.peak.origin.kind, figures.num_predicted) == (900, "predicted", 0)


def test_components_base_and_rest_add_up():
    log = log_of(
        Event("start", allocated_bytes=100),
        Event("vae_loaded", allocated_bytes=300),
        Event("warm_up", allocated_bytes=350),
        Event("dit_loaded", component="transformer", allocated_bytes=1350),
        Event("model_loaded", allocated_bytes=1400),
    )
    found = read_figures(log, None).components
    assert [(load.name, load.num_bytes, load.since) for load in found.loads] == [
        ("vae", 200, "start"),
        ("transformer", 1000, "warm_up"),
    ]
    assert (found.before_bytes, found.whole_bytes, found.unattributed_bytes) == (100, 1400, 100)


def test_a_component_without_an_earlier_event_says_so():
    found = read_figures(old(("t5_loaded", "peak", 50)), None).components
    assert (found.loads[0].num_bytes, found.loads[0].since) == (50, None)
    assert [load.num_bytes for load in found.loads[1:]] == [None, None]


@pytest.mark.parametrize(("slope", "noise", "grows"), [(2**21, 2**22, True), (0, 2**24, False), (2**10, 0, False)])
def test_distinguishes_growth_from_noise(slope, noise, grows):
    chance = random.Random(3)
    events = [
        Event(f"step_{n}", step=n, allocated_bytes=GIB + slope * n + chance.randint(0, noise)) for n in range(1, 101)
    ]
    steps = read_figures(log_of(*events), None).steps
    assert steps.trend.low <= slope <= steps.trend.high
    assert (steps.growth is not None) is grows


def test_steps_of_several_ranks_are_the_largest():
    events = [
        Event(f"step_{n}", step=n, rank=rank, allocated_bytes=10 * n + rank, peak_bytes=100 * n + rank)
        for n in (1, 2)
        for rank in (0, 1)
    ]
    figures = read_figures(log_of(*events), None)
    assert figures.ranks == {0: 200, 1: 201}
    assert [(step.held_bytes, step.peak.low, step.change_bytes) for step in figures.steps.steps] == [
        (11, 101, None),
        (21, 201, 10),
    ]


def test_the_peak_taken_apart_comes_from_a_trackers_note():
    note = {"peak_by_category": {"activation": 30, "parameter": 50}, "peak_by_module": {"a": True}}
    (split,) = read_figures(log_of(Event("mark", peak_bytes=90, note=note)), None).splits
    assert split.parts == (("parameter", 50), ("activation", 30))
    assert split.whole_bytes == 80


# ---- rating


def test_rating_uses_published_weights():
    events = [
        Event(f"step_{n}", step=n, allocated_bytes=8 * GIB, peak_bytes=(10 if n else 9) * GIB, reserved_bytes=12 * GIB)
        for n in range(20)
    ]
    rating = rate(read_figures(log_of(*events, total_bytes=16 * GIB), None))
    values = {each.rule.name: each.value for each in rating.marks}
    assert values == {
        "headroom": 0.25,
        "fragmentation": pytest.approx(1 / 6),
        "growth": 0.0,
        "spread": pytest.approx(0.1),
        "unattributed": None,
    }
    marks = [1.0, 1 - (1 / 6 - 0.05) / 0.25, 1.0, 1 - 0.08 / 0.28]
    assert rating.points == round(100 * sum(w * m for w, m in zip((30, 25, 20, 15), marks, strict=True)) / 90)
    assert sum(rule.weight for rule in RULES) == 100


def test_findings_cap_the_rating():
    events = [
        Event(f"step_{n}", step=n, allocated_bytes=8 * GIB, peak_bytes=12 * GIB, reserved_bytes=12 * GIB)
        for n in range(20)
    ]
    figures = read_figures(log_of(*events, total_bytes=16 * GIB), None)
    assert rate(figures).points == rate(figures, [ReportFinding(kind="level", severity="good")]).points == 100
    for severity, points in CAPS.items():
        rating = rate(
            figures, [ReportFinding(kind="leak", severity=severity), ReportFinding(kind="tight", severity="note")]
        )
        assert (rating.points, rating.uncapped) == (points, 100)


# ---- comparing


def test_changes_are_matched_by_name():
    before = old(("init", "peak", 0), ("t5_loaded", "peak", 50), ("gone", "peak", 60))
    after = old(("init", "peak", 0), ("t5_loaded", "peak", 40), ("new", "peak", 90))
    changes = {
        (change.group, change.name): change
        for change in compare_figures(read_figures(before, None), read_figures(after, None))
    }
    peak = changes["peak", "tensors"]
    assert (peak.before_bytes, peak.after_bytes, peak.change_bytes, peak.share) == (60, 90, 30, 0.5)
    assert changes["component", "t5"].change_bytes == -10
    assert (changes["stage", "new"].presence, changes["stage", "new"].change_bytes) == ("new", None)
    assert changes["stage", "gone"].presence == "gone"


@pytest.mark.parametrize(("rate", "course"), [(9_000, "slow"), (10, "flat"), (0, "flat"), (20_000, "growth")])
def test_growth_that_is_too_slow_to_matter_is_told_as_it_is(rate, course, tmp_path):
    held = [3 * 2**20 + rate * n for n in range(300)]
    log = log_of(*(Event("step", step=n, allocated_bytes=each, peak_bytes=each + 2**20) for n, each in enumerate(held)))
    write_report(log, tmp_path / "report.txt")
    page = " ".join((tmp_path / "report.txt").read_text().split())
    assert ("memory stays level over 300 steps" in page) == (course == "flat")
    assert ("Memory in tensors does not grow over the steps." in page) == (course == "flat")
    assert ("memory grows slowly, 8.79 KiB per step over 300 steps" in page) == (course == "slow")
    assert ("Memory grows 19.53 KiB per step" in page) == (course == "growth")
    share = rate * 299 / (held[-1] + 2**20)
    growth = next(line for line in page.split(" - ") if "growth over all steps" in line)
    assert f"{share if course != 'flat' else 0:.1%}" in growth


def ranks_log(held, peak=lambda _, number: 0):
    """Two ranks, 40 steps: what a rank holds after a step, and its peak beyond that."""
    events = [
        Event(f"step_{n}", step=n, rank=rank, allocated_bytes=held(rank, n), peak_bytes=held(rank, n) + peak(rank, n))
        for n in range(1, 41)
        for rank in (0, 1)
    ]
    return log_of(*events)


def test_growth_of_a_rank_that_holds_less_than_another_is_found():
    figures = read_figures(ranks_log(lambda rank, n: [8 * GIB, 2 * GIB + n * 50 * MIB][rank]), None)
    assert figures.steps.growth.rate == 50 * MIB
    (finding,) = find_findings(figures)
    assert (finding.kind, finding.rank) == ("leak", 1)
    assert headline(finding, Words("en")).endswith("(rank 1)")


def test_a_kind_is_found_once_where_it_is_worst():
    figures = read_figures(ranks_log(lambda rank, n: GIB + n * [90, 50][rank] * MIB), None)
    assert [(each.kind, each.rank) for each in find_findings(figures)] == [("leak", 0)]


def test_ranks_that_take_turns_do_not_grow():
    """The largest of both would rise and fall."""
    figures = read_figures(ranks_log(lambda rank, n: GIB, lambda rank, n: 100 * MIB * (1 + (n + rank) % 2)), None)
    assert [(each.kind, each.rank) for each in find_findings(figures)] == [("level", None)]


@pytest.mark.parametrize("first_is_known", [False, True])
def test_one_step_that_peaks_is_found_whatever_is_known_of_the_first(first_is_known):
    events = [
        Event(f"step_{n}", step=n, allocated_bytes=MIB, peak_bytes=(64 if n == 8 else 6) * MIB) for n in range(1, 35)
    ]
    if not first_is_known:
        events[0] = Event("step_1", step=1, allocated_bytes=MIB)
    (finding,) = find_findings(read_figures(log_of(*events), None))
    assert finding.kind == ("lone_peak" if first_is_known else "lone_peak_later")
    text = headline(finding, Words("en"))
    assert text.startswith("Only step 8 peaks at 64.00 MiB; the others take at most 6.00 MiB")
    assert ("the first one at least 1.00 MiB" in text) is not first_is_known
