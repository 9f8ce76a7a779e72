"""Random state: everything that user code may draw from comes back."""

import random

import numpy as np
import pytest
import torch

import memkit as mk
from memkit import _rng


def draw():
    return [
        torch.rand(3),
        torch.randn(2, dtype=torch.float64),
        torch.from_numpy(np.random.normal(size=3)),  # an odd number of normals leaves one cached
        torch.tensor([random.random(), random.gauss(0, 1)]),
    ]


def test_restore_replays_every_source():
    draw()
    state = _rng.capture()
    first = draw()
    torch.testing.assert_close(draw()[0].equal(first[0]), False)
    _rng.restore(state)
    torch.testing.assert_close(draw(), first, rtol=0, atol=0)


def test_preserved_leaves_no_trace_even_after_an_error():
    state = _rng.capture()
    want = draw()
    _rng.restore(state)
    with pytest.raises(ZeroDivisionError), _rng.preserved():
        draw()
        raise ZeroDivisionError
    torch.testing.assert_close(draw(), want, rtol=0, atol=0)


def test_state_survives_a_weights_only_load(tmp_path):
    """numpy.random.get_state() itself does not: torch.load(weights_only=True) refuses it."""
    draw()
    torch.save(_rng.capture().state_dict(), tmp_path / "rng.pt")
    want = draw()
    _rng.restore(_rng.RandomState.from_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True)))
    torch.testing.assert_close(draw(), want, rtol=0, atol=0)


def test_another_version_is_refused():
    with pytest.raises(mk.FileFormatError, match="got version 9; expected version 1"):
        _rng.RandomState.from_state_dict({"version": 9})
