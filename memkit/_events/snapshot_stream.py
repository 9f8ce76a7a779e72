"""Read the pickle of a CUDA memory snapshot piece by piece: memory use depends on its blocks and stacks.

A file of 1 GB holds some five million actions with a stack of 20 to 100 frames each. As Python objects they would take
several times the file's size. Here each action becomes a row of numbers as soon as it has been read, and equal stacks
get the same number. Nearly all of the file matches one regular expression (`ActionPattern`); a small pickle machine
runs the rest, operation by operation. It knows lists, tuples, dicts, strings and numbers; anything else is rejected,
never run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from memkit._core.errors import InputError, InputTypeError
from memkit._core.pickles import refuse_pickle
from memkit._core.printable import short
from memkit._events.allocations import Int64s
from memkit._events.snapshot_pattern import STACK_LIST, ActionColumns, ActionPattern, memo_indices
from memkit._events.snapshot_rows import NO_STACK, ActionTrace, StackNumber, Stacks, text_of

_FRAME, _FRAME_HEADER_BYTES, _STOP = 0x95, 9, ord(".")
_LOOKAHEAD_BYTES = 2**16
_FIRST_WINDOW_BYTES, _LARGEST_WINDOW_BYTES = 2**14, 2**22
_LONGEST_TEXT_BYTES = 2**20
_MOST_KEYS, _MOST_PATTERNS = 24, 32
# Limit on the memory of the values kept: PyTorch's own files need at most 15 bytes for each of theirs.
_BYTES_PER_BYTE, _BYTES_ANYHOW, _BYTES_AT_MOST = 40, 2**20, 2**30
_BYTES_OF_MARK = 120


class _Traces(list[Any]):
    """The list of the GPUs' traces."""


