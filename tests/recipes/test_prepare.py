"""Plans are held against real steps: what they take, which gradient they have, and what is refused."""

import contextlib
import copy
import gc
import json
import re
import signal
import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memkit as mk
from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitWarning, StateError
from memkit._core.units import format_bytes
from memkit.predict.gpus import find_gpu
from memkit.predict.plan import host
from memkit.predict.plan.host import HostTimes
from memkit.recipes import planned
from memkit.recipes.planned import plan_training, prepare
from memkit.recipes.report import write_report
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.allocations import trace_allocations
from tests.helpers import FunctionsEntered, Noted, assert_refused, assert_same, one_in_product
from tests.toys import Residual, mean_square


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def digits():
    """Six rows of 128 digits each: (6, 128, 64) and (6, 128)."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images[:768]).float().view(6, 128, 64) / 16
    return images, torch.from_numpy(labels[:768]).long().view(6, 128)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(64) for _ in range(2)), nn.Linear(64, 10))


def num_bytes(*groups) -> int:
    tensors = [each for group in groups for each in group]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def real_peak(trainer, model, optimizer, batch) -> int:
    trainer.train_step(batch, loss_fn)
    trainer.train_step(batch, loss_fn)
    state = [value for values in optimizer.state.values() for value in values.values()]
    there = num_bytes(model.parameters(), model.buffers(), state, batch)
    return there + trace_allocations(lambda: trainer.train_step(batch, loss_fn)).peak


@pytest.mark.slow
def test_planning_needs_no_garbage_collection():
    """Nothing of a simulated step is in a cycle: a collection, and a search among all objects, take longer than it."""
    generations = []

    def note(phase, information):
        generations.append(information["generation"])

    model = make_model()
    gc.disable()
    gc.callbacks.append(note)
    try:
        plan_training(model, digits(), loss_fn, torch.optim.AdamW(model.parameters()), budget="64MiB")
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert generations == []


def gradient(model, batch, **settings):
    model = copy.deepcopy(model).double()
    batch = batch[0].double(), batch[1]
    got = []
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: got.extend(each.grad.flatten().clone() for each in model.parameters()))
    with MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer:
        trainer.train_step(batch, loss_fn)
    return torch.cat(got)


@pytest.mark.parametrize(
    ("budget", "micro_batch_size", "treat", "treatments"),
    [
        pytest.param("2500KiB", None, None, set(), marks=pytest.mark.slow),
        ("4800KiB", 6, "blocks", {"selective", "full", "offload"}),
        ("4800KiB", 6, "tensors", set()),
        pytest.param("3800KiB", 6, None, set(), marks=pytest.mark.slow),
        pytest.param("3800KiB", 6, "blocks", {"offload"}, marks=pytest.mark.slow),
        pytest.param("2200KiB", None, None, set(), marks=pytest.mark.slow),
    ],
)
def test_the_plan_fits_for_real_with_the_same_gradient(budget, micro_batch_size, treat, treatments):
    batch, model = digits(), make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"budget": budget, "micro_batch_size": micro_batch_size, "treat": treat}
    with prepare(model, optimizer, batch, loss_fn, **settings) as trainer:
        plan = trainer.plan
        peak = real_peak(trainer, model, optimizer, batch)
    # The plan counts the random state that the step and each treated block keep; a block that waits elsewhere has none.
    assert plan.predicted_peak_bytes <= peak <= plan.required_bytes <= plan.budget_bytes
    if micro_batch_size is None:
        assert plan.accumulation_steps > 1
    else:
        assert (plan.micro_batch_size, plan.accumulation_steps) == (6, 1)
        assert not treatments or treatments & set(plan.checkpoint.values())
        assert (plan.saved_tensors is None) == (treat == "blocks")
    plain = gradient(make_model(), batch)
    planned = gradient(make_model(), batch, **plan.wrapper_settings())
    assert (planned - plain).norm() <= 1e-13 * plain.norm()


class GraphNet(nn.Module):
    """(num_nodes, 16) and (2, num_edges) to (num_nodes, 16)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.message, self.update = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.update(torch.zeros_like(x).index_add(0, edges[1], self.message(x[edges[0]]))).tanh()
        return x


def graph_loss(model, graph):
    return model(*graph).square().mean()


def test_a_graph_is_planned_as_a_whole():
    """Nodes and edges are no rows of one batch; how it can be cut, only its owner knows."""
    torch.manual_seed(0)
    graph, model = (torch.randn(200, 16), torch.randint(200, (2, 4000))), GraphNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(MemkitWarning, match="cannot be cut: .*split_fn"):
        trainer = prepare(model, optimizer, graph, graph_loss, budget="2MiB")
    plan = trainer.plan
    assert plan.candidates[0].required_bytes > plan.budget_bytes >= plan.required_bytes
    assert plan.notes == ("The batch is kept whole, because it cannot be cut: tensors with [2, 200] rows.",)
    peak = trace_allocations(lambda: trainer.train_step(graph, graph_loss)).peak
    there = num_bytes(model.parameters(), graph)
    assert plan.predicted_peak_bytes <= there + peak <= plan.required_bytes
    trainer.close()

    by_hand, by_wrapper = GraphNet(), GraphNet()
    graph_loss(by_hand, graph).backward()
    settings = plan.wrapper_settings() | {"split_fn": lambda batch, num_parts: [batch]}  # the warning's way out
    got = []
    optimizer = torch.optim.SGD(by_wrapper.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: got.extend(each.grad.clone() for each in by_wrapper.parameters()))
    with MemoryEfficientTrainingWrapper(by_wrapper, optimizer, **settings) as trainer:
        trainer.train_step(graph, lambda model, graph: mk.Loss(mean=graph_loss(model, graph), count=200))
    assert_same(got, [each.grad for each in by_hand.parameters()])
    assert_refused(
        lambda: plan_training(model, graph, graph_loss, budget="2MiB", micro_batch_size=2),
        InputError,
        "leave micro_batch_size out",
    )


