"""`profile_scaling` as a user calls it: what a step may look like, what comes back, what stays untouched."""

from __future__ import annotations

import csv
import gc
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit._charts import pictures
from memkit.predict.scaling.points import ScalingPoint
from memkit.predict.scaling.profile import profile_scaling
from memkit.predict.scaling.result import ScalingResult
from memkit.predict.scaling.traces import trace_step
from tests.helpers import assert_refused
from tests.predict.scaling.families import training

MODEL = nn.Linear(16, 16)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


def build_step_of_mode(n, mode):
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(n, 16)
    train = training(model, lambda: model(x).square().mean())
    return train if mode == "train" else lambda: model(x)


def build_step(n):
    return build_step_of_mode(n, "train")


def optimize(loss):
    OPTIMIZER.zero_grad()
    loss.backward()
    OPTIMIZER.step()


def build_step_on_globals(n):
    x = torch.randn(n, 16)

    def step():
        optimize(MODEL(x).square().mean())

    return step


@pytest.fixture(scope="module")
def result():
    return profile_scaling(build_step, sizes=[4000, 1000], modes=("train", "inference"))


def test_both_modes_at_every_size(result):
    assert [(p.mode, p.size, p.status, p.source) for p in result.points] == [
        (mode, size, "ok", "fake") for mode in ("train", "inference") for size in (1000, 4000)
    ]
    # By hand, the smallest of what lives at the peak of inference: x, the hidden layer and its ReLU, all parameters.
    hidden, parameters = 64 * 4 * 1000, 4 * (16 * 64 + 64 + 64 + 1)
    assert result.peaks("inference")[1000] == 1000 * 16 * 4 + parameters + 2 * hidden
    assert "aten.relu.default, forward" in result.points[2].peak_where
    train = result.law["train"]
    assert (train.tier, train.order, train.held_out_error) == ("structural", 1, 0.0)
    assert result.ratio(1000) == result.peaks("train")[1000] / result.peaks("inference")[1000]
    assert result.ratio(10**6) == pytest.approx(train.predict(10**6) / result.law["inference"].predict(10**6))


def test_build_step_receives_the_mode(result):
    own = profile_scaling(build_step_of_mode, sizes=[1000, 4000])
    assert own.peaks("train") == result.peaks("train")
    assert own.peaks("inference") == result.peaks("inference")


def test_inference_mode_has_no_graph_gradients_or_state():
    trace = trace_step(build_step, 1000, "inference")
    assert {place.phase for place in trace.places} <= {"forward", "other"}
    assert trace.live[0] == 1000 * 16 * 4 + 4 * (16 * 64 + 64 + 64 + 1)


@pytest.mark.parametrize("build", [build_step_on_globals, partial(build_step_on_globals)])
def test_module_level_models_and_optimizers_stay_unchanged(build):
    values = MODEL.weight.detach().clone()
    law = profile_scaling(build, sizes=[100], modes=["train"]).law["train"]
    assert law.predict(10**6) > 10**6 * 2 * 16 * 4
    assert torch.equal(MODEL.weight, values)
    assert type(MODEL.weight) is nn.Parameter
    assert MODEL.weight.grad is None
    assert not OPTIMIZER.state
    assert OPTIMIZER.param_groups[0]["params"][0] is MODEL.weight


def test_a_step_starts_with_the_state_of_models_of_the_module():
    parameters = 4 * (16 * 16 + 16)
    start = int(trace_step(build_step_on_globals, 100, "train").live[0])
    assert start == 100 * 16 * 4 + 4 * parameters + 2 * 4  # with gradients and two moments; two step counts


def test_random_state_and_collector_stay_unchanged():
    before = torch.get_rng_state()
    profile_scaling(build_step, sizes=[100], modes=["train"])
    assert torch.equal(torch.get_rng_state(), before)
    assert gc.isenabled()


def loop_over_chunks(n):
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(n, 8)

    def step():
        for part in x.split(100):
            (part @ weight).square().sum().backward()

    return step


def test_growing_loop_gets_lower_bound_and_reason():
    law = profile_scaling(loop_over_chunks, sizes=[200, 400, 800], modes=["train"]).law["train"]
    assert law.tier == "deterministic"
    assert "other operators at n=400 than at n=200: one ends where the other goes on to aten." in law.reason
    assert "in step" in law.reason
    assert law.predict(1600) == trace_step(loop_over_chunks, 1600, "train").peak_bytes


