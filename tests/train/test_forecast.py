"""The memory of a micro-batch of any size is predicted from two small runs, and batches are cut accordingly."""

import contextlib
import copy
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import memkit as mk
from memkit._recorder.recorder import Recorder
from memkit.train.forecast import Forecast, _added, _upper_envelope
from tests.allocations import trace_allocations
from tests.helpers import Noted, assert_refused, assert_same
from tests.toys import mean_square, trainer_of

MIB = 2**20


class Widening(nn.Module):
    """(N, C) -> (N, C). Its peak moves: with few rows it lies in the backward, with many where the rows are widest."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512) / 20)
        self.scale = nn.Parameter(torch.ones(8, 512))

    def forward(self, x):
        with torch.no_grad():
            bias = (x[:, None] * self.scale).pow(2).mean(1)  # (N, 8, C), gone before the backward
        return (x + bias) @ self.weight


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (16, 32)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 16, 16)), nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(),
    )  # fmt: skip


def mlp():
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])


MODELS = {"mlp": mlp, "convolutions": convolutions, "encoder": encoder, "widening": Widening}


def record(model, x):
    with Recorder() as recorder:
        torch.autograd.grad(mean_square(model, x), list(model.parameters()), allow_unused=True)
    return recorder.recording()


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_many_rows_is_predicted_to_the_byte(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(300, 512)
    forecast = Forecast.between(record(model, x[:2]), record(model, x[:4]), (2, 4))
    for num_rows in (8, 64, 300):
        truth = int(_added(record(model, x[:num_rows])).max())
        assert forecast.peak_bytes(num_rows) == pytest.approx(truth, rel=1e-4), num_rows


def test_a_line_through_the_two_peaks_would_be_wrong():
    torch.manual_seed(0)
    model, x = Widening(), torch.randn(300, 512)
    runs = {rows: record(model, x[:rows]) for rows in (2, 4, 300)}
    peaks = {rows: _added(run).max() for rows, run in runs.items()}
    line = peaks[2] + (300 - 2) * (peaks[4] - peaks[2]) / 2
    assert line < 0.7 * peaks[300]
    assert Forecast.between(runs[2], runs[4], (2, 4)).peak_bytes(300) == pytest.approx(peaks[300], rel=1e-4)


def test_diverging_runs_fall_back_to_line_of_peaks():
    with Recorder() as few:
        torch.ones(100)
    with Recorder() as more:
        torch.ones(200) + torch.ones(200)
    forecast = Forecast.between(few.recording(), more.recording(), (2, 4))
    assert [forecast.peak_bytes(rows) for rows in (2, 4, 6)] == [400, 2400, 4400]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 20)), max_size=60), st.integers(1, 10**6))
def test_drops_lines_that_are_never_highest(lines, num_rows):
    heights = np.array([float(height) for height, _ in lines])
    slopes = np.array([float(slope) for _, slope in lines])
    kept = _upper_envelope(heights, slopes)
    assert len(kept) <= 21  # one for each slope at most
    whole, short = Forecast(2, heights, slopes), Forecast(2, heights[kept], slopes[kept])
    assert short.peak_bytes(num_rows) == whole.peak_bytes(num_rows)


def test_a_forecast_keeps_a_few_lines():
    """One timeline for each shape, of a run with many shapes, would fill the host."""
    model = convolutions()
    runs = [record(model, torch.randn(rows, 512)) for rows in (2, 4)]
    assert len(_added(runs[0])) > 50
    assert len(Forecast.between(*runs, (2, 4)).slopes) < 10


def test_warns_once_of_unusable_budget():
    """The rehearsal has few rows, which this loss does not take; the step itself has enough."""
    model = mlp()

    def picky(model, x):
        if len(x) < 8:
            raise ValueError("too few rows")
        return mean_square(model, x)

    with trainer_of(model, memory="1GiB") as trainer:
        trainer.train_step(torch.randn(16, 512), picky)
        with pytest.warns(mk.MemkitWarning, match=r"memory=\.\.\. is ignored.*ValueError: too few rows"):
            trainer.train_step(torch.randn(16, 512), picky)
        trainer.train_step(torch.randn(18, 512), picky)


def test_number_of_fitting_rows():
    forecast = Forecast(2, torch.tensor([100.0, 50.0]).double().numpy(), torch.tensor([0.0, 10.0]).double().numpy())
    assert forecast.max_rows(100, 1000) == 7  # 50 + 5 * 10
    assert forecast.max_rows(99, 1000) == 1
    assert forecast.max_rows(10**6, 1000) == 1000


@pytest.mark.parametrize("on_oom", ["exact", pytest.param("raise", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        pytest.param("mlp", 2000, marks=pytest.mark.slow),
        ("convolutions", 400),
        pytest.param("encoder", 400, marks=pytest.mark.slow),
    ],
)
def test_budget_is_kept_and_training_equals_plain_parts(name, num_rows, on_oom):
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(num_rows, 512)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    activation_bytes = int(_added(record(model, x)).max()) - parameter_bytes
    budget = 4 * parameter_bytes + activation_bytes // 3  # parameters, momentum, a part's gradients and their sum
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    with (
        mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=budget, on_oom=on_oom, probe=False) as trainer,
        Recorder() as recorder,
    ):
        results = [trainer.train_step(x, mean_square) for _ in range(3)]
    assert all(2 <= result.num_microbatches <= 5 and result.num_ooms == 0 for result in results)
    assert recorder.recording().peak_bytes() - x.nbytes <= budget

    torch.manual_seed(1)
    accumulator = mk.GradientAccumulator(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), check_weights=False)
    for result in results:
        accumulator.expect(num_rows)
        for part in x.split(result.sizes):
            accumulator.backward(mean_square(twin, part), count=len(part))
        accumulator.flush()
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)  # the two small runs left no trace: dropout, statistics, gradients


@pytest.mark.parametrize("on_oom", ["exact", "raise"])
def test_a_predicted_split_that_changes_the_gradient_is_refused(on_oom):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256))
    x, before = torch.randn(512, 256), copy.deepcopy(model.state_dict())
    with trainer_of(model, memory="7MiB", on_oom=on_oom) as trainer:
        for _ in range(2):  # in the second step it is known
            assert_refused(
                lambda: trainer.train_step(x, mean_square),
                mk.MemkitOutOfMemoryError,
                r"predicted not to fit as a whole \(memory=...\), and splitting it changes its gradient",
                "In training mode 1 would see the statistics of each micro-batch",
            )
    assert_same(dict(model.state_dict()), dict(before))
    with (
        trainer_of(model, memory="7MiB", on_oom="inexact") as trainer,
        pytest.warns(mk.MemkitWarning, match="splitting the batch changes the gradient"),
    ):
        assert trainer.train_step(x, mean_square).num_microbatches > 1


@pytest.mark.slow
def test_a_model_in_bfloat16_is_charged_for_sums_in_bfloat16():
    def run(**keywords):
        model = mlp().bfloat16()
        with trainer_of(model, memory="7MiB", probe=False, **keywords) as trainer:
            return trainer.train_step(torch.randn(400, 512).bfloat16(), mean_square).num_microbatches

    assert 1 < run() < 20  # 2 MiB each: parameters, a part's gradients and their sum
    with pytest.warns(mk.MemkitWarning, match="a single row"):
        assert run(precision="bf16-true") == 1  # their sum takes 4 MiB, so that parts would take more than the batch


def test_batch_without_rows_stays_whole():
    model = nn.Linear(4, 4)
    memory = mk.MemoryManager("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.ones(6, 4), "table": torch.ones(3)}

    def table_loss(model, batch):
        return model(batch["x"]).pow(2).mean() * batch["table"].sum()

    with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=memory, on_oom="raise") as trainer:
        assert trainer.train_step(batch, table_loss).sizes == (1,)
        with pytest.warns(
            mk.MemkitWarning,
            match=r"memory=... is ignored, because the batch cannot be cut: tensors with \[3, 6\] rows",
        ):
            assert trainer.train_step(batch, table_loss).stepped
    with (
        mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=memory) as trainer,
        pytest.warns(mk.MemkitWarning, match=r"cannot be cut: tensors with \[3, 6\] rows"),
    ):
        assert trainer.train_step(batch, table_loss).num_microbatches == 1


def test_fitting_batch_stays_whole_and_is_rehearsed_once():
    sizes = Noted()

    def counted(model, x):
        sizes.append(len(x))
        return mean_square(model, x)

    model = mlp()
    with trainer_of(model, memory="1GiB") as trainer:
        for _ in range(3):
            assert trainer.train_step(torch.randn(16, 512), counted).sizes == (16,)
    assert sizes.take() == [2, 4, 16, 16, 16]


def test_a_look_at_the_split_stays_within_the_budget():
    sizes = Noted()

    def counted(model, x):
        sizes.append(len(x))
        return mean_square(model, x)

    model, x = nn.Linear(8, 512), torch.randn(2048, 8)
    with trainer_of(model, memory="2MiB") as trainer:
        for _ in range(4):
            results = []
            trace = trace_allocations(lambda into=results: into.append(trainer.train_step(x, counted)))
            assert len(results[0].sizes) > 2
            assert trace.live.max() <= 2 * MIB
    assert max(sizes.take()) == max(results[0].sizes)


@pytest.mark.parametrize(("budget", "size"), [(3_000_000, 1), (4_000_000, 2)])
def test_only_the_check_of_parts_of_few_rows_exceeds_the_budget(budget, size):
    """As `docs/wrapper.md` says: fewer rows would not show whether the loss compares rows."""
    x = torch.randn(8, 512, 64)

    def reconstruction(model, x):
        return (model(x) - x).square().mean()

    def peaks(*, probe):
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=budget, probe=probe) as trainer:
            for _ in range(4):
                with mk.Tracker(device="cpu") as tracker:
                    assert set(trainer.train_step(x, reconstruction).sizes) == {size}
                yield (tracker.peak_bytes - x.nbytes) / budget

    checked, unchecked = list(peaks(probe=True)), list(peaks(probe=False))
    assert budget < checked[1] * budget <= 5_120_000  # less if the rows that it chooses lie together in the batch
    assert checked[3] == checked[1]
    assert checked[2] == unchecked[2]
    assert max(unchecked[1:]) < 1
    assert unchecked[0] == pytest.approx(3_606_024 / budget, abs=0.02)  # of two rows, from which the others follow


class Centered:
    """A loss with a state of its own, as DINO's, and one that counts its calls, as a warm-up does."""

    def __init__(self):
        self.center, self.num_calls, self.chance = torch.zeros(512), 0, np.random.default_rng(0)

    def __call__(self, model, x):
        y = model(x)
        self.num_calls += 1
        loss = (y - self.center - self.chance.normal()).square().mean() * self.num_calls
        self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
        return loss