@pytest.mark.parametrize("batch", [(), "split.txt"])
def test_a_batch_without_data_is_planned_as_a_whole(batch):
    """The loss function holds the data, as the one graph of a data set; the wrapper's warning advises () for that."""
    torch.manual_seed(0)
    x, edges = torch.randn(200, 16), torch.randint(200, (2, 4000))
    model = GraphNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def of_all(model, _):
        return graph_loss(model, (x, edges))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = prepare(model, optimizer, batch, of_all, budget="2MiB")
    assert len(warned) == (batch != ())  # () says itself that nothing is to be cut
    plan = trainer.plan
    assert plan.candidates[0].required_bytes > plan.budget_bytes >= plan.required_bytes
    assert plan.notes == ("The batch is kept whole, because it cannot be cut: no tensor with rows.",)
    peak = trace_allocations(lambda: trainer.train_step(batch, of_all)).peak
    assert num_bytes(model.parameters(), (x, edges)) + peak <= plan.required_bytes
    trainer.close()


def test_an_object_with_tensors_is_planned_as_a_whole():
    @dataclass
    class Graph:
        x: torch.Tensor
        edges: torch.Tensor

        def __iter__(self):
            return iter((self.x, self.edges))

    class Holder:
        def __init__(self, graph):
            self.graph = graph

    graph = Holder(Graph(torch.randn(200, 16), torch.randint(200, (2, 4000))))
    plan = plan_training(GraphNet(), graph, lambda model, batch: graph_loss(model, batch.graph), "sgd", budget="2MiB")
    assert plan.saved_tensors is not None
    assert plan.notes == ("The batch is kept whole, because it cannot be cut: a Holder in it.",)


def test_a_batch_whose_rows_the_step_mixes_at_random_is_kept_whole():
    """A part could not repeat the permutation: mixup of single rows would be none."""

    def mixup(model, batch):
        images, labels = batch
        index = torch.randperm(len(images))
        out = model(0.7 * images + 0.3 * images[index])
        return 0.7 * F.cross_entropy(out, labels) + 0.3 * F.cross_entropy(out, labels[index])

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.randn(512, 64), torch.randint(10, (512,))
    plan = plan_training(model, batch, mixup, "sgd", budget="100MiB")
    assert (plan.accumulation_steps, plan.is_split_exact) == (1, False)
    assert "kept whole: the step permutes the rows at random" in plan.notes[0]
    with pytest.raises(ConfigError, match="with micro-batches of 512 rows"):
        plan_training(model, batch, mixup, "sgd", budget="1MiB")


def test_a_large_budget_leaves_the_step_alone():
    plan = plan_training(make_model(), digits(), loss_fn, "sgd", budget="1GiB")
    assert plan.wrapper_settings()["checkpoint"] is None
    assert plan.precision is None
    assert plan.notes == ()


def test_planning_leaves_no_trace_and_takes_the_fastest():
    model, batch = make_model(), digits()
    optimizer = torch.optim.AdamW(model.parameters())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = plan_training(model, batch, loss_fn, optimizer, budget="5MiB", measure=True)
    measured = [each for each in plan.candidates if each.measured_seconds is not None]
    fastest = min(measured, key=lambda each: each.measured_seconds)
    assert (fastest.accumulation_steps, fastest.seconds) == (plan.accumulation_steps, plan.predicted_seconds)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert all(each.grad is None for each in model.parameters())
    assert all("forward" not in vars(each) for each in model.modules())


class OwnModel:
    """A trainer whose loss reaches the model by itself."""

    def __init__(self, model):
        self.model = model

    def loss_fn(self, _, x):
        return mean_square(self.model, x)


