"""Attributes of an object, which it keeps in a dict of its own, in slots, or in both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any


class UserState:
    """A base of those classes of memkit's whose objects hold figures of the user's, as objects of their own would."""


def has_attributes(value: object) -> bool:
    """Whether an object has attributes of its own, whatever its class's ``__getattr__`` raises."""
    return _dict_of(value) is not None or any(True for _ in slots_of(type(value)))


def attributes_of(value: object) -> dict[str, Any]:
    """Return an object's own attributes, in a new dict: those that are in its slots too.

    Example:
        >>> from dataclasses import dataclass
        >>> from memkit._core.attributes import attributes_of
        >>> @dataclass(slots=True)
        ... class Center:
        ...     num_seen: int
        >>> attributes_of(Center(3))
        {'num_seen': 3}
    """
    return {**(_dict_of(value) or {}), **slots_content(value)}


def slots_content(value: object) -> dict[str, Any]:
    """Return what is in an object's slots, by name; empty ones are left out."""
    found: dict[str, Any] = {}
    for name, slot in slots_of(type(value)):
        with suppress(AttributeError):  # it is empty
            found[name] = slot.__get__(value)
    return found


def set_attributes(value: object, attributes: Mapping[str, Any]) -> None:
    """Give an object these attributes and no others, past its class's ``__setattr__``: it may be frozen."""
    slots = dict(slots_of(type(value)))
    for name, slot in slots.items():
        if name in attributes:
            slot.__set__(value, attributes[name])
        else:
            with suppress(AttributeError):  # it is empty
                slot.__delete__(value)
    own = _dict_of(value)
    if own is not None:
        wanted = {name: each for name, each in attributes.items() if name not in slots}
        own.clear()
        own.update(wanted)


def _dict_of(value: object) -> dict[str, Any] | None:
    try:
        own = value.__dict__
    except Exception:  # noqa: BLE001 - no dict; pydantic's unfinished models, for one, raise errors of their own
        return None
    return own if type(own) is dict else None  # a class has a view


def slots_of(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    """Yield the slots of a class and of its bases, by name."""
    if not hasattr(kind, "__slots__"):  # nearly all classes
        return
    for base in reversed(kind.__mro__):  # the most derived class has the last word
        if "__slots__" in vars(base):
            for name, each in vars(base).items():
                if isinstance(each, MemberDescriptorType):
                    yield name, each
