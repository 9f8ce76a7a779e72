"""Capture and restore the random state of torch, NumPy and Python."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from memkit._core.errors import StateError
from memkit._core.settings import check_version
from memkit._torch.machine import built_accelerator

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of random generators that objects may hold."""

_VERSION = 2
_NUM_WORDS = 624  # of a Mersenne twister; NumPy stores its position after them, Python before them
_MANY = 256  # bytes
_NUM_COMPARED = 4  # the position and the three words next to it
_PYTHON: Any = getattr(random.getstate, "__self__", None)  # the generator of the module's functions


@dataclass(slots=True)
class HostRandomState:
    """The random state of NumPy's global generator and of Python's `random`.

    Attributes:
        numpy: Result of `numpy.random.get_state`: a tuple, or a dict for a generator other than NumPy's default.
        python: Result of `random.getstate`.
    """

    numpy: tuple[Any, ...] | dict[str, Any]
    python: tuple[Any, ...]


@dataclass(slots=True)
class RandomState:
    """The random state of torch (CPU and accelerators), NumPy's global generator and Python's `random`.

    Attributes:
        cpu: uint8 tensor, torch's CPU state.
        accelerator: uint8 tensor, state of the current accelerator device; None if none is in use.
        host: NumPy's and Python's state.
        others: States of the other accelerators, by index: a model may be on a device that is not the current one.
    """

    cpu: torch.Tensor
    accelerator: torch.Tensor | None
    host: HostRandomState
    others: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Number of accelerators whose states are included."""
        return (self.accelerator is not None) + len(self.others)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types that ``torch.load(weights_only=True)`` accepts (it refuses NumPy's own state).

        Raises:
            StateError: NumPy's global generator is not the default one.
        """
        if isinstance(self.host.numpy, dict):
            raise StateError(
                "RandomState.state_dict()",
                got=f"a {self.host.numpy['bit_generator']} as NumPy's global generator",
                expected="NumPy's default global generator, a Mersenne twister",
                fix="keep that generator in a variable of your own, and call "
                "np.random.set_bit_generator(np.random.MT19937()).",
            )
        name, key, position, has_gauss, cached_gaussian = self.host.numpy
        version, internal, gauss_next = self.host.python
        return {
            "version": _VERSION,
            "cpu": self.cpu,
            "accelerator": self.accelerator,
            "others": self.others,
            "numpy": [name, torch.from_numpy(key.astype(np.int64)), position, has_gauss, cached_gaussian],
            "python": [version, list(internal), gauss_next],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """Rebuild the state from `state_dict`.

        Raises:
            FileFormatError: This version of memkit cannot read the state's version.
        """
        # Version 1 had only the current accelerator.
        check_version("RandomState.from_state_dict(state)", state, _VERSION, 1)
        name, key, position, has_gauss, cached_gaussian = state["numpy"]
        version, internal, gauss_next = state["python"]
        return cls(
            cpu=state["cpu"],
            accelerator=state["accelerator"],
            host=HostRandomState(
                numpy=(name, key.numpy().astype(np.uint32), position, has_gauss, cached_gaussian),
                python=(version, tuple(internal), gauss_next),
            ),
            others=state.get("others", {}),
        )


def capture(host: HostState | None = None) -> RandomState:
    """Capture the random state of torch, NumPy and Python; copies a few kilobytes and initializes no accelerator.

    Args:
        host: Cache of NumPy's and Python's state.
    """
    module = _accelerator_module()
    return RandomState(
        cpu=torch.default_generator.get_state(),
        accelerator=module.get_rng_state() if module else None,
        host=capture_host() if host is None else host.get(),
        others={index: module.get_rng_state(index) for index in _others(module)} if module else {},
    )


def restore(state: RandomState, host: HostState | None = None) -> None:
    """Restore a captured random state.

    Args:
        state: The state.
        host: Cache with which it was captured.
    """
    torch.set_rng_state(state.cpu)
    module = _accelerator_module()
    for index in _others(module):
        if index in state.others:
            module.set_rng_state(state.others[index], index)
    if module and state.accelerator is not None:
        module.set_rng_state(state.accelerator)
    restore_host(state.host, host)


def capture_host() -> HostRandomState:
    """Capture only NumPy's and Python's random state, if torch's is handled elsewhere; takes 40 microseconds."""
    return HostRandomState(numpy=_numpy_state(), python=random.getstate())


class HostState:
    """Cached random state of NumPy's and Python's global generators, copied again only if a number was drawn.

    A copy takes longer than the rest of a capture, since NumPy makes a new array and Python 625 integers. So the
    position of each Mersenne twister and some of its words are compared in place: NumPy exposes their address, Python's
    are fields of its generator object. They change with every draw but one: the second of a pair of normal numbers is
    stored in advance. Python exposes that number; a NumPy state that holds one is copied every time.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._numpy_words: memoryview | None = None  # those that are compared
        words = _words_of_python()
        self._python_words = memoryview(words)[:_NUM_COMPARED] if words else None
        self._marks: tuple[Any, Any] = None, None
        self._state: HostRandomState

    def __reduce__(self) -> tuple[type[HostState], tuple[()]]:
        return HostState, ()  # a copy, perhaps in another process, reads that process's generators

    def get(self) -> HostRandomState:
        """Return the state: the same object until a number is drawn."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it is documented
        if generator is not self._generator:
            self._read_generator(generator)
        numpy, python = self._numpy_words, self._python_words
        marks = (
            None if numpy is None else numpy.tobytes(),
            None if python is None else (python.tobytes(), _PYTHON.gauss_next),
        )
        if marks != self._marks or None in marks:
            self._copy(*marks)
        return self._state

    def _copy(self, numpy_mark: Any, python_mark: Any) -> None:
        is_numpy_known = numpy_mark is not None and numpy_mark == self._marks[0]
        is_python_known = python_mark is not None and python_mark == self._marks[1]
        self._marks = None, None  # an interrupt must not leave old marks with a new state
        numpy: Any = self._state.numpy if is_numpy_known else _numpy_state()
        self._state = HostRandomState(numpy, self._state.python if is_python_known else random.getstate())
        self._marks = None if numpy_mark is not None and numpy[3] else numpy_mark, python_mark

    def _read_generator(self, generator: Any) -> None:
        self._generator, self._numpy_words, self._marks = generator, None, (None, self._marks[1])
        if type(generator) is np.random.MT19937:
            words = (ctypes.c_uint32 * (_NUM_WORDS + 1)).from_address(generator.ctypes.state_address)
            _, key, position, *_ = _numpy_state()
            if words[_NUM_WORDS] == position and list(words[:_NUM_WORDS]) == key.tolist():  # NumPy's current layout
                self._numpy_words = memoryview(words)[-_NUM_COMPARED:]


def _words_of_python() -> Any:
    """Return a view of the position and words of Python's generator; () if its layout differs from CPython's."""
    words = ctypes.c_uint32 * (_NUM_WORDS + 1)
    begin = object.__basicsize__
    if sys.implementation.name != "cpython" or type(_PYTHON).__basicsize__ < begin + ctypes.sizeof(words):
        return ()
    found = words.from_address(id(_PYTHON) + begin)
    _, (*key, position), _ = random.getstate()
    return found if found[0] == position and found[1:] == key else ()


def _numpy_state() -> Any:
    # User code may draw from the legacy global state.
    if type(np.random.get_bit_generator()) is np.random.MT19937:  # type: ignore[attr-defined]  # as above
        return np.random.get_state(legacy=True)  # noqa: NPY002 - see above
    return np.random.get_state(legacy=False)  # noqa: NPY002 - see above


def restore_host(state: HostRandomState, host: HostState | None = None) -> None:
    """Restore NumPy's and Python's random state: see `restore`."""
    if host is not None and host.get() is state:  # setting it takes 50 microseconds
        return
    np.random.set_state(state.numpy)  # noqa: NPY002 - the counterpart of capture_host()
    random.setstate(state.python)


def advance(generators: Iterable[torch.Generator] = ()) -> None:
    """Draw from every generator, including NumPy's and Python's global ones, so that the next draws differ."""
    torch.rand(())
    module = _accelerator_module()
    if module is not None:
        torch.rand((), device=torch.accelerator.current_accelerator())
    for generator in generators:
        torch.rand((), device=generator.device, generator=generator)
    advance_host()


def advance_host() -> None:
    """Draw many numbers from NumPy's and Python's global generators.

    After a few, what is drawn next may be the same: a choice among some discards numbers that are too large.
    """
    np.random.bytes(_MANY)  # noqa: NPY002 - user code may draw from the legacy global state
    random.randbytes(_MANY)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators on a device draw from by default; None if torch does not expose it."""
    if device.type == "cpu":
        return torch.default_generator
    module = _accelerator_module()
    generators: Sequence[torch.Generator] = getattr(
        module, "default_generators", ()
    )  # of torch.cuda and torch.xpu, one per device
    if not generators:
        return None
    # torch's stub forgets that an index may be None.
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    return generators[index] if index < len(generators) else None


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Run a block that may draw random numbers, then restore the random state."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def _accelerator_module() -> Any:
    """Return torch.cuda, torch.xpu or torch.mps if already initialized, else None: capturing must not start it."""
    if built_accelerator() is None:  # at once, in C
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if accelerator.type == "mps" or module.is_initialized() else None


def _others(module: Any) -> list[int]:
    """List the accelerators other than the current one; their states are kept on the host, so reading starts none."""
    if module is None or module.device_count() == 1:
        return []
    return [index for index in range(module.device_count()) if index != module.current_device()]


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of random generators, in any form, are equal."""
    if isinstance(state, (torch.Tensor, np.ndarray)):
        return bool((state == other).all())
    if isinstance(state, (RandomState, HostRandomState)):
        fields = dataclasses.fields(state)
        return all(is_same_state(getattr(state, each.name), getattr(other, each.name)) for each in fields)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(is_same_state(each, other[name]) for name, each in state.items())
    if isinstance(state, tuple):
        if set(map(type, state)) == {int}:  # the 625 of Python's own
            return bool(state == other)
        return len(state) == len(other) and all(map(is_same_state, state, other))
    return bool(state == other)


def generator_state(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`, as a copy; None for one without: the system's entropy."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of one of `GENERATORS`, as `generator_state` returned it."""
    if state is None:
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
