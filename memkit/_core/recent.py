"""Dicts that keep their newest entries alone, so that a long run does not fill them."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MOST = 64


def keep_newest(entries: dict[_Key, _Value], key: _Key, value: _Value, *, most: int = _MOST) -> None:
    """Put an entry into a dict, as its newest one; the oldest ones go where there would be too many.

    Example:
        >>> entries = {"a": 1, "b": 2}
        >>> keep_newest(entries, "c", 3, most=2)
        >>> entries
        {'b': 2, 'c': 3}
    """
    entries.pop(key, None)
    while len(entries) >= most:
        del entries[next(iter(entries))]
    entries[key] = value
