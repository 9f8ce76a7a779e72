"""May a function be given its rows in pieces? Not when one row's result depends on another row."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memkit import _rng
from memkit._errors import InputError

NUM_PROBED = 8
_POISONED = 3  # not the first and not the last row
# Modules that passed, with the modes that they and their children were in: a cache, so that a loop pays once.
_PASSED: weakref.WeakKeyDictionary[nn.Module, list[bool]] = weakref.WeakKeyDictionary()


def check_independence(
    fn: Callable[..., Any], rows: Sequence[Any], *, call: str, behind: Callable[..., Any] | None = None
) -> None:
    """Refuse a function that mixes its rows: BatchNorm in training mode, a softmax or a mean over rows.

    A few rows are run once without gradients, with NaN in one of them. It must stay in that row. Random draws do not
    disturb that, as they would a comparison of results. Buffers and random state are put back.

    Args:
        fn: ``fn(*rows)``; rows in dimension 0 of its tensors and of what it returns.
        rows: The function's arguments, or containers of them. All but tensors are passed as they are; fewer than two
            rows prove nothing.
        call: The user's call, for the message.
        behind: What ``fn`` calls, where that is the user's; its modules are named.

    Raises:
        InputError: A row's result depends on another row; names the first module in which that happens.

    Time cost: one forward of at most 8 rows; for a module, once in each mode.
    """
    module = module_of(behind or fn)
    modes = [] if module is None else [child.training for child in module.modules()]
    if module is not None and _PASSED.get(module) == modes:
        return
    leaves = pytree.tree_leaves(tuple(rows))
    count = min([NUM_PROBED, *(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())])
    poisoned = min(_POISONED, count - 1)
    if count < 2:
        return

    def poison(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        part = value.detach()[:count]
        if not part.is_floating_point():
            return part
        part = torch.nan_to_num(part)  # a NaN that was there is no sign of anything
        part[poisoned] = math.nan
        return part

    arguments = pytree.tree_map(poison, tuple(rows))
    if not any(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(arguments)):
        return  # integers cannot be poisoned
    culprits: list[str] = []
    with torch.no_grad(), undone(module), _watched(module, count, culprits):
        result = fn(*arguments)
    bad = set().union(*(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(result)))
    if bad <= {poisoned}:
        if module is not None:
            _PASSED[module] = modes
        return
    where = culprits[0] if culprits else "its own code"
    raise InputError(
        call,
        got=f"a function whose result for one row depends on other rows, first in {where}",
        expected="a function of each row alone",
        fix="put a BatchNorm into eval mode or use LayerNorm or GroupNorm; do what mixes rows (a softmax, a mean, a "
        "sort over them) outside, or pass check=False if only NaN spreads.",
    )


def module_of(fn: object) -> nn.Module | None:
    """The module behind a function: itself, a method's, or what a `functools.partial` holds."""
    if isinstance(fn, functools.partial):
        return next((found for each in (fn.func, *fn.args) if (found := module_of(each)) is not None), None)
    owner = getattr(fn, "__self__", fn)
    return owner if isinstance(owner, nn.Module) else None


def _bad_rows(value: Any, count: int) -> set[int]:
    """Rows of a tensor in which NaN is."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count or not value.is_floating_point():
        return set()
    return set(torch.isnan(value).reshape(count, -1).any(1).nonzero().flatten().tolist()) if value.numel() else set()


@contextlib.contextmanager
def undone(module: nn.Module | None) -> Iterator[None]:
    """Put random state and a module's buffers back after the block."""
    buffers = [] if module is None else [(buffer, buffer.clone()) for buffer in module.buffers()]
    with _rng.preserved():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, copy in buffers:
                    buffer.copy_(copy)


@contextlib.contextmanager
def _watched(module: nn.Module | None, count: int, culprits: list[str]) -> Iterator[None]:
    """Note in which of a module's children NaN spreads to more rows."""
    names = {} if module is None else {child: name or type(child).__name__ for name, child in module.named_modules()}

    def watch(child: nn.Module, inputs: Any, output: Any) -> None:
        before, after = (
            set().union(*(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(value))) for value in (inputs, output)
        )
        if not after <= before:
            culprits.append(f"`{names[child]}` ({type(child).__name__})")

    handles = [child.register_forward_hook(watch) for child in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
