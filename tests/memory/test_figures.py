"""Memory as curves for any logger, tried with the real TensorBoard and Weights & Biases where they are installed."""

import importlib
import json

import pytest
import torch

import memkit as mk
from memkit._core.records import DeviceMemory
from memkit.memory import summary


def test_omits_figures_the_device_does_not_count():
    assert list(mk.MemoryManager("cpu").figures()) == ["memory/host_resident_bytes"]


def test_on_a_card_all_of_them():
    with mk.VirtualGPU("T4"):
        memory = mk.MemoryManager("cuda")
        x = torch.ones(2**20, device="cuda")
        del x
        y = torch.ones(2**18, device="cuda")
        figures = memory.figures()
        assert figures["memory/allocated_bytes"] == y.nbytes == 2**20
        assert figures["memory/peak_bytes"] == 4 * 2**20
        assert figures["memory/reserved_bytes"] >= figures["memory/peak_bytes"]
        torch.cuda.reset_peak_memory_stats()
        assert memory.figures()["memory/peak_bytes"] == figures["memory/peak_bytes"]  # of the run, whoever resets it


def test_the_bytes_of_a_tracker_on_the_cpu():
    memory = mk.MemoryManager("cpu")
    with memory.track():
        x = torch.ones(1000)
        assert memory.figures()["memory/allocated_bytes"] == x.nbytes


def test_figures_are_plain_ints_for_any_logger():
    figures = summary.memory_figures(DeviceMemory(allocated_bytes=1, reserved_bytes=2, peak_bytes=3))
    assert json.loads(json.dumps(figures)) == figures
    assert {type(value) for value in figures.values()} == {int}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(tmp_path)
    memory = mk.MemoryManager("cpu")
    for step in range(3):
        memory.step()
        for name, value in memory.figures().items():
            writer.add_scalar(name, value, step)
    writer.close()
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    curve = found.Scalars("memory/host_resident_bytes")
    assert [point.step for point in curve] == [0, 1, 2]
    assert all(point.value > 2**20 for point in curve)


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_SERVICE", "")  # it sets this one itself; taken back at the end
    monkeypatch.delenv("WANDB_SERVICE")
    memory = mk.MemoryManager("cpu")
    with wandb.init(mode="offline", dir=tmp_path, project="memkit") as run:
        for step in range(3):
            run.log({"loss": 1 / (step + 1), **memory.figures()})
        assert run.summary["memory/host_resident_bytes"] > 2**20
        assert run.step == 3
    wandb.teardown()  # its own process
    assert list(tmp_path.rglob("*.wandb"))
