"""Holders of an object: the chain of references up to a variable, in the user's terms. Used by the leak watch."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType as SlotType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from memkit._torch.modules import CHILDREN
from memkit.memory.sources import NamePlace

_WIDEST, _DEEPEST = 48, 14  # search bounds: objects per level, levels
_LOCALS_ARE_FAST = 0x1  # code flag: a function's locals, not a module's dict
_SHOWS_LOCALS = {"locals", "vars", "dir", "eval", "exec"}
_UNSHARED = 3  # references to a frame's dict of locals: the frame's, the variable's, the argument's
_LAST_ERRORS = ("last_exc", "last_value", "last_traceback")
CACHE = type(functools.lru_cache(maxsize=1)(id))
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_INTERNAL = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


def is_a(value: object, kind: type) -> bool:
    """`isinstance` without consulting the object: a proxy's ``__class__`` may run code, or fail."""
    return kind in type.__getattribute__(type(value), "__mro__")


def instances_of(base: type, objects: list[object]) -> list[Any]:
    """Return the instances of a class by their true types, without consulting a proxy's ``__class__``."""
    kinds = {kind for kind in set(map(type, objects)) if base in type.__getattribute__(kind, "__mro__")}
    return [each for each in objects if type(each) in kinds]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including slots, without calling its ``__getattr__``."""
    try:
        own = (
            type.__getattribute__(value, "__dict__")
            if is_a(value, type)
            else object.__getattribute__(value, "__dict__")
        )
        found = dict(own)
    except Exception:  # noqa: BLE001 - no dict, or a class that computes it
        found = {}
    for kind in type.__getattribute__(type(value), "__mro__"):
        for key, slot in list(type.__getattribute__(kind, "__dict__").items()):
            if type(slot) is SlotType:
                try:
                    found[key] = slot.__get__(value)
                except AttributeError:
                    continue
    return found


@dataclass(frozen=True, slots=True)
class NamedReference:
    """A reference that has a name: "global", `losses`, "in train.py"."""

    kind: str
    place: NamePlace
    owner: str = ""

    def text(self, suffix: str = "") -> str:
        """Return a description; `suffix` holds the subscripts that belong to the name."""
        return f"{self.kind} `{self.place.name}{suffix}` {self.owner}".rstrip()


@dataclass(frozen=True, slots=True)
class Referrer:
    """Holder of an object.

    Attributes:
        text: The nearest name, and the scope that it belongs to.
        referrers: Short descriptions of the whole chain, from the object up.
        place: Place in the source that uses the nearest name; None if no name leads to the object.
    """

    text: str
    referrers: tuple[str, ...]
    place: NamePlace | None


class References:
    """References between objects at one moment.

    Args:
        objects: All objects tracked by the garbage collector. Only these count as referrers, not those that the search
            creates.
        layers: The modules among them.

    Attributes:
        files: Files of the user code that is running now, innermost first.
    """

    def __init__(self, objects: list[object], layers: list[Any]) -> None:
        self._objects = objects
        self._known = set(map(id, objects))
        self._globals: dict[int, dict[str, Any]] = {}  # by id() of a variable's value: its namespace
        self._locals: dict[int, NamedReference] = {}
        self._arrays: dict[int, Any] = {}
        self._untracked: list[dict[Any, Any]] = []
        self._found: dict[int, list[tuple[Any, Any]]] = {}  # by id() of an object: its referrers, each with the object
        self._looked_up: list[Any] = []  # kept, so that no other object gets the same id()
        self.files: list[str] = []
        namespaces: dict[int, dict[str, Any]] = {}
        for top in sys._current_frames().values():  # noqa: SLF001 - the only access to other threads' frames
            frame: FrameType | None = top
            while frame is not None:
                if not frame.f_code.co_filename.startswith(_INTERNAL):
                    self._read_locals(frame)
                    namespaces[id(frame.f_globals)] = frame.f_globals
                frame = frame.f_back
        del top  # this very frame: with itself among its locals, it would keep them all until the next collection
        for module in list(sys.modules.values()):
            if is_a(module, ModuleType):
                namespace = ModuleType.__getattribute__(module, "__dict__")
                namespaces.setdefault(id(namespace), namespace)
        self._namespaces = set(namespaces)
        for namespace in reversed(namespaces.values()):  # running code comes first, and wins
            self._globals.update(zip(map(id, list(namespace.values())), itertools.repeat(namespace)))
        self._layers = {
            id(child): (layer, key)
            for layer in layers
            for key, child in (attributes(layer).get(CHILDREN) or {}).items()
        }

    def _read_locals(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_filename not in self.files and not code.co_filename.startswith(_LIBRARIES):
            self.files.append(code.co_filename)
        if code.co_flags & _LOCALS_ARE_FAST:
            for key, value in locals_of(frame):
                # Outer frames come later and win: they keep the objects that they pass on.
                self._locals[id(value)] = _local(key, code)
                if is_object_array(value):
                    self._arrays[id(value)] = value

    def name_of(self, value: object) -> NamedReference | None:
        """Return the variable that refers to this object."""
        namespace = self._globals.get(id(value))
        if namespace is None:
            return self._locals.get(id(value))
        key = next((str(key) for key, each in list(namespace.items()) if each is value), "")
        module, file = str(namespace.get("__name__")), namespace.get("__file__")
        if module == "sys" and key in _LAST_ERRORS:
            return NamedReference("the last exception's traceback", NamePlace(f"sys.{key}", None))
        file = file if isinstance(file, str) else None
        return NamedReference("global", NamePlace(key, file), f"in {Path(file).name if file else module}")

    # ---- one step up

    def referrers(self, values: list[Any]) -> list[tuple[Any, Any]]:
        """Return the referrers of some objects, as pairs (referrer, object), without namespaces of modules."""
        self._look_up(values)
        ids = dict.fromkeys(map(id, values))
        pairs = [pair for key in ids for pair in self._found[key]]
        pairs += [(each, value) for each in self._untracked for value in each.values() if id(value) in ids]
        pairs += [(array, item) for array in self._arrays.values() for item in array.flat if id(item) in ids]
        return pairs

    def _look_up(self, values: list[Any]) -> None:
        """Find the referrers of several objects in one pass over all objects, which takes most of the time."""
        new = {id(each): each for each in values if id(each) not in self._found}
        if not new:
            return
        self._found |= {key: [] for key in new}
        self._looked_up += new.values()
        parents = [each for each in gc.get_referrers(*new.values()) if id(each) not in self._namespaces]
        late = self._late_namespaces([each for each in parents if type(each) is dict and id(each) not in self._known])
        for parent in parents:
            if id(parent) in self._known or id(parent) in late:
                for child in gc.get_referents(parent):
                    if id(child) in new:
                        self._found[id(child)].append((parent, child))

    def _late_namespaces(self, dicts: list[dict[Any, Any]]) -> set[int]:
        """Return which are objects' dicts, created after the objects were listed: Python creates them on access."""
        owners = gc.get_referrers(*dicts) if dicts else []
        return {id(namespace_of(each)) for each in owners if id(each) in self._known}

    def find_arrays(self) -> None:
        """Find arrays of objects, which the garbage collector does not track, in the objects that it tracks."""
        values = list(itertools.chain.from_iterable(map(gc.get_referents, self._objects)))
        # A dict whose values are untracked, such as arrays, is untracked too.
        dicts = {id(each): each for each in values if type(each) is dict and not gc.is_tracked(each)}
        self._untracked = [each for each in dicts.values() if any(map(is_object_array, each.values()))]
        values += [value for each in self._untracked for value in each.values()]
        self._arrays |= {id(each): each for each in values if type(each) is np.ndarray and is_object_array(each)}

    # ---- the way up

    def prepare(self, values: list[Any]) -> None:
        """Look up the referrers of several objects together, before `holder_of` is called for each."""
        level = values
        for _ in range(_DEEPEST):
            if len(level) > _WIDEST:  # each object is compared with all of them
                break
            self._look_up(level)
            parents = {id(parent): parent for each in level for parent, _ in self._found[id(each)]}
            level = [each for key, each in parents.items() if key not in self._found and not self._is_end(each)]

    def holder_of(self, value: object) -> Referrer:
        """Return the holder of an object."""
        nodes = _without_carriers(self._way_up(value))
        texts: list[str] = []
        first: str | None = None
        place: NamePlace | None = None
        suffix = context = ""
        for below, child, parent in zip([value, *nodes], nodes, nodes[1:], strict=False):
            name = reference(child, parent)
            if isinstance(name, str):
                texts.append(f"{name} of a {type(parent).__name__}" if name.startswith("[") else name)
                suffix = name + suffix if first is None and name.startswith("[") else suffix
                continue
            text = name.text(suffix if first is None else "")
            if is_a(parent, nn.Module) and name.place.name.endswith("_hooks"):
                hooks = name.place.name.strip("_").replace("_", " ")
                text = f"{hooks} on {self.end(parent)}"
                if child is not value:
                    text = f"{hooks[:-1]} on {self.end(parent)}: function {_function_name(below)}"
                context = text
            texts.append(text)
            if first is None:
                first, place = text, name.place
        end = self.name_of(nodes[-1])
        if first is None and end is not None:
            return Referrer(end.text(suffix), (*texts, end.text()), end.place)
        end_text = self.end(nodes[-1])
        context = context or end_text
        if first is None:
            return Referrer(f"a {type(value).__name__} that no readable variable refers to", tuple(texts), None)
        return Referrer(first if context in ("", first) else f"{first} ({context})", (*texts, end_text), place)

    def _way_up(self, value: object) -> list[Any]:
        """Return the shortest chain of referrers to a variable or a layer, or else the longest chain."""
        below: dict[int, tuple[Any, Any]] = {id(value): (value, None)}
        level, end = [value], value
        for _ in range(_DEEPEST):
            end = next((each for each in level if self._is_end(each)), level[0])
            if self._is_end(end):
                break
            pairs = [(parent, child) for parent, child in self.referrers(level) if id(parent) not in below]
            if not pairs:
                break
            below |= {id(parent): (parent, child) for parent, child in reversed(pairs)}
            level = list({id(parent): parent for parent, _ in pairs}.values())[:_WIDEST]
        way = []
        while end is not None:
            way.append(end)
            end = below[id(end)][1]
        return way[::-1]

    def _is_end(self, value: object) -> bool:
        return self.name_of(value) is not None or is_a(value, nn.Module)

    def end(self, value: Any) -> str:
        """Describe the upper end of a chain: a variable, or a layer by its path."""
        keys: list[str] = []
        while is_a(value, nn.Module) and id(value) in self._layers and len(keys) < _DEEPEST:
            value, key = self._layers[id(value)]
            keys.insert(0, key)
        name = self.name_of(value)
        if keys:
            return f"layer `{'.'.join([*([name.place.name] if name else []), *keys])}`"
        return name.text() if name else f"a {type(value).__name__}"


