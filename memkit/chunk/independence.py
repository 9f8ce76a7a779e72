"""Check that a function treats rows independently, so that it can be run in chunks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, warn_user
from memkit._recovery.snapshot import Rollback, StateWatch, are_same, cloned
from memkit._torch import pytree
from memkit._torch.graph import is_transforming, saving_hooks
from memkit._torch.modules import is_compiled
from memkit._torch.tensors import version_of
from memkit.chunk.held import modules_of

NUM_PROBED = 8
_POISONED = 3  # not the first and not the last row
_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
# Cache of modules that passed, by how they were called and the training modes of all their children.
_PASSED: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, list[bool]]] = weakref.WeakKeyDictionary()


def check_independence(
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *,
    call: str,
    behind: Callable[..., Any] | None = None,
    unbatched: str | None = None,
) -> None:
    """Refuse a function that mixes its rows: BatchNorm in training mode, a softmax or a mean over rows.

    A few rows are run once, with NaN in one of them. It must stay in that row. Unlike a comparison of results, this is
    not disturbed by random draws. Integers cannot be NaN, so NaN is put into the embedding's output instead. A function
    that refuses NaN runs twice without, with another row's values in that row the second time, and other rows' results
    must stay. Buffers and random state are restored; a function that changes buffers is refused too, since each chunk
    would see different ones.

    Args:
        fn: ``fn(*rows)``; rows are dimension 0 of its tensor arguments and results.
        rows: The function's arguments, or containers of them. Non-tensors are passed unchanged; fewer than two rows are
            not checked.
        call: The user's call, for the message.
        behind: The user's function that ``fn`` calls, if different; its modules are named in the message.
        unbatched: The way out where rows are mixed because they are the channels of one volume; None otherwise.

    Raises:
        InputError: A row's result depends on another row (the first module in which this happens is named), or a call
            changes a buffer.

    Time cost: one forward of at most 8 rows; for a module, once in each mode.
    """
    behind = fn if behind is None else behind  # not `or`: an empty module is false, a compiled one has no truth value
    modules, way = modules_of(behind), _way(behind)
    modes = modes_of(modules)
    passed = _PASSED.setdefault(modules[0], {}) if len(modules) == 1 and way is not None else {}
    if passed.get(way) == modes:
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
        if not _may_be_nan(part):
            return part
        part = torch.nan_to_num(part)  # NaN in the user's data is not a sign of mixing
        part[poisoned] = math.nan
        return part.requires_grad_(value.requires_grad)  # the function may take a row's own gradient

    arguments = pytree.tree_map(poison, tuple(rows))
    culprits: list[str] = []
    parameters = [(name, each, version_of(each)) for module in modules for name, each in module.named_parameters()]
    try:
        with unpacked(), undone(modules) as changed, _watched(modules, count, poisoned, culprits):
            result = fn(*arguments)
            of_calls = changed()
        bad = set().union(*(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(result)))
    except Exception:  # noqa: BLE001 - a function may refuse NaN: a loss of probabilities, an assertion
        culprits.clear()
        bad, of_calls = _rows_that_follow(fn, modules, rows, count, poisoned, call)
    if not bad <= {poisoned}:
        culprits.append("its own code")
        raise InputError(
            call,
            got=f"a function whose result for one row depends on other rows, first in {culprits[0]}",
            expected="a function that computes each row from that row alone",
            fix=unbatched
            or "put a BatchNorm into eval mode or use LayerNorm or GroupNorm; move operations that mix rows (a "
            "softmax, a mean, a sort over them) out of the function; or pass check=False if only NaN spreads "
            "between rows.",
        )
    if of_calls:
        raise InputError(
            call,
            got=f"a function that changes its buffer `{of_calls[0]}` when it is called",
            expected="a function that computes the same for each chunk, and again in the backward",
            fix="put that module into eval mode, or pass check=False if no result depends on the buffer.",
        )
    written = [(name, each) for name, each, version in parameters if version_of(each) != version]
    if written:
        with unpacked(), undone(modules):
            _check_stay(written, lambda: fn(*arguments), call)
    passed[way] = modes


def _rows_that_follow(
    fn: Callable[..., Any], modules: Sequence[nn.Module], rows: Sequence[Any], count: int, changed_row: int, call: str
) -> tuple[set[int], list[str]]:
    """Return the rows of a result that change if one row becomes a copy of another, and the changed buffers."""
    given = [leaf[:count] for leaf in pytree.tree_leaves(tuple(rows)) if isinstance(leaf, Tensor) and leaf.dim()]
    others = [row for row in range(count) if any(not are_same(each[row], each[changed_row]) for each in given)]

    def run(*, is_changed: bool) -> tuple[list[Any], list[str]]:
        def some(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            part = value.detach()[:count].clone()
            if is_changed:
                part[changed_row] = part[others[0]]
            return part.requires_grad_(value.requires_grad)

        with unpacked(), undone(modules) as changed:
            return pytree.tree_leaves(fn(*pytree.tree_map(some, tuple(rows)))), changed()

    before, of_calls = run(is_changed=False)  # if the function fails by itself, its error is the user's own
    if not others:
        warn_user(
            f"{call}: could not check that each row is computed from that row alone: the function refuses NaN, and the "
            f"first {count} rows are the same. Way out: call it first with rows that differ, or pass check=False."
        )
        return set(), of_calls
    after, _ = run(is_changed=True)
    found: set[int] = set()
    for one, other in zip(before, after, strict=True):
        if isinstance(one, Tensor) and one.dim() and len(one) == count:
            differs = ~torch.isclose(one, other, rtol=1e-4, atol=1e-7, equal_nan=True).reshape(count, -1).all(1)
            found |= set(differs.nonzero().flatten().tolist())
    return found, of_calls


def _check_stay(written: Sequence[tuple[str, nn.Parameter]], repeat: Callable[[], object], call: str) -> None:
    """Refuse a function that changes its parameters again; an embedding with a largest norm changes its only once."""
    before = [cloned(each) for _, each in written]
    repeat()
    for (name, each), copy in zip(written, before, strict=True):
        if not are_same(each, copy):
            raise InputError(
                call,
                got=f"a function that changes its parameter `{name}` each time it is called, also in this check",
                expected="a function that computes the same for each chunk, and again in the backward",
                fix="change the parameter after the step.",
            )


def modes_of(modules: Sequence[nn.Module]) -> list[bool]:
    """Return the training mode of all modules and their children."""
    return [child.training for module in modules for child in module.modules()]


def _way(fn: object) -> Hashable:
    """Return a hashable description of how a function uses its module, without a reference to it; None if unknown."""
    if isinstance(fn, functools.partial):
        parts = [_way(part) for part in (fn.func, *fn.args, *fn.keywords.values())]
        return None if None in parts else (*parts, *fn.keywords)
    if inspect.ismethod(fn):
        return fn.__func__.__qualname__, fn.__func__.__code__
    if inspect.isfunction(fn):
        return None if fn.__closure__ else fn.__code__
    if isinstance(fn, nn.Module):
        return type(fn).__qualname__
    return fn if isinstance(fn, bool | int | float | str) else None


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _bad_rows(value: Any, count: int) -> set[int]:
    """Return the rows of a tensor that contain NaN."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count or not _may_be_nan(value):
        return set()
    return set(torch.isnan(value).reshape(count, -1).any(1).nonzero().flatten().tolist()) if value.numel() else set()


