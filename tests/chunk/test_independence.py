"""Functions that mix rows are detected by a NaN that spreads, and named; row-wise functions pass, random ones too."""

import copy
import queue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import memkit as mk
from memkit.chunk.independence import check_independence
from tests.helpers import assert_refused, assert_same, one_in_product


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


def test_rows_that_give_nan_by_themselves_do_not_mix():
    """A renderer's disparity divides 0 by 0 where no sample is hit; other results of that row are compared."""

    def rendered(x):
        hits = (x - x.mean(1, keepdim=True)).relu().sum(1)
        return {"disparity": hits * 0 / hits, "color": x.sum(1)}

    rows = torch.randn(8, 3)
    rows[2] = 1.0
    assert rendered(rows)["disparity"].isnan().tolist() == [row == 2 for row in range(8)]
    check(rendered, rows)
    mixed = lambda x: {**rendered(x), "color": x.sum(1) + x.mean()}  # noqa: E731
    assert_refused(lambda: check(mixed, rows), mk.errors.InputError, "its own code")
    assert_refused(lambda: check(lambda x: rendered(x - x[3:].mean(0)), rows), mk.errors.InputError, "its own code")


def test_rows_that_all_give_nan_prove_nothing_and_it_is_said():
    with pytest.warns(mk.errors.MemkitWarning, match="rows give NaN by themselves. Way out: call it first with rows"):
        check(lambda x: x.mean(0) * x * 0 / 0, torch.randn(16, 4))


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
    calls = queue.SimpleQueue()  # a list would be put back
    model = mlp(nn.BatchNorm1d(8))
    model.register_forward_hook(lambda *_: calls.put(1))
    for _ in range(3):
        check(model.eval(), torch.randn(20, 4))
    assert calls.qsize() == 2
    assert_refused(lambda: check(model.train(), torch.randn(20, 4)), mk.errors.InputError, "BatchNorm1d")


def test_chunked_calls_reject_mixed_rows_unless_check_is_off():
    x, index = torch.randn(20, 4), torch.arange(20) // 5
    for call in (
        lambda **more: mk.chunked_map(mlp(nn.BatchNorm1d(8)), x, chunk_size=8, **more),
        lambda **more: mk.chunked_segment_reduce(mlp(nn.BatchNorm1d(8)), x, index=index, chunk_size=8, **more),
    ):
        assert_refused(call, mk.errors.InputError, r"BatchNorm1d.*check=False")
        call(check=False)


@pytest.mark.parametrize("fn", [nn.BatchNorm1d(4), lambda x: x - x.mean(0)], ids=["norm", "mean"])
def test_chunks_of_one_row_are_checked_with_two(fn):
    assert_refused(
        lambda: mk.chunked_map(fn, torch.randn(6, 4), chunk_size=1), mk.errors.InputError, "depends on other"
    )


# What small chunks could let pass: what the last of two rows does not show, or is right by chance among a few.
OF_SEVERAL_ROWS = {
    "running sums": lambda x: x.cumsum(0),
    "running products": lambda x: x.cumprod(0),
    "ranks": lambda x: x.argsort(0),
    "order": lambda x: x.sort(0)[0],
    "a shift by two": lambda x: x.roll(2, 0),
    "the other way around": lambda x: x.flip(0),
    "a triangle": lambda x: x.tril(-1),
}


@pytest.mark.parametrize(("name", "chunk_size"), one_in_product(3, OF_SEVERAL_ROWS, [1, 2, 3, 4, 8]))
def test_small_chunks_are_checked_too(name, chunk_size):
    x = torch.randn(40, 40)
    assert_refused(lambda: mk.chunked_map(OF_SEVERAL_ROWS[name], x, chunk_size=chunk_size), mk.errors.InputError)


