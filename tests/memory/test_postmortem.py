"""The file that an out-of-memory leaves: real ones in child processes under a real limit, and every way it can fail."""

import json
import weakref

import pytest
import torch

import memkit as mk
from memkit._core.units import MIB
from tests.forked import run_module_forked

CHILD = "tests.memory.oom_child"


def run_child(directory, where, **environment):
    passed = json.loads(run_module_forked(CHILD, directory, where, **environment).stdout)
    texts = ["DefaultCPUAllocator: can't allocate memory"]
    if where in ("tight", "tightest"):  # what fails may as well be a few bytes of C++
        texts.append("std::bad_alloc")
    assert passed["is_oom"]
    assert any(text in passed["error"] for text in texts)
    assert passed["context"] == "None"  # nothing else went wrong on the way
    assert passed["num_kept"] == 0  # no tensor outlives the error
    return passed


def read(directory, name="out-of-memory.json"):
    return json.loads((directory / name).read_text())


def test_post_mortem_of_a_training(tmp_path):
    directory = tmp_path / "new" / "folder"
    run_child(directory, "plain")
    record = read(directory)
    assert record["phase"] == "step/head"  # not "step", nor none: their blocks were left before the file was written
    steps = 2 * 4 * 4  # the optimizer's own count of steps
    assert record["by_category_bytes"]["parameter"] == MIB
    assert record["by_category_bytes"]["gradient"] == MIB
    assert 2 * MIB <= record["by_category_bytes"]["optimizer"] <= 2 * MIB + steps
    assert record["by_category_bytes"]["buffer"] == MIB
    assert record["by_category_bytes"]["saved for backward"] == 8 * 4 * MIB  # the inputs of 4 layers and of 4 sines
    planted = record["largest"][0]
    assert planted["nbytes"] == 24 * MIB
    assert planted["holder"] == "global `CACHE[0]` in oom_child.py"
    assert record["snapshot"]["host_limited_by"] == "RLIMIT_DATA"
    assert (record["tracked"], record["allocator_snapshot"], record["problems"]) == (None, None, [])
    assert [event["event"] for event in record["events"]][-4:] == ["encoder", "head", "step", "out_of_memory"]
    assert record["text"][1] == "in phase step/head"
    assert "24.00 MiB  other float32[6291456], held by global `CACHE[0]`" in "\n".join(record["text"])


@pytest.mark.slow
def test_file_includes_active_tracker(tmp_path):
    run_child(tmp_path, "tracked", RANK="1", WORLD_SIZE="2")
    record = read(tmp_path, "out-of-memory.rank1.json")
    tracked = record["tracked"]
    assert tracked["by_category_bytes"]["activation"] >= 7 * 4 * MIB
    assert tracked["live_bytes"] == sum(tracked["by_category_bytes"].values())
    assert max(tracked["by_line_bytes"], key=tracked["by_line_bytes"].get).endswith("in forward")


@pytest.mark.parametrize("where", ["tight", "tightest"])
def test_writes_with_almost_no_memory_left(tmp_path, where):
    """Pieces of 4 MiB, or of 64 KiB, are taken until none is left: what fits is written, and the error passes."""
    passed = run_child(tmp_path, where)
    event, phase, note = passed["events"][-1]
    assert (event, phase, note["error"]) == ("out_of_memory", "fill", "RuntimeError")
    assert note["message"].startswith("RuntimeError: ")
    record = read(tmp_path)
    assert record["phase"] == "fill"
    assert record["snapshot"]["host_available_bytes"] < 8 * MIB  # what the failed piece's own frames gave back is free
    assert (record["by_category_bytes"] is None) == bool(record["problems"])


# ---- which phase it was


def fail():
    raise MemoryError


def phase_of(tmp_path, memory, block):
    with pytest.raises(MemoryError), memory.post_mortem(tmp_path):
        block()
    return read(tmp_path)["phase"]


