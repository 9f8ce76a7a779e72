"""Check that a function treats rows independently, so that it can be run in chunks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, warn_user
from memkit._gradients.loss import Loss
from memkit._recorder.rehearsal import Span
from memkit._recovery.attempt import Failed, unless_failed
from memkit._recovery.errors import explain
from memkit._recovery.snapshot import are_same, cloned
from memkit._torch import pytree
from memkit._torch.fake import FakeTensor
from memkit._torch.graph import is_transforming
from memkit._torch.modules import is_compiled
from memkit.chunk.held import modules_of
from memkit.chunk.probes import Probes, forward_hooks, may_be_nan, unpacked
from memkit.chunk.traits import traits_of

NUM_PROBED = 8
_POISONED = 3  # not the first and not the last row
_OF_SUMS, _TIMES_EPS = torch.finfo(torch.float32).eps ** 0.5, 8  # of few rows: smaller differences are not looked at
_TIMES_ROUNDING = 100  # a difference beyond this many times that of rounding is real
_MOST_WAYS = 64  # that are remembered of a module: a function may hold a number that is another in each step
_NUMBERS = (bool, int, float, str, type(None))
# Cache of what passed, by how it was called and the traits of that time, and whether it draws for all rows at once: by
# the module, or by the code of a function of several or none.
_PASSED: weakref.WeakKeyDictionary[Any, dict[Hashable, bool | None]] = weakref.WeakKeyDictionary()


def check_independence(
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *,
    call: str,
    behind: Callable[..., Any] | None = None,
    unbatched: str | None = None,
    others: Sequence[object] = (),
    pick: Callable[[Tensor], Sequence[Any]] | None = None,
    whole: Sequence[object] = (),
    chunk_size: int | None = None,
) -> bool | None:
    """Refuse a function that mixes its rows: BatchNorm in training mode, a softmax or a mean over rows.

    A few rows are run once, with NaN in one of them. It must stay in that row. Unlike a comparison of results, this is
    not disturbed by random draws. Integers cannot be NaN, so NaN is put into the embedding's output instead; and some
    rows get equal ones, so that they are of one group (edges of one node), whichever rows are the first. A function
    that refuses NaN runs twice without, with another row's values in that row the second time, and other rows' results
    must stay. Then it runs on all of the rows but the first, without NaN, which comparisons swallow, from the state
    that the first run left: their results must be the same, or they depend on other rows, on the number of rows, on a
    row's place, or on earlier calls. If it refuses these, it runs on half of them. Once more it is compared without
    those rows that hold the largest and smallest integers of all: the longest of several sentences, the only one of its
    class. A `Loss` has no rows: its sum and count must be those of its parts together. What the function changes is
    restored; a function that changes float buffers is refused too, since each chunk would see different ones.

    Args:
        fn: ``fn(*rows)``; rows are dimension 0 of its tensor arguments and results.
        rows: The function's arguments, or containers of them. Non-tensors are passed unchanged; fewer than two rows are
            not checked.
        call: The user's call, for the message.
        behind: The user's function that ``fn`` calls, if different; its modules are named in the message.
        unbatched: The way out where rows are mixed because they are the channels of one volume; None otherwise.
        others: What ``fn`` passes to the user's function besides rows.
        pick: Returns ``rows`` of other numbers, given as a tensor.
        whole: All rows of the arguments, as far as they are integers or booleans.
        chunk_size: Rows of a chunk, for a function that refuses a few rows: all of ``rows``, a chunk and the next one,
            are looked at, and compared without the first chunk.

    Returns:
        Whether it draws random numbers that belong to no row, as for a layer that is skipped: see `warn_of_draws`.
        None if nothing was compared, because it refuses every smaller number of rows.

    Raises:
        InputError: A row's result depends on another row (the first module in which this happens is named), on the
            number of rows or on earlier calls; or a call changes a buffer; or gradients depend on other rows.

    Warns:
        MemkitWarning: A call leaves a result in an attribute of a module that has a graph, as an auxiliary loss, or is
            another one for other rows, as statistics of the rows.

    Time cost: two forwards of at most 8 rows, four with integers; for a module, once until its traits change.
    """
    behind = fn if behind is None else behind  # not `or`: an empty module is false, a compiled one has no truth value
    modules, way, code = modules_of(behind), _way(behind), _code_of(behind)
    home = modules[0] if len(modules) == 1 else code
    passed = _PASSED.setdefault(home, {}) if home is not None else {}
    leaves = pytree.tree_leaves(tuple(rows))
    others = [*others, *(leaf for leaf in leaves if not isinstance(leaf, Tensor))]

    # A function may do anything with tensors that it holds: it is checked in each call, but compared once.
    is_known = way is not None and len(modules) < 2

    def key() -> Hashable:
        return way if is_known else code, count, chunk_size, torch.is_grad_enabled(), traits_of(behind, others)

    lengths = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    count = min([*lengths, NUM_PROBED] if chunk_size is None else lengths)
    known = key()
    if is_known and known in passed:
        return passed[known]
    if count < 2 or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return False  # an estimate has no values to compare: the first real call is checked
    probes = Probes(behind, others)
    with contextlib.closing(probes.runs):
        parts = (1, count // 2) if chunk_size is None else (chunk_size,)
        check = _Check(fn, tuple(rows), call, count, probes, parts)
        arguments, result = check.refuse_mixed(unbatched)
        if count == 2:
            again = check.of_first_row()
            with contextlib.closing(again.probes.runs):
                again.refuse_other_results(*again.refuse_mixed(unbatched))
        draws_for_all = passed.get(known)
        if is_known or known not in passed:
            is_compared = check.refuse_other_results(arguments, result)
            if any(isinstance(leaf, Tensor) and not may_be_nan(leaf) for leaf in pytree.tree_leaves(result)):
                check.refuse_other_integers()
            if isinstance(result, Loss):
                check.refuse_other_sums()
            if pick is not None and (found := _standing_out(whole, count)) is not None:
                check.refuse_standing_out(tuple(pick(found[0])), found[1])
            draws = probes.runs.has_draws_for_all or probes.runs.has_drawn_on_the_host
            draws_for_all = draws if is_compared else None
    if len(passed) >= _MOST_WAYS:
        passed.clear()
    passed[key()] = draws_for_all  # of now: the check has seen which traits calls change
    return draws_for_all


def note_rows(error: Exception, call: str, num_rows: int) -> None:
    """Add a note to an error of the user's function: it ran on only some of the rows, which may be the cause."""
    explain(
        error,
        f"{call} ran the function on {num_rows} rows, not on all: its check takes a few, as does the choice of a "
        "chunk's size; a chunk has chunk_size of them, and the last chunk those that are left. Way out, if the "
        "function needs a multiple of some number of rows: pass chunk_size, and make it and the number of all rows "
        "such multiples; pass check=False if you know that no row's result depends on another row.",
    )


