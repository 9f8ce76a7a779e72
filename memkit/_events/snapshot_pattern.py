"""Read the actions of a snapshot's pickle in bulk: those of one length differ only in numbers at the same offsets.

An action is a dict of some 100 bytes, plus 5 bytes for each frame of its stack. A regular expression parses one action
of each form and so finds the offsets of its numbers. All other actions of that length whose remaining bytes are equal
have their numbers at the same offsets. So thousands of actions become rows of a table at once, and each byte is still
checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memkit._events.allocations import Int64s

_GET = rb"(?:j.{4}|h.)"
# Everything but the payload has a fixed length. Of torch's numbers, only an unsigned address may take 9 bytes.
_NUMBER = rb"(?:\x8a(?:" + b"|".join(rb"\x%02x(.{%d})" % (n, n) for n in range(1, 9)) + rb")|J(.{4})|M(..)|K(.))"
_PLAIN_NUMBER = _NUMBER.replace(b"(.", b"(?:.")
_TEXT = rb"\x8c(?:\x00|" + b"|".join(rb"\x%02x.{%d}" % (n, n) for n in range(1, 41)) + rb")\x94"
_PAIR = _PLAIN_NUMBER + _PLAIN_NUMBER + rb"\x86\x94"
_RUN = rb"(?:j.{4}|h.)*+"
_VALUES = {
    "action": rb"(?:j(.{4})|h(.))",
    "addr": _NUMBER,
    "size": _NUMBER,
    "time_us": _NUMBER,
    "frames": rb"(?:\]\x94\((" + _RUN + rb")e|j(.{4})|h(.))",
}
_OTHER = rb"(?:(" + _TEXT + rb"|" + _PAIR + rb")|" + _GET + rb"|" + _PLAIN_NUMBER + rb"|[N\x88\x89])"
_MEMO = rb"(?:\x94|q.|r.{4})"
_NUM_SIGNED = 9  # of the groups of a number: those of 1 to 8 bytes, and the one of 4
_MOST_TEMPLATES = 4096

STACK_LIST = re.compile(rb"(?s:(" + _MEMO + rb")?\((" + _RUN + rb")e)")
"""A list of objects that are all in the memo: how the list is memoized, and the objects' memo indices."""

_one_name = re.compile(rb"(?s:j(.{4})|h(.))")
_names = re.compile(rb"(?s:" + _RUN + rb")")


def memo_indices(names: bytes) -> list[int]:
    """Return the memo indices in a run of operations."""
    return [int.from_bytes(long or short, "little") for long, short in _one_name.findall(names)]


def memo_name(index: int) -> bytes:
    """Return the operation that gets the object at a memo index."""
    return b"h" + index.to_bytes(1, "little") if index < 256 else b"j" + index.to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class ActionColumns:
    """Consecutive actions as columns: every array has one entry for each action.

    Attributes:
        num_bytes: Their length in the pickle.
        kinds: Memo index of the text of its kind.
        addresses, sizes: As numbers; 0 if the action has none.
        times: In microseconds; -1 if the action has none.
        stacks: Number of its stack if the action lists the frames; -1 otherwise.
        known: Memo index of its stack if the action refers to an earlier list; -1 otherwise.
        lists: Number of objects that the action memoizes before that list.
        memos: Number of objects that it memoizes in total.
    """

    num_bytes: int
    kinds: Int64s
    addresses: Int64s
    sizes: Int64s
    times: Int64s
    stacks: Int64s
    known: Int64s
    lists: Int64s
    memos: Int64s

    @property
    def num_rows(self) -> int:
        """Number of actions."""
        return len(self.kinds)


_COLUMNS = ("kinds", "addresses", "sizes", "times", "stacks", "known", "lists", "memos")
_NONE = {"kinds": -1, "times": -1, "stacks": -1, "known": -1}
_FIELDS = {"action": "kinds", "addr": "addresses", "size": "sizes", "time_us": "times", "frames": "known"}


@dataclass(frozen=True, slots=True)
class _Template:
    """Offsets of the numbers in actions of one length whose other bytes are equal."""

    fixed: npt.NDArray[np.uint8]
    mask: npt.NDArray[np.uint8]
    numbers: dict[str, tuple[int, int, bool]]  # start, end, and whether the last bit is a sign
    stack: tuple[int, int] | None
    num_before_stack: int
    num_memos: int


