"""The wrapper's step, the loop that is kept and SplitLoss check what they split, when it matters, and say it once."""

import collections
import functools
import itertools
import warnings
from dataclasses import InitVar, dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit.train.split_check import check_split
from tests.helpers import Noted, assert_refused, assert_same
from tests.toys import classify, fits, mean_square, out_of_memory, trainer_of
from tests.train.faults import FailingOperator

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(1))
PADDED = LABELS.clone().index_fill_(0, torch.tensor([0, 3, 8, 9, 10, 11, 15]), -100)


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), *layers)


def square(model, x):
    return (model(x) - 0.3).pow(2).mean()


def info_nce(model, x):
    z = F.normalize(model(x))
    return F.cross_entropy(z @ z.roll(1, 0).T, torch.arange(len(z)))


class Step:
    """Trains with the wrapper's step."""

    def __init__(self, model, **settings):
        self.trainer = trainer_of(model, accumulation_steps=4, **settings)

    def __call__(self, batch, loss_fn):
        self.trainer.train_step(batch, loss_fn)


class StepThatRaises(Step):
    """The same without recovery."""

    def __init__(self, model, **settings):
        super().__init__(model, on_oom="raise", **settings)


class Loop(Step):
    """Trains in a loop that is kept."""

    def __call__(self, batch, loss_fn):
        for attempt in self.trainer.microbatches(batch):
            with attempt as micro:
                self.trainer.backward(loss_fn(self.trainer.model, micro))
        self.trainer.step()


class Split:
    """Trains with a loss in parts."""

    def __init__(self, model, **settings):
        self.split = mk.SplitLoss(model, num_microbatches=4, **settings)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, batch, loss_fn):
        self.optimizer.zero_grad()
        self.split(batch, loss_fn).backward()
        self.optimizer.step()


WAYS = pytest.mark.parametrize("way", [Step, StepThatRaises, Loop, Split])