# ---- one reference


def reference(child: object, parent: Any) -> NamedReference | str:
    """Return how one object refers to another: a name or a short text; a text starting with ``[`` is a subscript."""
    kind = type(parent).__name__
    if type(parent) is functools.partial:
        return "a partial"
    if is_a(parent, dict):
        return next((f"[{_short(key)}]" for key, value in list(dict.items(parent)) if value is child), "a dict's key")
    if is_object_array(parent) or any(is_a(parent, each) for each in (list, tuple, deque)):
        items = list(parent.flat if type(parent) is np.ndarray else parent)
        return next((f"[{number}]" for number, item in enumerate(items) if item is child), f"a {kind}")
    return next((name for name, value in _names_in(parent) if value is child), f"a {kind}")


def _names_in(parent: Any) -> Iterator[tuple[NamedReference, Any]]:
    """Yield the named references of an object."""
    if type(parent) is FunctionType:
        yield from _names_in_function(parent)
    elif type(parent) is CACHE:
        function = parent.__wrapped__
        place = NamePlace(function.__qualname__, function.__code__.co_filename, function.__code__.co_firstlineno)
        yield from ((NamedReference("lru_cache of function", place), value) for value in gc.get_referents(parent))
    elif type(parent) is FrameType:
        yield from ((_local(key, parent.f_code), value) for key, value in locals_of(parent))
    elif type(parent) in (GeneratorType, CoroutineType, AsyncGeneratorType):
        prefix = {GeneratorType: "gi", CoroutineType: "cr", AsyncGeneratorType: "ag"}[type(parent)]
        frame = getattr(parent, f"{prefix}_frame")
        if frame is not None:
            yield from ((_local(key, frame.f_code, "generator"), value) for key, value in locals_of(frame))
    elif is_a(parent, threading.local):
        for each in _dicts_of_threads(parent):
            yield from (
                (NamedReference("thread-local attribute", NamePlace(str(key), None)), each[key]) for key in list(each)
            )
    else:
        owner = parent if is_a(parent, type) else type(parent)
        file = getattr(sys.modules.get(owner.__module__), "__file__", None)
        if file is not None and file.startswith(_INTERNAL):
            file = None
        text = f"of class {owner.__qualname__}" if owner is parent else f"of {owner.__qualname__}"
        yield from (
            (NamedReference("attribute", NamePlace(str(key), file, owner.__name__), text), v)
            for key, v in attributes(parent).items()
        )


