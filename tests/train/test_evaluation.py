"""Evaluation of a batch that does not fit: the whole batch's results, and only what failed is run again."""

from queue import SimpleQueue

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._recovery.snapshot import HeldState
from memkit.train import evaluation
from tests.helpers import assert_refused, assert_same
from tests.toys import SmallRoom, mean_square, out_of_memory, trainer_of


@pytest.fixture
def rows():
    return torch.randn(100, 3, dtype=torch.float64)


def make(room, **settings):
    model = SmallRoom(3, 2, room=room, dtype=torch.float64)
    return model, trainer_of(model, **settings)


def forward(model, part):
    return {"scores": model(part), "is_high": model.whole(part)[:, 0] > 0}


def test_results_equal_whole_batch_and_only_failed_parts_rerun(rows):
    model, trainer = make(room=40)
    sizes = SimpleQueue()  # neither copied nor restored
    model.register_forward_pre_hook(lambda _, inputs: sizes.put(len(inputs[0])))
    with trainer.evaluation() as evaluate:
        found = evaluate(rows, forward)
        expected = model.whole(rows)
    ran = [sizes.get() for _ in range(sizes.qsize())]
    torch.testing.assert_close(found, {"scores": expected, "is_high": expected[:, 0] > 0})
    assert not found["scores"].requires_grad
    assert ran == [100, 50, 25, 2, 8, 8, 8, 8, 25, 50, 25, 25]  # a few by themselves, to see that rows are independent


def test_remembers_fitting_size_separately_from_training(rows):
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


def test_a_model_that_cannot_enter_evaluation_mode_stays_in_its_own():
    class Merging(nn.Linear):
        """As LoRA's layers, whose `train` merges weights."""

        def train(self, mode=True):
            return super().train(mode) if mode else out_of_memory()

    model = nn.Sequential(nn.Dropout(), Merging(3, 2), nn.Dropout())
    with pytest.raises(torch.OutOfMemoryError), trainer_of(model).evaluation():
        pass
    assert all(each.training for each in model.modules())


MIXING = {
    "distances": lambda model, part: torch.cdist(model(part), model(part)),
    "a mean over rows": lambda model, part: model(part) - model(part).mean(0),
    "a softmax over rows": lambda model, part: model(part).softmax(0),
    "time first": lambda model, part: model(part)[:, None].expand(-1, len(part), -1).transpose(0, 1),
}


FOLLOWING = {
    "a running sum": lambda model, part: model(part).cumsum(0),
    "the row before": lambda model, part: torch.cat([model(part)[:1], model(part)[:-1]]),
    "numbers of rows": lambda model, part: torch.arange(len(model(part))),
}
"""What a row's result is among the first rows does not tell."""


@pytest.mark.parametrize("fn", (MIXING | FOLLOWING).values(), ids=MIXING | FOLLOWING)
def test_a_function_that_compares_rows_is_refused_once_the_batch_is_cut(rows, fn):
    model, trainer = make(room=200)
    with trainer.evaluation() as evaluate:
        assert len(evaluate(rows, fn)) == 100
        model.room = 40
        assert_refused(lambda: evaluate(rows, fn), mk.errors.InputError, "rows that do not depend on one another")


SELECTING = {
    "above the median": lambda scores: scores[:, 0] > scores[:, 0].median(),
    "scaled by the largest": lambda scores: scores / scores.amax(),
    "ranks": lambda scores: scores[:, 0].argsort().argsort(),
}


@pytest.mark.parametrize("room", [3, 40])
@pytest.mark.parametrize("select", SELECTING.values(), ids=SELECTING)
def test_rows_that_are_alike_by_chance_hide_no_comparison(select, room):
    for seed in range(4):
        rows = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        _, trainer = make(room=room)
        with trainer.evaluation() as evaluate:
            fn = lambda model, part: select(model(part))  # noqa: E731 - called at once
            assert_refused(lambda: evaluate(rows, fn), mk.errors.InputError, "do not depend on one another")  # noqa: B023


