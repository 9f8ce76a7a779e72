"""A number read from a tensor without data may decide a size: the verdict is then "not known", with the line.

Numbers that are written down, added up or only checked leave the verdict as it is.
"""

import code
import linecache
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._simulation import guesses
from memkit.predict.virtual_gpu import VirtualGPU
from tests.helpers import one_in_product
from tests.simulation.reads import (
    DECIDING,
    ORDINARY,
    accuracy,
    any_of_a_mask,
    best_row,
    caught_in_the_caller,
    int_plus_one,
    list_of_sizes,
    logged,
    loop_in_a_helper,
    not_a_number,
    stored_and_returned,
)

META = torch.device("meta")


def estimate_of(step, target):
    model, x = nn.Linear(8, 8, device=META), torch.empty(4, 8, device=META)
    return mk.estimate_memory_usage(model, x, step, optimizer="sgd", target=target)


@pytest.mark.parametrize("step", DECIDING, ids=lambda step: step.__name__)
def test_deciding_guess_is_not_known_and_names_the_line(step):
    estimate = estimate_of(step, "cpu")
    assert estimate.confidence == "guessed"
    verdict = estimate.verdict("1TiB")
    assert verdict == "not known"
    assert not estimate.fits("1TiB")
    helpers = {loop_in_a_helper: "count_of", stored_and_returned: "count_of", caught_in_the_caller: "positive"}
    name = helpers.get(step, step.__name__)
    assert f"in {name}" in verdict.reason or "in update" in verdict.reason
    assert "reads.py:" in verdict.reason
    assert verdict.reason.split(";")[0].split(" in ")[0] in estimate.explain()


@pytest.mark.parametrize("step", ORDINARY, ids=lambda step: step.__name__)
def test_logged_or_checked_guess_does_not_matter(step):
    estimate = estimate_of(step, "cpu")
    assert estimate.doubts == ()
    assert estimate.verdict("1TiB") == "fits"
    assert estimate.fits("1TiB")


@pytest.mark.filterwarnings("error::memkit.MemkitWarning")
def test_a_place_does_not_matter_in_a_plan_either():
    """The modes of a plan stand between the step and the answer."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    plan = mk.plan_training(model, torch.randn(256, 8), best_row, "sgd", activation_budget=0.6)
    assert plan.estimate.doubts == ()


@pytest.mark.parametrize("target", ["T4"])
@pytest.mark.parametrize("step", [any_of_a_mask, int_plus_one, list_of_sizes, logged, accuracy, not_a_number])
def test_guesses_on_a_card(step, target):
    assert bool(estimate_of(step, target).doubts) is (step in DECIDING)
    with VirtualGPU(target) as gpu:
        step(nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")).backward()
    estimate = gpu.estimate()
    assert bool(estimate.doubts) is (step in DECIDING)
    assert estimate.fits("T4") is (step not in DECIDING)


CELL = """
model = torch.nn.Linear(8, 8).cuda()
if not (model(torch.randn(4, 8).cuda()) > -1e9).all():
    raise ValueError("the check")
"""


class _Cells(code.InteractiveInterpreter):
    """A console, as Jupyter's: installed code that catches what a cell raises, and shows it."""

    def showtraceback(self):
        raise AssertionError("the check raised") from sys.exception()


def exec_and_go_on(compiled, names):
    try:
        exec(compiled, names)
    except ValueError:
        names["model"] = None


RUNNERS = {
    "console": lambda compiled, names: _Cells(names).runcode(compiled),
    "own exec": exec,
    "own exec that goes on": exec_and_go_on,
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_only_handlers_of_the_users_own_code_catch_a_check(runner, monkeypatch):
    lines = CELL.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(CELL), None, lines, "<cell>"))  # as IPython does
    names = {"torch": torch, "__name__": "__main__"}
    with VirtualGPU("T4") as gpu:
        RUNNERS[runner](compile(CELL, "<cell>", "exec"), names)
    goes_on = runner == "own exec that goes on"
    assert (names["model"] is None) is goes_on
    assert bool(gpu.guesses.branches) is goes_on
    assert [each.startswith("<cell>:3") for each in gpu.guesses.assumptions] == [True] * (not goes_on)


