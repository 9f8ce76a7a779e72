"""Phases: peaks out of one shared counter, paths, order, threads, errors; what a tracker adds."""

import mmap
import threading

import pytest
import torch
from hypothesis import given, strategies as st

import memkit as mk
from memkit._machine import devices
from memkit.memory.phases import IntervalPeak, PhaseTotals, RestartedPeaks, peak_by_record
from tests.forked import run_python_forked
from tests.helpers import assert_refused


class Counter:
    """An allocator's two numbers: bytes in use, and their record since the last restart."""

    def __init__(self):
        self.now = self.record = 0
        self.history = []

    def change(self, num_bytes):
        self.now = max(0, self.now + num_bytes)
        self.record = max(self.record, self.now)
        self.history.append(self.now)

    def restart(self):
        self.record = self.now
        return self.record

    def true_peak_since(self, index, level):
        return max([level, *self.history[index:]])


# A change of the bytes in use, or the beginning (None) or the end (which open block: blocks need not nest) of a block.
ACTIONS = st.lists(st.one_of(st.integers(-60, 60), st.none(), st.tuples(st.integers(0, 10))), max_size=60)


@given(ACTIONS)
def test_restarted_peaks_are_those_of_the_blocks_themselves(actions):
    counter = Counter()
    peaks = RestartedPeaks(counter.restart)
    open_blocks = []
    for action in actions:
        if action is None:
            block = object()
            peaks.begin(block, counter.record)
            open_blocks.append((block, len(counter.history), counter.now))
        elif isinstance(action, int):
            counter.change(action)
        elif open_blocks:
            block, index, level = open_blocks.pop(action[0] % len(open_blocks))
            true = counter.true_peak_since(index, level)
            assert peaks.end(block, counter.record) == (true, true)


@given(ACTIONS)
def test_peaks_by_record_are_exact_or_bounded(actions):
    counter = Counter()
    open_blocks = []
    for action in actions:
        if action is None:
            open_blocks.append((counter.record, len(counter.history), counter.now))
        elif isinstance(action, int):
            counter.change(action)
        elif open_blocks:
            first, index, level = open_blocks.pop(action[0] % len(open_blocks))
            true = counter.true_peak_since(index, level)
            known, at_most = peak_by_record(first, counter.record)
            assert (known is not None) == (true > first)
            assert known in (None, true)
            assert true <= at_most


def test_foreign_counter_reset_voids_the_peak():
    assert peak_by_record(100, 40) == (None, None)  # 40 is no bound: the block may have held 99 before
    assert peak_by_record(None, None) == (None, None)


def test_totals_keep_largest_peak_and_overall_bound():
    totals = PhaseTotals()
    totals.add(5, IntervalPeak(70, 70), IntervalPeak(None, 9))
    totals.add(3, IntervalPeak(None, 90), IntervalPeak(None, 8))
    assert (totals.num_calls, totals.duration_ns, totals.longest_ns) == (2, 8, 5)
    assert (totals.peak_bytes, totals.peak_at_most_bytes) == (70, 90)
    assert (totals.host_peak_bytes, totals.host_peak_at_most_bytes) == (None, 9)
    totals.add(1, IntervalPeak(None, None), IntervalPeak(None, 1))
    assert (totals.peak_bytes, totals.peak_at_most_bytes) == (70, None)  # the last one may have been larger


# ---- paths


def test_paths_nest_and_outer_phases_come_first():
    memory = mk.MemoryManager("cpu")
    for _ in range(2):
        with memory.phase("step"):
            with memory.phase("forward"):
                pass
            with memory.phase("loss/mean"):
                pass
    assert list(memory.phases) == ["step", "step/forward", "step/loss/mean"]
    assert [each.num_calls for each in memory.phases.values()] == [2, 2, 2]
    events = [(event.event, event.phase) for event in memory.events]
    assert events[:3] == [("forward", "step/forward"), ("loss/mean", "step/loss/mean"), ("step", "step")]


def test_an_outer_phase_takes_at_least_as_long_as_those_inside_it():
    memory = mk.MemoryManager("cpu")
    with memory.phase("outer"):
        for _ in range(3):
            with memory.phase("inner"):
                threading.Event().wait(0.01)
    inner, outer = memory.phases["outer/inner"], memory.phases["outer"]
    assert outer.duration_ns >= inner.duration_ns >= 3e7
    assert 3 * inner.longest_ns >= inner.duration_ns > inner.longest_ns


@pytest.mark.parametrize(("has_log", "waits"), [(False, [True, True, False]), (True, [True, False, False])])
def test_blocks_wait_to_be_evaluated(tmp_path, has_log, waits):
    memory = mk.MemoryManager("cpu", log=tmp_path / "memory_events.jsonl" if has_log else None)
    for seconds, still_waits in zip((0.05, 0.5, 1.5), waits, strict=True):
        memory._ledger.settle()
        memory._ledger.due_ns -= int(seconds * 1e9)
        with memory.phase("forward"):
            pass
        assert bool(memory._ledger.ended) == still_waits, seconds
    assert memory.phases["forward"].num_calls == 3