def messages(train, steps):
    """What is warned of in a series of steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, loss_fn in steps:
            train(batch, loss_fn)
    return [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]


@WAYS
def test_equal_splits_are_silent(way):
    steps = [((X, LABELS), classify)] * 5 + [((X[:13], LABELS[:13]), classify)] * 2 + [(X, square)] * 2
    assert messages(way(net(nn.Dropout(0.5))), steps) == []


@WAYS
def test_warns_once_of_float32_class_weights(way):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 3.0]))
    steps = [((X, LABELS), lambda model, batch: criterion(model(batch[0]), batch[1]))] * 3
    (message,) = messages(way(net()), steps)
    assert "splitting the batch changes the gradient" in message
    assert "return mk.Loss(mean=loss, count=n)" in message


@WAYS
@pytest.mark.parametrize("num_even", [1, 2, 4])
def test_warns_of_later_padding(way, num_even):
    steps = [((X, LABELS), classify)] * num_even
    train = way(net())
    assert messages(train, steps) == []
    # The loop that is kept learns of it with the last part, and looks at the next batch.
    (message,) = messages(train, [((X, PADDED), classify)] * 2)
    assert "return mk.Loss(mean=loss, count=n)" in message


@WAYS
def test_another_loss_function_is_looked_at(way):
    train = way(net())
    assert messages(train, [(X, square)] * 3) == []
    for _ in range(3):  # and is refused whenever it comes
        with pytest.raises(mk.errors.ConfigError, match=r"off by .* when the batch is split.*cached_backward"):
            train(X, info_nce)
    assert messages(train, [(X, square)] * 3) == []


def coupled_or_not(model, x, couples):
    return info_nce(model, x) if couples else square(model, x)


class Switched:
    """A loss that is an object, made anew in each step."""

    def __init__(self, couples):
        self.couples = couples

    def __call__(self, model, x):
        return coupled_or_not(model, x, self.couples)

    def loss(self, model, x):
        return self(model, x)


SWITCHED = {
    "partial": lambda couples: functools.partial(coupled_or_not, couples=couples),
    "closure": lambda couples: lambda model, x: coupled_or_not(model, x, couples),
    "default": lambda couples: lambda model, x, couples=couples: coupled_or_not(model, x, couples),
    "object": Switched,
    "method": lambda couples: Switched(couples).loss,
}


@pytest.mark.parametrize("how", SWITCHED)
@pytest.mark.parametrize("num_before", [2, 5, 20])
def test_a_loss_function_that_was_given_something_else_is_checked(how, num_before):
    train = Step(net())
    assert messages(train, [(X, SWITCHED[how](couples=False)) for _ in range(num_before)]) == []
    with pytest.raises(mk.errors.ConfigError, match=r"off by .* when the batch is split"):
        train(X, SWITCHED[how](couples=True))


@pytest.mark.parametrize("make", [lambda step: step, lambda step: 1 / step, str, lambda _: Switched(couples=False)])
def test_a_variable_that_is_another_one_in_each_step_does_not_cause_a_check_in_each(make):
    train, sizes, looked = Step(net()), Noted(), []

    def annealed(variable, switch=False):
        def loss_fn(model, x):
            sizes.append((len(x), variable))
            return coupled_or_not(model, x, switch)

        return loss_fn

    for step in range(1, 18):
        sizes.take()
        train(X, annealed(make(step)))
        if len(sizes.take()) > 4:
            looked.append(step)
    assert looked == [1, 2, 3, 4, 5, 8, 16]
    with pytest.raises(mk.errors.ConfigError, match=r"off by .* when the batch is split"):  # the others still count
        train(X, annealed(make(18), switch=True))


def test_what_is_noted_of_loss_functions_does_not_grow():
    trainer, kept = trainer_of(net(), accumulation_steps=2), []

    def count():
        watch = trainer._split_watch
        return [len(each) for each in (watch._records, watch._losses._values, watch._trusted, watch._refused_kinds)]

    for step in range(100):
        code = compile(f"def loss_{step}(model, x): return model(x).square().mean()", "made", "exec")
        exec(code, made := {})
        kept.append(made[f"loss_{step}"])
        trainer.train_step(X, kept[-1])
        trainer.trust_split(X, kept[-1])
    assert max(count()) == 64


@WAYS
def test_checks_again_after_mode_change(way):
    model = net(nn.BatchNorm1d(4)).eval()
    train = way(model)
    assert messages(train, [(X, square)] * 3) == []
    model.train()
    (message,) = messages(train, [(X, square)] * 3)
    assert "In training mode 3 would see the statistics of each micro-batch" in message


@WAYS
def test_rejected_step_trains_nothing(way):
    model = net()
    before = [each.detach().clone() for each in model.parameters()]
    assert_refused(lambda: way(model)(X, info_nce), mk.errors.ConfigError)
    assert_same(list(model.parameters()), before)
    assert all(each.grad is None for each in model.parameters())
    assert messages(way(model), [(X, square)]) == []


def test_refusal_is_not_undone_by_another_batch():
    def above_most(model, x):
        each = model(x).pow(2).mean(1)
        return (each * (x[:, 0] > x[:, 0].mean() - 100)).mean()

    step, far = Step(net()), X.clone()
    far[:4, 0] -= 1000
    assert_refused(lambda: step(far, above_most), mk.errors.ConfigError, "when the batch is split")
    with pytest.warns(mk.MemkitWarning, match="was refused on another batch"):
        step(X, above_most)


def test_after_an_out_of_memory_the_split_is_checked():
    model = net()
    trainer = trainer_of(model)
    with pytest.raises(mk.MemkitOutOfMemoryError, match="splitting the batch changes its gradient") as caught:
        trainer.train_step(X, fits(8, info_nce))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def unlucky(model, x):
    """Fails on parts of an odd size and on two rows: neither few rows nor real parts can be compared."""
    if len(x) != 4:
        raise ValueError("four rows at a time")
    return square(model, x)


@WAYS
def test_an_unchecked_split_is_reported_with_the_way_out(way):
    (message,) = messages(way(net()), [(X, unlucky)] * 3)
    assert "could not check that splitting the batch keeps its gradient: ValueError: four rows" in message
    assert "probe=False" in message
    assert "check_split(model, batch, loss_fn)" in message


@WAYS
def test_another_number_in_the_reason_is_no_other_cause(way):
    numbers = itertools.count(10)

    def out_of_bounds(model, x):
        if len(x) != 4:
            raise IndexError(f"index {next(numbers)} is out of bounds for dimension 0 with size 4")
        return square(model, x)

    (message,) = messages(way(net()), [(X, out_of_bounds), (X, lambda model, x: out_of_bounds(model, x))] * 2)
    assert "IndexError: index 1" in message


@WAYS
def test_require_refuses_unchecked_splits(way):
    with pytest.raises(mk.errors.ConfigError, match=r"probe='require'.*could not be checked: ValueError: four rows"):
        way(net(), probe="require")(X, unlucky)
    assert messages(way(net(), probe="require"), [(X, square)] * 3) == []


@WAYS
def test_no_check_on_demand(way):
    seen = []

    def noting(model, x):
        seen.append(len(x))
        return info_nce(model, x)

    assert messages(way(net(), probe=False), [(X, noting)] * 2) == []
    assert seen == [4] * 8


def test_checks_first_second_fourth_and_eighth_batch():
    calls = Noted()

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            calls.append(len(x))
            return self.net(x)

    train, looked = Step(Counting()), []
    for step in range(1, 10):
        calls.take()
        train(X, square)
        if len(calls.take()) > 4:
            looked.append(step)
    assert looked == [1, 2, 4, 8]


def test_trusted_split_is_checked_only_for_new_divisors():
    num_rows = []

    def noted(model, batch):
        num_rows.append(len(batch[0]))
        return classify(model, batch)

    with trainer_of(net(), accumulation_steps=4) as trainer:
        trainer.trust_split((X, LABELS), noted)
        for _ in range(4):
            trainer.train_step((X, LABELS), noted)
        assert set(num_rows) == {len(X) // 4}
        with pytest.warns(mk.MemkitWarning, match="splitting the batch"):
            trainer.train_step((X, PADDED), noted)


def test_branching_on_values_checks_first_eight_batches():
    calls = Noted()

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            calls.append(len(x))
            return self.net(x) if x.mean() < 1e6 else -self.net(x)

    train, looked = Step(Branching()), []
    for step in range(1, 11):
        calls.take()
        train(X, square)
        if len(calls.take()) > 4:
            looked.append(step)
    assert looked == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rejects_branch_taken_differently_by_parts():
    """It looked equal on the first batch, where all went the same way."""

    def loss_fn(model, x):
        out = model(x)
        return out.pow(2).mean() if x[:, 0].median() > 0 else out.pow(4).mean()

    step = Step(net())
    one_way = torch.cat([X.abs(), X.abs()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(one_way, loss_fn)
    two_ways = torch.cat([X.abs(), X.abs() + 1])
    two_ways[:12, 0] -= 5
    assert_refused(lambda: step(two_ways, loss_fn), mk.errors.ConfigError, "when the batch is split")


def by_group(model, batch):
    """Scores are centered in each group of rows, as answers to one prompt are."""
    x, group = batch
    score = model(x).pow(2).mean(1)
    groups = group.unique()
    means = torch.stack([score[group == each].detach().mean() for each in groups])
    return ((score - means[torch.searchsorted(groups, group)]) * score).mean()


def test_warns_of_grouped_rows():
    """Six rows each in parts of six: equal as they come, and only then."""
    x, group = torch.randn(96, 6), torch.randperm(16).repeat_interleave(6)
    x[::2, 0] = float("nan")  # what is missing comes first in the order of a look

    def loss_fn(model, batch):
        return by_group(model, (batch[0].nan_to_num(), batch[1]))

    trainer = mk.MemoryEfficientTrainingWrapper(
        model := net(), torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=16
    )
    with pytest.warns(mk.MemkitWarning, match="of the same rows in another order do not"):
        trainer.train_step((x, group), loss_fn)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_check_without_memory_is_no_error(dtype):
    """Also for the copies that it makes: rows in another order, parameters in float32."""
    model, batch = net().to(dtype), X.to(dtype)
    with FailingOperator() as counter:
        assert check_split(model, batch, square).exact is True
    assert counter.num_operators > 50
    for place in range(1, counter.num_operators + 1, 3):
        with FailingOperator(place) as fault:
            verdict = check_split(model, batch, square)
        assert fault.num_failures == 1
        assert verdict.exact is not False


def test_a_check_is_not_repeated_for_sentences_of_another_length():
    model = nn.Embedding(10, 4)
    train, lengths = Step(model), []

    def loss_fn(model, words):
        lengths.append(words.shape[1])
        return model(words).pow(2).mean((1, 2)).mean()

    for length in (7, 8, 9, 10, 11):
        train(torch.randint(0, 10, (8, length)), loss_fn)
    assert lengths.count(9) == lengths.count(11) == 4


def test_warns_of_lossy_split_fn():
    def cut(batch, num_parts):
        return list(batch.tensor_split(num_parts))[:-1]

    model = net()
    trainer = trainer_of(model, accumulation_steps=2, split_fn=cut)
    with pytest.raises(mk.errors.InputError, match=r"split_fn\(batch, 2\): got 8 of 16 rows, in 1 part;"):
        trainer.train_step(X, lambda model, x: mk.Loss(mean=square(model, x), count=len(x)))


def test_does_not_rerun_batch_changed_by_forward():
    calls = []

    def loss_fn(model, x):
        x.mul_(0.5)
        calls.append(len(x))
        if len(calls) == 1:
            out_of_memory()
        return square(model, x)

    model = net()
    trainer = trainer_of(model)
    with pytest.raises(mk.MemkitOutOfMemoryError, match=r"changes the batch in place.*CUDA out of memory"):
        trainer.train_step(X.clone(), loss_fn)


@pytest.mark.parametrize("on_oom", ["exact", "raise"])
def test_error_in_a_part_mentions_the_split(on_oom):
    table = torch.randn(16, 16)

    def loss_fn(model, batch):
        return (batch[1] @ model(batch[0])).pow(2).mean()

    model = net()
    trainer = trainer_of(model, accumulation_steps=4, on_oom=on_oom)
    with pytest.raises(RuntimeError) as caught:
        trainer.train_step((X, table), loss_fn)
    assert "a micro-batch of 4 of 16" in caught.value.__notes__[0]
    assert "split_fn" in caught.value.__notes__[0]


@dataclass
class Derived:
    x: torch.Tensor
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale):
        self.scaled, self.table = self.x * scale, torch.ones(3)


@dataclass
class DerivedField(Derived):
    scaled: torch.Tensor = field(init=False)


@pytest.mark.parametrize("nested", [False, True])
def test_attributes_beside_the_fields_of_a_dataclass_are_named(nested):
    def train_step(batch):
        model = net()
        trainer = trainer_of(model, accumulation_steps=4, on_oom="exact")
        inside = (lambda batch: batch["in"][0]) if nested else lambda batch: batch

        def loss_fn(model, batch):
            return (model(inside(batch).x) * inside(batch).scaled[:, :1]).square().mean()

        return trainer.train_step({"in": [batch]} if nested else batch, loss_fn)

    with pytest.raises(RuntimeError) as caught:
        train_step(Derived(X))
    assert "It has Derived.scaled whole: of a dataclass only the fields are cut." in caught.value.__notes__[0]
    assert train_step(DerivedField(X)).num_microbatches == 4


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ([224, 224, 3, 1], True),
        ([1.0, 2.0, 3.0, 4.0], True),
        ([None] * 4, True),
        ((224, 224, 3, 1), False),
        ([224, 224, 3], False),
        (["a", "b", "c", "d"], False),
        (torch.tensor([224, 224, 3, 1]), False),
    ],
)
def test_rejects_list_with_one_number_per_row(values, is_refused):
    model = net()
    trainer = trainer_of(model, accumulation_steps=2, probe=False)
    step = {"x": X[:4], "size": values}
    if is_refused:
        with pytest.raises(mk.errors.InputError, match=r"as many values as the batch has rows.*a tensor.*a tuple"):
            trainer.train_step(step, lambda model, batch: square(model, batch["x"]))
    else:
        trainer.train_step(step, lambda model, batch: square(model, batch["x"]))


class Centered(nn.Module):
    """Writes its batch's mean to a buffer, which the training reads after the step, as DINO's centering does."""

    def __init__(self, *, counts=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("num_calls", torch.tensor(0))
        self.counts = counts

    def forward(self, x):
        y = self.linear(x)
        if self.counts:
            self.num_calls += 1
        else:
            self.last.copy_(y.detach().mean(0))
        return y


@pytest.mark.parametrize("is_method", [False, True])
def test_buffers_of_a_criterion_are_told_of_like_the_models(is_method):
    """Where DINO keeps its center: in a module that the loss function holds, or finds elsewhere."""
    torch.manual_seed(0)
    model, criterion, x = nn.Linear(4, 4), Centered(), torch.randn(16, 4)
    criterion.requires_grad_(requires_grad=False)

    def loss_fn(model, x):
        return criterion(model(x)).square().mean()

    verdict = mk.train.check_split(model, x, loss_fn)
    assert (verdict.exact, verdict.buffers) == (True, ("Centered.last",))
    trainer = trainer_of(model, accumulation_steps=4)

    def step():
        if is_method:
            return trainer.train_step(x, loss_fn)
        for attempt in trainer.microbatches(x):
            with attempt as micro:
                trainer.backward(loss_fn(model, micro))
        return trainer.step()

    with pytest.warns(mk.errors.MemkitWarning, match=r"not what forward writes to Centered\.last: each micro-batch"):
        step()


class Keeper:
    """Keeps what a forward leaves, each kind in another place, as hooks and optimizers do."""

    def __init__(self):
        self.mean, self.norm, self.array, self.calls = torch.zeros(4), 0.5, np.zeros(4), 0
        self.lazy, self.seconds, self.cache = None, 0.0, torch.zeros(4, 4)
        self.by_module, self.by_name, self.log, self.lines = {}, {"mean": torch.zeros(4)}, {}, [0.5]
        self.window, self.clock = collections.deque([0.5] * 2, maxlen=2), itertools.count(1)

    def __call__(self, module, inputs):
        value = inputs[0].detach().square().mean(0)
        getattr(self, f"keep_{self.kind}")(module, value, inputs[0].detach())
        self.calls += 1

    def keep_attribute(self, _, value, __):
        self.mean = 0.5 * self.mean + value

    def keep_in_place(self, _, value, __):
        self.mean.mul_(0.5).add_(value)

    def keep_number(self, _, value, __):
        self.norm = 0.5 * self.norm + float(value.sum())

    def keep_array(self, _, value, __):
        self.array = 0.5 * self.array + value.numpy()

    def keep_item(self, _, value, __):
        self.by_name["mean"] = 0.5 * self.by_name["mean"] + value

    def keep_begun(self, _, value, __):
        self.lazy = value if self.lazy is None else 0.5 * self.lazy + value

    def keep_begun_item(self, module, value, _):
        self.by_module[module] = 0.5 * self.by_module[module] + value if module in self.by_module else value

    def keep_last(self, _, value, rows):
        self.norm, self.mean, self.lazy = float(value.sum()), value, rows

    def keep_logs(self, _, value, __):
        self.log[self.calls] = float(value.sum())
        self.lines.append(float(value.sum()))
        self.window.append(float(value.sum()))

    def keep_sum(self, _, __, rows):
        self.mean = self.mean + rows.sum(0)  # all rows add the same, in whatever parts

    def keep_time(self, _, __, ___):
        self.seconds += next(self.clock)

    def keep_cache(self, _, __, rows):
        if len(rows) != len(self.cache):
            self.cache = torch.ones(len(rows), 4)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("attribute", "Keeper.mean"),
        ("in_place", "Keeper.mean"),
        ("number", "Keeper.norm"),
        ("array", "Keeper.array"),
        ("item", "Keeper.by_name"),
        ("begun", "Keeper.lazy"),
        ("begun_item", "Keeper.by_module"),
        *((kind, "") for kind in ("last", "logs", "sum", "time", "cache")),
    ],
)
def test_statistics_outside_of_buffers_are_told_of_and_no_others(kind, shown):
    torch.manual_seed(0)
    model, keeper, x = nn.Linear(4, 4), Keeper(), torch.randn(16, 4)
    keeper.kind = kind
    model.register_forward_pre_hook(keeper)
    x *= torch.arange(1, 17)[:, None]
    verdict = check_split(model, x, mean_square)
    assert (verdict.exact, verdict.buffers) == (True, (shown,) if shown else ())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = trainer_of(model, accumulation_steps=4)
        for _ in range(2):
            trainer.train_step(x, mean_square)
    assert len(told) == bool(shown)
    assert not shown or f"not what forward writes to {shown}: each micro-batch writes its own" in str(told[0].message)


class Preconditioned(torch.optim.SGD):
    """Keeps, as K-FAC does, statistics that its hooks take of each forward and backward, with its moments."""

    def __init__(self, model):
        super().__init__(model.parameters(), 0.1)
        self.inputs, self.gradients = {}, {}
        model.register_forward_pre_hook(lambda module, inputs: self.take(self.inputs, module, inputs))
        model.register_full_backward_hook(lambda module, _, gradients: self.take(self.gradients, module, gradients))

    def take(self, kept, module, rows):
        value = rows[0].detach().square().mean(0)
        kept[module] = 0.5 * kept.get(module, 1.0) + value


def test_statistics_of_hooks_are_told_of_where_memory_cuts_the_batch():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer, fails = Preconditioned(model), itertools.count()

    def loss_fn(model, x):
        if next(fails) == 0:
            out_of_memory()
        return mean_square(model, x)

    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
    with pytest.warns(mk.MemkitWarning, match=r"it was split\) keeps its gradient, but not .*Preconditioned.inputs"):
        trainer.train_step((torch.randn(8, 4) * torch.arange(1, 9)[:, None]).requires_grad_(), loss_fn)


def test_only_runs_that_leave_other_state_are_checked_further():
    """The last part apart, for what is shown; the whole again too, for a statistic."""
    counts = []
    for kind in ("sum", "last", "attribute"):
        model, keeper, calls = nn.Linear(4, 4), Keeper(), Noted()
        keeper.kind = kind
        model.register_forward_pre_hook(keeper)

        def loss_fn(model, x, calls=calls):
            calls.append(len(x))
            return mean_square(model, x)

        check_split(model, torch.randn(8, 4) * torch.arange(1, 9)[:, None], loss_fn)
        counts.append(len(calls.take()))
    assert [each - counts[0] for each in counts] == [0, 1, 2]


@pytest.mark.parametrize("counts", [False, True])
def test_buffers_that_the_parts_leave_otherwise_are_told(counts):
    """A number of calls says nothing: it is another one in any loop that accumulates."""
    torch.manual_seed(0)
    model, x = Centered(counts=counts), torch.randn(16, 4)
    verdict = mk.train.check_split(model, x, mean_square)
    assert verdict.exact
    assert verdict.buffers == (() if counts else ("last",))
    trainer = trainer_of(model, accumulation_steps=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            trainer.train_step(x, mean_square)
    assert len(told) == (not counts)
    assert counts or "but not what forward writes to last: each micro-batch writes its own" in str(told[0].message)
    assert mk.plan_training(model, x, mean_square, "sgd", budget="64MiB").is_split_exact is counts


@pytest.mark.filterwarnings("ignore::memkit.errors.MemkitWarning")
@pytest.mark.parametrize("still_runs_out", [False, True])
def test_a_cut_of_an_earlier_step_is_not_the_reason_to_refuse(still_runs_out):
    """Memory ran out once; later the loss compares rows. The whole batch is tried, and refused only if it fails."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    trainer = trainer_of(model)

    class Now:
        step = 0

    def loss_fn(model, x):
        y = model(x)
        if len(x) > 4 and (Now.step == 0 or still_runs_out):
            raise MemoryError
        return y.square().mean() + (y.std() if Now.step >= 1 else 0)

    sizes = []
    for Now.step in range(5):
        try:
            sizes.append(trainer.train_step(x, loss_fn).sizes)
        except mk.errors.MemkitOutOfMemoryError:
            sizes.append(None)
    assert sizes[0] == (4, 4)
    assert (None in sizes) == still_runs_out
    assert still_runs_out or sizes[-1] == (8,)


