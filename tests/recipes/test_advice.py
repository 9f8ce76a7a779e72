"""Advice is tried before it is given: predictions match real steps, failures are shown, no trace is left."""

import copy
import importlib.util
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import memkit as mk
from benchmarks.models import transformer
from memkit._simulation.simulation import Host
from memkit.points.edges import sample_edges
from memkit.recipes.advice.advise import _difference, advise
from memkit.recipes.advice.remedies import no_change
from memkit.recipes.advice.step import Training, observe_step
from memkit.recipes.advice.submodules import held_by_modules
from tests.toys import Residual, classify, mean_square, mlp


def by_name(table):
    return {each.name: each for each in table}


@pytest.fixture(scope="module")
def batch():
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images[:1024]).float() / 16, torch.from_numpy(labels[:1024]).long()


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(64, 32), Residual(32, 64), Residual(32, 64), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def table(model, batch):
    return advise(model, batch, classify, changes_model=True, budget="1200KiB")


@pytest.mark.parametrize(("expected", "measured", "meets"), [(102, 100, True), (103, 100, False), (None, 100, True)])
def test_tolerance_is_two_percent(expected, measured, meets):
    values = {"name": "x", "change": "y", "effect": "z", "exact": True, "status": "verified"}
    for what in ("peak_bytes", "saved_bytes", "flops_ratio"):
        figures = {f"expected_{what}": expected, f"measured_{what}": measured}
        assert mk.recipes.Advice(**values, **figures).meets_expectations is meets


class TestOneTable:
    @pytest.mark.slow
    def test_measured_matches_predicted(self, table):
        assert table.measured_peak_bytes == table.peak_bytes
        verified = [each for each in table if each.is_verified]
        assert {each.name.partition(" of ")[0] for each in verified} >= {"checkpoint 2", "2 micro-batches", "bf16"}
        for each in verified:
            assert each.measured_peak_bytes == each.predicted_peak_bytes
            assert (
                each.measured_saved_bytes == each.predicted_saved_bytes == table.peak_bytes - each.measured_peak_bytes
            )
            assert each.expected_peak_bytes == each.predicted_peak_bytes  # it is measured where it was predicted
            assert each.expected_flops_ratio == each.predicted_flops_ratio
            assert each.allocator_saved_bytes > 0
            assert each.meets_expectations
            # A module's first call in chunks tries a few rows more, for independence.
            assert each.measured_flops_ratio == pytest.approx(each.predicted_flops_ratio, rel=0.01)

    def test_subtracting_block_bytes_is_wrong(self, model, batch, table):
        plain = observe_step(Training(model, batch, classify, "adamw", None, None), no_change, Host)
        held = held_by_modules(plain)
        advice = by_name(table)["checkpoint 2 of 2 blocks"]
        reckoned = held["1"] + held["2"]
        assert abs(reckoned - advice.measured_saved_bytes) > 0.1 * advice.measured_saved_bytes

    def test_operations_are_those_of_a_second_forward_of_the_blocks(self, table):
        advice = by_name(table)
        assert 1.05 < advice["checkpoint 2 of 2 blocks"].measured_flops_ratio < 4 / 3
        assert advice["2 micro-batches"].measured_flops_ratio == 1
        assert advice["MLPs of half the width"].measured_flops_ratio < 1

    def test_numbers_are_within_stated_precision(self, table):
        advice = by_name(table)
        assert advice["checkpoint 2 of 2 blocks"].exact
        assert advice["checkpoint 2 of 2 blocks"].difference == 0
        assert 0 < advice["2 micro-batches"].difference < 1e-6
        assert not advice["bf16"].exact
        assert 1e-4 < advice["bf16"].difference < 0.1
        assert not advice["MLPs of half the width"].exact
        assert advice["MLPs of half the width"].difference is None

    def test_order(self, table):
        kinds = [(each.is_verified, each.exact) for each in table]
        assert kinds == sorted(kinds, reverse=True)

    def test_budget(self, table):
        for each in table:
            assert each.fits is (
                None if each.predicted_peak_bytes is None else each.predicted_peak_bytes <= 1200 * 2**10
            )
        assert {each.fits for each in table} >= {True, False}

    @pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
    def test_missing_package_is_reported_without_figures(self, table):
        advice = by_name(table)["8-bit optimizer state"]
        assert advice.status == "not run: needs torchao, which is not installed"
        assert advice.predicted_saved_bytes is None

    def test_as_text_and_plain_values(self, table):
        text = table.explain()
        advice = by_name(table)["2 micro-batches"]
        assert f"predicted: saves {mk.memory.format_bytes(advice.predicted_saved_bytes)}" in text
        assert f"measured: saves {mk.memory.format_bytes(advice.measured_saved_bytes)}" in text
        assert "> mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)" in text
        assert json.loads(json.dumps(table.as_dict()))["items"][0]["name"] == table[0].name

    def test_in_a_report(self, table, tmp_path):
        (tmp_path / "log.json").write_text(
            '[{"event": "init", "peak_memory": 0}, {"event": "end", "peak_memory": 1000}]'
        )
        log = mk.report.read_memory_events(tmp_path / "log.json")
        mk.write_report(log, tmp_path / "report.md", sections=[table])
        text = (tmp_path / "report.md").read_text("utf-8")
        advice = by_name(table)["2 micro-batches"]
        assert text.count(mk.memory.format_bytes(advice.measured_saved_bytes)) >= 2  # predicted and measured

    def test_in_a_chinese_report_its_own_words_are_chinese(self, table):
        section = table(None, "zh")
        assert section.nodes[0].text.startswith("cpu 上未改动的训练步")
        assert mk.memory.format_bytes(table.peak_bytes) in section.nodes[0].text
        assert "plain step" not in section.nodes[0].text


