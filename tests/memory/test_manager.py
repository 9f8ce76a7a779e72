"""The manager itself: what it reads, the budget, giving memory back, the line in the log."""

import code
import dataclasses
import gc
import logging
import sys
import threading
import weakref

import pytest
import torch

import memkit as mk
from memkit._core.protocols import MemoryWatch
from memkit._machine import devices
from tests.forked import run_python_forked
from tests.helpers import assert_refused

MIB = 2**20
requires_cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="Requires: [no accelerator]")


def test_a_snapshot_of_the_cpu_says_unknown_and_not_zero():
    memory = mk.MemoryManager("cpu")
    snapshot = memory.snapshot()
    values = dataclasses.asdict(snapshot)
    assert {name for name, value in values.items() if value is None} == {
        "allocated_bytes",
        "reserved_bytes",
        "peak_bytes",
    }
    assert 0 < snapshot.host_rss_bytes <= snapshot.host_peak_bytes
    assert 0 < snapshot.free_bytes == snapshot.host_available_bytes < snapshot.host_total_bytes == snapshot.total_bytes


@pytest.mark.parametrize("device", ["meta", "gpu", "xpu:7"])
def test_a_device_without_memory_or_not_there(device):
    assert_refused(lambda: mk.MemoryManager(device), mk.errors.ConfigError)


@requires_cpu_only
def test_auto_without_accelerator_is_unshared_cpu():
    with mk.MemoryManager() as one, mk.MemoryManager() as two:
        assert one.device == two.device == torch.device("cpu")
        assert two.advice() == []


def test_provides_what_the_wrapper_needs():
    memory: MemoryWatch = mk.MemoryManager("cpu")
    with memory.phase("a"):
        memory.mark("b", note={"c": 1})
    assert memory.available_bytes() > 0


