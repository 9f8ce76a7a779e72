"""The dry run against the real step on the CPU: live bytes one by one, the peak's parts, and the allocator's truth."""

import copy
import functools
import json
import re
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, NotSimulatedError
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import find_gpu
from memkit.predict.presets import get_preset_config
from memkit.predict.usage import estimate_memory_usage
from tests.helpers import assert_refused, one_in
from tests.predict.steps import STEPS, Step, classify, labels
from tests.predict.truth import NUMBERS, allocated_peak, assert_equals_the_real_step, estimate_of, real_step

# A view that was written in place: its backward frees two blocks of the same size in another order. A tangent of zeros
# is added: torch's shape functions take a few bytes more, for a moment.
OTHER_ORDER = {"unet3d", "unet3d_bfloat16", "laplacian"}


def build(name: str) -> Step:
    torch.manual_seed(0)
    return STEPS[name]()


@pytest.mark.parametrize("name", one_in(5, STEPS))
def test_equals_the_real_step(name):
    assert_equals_the_real_step(functools.partial(build, name), is_other_order=name in OTHER_ORDER)


@pytest.mark.slow  # the profiler prints; the test above reads the same events in another way
@pytest.mark.parametrize("name", STEPS)
def test_interval_contains_profiler_peak(name):
    step = build(name)
    low, high = estimate_of(step).peak_interval
    assert low <= allocated_peak(real_step(step), step.model, step.batch) <= high + NUMBERS


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.RAdam,
        functools.partial(torch.optim.RAdam, betas=(0.9, 0.5)),  # never divides by the variance
        functools.partial(torch.optim.ASGD, t0=4),
    ],
)
def test_later_steps_of_an_optimizer_take_no_more(make, is_own):
    model, x = nn.Linear(64, 256), torch.randn(8, 64)
    run = make(model.parameters())
    predicted = mk.estimate_memory_usage(
        model, x, loss_fn=lambda model, x: model(x).mean(), optimizer=make(model.parameters()) if is_own else make
    )
    peaks = []
    for _ in range(8):
        with mk.Tracker(device="cpu") as tracker:
            model(x).mean().backward()
            run.step()
            run.zero_grad()
        peaks.append(tracker.peak_bytes)
    assert predicted.confidence == "exact"
    assert predicted.peak_bytes == pytest.approx(max(peaks), abs=NUMBERS)


def test_the_class_says_whether_kernels_may_hide_memory():
    classes = {name: estimate_of(build(name)).confidence for name in ("physics_informed", "resnet", "lstm")}
    assert classes == {"physics_informed": "exact", "resnet": "workspace", "lstm": "workspace"}


# ------------------------------------------------------------------------------------------- nothing is left behind


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Everything a user could notice: objects by identity, numbers by value."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {k: (id(t), t._version, t.requires_grad, t.tolist()) for k, t in tensors.items()},
        "gradients": {k: None if t.grad is None else (id(t.grad), t.grad.tolist()) for k, t in tensors.items()},
        "attributes": {
            name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()
        },
        "training": [module.training for module in model.modules()],
        "groups": [(id(group), [id(p) for p in group["params"]]) for group in optimizer.param_groups],
        "state": [(id(p), {k: (id(v), float(v.sum())) for k, v in s.items()}) for p, s in optimizer.state.items()],
        "optimizer": {key: id(value) for key, value in vars(optimizer).items()},
        "random": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
    }


