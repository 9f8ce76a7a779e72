"""The divisor of a loss is read from its graph, and shows where counts are missing."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit import GradientAccumulator, MemkitWarning
from memkit.errors import ConfigError
from memkit.train.divisors import DivisorWatch, Term, divisors, normalizes_over_batch
from tests.toys import trainer_of

X = torch.randn(6, 4)
LABELS = torch.tensor([0, 1, -100, 3, 2, -100])
MASK = torch.tensor([1.0, 0, 1, 1, 0, 1])
WEIGHT = torch.tensor([1.0, 2, 3, 4])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: x.mean(), [24.0]),
        (lambda x: x.mean((0, 1)) * 0.5, [48.0]),
        (lambda x: F.mse_loss(x, X + 1), [24.0]),
        (lambda x: F.l1_loss(x, X + 1), [24.0]),
        (lambda x: F.cross_entropy(x, LABELS), [4.0]),
        (lambda x: F.cross_entropy(x, LABELS, weight=WEIGHT), [10.0]),
        (lambda x: (x.sum(1) * MASK).sum() / MASK.sum(), [4.0]),
        (lambda x: (x.sum(1) * MASK).sum() / MASK.sum().item(), [4.0]),
        (lambda x: (x.sum(1) * MASK).sum() * (1 / MASK.sum()), [4.0]),
        (lambda x: x[MASK.bool()].mean(), [16.0]),
        (lambda x: torch.nanmean(x), [24.0]),
        (lambda x: torch.log(x.exp().mean()), [24.0]),
        (lambda x: x.mean() + 0.1 * x.pow(2).sum(), [24.0, 10.0]),
        (lambda x: x.sum(), [1.0]),
        (lambda x: (x.sum(1) * MASK.bool()).sum() / MASK.sum(), [4.0]),
        (lambda x: (x.sum(1) * MASK.long()).mean(), [6.0]),
        (lambda x: (x[:0].sum(1) * MASK[:0]).sum(), [1.0]),
    ],
)
def test_divisors_of_the_usual_losses(loss, expected):
    terms = divisors(loss(X.clone().requires_grad_()))
    products = [float(torch.tensor([float(factor) for factor in each.factors]).prod()) for each in terms]
    torch.testing.assert_close(products, expected)


@pytest.mark.parametrize(
    ("weights", "terms", "is_uneven"),
    [
        ((4, 4, 1), [(4,), (4,), (1,)], False),
        ((4, 4, 1), [(16,), (16,), (4,)], False),  # in proportion
        ((1, 1, 1), [(4,), (4,), (1,)], True),
        ((4, 4, 4), [(4,), (3,), (0,)], True),
        ((4, 4, 4), [(4, 7), (4, 7), (4, 7)], False),  # a penalty is constant
        ((4, 4, 1), [(4, 7), (4, 7), (1, 7)], False),
        ((4, 4, 4), [(4, 3), (3, 4), (2, 9)], True),  # each in its own way
        ((4, 4, 1), [(4, 3), (4, 9), (1, 5)], True),  # one of them as the weights
        ((4, 4, 4), [(4, 8), (3, 6), (2, 4)], True),
        ((4,), [(3,)], False),
    ],
)
def test_detects_divisors_not_following_weights(weights, terms, is_uneven):
    group = [
        (weight, tuple(Term((f"kind {k}",), (float(each),)) for k, each in enumerate(line)))
        for weight, line in zip(weights, terms, strict=True)
    ]
    assert DivisorWatch().is_uneven(group) is is_uneven


def test_terms_of_a_loop_over_samples_weigh_as_the_samples():
    one, other = (Term(("mean",), (4.0,)), Term(("mean",), (3.0,))), (Term(("mean",), (5.0,)), Term(("mean",), (2.0,)))
    assert DivisorWatch().is_uneven([(1, one), (1, other)]) is False
    assert DivisorWatch().is_uneven([(1, one[:1]), (1, other[:1])]) is True


def mean_of_tasks(model, x, there):
    """The mean over tasks of each one's mean over the rows that have it."""
    each = (model(x) * there).pow(2).sum(0) / there.sum(0)
    return each.mean()


