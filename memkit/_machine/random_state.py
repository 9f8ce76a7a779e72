"""Capture and restore the random state of torch, NumPy and Python."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from memkit._core.errors import StateError
from memkit._core.settings import check_version

_VERSION = 2
_POSITION = 624  # words of the Mersenne twister; the next word is its position


@dataclass(frozen=True, slots=True)
class HostRandomState:
    """The random state of NumPy's global generator and of Python's `random`.

    Attributes:
        numpy: Result of `numpy.random.get_state`: a tuple, or a dict for a generator other than NumPy's default.
        python: Result of `random.getstate`.
    """

    numpy: tuple[Any, ...] | dict[str, Any]
    python: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
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


def capture(numpy: NumpyState | None = None) -> RandomState:
    """Capture the random state of torch, NumPy and Python; copies a few kilobytes and initializes no accelerator.

    Args:
        numpy: Cache of NumPy's state.
    """
    module = _accelerator_module()
    return RandomState(
        cpu=torch.get_rng_state(),
        accelerator=module.get_rng_state() if module else None,
        host=capture_host(numpy),
        others={index: module.get_rng_state(index) for index in _others(module)},
    )


def restore(state: RandomState) -> None:
    """Restore a captured random state."""
    torch.set_rng_state(state.cpu)
    module = _accelerator_module()
    for index in _others(module):
        if index in state.others:
            module.set_rng_state(state.others[index], index)
    if module and state.accelerator is not None:
        module.set_rng_state(state.accelerator)
    restore_host(state.host)


def capture_host(numpy: NumpyState | None = None) -> HostRandomState:
    """Capture only NumPy's and Python's random state, if torch's is handled elsewhere; takes 40 microseconds."""
    legacy = _numpy_state() if numpy is None else numpy.get()
    return HostRandomState(numpy=legacy, python=random.getstate())


class NumpyState:
    """Cached random state of NumPy's global generator, copied again only if it has changed.

    A copy takes longer than everything else that is captured, since NumPy creates a new array for it. The position of
    its Mersenne twister, and some of its words, lie at an address that NumPy exposes. They change with each draw except
    one: the second of a pair of normal numbers, which is stored. A state with such a number is copied every time.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = ()
        self._mark: tuple[int, ...] = ()
        self._state: Any = ()

    def __reduce__(self) -> tuple[type[NumpyState], tuple[()]]:
        return NumpyState, ()  # a copy, perhaps in another process, looks at its own generator

    def get(self) -> Any:
        """Return the state in the form of `numpy.random.get_state`."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it is documented
        if generator is not self._generator:
            self._look_at(generator)
        words = self._words
        mark = (words[0], words[1], words[_POSITION - 227], words[_POSITION]) if words else ()
        if not mark or mark != self._mark:
            self._state, self._mark = _numpy_state(), mark
            if mark and self._state[3]:  # it stores a normal number
                self._mark = ()
        return self._state

    def _look_at(self, generator: Any) -> None:
        self._generator, self._mark, self._words = generator, (), ()
        if type(generator) is np.random.MT19937:
            words = (ctypes.c_uint32 * (_POSITION + 1)).from_address(generator.ctypes.state_address)
            _, key, position, *_ = _numpy_state()
            if words[_POSITION] == position and list(words[:_POSITION]) == key.tolist():  # NumPy's current layout
                self._words = words


def _numpy_state() -> Any:
    # User code may draw from the legacy global state.
    if type(np.random.get_bit_generator()) is np.random.MT19937:  # type: ignore[attr-defined]  # as above
        return np.random.get_state(legacy=True)  # noqa: NPY002 - as said
    return np.random.get_state(legacy=False)  # noqa: NPY002 - as said


def restore_host(state: HostRandomState) -> None:
    """Restore NumPy's and Python's random state."""
    np.random.set_state(state.numpy)  # noqa: NPY002 - the counterpart of capture_host()
    random.setstate(state.python)


def advance(generators: Iterable[torch.Generator] = ()) -> None:
    """Draw once from every generator, including NumPy's and Python's global ones, so that the next draws differ."""
    torch.rand(())
    module = _accelerator_module()
    if module is not None:
        torch.rand((), device=torch.accelerator.current_accelerator())
    for generator in generators:
        torch.rand((), device=generator.device, generator=generator)
    advance_host()


def advance_host() -> None:
    """Draw once from NumPy's and Python's global generators."""
    np.random.random()  # noqa: NPY002 - user code may draw from the legacy global state
    random.random()


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
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]  # it is
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