class Noted(nn.Module):
    """Notes things on itself as it runs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
        self.rnn = nn.LSTM(8, 4, batch_first=True)
        self.seen = []
        self.last = None

    def forward(self, x):
        np.random.rand()
        self.last = self.layers(x) + self.rnn(x[:, None])[0][:, 0]
        self.seen.append(self.last)
        return self.last


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails):
    model = Noted()
    model.layers[2].eval()
    outside = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batch = torch.randn(16, 8), labels(4, 16)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()  # and the gradients stay
    model.seen.clear()
    before = state_of(model, optimizer), state_of(outside, optimizer), scheduler.state_dict()

    def loss_fn(model, batch):
        loss = F.cross_entropy(outside(model(batch[0])), batch[1])
        if fails and optimizer.state[next(model.parameters())]["step"] > 1:  # in the second step
            raise ValueError("mine")
        return loss

    estimate = functools.partial(estimate_memory_usage, model, batch, loss_fn=loss_fn, optimizer=optimizer)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            estimate()
    else:
        estimate()
    assert (state_of(model, optimizer), state_of(outside, optimizer), scheduler.state_dict()) == before
    assert model.seen == []
    assert all(type(p) is nn.Parameter for p in [*model.parameters(), *outside.parameters()])
    assert type(batch[0]) is torch.Tensor
    F.cross_entropy(outside(model(batch[0])), batch[1]).backward()  # and all works
    optimizer.step()


OUTSIDE = nn.Linear(8, 8)


class Trainer:
    """A loss as a method, with a network of its own."""

    def __init__(self):
        self.teacher = nn.Linear(8, 8)

    def loss(self, model, x):
        return self.teacher(model(x)).square().mean()


class Opaque:
    layer = nn.Linear(8, 8)


def test_networks_from_outside_count_and_get_no_gradient():
    layer, trainer, hidden = nn.Linear(8, 8), Trainer(), Opaque()
    hidden.layer.weight.grad = kept = torch.ones(8, 8)
    losses = [
        lambda model, x: OUTSIDE(model(x)).square().mean(),
        lambda model, x: layer(model(x)).square().mean(),
        trainer.loss,
        functools.partial(lambda other, model, x: other(model(x)).square().mean(), layer),
    ]
    for loss_fn in losses:
        estimate = estimate_memory_usage(nn.Linear(8, 8), torch.randn(2, 8), loss_fn=loss_fn, optimizer="sgd")
        assert estimate.parameters_bytes == 2 * 4 * (64 + 8)
    estimate_memory_usage(nn.Linear(8, 8), torch.randn(2, 8), loss_fn=lambda m, x: hidden.layer(m(x)).sum())
    assert OUTSIDE.weight.grad is layer.weight.grad is trainer.teacher.weight.grad is None
    assert hidden.layer.weight.grad is kept  # not found before the step, met in it
    assert hidden.layer.bias.grad is None
    assert all(type(p) is nn.Parameter for module in (OUTSIDE, layer, trainer.teacher) for p in module.parameters())


# ---------------------------------------------------------------------------------------------------- the arguments


def test_optimizer_by_name_class_function_and_instance():
    def estimate(optimizer):
        return estimate_memory_usage(
            model, (torch.randn(4, 8), labels(3, 4)), loss_fn=classify, optimizer=optimizer
        ).as_dict() | {"holders": None, "peak_where": None}

    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 3))
    fresh = torch.optim.AdamW(model.parameters())
    forms = ["AdamW", torch.optim.AdamW, lambda params: torch.optim.AdamW(params, lr=0.1), fresh]
    first, *others = [estimate(form) for form in forms]
    assert all(other == first for other in others)
    assert first["optimizer_bytes"] == 2 * first["parameters_bytes"] + 4 * 4
    assert estimate("sgd")["optimizer_bytes"] == 0
    assert_refused(lambda: estimate("adamww"), ConfigError, "did you mean 'adamw'?")
    assert_refused(lambda: estimate(3), InputTypeError, "optimizer=3")


def test_a_model_on_the_meta_device_needs_no_memory():
    def estimate(device):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 8))
        return estimate_memory_usage(model, (torch.randn(4, 64), labels(8, 4)), loss_fn=classify)

    assert estimate("meta") == estimate("cpu")
    with torch.device("meta"):
        huge = nn.Linear(200_000, 200_000)
    peak = estimate_memory_usage(huge, torch.empty(1, 200_000), loss_fn=lambda m, x: m(x).sum(), optimizer="sgd")
    assert peak.parameters_bytes == peak.gradients_bytes == 4 * (200_000**2 + 200_000)


def test_a_view_holds_all_of_its_storage():
    rows = torch.randn(1000, 8)
    estimate = estimate_memory_usage(nn.Linear(8, 8), rows[10:20], loss_fn=lambda m, x: m(x).sum())
    assert estimate.other_bytes == rows.nbytes
    shared = estimate_memory_usage(
        nn.Linear(8, 8), (rows[10:20], rows[0]), loss_fn=lambda m, b: m(b[0]).sum() + m(b[1]).sum()
    )
    assert shared.other_bytes == rows.nbytes


@pytest.mark.parametrize("num_rows", [1000, 2**18])  # below and above what keeps its values
def test_a_view_of_whole_numbers_holds_all_of_its_storage(num_rows):
    rows = torch.arange(8 * num_rows).view(num_rows, 8) % 5
    estimate = estimate_memory_usage(nn.Embedding(5, 8), rows[10:20], loss_fn=lambda m, x: m(x).sum())
    assert estimate.other_bytes == rows.nbytes


def test_accumulation_counts_existing_gradients():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    batch = torch.randn(512, 32)
    one, four, eight = (
        estimate_memory_usage(model, batch, loss_fn=lambda m, x: m(x).square().mean(), accumulation_steps=n)
        for n in (1, 4, 8)
    )
    assert one.gradients_bytes < four.gradients_bytes == four.parameters_bytes
    assert four == eight


def test_counts_data_dependent_values_by_line():
    def loss_fn(model, x):
        y = model(x)
        scale = y.abs().max().item()
        return y.sum() / scale if y.isfinite().all() else y.sum()

    estimate = estimate_memory_usage(nn.Linear(8, 8), torch.randn(2, 8), loss_fn=loss_fn)
    assert estimate.confidence == "guessed"
    line = loss_fn.__code__.co_firstlineno + 2
    assert estimate.guesses[0].startswith("2 x aten._local_scalar_dense.default at ")
    assert estimate.guesses[0].endswith(f"test_dryrun.py:{line} in loss_fn")
    assert estimate.guesses[0] in estimate.explain()


def test_numbers_in_the_batch_are_true():
    def loss_fn(model, batch):
        x, lengths = batch
        return model(x[:, : int(lengths.max())]).sum()

    for longest in (5, 50):
        batch = torch.randn(2, 60, 8), torch.tensor([3, longest])
        estimate = estimate_memory_usage(nn.Linear(8, 100), batch, loss_fn=loss_fn)
        assert estimate.guesses == ()
        assert estimate.activations_bytes + estimate.temporaries_bytes >= 2 * longest * 100 * 4


class Recommender(nn.Module):
    """The gradient of its table is sparse and waits for that of a perceptron."""

    def __init__(self, kind):
        super().__init__()
        self.table = kind(1000, 64, sparse=True, **({"mode": "sum"} if kind is nn.EmbeddingBag else {}))
        self.mlp = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, x, chosen):
        rows = self.mlp(x)  # the first in the forward has the last backward
        looked_up = self.table(chosen)
        return (rows * (looked_up.sum(1) if looked_up.dim() == 3 else looked_up)).sum()


@pytest.fixture(params=[nn.EmbeddingBag, nn.Embedding])
def recommending(request):
    batch = torch.randn(256, 64), torch.randint(1000, (256, 100))
    return Step(Recommender(request.param), batch, lambda model, batch: model(*batch), "sgd")


def test_a_sparse_gradient_has_an_entry_for_each_index(recommending):
    estimate = estimate_of(recommending)
    table, last = 256 * 100 * 64 * 4, sum(each.nbytes for each in recommending.model.mlp[2].parameters())
    assert estimate.gradients_bytes == table + last
    assert estimate.doubts == ()


@pytest.mark.slow  # the profiler prints
def test_a_step_with_a_sparse_gradient_takes_what_the_profiler_saw(recommending):
    recommending.optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    run = real_step(recommending)
    run()
    assert estimate_of(recommending).peak_bytes == allocated_peak(run, recommending.model, recommending.batch)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_step_with_a_sparse_matrix_in_the_batch_is_not_known(layout):
    """A graph's adjacency, which kernels convert into tensors of their own."""
    adjacency = torch.eye(50).to_sparse(layout=layout)
    model, batch = nn.Linear(16, 16), {"x": torch.randn(50, 16), "adjacency": adjacency}

    def loss_fn(model, batch):
        return (batch["adjacency"] @ model(batch["x"])).square().mean()

    estimate = estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer="adam")
    assert (estimate.parameters_bytes, estimate.optimizer_bytes) == (4 * 16 * 17, 2 * (4 * 16 * 17 + 4))
    assert "computes with a sparse tensor, whose size depends on data" in str(estimate.doubts)
    assert not estimate.fits("1GiB")


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_sparse_gradients_that_are_put_together_are_not_known(recommending, accumulation_steps):
    if accumulation_steps == 1:
        # It adds up the entries of equal rows.
        recommending.optimizer = torch.optim.SparseAdam(recommending.model.table.parameters())
    recommending.accumulation_steps = accumulation_steps
    assert "computes with a sparse tensor, whose size depends on data" in str(estimate_of(recommending).doubts)


