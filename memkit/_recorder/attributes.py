"""Save what a forward and a loss function may change, beside what autograd and operators show, and restore it.

That is: attributes of modules and of the user's objects, the lists, dicts and arrays that stand there, variables that
functions assign to, hooks, and buffers and tensors that are written to in place.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import dis
import functools
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from memkit._core.attributes import UserState, attributes_of, has_attributes, set_attributes
from memkit._core.code import global_names
from memkit._core.errors import warn_user
from memkit._core.installed import is_users_module
from memkit._core.printable import list_some
from memkit._machine import random_state
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import (
    BUFFERS,
    HOOKS,
    PARAMETERS,
    STATE,
    members_of,
    recomputed_by_hooks,
)
from memkit._torch.optimizers import own_attributes
from memkit._torch.ranks import gathered_parameters
from memkit._torch.tensors import (
    accumulate_hooks,
    as_integers,
    bit_sums,
    has_storage,
    hooks_of,
    is_view,
    leaf_gradient,
    storage_key,
    version_of,
)

_MAX_OBJECTS = 10_000  # searched for attributes that a forward may change
_MAX_ITEMS = 4096  # of a list or dict that is searched for such objects
_SMALL_BYTES, _MOST_SAVED_BYTES = 2**20, 2**26  # of a tensor whose content is saved, and of all of them
_MOST_CHECKED_BYTES = 2**30  # of larger arrays that are watched: half a second to read them
_MAX_COPIED = 100_000  # items of a list or dict that is restored
_MAX_COUNTS = 32  # tensors of a list that are counts; more of them are results
_UNSET: Any = object()  # the value of a variable that has none
_GLOBAL_STORES = frozenset({dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]})
_CONTAINERS = (list, dict, set, collections.deque)
_NUMBERS = (bytearray, array.array)
_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
# Of the standard library, with what is the user's.
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_WRAPPERS = (collections.UserDict, collections.UserList, types.SimpleNamespace, argparse.Namespace, UserState, *_WEAK)
_OPTIMIZING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_WORDS = frozenset({bool, int, float, str, type(None)})
_COUNTED = frozenset({bool, int, float, str})
_RESULTS = frozenset({Tensor, np.ndarray, tuple, list, dict, *_WORDS})
_WITH_STORAGE = frozenset({Tensor, nn.Parameter, nn.Buffer, FakeTensor})
# Internals of every module; a forward does not change them.
_MODULE_MACHINERY = (frozenset(vars(nn.Module())) - STATE) | {"forward"}  # an instance-level override
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "memkit", "lightning", "accelerate"}


class Attributes:
    """Saved attributes of modules and of the user's objects, and variables that functions assign to.

    Parameters under `fully_shard` are left to it.

    Args:
        roots: Modules, functions and other objects.
        content: ``"arrays"``: also save the content of NumPy arrays, of 64 MiB in all, and watch larger ones, of 1 GiB.
            ``"versions"``: the same, and watch whether tensors change in place, buffers excepted. ``"saved"``: the
            same, and save the content of tensors of up to 1 MiB, as a count, a running mean or a small teacher has; of
            64 MiB in all, and not of parameters that are trained. ``"versions"`` saves that of plain tensors in the
            attributes of modules alone, such as the targets that a criterion keeps. ``"counts"``, for each part of an
            evaluation: as ``"saved"``, but what is not saved, such as a network's parameters, has only its version
            watched, and the tensors in long lists, which are results, not even that.
        trained: Ids of the parameters that are trained; None takes all that require a gradient for such.
        containers: Copies of lists and dicts, beside them.
        except_for: Types of objects that are left out, with all that only they hold.
        left_out: Ids of objects that are left out, with all that only they hold.
        apart: Ids of tensors whose content is neither saved nor watched: somebody else restores it.
        is_for_rerun: Whether the forward runs again after each `restore`: weights that hooks compute anew before it, as
            `spectral_norm` does, are then left out, and the old ones can be freed while it runs.
        gradients_but_of: Ids of parameters; the gradients of all others are restored: a loss function may run the
            backward of an online probe. None leaves all gradients alone.
        with_optimizers: Whether optimizers, their schedules and scalers are among the objects; those whose parameters
            are all ``apart`` are left out.
        with_buffers: Whether buffers are among the tensors whose content is watched or saved, the latter up to the 64
            MiB of all together, as a queue of keys has; otherwise somebody else restores them.

    Warns:
        MemkitWarning: When it is restored: a larger tensor or array was changed in place.
    """

    def __init__(
        self,
        roots: Sequence[object],
        *,
        content: Literal["arrays", "versions", "saved", "counts"] | None = None,
        trained: Container[int] | None = None,
        containers: Iterable[tuple[Any, Any]] = (),
        except_for: tuple[type, ...] = (),
        left_out: Container[int] = (),
        apart: Container[int] = (),
        is_for_rerun: bool = False,
        gradients_but_of: Container[int] | None = None,
        with_optimizers: bool = False,
        with_buffers: bool = False,
    ) -> None:
        self._roots, self._except_for, self._is_for_rerun = roots, except_for, is_for_rerun
        self._with_buffers = with_buffers
        self._of_training: dict[str, Any] = {"gradients_but_of": gradients_but_of, "with_optimizers": with_optimizers}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []  # of parameters
        self._is_of_counts = content == "counts"
        self._has_classes = content is not None  # the search in their functions takes longer than a block's call
        self._variables: list[_Variable] = []
        self._owners: list[tuple[Any, dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: list[_HeldTensor] = []
        self._leaves: list[tuple[Tensor, bool]] = []
        self._arrays: list[_HeldArray] = []
        self._containers = list(containers)
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []  # of modules and tensors, beside what they were
        self._seen: set[int] = set()
        self._of_hooks: set[int] = set()  # optimizers of which only their own attributes are saved
        modules = [each for each in roots if isinstance(each, nn.Module)]
        self._names = {id(each): name for root in modules for name, each in root.named_modules()}
        todo: list[object] = list(roots)
        while todo and len(self._seen) < _MAX_OBJECTS:
            value = todo.pop()
            if id(value) in self._seen or id(value) in left_out or isinstance(value, except_for):
                continue
            if _may_hold_state(value):
                self._seen.add(id(value))
                todo.extend((*self._note(value), *self._note_gradient(value)))
            elif isinstance(value, _OPTIMIZING):
                self._seen.add(id(value))
                todo.extend(self._note_optimizer(value, apart))
            elif isinstance(value, Tensor) and value.is_leaf:  # without a storage: a stand-in
                self._leaves.append((value, value.requires_grad))
        if gathered := gathered_parameters(owner for owner, _ in self._owners):
            self._containers = [pair for pair in self._containers if id(pair[0]) not in gathered]
            self._tensors = [held for held in self._tensors if id(held.tensor) not in gathered]
            self._gradients = [pair for pair in self._gradients if id(pair[0]) not in gathered]
        if content is not None:
            self._save_arrays()
        if content == "counts":
            self._watch_counts()
        elif content in ("versions", "saved"):
            self._watch_content(is_saved=content == "saved", trained=trained, apart=apart)

    def _save_arrays(self) -> None:
        saved_bytes, checked_bytes = _MOST_SAVED_BYTES, _MOST_CHECKED_BYTES
        for index, (each, *_) in enumerate(self._arrays):
            if each.dtype == object or not each.flags.writeable:
                continue
            if each.nbytes <= saved_bytes:
                saved_bytes -= each.nbytes
                self._arrays[index] = _HeldArray(each, each.copy())
            elif each.nbytes <= checked_bytes:
                checked_bytes -= each.nbytes
                self._arrays[index] = _HeldArray(each, checksum=_checksum(each))

    def _watch_content(self, *, is_saved: bool, trained: Container[int] | None, apart: Container[int]) -> None:
        """Watch tensors. A write through `.data`, as to a codebook, a teacher or a center, makes no new version."""
        buffers = {id(each) for owner, own in self._owners for each in _buffers(owner, own)}
        of_modules = {id(each) for owner, own in self._owners if isinstance(owner, nn.Module) for each in own.values()}
        saved_bytes, checked_bytes = _MOST_SAVED_BYTES, _MOST_CHECKED_BYTES
        for index, held in enumerate(self._tensors):
            each, same = held.tensor, held.same
            is_buffer = id(each) in buffers
            if (is_buffer and not self._with_buffers) or id(each) in apart or each.is_inference():
                continue
            is_trained = isinstance(each, nn.Parameter) and each.requires_grad
            is_trained = is_trained and (trained is None or id(each) in trained)
            held = held._replace(version=version_of(same))  # noqa: PLW2901 - the same one, with more
            may_save = (is_saved or id(each) in of_modules) and not (same.is_meta or is_trained)
            if may_save and same.nbytes <= (saved_bytes if is_buffer else min(_SMALL_BYTES, saved_bytes)):
                saved_bytes -= same.nbytes
                held = held._replace(content=same.clone())  # noqa: PLW2901 - as above
            elif same.nbytes <= checked_bytes:
                checked_bytes -= same.nbytes
                held = held._replace(sums=bit_sums([same]))  # noqa: PLW2901 - as above
            self._tensors[index] = held

    def _watch_counts(self) -> None:
        buffers = {id(each) for owner, own in self._owners for each in _buffers(owner, own)}
        saved_bytes = _MOST_SAVED_BYTES
        for index, held in enumerate(self._tensors):
            each, same = held.tensor, held.same
            if id(each) in buffers or same.is_inference() or same.is_meta:
                continue
            is_saved = not isinstance(each, nn.Parameter) and same.nbytes <= min(_SMALL_BYTES, saved_bytes)
            saved_bytes -= same.nbytes if is_saved else 0
            self._tensors[index] = held._replace(version=version_of(same), content=same.clone() if is_saved else None)

    def _note_function(self, value: Any) -> Sequence[object]:
        held = list(_held_by_function(value))
        if isinstance(value, types.FunctionType) and _is_users(value):
            self._variables += _assigned_by(value)
            self._owners.append((value, dict(vars(value))))
            held += vars(value).values()
        return held

    def _note(self, value: Any) -> Sequence[object]:
        """Save the state of one object; return the objects that it holds."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, *_BUILTIN_METHODS)):
            return self._note_function(value)
        if isinstance(value, type):
            self._variables += _assigned_in(value)
            return self._note_class(value) if self._has_classes else ()
        if isinstance(value, (*_CONTAINERS, *_NUMBERS)):
            return self._note_container(value)
        if isinstance(value, (tuple, frozenset, types.MappingProxyType)):
            held = value.values() if isinstance(value, types.MappingProxyType) else value
            return list(held) if len(value) <= _MAX_ITEMS else ()
        if isinstance(value, Tensor):
            self._tensors.append(
                _HeldTensor(value, value.detach(), _gradient_of(value), value.requires_grad, value.is_leaf)
            )
            own = {} if isinstance(value, FakeTensor) else dict(vars(value))  # p.num_steps, as some averages keep it
            self._owners += [(value, own)] if own else []
            registered = [each for each in (hooks_of(value), accumulate_hooks(value)) if each]
            return [*own.values(), *(self._note_hooks(registered) if registered else ())]
        if isinstance(value, np.ndarray):
            return self._note_array(value)
        if isinstance(value, random_state.GENERATORS):  # late: torch checks for its own in Python
            self._generators.append((value, random_state.generator_state(value)))
            return ()
        if isinstance(value, LazyModuleMixin) and value.has_uninitialized_params():  # type: ignore[misc]  # torch's protocol
            return ()  # it stays as its first run leaves it, of another class
        own = self._attributes_of(value)
        self._owners.append((value, own))
        of_module = HOOKS if isinstance(value, nn.Module) else ()
        hooks = self._note_hooks([each for name in of_module if (each := vars(value).get(name)) is not None])
        return [*own.values(), *hooks, type(value)]

    def _note_hooks(self, registered: Sequence[dict[int, Any]]) -> Sequence[object]:
        """Save which hooks there are; return the user's, which may keep statistics, not those of installed packages."""
        self._hooks += [(each, dict(each)) for each in registered]
        hooks = [hook for each in registered for hook in each.values()]
        return [each for each in hooks if is_users_module(_home_of(each))]

    def _note_gradient(self, value: object) -> Sequence[object]:
        but_of = self._of_training["gradients_but_of"]
        if but_of is None or not _is_trained(value) or id(value) in but_of:
            return ()
        self._gradients.append((value, value.grad))
        return (value.grad,)  # something may be added to it in place

    def _note_class(self, kind: type) -> Sequence[object]:
        """Save what a class's functions, and those that they call, assign to; return what they, and it, hold."""
        held: list[object] = []
        for each in _held_by_class(kind):
            if not isinstance(each, types.FunctionType):
                held.append(each)
                continue
            self._variables += _assigned_by(each)
            for value in _held_by_function(each):
                if not isinstance(value, types.FunctionType):
                    held.append(value)
                elif _is_users(value):  # but not what that one holds: a script's functions reach all of it
                    self._variables += _assigned_by(value)
        return held

    def _note_optimizer(self, value: Any, apart: Container[int]) -> Sequence[object]:
        """Save an optimizer's attributes; of one that the training itself steps, those alone that hooks may write."""
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        groups = getattr(value, "param_groups", ())  # a wrapper around an optimizer may have none
        is_whole = self._of_training["with_optimizers"] and not (
            is_optimizer and all(id(each) in apart for group in groups for each in group["params"])
        )
        if not (is_whole or is_optimizer):
            return ()
        if not is_whole:
            self._of_hooks.add(id(value))
        own = self._attributes_of(value)
        self._owners += [(value, own)] if own else []
        if is_whole and is_optimizer and self._is_for_rerun:
            # A schedule writes into the groups, which is told of. Tensors are watched where the loss itself holds them:
            # here they would be all parameters and their states.
            self._containers += [(group, group.copy()) for group in groups]
            own = own_attributes(own)
        return list(own.values())

    def _note_container(self, value: Any) -> Sequence[object]:
        is_of_numbers = isinstance(value, _NUMBERS)
        if len(value) <= _MAX_COPIED:
            self._containers.append((value, value[:] if is_of_numbers else value.copy()))
        if self._is_of_counts and isinstance(value, list) and len(value) > _MAX_COUNTS:
            return [each for each in value if type(each) not in _RESULTS]
        inside = value.values() if isinstance(value, dict) else value
        return () if is_of_numbers or len(value) > _MAX_ITEMS else list(inside)

    def _attributes_of(self, owner: object) -> dict[str, Any]:
        if id(owner) in self._of_hooks:
            return own_attributes(attributes_of(owner))
        if not isinstance(owner, nn.Module):
            return attributes_of(owner)
        left_out = _MODULE_MACHINERY | recomputed_by_hooks(owner) if self._is_for_rerun else _MODULE_MACHINERY
        return {name: value for name, value in vars(owner).items() if name not in left_out}

    def _note_array(self, value: npt.NDArray[Any]) -> Sequence[object]:
        """Save an array; one of Python objects, such as a batch of meshes, is a container like a list."""
        held = _HeldArray(value)
        if held.is_list and value.size <= _MAX_COPIED:
            held = _HeldArray(value, value.copy())
        self._arrays.append(held)
        return list(value.flat) if held.is_list and value.size <= _MAX_ITEMS else ()

    def restore(self, restored: Container[int] = ()) -> None:
        """Restore all attributes that have changed.

        Args:
            restored: Ids of tensors whose content somebody else has restored.
        """
        for container, copy in self._containers:
            _refill(container, copy)
        for owner, attributes in self._owners:
            self._set_back(owner, attributes)
        for variable in self._variables:
            variable.restore()
        for hooks, before in self._hooks:
            _set_back_hooks(hooks, before)
        self._restore_gradients()
        for generator, state in self._generators:
            random_state.set_generator_state(generator, state)
        for leaf, is_trained in self._leaves:
            _drop_graph(leaf, is_trained=is_trained)
        lost = [tuple(held.array.shape) for held in self._arrays if not held.restore()]
        lost += [
            tuple(held.tensor.shape) for held in self._tensors if not (held.restore() or id(held.tensor) in restored)
        ]
        if lost:
            shapes = list_some(list(dict.fromkeys(map(str, lost))), 3)
            warn_user(
                "A run of memkit's own, of which nothing should stay, has changed a tensor or an array in place that "
                f"the loss function or the model holds, and that is too large to be saved beforehand: of the shape "
                f"{shapes}. It stays changed. Way out: make it a buffer of a module, write x = x + y instead of x += "
                "y, or change it after the step."
            )

    def restore_modules(self, modules: Container[nn.Module]) -> None:
        """Restore the attributes of these modules alone, and what stands in them as far as it was saved."""
        inside: set[int] = set()
        copies = {id(container): copy for container, copy in self._containers} if self._with_buffers else {}
        for owner, attributes in self._owners:
            if isinstance(owner, nn.Module) and owner in modules:
                self._set_back(owner, attributes)
                inside |= {id(each) for name, each in attributes.items() if name not in STATE}
                if (buffers := copies.get(id(attributes.get(BUFFERS)))) is not None:
                    inside |= {id(attributes[BUFFERS]), *map(id, buffers.values())}
        for container, copy in self._containers:
            if id(container) in inside:
                _refill(container, copy)
        for held in self._arrays:
            if id(held.array) in inside:
                held.restore()
        for each in self._tensors:
            if id(each.tensor) in inside and each.content is not None:
                each.restore()
        self._restore_gradients()

    def _restore_gradients(self) -> None:
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _set_back(self, owner: object, attributes: dict[str, Any]) -> None:
        if not attributes and type(owner) is types.FunctionType and not vars(owner):  # most functions have none
            return
        now = self._attributes_of(owner)
        if not _is_same(now, attributes):
            others = {name: each for name, each in attributes_of(owner).items() if name not in now}
            set_attributes(owner, others | attributes)

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        """Run the block with everything as it was saved; afterwards it is as it was before the block."""
        how = {"is_for_rerun": self._is_for_rerun, **self._of_training}
        now = Attributes(self._roots, except_for=self._except_for, **how)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the NumPy arrays of numbers."""
        return [held.array for held in self._arrays if not held.is_list]

    def lost_arrays(self) -> list[npt.NDArray[Any]]:
        """Return the arrays that have changed and that `restore` cannot restore, since they were too large to save."""
        return [held.array for held in self._arrays if held.content is None and held.has_changed()]

    def differ(self) -> bool:
        """Return whether any attribute has changed."""
        return (
            any(not _is_same(container, copy) for container, copy in self._containers)
            or any(not _is_same(self._attributes_of(owner), attributes) for owner, attributes in self._owners)
            or any(held.has_changed() for held in self._tensors)
            or any(parameter.grad is not gradient for parameter, gradient in self._gradients)
            or any(hooks.keys() != before.keys() for hooks, before in self._hooks)
            or any(held.has_changed() for held in self._arrays)
            or any(variable.has_changed() for variable in self._variables)
            or self.have_drawn()
        )

    def have_drawn(self) -> bool:
        """Return whether any random generator has drawn."""
        return any(
            not random_state.is_same_state(random_state.generator_state(generator), state)
            for generator, state in self._generators
        )

    def differences(self, restored: Container[int] = ()) -> list[str]:
        """Return what has changed, in words: attributes by their names, and how many other things.

        Numbers and words that were appended to a list do not count: that is how a loss is written down. Nor do new keys
        of a dict, as of a cache.

        Args:
            restored: Ids of tensors whose content somebody else has restored: their versions still tell of the writes.
        """
        names, num_others, tensors = dict[str, None](), 0, dict[int, str]()
        for owner, attributes in self._owners:
            now, kind = self._attributes_of(owner), type(owner).__name__
            for name in now.keys() | attributes.keys():
                if not _is_equal(now.get(name, self), attributes.get(name, self)):
                    names[f"{kind}.{name}"] = None
            tensors |= {id(each): f"{kind}.{name}" for name, each in members_of(attributes).items()}
            tensors |= {id(each): f"{kind}.{name}" for name, each in attributes.items() if type(each) is np.ndarray}
        names |= dict.fromkeys(f"the variable {each.name}" for each in self._variables if each.has_changed())
        num_others += sum(not (_is_same(*pair) or _is_written_down(*pair)) for pair in self._containers)
        written = [held.tensor for held in self._tensors if id(held.tensor) not in restored and held.has_changed()]
        changed = [tensors.get(id(each), "") for each in written]
        changed += [tensors.get(id(held.array), "") for held in self._arrays if held.has_changed()]
        names |= dict.fromkeys(filter(None, changed))
        num_others += changed.count("")
        for generator, state in self._generators:
            if not random_state.is_same_state(random_state.generator_state(generator), state):
                names[f"a {type(generator).__name__}"] = None
        others = [f"{num_others} of its lists, dicts, arrays and tensors"] if num_others else []
        return [*sorted(names), *others]

    def values(self, except_for: Container[int] = ()) -> Iterator[HeldValue]:
        """Yield what stands now in attributes, variables and containers.

        Args:
            except_for: Ids of objects and containers that do not count.
        """
        for owner in self.owners():
            if id(owner) not in except_for:
                for name, each in self._attributes_of(owner).items():
                    yield HeldValue(owner, name, f"{type(owner).__name__}.{name}", each)
        for variable in self._variables:
            yield HeldValue(variable.place, variable.name, f"the variable {variable.name}", variable.now)
        for container, _ in self._containers:
            if id(container) not in except_for:
                yield from _values_in(container)

    def drawn(self) -> list[str]:
        """Return the kinds of NumPy's and Python's generators that drew."""
        return [
            f"a {type(generator).__name__}"
            for generator, state in self._generators
            if not isinstance(generator, torch.Generator)
            and not random_state.is_same_state(random_state.generator_state(generator), state)
        ]

    def owners(self) -> list[object]:
        """Return the objects whose attributes were saved."""
        return [owner for owner, _ in self._owners]

    def torch_generators(self) -> list[torch.Generator]:
        """Return torch's generators, but for the global one, in the order in which they are found."""
        found = [each for each in self.generators() if isinstance(each, torch.Generator)]
        return [each for each in found if each is not torch.default_generator]

    def generators(self) -> list[Any]:
        """Return the random generators."""
        return [each for each, _ in self._generators]

    def hold(self, value: object) -> bool:
        """Whether an object is among the roots or what they hold."""
        return id(value) in self._seen

    def ids(self) -> set[int]:
        """Return the ids of the roots, and of all that they hold."""
        return set(self._seen)

    def modules(self) -> set[nn.Module]:
        """Return the modules among the roots and what they hold."""
        return {each for each, _ in self._owners if isinstance(each, nn.Module)}

    def holders(self) -> list[object]:
        """Return the modules and optimizers, and the other objects that have tensors among their attributes."""
        return [
            owner
            for owner, own in self._owners
            if isinstance(owner, (nn.Module, torch.optim.Optimizer))
            or any(isinstance(each, Tensor) for each in own.values())
        ]

    def plain_tensors(self) -> list[Tensor]:
        """Return the tensors in attributes and containers that are neither parameters nor buffers."""
        values = [each for owner, attributes in self._owners for each in attributes.values()]
        values += [each.value for each in self._variables]
        values += [each.tensor for each in self._tensors]  # in tuples, too
        for _, copy in self._containers:
            values += copy.values() if isinstance(copy, dict) else copy
        tensors = {id(each): each for each in values if isinstance(each, Tensor)}
        return [each for each in tensors.values() if not isinstance(each, nn.Parameter)]

    def buffers(self) -> Iterator[HeldBuffer]:
        """Yield the buffers of the modules."""
        shown = self._shown()
        for owner, _ in self._owners:
            for name, _ in owner.named_buffers(recurse=False) if isinstance(owner, nn.Module) else ():
                yield HeldBuffer(shown(owner, name), owner, name)

    def _shown(self) -> Callable[[object, str], str]:
        """Return a function of an owner and its member's name: the member's name for people.

        That of a module of the roots begins with its path; others, such as those of a network that the loss function
        holds, are told with their path in the outermost module, and its class.
        """
        outside = [each for each, _ in self._owners if isinstance(each, nn.Module) and id(each) not in self._names]
        inner = {id(child) for each in outside for child in each.children()}
        tops = [each for each in outside if id(each) not in inner]
        paths = {id(each): (path, type(top).__name__) for top in tops for path, each in top.named_modules()}

        def shown(owner: object, name: str) -> str:
            if id(owner) in self._names:
                return f"{self._names[id(owner)]}.{name}".removeprefix(".")
            path, of = paths.get(id(owner), ("", type(owner).__name__))
            return f"{path}.{name} of {of}" if path else f"{of}.{name}"

        return shown

    def changed_gradients(self, written: set[int]) -> list[HeldGradient]:
        """Return the gradients, of those that are restored, that are others now or whose storage was written to."""
        changed: dict[int, Tensor] = {}
        for parameter, before in self._gradients:
            storage = storage_of(parameter.grad) if parameter.grad is not None else None
            if parameter.grad is not before or (storage is not None and storage_key(storage) in written):
                changed[id(parameter)] = parameter
        names, shown = dict[int, str](), self._shown()
        for owner, _ in self._owners if changed else ():
            for name, each in owner.named_parameters(recurse=False) if isinstance(owner, nn.Module) else ():
                names[id(each)] = shown(owner, name)
        return [HeldGradient(f"the gradient of {names.get(key, 'a tensor')}", each) for key, each in changed.items()]

    def changed_numbers(self, written: set[int], *, is_by_class: bool = False) -> list[HeldNumber]:
        """Return the floating-point numbers, outside of buffers and parameters, that have changed in their places.

        A tensor or an array that stood there with another shape is left out: it has a row for each of a batch.

        Args:
            written: Keys of the storages that were written to.
            is_by_class: Whether places are named by the class of their module, not by its name in the root.
        """
        arrays = {id(held.array) for held in self._arrays if held.has_changed()}
        found: list[HeldNumber] = []
        for shown, before, read in self._places(is_by_class=is_by_class):
            now = read()
            is_written = (has_storage(now) and storage_key(now.untyped_storage()) in written) or id(now) in arrays
            if now is before and not is_written:
                continue
            then, floats = _floats_of(before), _floats_of(now)
            if floats is not None and (before is None or (then is not None and then.shape == floats.shape)):
                found.append(HeldNumber(shown, read))
        return found

    def _places(self, *, is_by_class: bool) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        """Yield the places in attributes, variables, lists and dicts: names for people, what stood there, what stands.

        Left out are items of a deque, which move up, and new ones of a list, or of a dict by words: a log has them.
        """
        homes: dict[int, str] = {}  # of lists and dicts, which come after those that hold them
        members: set[int] = set()
        for owner, attributes in self._owners:
            kind = type(owner).__name__
            place = kind if is_by_class else self._names.get(id(owner), kind)
            if isinstance(owner, nn.Module):
                members |= {id(attributes.get(name)) for name in (BUFFERS, PARAMETERS)}
            for name, value in (dict.fromkeys(self._attributes_of(owner)) | attributes).items():
                shown = f"{place}.{name}" if place else name
                homes.setdefault(id(value), shown)
                yield shown, value, functools.partial(_attribute, owner, name)
        for variable in self._variables:
            shown = f"the variable {variable.name}"
            homes.setdefault(id(variable.value), shown)
            yield shown, variable.value, functools.partial(getattr, variable, "now")
        for container, copy in self._containers:
            if isinstance(container, (list, dict)) and len(copy) <= _MAX_ITEMS and id(container) not in members:
                home = homes.get(id(container), f"a {type(container).__name__}")
                before = dict(enumerate(copy)) if isinstance(copy, list) else copy
                added = [] if isinstance(copy, list) else [each for each in container if type(each) not in _WORDS]
                for key, value in (dict.fromkeys(added) | before).items():
                    homes.setdefault(id(value), home)
                    yield home, value, functools.partial(_item, container, key)

    def changed(self, written: set[int]) -> list[str]:
        """Return the names of module members that have changed, or whose storage was written to."""
        names, shown = dict[str, None](), self._shown()
        arrays = {id(held.array) for held in self._arrays if held.has_changed()}
        copies = {id(container): copy for container, copy in self._containers}
        moved = {id(held.tensor) for held in self._tensors if not held.is_there}  # by `tensor.data = other`
        for owner, attributes in self._owners:
            now = self._attributes_of(owner)
            # The dict of a module's buffers is the same object, whatever is in it.
            members = {name: attributes[name] for name in (BUFFERS, PARAMETERS) if name in attributes}
            before = members_of(attributes | {name: copies.get(id(each), each) for name, each in members.items()})
            after = members_of(now)
            for name in recomputed_by_hooks(owner) if isinstance(owner, nn.Module) else ():
                after.pop(name, None)  # another object after each forward, but no state
            written_arrays = [name for name, value in attributes.items() if id(value) in arrays]
            names |= dict.fromkeys(shown(owner, name) for name in written_arrays)
            for name, value in after.items():
                storage = storage_of(value) if isinstance(value, Tensor) else None
                is_written = id(value) in moved or (storage is not None and storage_key(storage) in written)
                if is_written or (name in before and before[name] is not value and not name.startswith("_")):
                    names[shown(owner, name)] = None
        names |= dict.fromkeys(f"the variable {each.name}" for each in self._variables if each.has_changed())
        return list(names)