def _names_in_function(function: FunctionType) -> Iterator[tuple[NamedReference, Any]]:
    code, owner = function.__code__, f"of function {function.__qualname__}"
    named: list[tuple[str, str, Any]] = []
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        named += [("closure variable", key, value) for value in gc.get_referents(cell)]
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    defaults_by_name = dict(zip(arguments, defaults, strict=True)) | (function.__kwdefaults__ or {})
    named += [("default argument", key, value) for key, value in defaults_by_name.items()]
    named += [("attribute", key, value) for key, value in attributes(function).items()]
    for kind, key, value in named:
        yield (
            NamedReference(
                kind, NamePlace(key, code.co_filename, code.co_firstlineno, is_local=kind != "attribute"), owner
            ),
            value,
        )


def _local(key: str, code: CodeType, kind: str = "function") -> NamedReference:
    place = NamePlace(key, code.co_filename, code.co_firstlineno, is_local=True)
    return NamedReference("local", place, f"of {kind} {code.co_qualname}")


def _dicts_of_threads(value: threading.local) -> list[dict[Any, Any]]:
    by_thread = [each for each in gc.get_referents(value) if type(each) is dict]
    return [each for outer in by_thread for each in outer.values() if type(each) is dict]


def _without_carriers(way: list[Any]) -> list[Any]:
    """Drop objects that only carry a name: an object's dict, a function's cells and tuples."""
    nodes = way[:1]
    for parent in way[1:]:
        carriers = _carriers(parent)
        while len(nodes) > 1 and id(nodes[-1]) in carriers:
            nodes.pop()
        nodes.append(parent)
    return nodes