def test_choices_and_orders_within_rows_are_no_comparison_of_rows(rows):
    """Also of rows in dicts, lists and tuples of one text for all; a result may be wider than what computed it."""
    batch = {"x": rows.float(), "names": [str(row) for row in range(100)], "unit": ("m",)}
    model = SmallRoom(3, 2, room=3)

    def fn(model, part):
        scores = model(part["x"])
        number = torch.tensor([len(part["unit"]) * int(name) for name in part["names"]])
        return scores.argmax(1), scores.argsort(1), scores > 0, scores.double() + 1e-9 * number[:, None], number

    with trainer_of(model).evaluation() as evaluate:
        found = evaluate(batch, fn)
    assert torch.equal(found[-1], torch.arange(100))
    assert torch.equal(found[0], found[1][:, -1])


@pytest.mark.parametrize("fn", MIXING.values(), ids=MIXING)
def test_tells_once_that_single_rows_could_not_be_compared(rows, fn):
    _, trainer = make(room=1)
    told = pytest.warns(mk.MemkitWarning, match="only one row fits at a time, so it could not be checked")
    with trainer.evaluation() as evaluate:
        with told as found:
            for _ in range(2):
                evaluate(rows[:4], fn)
        assert len(found) == 1


@pytest.mark.filterwarnings("ignore:.*only one row fits")
def test_what_could_not_be_compared_is_compared_once_more_rows_fit(rows):
    def centered(model, part):
        scores = model(part[0] if isinstance(part, tuple) else part)
        return scores - scores.mean(0)

    model, trainer = make(room=1)
    with trainer.evaluation() as evaluate:
        evaluate(rows[:4], centered)
        model.room = 40
        batch = rows, torch.zeros(100)  # of another kind, so that the size of one row is not remembered for it
        assert_refused(
            lambda: evaluate(batch, centered), mk.errors.InputError, "rows that do not depend on one another"
        )


class Scores:
    def __init__(self, *, is_centered):
        self.is_centered = is_centered

    def __call__(self, model, part):
        scores = model(part)
        return scores - scores.mean(0) if self.is_centered else scores


def test_objects_of_one_class_are_compared_each(rows):
    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        assert len(evaluate(rows, Scores(is_centered=False))) == 100
        refused = Scores(is_centered=True)
        assert_refused(lambda: evaluate(rows, refused), mk.errors.InputError, "rows that do not depend on one another")


def test_functions_of_one_factory_are_compared_each(rows):
    """One that compares rows is refused, whatever another one from the same lines was found to do."""

    def of(metric):
        return lambda model, part: metric(model(part))

    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        assert len(evaluate(rows, of(lambda scores: scores))) == 100
        compared = of(lambda scores: scores - scores.mean(0))
        assert_refused(lambda: evaluate(rows, compared), mk.errors.InputError, "rows that do not depend on one another")


def test_parts_of_other_widths_are_refused_by_name(rows):
    """As of a loop over tokens that ends where the last row of its part does."""
    _, trainer = make(room=40)
    lengths = torch.arange(100)[:, None] // 25 * 25 + 24

    def generate(model, part):
        model(part[:, :-1])
        return torch.ones(len(part), int(part[:, -1].max()) + 1)

    with trainer.evaluation() as evaluate:
        batch = torch.cat([rows, lengths.to(rows.dtype)], 1)
        assert_refused(lambda: evaluate(batch, generate), mk.errors.InputError, r"parts of \(25,\) and of \(50,\).*pad")


def test_a_mean_for_each_row_may_be_averaged(rows):
    model, trainer = make(room=60)
    with trainer.evaluation() as evaluate:
        found = evaluate(rows, lambda model, part: model(part).mean().expand(len(part)))
    assert_same(found.mean(), model.whole(rows).mean(), 1e-12)


def test_the_comparison_leaves_nothing(rows):
    _, trainer = make(room=40)
    losses, counts = [], {"rows": 0}

    def fn(model, part):
        out = model(part)
        losses.append(out.sum().item())
        counts["rows"] += len(part)
        return out

    with trainer.evaluation() as evaluate:
        evaluate(rows, fn)
    assert counts == {"rows": 100}
    assert len(losses) == 4


