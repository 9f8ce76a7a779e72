"""What an operator says of itself."""

from typing import Any


def schema_of(func: Any) -> Any:
    """Return an operator's schema: its arguments and results, and which of them it writes to."""
    return func._schema
