"""The cache of operators' results without data: equal to torch's shape functions, and no entry that may change."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memkit import estimate_memory_usage
from memkit._simulation import tensors
from memkit._simulation.tensors import Tensors
from tests.predict.test_dryrun import build
from tests.predict.truth import dry_run


def description(value, given):
    """All that a result without data has: which argument it is, or its sizes, storage and kernels."""
    if isinstance(value, (tuple, list)):
        return type(value) is list, [description(each, given) for each in value]
    if not isinstance(value, FakeTensor):
        return value
    storage = value.untyped_storage()
    leaves = [each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, FakeTensor)]
    return (
        [each is value for each in leaves],
        [each.untyped_storage()._cdata == storage._cdata for each in leaves],
        storage.nbytes(),
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.fake_device,
        value.requires_grad,
        torch._C._dispatch_keys(value),
        {name: attribute for name, attribute in vars(value).items() if name != "constant"},
    )


@pytest.fixture
def counts(monkeypatch):
    """Compare what is made again with what torch says; counts how often, and how often torch was asked."""
    counted = Counter()
    again, follow = Tensors.again, FakeTensorMode.dispatch

    def compared(mode, recipe, func, args, kwargs):
        made = again(mode, recipe, func, args, kwargs)
        said = follow(mode, func, (), args, kwargs)
        assert description(made, (args, kwargs)) == description(said, (args, kwargs)), func
        counted["again"] += 1
        return made

    def asked(mode, func, *args):
        counted["asked"] += 1
        return follow(mode, func, *args)

    monkeypatch.setattr(Tensors, "again", compared)
    monkeypatch.setattr(FakeTensorMode, "dispatch", asked)
    return counted


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "cpu") for name in ("resnet", "packed_lengths")),
        *(
            pytest.param(name, "cpu", marks=pytest.mark.slow)
            for name in ("lstm", "encoder_bfloat16", "message_passing")
        ),
        ("message_passing", "RTX 4090"),
        *(pytest.param(name, "RTX 4090", marks=pytest.mark.slow) for name in ("resnet", "encoder_bfloat16", "lstm")),
    ],
)
def test_cached_results_match_torch(name, target, counts):
    step = build(name)
    for _ in range(2):
        counts.clear()
        estimate_memory_usage(
            step.model,
            step.batch,
            loss_fn=step.loss_fn,
            optimizer=step.optimizer,
            precision=step.precision,
            target=target,
        )
    assert counts["again"] > 2 * counts["asked"]


@pytest.mark.slow
def test_most_operators_of_a_second_estimate_are_made_again(counts):
    """Labels have values, and torch's own cache takes nothing that touches them."""
    for name in ("mlp", "resnet", "tied_decoder"):
        dry_run(build(name))
        counts.clear()
        dry_run(build(name))
        assert counts["again"] > 4 * counts["asked"]


def test_a_wrong_recipe_would_be_seen(counts, monkeypatch):
    dry_run(build("mlp"))
    make = Tensors.fake
    monkeypatch.setattr(Tensors, "fake", lambda mode, elem, device: make(mode, elem.new_empty(elem.shape), device))
    with pytest.raises(AssertionError):
        dry_run(build("mlp"))


def test_distinguishes_numbers_by_type_and_value():
    mode = Tensors()
    x = mode.stand_in(torch.zeros(2000, dtype=torch.int64))
    two, three = (mode.stand_in(torch.tensor(mask)) for mask in ([True, False, True], [True, True, True]))
    with mode:
        assert (x * 1).dtype is torch.int64
        assert (x * 1.0).dtype is torch.float32
        assert (x * True).dtype is torch.int64
        assert x[:3][two].shape == (2,)
        assert x[:3][three].shape == (3,)
        with torch.inference_mode():
            assert (x * 1).is_inference()
        assert not (x * 1).is_inference()


def twice(run, *shapes):
    """What two runs make of tensors without data, the second of the same arguments."""
    with Tensors():
        return [description(run(*map(torch.empty, shapes)), ()) for _ in range(2)]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda x: x.t_(), id="it changes sizes in place"),
        pytest.param(lambda x: x.resize_(2, 3), id="it changes the storage"),
        pytest.param(lambda x: torch.add(x, x, out=torch.empty(0)), id="it writes into a result given"),
        pytest.param(lambda x: x.split(2), id="several views"),
        pytest.param(lambda x: x[1:, 2:].t(), id="a view of a view"),
        pytest.param(lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(), id="a conjugate, which is not computed"),
        pytest.param(lambda x: torch._foreach_add([x, x], 1.0), id="a list"),
        pytest.param(lambda x: torch.ops.aten._unsafe_view(x, [24]).add_(1), id="a view that says it is none"),
        pytest.param(lambda x: torch.nn.functional.mse_loss(x, x), id="a storage larger than the result"),
        pytest.param(lambda x: x.is_same_size(x), id="an answer"),
    ],
)
def test_the_second_time_is_like_the_first(run):
    first, second = twice(run, (4, 6))
    assert first == second


def test_does_not_cache_guessed_results():
    lengths = []
    for fraction in (1.0, 0.5):
        with Tensors(fraction):
            x = torch.empty(100)
            lengths.append(len(x[x > 0]))
    assert lengths == [100, 50]


def test_does_not_cache_value_dependent_results(monkeypatch):
    """An operator that asks inside whether its input is finite, as code does that stops a failed training."""
    dispatch = FakeTensorMode.dispatch

    def asking(mode, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.relu.default:
            return dispatch(mode, func, types, args, kwargs or {})
        with mode:
            return torch.empty(100 if args[0].any() else 50)

    monkeypatch.setattr(FakeTensorMode, "dispatch", asking)
    with Tensors():
        lengths = [len(torch.relu(make(torch.empty(7)))) for make in (torch.isnan, lambda x: x == x)]
    assert lengths == [50, 100]


def test_a_view_is_of_its_own_argument():
    with Tensors():
        first, second = torch.empty(4, 6), torch.empty(4, 6)
        for x in (first, second):
            assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata


def test_known_counts_go_up_and_take_no_memory():
    mode = Tensors()
    count = mode.stand_in(torch.tensor(3))
    with mode:
        assert count.add_(2) is count
        assert int(count) == 5
        assert (count + 1).item() == 6


def test_recipes_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(tensors, "_recipes", {})
    monkeypatch.setattr(tensors, "_MOST_RECIPES", 5)
    with Tensors():
        for length in range(1, 20):
            torch.empty(length)
    assert len(tensors._recipes) <= 5
