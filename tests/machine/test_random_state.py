"""Random state: everything that user code may draw from comes back."""

import random

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
    """What torch.cuda says of random states, where there are two cards."""

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


def test_a_card_that_is_not_the_current_one_comes_back_too(monkeypatch, tmp_path):
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
def test_numpys_state_is_copied_where_it_has_moved(draws):
    """Also where the second number of a pair was kept, and where the global generator is another one."""
    before, own = np.random.get_state(), np.random.get_bit_generator()
    calls = {
        "uniform": np.random.random,
        "normal": np.random.randn,
        "pair": lambda: np.random.randn(2),
        "integer": lambda: np.random.randint(5),
        "seed": lambda: np.random.seed(3),
        "other": lambda: np.random.set_bit_generator(np.random.MT19937(1)),
        "nothing": lambda: None,
    }
    known = random_state.NumpyState()
    try:
        for draw in draws:
            calls[draw]()
            found, wanted = known.get(), np.random.get_state()
            assert found[0] == wanted[0]
            np.testing.assert_array_equal(found[1], wanted[1])
            assert found[2:] == wanted[2:]
    finally:
        np.random.set_bit_generator(own)
        np.random.set_state(before)


def test_a_state_that_has_not_moved_is_not_copied_again():
    np.random.seed(0)
    known = random_state.NumpyState()
    first = known.get()
    assert known.get() is first
    np.random.random()
    assert known.get() is not first


def test_another_generator_than_numpys_own_is_copied_each_time():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        known = random_state.NumpyState()
        first = known.get()
        assert known.get() is not first
        state = random_state.capture()
        drawn = np.random.random()
        random_state.restore(state)
        assert np.random.random() == drawn
        assert_refused(lambda: state.state_dict(), mk.errors.StateError, "a PCG64 as NumPy's global generator")
    finally:
        np.random.set_bit_generator(own)