def test_no_more_than_a_thousand_blocks_wait():
    memory = mk.MemoryManager("cpu")
    memory._ledger.due_ns = 2**62
    for number in range(1, 1001):
        memory.step()
        assert len(memory._ledger.ended) == number % 1000
    memory.close()


def test_an_error_passes_and_is_noted():
    memory = mk.MemoryManager("cpu")
    error = ValueError("the user's own")
    with pytest.raises(ValueError, match="the user's own") as info, memory.phase("a"), memory.phase("b"):
        raise error
    assert info.value is error
    assert [(event.phase, event.note) for event in memory.events] == [
        ("a/b", {"error": "ValueError"}),
        ("a", {"error": "ValueError"}),
    ]
    with memory.phase("c"):
        pass
    assert list(memory.phases) == ["a", "a/b", "c"]


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_phase_needs_a_name(name):
    assert_refused(lambda: mk.MemoryManager("cpu").phase(name), mk.errors.InputError, r"expected a non-empty name")


def test_one_phase_is_one_block():
    memory = mk.MemoryManager("cpu")
    phase = memory.phase("forward")
    with phase, pytest.raises(mk.errors.StateError, match=r"already entered"), phase:
        pass
    with pytest.raises(mk.errors.StateError, match=r"creates a new phase on each call"), phase:
        pass
    assert memory.phases["forward"].num_calls == 1
    with memory.phase("next"):
        pass
    assert "next" in memory.phases  # not "forward/next": nothing was left open


def test_a_phase_ends_once_and_after_its_beginning():
    memory = mk.MemoryManager("cpu")
    phase = memory.phase("forward")
    assert_refused(
        lambda: phase.__exit__(None, None, None), mk.errors.StateError, "write `with memory.phase('forward')"
    )
    with phase:
        pass
    assert_refused(lambda: phase.__exit__(None, None, None), mk.errors.StateError, "a phase that is not open")
    assert memory.phases["forward"].num_calls == 1


def test_open_generator_does_not_affect_other_paths():
    memory = mk.MemoryManager("cpu")

    def batches():
        with memory.phase("data"):
            yield 1
            yield 2

    with memory.phase("epoch"):
        loader = batches()
        next(loader)
        with memory.phase("forward"):  # the generator's block is open: it counts as around this one
            pass
    with memory.phase("later"):
        loader.close()
    with memory.phase("last"):
        pass
    assert list(memory.phases) == ["epoch", "epoch/data", "epoch/data/forward", "epoch/data/later", "last"]
    assert all(each.num_calls == 1 for each in memory.phases.values())


def test_only_evaluations_note_the_graphs_that_they_build():
    """A report looks for them nowhere else, and each count costs time in a training step."""
    memory = mk.MemoryManager("cpu")
    weight = torch.ones(2, requires_grad=True)
    for name in ("forward", "validation", "inner"):
        with memory.phase(name), torch.set_grad_enabled(name != "inner"):
            weight.mul(2).mul(3)
    with memory.phase("validation"), torch.no_grad(), memory.phase("inner"):
        weight.mul(2)
    with memory.phase("validation"), memory.phase("inner"):
        weight.mul(2)
    notes = [(event.phase, event.note) for event in memory.events]
    assert notes == [
        ("forward", None),
        ("validation", {"graph_nodes": 2}),
        ("inner", None),
        ("validation/inner", None),
        ("validation", None),
        ("validation/inner", {"graph_nodes": 1}),
        ("validation", {"graph_nodes": 1}),
    ]