def measured_step(make_loss):
    """A measured plan for convolutions, whose fit depends on their workspace; it leaves no trace."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.GELU()) for _ in "12"))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(2, 4, 8, 8, 8)
    mean_square(model, x).backward()
    optimizer.step()
    gradients = [each.grad for each in model.parameters()]
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], gradients))
    with pytest.raises(ConfigError, match="a step that needs at least") as caught:
        plan_training(model, x, make_loss(model), optimizer, budget="100KiB", micro_batch_size=2, measure=True)
    assert_same((model.state_dict(), optimizer.state_dict()["state"], gradients), state)
    assert all(each.grad is before for each, before in zip(model.parameters(), gradients, strict=True))
    return re.search(r"needs at least (\S+ \S+),", str(caught.value))[1]


def test_a_measured_step_trains_the_model_that_the_loss_reaches_by_itself():
    """On a copy such a loss would leave no gradients and no state of the optimizer."""
    assert measured_step(lambda model: OwnModel(model).loss_fn) == measured_step(lambda _: mean_square)


def test_an_interrupt_waits_until_measured_steps_are_undone(monkeypatch):
    """In the middle of that it would leave a model that is half trained."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    before, put_back = copy.deepcopy(model.state_dict()), planned.put_back

    def interrupted(*args):
        put_back(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planned, "put_back", interrupted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            plan_training(model, x, mean_square, optimizer, budget="1MiB", measure=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert_same(dict(model.state_dict()), dict(before))


@pytest.mark.slow
def test_a_card_and_a_model_without_data():
    with torch.device("meta"):
        model = nn.Sequential(*(Residual(2048) for _ in range(2)))
        batch = torch.empty(2**18, 2048)

    plan = plan_training(model, batch, mean_square, "adamw", budget="RTX 3090")
    assert plan.estimate.fits("RTX 3090")
    assert plan.estimate.total_bytes <= plan.required_bytes <= plan.budget_bytes
    assert plan.accumulation_steps > 1
    assert not plan.candidates[0].fits  # the whole batch
    assert "has no data" in plan.notes[0]
    losses_bytes = 4 * (plan.accumulation_steps - 2)  # of the micro-batches that were not rehearsed
    assert plan.required_bytes == plan.estimate.required_bytes + losses_bytes  # all that the allocator would keep
    assert not any("free its cache" in each for each in plan.notes)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    widths = [3, *6 * (64,)]
    units = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*units, nn.Conv2d(64, 3, 1))


def three_steps(plan):
    """Train on a virtual GPU as the plan says, or without one; the out-of-memory errors, and what was reserved."""
    model, x = convolutions().cuda(), torch.zeros(8, 3, 96, 96, device="cuda")
    settings = {} if plan is None else plan.wrapper_settings()
    trainer = MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    num_ooms = sum(trainer.train_step(x, mean_square).num_ooms for _ in range(3))
    return num_ooms, torch.cuda.max_memory_reserved()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_plan_for_a_whole_card_uses_what_the_allocator_can_free(share):
    """Its allocator would like to keep more than there is; with a limit it frees its cache, and runs all the same."""
    card = find_gpu("RTX 3090")
    with mk.VirtualGPU(card):
        _, reserved_bytes = three_steps(None)
    num_bytes = card.context_bytes + int(share * reserved_bytes)
    small = replace(card, total_interval=(num_bytes, num_bytes))
    model, x = convolutions(), torch.zeros(8, 3, 96, 96)

    def planned(**budget):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return plan_training(model, x, mean_square, optimizer, micro_batch_size=8, may_offload=False, **budget)

    plan = planned(budget=small)
    assert plan.estimate.required_bytes > num_bytes >= plan.required_bytes
    assert "has to free its cache" in plan.notes[-1]
    with mk.VirtualGPU(small):
        assert three_steps(None)[0] > 0
    with mk.VirtualGPU(small):
        num_ooms, within_bytes = three_steps(plan)
    assert num_ooms == 0
    assert within_bytes <= share * reserved_bytes
    # In a part of a card the allocator may take more, so that the plan must give up more.
    with contextlib.suppress(ConfigError):
        part = planned(budget=num_bytes, target=card)
        assert part.required_bytes == part.estimate.required_bytes <= num_bytes
        assert part.predicted_seconds > plan.predicted_seconds


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(0, 1), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 10))


def test_model_normalizing_over_rows_stays_whole():
    plan = plan_training(normalized(), digits(), loss_fn, budget="8MiB")
    assert [each.accumulation_steps for each in plan.candidates] == [1]
    assert "In training mode 2 would see the statistics of each micro-batch: use GroupNorm" in plan.notes[0]
    with pytest.raises(ConfigError, match=r"The batch is kept whole: 2 normalize over the rows"):
        plan_training(normalized().to("meta"), digits(), loss_fn, budget="64KiB")


def test_loss_comparing_rows_stays_whole():
    def contrast(model, batch):
        codes = model(batch[0]).flatten(1)
        return F.cross_entropy(codes @ codes.T, torch.arange(len(codes)))

    plan = plan_training(make_model(), digits(), contrast, budget="8MiB")
    assert [each.accumulation_steps for each in plan.candidates] == [1]
    assert "cached_backward" in plan.notes[0]


def test_blocks_of_data_parallel_are_not_tried():
    """Its replicas would run the original's blocks: the search goes on without them."""
    plain, batch = make_model(), digits()
    model = nn.DataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prepare(model, optimizer, batch, loss_fn, budget="2MiB", micro_batch_size=2) as trainer:
        assert trainer.plan.saved_tensors is not None  # it did not fit as it was
        assert trainer.plan.wrapper_settings()["checkpoint"] is None
        trainer.train_step(batch, loss_fn)
    loss_fn(plain, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())


def test_error_if_nothing_fits():
    with pytest.raises(ConfigError) as raised:
        plan_training(make_model(), digits(), loss_fn, budget="100KiB", micro_batch_size=1)
    error = raised.value  # the four parts
    assert error.call == "plan_training(..., budget='100KiB')"
    assert "a step that needs at least " in error.got
    assert ", with micro-batches of" in error.got
    assert "its largest holders are" in error.got
    least = int(re.search(r"pass budget='(\d+)B' or more", error.fix)[1])
    assert plan_training(make_model(), digits(), loss_fn, budget=f"{least}B", micro_batch_size=1)


