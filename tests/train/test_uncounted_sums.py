"""A sum with count 0 is part of the batch: a focal loss over all anchors, divided by the objects of the whole batch."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit.recipes.validation import RowsOfLoss, validate
from memkit.train.split_check import check_split
from tests.helpers import assert_same, gradients
from tests.toys import out_of_memory, trainer_of

OBJECTS = torch.tensor([0, 0, 2, 1, 3, 0])
KINDS = pytest.mark.parametrize("kind", [int, float, torch.as_tensor], ids=["int", "float", "tensor"])


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    anchors = (torch.rand(6, 4, generator=generator) < 0.3).double()
    torch.manual_seed(0)
    return nn.Linear(8, 4).double(), (images, anchors, OBJECTS)


def anchor_loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="sum")


def expected_gradients(model, batch):
    model = copy.deepcopy(model)
    (anchor_loss(model, batch) / batch[2].sum()).backward()
    return gradients(model)


def moved(before, after):
    """The gradient of a step with lr=1."""
    return [(a - b).detach() for a, b in zip(before.parameters(), after.parameters(), strict=True)]


def counted(kind, most_rows=6):
    def loss_fn(model, batch):
        if len(batch[0]) > most_rows:
            out_of_memory()
        return mk.Loss(sum=anchor_loss(model, batch), count=kind(batch[2].sum()))

    return loss_fn


@KINDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulator_adds_uncounted_sums(problem, kind, size):
    model, batch = problem
    trained = copy.deepcopy(model)
    accumulator = mk.GradientAccumulator(torch.optim.SGD(trained.parameters(), lr=1.0), accumulation_steps=6 // size)
    for part in zip(*(each.split(size) for each in batch), strict=True):
        accumulator.backward(anchor_loss(trained, part), count=kind(part[2].sum()), reduction="sum")
        accumulator.step()
    assert_same(moved(model, trained), expected_gradients(model, batch), 1e-13)


@KINDS
@pytest.mark.parametrize("most_rows", [6, 3, 2])
def test_wrapper_adds_uncounted_sums_without_a_warning(problem, kind, most_rows):
    model, batch = problem
    for steps in (1, 2, 3, 6):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
        trainer = mk.MemoryEfficientTrainingWrapper(trained, optimizer, accumulation_steps=steps)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*out of memory.*", mk.errors.MemkitWarning)
            result = trainer.train_step(batch, counted(kind, most_rows))
        assert max(result.sizes) <= most_rows
        assert_same(result.loss, (anchor_loss(model, batch) / 6).detach(), 1e-13)
        assert_same(moved(model, trained), expected_gradients(model, batch), 1e-13)


@KINDS
def test_split_loss_adds_uncounted_sums(problem, kind):
    model, batch = problem
    loss = mk.SplitLoss(model, num_microbatches=3)(batch, counted(kind))
    loss.backward()
    assert_same(loss.detach(), (anchor_loss(model, batch) / 6).detach(), 1e-13)
    want = expected_gradients(model, batch)
    assert_same(gradients(model), want, 1e-13)


@KINDS
def test_validation_adds_uncounted_sums(problem, kind):
    model, batch = problem
    loader = list(zip(*(each.split(2) for each in batch), strict=True))
    with trainer_of(model).evaluation() as evaluate:
        found = validate(evaluate, loader, RowsOfLoss(counted(kind)), device=torch.device("cpu"))
        own = {"loss": mk.recipes.WeightedMean()}  # takes the batches' means, of which one over nothing has no part
        of_means = validate(evaluate, loader[1:], RowsOfLoss(counted(kind)), device=torch.device("cpu"), reducers=own)
    assert found["loss"] == pytest.approx(anchor_loss(model, batch).item() / 6, rel=1e-12)
    rest = tuple(each[2:] for each in batch)
    assert of_means["loss"] == pytest.approx(anchor_loss(model, rest).item() / 6, rel=1e-12)


def test_validation_checks_a_part_that_counts_nothing(problem):
    model, (images, anchors, objects) = problem
    loader = [(images, anchors, objects * 0), (images[:3], anchors[:3], objects[:3])]  # only the first one is cut

    def validated(loss_fn):
        with trainer_of(model).evaluation() as evaluate, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*out of memory.*", mk.errors.MemkitWarning)
            return validate(evaluate, loader, RowsOfLoss(loss_fn), device=torch.device("cpu"))["loss"]

    total = sum(anchor_loss(model, batch).item() for batch in loader)
    assert validated(counted(int, most_rows=3)) == pytest.approx(total / 2, rel=1e-12)

    def of_pairs(model, batch):
        loss = counted(int, most_rows=3)(model, batch)
        return mk.Loss(sum=loss.sum * batch[0].std(), count=loss.count)

    with pytest.raises(mk.errors.InputError, match="not the mean of its halves"):
        validated(of_pairs)


def test_the_check_knows_what_an_uncounted_sum_adds(problem):
    model, batch = problem
    assert check_split(model, batch, counted(int), num_parts=3).exact

    def without(model, batch):  # drops what memkit dropped: the anchors of a part without objects
        count = int(batch[2].sum())
        return mk.Loss(sum=anchor_loss(model, batch) * (count > 0), count=count)

    found = check_split(model, batch, without, num_parts=3)
    assert found.exact is False

    def of_pairs(model, batch):  # the rows are compared, which a count does not mend
        return mk.Loss(sum=anchor_loss(model, batch) * batch[0].std(), count=int(batch[2].sum()))

    assert check_split(model, batch, of_pairs, num_parts=3).loss == "rows"


@KINDS
def test_a_batch_without_any_count_is_left_out_with_a_warning(problem, kind):
    model, (images, anchors, objects) = problem
    before = copy.deepcopy(model)
    trainer = trainer_of(model, accumulation_steps=2)
    empty = images, anchors, objects * 0
    with pytest.warns(mk.errors.MemkitWarning, match=r"counts of this group's losses add up to 0.*max\(1, n\)"):
        assert not trainer.train_step(empty, counted(kind)).stepped
    assert_same(dict(model.state_dict()), dict(before.state_dict()))
    # A masked sum of nothing has a gradient too, which is zero.
    nothing = trainer.train_step(
        empty, lambda model, batch: mk.Loss(sum=(model(batch[0]) * 0).sum(), count=kind(batch[2].sum()))
    )
    assert not nothing.stepped
    # The way out that the warning gives.
    for way in (empty, (images, anchors, objects)):
        rows, n = len(way[0]), max(1, int(way[2].sum()))
        trained = copy.deepcopy(before)
        mk.MemoryEfficientTrainingWrapper(
            trained, torch.optim.SGD(trained.parameters(), lr=1.0), accumulation_steps=3
        ).train_step(
            way,
            lambda model, part, rows=rows, n=n: mk.Loss(
                sum=rows * anchor_loss(model, part) / max(1, n), count=len(part[0])
            ),
        )
        plain = copy.deepcopy(before)
        (anchor_loss(plain, way) / n).backward()
        assert_same(moved(before, trained), gradients(plain), 1e-13)
