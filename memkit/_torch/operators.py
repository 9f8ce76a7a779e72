"""What an operator says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def schema_of(func: Any) -> Any:
    """Return an operator's schema: its arguments and results, and which of them it writes to."""
    return func._schema


def remove_kernels(library: Any) -> None:
    """Take the kernels away that a library has registered."""
    library._destroy()


def has_kernel(func: Any, key: str) -> bool:
    """Say whether an operator has a kernel in C++ for a dispatch key; what Python has added to it does not count."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def run_kernel_of(func: Any, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator's kernel for one dispatch key."""
    return func._op_dk(key, *args, **kwargs)


def pass_through(key: str) -> Any:
    """Let operators without a kernel for a dispatch key go on to the next, until `remove_kernels`, unless torch does.

    torch itself does for autograd, except in 2.8.
    """
    library = torch.library.Library("_", "IMPL", key)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if not torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)):
        library.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]  # likewise
    return library