@pytest.mark.parametrize("chunk_size", [2, 64])
def test_a_function_with_another_default_is_another_function(chunk_size):
    """As one that is made in a loop: `lambda x, scale=scale: ...`."""
    x = torch.randn(40, 4)
    for dim in (1, 0):
        call = lambda x, dim=dim: x.softmax(dim)  # noqa: E731
        if dim:
            mk.chunked_map(call, x, chunk_size=chunk_size)
        else:
            assert_refused(lambda: mk.chunked_map(call, x, chunk_size=chunk_size), mk.errors.InputError)  # noqa: B023


def for_one_row_alone(x):
    if len(x) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
    return x * 2


def of_one_row(x):
    assert len(x) == 1
    return x * 2


@pytest.mark.parametrize("fn", [for_one_row_alone, of_one_row])
def test_a_function_that_cannot_run_two_rows_is_not_checked_and_it_is_said(fn):
    x = torch.randn(6, 4)
    with pytest.warns(mk.errors.MemkitWarning, match="could not check that each row .* with two rows .* check=False"):
        out = mk.chunked_map(fn, x, chunk_size=1)
    assert torch.equal(out, x * 2)
    assert torch.equal(mk.chunked_map(fn, x, chunk_size=1, check=False), x * 2)


# Of 300 rows with lengths, of which few are long: results that depend on the longest, and others that do not.
BY_LENGTHS = {
    "a share of the longest": lambda x, n: x[:, 0] * (n / n.max())[:, None],
    "a mean up to the longest": lambda x, n: x[:, : int(n.max())].mean(1),
    "a code as wide as the longest": lambda x, n: x[:, 0] * F.one_hot(n).double().mean(1, keepdim=True),
    "a test for long ones": lambda x, n: x[:, 0] * (2 if (n == 9).any() else 1),
    "a number of long ones": lambda x, n: x[:, 0] * (1 + (n == 9).sum()),
    "a number of lengths": lambda x, n: x[:, 0] / len(n.unique()),
    "a mean of long ones": lambda x, n: x[:, 0] + (x[n == 9].mean() if (n == 9).any() else 0),
    "the shortest": lambda x, n: x[:, 0] * (n - n.min())[:, None],
    "a number of marks": lambda x, n: x[:, 0] * (torch.arange(9) < n[:, None]).sum(),
}
OF_EACH_LENGTH = {
    "a sum up to its own": lambda x, n: (x * (torch.arange(9) < n[:, None])[..., None]).sum(1) / n[:, None],
    "trimmed to the longest": lambda x, n: (
        x[:, : int(n.max())] * (torch.arange(int(n.max())) < n[:, None])[..., None]
    ).sum(1),
    "packed": lambda x, n: nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False), batch_first=True
    )[0].sum(1),
}


def with_lengths():
    lengths = torch.randint(2, 4, (300,))
    lengths[::50] = 9
    lengths[25] = 1
    return torch.randn(300, 9, 4, dtype=torch.float64), lengths.roll(20)


CALLS = {
    "map": lambda fn, *rows: mk.chunked_map(fn, *rows, chunk_size=64),
    "loss": lambda fn, *rows: mk.chunk.chunked_loss(lambda x, n: fn(x, n).square(), *rows, chunk_size=64),
}


@pytest.mark.parametrize(("name", "call"), one_in_product(3, BY_LENGTHS, CALLS))
def test_rows_that_are_compared_with_the_largest_integers_are_refused(name, call):
    rows = with_lengths()
    assert_refused(lambda: CALLS[call](BY_LENGTHS[name], *rows), mk.errors.InputError, "on the values of other rows")


@pytest.mark.parametrize("name", OF_EACH_LENGTH)
def test_rows_with_integers_of_their_own_pass(name):
    fn, rows = OF_EACH_LENGTH[name], with_lengths()
    assert_close(CALLS["map"](fn, *rows), fn(*rows))
    assert_close(CALLS["loss"](fn, *rows), fn(*rows).square().mean())


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


