"""Out-of-memory invariance: after any fault the run ends bit for bit where an undisturbed run with those sizes ends."""

import copy
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from memkit._machine import random_state
from memkit._recovery.plan import Plan
from tests.helpers import assert_refused, assert_same, gradients, is_same, one_in, one_in_product
from tests.toys import out_of_memory
from tests.train.faults import MODELS, OPTIMIZERS, FailingOperator

ROWS, STEPS, ACCUMULATION = 13, 3, 2


def make(model_name, optimizer_name):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = MODELS[model_name]()
    generator = torch.Generator().manual_seed(7)
    batches = [
        (torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)) for _ in range(STEPS)
    ]
    return model, OPTIMIZERS[optimizer_name](model.parameters()), batches


def loss_fn(model, micro):
    x, y = micro
    return F.mse_loss(model(x + 0.01 * np.random.normal() + 0.01 * random.random()), y)


def final_state(model, optimizer):
    randomness = random_state.capture().state_dict()
    randomness["numpy"] = randomness["numpy"][1:]  # the first is the generator's name
    return dict(model.state_dict()), optimizer.state_dict(), randomness


def recovered(model_name, optimizer_name, *places, on_oom="exact"):
    model, optimizer, batches = make(model_name, optimizer_name)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=ACCUMULATION, max_grad_norm=0.5, on_oom=on_oom, probe=False
    )
    with FailingOperator(*places) as fault:
        results = [trainer.train_step(batch, loss_fn) for batch in batches]
    assert all(result.stepped for result in results)
    assert sum(sum(result.sizes) for result in results) == STEPS * ROWS
    return final_state(model, optimizer), [result.sizes for result in results], fault, results


def undisturbed(model_name, optimizer_name, sizes):
    """The same sizes, in a plain loop without any wrapper, under the same kind of mode."""
    model, optimizer, batches = make(model_name, optimizer_name)
    accumulator = mk.GradientAccumulator(optimizer, max_grad_norm=0.5)
    with FailingOperator():
        for (x, y), parts in zip(batches, sizes, strict=True):
            accumulator.expect(ROWS)
            for micro in zip(x.split(parts), y.split(parts), strict=True):
                accumulator.backward(loss_fn(model, micro), count=len(micro[0]))
            accumulator.flush()
    return final_state(model, optimizer)


FEW_PAIRS = {("mlp", "sgd"), ("conv", "adamw")}