def test_printed_call_has_the_precision_that_ran(batch):
    table = advise(mlp(64, 256, 10), batch, classify, precision="bf16-mixed")
    advice = by_name(table)["2 micro-batches"]
    assert advice.change == (
        "mk.MemoryEfficientTrainingWrapper(model, optimizer, precision='bf16-mixed', accumulation_steps=2)"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_gradient_is_a_difference(bad):
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    other = {"a": torch.ones(2), "b": torch.tensor([1.0, bad])}
    for ours, theirs in ((one, other), (other, one), (other, other)):
        assert not _difference(ours, theirs) <= 1e-3
    nothing = {"a": torch.zeros(2)}
    assert _difference(nothing, nothing) == 0
    assert _difference(one, nothing) == 1


def test_a_model_of_complex_numbers():
    model = nn.Sequential(nn.Linear(16, 64, dtype=torch.complex64), nn.Linear(64, 1, dtype=torch.complex64))
    table = advise(model, torch.ones(256, 16, dtype=torch.complex64), lambda m, x: m(x).abs().square().mean())
    assert by_name(table)["2 micro-batches"].is_verified


def test_leaves_no_trace(batch):
    model = mlp(64, 256, 10)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    classify(model, batch).backward()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    objects = [(p, p.data_ptr(), p.grad) for p in model.parameters()]
    seen = list(model.named_modules())
    random_state = torch.get_rng_state()

    def loss_fn(model, batch):
        if any(isinstance(each, nn.Linear) and each.out_features == 128 for each in model.modules()):
            raise ValueError("the narrow one")
        return classify(model, batch)

    table = advise(model, batch, loss_fn, optimizer=optimizer, changes_model=True)
    assert any(each.is_verified for each in table)
    torch.testing.assert_close(
        (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]), before
    )
    assert [(p, p.data_ptr(), p.grad) for p in model.parameters()] == objects
    assert list(model.named_modules()) == seen
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.slow
def test_the_optimizers_own_memory(batch):
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, foreach=True)

    few = batch[0][:16], batch[1][:16]
    advice = by_name(advise(mlp(64, 256, 256, 10), few, classify, optimizer=optimizer))["fused"]
    assert advice.is_verified
    assert advice.measured_saved_bytes == advice.predicted_saved_bytes > 0
    assert 0 < advice.difference < 1e-4


