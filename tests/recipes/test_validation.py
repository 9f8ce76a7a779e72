"""Early stopping, and validations that hold one batch's outputs at most and never fail where a part would fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit.recipes.validation import RowsOfLoss, ValidationMonitor, validate
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.toys import SmallRoom, fits, mean_square, out_of_memory, trainer_of


def test_best_patience_and_plateau():
    monitor = ValidationMonitor(patience=3, mode="max")
    assert [monitor.update(value) for value in (0.1, 0.3, 0.3, 0.2, torch.tensor(0.4))] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert (monitor.best, monitor.plateau, monitor.should_stop) == (pytest.approx(0.4), 0, False)
    assert not any(monitor.update(0.4) for _ in range(3))
    assert monitor.should_stop


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_best_and_infinity_is_beaten(mode):
    worst = math.inf if mode == "min" else -math.inf
    monitor = ValidationMonitor(mode=mode)
    assert [monitor.update(value) for value in (math.nan, worst, worst, 1.0, math.nan)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (monitor.best, monitor.plateau) == (1.0, 1)


def test_a_gain_below_min_delta_does_not_count():
    monitor = ValidationMonitor(min_delta=0.1)
    assert [monitor.update(value) for value in (1.0, 0.95, 0.85)] == [True, False, True]


def test_patience_none_never_stops():
    monitor = ValidationMonitor(patience=None)
    for _ in range(100):
        monitor.update(1.0)
    assert (monitor.should_stop, monitor.plateau) == (False, 99)


def test_state_continues_where_it_was():
    monitor = ValidationMonitor(patience=2)
    for value in (1.0, 2.0):
        monitor.update(value)
    again = ValidationMonitor(patience=2)
    again.load_state_dict(monitor.state_dict())
    again.update(3.0)
    assert again.should_stop
    assert again.best == 1.0
    with pytest.raises(mk.errors.FileFormatError, match="mode 'min'; expected mode 'max'"):
        ValidationMonitor(mode="max").load_state_dict(monitor.state_dict())


@pytest.mark.parametrize("setting", [{"patience": 0}, {"mode": "least"}, {"min_delta": -1.0}])
def test_wrong_settings(setting):
    assert_refused(lambda: ValidationMonitor(**setting), mk.errors.ConfigError, next(iter(setting)))


def run(trainer, loader, fn, **settings):
    with trainer.evaluation() as evaluate:
        return validate(evaluate, loader, fn, device=torch.device("cpu"), **settings)


def test_outputs_are_never_held_together():
    """40 batches whose outputs are 256 KiB each: all of them would be 10 MiB."""
    model = nn.Linear(8, 64)
    loader = [torch.randn(1024, 8) for _ in range(40)]
    trainer = trainer_of(model)
    figures = {}

    def streamed():
        figures["streamed"] = run(trainer, loader, lambda model, rows: {"mean": model(rows)})["mean"]

    def held():
        with trainer.evaluation() as evaluate:
            outputs = [evaluate(rows, lambda model, rows: model(rows)) for rows in loader]
        figures["held"] = torch.cat(outputs).double().mean().item()

    streamed()
    assert trace_allocations(streamed).peak < 1.5 * 2**20
    assert trace_allocations(held).peak > 10 * 2**20
    assert figures["streamed"] == pytest.approx(figures["held"])


def test_oversized_batch_gives_equal_figures():
    torch.manual_seed(1)
    model = SmallRoom(8, 1)
    loader = [torch.randn(rows, 8) for rows in (33, 7)]
    found = run(trainer_of(model), loader, RowsOfLoss(mean_square))
    expected = model.whole(torch.cat(loader)).square().mean().item()
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_weighted_losses_with_a_weightless_batch():
    def loss_fn(model, batch):
        valid = batch["valid"]
        return mk.Loss(sum=(model(batch["x"]).square()[:, 0] * valid).sum(), count=valid.sum())

    model = nn.Linear(3, 1)
    loader = [
        {"x": torch.randn(4, 3), "valid": torch.tensor(v)} for v in ([1.0, 1, 0, 1], [0.0, 0, 0, 0], [0.0, 1, 0, 0])
    ]
    total = sum(loss_fn(model, batch).sum for batch in loader) / 4
    averaged = lambda model, batch: mk.Loss(mean=loss_fn(model, batch).average(), count=batch["valid"].sum())  # noqa: E731
    for each in (loss_fn, averaged):  # the mean over nothing is NaN
        found = run(trainer_of(model), loader, RowsOfLoss(each))
        assert found["loss"] == pytest.approx(total.item(), rel=1e-6)


def test_counts_of_losses_in_half_precision_are_exact():
    """1001 is no number in bfloat16, and 70,000 none in float16."""
    for dtype, counts in ((torch.bfloat16, (1001, 1)), (torch.float16, (70_000, 7))):
        loader = [{"x": torch.tensor([float(place)]), "count": count} for place, count in enumerate(counts)]
        loss_fn = lambda _, batch, dtype=dtype: mk.Loss(mean=batch["x"].mean().to(dtype), count=batch["count"])  # noqa: E731
        found = run(trainer_of(nn.Linear(3, 1)), loader, RowsOfLoss(loss_fn))
        assert found["loss"] == pytest.approx(counts[1] / sum(counts), rel=1e-6)


@pytest.mark.parametrize("count", [-1, float("nan"), torch.tensor(-1)])
def test_an_invalid_count_is_refused(count):
    loss_fn = lambda model, rows: mk.Loss(mean=model(rows).mean(), count=count)  # noqa: E731
    with pytest.raises(mk.errors.InputError, match=r"count of loss_fn of a validation.*zero or more"):
        run(trainer_of(nn.Linear(3, 1)), [torch.ones(2, 3)], RowsOfLoss(loss_fn))


def test_losses_without_rows_are_weighted_by_counts():
    """A batch of 3 graphs must not weigh as much as one of 100; nothing but the loss says how many there are."""

    def losses(model, graphs):
        return model(graphs["x"])[:, 0].square()

    model = nn.Linear(3, 1)
    loader = [{"x": torch.randn(num, 3), "edges": torch.zeros(2, 5 * num)} for num in (3, 100)]
    trainer = trainer_of(model, on_oom="raise")

    def summed(model, graphs):
        return mk.Loss(sum=losses(model, graphs).sum(), count=len(graphs["x"]))

    found = run(trainer, loader, RowsOfLoss(summed))
    expected = losses(model, {"x": torch.cat([graphs["x"] for graphs in loader])}).mean()
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(mk.errors.InputError, match=r"a loss without its count.*return mk.Loss\(mean=loss, count=n\)"):
        run(trainer, loader, RowsOfLoss(lambda model, graphs: losses(model, graphs).mean()))


def test_figures_have_names():
    """A loss function in the place of val_fn: what it gives says nothing about single rows."""
    with pytest.raises(
        mk.errors.InputTypeError, match=r"val_fn\(model, batch\): got a Tensor; expected a mapping of figures"
    ):
        run(trainer_of(nn.Linear(3, 1)), [torch.ones(2, 3)], lambda model, rows: model(rows).mean())


def test_the_random_state_is_left_alone_and_no_batch_is_an_error():
    trainer = trainer_of(nn.Linear(3, 1))
    state = torch.get_rng_state()
    run(trainer, (torch.rand(2, 3) for _ in range(3)), lambda model, rows: {"mean": model(rows)})
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(mk.errors.InputError, match="an iterator is exhausted"):
        run(trainer, iter(()), lambda model, rows: {"mean": model(rows)})


class OutWhenRead:
    """A figure on a card whose kernels ran out of memory: reading it reports that."""

    def __float__(self):
        out_of_memory()


@pytest.mark.parametrize("read", ["monitor", "state"])
def test_out_of_memory_while_a_figure_is_read_is_not_called_a_wrong_figure(read, tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        if read == "monitor":
            ValidationMonitor().update(OutWhenRead())
        else:
            mk.TrainingStateManager(tmp_path).save(1, model=nn.Linear(1, 1), metric=OutWhenRead())


def masked_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)


def masked_mean_with_count(model, batch):
    return mk.Loss(mean=masked_mean(model, batch), count=(batch[1] != -100).sum())


def contrast(model, batch):
    scores = model(batch[0])
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def balanced(model, batch):
    """Both signs: the mean is small beside its terms."""
    scores = model(batch[0])[:, 0]
    return (scores - 10 * (-1.0) ** batch[2]).mean()


@pytest.mark.parametrize("most", [2, 4, 8])
def test_a_loss_that_is_no_mean_over_rows_is_not_cut_in_a_validation(most):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    labels = torch.tensor([0, 1, 2, 0, -100, 2, 0, 1, *[-100] * 7, 2])
    batch = torch.randn(16, 4).double(), labels, torch.arange(16)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def validated(loss_fn):
        loop = mk.MemoryEfficientTrainLoop(trainer, [batch], loss_fn, val_loader=[batch], progress=False)
        return loop.validate([batch])["loss"]

    for loss_fn in (masked_mean_with_count, balanced):
        assert validated(fits(most, loss_fn)) == pytest.approx(validated(loss_fn), rel=1e-12, abs=1e-12)
    refusal = mk.errors.InputError, "not the mean of its halves", r"return mk.Loss\(mean=loss, count=n\)"
    for loss_fn in (masked_mean, contrast):
        assert_refused(lambda loss_fn=loss_fn: validated(fits(most, loss_fn)), *refusal)