def places_to_fail(model_name, optimizer_name, num_places):
    """Spread over every operator of the first step and the second, optimizer steps of the first two included."""
    num_operators = recovered(model_name, optimizer_name)[2].num_operators
    chance = random.Random(model_name + optimizer_name)
    return sorted(chance.sample(range(1, 2 * num_operators // 3), num_places))


@pytest.mark.parametrize(
    ("model_name", "optimizer_name"),
    [
        pytest.param(*pair, marks=[] if pair in FEW_PAIRS else [pytest.mark.slow])
        for pair in itertools.product(MODELS, OPTIMIZERS)
    ],
)
def test_fault_anywhere_changes_only_sizes(model_name, optimizer_name):
    """12 places each: forward, backward, clipping, the first two optimizer steps, and the bookkeeping between."""
    references = {}
    survived = 0
    for place in places_to_fail(model_name, optimizer_name, 12):
        state, sizes, fault, _ = recovered(model_name, optimizer_name, place)
        assert fault.num_failures == 1
        survived += 1
        key = str(sizes)
        if key not in references:
            references[key] = undisturbed(model_name, optimizer_name, sizes)
        torch.testing.assert_close(state, references[key], rtol=0, atol=0, msg=f"fault at operator {place}")
    assert survived == 12
    assert len(references) > 1 or model_name == "transformer"  # some changed the sizes; blocks ran again instead


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_a_fault_at_every_operator(model_name, optimizer_name):
    """Of all three steps: forward, backward, clipping, the optimizer, and the bookkeeping between."""
    references = {}
    num_operators = recovered(model_name, optimizer_name)[2].num_operators
    for place in range(1, num_operators + 1):
        state, sizes, fault, _ = recovered(model_name, optimizer_name, place)
        assert fault.num_failures == 1
        if str(sizes) not in references:
            references[str(sizes)] = undisturbed(model_name, optimizer_name, sizes)
        torch.testing.assert_close(state, references[str(sizes)], rtol=0, atol=0, msg=f"fault at operator {place}")
    assert num_operators > 200


@pytest.mark.parametrize("model_name", one_in(3, MODELS))
def test_two_faults_in_one_run(model_name):
    num_operators = recovered(model_name, "adamw")[2].num_operators
    places = [num_operators // 20, num_operators // 2]
    state, sizes, fault, _ = recovered(model_name, "adamw", *places)
    assert fault.num_failures == 2
    assert_same(state, undisturbed(model_name, "adamw", sizes))


def test_without_rollback_the_run_ends_elsewhere(monkeypatch):
    """Negative control: the same recovery without putting random state and buffers back."""
    from memkit._recovery import snapshot

    place = 25  # in the second half of the first forward: randomness has been drawn
    state, sizes, *_ = recovered("conv", "adamw", place)
    assert is_same(state, undisturbed("conv", "adamw", sizes))
    monkeypatch.setattr(snapshot.Rollback, "restore", lambda self: None)
    state, sizes, *_ = recovered("conv", "adamw", place)
    assert not is_same(state, undisturbed("conv", "adamw", sizes))


class Steps:
    """Ways to train on a batch within ``except``, in which memory runs out once."""

    def __init__(self):
        self.model, self.optimizer, (self.batch, *_) = make("mlp", "sgd")
        self.errors = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]

    def fail_once(self, *_):
        if self.errors:
            raise self.errors.pop()

    def trainer(self, **settings):
        return mk.MemoryEfficientTrainingWrapper(self.model, self.optimizer, probe=False, **settings)

    def loss(self, model, micro):
        self.fail_once()
        return loss_fn(model, micro)

    def in_the_loss(self):
        self.trainer().train_step(self.batch, self.loss)

    def in_a_loop(self):
        trainer = self.trainer()
        for attempt in trainer.microbatches(self.batch):
            with attempt as micro:
                trainer.backward(self.loss(self.model, micro))
        trainer.step()

    def in_a_step_hook(self):
        self.optimizer.register_step_pre_hook(self.fail_once)
        with pytest.raises(mk.errors.MemkitOutOfMemoryError):
            self.trainer().train_step(self.batch, loss_fn)

    def in_the_check_of_a_split(self):
        self.trainer(accumulation_steps=2).train_step(self.batch, self.loss)

    def after_the_step(self):
        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        schedule.step = self.fail_once
        with pytest.raises(mk.errors.MemkitOutOfMemoryError):
            self.trainer(scheduler=schedule).train_step(self.batch, loss_fn)


@pytest.mark.filterwarnings("ignore::memkit.errors.MemkitWarning")
@pytest.mark.parametrize("way", [each for each in vars(Steps) if each.startswith(("in_", "after_"))])
def test_an_error_handled_around_a_step_keeps_its_frames(way):
    def read():
        payload = [1]
        raise KeyError(payload.pop())

    steps = Steps()
    try:
        read()
    except KeyError as error:
        handled, trace = error, error.__traceback__
        getattr(steps, way)()
    assert handled.__traceback__ is trace
    assert trace.tb_next.tb_frame.f_locals == {"payload": []}
    assert not steps.errors


def test_on_oom_raise_propagates():
    with pytest.raises(torch.OutOfMemoryError, match="planted fault"):
        recovered("mlp", "sgd", 20, on_oom="raise")


def test_impossible_step_raises_typed_error():
    model, optimizer, batches = make("mlp", "sgd")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)

    with pytest.raises(mk.MemkitOutOfMemoryError, match=r"micro-batch of 1 rows: OutOfMemoryError.*use a lower prec"):
        trainer.train_step(batches[0], out_of_memory)  # it has no blocks to recompute
    assert_same(dict(model.state_dict()), before)
    assert trainer.train_step(batches[0], loss_fn).stepped  # and the loop may go on


def test_final_error_names_what_may_still_help():
    def make_blocks():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)])

    def refused(model, **settings):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer,
            warnings.catch_warnings(),
            pytest.raises(mk.MemkitOutOfMemoryError) as caught,
        ):
            warnings.simplefilter("ignore", mk.MemkitWarning)
            trainer.train_step((torch.ones(2, 4), torch.ones(2, 4)), out_of_memory)
        return str(caught.value)

    assert "checkpoint='auto'" in refused(make_blocks(), probe=False)  # it was not checked, so recovery did not try it
    assert "checkpoint='auto'" not in refused(make_blocks(), checkpoint="auto")