def test_a_check_that_refuses_leaves_what_was_trained_as_it_was():
    """ActNorm with a flag in Python: NaN would have stayed in the parameter, and the flag said that it is ready."""
    model, x = mlp(Flagged(8)).double(), torch.rand(50, 4, dtype=torch.float64)
    for call in (
        lambda: mk.chunked_map(model, x, chunk_size=7),
        lambda: mk.ChunkedProcessor(model, memory_budget="1MiB")(x),
        lambda: mk.chunk.chunked_loss(lambda a: model(a).square(), x, chunk_size=7, params=model.parameters()),
    ):
        assert_refused(call, mk.errors.InputError, r"`1` \(Flagged\)")
        assert_same(model[1].bias.data, torch.zeros(8, dtype=torch.float64))
        assert not model[1].is_ready
    assert_close(model(x), mk.chunked_map(model, x, chunk_size=7))  # the plain call has initialized it


class Flagged(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bias, self.is_ready = nn.Parameter(torch.zeros(width)), False

    def forward(self, x):
        if not self.is_ready:
            self.bias.data.copy_(-x.detach().mean(0))
            self.is_ready = True
        return x + self.bias


MODEL = mlp()
OF_THE_NUMBER = {
    "its share": lambda x: MODEL(x) / len(x),
    "its place": lambda x: x * torch.arange(len(x))[:, None],
    "places as integers": lambda x: (x, torch.arange(len(x))),
    "the number itself": lambda x: (x, len(x)),
    "another form": lambda x: {"x": x} if len(x) % 2 else x,
    "as many columns": lambda x: torch.eye(len(x)) + x.sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", OF_THE_NUMBER)
def test_functions_of_the_number_of_rows_are_refused(name):
    message = r"depends on the number of rows.*functools\.partial\(fn, n=len\(x\)\).*check=False\.$"
    for rows in (torch.randn(50, 4), torch.randn(3, 4)):
        assert_refused(lambda: check(OF_THE_NUMBER[name], rows), mk.errors.InputError, message)  # noqa: B023
    check(lambda x, places: x * places / 50, torch.randn(50, 4), torch.arange(50.0)[:, None])  # the way out


def test_calls_refuse_functions_of_the_number_of_rows():
    x, index = torch.randn(50, 4), torch.arange(50) % 3
    for call in (
        lambda **more: mk.chunked_map(lambda x: x / len(x), x, chunk_size=7, **more),
        lambda **more: mk.chunked_segment_reduce(lambda x: x / len(x), x, index=index, chunk_size=7, **more),
        lambda **more: mk.chunk.chunked_loss(lambda x: x / len(x), x, chunk_size=7, **more),
    ):
        assert_refused(call, mk.errors.InputError, "depends on the number of rows")
        call(check=False)
    count = mk.chunk.chunked_loss(lambda x: mk.Loss(sum=x.sum(), count=len(x)), x, chunk_size=7)
    assert_close(count, x.sum() / 50)


def test_a_function_that_a_chunk_would_change_for_the_next_is_refused():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mean = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x):
            out = self.layer(x) - self.mean  # the rows of this call do not change it, those of earlier ones do
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return out

    model = Centered()
    assert_refused(lambda: check(model, torch.randn(20, 4)), mk.errors.InputError, "depends on its earlier calls")
    assert_same(model.mean, torch.zeros(4))


def of_another_order(x):
    """Round differently for another number of rows, which a steep function makes large."""
    return torch.sin(1e13 * (x.sum(1) if len(x) == 8 else x.flip(1).sum(1)))


RANDOM = {
    "dropout": mlp(nn.Dropout(0.5)),
    "noise for each row": lambda x: x + torch.randn(len(x), 1),
    "several for each row": lambda x: x + torch.rand(3 * len(x)).view(-1, 3).sum(1, keepdim=True),
    "NumPy": lambda x: x + torch.from_numpy(np.random.rand(len(x), 1)),
    "a permutation": lambda x: x + torch.randperm(len(x))[:, None],
    "rounding": of_another_order,
    "rows in pairs": lambda x: (x.view(-1, 2, 4) * torch.tensor([[1.0], [2.0]])).flatten(0, 1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_noise_and_rounding_are_no_sign_of_the_number_of_rows(name):
    rows = torch.randn(50, 100 if name == "rounding" else 4)
    for _ in range(3):
        check(RANDOM[name], rows)


def test_embeddings_that_divide_gradients_by_counts_are_refused():
    emb, words = nn.Embedding(10, 3, scale_grad_by_freq=True), torch.randint(10, (50,))
    message = r"scale_grad_by_freq=True.*pass them: emb\(words\) in the place of words\.$"
    assert_refused(lambda: mk.chunked_map(emb, words, chunk_size=7), mk.errors.InputError, message)
    looked_up = lambda each: F.embedding(each, emb.weight, scale_grad_by_freq=True)  # noqa: E731
    assert_refused(lambda: check(looked_up, words), mk.errors.InputError, message)
    with torch.no_grad():
        assert_same(mk.chunked_map(emb, words, chunk_size=7), emb(words))
    expected, ours = (
        torch.autograd.grad(fn(emb(words)).square().sum(), emb.weight)
        for fn in (torch.tanh, lambda rows: mk.chunked_map(torch.tanh, rows, chunk_size=7))
    )
    assert_close(ours, expected)


def test_closures_of_one_module_are_checked_once():
    calls, model = queue.SimpleQueue(), mlp()
    model.register_forward_hook(lambda *_: calls.put(1))

    def made(factor, tensor=None):
        return lambda x: model(x) * factor if tensor is None else model(x) * tensor

    for factor, num_calls in ((2.0, 2), (2.0, 0), (3.0, 2)):
        check(made(factor), torch.randn(20, 4))
        assert calls.qsize() == num_calls
        calls = queue.SimpleQueue()
    for num_calls in (2, 1):  # a tensor may be any: NaN is tried each time, the number of rows once
        check(made(2.0, torch.ones(3)), torch.randn(20, 4))
        assert calls.qsize() == num_calls
        calls = queue.SimpleQueue()


def segment_softmax(index, x):
    scores = x.exp().sum(1)
    return x * (scores / scores.new_zeros(50).index_add(0, index, scores)[index])[:, None]


OF_A_GROUP = {
    "softmax": segment_softmax,
    "degree": lambda index, x: x / x.new_zeros(50).index_add(0, index, torch.ones_like(x[:, 0]))[index][:, None],
    "largest": lambda index, x: x - torch.zeros(50, 4).double().index_reduce(0, index, x, "amax")[index],
    "softmax of what refuses NaN": lambda index, x: segment_softmax(index, only_finite(x)),
}


@pytest.mark.parametrize("name", OF_A_GROUP)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_functions_that_mix_the_rows_of_a_group_are_refused_whatever_the_first_rows(name):
    """Edges in any order: the first ones may lead to a node each."""
    torch.manual_seed(0)
    x, index = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 20
    fn = OF_A_GROUP[name]
    assert not torch.allclose(torch.cat([fn(index[:25], x[:25]), fn(index[25:], x[25:])]), fn(index, x))
    assert_refused(
        lambda: mk.chunked_segment_reduce(fn, index, x, index=index, num_segments=20, chunk_size=25),
        mk.errors.InputError,
        "computes each row from that row alone",
    )


def test_functions_of_sorted_or_unique_integers_pass():
    def sorted_only(index, x):
        assert (index.diff() >= 0).all()
        return x * index[:, None]

    def unique_only(index, x):
        assert (index.diff() > 0).all()
        return x * index[:, None]

    x, index = torch.randn(50, 4, dtype=torch.float64), torch.arange(50)
    for fn in (sorted_only, unique_only):
        assert_close(mk.chunked_map(fn, index, x, chunk_size=8), x * index[:, None])


LINEAR = nn.Linear(4, 4).double()
BY_COMPARISON = {
    "above the mean": lambda x: LINEAR(x) * (LINEAR(x) > LINEAR(x).mean(0)),
    "hard examples": lambda x: x.square().mean(1) * (x.square().mean(1) > x.square().mean()),
    "the largest": lambda x: torch.cat([x, (x >= x.amax(0)).double()], 1),
    "near the mean": lambda x: torch.where((x - x.mean(0)).abs() < 3 * x.std(0), x, 0.0),
}


@pytest.mark.parametrize("name", BY_COMPARISON)
def test_comparisons_with_a_statistic_over_rows_are_refused(name):
    """NaN does not spread through them."""
    torch.manual_seed(0)
    x, fn = torch.randn(500, 4, dtype=torch.float64), BY_COMPARISON[name]
    assert not torch.allclose(torch.cat([fn(part) for part in x.split(100)]), fn(x))
    assert_refused(
        lambda: mk.chunked_map(fn, x, chunk_size=100, params=LINEAR.parameters()),
        mk.errors.InputError,
        "on the values of other rows",
    )
    check(lambda x: x * (x > x.new_ones(4)), x)  # the way out: the statistic comes from outside


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(4, 4)).double()  # keeps a weight with a graph, as it should
        self.keeps = True

    def forward(self, x):
        y = self.layer(x)
        if self.keeps:
            self.aux = y.square().mean()
        return y, y.square().mean(1)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_loss_kept_in_an_attribute_is_warned_of_and_the_way_out_works():
    model, x = WithLoss(), torch.randn(50, 4, dtype=torch.float64)
    with pytest.warns(mk.errors.MemkitWarning, match=r"attribute 'aux'.*return it from the function, as one value per"):
        mk.chunked_map(model, x, chunk_size=16)
    model.keeps = False
    model.eval()  # another mode, checked again: without a warning
    expected, ours = (
        torch.autograd.grad(call(x)[1].mean(), model.layer.weight_v)
        for call in (model, lambda x: mk.chunked_map(model, x, chunk_size=16))
    )
    assert_close(ours, expected)


def test_weights_that_pruning_computes_before_each_forward_are_not_warned_of():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    nn.utils.prune.l1_unstructured(net[0], "weight", 0.5)
    x, params = torch.randn(50, 4, dtype=torch.float64), [*net.parameters()]
    expected, ours = (
        torch.autograd.grad(call(x).square().sum(), params)
        for call in (net, lambda x: mk.chunked_map(net, x, chunk_size=16))
    )
    assert_close(ours, expected)


def test_transforms_inside_of_a_function_of_a_module_pass():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.randn(50, 4).double()
    holder = {"net": net}  # not found from outside: it is met inside of the transform
    params = list(net.parameters())
    for fn in (
        lambda rows: torch.func.vmap(torch.func.grad(lambda p: holder["net"](p).sum()))(rows),
        lambda rows: torch.func.vmap(torch.func.hessian(lambda p: holder["net"](p)[0]))(rows).diagonal(0, 1, 2),
    ):
        expected, ours = (
            torch.autograd.grad(call(x).square().sum(), params, allow_unused=True)
            for call in (fn, lambda x: mk.chunked_map(fn, x, chunk_size=7, params=params))  # noqa: B023
        )
        assert_close(ours[:3], expected[:3])


class Storing(nn.Module):
    """Keeps an auxiliary loss in a list or a dict, as mixtures of experts do."""

    def __init__(self, place):
        super().__init__()
        self.linear, self.place, self.losses, self.store = nn.Linear(5, 4), place, [], {}

    def forward(self, x):
        y = self.linear(x)
        if self.place == "losses":
            self.losses.append(y.square().mean())
        else:
            self.store["kl"] = y.square().mean()
        return y


@pytest.mark.parametrize("place", ["losses", "store"])
def test_a_loss_kept_in_a_list_or_a_dict_is_warned_of_too(place):
    with pytest.warns(
        mk.errors.MemkitWarning, match=rf"attribute '{place}'.*return it from the function, as one value"
    ):
        mk.chunked_map(Storing(place), torch.randn(300, 5), chunk_size=64)


class Normalizing(nn.Module):
    """Keeps the statistics of its rows, without a graph, for the way back, as RevIN does."""

    def __init__(self, place):
        super().__init__()
        self.linear, self.place, self.kept = nn.Linear(5, 5), place, {}

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach()
        if self.place == "attribute":
            self.mean, self.std = mean, std
        elif self.place == "tuple":
            self.statistics = mean, std
        elif self.place == "dict":
            self.kept["mean"] = mean
        elif self.place == "number":
            self.largest = x.detach().amax()
        elif self.place == "integers":
            self.places = x.argmax(1)
        return self.linear((x - mean) / std), mean, std


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("attribute", "mean"),
        ("tuple", "statistics"),
        ("dict", "kept"),
        ("number", "largest"),
        ("integers", "places"),
    ],
)
@pytest.mark.parametrize("num_rows", [2, 50])
def test_statistics_of_rows_kept_in_an_attribute_are_warned_of_once(place, name, num_rows):
    model, x = nn.Sequential(Normalizing(place)), torch.randn(num_rows, 5)
    with pytest.warns(mk.errors.MemkitWarning, match=rf"attribute '0\.{name}'.*, another one for other rows") as told:
        mk.chunked_map(model, x, chunk_size=16)
    assert len(told) == 1
    mk.chunked_map(model, x, chunk_size=16)