def test_on_a_card_sparse_gradients_are_refused(recommending):
    with pytest.raises(NotSimulatedError, match=r"sparse_coo.*CUDA's sparse kernels are not simulated"):
        estimate_memory_usage(
            recommending.model, recommending.batch, recommending.loss_fn, optimizer="sgd", target="T4"
        )


def test_data_dependent_sizes_need_a_bound():
    def loss_fn(model, x):
        y = model(x)
        return y[y > 0].square().sum() + y.masked_select(y < 0).sum()

    model, x = nn.Linear(8, 50), torch.randn(100, 8)
    with pytest.raises(InputError, match=r"aten.nonzero.default at .*:\d+ in loss_fn.*selected_fraction=1.0"):
        estimate_memory_usage(model, x, loss_fn=loss_fn)
    half, whole = (estimate_memory_usage(model, x, loss_fn=loss_fn, selected_fraction=f) for f in (0.5, 1.0))
    assert half.peak_bytes < whole.peak_bytes
    assert len(whole.guesses) == 2
    with pytest.raises(InputError, match="repeat_interleave"):
        estimate_memory_usage(
            model,
            x,
            loss_fn=lambda m, x: m(x).repeat_interleave((x[:, 0] > 0).long(), dim=0).sum(),
            selected_fraction=1,
        )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("estimate_memory_usage", lambda *step, **f: estimate_memory_usage(*step[:2], loss_fn=step[2], **f)),
        ("find_worst_batch", lambda model, x, loss_fn, **f: mk.predict.find_worst_batch([x], model, loss_fn, **f)),
        ("plan_training", lambda *step, **f: mk.plan_training(*step, budget="1GiB", **f)),
        (
            "prepare",
            lambda model, *step, **f: mk.prepare(model, torch.optim.SGD(model.parameters()), *step, budget="1GiB", **f),
        ),
        ("advise", lambda *step, **f: mk.advise(*step, **f)),
        ("VirtualGPU", lambda *_, **f: mk.VirtualGPU("T4", **f)),
        ("profile_scaling", lambda *_, **f: mk.predict.profile_scaling(lambda n: lambda: None, [100], **f)),
    ],
)
@pytest.mark.parametrize(
    ("fraction", "meant"), [(0, 0.5), (-0.5, 0.5), (2, 1), (50, 0.5), (1.5, 1), (float("nan"), 0.5)]
)
def test_a_fraction_that_masks_cannot_select_is_refused_by_every_call_alike(name, call, fraction, meant):
    with pytest.raises(ConfigError) as caught:
        call(nn.Linear(8, 50), torch.randn(100, 8), positive_squares, selected_fraction=fraction)
    rule = "expected a finite number above 0 and at most 1"
    assert str(caught.value) == (
        f"{name}(...): got selected_fraction={fraction!r}; {rule}. Way out: pass selected_fraction={meant:g}."
    )