def test_names_phase_of_the_error(tmp_path):
    memory = mk.MemoryManager("cpu")

    def inner():
        with memory.phase("step"):
            with memory.phase("data"):
                pass
            with memory.phase("forward"):
                fail()

    def between():
        with memory.phase("step"):
            with memory.phase("forward"):
                pass
            fail()

    def after_another_one():
        with memory.phase("step"):
            try:
                with memory.phase("forward"):
                    fail()
            except MemoryError:
                pass
            with memory.phase("retry"):
                fail()

    assert phase_of(tmp_path, memory, inner) == "step/forward"
    assert phase_of(tmp_path, memory, between) == "step"
    assert phase_of(tmp_path, memory, after_another_one) == "step/retry"
    assert phase_of(tmp_path, memory, fail) is None
    with memory.phase("around"):
        assert phase_of(tmp_path, memory, fail) == "around"


def test_the_last_error_counts(tmp_path):
    memory = mk.MemoryManager("cpu")
    for name in ("first", "second"):
        with pytest.raises(MemoryError), memory.post_mortem(tmp_path), memory.phase(name):
            fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-of-memory.json", "out-of-memory.jsonl"]
    assert read(tmp_path)["phase"] == "second"


# ---- what must not happen


def test_other_errors_write_nothing(tmp_path):
    memory = mk.MemoryManager("cpu")
    for error in (ValueError("wrong"), KeyboardInterrupt(), RuntimeError("shape '[4]' is invalid for input of size 6")):
        with pytest.raises(type(error)), memory.post_mortem(tmp_path):
            raise error
    with memory.post_mortem(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    assert list(memory.events) == []


def test_error_passes_unchanged_and_is_not_kept_alive(tmp_path):
    memory = mk.MemoryManager("cpu")
    original = MemoryError("the user's own")
    held = []

    def block():
        x = torch.ones(1000)
        held.append(weakref.ref(x))
        raise original

    with pytest.raises(MemoryError) as info, memory.post_mortem(tmp_path), memory.phase("a"):
        block()
    assert info.value is original
    assert (original.__context__, original.__cause__, original.args) == (None, None, ("the user's own",))
    assert read(tmp_path)["by_category_bytes"]["other"] >= 4000
    assert held[0]() is not None  # by the traceback
    original.__traceback__ = None
    del info
    assert held[0]() is None


def test_unwritable_file_is_a_warning(tmp_path):
    memory = mk.MemoryManager("cpu")
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(mk.MemkitWarning, match=r"post-mortem could not be written: (NotADirectory|FileExists)Error"),
        pytest.raises(MemoryError),
        memory.post_mortem(tmp_path / "file"),
    ):
        fail()


def test_first_error_passes_when_warnings_are_errors(tmp_path):
    (tmp_path / "file").write_text("")  # the test run's own filter makes errors of warnings
    with pytest.raises(MemoryError), mk.MemoryManager("cpu").post_mortem(tmp_path / "file"):
        fail()


def test_no_size_is_negative_where_the_tracker_has_not_seen_all_tensors(tmp_path):
    untouched, model = torch.zeros(2**18), torch.nn.Linear(8, 8)
    memory = mk.MemoryManager("cpu")

    def train():
        with memory.track(), memory.post_mortem(tmp_path):
            model(torch.ones(2, 8))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")

    with pytest.raises(torch.OutOfMemoryError):
        train()
    text = "\n".join(read(tmp_path)["text"])
    assert f"{untouched.nbytes // MIB}.00 MiB  other" in text
    assert " -" not in text


def test_parameters_and_what_belongs_to_them_are_named_by_their_layers(tmp_path):
    def train():
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64, bias=False))
        optimizer = torch.optim.Adam(model.parameters())
        with mk.MemoryManager("cpu").post_mortem(tmp_path):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")

    with pytest.raises(torch.OutOfMemoryError):
        train()
    own = [each for each in read(tmp_path)["largest"] if each["shape"] == [64, 32]]
    assert sorted(each["category"] for each in own) == ["gradient", "optimizer", "optimizer", "parameter"]
    for each in own:
        assert each["holder"].endswith("attribute `_parameters['weight']` of Linear (layer `model.1`)")


def test_a_post_mortem_given_as_a_log_is_named_as_what_it_is(tmp_path):
    memory = mk.MemoryManager("cpu")
    with pytest.raises(RuntimeError), memory.post_mortem(tmp_path):
        torch.empty(2**50)
    with pytest.raises(mk.errors.FileFormatError, match=r"got a post mortem .*pass the log beside it, .*\.jsonl'"):
        mk.report.read_memory_events(tmp_path / "out-of-memory.json")
    assert mk.report.read_memory_events(tmp_path / "out-of-memory.jsonl").events