@pytest.mark.parametrize("how", ["a budget", "a manager"])
def test_a_rehearsal_leaves_no_trace_in_what_the_loss_holds(how):
    def run(**settings):
        torch.manual_seed(0)
        model, loss_fn = nn.Linear(512, 512), Centered()
        with trainer_of(model, **settings) as trainer:
            for _ in range(3):
                assert trainer.train_step(torch.randn(16, 512), loss_fn).sizes == (16,)
        return [*model.parameters(), loss_fn.center], loss_fn.num_calls

    expected, num_calls = run()
    found, num_calls_found = run(memory="1GiB" if how == "a budget" else mk.MemoryManager("cpu"))
    assert num_calls_found == num_calls == 3
    assert_same(found, expected)


class Again(torch.autograd.Function):
    """Runs a block again in backward, as reversible networks do: its parameters get their gradients in ``.grad``."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.x, ctx.block = x.detach(), block
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


def test_a_rehearsal_leaves_no_gradients_of_a_reversible_network():
    """They are not told of as those of another backward, and are not in the step's."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]).double()
    x, got = torch.randn(8, 3, dtype=torch.float64), []

    def loss_fn(model, x):
        return Again.apply(model[0](x), model[1]).square().mean()

    model[1](model[0](x)).square().mean().backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    with trainer_of(
        model, memory="20MiB", on_gradients=lambda model: got.extend(each.grad.clone() for each in model.parameters())
    ) as trainer:
        trainer.train_step(x, loss_fn)
    torch.testing.assert_close(got, expected)