def mean_of_rows(model, x, there):
    return ((model(x) * there).pow(2).sum(1) / there.sum(1)).mean()


@pytest.mark.parametrize(("loss", "is_told"), [(mean_of_tasks, True), (mean_of_rows, False)])
def test_detects_means_over_different_items(loss, is_told):
    there = torch.tensor([[1.0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]])
    x = torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accumulate(nn.Linear(4, 3), [lambda m: loss(m, x[:2], there[:2]), lambda m: loss(m, x[2:], there[2:])])
    assert any("means over different numbers of items" in str(each.message) for each in caught) is is_told


def accumulate(model, losses, counts=None, **settings):
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), len(losses), **settings)
    for i, loss in enumerate(losses):
        accumulator.backward(loss(model), count=None if counts is None else counts[i])
        accumulator.step()
    return accumulator.num_steps


def rows(num):
    return lambda model: model(torch.randn(num, 4)).pow(2).mean()


@pytest.mark.parametrize("counts", [None, (1, 1, 1), (5, 5, 5)])
def test_warns_once_of_short_micro_batch_without_count(counts):
    with pytest.warns(MemkitWarning, match=r"means over different numbers of items.*count=n") as caught:
        accumulate(nn.Linear(4, 2), [rows(5), rows(5), rows(2)], counts)
    assert len(caught) == 1


def weighted(x, weight):
    return lambda model: (model(x).pow(2).mean(1) * weight).sum() / weight.sum()