def test_masks_need_a_share():
    def masked(n):
        x, weight = torch.randn(n, 4), torch.randn(4, 64, requires_grad=True)
        return lambda: (x[x[:, 0] > 0] @ weight).square().sum().backward()

    with pytest.raises(
        mk.errors.InputError, match=r"build_step\(100\), traced for mode='train': .*selected_fraction=1.0"
    ):
        profile_scaling(masked, sizes=[100])
    whole = profile_scaling(masked, sizes=[100], selected_fraction=1.0).peaks("train")[100]
    half = profile_scaling(masked, sizes=[100], selected_fraction=0.5).peaks("train")[100]
    assert half < whole


def test_step_requiring_gradients():
    def penalized(n):
        x, weight = torch.randn(n, 4), torch.randn(4, requires_grad=True)
        return lambda: torch.autograd.grad((x @ weight).sum(), weight)

    with pytest.raises(mk.errors.InputError, match=r"mode='inference'.*give build_step a parameter named `mode`"):
        profile_scaling(penalized, sizes=[100])
    assert profile_scaling(penalized, sizes=[100], modes=["train"]).law["train"].tier == "structural"


@pytest.mark.parametrize(
    ("sizes", "modes", "error"),
    [
        ([], ("train",), mk.errors.ConfigError),
        ([100], (), mk.errors.ConfigError),
        ([100], ("training",), mk.errors.ConfigError),
        ([100.0], ("train",), mk.errors.InputTypeError),
        ([0], ("train",), mk.errors.InputError),
        (np.array([100.0, 200.0]), ("train",), mk.errors.InputTypeError),
    ],
)
def test_rejects_invalid_arguments(sizes, modes, error):
    with pytest.raises(error, match=r"profile_scaling\(build_step, sizes=.* got .* expected .* Way out: "):
        profile_scaling(build_step, sizes, modes)


def test_sizes_as_numpy_has_them(result):
    again = profile_scaling(build_step, np.array([point.size for point in result.points]))
    assert again == result
    assert result.law["train"].predict(np.int64(8000)) == result.law["train"].predict(8000)


def test_reports_values_answered_without_data(result):
    def stops(n):
        x, weight = torch.randn(n, 4), torch.randn(4, requires_grad=True)

        def step():
            loss = (x @ weight).square().mean()
            loss.backward()
            return loss.item()

        return step

    guessed = profile_scaling(stops, sizes=[100])
    (guess,) = guessed.guesses
    assert "test_law_profile.py" in guess
    assert guessed.explain().endswith(f"answered without data\n  {guess}")
    assert guessed.as_dict()["guesses"] == [guess]
    assert result.guesses == ()
    assert "answered" not in result.explain()
    with pytest.raises(mk.errors.ConfigError, match="selected_fraction=50"):
        profile_scaling(stops, sizes=[100], selected_fraction=50)


def readout_of_graphs(n, num_graphs=10):
    weight = torch.randn(8, 32, requires_grad=True)
    x, batch, y = torch.randn(n, 8), torch.arange(n) * num_graphs // n, torch.randn(num_graphs, 32)

    def step():
        means = torch.zeros(int(batch.max()) + 1, 32).index_add_(0, batch, x @ weight)
        (means - y).square().mean().backward()

    return step


def loop_over_graphs(n):
    batch, weight = torch.arange(n) // 1000, torch.randn(8, 32, requires_grad=True)
    return lambda: sum((torch.ones(n, 8) @ weight).sum() for _ in range(int(batch.max()) + 1)).backward()


def test_a_size_at_which_a_guess_decides_is_not_said_to_fail():
    readout_of_graphs(12_900)()  # it does run
    result = profile_scaling(readout_of_graphs, sizes=[100, 200, 300], modes=["train"])
    reason = result.law["train"].reason
    assert reason.startswith("the step could not be traced at n=12900: RuntimeError: ")
    assert "in step uses a guessed value" in reason
    (guess,) = result.guesses
    assert "_local_scalar_dense" in guess
    assert "test_law_profile.py" in guess
    assert result.doubts == ()  # at these sizes the number is known
    assert "answered without data" in result.explain()
    inference = profile_scaling(readout_of_graphs, sizes=[100, 200, 300], modes=["inference"]).law["inference"]
    assert "uses a guessed value" in inference.reason
    assert "without gradients" not in inference.reason