def content_of(batch: Any) -> Attributes | None:
    """Save what a batch's dicts, lists and objects hold: a model may write its results there. None if it has none."""
    containers: list[tuple[Any, Any]] = []
    if not _is_plain(batch, containers):
        return Attributes([batch])
    return Attributes((), containers=containers) if containers else None


def _is_plain(value: Any, containers: list[tuple[Any, Any]]) -> bool:
    """Whether a value has only tensors and words in lists, dicts and tuples; note the lists and dicts."""
    kind = type(value)
    if kind is dict or kind is list:
        containers.append((value, value.copy()))
        value = value.values() if kind is dict else value
    elif kind is not tuple:
        return kind is Tensor or kind in _WORDS
    return all(type(each) is Tensor or _is_plain(each, containers) for each in value)


class HeldValue(NamedTuple):
    """A value: the object, container or cell that it is in, its name or key there, its name for people, and itself."""

    place: object
    key: Hashable
    shown: str
    now: Any


class HeldBuffer(NamedTuple):
    """A buffer: its name for people, as in `Attributes.changed`, its module, and its name there."""

    shown: str
    owner: nn.Module
    name: str

    @property
    def now(self) -> Tensor | None:
        """Its tensor."""
        return getattr(self.owner, self.name, None)


class HeldGradient(NamedTuple):
    """A gradient that a backward inside a loss function has accumulated: its name for people, and its parameter."""

    shown: str
    parameter: Tensor

    @property
    def now(self) -> Tensor | None:
        """Its tensor."""
        return self.parameter.grad


