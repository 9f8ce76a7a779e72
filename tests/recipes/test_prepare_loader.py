"""A plan for a loader holds for each of its batches, as real steps show, also where the largest is not the hardest."""

import contextlib
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import memkit as mk
from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitWarning
from memkit._tape.plan import SavedTensorPlan
from memkit.predict.plan.host import HostTimes
from memkit.recipes.planned_kinds import RehearsedBatches
from tests.allocations import trace_allocations
from tests.helpers import assert_refused


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


def loss_fn(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens(*shapes):
    return DataLoader([torch.randint(256, shape) for shape in shapes], batch_size=None)


# Many short rows are the largest batch; a single long one cannot be cut, and is the hardest then.
MANY_AND_LONG = ((64, 30), (8, 30), (64, 30), (1, 700), (20, 30))


def num_bytes(tensors) -> int:
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def real_peak(trainer, model, optimizer, batch) -> int:
    trainer.train_step(batch, loss_fn)
    state = [value for values in optimizer.state.values() for value in values.values()]
    there = num_bytes([*model.parameters(), *state, batch])
    return there + trace_allocations(lambda: trainer.train_step(batch, loss_fn)).peak


@pytest.mark.slow
def test_every_batch_fits_for_real():
    loader, model = tokens(*MANY_AND_LONG), Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    with mk.prepare(model, optimizer, loader, loss_fn, budget="5MiB") as trainer:
        plan = trainer.plan
        peaks = [real_peak(trainer, model, optimizer, batch) for batch in loader]
    assert max(peaks) <= plan.required_bytes <= plan.budget_bytes
    assert plan.is_split_exact
    assert plan.notes == (
        "Rehearsed with 4 of 4 kinds of batch: batch 0 of 5 is the largest, and 4 would not fit as they are.",
    )
    assert "<- chosen" in plan.explain()


@pytest.mark.slow
def test_a_plan_for_the_largest_batch_alone_does_not_suit_a_long_row(monkeypatch):
    """The naive way."""
    monkeypatch.setattr(HostTimes, "moving_seconds", lambda *_: 1.0)  # no offload, which would suit any row
    model = Reader()
    largest, long = (torch.randint(256, MANY_AND_LONG[number]) for number in (0, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    naive = mk.plan_training(model, largest, loss_fn, optimizer, budget="5MiB")
    settings = naive.wrapper_settings()
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **settings) as trainer:
        assert real_peak(trainer, model, optimizer, largest) <= naive.budget_bytes
        assert real_peak(trainer, model, optimizer, long) > naive.budget_bytes


def num_timed_calls(monkeypatch, batch):
    """Operator calls whose time was asked for while a plan was made."""
    calls, seconds = [], HostTimes.seconds
    with monkeypatch.context() as patch:
        patch.setattr(HostTimes, "seconds", lambda *args: calls.append(1) or seconds(*args))
        mk.plan_training(Reader(), batch, loss_fn, "sgd", budget="1GiB")
    return len(calls)


@pytest.mark.slow
def test_other_kinds_of_batch_are_rehearsed_without_timing_their_operators(monkeypatch):
    one = num_timed_calls(monkeypatch, tokens((4, 40)))
    assert num_timed_calls(monkeypatch, tokens((4, 40), (2, 30), (3, 20), (1, 50))) == one > 100


@pytest.mark.slow
def test_saved_tensors_are_treated_in_every_batch():
    loader, model = tokens((1, 700), (1, 30)), Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    with mk.prepare(model, optimizer, loader, loss_fn, budget="4500KiB", treat="tensors") as trainer:
        plan = trainer.plan
        peaks = [real_peak(trainer, model, optimizer, batch) for batch in loader]
    assert plan.saved_tensors is not None
    assert max(peaks) == peaks[0] <= plan.required_bytes <= plan.budget_bytes


class TwoWays(Reader):
    """Odd lengths run other operators, which save much."""

    def forward(self, tokens):
        if tokens.shape[1] % 2 == 0:
            return super().forward(tokens)
        x = self.embedding(tokens)
        for _ in range(18):
            x = x.sigmoid().tanh()
        return self.head(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*this forward is not the planned one")
def test_rejects_plan_not_suiting_all_kinds():
    """The largest batch fits with its tensors treated; by its operators nothing can be said of the other one."""
    model, loader = TwoWays(), tokens((1, 700), (1, 659))
    largest = mk.plan_training(model, loader.dataset[0], loss_fn, budget="4500KiB", treat="tensors")
    assert largest.saved_tensors is not None
    assert_refused(
        lambda: mk.plan_training(model, loader, loss_fn, budget="4500KiB", treat="tensors"),
        ConfigError,
        "No plan suits all batches",
    )


@pytest.mark.slow
def test_warns_of_unrehearsed_forward():
    """All kinds that the loader had are known; an odd length is none of them, and runs other operators."""
    model, loader = TwoWays(), tokens((1, 700), (1, 30))
    plan = mk.plan_training(model, loader, loss_fn, budget="4500KiB", treat="tensors").saved_tensors
    restored = SavedTensorPlan.from_dict(json.loads(json.dumps(plan.as_dict())))
    assert restored == plan
    assert restored.rehearsed == plan.rehearsed
    for each in (plan, restored):
        treated = mk.train.treat_saved_tensors(each)
        for batch in loader:
            with treated:
                loss_fn(model, batch)
        with pytest.warns(MemkitWarning, match="not the planned one.*Way out"), treated:
            loss_fn(model, torch.zeros(1, 31, dtype=torch.long))


class SmallReader(Reader):
    """Odd lengths run an operator more."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits.tanh() if tokens.shape[1] % 2 else logits


@pytest.mark.slow
def test_forwards_of_other_kinds_of_the_loader_are_no_news():
    """They run other operators than the largest batch; a plan without its rehearsals warns of the same batch."""
    model, loader = SmallReader(), tokens((1, 700), (1, 31))
    plan = mk.plan_training(model, loader, loss_fn, budget="4800KiB", treat="tensors").saved_tensors
    treated = mk.train.treat_saved_tensors(plan)
    for batch in (*loader, torch.zeros(1, 29, dtype=torch.long)):
        with treated:
            loss_fn(model, batch)
    without = mk.train.treat_saved_tensors(dataclasses.replace(plan, rehearsed=frozenset()))
    with pytest.warns(MemkitWarning, match="not the planned one"), without:
        loss_fn(model, loader.dataset[1])


@pytest.mark.parametrize("is_loop", [pytest.param(False, marks=pytest.mark.slow), True])
def test_warns_once_of_unrehearsed_batch(is_loop):
    """Also where it runs the operators of the others: a longer one takes more than the budget."""
    loader, model = tokens((1, 700), (1, 30)), Reader()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(length):
        batch = torch.zeros(1, length, dtype=torch.long)
        if not is_loop:
            trainer.train_step(batch, loss_fn)
            return
        for attempt in trainer.microbatches(batch):
            with attempt as micro:
                with trainer.autocast():
                    loss = loss_fn(model, micro)
                trainer.backward(loss)
        trainer.step()

    with mk.prepare(model, optimizer, loader, loss_fn, budget="1GiB") as trainer:
        step(700), step(30)
        with pytest.warns(MemkitWarning, match=r"\(1, 900\).*may take more memory than the budget.*Way out"):
            step(900)
        step(1000)


ONE = {"tokens": torch.zeros(8, 30, dtype=torch.long), "mask": torch.ones(8, 30)}


@pytest.mark.parametrize(
    ("batch", "is_told"),
    [
        (ONE, False),
        ({name: each[:3, :9] for name, each in ONE.items()}, False),
        ({name: each.repeat(2, 1) for name, each in ONE.items()}, True),
        ({"tokens": ONE["tokens"]}, True),
        (ONE | {"weights": torch.ones(8)}, True),
        (ONE | {"mask": ONE["mask"].double()}, True),
    ],
)
def test_a_plan_for_one_batch_holds_for_smaller_ones(batch, is_told):
    rehearsed = RehearsedBatches([ONE], is_loader=False)
    with pytest.warns(MemkitWarning, match="may take more") if is_told else contextlib.nullcontext():
        rehearsed.look_at(batch)


def test_a_plan_for_one_list_of_samples_holds_for_a_shorter_one(recwarn):
    RehearsedBatches([[(torch.ones(3), 1)] * 4], is_loader=False).look_at([(torch.ones(2), 1)] * 3)
    assert not recwarn.list


@pytest.mark.slow
def test_a_worst_batch_without_data_will_do():
    """As the loader's own, but that whether it may be split cannot be checked."""
    model, loader = Reader(), tokens(*MANY_AND_LONG)
    bare = mk.predict.find_worst_batch(
        MANY_AND_LONG, model, loss_fn, make_batch=lambda shape: torch.empty(shape, dtype=torch.long, device="meta")
    )
    plans = [mk.plan_training(model, each, loss_fn, budget="20MiB") for each in (loader, bare)]
    required = [{each.accumulation_steps: each.required_bytes for each in plan.candidates} for plan in plans]
    tried_by_both = required[0].keys() & required[1].keys()  # measured times decide what is tried, and what is fastest
    assert len(tried_by_both) > 1
    assert all(required[0][each] == required[1][each] for each in tried_by_both)
    assert (plans[0].is_split_exact, plans[1].is_split_exact) == (True, None)
    assert "Whether the batch may be split was not checked: the batch has no data." in plans[1].notes


@pytest.mark.slow
def test_equal_batches_are_planned_like_one():
    model, loader = Reader(), tokens((64, 30), (64, 30))
    plans = [mk.plan_training(model, each, loss_fn, budget="6MiB") for each in (loader, next(iter(loader)))]
    assert all(plan.required_bytes <= plan.budget_bytes for plan in plans)
    # Which one is chosen, and how it treats tensors, depends on measured times: what both tried untreated is compared.
    tried = [
        {each.micro_batch_size: each.required_bytes for each in plan.candidates if each.treatment == "-"}
        for plan in plans
    ]
    common = tried[0].keys() & tried[1].keys()
    assert common
    assert all(tried[0][each] == tried[1][each] for each in common)


@pytest.mark.slow
def test_fixed_rows_stay():
    model = Reader()
    plan = mk.plan_training(model, tokens(*MANY_AND_LONG), loss_fn, budget="6MiB", micro_batch_size=16)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (16, 4)
    assert plan.required_bytes <= plan.budget_bytes


def one_long_row():
    return mk.plan_training(nn.Linear(16, 16), ROWS, lambda m, x: m(x).square().mean(), budget="600KiB")


ROWS = DataLoader([torch.ones(64, 100, 16), torch.ones(1, 3000, 16)], batch_size=None)


@pytest.mark.parametrize(
    "refusal",
    [
        (one_long_row, ConfigError, "budget='600KiB'", "2 of 2 kinds of batch", "batch 1 does not fit"),
        (lambda: mk.plan_training(Reader(), tokens(), loss_fn, budget="1MiB"), InputError, "loader without batches"),
        (lambda: mk.estimate_memory_usage(Reader(), tokens((2, 3)), loss_fn), InputTypeError, "next(iter(loader))"),
    ],
)
def test_refusals(refusal):
    assert_refused(*refusal)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.LeakyReLU(), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64),
        nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def images(*sizes):
    return [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for size in sizes]


class OwnLoader:
    """Neither a DataLoader nor a container."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), (8, 5)])
def test_kernels_are_measured_for_a_loader_too(sizes):
    """The bound for what convolutions take inside is more than the budget, and what they take is not."""
    model, batches = net(), images(*sizes)
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.1), torch.get_rng_state()
    budget = mk.estimate_memory_usage(model, batches[0], loss_fn=classify, optimizer=optimizer).peak_bytes
    with pytest.raises(ConfigError, match=r"needs \d.* to \d.*measure=True finds what they take"):
        mk.prepare(model, optimizer, OwnLoader(batches), classify, budget=budget, treat="tensors", may_offload=False)
    with mk.prepare(model, optimizer, OwnLoader(batches), classify, budget=budget, measure=True) as trainer:
        for batch in batches:
            with mk.Tracker(device="cpu", workspace=True) as tracker:
                trainer.train_step(batch, classify)
            assert tracker.peak_bytes <= trainer.plan.required_bytes <= budget
    assert torch.equal(torch.get_rng_state(), state)


def test_a_list_of_batches_is_told_from_a_batch():
    model, batches = net(), images(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError) as caught:
        mk.prepare(model, optimizer, batches, classify, budget="1GiB")
    assert "If it is a list of batches, pass one of them, or mk.predict.find_worst_batch(" in caught.value.__notes__[0]
    worst = mk.predict.find_worst_batch(batches, model, classify, optimizer=optimizer)
    notes = mk.prepare(model, optimizer, worst, classify, budget="1GiB").plan.notes
    assert any(each.startswith("Rehearsed with 2 of 2 kinds") for each in notes)