def test_if_only_the_bound_for_kernels_does_not_fit_the_way_out_is_to_measure_them():
    model, batch = nn.Sequential(nn.Conv3d(1, 4, 3), nn.Flatten(), nn.LazyLinear(2)), torch.randn(1, 1, 24, 24, 24)
    model(batch)
    settings = {"micro_batch_size": 1, "treat": "tensors"}

    def plan(budget, **more):
        return plan_training(model, batch, lambda model, x: model(x).square().mean(), budget=budget, **settings, **more)

    roomy = plan("1GiB")
    least_bytes = roomy.required_bytes - roomy.estimate.workspace_bytes
    with pytest.raises(ConfigError, match="measure=True finds what they take"):
        plan(least_bytes)
    with pytest.raises(ConfigError) as raised:
        plan(least_bytes // 2)
    assert "measure=True" not in str(raised.value)


@pytest.mark.parametrize("size", [0, 7, 1.5, "2"])
def test_rejects_more_micro_batches_than_rows(size):
    with pytest.raises(ConfigError, match=r"of a batch of 6 rows.*a whole number from 1 to 6"):
        plan_training(make_model(), digits(), loss_fn, budget="4MiB", micro_batch_size=size)


def test_judges_requested_micro_batches():
    plan = plan_training(normalized(), digits(), loss_fn, budget="8MiB", micro_batch_size=3)
    assert (plan.accumulation_steps, plan.is_split_exact) == (2, False)
    assert plan.notes[0].startswith(
        "Split into micro-batches of 3 rows as requested, although the parts have a different gradient. "
        "In training mode 2 "
    )
    whole = plan_training(normalized(), digits(), loss_fn, budget="8MiB", micro_batch_size=6)
    assert (whole.notes, whole.is_split_exact) == ((), None)


@pytest.mark.slow
def test_another_loss_than_the_plan_judged_is_judged():
    def contrastive(model, batch):
        scores = model(batch[0])
        return (scores - scores.mean(0)).square().mean()

    model = make_model()
    with prepare(model, torch.optim.AdamW(model.parameters()), digits(), loss_fn, budget="2500KiB") as trainer:
        assert trainer.train_step(digits(), loss_fn).num_microbatches > 1
        with pytest.warns(MemkitWarning, match="it has another loss function"):
            assert_refused(lambda: trainer.train_step(digits(), contrastive), ConfigError, "when the batch is split")


def take_step(trainer, batch):
    trainer.train_step(batch, loss_fn)


def take_step_by_hand(trainer, batch):
    for attempt in trainer.microbatches(batch):
        with attempt as micro:
            trainer.backward(loss_fn(trainer.model, micro))
    trainer.step()


@pytest.mark.parametrize("step", [take_step, take_step_by_hand])
def test_other_modes_than_the_plan_judged_are_judged(step):
    model = normalized().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    with prepare(model, optimizer, digits(), loss_fn, budget="8MiB", micro_batch_size=3) as trainer:
        assert trainer.plan.is_split_exact
        model.train()
        with pytest.warns(MemkitWarning, match="splitting the batch changes the gradient"):
            step(trainer, digits())


@pytest.mark.slow
def test_no_step_runs_more_rows_than_the_plan_says():
    """Checking again what planning has proven would run the whole batch, above the budget, every now and then."""
    model, batch, num_rows = make_model(), digits(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with prepare(model, optimizer, batch, loss_fn, budget="2500KiB") as trainer:
        assert trainer.plan.is_split_exact
        assert trainer.plan.micro_batch_size < len(batch[0])
        handle = model.register_forward_pre_hook(lambda module, args: num_rows.append(len(args[0])))
        for _ in range(4):
            trainer.train_step(batch, loss_fn)
        handle.remove()
    assert max(num_rows) == trainer.plan.micro_batch_size
    assert sum(num_rows) == 4 * len(batch[0])


@pytest.mark.slow
def test_another_loss_than_the_planned_one_is_checked():
    model, batch = make_model(), digits()
    optimizer = torch.optim.AdamW(model.parameters())

    def of_the_batch(model, batch):
        rows = model(batch[0]).flatten(1)
        return (rows - rows.mean(0)).square().mean()

    with prepare(model, optimizer, batch, loss_fn, budget="2500KiB", treat="blocks") as trainer:
        trainer.train_step(batch, loss_fn)
        with pytest.warns(MemkitWarning, match="it has another loss function"):
            assert_refused(lambda: trainer.train_step(batch, of_the_batch), ConfigError, "when the batch is split")
    other = prepare(model, optimizer, batch, loss_fn, budget="2500KiB", treat="blocks", probe=False)
    with other as trainer, pytest.warns(MemkitWarning, match="it has another loss function"):
        trainer.train_step(batch, of_the_batch)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"precisions": ()}, ConfigError, "a list of at least one of"),
        ({"precisions": "bf16-mixed"}, ConfigError, "got precisions='bf16-mixed'; expected a list"),
        ({"precisions": ("fp8",)}, ConfigError, "fp8"),
        ({"model": make_model}, InputTypeError, r"plan_training\(function, \.\.\.\).*a torch\.nn\.Module"),
        ({"sample_batch": torch.empty(0, 128, 64), "model": make_model().to("meta")}, InputError, "without rows"),
        ({"sample_batch": None}, InputTypeError, r"got None; .* an empty tuple: plan_training\(.*sample_batch=\(\)"),
        ({"sample_batch": (), "micro_batch_size": 1}, InputError, "leave micro_batch_size out"),
        ({"budget": 1.5}, InputTypeError, "budget=1.5"),
        ({"target": 4090}, InputTypeError, "the name of a GPU as a string"),
        ({"selected_fraction": 0}, ConfigError, "selected_fraction=0"),
        (
            {"budget": "RTX 4090", "target": "cpu"},
            ConfigError,
            "got a budget and a target that each name a device; expected a budget in bytes when target is given",
        ),
        ({"budget": "RTX 4090", "measure": True}, ConfigError, r"measure=True.*a budget on RTX 4090"),
    ],
)
def test_wrong_arguments(changed, error, message):
    given = {"model": make_model(), "sample_batch": digits(), "loss_fn": loss_fn, "budget": "4MiB"} | changed
    assert_refused(lambda: plan_training(**given), error, message)


