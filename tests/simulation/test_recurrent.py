"""Recurrent layers on a GPU that is not there: cuDNN's operator, with what an H100 took for three nets."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import memkit as mk
from benchmarks.gpu.observe import Ledger
from memkit._simulation.cuda.recurrent import RecurrentCall

MIB = 2**20
# Kind, directions, dtype; reserve and workspace; kept by the forward; kept by the backward, and at its peak.
RECORDED = [
    (nn.LSTM, 1, torch.float32, 369_099_008, 226_494_720, 404_750_848, 33_587_200, 297_798_144),
    (nn.LSTM, 1, torch.float16, 184_549_632, 121_637_120, 202_375_680, 16_793_600, 157_288_960),
    (nn.GRU, 2, torch.float32, 872_415_488, 512_755_968, 941_621_760, 47_235_072, 618_659_840),
]


def operators_of(layer, dtype, *, packed=None):
    """The operators of a forward and a backward on rows of 64 steps."""
    with mk.VirtualGPU("H100"):
        layer = layer.cuda()
        x = torch.zeros(256, 64, 256, device="cuda", requires_grad=True)
        rows = x if packed is None else pack_padded_sequence(x, packed, batch_first=True)
        with Ledger() as ledger:
            with torch.autocast("cuda", enabled=dtype is not torch.float32, dtype=dtype):
                out = layer(rows)[0]
            (out if packed is None else out.data).sum().backward()
        return {row.name: row for row in ledger.operators}


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_sizes_are_those_of_an_h100(recorded):
    kind, directions, dtype, reserve, workspace, kept, kept_behind, most_behind = recorded
    layer = kind(256, 512, 2, batch_first=True, bidirectional=directions == 2)
    x = torch.empty(256, 64, 256, dtype=dtype, device="meta")
    call = RecurrentCall(
        x, layer._flat_weights, 4, x, None, 2 if kind is nn.LSTM else 3, 512, 0, 2, True, 0.0, True, directions == 2, []
    )
    assert (call.reserve_bytes, call.workspace_bytes, call.bound) == (reserve, workspace, 0)
    operators = operators_of(layer, dtype)
    forward, behind = operators["aten._cudnn_rnn.default"], operators["aten._cudnn_rnn_backward.default"]
    assert (forward.kept, behind.kept) == (kept, kept_behind)
    assert abs(behind.most - most_behind) < MIB  # large blocks are split or not, by what was there before
    assert not any(name.startswith("aten.sigmoid") for name in operators)


def test_autocast_runs_in_float16_whatever_its_own():
    lowest, most = (operators_of(nn.LSTM(256, 512, 2), dtype) for dtype in (torch.bfloat16, torch.float16))
    assert lowest["aten._cudnn_rnn.default"] == most["aten._cudnn_rnn.default"]


def estimate_of(layer, run=lambda model, x: model(x)[0].sum(), dtype=torch.float32):
    return mk.estimate_memory_usage(layer, torch.zeros(9, 3, 32, dtype=dtype), run, target="RTX 4090")


def test_sizes_that_nobody_recorded_have_a_bound():
    recorded = estimate_of(nn.LSTM(32, 256, 2))
    assert (recorded.confidence, recorded.workspace_bytes, recorded.spread) == ("exact", 0, 0)
    others = [
        nn.LSTM(32, 64, 2),  # narrow: other kernels
        nn.LSTM(32, 256),
        nn.GRU(32, 256, 2),
        nn.RNN(32, 512, 2),
        nn.LSTM(32, 256, 2, dropout=0.5),
        nn.LSTM(32, 256, 2, proj_size=16),
    ]
    for layer in others:
        estimate = estimate_of(layer)
        lowest, highest = estimate.peak_interval
        assert estimate.confidence == "workspace"
        assert lowest < estimate.peak_bytes < highest


def test_gradients_are_views_of_one_buffer_if_the_layer_has_biases():
    def gradients(bias):
        with mk.VirtualGPU("RTX 4090"):
            layer = nn.GRU(32, 64, 2, bias=bias).cuda()
            layer(torch.zeros(9, 3, 32, device="cuda"))[0].sum().backward()
            return [each.grad.untyped_storage().nbytes() for each in layer.parameters()]

    assert set(gradients(True)) == {4 * (3 * 64 * (32 + 64 + 64 + 64) + 2 * 2 * 3 * 64)}
    assert gradients(False) == [4 * 3 * 64 * width for width in (32, 64, 64, 64)]


def test_packed_rows_count_as_if_all_were_as_long_as_the_longest():
    long, short = (
        operators_of(nn.LSTM(256, 64, 2), torch.float32, packed=torch.tensor(lengths))["aten._cudnn_rnn.default"]
        for lengths in ([64] * 256, [64] * 128 + [32] * 128)
    )
    outputs = 128 * 32 * 64 * 4
    assert long.kept - short.kept == outputs


def test_without_cudnn_the_estimate_is_in_doubt():
    def run(model, x):
        with torch.backends.cudnn.flags(enabled=False):
            return model(x)[0].sum()

    (doubt,) = estimate_of(nn.LSTM(32, 64, 2), run).doubts
    assert "runs without cuDNN" in doubt


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_are_in_doubt(cell):
    """They are one fused operator on a card."""

    def run(model, x):
        state = model(x[0])
        return (state[0] if isinstance(state, tuple) else state).sum()

    assert estimate_of(cell(32, 64), run).doubts


def test_backward_needs_training_mode_as_on_a_card():
    with mk.VirtualGPU("RTX 4090"):
        layer = nn.LSTM(32, 64).cuda().eval()
        x = torch.zeros(9, 3, 32, device="cuda")
        with torch.no_grad():
            kept = torch.cuda.memory_allocated()
            out = layer(x)[0]
            assert torch.cuda.memory_allocated() - kept < 2 * out.nbytes  # there is no reserve
        with pytest.raises(RuntimeError, match="can only be called in training mode"):
            layer(x)[0].sum().backward()


def test_inference_mode_runs_cudnn_too():
    with mk.VirtualGPU("RTX 4090"):
        layer, x = nn.LSTM(32, 64, 2).cuda(), torch.zeros(9, 3, 32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            layer(x)
        assert torch.cuda.max_memory_allocated() - before > 16 * MIB  # its workspace


def test_weights_move_into_one_buffer_on_the_card():
    with mk.VirtualGPU("RTX 4090") as gpu:
        layer = nn.GRU(32, 64, 2).cuda()
        storages = {each.untyped_storage().nbytes() for each in layer.parameters()}
        assert storages == {sum(each.nbytes for each in layer.parameters())}
        assert gpu.allocated_bytes - 512 < max(storages) <= gpu.allocated_bytes
        assert gpu.peak_bytes > 2 * max(storages)  # for a moment they are there twice
        narrow = layer.half()
        assert {each.untyped_storage().nbytes() for each in narrow.parameters()} == {max(storages) // 2}
        assert layer.cpu().weight_hh_l0.device.type == "cpu"
    assert layer.weight_hh_l0.untyped_storage().nbytes() == layer.weight_hh_l0.nbytes


def test_estimates_count_the_weights_once():
    layer = nn.GRU(32, 512, 2)
    weights = sum(each.nbytes for each in layer.parameters())
    estimate = estimate_of(layer)
    assert weights <= estimate.parameters_bytes < weights + 512 * 8
    assert estimate.parameters_bytes + estimate.temporaries_bytes <= 2 * weights  # an optimizer has as many


def test_a_layer_that_runs_out_leaves_nothing_behind():
    with mk.VirtualGPU("RTX 4090") as gpu:
        layer = nn.LSTM(1024, 1024, 4).cuda()
        x = torch.zeros(1024, 256, 1024, device="cuda")
        before = gpu.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError):
            layer(x)
        assert gpu.allocated_bytes == before


def test_rows_that_were_packed_before_the_step():
    """C++ reads on the host how many rows each time has."""
    net, head = nn.LSTM(5, 6), nn.Linear(6, 3)
    model = nn.ModuleDict({"net": net, "head": head})
    rows = pack_sequence([torch.randn(size, 5) for size in (40, 30, 50, 20)], enforce_sorted=False)
    batch, optimizer = (rows, torch.randint(3, (4,))), torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model["head"](model["net"](batch[0])[1][0][-1]), batch[1])

    def step():
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    estimate = mk.estimate_memory_usage(model, batch, loss_fn, optimizer=optimizer)
    step()
    with mk.Tracker(device="cpu") as tracker:
        step()
    assert estimate.doubts == ()
    assert abs(estimate.peak_bytes - tracker.peak_bytes) <= 64
    assert mk.estimate_memory_usage(model, batch, loss_fn, optimizer=optimizer, target="T4").fits("T4")
