"""The structural law against dry runs far away and against what the CPU allocator really does."""

from __future__ import annotations

import itertools
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

import memkit as mk
from memkit.predict.scaling.polynomials import envelope
from memkit.predict.scaling.profile import profile_scaling
from memkit.predict.scaling.structural import Stretch, StructuralLaw, structural_law
from memkit.predict.scaling.traces import trace_step
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.predict.scaling.families import FAMILIES, allocated_peak

FAST = ("edge MLP", "MLP by width")
NO_LAW = [name for name, family in FAMILIES.items() if family.order is None]


def law_of(name, mode):
    family = FAMILIES[name]
    trace = cache(partial(trace_step, family.build, mode=mode))
    return structural_law(trace, [family.smallest]), trace


def assert_exact_far_away(name):
    for mode in ("train", "inference"):
        law, trace = law_of(name, mode)
        assert isinstance(law, StructuralLaw), law
        n = 100 * law.checked[-1]
        assert law.predict(n) == trace(n).peak_bytes
        assert law.peak_where(n) == trace(n).point().peak_where
        if mode == "train":
            assert law.order == FAMILIES[name].order


@pytest.mark.parametrize("name", FAST)
def test_a_hundred_times_as_far_is_exact(name):
    assert_exact_far_away(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*FAST, *NO_LAW)])
def test_a_hundred_times_as_far_is_exact_in_every_family(name):
    assert_exact_far_away(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LSTM cells by length", "other operators at n=4 than at n=2: LSTMCell, aten"),
        ("chunked MLP", "other operators at n=1024 than at n=512"),
        ("LSTM by rows", "bytes do not follow a polynomial"),
    ],
)
def test_unstructured_step_states_the_reason(name, reason):
    law, _ = law_of(name, "train")
    assert isinstance(law, str)
    assert reason in law
    assert "families.py" in law  # the line of the user's code


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_real_run_matches_the_law(mode):
    law, _ = law_of("edge MLP", mode)
    n = 20_000
    assert law.predict(n) == allocated_peak(FAMILIES["edge MLP"].build, n, mode)


def test_a_real_run_with_workspace_lies_in_the_interval():
    law, _ = law_of("VAE", "inference")
    low, high = law.interval(1000)
    assert law.predict(1000) == low < allocated_peak(FAMILIES["VAE"].build, 1000, "inference") <= high


def test_tracing_takes_no_tensor_memory():
    def build_step(n):
        x, weight = torch.randn(n, 1000), torch.randn(1000, 1000, requires_grad=True)
        return lambda: (x @ weight).sum().backward()

    laws = []
    taken = trace_allocations(lambda: laws.append(profile_scaling(build_step, [10**6, 10**9]).law["train"]))
    assert laws[0].predict(10**9) > 2**40
    assert taken.peak < 2**16


def rounded_up(to):
    """A step that pads its rows to a multiple."""

    def build_step(n):
        weight = torch.randn(8, 8, requires_grad=True)
        x = torch.randn(-(-n // to) * to, 8)
        return lambda: (x @ weight).sum().backward()

    return build_step


def test_detects_padding_and_rejects_sizes_between():
    law = profile_scaling(rounded_up(8), [64, 72], ["train"]).law["train"]
    assert (law.tier, law.grain) == ("structural", 8)
    assert law.predict(80) == trace_step(rounded_up(8), 80, "train").peak_bytes
    with pytest.raises(mk.errors.InputError, match=r"law.predict\(75\): got 75; expected a multiple of 8.*ask for 80"):
        law.predict(75)
    assert law.max_n(law.predict(80) + 1) == 80
    assert law.max_n(law.predict(80) - 1) == 72


def test_unshared_padding_leaves_no_structure():
    law = profile_scaling(rounded_up(64), [1000, 3000], ["train"]).law["train"]
    assert law.tier == "deterministic"
    assert "bytes do not follow a polynomial of n of degree 6 or less" in law.reason


def test_detects_late_padding():
    # 961 is 15 * 64 + 1: up to 64 times as much, each multiple leaves one row less to pad.
    law = profile_scaling(rounded_up(64), [961], ["train"]).law["train"]
    assert law.tier == "deterministic"


def test_peak_moves_at_predicted_breakpoint():
    law, trace = law_of("edge MLP", "train")
    (moves,) = law.breakpoints
    assert trace(moves).point().peak_where == law.peak_where(moves) != law.peak_where(moves - 1)
    assert trace(moves - 1).point().peak_where == law.peak_where(moves - 1)


# -------------------------------------------------------------------------------------------------- max_n

rising = st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 3))
any_curve = st.tuples(st.integers(0, 500), st.integers(-40, 20), st.integers(0, 3))


def law_from(curves, grain=1, scale=1):
    trimmed = [tuple(curve) if curve[2] else tuple(curve[:2]) if curve[1] else tuple(curve[:1]) for curve in curves]
    stretches = tuple(Stretch(start, trimmed[k], str(k)) for start, k in envelope(trimmed))
    return StructuralLaw(grain, (1,), (2,), scale, stretches, ())


@settings(max_examples=50)
@given(st.lists(st.one_of(rising, any_curve), min_size=1, max_size=4), st.integers(0, 4000), st.integers(1, 3))
def test_max_n_is_the_largest_fitting_size(curves, budget, grain):
    law = law_from([(max(1, c), *rest) for c, *rest in curves], grain)
    answer = law.max_n(budget)
    fitting = [n for n in range(grain, 4100, grain) if law.predict(n) <= budget]
    if answer is None:
        assert law.predict(10**9 * grain) <= budget
    else:
        assert answer == max(fitting, default=0)


def test_max_n_takes_a_card_and_a_size_as_text():
    law = law_from([(0, 2**20, 0)])
    assert law.max_n("24GiB") == 24 * 1024
    assert law.max_n("RTX 4090") == mk.find_gpu("RTX 4090").usable_bytes // 2**20
    assert law.max_n(2**20 - 1) == 0
    assert law_from([(5, 0, 0)]).max_n(5) is None
    assert law_from([(5, 0, 0)]).max_n(4) == 0
    assert_refused(lambda: law.max_n("RTX 9999999"), mk.errors.InputError, "RTX 4090")


def test_fractions_of_a_byte_are_rounded_up():
    law = law_from([(0, 1, 1)], scale=2)  # n (n + 1) / 2
    assert [law.predict(n) for n in (1, 2, 3)] == [1, 3, 6]
    assert [law.max_n(each) for each in (0, 1, 2, 3, 5, 6)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("n", "error"), [(0, mk.errors.InputError), (2.0, mk.errors.InputTypeError), (True, mk.errors.InputTypeError)]
)
def test_rejects_invalid_sizes(n, error):
    law = law_from([(5, 1, 0)])
    for question in (law.predict, law.interval, law.peak_where):
        with pytest.raises(error, match=r"law\.\w+\("):
            question(n)


def test_covers_all_required_families():
    assert len(FAMILIES) - len(NO_LAW) >= 12
    assert all(a != b for a, b in itertools.combinations([family.build for family in FAMILIES.values()], 2))