class SnapshotStream:
    """A snapshot that is being read; `load` reads it.

    Args:
        chunks: The file, in chunks of any length.

    Attributes:
        stacks: All stacks.
        num_bytes: Number of bytes read.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.stacks = Stacks()
        self.num_bytes = 0
        self._chunks = _unframed(self._counted(chunks))
        self._data, self._at, self._is_over = b"", 0, False
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._stack_memo = np.full(2**12, -1, dtype=np.int32)  # numbers of stacks, by memo index
        self._num_memos = 0
        self._text_memo: dict[str, int] = {}  # the index at which each text was last stored or fetched
        self._held = 0
        self._trace: ActionTrace | None = None  # the trace being read: its actions lie directly above `_trace_depth`
        self._trace_depth = self._trace_held = -1
        self._keys: list[str] = []
        self._pattern: ActionPattern | None = None
        self._num_patterns = 0

    def load(self) -> Any:
        """Return the snapshot, with `ActionTrace` for traces and `StackNumber` for most lists of frames.

        Raises:
            InputError: The file holds anything but plain values, is damaged, or would take far more memory than its
                length.
            InputTypeError: A field of an action does not have the type that torch writes.
        """
        try:
            return self._run()
        except (InputError, InputTypeError):
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            found = f"{type(error).__name__}: {short(str(error))}"
            refuse_pickle(f"a pickle that cannot be loaded ({found})", "a complete pickle")

    def _run(self) -> Any:
        while True:
            if len(self._data) - self._at < _LOOKAHEAD_BYTES:
                self._read_on(_LOOKAHEAD_BYTES)
            if self._at >= len(self._data):
                _refuse_end()
            code = self._data[self._at]
            if code == _STOP:
                (value,) = self._stack
                return value
            found = self._operations.get(code)
            if found is None:
                what = f"operation {bytes([code])!r}, which does not occur in snapshots"
                refuse_pickle(f"a pickle with {what}", "plain lists, dicts, strings and numbers")
            operation, num_held = found
            self._at += 1
            self._held += num_held
            operation(self)

    # ------------------------------------------------------------------------------------------------ the file

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.num_bytes += len(chunk)
            yield chunk

    def _read_on(self, num_bytes: int) -> None:
        """Read until at least ``num_bytes`` lie ahead, or the file ends."""
        most = min(_BYTES_ANYHOW + _BYTES_PER_BYTE * self.num_bytes, _BYTES_AT_MOST)
        if self._held + self.stacks.num_held_bytes > most:
            what = "are almost all empty containers" if most < _BYTES_AT_MOST else f"take over {most} bytes of memory"
            refuse_pickle(f"{self.num_bytes} bytes that {what}", "a snapshot")
        while not self._is_over and len(self._data) - self._at < num_bytes:
            chunk = next(self._chunks, None)
            self._is_over = chunk is None
            self._data, self._at = self._data[self._at :] + (chunk or b""), 0

    def _take(self, num_bytes: int) -> bytes:
        self._at += num_bytes
        if self._at > len(self._data):
            _refuse_end()
        return self._data[self._at - num_bytes : self._at]

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    # ------------------------------------------------------------------------------------------------ operations

    def _pass(self) -> None:
        self._take(1)

    def _pass_frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        top = self._stack[-1] if self._stack else None
        self._marked.append(self._stack)
        self._stack = []
        if type(top) is ActionTrace:
            self._trace, self._trace_depth, self._trace_held = top, len(self._marked), self._held

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        self._held -= _BYTES_OF_MARK
        if len(self._marked) < self._trace_depth:
            self._trace, self._trace_depth = None, -1
        return items

    @property
    def _is_among_actions(self) -> bool:
        return len(self._marked) == self._trace_depth

    def _text(self, width: int) -> None:
        num_bytes = self._number(width)
        if num_bytes > _LONGEST_TEXT_BYTES:
            refuse_pickle(f"a text of {num_bytes} bytes, too long for a snapshot", "names and paths")
        self._read_on(num_bytes)
        self._held += num_bytes
        self._stack.append(self._take(num_bytes).decode("utf-8", "surrogatepass"))

    def _integer(self, width: int) -> None:
        self._stack.append(self._number(width))

    def _signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _long(self) -> None:
        num_bytes = self._number(1)
        if num_bytes > 9:
            refuse_pickle(f"a number of {num_bytes} bytes, too long for a snapshot", "numbers of up to 64 bits")
        self._stack.append(int.from_bytes(self._take(num_bytes), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("a tuple of more items than the stack holds")
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        self._stack.append(tuple(items))

    def _marked_tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _dict(self) -> None:
        if self._is_among_actions and not self._stack and self._take_actions():
            return
        self._stack.append({})

    def _list(self) -> None:
        top = self._stack[-1] if self._stack else None
        parent = (
            self._marked[-1][-1]
            if self._marked and self._marked[-1] and type(top) in (type(None), ActionTrace)
            else top
        )
        if isinstance(top, str) and top == "device_traces":
            self._stack.append(_Traces())
        elif type(parent) is _Traces:
            self._stack.append(ActionTrace(self.stacks))
        elif found := STACK_LIST.match(self._data, self._at):  # a list of frames that are all in the memo
            self._at = found.end()
            number = self._stack_of(found[2])
            if found[1]:
                self._note_stack(self._memo_index(found[1]), number)
            self._stack.append(StackNumber(number))
        else:
            self._stack.append([])

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        items = self._pop_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (list, ActionTrace, _Traces):
            raise TypeError("an item for an object that is not a list")
        if type(target) is ActionTrace:
            self._add_actions(target, items)
        else:
            target.extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_all([key, value])

    def _set_items(self) -> None:
        items = self._pop_mark()
        self._set_all(items)

    def _set_all(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError("an entry for an object that is not a dict")
        target.update(zip(items[::2], items[1::2], strict=True))
        if self._is_among_actions and len(self._stack) == 1 and self._trace is not None:
            self._add_actions(self._trace, [self._stack.pop()])
            self._held = self._trace_held

    # ------------------------------------------------------------------------------------------------ the memo

    def _memoize(self) -> None:
        self._remember(self._num_memos)
        self._num_memos += 1

    def _put(self, width: int) -> None:
        self._remember(self._number(width))

    def _remember(self, index: int) -> None:
        if index > self.num_bytes:
            refuse_pickle(f"a memo index of {index}, too large for a snapshot", "one for each object")
        if not self._is_among_actions:  # an action becomes a row, which no later operation can get
            value = self._memo[index] = self._stack[-1]
            if type(value) is str:
                self._text_memo[value] = index

    def _get(self, width: int) -> None:
        index = self._number(width)
        value = self._recall(index)
        if type(value) is str:
            self._text_memo[value] = index
        self._stack.append(value)

    def _recall(self, index: int) -> Any:
        if index in self._memo:
            return self._memo[index]
        number = int(self._stack_memo[index]) if index < len(self._stack_memo) else -1
        if number < 0:
            raise KeyError(f"no object at memo index {index}")
        return StackNumber(number)

    def _memo_index(self, operation: bytes) -> int:
        """Return the index at which a memo operation stores."""
        if operation != b"\x94":
            return int.from_bytes(operation[1:], "little")
        self._num_memos += 1
        return self._num_memos - 1

    def _note_stack(self, index: int, number: int) -> None:
        if index > self.num_bytes:
            refuse_pickle(f"a memo index of {index}, too large for a snapshot", "one for each object")
        self._make_room(index + 1)
        self._stack_memo[index] = number

    def _make_room(self, size: int) -> None:
        if size > len(self._stack_memo):
            more = np.full(max(size, 2 * len(self._stack_memo)) - len(self._stack_memo), -1, dtype=np.int32)
            self._stack_memo = np.concatenate([self._stack_memo, more])

    def _stack_of(self, names: bytes) -> int:
        """Return the number of the stack whose frames these operations get."""
        return self.stacks.number([self._recall(index) for index in memo_indices(names)])

    # ------------------------------------------------------------------------------------------------ actions

    def _add_actions(self, trace: ActionTrace, items: Sequence[Any]) -> None:
        for item in items:
            if not isinstance(item, dict):
                refuse_pickle(f"an action that is {short(item)}", "a dict")
            trace.add(item)
            self._learn(item)

    def _learn(self, action: dict[Any, Any]) -> None:
        """Make a pattern that also matches actions like this one."""
        keys = [key for key in action if key in self._text_memo and key != "device_free"]
        if self._num_patterns == _MOST_PATTERNS or set(keys) <= set(self._keys):
            return
        self._keys = [*(key for key in self._keys if key not in keys), *keys][-_MOST_KEYS:]
        self._num_patterns += 1
        self._pattern = ActionPattern({key: self._text_memo[key] for key in self._keys}, self._stack_of)

    def _take_actions(self) -> bool:
        """Read all actions that match the pattern, from the dict that begins here; return whether there were any."""
        if self._pattern is None or self._trace is None:
            return False
        self._at -= 1
        window, num_rows = _FIRST_WINDOW_BYTES, 0
        while True:
            self._read_on(window)
            found = self._pattern.match(self._data, self._at, self._at + window)
            if not found.num_rows:
                break
            num_rows += found.num_rows
            self._at += found.num_bytes
            self._trace.extend(
                [
                    self._kinds(self._trace, found.kinds),
                    found.addresses,
                    found.sizes,
                    found.times,
                    self._stacks_of(found),
                ]
            )
            if found.num_bytes > window // 2:
                window = min(2 * window, _LARGEST_WINDOW_BYTES)
            else:
                break
        self._at += not num_rows  # past the beginning of the dict, as it was
        return num_rows > 0

    def _kinds(self, trace: ActionTrace, indices: Int64s) -> Int64s:
        """Return the number of each action's kind."""
        names, inverse = np.unique(indices, return_inverse=True)
        texts = [text_of({"action": self._recall(each)}, "action") for each in names.tolist()]
        return np.asarray([trace.kind(text) for text in texts])[inverse]

    def _stacks_of(self, found: ActionColumns) -> Int64s:
        """Return the number of each action's stack, and note the stacks that later actions may refer to."""
        ends = self._num_memos + np.cumsum(found.memos)
        starts, self._num_memos = ends - found.memos, int(ends[-1])
        is_new, is_known = found.stacks >= 0, found.known >= 0
        self._make_room(self._num_memos)
        self._stack_memo[(starts + found.lists)[is_new]] = found.stacks[is_new]
        stacks = np.where(is_new, found.stacks, NO_STACK)
        indices = found.known[is_known]
        for each in np.unique(indices[self._stack_number(indices) < 0]).tolist():
            self._note_stack(each, self.stacks.number(self._recall(each)))
        stacks[is_known] = self._stack_number(indices)
        return stacks

    def _stack_number(self, indices: Int64s) -> Int64s:
        """Return the number of the stack at each memo index; -1 if no stack is known there."""
        inside = np.minimum(indices, len(self._stack_memo) - 1)
        return np.where(inside == indices, self._stack_memo[inside], -1).astype(np.int64)

    _operations: ClassVar[
        dict[int, tuple[Callable[[SnapshotStream], None], int]]
    ] = {  # with the memory that each one takes, at most
        0x80: (_pass, 0),
        0x95: (_pass_frame, 0),
        ord("("): (_mark, _BYTES_OF_MARK),
        ord("}"): (_dict, 240),
        ord("]"): (_list, 96),
        ord(")"): (lambda self: self._tuple(0), 8),
        0x85: (lambda self: self._tuple(1), 56),
        0x86: (lambda self: self._tuple(2), 64),
        0x87: (lambda self: self._tuple(3), 72),
        ord("t"): (_marked_tuple, 64),
        ord("N"): (lambda self: self._stack.append(None), 8),
        0x88: (lambda self: self._stack.append(True), 8),
        0x89: (lambda self: self._stack.append(False), 8),
        ord("K"): (lambda self: self._integer(1), 8),
        ord("M"): (lambda self: self._integer(2), 40),
        ord("J"): (_signed, 40),
        0x8A: (_long, 40),
        ord("G"): (_float, 32),
        0x8C: (lambda self: self._text(1), 64),
        ord("X"): (lambda self: self._text(4), 64),
        0x8D: (lambda self: self._text(8), 64),
        ord("a"): (_append, 0),
        ord("e"): (_appends, 0),
        ord("s"): (_set_item, 0),
        ord("u"): (_set_items, 0),
        0x94: (_memoize, 100),
        ord("q"): (lambda self: self._put(1), 100),
        ord("r"): (lambda self: self._put(4), 100),
        ord("h"): (lambda self: self._get(1), 8),
        ord("j"): (lambda self: self._get(4), 8),
    }


def _unframed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a pickle without the headers of its frames, which may lie in the middle of an action."""
    data, num_left, is_framed = b"", 2, True  # the first two bytes give the version
    for chunk in chunks:
        data, at, pieces = data + chunk, 0, []
        while is_framed and at < len(data):
            if num_left:
                pieces.append(data[at : at + num_left])
                at += len(pieces[-1])
                num_left -= len(pieces[-1])
            elif data[at] != _FRAME:
                is_framed = False
            elif len(data) - at < _FRAME_HEADER_BYTES:
                break
            else:
                num_left = int.from_bytes(data[at + 1 : at + _FRAME_HEADER_BYTES], "little")
                at += _FRAME_HEADER_BYTES
        if not is_framed:
            pieces.append(data[at:])
            at = len(data)
        data = data[at:]
        yield b"".join(pieces)
    yield data


def _refuse_end() -> NoReturn:
    refuse_pickle("a truncated pickle", "plain lists, dicts, strings and numbers")