@pytest.mark.slow
def test_a_card_as_a_record():
    card = replace(find_gpu("RTX 4090"), name="mine")
    plan = plan_training(make_model(), digits(), loss_fn, budget=card)
    assert plan.budget_bytes == card.total_bytes
    part = plan_training(make_model(), digits(), loss_fn, budget="8GiB", target=card)
    assert part.estimate == plan.estimate
    with pytest.raises(ConfigError, match=r"budget=mine, target='cpu'"):
        plan_training(make_model(), digits(), loss_fn, budget=card, target="cpu")


@pytest.mark.slow
def test_reports_values_answered_without_data():
    def masked(model, batch):
        losses = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten(), reduction="none")
        return losses[losses > 0].mean()

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with prepare(model, optimizer, digits(), masked, budget="8MiB", selected_fraction=1.0) as trainer:
        notes = trainer.plan.notes
    assert any(each.startswith("Answered without data: ") and "test_prepare.py" in each for each in notes)
    assert notes[-1] in trainer.plan.explain()
    with pytest.raises(ConfigError, match=r"masks that select 90%.*a smaller selected_fraction= may let a plan fit"):
        plan_training(model, digits(), masked, optimizer, budget="1KiB", treat="blocks", selected_fraction=0.9)


def test_explains_itself():
    plan = plan_training(make_model(), digits(), loss_fn, budget="2500KiB")
    lines = plan.explain().splitlines()
    assert sum("<- chosen" in line for line in lines) == 1
    assert sum("more than the budget" in line for line in lines) == sum(not each.fits for each in plan.candidates)
    (field, key) = ([line.partition("|")[2] for line in lines if "|" in line], lines[-len(plan.notes) - 4])
    assert sum(line.count("*") for line in field) == 1
    assert key.split("   ")[-1] == "- budget 2.44 MiB"
    assert "* chosen" in key
    assert ("x too large" in key) == any("x" in line for line in field)
    figures = plan.as_dict()
    assert figures["estimate"]["peak_bytes"] == plan.predicted_peak_bytes
    assert len(figures["candidates"]) == len(plan.candidates)


@pytest.mark.slow
def test_a_plan_has_a_report(tmp_path):
    plan = plan_training(make_model(), digits(), loss_fn, "sgd", budget="4MiB", micro_batch_size=6, curve=True)
    write_report(plan, tmp_path / "plan.html")
    write_report(plan, tmp_path / "plan.json")
    page, data = (tmp_path / "plan.html").read_text("utf-8"), json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert data["headline"] == str(plan).splitlines()[0]
    assert data["figures"]["required_bytes"] == plan.required_bytes
    assert len(data["figures"]["candidates"]) == len(plan.candidates) >= 5
    assert page.count("tensors: ") >= 4
    (at_peak,) = [each for each in data["sections"] if each["title"] == "At the peak"]
    assert sum(size for _, size in at_peak["content"][0]["rows"]) == plan.predicted_peak_bytes
    with pytest.raises(ConfigError, match="in English"):
        write_report(plan, tmp_path / "plan.md", language="zh")


