"""Runs of the user's function for inspection, on values of memkit's own or on the first rows: nothing of them stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from memkit._gradients.left import LeftResults
from memkit._recorder.rehearsal import Rehearsal, Span
from memkit._recovery.snapshot import are_same
from memkit._torch.graph import saving_hooks
from memkit.chunk.held import modules_of
from memkit.chunk.traits import Moving

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


class _Member(NamedTuple):
    """A parameter or a buffer of a module, and the storage that it had."""

    path: str
    owner: nn.Module
    name: str
    tensor: Tensor
    same: Tensor

    @property
    def now(self) -> Tensor | None:
        found = getattr(self.owner, self.name, None)
        return found if isinstance(found, Tensor) else None


class Probes:
    """Runs of a function of which nothing stays: no attribute, list, parameter, buffer or random state changes.

    A run starts as the first one did, unless it goes on from the last one. Tensors are copied right before they are
    written to, no matter what holds them. Only a lazy module stays as its first run leaves it: initialized.

    Args:
        fn: The user's function.
        others: Other objects that it is called with and may write to.

    Attributes:
        modules: The modules that it uses.
        runs: The runs; close it at the end.
    """

    def __init__(self, fn: object, others: Sequence[object] = ()) -> None:
        self._of = fn, others
        self.modules = modules_of(fn)
        self.runs = Rehearsal([fn, *self.modules, *others], as_called=True, except_for=(LazyModuleMixin,))
        owners = [pair for module in self.modules for pair in module.named_modules()]
        self._buffers = list(_members(owners, lambda owner: owner.named_buffers(recurse=False)))
        self._parameters = list(_members(owners, lambda owner: owner.named_parameters(recurse=False)))
        self._moving = Moving(fn)
        self._kept = LeftResults(owners)

    def again(self) -> Probes:
        """Return probes of the same function, for rows that have nothing to do with those of these runs."""
        return Probes(*self._of)

    @contextlib.contextmanager
    def run(self, span: Span | None = None, **how: Any) -> Iterator[None]:
        """Enter one run: see `Rehearsal.run`. What it changes itself is no trait of the function."""
        with self.runs.run(span, **how):
            try:
                yield
            finally:
                self._moving.note()

    def changed_buffers(self, *, with_counters: bool = False) -> list[_Member]:
        """Return buffers whose values changed in the runs, except caches that have grown, and integer call counters."""
        return [each for each in self._changed(self._buffers) if with_counters or may_be_nan(each.same)]

    def changed_parameters(self) -> list[_Member]:
        """Return parameters whose values changed in the runs."""
        return list(self._changed(self._parameters))

    def kept_results(self) -> list[str]:
        """Return the attributes of modules in which the runs have left a new tensor with a graph."""
        return self._kept.names()

    def kept_values(self) -> dict[str, list[Tensor]]:
        """Return the new tensors without a graph that the runs have left, by the attributes of modules that hold them.

        Only those whose values can be compared.
        """
        return _comparable(self._kept.values())

    def written_values(self) -> dict[str, list[Tensor]]:
        """Return copies of the older tensors of numbers that the runs have written to, by the modules' attributes."""
        return _comparable(
            {name: [each for each in values if may_be_nan(each)] for name, values in self._kept.written().items()}
        )

    def _changed(self, members: Sequence[_Member]) -> Iterator[_Member]:
        for each in members:
            now, before = each.now, self.runs.original(each.same)
            if now is None or now.shape != before.shape:
                continue
            is_untouched = before is each.same and now is each.tensor and now.data_ptr() == before.data_ptr()
            if not is_untouched and not are_same(now, before):
                yield each


def _members(
    owners: Iterable[tuple[str, nn.Module]], own: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> Iterator[_Member]:
    for path, owner in owners:
        for name, each in own(owner):
            if type(each) in _PLAIN and each.layout is torch.strided:
                yield _Member(f"{path}.{name}".lstrip("."), owner, name, each, each.detach())


def _comparable(named: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    found = {name: [each for each in values if _has_values(each)] for name, values in named.items()}
    return {name: values for name, values in found.items() if values}


def _has_values(tensor: Tensor) -> bool:
    is_strided = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return is_strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


@contextlib.contextmanager
def undone(fn: object, others: Sequence[object] = ()) -> Iterator[Probes]:
    """Undo after the block what it has changed by calling a function: see `Probes`."""
    probes = Probes(fn, others)
    with contextlib.closing(probes.runs), probes.run():
        yield probes


def unpacked() -> contextlib.AbstractContextManager[None]:
    """Return a context that hides its saved tensors from an outer checkpoint, whose hooks must not count them."""
    if saving_hooks() is None:
        return contextlib.nullcontext()  # hooks, even those that do nothing, would forbid torch.func inside
    # Detached, as torch's checkpoint does: a tensor that a gradient with create_graph=True saves would hold itself.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


@contextlib.contextmanager
def forward_hooks(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook after the forward of each module in the block."""
    with contextlib.ExitStack() as stack:
        for each in modules:
            stack.callback(each.register_forward_hook(hook).remove)
        yield


def may_be_nan(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be NaN."""
    return tensor.is_floating_point() or tensor.is_complex()
