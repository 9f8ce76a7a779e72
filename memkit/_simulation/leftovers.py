"""Cleanup after a simulation: undo its patches to torch, and find tensors that the user's code kept.

Before a step on tensors without data, the contents of all containers that the user's code can reach are saved: globals
of its modules, attributes of its classes and objects, closures, default arguments. If a tensor without data is still
alive afterwards, additions to these containers are removed and overwritten values are restored; a `functools.lru_cache`
is emptied. If anything else holds the tensor, the call raises an error that names the holder.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, NoneType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit._core.attributes import slots_content, slots_of
from memkit._core.errors import StateError
from memkit._core.installed import is_users_module
from memkit._simulation.guesses import GuessedFloat, GuessedInt, Guesses
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import BUFFERS, CHILDREN, PARAMETERS

T = TypeVar("T")
ContainerKind: TypeAlias = Literal["items", "names", "class", "slots", "cell"]

_MOST_OBJECTS = 50_000  # that are visited: holders beyond this are found afterwards and cause an error
_MOST_ITEMS = 1_000  # in a container whose items are visited
_FARTHEST = 8  # steps from a tensor to a holder with a name
_MOST_NAMED, _MOST_TRIED = 3, 40
_CACHE: Any = type(functools.lru_cache(len))
_COPIES: dict[type, Callable[[Any], Any]] = {dict: dict, list: list, set: set, deque: list}
_MISSING = object()
_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes, Tensor, nn.Parameter, torch.Size})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Simulated(Protocol):
    """A source of tensors without data: knows which are alive, and which values were guessed."""

    guesses: Guesses

    def survivors(self) -> list[Tensor]:
        """Return the tensors that are alive."""


def leaving_nothing(call: str, roots: Iterable[object], tensors: Simulated, run: Callable[[], T]) -> T:
    """Run a simulation and make sure that no tensor without data outlives it.

    Args:
        call: The user's call, for the error.
        roots: The user's objects: model, loss function, optimizer.
        tensors: The source of tensors without data.
        run: Runs the simulation. Its result must not hold tensors.

    Raises:
        StateError: Some object holds a tensor without data and cannot be made to release it.
    """
    surroundings = _Surroundings(roots)
    try:
        result = run()
    except BaseException:
        surroundings.clean(tensors)  # the traceback holds tensors, so holders cannot be told apart
        raise
    if tensors.guesses or _are_alive(tensors):
        surroundings.clean(tensors)
    if _are_alive(tensors):
        surroundings.clean_by_search(tensors)
        if _are_alive(tensors):
            holders = surroundings.holders(tensors)
            raise StateError(
                call,
                got="tensors without data that are still held after the step, by "
                + (", ".join(holders) or "an object that Python's garbage collector does not track"),
                expected="no tensor that outlives the step: it has no values, so training cannot use it",
                fix=f"empty {holders[0] if holders else 'the container that the step fills'}, and fill it before the "
                "call: existing entries are used unchanged.",
            )
    return result


def empty_caches(tensors: Simulated) -> None:
    """Empty each `functools.lru_cache` that holds tensors without data; emptying a cache is always safe."""
    if tensors.survivors():
        search = _Search(tensors)
        for each in gc.get_objects():
            if type(each) is _CACHE and search.leads(gc.get_referents(each)):
                each.cache_clear()


def _are_alive(tensors: Simulated) -> bool:
    if not tensors.survivors():
        return False
    gc.collect()  # most remaining ones are in cycles
    return bool(tensors.survivors())


class _Saved(NamedTuple):
    """A saved container.

    Attributes:
        container: The object.
        content: A copy of its content.
        kind: How it is restored: "items" as a whole; the "names" of an object or a module, of a "class" or in "slots"
            one by one; the value of a "cell".
    """

    container: Any
    content: Any
    kind: ContainerKind


class _Surroundings:
    """Containers that the user's code can reach, with their saved contents."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._saved: dict[tuple[int, str], _Saved] = {}
        self._caches: list[tuple[Any, int]] = []  # with their number of misses
        self._names: dict[int, tuple[int, str]] = {}  # by id(): the id of its holder, and its name there
        self._homes: dict[str, bool] = {}
        self._kept: list[object] = []  # keeps the ids valid
        self._slotted: dict[type, bool] = {}
        self._crawl(roots)

    # ------------------------------------------------------------------------------------------------ before

    def _crawl(self, roots: Iterable[object]) -> None:
        queue: deque[Any] = deque()
        for root in roots:
            for module in _homes_of(root):
                self._homes[module.__name__] = True
                queue.append((module, (0, module.__name__)))
            queue.append((root, (0, getattr(root, "__qualname__", f"the {type(root).__name__}"))))
        while queue and len(self._names) < _MOST_OBJECTS:
            value, name = queue.popleft()
            key = id(value)
            if key not in self._names and not _is_atom(value):
                self._names[key] = name
                self._kept.append(value)
                for child, label in self._children(value):
                    if type(child) not in _ATOMS and id(child) not in self._names:
                        queue.append((child, (key, label)))

    def _children(self, value: Any) -> Iterator[tuple[Any, str]]:
        """Yield the objects that a value holds, with their names there; save mutable content."""
        if isinstance(value, ModuleType):
            if self._is_followed(value.__name__):
                named = self._named(value, vars(value), "names")
                yield from (each for each in named if each[1] != ".__builtins__")  # shared by all modules
        elif isinstance(value, type):
            if self._is_followed(value.__module__):
                yield from self._named(value, vars(value), "class")
        elif isinstance(value, (FunctionType, MethodType, functools.partial, staticmethod, classmethod, property)):
            yield from self._of_function(value)
        elif isinstance(value, _CACHE):
            self._caches.append((value, value.cache_info().misses))
            yield value.__wrapped__, ""
        else:
            yield from self._of_object(value)

    def _of_function(self, value: Any) -> Iterator[tuple[Any, str]]:
        if not isinstance(value, FunctionType):
            for name in ("__self__", "__func__", "func", "args", "keywords", "fget", "fset"):
                yield getattr(value, name, None), ""
        elif self._is_followed(value.__module__ or ""):
            yield sys.modules.get(value.__module__), ""
            names = value.__code__.co_freevars
            for name, cell in zip(names, value.__closure__ or (), strict=True):
                self._save(cell, _content_of(cell), "cell")
                yield _content_of(cell), f"'s variable {name}"
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            yield from ((each, "'s default argument") for each in defaults)
            yield from self._named(value, vars(value), "names")

    def _of_object(self, value: Any) -> Iterator[tuple[Any, str]]:
        is_container = isinstance(value, (dict, list, set, deque, tuple, frozenset))
        copy = next((copy for kind, copy in _COPIES.items() if isinstance(value, kind)), None) if is_container else None
        if copy is not None:
            self._save(value, copy(value), "items")
        if is_container and len(value) <= _MOST_ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((item, f"[{key!r}]" if isinstance(key, (str, int)) else "") for key, item in list(items))
        if isinstance(value, (nn.Module, Optimizer)):
            yield from self._of_module(value)
        elif self._is_looked_into(value):
            yield type(value), ""
            names = _own(value, "__dict__")
            if names is not None:
                yield from self._named(value, names, "names")
            if self._has_slots(type(value)):
                yield from self._named(value, slots_content(value), "slots")

    def _of_module(self, value: nn.Module | Optimizer) -> Iterator[tuple[Any, str]]:
        """Yield its own attributes; most of the standard ones are empty."""
        yield type(value), ""
        names = vars(value)
        self._save(value, dict(names), "names")
        for name in (BUFFERS, PARAMETERS):
            if names.get(name):
                self._save(names[name], dict(names[name]), "items")
        own = {name: child for name, child in names.items() if name not in _OF_EVERY_MODULE}
        yield from ((child, f".{name}") for name, child in {**own, **dict(names.get(CHILDREN, {}).items())}.items())

    def _named(self, owner: Any, names: Mapping[str, Any], kind: ContainerKind) -> Iterator[tuple[Any, str]]:
        self._save(owner, dict(names), kind)
        for name, child in list(names.items()):
            if type(child) not in _ATOMS:
                yield child, f".{name}"

    def _save(self, container: Any, content: Any, kind: ContainerKind) -> None:
        self._saved[id(container), kind] = _Saved(container, content, kind)

    def _has_slots(self, kind: type) -> bool:
        if kind not in self._slotted:
            self._slotted[kind] = hasattr(kind, "__slots__") and any(True for _ in slots_of(kind))
        return self._slotted[kind]

    def _is_followed(self, module: str) -> bool:
        """Whether a module is the user's own, or defines a root."""
        if module not in self._homes:
            self._homes[module] = is_users_module(sys.modules.get(module))
        return self._homes[module]

    def _is_looked_into(self, value: Any) -> bool:
        kind = type(value)
        is_container = hasattr(kind, "__getitem__") or isinstance(value, threading.local)
        return is_container or self._is_followed(kind.__module__)

    # ------------------------------------------------------------------------------------------------- after

    def clean(self, tensors: Simulated) -> None:
        """Remove what the step added, if it leads to a tensor without data or a guessed number."""
        search = _Search(tensors)
        for saved in self._saved.values():
            _put_back(saved, search)
        has_guessed = bool(tensors.guesses)  # a plain number may result from a guess
        for cache, num_misses in self._caches:
            is_new = cache.cache_info().misses != num_misses
            if is_new and (has_guessed or search.leads(gc.get_referents(cache))):
                cache.cache_clear()

    def clean_by_search(self, tensors: Simulated) -> None:
        """Empty the caches of third-party modules that hold tensors without data."""
        while True:
            ends = [path[-1] for path in _holders_of(tensors, self._is_end)]
            caches = {id(end): end for end in ends if isinstance(end, _CACHE) and end.cache_info().currsize}
            if not caches:
                return
            for cache in caches.values():
                cache.cache_clear()

    def holders(self, tensors: Simulated) -> list[str]:
        """Return readable names of the holders of tensors without data."""
        paths = _holders_of(tensors, self._is_end)
        return list(dict.fromkeys(map(self._name_of, paths)))

    def _is_end(self, value: Any) -> bool:
        """Whether a holder has a name of its own."""
        return isinstance(value, (_CACHE, ModuleType, type, FunctionType, GeneratorType)) or id(value) in self._names

    def _name_of(self, path: list[Any]) -> str:
        """Return the readable path to a tensor, starting at the named end."""
        end = path[-1]
        name = self._known_name(end) if id(end) in self._names else _own_name(end)
        for holder, held in zip(path[:0:-1], path[-2::-1], strict=True):
            name += _label(holder, held)
        return name

    def _known_name(self, value: Any) -> str:
        parts, key = [], id(value)
        while key:
            key, label = self._names[key]
            parts.append(label)
        return "".join(reversed(parts))