@pytest.mark.slow
def test_packed_rows_are_planned_tensor_by_tensor():
    """C++ reads how many rows each step of a packed sequence has, in the rehearsal without data too."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(50, 32), nn.BatchNorm1d(32)  # not to be split: parts differ
            self.layer, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, rows, lengths):
            x = self.norm(self.embedding(rows).mT).mT
            packed = pack_padded_sequence(x, lengths.long(), batch_first=True)
            padded, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
            return self.head(padded.tanh().mean(1))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(*batch[:2]), batch[2])

    rows, lengths = torch.randint(50, (6, 40)), torch.tensor([40, 31, 31, 12, 5, 2])
    batch = rows, lengths, torch.randint(4, (6,))
    torch.manual_seed(0)
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def trained(plan):
        with mk.train.treat_saved_tensors(plan):
            loss = loss_fn(model, batch)
        loss.backward()
        found = [each.grad for each in model.parameters()]
        optimizer.zero_grad()
        return found

    plan = plan_training(model, batch, loss_fn, optimizer=optimizer, activation_budget=0.6)
    assert plan.saved_tensors.recomputed
    torch.testing.assert_close(trained(plan.saved_tensors), trained(None), rtol=0, atol=0)


def test_another_models_optimizer_is_refused_before_planning():
    def loss_fn(*_):
        pytest.fail("a dry run")

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match="none of which is a parameter of the model"):
        mk.prepare(make_model(), optimizer, digits(), loss_fn, budget="1GiB")


def test_a_step_that_trains_nothing_is_not_planned():
    """Only loss_fn unfreezes the model, so the step trains nothing: with the way out it does, and is planned."""

    def within(model, x):
        model.requires_grad_(True)
        loss = mean_square(model, x)
        model.requires_grad_(False)
        return loss

    model, x = nn.Linear(6, 6).requires_grad_(False), torch.ones(12, 6)
    for rows in (12, 6, 3):
        with pytest.warns(MemkitWarning, match="nothing was trained"):
            assert_refused(
                lambda rows=rows: plan_training(model, x, within, budget="1MiB", micro_batch_size=rows),
                InputError,
                r"^plan_training\(...\): got a step that trains nothing",
                r"model.requires_grad_\(True\).$",
            )
    model.requires_grad_(True)
    assert plan_training(model, x, mean_square, budget="1MiB").accumulation_steps == 1


def test_the_time_of_a_step_has_all_optimizers(monkeypatch):
    """Of four micro-batches two are tried; the optimizers are not taken for micro-batches."""
    monkeypatch.setattr(HostTimes, "seconds", lambda *_: 1.0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.ones(12, 6)

    def seconds(*groups):
        optimizers = [torch.optim.SGD(each, foreach=False) for each in groups]
        return plan_training(model, x, mean_square, optimizers, budget="1MiB", micro_batch_size=3).predicted_seconds

    assert seconds(model[0].parameters(), model[2].parameters()) == seconds(model.parameters())


class WithTable(nn.Linear):
    """Has a large buffer that no forward changes, which the first step finds out."""

    def __init__(self):
        super().__init__(64, 64)
        self.register_buffer("table", torch.randn(4 * 2**20))

    def forward(self, x):
        return super().forward(x) * self.table[:64]


@pytest.mark.parametrize("micro_batch_size", [256, 128])
def test_the_first_step_too_keeps_to_the_plan(micro_batch_size):
    model, x = WithTable(), torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {"budget": "34MiB", "micro_batch_size": micro_batch_size}  # else measured times decide
    with mk.prepare(model, optimizer, x, lambda model, x: model(x).square().mean(), **budget) as trainer:
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                trainer.train_step(x, lambda model, x: model(x).square().mean())
            assert tracker.peak_bytes <= trainer.plan.required_bytes


class Adapted(nn.Module):
    """One adapter beside a frozen network, as LoRA by hand."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).requires_grad_(False)
        self.adapter = nn.Linear(64, 64)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize("make", [Adapted, WithTable, lambda: nn.Sequential(Adapted(), WithTable(), Adapted())])
@pytest.mark.parametrize("rows", [128, 64])
def test_copies_of_the_first_step_are_room_for_it_and_no_part_of_later_ones(make, rows):
    def loss_fn(model, x):
        return model(x).square().mean()

    torch.manual_seed(0)
    model, x = make(), torch.randn(128, 64)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    plan = mk.plan_training(model, x, loss_fn, optimizer, budget="1GiB", micro_batch_size=rows)
    peaks = []
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, **plan.wrapper_settings(), probe=False) as trainer:
        for _ in range(3):
            with mk.Tracker(device="cpu") as tracker:
                trainer.train_step(x, loss_fn)
            peaks.append(tracker.peak_bytes)
        assert trainer.first_step_bytes > 100_000
        assert f"needs {format_bytes(trainer.first_step_bytes)} that later ones do not" in plan.explain()
    assert plan.predicted_peak_bytes == peaks[1] == peaks[2]
    assert peaks[1] < peaks[0] <= plan.required_bytes < peaks[1] + 1.1 * trainer.first_step_bytes + 2**14


def follow(student, teacher):
    """Momentum, as BYOL's and MoCo's code has it."""
    with torch.no_grad():
        for mine, its in zip(student.parameters(), teacher.parameters(), strict=True):
            its.data = its.data * 0.99 + mine.data * 0.01


class WithTeacher(nn.Module):
    """A student with a teacher that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(64, 256), nn.Linear(64, 256).requires_grad_(False)

    def forward(self, x):
        follow(self.online, self.target)
        return (self.online(x) - self.target(x)).square()


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_storages_of_a_replaced_teacher_are_in_the_plan(is_inside):
    torch.manual_seed(0)
    model = WithTeacher() if is_inside else nn.Linear(64, 256)
    teacher = None if is_inside else nn.Linear(64, 256).requires_grad_(False)

    def loss_fn(model, x):
        if teacher is None:
            return model(x).mean()
        follow(model, teacher)
        return (model(x) - teacher(x)).square().mean()

    x = torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mk.prepare(model, optimizer, x, loss_fn, budget="1GiB", micro_batch_size=32) as trainer:
        for _ in range(3):
            with mk.Tracker(device="cpu") as tracker:
                trainer.train_step(x, loss_fn)
            assert tracker.peak_bytes == trainer.plan.predicted_peak_bytes


def test_copies_for_blocks_that_run_again_are_known_too():
    model, x = nn.Sequential(WithTable(), nn.Linear(64, 4)), torch.randn(8, 64)
    with mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=["0"], probe=False
    ) as trainer:
        assert trainer.first_step_bytes == 0
        for _ in range(2):
            trainer.train_step(x, lambda model, x: model(x).square().mean())
            assert trainer.first_step_bytes == 2 * model[0].table.nbytes  # of the step, and of the block


class Picky(nn.Module):
    """Takes only numbers of rows that divide its queue's, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        assert len(x) == 0 or 64 % len(x) == 0, "rows that divide 64"
        return self.body(x)