def test_files_between_a_read_and_its_answer_are_there():
    """A file that was moved would be taken for the code that reads the number."""
    assert [file for file in (*guesses._BETWEEN, guesses._SCALING) if not Path(file).exists()] == []


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("target", ["cpu", "T4"])
def test_the_larger_of_two_numbers_in_adafactor_does_not_matter(target, foreach):
    model = nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 3))
    optimizer = torch.optim.Adafactor(model.parameters(), foreach=foreach)
    estimate = mk.estimate_memory_usage(
        model, torch.randn(64, 30), lambda model, x: model(x).square().mean(), optimizer=optimizer, target=target
    )
    assert estimate.guesses
    assert estimate.doubts == ()
    assert estimate.fits("1TiB")


def test_the_larger_of_two_numbers_in_another_optimizer_is_a_branch():
    class Scaled(torch.optim.SGD):
        def step(self, closure=None):
            if max(1.0, self.param_groups[0]["params"][0].grad.norm().item()) > 1:
                super().step(closure)

    model = nn.Linear(30, 3)
    optimizer = Scaled(model.parameters(), lr=0.1)
    (doubt,) = mk.estimate_memory_usage(
        model, torch.randn(64, 30), lambda model, x: model(x).square().mean(), optimizer=optimizer
    ).doubts
    assert "branches on a guessed value" in doubt


def draw_until_small(weight):
    while (weight > 2).any():
        nn.init.normal_(weight)


@pytest.mark.parametrize("fill", [nn.init.trunc_normal_, draw_until_small], ids=["torch.nn.init", "own code"])
def test_filling_weights_is_no_guess_but_a_loop_over_values_is(fill):
    with mk.VirtualGPU("RTX 4090") as gpu:
        weight = nn.Parameter(torch.empty(1024, 1024))  # so large that it holds no data
        fill(weight)
        weight.data.cuda()
    assert bool(gpu.guesses) is bool(gpu.estimate().doubts) is (fill is draw_until_small)


def test_known_values_in_an_unknown_order_are_not_known():
    """torch's shape function makes the result by `new_empty` of the known tensor: its numbers are anything."""
    labels, x = torch.arange(2000) % 2, torch.randn(2000, 8)

    def hard_rows(model, batch):
        x, labels = batch
        order = model(x).flatten().argsort()
        return model(x[order][labels[order] == 1]).sum()

    model = nn.Linear(8, 1)
    with pytest.raises(mk.errors.NotSimulatedError, match=r"nonzero.*test_guesses\.py.*selected_fraction"):
        mk.estimate_memory_usage(model, (x, labels), hard_rows, optimizer="sgd")
    assert mk.estimate_memory_usage(model, (x, labels), hard_rows, selected_fraction=0.5).confidence == "guessed"


def test_a_number_of_cells_that_a_guess_decides_is_not_known():
    """memkit reads the coordinates itself, in the middle of a forward."""

    class Voxels(nn.Module):
        def __init__(self):
            super().__init__()
            self.points, self.cells = nn.Linear(3, 4), nn.Linear(4, 512)

        def forward(self, coords):
            index = mk.GridIndex.from_coords(coords, 0.02)
            return self.cells(mk.points.voxel_mean(self.points(coords), index))

    estimate = mk.estimate_memory_usage(Voxels(), torch.rand(2000, 3), lambda model, x: model(x).square().mean())
    assert estimate.verdict("1TiB") == "not known"
    assert "test_guesses.py" in estimate.verdict("1TiB").reason