class Contrast(nn.Module):
    """Each row is compared with the others: nothing that may be cut."""

    def __init__(self):
        super().__init__()
        self.encode = mlp(64, 128, 32)

    def forward(self, x):
        z = F.normalize(self.encode(x), dim=1)
        return z @ z.T


@pytest.mark.slow
def test_change_of_gradient_is_shown_as_failed(batch):
    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])))

    advice = by_name(advise(Contrast(), batch, loss_fn))["2 micro-batches"]
    assert advice.status.startswith("failed: gradients differ by ")
    assert advice.expected_saved_bytes == advice.measured_saved_bytes > 0  # with both figures


class Mixing(nn.Module):
    """A softmax over rows in the middle: no tensor without data tells."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.Softmax(0), nn.Linear(64, 64))

    def forward(self, x):
        return self.inner(x).sum(0, keepdim=True)


@pytest.mark.slow
def test_real_run_rejects_chunks_that_mix_rows():
    advice = by_name(advise(Mixing(), torch.randn(1024, 8), mean_square))
    (chunks,) = (each for name, each in advice.items() if name.startswith("chunks of inner"))
    assert chunks.status.startswith("failed: a function whose result for one row depends on other rows")
    assert chunks.predicted_saved_bytes > 0
    assert chunks.measured_saved_bytes is None


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.head = mlp(6, 32, 32), nn.Linear(32, 1)

    def forward(self, points, edges):
        start, end = edges
        messages = self.message(torch.cat([points[start], points[end]], 1))
        return self.head(messages.new_zeros(len(points), 32).index_add(0, end, messages))


@pytest.mark.slow
def test_chunks_and_fewer_edges_of_a_graph():
    generator = torch.Generator().manual_seed(0)
    batch = {
        "points": torch.randn(200, 3, generator=generator),
        "edges": torch.randint(200, (2, 4000), generator=generator),
    }

    def fewer(batch):
        return batch | {"edges": batch["edges"][:, sample_edges(batch["edges"][1], 0.5)]}

    def loss_fn(model, batch):
        return model(batch["points"], batch["edges"]).square().mean()

    with pytest.warns(mk.MemkitWarning, match="the batch cannot be cut"):
        table = advise(Graph(), batch, loss_fn, fewer_edges=fewer)
    advice = by_name(table)
    assert advice["chunks of message"].is_verified
    assert advice["chunks of message"].difference < 1e-5
    assert "mk.ChunkedProcessor(model.message, chunk_size=250)" in advice["chunks of message"].change
    assert advice["fewer edges"].is_verified
    assert not advice["fewer edges"].exact
    assert advice["fewer edges"].difference > 0.01
    assert not any("micro-batches" in name for name in advice)  # nobody said how to cut a graph
    assert advice["offload activations"].is_verified


@pytest.mark.slow
def test_chunks_with_input_requiring_gradient():
    model = nn.Sequential(nn.Linear(3, 4), mlp(4, 128, 128, 4))
    points = torch.randn(2048, 3, generator=torch.Generator().manual_seed(0))
    table = advise(model, points, mean_square)
    (chunks,) = (each for each in table if each.name == "chunks of 1")
    assert chunks.is_verified
    assert chunks.change == "mk.ChunkedProcessor(model[1], chunk_size=128)(x) in place of model[1](x)"
    assert chunks.measured_flops_ratio > 1.2


@pytest.mark.slow
def test_tiles_of_convolutions():
    model = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 1, 3, padding=1))
    sound = torch.sin(torch.arange(4096) / 7).view(1, 1, -1)
    advice = by_name(advise(model, sound, lambda model, x: (model(x) - x).square().mean()))["tiles of the model"]
    assert advice.is_verified
    assert advice.difference < 1e-5
    assert advice.change == "mk.tiled_apply(model, x, 1024, dims=(-1,))"


class Inner(nn.Sequential):
    """A module that is called by keyword, and whose attributes and layers its owner uses too."""

    def forward(self, x, *, scale=None):
        return super().forward(x) if scale is None else super().forward(x) * scale


class Owner(nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x, other):
        assert isinstance(self.inner, Inner)
        return (
            self.inner(x=x, **self.options) * other.mean() + self.inner[0].weight.mean() + self.inner.train().training
        )


def test_a_module_tried_in_chunks_keeps_its_attributes_and_signature():
    model = Owner(Inner(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)))
    advice = by_name(advise(model, torch.randn(1024, 8), lambda model, x: model(x, x).square().mean()))[
        "chunks of inner"
    ]
    assert advice.status == "verified"
    assert advice.difference < 1e-6
    assert type(model.inner) is Inner
    assert "forward" not in vars(model.inner)


def test_a_module_tried_in_tiles_keeps_its_attributes_and_signature():
    model = Owner(Inner(nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)))
    advice = by_name(advise(model, torch.randn(1, 1, 96, 96), lambda model, x: model(x, x).square().mean()))
    assert advice["tiles of inner"].status == "verified"


def test_what_cannot_be_passed_by_position_is_said():
    model = Owner(Inner(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)), scale=2)
    advice = by_name(advise(model, torch.randn(1024, 8), lambda model, x: model(x, x).square().mean()))[
        "chunks of inner"
    ]
    assert advice.status == "not run: a call of Inner with scale by keyword only"


@pytest.mark.slow
def test_batchnorm_forbids_micro_batches(batch):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    advice = by_name(advise(model, batch, classify))["2 micro-batches"]
    assert advice.status == "not run: 1 normalizes over the rows, and would see only those of one part"
    assert advice.predicted_saved_bytes is None


@pytest.mark.slow
def test_random_numbers_in_another_order_are_not_compared(batch):
    model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.5), nn.Linear(512, 10))
    advice = by_name(advise(model, batch, classify))
    assert advice["2 micro-batches"].is_verified
    assert advice["2 micro-batches"].difference is None
    assert "another order" in advice["2 micro-batches"].effect


def test_parts_with_another_gradient_are_found_in_spite_of_dropout(batch):
    """Then gradients are not compared, and the split check is, on the same random numbers."""

    def contrast(model, batch):
        rows = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 10))
    table = by_name(advise(model, [each[:256] for each in batch], contrast))
    for name, advice in table.items():
        if "micro-batches" in name:
            assert advice.status.startswith("failed: the parts have a different gradient")
    assert any("micro-batches" in name for name in table)


@pytest.mark.slow
def test_reports_steps_too_large_to_run_here():
    x = torch.zeros(1, 1).expand(2**24, 64)  # no memory; its copy would take 4 GiB, the activations 4 TiB
    table = advise(nn.Sequential(nn.Linear(64, 2**16), nn.Linear(2**16, 1)), x, lambda model, x: model(x).mean())
    assert table.measured_peak_bytes is None
    assert table.peak_bytes > 2**42
    advice = by_name(table)["2 micro-batches"]
    assert advice.predicted_saved_bytes > 2**41
    assert advice.status.startswith("not run: needs 4.00 TiB here")
    assert advice.measured_saved_bytes is None


@pytest.mark.slow
def test_a_model_without_data_is_predicted_only():
    with torch.device("meta"):
        model = mlp(64, 1024, 10)
    table = advise(model, torch.zeros(512, 64), lambda model, x: model(x).mean())
    assert table[0].status == "not run: the model has no data (meta device)"
    assert not any(each.is_verified for each in table)


@pytest.mark.slow
def test_on_a_card():
    language = transformer(num_blocks=2, width=32, length=64, rows=4)
    table = advise(language.model, language.batch, language.loss_fn, target="RTX 4090")
    advice = by_name(table)["2 micro-batches"]
    assert advice.is_verified
    assert advice.expected_saved_bytes == advice.measured_saved_bytes != advice.predicted_saved_bytes
    assert all(each.fits for each in table if each.is_verified)


@pytest.mark.slow
def test_steps_in_backward_are_predicted_for_a_card():
    """A freed gradient is a tensor without memory, on the card too."""
    model = mlp(*[512] * 4)
    x = torch.rand(2, 512)
    table = by_name(advise(model, x, lambda model, x: model(x).sum(), optimizer="adamw", target="RTX 4090"))
    advice = table["step in backward"]
    assert advice.is_verified
    assert advice.expected_saved_bytes == advice.measured_saved_bytes > 0


def test_what_is_not_known_is_not_called_above_the_budget():
    """Python branches on a value, which is guessed without data."""
    model = mlp(64, 256, 10)

    def loss_fn(model, x):
        out = model(x)
        return out.square().mean() if out.abs().max() > 1e-3 else out.exp().mean()

    with pytest.warns(mk.MemkitWarning):
        table = advise(model, torch.randn(512, 64), loss_fn, budget="1GiB")
    judged = [each for each in table if each.predicted_peak_bytes is not None]
    assert judged
    assert all((each.fits, each.budget_verdict) == (None, "not known") for each in judged)
    assert "whether it is within the budget is not known" in str(judged[0])


def test_a_deviation_names_its_figures():
    advice = mk.recipes.Advice(
        name="a", change="b", effect="c", exact=True, status="", expected_peak_bytes=2**20, measured_peak_bytes=2**21,
        expected_saved_bytes=2**20, measured_saved_bytes=2**20, expected_flops_ratio=1.0, measured_flops_ratio=1.5,
    )  # fmt: skip
    assert not advice.meets_expectations
    assert advice.deviations == [
        "the peak is 2.00 MiB instead of 1.00 MiB",
        "the ratio of operations is 1.50 instead of 1.00",
    ]


def test_a_precision_that_loses_the_gradient_is_not_advice():
    """A difference quotient is lost in bfloat16."""
    torch.manual_seed(0)
    model = mlp(64, 512, 64)

    def loss_fn(model, x):
        return ((model(x) - model(x + 1e-4)).float() * 1e4).square().mean()

    advice = by_name(advise(model, torch.randn(512, 64), loss_fn))["bf16"]
    assert advice.status.startswith("failed: gradients differ by")
    assert "more than rounding" in advice.status


def test_wrong_arguments(batch):
    with pytest.raises(mk.errors.InputTypeError, match=r"advise\(str, \.\.\.\): got a str"):
        advise("model", batch, classify)
    with pytest.raises(mk.errors.ConfigError, match="None or 'bf16-mixed'"):
        advise(mlp(64, 10), batch, classify, precision="fp16")
    with pytest.raises(mk.errors.InputTypeError, match="the mean loss as a 0-dim tensor"):
        advise(mlp(64, 10), batch, lambda model, batch: 1.0)
    with pytest.raises(mk.errors.InputTypeError, match="the name of a GPU as a string, or a GPU object"):
        advise(mlp(64, 10), batch, classify, target=None)
    with pytest.raises(mk.errors.ConfigError, match="a class in torch"):
        advise(mlp(64, 10), batch, classify, optimizer="adamm")
    with pytest.raises(mk.errors.InputTypeError, match=r"advise: got None.*advise\(model, \(\), loss_fn\)"):
        advise(mlp(64, 10), None, classify)
    with pytest.raises(mk.errors.InputError, match="8 bytez"):  # before any step: there may be no advice to ask it of
        advise(mlp(64, 10), batch, lambda model, batch: pytest.fail("it ran"), budget="8 bytez")


@pytest.mark.parametrize("is_given", [True, False])
def test_a_batch_that_cannot_be_cut_is_tried_whole(is_given):
    """As the wrapper trains it: nodes and indices of some of them, or () where the loss function holds them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 2))
    nodes, labels, index = torch.randn(300, 64), torch.randint(2, (300,)), torch.arange(100)

    def loss_fn(model, batch):
        x, y, i = batch or (nodes, labels, index)
        return F.cross_entropy(model(x)[i], y[i])

    recorded = warnings.catch_warnings(record=True, action="always")
    with recorded as warned:
        table = by_name(advise(model, (nodes, labels, index) if is_given else (), loss_fn, optimizer="sgd"))
    assert len(warned) == is_given  # once, not for each remedy
    assert all("advise(...): the batch cannot be cut: tensors with [100, 300] rows" in str(w.message) for w in warned)
    for name in ("offload activations", "bf16"):
        assert table[name].is_verified
        assert table[name].measured_saved_bytes > 0.2 * nodes.nbytes


