"""A `Loss` states its weight: valid forms, forms that are refused everywhere, gradients, and further outputs."""

import dataclasses
import itertools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._gradients.loss import read_loss
from memkit.recipes.validation import RowsOfLoss
from tests.helpers import assert_refused, flat_gradient
from tests.toys import classify, mean_square, out_of_memory, trainer_of

SCALAR = torch.tensor(2.0)
SGD = torch.optim.SGD


def make_batch(rows=10):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    y[1:5] = -100
    return x, y


def make_model():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def num_valid(batch):
    return (batch[1] != -100).sum()


def of_sum(model, batch):
    return mk.Loss(sum=F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count=num_valid(batch))


def of_mean(model, batch):
    """NaN where no target is valid."""
    return mk.Loss(mean=classify(model, batch), count=num_valid(batch))


def of_mean_and_number(model, batch):
    return mk.Loss(mean=classify(model, batch), count=int(num_valid(batch)))


WEIGHED = [of_sum, of_mean, of_mean_and_number]


class TestForms:
    @pytest.mark.parametrize(
        ("loss", "value", "reduction", "weight", "total", "average"),
        [
            (mk.Loss(mean=SCALAR), 2, "mean", 1, 2, 2),
            (mk.Loss(mean=SCALAR, count=3), 2, "mean", 3, 6, 2),
            (mk.Loss(mean=SCALAR, count=torch.tensor(3)), 2, "mean", 3, 6, 2),
            (mk.Loss(sum=SCALAR, count=4), 2, "sum", 4, 2, 0.5),
            (mk.Loss(sum=SCALAR, count=torch.tensor(4.0)), 2, "sum", 4, 2, 0.5),
            (mk.Loss(mean=SCALAR.half(), count=100_000), 2, "mean", 100_000, 200_000, 2),
            (mk.Loss(mean=SCALAR * math.nan, count=0), math.nan, "mean", 0, 0, math.nan),
            (mk.Loss(mean=SCALAR * math.nan, count=torch.tensor(0)), math.nan, "mean", 0, 0, math.nan),
            (mk.Loss(sum=SCALAR * 0, count=torch.tensor(0)), 0, "sum", 0, 0, math.nan),
        ],
    )
    def test_accepts_valid_losses(self, loss, value, reduction, weight, total, average):
        assert loss.reduction == reduction
        found = [float(each) for each in (loss.value, loss.weight, loss.total(), loss.average())]
        assert found == pytest.approx([value, weight, total, average], nan_ok=True)

    @pytest.mark.parametrize(
        ("wrong", "error", "text"),
        [
            ({}, mk.errors.InputError, r"got neither mean nor sum.*write mk\.Loss\(mean=loss\)"),
            (
                {"mean": SCALAR, "sum": SCALAR, "count": 1},
                mk.errors.InputError,
                r"got both mean and sum.*write mk\.Loss\(",
            ),
            ({"count": 3}, mk.errors.InputError, "got neither mean nor sum"),
            ({"sum": SCALAR}, mk.errors.InputError, r"a sum without its count.*write mk\.Loss\(sum=loss, count=n\)"),
            ({"mean": 2.0}, mk.errors.InputTypeError, r"mk\.Loss\(mean=\.\.\.\): got a float.*not loss\.item\(\)"),
            ({"sum": [SCALAR], "count": 1}, mk.errors.InputTypeError, r"mk\.Loss\(sum=\.\.\.\): got a list"),
            ({"mean": torch.ones(3)}, mk.errors.InputError, r"shape \(3,\).*mk\.Loss\(mean=losses\.mean\(\)\)"),
            ({"mean": SCALAR, "count": torch.ones(3)}, mk.errors.InputError, r"shape \(3,\).*count=valid\.sum\(\)"),
            (
                {"sum": SCALAR, "count": "3"},
                mk.errors.InputTypeError,
                r"count=\.\.\.\): got a str.*count=valid\.sum\(\)",
            ),
            ({"sum": SCALAR, "count": True}, mk.errors.InputTypeError, "got a bool"),
        ],
    )
    def test_rejects_invalid_arguments(self, wrong, error, text):
        assert_refused(lambda: mk.Loss(**wrong), error, text)

    def test_error_names_the_arguments(self):
        """A second positional argument would be a count or a metric: that is what tuples were."""
        with pytest.raises(TypeError):
            mk.Loss(SCALAR, 3)

    @pytest.mark.parametrize("count", [-1, math.inf, math.nan, torch.tensor(-1)])
    def test_an_invalid_count_is_refused_in_the_step(self, count):
        model = make_model()
        trainer = trainer_of(model)
        loss_fn = lambda model, batch: mk.Loss(mean=classify(model, batch), count=count)  # noqa: E731
        for step in (trainer.train_step, mk.SplitLoss(model)):
            with pytest.raises(mk.errors.InputError, match="a finite weight of zero or more"):
                step(make_batch(), loss_fn)