@pytest.mark.parametrize("measure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sizes_that_the_model_refuses_are_left_out_and_noted(measure):
    model, x = Picky(), torch.randn(8, 512, 64)
    whole = plan_training(model, x, mean_square, "sgd", budget="1GiB", micro_batch_size=8)
    budget = int(0.6 * whole.required_bytes)
    plan = plan_training(model, x, mean_square, "sgd", budget=budget, treat="blocks", measure=measure)
    assert 64 % plan.micro_batch_size == 0
    assert any(
        each == "Micro-batches of 3 rows are left out: the step fails on them (AssertionError: rows that divide 64)."
        for each in plan.notes
    )


@pytest.mark.slow
def test_a_loss_that_zeroes_gradients_keeps_the_batch_whole():
    """As TRADES' does, between its attack and its loss: gradients of earlier micro-batches are gone then."""
    model, x = make_model(), torch.randn(32, 8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def zeroing_loss(model, x):
        optimizer.zero_grad()
        return model(x).square().mean()

    plan = partial(plan_training, model, x, zeroing_loss, optimizer, treat="blocks")
    budget = f"{int(0.9 * plan(budget='1GiB').required_bytes)}B"
    with prepare(model, optimizer, x, zeroing_loss, budget=budget, treat="blocks") as trainer:
        assert trainer.train_step(x, zeroing_loss).sizes == (32,)
    (note,) = trainer.plan.notes
    assert note.startswith(
        "Micro-batches of 16, 11, 8 rows and 5 other sizes are left out: the step fails on them (Sta"
    )
    assert "remove optimizer.zero_grad()" in note
    with pytest.raises(StateError, match=r"remove optimizer\.zero_grad\(\) from the loop and from the loss"):
        plan(budget=budget, micro_batch_size=8)


def test_an_error_of_the_whole_batch_is_the_users_own():
    with pytest.raises(AssertionError, match="rows that divide 64"):
        plan_training(Picky(), torch.randn(6, 16, 64), mean_square, "sgd", budget="1GiB")


@pytest.mark.slow
def test_the_least_budget_of_a_refusal_is_measured_too():
    """A plan for twice the budget exists; the error must not ask for more than that plan needs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in "123456"]
    )
    plan = partial(plan_training, model, torch.randn(8, 8, 32, 32), mean_square, "sgd", measure=True)
    enough = plan(budget="2MiB").required_bytes
    with pytest.raises(ConfigError, match="pass budget='") as caught:
        plan(budget="1.2MiB")
    least = int(re.search(r"pass budget='(\d+)B'", str(caught.value))[1])
    assert least <= enough
    assert plan(budget=f"{least}B").required_bytes <= least


class Trims(nn.Module):
    """(N, L) integers to (N, longest, 4): padding that no row needs is cut off, as pad_packed_sequence does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, tokens):
        longest = int((tokens > 0).sum(1).max())
        return self.body(self.table(tokens[:, :longest]))


def padded(num_rows, long_row):
    """One row of 64 numbers, and others of 8."""
    tokens = torch.randint(1, 50, (num_rows, 64))
    lengths = torch.full((num_rows, 1), 8)
    lengths[long_row] = 64
    return tokens.where(torch.arange(64) < lengths, 0)


def samples(num_rows, long_row):
    return [(torch.randint(1, 50, (64 if each == long_row else 8,)),) for each in range(num_rows)]


def trimmed_loss(model, batch):
    rows = batch if isinstance(batch, torch.Tensor) else nn.utils.rnn.pad_sequence([x for (x,) in batch], True)
    return model(rows).square().sum() / 64


@pytest.mark.parametrize(
    ("make", "long_row", "treat"), one_in_product(5, [padded, samples], [0, 15], ["tensors", "blocks"])
)
def test_every_micro_batch_is_tried_where_they_may_differ(make, long_row, treat):
    model, batch = Trims(), make(16, long_row)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"micro_batch_size": 4, "treat": treat, "probe": False}
    with prepare(model, optimizer, batch, trimmed_loss, budget="1GiB", **settings) as trainer:
        peaks = []
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                assert trainer.train_step(batch, trimmed_loss).sizes == (4,) * 4
            peaks.append(tracker.peak_bytes)
    assert trainer.plan.predicted_peak_bytes <= peaks[1] <= trainer.plan.required_bytes < 1.1 * peaks[1]
    assert trainer.plan.estimate.confidence == "exact"


