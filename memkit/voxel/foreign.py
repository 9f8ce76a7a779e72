"""Functions and other libraries' transforms as steps of a composed augmentation, with draws that can be repeated."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from memkit._core.errors import ConfigError, InputError, InputTypeError, warn_user
from memkit._core.settings import Checker
from memkit._machine.random_state import preserved
from memkit.voxel.augment_base import Augmentation, X, generator
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import CallableParams

_LEGACY = 2**32  # seeds of NumPy's global generator are below this
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_GLOBAL = (random.random.__self__, np.random.random.__self__, torch.default_generator)  # type: ignore[attr-defined]
_DEPTH = 3  # reaches the attributes of a transform in the list of a Compose


class ForeignStep(Augmentation[CallableParams]):
    """Calls any function with the result of the previous step, under a seed of its own.

    Python's, NumPy's and torch's global generators are seeded for the call and restored afterwards; a transform with
    ``set_random_state``, such as MONAI's, is seeded through it, also within another library's ``Compose``. `apply`
    cannot repeat a callable that draws from a generator of its own; if the generator can be found, there is a warning.

    Args:
        function: Takes the volume or the whole sample, and returns the new one.
    """

    layout = None
    _params = CallableParams

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__name__)
        found = list(_sources(function))
        self._seeded = [each for _, each in found if not isinstance(each, _GENERATORS)]
        for name in dict.fromkeys(name for name, each in found if isinstance(each, _GENERATORS)):
            warn_user(
                f"{self.name} as an augmentation: it holds {name}, a random generator of its own, so its draws cannot "
                "be repeated. Let it draw from torch's, NumPy's or Python's global generator, which are seeded for it, "
                "or give it a method set_random_state(seed=...)."
            )

    def sample(
        self,
        shape: Sequence[int],  # noqa: ARG002 - the seed does not depend on it
        *,
        seed: int,
        epoch: int = 0,
        index: int | Sequence[int] = 0,
    ) -> CallableParams:
        """Draw a seed."""
        named = tuple(index) if isinstance(index, Sequence) else (index,)
        check = Checker("ComposedAugmentation.sample(shape)", InputError)
        chance = generator(check, seed=seed, epoch=epoch, index=named)
        return CallableParams(self.name, int(chance.integers(2**63)))

    def augment_with(
        self,
        sample: Any,
        *,
        seed: int,
        epoch: int = 0,
        index: int | Sequence[int] = 0,
        photometric: Collection[Any] | None = None,  # noqa: ARG002 - the callable decides
        layouts: Mapping[Any, VoxelLayout] | None = None,  # noqa: ARG002 - as above
    ) -> tuple[Any, CallableParams]:
        """Call the function with the sample as it is."""
        params = self.sample((), seed=seed, epoch=epoch, index=index)
        return self._call(sample, params), params

    def apply(self, x: X, params: CallableParams, *, layout: VoxelLayout | None = None, inplace: bool = False) -> X:  # noqa: ARG002 - the callable decides
        """Call the function with the volume."""
        return self._call(x, params)  # type: ignore[no-any-return]  # as the callable returns it

    def apply_joint(
        self,
        sample: Mapping[Any, Any],
        params: CallableParams,
        *,
        photometric: Collection[Any] | None = None,  # noqa: ARG002 - the callable decides
        layouts: Mapping[Any, VoxelLayout] | None = None,  # noqa: ARG002 - as above
    ) -> Any:
        """Call the function with the whole sample."""
        return self._call(sample, params)

    def _apply(self, x: X, params: CallableParams, layout: VoxelLayout | None, *, inplace: bool) -> X:  # noqa: ARG002 - as above
        return self._call(x, params)  # type: ignore[no-any-return]  # as above

    def _moves(self, params: CallableParams, layout: VoxelLayout | None) -> list[torch.Tensor] | None:  # noqa: ARG002 - unknown
        raise InputError(
            "ComposedAugmentation.affine_after(affine, params)",
            got=f"parameters of {self.name}, which is not an augmentation of memkit",
            expected="augmentations whose flips and turns are known",
            fix=f"call it before or after the composed augmentation: {self.name}(aug(x)).",
        )

    def _call(self, x: Any, params: CallableParams) -> Any:
        if params.name != self.name:
            raise InputTypeError(
                "ComposedAugmentation.apply(x, params)",
                got=f"parameters of {params.name}",
                expected=f"parameters of {self.name}",
                fix="pass the parameters that sample() of this augmentation returned.",
            )
        with preserved():
            self._seed(params.seed)
            result = self.function(x)
        if result is None:
            raise InputTypeError(
                "ComposedAugmentation(augmentations)",
                got=f"{self.name}, which returned None",
                expected="a function that returns the new volume or sample",
                fix="end the function with: return x.",
            )
        return result

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % _LEGACY)  # noqa: NPY002 - the callable may draw from it
        torch.manual_seed(seed)  # noqa: TID251 - as above; restored after the call
        for number, each in enumerate(self._seeded):  # a different seed for each
            each.set_random_state(seed=(seed + number) % _LEGACY)


def as_step(each: object, call: str) -> Augmentation[Any]:
    """Return an augmentation of memkit unchanged, and any other callable wrapped in a step."""
    if isinstance(each, Augmentation):
        return each
    if isinstance(each, type) or not callable(each):
        given = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
        raise InputTypeError(
            call,
            got=given,
            expected="augmentations of memkit, functions, or other libraries' transforms",
            fix=f"write {each.__name__}()." if isinstance(each, type) else "pass for example VoxelAugmentation().",
        )
    return ForeignStep(each)


def _sources(thing: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield by name a callable's random generators, and its objects that have a ``set_random_state``.

    The search covers attributes, a function's closure and the globals that it uses, a partial's arguments, and the
    callables among those.
    """
    if callable(getattr(thing, "set_random_state", None)):
        yield name, thing
    elif isinstance(thing, _GENERATORS):
        if not any(thing is each for each in _GLOBAL):
            yield name, thing
    elif isinstance(thing, list | tuple | Mapping):
        for each in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _sources(each, name, depth)
    elif depth and callable(thing) and not isinstance(thing, type | Augmentation):
        for key, value in _held_by(thing).items():
            yield from _sources(value, key, depth - 1)


def _held_by(thing: Any) -> dict[str, Any]:
    held = dict(getattr(thing, "__dict__", {}))
    if isinstance(thing, functools.partial):
        return held | {"func": thing.func, "args": thing.args, **thing.keywords}
    if inspect.ismethod(thing):
        return held | {"self": thing.__self__}
    if inspect.isfunction(thing):
        used = inspect.getclosurevars(thing)
        return held | {**used.globals, **used.nonlocals}
    return held


def check_steps(call: str, given: object) -> tuple[Any, ...]:
    """Return the augmentations of a list or tuple, at least one."""
    if isinstance(given, (list, tuple)) and given:
        return tuple(given)
    raise ConfigError(
        call,
        got=f"a {type(given).__name__}" + ("" if given else " without any"),
        expected="one list of at least one augmentation",
        fix=f"write {composed_call([given])}",
    )


def composed_call(given: Sequence[object]) -> str:
    """Return the call that composes augmentations that were passed one by one."""
    shown = [f"{type(each).__name__}(...)" for each in given if callable(each)] or ["VoxelAugmentation()"]
    return f"ComposedAugmentation([{', '.join(shown)}])"
