"""A snapshot's history in memory: one row of numbers for each action; each distinct stack is stored once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from memkit._core.pickles import refuse_pickle
from memkit._core.printable import short
from memkit._events.allocations import Int64s
from memkit._events.log import require_count

NO_STACK = 0
_LONGEST_NAME = 400  # characters of a frame's file or function: C++ writes templates out
_BYTES_OF_STACK, _BYTES_OF_FRAME = 300, 500


class StackNumber(int):
    """Replacement for a list of frames: the number of an equal stack in `Stacks`."""


class Frame(NamedTuple):
    """A place in code; ``line`` is 0 if unknown."""

    file: str
    line: int
    name: str

    @property
    def text(self) -> str:
        """The place and the name, or the name alone if the line is unknown."""
        return f"{self.file}:{self.line} {self.name}" if self.line else self.name


class Stacks:
    """The distinct stacks, by number; number 0 is the empty one. Equal frames of several objects are stored once.

    Attributes:
        frames: All frames.
        stacks: For each stack, the numbers of its frames, innermost first.
        num_held_bytes: Approximate memory of this object.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = [()]
        self.num_held_bytes = 0
        self._numbers: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._frame_numbers: dict[Frame, int] = {}
        self._seen: dict[int, tuple[object, int | None]] = {}  # by the id of an object, which is kept alive

    def number(self, frames: object) -> int:
        """Return the number of a stack; 0 for anything but a list of frames."""
        if isinstance(frames, StackNumber):
            return int(frames)
        if not isinstance(frames, list):
            return NO_STACK
        stack = tuple(number for each in frames if (number := self._frame(each)) is not None)
        if stack not in self._numbers:
            self._numbers[stack] = len(self.stacks)
            self.stacks.append(stack)
            self.num_held_bytes += _BYTES_OF_STACK + 16 * len(frames)
        return self._numbers[stack]

    def _frame(self, value: object) -> int | None:
        if id(value) not in self._seen:
            self._seen[id(value)] = value, self._new_frame(value)
            self.num_held_bytes += _BYTES_OF_FRAME
        return self._seen[id(value)][1]

    def _new_frame(self, value: object) -> int | None:
        if not isinstance(value, dict):
            return None
        file, line, name = (value.get(key) for key in ("filename", "line", "name"))
        if not isinstance(file, str) or not isinstance(name, str):
            return None
        frame = Frame(file[-_LONGEST_NAME:], line if type(line) is int else 0, name[:_LONGEST_NAME])
        if frame not in self._frame_numbers:
            self._frame_numbers[frame] = len(self.frames)
            self.frames.append(frame)
        return self._frame_numbers[frame]


class ActionTrace:
    """The actions of one GPU's allocator, in order, as columns.

    Attributes:
        kinds: The kinds of actions; `kind` returns their numbers.
        free_bytes: Bytes free on the device, by row, for actions that record them.
    """

    def __init__(self, stacks: Stacks) -> None:
        self.kinds: list[str] = []
        self.free_bytes: dict[int, int] = {}
        self._stacks = stacks
        self._numbers: dict[str, int] = {}
        self._blocks: list[list[Int64s]] = []
        self._loose: list[tuple[int, ...]] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, action: dict[str, Any]) -> None:
        """Add an action.

        Raises:
            InputError: A field has a value that torch never writes.
            InputTypeError: A field has another type.
        """
        free = number_of(action, "device_free", None)
        if free is not None:
            self.free_bytes[self._num_rows] = free
        row = (
            self.kind(text_of(action, "action")),
            number_of(action, "addr", 0),
            number_of(action, "size", 0),
            number_of(action, "time_us", -1),
            self._stacks.number(frames_of(action)),
        )
        self._loose.append(row)
        self._num_rows += 1

    def extend(self, columns: list[Int64s]) -> None:
        """Add many actions: their kinds, addresses, sizes, times and stacks."""
        self._gather()
        self._blocks.append(columns)
        self._num_rows += len(columns[0])

    def kind(self, value: str) -> int:
        """Return the number of a kind of action."""
        if value not in self._numbers:
            self._numbers[value] = len(self.kinds)
            self.kinds.append(value)
        return self._numbers[value]

    def columns(self) -> list[Int64s]:
        """Return kinds, addresses, sizes, times (in microseconds, -1 if unknown) and stacks of all actions."""
        self._gather()
        if len(self._blocks) > 1:
            self._blocks = [[np.concatenate(each) for each in zip(*self._blocks, strict=True)]]
        return self._blocks[0] if self._blocks else [np.zeros(0, dtype=np.int64)] * 5

    def _gather(self) -> None:
        if self._loose:
            self._blocks.append(list(np.asarray(self._loose, dtype=np.int64).T))
            self._loose = []


def number_of(record: dict[str, Any], name: str, default: Any) -> Any:
    """Return a number from 0 to 2**63 - 1 of a record, or the default if it has none."""
    value = record.get(name)
    if value is None:
        return default
    require_count("", name, value)
    return value


def frames_of(record: dict[str, Any]) -> object:
    """Return the stack of a block or an action; old versions stored it in a block's history."""
    history = record.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return record.get("frames")


def text_of(record: dict[str, Any], name: str) -> str:
    """Return a text of a record."""
    value = record.get(name)
    if type(value) is not str or not value:
        refuse_pickle(f"{name}={short(value)}", "text that is not empty")
    return value
