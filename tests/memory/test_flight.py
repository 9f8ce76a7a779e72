"""The flight recorder: its contents, the file that it leaves after an out-of-memory error, and its cost until then."""

import json
import tracemalloc
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import memkit as mk
from memkit.cli import main
from memkit.memory.batch_shapes import batch_shapes
from memkit.report import read_memory_events
from tests.forked import run_module_forked
from tests.helpers import FunctionsEntered
from tests.memory.test_postmortem import CHILD, read


@dataclass
class Sample:
    image: torch.Tensor
    name: str


def die(message="DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."):
    raise RuntimeError(message)


# ------------------------------------------------------------------------------------------- what is recorded


def test_each_step_has_its_number_its_memory_and_its_batch(tmp_path):
    memory = mk.MemoryManager("cpu")
    for rows in (8, 16, 8):
        with memory.recorded_step(tmp_path, {"x": torch.ones(rows, 3), "y": torch.zeros(rows, dtype=torch.int64)}):
            pass
    assert memory.num_steps == 3
    assert [event.step for event in memory.events] == [1, 2, 3]
    assert [event.note for event in memory.events] == [
        {"batch": [f"float32[{rows}, 3]", f"int64[{rows}]"]} for rows in (8, 16, 8)
    ]
    assert list(tmp_path.iterdir()) == []  # nothing is written while nothing happens


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.ones(2, 3), ["float32[2, 3]"]),
        (torch.tensor(1.0), ["float32[]"]),
        ([torch.ones(2), (torch.ones(3), {"mask": torch.ones(4).bool()})], ["float32[2]", "float32[3]", "bool[4]"]),
        (np.ones((2, 3), np.uint8), ["uint8[2, 3]"]),
        (Sample(torch.ones(5), "a"), ["float32[5]"]),
        (SimpleNamespace(x=torch.ones(2)), ["SimpleNamespace"]),
        (["a", "b"], ["list"]),
        ([torch.ones(1)] * 16, ["float32[1]"] * 16),
        ([torch.ones(1)] * 100_000, ["float32[1]"] * 16 + ["and more"]),
        ([["text"] * 100_000] * 100_000, ["and more"]),
        (torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,)), ["float32[4]"]),
    ],
)  # fmt: skip
def test_the_shapes_of_a_batch(batch, shapes):
    assert batch_shapes(batch) == shapes


def test_other_failures_count_no_step_and_leave_no_file(tmp_path):
    memory = mk.MemoryManager("cpu")
    with pytest.raises(ValueError, match="mine"), memory.recorded_step(tmp_path, torch.ones(1)):
        raise ValueError("mine")
    assert memory.num_steps == 0
    assert list(tmp_path.iterdir()) == []


def test_synonyms_lead_to_recorded_step():
    with pytest.raises(AttributeError, match=r"with memory\.recorded_step\('evidence', batch\)"):
        mk.MemoryManager("cpu").flight_recorder("evidence")


# ------------------------------------------------------------------------------------------- the evidence


def test_evidence_log_has_the_oversized_batch(tmp_path, capsys):
    memory = mk.MemoryManager("cpu")
    for rows in (8, 9000):
        with memory.recorded_step(tmp_path / "new", torch.ones(rows, 4)), memory.phase("forward"):
            pass
    error = pytest.raises(RuntimeError, match="DefaultCPUAllocator")
    with error, memory.recorded_step(tmp_path / "new", torch.ones(12_345, 4)), memory.phase("forward"):
        die()
    log = read_memory_events(tmp_path / "new")
    assert [event.event for event in log.events] == [
        "forward",
        "step_1",
        "forward",
        "step_2",
        "forward",
        "out_of_memory",
    ]
    last = log.events[-1]
    assert last.phase == "forward"
    assert last.note["batch"] == ["float32[12345, 4]"]
    assert last.note["error"] == "RuntimeError"
    assert "you tried to allocate 64 bytes" in last.note["message"]
    assert log.problems == ()
    assert read(tmp_path / "new")["events"][-1]["note"] == last.note  # the same in the post-mortem beside it
    page = tmp_path / "page.md"
    assert main(["report", str(tmp_path / "new"), "--output", str(page)]) == 0
    assert "The batch of the step that ran out of memory: float32[12345, 4]" in page.read_text("utf-8").replace(
        "\\", ""
    )
    capsys.readouterr()


def test_ring_is_bounded_and_counts_dropped_events(tmp_path):
    memory = mk.MemoryManager("cpu", max_events=10)
    for _ in range(100):
        with memory.recorded_step(tmp_path, torch.ones(2)):
            pass
    with pytest.raises(RuntimeError), memory.recorded_step(tmp_path, torch.ones(3)):
        die()
    events = read_memory_events(tmp_path / "out-of-memory.jsonl").events
    assert [event.event for event in events] == [
        "events_dropped",
        *(f"step_{n}" for n in range(92, 101)),
        "out_of_memory",
    ]
    assert events[0].note == {"num_dropped": 91}