# ---------------------------------------------------------------------------------------------- before


def _homes_of(root: Any) -> Iterator[ModuleType]:
    """Yield the modules whose code a root runs, except PyTorch's and memkit's own."""
    kinds = {type(each) for each in root.modules()} if isinstance(root, nn.Module) else {type(root)}
    named = [base for kind in kinds for base in kind.__mro__]
    functions = [getattr(root, "func", root), getattr(root, "__func__", root)]
    for each in (*named, *functions):
        module = sys.modules.get(getattr(each, "__module__", None) or "")
        if module is not None and module.__name__.partition(".")[0] not in {"torch", "memkit", "builtins"}:
            yield module


def _is_atom(value: Any) -> bool:
    """Whether a value cannot hold anything that a step leaves behind."""
    return value is None or isinstance(value, (str, bytes, int, float, complex, Tensor, torch.Size))


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _own(value: object, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default whatever the class's `__getattr__` raises."""
    try:
        return getattr(value, name)
    except Exception:  # noqa: BLE001 - pydantic's unfinished models, for one, raise errors of their own
        return default


# ----------------------------------------------------------------------------------------------- after


class _Search:
    """Checks whether values lead to a tensor without data or to a guessed number."""

    def __init__(self, tensors: Simulated) -> None:
        self._tensors = tensors

    def leads(self, values: Iterable[Any]) -> bool:
        """Whether one of the values is one, or holds one at any depth of containers and objects."""
        stack, seen = list(values), set[int]()
        while stack and len(seen) < _MOST_OBJECTS:
            value = stack.pop()
            if isinstance(value, FakeTensor):
                if id(value.fake_mode) == id(self._tensors):
                    return True
            elif isinstance(value, (GuessedFloat, GuessedInt)):
                if value.guesses is self._tensors.guesses:
                    return True
            elif id(value) not in seen and not isinstance(value, (ModuleType, type)):
                seen.add(id(value))
                stack += gc.get_referents(value) if not isinstance(value, FunctionType) else value.__closure__ or ()
        return False


def _put_back(saved: _Saved, search: _Search) -> None:
    """Restore a container's content if new items in it lead to a tensor without data."""
    container, content, kind = saved
    if kind == "items":
        if search.leads(_new_items(container, content)):
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        return
    if kind == "cell":
        new = _content_of(container)
        if new is not content and search.leads([new]):
            container.cell_contents = content
        return
    names = slots_content(container) if kind == "slots" else dict(vars(container))
    for name, value in names.items():
        old = content.get(name, _MISSING)
        if value is not old and search.leads([value]):
            _name_again(container, name, old, kind)


def _name_again(container: Any, name: str, old: Any, kind: str) -> None:
    if kind == "names":  # bypasses the class's `__setattr__`
        vars(container).pop(name)
        vars(container).update({} if old is _MISSING else {name: old})
    elif old is _MISSING:
        delattr(container, name)
    else:
        setattr(container, name, old)


def _new_items(container: Any, content: Any) -> list[Any]:
    if isinstance(container, dict):
        keys = [key for key in container if key not in content]
        return [*keys, *(item for key, item in container.items() if content.get(key, _MISSING) is not item)]
    known = {id(each) for each in content}
    return [item for item in container if id(item) not in known]


class _Own(list[Any]):
    """A list that belongs to the search itself, and so does not count as a holder."""


def _holders_of(tensors: Simulated, is_end: Callable[[Any], bool]) -> list[_Own]:
    """Find paths from live tensors to their holders, up to the nearest holder with a name."""
    alive, found = _Own(tensors.survivors()), list[_Own]()
    del alive[:-_MOST_TRIED]
    while alive and len(found) < _MOST_NAMED:
        path = _path_from(alive.pop(), is_end)
        found += [path] if len(path) > 1 else []  # otherwise only autograd's graph holds it, in C++
    return found


def _path_from(tensor: Tensor, is_end: Callable[[Any], bool]) -> _Own:
    paths, seen = _Own([_Own([tensor])]), {id(tensor)}
    for _ in range(_FARTHEST):
        longer = _Own()
        for path in paths:
            for holder in gc.get_referrers(path[-1]):
                if id(holder) not in seen and not isinstance(holder, (_Own, FrameType)):
                    seen.add(id(holder))
                    longer.append(_Own([*path, holder]))
        found = [path for path in longer if is_end(path[-1])] or ([] if longer else paths)
        if found:
            return _Own(found[0])
        paths = _Own(longer[:_MOST_NAMED])
    return _Own(paths[0])


def _own_name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    name = _own(value, "__qualname__")
    if name is None:
        return f"a {type(value).__name__}"
    return f"the generator {name}" if isinstance(value, GeneratorType) else f"{value.__module__}.{name}"


def _label(holder: Any, held: Any) -> str:
    """Return the name of an object within its holder."""
    if isinstance(holder, dict):
        is_module = "__name__" in holder
        return next((f".{key}" if is_module else f"[{key!r}]" for key, item in holder.items() if item is held), "")
    if isinstance(holder, (list, tuple)):
        return next((f"[{number}]" for number, item in enumerate(holder) if item is held), "")
    return next((f".{name}" for name, item in _own(holder, "__dict__", {}).items() if item is held), "")


# ------------------------------------------------------------------------------------------------------------ patches


class Patches(NamedTuple):
    """New values for attributes of one owner.

    Attributes:
        owner: A module or a class.
        purpose: Their purpose.
        values: The values by name.
    """

    owner: Any
    purpose: str
    values: Mapping[str, Any]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute temporarily; an inherited one is inherited again afterwards."""
    had = vars(owner).get(name, patched)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had is patched:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


@contextmanager
def applied(patches: Iterable[Patches]) -> Iterator[None]:
    """Apply patches temporarily; they are always undone, in reverse order."""
    with ExitStack() as stack:
        for each in patches:
            for name, value in each.values.items():
                stack.enter_context(patched(each.owner, name, value))
        yield


class Shared:
    """Patches that stay applied while at least one block runs, in one or several threads.

    Args:
        make: Makes the patches when the first block begins.
    """

    def __init__(self, make: Callable[[], Iterable[Patches]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._applied = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Apply the patches within the block."""
        with self._lock:
            if not self._num_blocks:
                self._applied.enter_context(applied(self._make()))
            self._num_blocks += 1  # only now: making them may fail or be interrupted
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                if not self._num_blocks:
                    self._applied.close()