class HeldNumber(NamedTuple):
    """A place that holds a floating-point number, or a tensor or an array of them: its name for people."""

    shown: str
    read: Callable[[], Any]

    @property
    def now(self) -> Tensor | None:
        """The present number, as a tensor; None if there is none."""
        return _floats_of(self.read())


@dataclass(slots=True)
class _Variable:
    """A variable outside a function that the function assigns to (``nonlocal`` or ``global``), with its value."""

    name: str
    place: types.CellType | dict[str, Any] | type
    value: Any

    @property
    def now(self) -> Any:
        """Its present value."""
        if isinstance(self.place, dict):
            return self.place.get(self.name, _UNSET)
        if isinstance(self.place, type):
            return vars(self.place).get(self.name, _UNSET)
        return _content_of(self.place)

    def has_changed(self) -> bool:
        return self.now is not self.value

    def restore(self) -> None:
        if not self.has_changed():
            return
        if isinstance(self.place, dict):
            self.place.pop(self.name, None)
            self.place.update({} if self.value is _UNSET else {self.name: self.value})
        elif isinstance(self.place, type):
            setattr(self.place, self.name, self.value)
        elif self.value is _UNSET:
            del self.place.cell_contents
        else:
            self.place.cell_contents = self.value


class _HeldArray(NamedTuple):
    """A NumPy array, and its content. Where that is too large to be saved, a checksum tells whether it has changed."""

    array: npt.NDArray[Any]
    content: npt.NDArray[Any] | None = None
    checksum: int | None = None

    @property
    def is_list(self) -> bool:
        """Whether it holds Python objects, which are compared by identity."""
        return bool(self.array.dtype == object)

    def has_changed(self) -> bool:
        if self.content is not None:
            return self.array.tobytes() != self.content.tobytes()
        return self.checksum is not None and _checksum(self.array) != self.checksum

    def restore(self) -> bool:
        """Restore it; False if it has changed and was not saved."""
        if not self.has_changed():
            return True
        if self.content is not None:
            self.array[...] = self.content
        return self.content is not None