def positive_squares(model, x):
    y = model(x)
    return y[y > 0].square().sum()


@pytest.mark.parametrize("target", ["cpu", "T4"])
def test_an_assumed_fraction_is_a_condition_of_the_verdict(target):
    arguments = nn.Linear(8, 50), torch.randn(100, 8), positive_squares
    few, all_ = (estimate_memory_usage(*arguments, target=target, selected_fraction=f) for f in (0.2, 1.0))
    unmasked = estimate_memory_usage(*arguments[:2], lambda model, x: model(x).sum(), selected_fraction=0.2)
    assert (few.selected_fraction, all_.selected_fraction, unmasked.selected_fraction) == (0.2, 1.0, None)
    condition = ", if masks select at most 20%"
    assert (few.condition, all_.condition, unmasked.condition) == (condition, "", "")
    for num_bytes in (few.required_bytes, few.least_required_interval[1]):  # with less, a card has to free its cache
        size = f"{num_bytes}B"
        verdict = few.verdict(size)
        assert verdict == "fits"
        assert condition in verdict.reason
        assert few.fits(size)
    assert few.headline.endswith(condition)
    assert all_.fits(f"{all_.required_bytes}B")
    for estimate, share in ((few, "20%"), (all_, "100%")):
        verdict = estimate.verdict(f"{estimate.least_required_interval[1] - 1}B")
        assert verdict == "not known"
        assert f"if masks select {share}; if they select less, it may fit" in verdict.reason
        assert estimate.verdict("1KiB") == "not known"
    assert unmasked.verdict("1KiB") == "does not fit"