class ActionPattern:
    """Matches actions with some of these keys, in this order.

    Args:
        keys: Memo index of each key.
        number_of: Returns the number of a stack, given the operations that get its frames.
    """

    def __init__(self, keys: Mapping[str, int], number_of: Callable[[bytes], int]) -> None:
        names = {key: memo_name(index) for key, index in keys.items()}
        first, *_ = names.values()
        self._begin = rb"}" + b"\x94(" + first
        self._number_of = number_of
        self._stacks: dict[bytes, int] = {}
        self._templates: dict[int, list[_Template]] = {}
        self._num_templates = 0
        values, num_groups = [], 0
        self._groups: dict[str, tuple[int, int]] = {}
        for key, name in names.items():
            value = _VALUES.get(key, _OTHER)
            count = re.compile(value).groups
            self._groups[key] = num_groups + 1, num_groups + 1 + count
            num_groups += count
            values.append(value if name == first else rb"(?:" + re.escape(name) + value + rb")?")
        self._action = re.compile(rb"(?s:" + b"".join(values) + rb"u(?:e\()?)")

    def match(self, data: bytes, start: int, end: int) -> ActionColumns:
        """Return the consecutive actions from ``start`` on, up to the first that does not match."""
        before, *pieces = data[start:end].split(self._begin)
        pieces = pieces[:-1] if not before else []  # the last one may be truncated, or followed by something else
        found = {name: np.full(len(pieces), _NONE.get(name, 0), dtype=np.int64) for name in _COLUMNS}
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        order = np.argsort(lengths, kind="stable")
        num_good = len(pieces)
        for rows in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
            if len(rows):
                num_good = min(num_good, self._read(pieces, rows, found))
        num_bytes = int(lengths[:num_good].sum()) + num_good * len(self._begin)
        return ActionColumns(num_bytes, **{name: column[:num_good] for name, column in found.items()})

    def _read(self, pieces: list[bytes], rows: Int64s, found: dict[str, Int64s]) -> int:
        """Fill in the rows of actions of one length; return the first row without a match, or the number of rows."""
        length = len(pieces[rows[0]])
        table = np.frombuffer(b"".join([pieces[row] for row in rows.tolist()]), dtype=np.uint8).reshape(-1, length)
        templates = self._templates.setdefault(length, [])
        tried = 0
        while len(rows):
            if tried == len(templates):
                made = self._template(pieces[rows[0]])
                if made is None:
                    return int(rows[0])
                templates.append(made)
            template = templates[tried]
            tried += 1
            fits = ~((table ^ template.fixed) & template.mask).any(axis=1)
            bad = self._fill(template, pieces, rows[fits], table[fits], found)
            if bad is not None:
                return min(bad, int(rows[~fits][0])) if not fits.all() else bad
            rows, table = rows[~fits], table[~fits]
        return len(pieces)

    def _template(self, piece: bytes) -> _Template | None:
        action = self._action.fullmatch(piece)
        if action is None or self._num_templates == _MOST_TEMPLATES:
            return None
        self._num_templates += 1
        mask = np.full(len(piece), 255, dtype=np.uint8)
        numbers: dict[str, tuple[int, int, bool]] = {}
        stack, num_memos, num_before_stack = None, 1, 0
        for key, (first, last) in self._groups.items():
            group = next((each for each in range(first, last) if action.group(each) is not None), None)
            if group is None:
                continue
            start, end = action.span(group)
            if key == "frames" and group == first:
                stack, num_before_stack = (start, end), num_memos
                num_memos += 1
            elif key in _FIELDS:
                is_signed = key not in ("action", "frames") and group < first + _NUM_SIGNED
                numbers[_FIELDS[key]] = start, end, is_signed
            else:
                num_memos += 1
                continue
            mask[start:end] = 0
        fixed = np.frombuffer(piece, dtype=np.uint8)
        return _Template(fixed, mask, numbers, stack, num_before_stack, num_memos)

    def _fill(
        self,
        template: _Template,
        pieces: list[bytes],
        rows: Int64s,
        table: npt.NDArray[np.uint8],
        found: dict[str, Int64s],
    ) -> int | None:
        """Fill in rows that match a template; return the first one with an invalid number or stack, if any."""
        is_good = np.ones(len(rows), dtype=np.bool_)
        for name, (start, end, is_signed) in template.numbers.items():
            wide = np.zeros((len(rows), 8), dtype=np.uint8)
            wide[:, : end - start] = table[:, start:end]
            found[name][rows] = wide.view("<i8")[:, 0]
            if is_signed:
                is_good &= table[:, end - 1] < 128
        found["memos"][rows] = template.num_memos
        if template.stack is not None:
            start, end = template.stack
            found["lists"][rows] = template.num_before_stack
            known = self._stacks.get
            names = [pieces[row][start:end] for row in rows.tolist()]
            numbers = [known(each) for each in names]
            if None in numbers:
                numbers = [self._number(each) for each in names]
            stacks = np.asarray(numbers, dtype=np.int64)
            is_good &= stacks >= 0
            found["stacks"][rows] = stacks
        return None if is_good.all() else int(rows[np.argmin(is_good)])

    def _number(self, names: bytes) -> int:
        """Return the number of a stack; -1 if the bytes contain other operations, or refer to a later frame."""
        if names not in self._stacks:
            if not _names.fullmatch(names):
                return -1
            try:
                self._stacks[names] = self._number_of(names)
            except KeyError:
                return -1
        return self._stacks[names]