def test_statistics_of_rows_that_the_function_returns_are_those_of_all():
    """The way out that the warning names."""
    model, x = Normalizing("nowhere"), torch.randn(50, 5)
    for ours, plain in zip(mk.chunked_map(model, x, chunk_size=16), model(x), strict=True):
        assert torch.allclose(ours, plain)


class Writing(nn.Module):
    """Writes into a tensor that it keeps in a plain attribute."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what, self.kept, self.calls = nn.Linear(5, 5), what, torch.zeros(5), torch.tensor(0)

    def forward(self, x):
        y = self.linear(x)
        if self.what == "average":
            self.kept.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        elif self.what == "first row":
            self.kept.copy_(y[0].detach())
        elif self.what == "constant":
            self.kept.fill_(2.0)
        self.calls += 1
        return y


@pytest.mark.parametrize("what", ["average", "first row"])
@pytest.mark.parametrize("num_rows", [2, 50])
def test_what_calls_write_into_an_attribute_of_their_rows_is_warned_of_once(what, num_rows):
    model, x = nn.Sequential(Writing(what)), torch.randn(num_rows, 5)
    with pytest.warns(mk.errors.MemkitWarning, match=r"writes into the tensor in its attribute '0\.kept'") as told:
        mk.chunked_map(model, x, chunk_size=16)
    assert len(told) == 1
    mk.chunked_map(model, x, chunk_size=16, check=False)


def test_a_constant_written_into_an_attribute_is_not_warned_of():
    model = Writing("constant")
    mk.chunked_map(model, torch.randn(50, 5), chunk_size=16)
    assert model.kept.tolist() == [2.0] * 5


class Renewing(nn.Module):
    """Sets attributes to what no row decides: a constant, what a weight gives, a table of the first call."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.log = nn.Linear(5, 4), None, []

    def forward(self, x):
        self.scale, self.spread = torch.full((), 0.5), self.linear.weight.detach().std()
        self.log.append(torch.ones(3))
        if self.table is None:
            self.table = torch.arange(len(x))
        return self.linear(x) * self.scale