@pytest.mark.parametrize("target", ["cpu", "T4"])
@pytest.mark.parametrize(
    "select",
    [
        lambda y, mask: y[mask],
        lambda y, mask: y.masked_select(mask.unsqueeze(1)),
        lambda y, mask: y[:1].masked_select(mask.unsqueeze(1)),
        lambda y, mask: y.masked_select(mask.unsqueeze(1).expand(y.shape)),
    ],
)
def test_sizes_by_a_known_mask_need_none(select, target):
    def loss_fn(model, batch):
        selected = select(model(batch[0]), batch[1])
        assert selected.numel() == 250  # as with data
        return selected.square().sum()

    model, mask = nn.Linear(8, 50), torch.arange(100) % 20 == 0
    loss_fn(model, (torch.randn(100, 8), mask)).backward()
    estimate = estimate_memory_usage(model, (torch.randn(100, 8), mask), loss_fn=loss_fn, target=target)
    assert estimate.confidence in ("exact", "workspace")
    assert estimate.guesses == ()


@pytest.mark.parametrize("target", ["cpu", "T4"])
@pytest.mark.parametrize(
    "make",
    [
        lambda y, lengths: torch.arange(50, device=lengths.device) < lengths.unsqueeze(1),
        lambda y, lengths: ~torch.eye(4, 50, dtype=torch.bool, device=y.device),
    ],
)
def test_masks_made_of_positions_are_known(make, target):
    def loss_fn(model, batch):
        y = model(batch[0])
        mask = make(y, batch[1])
        return y[mask].square().sum() + y.masked_select(mask).sum()

    model, batch = nn.Linear(8, 50), (torch.randn(4, 8), torch.tensor([3, 5, 7, 9]))
    estimate = estimate_memory_usage(model, batch, loss_fn=loss_fn, target=target)
    assert estimate.confidence in ("exact", "workspace")
    assert estimate.guesses == ()


