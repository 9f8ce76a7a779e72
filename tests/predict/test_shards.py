"""One rank's step without data against two real gloo processes, and what an estimate leaves behind."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._simulation.shard import Shard
from memkit.predict.usage import estimate_memory_usage
from memkit.recipes.planned import plan_training, prepare
from tests.helpers import assert_refused, one_in
from tests.predict.ranks import (
    FOUR,
    MORE,
    REPLICATED,
    SHARDED,
    build,
    figures,
    outcome,
    rank_estimate,
    rank_run,
    run_for_real,
    spread,
    without,
)
from tests.predict.truth import allocated_peak
from tests.toys import mean_square

# Python numbers that C++ wraps in tensors; DDP's own divides by the number of ranks.
NUMBERS = 64
# DDP sends the order of its new buckets around, an int32 per parameter and one more; gloo's threads may let go late.
ORDER = 4
# In the real step nobody says what DDP's buckets are; here they are gradients.
MAY_HOLD_BUCKETS = ("gradient", "activation", "input")

# A parameter gets no gradient: DDP says so at the next forward, which an estimate does not run.
REFUSED_IN_A_SECOND_STEP = {"laplacian, ddp"}

# Torch warns of units that return views, as the real step does.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.fixture(scope="module")
def real(request, tmp_path_factory):
    """What the two processes measure for the cases of the tests that were chosen to run."""
    names = {
        each.callspec.params["name"] for each in request.session.items if "real" in getattr(each, "fixturenames", ())
    }
    return run_for_real(tmp_path_factory.mktemp("ranks"), [each for each in (*SHARDED, *REPLICATED) if each in names])


def figures_without_data(name):
    record = rank_run(name)
    assert record.guesses == ()
    return figures(record.recording)


def assert_sharded_equal(name, ranks):
    first, *others = (figures_of[name] for figures_of in ranks)
    assert figures_without_data(name) == first
    assert max(other["peak"] for other in others) <= first["peak"]  # of an uneven shape the first holds the most


def assert_replicated_equal(name, ranks):
    expected, found = ranks[0][name], figures_without_data(name)
    num_parameters = len(list(build(name).model.parameters()))
    assert 0 <= expected["peak"] - found["peak"] <= NUMBERS + ORDER * (num_parameters + 1)
    for part in expected.keys() - {*MAY_HOLD_BUCKETS, "peak"}:
        assert found[part] == expected[part], part


@pytest.mark.parametrize("name", one_in(6, SHARDED))
def test_equals_a_real_sharded_step(name, real):
    assert_sharded_equal(name, real)


@pytest.mark.parametrize("name", one_in(2, REPLICATED))
def test_equals_a_real_replicated_step(name, real):
    assert_replicated_equal(name, real)


@pytest.mark.parametrize("name", one_in(3, SHARDED))
def test_negative_control_without_gathered_parameters(name, real):
    """Negative control: without them no case is equal."""
    recording = rank_run(name).recording
    gathered = [storage.id for storage in recording.storages() if storage.operator == "fsdp.unshard"]
    assert without(recording, gathered).peak_bytes() < real[0][name]["peak"]


@pytest.mark.slow  # four processes
def test_equals_four_real_ranks(tmp_path):
    ranks = run_for_real(tmp_path, FOUR, world_size=4)
    for name in FOUR:
        assert_sharded_equal(name, ranks)


@pytest.mark.slow  # 38 models, three ways
def test_equals_many_real_steps(tmp_path):
    ranks = run_for_real(tmp_path, MORE)
    num_answers = 0
    for name, case in MORE.items():
        if name in REFUSED_IN_A_SECOND_STEP:
            assert ranks[0][name] == "RuntimeError"
        elif isinstance(ranks[0][name], str):
            assert outcome(figures_without_data, name) == ranks[0][name]
        else:
            (assert_replicated_equal if case.shard.kind == "ddp" else assert_sharded_equal)(name, ranks)
            num_answers += 1
    assert num_answers >= len(MORE) - 11  # torch itself refuses the others


@pytest.fixture
def group_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow  # the profiler prints
@pytest.mark.parametrize("name", SHARDED)
def test_interval_contains_allocator_peak(name, request):
    """Real fully_shard and real memory, in a group that takes none for itself as gloo does."""
    low, high = rank_estimate(name).peak_interval
    request.getfixturevalue("group_of_two")
    assert low <= allocated_peak(*spread(name)) <= high + NUMBERS


# ------------------------------------------------------------------------------------------ what the parts mean


def small():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def estimate(shard, model=None, num_rows=4, **options):
    batch = torch.randn(num_rows, 6)
    return estimate_memory_usage(model or small(), batch, loss_fn=mean_square, shard=shard, **options)


def test_parts_add_up_and_name_the_gathered():
    found = estimate(Shard("fsdp2", 2), num_rows=64)
    assert found.parameters_bytes == 4 * (5 * 6 + 5 + 2 * 10 + 2)
    assert found.optimizer_bytes == 2 * found.parameters_bytes + 4 * 4
    assert found.unsharded_bytes == 4 * (10 * 6 + 10 + 4 * 10 + 4)  # three rows and one that pads
    assert found.peak_bytes == sum(list(found.parts().values())[:8])
    assert "gathered parameters" in found.explain()
    assert found.as_dict()["unsharded_bytes"] == found.unsharded_bytes
    assert estimate(Shard("ddp", 2)).unsharded_bytes is None
    assert estimate(None).unsharded_bytes is None


def of_layers(shard):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    return estimate_memory_usage(model, torch.randn(2, 64), loss_fn=mean_square, optimizer="sgd", shard=shard)


def test_more_ranks_hold_less():
    shares = [of_layers(Shard("fsdp2", ranks, ("*",))).parameters_bytes * ranks for ranks in (2, 8, 64)]
    assert shares == [8 * 4 * 65 * 64] * 3


def test_a_divisor_reshards_to_fewer_ranks():
    """Between forward and backward a rank keeps its share among two of four."""
    freed, halves, kept = (
        of_layers(Shard("fsdp2", 4, ("*",), reshard_after_forward=reshard)).peak_bytes for reshard in (True, 2, False)
    )
    assert freed < halves < kept


def test_an_optimizer_by_zero_holds_its_share():
    whole, shared = estimate(Shard("ddp", 2)), estimate(Shard("zero1", 2))
    assert whole.parameters_bytes == shared.parameters_bytes
    assert whole.optimizer_bytes // 3 < shared.optimizer_bytes < whole.optimizer_bytes


# --------------------------------------------------------------------------------------------- left as it was


@pytest.mark.parametrize(
    ("kind", "target"),
    [*((kind, "cpu") for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2")), ("zero1", "H100"), ("fsdp2", "H100")],
)
def test_leaves_no_trace(kind, target, capfd):
    model = small()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    resize, excepthook = torch.UntypedStorage.resize_, sys.excepthook
    first = estimate(Shard(kind, 2), model, target=target)
    assert not dist.is_initialized()
    assert not torch.cuda.is_available() or torch.version.cuda
    assert torch.UntypedStorage.resize_ is resize
    assert sys.excepthook is excepthook
    assert [type(module) for module in model.modules()] == [nn.Sequential, nn.Linear, nn.Tanh, nn.Linear]
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        torch.testing.assert_close(value, before[name][1], rtol=0, atol=0)
    mean_square(model, torch.randn(4, 6)).backward()
    assert estimate(Shard(kind, 2), model, target=target) == first
    assert capfd.readouterr() == ("", "")


def test_leaves_no_trace_after_an_error():
    model = small()

    def broken(model, x):
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        estimate_memory_usage(model, torch.randn(4, 6), loss_fn=broken, shard=Shard("fsdp2", 2, ("0",)))
    assert not dist.is_initialized()
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter


def test_the_model_can_be_sharded_afterwards(request):
    model = small()
    estimate(Shard("fsdp2", 2, ("0",)), model)
    request.getfixturevalue("group_of_two")
    fully_shard(model[0])
    fully_shard(model)
    assert isinstance(model[2].weight, DTensor)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fsdp3", 2), "one of ddp"),
        (("fsdp2", 1), "2 or more"),
        (("fsdp2", "4"), "got ranks='4'; expected a whole number"),
        (("fsdp2", 4.5), "got ranks=4.5"),
        (("fsdp2", 8, (), 2.0), "divisor of ranks"),
        (("fsdp2", 2, "layers"), "a tuple of names"),
        (("fsdp2", 8, (), 3), "divisor of ranks"),
        (("zero2", 8, (), True), "belongs to fsdp2"),
        (("ddp", 2, ("0",)), "belongs to fsdp2, zero2 and zero3"),
        (("ddp", 2, (), None, torch.bfloat16), "belongs to fsdp2, zero2 and zero3"),
        (("fsdp2", 2, (), None, None, None, True), "belongs to ddp"),
        (("fsdp2", 2, (), None, "bfloat16"), "got 'bfloat16'; expected None, or a floating-point torch.dtype"),
        (("zero3", 2, (), None, 1.5), "got 1.5"),
        (("fsdp2", 2, (), None, None, torch.int8), "got torch.int8"),
    ],
)
def test_rejects_options_of_other_kinds(arguments, message):
    assert_refused(lambda: Shard(*arguments), ConfigError, message)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"units": "*"}, "Shard('fsdp2', ranks=8, units=('*',))"),
        ({"units": ["a.*", "b"]}, "Shard('fsdp2', ranks=8, units=('a.*', 'b'))"),
        ({"units": None}, "Shard('fsdp2', ranks=8)"),
        ({"units": 3, "reshard_after_forward": False}, "Shard('fsdp2', ranks=8, reshard_after_forward=False)"),
        ({"kind": "fsdp", "units": ("*",)}, "Shard('fsdp2', ranks=8, units=('*',))"),
        ({"kind": "DDP", "gradient_as_bucket_view": True}, "Shard('ddp', ranks=8, gradient_as_bucket_view=True)"),
        (
            {"units": ("*",), "reshard_after_forward": 3, "param_dtype": torch.bfloat16},
            "Shard('fsdp2', ranks=8, units=('*',), param_dtype=torch.bfloat16)",
        ),
        (
            {"kind": "zero3", "units": ("*",), "reshard_after_forward": 4},
            "Shard('fsdp2', ranks=8, units=('*',), reshard_after_forward=4)",
        ),
        (
            {"kind": "ddp", "units": ("*",), "gradient_as_bucket_view": True},
            "Shard('fsdp2', ranks=8, units=('*',))",
        ),
        ({"units": ("*",), "gradient_as_bucket_view": True}, "Shard('fsdp2', ranks=8, units=('*',))"),
        ({"param_dtype": "torch.float16"}, "Shard('fsdp2', ranks=8, param_dtype=torch.float16)"),
        ({"reduce_dtype": "fp32", "units": "a"}, "Shard('fsdp2', ranks=8, units=('a',), reduce_dtype=torch.bfloat16)"),
    ],
)
def test_the_corrected_shard_keeps_what_else_was_given(given, meant):
    with pytest.raises(ConfigError) as caught:
        Shard(**{"kind": "fsdp2", "ranks": 8} | given)
    assert caught.value.fix == f"write {meant}."
    assert repr(eval(meant, {"Shard": Shard, "torch": torch}))  # it is accepted


@pytest.mark.parametrize("target", ["cpu", "H100"])
def test_refuses_text_and_names_of_no_units(target):
    def refused(shard, words):
        assert_refused(lambda: estimate(shard, target=target), ConfigError, words)

    refused("fsdp2", "Shard('fsdp2', 8)")
    refused(Shard("fsdp2", 2, ("2.",)), "did you mean '2'")
    refused(Shard("fsdp2", 2, ("layers.*",)), "named_modules")


def test_refuses_an_optimizer_of_the_whole_model():
    model, shard = small(), Shard("fsdp2", 2)
    whole = torch.optim.AdamW(model.parameters())
    assert_refused(lambda: estimate(shard, model, optimizer=whole), InputTypeError, "lambda params")


@pytest.mark.parametrize("target", ["cpu", "H100"])
def test_rejects_process_in_a_group(target, group_of_two):
    assert_refused(lambda: estimate(Shard("fsdp2", 2), target=target), StateError, "before init_process_group")
    assert dist.is_initialized()


def test_refuses_a_sharded_model(group_of_two):
    model = small()
    fully_shard(model)
    dist.destroy_process_group()
    assert_refused(lambda: estimate(Shard("fsdp2", 2), model), InputError, "before fully_shard")


def estimate_of(model, x):
    return estimate_memory_usage(model, x, loss_fn=mean_square)


@pytest.mark.parametrize(
    ("call", "kind", "way_out"),
    [
        (
            lambda model, optimizer, x: estimate_of(model, x),
            "ddp",
            r"pass model\.0\.module in place of model\.0; .*shard=Shard",
        ),
        (lambda model, optimizer, x: estimate_of(model, x), "fsdp2", "estimate_memory_usage before fully_shard"),
        (lambda model, optimizer, x: plan_training(model, x, mean_square), "ddp", "pass model.0.module in place"),
        (
            lambda model, optimizer, x: plan_training(model, x, mean_square),
            "fsdp2",
            "treat='blocks'.* before fully_shard",
        ),
        (
            lambda model, optimizer, x: prepare(model, optimizer, x, mean_square),
            "ddp",
            r"plan_training\(.*with model\.0\.module",
        ),
        (
            lambda model, optimizer, x: prepare(model, optimizer, x, mean_square),
            "fsdp2",
            "treat='blocks'.* before fully_",
        ),
    ],
)
def test_a_model_of_ranks_is_refused_and_trains_on(call, kind, way_out, group_of_one):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    if kind == "ddp":
        model[0] = DistributedDataParallel(model[0])
    else:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_refused(lambda: call(model, optimizer, x), InputError, way_out)
    mean_square(model, x).backward()  # left as it was
    mean_square(plain, x).backward()
    for each, expected in zip(model.parameters(), plain.parameters(), strict=True):
        grad = each.grad.full_tensor() if kind == "fsdp2" else each.grad
        torch.testing.assert_close(grad, expected.grad, rtol=1e-13, atol=1e-15)