class Confusion(nn.Module):
    """A metric whose counts are a buffer, a plain attribute, and an attribute that is a number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))
        self.seen = torch.zeros(4)
        self.num_rows = 0

    def update(self, part):
        counts = torch.bincount((2 * part[:, 0]).long().clamp(-2, 1) + 2, minlength=4)
        self.counts += counts
        self.seen = self.seen + counts
        self.num_rows += len(part)


@pytest.mark.parametrize("sooner", [True, False])
def test_what_fn_counts_in_a_failed_attempt_or_in_the_comparison_does_not_count(rows, sooner):
    def counted(room):
        model, trainer = make(room=1000)
        confusion, mean, total, sums, outputs = Confusion(), mk.recipes.Mean(), torch.zeros(()), {"rows": 0}, []
        sums["ones"] = torch.zeros(())

        def fn(model, part):
            confusion.update(part)
            mean.update(part[:, 0])
            total.add_(len(part))
            sums["rows"] += len(part)
            sums["ones"] += len(part)
            outputs.append(part[:, 0].clone())
            outputs[0] += 1  # a tensor in a list
            return model(part)

        with trainer.evaluation() as evaluate:
            if not sooner:  # what is known of fn from a call that fits
                evaluate(rows[:4], fn)
            model.room = room
            evaluate(rows.clone(), fn)
        order = [len(each) for each in outputs]
        return [confusion.counts, confusion.num_rows, mean.result(), total, sums, sum(order)], order

    wanted, order = counted(1000)
    found, cut = counted(40)
    assert len(cut) > len(order)
    torch.testing.assert_close(found, wanted)


def test_what_fn_changes_and_memkit_cannot_restore_is_told(rows):
    model, trainer = make(room=1000)
    large = torch.zeros(2**19)

    def fn(model, part):
        large[: len(part)] += 1
        return model(part)

    with trainer.evaluation() as evaluate:
        evaluate(rows[:4], fn)
        model.room = 40
        with pytest.warns(mk.MemkitWarning, match="524288"):
            evaluate(rows, fn)


def test_a_function_that_was_seen_to_change_nothing_is_searched_no_more(rows, monkeypatch):
    trainer, looks = trainer_of(nn.Linear(3, 2, dtype=torch.float64)), []
    monkeypatch.setattr(evaluation, "HeldState", lambda root, **_: looks.append(root) or HeldState(root, **_))
    with trainer.evaluation() as evaluate:
        for _ in range(3):
            evaluate(rows, lambda model, part: model(part))
    assert len(looks) == 2  # the model and the function, in the first call


def test_a_part_that_fn_has_written_to_is_not_compared(rows):
    model, trainer = make(room=40)

    def fn(model, part):
        out = model(part)
        part.mul_(2)
        return out

    with trainer.evaluation() as evaluate:
        evaluate(rows[:20], fn)
        model.room = 10
        with pytest.raises(mk.MemkitOutOfMemoryError, match="changes the batch in place"):  # 20 rows, then 10, then 5
            evaluate(torch.cat([rows[:11], rows[:11]]), fn)


def test_random_results_are_not_compared(rows):
    _, trainer = make(room=40)
    torch.manual_seed(0)
    with trainer.evaluation() as evaluate:
        assert len(evaluate(rows, lambda model, part: torch.randn_like(model(part)))) == 100


def test_single_oversized_row(rows):
    _, trainer = make(room=0)
    with trainer.evaluation() as evaluate, pytest.raises(mk.MemkitOutOfMemoryError, match=r"one row.*\.cpu\(\)"):
        evaluate(rows[:3], forward)


def test_rejects_uncombinable_results_after_split(rows):
    model, trainer = make(room=100)
    with trainer.evaluation() as evaluate:
        mean = evaluate(rows, lambda model, part: model(part).mean())
        torch.testing.assert_close(mean, model.whole(rows).mean())
        model.room = 40
        with pytest.raises(mk.errors.InputError, match=r"returns shape \(\) for 25 rows.*mean of the parts' means"):
            evaluate(rows, lambda model, part: model(part).mean())


def detect(model, part):
    """As a detector in eval mode: a dict for each row, of as many boxes as it finds, and a name."""
    found = []
    for scores in model(part):
        boxes = scores[scores > -0.1]
        found.append({"boxes": boxes, "waves": 1j * boxes, "sum": boxes.sum().item(), "name": f"{len(boxes)} boxes"})
    return found


@pytest.mark.filterwarnings("ignore:.*only one row fits")
@pytest.mark.parametrize("room", [40, 1])
def test_a_list_with_an_entry_for_each_row_is_joined_in_order(rows, room):
    model, trainer = make(room=room)
    with trainer.evaluation() as evaluate:
        found = evaluate(rows, detect)
    expected = detect(model.whole, rows)
    assert [each.pop("name") for each in found] == [each.pop("name") for each in expected]
    assert_same(found, expected, 1e-12)


def test_entries_and_columns_are_told_apart_by_a_run_of_fewer_rows(rows):
    """Where two rows fit, a list of two tensors of two rows each may be either."""
    model, trainer = make(room=2)
    batch = rows[:4]
    with trainer.evaluation() as evaluate:
        columns = evaluate(batch, lambda model, part: [model(part), 2 * model(part)])
        entries = evaluate(batch, lambda model, part: [torch.stack([row, 2 * row]) for row in model(part)])
    whole = model.whole(batch)
    assert_same(columns, [whole, 2 * whole], 1e-12)
    assert_same(entries, [torch.stack([row, 2 * row]) for row in whole], 1e-12)


@pytest.mark.filterwarnings("ignore:.*only one row fits")
def test_a_list_that_may_hold_entries_or_columns_is_refused(rows):
    _, trainer = make(room=1)
    with trainer.evaluation() as evaluate:
        assert_refused(
            lambda: evaluate(rows[:4], lambda model, part: [model(part)]),
            mk.errors.InputError,
            "returns a list of 1 with 1 row in each for 1 row.*one entry for each row and one row in each entry",
        )


CENTERED = {
    "values": lambda scores: [{"box": row - scores.mean(0)} for row in scores],
    "numbers": lambda scores: [{"box": row[: len(scores) % 2]} for row in scores],
    "names": lambda scores: [f"of {len(scores)}" for _ in scores],
    "dtypes": lambda scores: [row.float() if len(scores) > 20 else row for row in scores],
}


@pytest.mark.parametrize("fn", CENTERED.values(), ids=CENTERED)
def test_entries_that_depend_on_other_rows_are_refused(rows, fn):
    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        assert_refused(
            lambda: evaluate(rows, lambda model, part: fn(model(part))),
            mk.errors.InputError,
            "rows that do not depend on one another.*pad to one size",
        )


def test_one_entry_over_a_threshold_is_rounding(rows):
    _, trainer = make(room=40)

    def fn(model, part):
        is_apart = len(part) < 10  # of the two rows that are run by themselves, the first has one number more
        return [row[: 1 + (number == 0 and is_apart)] for number, row in enumerate(model(part))]

    with trainer.evaluation() as evaluate:
        assert len(evaluate(rows, fn)) == 100


def test_a_list_of_another_length_is_refused(rows):
    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate:
        assert_refused(
            lambda: evaluate(rows, lambda model, part: list(model(part))[1:]),
            mk.errors.InputError,
            r"shape \(2,\) in a list of 24 for 25 rows.*or a list with one entry for each row",
        )


def test_other_errors_pass_through(rows):
    _, trainer = make(room=40, on_oom="raise")
    with trainer.evaluation() as evaluate, pytest.raises(torch.OutOfMemoryError):
        evaluate(rows, forward)
    _, trainer = make(room=40)
    with trainer.evaluation() as evaluate, pytest.raises(RuntimeError, match="cannot be multiplied"):
        evaluate(rows[:, :2], forward)


class Graph:
    """What memkit does not know: an object with tensors in it."""

    def __init__(self, x):
        self.x = x


def of_graph(model, graph):
    return model(graph.x)


UNCUT = {  # (the batch, what is computed of it): training takes them as they are too
    "an object": (lambda x: Graph(x), of_graph),
    "a sparse tensor": (lambda x: {"x": x, "to": x.to_sparse()}, lambda model, batch: model(batch["x"])),
    "no tensor": (lambda x: (), lambda model, batch: model(torch.ones(100, 3, dtype=torch.float64))),
}


@pytest.mark.parametrize("name", UNCUT)
def test_uncuttable_batch_runs_whole(rows, name):
    make_batch, fn = UNCUT[name]
    batch = make_batch(rows)
    model, trainer = make(room=100)
    assert trainer.train_step(batch, lambda model, batch: fn(model, batch).square().mean()).stepped
    with trainer.evaluation() as evaluate:
        assert evaluate(batch, fn).shape == (100, 2)
        model.room = 40
        model.seen.clear()
        with pytest.raises(mk.MemkitOutOfMemoryError, match="cannot be cut") as caught:
            evaluate(batch, fn)
    assert str(caught.value).endswith("DataLoader(dataset, batch_size=1).")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert model.seen == [100]


def test_unequal_columns_run_whole(rows):
    model, trainer = make(room=100)
    with trainer.evaluation() as evaluate:
        found = evaluate({"x": rows, "edges": torch.zeros(2, 7)}, lambda model, batch: model(batch["x"]))
    torch.testing.assert_close(found, model.whole(rows))


def test_out_of_memory_names_uncut_mask():
    _, trainer = make(room=2)
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "mask": torch.ones(4, 4, dtype=torch.bool).tril()}
    with trainer.evaluation() as evaluate, pytest.raises(mk.MemkitOutOfMemoryError, match="cannot be cut: a mask"):
        evaluate(batch, lambda model, batch: model(batch["x"]))


def test_a_loader_is_not_a_batch(rows):
    _, trainer = make(room=100)
    loader = torch.utils.data.DataLoader(rows, batch_size=10)
    with trainer.evaluation() as evaluate, pytest.raises(mk.errors.InputTypeError) as caught:
        evaluate(loader, forward)
    assert str(caught.value).endswith("write for batch in loader: evaluate(batch, fn)")


class Merging(nn.Linear):
    """Merges its adapter into the weight for evaluation, as LoRA does in `train`."""

    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.adapter, self.is_merged = nn.Parameter(torch.ones(3, 3, dtype=torch.float64)), False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (-1 if mode else 1) * self.adapter.detach()
            self.is_merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) + (0 if self.is_merged else x @ self.adapter.t())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_module_that_works_in_train_gets_back_by_it(rows, is_frozen):
    torch.manual_seed(0)
    model = nn.Sequential(Merging(), nn.Sequential(nn.Dropout(), Merging()))
    model[1][1].train(not is_frozen)
    trainer = trainer_of(model)
    with torch.no_grad():
        expected = model[1][1](model[0](rows))
    with trainer.evaluation() as evaluate:
        assert all(each.is_merged for each in (model[0], model[1][1]))
        torch.testing.assert_close(evaluate(rows, lambda model, part: model(part)), expected)
    assert [each.training for each in model.modules()] == [True, True, True, True, not is_frozen]
    assert (model[0].is_merged, model[1][1].is_merged) == (False, is_frozen)
    trainer.train_step(rows, mean_square)
    assert model[0].adapter.grad is None or model[0].adapter.grad.abs().sum() > 0


def forces(model, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    return gradient


def forces_with_gradients(model, x):
    with torch.enable_grad():
        return forces(model, x).detach()


def test_an_evaluation_that_needs_gradients_says_how():
    """Forces are gradients of the energy: a force field needs them in validation too."""
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 3)
    trainer = trainer_of(model)
    with pytest.raises(RuntimeError, match="does not require grad") as caught, trainer.evaluation() as evaluate:
        evaluate(x, forces)
    assert any("with torch.enable_grad():" in each for each in caught.value.__notes__)
    assert model.training
    with trainer.evaluation() as evaluate:
        found = evaluate(x, forces_with_gradients)
    torch.testing.assert_close(found, forces(model, x))