@pytest.mark.parametrize("target", ["cpu", "T4"])
@pytest.mark.parametrize(
    "write",
    [
        lambda zeros, y: zeros.add_(y),
        lambda zeros, y: zeros[0].add_(y[0]),
        lambda zeros, y: torch._foreach_add_([zeros], [y]),
        lambda zeros, y: torch._foreach_add_([zeros, y], 1),
    ],
)
def test_what_a_step_wrote_is_not_known(write, target):
    def loss_fn(model, x):
        y = model(x)
        zeros = torch.zeros(2, device=y.device)
        write(zeros, y[0].detach())
        return y.sum() + zeros.sum().item()

    estimate = estimate_memory_usage(nn.Linear(2, 2), torch.ones(1, 2), loss_fn=loss_fn, target=target)
    assert len(estimate.guesses) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16-mixed"}, "precision='fp16-mixed'"),
        ({"target": "RTX 4090", "precision": "fp8"}, "precision='fp8'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"accumulation_steps": 1.5}, "accumulation_steps=1.5"),
        ({"accumulation_steps": "4"}, "accumulation_steps='4'"),
        ({"selected_fraction": 1.5}, "selected_fraction=1.5"),
        ({"selected_fraction": "0.5", "target": "RTX 4090"}, "selected_fraction='0.5'"),
    ],
)
def test_wrong_options(options, message):
    options = {"loss_fn": lambda m, x: m(x).sum()} | options
    assert_refused(lambda: estimate_memory_usage(nn.Linear(2, 2), torch.ones(1, 2), **options), ConfigError, message)


@pytest.mark.parametrize(
    ("model", "loss_fn", "error", "message"),
    [
        (nn.Linear(2, 2), None, InputTypeError, "loss_fn="),
        (lambda x: x, lambda m, x: m(x).sum(), InputTypeError, "expected a torch.nn.Module"),
        (nn.Linear(2, 2), lambda m, x: m(x).sum().item(), InputTypeError, "got a float"),
        (nn.LazyLinear(8), lambda m, x: m(x).sum(), InputError, "call model(batch) once first"),
    ],
)
def test_wrong_arguments(model, loss_fn, error, message):
    assert_refused(lambda: estimate_memory_usage(model, torch.ones(1, 2), loss_fn=loss_fn), error, message)


@pytest.mark.parametrize(
    "beside",
    [
        {"precision": "fp16-mixed"},
        {"target": "RTX 4090"},
        {"accumulation_steps": 2},
        {"optimizer": torch.optim.SGD},
        {"sample_batch": torch.ones(1)},
        {"selected_fraction": 1.0},
    ],
)
def test_a_config_stands_alone(beside):
    words = f"got {next(iter(beside))} together with a config"
    assert_refused(lambda: estimate_memory_usage(get_preset_config("medium"), **beside), ConfigError, words)


def test_a_card_as_a_record_and_the_loss_by_position():
    model, batch = nn.Linear(64, 64), torch.ones(8, 64)

    def loss_fn(model, x):
        return model(x).sum()

    by_name = estimate_memory_usage(model, batch, loss_fn=loss_fn, target="RTX 4090")
    assert estimate_memory_usage(model, batch, loss_fn, target=find_gpu("RTX 4090")) == by_name
    with pytest.raises(InputTypeError, match="the name of a GPU as a string, or a GPU object"):
        estimate_memory_usage(model, batch, loss_fn, target=None)


Triple = namedtuple("Triple", ["x", "y", "unused"])