@pytest.mark.parametrize(("scale", "is_split"), [(11, True), (None, False)])
def test_a_penalty_times_the_count_is_no_divisor_where_memory_forces_the_split(scale, is_split):
    """No two parts fit together, so nothing but the graph tells: a sum over rows, and one that each part divides."""
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(2))

    def summed(model, x):
        loss, n = model(x).square().sum(), len(x)
        penalty = sum(each.square().sum() for each in model.parameters())
        return mk.Loss(sum=loss * (scale or n) + n * 1e-3 * penalty, count=n)

    trainer = trainer_of(net().double())
    if is_split:
        assert [trainer.train_step(x.double(), fits(4, summed)).sizes for _ in range(2)] == [(4, 4, 3)] * 2
    else:
        with pytest.raises(mk.MemkitOutOfMemoryError, match="splitting the batch"):
            trainer.train_step(x.double(), fits(4, summed))


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}])
def test_a_loss_function_may_refer_to_itself(settings):
    def loss_fn(model, x):
        if len(x) > 4:
            return (loss_fn(model, x[:4]) * 4 + loss_fn(model, x[4:]) * (len(x) - 4)) / len(x)
        return mean_square(model, x)

    with trainer_of(nn.Linear(4, 4), **settings) as trainer:
        for _ in range(2):
            assert trainer.train_step(torch.randn(8, 4), loss_fn).stepped