TUPLE = (
    r"whose entries are ambiguous.*return mk\.Loss\(sum=loss_sum, count=n\).*"
    r"return mk\.Loss\(mean=loss, count=n\).*return mk\.Loss\(mean=loss, outputs=\.\.\.\)"
)
COMPLEX = r"got a complex loss \(torch\.complex.*return loss\.abs\(\)"
BESIDE = r"return mk\.Loss\(mean=loss, outputs=\.\.\.\)"
RETURNS = {
    "no entries": (lambda loss, _: (), mk.errors.InputError, "a tuple of no entries, " + TUPLE),
    "one entry": (lambda loss, _: (loss,), mk.errors.InputError, "a tuple of Tensor, " + TUPLE),
    "loss and count": (lambda loss, _: (loss, 10), mk.errors.InputError, "a tuple of Tensor, int, " + TUPLE),
    "loss and accuracy": (lambda loss, hits: (loss, hits), mk.errors.InputError, "a tuple of Tensor, Tensor, " + TUPLE),
    "loss and None": (lambda loss, _: (loss, None), mk.errors.InputError, "a tuple of Tensor, NoneType, " + TUPLE),
    "three entries": (
        lambda loss, hits: (loss, hits, {}),
        mk.errors.InputError,
        "a tuple of Tensor, Tensor, dict, " + TUPLE,
    ),
    "list": (lambda loss, hits: [loss, hits], mk.errors.InputError, "a list of Tensor, Tensor, " + TUPLE),
    "dict": (
        lambda loss, _: {"loss": loss},
        mk.errors.InputTypeError,
        "got a dict.*" + BESIDE,
    ),
    "float": (lambda loss, _: 1.5, mk.errors.InputTypeError, r"got a float.*not loss\.item\(\)"),
    "complex": (lambda loss, _: loss * (1 + 1j), mk.errors.InputError, COMPLEX),
    "None": (lambda loss, _: None, mk.errors.InputTypeError, r"got a NoneType.*end loss_fn with `return loss`"),
}


def returning(name):
    """A loss function with the named return value; its accuracy is a mean over rows."""
    give, error, text = RETURNS[name]

    def loss_fn(model, batch):
        logits = model(batch[0])
        return give(logits.square().mean(), (logits.argmax(1) == batch[1]).double().mean())

    return loss_fn, error, text


def in_a_step(loss_fn, **settings):
    model = make_model()
    before = model.weight.detach().clone()
    try:
        trainer_of(model, **settings).train_step(make_batch(), loss_fn)
    finally:
        assert torch.equal(model.weight, before)


def in_lightning(loss_fn):
    pytest.importorskip("lightning", reason="an extra: pip install lightning")
    from lightning.fabric import Fabric

    from memkit.integrations.lightning import MemoryEfficientModule

    class Net(MemoryEfficientModule):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def training_step(self, batch, batch_idx):
            return loss_fn(self.net, batch)

    net = Net()
    net, _ = Fabric(accelerator="cpu", devices=1).setup(net, SGD(net.parameters(), lr=0.1))
    net.training_step(make_batch(), 0)


