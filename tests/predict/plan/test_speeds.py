"""The roofline and its table, and what a trace adds up on fake tensors."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memkit.predict.gpus import all_gpus, find_gpu
from memkit.predict.plan.operations import StepTimes
from memkit.predict.plan.speeds import Speeds, card_speeds

aten = torch.ops.aten
SPEEDS = Speeds({torch.float32: 1e9, torch.bfloat16: 4e9}, 1e8, 1e7, 1e-6, 0.0, "made up")


def seconds_of(func, *args):
    return SPEEDS.seconds(func, args, {}, func(*args))


def test_an_operator_takes_the_longer_of_computing_and_moving():
    square = torch.ones(200, 200, device="meta")
    assert seconds_of(aten.mm.default, square, square) == 16e6 / 1e9 + 1e-6
    assert seconds_of(aten.mm.default, square.bfloat16(), square.bfloat16()) == 16e6 / 4e9 + 1e-6
    assert seconds_of(aten.mm.default, square.long(), square.long()) == 16e6 / 1e9 + 1e-6
    assert seconds_of(aten.relu.default, square) == 2 * 16e4 / 1e8 + 1e-6
    assert seconds_of(aten.t.default, square) == 0.0
    assert SPEEDS.moving_seconds(1000) == 2 * 1000 / 1e7


def test_listed_cards_are_known_with_plausible_speeds():
    for gpu in all_gpus():
        if gpu.vendor == "NVIDIA":
            speeds = card_speeds(gpu)
            assert 1e12 < speeds.flops[torch.float32] <= speeds.flops[torch.bfloat16] < 1e16
            assert 1e11 < speeds.bandwidth < 1e13
            assert speeds.link_bandwidth < speeds.bandwidth
    assert card_speeds(find_gpu("RTX 4090")).about == "the published speeds of RTX 4090"


def test_unlisted_card_scales_speeds_of_its_generation():
    speeds, listed = card_speeds(find_gpu("RTX 3060 12GB")), card_speeds(find_gpu("RTX 3070"))
    share = find_gpu("RTX 3060 12GB").num_multiprocessors / find_gpu("RTX 3070").num_multiprocessors
    assert speeds.flops[torch.float32] == listed.flops[torch.float32] * share
    assert speeds.about == "the published speeds of RTX 3070, times 0.61"


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
    assert forward.seconds == seconds_of(aten.mm.default, torch.ones(8, 32), torch.ones(32, 4))
    assert forward.light_seconds == 0  # a product is kept
    assert forward.input_bytes == 8 * 32 * 4
    # Forward two products, backward three more (the batch wants no gradient); no launch less than these.
    assert trace.parts[1] > 5 * 1e-6
