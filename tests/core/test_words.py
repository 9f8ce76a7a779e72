"""Calls in other libraries' words get the corrected call as an error, and correct calls are unaffected."""

import copy
import inspect
import pickle

import pytest
import torch

import memkit as mk
from memkit._core.foreign import IDEAS, VALUES
from memkit._core.words import guided


@guided(words={"steps": "grad_accum", "precision='bf16'": "amp", "move the model first: model.to(device)": "device"})
def train(model, steps=1, *, precision=None):
    return model, steps, precision


@guided()
def takes_two(first, second):
    return first, second


@guided()
def takes_any(step, /, **objects):
    return step, objects


@guided(
    words={"it goes into run(number=3)": "epochs"},
    absent={"loop.run()": "fit", "trainer.model(x)": "()"},
    methods={"step": {}, "run": {"number": "epochs"}},
)
class Trainer:
    """A class whose constructor and method are guided."""

    def __init__(self, model, *, steps=1):
        self.model = model
        self.steps = steps

    @property
    def broken(self):
        return self.model.no_such_attribute

    def step(self, batch, *, count=None):
        return batch, count

    def run(self, number=1):
        return number

    def fails_inside(self):
        raise TypeError("the user's own")


@pytest.mark.parametrize(
    ("call", "got", "corrected"),
    [
        (lambda: train("net", grad_accum=4), "grad_accum=4", "write train('net', steps=4)"),
        (lambda: train(object(), amp=True), "amp=True", "write train(model, precision='bf16')"),
        (lambda: train(1, device="cuda"), "device='cuda'", "move the model first: model.to(device); write train(1)"),
        (lambda: train(), "no model", "write train(model)"),
        (lambda: train(1, 2, "bf16"), "one argument too many", "write train(1, 2, precision='bf16')"),
        (lambda: train(1, model=2), "model twice", "write train(1)"),
        (lambda: train(1, presision="bf16"), "presision='bf16'", "write train(1, precision='bf16')"),
        (lambda: train(1, zebra=object()), "zebra=zebra", "there is no zebra; write train(1)"),
        (
            lambda: train(grad_accum=2, amp=1),
            "grad_accum=2, amp=1, no model",
            "write train(model, steps=2, precision='bf16')",
        ),
        (lambda: train(steps=4), "no model", "write train(model, steps=4)"),
        (lambda: takes_two(first=1), "no second", "write takes_two(first=1, second=second)"),
        (lambda: takes_any(1, 2), "one argument too many", "write takes_any(1)"),
        (lambda: takes_any(name=1), "no step", "write takes_any(step, name=1)"),
        (lambda: takes_any(step=1, name=2), "step by name", "write takes_any(1, name=2)"),
        (lambda: Trainer("net").run(epochs=3), "epochs=3", "write run(number=3)"),
        (lambda: Trainer("net", epochs=3), "epochs=3", "it goes into run(number=3); write Trainer('net')"),
        (lambda: Trainer(), "no model", "write Trainer(model)"),
        (lambda: Trainer("net", 4), "one argument too many", "write Trainer('net', steps=4)"),
        (lambda: Trainer("net").step(), "no batch", "write step(batch)"),
        (lambda: Trainer("net").step([1, 2], n=3), "n=3", "there is no n; write step([1, 2])"),
    ],
)
def test_a_wrong_call_is_answered_with_the_corrected_one(call, got, corrected):
    with pytest.raises(mk.errors.InputTypeError) as caught:
        call()
    assert (caught.value.got, caught.value.fix) == (got, corrected)
    assert str(caught.value).endswith(corrected)
    assert caught.value.__suppress_context__


@guided(absent={"loop.run()": "fit"}, methods=("run",))
class Loop:
    def __init__(self, model, *, accumulation_steps=1, precision=None, val_loader=None):
        self.model = model

    def run(self, num_epochs=1): ...


@pytest.mark.parametrize(
    ("call", "corrected"),
    [
        (lambda: Loop("net", accumulate_grad_batches=4), "write Loop('net', accumulation_steps=4)"),
        (lambda: Loop("net", fp16=True), "write Loop('net', precision='fp16-mixed')"),
        (lambda: Loop("net", eval_dataloader=None), "write Loop('net', val_loader=None)"),
        (lambda: Loop("net", budget=4), "there is no budget; write Loop('net')"),  # no parameter of that idea
        (lambda: Loop("net").run(max_epochs=4), "write run(num_epochs=4)"),
        (
            lambda: Loop("net").run(grad_accum=4),
            "pass it to the constructor, Loop(..., accumulation_steps=4); write run()",
        ),
        (
            lambda: Loop("net").run(amp=True),
            "pass it to the constructor, Loop(..., precision='bf16-mixed'); write run()",
        ),
    ],
)
def test_every_owner_of_a_parameter_knows_its_synonyms(call, corrected):
    with pytest.raises(mk.errors.InputTypeError) as caught:
        call()
    assert caught.value.fix == corrected


def test_the_catalog_names_each_idea_once():
    values = [word for words in VALUES.values() for word in words.split()]
    assert len(values) == len(set(values))
    for idea in IDEAS:
        assert len(idea) > 1
        assert not any(idea < other for other in IDEAS)


def test_the_corrected_calls_work():
    assert train("net", steps=4) == ("net", 4, None)
    assert train(1, 2, precision="bf16") == (1, 2, "bf16")
    assert Trainer("net", steps=4).step([1, 2]) == ([1, 2], None)


def test_inner_error_passes_unchanged():
    with pytest.raises(TypeError, match="the user's own"):
        Trainer("net").fails_inside()

    @guided()
    def calls_wrongly(value):
        return len(value)

    with pytest.raises(TypeError, match="has no len") as caught:
        calls_wrongly(3)
    assert not isinstance(caught.value, mk.MemkitError)