STEP = r"loss_fn of trainer\.train_step: .*"
OF_ONE_LOSS = {  # where a loss function is called, and how the error calls it
    "step": (in_a_step, STEP),
    "step that raises": (lambda loss_fn: in_a_step(loss_fn, on_oom="raise"), STEP),
    "step in parts": (lambda loss_fn: in_a_step(loss_fn, accumulation_steps=3), STEP),
    "split loss": (
        lambda loss_fn: mk.SplitLoss(make_model(), num_microbatches=2)(make_batch(), loss_fn),
        "SplitLoss.*",
    ),
    "split loss without gradients": (
        torch.no_grad()(lambda loss_fn: mk.SplitLoss(make_model())(make_batch(), loss_fn)),
        "SplitLoss.*",
    ),
    "validation": (lambda loss_fn: RowsOfLoss(loss_fn)(make_model(), make_batch()), "loss_fn of a validation: .*"),
    "estimate": (lambda loss_fn: mk.estimate_memory_usage(make_model(), make_batch(), loss_fn), ""),
}
PLAN = {"optimizer": "sgd", "target": "cpu"}
OF_A_PLAN = {
    "advice": (lambda loss_fn: mk.advise(make_model(), make_batch(), loss_fn, **PLAN), ""),
    "plan": (lambda loss_fn: mk.plan_training(make_model(), make_batch(), loss_fn, budget="1GiB", **PLAN), ""),
    "lightning": (in_lightning, ""),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *itertools.product(OF_ONE_LOSS, RETURNS),
        *itertools.product(OF_A_PLAN, ("loss and accuracy", "loss and count", "complex")),
    ],
)
def test_every_caller_of_a_loss_rejects_other_returns_with_way_out(where, name):
    call, words = (OF_ONE_LOSS | OF_A_PLAN)[where]
    loss_fn, error, text = returning(name)
    assert_refused(lambda: call(loss_fn), error, words + text)


def in_a_loop(loss):
    trainer = trainer_of(make_model(), accumulation_steps=2)
    for attempt in trainer.microbatches(make_batch()):
        with attempt as micro:
            trainer.backward(loss(trainer.model(micro[0])), count=len(micro[0]))


def in_an_accumulator(loss):
    model = make_model()
    mk.GradientAccumulator(SGD(model.parameters(), lr=0.1)).backward(loss(model(make_batch()[0])), count=10)


@pytest.mark.parametrize(
    "call",
    [
        lambda loss: mk.Loss(mean=loss(torch.ones(3, requires_grad=True))),
        lambda loss: mk.Loss(sum=loss(torch.ones(3, requires_grad=True)), count=3),
        in_a_loop,
        in_an_accumulator,
        lambda loss: mk.train.cached_backward(make_model(), make_batch()[0], loss, chunk_size=4),
    ],
)
def test_complex_losses_are_refused_wherever_they_are_passed(call):
    """Torch refuses them in `loss.backward()` alone: with a weight, it takes one half of the gradient in silence."""
    assert_refused(lambda: call(lambda out: out.square().mean() * 1j), mk.errors.InputError, COMPLEX)


def gradient_of(loss_fn, batch, steps):
    model = make_model()
    trainer = mk.MemoryEfficientTrainingWrapper(model, SGD(model.parameters(), lr=1.0), accumulation_steps=steps)
    before = torch.cat([each.detach().flatten() for each in model.parameters()])
    result = trainer.train_step(batch, loss_fn)
    return before - torch.cat([each.detach().flatten() for each in model.parameters()]), result.loss


def split_gradient_of(loss_fn, batch, steps):
    model = make_model()
    loss = mk.SplitLoss(model, num_microbatches=steps, probe=False)(batch, loss_fn)
    loss.backward()
    return flat_gradient(model), loss.detach()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10])  # 10 rows: of even and ragged parts; of 10, four weigh nothing