def _checksum(values: npt.NDArray[Any]) -> int:
    """Return a checksum of an array; one that is not contiguous is copied a part at a time."""
    parts = [values.reshape(-1).view(np.uint8)] if values.flags.c_contiguous else (each.tobytes() for each in values)
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), parts, 0)


class _HeldTensor(NamedTuple):
    """A tensor, its storage and layout (``tensor.data = other`` gives it others), ``requires_grad``, version, content.

    Where the content is not saved, sums of its bits may tell whether it has changed.
    """

    tensor: Tensor
    same: Tensor
    gradient: Tensor | None
    is_trained: bool
    is_leaf: bool
    version: int | None = None
    content: Tensor | None = None
    sums: list[int] | None = None

    @property
    def _gradient_now(self) -> Tensor | None:
        return None if self.is_trained else leaf_gradient(self.tensor)

    @property
    def is_there(self) -> bool:
        """Whether it has the storage, and the place in it, that it had."""
        now, before = self.tensor, self.same
        is_in_storage = storage_key(now.untyped_storage()) == storage_key(before.untyped_storage())
        return is_in_storage and now.storage_offset() == before.storage_offset()

    def has_changed(self) -> bool:
        """Return whether it has changed, but for ``requires_grad``, which a GAN's loss sets in each call."""
        if self._gradient_now is not self.gradient:
            return True
        if not self.is_there or self.tensor.shape != self.same.shape or self.tensor.dtype is not self.same.dtype:
            return True
        return self._is_written()

    def _is_written(self) -> bool:
        if self.content is not None and not isinstance(self.same, FakeTensor):
            # Content that was written and restored counts as unchanged, whatever its version.
            return not torch.equal(as_integers(self.same), as_integers(self.content))  # NaN equals NaN
        if self.version is not None and version_of(self.same) != self.version:
            return True
        return self.sums is not None and bit_sums([self.same]) != self.sums

    def restore(self) -> bool:
        """Restore all of it; False if its content has changed and was not saved."""
        if self.is_leaf:
            _drop_graph(self.tensor, is_trained=self.is_trained)
        if self._gradient_now is not self.gradient:
            self.tensor.grad = self.gradient
        if not self.has_changed():
            return True
        if not self.is_there or self.tensor.shape != self.same.shape:
            self.tensor.data = self.same
        if not self._is_written():
            return True
        if self.content is not None:
            self.same.data.copy_(self.content)
        return self.content is not None


