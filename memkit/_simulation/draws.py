"""Random numbers that a simulated step draws from Python or NumPy: another draw may take another branch, or size.

They are guesses, as the numbers are that code reads from tensors without data. The functions of `random` and
`numpy.random` return numbers that are followed; what else draws (a generator of the user's own, ``from random import
random``) cannot be, and is a doubt.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memkit._machine import random_state
from memkit._simulation.guesses import Guesses
from memkit._simulation.leftovers import Patches, Shared

_TORCH = str(Path(torch.__file__).parent)
_OF_PYTHON = """
    random uniform triangular randint randrange gauss betavariate choice choices sample shuffle
""".split()  # noqa: SIM905 - a table of words
_OF_NUMPY = """
    rand randn random random_sample randint uniform normal standard_normal beta binomial exponential poisson choice
    permutation shuffle
""".split()  # noqa: SIM905 - a table of words


class Draws:
    """Random numbers drawn in one simulation.

    They come from generators of its own, so that the global ones only move where somebody draws past it.

    Args:
        guesses: Guesses of the simulation.
    """

    def __init__(self, guesses: Guesses) -> None:
        self.guesses = guesses
        self.python, self.numpy = random.Random(0), np.random.RandomState(0)
        self._host = random_state.capture_host()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the numbers that this thread draws within the block."""
        token = _draws.set(self)
        self._host = random_state.capture_host()
        try:
            with _patched():
                yield
        finally:
            _draws.reset(token)

    def drawn(self, name: str, value: Any) -> Any:
        """Return a number that was drawn as one that is followed."""
        value = value.item() if isinstance(value, np.generic) else value
        if value is None:  # of shuffle
            return value
        if not isinstance(value, (np.ndarray, list)):
            return self.guesses.drawn(name, value)
        size = value.size if isinstance(value, np.ndarray) else len(value)
        if size == 1:  # np.random.rand(1) < 0.5; more numbers than one are data
            self.guesses.unseen(name)
        return value

    def note_unseen(self, *, have_others_drawn: bool) -> None:
        """Note that something has drawn past the functions that are followed.

        Args:
            have_others_drawn: Whether a generator of the user's own has.
        """
        now = random_state.capture_host()
        if not random_state.is_same_state(self._host.python, now.python):
            self.guesses.unseen("Python's random")
        if not random_state.is_same_state(self._host.numpy, now.numpy):
            self.guesses.unseen("numpy.random")
        if have_others_drawn:
            self.guesses.unseen("a generator of its own")


_draws: ContextVar[Draws | None] = ContextVar("memkit draws", default=None)  # other threads draw as they always do


def _patches() -> list[Patches]:
    purpose = "random numbers that a step draws are guesses"
    of_python = {name: _following(random, name, operator.attrgetter(f"python.{name}")) for name in _OF_PYTHON}
    of_numpy = {name: _following(np.random, name, operator.attrgetter(f"numpy.{name}")) for name in _OF_NUMPY}
    of_numpy["default_rng"] = _seeding(np.random.default_rng)
    return [Patches(random, purpose, of_python), Patches(np.random, purpose, of_numpy)]


def _seeding(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def make(seed: Any = None) -> Any:
        draws = _draws.get()
        if draws is not None and seed is None:  # from the system's entropy: its numbers are other ones each time
            draws.guesses.unseen(f"np.random.{original.__name__}()")
        return original(seed)

    return make


def _following(module: Any, name: str, own: Callable[[Draws], Callable[..., Any]]) -> Callable[..., Any]:
    original = getattr(module, name)

    @wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        draws = _draws.get()
        if draws is None:
            return original(*args, **kwargs)
        value = own(draws)(*args, **kwargs)
        # PyTorch draws names and intervals of its logs; what a module draws is drawn by torch's own generator.
        is_torchs = sys._getframe(1).f_code.co_filename.startswith(_TORCH)  # noqa: SLF001 - no public form
        return value if is_torchs else draws.drawn(f"{module.__name__}.{name}", value)

    return draw


_patched = Shared(_patches)
