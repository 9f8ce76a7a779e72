"""Dataset metadata in a few NumPy arrays, so that DataLoader workers do not copy it page by page.

A Python object holds its own reference count. A forked worker that only reads a list of strings updates those counts,
and each write copies a page, so every worker ends up with its own list. An array is one object, however long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final, overload

import numpy as np
from numpy.typing import NDArray

from memkit._core.errors import InputError, InputTypeError

_NUMBERS = (bool, int, float)


@final
class CompactStrings(Sequence[str]):
    """Strings, such as file names, in one array of UTF-8 bytes and one of offsets; reads like a tuple of strings.

    Args:
        strings: The strings; they are read once.

    Attributes:
        nbytes: Bytes of the two arrays.

    Raises:
        InputTypeError: An item is not a string.

    Memory cost: the UTF-8 bytes, and 8 bytes per string.

    Example:
        >>> import memkit as mk
        >>> names = mk.train.CompactStrings(f"scene-{i:04d}.ply" for i in range(1000))
        >>> len(names), names[-1], names[:2], names.nbytes
        (1000, 'scene-0999.ply', ('scene-0000.ply', 'scene-0001.ply'), 22008)
    """

    def __init__(self, strings: Iterable[str]) -> None:
        text = bytearray()
        ends = [0]
        for each in strings:
            if not isinstance(each, str):
                _refuse_type("CompactStrings(strings)", each, "strings")
            text += each.encode(errors="surrogatepass")  # file names that are not UTF-8 hold surrogates
            ends.append(len(text))
        self._text = np.frombuffer(bytes(text), dtype=np.uint8)
        self._ends = np.asarray(ends, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._text.nbytes + self._ends.nbytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple([self[i] for i in range(*index.indices(len(self)))])
        i = range(len(self))[index]  # negative ones, and the usual IndexError
        return self._text[self._ends[i] : self._ends[i + 1]].tobytes().decode(errors="surrogatepass")


@final
class CompactRecords(Sequence[dict[str, Any]]):
    """Dictionaries with the same keys, such as annotations, in one array per key; reads like a tuple of dicts.

    Args:
        records: The dictionaries. Values are strings, numbers, booleans, or NumPy arrays of one shape; the values of a
            key are of one type, so that they come back unchanged.

    Attributes:
        nbytes: Bytes of the arrays.

    Raises:
        InputError: A record has different keys from the first, or there are no records.
        InputTypeError: A value's type differs from the first of its key, or does not fit into an array.

    Memory cost: 8 bytes per number, 1 per boolean, and the UTF-8 bytes plus 8 per string.

    Example:
        >>> import memkit as mk
        >>> records = mk.train.CompactRecords({"file": f"{i}.png", "label": i % 10} for i in range(100))
        >>> records[42], records.columns["label"].sum()
        ({'file': '42.png', 'label': 2}, np.int64(450))
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        rows = list(records)
        if not rows:
            raise InputError(
                "CompactRecords(records)",
                got="no records",
                expected="at least one record",
                fix="pass a non-empty iterable, for example CompactRecords([{'id': 1}]).",
            )
        keys = rows[0].keys()
        for number, row in enumerate(rows):
            if row.keys() != keys:
                raise InputError(
                    "CompactRecords(records)",
                    got=f"keys {sorted(row)} in record {number}",
                    expected=f"the keys of the first, {sorted(keys)}",
                    fix="give every record the same keys; write a missing value as '' or -1, for example.",
                )
        self.columns = {key: _column(key, [row[key] for row in rows]) for key in keys}
        self._length = len(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(column.nbytes for column in self.columns.values())

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[dict[str, Any], ...]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | tuple[dict[str, Any], ...]:
        if isinstance(index, slice):
            return tuple([self[i] for i in range(*index.indices(len(self)))])
        i = range(len(self))[index]
        return {key: _plain(column[i]) for key, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


def _column(key: str, values: list[Any]) -> CompactStrings | NDArray[Any]:
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        first, other = next(pair for pair in itertools.pairwise(values) if type(pair[0]) is not type(pair[1]))
        _refuse_type(f"CompactRecords: key {key!r}", other, f"a {type(first).__name__}, as before")
    (kind,) = kinds
    if kind is str:
        return CompactStrings(values)
    if kind in _NUMBERS:
        try:
            return np.asarray(values, dtype={bool: np.bool_, int: np.int64, float: np.float64}[kind])
        except OverflowError:
            largest = max(values, key=abs)
            _refuse_type(f"CompactRecords: key {key!r}, value {largest}", largest, "64-bit integers")
    is_one_shape = kind is np.ndarray and len({(value.shape, value.dtype) for value in values}) == 1
    if not is_one_shape or values[0].dtype == object:
        _refuse_type(
            f"CompactRecords: key {key!r}", values[0], "strings, numbers, booleans, or arrays of the same shape"
        )
    return np.stack(values)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _refuse_type(call: str, value: object, expected: str) -> NoReturn:
    raise InputTypeError(
        call, got=f"a {type(value).__name__}", expected=expected, fix="convert the values, or keep them in a list."
    )