def test_sparse_gradients_are_compared_too():
    model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 4))
    advices = advise(model, torch.randint(50, (64, 5)), lambda model, x: model(x).square().mean(), optimizer="sgd")
    compared = [each for each in advices if each.difference is not None]
    assert compared
    assert all(each.difference < 1e-5 for each in compared)


@pytest.mark.slow
def test_a_packed_batch_is_split_by_the_users_function():
    """Boxes name their image in the first column."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 4))
    images, boxes = torch.randn(256, 64), torch.rand(768, 5)
    boxes[:, 0] = torch.arange(768) // 3

    def split(batch, n):
        """By sizes alone: there is no data in a prediction."""
        firsts = [3 * len(batch[0]) // n * each for each in range(n)]
        parts = zip(batch[0].chunk(n), batch[1].chunk(n), firsts, strict=True)
        return [(images, boxes - torch.tensor([first // 3, 0, 0, 0, 0])) for images, boxes, first in parts]

    def loss_fn(model, batch):
        images, boxes = batch
        return mk.Loss(mean=(model(images)[boxes[:, 0].long()] - boxes[:, 1:]).square().mean(), count=len(boxes))

    with pytest.warns(mk.MemkitWarning, match=r"advise\(model, batch, loss_fn, split_fn=\.\.\.\)"):
        plain = mk.advise(model, (images, boxes), loss_fn)
    assert not any("micro-batches" in each.name for each in plain)
    advice = mk.advise(model, (images, boxes), loss_fn, split_fn=split)
    (found,) = [each for each in advice if each.name == "4 micro-batches"]
    assert found.status == "verified"
    assert "split_fn=split_fn, accumulation_steps=4" in found.change


@pytest.mark.slow
def test_several_optimizers_are_advised_on_and_left_as_they_were(batch):
    images, labels = batch[0].double(), batch[1]
    model = mlp(64, 256, 10).double()
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(parameters[:2]), torch.optim.SGD(parameters[2:], lr=0.1, momentum=0.9)]
    classify(model, (images, labels)).backward()
    for each in optimizers:
        each.step()
    before = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    told = by_name(advise(model, (images, labels), classify, optimizer=optimizers))
    parts = told["4 micro-batches"]
    assert parts.is_verified
    assert parts.measured_saved_bytes == parts.predicted_saved_bytes > 0
    after = model.state_dict(), [each.state_dict() for each in optimizers]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_forms_of_several_optimizers_change_those_of_their_class():
    parameters = [nn.Parameter(torch.zeros(2**16)) for _ in range(6)]
    both = [torch.optim.AdamW(parameters[:5], foreach=True), torch.optim.SGD(parameters[5:], lr=0.1, foreach=True)]
    model = nn.ParameterList(parameters)
    told = advise(model, torch.ones(1), lambda m, x: sum((each * x).sum() for each in m), optimizer=both)
    assert {"fused", "step in backward"} <= {each.name for each in told if each.is_verified}
    assert {each.change for each in told if each.name == "fused"} == {"torch.optim.AdamW(..., fused=True)"}
    assert [each.param_groups[0]["foreach"] for each in both] == [True, True]