def test_other_operators_because_of_a_guess_are_said_to_be():
    result = profile_scaling(loop_over_graphs, sizes=[100], modes=["train"])
    assert len(result.guesses) == 1
    assert "than at n=100 (traced without data: " in result.law["train"].reason
    assert "uses a guessed value" in result.law["train"].reason


def test_an_error_at_a_given_size_names_the_guess_before_it():
    with pytest.raises(RuntimeError) as caught:
        profile_scaling(readout_of_graphs, sizes=[12_900], modes=["train"])
    (note,) = caught.value.__notes__
    assert "build_step(12900), traced for mode='train', ran without data" in note
    assert "uses a guessed value" in note
    assert "measure_scaling" in note


def test_rejects_build_step_returning_no_step():
    with pytest.raises(mk.errors.InputTypeError, match=r"build_step\(100\).*got a FakeTensor; expected a function"):
        profile_scaling(lambda n: torch.zeros(n), sizes=[100])


def test_user_errors_at_requested_sizes_propagate():
    def fails(n):
        raise ZeroDivisionError(n)

    with pytest.raises(ZeroDivisionError):
        profile_scaling(fails, sizes=[100])


# ---------------------------------------------------------------------------------------------- on paper


def test_tables(result, tmp_path):
    result.to_csv(tmp_path / "points.csv")
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["peak_bytes"]) for row in rows] == [point.peak_bytes for point in result.points]
    assert rows[0]["requested_bytes"] == ""  # not known, not zero
    result.to_json(tmp_path / "points.json")
    read = json.loads((tmp_path / "points.json").read_text())
    assert read == result.as_dict()
    assert [ScalingPoint(**row) for row in read["points"]] == list(result.points)
    assert read["law"]["train"]["order"] == 1
    assert read["law"]["train"]["scaling_factor"] == result.scaling_factor("train")


def test_text(result):
    text = result.explain()
    assert "train: structural law, grows with n^1, held-out error 0, " in text
    assert "(includes the constant part)" in text
    assert "peak at n=4000: " in text
    assert f"{result.ratio(4000):.2f}" in text
    assert result.scaling_factor("train") < 1 == result.law["train"].order


def test_table_includes_sizes_that_ran_out():
    points = (
        ScalingPoint(10, "train", "ok", 1024, "", "measured"),
        ScalingPoint(20, "train", "oom", None, "", "measured"),
    )
    text = ScalingResult(points, {}).explain()
    assert "1.00 KiB" in text
    assert "oom" in text
    assert ScalingResult(points, {}).ratio(10) is None
    assert ScalingResult(points, {}).scaling_factor("train") is None


def test_plots(result, tmp_path, monkeypatch):
    svg = result.plot(tmp_path / "law.svg")
    assert (tmp_path / "law.svg").read_text() == svg
    assert svg.count("<circle") >= 4  # a dot per point
    assert "structural law" in svg
    monkeypatch.setattr(pictures, "to_png", lambda figure: None)  # as where matplotlib is not installed
    with pytest.raises(mk.errors.ConfigError, match=r"matplotlib is not installed.*pip install matplotlib"):
        result.plot(tmp_path / "law.png")
    assert_refused(lambda: result.plot(tmp_path / "law.jpeg"), mk.errors.ConfigError, r"got the suffix '.jpeg'")


def test_plot_marks_out_of_memory_and_draws_laws_only(result):
    ran_out = ScalingPoint(8000, "train", "oom", None, "", "measured", requested_bytes=2**20)
    strokes = lambda each, width: each.plot().count(f'stroke-width="{width}"')  # noqa: E731
    without_law = ScalingResult((*result.points, ran_out), {})
    assert strokes(result, 2.5) == 0
    assert strokes(without_law, 2.5) == 2  # a cross
    assert strokes(without_law, 1.6) == 0 < strokes(result, 1.6)
    assert "Crosses: out of memory." in without_law.plot()


def test_empty_results_have_text_and_plot():
    empty = profile_scaling(lambda n: lambda: None, [10, 20], ["train"])
    assert (empty.peaks("train"), empty.scaling_factor("train")) == ({10: 0, 20: 0}, None)
    failed = ScalingResult((ScalingPoint(10, "train", "error", None, "ValueError", "measured"),), {})
    assert "n^0" in empty.explain()
    assert "error" in failed.explain()
    for each in (empty, failed):
        assert "<circle" not in each.plot()