def _carriers(parent: Any) -> set[int]:
    if type(parent) is FunctionType:
        cells = parent.__closure__ or ()
        return set(map(id, (*cells, cells, parent.__defaults__, parent.__kwdefaults__, parent.__dict__)))
    if is_a(parent, threading.local):
        return set(map(id, [*gc.get_referents(parent), *_dicts_of_threads(parent)]))
    if is_a(parent, type) or type(parent) is CACHE:
        return {id(each) for each in gc.get_referents(parent) if type(each) is dict}
    return {id(namespace_of(parent))}


def namespace_of(value: Any) -> Any:
    """Return the dict of an object's attributes, if it has one."""
    try:
        return object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - a class may compute it
        return None


def locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the local variables of a function's frame, without leaving a reference to their values behind.

    Before Python 3.13, `f_locals` fills a dict that stays with the frame and that `locals()` returns to the function's
    own code. It is cleared here; a frame whose code uses that dict, or that is traced by a debugger, is not read.
    """
    if sys.version_info >= (3, 13):
        return list(frame.f_locals.items())
    if frame.f_trace is not None or _SHOWS_LOCALS.intersection(frame.f_code.co_names):
        return []
    snapshot = frame.f_locals
    items = list(snapshot.items())
    if sys.getrefcount(snapshot) <= _UNSHARED:
        snapshot.clear()
    return items


def is_object_array(value: object) -> bool:
    """Whether a value is a NumPy array of Python objects, whose references the garbage collector does not see."""
    return type(value) is np.ndarray and bool(value.dtype.hasobject)


def _short(key: object) -> str:
    return repr(key)[:40] if type(key) in (str, int, float, bool) else f"<{type(key).__name__}>"


def _function_name(value: Any) -> str:
    while type(value) is functools.partial:
        value = value.func
    name = attributes(value).get("__qualname__") or getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__qualname__