def test_manager_supplies_budget_and_gets_phases():
    model = mlp()
    memory = mk.MemoryManager("cpu")
    with trainer_of(model, memory=memory) as trainer:
        trainer.train_step(torch.randn(16, 512), mean_square)
    assert [(path, totals.num_calls) for path, totals in memory.phases.items()] == [
        ("microbatches", 1),
        ("optimizer", 1),
    ]


class Reader(nn.Module):
    """(N, 512) to (N, 64), with no block of several layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(512, 64, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None])[0]


@pytest.mark.parametrize(
    ("make", "settings", "is_cut", "ways"),
    [
        (encoder, {}, True, "checkpoint='auto' or offload=('activations',) or a lower precision or a larger budget"),
        (
            encoder,
            {"checkpoint": "auto", "precision": "bf16-mixed"},
            True,
            "offload=('activations',) without checkpoint=... or a larger budget",
        ),
        (encoder, {"offload": {"activations"}, "precision": "bf16-mixed"}, False, "a larger budget"),
        (Reader, {}, False, "offload=('activations',) or a lower precision or a larger budget"),
    ],
)
def test_warns_once_of_oversized_row_and_tries_it(make, settings, is_cut, ways):
    """Where the weights take most, the batch is not cut: parts would keep the sum of their gradients, too."""
    x = torch.randn(8, 512)
    recorded = warnings.catch_warnings(record=True, action="always")
    with trainer_of(make(), memory="20KiB", **settings) as trainer, recorded as warned:
        for num_rows in (8, 8, 7):
            sizes = (1,) * num_rows if is_cut else (num_rows,)
            assert trainer.train_step(x[:num_rows], mean_square).sizes == sizes
    (told,) = [str(each.message) for each in warned if "a single row are predicted to take" in str(each.message)]
    assert "but only 0 B are available" in told
    assert ("anyway row by row." if is_cut else "anyway, and the batch is not cut for it: parts would take") in told
    assert told.endswith(f"Way out: set {ways}.")


class Nodes(nn.Module):
    """(N,) indices of nodes to (N, 64): all of a graph's nodes run for any of them, and then each index by itself."""

    def __init__(self, num_nodes):
        super().__init__()
        self.register_buffer("nodes", torch.randn(num_nodes, 64))
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, index):
        return self.head(F.dropout(self.layer(self.nodes).relu(), 0.5)[index]).tanh()