def test_attributes_that_do_not_depend_on_rows_are_not_warned_of():
    for num_rows in (2, 50):
        mk.chunked_map(Renewing(), torch.randn(num_rows, 5), chunk_size=16)


class Annealed(nn.Module):
    def __init__(self, linear, *, counts):
        super().__init__()
        self.linear, self.counts = linear, counts
        self.register_buffer("alpha", torch.ones(1))
        self.register_buffer("num_rows", torch.tensor(0))

    def forward(self, x):
        if self.counts:
            self.num_rows += len(x)
        return self.linear(x * self.alpha).tanh()


@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_buffer_that_is_changed_before_backward_is_an_error(is_tiled):
    """As autograd's own for parameters: the rerun would see another one. What each forward counts is no such buffer."""
    net, x = Annealed(nn.Linear(5, 4), counts=True), torch.randn(300, 5)
    if is_tiled:
        net, x = Annealed(nn.Conv1d(1, 2, 3, padding=1), counts=False), torch.randn(1, 1, 80)

    def run():
        if is_tiled:
            return mk.tiled_apply(net, x, 32).square().mean()
        return mk.chunked_map(net, x, chunk_size=64).square().mean()

    first, second = run(), run()
    first.backward()
    second.backward()
    loss = run()
    net.alpha.mul_(0.5)
    with pytest.raises(mk.errors.StateError, match=r"the buffer 'alpha', changed since the forward"):
        loss.backward()
    run().backward()


