"""Recorded runs of real GPUs on the virtual GPU: the same allocations in the same order, the same peaks.

`python -m benchmarks.cases.public_runs` writes all figures.
"""

from unittest import mock

import pytest

from memkit._simulation.cuda import memory, tensors
from tests.simulation.liger_rows import ROWS, as_printed, peak_bytes
from tests.simulation.public_runs import RUNS, num_alike

_BY_NAME = {run.name: run for run in RUNS}
_ONE_EARLIER = 2  # adding up rows by index gives one of five blocks back earlier than the model does


@pytest.mark.slow
def test_autocast_training_step_matches_gpu_blocks():
    run = _BY_NAME["medium_512_training"]
    alike, recorded = num_alike(run, run.play(num_steps=1))
    assert recorded == 7591
    assert recorded - alike <= _ONE_EARLIER


def test_attention_matches_gpu_in_every_block():
    run = _BY_NAME["attention in parts, forward and backward"]
    played = run.play()
    assert num_alike(run, played) == (36, 36)
    assert (played.peak_bytes, played.reserved_bytes) == (run.peak_bytes, run.reserved_bytes)


@pytest.mark.slow
def test_autocast_inference_matches_gpu_blocks():
    run = _BY_NAME["medium_512_inference"]
    assert num_alike(run, run.play(num_steps=1)) == (1666, 1666)


@pytest.mark.slow  # three minutes
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_whole_run_peaks_like_the_gpu(run):
    played = run.play()
    assert played.peak_bytes == pytest.approx(run.peak_bytes, rel=2e-4)
    assert played.reserved_bytes == pytest.approx(run.reserved_bytes, rel=0.02)


@pytest.mark.slow
def test_every_published_operator_is_exact_in_every_digit():
    assert len(ROWS) == 79
    assert [row for row in ROWS if as_printed(peak_bytes(row)) != row["measured_mib"]] == []


WRONG = {
    "silu_backward in parts": ("swiglu", mock.patch.object(tensors, "_WHOLE", ())),
    "no factors of channels": ("group_norm", mock.patch.dict(memory._KERNELS, clear=True)),
    "no partial sums": ("jsd", mock.patch.object(memory, "reduction_workspace", return_value=())),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_detects_wrong_rules(wrong):
    kernel, change = WRONG[wrong]
    rows = [row for row in ROWS if row["kernel"] == kernel]
    tensors._has_parts.cache_clear()
    with change:
        assert any(as_printed(peak_bytes(row)) != row["measured_mib"] for row in rows)
    tensors._has_parts.cache_clear()
