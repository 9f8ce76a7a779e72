"""Log entries for tracked blocks, evaluations, child processes, leaks and survived out-of-memory errors."""

import multiprocessing
import re

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._machine import devices
from memkit.memory import ledger
from memkit.memory.notes import short_line, twice_bytes

MIB = 2**20


def notes_of(memory, name):
    return [event.note for event in memory.events if event.event == name]


def keep_outputs(memory):  # without an assert, for which pytest adds `locals()`: such frames are not read
    outputs = []
    with memory.track():
        for _ in range(6):
            outputs.append(torch.ones(MIB // 4) * 2)
            memory.step()


def test_tracked_block_names_kept_tensors_and_holders():
    memory = mk.MemoryManager("cpu")
    keep_outputs(memory)
    first, last = notes_of(memory, "kept")[0], notes_of(memory, "track")[0]
    assert (first["num_steps"], last["num_steps"]) == (4, 6)
    for note, count in ((first, 4), (last, 6)):
        (kept,) = note["kept"]
        assert (kept["num_tensors"], kept["nbytes"], kept["is_graph"]) == (count, count * MIB, False)
        assert kept["holder"] == "local `outputs` of function keep_outputs"
        assert kept["grows_at"].startswith("memory/test_notes.py:")
    assert sum(last["peak_by_category"].values()) == sum(last["peak_by_line"].values()) == 7 * MIB


def keep_detached(memory):
    outputs, layer = [], nn.Linear(64, 64)
    with memory.track():
        for _ in range(5):
            out = layer(torch.ones(8, 64))
            outputs.append(out.detach())
            memory.step()


def test_last_output_variable_is_not_the_holder():
    memory = mk.MemoryManager("cpu")
    keep_detached(memory)
    for name in ("kept", "track"):
        kept = notes_of(memory, name)[0]["kept"][0]
        assert (kept["is_graph"], kept["holder"]) == (False, "local `outputs` of function keep_detached")


def test_notes_kept_tensors_of_running_function():
    memory = mk.MemoryManager("cpu")

    def train():
        losses, layer = [], nn.Linear(64, 64)
        for _ in range(5):
            losses.append(layer(torch.ones(8, 64)).mean())
            memory.step()

    with memory.track():
        train()
    (kept,) = notes_of(memory, "kept")[0]["kept"]
    assert kept["is_graph"]
    assert re.fullmatch(r"local `losses` of function .*train", kept["holder"])
    assert "kept" not in notes_of(memory, "track")[0]  # the function has ended


def test_released_or_one_time_tensors_are_not_kept():
    memory, cache = mk.MemoryManager("cpu"), {}
    layer = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(layer.parameters())
    with memory.track():
        for _ in range(5):
            cache.setdefault("scale", torch.ones(MIB // 4))
            loss = layer(torch.ones(8, 256)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            memory.step()
    assert notes_of(memory, "kept") == []
    assert "kept" not in notes_of(memory, "track")[0]


def test_distinguishes_preexisting_batches():
    memory = mk.MemoryManager("cpu")
    batches, layer = [torch.ones(1, 1024) for _ in range(12)], nn.Linear(1024, 1)
    with memory.track(), torch.no_grad():
        for batch in batches:
            layer(batch)
            memory.step()
    assert notes_of(memory, "kept")[0] == {"num_steps": 4, "preloaded_bytes": 4 * 4096}


def test_block_left_by_error_skips_the_search():
    memory = mk.MemoryManager("cpu")
    with pytest.raises(ZeroDivisionError), memory.track():
        kept = [torch.ones(10) for _ in range(20)]
        assert 1 / (len(kept) - 20)
    assert notes_of(memory, "track") == [None]


def test_state_of_two_optimizers_for_the_same_parameters():
    layer = nn.Linear(100, 10, bias=False)
    optimizers = [torch.optim.AdamW(layer.parameters()), torch.optim.SGD(layer.parameters(), momentum=0.9)]
    assert twice_bytes(optimizers) == 0
    for optimizer in optimizers:
        layer(torch.ones(1, 100)).sum().backward()
        optimizer.step()
    assert twice_bytes(optimizers) == 4000  # the smaller one
    assert twice_bytes([optimizers[0], torch.optim.AdamW(nn.Linear(3, 3).parameters())]) == 0


def test_phases_note_built_graphs():
    memory, layer = mk.MemoryManager("cpu"), nn.Linear(8, 8)
    with memory.phase("validation"):
        layer(torch.ones(1, 8))
    with memory.phase("validation"), torch.no_grad():
        layer(torch.ones(1, 8))
    first, second = notes_of(memory, "validation")
    assert first["graph_nodes"] >= 1
    assert second is None


def _hold(num_bytes, here):
    data = bytearray(num_bytes)
    here.send("held")
    here.recv()
    return data


@pytest.mark.skipif(devices.sys.platform != "linux", reason="Requires: /proc")
def test_child_processes_are_counted_now_and_then(monkeypatch):
    monkeypatch.setattr(ledger, "_CHILDREN_NS", 0)
    monkeypatch.setattr(ledger, "_CHILDREN_SHARE", 0)
    before = devices.children_bytes() or 0  # of other tests: a process that starts ranks
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_hold, args=(64 * MIB, there))
    child.start()
    assert here.recv() == "held"
    memory = mk.MemoryManager("cpu")
    memory.mark("with a worker")
    here.send("done")
    child.join()
    memory.mark("without")
    during, after = (event.children_bytes or 0 for event in memory.events)
    assert 64 * MIB < during - before < 200 * MIB
    assert after < before + MIB


def test_found_leaks_are_in_the_log():
    memory, outputs = mk.MemoryManager("cpu"), []
    for _ in range(4):
        memory.leaks()
        outputs.append(torch.ones(MIB))
    noted = notes_of(memory, "leaks")
    assert noted[-1]["kept"][0]["holder"].startswith("local `outputs` of function")


@pytest.mark.filterwarnings("ignore:MemoryEfficientTrainingWrapper")
def test_a_survived_out_of_memory_is_in_the_log():
    memory, layer = mk.MemoryManager("cpu"), nn.Linear(4, 4)
    trainer = mk.MemoryEfficientTrainingWrapper(layer, torch.optim.SGD(layer.parameters(), lr=0.1), memory=memory)

    def loss_fn(model, batch):
        if len(batch) > 8:
            torch.empty(2**50)
        return model(batch).square().mean()

    for _ in range(2):
        trainer.train_step(torch.ones(16, 4), loss_fn)
    assert notes_of(memory, "oom") == [{"num_ooms": 1, "sizes": [8, 8]}]


def test_a_path_is_cut_to_its_last_two_parts():
    assert short_line("/home/me/work/train.py:17 in step") == "work/train.py:17 in step"
    assert short_line("train.py:17") == "train.py:17"
    assert short_line("") == ""
