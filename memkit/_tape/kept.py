"""Results of expensive operators, kept from a forward for the time when it runs again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from memkit._core.errors import StateError
from memkit._tape.references import Counts, Run, references, references_if_unread
from memkit._tape.tape import changes_arguments, is_plain, is_random, written_arguments
from memkit._torch.aten import FUSED_ATTENTION
from memkit._torch.dispatch import LeanDispatchMode, counting_in_views
from memkit._torch.graph import keeps_graph
from memkit._torch.operators import is_query
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.tensors import storage_key, version_of

_aten = torch.ops.aten
# Operators whose results are kept: many FLOPs per byte of result. Not bmm: in unfused attention it computes the scores,
# which are the largest tensors of the block.
KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.convolution.default,
        *FUSED_ATTENTION,
    }
)


class KeptResults:
    """Results of `KEPT_OPERATORS` in one forward, reused when it is recomputed.

    Like `torch.utils.checkpoint.create_selective_checkpoint_contexts`, but a retained graph can be used again, and a
    result that is later changed in place (by ``ReLU(inplace=True)``) is recomputed where torch raises an error.

    Args:
        call: The user's call, for messages.
        fix: Way out for a forward that does not run the same operators each time.
        least_terms: Results that sum up fewer terms per number are not kept: with few inputs, a layer runs again as
            fast as the elementwise operators around it, and its result would take the place of one that pays more.
    """

    def __init__(self, call: str, fix: str, *, least_terms: int = 0) -> None:
        self._call, self._fix, self._least_terms = call, fix, least_terms
        self._results: list[tuple[Any, Any]] = []  # operators and results in order; None must be recomputed
        self._by_storage: dict[int, list[_Result]] = {}  # by id(): the results hold the storages
        self._ends_with_kept = False  # whether a kept operator was the last of the forward

    @property
    def num_bytes(self) -> int:
        """Memory of the results."""
        return sum(part.num_bytes for _, result in self._results for part in tree_leaves(result) if _is_result(part))

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Record the results of the first forward in the block."""
        mode = _OnKept(self._keep, self._note_change)
        with mode:
            yield
        self._by_storage.clear()
        self._ends_with_kept = mode.was_last
        self._results = [(func, result if _is_unchanged(result) else None) for func, result in self._results]

    def forget_unused(self, outputs: list[Tensor]) -> None:
        """Drop the result of the forward's last operator if it is an output that no backward reads.

        It is recognized by its references: the graph, or an object of the user's, would add to them. Where these cannot
        be told apart, it stays. In the recomputed forward, NaN stands for it.

        Args:
            outputs: The forward's outputs, with their graph. Nothing else holds them.
        """
        last = self._results[-1][1] if self._ends_with_kept else None
        if not isinstance(last, _Result):
            return
        key = last.storage_key
        for number in range(len(outputs)):  # a loop over the tensors would refer to them
            if storage_key(outputs[number].untyped_storage()) != key:
                continue
            if references(outputs, number) == _references_if_unread():
                nan = outputs[number].detach().new_full((), math.nan).expand(outputs[number].shape)
                self._results[-1] = self._results[-1][0], _Result(nan)

    @contextlib.contextmanager
    def repetition(self) -> Iterator[None]:
        """Reuse the results in the recomputed forward in the block.

        Raises:
            StateError: It does not run the same operators.
        """
        order = itertools.count()

        def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._give(next(order), func, args, kwargs)

        with _OnKept(run):
            yield
        if (number := next(order)) < len(self._results):
            self._refuse("nothing more", self._results[number][0])

    def _keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if terms(func, args) < self._least_terms:
            self._results.append((func, None))
            return out
        result = tree_map(lambda part: _Result(part) if isinstance(part, Tensor) else part, out)
        self._results.append((func, result))
        for part in tree_leaves(result):
            if isinstance(part, _Result):
                self._by_storage.setdefault(part.storage_id, []).append(part)
        return out

    def _note_change(self, written: Sequence[Tensor]) -> None:
        """Note changes that no version tells: parts by `unsafe_chunk`, as in PyTorch's GRU, have their own versions."""
        for tensor in filter(is_plain, written):
            for part in self._by_storage.get(id(tensor.untyped_storage()), ()):
                part.is_changed = True

    def _give(self, index: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        then, result = self._results[index] if index < len(self._results) else (None, None)
        if then != func:
            self._refuse(func, then or "nothing more")
        if not keeps_graph():
            self._results[index] = func, None  # free it as soon as backward is done with it
        if not _is_unchanged(result):
            return func(*args, **kwargs)
        return tree_map(lambda part: part.get() if _is_result(part) else part, result)

    def _refuse(self, now: object, then: object) -> NoReturn:
        raise StateError(
            self._call,
            got=f"{now} in the repeated forward where the first one ran {then}",
            expected="a forward that runs the same operators each time",
            fix=self._fix,
        )


class _Result:
    """A tensor that knows whether it was changed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = _detached(tensor)
        self._version = version_of(self._tensor)
        self._storage = tensor.untyped_storage() if is_plain(tensor) else None
        self.is_changed = False

    @property
    def storage_id(self) -> int:
        return id(self._storage)

    @property
    def num_bytes(self) -> int:
        return self._tensor.untyped_storage().nbytes()

    @property
    def storage_key(self) -> int:
        return storage_key(self._tensor.untyped_storage())

    def is_unchanged(self) -> bool:
        return not self.is_changed and version_of(self._tensor) == self._version

    def get(self) -> Tensor:
        return _detached(self._tensor)  # a new object, which gets an autograd history


class _OnKept(LeanDispatchMode):
    """Runs `KEPT_OPERATORS` through a function, and may tell of tensors that other operators are about to change.

    Attributes:
        was_last: Whether the last operator was one of them.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        run: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any],
        note_change: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._note_change = run, note_change
        self.was_last = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the block run compiled, as torch's own selective checkpoint does."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_query(func):
            return func(*args, **kwargs)
        self.was_last = is_kept(func, args, kwargs)
        if self.was_last:
            return self._run(func, args, kwargs)
        if self._note_change is not None and changes_arguments(func):
            self._note_change(written_arguments(func, args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _references_if_unread() -> Counts | None:
    """Return the references to an unread output whose result is kept."""

    def watched(run: Run) -> tuple[object, list[Tensor]]:
        kept = KeptResults("", "")
        with kept.first():
            outputs = run()
        return kept, outputs

    return references_if_unread(watched)


def is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a result is kept; not with dropout inside, since a skipped operator draws no random numbers."""
    return func in KEPT_OPERATORS and not is_random(func, args, kwargs)


def terms(func: Any, args: Sequence[Any]) -> float:
    """Return how many products are summed up for each number of the result of a kept operator."""
    if func is _aten.mm.default:
        return int(args[0].shape[1])
    if func is _aten.addmm.default:
        return int(args[1].shape[1])
    if func is _aten.convolution.default:
        weight, is_transposed, groups = args[1], args[6], args[8]
        num_outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
        return int(weight.numel() // max(num_outputs, 1))
    return math.inf  # attention: each number comes from all keys


def _is_result(part: Any) -> bool:
    return isinstance(part, _Result)


def _is_unchanged(result: Any) -> bool:
    return result is not None and all(part.is_unchanged() for part in tree_leaves(result) if _is_result(part))


def _detached(tensor: Tensor) -> Tensor:
    # Below autograd a view would get its own version counter; torch's own selective checkpoint does this, too.
    with counting_in_views():
        return tensor.detach()
