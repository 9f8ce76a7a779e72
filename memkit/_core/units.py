"""Sizes: ints of bytes inside memkit, parsed from text with a unit and formatted for people in binary units.

GB is 10^9 bytes and GiB is 2^30 bytes, everywhere; a letter alone is the smaller of the two: 24G is 24 GB. The number
on a graphics card's box counts GiB.
"""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from memkit._core.errors import ConfigError, InputError, InputTypeError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_FACTORS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}{b}": 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1) for b in ("", "b")},
    **{f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_CARD = re.compile(r"\s*[A-Za-z].*[0-9]")  # probably the name of a GPU; the table of GPUs is not known here
_BUDGETS = "pass 0.9 for 90%, or a size such as '22GiB'."
_MOST_GIB = 4096  # of one machine; a larger number without a unit is one of bytes
_UNITS = "B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"


def parse_bytes(value: SupportsIndex | str, *, name: str = "size", is_large: bool = False) -> int:
    """Read a size in bytes.

    Args:
        value: Bytes as an int, or text with a unit, such as ``"24GiB"``, ``"24 GB"`` or ``"1.5MiB"``
            (upper or lower case). A fraction of a byte is rounded down.
        name: Name of the size, for the error message.
        is_large: Whether this is a budget, or the memory of a whole device or step. If so, a bare number below 1 MiB
            is refused, since 24 probably means 24 GiB.

    Returns:
        The size in bytes, zero or more.

    Raises:
        InputTypeError: ``value`` is neither an int nor text (a bool or a float is not a size).
        InputError: ``value`` is negative, has no unit, has a unit that is not in the list, or is too small.

    Example:
        >>> from memkit.memory import parse_bytes
        >>> parse_bytes("24GiB"), parse_bytes("24GB"), parse_bytes(512)
        (25769803776, 24000000000, 512)
    """
    call = f"{name}={value!r}"
    if isinstance(value, str):
        return _parse_text(value, call)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputTypeError(
            call,
            got=f"a {type(value).__name__}",
            expected="bytes as an int, or text with a unit",
            fix="pass the size as an int of bytes or as text such as '24GiB'.",
        )
    num_bytes = operator.index(value)
    if is_large and 0 < num_bytes < MIB:
        raise InputError(
            call,
            got=f"{num_bytes}, which means {num_bytes} bytes",
            expected="a budget of 1 MiB or more as a bare number, or text with a unit",
            fix=_with_units(str(num_bytes)),
        )
    if num_bytes < 0:
        raise InputError(
            call, got=f"{num_bytes}", expected="zero bytes or more", fix="pass a size that is not negative."
        )
    return num_bytes


def parse_budget(budget: SupportsIndex | str | float, total_bytes: int | None, *, name: str = "budget") -> int:
    """Parse a memory budget for a device.

    Args:
        budget: Bytes as an int, text with a unit, or a fraction of the capacity as a float in (0, 1].
        total_bytes: The capacity; None if unknown.
        name: Name of the budget, for the error message.

    Returns:
        The budget in bytes.

    Raises:
        ConfigError: The budget is zero, or a float that is outside (0, 1] or given for an unknown capacity.
        InputTypeError: ``budget`` is not a size.
        InputError: ``budget`` is text that is not a size, or a negative number.
    """
    if not isinstance(budget, float):
        num_bytes = parse_bytes(budget, name=name, is_large=True)
    elif 0 < budget <= 1 and total_bytes is not None:
        num_bytes = int(budget * total_bytes)
    else:
        num_bytes = 0
    if num_bytes == 0:
        raise ConfigError(
            f"{name}={budget!r}",
            got=repr(budget) + ("" if total_bytes is not None else ", on a device whose capacity is unknown"),
            expected="a size above zero, or a fraction in (0, 1] of a known capacity",
            fix=f"pass '{budget:g}GiB'." if isinstance(budget, float) and 1 < budget <= _MOST_GIB else _BUDGETS,
        )
    return num_bytes


def _with_units(number: str) -> str:
    in_bytes = f"'{number}B' if bytes are meant."
    return f"write '{number}GiB', or {in_bytes}" if Decimal(number) <= _MOST_GIB else f"write {in_bytes}"


def _parse_text(value: str, call: str) -> int:
    percent = _PERCENT.fullmatch(value)
    if percent:
        raise InputError(
            call,
            got=f"the text {value!r}",
            expected="a size, or a fraction as a float where the argument takes one",
            fix=f"pass {float(percent[1]) / 100:g}.",
        )
    match = _SIZE.fullmatch(value)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        fix = "write for example '24GiB' (the number on a graphics card's box) or '500MB'."
        if match is not None and not match[2]:
            fix = _with_units(match[1])
        elif _CARD.match(value):
            name = call.partition("=")[0].rpartition(" ")[2]
            fix = f"write {name}=mk.find_gpu({value!r}).usable_bytes for all memory of that GPU."
        raise InputError(call, got=f"the text {value!r}", expected=f"a number and a unit: {_UNITS}", fix=fix)
    return int(Decimal(match[1].replace("_", "")) * factor)


def format_bytes(num_bytes: int, *, is_change: bool = False) -> str:
    """Format a size for people: binary units with two decimals, plain bytes below 1 KiB.

    Args:
        num_bytes: A size or a difference of sizes in bytes; may be negative.
        is_change: Whether it is a difference, which has a sign unless it is zero.

    Returns:
        Text such as ``"1.50 GiB"``.

    Example:
        >>> from memkit.memory import format_bytes
        >>> format_bytes(24_824_987_648), format_bytes(-512)
        ('23.12 GiB', '-512 B')
    """
    magnitude = abs(num_bytes)
    sign = "-" if num_bytes < 0 else "+" if is_change and num_bytes else ""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # Two decimals can round up to the next unit's 1.00: 1,048,575 B is "1.00 MiB", never "1024.00 KiB".
        if round(magnitude / size, 2) >= 1:
            return f"{sign}{magnitude / size:.2f} {unit}"
    return f"{sign}{magnitude} B"


def format_gib(num_bytes: int) -> str:
    """Format bytes in GiB, whatever their size.

    Example:
        >>> from memkit._core.units import format_gib
        >>> format_gib(2**29), format_gib(512)
        ('0.50 GiB', '0.00 GiB')
    """
    return f"{num_bytes / GIB:.2f} GiB"