def _drop_graph(leaf: Tensor, *, is_trained: bool) -> None:
    """Make a tensor the leaf again that it was, without the graph of what a run has written to it."""
    if not leaf.is_leaf and not is_view(leaf):
        leaf.detach_()
    if leaf.requires_grad != is_trained and leaf.is_leaf:
        leaf.requires_grad_(is_trained)


def _gradient_of(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a tensor that is not trained: some codebooks keep counts there."""
    return None if tensor.requires_grad else leaf_gradient(tensor)


def _assigned_in(kind: type) -> Iterator[_Variable]:
    """Yield the attributes of a user's class that may be counts or other state: not its functions and descriptors."""
    for base in kind.__mro__:
        if _is_users(base):
            for name, value in vars(base).items():
                if type(value) in _WORDS or (type(value) is Tensor and not name.startswith("__")):
                    yield _Variable(name, base, value)


def _buffers(owner: object, attributes: Mapping[str, Any]) -> Iterable[object]:
    """Return the buffers of a module, which are watched by themselves."""
    return attributes.get(BUFFERS, {}).values() if isinstance(owner, nn.Module) else ()


def _content_of(cell: types.CellType) -> Any:
    return cell.cell_contents if cell != types.CellType() else _UNSET


def _assigned_by(function: types.FunctionType) -> Iterator[_Variable]:
    """Yield the variables outside a function that may be assigned to: its cells, and globals that its code stores."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Variable(name, cell, _content_of(cell))
    for name in _stored_globals(function.__code__):
        yield _Variable(name, function.__globals__, function.__globals__.get(name, _UNSET))


def _is_users(value: types.FunctionType | type) -> bool:
    """Whether a function or a class is the user's own.

    A class that a metaclass has made, as PyG's of batches, is said to be of the metaclass's module: its bases tell.
    """
    kinds = value.__mro__[:-1] if isinstance(value, type) else (value,)
    for each in kinds:
        module: object = each.__module__  # Cython's metaclasses have a descriptor there
        if module is None or (isinstance(module, str) and module.partition(".")[0] not in _FOREIGN):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def _stored_globals(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that code assigns to or deletes, in functions inside it too."""
    names = frozenset[str]()
    if not _GLOBAL_STORES.isdisjoint(code.co_code[::2]):  # without decoding: nearly all code stores none
        names = frozenset(each.argval for each in dis.get_instructions(code) if each.opcode in _GLOBAL_STORES)
    return names.union(*(_stored_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _set_back_hooks(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Remove the hooks that were added, and put back those that removed themselves; PyTorch's own are left alone."""
    if hooks.keys() == before.keys():
        return
    added = {key: hook for key, hook in hooks.items() if key not in before}
    theirs = {key: hook for key, hook in added.items() if _package_of(hook) in _FOREIGN}
    hooks.clear()
    hooks.update(before | theirs)


def _package_of(hook: object) -> str:
    home = _home_of(hook)
    return "" if home is None else home.__name__.partition(".")[0]


def _home_of(hook: object) -> types.ModuleType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return sys.modules.get(getattr(hook, "__module__", None) or type(hook).__module__)


def _may_hold_state(value: object) -> bool:
    kind = type(value)
    if kind in _WORDS:
        return False
    if isinstance(value, Tensor):
        return kind in _WITH_STORAGE and value.layout is torch.strided and not value.is_nested
    if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, functools.partial, tuple, *_CONTAINERS)):
        return True
    if isinstance(value, _NUMBERS) or kind in (np.ndarray, types.MappingProxyType):
        return True
    if isinstance(value, type):
        return _is_users(value)
    if isinstance(value, _BUILTIN_METHODS):  # log = history.append
        return isinstance(value.__self__, (*_CONTAINERS, *_NUMBERS))
    if isinstance(value, (types.ModuleType, torch.optim.Optimizer)):
        return False
    is_own = isinstance(value, _WRAPPERS) or _is_users(kind)
    return (is_own and has_attributes(value)) or isinstance(value, random_state.GENERATORS)


def _is_trained(value: object) -> TypeGuard[nn.Parameter]:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _held_by_function(fn: Any) -> Iterator[object]:
    if isinstance(fn, functools.partial):
        yield from (fn.func, *fn.args, *fn.keywords.values())
    elif isinstance(fn, types.MethodType):
        yield from (fn.__self__, fn.__func__)
    elif isinstance(fn, _BUILTIN_METHODS):
        yield fn.__self__
    else:
        yield from (fn.__defaults__ or (), fn.__kwdefaults__ or {})
        for cell in getattr(fn, "__closure__", None) or ():
            yield _content_of(cell)
        code, variables = getattr(fn, "__code__", None), getattr(fn, "__globals__", {})
        for name in global_names(code) if code is not None else ():
            if name in variables:
                yield variables[name]


def _held_by_class(kind: type) -> Iterator[object]:
    """Yield the functions of a user's class, which may count in variables outside, and its lists and dicts.

    Classes of installed packages are left out: they have hundreds of functions, and registries that they all reach.
    """
    for base in kind.__mro__:
        if _is_users(base) and is_users_module(sys.modules.get(base.__module__)):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)  # a static method's
                if isinstance(function, (types.FunctionType, *_CONTAINERS)):
                    yield function


def _is_written_down(container: Any, copy: Any) -> bool:
    """Whether numbers or words were appended to a list, or keys added to a dict, and nothing else was changed."""
    if isinstance(container, dict):  # a cache
        return copy.keys() <= container.keys() and _is_same({key: container[key] for key in copy}, copy)
    if not isinstance(container, list) or len(container) < len(copy):
        return False
    return _is_same(container[: len(copy)], copy) and all(type(each) in _WORDS for each in container[len(copy) :])


def _is_equal(one: object, other: object) -> bool:
    """Whether two attributes are one object, or equal words, numbers or shapes."""
    if one is other:
        return True
    is_shape = isinstance(one, tuple) and all(type(each) in _WORDS for each in one)
    return type(one) is type(other) and (type(one) in _WORDS or is_shape) and bool(one == other)


def _values_in(container: Any) -> Iterator[HeldValue]:
    """Yield the items of a list, dict or deque; of a deque that forgets, as a window does, its length too."""
    kind = type(container).__name__
    if isinstance(container, collections.deque) and container.maxlen is not None:
        yield HeldValue(container, len, f"a {kind} of at most {container.maxlen}", len(container))
    if isinstance(container, (set, *_NUMBERS)) or len(container) > _MAX_ITEMS:
        return
    for key, each in container.items() if isinstance(container, dict) else enumerate(container):
        yield HeldValue(container, key, f"{kind}[{key!r}]", each)


def _floats_of(value: Any) -> Tensor | None:
    """Return a small value's floating-point numbers as a tensor; None if it has others, or none."""
    if has_storage(value):
        return value.detach() if value.is_floating_point() and value.nbytes <= _SMALL_BYTES else None
    if not isinstance(value, (float, np.floating, np.ndarray)):
        return None
    array = np.asarray(value)
    return (
        torch.tensor(array, dtype=torch.float64) if array.dtype.kind == "f" and array.nbytes <= _SMALL_BYTES else None
    )


def _attribute(owner: object, name: str) -> Any:
    return attributes_of(owner).get(name)


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if key < len(container) else None


def fingerprint_of(value: Any) -> tuple[object, object] | None:
    """Return a kind of value, and what tells two values of that kind apart; None for what is no value, or has a graph.

    A number and a tensor with one number and no dimensions are of one kind: a running mean may begin as 0.0.
    """
    if type(value) in _COUNTED:
        return "word" if type(value) is str else "number", value
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype != object:
        array = np.asarray(value)
        return array.shape or "number", (_checksum(array) if array.shape else array.item())
    if not isinstance(value, Tensor) or not value.is_leaf or not (sums := bit_sums([value.detach()])):
        return None
    return value.shape or "number", sums[0]


def _refill(container: Any, copy: Any) -> None:
    """Put the objects of its copy back into a container."""
    if _is_same(container, copy):
        return
    if isinstance(container, _NUMBERS):
        container[:] = copy
    else:
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(copy)


def _is_same(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects as its copy."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in copy.items())
    if isinstance(container, set):
        return bool(container == copy)
    if isinstance(container, _NUMBERS):
        return bytes(container) == bytes(copy)
    return all(one is other for one, other in zip(container, copy, strict=True))


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None if it has no storage of its own, as for sparse and wrapper tensors."""
    try:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):
        return None