def test_each_rank_has_its_own(tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        memory = mk.MemoryManager("cpu")
        with pytest.raises(RuntimeError), memory.recorded_step(tmp_path, torch.ones(rank + 1)):
            die()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"out-of-memory.rank{rank}.{suffix}" for rank in range(2) for suffix in ("json", "jsonl")
    }
    log = read_memory_events(tmp_path)
    assert [(event.rank, event.note["batch"]) for event in log.events] == [(0, ["float32[1]"]), (1, ["float32[2]"])]


def test_real_out_of_memory_under_limit_leaves_the_log(tmp_path):
    passed = json.loads(run_module_forked(CHILD, tmp_path, "tightest").stdout)
    assert passed["is_oom"], passed["error"]
    assert read_memory_events(tmp_path / "out-of-memory.jsonl").events[-1].event == "out_of_memory"


def test_unwritable_log_hides_no_error(tmp_path):
    (tmp_path / "out-of-memory.jsonl").mkdir()
    memory = mk.MemoryManager("cpu")
    with (
        pytest.warns(mk.MemkitWarning, match="could not be written"),
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        memory.recorded_step(tmp_path, torch.ones(2)),
    ):
        die()


# ------------------------------------------------------------------------------------------- CUDA's history


def test_on_a_card_the_allocators_history_is_recorded_and_stopped(tmp_path, monkeypatch):
    with mk.VirtualGPU("T4"):
        calls = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **kw: calls.append((a, kw)))
        memory = mk.MemoryManager("cuda", allocator_history=5000)
        assert calls == [((), {"stacks": "python", "max_entries": 5000})]
        x = torch.ones(2**20, device="cuda")
        error = pytest.raises(torch.OutOfMemoryError)
        with error, memory.recorded_step(tmp_path, x), memory.phase("forward"):
            torch.empty(2**40, device="cuda")
        memory.close()
        assert calls[1:] == [((None,), {})]
        memory.close()
        assert len(calls) == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out-of-memory.json", "out-of-memory.jsonl", "out-of-memory.pickle"}
    last = read_memory_events(tmp_path).events[-1]
    assert (last.phase, last.allocated_bytes, last.note["batch"]) == ("forward", 4 * 2**20, ["float32[1048576]"])
    actions = read_memory_events(tmp_path / "out-of-memory.pickle").events
    assert any("oom" in (event.note or {}) for event in actions)


def test_keeps_torchs_history_setting_by_default(monkeypatch):
    with mk.VirtualGPU("T4"):
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **kw: pytest.fail("called"))
        mk.MemoryManager("cuda").close()


def test_a_cpu_has_no_such_history(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **kw: pytest.fail("called"))
    mk.MemoryManager("cpu", allocator_history=10).close()


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_a_history_is_a_number_of_entries(value):
    with pytest.raises(mk.MemkitError, match="allocator_history"):
        mk.MemoryManager("cpu", allocator_history=value)


# ------------------------------------------------------------------------------------------- what it costs


def test_a_recorded_step_calls_few_functions(tmp_path, monkeypatch):
    """Counted, as times are not: a step without news is read from the counters, and evaluated later."""
    memory = mk.MemoryManager("cpu")
    batch = (torch.ones(8, 3), torch.ones(8))
    memory._ledger.due_ns = 2**62  # no second passes

    def step():
        with memory.recorded_step(tmp_path, batch):
            pass

    step()
    with FunctionsEntered() as recorded:
        step()
    with FunctionsEntered() as plain:
        memory.step()
    assert len(plain.all) <= 12
    assert len(recorded.all) <= len(plain.all) + 12


def test_a_phase_and_a_step_call_few_functions(tmp_path):
    for log in (None, tmp_path / "memory_events.jsonl"):
        memory = mk.MemoryManager("cpu", log=log)
        memory._ledger.due_ns = 2**62

        def phase(memory=memory):
            with memory.phase("forward"):
                pass

        phase()
        memory.step()
        with FunctionsEntered() as in_phase:
            phase()
        with FunctionsEntered() as in_step:
            memory.step()
        assert len(in_phase.all) <= 10  # with `phase` itself
        assert len(in_step.all) <= 9


def test_a_thousand_steps_hold_no_more_than_the_ring(tmp_path):
    memory = mk.MemoryManager("cpu", max_events=50)
    batch = torch.ones(8, 3)

    def steps(num):
        for _ in range(num):
            with memory.recorded_step(tmp_path, batch):
                pass
        memory.events  # noqa: B018 - evaluates what has ended

    steps(200)
    tracemalloc.start()
    try:
        steps(200)
        before = tracemalloc.get_traced_memory()[0]
        steps(1000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # 1,000 events would be 200 kB
    assert len(memory.events) == 50