def train_nodes(num_rows, **settings):
    """Take two steps; return the parts' sizes, the second step's peak, the weights, and what was warned of."""
    torch.manual_seed(0)
    model, index, results = Nodes(1024), torch.arange(num_rows), []
    recorded = warnings.catch_warnings(record=True, action="always")
    with trainer_of(model, probe=False, **settings) as trainer, recorded as warned:
        torch.manual_seed(1)
        trainer.train_step(index, mean_square)
        peak = trace_allocations(lambda: results.append(trainer.train_step(index, mean_square))).peak
    return results[0].sizes, peak, dict(model.state_dict()), [str(each.message) for each in warned]


def test_where_not_even_a_row_fits_parts_are_no_smaller_than_helps():
    sizes, _, weights, told = train_nodes(32, memory="320KiB")
    assert sizes == (32,)
    assert_same(weights, train_nodes(32)[2])  # the same dropout
    assert len(told) == 1
    assert "tried anyway, and the batch is not cut for it: parts would take hardly less. Way out" in told[0]

    sizes, peak, _, (told,) = train_nodes(1024, memory="320KiB")
    assert 1 < len(sizes) < 100
    assert f"tried anyway in {len(sizes)} parts: smaller ones would take hardly less. Way out" in told
    least = train_nodes(1024, accumulation_steps=128)[1]
    assert peak <= 1.06 * least < train_nodes(1024, accumulation_steps=len(sizes) - 1)[1]


def test_a_refused_split_names_what_is_not_set_yet_and_takes_less():
    """Blocks that run again are there as a whole, so that activations are offloaded best without them."""

    def refusal(*layers, **settings):
        with trainer_of(nn.Sequential(*layers, nn.BatchNorm1d(256)), memory="3MiB", **settings) as trainer:
            return str(assert_refused(lambda: trainer.train_step(torch.randn(2048, 256), mean_square), mk.MemkitError))

    block = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256))
    blocks = block, copy.deepcopy(block)
    ways = "a lower precision, more memory=..., smaller batches or a smaller model"
    assert f"use checkpoint='auto' or offload=('activations',), {ways}" in refusal(*blocks)
    assert f"use offload=('activations',), {ways}" in refusal(nn.Linear(256, 256))
    assert "use offload=('activations', 'optimizer'), a" in refusal(nn.Linear(256, 256), offload={"optimizer"})
    alone = f"use offload=('activations',) without checkpoint=..., {ways}"
    assert alone in refusal(*blocks, checkpoint="auto")
    assert alone in refusal(*blocks, checkpoint="auto", offload={"activations"})
    ways = "more memory=..., smaller batches or a smaller model"
    assert f"Otherwise use {ways}" in refusal(*blocks, offload={"activations"}, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"memory": object()}, mk.errors.ConfigError, "a MemoryManager, or a budget"),
        ({"memory": True}, mk.errors.ConfigError, "a MemoryManager"),
        ({"memory": 1.5}, mk.errors.ConfigError, r"memory=1.5.*fraction in \(0, 1\]"),
        ({"memory": 0.0}, mk.errors.ConfigError, "fraction"),
        ({"memory": "much"}, mk.errors.InputError, "a number and a unit"),
        ({"memory": -1}, mk.errors.InputError, "zero bytes or more"),
        (
            {"memory": "1GiB", "split_fn": lambda batch, n: [batch]},
            mk.errors.ConfigError,
            r"no split_fn.*accumulation_steps",
        ),
    ],
)
def test_rejects_unusable_budgets(settings, error, words):
    assert_refused(lambda: trainer_of(mlp(), **settings), error, words)