def test_batch_that_cannot_be_cut_is_recovered_whole():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)])
    twin = copy.deepcopy(model)
    graph = {"x": torch.randn(6, 4), "edges": torch.randint(6, (2, 20))}
    num_faults = 1

    def graph_loss(model, graph):
        nonlocal num_faults
        x, (sources, targets) = graph["x"], graph["edges"]
        output = model(x.index_add(0, targets, x[sources]))
        if num_faults:
            num_faults -= 1
            out_of_memory(model, graph)
        return output.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
        with pytest.warns(mk.MemkitWarning) as told:
            result = trainer.train_step(graph, graph_loss)
        texts = [str(each.message) for each in told]
        assert result.num_ooms == 1
        assert result.num_microbatches == 1
        assert "cannot be cut: tensors with [2, 6] rows" in texts[0]
        assert any("out of memory with the whole batch" in each for each in texts[1:])
        num_faults = 10
        with (
            pytest.raises(mk.MemkitOutOfMemoryError, match=r"the whole batch.*cannot be cut: tensors with.*split_fn="),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", mk.MemkitWarning)
            trainer.train_step(graph, graph_loss)
    num_faults = 0
    graph_loss(twin, graph).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_fitting_size_is_remembered_and_grows_back():
    model, optimizer, batches = make("mlp", "sgd")
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
    capacity = 5

    def limited(model, micro):
        if len(micro[0]) > capacity:
            out_of_memory()
        return loss_fn(model, micro)

    first = trainer.train_step(batches[0], limited)
    assert first.num_ooms == 1  # 13 rows fail; 6 at most, so nearly equal parts
    assert first.sizes == (5, 4, 4)
    again = trainer.train_step(batches[1], limited)
    assert again.num_ooms == 0
    grown = [trainer.train_step(batches[0], limited) for _ in range(30)]
    assert max(max(result.sizes) for result in grown) == 5
    assert sum(result.num_ooms for result in grown) <= 1
    capacity = 100
    sizes = [max(trainer.train_step(batches[0], limited).sizes) for _ in range(150)]
    assert sizes[-1] == 13

    resumed = mk.MemoryEfficientTrainingWrapper(model, optimizer)
    resumed.load_state_dict(trainer.state_dict())
    capacity = 5
    assert resumed._driver.sizes.state_dict() == trainer._driver.sizes.state_dict()


def kept(trainer, model, batch, capacity):
    """The docs' kept loop; return how many rows its own figures count."""
    num_rows = 0
    for attempt in trainer.microbatches(batch):
        with attempt as (x, y):
            if len(x) > capacity:
                out_of_memory()
            trainer.backward(F.mse_loss(model(x), y))
        if attempt.counts:
            num_rows += len(x)
    return num_rows


def test_own_loop_counts_valid_attempts_only():
    """Runs that failed, and looks, end their block without an error."""
    model, optimizer, batches = make("mlp", "adamw")
    with mk.MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
        for batch in batches:
            assert kept(trainer, model, batch, capacity=5) == ROWS
            assert trainer.step()


def test_discarded_batch_leaves_no_trace():
    states = []
    for is_interrupted in (False, True):
        model, optimizer, batches = make("conv", "adamw")
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
            if is_interrupted:
                kept(trainer, model, batches[0], ROWS)  # and here Ctrl-C came, before step()
                with pytest.raises(mk.errors.StateError, match=r"or trainer\.discard\(\) to drop"):
                    kept(trainer, model, batches[1], ROWS)
                trainer.discard()
            kept(trainer, model, batches[1], ROWS)
            trainer.step()
        states.append(final_state(model, optimizer))
    assert_same(states[1], states[0])


class Attention(torch.nn.Module):
    """The bias of its keys has a gradient of zero, so that a look must tell rounding from a difference."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(3, 8) for _ in range(3))
        self.o = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)).mean(1)


@pytest.mark.slow
def test_out_of_memory_in_check_is_not_a_difference():
    said = []
    for place in range(1, 700, 20):
        torch.manual_seed(0)
        model = Attention().double()
        x = torch.randn(9, 5, 3, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters())
        with (
            warnings.catch_warnings(record=True) as caught,
            mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=3) as trainer,
            FailingOperator(place),
        ):
            warnings.simplefilter("always")
            trainer.train_step(x, lambda model, x: (model(x) - x[:, 0, :1]).square().mean())
        said += [f"{place}: {each.message}" for each in caught if "changes the gradient" in str(each.message)]
    assert said == []


def test_uncuttable_batch_error_mentions_out_of_memory():
    model = torch.nn.Linear(4, 1)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), split_fn=lambda batch, _: None
    )

    def too_large(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(mk.MemkitOutOfMemoryError, match="and a batch that cannot be cut") as caught:
        trainer.train_step(torch.ones(8, 4), too_large)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    whole = trainer.train_step(torch.ones(8, 4), lambda model, batch: mk.Loss(mean=model(batch).mean(), count=8))
    assert whole.stepped


class Mixing(nn.Module):
    """Its rows depend on each other, by their standard deviation, as in StyleGAN2's discriminator."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(9, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(torch.cat([x, x.std(0, unbiased=False).mean().expand(len(x), 1)], 1))


class FailsOnce(TorchDispatchMode):
    """Runs out of memory at one operator."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number -= 1
        if self.number == 0:
            out_of_memory()
        return func(*args, **(kwargs or {}))


def test_memory_that_runs_out_before_the_first_forward_is_tried_again():
    """There the wrapper cuts the batch, and looks at its content."""
    x, begun = torch.randn(8, 4, dtype=torch.float64), []

    def step(number):
        begun.clear()
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)

        def loss_fn(model, x):
            begun.append(mode.number)
            return model(x).square().mean()

        with FailsOnce(number) as mode:
            trainer.train_step(x, loss_fn)
        return list(model.parameters())

    plain = step(0)
    num_before = -begun[0]
    assert num_before > 3
    for number in range(1, num_before + 1):
        assert_same(step(number), plain)
        assert begun[0] < 0  # it was before the forward


def test_a_look_at_gradients_that_runs_out_of_memory_undoes_the_step():
    """It may not run twice: it may have changed the gradients."""

    def train(fails_at):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        calls = itertools.count(1)

        def clip(model):
            if next(calls) == fails_at:
                out_of_memory()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, on_gradients=clip)
        for x in torch.randn(3, 8, 4, dtype=torch.float64):
            try:
                trainer.train_step(x, lambda model, x: model(x).square().mean())
            except mk.MemkitOutOfMemoryError as error:
                errors.append(error)
                trainer.train_step(x, lambda model, x: model(x).square().mean())
        return [each.detach().clone() for each in model.state_dict().values()], next(calls)

    errors: list[mk.MemkitOutOfMemoryError] = []
    (plain, num_plain), (hit, num_hit) = train(0), train(2)
    assert num_hit == num_plain + 1
    assert [type(each.__cause__) for each in errors] == [torch.OutOfMemoryError]
    assert "MemoryEfficientTrainingWrapper(on_gradients=...)" in str(errors[0])
    torch.testing.assert_close(hit, plain, rtol=0, atol=0)


class TestCutThatCouldNotBeChecked:
    """Memory runs out in the check of a cut, and later in a part; the next check finds that rows are mixed."""

    @staticmethod
    def run(runs_out):
        torch.manual_seed(0)
        model, x, found = Mixing().double(), torch.randn(8, 4, dtype=torch.float64), []
        model(x).square().mean().backward()
        right = gradients(model)
        model.zero_grad()

        def loss_fn(model, x):
            loss = model(x).square().mean()
            if runs_out(x):
                out_of_memory()
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, optimizer, on_gradients=lambda model: found.extend(gradients(model))
        )
        result = trainer.train_step(x, loss_fn)
        assert_same(found, right)
        return result.sizes

    @pytest.mark.parametrize("num_ooms", [9, 10, 11])
    def test_is_undone_if_memory_comes_back(self, num_ooms):
        calls = itertools.count(1)
        assert self.run(lambda _: next(calls) <= num_ooms) == (8,)

    def test_is_refused_if_memory_stays_short(self):
        def runs_out(x):
            offloads = _top_saved_tensors_default_hooks(True) is not None
            return len(x) > (4 if offloads else 1)

        assert_refused(lambda: self.run(runs_out), mk.MemkitOutOfMemoryError, "splitting the batch (could not|changes)")


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (torch.OutOfMemoryError, mk.MemkitOutOfMemoryError, "AveragedModel.update_parameters may be half done, the st"),
        (ValueError, ValueError, "had stepped before AveragedModel.update_parameters: do not train the batch again"),
    ],
)
def test_a_failure_after_the_step_says_that_the_step_is_done(kind, error, told):
    model, optimizer, batches = make("mlp", "sgd")
    updates = itertools.count(1)

    def failing(average, parameter, _):
        if next(updates) == 2:
            raise kind("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return 0.9 * average + 0.1 * parameter

    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=failing)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, average=average) as trainer:
        trainer.train_step(batches[0], loss_fn)  # the first update copies
        with pytest.raises(error) as caught:
            trainer.train_step(batches[1], loss_fn)
        assert told in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert trainer.num_steps == 2
        assert trainer.train_step(batches[2], loss_fn).stepped


@pytest.mark.parametrize("most_rows", [2, 4])
def test_the_batch_of_a_failed_attempt_requires_no_gradient_again(most_rows):
    """Forces of molecules, residuals of equations: `loss_fn` differentiates by the batch, which must be a leaf."""

    def train(most_rows):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def loss_fn(model, batch):
            x, forces = batch
            x.requires_grad_()
            assert x.is_leaf
            if len(x) > most_rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            energy = model(x)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy.square().mean() + (slope - forces).square().sum(1).mean()

        batch = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
        with mk.MemoryEfficientTrainingWrapper(net, torch.optim.SGD(net.parameters(), lr=0.1)) as trainer:
            trainer.train_step(batch, loss_fn)
        return list(net.parameters())

    torch.testing.assert_close(train(most_rows), train(8))


class _OnlyTrained(nn.Module):
    """Statistics as frozen parameters, and `parameters` that returns those for the optimizer, as in MAML-Pytorch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.mean, self.var = (
            nn.Parameter(make(3, dtype=torch.float64), requires_grad=False) for make in (torch.zeros, torch.ones)
        )

    def parameters(self, recurse=True):
        return self.layer.parameters(recurse)

    def forward(self, tasks):
        norm = nn.functional.batch_norm
        return torch.stack([norm(self.layer(x), self.mean, self.var, training=True) for x in tasks])


@pytest.mark.filterwarnings("ignore:.*out of memory:memkit.MemkitWarning")
@pytest.mark.parametrize("settings", [{}, {"memory": "1GiB"}], ids=["recovery", "trials"])
def test_frozen_parameters_that_a_model_does_not_list_are_restored(settings):
    def train(num_failures, **settings):
        torch.manual_seed(0)
        model, left = _OnlyTrained(), iter(range(num_failures))

        def loss_fn(model, x):
            loss = model(x).pow(3).mean()
            if next(left, None) is not None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss

        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), **settings)
        trainer.train_step(torch.rand(4, 6, 4, dtype=torch.float64), loss_fn)
        return dict(model.named_parameters())

    torch.testing.assert_close(train(0 if settings else 1, **settings), train(0), rtol=1e-12, atol=1e-12)


