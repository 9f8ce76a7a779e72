"""Read pickles without executing any code in them. No torch.

A pickle is a program that can name and call any function. Before one is loaded, its operations are checked, and all but
a few are rejected. `load_noted` accepts calls, for files that hold tensors or records: each call is recorded as a
`Noted`, and never made. The reader of the file maps each note to an object, from its own table. Snapshots, which hold
plain values only, have a reader of their own (`memkit/_events/snapshot_stream.py`).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Self

from memkit._core.errors import InputError
from memkit._core.printable import short

_PUT, _STOP = b"r", b"."
_FIXED = rb"[(N\x88\x89aesu\x94)]|[\x80Khq].|M..|[Jj].{4}|[\x95G].{8}"
_NAMES = rb"|[RbQ\x81\x93]|c[\w.]{1,99}\n[\w.]{1,99}\n"
_CONTAINERS = rb"|[}\]t\x85\x86\x87]"
_fixed = re.compile(rb"(?s:" + _FIXED + _NAMES + _CONTAINERS + rb")*+")  # a run of operations of fixed length
_TEXTS = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"\x8a": 1, b"\x8b": 4}  # by the size of the length field


class Noted:
    """A call requested by a pickle, and the operations that it applies to the result.

    Each file has its own classes, one for each name in it: a pickle that modifies one of them affects no other file.

    Attributes:
        name: The callable, with its module; empty for a reference to something outside the pickle.
        args: The arguments of the call.
        items: The items to set in the result, with keys.
        state: The state to set on the result; None if there is none.
    """

    name = ""
    args: tuple[Any, ...]
    items: list[tuple[Any, Any]]
    state: Any

    def __new__(cls, *args: object) -> Self:
        noted = super().__new__(cls)
        noted.args, noted.items, noted.state = args, [], None
        return noted

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    def __setstate__(self, state: object) -> None:
        self.state = state


def name_of(value: object) -> str | None:
    """Return a name that a pickle mentions without calling it, such as a dtype; None for anything else."""
    return value.name if isinstance(value, type) and issubclass(value, Noted) else None


def load_noted(data: bytes, kind: str, names: Collection[str]) -> object:
    """Load a pickle with calls, without making any of them; see `rebuild`.

    Args:
        data: The pickle.
        kind: Expected kind of file, for errors.
        names: Names of the functions and classes that it may contain.

    Raises:
        InputError: The pickle contains any other operation or name, or is damaged.
    """
    _check_operations(data, kind)
    try:
        return _Unpickler(data, names).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle can make the unpickler raise any error
        found = f"{type(error).__name__}: {short(str(error))}"
        refuse_pickle(f"a pickle that cannot be loaded ({found})", "a complete pickle")


def _check_operations(data: bytes, kind: str) -> None:
    """Check that every operation is allowed.

    A memo index allocates an array of that length: no index may exceed the number of bytes in the file.
    """
    place = 0
    while True:
        fixed = _fixed.match(data, place)
        place = fixed.end() if fixed else place
        code = data[place : place + 1]
        if code == _STOP:
            return
        width = 4 if code == _PUT else _TEXTS.get(code, 0)
        number = int.from_bytes(data[place + 1 : place + 1 + width], "little")
        if not width or number > len(data):
            found = f"with operation {code!r} at byte {place}, which no {kind} uses" if code else "without an end"
            refuse_pickle(f"a pickle {found}", "plain lists, dicts, strings and numbers")
        place += 1 + width + (0 if code == _PUT else number)


class _Unpickler(pickle.Unpickler):
    """Unpickler that records calls; the classes that it finds are its own."""

    def __init__(self, data: bytes, names: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._found: dict[str, type[Noted]] = {}

    def find_class(self, module: str, name: str) -> type[Noted]:
        full = f"{module}.{name}"
        if full not in self._names:
            raise pickle.UnpicklingError(f"{full} is not a plain value")
        if full not in self._found:
            self._found[full] = type("Noted", (Noted,), {"name": full})
        return self._found[full]

    def persistent_load(self, pid: object) -> Noted:
        return Noted(pid)


def rebuild(value: object, make: Callable[[Noted | type[Noted]], object], most_parts: int) -> Any:
    """Return a loaded value with its notes replaced by the objects that they represent.

    Args:
        value: The result of `load_noted`, or a part of it.
        make: Given a note with rebuilt contents, or the class of a name that is not called, returns the object that it
            represents; raises `InputError` for an unknown note.
        most_parts: Maximum number of parts of the value; a part that occurs in several places counts each time.

    Raises:
        InputError: There are more parts, a container contains itself, or containers are nested too deeply.
    """
    try:
        return _Builder(make, most_parts).build(value)[0]
    except RecursionError:
        refuse_pickle("containers nested too deeply", "a few levels of nesting")
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        refuse_pickle(
            f"values that do not fit together ({type(error).__name__}: {short(str(error))})",
            "the values that were written",
        )


class _Builder:
    """Walks through a loaded value, visiting each container once; the value must stay alive meanwhile."""

    def __init__(self, make: Callable[[Noted | type[Noted]], object], most_parts: int) -> None:
        self._make, self._most_parts = make, most_parts
        self._done: dict[int, tuple[Any, int]] = {}  # by the container's id: its rebuilt value, and its number of parts
        self._open: set[int] = set()

    def build(self, value: Any) -> tuple[Any, int]:
        """Return the rebuilt value and its number of parts."""
        if name_of(value) is not None:
            return self._make(value), 1
        if not isinstance(value, (dict, list, tuple, Noted)):
            return value, 1
        if id(value) not in self._done:
            if id(value) in self._open:
                refuse_pickle("a container inside itself", "plain values")
            self._open.add(id(value))
            self._done[id(value)] = self._build(value)
            self._open.remove(id(value))
        return self._done[id(value)]

    def _build(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, Noted):
            parts, num_parts = self._build_all([value.args, value.items, value.state])
            rebuilt = type(value)(*parts[0])
            rebuilt.items, rebuilt.state = parts[1:]
            return self._make(rebuilt), num_parts
        if isinstance(value, dict):
            keys, num_keys = self._build_all(value)
            values, num_values = self._build_all(value.values())
            return dict(zip(keys, values, strict=True)), num_keys + num_values
        parts, num_parts = self._build_all(value)
        return type(value)(parts), num_parts

    def _build_all(self, values: Collection[Any]) -> tuple[list[Any], int]:
        pairs = [self.build(each) for each in values]
        num_parts = 1 + sum(count for _, count in pairs)
        if num_parts > self._most_parts:
            refuse_pickle(f"over {self._most_parts} parts, with repeated ones", "each part once")
        return [part for part, _ in pairs], num_parts


def refuse_pickle(got: str, expected: str) -> NoReturn:
    """Reject a file or a part of it; the caller reports which file it was."""
    raise InputError("", got=got, expected=expected, fix="")
