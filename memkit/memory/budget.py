"""How much of a device may be used, as the caller writes it."""

from __future__ import annotations

from memkit._errors import ConfigError
from memkit._units import parse_bytes


def parse_budget(budget: int | str | float | None, total_bytes: int | None) -> int | None:
    """Read a budget.

    Args:
        budget: Bytes as an int, text with a unit, a fraction of the capacity as a float in (0, 1], or None.
        total_bytes: The capacity.

    Returns:
        The budget in bytes; None for no budget.

    Raises:
        ConfigError: It is nothing, a fraction is above 1, or the capacity that it is of is not known.
        InputError: Text that is no size, or a negative number.
        InputTypeError: Neither number nor text.
    """
    if budget is None:
        return None
    if not isinstance(budget, float):
        num_bytes = parse_bytes(budget, name="budget")
    elif 0 < budget <= 1 and total_bytes is not None:
        num_bytes = int(budget * total_bytes)
    else:
        num_bytes = 0
    if num_bytes == 0:
        raise ConfigError(
            f"budget={budget!r}",
            got=repr(budget) + ("" if total_bytes is not None else ", on a device whose capacity is not known"),
            expected="a size above zero, or a fraction in (0, 1] of a known capacity",
            fix="write 0.9 for nine tenths, or a size such as '22GiB'.",
        )
    return num_bytes