@pytest.mark.parametrize("sizes", [(3, 3, 3, 1), (4, 1), (1, 1, 1, 1), (3, 3, 2)])
def test_a_micro_batch_of_one_row_is_read_as_the_others(sizes):
    x, weight = torch.randn(sum(sizes), 4), torch.rand(sum(sizes))
    losses = [weighted(*each) for each in zip(x.split(sizes), weight.split(sizes), strict=True)]
    with pytest.warns(MemkitWarning, match="means over different numbers of items"):
        accumulate(nn.Linear(4, 2), losses, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate(nn.Linear(4, 2), losses, [float(each.sum()) for each in weight.split(sizes)])


NORMALIZED = {
    "divided before": lambda each, weight: (each * (weight / weight.sum())).sum(),
    "to the number of rows": lambda each, weight: (each * weight * (len(weight) / weight.sum())).mean(),
    "in a product": lambda each, weight: F.normalize(weight, p=1, dim=0) @ each,
    "softmax": lambda each, weight: (torch.softmax(weight, 0) * each).sum(),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_warns_when_weights_become_uneven(name):
    """They are divided by their own sum before the multiplication, so the divisor is not in the graph."""
    model = nn.Linear(4, 2)
    trainer = trainer_of(model, accumulation_steps=3)

    def loss_fn(model, batch):
        return NORMALIZED[name](model(batch[0]).pow(2).mean(1), batch[1])

    x = torch.randn(9, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            trainer.train_step((x, torch.ones(9)), loss_fn)
    with pytest.warns(MemkitWarning, match="splitting the batch changes the gradient"):
        trainer.train_step((x, torch.arange(1.0, 10.0)), loss_fn)


BEGIN_TO_DIFFER = {
    "by the largest": lambda e, w, mask: (w / w.max() * e.mean(1)).mean(),
    "by the largest, below": lambda e, w, mask: (e * (w / w.max())[:, None]).mean(1).mean(),
    "exponential": lambda e, w, mask: (torch.exp(w - w.max()) * e.mean(1)).mean(),
    "mask": lambda e, w, mask: (e * (mask / mask.mean())).mean(),
    "mask, then rows": lambda e, w, mask: (e * (mask / mask.mean())).mean(1).mean(),
    "einsum": lambda e, w, mask: torch.einsum("nt,nt->", e, mask / mask.sum()),
    "einsum, the other way": lambda e, w, mask: torch.einsum("n,n->", w / w.sum(), e.mean(1)),
}
FIT_NO_COUNT = ("by the largest", "by the largest, below", "exponential")
FOR_EACH_ROW = {
    "mask of each row": lambda e, w, mask: (e * (mask / mask.mean(1, keepdim=True))).mean(),
    "mean of each row": lambda e, w, mask: ((e * mask).sum(1) / mask.sum(1)).mean(),
    "constant": lambda e, w, mask: (e * w[:, None] / 3.0).mean(),
    "columns": lambda e, w, mask: (e * torch.arange(1.0, 6.0)).mean(),
    "largest of each row": lambda e, w, mask: (e * (mask / mask.amax(1, keepdim=True))).mean(),
}


@pytest.mark.parametrize("form", [*BEGIN_TO_DIFFER, *FOR_EACH_ROW])
def test_weights_that_begin_to_differ_are_noticed_in_their_step(form):
    """In the ninth, between two checks; weights that do not depend on other rows are silent."""
    torch.manual_seed(0)
    model, form_of = nn.Linear(4, 5), {**BEGIN_TO_DIFFER, **FOR_EACH_ROW}[form]
    trainer = trainer_of(model, accumulation_steps=2, probe="require")

    def loss_fn(model, batch):
        return form_of(model(batch["x"]).square(), batch["w"], batch["mask"])

    def step(w, mask):
        trainer.train_step({"x": torch.randn(8, 4), "w": w, "mask": mask}, loss_fn)

    for _ in range(8):
        step(torch.ones(8), torch.ones(8, 5))
    mask = (torch.arange(5) < torch.tensor([1, 5, 2, 4, 3, 5, 1, 2])[:, None]).float()
    if form in FOR_EACH_ROW:
        for _ in range(3):
            step(torch.rand(8) + 0.1, mask)
        return
    text = "splitting the batch changes the gradient"
    with (
        pytest.raises(ConfigError, match="compares or mixes the rows") if form in FIT_NO_COUNT else told(text, warns=1)
    ):
        step(torch.rand(8) + 0.1, mask)


@pytest.mark.parametrize(
    ("losses", "counts", "settings"),
    [
        ([rows(5), rows(5)], None, {}),
        ([rows(5), rows(2)], (5, 2), {}),
        ([rows(5), rows(2)], None, {"check_weights": False}),
        ([rows(5), rows(2)], None, {"objective": "sum"}),
    ],
)
def test_correct_and_unchecked_losses_are_silent(losses, counts, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accumulate(nn.Linear(4, 2), losses, counts, **settings) == 1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm1d(3).eval(), False),
        (nn.InstanceNorm1d(3), False),
        (nn.InstanceNorm1d(3, affine=True), False),
        (nn.GroupNorm(3, 3), False),
        (nn.LayerNorm(2), False),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("is_first", [True, False])
def test_batch_normalizations_are_found_in_the_graph(layer, expected, num_rows, is_first):
    layers = [layer, nn.Conv1d(3, 3, 1)] if is_first else [nn.Conv1d(3, 3, 1), layer]
    loss = nn.Sequential(*layers)(torch.randn(num_rows, 3, 2)).pow(3).sum()
    assert normalizes_over_batch(loss) is expected


def test_warns_once_of_batch_norm():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.warns(MemkitWarning, match="sees the statistics of each micro-batch") as caught:
        accumulate(model, [rows(4), rows(4), rows(4)])
    assert len(caught) == 1


SUMS = {
    "of squares": lambda each: each.pow(2).sum(),
    "in two goes": lambda each: each.pow(2).sum(1).sum(0),
    "of rows' means": lambda each: each.pow(2).mean(-1).sum(),
    "mse_loss": lambda each: F.mse_loss(each, torch.zeros_like(each), reduction="sum"),
    "cross_entropy": lambda each: F.cross_entropy(each, torch.zeros(len(each), dtype=torch.long), reduction="sum"),
    "not reduced": lambda each: F.cross_entropy(each, torch.zeros(len(each), dtype=torch.long), reduction="none").sum(),
    "masked": lambda each: (each.pow(2) * torch.ones(len(each), 1)).sum(),
    "two terms": lambda each: each.pow(2).sum() + each.abs().sum(),
}
MEANS = {
    "mean": lambda each: each.pow(2).mean(),
    "divided": lambda each: each.pow(2).sum() / len(each),
    "divided before": lambda each: (each.pow(2) / len(each)).sum(),
    "over rows": lambda each: each.pow(2).mean(0).sum(),
    "over rows, negative": lambda each: (-each.repeat(1, 6).mean(0)).sum(),
    "normalized weights": lambda each: (each.pow(2).mean(1) * torch.rand(len(each)).softmax(0)).sum(),
    "a penalty": lambda each: each.pow(2).mean() + torch.ones(24, requires_grad=True).sum(),
}
UNREAD = {"over rows, negative", "normalized weights"}  # nobody reads their divisors in the graph


@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 3)])
@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_warns_of_sum_with_count_in_wrapper_terms(name, sizes):
    """A sum that comes with a count as a mean is warned of, and a mean as a sum where that shows."""
    model, loss = nn.Linear(4, 2), {**SUMS, **MEANS}[name]
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), len(sizes))
    for reduction in ("mean", "sum"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in sizes:
                accumulator.backward(loss(model(torch.randn(size, 4))), count=size, reduction=reduction)
                accumulator.step()
        told = [str(each.message) for each in caught]
        if name in SUMS and reduction == "mean":
            assert len(told) == 1
            assert "The loss is a sum over rows, and the parts are averaged" in told[0]
            accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), len(sizes))
        elif name in MEANS and reduction == "sum" and name not in UNREAD:
            assert ["than count= and reduction= say" in each for each in told] == [True] * (sizes == (6, 3))
        else:
            assert not told


