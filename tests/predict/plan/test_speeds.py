"""The roofline and its table, and what a trace adds up on fake tensors."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memkit.predict.gpus import all_gpus, find_gpu
from memkit.predict.plan.operations import StepTimes
from memkit.predict.plan.speeds import Speeds, card_speeds, host_speeds

SPEEDS = Speeds({torch.float32: 1e9, torch.bfloat16: 4e9}, 1e8, 1e7, 1e-6, 0.0, "made up")


def test_an_operator_takes_the_longer_of_computing_and_moving():
    assert SPEEDS.seconds(num_flops=10**9, num_bytes=1, dtype=torch.float32) == 1 + 1e-6
    assert SPEEDS.seconds(num_flops=10**9, num_bytes=1, dtype=torch.bfloat16) == 0.25 + 1e-6
    assert SPEEDS.seconds(num_flops=1, num_bytes=10**8, dtype=torch.float32) == 1 + 1e-6
    assert SPEEDS.seconds(num_flops=10**9, num_bytes=1, dtype=torch.int64) == 1 + 1e-6


def test_each_listed_card_is_a_card_of_the_table_with_plausible_speeds():
    for gpu in all_gpus():
        if gpu.vendor == "NVIDIA":
            speeds = card_speeds(gpu)
            assert 1e12 < speeds.flops[torch.float32] <= speeds.flops[torch.bfloat16] < 1e16
            assert 1e11 < speeds.bandwidth < 1e13
            assert speeds.link_bandwidth < speeds.bandwidth
    assert card_speeds(find_gpu("RTX 4090")).about == "the published speeds of RTX 4090"


def test_a_card_that_is_not_listed_has_those_of_its_generation_in_proportion():
    speeds, listed = card_speeds(find_gpu("RTX 3060 12GB")), card_speeds(find_gpu("RTX 3070"))
    share = find_gpu("RTX 3060 12GB").num_multiprocessors / find_gpu("RTX 3070").num_multiprocessors
    assert speeds.flops[torch.float32] == listed.flops[torch.float32] * share
    assert speeds.about == "the published speeds of RTX 3070, times 0.61"


def test_this_machines_speeds_are_of_a_cpu():
    random = torch.get_rng_state()
    speeds = host_speeds()
    assert torch.equal(torch.get_rng_state(), random)
    assert 1e9 < speeds.flops[torch.float32] < 1e14
    assert 1e8 < speeds.bandwidth < 1e12
    assert 1e-7 < speeds.operator_seconds < 1e-3


def test_a_trace_adds_up_products_parts_and_blocks():
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    trace = StepTimes(SPEEDS, {model[1]: "second"}, frozenset({torch.ops.aten.mm.default}))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.ones(8, 16))
        with trace:
            trace.begin_part()
            model(x).sum().backward()
    assert trace.parts[0] == 0
    forward = trace.forwards["second"]
    product = SPEEDS.seconds(num_flops=2 * 8 * 32 * 4, num_bytes=4 * (8 * 32 + 32 * 4 + 8 * 4), dtype=torch.float32)
    assert forward.seconds == product
    assert forward.light_seconds == 0  # a product is kept
    assert forward.input_bytes == 8 * 32 * 4
    # Forward two products, backward three more (the batch wants no gradient); no launch less than these.
    assert trace.parts[1] > 5 * 1e-6