def test_failed_rehearsal_leaves_everything_unchanged():
    model = mlp()

    def only_whole(model, x):
        if len(x) < 8:
            raise ValueError("at least 8 rows")
        return F.mse_loss(model(x), x)

    with trainer_of(model, memory="1MiB", probe=False) as trainer:
        assert trainer.train_step(torch.randn(8, 512), only_whole).sizes == (8,)


@pytest.mark.parametrize("order", ["small first", "large first", "mixed"])
def test_samples_of_different_sizes_stay_below_the_budget_in_any_order(order):
    """The largest ones are looked at first, and no more of them at once than may fit."""
    few, many = [2000] * 4, [20] * 12
    lengths = {"small first": [*many, *few], "large first": [*few, *many], "mixed": [20, 20, 2000, 20] * 4}

    def loss_fn(model, samples):
        return torch.stack([model(each).square().mean() for each in samples]).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    with trainer_of(model, memory="10MiB") as trainer:
        for scale in (1, 2, 1):  # larger samples than before are looked at again
            samples = [torch.randn(scale * length, 16) for length in lengths[order]]
            with Recorder() as recorder:
                trainer.train_step(samples, loss_fn)
            held = sum(each.nbytes for each in samples)
            assert recorder.recording().peak_bytes("cpu") - held <= 10 * 2**20


