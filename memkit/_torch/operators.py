"""Metadata of operators."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Returns an operator's schema: its arguments and results, and the ones it writes to."""

kernel_of: Callable[[Any], Callable[..., Any]] = attrgetter("_op")
"""Returns the function that an `OpOverload` calls: calling it directly saves one Python call."""

remove_kernels: Callable[[Any], None] = methodcaller("_destroy")
"""Removes the kernels that a library has registered."""

scriptable: Callable[[], dict[int, str]] = torch.jit._builtins._get_builtin_table
"""Returns torch's own table of functions that `torch.jit.script` maps to operators: operator names by `id`."""

has_fallback: Callable[[Any], bool] = torch._C._dispatch_has_backend_fallback
"""Returns whether operators without a kernel for a dispatch key fall through to the next; not for autograd in 2.8."""


def is_query(func: Any) -> bool:
    """Return whether an operator only asks for a property: tensors without data look up their device by one."""
    return getattr(func, "namespace", "") == "prim"


def has_kernel(func: Any, key: str) -> bool:
    """Return whether an operator has a C++ kernel for a dispatch key; kernels added from Python do not count."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def run_kernel_of(func: Any, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator's kernel for one dispatch key."""
    return func._op_dk(key, *args, **kwargs)