@pytest.mark.parametrize("sizes", [(5, 4), (4, 4)])
def test_warns_of_constant_divisor_for_unequal_micro_batches(sizes):
    model = nn.Linear(4, 2)
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in sizes:
            accumulator.backward(model(torch.randn(size, 4)).square().mean(1).sum() / 5)
        accumulator.step()
    assert ["is a sum over rows" in str(each.message) for each in caught] == [True] * (sizes[0] != sizes[1])


@pytest.mark.parametrize("divisor", [1, 2000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_sum_over_valid_tokens_with_their_number(dtype, divisor):
    """As ProteinMPNN's, which divides by a constant."""
    model = nn.Linear(4, 1)
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    mask = (torch.arange(6) < torch.tensor([[6], [4], [3]])).to(dtype)
    for part in mask:
        loss = (model(torch.randn(6, 4)).squeeze(1).square() * part).sum() / divisor
        accumulator.backward(loss, count=part.sum())
    with pytest.warns(MemkitWarning, match="The loss is a sum over rows"):
        accumulator.step()


def per_token(logits, labels, **settings):
    return F.cross_entropy(logits, labels, reduction="none", **settings)


PADDED = torch.tensor([0, 1, 2, 0, -100, 1, -100, 2])
PADDED_SUMS = {
    "cross_entropy": lambda p, y: F.cross_entropy(p, y, reduction="sum"),
    "padding of another number": lambda p, y: F.cross_entropy(
        F.pad(p, (1, 0)), (y + 1).clamp(min=0), ignore_index=0, reduction="sum"
    ),
    "label smoothing": lambda p, y: F.cross_entropy(p, y, reduction="sum", label_smoothing=0.1),
    "not reduced": lambda p, y: per_token(p, y).sum(),
    "averaged over steps": lambda p, y: F.cross_entropy(p, y, reduction="sum") / 7,
    "a plane": lambda p, y: F.cross_entropy(p.T[None], y[None], reduction="sum"),
    "a plane, not reduced": lambda p, y: per_token(p.T[None], y[None]).sum(),
    "masked": lambda p, y: (per_token(p, y.clamp(min=0)) * (y >= 0)).sum(),
    "selected": lambda p, y: per_token(p, y.clamp(min=0)).masked_select(y >= 0).sum(),
}
CLASS_WEIGHTS = torch.tensor([1.5, 2.0, 1.3], dtype=torch.float64)
WEIGHTED_SUM = partial(F.cross_entropy, weight=CLASS_WEIGHTS, reduction="sum")
PADDED_MEANS = {
    "mean": lambda p, y, n: F.cross_entropy(p, y),
    "by hand": lambda p, y, n: F.cross_entropy(p, y, reduction="sum") / n,
    "not reduced": lambda p, y, n: per_token(p, y).sum() / n,
    "divided before": lambda p, y, n: (per_token(p, y) / n).sum(),
    "masked": lambda p, y, n: (per_token(p, y) * (y >= 0)).sum() / (y >= 0).sum(),
    "divided, then masked": lambda p, y, n: (per_token(p, y) / n * (y >= 0)).sum(),
    "normalized mask": lambda p, y, n: (per_token(p, y) * ((y >= 0).double() / n)).sum(),
}


def valid(y):
    return int((y >= 0).sum())


def class_weights(y):
    return float(CLASS_WEIGHTS[y[y >= 0]].sum())


def padded_group(loss_fn, cuts, count_of, *, reduction, **settings):
    """Return the gradient of a group, and what it was warned of."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    accumulator = GradientAccumulator(optimizer, len(cuts), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part, labels in zip(x.split(cuts), PADDED.split(cuts), strict=True):
            p = model(part)
            count = None if count_of is None else count_of(labels)
            accumulator.backward(loss_fn(p, labels), count=count, reduction=reduction)
            accumulator.step()
    whole = torch.autograd.grad(loss_fn(model(x), PADDED), model.weight)[0]
    return seen[0], whole, [str(each.message) for each in caught]


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("cuts", [(2, 6), (1, 3, 4), (3, 5)])
@pytest.mark.parametrize("name", [*PADDED_SUMS, "class weights"])
def test_a_sum_over_what_is_not_padding_with_its_number_as_count(name, cuts, objective):
    """Rows are no multiple of the valid tokens; the way out that the warning names has the gradient, and is silent."""
    loss_fn, count_of = PADDED_SUMS.get(name, WEIGHTED_SUM), class_weights if name == "class weights" else valid
    _, whole, told = padded_group(loss_fn, cuts, count_of, reduction="mean", objective=objective)
    if name in {"averaged over steps", "label smoothing"} and cuts == (3, 5):
        assert not told  # 3 and 3 valid tokens: a constant factor may be their divisor
        return
    assert len(told) == 1
    assert "The loss is a sum over rows" in told[0]
    assert told[0].endswith("call accumulator.backward(loss, reduction='sum').")
    if objective == "mean":
        assert f"build GradientAccumulator(optimizer, accumulation_steps={len(cuts)}, objective='sum') and" in told[0]
        got, _, told = padded_group(loss_fn, cuts, count_of, reduction="sum")
        assert not told
        torch.testing.assert_close(got, whole / count_of(PADDED), rtol=1e-12, atol=1e-14)
    got, _, told = padded_group(loss_fn, cuts, None, reduction="sum", objective="sum")
    assert not told
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("cuts", [(2, 6), (1, 3, 4), (3, 5)])
@pytest.mark.parametrize("name", PADDED_MEANS)
def test_a_mean_over_what_is_not_padding_is_silent(name, cuts, objective):
    loss_fn = PADDED_MEANS[name]
    got, whole, told = padded_group(
        lambda p, y: loss_fn(p, y, valid(y)), cuts, valid, reduction="mean", objective=objective
    )
    assert not told
    torch.testing.assert_close(got, whole * (1 if objective == "mean" else 6), rtol=1e-12, atol=1e-14)


def test_counts_on_a_card_are_read_a_group_later(monkeypatch):
    """As if the number of valid tokens lay on a card: it is handed to the card's side, and what it returns is used."""
    handed = []

    def exchange(self, table):
        handed.append([[float(each) for each in line] for line in table])
        return handed[-2] if len(handed) > 1 else None

    monkeypatch.setattr("memkit.train.divisors._on_host", lambda value: value)
    monkeypatch.setattr("memkit.train.divisors._Values.exchange", exchange)
    model = nn.Linear(4, 3)
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for k in range(2):
        with told("The loss is a sum over rows", warns=k == 1), warnings.catch_warnings():
            if k == 0:
                warnings.simplefilter("error")
            for part in PADDED.split((3, 5)):
                loss = F.cross_entropy(model(torch.randn(len(part), 4)), part, reduction="sum")
                accumulator.backward(loss, count=valid(part))
                accumulator.step()
    assert handed == [[[3.0, 3.0]] * 3] * 2  # counts, class weights, targets that are not ignored


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_valid_tokens_of_a_bfloat16_loss_are_counted_exactly(reduction):
    """The class weights that torch adds up are rounded: 301 is 300."""
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for number in (301, 599):
        labels = torch.zeros(700, dtype=torch.long).index_fill(0, torch.arange(number, 700), -100)
        loss = F.cross_entropy(model(torch.randn(700, 4, dtype=torch.bfloat16)), labels, reduction=reduction).sum()
        accumulator.backward(loss, count=number)
    with pytest.warns(MemkitWarning, match="The loss is a sum over rows"):
        accumulator.step()


SUM_ALONE = [
    ({"count": 6}, True),  # multiplied by it
    ({}, False),
    ({"count": 1}, False),
    ({"count": 6, "reduction": "sum"}, False),
    ({"count": 10}, False),  # 24 numbers: a weight that the user gave
]


@pytest.mark.parametrize(("given", "warns"), SUM_ALONE)
def test_a_sum_in_a_group_of_its_own_is_multiplied_by_its_count(given, warns):
    """For objective="sum"; the mean's is right."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    for objective in ("sum", "mean"):
        accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), objective=objective)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accumulator.backward(model(torch.randn(6, 4)).square().sum(), **given)
            accumulator.step()
        assert ["multiplied by the count" in str(each.message) for each in caught] == [True] * (
            warns and objective == "sum"
        )


@pytest.mark.parametrize("counts", [None, (1, 1)])
def test_losses_of_their_own_are_added_up_silently(counts):
    """As a GAN's real and fake images: the plain loop has the same batch normalization, and the same sum."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    losses = [lambda m, n=n: m(torch.randn(n, 4)).square().sum() / 2 for n in (5, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accumulate(model, losses, counts, objective="sum") == 1


def test_a_mean_with_another_count_is_told_of_in_a_sum():
    """The mean over valid tokens, multiplied by the rows."""
    _, _, found = padded_group(F.cross_entropy, (4, 4), len, reduction="mean", objective="sum")
    assert len(found) == 1
    assert "the group's gradient is not the sum over its items. Call accumulator.backward(loss, count=n)" in found[0]


def test_the_way_out_names_the_present_number_of_micro_batches():
    model = nn.Linear(4, 2)
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    accumulator.accumulation_steps = 3
    for size in (4, 4, 2):
        accumulator.backward(model(torch.randn(size, 4)).square().sum(), count=size)
        if accumulator.num_microbatches == 3:
            with pytest.warns(MemkitWarning, match=r"Accumulator\(optimizer, accumulation_steps=3, objective='sum'\)"):
                accumulator.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_suggested_fix_gives_mean_over_rows(reduction):
    x = torch.randn(9, 4, dtype=torch.float64)
    model = nn.Linear(4, 2).double()
    expected = torch.autograd.grad(model(x).pow(2).sum() / 9, list(model.parameters()))
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(each.grad.clone() for each in model.parameters()))
    accumulator = GradientAccumulator(optimizer, 2, check_weights=False)
    for part in x.split((6, 3)):
        accumulator.backward(model(part).pow(2).sum(), count=len(part), reduction=reduction)
        accumulator.step()
    is_equal = all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(seen, expected, strict=True))
    assert is_equal is (reduction == "sum")