class ShiftedWindows(nn.Module):
    """Swin's attention: rows are windows, and those of an image have masks by their place in it."""

    def __init__(self, num_windows):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.register_buffer("mask", torch.randn(num_windows, 9, 9))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).view(-1, len(self.mask), 9, 9) + self.mask
        return scores.flatten(0, 1).softmax(-1) @ v


@pytest.mark.parametrize("num_windows", [4, 8, 16])
def test_a_function_of_a_multiple_of_rows_is_checked_with_two_chunks(num_windows):
    model, x = ShiftedWindows(num_windows), torch.randn(64, 9, 4)
    for chunk_size in (16, 32, 48, 64):
        assert_close(mk.chunked_map(model, x, chunk_size=chunk_size), model(x))
    assert_refused(
        lambda: mk.chunked_map(lambda x: model(x) + torch.arange(len(x))[:, None, None], x, chunk_size=16),
        mk.errors.InputError,
        "depends on the number of rows",
    )
    assert_refused(
        lambda: mk.chunked_map(lambda x: model(x) - model(x).mean(0), x, chunk_size=16),
        mk.errors.InputError,
        "depends on other rows",
    )


def of_windows(x, how):
    model = ShiftedWindows(16)
    return {
        "wrong chunks": lambda: mk.chunked_map(model, x, chunk_size=30),
        "wrong chunks, not checked": lambda: mk.chunked_map(model, x, chunk_size=30, check=False),
        "a budget": lambda: mk.ChunkedProcessor(model, memory_budget="2MiB")(x),
        "a budget, not checked": lambda: mk.ChunkedProcessor(model, memory_budget="2MiB", check=False)(x),
    }[how]()