@pytest.mark.parametrize("target", ["cpu", "RTX 4090"])
@pytest.mark.parametrize("make", [UserDict, lambda items: Triple(**items)], ids=["UserDict", "named tuple"])
def test_batches_of_other_kinds(make, target):
    def loss_fn(model, batch):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, UserDict) else (batch.x, batch.y)
        return F.mse_loss(model(x), y)

    model, items = nn.Linear(64, 8), {"x": torch.randn(32, 64), "y": torch.randn(32, 8), "unused": torch.ones(999)}
    batch, before = make(items), dict(items)
    estimate = estimate_memory_usage(model, batch, loss_fn, target=target)
    plain = estimate_memory_usage(model, tuple(items.values()), lambda m, b: F.mse_loss(m(b[0]), b[1]), target=target)
    assert estimate.peak_bytes == plain.peak_bytes
    assert estimate.other_bytes == plain.other_bytes
    left = dict(batch) if isinstance(batch, UserDict) else batch._asdict()
    assert all(left[name] is before[name] for name in before)


def test_the_callers_modes_do_not_matter():
    def estimate(model):
        return estimate_memory_usage(model, x, loss_fn=lambda m, x: m(x).square().mean()).peak_bytes

    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    peak_bytes = estimate(model)
    assert estimate(torch.compile(model, backend="eager")) == peak_bytes
    with torch.inference_mode():
        assert estimate(model) == peak_bytes


def test_hooks_run_and_closures_are_restored():
    model = nn.Linear(8, 8)
    average = torch.optim.swa_utils.AveragedModel(model)
    before = [parameter.clone() for parameter in average.parameters()]
    with_average, plain = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    with_average.register_step_post_hook(lambda *_: average.update_parameters(model))
    more, less = (
        estimate_memory_usage(model, torch.ones(4, 8), loss_fn=lambda m, x: m(x).sum(), optimizer=optimizer)
        for optimizer in (with_average, plain)
    )
    assert more.peak_bytes >= less.peak_bytes + 4 * (64 + 8)
    assert average.n_averaged == 0
    torch.testing.assert_close(list(average.parameters()), before, rtol=0, atol=0)


def test_the_answer():
    estimate = estimate_of(build("resnet"))
    assert estimate.reserved_bytes is estimate.context_bytes is estimate.total_bytes is None
    assert estimate.required_bytes == estimate.peak_bytes + estimate.workspace_bytes
    assert estimate.fits(estimate.required_bytes)
    assert not estimate.fits(estimate.required_bytes - 1)
    module, operator, phase, source = estimate.peak_where.split(", ")
    assert (module, operator, phase) == ("4.norm2", "aten.native_batch_norm_backward.default", "backward")
    assert re.fullmatch(r"\S+zoo.py:\d+ in forward", source)
    text = estimate.explain()
    assert "confidence: workspace" in text
    assert str(estimate.holders[0]) in text
    assert "None" not in text
    sizes = [holder.nbytes for holder in estimate.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert copy.deepcopy(estimate) == estimate
    assert MemoryEstimate.from_dict(json.loads(json.dumps(estimate.as_dict()))) == estimate


@pytest.mark.parametrize("figures", [None, "", "[]", b"", {}, {"parameters_bytes": 3}])
def test_other_figures_are_no_estimate(figures):
    assert_refused(lambda: MemoryEstimate.from_dict(figures), FileFormatError, "from_dict(estimate.as_dict())")


def test_known_positions_that_are_joined_stay_on_the_card():
    """As PyG's GCNConv adds loops to a graph's edges."""

    def loss_fn(model, batch):
        x, edges = batch
        loops = torch.arange(len(x), device=edges.device).repeat(2, 1)
        edges = torch.cat([edges[:, edges[0] != edges[1]], loops], dim=1)
        degree = x.new_zeros(len(x)).scatter_add_(0, edges[1], torch.ones(edges.shape[1], device=edges.device))
        return (model(x)[:, 0] * degree).mean()

    torch.manual_seed(0)
    batch = torch.randn(10, 3), torch.randint(0, 10, (2, 40))
    estimate = estimate_memory_usage(nn.Linear(3, 1), batch, loss_fn=loss_fn, optimizer="sgd", target="RTX 4090")
    assert estimate.confidence != "guessed"