OF_SUMS = {
    "times the count": (lambda each, penalty, n: each.sum() * 9 + penalty * n, False),
    "of a mean": (lambda each, penalty, n: each.mean() * n + penalty * (n / 9), False),
    "not multiplied": (lambda each, penalty, n: each.sum() / n, True),
    "divided by another number": (lambda each, penalty, n: each.sum() / (n + 1) * n + penalty * n, True),
}


@pytest.mark.parametrize("name", OF_SUMS)
def test_the_divisors_of_a_sum_are_those_of_its_mean(name):
    model, (loss_of, is_told) = nn.Linear(4, 2), OF_SUMS[name]
    accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (4, 3, 2):
            loss = loss_of(model(torch.randn(n, 4)).square().mean(1), model.weight.square().sum(), n)
            accumulator.backward(loss, count=n, reduction="sum")
            accumulator.step()
    assert ["means over different numbers of items" in str(each.message) for each in caught] == [True] * is_told


def told(text, *, warns):
    return pytest.warns(MemkitWarning, match=text) if warns else nullcontext()


@pytest.mark.parametrize(("counts", "warns"), [((4, 4), True), ((2, 2), False), ((1, 1), False)])
def test_terms_of_one_kind_are_matched_by_their_place_unless_there_is_one_for_each_item(counts, warns):
    """A mean over rows plus a mean over matched items, as in detection; or a loop over two samples."""
    layer = nn.Linear(4, 4)
    accumulator = GradientAccumulator(torch.optim.SGD(layer.parameters(), lr=0.1), accumulation_steps=2)
    with told("means over different numbers of items", warns=warns):
        for number, count in zip((1, 3), counts, strict=True):
            y = layer(torch.randn(4, 4))
            accumulator.backward(y.square().mean() + y[:number].square().mean(), count=count)
            accumulator.step()