@pytest.mark.parametrize("how", ["wrong chunks", "wrong chunks, not checked", "a budget", "a budget, not checked"])
def test_an_error_of_too_few_rows_says_how_many_there_were(how):
    with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
        of_windows(torch.randn(64, 9, 4), how)
    [note] = caught.value.__notes__
    assert "(ShiftedWindows" in note
    assert "rows, not on all" in note
    assert "pass chunk_size" in note
    assert "check=False" in note


def test_an_error_with_all_rows_has_no_note():
    with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
        mk.chunked_map(ShiftedWindows(7), torch.randn(64, 9, 4), chunk_size=64)
    assert not hasattr(caught.value, "__notes__")


def test_two_chunks_that_do_not_fit_are_not_checked_and_it_is_said():
    x = torch.randn(64, 9, 4)

    class Small(ShiftedWindows):
        def forward(self, x):
            if len(x) > 32:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
        mk.chunked_map(Small(16), x, chunk_size=32)
    assert "pass check=False" in caught.value.__notes__[0]
    model = Small(8)  # eight rows show that NaN stays in its row, and nothing else
    with pytest.warns(mk.errors.MemkitWarning, match="could not check that each row .* with two chunks it raised"):
        found = mk.chunked_map(model, x, chunk_size=32)
    assert_close(found, torch.cat([model(part) for part in x.split(32)]))


def test_a_function_of_a_multiple_of_rows_may_take_gradients_inside():
    model, x = ShiftedWindows(16), torch.randn(64, 9, 4)

    def slopes(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)[0]

    found = mk.chunked_map(slopes, x, chunk_size=32, params=model.parameters())
    assert_close(found, slopes(x))
