"""The manager and the tracker called in torch's and other libraries' words: the way out is the right call."""

import pytest
import torch

import memkit as mk


def manager(**settings):
    return mk.MemoryManager("cpu", **settings)


def tracker():
    with mk.memory.Tracker(device="cpu") as watched:
        torch.ones(4)
    return watched


def rows():
    yield 1


TABLE = [
    (lambda: manager().allocated, "AbsentError", "such as a CPU; print(memory) shows what is known)"),
    (lambda: manager().max_memory_allocated(), "AbsentError", "such as a CPU; print(memory) shows what is known)"),
    (lambda: manager().empty_cache(), "AbsentError", "write memory.release()"),
    (lambda: manager().memory_summary(), "AbsentError", "write memory.summary()"),
    (lambda: manager().reset_peak_memory_stats(), "AbsentError", "which makes the peak of every phase exact"),
    (lambda: manager().profile(), "AbsentError", "write with memory.track() as tracker: ..."),
    (lambda: manager().start(), "AbsentError", "write with memory.phase('name'): ..."),
    (lambda: manager().phase(), "InputTypeError", "write phase(name)"),
    (lambda: manager().phase("a")(rows), "InputTypeError", "write `with memory.phase('a'):` around the code."),
    (lambda: manager().phase("a")(5), "InputTypeError", "write `with memory.phase('a'):` around the code."),
    (lambda: manager(limit="24GiB"), "InputTypeError", "write MemoryManager('cpu', budget='24GiB')"),
    (lambda: manager(memory_fraction=0.9), "InputTypeError", "write MemoryManager('cpu', budget=0.9)"),
    (lambda: manager(log_file="a.jsonl"), "InputTypeError", "write MemoryManager('cpu', log='a.jsonl')"),
    (lambda: manager(budget=24), "InputError", "write '24GiB', or '24B' if bytes are meant."),
    (lambda: manager(budget=24.0), "ConfigError", "pass '24GiB'."),
    (lambda: tracker().peak, "AbsentError", "write tracker.peak_bytes"),
    (lambda: tracker().key_averages(), "AbsentError", "write tracker.summary()"),
    (lambda: tracker().breakdown, "AbsentError", "write tracker.peak_by_category"),
    (lambda: manager(log=True), "InputTypeError", "pass log='memory_events.jsonl'."),
    (lambda: manager().leaks(5), "InputTypeError", "write leaks()"),
    (lambda: manager().mark(), "InputTypeError", "write mark(name)"),
    (lambda: manager().mark(5), "InputError", "pass a string such as 'vae_loaded'."),
    (lambda: manager().mark("a", note={"x": object()}), "InputTypeError", "text, number, bool or None as note['x']."),
    (lambda: manager().track("name"), "InputTypeError", "write track(workspace='name')"),
    (lambda: manager().snapshot().allocated, "AbsentError", "write snapshot.allocated_bytes"),
    (lambda: manager().snapshot().peak_memory, "AbsentError", "write snapshot.peak_bytes"),
    (lambda: manager().snapshot()["allocated_bytes"], "InputTypeError", "write dataclasses.asdict(snapshot)"),
    (lambda: manager().events.save(), "InputTypeError", "write save(path)"),
    (lambda: manager().events.dump(), "AbsentError", "write memory.events.save('memory_events.jsonl')"),
    *((lambda at=at: tracker().top(at=at), "ConfigError", "pass at='peak'.") for at in ("Peak", "start", None)),
    (lambda: manager().release(min_interval_s=None), "ConfigError", "pass min_interval_s=0."),
    (lambda: mk.MemoryManager(10**30), "ConfigError", "such as 'cpu' or 'cuda:0'."),
    (lambda: tracker().top("3"), "ConfigError", "pass count=3."),
    (lambda: tracker().top(-1), "ConfigError", "pass count=0."),
    (lambda: mk.memory.Tracker("cpu"), "InputTypeError", "write Tracker(device='cpu')"),
]


@pytest.mark.parametrize(("call", "kind", "end"), TABLE, ids=range(len(TABLE)))
def test_the_way_out_is_the_right_call(call, kind, end):
    with pytest.raises(mk.MemkitError) as caught:
        call()
    assert type(caught.value).__name__ == kind
    assert str(caught.value).endswith(end)


def test_a_log_of_a_tracked_block_alone_makes_a_report(tmp_path):
    log = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", log=log) as memory, memory.track() as watched:
        kept = torch.ones(2**18)
    (event,) = mk.report.read_memory_events(log).events
    assert (event.event, event.peak_bytes) == ("track", watched.peak_bytes)
    assert event.peak_bytes == kept.nbytes
    mk.write_report(mk.report.read_memory_events(log), tmp_path / "report.md")
    assert "1.00 MiB" in (tmp_path / "report.md").read_text() or "0.00 GiB" in (tmp_path / "report.md").read_text()
