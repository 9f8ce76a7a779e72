"""Measured times of operators: which calls are run, on which tensors, and what is left as it was."""

import ctypes
import tempfile

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memkit.predict.plan.host import HostTimes
from memkit.predict.plan.operations import StepTimes
from tests.helpers import run_python

aten = torch.ops.aten


@pytest.fixture
def times():
    made = HostTimes(2**20)
    assert made.operator_seconds > 0
    return made


def seconds_of(times, func, *args, **kwargs):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
        return times.seconds(func, tuple(fakes), kwargs, func(*fakes, **kwargs))


def test_each_distinct_call_is_run_once(times):
    x = torch.ones(8, 8)
    first = seconds_of(times, aten.mul.Tensor, x, x)
    assert seconds_of(times, aten.mul.Tensor, x, x.clone()) == first > 0
    assert times.num_measured == 1
    for other in (x.double(), x.expand(2, 8, 8), torch.ones(8, 16)[:, ::2], 2, 2.0):
        seconds_of(times, aten.mul.Tensor, x, other)
    seconds_of(times, aten.add.Tensor, x, x)
    seconds_of(times, aten.add.Tensor, x, x, alpha=2)
    assert (times.num_measured, times.num_unmeasured) == (8, 0)


def test_the_next_plan_takes_the_times_of_the_last_one(times, monkeypatch):
    """A busy moment between two plans would else make them differ, and the least budget of an error not suffice."""
    x = torch.ones(24, 24)
    first = seconds_of(times, aten.mul.Tensor, x, x)
    monkeypatch.setattr(HostTimes, "_time_calls", lambda *_: 1.0)
    assert seconds_of(HostTimes(2**20), aten.mul.Tensor, x, x) == first < 1.0
    assert seconds_of(HostTimes(2**20), aten.mul.Tensor, x[1:], x[1:]) > 1.0
    assert seconds_of(HostTimes(2**10), aten.mul.Tensor, x, x) != first  # too large for its budget: not as measured