@pytest.mark.parametrize(
    ("scale", "warns"),
    [(lambda x: x / 4, True), (lambda x: x * 0.25, True), (lambda x: x / 3, False), (lambda x: x, False)],
)
def test_losses_that_were_already_divided_by_the_number_of_micro_batches_are_told_of(scale, warns):
    """The loop by hand needs that division; the accumulator divides by itself."""
    layer = nn.Linear(4, 1)
    accumulator = GradientAccumulator(torch.optim.SGD(layer.parameters(), lr=0.1), accumulation_steps=4)
    with told("4 times smaller than the whole batch's", warns=warns):
        for part in torch.randn(16, 4).split(4):
            accumulator.backward(scale(layer(part).square().mean()), count=len(part))
            accumulator.step()


@pytest.mark.parametrize(
    ("counts", "warns"), [((4, 4), True), ((2, 1), False), ((1, 1), False)], ids=["rows", "samples", "no counts"]
)
def test_a_mean_that_some_micro_batches_lack_is_told_of(counts, warns):
    """Confident rows, or matched boxes, of which there are none; or a loop over two samples, then one."""
    layer = nn.Linear(4, 4)
    accumulator = GradientAccumulator(torch.optim.SGD(layer.parameters(), lr=0.1), accumulation_steps=2)
    with told("the mean of fewer things than others", warns=warns):
        for number, count in zip((2, 1), counts, strict=True):
            parts = layer(torch.randn(4, 4)).chunk(2)[:number]
            accumulator.backward(sum(each.square().mean() for each in parts), count=count)
            accumulator.step()