@pytest.mark.parametrize(
    ("where", "target"), one_in_product(5, ["model", "block", "loss_fn", "function"], ["cpu", "RTX 4090"])
)
def test_what_compiled_code_takes_is_not_known(target, where):
    """The code that is simulated is not the code that the compiler makes of it."""

    def loss_fn(model, x):
        return activate(model(x)).square().mean()

    layers, activate = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.compiler.disable(torch.relu)
    x = torch.rand(4, 8)
    plain = mk.estimate_memory_usage(layers, x, loss_fn, target=target)
    assert (plain.confidence, plain.doubts) == ("exact", ())
    model, loss = layers, loss_fn
    if where == "model":
        model = torch.compile(layers)
    elif where == "block":
        layers[1].compile()
    elif where == "loss_fn":
        loss = torch.compile(loss_fn)
    else:
        activate = torch.compile(torch.relu)
    estimate = mk.estimate_memory_usage(model, x, loss, target=target)
    assert (estimate.peak_bytes, estimate.confidence) == (plain.peak_bytes, "guessed")
    (doubt,) = estimate.doubts
    assert doubt.startswith(str(Path(__file__)))
    assert "calls compiled code" in doubt
    assert not estimate.fits("1TiB")


IN_LIBRARIES = {
    "matrix exponential": lambda x: torch.matrix_exp(x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x),
    "inverse": lambda x: torch.linalg.inv(x),
    "spectrum": lambda x: torch.fft.rfft2(x).abs(),
    "order of long rows": lambda x: x.repeat(1, 200).sort(1)[0],
    "stable order": lambda x: x.repeat(200, 1).sort(stable=True, dim=0)[0],
    "largest of a long row": lambda x: x.repeat(1, 200).topk(5000)[0],
    "median": lambda x: x.repeat(1, 200).median(),
    "most frequent": lambda x: x.mode()[0],
}


@pytest.mark.parametrize("name", IN_LIBRARIES)
def test_what_libraries_take_inside_is_not_known_on_a_card(name):
    """cuSOLVER, cuFFT and CUB ask for memory of their own; LAPACK's has a bound."""
    model, x = nn.Linear(32, 32), torch.rand(32, 32)

    def loss_fn(model, x):
        return IN_LIBRARIES[name](model(x)).square().mean()

    estimate = mk.estimate_memory_usage(model, x, loss_fn, target="RTX 4090", optimizer="sgd")
    assert (estimate.confidence, estimate.fits("1TiB")) == ("guessed", False)
    assert any("of which the results are counted, not what it takes inside" in doubt for doubt in estimate.doubts)
    assert mk.estimate_memory_usage(model, x, loss_fn, optimizer="sgd").fits("1GiB")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # the estimate's doubt
