"""Measured points: a process each, out of memory as a result, and sweeps that go on after an interruption."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn

from memkit._core.errors import ConfigError, InputError
from memkit.predict.scaling import measured
from memkit.predict.scaling.measured import measure_scaling
from memkit.predict.scaling.profile import profile_scaling
from memkit.recipes.memory_test.reference import EdgeCase

CASE = EdgeCase("encoder", (16, 16), 3, 8, 50, 40)
CPU = torch.device("cpu")


def awkward_step(n):
    """Ends in another way at each size."""
    if n == 20:
        raise ValueError("no such size")
    if n == 30 and multiprocessing.parent_process():  # not where it is traced
        os.kill(os.getpid(), signal.SIGKILL)
    model, x = nn.Linear(8, 8), torch.ones(n, 8)
    print("to stdout")
    return lambda: model(x[: int(x.sum().item() / 8)])


def test_a_point_is_the_peak_of_the_second_step():
    """The first step holds no optimizer state when its gradients come, and the building is larger than any step."""

    def build_step(n):
        weight = nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.AdamW([weight])
        torch.ones(n, 1000)

        def step():
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()

        return step

    point = measured._measure(build_step, 100, "train", CPU)
    assert point.peak_bytes == profile_scaling(build_step, [100], ["train"]).peaks("train")[100]
    assert 4 * 4000 <= point.peak_bytes < 400_000
    assert measured._measure(build_step, 100, "inference", CPU).peak_bytes < 4 * 4000
    assert point.seconds > 0


@pytest.mark.slow
def test_a_measured_point_is_the_predicted_one():
    seen = []
    result = measure_scaling(CASE.build_step, [3000], ["train"], device="cpu", on_point=seen.append)
    (point,) = result.points
    assert seen == [point]
    assert (point.status, point.source) == ("ok", "measured")
    assert point.peak_bytes == result.law["train"].predict(3000)
    assert result.law["train"].tier == "structural"


@pytest.mark.slow
def test_out_of_memory_is_a_point_and_larger_ones_are_skipped():
    sizes = [1_000, 2_000_000, 4_000_000]
    result = measure_scaling(CASE.build_step, sizes, ["inference"], device="cpu", memory_limit="200MiB")
    small, large, larger = result.points
    assert small.peak_bytes == result.law["inference"].predict(1_000)
    assert (large.status, large.peak_bytes) == ("oom", None)
    assert 2_000_000 * 4 <= large.requested_bytes <= 2_000_000 * 2 * 16 * 4
    assert "allocate memory" in large.peak_where
    assert (larger.status, larger.requested_bytes) == ("skipped", None)
    assert result.law["inference"].predict(2_000_000) > 200 * 2**20


@pytest.mark.slow
def test_process_failure_is_recorded_for_its_point(capfd):
    result = measure_scaling(awkward_step, [10, 20, 30, 40], ["inference"], device="cpu")
    assert [point.status for point in result.points] == ["ok", "error", "oom", "skipped"]
    assert result.points[1].peak_where == "ValueError: no such size"
    assert result.points[2].peak_where == "the process ended by SIGKILL"
    assert result.law["inference"].tier == "deterministic"  # what it does with its data cannot be traced
    assert "to stdout" in capfd.readouterr().err  # stdout belongs to whoever asked


def test_rejects_unimportable_step_before_starting():
    with pytest.raises(InputError, match="top level of a module"):
        measure_scaling(lambda n: lambda: None, [1], ["train"], device="cpu")


def test_sizes_and_modes_are_checked_before_any_process_starts():
    for sizes, modes in (([], ["train"]), ([1], ["eval"]), ([0], ["train"])):
        with pytest.raises((ConfigError, InputError), match=r"^measure_scaling\("):
            measure_scaling(CASE.build_step, sizes, modes, device="cpu")


@pytest.mark.parametrize(
    ("message", "requested"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 30720000 bytes. Error code 12", 30720000),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.79 GiB", 5 * 2**29),
        ("MPS backend out of memory (MPS allocated: 8.87 GB). Tried to allocate 19.38 MB on private pool.", 19_380_000),
        ("std::bad_alloc", None),
    ],
)
def test_the_request_is_read_from_the_error(message, requested):
    assert measured._requested(message) == requested
