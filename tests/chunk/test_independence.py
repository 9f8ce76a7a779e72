"""Functions that mix rows are detected by a NaN that spreads, and named; row-wise functions pass, random ones too."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit.chunk.independence import check_independence
from tests.helpers import assert_refused, assert_same


def check(fn, *rows):
    check_independence(fn, rows, call="chunked_map(fn)")


def mlp(*middle):
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (mlp(nn.BatchNorm1d(8)), r"`1` \(BatchNorm1d\)"),
        (mlp(nn.Softmax(0)), r"`1` \(Softmax\)"),
        (nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0), r"`self_attn` \(MultiheadAttention\)"),
        (lambda x: x - x.mean(0), "its own code"),
        (lambda x: x.cumsum(0), "its own code"),
        (lambda x: x.flip(0), "its own code"),
        (lambda x: {"y": x, "norm": x / x.norm()}, "its own code"),
    ],
)
def test_names_modules_that_mix_rows(fn, name):
    with pytest.raises(
        mk.errors.InputError, match=rf"first in ({name}).*computes each row from that row alone.*eval mode"
    ):
        check(fn, torch.randn(20, 4))


@pytest.mark.parametrize(
    "fn",
    [
        mlp(nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5)),
        mlp(nn.BatchNorm1d(8)).eval(),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4)),
        lambda x: (x.pow(2).sum(1), torch.rand_like(x)),
        lambda x: 1.0,
    ],
)
def test_functions_of_each_row_pass(fn):
    rows, state = torch.randn(20, 4), torch.get_rng_state()
    check(fn, rows)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_row_and_integers_prove_nothing():
    centered = lambda x: x - x.mean(0)  # noqa: E731
    check(centered, torch.randn(1, 4))
    assert_refused(lambda: check(centered, torch.randn(2, 4)), mk.errors.InputError, "its own code")
    check(nn.Embedding(10, 3), torch.arange(10))


def test_ignores_existing_nan():
    rows = torch.randn(6, 2)
    rows[0, 0] = float("nan")
    check(lambda x: x * 2, rows)
    assert rows.isnan().sum() == 1
    assert_refused(lambda: check(lambda x: x - x[1:].mean(0), rows), mk.errors.InputError, "its own code")


def test_leaves_no_trace():
    model = mlp(nn.BatchNorm1d(8), nn.Dropout())
    before, x = copy.deepcopy(model.state_dict()), torch.randn(20, 4, requires_grad=True)
    state = torch.get_rng_state()
    assert_refused(lambda: check(model, x), mk.errors.InputError)
    assert_same(model.state_dict(), before)  # NaN would have stayed in the statistics
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.isnan(x).any()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_module_is_tried_once_in_each_mode():
    calls = []
    model = mlp(nn.BatchNorm1d(8))
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        check(model.eval(), torch.randn(20, 4))
    assert len(calls) == 1
    assert_refused(lambda: check(model.train(), torch.randn(20, 4)), mk.errors.InputError, "BatchNorm1d")


def test_chunked_calls_reject_mixed_rows_unless_check_is_off():
    x, index = torch.randn(20, 4), torch.arange(20) // 5
    for call in (
        lambda **more: mk.chunked_map(mlp(nn.BatchNorm1d(8)), x, chunk_size=8, **more),
        lambda **more: mk.chunked_segment_reduce(mlp(nn.BatchNorm1d(8)), x, index=index, chunk_size=8, **more),
    ):
        assert_refused(call, mk.errors.InputError, r"BatchNorm1d.*check=False")
        call(check=False)


PROBABILITIES = nn.Sequential(mlp(), nn.Sigmoid())


def only_finite(x):
    assert torch.isfinite(x).all()
    return torch.tanh(x)


REFUSE_NAN = {
    "probabilities": lambda x: F.binary_cross_entropy(PROBABILITIES(x), torch.full((len(x), 3), 0.5), reduction="none"),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0).log_prob(torch.ones_like(x)),
    "an assertion": only_finite,
}


@pytest.mark.parametrize("name", REFUSE_NAN)
def test_functions_that_refuse_nan_are_checked_by_other_values(name):
    fn, x = REFUSE_NAN[name], torch.randn(16, 4)
    check(fn, x)
    with pytest.raises(mk.errors.InputError, match="its own code"):
        check(lambda x: fn(x - x.mean(0) * 0.5), x)


def test_rows_that_are_the_same_prove_nothing_and_it_is_said():
    with pytest.warns(mk.errors.MemkitWarning, match="could not check that each row is computed from that row alone"):
        check(lambda x: only_finite(x - x.mean(0)), torch.ones(16, 4))


def test_an_error_of_the_function_itself_is_the_users_own():
    def broken(x):
        raise ValueError("not a NaN at all")

    with pytest.raises(ValueError, match="not a NaN at all"):
        check(broken, torch.randn(16, 4))


class ActNorm(nn.Module):
    """Puts tensors made from its first batch in the place of its own, as nflows does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_ready", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if not self.is_ready:
            self.scale.data = 1 / x.detach().std(0)
            self.is_ready.data = torch.tensor(True)
        return x * self.scale


def test_storages_that_a_check_has_replaced_are_back():
    model = ActNorm()
    before = model.scale.data_ptr()
    with pytest.raises(mk.errors.InputError):
        check(model, torch.randn(16, 4))
    assert model.scale.data_ptr() == before
    assert_same(list(model.parameters()), [torch.ones(4)])
    assert not model.is_ready