def test_what_flex_attention_takes_inside_is_not_known():
    """Its results have the fused kernel's sizes; without torch.compile it takes all scores as well."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(model, x):
        q, k, v = model(x).view(2, 256, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v).square().mean()

    model, x = nn.Linear(32, 96), torch.rand(2, 256, 32)
    estimate = mk.estimate_memory_usage(model, x, attend, target="RTX 4090", optimizer="sgd")
    assert (estimate.confidence, estimate.fits("1TiB")) == ("guessed", False)
    assert any("calls flex_attention, of which the results are counted" in doubt for doubt in estimate.doubts)
    per_row = 3 * 32 + 32 + 2  # queries, keys and values; the output; a sum for each head
    assert 4 * 512 * per_row <= estimate.activations_bytes < 4 * 512 * (per_row + 256)  # and no scores


class TestParametersOutsideOfTheModel:
    """An optimizer by name has the model's alone: whether the step has one for the others is not known."""

    @staticmethod
    def make():
        coarse, fine = nn.Linear(8, 8), nn.Linear(8, 512)
        return coarse, fine, lambda model, x: fine(model(x)).square().mean()

    @pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW, lambda params: torch.optim.AdamW(params)])
    def test_are_told_of(self, optimizer):
        coarse, _, loss_fn = self.make()
        x = torch.randn(16, 8)
        estimate = mk.estimate_memory_usage(coarse, x, loss_fn=loss_fn, optimizer=optimizer)
        [doubt] = estimate.doubts
        assert "the loss trains 2 parameters outside of the model (18.00 KiB)" in doubt
        assert estimate.verdict("1GiB") == "not known"
        with pytest.warns(mk.MemkitWarning, match="trains 2 parameters outside of the model"):
            plan = mk.plan_training(coarse, x, loss_fn, optimizer, budget="1GiB")
        assert any(doubt in note for note in plan.notes)

    def test_are_known_to_belong_to_the_step_s_own_optimizer(self):
        coarse, fine, loss_fn = self.make()
        optimizer = torch.optim.AdamW([*coarse.parameters(), *fine.parameters()])
        x = torch.randn(16, 8)
        estimate = mk.estimate_memory_usage(coarse, x, loss_fn=loss_fn, optimizer=optimizer)
        assert estimate.confidence == "exact"
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                loss_fn(coarse, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert abs(estimate.peak_bytes - tracker.peak_bytes) <= 64

    def test_that_are_frozen_do_not_matter(self):
        coarse, fine, loss_fn = self.make()
        fine.requires_grad_(False)
        assert not mk.estimate_memory_usage(coarse, torch.randn(16, 8), loss_fn=loss_fn, optimizer="adamw").doubts


CODES = nn.Parameter(torch.zeros(64, 8))
IN_A_LIST, IN_A_DICT = [CODES], {"codes": CODES}
IN_A_NAMESPACE = SimpleNamespace(codes=CODES)


class InAClass:
    codes = CODES


def by_helper():
    return CODES


def residual(model, batch, codes):
    return (model(batch[0]) - codes[batch[1]]).square().mean()


def by_default(model, batch, codes=CODES):
    return residual(model, batch, codes)


def by_name(model, batch, *, codes=CODES):
    return residual(model, batch, codes)


NAMED = {
    "a global": lambda model, batch: residual(model, batch, CODES),
    "a list": lambda model, batch: residual(model, batch, IN_A_LIST[0]),
    "a dict": lambda model, batch: residual(model, batch, IN_A_DICT["codes"]),
    "a helper": lambda model, batch: residual(model, batch, by_helper()),
    "a default": by_default,
    "a named default": by_name,
}


class TestTrainedTensorsThatTheLossReads:
    """They have the stand-ins that their optimizer has; if one is not found, that is said."""

    @staticmethod
    def step_of(codes):
        model = nn.Linear(8, 8)
        batch = torch.randn(16, 8), torch.randint(64, (16,))
        return model, batch, torch.optim.AdamW([*model.parameters(), codes])

    @pytest.mark.parametrize("where", NAMED)
    def test_are_found_where_it_names_them(self, where):
        model, batch, optimizer = self.step_of(CODES)
        loss_fn = NAMED[where]
        estimate = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer=optimizer)
        on_card = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer=optimizer, target="RTX 4090")
        assert not estimate.doubts
        assert not on_card.doubts
        assert CODES is InAClass.codes  # all are back
        assert (
            CODES is IN_A_LIST[0] is IN_A_DICT["codes"] is by_default.__defaults__[0] is by_name.__kwdefaults__["codes"]
        )
        assert CODES.grad is None
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert estimate.peak_interval[0] - 64 <= tracker.peak_bytes <= estimate.peak_interval[1]

    def test_that_are_not_found_are_told_of(self):
        model, batch, optimizer = self.step_of(CODES)

        def loss_fn(model, batch):
            return residual(model, batch, InAClass.codes)

        estimate = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer=optimizer)
        assert any("reads a trained tensor of shape (64, 8) through a class" in each for each in estimate.doubts)
        with pytest.raises(mk.errors.InputError, match=r"let the loss function name it: codes = config.codes"):
            mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer=optimizer, target="RTX 4090")

    def test_that_are_plain_leaves_are_told_of_beside_an_optimizer_by_name(self):
        model, batch, _ = self.step_of(CODES)
        codes = torch.zeros(64, 8, requires_grad=True)

        def loss_fn(model, batch):
            noise = torch.zeros(8).requires_grad_()  # made inside: nothing to step
            return residual(model, batch, codes) + noise.sum()

        batch = batch[0].requires_grad_(), batch[1]  # a batch is not stepped either
        [doubt] = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer="adamw").doubts
        assert "the loss trains 1 parameter outside of the model (2.00 KiB)" in doubt