def summed_in_a_loop(model, samples):
    return sum(model(each).square().sum() for each in samples) / len(samples)


def means_in_a_loop(model, samples):
    total = sum(model(each).square().mean() for each in samples) / len(samples)
    return total + 0.1 * model.weight.square().mean()


def two_means_in_a_loop(model, samples):
    total = 0.0
    for each in samples:
        total = total + F.mse_loss(model(each), each) + 0.5 * model(each).abs().mean()
    return total / len(samples)


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4), (3, 3)])
@pytest.mark.parametrize("loss_fn", [summed_in_a_loop, means_in_a_loop, two_means_in_a_loop])
def test_a_loop_over_samples_of_different_sizes_is_a_mean_over_them(loss_fn, sizes):
    """Python's sum has each sample's loss at a place of its own, in which no two micro-batches need agree."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, dtype=torch.float64)
    samples = [torch.randn(number, 3, dtype=torch.float64) for number in (2, 7, 4, 1, 6, 3, 5, 8)[: sum(sizes)]]
    loss_fn(model, samples).backward()
    expected, model.weight.grad = model.weight.grad, None
    model.zero_grad()
    optimizer, got = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: got.append(model.weight.grad.clone()))
    accumulator = GradientAccumulator(optimizer, accumulation_steps=2)
    for part in (samples[: sizes[0]], samples[sizes[0] :]):
        accumulator.backward(loss_fn(model, part), count=len(part))
        accumulator.step()
    torch.testing.assert_close(got, [expected])


def test_three_means_that_are_no_loop_are_compared():
    """The control: means over selected rows, fewer than samples."""
    layer = nn.Linear(4, 4)
    accumulator = GradientAccumulator(torch.optim.SGD(layer.parameters(), lr=0.1), accumulation_steps=2)
    with told("means over different numbers of items", warns=True):
        for numbers in ((1, 2, 3), (3, 1, 4)):
            y = layer(torch.randn(4, 4))
            accumulator.backward(sum(y[:number].square().mean() for number in numbers), count=4)
            accumulator.step()


def masked(model, x):
    return (model(x).square() * (x[:, :1] > 0)).sum() / 12


def with_penalty(model, x):
    return model(x).square().mean() + model.weight.square().mean()


def third_of_a_sum(model, x):
    return 0.3 * model(x).square().mean(1).sum()


def of_another_library(model, x):
    """A divisor that nobody reads, and a penalty."""
    return torch.sparse.softmax(model(x).to_sparse(), 1).to_dense().norm() + model.weight.square().mean()


@pytest.mark.parametrize(
    ("loss", "counts", "text"),
    [
        (with_penalty, (12, 3), "means over different numbers of items"),
        (lambda m, x: F.cross_entropy(m(x), torch.zeros(len(x)).long()), (1, 7), "means over different numbers"),
        (lambda m, x: F.mse_loss(m(x), torch.zeros(len(x), 2)), (12, 0, 3), "means over different numbers"),
        (with_penalty, (12, 12), ""),
        (with_penalty, (0, 12, 12), ""),
        (with_penalty, (3, 0), ""),
        (masked, (12, 12), ""),
        (third_of_a_sum, (0.5, 0.7), ""),
        (of_another_library, (12, 3), ""),
        (with_penalty, (12, None), "some micro-batches of a group came with a count and others without one"),
        (of_another_library, (None, 12), "some micro-batches of a group came with a count and others without one"),
        (with_penalty, (None, 1), ""),
        (with_penalty, (None, 0), ""),
    ],
)
def test_counts_that_differ_for_means_over_equal_numbers_are_told_of(loss, counts, text):
    model = nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accumulate(model, [lambda m: loss(m, torch.randn(12, 4))] * len(counts), counts)
    assert len(caught) == bool(text)
    assert all(text in str(each.message) for each in caught)