def test_a_trace_is_timed_by_real_runs(times):
    model = nn.Sequential(nn.Embedding(10, 16), nn.Dropout(), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        index = mode.from_tensor(torch.arange(8))
        with StepTimes(times, {model[3]: "gelu"}, frozenset()) as trace:
            model(index).sum().backward()
    assert times.num_unmeasured == 0 < times.num_measured
    assert 0 < trace.forwards["gelu"].seconds < trace.parts[0]


def test_an_operator_with_larger_operands_takes_longer(times):
    small, large = torch.ones(32, 32), torch.ones(256, 256)
    assert seconds_of(times, aten.mm.default, small, small) < seconds_of(times, aten.mm.default, large, large)


def test_leaves_the_caller_unchanged(times):
    x, state = torch.zeros(4, 4), torch.get_rng_state()
    with torch.device("meta"):
        assert times.seconds(aten.bernoulli_.float, (x, 0.5), {}, x) > 0
        assert times.seconds(aten.add_.Tensor, (x, x), {}, x) > 0
    assert times.num_measured == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert not x.any()


def test_indices_are_valid_and_known_values_are_used(times):
    table, index = torch.ones(3, 4), torch.tensor([0, 2, 1])
    for func, args in (
        (aten.embedding.default, (table, index)),
        (aten.index.Tensor, (table, [index])),
        (aten.index_put.default, (table, [index], torch.ones(3, 4), True)),
        (aten.gather.default, (table, 0, index[:, None])),
    ):
        times.seconds(func, args, {}, func(*args))
    assert (times.num_measured, times.num_unmeasured) == (4, 0)
    with FakeTensorMode() as mode:
        repeats = mode.from_tensor(index)
    for values, num_unmeasured in ((None, 1), (index, 0)):  # zeros do not add up to three rows
        times._seconds.clear()
        repeats.constant = values
        times.seconds(aten.repeat_interleave.Tensor, (repeats,), {"output_size": 3}, index)
        assert times.num_unmeasured == num_unmeasured


@torch.library.custom_op("memkit_test_host::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it may do anything, so it is not run")


def test_counts_operators_it_cannot_run(times):
    x, large = torch.ones(8), torch.ones(2**18)
    calls = (
        (torch.ops.memkit_test_host.twice.default, (x,), {}),
        (aten.bernoulli_.float, (x,), {"generator": torch.Generator()}),
        (aten.add.Tensor, (large, large), {}),  # together more than a MiB
        (aten.linalg_inv_ex.default, (torch.ones(2, 2, dtype=torch.long),), {}),  # fails
        (aten.relu.default, (torch.ones(2, 2).to_sparse(),), {}),
    )
    for number, (func, args, kwargs) in enumerate(calls, 1):
        assert times.seconds(func, args, kwargs, x) > 0
        assert (times.num_measured, times.num_unmeasured) == (0, number)
    assert times.about == "operators timed on this machine, except 5 of 5, by its measured speeds"


def test_no_call_is_run_after_the_time_limit():
    times = HostTimes(2**20, most_seconds=0.0)
    assert seconds_of(times, aten.relu.default, torch.ones(8)) > 0
    assert times.num_measured == 0


def test_estimates_oversized_call_from_measured_ones(times):
    def roofline(size):
        return times._roofline.seconds(aten.relu.default, (torch.ones(size),), {}, torch.ones(size))

    measured = seconds_of(times, aten.relu.default, torch.ones(2**17))
    too_large = seconds_of(times, aten.relu.default, torch.ones(2**20))
    _, extra = times._machine.added_seconds[True]
    assert too_large - extra == pytest.approx((measured - extra) / roofline(2**17) * roofline(2**20))


def test_one_disturbed_measurement_does_not_scale_unmeasured_calls(times, monkeypatch):
    """On a busy machine the longest measurement may be the one that another program interrupted."""
    disturbed_bytes = 2 * 4 * 2**16  # argument and result

    def time_calls(_, size):
        return 1e-9 * size * (100 if size == disturbed_bytes else 1)

    monkeypatch.setattr(times, "_time_calls", time_calls)
    for size in (2**14, 2**15, 2**16):
        seconds_of(times, aten.relu.default, torch.ones(size))
    too_large = seconds_of(times, aten.relu.default, torch.ones(2**20))
    plain = times._roofline.seconds(aten.relu.default, (torch.ones(2**20),), {}, torch.ones(2**20))
    ratios = sorted(ratio for _, ratio in times._compared[aten.relu.default])
    assert ratios[-1] > 10 * ratios[-2]
    assert too_large - times._machine.added_seconds[True][1] <= 1.01 * ratios[-2] * plain


@pytest.mark.slow
def test_a_machine_is_measured_once_for_each_number_of_threads(times):
    assert HostTimes(2**30)._machine is times._machine
    torch.set_num_threads(2)
    try:
        other = HostTimes(2**20)._machine
    finally:
        torch.set_num_threads(1)
    assert other is not times._machine
    assert other.operator_seconds > 0


def test_measures_a_file_only_with_free_memory(monkeypatch):
    slow = HostTimes(2**50)  # nothing is free beside such a budget: the system would write to the disk at once
    assert slow.moving_seconds(2**20) == 2**21 / 2e8
    fast = HostTimes(2**20)
    assert 0 < fast.moving_seconds(2**21) == 2 * fast.moving_seconds(2**20) < slow.moving_seconds(2**21)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert HostTimes(2**20).moving_seconds(2**20) == slow.moving_seconds(2**20)


_CHILD = """
import ctypes, torch
from memkit.predict.plan.host import HostTimes
libc = ctypes.CDLL(None)
class Counters(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]
libc.mallinfo2.restype, libc.malloc.restype, libc.malloc.argtypes = Counters, ctypes.c_void_p, [ctypes.c_size_t]
def is_given_back(size):  # a block that is mapped by itself; not freed, which would change the answer
    before = libc.mallinfo2().hblks
    libc.malloc(size)
    return libc.mallinfo2().hblks > before
times, x = HostTimes(2**30), torch.empty(2**18)
times.seconds(torch.ops.aten.relu.default, (x,), {}, x)
del times
print(is_given_back(2**19), is_given_back(24 * 2**20), is_given_back(30 * 2**20))  # more than all operands together
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_allocator_keeps_blocks_up_to_step_size():
    """A block of 32 MiB, freed to begin with, changes what the process keeps for good."""
    assert run_python(_CHILD).stdout.split() == ["False", "True", "True"]