@pytest.mark.parametrize("way", [gradient_of, split_gradient_of])
class TestGradient:
    @pytest.mark.parametrize("loss_fn", WEIGHED)
    def test_mean_and_sum_have_the_gradient_of_the_whole_batch(self, loss_fn, way, steps):
        model = make_model()
        whole = classify(model, make_batch())
        whole.backward()
        expected = flat_gradient(model), whole.detach()
        torch.testing.assert_close(way(loss_fn, make_batch(), steps), expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.filterwarnings("ignore::memkit.MemkitWarning")
    def test_a_plain_mean_has_another(self, way, steps):
        """Negative control: without its count, a mean over valid tokens weighs rows."""
        (plain, _), (counted, _) = (way(each, make_batch(), steps) for each in (classify, of_mean))
        differs = not torch.allclose(plain, counted, rtol=1e-6)
        assert differs == (steps > 1)


class TestOutputs:
    def step_of(self, capacity, **settings):
        def loss_fn(model, batch):
            if len(batch[0]) > capacity:
                out_of_memory()
            logits = model(batch[0])
            outputs = {"rows": batch[0][:, 0], "more": (logits, "text", None)}
            return mk.Loss(mean=F.cross_entropy(logits, batch[1]), count=num_valid(batch), outputs=outputs)

        return loss_fn

    def check(self, outputs, sizes):
        assert [len(each["rows"]) for each in outputs] == list(sizes)
        torch.testing.assert_close(torch.cat([each["rows"] for each in outputs]), make_batch()[0][:, 0])
        for each in outputs:
            logits, *others = each["more"]
            assert not logits.requires_grad
            assert others == ["text", None]

    @pytest.mark.parametrize("capacity", [10, 4])
    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_of_a_step_in_order_also_after_an_out_of_memory(self, steps, capacity):
        model = make_model()
        trainer = trainer_of(model, accumulation_steps=steps)
        result = trainer.train_step(make_batch(), self.step_of(capacity))
        self.check(result.outputs, result.sizes)
        assert (result.num_ooms > 0) == (capacity * steps < 10)

    def test_of_a_step_with_on_oom_raise(self):
        model = make_model()
        trainer = trainer_of(model, accumulation_steps=3, on_oom="raise")
        result = trainer.train_step(make_batch(), self.step_of(10))
        self.check(result.outputs, result.sizes)
        assert all(each.value.grad_fn is None for each in result.losses)

    @pytest.mark.parametrize("capacity", [10, 4])
    def test_of_a_split_loss(self, capacity):
        split = mk.SplitLoss(make_model(), num_microbatches=2)
        assert split.outputs == ()
        split(make_batch(), self.step_of(capacity)).backward()
        self.check(split.outputs, split.sizes)
        assert (split.num_ooms > 0) == (capacity == 4)
        with torch.no_grad():
            split(make_batch(), self.step_of(10))
        self.check(split.outputs, (10,))
        split(make_batch(), lambda model, batch: mean_square(model, batch[0]))
        assert split.outputs == (None,) * len(split.sizes)

    @pytest.mark.parametrize("is_frozen", [False, True])
    def test_dataclasses_among_them_keep_no_graph(self, is_frozen):
        model = make_model()
        kind = dataclasses.make_dataclass("Seen", ["logits", "name"], frozen=is_frozen)

        def loss_fn(model, batch):
            logits = model(batch[0])
            seen = [kind(logits, "text"), types.MappingProxyType({"logits": logits})]
            return mk.Loss(mean=logits.square().mean(), count=len(logits), outputs=seen)

        result = trainer_of(model, accumulation_steps=2).train_step(make_batch(), loss_fn)
        for seen, mapping in result.outputs:
            assert [type(seen), seen.name, type(mapping)] == [kind, "text", types.MappingProxyType]
            assert [seen.logits.requires_grad, mapping["logits"].requires_grad] == [False, False]
            torch.testing.assert_close(seen.logits, mapping["logits"])

    def test_of_plain_losses_none(self):
        model = make_model()
        trainer = trainer_of(model, accumulation_steps=2)
        result = trainer.train_step(make_batch(), of_sum)
        assert result.outputs == (None, None)

    def test_an_estimate_holds_them_as_a_step_does(self):
        """The logits of each micro-batch are there until the step is over."""
        model, batch = nn.Linear(8, 4096), torch.randn(16, 8)

        def peak_bytes(outputs, steps):
            def loss_fn(model, batch):
                logits = model(batch)
                return mk.Loss(mean=logits.mean(), outputs=logits if outputs else None)

            return mk.estimate_memory_usage(model, batch, loss_fn, optimizer="sgd", accumulation_steps=steps).peak_bytes

        logits_bytes = 16 * 4096 * 4
        for steps in (1, 2, 4):
            more = peak_bytes(outputs=True, steps=steps) - peak_bytes(outputs=False, steps=steps)
            assert (steps - 1) * logits_bytes <= more <= steps * logits_bytes


def test_passes_existing_values_on():
    loss = mk.Loss(sum=SCALAR, count=2)
    assert read_loss(loss, call="loss_fn") is loss
    assert read_loss(SCALAR, call="loss_fn").mean is SCALAR


@pytest.mark.parametrize("fn", [F.mse_loss, F.smooth_l1_loss, F.l1_loss])
def test_a_detached_loss_holds_no_more_than_its_number(fn):
    """On a CPU, the result of `mse_loss` has the storage of all its elements."""
    x = torch.randn(1000, requires_grad=True)
    loss = fn(x, torch.zeros(1000))
    found = read_loss(loss, call="loss_fn(model, batch)").detached(1)
    assert found.mean.untyped_storage().nbytes() == found.mean.nbytes
    assert found.mean == loss