@contextlib.contextmanager
def undone(modules: Sequence[nn.Module]) -> Iterator[Callable[..., list[str]]]:
    """Restore random state and the modules' buffers after the block; yield a function that lists changed buffers."""
    watch = StateWatch(nn.ModuleList(modules))
    watch.changes_attributes = False
    rollback = Rollback(watch)
    paths = {owner: path for module in modules for path, owner in module.named_modules()}

    def changed(*, with_counters: bool = False) -> list[str]:
        """Return buffers whose values changed, except caches that have grown, and integer call counters."""
        copies = {key: entry.copy for key, entry in rollback.buffers.entries.items()}
        return [
            f"{paths[owner]}.{name}".lstrip(".")
            for (owner, name), copy in copies.items()
            if copy is not None and (with_counters or _may_be_nan(copy))
            if (now := getattr(owner, name)).shape == copy.shape and not are_same(now, copy)
        ]

    members = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    storages = [(each, each.detach()) for each in members if type(each) in _PLAIN and each.layout is torch.strided]
    try:
        yield changed
    finally:
        for each, same in storages:  # `tensor.data = other` gives it another one
            if each.data_ptr() != same.data_ptr():
                each.data = same
        rollback.restore()


def unpacked() -> contextlib.AbstractContextManager[None]:
    """Return a context that hides its saved tensors from an outer checkpoint, whose hooks must not count them."""
    if saving_hooks() is None:
        return contextlib.nullcontext()  # hooks, even those that do nothing, would forbid torch.func inside
    # Detached, as torch's checkpoint does: a tensor that a gradient with create_graph=True saves would hold itself.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def _open_children(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield a module and its children by name, except children of a compiled one, where hooks would be compiled."""
    yield module, path or type(module).__name__
    if not is_compiled(module):
        for name, child in module.named_children():
            yield from _open_children(child, f"{path}.{name}".lstrip("."))


@contextlib.contextmanager
def _watched(modules: Sequence[nn.Module], count: int, poisoned: int, culprits: list[str]) -> Iterator[None]:
    """Record children in which NaN spreads to other rows; put NaN into the results of children with integer inputs."""
    names = dict(pair for module in modules for pair in _open_children(module, ""))

    def watch(child: nn.Module, inputs: Any, output: Any) -> Any:
        if is_transforming():  # inside torch.func the values cannot be read; the result will show the mixing
            return output
        given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if given and not any(map(_may_be_nan, given)):
            output = pytree.tree_map(with_nan, output)
        before, after = (
            set().union(*(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(value))) for value in (given, output)
        )
        if not after <= before | {poisoned}:
            culprits.append(f"`{names[child]}` ({type(child).__name__})")
        return output

    def with_nan(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != (count,) or not _may_be_nan(value):
            return value
        row = torch.arange(count, device=value.device).view(-1, *[1] * (value.dim() - 1)) == poisoned
        return value.masked_fill(row, math.nan)

    with forward_hooks(names, watch):
        yield


@contextlib.contextmanager
def forward_hooks(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook after the forward of each module in the block."""
    with contextlib.ExitStack() as stack:
        for each in modules:
            stack.callback(each.register_forward_hook(hook).remove)
        yield