def test_the_budget_is_for_the_whole_process():
    whole = mk.MemoryManager("cpu").available_bytes()
    rss = mk.MemoryManager("cpu").snapshot().host_rss_bytes
    assert mk.MemoryManager("cpu", budget="900TB").available_bytes() == pytest.approx(whole, abs=500 * MIB)
    assert mk.MemoryManager("cpu", budget=rss + 100 * MIB).available_bytes() == pytest.approx(100 * MIB, abs=20 * MIB)
    assert mk.MemoryManager("cpu", budget=rss // 2).available_bytes() == 0
    assert mk.MemoryManager("cpu", budget=0.5).budget_bytes == devices.host_memory().total_bytes // 2


def test_resource_limit_sets_capacity_and_remainder():
    """A budget may be a fraction of the limit; the bytes reported as available can be allocated, but not much more."""
    out = run_python_forked("""
        import torch, memkit as mk
        from memkit._machine.devices import limit_memory
        memory = mk.MemoryManager("cpu")
        limit_memory(torch.device("cpu"), 200 * 2**20)
        available = memory.available_bytes()
        assert 150 * 2**20 < available <= 200 * 2**20, available
        assert memory.snapshot().host_limited_by == "RLIMIT_DATA"
        half = mk.MemoryManager("cpu", budget=0.5)
        assert half.budget_bytes == half.snapshot().total_bytes // 2 < 2**30
        held = torch.empty(available - 8 * 2**20, dtype=torch.uint8)
        assert memory.available_bytes() < 16 * 2**20
        try: torch.empty(32 * 2**20, dtype=torch.uint8)
        except RuntimeError: print("limited by", memory.snapshot().host_limited_by)
        """).stdout
    assert out == "limited by RLIMIT_DATA\n"


@pytest.mark.slow
def test_ignores_parent_process():
    """ru_maxrss begins with the size of whoever started the program."""
    out = run_python_forked("""
        import subprocess, sys, torch
        script = "import memkit as mk; print(mk.MemoryManager('cpu').snapshot().host_peak_bytes)"
        large = torch.ones(200 * 2**20)  # 800 MiB
        subprocess.run([sys.executable, "-c", script], check=True)
        """).stdout
    assert int(out) < 750 * MIB  # builds for CUDA take 500


# ---- release


def make_small_tensors():
    """On glibc's heap: blocks between them keep the heap from shrinking on its own."""
    tensors = [torch.ones(2000) for _ in range(16_000)]
    return tensors, tensors[::100]


def test_release_gives_back_and_says_so():
    memory = mk.MemoryManager("cpu")
    tensors, few = make_small_tensors()
    del tensors
    before = devices.resident_bytes()
    given_back = memory.release()
    after = devices.resident_bytes()
    assert len(few) == 160
    assert given_back > 80 * MIB
    assert given_back == pytest.approx(before - after, abs=5 * MIB)
    (event,) = memory.events
    assert (event.event, event.note) == ("release", {"given_back_bytes": given_back})


def test_release_collects_cycles_and_holds_its_rate():
    class Node:
        pass

    def make():
        node = Node()
        node.itself, node.value = node, torch.ones(10)
        return weakref.ref(node.value)

    memory = mk.MemoryManager("cpu")
    gc.collect()
    first = make()
    memory.release()
    assert first() is None
    second = make()
    collections = []
    gc.disable()  # no collection but the manager's
    gc.callbacks.append(lambda *about: collections.append(about))
    assert [memory.release() for _ in range(1000)] == [0] * 1000
    gc.callbacks.pop()
    gc.enable()
    assert not collections
    assert second() is not None
    memory.release(min_interval_s=0)
    assert second() is None
    assert len(memory.events) == 2


@pytest.mark.parametrize("kind", ["plain", "cause", "context"])
def test_release_clears_last_error_at_prompt(kind, monkeypatch):
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    held = []
    lines = {
        "plain": "inner()",
        "cause": "try: inner()\nexcept ValueError as error: raise KeyError('second') from error",
        "context": "try: inner()\nexcept ValueError: raise KeyError('second')",
    }
    inner = "def inner():\n    x = torch.ones(10)\n    held.append(weakref.ref(x))\n    raise ValueError\n"
    prompt = code.InteractiveInterpreter({"held": held, "torch": torch, "weakref": weakref})
    prompt.write = lambda text: None
    prompt.runcode(compile(inner + lines[kind], "<prompt>", "exec"))
    assert isinstance(sys.last_value, KeyError if kind != "plain" else ValueError)
    gc.collect()
    assert held[0]() is not None  # as a notebook keeps it
    mk.MemoryManager("cpu").release()
    assert held[0]() is None
    assert sys.last_value is not None  # the error itself stays, with its traceback's lines


def test_release_inside_error_handler():
    """Frames that still run cannot be cleared: they are left alone."""
    memory = mk.MemoryManager("cpu")
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        sys.last_value = error
    try:
        assert memory.release() >= 0
    finally:
        del sys.last_value


# ---- steps and the line


def test_steps_are_counted_and_every_few_of_them_there_is_a_line(caplog):
    memory = mk.MemoryManager("cpu", line_every=2)
    with caplog.at_level(logging.INFO, "memkit"):
        for _ in range(5):
            memory.step()
    assert memory.num_steps == 5
    assert [event.step for event in memory.events] == [1, 2, 3, 4, 5]
    assert [record.getMessage().split(", ")[0] for record in caplog.records] == ["step 2", "step 4"]
    assert "cpu: tensors not recorded, of " in caplog.records[0].getMessage()
    assert "| host: process " in caplog.records[0].getMessage()


def test_a_step_inside_a_phase_belongs_to_it():
    memory = mk.MemoryManager("cpu")
    with memory.phase("epoch"):
        memory.step()
    memory.step()
    assert [(event.event, event.phase) for event in memory.events] == [
        ("step_1", "epoch"),
        ("epoch", "epoch"),
        ("step_2", None),
    ]


def test_a_decorated_function_is_a_phase_in_each_call():
    memory = mk.MemoryManager("cpu")

    @memory.phase("fold")
    def fold(n):
        return n if n < 1 else fold(n - 1) + 1

    with memory.phase("epoch"):
        assert fold(1) == 1
    with pytest.raises(TypeError):
        fold("a")
    assert fold.__name__ == "fold"
    assert {path: totals.num_calls for path, totals in memory.phases.items()} == {
        "epoch": 1, "epoch/fold": 1, "epoch/fold/fold": 1, "fold": 1
    }  # fmt: skip


@pytest.mark.parametrize("line_every", [0, -1])
def test_a_line_every_no_step(line_every):
    with pytest.raises(
        mk.errors.ConfigError, match=r"MemoryManager\(...\): got line_every=.*a whole number, 1 or more"
    ):
        mk.MemoryManager("cpu", line_every=line_every)


def test_the_summary_of_a_run_on_the_cpu():
    memory = mk.MemoryManager("cpu")
    with memory.phase("forward"):
        pass
    lines = memory.summary().splitlines()
    assert lines[0].startswith("cpu: tensors not recorded, of ")
    assert lines[3].split()[:2] == ["forward", "1"]
    assert "not recorded" in lines[3]


def test_leaks_are_those_of_the_leak_watch():
    memory = mk.MemoryManager("cpu")
    outputs = []
    for _ in range(4):
        outputs.append(torch.ones(1000))
        leaks = memory.leaks()
    assert [(leak.num_tensors, leak.growth_bytes) for leak in leaks] == [(4, 4000)]


# ---- what it leaves alone


def test_starts_no_thread_and_is_collected():
    threads = threading.active_count()
    hook, env = sys.excepthook, dict(devices.allocator_settings())
    memory = mk.MemoryManager("cpu")
    with memory.phase("a"):
        memory.step()
    gone = weakref.ref(memory)
    assert threading.active_count() == threads
    assert (sys.excepthook, devices.allocator_settings()) == (hook, env)
    del memory
    assert gone() is None


def test_a_phase_named_like_a_path_keeps_its_name():
    memory = mk.MemoryManager("cpu")
    with memory.phase("step"), memory.phase("forward"):
        pass
    with memory.phase("step/forward"):
        pass
    named = [(event.event, event.phase) for event in memory.events]
    assert named == [("forward", "step/forward"), ("step", "step"), ("step/forward", "step/forward")]


def test_a_tracked_block_with_workspace_is_noted_with_it(tmp_path):
    manager = mk.MemoryManager("cpu", log=tmp_path / "log.jsonl")
    with manager.track(workspace=True) as tracker:
        torch.randn(1000).sort()
    manager.close()
    (event,) = [each for each in mk.report.read_memory_events(tmp_path / "log.jsonl").events if each.event == "track"]
    assert event.peak_bytes == tracker.peak_bytes > tracker.peak_since(0)
    assert event.note["peak_by_category"] == tracker.peak_by_category


def test_an_error_inside_a_tracked_block_with_workspace_stays_the_users():
    with pytest.raises(ZeroDivisionError), mk.MemoryManager("cpu").track(workspace=True):
        _ = 1 / 0