def test_absent_attributes_name_their_counterpart():
    trainer = Trainer("net")
    with pytest.raises(mk.errors.AbsentError, match=r"Way out: write loop\.run\(\)"):
        trainer.fit(3)
    with pytest.raises(mk.errors.AbsentError, match="Way out: write step"):
        trainer.stepp(3)
    with pytest.raises(mk.errors.InputTypeError, match=r"Way out: write trainer\.model\(x\)"):
        trainer(3)
    assert not hasattr(trainer, "fit")
    assert getattr(trainer, "eval", None) is None


def test_failing_property_is_not_reported_missing():
    with pytest.raises(AttributeError) as caught:
        _ = Trainer("net").broken
    assert not isinstance(caught.value, mk.errors.AbsentError)


def test_guided_objects_are_copied_pickled_and_inspected_as_before():
    trainer = Trainer("net", steps=2)
    for again in (copy.copy(trainer), copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert (again.model, again.steps) == ("net", 2)
    assert str(inspect.signature(Trainer)) == "(model, *, steps=1)"
    assert pickle.loads(pickle.dumps(train)) is train


@guided(
    words={"steps": "n", "bind {key}": ""},
    methods={"__call__": {"rows go by position, not as {key}": ""}},
)
class Runner:
    def __init__(self, fn, *, steps=1):
        self.fn, self.steps = fn, steps

    def __call__(self, *rows, scale=1):
        return [self.fn(each) * scale for each in rows]


@guided(words={"size": "n", "write run(rows.T)": "axis", "bind {key}": ""})
def run(fn, *rows, size=1):
    return fn, rows, size


@guided(words={"{'c': 1}": "c"}, rewrite={"pair": lambda _: "pair(a, b)"})
def pair(a, b): ...


@pytest.mark.parametrize(
    ("call", "corrected"),
    [
        (lambda: run(len, [1], [2], n=3), "write run(fn, *rows, size=3)"),
        (lambda: run(len, [1], mask=2), "bind mask; write run(fn, *rows)"),
        (lambda: run(len, [1], axis=2, mask=1), "write run(rows.T)"),
        (lambda: run(), "write run(fn)"),
        (lambda: pair(1, 2, 3), "write pair(a, b)"),
        (lambda: pair(1, 2, c=3), "{'c': 1}; write pair(1, 2)"),  # braces of a dictionary stay
        (lambda: Runner(len, mask=1), "bind mask; write Runner(fn)"),
        (lambda: Runner(len)([1], mask=1), "rows go by position, not as mask; write Runner(...)(*rows)"),
        (lambda: Runner(len)([1], [2], scal=2), "write Runner(...)(*rows, scale=2)"),
    ],
)
def test_series_of_arguments_words_of_a_method_and_whole_calls(call, corrected):
    with pytest.raises(mk.errors.InputTypeError) as caught:
        call()
    assert caught.value.fix == corrected


def test_class_without_public_names_suggests_calling():
    @guided(absent={"runner(x)": "fit"})
    class Only:
        def __call__(self): ...

    with pytest.raises(
        mk.errors.AbsentError, match=r"expected a call of the object itself. Way out: write runner\(x\)"
    ):
        Only().fit()


class Seeded:
    """A base whose constructor keeps a setting under the setting's name."""

    def __init__(self, seed):
        self.seed = seed


@guided(absent={"loop.run()": "fit"})
class Holder(Seeded):
    """A class that keeps one of its settings under a name of its own, and another one under the setting's."""

    def __init__(self, model, limit=1.0, *, kept=2, seed=0):
        super().__init__(seed)
        self._limit, self.kept = limit, kept

    @property
    def model(self):
        """The model."""


class OwnHolder(Holder):
    """A class of the user's that gives the name of a setting a meaning of its own."""

    def __init__(self):
        super().__init__("net")
        self.limit, self.color = 3, "red"


def test_setting_what_only_the_constructor_takes_is_refused():
    holder = Holder("net")
    with pytest.raises(mk.errors.AbsentError) as caught:
        holder.limit = 5.0
    assert caught.value.fix == "make a new one, Holder(model, limit=5.0)"
    assert "'limit', which would have no effect" in str(caught.value)
    with pytest.raises(mk.errors.AbsentError, match="expected one of model"):  # it is none to read, either
        _ = holder.limit
    assert not hasattr(holder, "limit")
    holder.kept, holder.color = 3, "red"
    assert vars(holder) == {"seed": 0, "_limit": 1.0, "kept": 3, "color": "red"}


def test_a_subclass_may_have_attributes_of_any_name():
    holder = OwnHolder()
    assert (holder.limit, holder.color) == (3, "red")
    assert copy.copy(holder).limit == 3
    with pytest.raises(mk.errors.AbsentError):
        _ = OwnHolder.__new__(OwnHolder).limit


def test_the_components_refuse_settings_that_they_would_not_read():
    model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
    for owner, name, value in (
        (trainer, "accumulation_steps", 4),
        (trainer, "max_grad_norm", 1.0),
        (mk.GradientAccumulator(optimizer), "max_grad_norm", 1.0),
        (mk.SplitLoss(model, num_microbatches=2), "num_microbatches", 4),
        (mk.MemoryEfficientTrainLoop(trainer, [x], lambda model, x: model(x).mean()), "validate_every", 3),
        (mk.MemoryManager("cpu"), "budget", "1GiB"),
        (mk.ChunkedProcessor(model, chunk_size=2), "chunk_size", 4),
    ):
        with pytest.raises(mk.errors.AbsentError, match=rf"make a new one, {type(owner).__name__}\(.*{name}={value!r}"):
            setattr(owner, name, value)