class Towers(nn.Module):
    """Two tables of embeddings, for which memory suffices up to so many rows, with a graph and without."""

    def __init__(self, most, most_without):
        super().__init__()
        self.users, self.items = nn.Embedding(200, 4).double(), nn.Embedding(200, 4).double()
        self.most, self.most_without = most, most_without

    def forward(self, batch):
        if len(batch[0]) > (self.most if torch.is_grad_enabled() else self.most_without):
            out_of_memory()
        return (self.users(batch[0]) * self.items(batch[1])).sum(1)


def by_frequency(model, batch):
    """Errors divided by how often the item is in the batch: most of its rows do not meet."""
    errors = (model(batch) - 1).square() / torch.bincount(batch[1], minlength=200)[batch[1]]
    return errors.mean()


def rare_meetings():
    """A batch whose few rows of a check have no item twice, but two of its quarters do."""
    draws = torch.Generator().manual_seed(0)
    return torch.randint(200, (64,), generator=draws), torch.randint(200, (64,), generator=draws)


def test_two_parts_are_compared_again_once_they_have_become_so_small_that_they_fit():
    batch = rare_meetings()
    with pytest.raises(mk.MemkitOutOfMemoryError, match="the loss of 32 rows is not the mean of their parts' losses"):
        trainer_of(Towers(16, 32)).train_step(batch, by_frequency)


