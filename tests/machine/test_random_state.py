"""Random state: everything that user code may draw from comes back."""

import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import memkit as mk
from memkit._machine import random_state
from tests.helpers import assert_refused


def draw():
    return [
        torch.rand(3),
        torch.randn(2, dtype=torch.float64),
        torch.from_numpy(np.random.normal(size=3)),  # an odd number of normals leaves one cached
        torch.tensor([random.random(), random.gauss(0, 1)]),
    ]


def test_restore_replays_every_source():
    draw()
    state = random_state.capture()
    first = draw()
    torch.testing.assert_close(draw()[0].equal(first[0]), False)
    random_state.restore(state)
    torch.testing.assert_close(draw(), first, rtol=0, atol=0)


def test_preserved_leaves_no_trace_even_after_an_error():
    state = random_state.capture()
    want = draw()
    random_state.restore(state)
    with pytest.raises(ZeroDivisionError), random_state.preserved():
        draw()
        raise ZeroDivisionError
    torch.testing.assert_close(draw(), want, rtol=0, atol=0)


def test_state_survives_a_weights_only_load(tmp_path):
    """numpy.random.get_state() itself does not: torch.load(weights_only=True) refuses it."""
    draw()
    torch.save(random_state.capture().state_dict(), tmp_path / "rng.pt")
    want = draw()
    random_state.restore(random_state.RandomState.from_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True)))
    torch.testing.assert_close(draw(), want, rtol=0, atol=0)


def test_another_version_is_refused():
    with pytest.raises(mk.errors.FileFormatError, match="got version 9; expected version 2 or 1"):
        random_state.RandomState.from_state_dict({"version": 9})


class Cards:
    """Stands in for torch.cuda's random states on a machine with two GPUs."""

    def __init__(self, current=0):
        self.states, self.current = [torch.zeros(1), torch.zeros(1)], current

    def device_count(self):
        return len(self.states)

    def current_device(self):
        return self.current

    def get_rng_state(self, index=None):
        return self.states[self.current if index is None else index].clone()

    def set_rng_state(self, state, index=None):
        self.states[self.current if index is None else index] = state.clone()


def test_restores_state_of_other_cards(monkeypatch, tmp_path):
    """A model on cuda:1, without torch.cuda.set_device."""
    cards = Cards()
    monkeypatch.setattr(random_state, "_accelerator_module", lambda: cards)
    with random_state.preserved():
        cards.states[1] += 1
    assert cards.states == [0, 0]
    cards.states = [torch.tensor([1.0]), torch.tensor([2.0])]
    torch.save(random_state.capture().state_dict(), tmp_path / "rng.pt")
    state = torch.load(tmp_path / "rng.pt", weights_only=True)
    cards = Cards()
    random_state.restore(random_state.RandomState.from_state_dict(state))
    assert cards.states == [1, 2]
    cards = Cards(current=1)  # the process's own state goes where it computes now
    random_state.restore(random_state.RandomState.from_state_dict(state))
    assert cards.states == [0, 1]
    cards = Cards()  # of the version before, which had the current one only
    random_state.restore(
        random_state.RandomState.from_state_dict(
            {name: state[name] for name in state if name != "others"} | {"version": 1}
        )
    )
    assert cards.states == [1, 0]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["uniform", "normal", "pair", "integer", "seed", "other", "nothing"]), max_size=25))
def test_cached_state_equals_a_copy(draws):
    """Also where the second number of a pair was kept, and where NumPy's global generator is another one."""
    before, own, pythons = np.random.get_state(), np.random.get_bit_generator(), random.getstate()
    calls = {
        "uniform": (np.random.random, random.random),
        "normal": (np.random.randn, lambda: random.gauss(0, 1)),
        "pair": (lambda: np.random.randn(2), lambda: (random.gauss(0, 1), random.gauss(0, 1))),
        "integer": (lambda: np.random.randint(5), lambda: random.randrange(5)),
        "seed": (lambda: np.random.seed(3), lambda: random.seed(3)),
        "other": (lambda: np.random.set_bit_generator(np.random.MT19937(1)), lambda: random.setstate(pythons)),
    }
    known = random_state.HostState()
    try:
        for draw, who in itertools.product(draws, ("numpy", "python", "both")):
            if draw != "nothing":
                of_numpy, of_python = calls[draw]
                _ = who != "python" and of_numpy(), who != "numpy" and of_python()
            found, wanted = known.get(), np.random.get_state()
            assert found.numpy[0] == wanted[0]
            np.testing.assert_array_equal(found.numpy[1], wanted[1])
            assert found.numpy[2:] == wanted[2:]
            assert found.python == random.getstate()
    finally:
        np.random.set_bit_generator(own)
        np.random.set_state(before)
        random.setstate(pythons)


@pytest.mark.parametrize("num_draws", [1, 624, 625, 1248])
@pytest.mark.parametrize("draw", [lambda: np.random.randint(2**31), lambda: random.getrandbits(32)])
def test_detects_a_full_cycle_of_twister_draws(draw, num_draws):
    """Its position is then the same as before."""
    known = random_state.HostState()
    known.get()
    for _ in range(num_draws):
        draw()
    found = known.get()
    assert found.python == random.getstate()
    np.testing.assert_array_equal(found.numpy[1], np.random.get_state()[1])


def test_unchanged_state_is_not_copied_again():
    np.random.seed(0)
    random.seed(0)
    known = random_state.HostState()
    first = known.get()
    assert known.get() is first
    random.random()
    second = known.get()
    assert second.python is not first.python
    assert second.numpy is first.numpy
    np.random.random()
    third = known.get()
    assert third.numpy is not second.numpy
    assert third.python is second.python


def test_an_interrupted_copy_leaves_no_state_under_old_marks():
    """After it the generators are put back, and look as they did when the older state was copied."""
    known = random_state.HostState()
    first, copy = known.get(), random.getstate
    random.random()

    def interrupted(line, event, _):
        if event == "line" and line.f_lineno == last_line:
            raise KeyboardInterrupt
        return interrupted

    code = random_state.HostState._copy.__code__
    last_line = max(line for *_, line in code.co_lines() if line)
    sys.settrace(lambda frame, *_: interrupted if frame.f_code is code else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            known.get()
    finally:
        sys.settrace(None)
    random_state.restore_host(first)
    assert known.get().python == copy()


def test_copies_python_state_with_unexpected_layout(monkeypatch):
    monkeypatch.setattr(sys, "implementation", types.SimpleNamespace(name="another"))
    known = random_state.HostState()
    first = known.get()
    assert known.get().python == first.python
    random.random()
    assert known.get().python == random.getstate()


def test_another_generator_than_numpys_own_is_copied_each_time():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        known = random_state.HostState()
        first = known.get()
        assert known.get().numpy is not first.numpy
        state = random_state.capture()
        drawn = np.random.random()
        random_state.restore(state)
        assert np.random.random() == drawn
        assert_refused(lambda: state.state_dict(), mk.errors.StateError, "a PCG64 as NumPy's global generator")
    finally:
        np.random.set_bit_generator(own)
