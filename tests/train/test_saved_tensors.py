"""For any plan of saved tensors, the training is bit-identical to that of the plain step."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memkit as mk
from memkit._core.errors import ConfigError, FileFormatError, InputTypeError, MemkitWarning, StateError
from memkit._tape.plan import SavedTensorPlan
from memkit._tape.tape import SavedKind, counts
from memkit._torch.dispatch import TorchDispatchMode, current_modes
from memkit._torch.graph import saving_hooks
from memkit.predict.plan.host import HostTimes
from memkit.train.saved_tensors import treat_saved_tensors
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, gradient_of, gradients, one_in
from tests.zoo import CASES


class Names(TorchDispatchMode):
    """Operators of a forward, as a plan counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if counts(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of(forward: Callable[[], object]) -> tuple[str, ...]:
    with Names() as seen:
        forward()
    return tuple(seen.names)


@contextmanager
def all_saved() -> Iterator[list[str]]:
    """Kinds of the tensors that a forward saves."""
    saves: list[str] = []

    def pack(tensor):
        saves.append(str(SavedKind(tensor.is_floating_point(), tensor.dim())))
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saves


def all_moved(names: tuple[str, ...], saves: list[str]) -> SavedTensorPlan:
    """Everything is offloaded, by what autograd saves."""
    numbers = frozenset(range(len(saves)))
    return SavedTensorPlan(operators=names, offloaded=frozenset(range(len(names))), saves=tuple(saves), moved=numbers)


def additions(names: tuple[str, ...]) -> frozenset[int]:
    return frozenset(number for number, name in enumerate(names) if name.startswith("aten.index_add"))


def everything(names: tuple[str, ...]) -> SavedTensorPlan:
    return SavedTensorPlan(operators=names, recomputed=frozenset(range(len(names))), shape_only=additions(names))


def elsewhere(names: tuple[str, ...]) -> SavedTensorPlan:
    return SavedTensorPlan(operators=names, offloaded=frozenset(range(len(names))), shape_only=additions(names))


def mixed(names: tuple[str, ...], seed: int) -> SavedTensorPlan:
    draw = random.Random(seed)
    fates = [draw.choice("krro") for _ in names]
    numbers = {fate: frozenset(k for k, each in enumerate(fates) if each == fate) for fate in "ro"}
    return SavedTensorPlan(
        operators=names, recomputed=numbers["r"], offloaded=numbers["o"], shape_only=additions(names)
    )


def trained(name: str, make_plan: Callable[[tuple[str, ...], list[str]], SavedTensorPlan] | None) -> list[Tensor]:
    """Parameters, buffers and the next random number after two steps, each forward under a plan of its own."""
    torch.manual_seed(0)
    case = CASES[name]()
    forwards: list[tuple[tuple[str, ...], list[str]]] = []

    @contextmanager
    def observed(phase: str) -> Iterator[None]:
        if phase != "forward":
            yield
            return
        with Names() as seen, all_saved() as saves:
            yield
        forwards.append((tuple(seen.names), saves))

    before = copy.deepcopy(case.model.state_dict())
    case.step(observed)
    case.model.load_state_dict(before)
    torch.manual_seed(1)
    for _ in range(2):
        plans = iter([] if make_plan is None else itertools.starmap(make_plan, forwards))
        case.step(lambda phase, plans=plans: treat_saved_tensors(next(plans, None) if phase == "forward" else None))
    return [each.clone() for each in (*case.model.parameters(), *case.model.buffers())] + [torch.rand(2)]


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_any_plan_trains_like_the_plain_step(name):
    plain = trained(name, None)
    by_operators = [everything, elsewhere, lambda names: mixed(names, 1), lambda names: mixed(names, 2)]
    plans = [lambda names, _, make=each: make(names) for each in by_operators]
    for make_plan in [*plans, all_moved]:
        treated = trained(name, make_plan)
        assert all(torch.equal(a, b) for a, b in zip(treated, plain, strict=True)), make_plan


def test_a_tensor_of_another_value_would_be_noticed():
    """The comparison above can fail: one random number more, drawn in the forward, changes the training."""
    plain = trained("encoder_dropout", None)

    def disturbed(names, _):
        torch.rand(1)
        return everything(names)

    other = trained("encoder_dropout", disturbed)
    assert not all(torch.equal(a, b) for a, b in zip(other, plain, strict=True))


def block(width: int = 32) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def outcome(forward: Callable[[], Tensor], model: nn.Module, backward=lambda loss: loss.backward()) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    backward(forward())
    return [each.clone() for each in (*gradients(model), *model.buffers())] + [torch.rand(1)]


def compared(model: nn.Module, forward: Callable[[], Tensor], backward=lambda loss: loss.backward()) -> None:
    """Hold treated forwards against the plain one."""
    state = copy.deepcopy(model.state_dict())
    with all_saved() as saves:
        names = operators_of(forward)
    model.load_state_dict(state)
    plain = outcome(forward, model, backward)
    for plan in (everything(names), elsewhere(names), mixed(names, 5), all_moved(names, saves)):
        model.load_state_dict(state)

        def treated(plan=plan) -> Tensor:
            with treat_saved_tensors(plan):
                return forward()

        assert all(torch.equal(a, b) for a, b in zip(outcome(treated, model, backward), plain, strict=True))


def test_a_kept_graph_runs_twice():
    model, x = block(), torch.randn(8, 32)

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    compared(model, lambda: model(x).square().mean(), twice)


def test_a_second_derivative():
    model, x = block(), torch.randn(8, 32, requires_grad=True)

    def penalized(loss):
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()

    compared(model, lambda: model(x).square().mean(), penalized)


def test_backward_inside_the_block_and_forward_after_it():
    model, x = block(), torch.randn(8, 32)
    names = operators_of(lambda: model(x).sum())
    plain = outcome(lambda: model(x).sum(), model)
    torch.manual_seed(3)
    model.zero_grad()
    treated = treat_saved_tensors(everything(names))
    with treated:
        model(x).sum().backward()
    found = [*gradients(model), torch.rand(1)]
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    with treated:
        model(x).sum().backward()
    assert treated.num_recomputed == len(names)


@pytest.mark.parametrize("reentrant", [True, False])
def test_around_the_models_own_checkpoints(reentrant):
    model, x = block(), torch.randn(8, 32, requires_grad=True)

    def forward():
        return model[3](checkpoint(model[1], model[2](model[0](x)), use_reentrant=reentrant)).square().mean()

    compared(model, forward)


def test_in_place_changes_between_recomputed_operators():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            u = self.first(x)
            w = torch.sigmoid(u.clone())
            u.neg_()
            u[:, :4].mul_(2.0)  # a part, after a whole
            y = torch.empty_like(u)
            y[:, :8] = u[:, 8:]
            y[:, 8:] = w[:, :8]
            return self.second(y * w).add_(u)

    model, x = InPlace(), torch.randn(8, 16)
    compared(model, lambda: model(x).square().mean())


def forward_mode(layer, x):
    """Forward-mode AD makes zeros without memory, which autograd saves."""
    value, tangent = torch.func.jvp(lambda rows: layer(rows).sin(), (x,), (x.cos(),))
    return value * tangent


def many_at_once(layer, x):
    several = torch._foreach_mul([layer(x), x.sin()], 2.0)
    torch._foreach_add_(several, 1.0)
    return several[0].sin() * several[1].cos()


def noise_that_is_saved_before_it_is_drawn(layer, x):
    return torch.nn.functional.rrelu(layer(x), training=True)


@pytest.mark.parametrize("make_plan", [everything, elsewhere, lambda names: mixed(names, 1)])
@pytest.mark.parametrize("forward", [forward_mode, many_at_once, noise_that_is_saved_before_it_is_drawn])
def test_special_tensors_are_saved_unchanged(forward, make_plan):
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def found(around):
        torch.manual_seed(1)
        with around:
            loss = forward(layer, x).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    plan = make_plan(operators_of(lambda: forward(layer, x).square().mean()))
    expected = found(contextlib.nullcontext())
    assert all(map(torch.equal, found(treat_saved_tensors(plan)), expected))


def test_parts_with_versions_of_their_own():
    """PyTorch's GRU on a CPU changes parts made by `unsafe_chunk`: the storage's version does not show it."""
    model, x = nn.GRU(16, 32, 2), torch.randn(6, 4, 16)
    compared(model, lambda: model(x)[0].square().mean())


def test_forward_side_effects():
    """Each forward changes a vector of spectral norm: operators that run again get its old value."""
    model, x = nn.utils.spectral_norm(nn.Linear(8, 8)), torch.randn(4, 8)
    compared(model, lambda: model(x).square().mean())


def test_numbers_from_a_generator_of_the_users_own():
    generator = torch.Generator().manual_seed(5)
    model, x = nn.Linear(16, 16), torch.randn(8, 16)

    def forward():
        generator.manual_seed(7)
        h = model(x).sigmoid()
        return (h * torch.rand(h.shape, generator=generator).exp()).square().mean()

    compared(model, forward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_and_backward_outside_or_inside_of_it(dtype):
    model, x = block(), torch.randn(8, 32)

    def forward():
        with torch.autocast("cpu", dtype):
            return model(x).float().square().mean()

    def inside(loss):
        with torch.autocast("cpu", torch.bfloat16):  # would cast what runs again
            loss.backward()

    compared(model, forward)
    compared(model, forward, inside)


def test_two_threads_run_their_backwards_at_once():
    models = [block() for _ in range(4)]
    x = torch.randn(64, 32)
    plain = [outcome(lambda m=m: m.eval()(x).square().mean(), m)[:-1] for m in models]
    names = operators_of(lambda: models[0](x).square().mean())

    def run(model):
        for _ in range(5):
            model.zero_grad()
            with treat_saved_tensors(everything(names)):
                loss = model(x).square().mean()
            loss.backward()

    threads = [threading.Thread(target=run, args=(each,)) for each in models]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for model, want in zip(models, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))


def test_long_chains_need_no_deep_stack():
    x = torch.randn(4, requires_grad=True)

    def forward():
        y = x
        for _ in range(3000):
            y = y.sin()
        return y.sum()

    forward().backward()
    want, x.grad = x.grad, None
    with treat_saved_tensors(everything(operators_of(forward))):
        loss = forward()
    loss.backward()
    assert torch.equal(x.grad, want)


class Remember(torch.autograd.Function):
    """Saves a tensor right before another operator does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()


class Messages(nn.Module):
    """Sums messages by nodes in each way that `index_add` has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.lift, self.weight = how, nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("x", torch.randn(6, 4))
        self.register_buffer("nodes", torch.tensor([0, 2, 1, 1, 0, 2]))

    def forward(self) -> Tensor:
        messages = self.lift(self.x).tanh()  # its result is saved, too, for its own backward
        start = torch.zeros(3, 4) + self.weight
        match self.how:
            case "in place":
                return start.clone().index_add_(0, self.nodes, messages.sin()).cos().sum()
            case "scaled":
                return start.index_add(0, self.nodes, messages, alpha=3).cos().sum()
            case "view":
                return start.T.index_add(1, self.nodes, messages.T).cos().sum()
            case "used before and after":
                early = messages * messages
                sums = start.index_add(0, self.nodes, messages)
                return sums.cos().sum() + (messages * early).sum()
            case "saved by another":  # the last to save it is not `index_add`, for which it is a constant
                constant = self.x.abs()
                early = Remember.apply(constant, self.weight)
                return start.index_add(0, self.nodes, constant).cos().sum() + early.sum() + messages.sum()
            case "saved by both":
                early = Remember.apply(messages, self.weight)
                return start.index_add(0, self.nodes, messages).cos().sum() + early.sum()
        raise AssertionError(self.how)


@pytest.mark.parametrize(
    "how", ["in place", "scaled", "view", "used before and after", "saved by another", "saved by both"]
)
def test_index_add_saves_only_the_shape_of_its_source(how):
    torch.manual_seed(0)
    model = Messages(how)
    compared(model, model)
    compared(model, model, lambda loss: loss.backward(retain_graph=True) or loss.backward())


def test_index_add_releases_its_source():
    x, nodes, storages = torch.randn(6, 4, requires_grad=True), torch.zeros(6, dtype=torch.long), []

    def forward():
        messages = x * 2
        storages.append(weakref.ref(messages.untyped_storage()))
        return torch.zeros(2, 4).index_add(0, nodes, messages).sum()

    names = operators_of(forward)
    for shape_only, is_held in ((frozenset(), True), (additions(names), False)):
        with treat_saved_tensors(SavedTensorPlan(operators=names, offloaded=frozenset({1}), shape_only=shape_only)):
            loss = forward()
        assert (storages[-1]() is not None) == is_held
        loss.backward()


def test_a_shape_is_no_tensor_for_others():
    x, nodes = torch.randn(6, 4, requires_grad=True), torch.zeros(6, dtype=torch.long)

    def forward():
        return torch.zeros(2, 4).index_add(0, nodes, x * 2)

    names = operators_of(forward)
    with treat_saved_tensors(SavedTensorPlan(operators=names, shape_only=additions(names))):
        out = forward()
    assert_refused(lambda: out.grad_fn._saved_source, StateError, "the plan keeps the shape")


def test_memory_goes_as_backward_goes_on_and_with_the_graph():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    x = torch.randn(1024, 256)
    step = lambda: model(x).square().mean().backward()  # noqa: E731 - as short as it is
    step()
    names = operators_of(lambda: model(x).square().mean())
    gelus = frozenset(k for k, name in enumerate(names) if "gelu" in name)
    plan = SavedTensorPlan(operators=names, recomputed=gelus)

    def treated():
        with treat_saved_tensors(plan):
            loss = model(x).square().mean()
        loss.backward()

    plain, less = trace_allocations(step).peak, trace_allocations(treated).peak
    assert plain - less >= 6 * x.nbytes  # of eight results of GELU; the last two are there at the peak


def test_dropped_graph_leaves_no_trace():
    model, x = block(), [torch.randn(8, 32)]
    names = operators_of(lambda: model(x[0]).sum())
    with treat_saved_tensors(everything(names)):
        loss = model(x[0]).sum()
    storage = weakref.ref(x.pop().untyped_storage())
    assert storage() is not None
    del loss
    gc.collect()
    assert storage() is None


def test_other_forward_keeps_gradients_and_warns():
    model = block()
    short, long = torch.randn(8, 32), torch.randn(12, 32)
    names = operators_of(lambda: model(short).sum())
    treated = treat_saved_tensors(everything(names))
    with treated:  # another size is no other forward
        model(long).sum().backward()
    want = outcome(lambda: model(long).abs().relu().sum(), model)
    torch.manual_seed(3)
    model.zero_grad()
    with pytest.warns(MemkitWarning, match=r"1 operator fewer|2 operators more") as told, treated:
        loss = model(long).abs().relu().sum()
    loss.backward()
    assert "aten.abs.default" in str(told[0].message)
    assert all(torch.equal(a, b) for a, b in zip([*gradients(model), torch.rand(1)], want, strict=True))
    with treated:  # once
        model(long).abs().relu().sum()


def test_offload_alone_follows_no_operators():
    model, x = block(), torch.randn(8, 32)
    forward = lambda: model(x).square().mean()  # noqa: E731 - as short as it is
    with all_saved() as saves:
        names = operators_of(forward)
    plain = outcome(forward, model)
    by_operators, by_saves = treat_saved_tensors(elsewhere(names)), treat_saved_tensors(all_moved(names, saves))
    for treated, num_modes in ((by_operators, 1), (by_saves, 0)):
        torch.manual_seed(3)
        model.zero_grad()
        with treated:
            assert len(current_modes()) == num_modes
            loss = forward()
        loss.backward()
        assert all(map(torch.equal, [*gradients(model), torch.rand(1)], plain))
    with treated:  # another size, and a backward inside, are no other forward
        model(torch.randn(12, 32)).square().mean().backward()
    with pytest.warns(MemkitWarning, match=r"1 saved tensor more \(1 x floating 0-D\)"), treated:
        loss = forward().exp()
    loss.backward()


@pytest.fixture
def moves_cost_nothing(monkeypatch):
    """Plans that may offload do only that; otherwise the times measured on this machine decide.

    On a busy one, following an operator may seem to cost nothing.
    """
    monkeypatch.setattr(HostTimes, "moving_seconds", lambda *_: 1e-9)
    monkeypatch.setattr(HostTimes, "following_seconds", lambda *_: 1e-3)


def first_layers_planned(model, x, may_offload):
    """A plan that treats the first layers alone."""
    need = mk.plan_training(model, x, mean_square, "sgd", budget="1GiB", micro_batch_size=len(x)).required_bytes
    settings = {"budget": f"{need - 3 * x.nbytes}B", "micro_batch_size": len(x), "treat": "tensors"}
    plan = mk.plan_training(model, x, mean_square, "sgd", may_offload=may_offload, **settings).saved_tensors
    assert plan.needs_tape is not may_offload
    assert 0 < plan.last_save < len(plan.saves)
    return plan


def mean_square(model, x):
    return model(x).square().mean()


@pytest.mark.usefixtures("moves_cost_nothing")
@pytest.mark.parametrize("may_offload", [True, False])
def test_forwards_are_followed_no_further_than_the_last_treated_tensor(may_offload):
    model = nn.Sequential(*(module for _ in range(8) for module in (nn.Linear(64, 64), nn.GELU())))
    x, seen = torch.randn(1024, 64), []
    treated = treat_saved_tensors(first_layers_planned(model, x, may_offload))
    plain = outcome(lambda: mean_square(model, x), model)
    model[0].register_forward_hook(lambda *_: seen.append((bool(saving_hooks()), len(current_modes()))))
    model[-1].register_forward_hook(lambda *_: seen.append((bool(saving_hooks()), len(current_modes()))))
    followed, alone = (True, 1 - may_offload), (False, 0)
    for at_last in (followed, alone, alone):  # the first forward is compared with the plan to its end
        torch.manual_seed(3)
        model.zero_grad()
        with treated:
            loss = mean_square(model, x)
        assert (saving_hooks(), current_modes()) == (None, [])
        loss.backward()
        assert all(map(torch.equal, [*gradients(model), torch.rand(1)], plain))
        assert seen == [followed, at_last]
        seen.clear()
    with FlopCounterMode(display=False), treated:  # around it
        mean_square(model, x)
    assert seen.pop()[0] is False
    model[0].register_forward_pre_hook(lambda *_: modes.enter_context(FlopCounterMode(display=False)) and None)
    with treated, contextlib.ExitStack() as modes:  # inside, so that the tape cannot leave before it
        mean_square(model, x)
    assert seen[-1][0] is not may_offload


@pytest.mark.usefixtures("moves_cost_nothing")
@pytest.mark.parametrize("may_offload", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("place", "num_planned", "is_told_by"),
    [
        (0, 1, "tape"),
        (-1, 1, "none"),
        *(pytest.param(place, 0, "both", marks=pytest.mark.slow) for place in (0, -1)),
    ],
)
def test_other_forward_is_told_as_far_as_it_is_followed(place, num_planned, is_told_by, may_offload):
    """One of 64 forwards is followed to its end. Saved tensors of the same kind are told by their number alone."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    model, x = nn.Sequential(*layers), torch.randn(1024, 64)
    treated = treat_saved_tensors(first_layers_planned(model, x, may_offload))
    for _ in range(num_planned):
        with treated:
            mean_square(model, x)
    layers[place].append(nn.Tanh())
    plain = outcome(lambda: mean_square(model, x), model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        model.zero_grad()
        with treated:
            loss = mean_square(model, x)
        is_told = len(told)
        for _ in range(64):
            with treated:
                mean_square(model, x)
    assert is_told == (is_told_by == "both" or (is_told_by == "tape" and not may_offload))
    assert [each.category for each in told] == [MemkitWarning]
    loss.backward()
    assert all(map(torch.equal, [*gradients(model), torch.rand(1)], plain))


@pytest.mark.parametrize("may_offload", one_in(2, [True, False]))
def test_backward_inside_of_the_loss_is_planned(may_offload):
    """As in a WGAN with a gradient penalty."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 1))
    x = torch.randn(512, 64)

    def loss_fn(model, x):
        x = x.detach().requires_grad_()
        scores = model(x).sum()
        (slopes,) = torch.autograd.grad(scores, x, create_graph=True)
        return (slopes.norm(dim=1) - 1).square().mean() + scores / 1000

    need = mk.plan_training(model, x, loss_fn, "sgd", budget="1GiB", micro_batch_size=512).required_bytes
    wanted = {"budget": f"{need - x.nbytes}B", "treat": "tensors"} if may_offload else {"activation_budget": 0.8}
    plan = mk.plan_training(model, x, loss_fn, "sgd", micro_batch_size=512, **wanted).saved_tensors
    assert plan.needs_tape is not may_offload
    treated = treat_saved_tensors(plan)
    plain = outcome(lambda: loss_fn(model, x), model)
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        with treated:
            loss = loss_fn(model, x)
        loss.backward()
        assert all(map(torch.equal, [*gradients(model), torch.rand(1)], plain))


def test_noise_of_a_forward_that_was_not_planned_is_refused():
    layer, x = nn.Linear(6, 6), torch.randn(5, 6)
    with all_saved() as saves:
        names = operators_of(lambda: layer(x).sigmoid().tanh().sum())
    with (
        pytest.warns(MemkitWarning, match="not the planned one"),
        treat_saved_tensors(all_moved(names, saves * 2)),
    ):
        loss = noise_that_is_saved_before_it_is_drawn(layer, x).sum()
    with pytest.raises(StateError, match="rrelu"):
        loss.backward()


@pytest.mark.parametrize("num_moved", [0, 3, 8])
def test_what_is_moved_by_the_plan_leaves_memory(num_moved):
    x, places = torch.randn(1024, 64), []
    model = nn.Sequential(*(module for _ in range(8) for module in (nn.Linear(64, 64), nn.Tanh())))
    with saved_tensors_hooks(lambda tensor: places.append(tensor.data_ptr()), lambda packed: packed):
        kept = [x := layer(x) for layer in model][1::2]  # the results of Tanh, each saved by two layers
    with all_saved() as saves:
        names = operators_of(lambda: model(torch.randn(1024, 64)))
    chosen = {each.data_ptr() for each in kept[:num_moved]}
    moved = frozenset(number for number, place in enumerate(places) if place in chosen)
    plan = SavedTensorPlan(operators=names, offloaded=frozenset({0}), saves=tuple(saves), moved=moved)
    inputs = torch.randn(1024, 64)
    held = []

    def forward():
        with treat_saved_tensors(plan):
            held.append(model(inputs).sum())

    live = trace_allocations(forward).live[-1]
    assert (8 - num_moved) * x.nbytes <= live < (8 - num_moved) * x.nbytes + 10_000


def test_rejects_tensors_changed_after_the_forward():
    model, x = block(), torch.randn(8, 32)
    names = operators_of(lambda: model(x).sum())
    with treat_saved_tensors(everything(names)):
        loss = model(x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(StateError, match="changed in place after it was needed"):
        loss.backward()


def test_does_not_read_memory_released_before_backward():
    model, x = block(), torch.randn(8, 32)
    with treat_saved_tensors(everything(operators_of(lambda: model(x).sum()))):
        loss = model(x).sum()
    x.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="memory was released"):
        loss.backward()


def test_does_nothing_without_gradients():
    model, x = block(), torch.randn(8, 32)
    treated = treat_saved_tensors(everything(operators_of(lambda: model(x).sum())))
    with torch.no_grad(), treated:
        model(x)
    assert treated.num_recomputed == 0


def test_a_plan_around_transforms_that_take_gradients_is_refused():
    model, x = block(), torch.randn(8, 32)
    treated = treat_saved_tensors(everything(operators_of(lambda: model(x).sum())))

    def run():
        with treated:
            torch.func.grad(lambda x: model(x).sum())(x)

    assert_refused(run, ConfigError, "with treat_saved_tensors(plan)", "without checkpoint=, saved_tensors=")


def test_wrong_calls():
    assert_refused(lambda: treat_saved_tensors({"0": "full"}), InputTypeError, "saved_tensors")
    treated = treat_saved_tensors(None)
    with treated, pytest.raises(StateError, match="second forward"), treated:
        pass


def test_two_ways_to_save_tensors_are_refused():
    model, x = block(), torch.randn(8, 32)
    plan = everything(operators_of(lambda: model(x).sum()))
    with (
        mk.train.offload_activations(to="disk", min_bytes=0),
        pytest.raises(StateError, match="other hooks on saved tensors"),
        treat_saved_tensors(plan),
    ):
        pass
    optimizer = torch.optim.SGD(model.parameters())
    assert_refused(
        lambda: mk.MemoryEfficientTrainingWrapper(model, optimizer, saved_tensors=plan, offload={"activations"}),
        mk.errors.ConfigError,
        "two ways to save",
    )


def test_a_plan_is_followed_through_vmap():
    """Left in the middle of vmap, as soon as nothing more is treated, a mode would leave the dispatcher broken."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))).double()
    x = torch.randn(9, 4, dtype=torch.float64)

    def loss_fn(model, x):
        return torch.func.vmap(lambda row: (model(row) - row.roll(1, 0)).square().mean())(x).mean()

    want = gradient_of(loss_fn(model, x), model)
    plan = mk.plan_training(model, x, loss_fn, "sgd", activation_budget=0.1).saved_tensors
    treated = treat_saved_tensors(plan)
    for _ in range(3):
        model.zero_grad()
        with treated:
            loss = loss_fn(model, x)
        loss.backward()
        torch.testing.assert_close(gradients(model), want, rtol=1e-13, atol=1e-13)
    assert treated.num_recomputed > 0


def test_a_plan_as_a_file():
    plan = mixed(operators_of(lambda: block()(torch.randn(2, 32))), 3)
    assert SavedTensorPlan.from_dict(plan.as_dict()) == plan
    with pytest.raises(FileFormatError):
        SavedTensorPlan.from_dict(plan.as_dict() | {"version": 99})
    assert "of" in str(plan)


def test_in_the_wrapper_with_micro_batches():
    model, x = block(), torch.randn(8, 32)
    state = copy.deepcopy(model.state_dict())
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731 - as short as it is
    found = []
    for plan in (None, everything(operators_of(lambda: loss_fn(model, x)))):
        model.load_state_dict(state)
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mk.MemoryEfficientTrainingWrapper(
            model, optimizer, accumulation_steps=2, saved_tensors=plan, probe=False
        ) as trainer:
            trainer.train_step(x, loss_fn)
            for attempt in trainer.microbatches(x):
                with attempt as micro:
                    with trainer.autocast():
                        loss = loss_fn(model, micro)
                    trainer.backward(loss)
            trainer.step()
        found.append([each.clone() for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.*is not the planned one:memkit.errors.MemkitWarning")
def test_a_result_written_through_data_is_refused():
    """The plain step's backward would read what was written; a recomputed or offloaded tensor does not have it."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(64, 8)

    def loss_fn(model, x):
        y = model[:2](x)
        loss = model[2:](y).square().mean()
        y.data.clamp_(min=0)
        return loss

    def harmless(model, x):
        y = model[:2](x)
        loss = model[2:](y).square().mean()
        y.data.max()  # a look
        return loss

    saved = mk.plan_training(model, x, harmless, "sgd", activation_budget=0.5, micro_batch_size=64).saved_tensors
    treated = mk.train.treat_saved_tensors(saved)
    with pytest.raises(mk.errors.StateError, match=r"wrote through \.data to a result of 2\.00 KiB"), treated:
        loss_fn(model, x)
    with treated:
        harmless(model, x)
    assert "data" not in vars(torch.Tensor)