def test_two_parts_that_never_fit_together_are_told_of_once():
    batch, looks = rare_meetings(), []

    def loss_fn(model, batch):
        if not torch.is_grad_enabled():
            looks.append(len(batch[0]))
        return (model(batch) - 1).square().mean()

    trainer = trainer_of(Towers(16, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trainer.train_step(batch, loss_fn).sizes == (16,) * 4
        del looks[:]
        for _ in range(4):
            trainer.train_step(batch, loss_fn)
    told = [str(each.message) for each in caught if "Training continues" not in str(each.message)]
    assert len(told) == 1
    assert "two of its parts together could not be checked, because memory ran out" in told[0]
    assert looks == []
    with warnings.catch_warnings():  # where they do fit, in the end, nothing is told
        warnings.filterwarnings("error", ".*a few rows have shown")
        trainer_of(Towers(16, 32)).train_step(batch, loss_fn)


@pytest.mark.parametrize("far", [1, 1e9])
def test_a_loss_scale_that_is_still_too_large_does_not_keep_a_split_from_being_checked(far):
    """With autocast inside of `loss_fn`, in which the check cannot switch it off."""
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 3), (torch.randn(8, 6), 50 * torch.randn(8, 3))

    def half(model, batch):
        with torch.autocast("cpu", torch.float16):
            return (far * (model(batch[0]).float() - batch[1])).square().mean()

    trainer = trainer_of(model, scaler=torch.amp.GradScaler("cpu"))
    if far == 1:
        assert not trainer.train_step(batch, fits(4, half)).stepped  # as in a plain loop, which makes the scale smaller
    else:
        text = "could not be checked: the gradient of the rows.*is not finite, also without the loss scale"
        with pytest.raises(mk.MemkitOutOfMemoryError, match=text):
            trainer.train_step(batch, fits(4, half))