def warn_of_draws(call: str) -> None:
    """Tell the user that each chunk draws what one call with all rows draws once."""
    warn_user(
        f"{call}: the function draws random numbers that belong to no row, or from Python's random or NumPy, anew for "
        "each chunk, where one call with all rows draws once. Way out: draw before the call what belongs to all rows, "
        "such as whether a layer is skipped; draw what belongs to each row with torch, in the shape of the rows."
    )


# Arguments, their result, its rows that another row has changed, and the modules in which this happens.
_Found = tuple[tuple[Any, ...], Any, set[int], list[str]]


@dataclass(slots=True)
class _Check:
    fn: Callable[..., Any]
    rows: tuple[Any, ...]
    call: str
    count: int
    probes: Probes
    parts: tuple[int, ...]  # how many of the first rows to leave out in a comparison: the first that the function takes
    told: set[str] = field(default_factory=set)  # attributes that a warning was about
    _poisoned: int = field(init=False)

    def __post_init__(self) -> None:
        self._poisoned = min(_POISONED, self.count - 2) if self.count > 2 else 1

    def of_first_row(self) -> _Check:
        """Return a check of what the first of two rows does to the last one: a running sum goes that way."""
        check = _Check(self.fn, self.rows, self.call, self.count, self.probes.again(), self.parts, self.told)
        check._poisoned = 0
        return check

    @property
    def _beside(self) -> int:
        return self._poisoned + (1 if self._poisoned + 1 < self.count else -1)

    def _run(self, arguments: tuple[Any, ...], span: Span | None = None, **how: Any) -> Any:
        with unpacked(), self.probes.run(span or Span(0, self.count, self.count), **how):
            return self.fn(*arguments)

    def refuse_mixed(self, unbatched: str | None) -> tuple[tuple[Any, ...], Any]:
        """Refuse a function that mixes rows or changes its state; return the arguments and the result of a run."""
        arguments, result, bad, culprits = self._other_rows_changed()
        if not bad <= {self._poisoned}:
            culprits.append("its own code")
            raise InputError(
                self.call,
                got=f"a function whose result for one row depends on other rows, first in {culprits[0]}",
                expected="a function that computes each row from that row alone",
                fix=unbatched
                or "put a BatchNorm into eval mode or use LayerNorm or GroupNorm; move operations that mix rows (a "
                "softmax, a mean, a sort over them) out of the function; or pass check=False if only NaN spreads "
                "between rows.",
            )
        self._refuse_changes(arguments)
        return arguments, result

    def _warn_of_kept_results(self) -> None:
        self._warn_of_kept(self.probes.kept_results(), "with a graph", "and its gradient is that of one chunk or none")

    def _warn_of_kept(self, names: Sequence[str], how: str, what_else: str) -> None:
        if name := self._untold(names):
            warn_user(
                f"{self.call}: the function keeps a result in the attribute {name!r} when it is called, {how}. After "
                f"the call, it is that of one chunk alone, {what_else}. Way out: return it from the function, as one "
                "value per row; or compute it outside of the call; or pass check=False if nothing reads it after the "
                "call."
            )

    def _warn_of_written(self, names: Sequence[str]) -> None:
        if name := self._untold(names):
            warn_user(
                f"{self.call}: the function writes into the tensor in its attribute {name!r} when it is called: once "
                "for each chunk, and again in the backward, so that an average over calls, say, moves several times a "
                "step. Way out: return from the function what is to be written, as one value per row, and write it "
                "after the call; or pass check=False if each row writes its own entries, or nothing reads it."
            )

    def _untold(self, names: Sequence[str]) -> str | None:
        """Return the first attribute that no warning has named or covered; one warning covers all."""
        untold = [each for each in names if each not in self.told]
        self.told.update(untold)
        return untold[0] if untold else None

    def _other_rows_changed(self) -> _Found:
        """Look which rows change with one, in the first way that the function does not refuse.

        A function may refuse NaN (a loss of probabilities, an assertion) or equal integers; its error in the last way
        is the user's own.
        """
        groupings = [self.rows]
        if any(
            isinstance(each, Tensor) and each.dim() and not may_be_nan(each) for each in pytree.tree_leaves(self.rows)
        ):
            groupings.insert(0, self._grouped())
        *ways, last = [(way, rows) for way in (self._rows_with_nan, self._rows_that_follow) for rows in groupings]
        for way, rows in ways:
            outcome = unless_failed((Exception,), way, rows)
            if not isinstance(outcome, Failed):
                return outcome.result
            self.probes.runs.close()
        return last[0](last[1])

    def _rows_with_nan(self, rows: tuple[Any, ...]) -> _Found:
        """Return arguments with NaN in one row, their result, its rows with NaN, and the modules where it spreads."""
        arguments, culprits = self._with_nan(rows), list[str]()
        with _watched(self.probes.modules, self.count, self._poisoned, culprits):
            result = self._run(arguments)
        bad = [_bad_rows(leaf, self.count) for leaf in pytree.tree_leaves(result)]
        if not set().union(*bad) <= {self._poisoned}:
            bad = self._without_own(bad, rows)
        return arguments, result, set().union(*bad), culprits

    def _without_own(self, bad: Sequence[set[int]], rows: tuple[Any, ...]) -> list[set[int]]:
        """Leave out the rows of each leaf that are NaN without one in the arguments: an empty ray divides 0 by 0."""
        result = self._run(self._with_nan(rows, value=None))
        own = [_bad_rows(leaf, self.count) for leaf in pytree.tree_leaves(result)]
        others = set(range(self.count)) - {self._poisoned}
        if any(others <= each for each in own):
            warn_user(
                f"{self.call}: could not check that each row is computed from that row alone: the first {self.count} "
                "rows give NaN by themselves. Way out: call it first with rows that give numbers, or pass check=False."
            )
        return [found - mine for found, mine in zip(bad, own, strict=True)] if len(own) == len(bad) else list(bad)

    def _with_nan(self, rows: tuple[Any, ...], value: float | None = math.nan) -> tuple[Any, ...]:
        def poison(given: Any) -> Any:
            if not isinstance(given, Tensor) or given.dim() == 0:
                return given
            part = given.detach()[: self.count]
            if not may_be_nan(part):
                return part
            part = torch.nan_to_num(part)  # NaN in the user's data is not a sign of mixing
            if value is not None:
                part[self._poisoned] = value
            return part.requires_grad_(given.requires_grad)  # the function may take a row's own gradient

        return tuple(pytree.tree_map(poison, rows))

    def _grouped(self) -> tuple[Any, ...]:
        """Return the rows with equal integers in two pairs: rows of one group show what is computed over a group.

        In each pair, one row's company changes: the first row is left out later, and the poisoned one is NaN. A copy of
        a neighbor leaves sorted integers sorted.
        """

        def group(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or may_be_nan(value):
                return value
            part = value.detach()[: self.count].clone()
            part[self._poisoned] = part[self._beside]
            if self.count > 3:  # else all rows would be equal, and show nothing else
                part[0] = part[1]
            return part

        return tuple(pytree.tree_map(group, self.rows))

    def _rows_that_follow(self, rows: tuple[Any, ...]) -> _Found:
        """Return arguments, their result, and its rows that change if one row becomes a copy of another."""
        leaves = pytree.tree_leaves(rows)
        given = [leaf[: self.count] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        changed = self._poisoned
        others = [row for row in range(self.count) if any(not are_same(each[row], each[changed]) for each in given)]

        def some(value: Any, *, is_changed: bool = False) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            part = value.detach()[: self.count].clone()
            if is_changed:
                part[changed] = part[others[0]]
            return part.requires_grad_(value.requires_grad)

        arguments = tuple(pytree.tree_map(some, rows))
        result = self._run(arguments)  # if the function fails by itself, its error is the user's own
        found: set[int] = set()
        if not others:
            warn_user(
                f"{self.call}: could not check that each row is computed from that row alone: the function refuses "
                f"NaN, and the first {self.count} rows are the same. Way out: call it first with rows that differ, or "
                "pass check=False."
            )
            return arguments, result, found, []
        other = self._run(tuple(pytree.tree_map(functools.partial(some, is_changed=True), rows)))
        for one, two in zip(*map(pytree.tree_leaves, (result, other)), strict=True):
            if isinstance(one, Tensor) and one.dim() and len(one) == self.count:
                differs = ~_are_close(one, two).reshape(self.count, -1).all(1)
                found |= set(differs.nonzero().flatten().tolist())
        return arguments, result, found, []

    def _refuse_changes(self, arguments: tuple[Any, ...]) -> None:
        """Refuse changes of buffers, and of parameters if they change again: an embedding with a largest norm does not.

        Also an embedding's gradient that depends on other rows.
        """
        if self.probes.runs.counts_in_backward and torch.is_grad_enabled():
            raise InputError(
                self.call,
                got="an embedding with scale_grad_by_freq=True, which divides a row's gradient by its count in the "
                "batch: a chunk has other counts",
                expected="a function whose gradients for one row do not depend on other rows",
                fix="look the rows up before the call, and pass them: emb(words) in the place of words.",
            )
        if buffers := self.probes.changed_buffers():
            raise InputError(
                self.call,
                got=f"a function that changes its buffer `{buffers[0].path}` when it is called",
                expected="a function that computes the same for each chunk, and again in the backward",
                fix="put that module into eval mode, or pass check=False if no result depends on the buffer.",
            )
        self._warn_of_kept_results()
        before = [(each, cloned(each.now)) for each in self.probes.changed_parameters() if each.now is not None]
        if not before:
            return
        self._run(arguments, goes_on=True)
        for each, copy in before:
            if each.now is not None and not are_same(each.now, copy):
                raise InputError(
                    self.call,
                    got=f"a function that changes its parameter `{each.path}` each time it is called",
                    expected="a function that computes the same for each chunk, and again in the backward",
                    fix="change the parameter after the step.",
                )

    def refuse_other_integers(self) -> None:
        """Refuse other integers among fewer rows, as ranks are: NaN would always be the last."""
        arguments = self._with_nan(self.rows, value=None)
        self.refuse_other_results(arguments, self._run(arguments))

    def refuse_standing_out(self, rows: tuple[Any, ...], num_first: int) -> None:
        """Refuse a function whose results for rows depend on the first ones, which have the largest integers of all."""
        arguments = tuple(pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, rows))
        count = next(len(each) for each in pytree.tree_leaves(rows) if isinstance(each, Tensor) and each.dim())
        check = _Check(self.fn, rows, self.call, count, self.probes.again(), (num_first, *self.parts), self.told)
        with contextlib.closing(check.probes.runs):
            outcome = unless_failed((Exception,), check._run, arguments)
            if isinstance(outcome, Failed):  # rows in another order may be refused
                return
            check.refuse_other_results(arguments, outcome.result)
            if isinstance(outcome.result, Loss):
                check.refuse_other_sums()

    def refuse_other_results(self, arguments: tuple[Any, ...], result: Any) -> bool:
        """Refuse a function that gives a row another result among fewer rows, or after an earlier call.

        Returns:
            Whether it could be compared: it may need a certain number of rows.
        """
        earlier, written = self.probes.kept_values(), self.probes.written_values()
        for num_first in self.parts:
            other = 1 - self._poisoned  # of two rows
            span = Span(num_first, self.count, self.count) if self.count > 2 else Span(other, other + 1, self.count)
            fewer = self._without_first(arguments, span)
            apart = self._distance(result, fewer, span, goes_on=True)
            if apart is not None:
                break
        else:
            return False
        others = _replaced(earlier, self.probes.kept_values())
        if apart and self.probes.runs.draws_are_rows:
            self._refuse_distance(apart, arguments, result, fewer, span)
        self._warn_of_kept(
            others, "another one for other rows", "not of all rows, and what reads it gets another result"
        )
        self._warn_of_written(_rewritten(written, self.probes.written_values()))
        return True

    def _without_first(self, arguments: tuple[Any, ...], span: Span) -> tuple[Any, ...]:
        def part(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            some = value.detach()[span.start : span.stop]
            if span.start <= self._poisoned < span.stop:
                # Comparisons swallow NaN (x > x.mean(0) is false in all rows), so now it is gone. A copy, since the row
                # itself is not compared, and could be the only one that differs.
                some = some.clone()
                some[self._poisoned - span.start] = value.detach()[self._beside]
            return some.requires_grad_(value.requires_grad)

        return tuple(pytree.tree_map(part, arguments))

    def _refuse_distance(
        self, apart: float, arguments: tuple[Any, ...], result: Any, fewer: tuple[Any, ...], span: Span
    ) -> None:
        """Refuse other results than before of fewer rows, unless rounding explains the distance."""
        of_rounding = self._distance(result, arguments, rounding=torch.Generator(_device_of(result)))
        if of_rounding is not None and apart <= _TIMES_ROUNDING * of_rounding:
            return
        if self._distance(result, fewer, span):
            raise InputError(
                self.call,
                got="a function whose result for a row depends on the number of rows that it is called with, on the "
                "values of other rows, or on the row's place among them: a chunk has fewer",
                expected="a function that computes each row from that row alone",
                fix="pass the number of all rows with functools.partial(fn, n=len(x)), and places as rows of their "
                "own, torch.arange(len(x)); compute what depends on other rows (a mean, a largest value, a "
                "degree) before the call, and pass it; or pass check=False.",
            )
        raise InputError(
            self.call,
            got="a function whose result depends on its earlier calls: it changes something that it reads",
            expected="a function that computes the same for each chunk, and again in the backward",
            fix="change such state after the step, outside of the function; or pass check=False.",
        )

    def refuse_other_sums(self) -> None:
        """Refuse a function whose loss and count over some rows are not the sums of those over their parts.

        It cuts the rows in several places, since a choice among rows (topk) may be the same in the halves.
        """
        whole, rounding = self._sums(0, self.count)
        for place in sorted({1, self.count // 2, min(3, self.count - 1)}):
            apart = _distance_of_sums(whole, self._sums(0, place)[0], self._sums(place, self.count)[0])
            if apart <= rounding or not self.probes.runs.draws_are_rows:
                continue
            perturbed, _ = self._sums(0, self.count, rounding=torch.Generator(_device_of(self.rows)))
            of_rounding = _distance_of_sums(whole, perturbed)
            if apart > _TIMES_ROUNDING * of_rounding:
                raise InputError(
                    self.call,
                    got=f"a function that returns an mk.Loss whose sum or count over {self.count} rows is not that of "
                    f"the first {place} and that of the others together",
                    expected="a loss of each row from that row alone, and a count that is added up over chunks",
                    fix="compute what depends on other rows before the call (a threshold, a median, a mean), and pass "
                    "it with functools.partial(fn, threshold=threshold); add what belongs to no row, such as a penalty "
                    "on parameters, to the result of the call; or pass check=False.",
                )

    def _sums(self, start: int, stop: int, **how: Any) -> tuple[Tensor, float]:
        """Return the loss's sum and count over some of the rows, and their rounding; NaN if the function needs more."""

        def part(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            return value.detach()[start:stop].requires_grad_(value.requires_grad)

        arguments = tuple(pytree.tree_map(part, self.rows))
        run = functools.partial(self._run, span=Span(start, stop, self.count), **how)
        outcome = unless_failed((Exception,), run, arguments)
        loss = None if isinstance(outcome, Failed) else outcome.result
        if not isinstance(loss, Loss) or loss.count is None or loss.outputs is not None:  # refused elsewhere
            return torch.full((2,), math.nan), 0.0
        values = (loss.total().detach().reshape(()), torch.as_tensor(loss.count).detach().reshape(()))
        rounding = max(_OF_SUMS, _TIMES_EPS * torch.finfo(loss.value.dtype).eps)
        return torch.stack([each.to("cpu", torch.float64) for each in values]), rounding

    def _distance(self, result: Any, arguments: tuple[Any, ...], span: Span | None = None, **how: Any) -> float | None:
        """Return the largest distance of the rows in another run, relative to the largest value; None if it fails."""
        span = span or Span(0, self.count, self.count)
        outcome = unless_failed((Exception,), functools.partial(self._run, span=span, **how), arguments)
        if isinstance(outcome, Failed):
            return None
        (ones, tree), (others, other_tree) = pytree.tree_flatten(result), pytree.tree_flatten(outcome.result)
        if tree != other_tree:
            return math.inf
        compare = functools.partial(_leaf_distance, span=span, left_out=self._poisoned)
        return max(map(compare, ones, others), default=0.0)


def _leaf_distance(one: Any, other: Any, *, span: Span, left_out: int) -> float:
    """Return the distance of one leaf of a result; 0 for rounding, and for what has no rows.

    Args:
        one: That of all rows.
        other: That of some.
        span: The rows of ``other``.
        left_out: A row that is not compared.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        is_number = type(one) in _NUMBERS or type(other) in _NUMBERS
        return math.inf if is_number and (type(one) is not type(other) or one != other) else 0.0
    if one.layout is not torch.strided or one.shape[:1] != (span.total,):
        return 0.0  # refused elsewhere
    if other.shape != (span.stop - span.start, *one.shape[1:]):
        return math.inf
    rows = torch.tensor([row for row in range(span.start, span.stop) if row != left_out], dtype=torch.int64)
    a, b = _as_doubles(one)[rows], _as_doubles(other)[rows - span.start]
    differences = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    if not bool(differences.any()):
        return 0.0
    found = float(differences.amax() / a.where(a.isfinite(), 0.0).abs().amax())
    return found if not may_be_nan(one) or found > torch.finfo(one.dtype).eps ** 0.5 else 0.0


def _standing_out(whole: Sequence[object], count: int) -> tuple[Tensor, int] | None:
    """Return the numbers of some rows, and of how many the first ones hold the largest and smallest integers.

    Of booleans the sums count, as lengths. The other rows lie between these. None if there are none.
    """
    first: dict[int, None] = {}
    between: Tensor | None = None
    for each in whole:
        if not isinstance(each, Tensor) or may_be_nan(each) or each.dim() == 0 or not each.numel():
            continue
        rows = each.detach().reshape(len(each), -1)
        if not rows.dtype.is_signed and rows.dtype is not torch.bool:
            rows = rows.long()  # torch takes no maximum of most unsigned integers
        keys = (rows.sum(1) if rows.dtype is torch.bool else rows.amax(1)).cpu()
        below, above = keys < keys.max(), keys > keys.min()
        if between is not None:
            below, above = below & between, above & between
        if bool((below & above).any()):
            first |= dict.fromkeys((int(keys.argmax()), int(keys.argmin())))
            between = below & above
        elif bool(below.any()):
            first[int(keys.argmax())] = None
            between = below
    if between is None or len(first) >= count:
        return None
    others = between.nonzero().flatten()[: count - len(first)]
    return torch.cat([torch.tensor(list(first)), others]), len(first)


def _distance_of_sums(whole: Tensor, *parts: Tensor) -> float:
    """Return how far sums are from those of the parts together, relative to them; 0 if that is unknown."""
    all_parts = torch.stack(parts)
    differences = (whole - all_parts.sum(0)).abs() / (whole.abs() + all_parts.abs().sum(0))
    return float(differences.nan_to_num(nan=0.0).amax())


def _replaced(earlier: Mapping[str, Sequence[Tensor]], now: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Return the attributes in which a later call has left other values than the earlier one: constants are the same.

    What it has not replaced, such as a table made by the first call, is no result of its rows.
    """
    found = []
    for name, values in now.items():
        before = earlier.get(name, [])
        new = [each for each in values if not any(each is one for one in before)]
        last = before[-len(new) :] if new else []  # a list may hold those of all calls so far
        if len(new) != len(last) or not all(map(_are_alike, new, last)):
            found.append(name)
    return found


def _rewritten(earlier: Mapping[str, Sequence[Tensor]], now: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Return the attributes into which calls have written other values, or the NaN of a row."""
    return [
        name
        for name, values in now.items()
        if len(values) != len(before := earlier.get(name, ()))
        or not all(map(_are_alike, values, before))
        or any(_as_doubles(each).isnan().any() for each in values)
    ]


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and bool(_are_close(one, other).all())


def _are_close(one: Tensor, other: Tensor) -> Tensor:
    a, b = _as_doubles(one), _as_doubles(other)  # of float8, torch compares none
    return torch.isclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True)


def _as_doubles(tensor: Tensor) -> Tensor:
    values = tensor.detach().cpu()
    return torch.view_as_real(values.to(torch.complex128)) if values.is_complex() else values.double()


def _device_of(result: Any) -> torch.device | str:
    return next((each.device for each in pytree.tree_leaves(result) if isinstance(each, Tensor)), "cpu")


def _code_of(fn: Any) -> Any:
    """Return the code of a function, of a method or in a partial; of other objects, that of their call, or None."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


def _way(fn: object, *, is_held: bool = False) -> Hashable:
    """Return a hashable description of how a function uses its module, without a reference to it; None if unknown.

    Args:
        fn: The function, or what it holds.
        is_held: Whether another function holds it: one that holds others is then unknown, as one that holds itself.
    """
    if isinstance(fn, functools.partial):
        return _ways((fn.func, *fn.args, *fn.keywords.values()), (*fn.keywords,), is_held=is_held)
    if inspect.ismethod(fn):
        return fn.__func__.__qualname__, fn.__func__.__code__
    if inspect.isfunction(fn):
        held = [_content_of(cell) for cell in fn.__closure__ or ()]
        held += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        return _ways(held, (fn.__code__,), is_held=True) if not held or not is_held else None
    if isinstance(fn, nn.Module):
        return type(fn).__qualname__
    if fn is None:
        return (None,)
    return fn if isinstance(fn, bool | int | float | str) else None


def _ways(parts: Sequence[object], others: tuple[Hashable, ...], *, is_held: bool) -> Hashable:
    ways = [_way(part, is_held=is_held) for part in parts]
    return None if None in ways else (*ways, *others)


def _content_of(cell: types.CellType) -> object:
    return cell if cell == types.CellType() else cell.cell_contents  # a variable without a value yet is unknown


def _bad_rows(value: Any, count: int) -> set[int]:
    """Return the rows of a tensor that contain NaN; -1 for a number, which has none."""
    if isinstance(value, float) and math.isnan(value):
        return {-1}
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count or not may_be_nan(value):
        return set()
    return set(torch.isnan(value).reshape(count, -1).any(1).nonzero().flatten().tolist()) if value.numel() else set()


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
        if given and not any(map(may_be_nan, given)):
            output = pytree.tree_map(with_nan, output)
        before, after = (
            set().union(*(_bad_rows(leaf, count) for leaf in pytree.tree_leaves(value))) for value in (given, output)
        )
        if not after <= before | {poisoned}:
            culprits.append(f"`{names[child]}` ({type(child).__name__})")
        return output

    def with_nan(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != (count,) or not may_be_nan(value):
            return value
        row = torch.arange(count, device=value.device).view(-1, *[1] * (value.dim() - 1)) == poisoned
        return value.masked_fill(row, math.nan)

    with forward_hooks(names, watch):
        yield