def test_a_model_that_refuses_one_row_gets_a_forecast_of_two():
    """BatchNorm: where four rows might exceed the budget, one row is tried next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(12, 4000, 64)

    def loss_fn(model, x):
        if len(x) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return mean_square(model, x.flatten(0, 1))

    with trainer_of(model, memory="20MiB", probe=False) as trainer, Recorder() as recorder:
        sizes = trainer.train_step(x, loss_fn).sizes
    assert 1 < max(sizes) < 4
    assert recorder.recording().peak_bytes("cpu") - x.nbytes <= 20 * 2**20


def test_offload_counts_in_the_forecast_of_a_budget():
    """Tensors that are too small to be moved in the trial runs of few rows are moved in the step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU()) for _ in range(4)]
    model, x = nn.Sequential(nn.Linear(64, 256), *blocks), torch.randn(2048, 64)

    def peak_bytes(**settings):
        with trainer_of(copy.deepcopy(model), **settings) as trainer:
            for _ in range(2):
                with Recorder() as recorder:
                    assert trainer.train_step(x, lambda model, x: model(x).square().mean()).sizes == (2048,)
        return recorder.recording().peak_bytes("cpu")

    plain, offloaded = peak_bytes(), peak_bytes(offload={"activations"})
    assert offloaded < 0.6 * plain
    # With BatchNorm the batch may not be split: it is only accepted if it is predicted to fit as a whole.
    assert peak_bytes(offload={"activations"}, memory=(offloaded + plain) // 2) <= (offloaded + plain) // 2
    with pytest.raises(mk.MemkitOutOfMemoryError, match="predicted not to fit"):
        peak_bytes(memory=(offloaded + plain) // 2)


class Trimmed(nn.Module):
    """(N, L) integers to (N, longest, 8): padding that no row needs is cut off."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, tokens, lengths):
        return self.body(self.table(tokens[:, : int(lengths.max())]))


def padded(lengths):
    lengths = torch.tensor(lengths)
    tokens = torch.randint(1, 50, (len(lengths), 64))
    return tokens.where(torch.arange(64) < lengths[:, None], 0), lengths


def trimmed_loss(model, batch):
    tokens, lengths = batch if isinstance(batch, tuple) else (batch, (batch != 0).sum(1))
    return model(tokens, lengths).square().sum((1, 2)).mean()


SHORT, LONG_LAST = [8] * 32, [8] * 31 + [64]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([LONG_LAST] * 2, id="long last"),
        pytest.param([LONG_LAST[::-1]] * 2, id="long first"),
        pytest.param([SHORT, LONG_LAST, SHORT], id="longer later"),
    ],
)
@pytest.mark.parametrize("has_lengths", [True, False])
def test_rows_that_a_forward_trims_stay_below_the_budget_in_any_order(lengths, has_lengths):
    model = Trimmed()
    budget = 2**21
    with trainer_of(model, memory=budget, probe=False) as trainer:
        for each in lengths:
            batch = padded(each) if has_lengths else padded(each)[0]
            with Recorder() as recorder:
                sizes = trainer.train_step(batch, trimmed_loss).sizes
            assert recorder.recording().peak_bytes("cpu") <= budget
    assert len(sizes) > 1


def test_a_sorted_batch_is_rehearsed_sorted():
    """As `pack_padded_sequence` wants it, also where other rows are large by their labels."""

    def sorted_loss(model, batch):
        tokens, lengths, labels = batch
        assert (lengths.diff() <= 0).all()
        return (model(tokens, lengths).square().sum((1, 2)) * labels).mean()

    tokens, lengths = padded([64, *SHORT])
    batch = tokens, lengths, torch.arange(33)
    with trainer_of(Trimmed(), memory=2**21, probe=False) as trainer:
        assert len(trainer.train_step(batch, sorted_loss).sizes) > 1


def test_integers_that_memory_does_not_depend_on_are_compared_once():
    sizes = Noted()

    def counted(model, batch):
        sizes.append(len(batch[0]))
        return F.cross_entropy(model(batch[0]), batch[1])

    with trainer_of(nn.Linear(512, 99), memory="1GiB") as trainer:
        for largest in (9, 99, 19):
            trainer.train_step((torch.randn(16, 512), torch.arange(16) * largest // 16), counted)
    assert sizes.take() == [2, 4, 2, 2, 16, 16, 16]


def test_a_batch_of_few_rows_does_not_turn_the_budget_off():
    x = torch.randn(2000, 512)
    with trainer_of(mlp(), memory="20MiB", probe=False) as trainer:
        assert trainer.train_step(x[:3], mean_square).sizes == (3,)
        assert len(trainer.train_step(x, mean_square).sizes) > 1


@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_batch_of_two_or_three_rows_is_cut(num_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    twin, x = copy.deepcopy(model), torch.randn(num_rows, 1024, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_of(model, x):
        return model(x).square().mean()

    whole = trace_allocations(lambda: step_of(twin, x).backward()).peak
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    there = sum(each.nbytes for each in model.parameters())
    budget = there + whole * 3 // 4  # with one row less, it fits
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=f"{budget}B") as trainer:
        first = trace_allocations(lambda: trainer.train_step(x, step_of)).peak  # its trial runs and checks too
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        assert trainer.train_step(x, step_of).num_microbatches == 2
        later = trace_allocations(lambda: trainer.train_step(x, step_of)).peak
    assert there + (later if num_rows == 2 else first) <= budget  # the check of a cut into single rows takes two


def test_a_batch_of_one_row_over_the_budget_is_told():
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory="24KiB") as trainer:
        with pytest.warns(mk.MemkitWarning, match=r"of a single row are predicted to take [\d.]+ KiB, but only"):
            trainer.train_step(torch.ones(1, 4), lambda model, x: model(x).mean())
        assert trainer.train_step(torch.ones(60, 4), lambda model, x: model(x).mean()).num_microbatches > 1


def test_the_sum_of_gradients_that_only_parts_need_is_told_of():
    """A batch of fewer rows stays whole at the same budget: the numbers of the text show why."""
    model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 1)).double()
    with trainer_of(model, memory="60KiB") as trainer:
        with pytest.warns(mk.MemkitWarning, match="the sum of the parts' gradients 20.01 KiB more") as caught:
            assert trainer.train_step(torch.ones(32, 8).double(), mean_square).num_microbatches > 1
        row, total, available = map(float, re.findall(r"([\d.]+) KiB", str(caught[0].message)))
        assert row < available < row + total
        assert trainer.train_step(torch.ones(4, 8).double(), mean_square).sizes == (4,)


class Bag(nn.Module):
    """An embedding bag with a head."""

    def __init__(self, sparse):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(1000, 32, mode="sum", sparse=sparse), nn.Linear(32, 1)

    def forward(self, indices):
        return self.head(self.bag(indices))


@pytest.mark.parametrize(
    ("sparse", "memory", "is_told"), [(True, "300KiB", True), (True, "1GiB", False), (False, "300KiB", False)]
)
def test_sparse_gradients_that_a_budget_may_not_hold_are_told_of(sparse, memory, is_told):
    model, indices = Bag(sparse), torch.randint(1000, (64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=memory)
    with pytest.warns(mk.MemkitWarning, match="sparse=True") if is_told else contextlib.nullcontext() as told:
        for _ in range(3):
            trainer.train_step(indices, lambda model, indices: model(indices).square().mean())
    assert not is_told or len(told) == 1


def test_two_forecasts_join_to_the_higher_peak():
    one, other = Forecast(2, np.array([100.0]), np.array([1.0])), Forecast(1, np.array([10.0]), np.array([20.0]))
    for joined in (one.joined(other), other.joined(one)):
        for rows in (2, 4, 6, 40):
            assert joined.peak_bytes(rows) == max(one.peak_bytes(rows), other.peak_bytes(rows))


def test_a_step_that_takes_more_than_was_predicted_is_told_once_and_learned_from():
    """On a card, which counts: what the few rows of a forecast do not show, the step does."""

    class Seen:
        repeats = 1  # of a class: what an object holds is restored after a rehearsal

    def growing(model, x):
        return mean_square(model, x.repeat(1, Seen.repeats, 1))

    with mk.VirtualGPU("RTX 4090"), warnings.catch_warnings(record=True, action="always") as warned:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
        # So much that a sixteenth holds cuBLAS's workspace, which PyTorch 2.15 takes for each product and gives back.
        x, peaks = torch.randn(32, 1024, 64, device="cuda"), []
        with trainer_of(model, memory="160MiB", probe=False) as trainer:
            for repeats in (1, 1, 2, 2, 4, 4):
                Seen.repeats, number = repeats, len(warned)
                torch.cuda.reset_peak_memory_stats()
                peaks.append(trainer.train_step(x, growing).peak_bytes)
                assert number == 0 or len(warned) == number == 1
    assert [peak > 164 * MIB for peak in peaks] == [False, False, True, False, True, False]
    assert "iB more than memory=... allows" in str(warned[0].message)


class Cloud:
    """A batch that only its own code can cut."""

    def __init__(self, points):
        self.points = points


def test_a_batch_that_cannot_be_cut_says_a_way_out_that_works():
    def step(trainer):
        return trainer.train_step(Cloud(torch.ones(8, 3)), loss_fn)

    def loss_fn(model, batch):
        return mk.Loss(mean=model(batch.points).square().mean(), count=len(batch.points))

    def trainer(**settings):
        model = nn.Linear(3, 1)
        return mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)

    ignoring = trainer(memory="1MiB")
    step(ignoring)
    said = "is ignored, because the batch cannot be cut: .*omit memory=..., set accumulation_steps, and pass split_fn"
    with pytest.warns(mk.MemkitWarning, match=said):
        step(ignoring)
    cut = trainer(accumulation_steps=2, split_fn=lambda batch, n: [Cloud(each) for each in batch.points.chunk(n)])
    assert step(cut).num_microbatches == 2


def test_the_empty_batch_says_ways_out_that_work_for_it():
    """No split_fn could cut (), for a loss function that holds the data."""
    x = torch.randn(8, 512)

    def of_all(model, _):
        return mean_square(model, x)

    with trainer_of(encoder(), memory="1MiB") as trainer:
        trainer.train_step((), of_all)
        with pytest.warns(mk.MemkitWarning, match="because the batch cannot be cut: no tensor with rows") as warned:
            trainer.train_step((), of_all)
    (told,) = [str(each.message) for each in warned]
    assert told.endswith(
        "Way out: omit memory=..., and set checkpoint='auto' or offload=('activations',) or a lower precision; or plan "
        "the step, memkit.prepare(model, optimizer, (), loss_fn, budget=...)."
    )
    for settings in ({"checkpoint": "auto"}, {"offload": ("activations",)}):
        with trainer_of(encoder(), **settings) as trainer:
            assert trainer.train_step((), of_all).stepped


def layers():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])


def near(model, x):
    return (model(x) - x).square().mean()


def unfreeze(model, _):
    model.requires_grad_(True)


def widen(model, optimizer):
    """As densification does: other parameters take the places of old ones, in the model and in the optimizer."""
    for layer, name, shape in ((0, "weight", (1024, 64)), (0, "bias", (1024,)), (2, "weight", (64, 1024))):
        setattr(model[layer], name, nn.Parameter(torch.randn(shape) / 20))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def begin_to_train(model, _):
    model.train()


def small(model, x):
    return model(x).square().mean()


def of_heads(model, x):
    return sum((model(x) - each * x).square().mean() for each in range(6))


CHANGES = {
    "unfrozen": (lambda: layers().requires_grad_(False).append(nn.Linear(64, 64)), unfreeze, (near, near)),
    "larger": (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), widen, (near, near)),
    "in training mode": (lambda: nn.Sequential(nn.Linear(64, 64), *[nn.Dropout(0.1)] * 20).eval(), begin_to_train,
                         (near, near)),
    "another loss": (layers, lambda *_: None, (small, of_heads)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_changes_is_predicted_anew(change):
    """The parts are those of a trainer that begins with the step as it is then."""
    make, apply, (before, after) = CHANGES[change]
    torch.manual_seed(0)
    model, x = make(), torch.randn(1024, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory="4MiB", probe=False) as trainer:
        first = trainer.train_step(x, before)
        apply(model, optimizer)
        changed = [trainer.train_step(x, after).num_microbatches for _ in range(3)]
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, memory="4MiB", probe=False) as trainer:
        anew = [trainer.train_step(x, after).num_microbatches for _ in range(3)]
    assert first.num_microbatches < changed[0]
    assert changed == anew


class Counted(nn.Module):
    """A linear layer that notes the rows of its runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(8, 8), Noted()

    def forward(self, x):
        self.rows.append(len(x))
        return self.linear(x)


def num_rehearsed(run, num_steps):
    """Return how many of the forwards of some steps were of few rows."""
    model = Counted()
    trainer = trainer_of(model, memory="1GiB")
    for number in range(num_steps):
        run(trainer, number)
    rows = model.rows.take()
    assert rows.count(16) == num_steps
    return len(rows) - num_steps


SIXTEEN_ROWS = torch.ones(16, 8)


def test_losses_in_turn_are_predicted_once_each():
    assert num_rehearsed(lambda trainer, number: trainer.train_step(SIXTEEN_ROWS, (near, small)[number % 2]), 12) == 4


def test_networks_trained_in_turn_are_predicted_once_each():
    def run(trainer, number):
        trainer.model.linear.bias.requires_grad_(number % 2 == 0)
        trainer.train_step(SIXTEEN_ROWS, near)

    assert num_rehearsed(run, 12) == 4


def test_a_lambda_made_anew_in_each_step_is_predicted_once():
    assert num_rehearsed(lambda trainer, _: trainer.train_step(SIXTEEN_ROWS, lambda model, x: near(model, x)), 50) == 2


class Near:
    def __call__(self, model, x):
        return near(model, x)


def test_loss_objects_made_anew_in_each_step_are_predicted_a_few_times_and_told():
    losses = [Near() for _ in range(20)]
    with pytest.warns(mk.MemkitWarning, match=r"ever new ones.*make each loss once, before the loop") as told:
        assert num_rehearsed(lambda trainer, number: trainer.train_step(SIXTEEN_ROWS, losses[number]), 20) == 2 * 5
    assert len(told) == 1


@pytest.mark.parametrize(("of_steps", "num_predicted"), [([False, True], 2), (range(12), 5)])
def test_a_switch_makes_another_loss_and_a_count_soon_none(of_steps, num_predicted):
    def run(trainer, number):
        value = of_steps[number % len(of_steps)]
        trainer.train_step(SIXTEEN_ROWS, lambda model, x: (value + 1) * near(model, x))

    assert num_rehearsed(run, 12) == 2 * num_predicted