class _Between(nn.Module):
    """Something that is another in the middle of a forward, and as before at its end."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
        self.kind, self.depth, self.auxiliary, self.seen = kind, 1, [], {}

    def forward(self, x):
        if self.kind == "a count":
            self.depth += 1
        elif self.kind == "a dict":
            self.seen["calls"] = self.seen.get("calls", 0) + 1
        h = self.first(x).tanh()
        self.auxiliary.append(h.square().mean())
        y = self.last(h) * (self.depth + self.seen.get("calls", 0))
        if self.fails():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.kind == "a count":
            self.depth -= 1
        self.seen.pop("calls", None)
        return y

    def fails(self):
        return next(FAILURES["left"], None) is not None

    def loss(self, x):
        """Empty the list, as losses with the auxiliary ones of experts do."""
        loss = self(x).square().mean() + sum(self.auxiliary)
        self.auxiliary.clear()
        return loss


FAILURES = {"left": iter(())}


@pytest.mark.filterwarnings("ignore:.*out of memory:memkit.MemkitWarning")
@pytest.mark.parametrize(
    ("accumulation_steps", "kind", "step"), one_in_product(2, [1, 2], ["a count", "a dict", "a list"], [1, 2, 3])
)
def test_what_a_forward_puts_back_is_put_back_for_it(kind, step, accumulation_steps):
    def train(failing):
        torch.manual_seed(0)
        model = _Between(kind)
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=accumulation_steps
        )
        for number in range(1, 4):
            FAILURES["left"] = iter([1] if number == failing else [])
            trainer.train_step(torch.rand(8, 4, dtype=torch.float64), _Between.loss)
        assert (model.depth, model.auxiliary, model.seen) == (1, [], {})
        return model.state_dict()

    torch.testing.assert_close(train(step), train(None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_evaluation_puts_back_what_its_forward_puts_back(failing):
    torch.manual_seed(0)
    model, x = _Between("a count"), torch.rand(8, 4, dtype=torch.float64)
    FAILURES["left"] = iter(())
    right = model(x).detach()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1))
    with trainer.evaluation() as evaluate:
        for number in range(1, 4):
            FAILURES["left"] = iter([1] if number == failing else [])
            torch.testing.assert_close(evaluate(x, lambda model, rows: model(rows)), right)


def counted_loss(model, micro):
    x, y, valid = micro
    return mk.Loss(mean=(model(x) - y).square()[valid].mean(), count=valid.sum())


def step_with_counts(step, *places):
    torch.manual_seed(1)
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(ROWS, 6).double(), torch.randn(ROWS, 1).double(), torch.arange(ROWS) % 4 > 0
    with FailingOperator(*places) as fault:
        step(model, optimizer, batch)
    return model.weight.detach(), fault


def test_a_count_whose_reading_fails_is_no_bad_count():
    """An out-of-memory is a RuntimeError, too; kernels that ran before may report it when a number is read."""

    def step_plainly(model, optimizer, batch):
        counted_loss(model, batch).average().backward()
        optimizer.step()

    def step(model, optimizer, batch):
        mk.MemoryEfficientTrainingWrapper(model, optimizer).train_step(batch, counted_loss)

    plain, _ = step_with_counts(step_plainly)
    _, fault = step_with_counts(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*out of memory", mk.MemkitWarning)
        for place in range(1, fault.num_operators + 1):
            weight, again = step_with_counts(step, place)
            torch.testing.assert_close(weight, plain)
            assert again.num_failures == 1


def test_memory_that_runs_out_between_parts_is_a_typed_error(monkeypatch):
    model, optimizer, batches = make("mlp", "sgd")
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=3, probe=False)
    advance, num_calls = Plan.advance, itertools.count()

    def failing(plan):
        if next(num_calls) == 1:
            raise MemoryError
        return advance(plan)

    monkeypatch.setattr(Plan, "advance", failing)
    with pytest.raises(
        mk.MemkitOutOfMemoryError, match="outside of the micro-batches, with 2 of 3 done: MemoryError"
    ) as e:
        trainer.train_step(batches[0], loss_fn)
    assert isinstance(e.value.__cause__, MemoryError)
    assert trainer.train_step(batches[1], loss_fn).stepped