def test_each_thread_has_paths_of_its_own():
    memory = mk.MemoryManager("cpu")
    gate = threading.Barrier(8)

    def work(number):
        gate.wait()
        for _ in range(1000):
            with memory.phase(f"thread {number}"), memory.phase("inner"):
                pass

    with memory.phase("main"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = {"main"} | {f"thread {n}{inner}" for n in range(8) for inner in ("", "/inner")}
    assert set(memory.phases) == expected
    assert {each.num_calls for path, each in memory.phases.items() if path != "main"} == {1000}


def test_phase_ending_in_other_thread_is_closed():
    memory = mk.MemoryManager("cpu")
    phase = memory.phase("moved")
    phase.__enter__()
    thread = threading.Thread(target=phase.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with memory.phase("next"):
        pass
    assert list(memory.phases) == ["moved", "next"]


# ---- what a tracker adds


def make_tensors():
    x = torch.ones(2**18)
    return (x * 2).sum()


def test_under_a_tracker_a_phase_knows_its_peak_and_the_live_bytes():
    memory = mk.MemoryManager("cpu")
    with memory.track() as tracker:
        held = torch.ones(2**16)
        with memory.phase("outer"):
            with memory.phase("large"):
                make_tensors()
            with memory.phase("small"):
                pass
        assert memory.snapshot().allocated_bytes == held.nbytes
    phases = memory.phases
    assert phases["outer/large"].peak_bytes == phases["outer"].peak_bytes == tracker.peak_bytes > 2 * 2**20
    assert phases["outer/small"].peak_bytes == held.nbytes
    *phases_only, tracked = memory.events
    assert [event.allocated_bytes for event in phases_only] == [held.nbytes] * 3
    assert (tracked.event, tracked.peak_bytes) == ("track", tracker.peak_bytes)
    assert memory.snapshot().allocated_bytes is None  # nobody counts any more: unknown, not zero


def test_partly_watched_phase_has_no_peak():
    memory = mk.MemoryManager("cpu")
    with memory.phase("before and in"), memory.track():
        make_tensors()
    tracked = memory.track()
    tracked.__enter__()
    with memory.phase("in and after"):
        make_tensors()
        tracked.__exit__(None, None, None)
    with memory.track(), memory.phase("around another tracker"), memory.track():
        make_tensors()
    with memory.track():
        phase = memory.phase("into another tracker")
        phase.__enter__()
        with memory.track():
            make_tensors()
            phase.__exit__(None, None, None)
    known = {path: totals.peak_bytes is not None for path, totals in memory.phases.items()}
    assert known == {
        "before and in": False,
        "in and after": False,
        "around another tracker": True,
        "into another tracker": False,
    }


# ---- the process's own peak


def touch(num_bytes):
    """Not through the heap, which may have room that is resident already."""
    with mmap.mmap(-1, num_bytes) as memory:
        memory.write(b"1" * num_bytes)


def test_with_reset_peaks_each_phase_has_the_processs_own_peak():
    if not devices.ResidentPeak().restart():
        pytest.skip("Requires: [clear_refs]")
    memory = mk.MemoryManager("cpu", reset_peaks=True)
    with memory.phase("outer"):
        with memory.phase("large"):
            touch(2**26)
        with memory.phase("small"):
            pass
    outer, large, small = memory.phases.values()
    assert outer.host_peak_bytes == large.host_peak_bytes == large.host_peak_at_most_bytes
    assert 0.9 * 2**26 < large.host_peak_bytes - small.host_peak_bytes < 2.5 * 2**26  # with what is written to it
    assert memory.snapshot().host_peak_bytes >= large.host_peak_bytes  # the run's peak survives the restarts


def test_a_short_phase_that_never_raises_the_peak_is_not_read_until_one_does():
    """Reading takes a third of a phase's time; the next reading, here the step's, bounds those without one."""
    out = run_python_forked("""
        import mmap
        import memkit as mk

        def touch(num_bytes):
            with mmap.mmap(-1, num_bytes) as memory:
                memory.write(b"1" * num_bytes)

        memory = mk.MemoryManager("cpu")
        touch(2**22)  # later rises are real ones
        memory.step()

        def call(name, num_bytes=0):
            with memory.phase(name):
                touch(num_bytes) if num_bytes else None
            memory.step()
            return memory.phases[name]

        for _ in range(40):
            forward = call("forward")
        print(memory._ledger.steady, forward.host_peak_bytes)
        before = forward.host_peak_at_most_bytes
        grown = call("forward", 2**24)  # nobody knows which phase of the step it was
        print(grown.host_peak_bytes, grown.host_peak_at_most_bytes - before > 2**23, memory._ledger.steady)
        known = call("forward", 2**25)  # read again
        print(known.host_peak_bytes == known.host_peak_at_most_bytes, known.host_peak_bytes - before > 2**24)
        other = call("other", 2**26)  # a phase with few calls is always read
        print(other.host_peak_bytes == other.host_peak_at_most_bytes)

        for _ in range(40):
            call("forward")
        with memory.phase("forward"):
            touch(2**26 + 2**24)
            memory.figures()  # sees the rise first
        print(memory._ledger.steady)

        for _ in range(40):
            call("forward")
        reads, ledger = [], memory._ledger
        read = ledger._host_peak.read_usage
        ledger._host_peak.read_usage = ledger.read_usage = lambda: reads.append(1) or read()
        for _ in range(10):
            call("forward")
        print(len(reads) <= 10 + 1)  # each step, and `phases`, but no phase
        """).stdout
    assert out.splitlines() == ["{'forward'} None", "None True set()", "True True", "True", "set()", "True"]


def test_a_long_phase_is_read_each_time():
    memory = mk.MemoryManager("cpu")
    for _ in range(40):
        for name in ("short", "long"):
            with memory.phase(name):
                pass
            if name == "long":
                memory._ledger.ended[-1].start_ns -= 10**9
    memory._ledger.settle()
    assert memory._ledger.steady == {"short"}


def test_falls_back_to_record_without_counter_reset(monkeypatch):
    monkeypatch.setattr(devices.ResidentPeak, "restart", lambda self: False)
    memory = mk.MemoryManager("cpu", reset_peaks=True)
    with memory.phase("nothing"):
        pass
    totals = memory.phases["nothing"]
    assert totals.host_peak_bytes is None
    assert totals.host_peak_at_most_bytes > 0
