"""Evaluation of a batch that does not fit: the whole batch's results, and only what failed is run again."""

import pytest
import torch

import memkit as mk
from tests.toys import SmallRoom, mean_square, trainer_of


@pytest.fixture
def rows():
    return torch.randn(100, 3, dtype=torch.float64)


def make(room, **settings):
    model = SmallRoom(3, 2, room=room, dtype=torch.float64)
    return model, trainer_of(model, **settings)


def forward(model, part):
    return {"scores": model(part), "is_high": model.whole(part)[:, 0] > 0}


def test_results_are_the_whole_batchs_and_only_what_failed_runs_again(rows):
    model, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        found = evaluate(rows, forward)
        expected = model.whole(rows)
    torch.testing.assert_close(found, {"scores": expected, "is_high": expected[:, 0] > 0})
    assert not found["scores"].requires_grad
    assert model.seen == [100, 50, 25, 25, 50, 25, 25]


def test_the_size_that_fits_is_remembered_apart_from_trainings(rows):
    model, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        evaluate(rows, forward)
        model.seen.clear()
        evaluate(rows, forward)
    assert model.seen == [25, 25, 25, 25]
    model.seen.clear()
    model.room = 200
    trainer.train_step(rows, mean_square)
    assert model.seen[-1] == 100  # in one piece


def test_one_row_that_does_not_fit(rows):
    _, trainer = make(room=0)
    with trainer.evaluation() as evaluate, pytest.raises(mk.MemkitOutOfMemoryError, match=r"one row.*\.cpu\(\)"):
        evaluate(rows[:3], forward)


def test_what_cannot_be_put_together_is_refused_where_the_batch_was_cut(rows):
    model, trainer = make(room=100)
    with trainer.evaluation() as evaluate:
        mean = evaluate(rows, lambda model, part: model(part).mean())
        torch.testing.assert_close(mean, model.whole(rows).mean())
        model.room = 40
        with pytest.raises(mk.errors.InputError, match=r"returns shape \(\) for 25 rows.*mean of the parts' means"):
            evaluate(rows, lambda model, part: model(part).mean())


def test_errors_pass_through_where_asked_or_of_other_kinds(rows):
    _, trainer = make(room=40, on_oom="raise")
    with trainer.evaluation() as evaluate, pytest.raises(torch.OutOfMemoryError):
        evaluate(rows, forward)
    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate, pytest.raises(RuntimeError, match="cannot be multiplied"):
        evaluate(rows[:, :2], forward)