@pytest.mark.slow
def test_a_plan_for_rows_that_differ_keeps_its_budget_and_knows_its_forwards(recwarn):
    model, batch = Trims(), padded(16, 15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    least = plan_training(model, batch, trimmed_loss, optimizer, budget="1GiB", micro_batch_size=4).required_bytes
    budget = f"{int(0.95 * least)}B"
    settings = {"micro_batch_size": 4, "treat": "tensors", "probe": False}
    with prepare(model, optimizer, batch, trimmed_loss, budget=budget, **settings) as trainer:
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                trainer.train_step(batch, trimmed_loss)
    assert trainer.plan.saved_tensors.saved_bytes > 0
    assert tracker.peak_bytes <= trainer.plan.required_bytes <= 0.95 * least
    assert not [each for each in recwarn if "not the planned one" in str(each.message)]
    assert any("another batch of equal shapes may take more" in each for each in trainer.plan.notes)


def test_two_micro_batches_are_tried_where_all_are_alike():
    sizes = Noted()

    def counted(model, x):
        sizes.append(len(x))
        return model(x).square().mean()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plan = plan_training(model, torch.randn(12, 8), counted, "sgd", budget="1GiB", micro_batch_size=2, treat="blocks")
    assert plan.notes == ()
    seen = sizes.take()
    assert seen.count(2) < 12  # of six micro-batches
    assert seen[-4:] == [2] * 4  # of two, twice


@pytest.mark.slow
def test_what_was_not_tried_is_not_said_to_fit():
    with pytest.warns(MemkitWarning, match="only 64 of 70 were tried"):
        plan = plan_training(Trims(), padded(70, 69), trimmed_loss, "sgd", budget="1GiB", micro_batch_size=1)
    assert str(plan).startswith("not known whether it fits into 1.00 GiB: micro-batches differ")


def two_optimizers(model):
    first, *others = model.double()
    rest = nn.ModuleList(others).parameters()
    return [torch.optim.Adam(first.parameters()), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


@pytest.mark.slow
@pytest.mark.parametrize("measure", [False, True])
def test_several_optimizers_take_the_steps_of_a_loop(measure):
    images, labels = digits()
    batch = images.double(), labels
    planned, plain = make_model(), make_model()
    ours, theirs = two_optimizers(planned), two_optimizers(plain)
    with prepare(planned, ours, batch, loss_fn, budget="4MiB", measure=measure) as trainer:
        assert trainer.plan.accumulation_steps > 1
        assert [len(each.state) for each in ours] == [0, 0]  # planning leaves nothing
        for _ in range(2):
            trainer.train_step(batch, loss_fn)
            loss_fn(plain, batch).backward()
            for each in theirs:
                each.step()
                each.zero_grad()
    torch.testing.assert_close(planned.state_dict(), plain.state_dict())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.slow
def test_plans_are_the_same_in_inference_mode(monkeypatch):
    """As estimates are: the speeds of the host, measured once for each process, need a graph too."""
    monkeypatch.setattr(host, "_this_machine", host._this_machine.__wrapped__)
    model, loss_fn = nn.Linear(4, 2), mean_square
    plan = plan_training(model, torch.ones(8, 4), loss_fn, budget="1MiB")
    with torch.inference_mode():
        x = torch.ones(8, 4)
        inside = plan_training(model, x, loss_fn, budget="1MiB", measure=True)
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), x, loss_fn, budget="1GiB", target="cpu")
        assert torch.is_inference_mode_enabled()
    assert inside.required_bytes == plan.required_bytes
    assert inside.accumulation_steps == plan.accumulation_steps


def with_penalty(model, batch):
    return loss_fn(model, batch) + sum(each.square().sum() for each in model.parameters())


def replace_head(model, optimizer):
    model[-1] = nn.Linear(64, 500)
    optimizer.param_groups[0]["params"][-2:] = model[-1].parameters()


STEP_CHANGES = {
    "unfrozen": (lambda model, _: model.requires_grad_(True), loss_fn, "or are trained that were not"),
    "larger": (replace_head, loss_fn, "parameters have other sizes"),
    "another loss": (lambda *_: None, with_penalty, "it has another loss function"),
    "another loss, unfrozen": (
        lambda model, _: model.requires_grad_(True), with_penalty, "another loss function, and parameters have",
    ),
    "frozen": (lambda model, _: model[1].requires_grad_(False), loss_fn, None),
    "the same text": (lambda *_: None, lambda model, batch: by_lambda(model, batch), None),
}  # fmt: skip


def by_lambda(model, batch):
    return loss_fn(model, batch)


@pytest.mark.parametrize("change", STEP_CHANGES)
def test_a_step_that_was_not_planned_is_told_once(change):
    """A plan holds for a step that trains fewer parameters, and for a lambda that is written once more."""
    apply, other_loss, told = STEP_CHANGES[change]
    planned_loss = (lambda model, batch: by_lambda(model, batch)) if told is None and change != "frozen" else loss_fn
    model, batch = make_model(), digits()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = prepare(model, optimizer, batch, planned_loss, budget="64MiB", micro_batch_size=6, probe=False)
    with warnings.catch_warnings(record=True, action="always") as warned:
        trainer.train_step(batch, planned_loss)
        assert not warned
        apply(model, optimizer)
        for _ in range(3):
            trainer.train_step(batch, other_loss)
    messages = [str(each.message) for each in warned if "the step is not the one that was planned" in str(each.message)]
    assert len(messages) == (told is not None)
    assert all(told in each and "mk.prepare(model, optimizer, batch, loss_fn, budget=...)" in each for each in messages)


def test_a_loop_of_ones_own_is_told_of_unfrozen_layers():
    model, batch = make_model().requires_grad_(False), digits()
    model[-1].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = prepare(model, optimizer, batch, loss_fn, budget="64MiB", probe=False)
    model.requires_grad_(True)
    with pytest.warns(MemkitWarning, match="trained that were not"):
        attempt = next(trainer.microbatches(batch))
    assert not attempt.is_check


def test_a_warm_prepared_step_enters_few_functions():
    model, batch = make_model(), (torch.ones(4, 8, 64), torch.zeros(4, 8, dtype=torch.long))
    trainer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batch, loss_fn, budget="64MiB")
    for _ in range(5):
        trainer.train_step(batch, loss_fn)
    with FunctionsEntered() as entered:
        trainer.train_step(batch, loss_fn)
    assert len(entered.own) <= 111
