"""What an operator says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any


def schema_of(func: Any) -> Any:
    """Return an operator's schema: its arguments and results, and which of them it writes to."""
    return func._schema


def remove_kernels(library: Any) -> None:
    """Take the kernels away that a library has registered."""
    library._destroy()


def run_kernel_of(func: Any, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator's kernel for one dispatch key."""
    return func._op_dk(key, *args, **kwargs)
