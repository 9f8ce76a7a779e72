"""Forward passes without gradients over a batch of any size: as many rows at a time as fit, results joined."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from memkit._core.errors import InputError, InputTypeError, MemkitOutOfMemoryError, StateError, warn_user
from memkit._core.foreign import LOSS
from memkit._core.words import guided
from memkit._machine import random_state
from memkit._recovery.attempt import Done, Failure, attempt, insist
from memkit._recovery.inputs import Contents, InputWatch
from memkit._recovery.loss_key import key_of_loss
from memkit._recovery.sizes import SizeMemory
from memkit._recovery.snapshot import HeldState, looking_inside
from memkit._torch import pytree
from memkit._torch.tensors import are_unwritten, marks_of
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.split import check_batch, copied, list_arrays, pick_rows, split_batch, survey

_CALL = "evaluate(batch, fn)"


@guided(
    words={"fn": LOSS, "batch": "rows inputs"},
    absent={"trainer.train_step(batch, loss_fn) outside of the block": "train_step"},
    methods=("__call__",),
    rewrite={"__call__": lambda _: "evaluate(batch, fn)"},
)
class Evaluation:
    """Evaluation function yielded by ``with trainer.evaluation() as evaluate:``.

    ``evaluate(batch, fn)`` returns ``fn(model, batch)``. After an out-of-memory only the failed part is rerun, in
    halves; the size that fits is remembered per input shape, separately from training, which takes more memory. A
    batch that cannot be cut into rows runs whole.

    Args:
        model: The model, in evaluation mode.
        sizes: The remembered sizes that fit.
        can_split: Whether to recover from an out-of-memory; else the error passes through.

    Attributes:
        mean_of: Returns the mean over all rows of a result that is itself a mean, repeated for each row; None if it is
            none. In the first batch that is cut, each part's is then compared with that of its halves.
    """

    def __init__(self, model: nn.Module, sizes: SizeMemory, *, can_split: bool) -> None:
        self._model, self._sizes, self._can_split = model, sizes, can_split
        self._inputs = InputWatch(list_arrays)
        self.mean_of: Callable[[Any], torch.Tensor] | None = None
        # Keys of functions whose rows were found independent, and of those of which a warning said that nobody knows.
        self._checked: set[object] = set()
        self._told: set[object] = set()
        self._has_entries: dict[object, bool] = {}  # by function: a list with an entry for each row, or one of columns
        self._has_checked_means = False
        self._host = random_state.HostState()
        self._quiet: set[object] = set()  # keys of functions, and None for the model, that were seen to change nothing
        self._restless: set[object] = set()  # the same of those that were seen to change something in between

    def __call__(self, batch: Any, fn: Callable[[nn.Module, Any], Any]) -> Any:
        """Run ``fn`` over all rows of a batch.

        Args:
            batch: Tensors with the rows in dimension 0, in any containers. Other batches, such as graphs, run whole.
            fn: ``fn(model, part)`` returns tensors (n, ...), one row for each row of the part, alone or in containers;
                or a list with one entry for each row, whatever the entries are, as a detector does. To keep the results
                in host memory, let it return them there.

        Returns:
            The result of ``fn(model, batch)``.

        Raises:
            InputTypeError: ``fn`` is not a function of model and batch, or ``batch`` is a loader.
            InputError: The batch was split, and ``fn`` does not return one output row per input row, or a list that may
                hold entries as well as columns, or its rows depend on one another: a few rows of the first part are run
                by themselves, and compared.
            MemkitOutOfMemoryError: Even one row does not fit, the batch cannot be cut, or ``fn`` has written to it.

        Warns:
            MemkitWarning: Only one row fits at a time, so nothing could be compared; or a failed attempt has changed a
                tensor over 1 MiB that ``fn`` holds, is no module's buffer, and stays changed.

        Memory cost: the results, briefly twice if the batch was split, plus the memory of one part. Until ``fn`` and
        the model are seen to change nothing, also copies of the buffers of modules that they hold, and of other tensors
        of up to 1 MiB, of 64 MiB in all.

        Example:
            >>> import torch
            >>> import memkit as mk
            >>> model = torch.nn.Linear(3, 2)
            >>> trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with trainer.evaluation() as evaluate:
            ...     scores = evaluate(torch.randn(1000, 3), lambda model, rows: model(rows))
            >>> scores.shape
            torch.Size([1000, 2])
        """
        _check_function(fn, self._model, batch)
        check_batch(batch, call=_CALL, written="evaluate({}, fn)")
        if not self._can_split:
            return fn(self._model, batch)
        marked = mark_samples(batch)
        try:
            num_rows, key, tensors = survey(marked)
        except InputError as error:
            return self._whole(batch, fn, error.got)
        marks, contents = marks_of(tensors), None if self._inputs.is_quiet else self._inputs.note(marked)
        todo = deque(split_batch(marked, self._sizes.num_parts(key, num_rows, 1), num_rows=num_rows))
        results: list[tuple[Any, int]] = []
        was_clean = True
        while todo:
            part, size = todo.popleft()
            outcome = self._attempt(fn, part if marked is batch else unmark_samples(part))
            if isinstance(outcome, Done):
                self._sizes.note_success(key, size)
                results.append((outcome.result, size))
                if size < num_rows and _is_unwritten(marks, contents):
                    self._check(part, outcome.result, size, fn, is_first=len(results) == 1)
                if contents is not None and contents.are_same():
                    contents, self._inputs.is_quiet = None, True
                continue
            was_clean = False
            _check_unwritten(marks, contents, outcome)
            if size <= 1:
                raise MemkitOutOfMemoryError(
                    _CALL,
                    got=f"out of memory with one row: {outcome.description}",
                    expected="enough memory for one row and for the results so far",
                    fix="let fn return its results in host memory (.cpu()), or return only the results that you need.",
                ) from outcome.error
            self._sizes.note_failure(key, size)
            try:
                todo.extendleft(reversed(split_batch(part, 2, num_rows=size)))
            except InputError as error:  # such as a mask that may belong to all rows
                raise _not_cut(outcome, error.got) from outcome.error
        if was_clean:
            self._sizes.note_clean_step(key)
        self._has_checked_means = self._has_checked_means or len(results) > 1
        return results[0][0] if len(results) == 1 else self._joined(results, fn)

    def _joined(self, results: list[tuple[Any, int]], fn: Callable[[nn.Module, Any], Any]) -> Any:
        if not all(_is_list_of(size, result) for result, size in results):
            return _together(results)
        has_entries = self._has_entries.get(key_of_loss(fn))
        may_be_columns = all(all(_is_column(leaf, size) for leaf in _leaves(result)) for result, size in results)
        if has_entries is None and may_be_columns:
            size = results[0][1]
            raise InputError(
                _CALL,
                got=f"a function that returns a list of {size} with {size} row{'s' * (size > 1)} in each for {size} "
                f"row{'s' * (size > 1)} of a batch that had to be cut",
                expected="an unambiguous choice between one entry for each row and one row in each entry",
                fix="return a tuple, if its tensors have one row for each row; if the list has one entry for each row, "
                "put a number beside the tensors of an entry: {'boxes': boxes, 'number': len(boxes)}.",
            )
        if has_entries or not may_be_columns:
            return list(itertools.chain.from_iterable(result for result, _ in results))
        return _together(results)

    def _check(self, part: Any, result: Any, size: int, fn: Callable[[nn.Module, Any], Any], *, is_first: bool) -> None:
        """Check whether a part's rows are independent of one another."""
        if self.mean_of is not None and not self._has_checked_means and size > 1:
            self._check_mean(part, result, size, fn)
        if is_first:
            self._check_rows(part, result, size, fn)

    def _check_rows(self, part: Any, result: Any, size: int, fn: Callable[[nn.Module, Any], Any]) -> None:
        """Compare a few rows of a part with the same rows by themselves; random results cannot be compared.

        Nothing stays of that run: not what ``fn`` writes down, nor what it draws.
        """
        key = key_of_loss(fn)
        if key in self._checked:
            return
        if size == 1:
            if key in self._told:
                return
            self._told.add(key)
            warn_user(
                f"{_CALL}: only one row fits at a time, so it could not be checked whether fn's result for a row "
                "depends on the others (distances, a mean or a softmax over rows): if it does, the joined result is "
                "wrong. Way out: compute what compares rows outside of fn, from the results of all rows."
            )
            return
        chosen = _telling_rows(result, size)
        parts = [pick_rows(part, rows, num_rows=size) for rows in chosen]
        outcomes, is_random = self._run_apart(parts, fn)
        for rows, outcome in zip(chosen, outcomes, strict=True):
            if not isinstance(outcome, Done):
                continue
            # Fewer rows give fewer entries, but not fewer columns.
            self._has_entries[key] = _is_list_of(size, result) and _is_list_of(len(rows), outcome.result)
            are_equal = self._are_equal_entries if self._has_entries[key] else self._are_equal
            if not is_random and not are_equal(result, outcome.result, rows, size):
                raise InputError(
                    _CALL,
                    got=f"a function whose result for {len(rows)} of {size} rows is another one when they are run by "
                    "themselves, for a batch that had to be cut",
                    expected="rows that do not depend on one another",
                    fix="compute what compares rows (distances, a mean over rows) outside of fn, from the results of "
                    "all rows; pad to one size for all batches, not to the largest row of a part.",
                )
        self._checked.add(key)

    def _are_equal(self, result: Any, few: Any, rows: list[int], size: int) -> bool:
        """Whether a result for a few rows is what a result for more rows has for them, up to rounding."""
        for whole, part in zip(_leaves(result), _leaves(few), strict=False):
            if not (_is_column(whole, size) and _is_column(part, len(rows))):
                continue  # refused when the results are joined
            if whole.shape[1:] != part.shape[1:]:
                return False
            if (whole == whole[:1]).all():  # a mean of a part, repeated: it is to be averaged over rows
                continue
            if part.is_floating_point():
                if not self._are_close(whole[rows], part, whole):
                    return False
            elif _are_other_choices(whole[rows], part, self._less()):
                return False
        return True

    def _are_equal_entries(self, result: list[Any], few: list[Any], rows: list[int], _: int) -> bool:
        """Whether entries for a few rows are those of more rows; rounding may change some, as it does a choice.

        It may move a box over a threshold, or in front of another one.
        """
        are_equal = [
            len(_leaves(result[row])) == len(_leaves(entry))
            and all(map(self._is_equal_leaf, _leaves(result[row]), _leaves(entry)))
            for row, entry in zip(rows, few, strict=True)
        ]
        return not _are_other_choices(torch.ones(len(rows), dtype=torch.bool), torch.tensor(are_equal), self._less())

    def _is_equal_leaf(self, one: Any, other: Any) -> bool:
        if not all(isinstance(each, (torch.Tensor, int, float)) for each in (one, other)):
            return not isinstance(one, str) or one == other
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.shape != other.shape or one.dtype is not other.dtype:
            return False
        is_rounded = one.is_floating_point() or one.is_complex()
        return self._are_close(one, other, one) if is_rounded else torch.equal(one, other)

    def _are_close(self, one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> bool:
        tolerance = self._tolerance(other.dtype)
        scale = whole.abs().nan_to_num(0.0, 0.0, 0.0).max() if whole.numel() else 0.0
        return torch.allclose(one, other, tolerance, float(tolerance * scale), equal_nan=True)

    def _less(self) -> float:
        return _LESS_IN_HALF if self._is_in_half() else _LESS

    def _check_mean(self, part: Any, result: Any, size: int, fn: Callable[[nn.Module, Any], Any]) -> None:
        """Compare a part's mean with that of its halves; random results cannot be compared."""
        assert self.mean_of is not None  # noqa: S101 - the caller has looked
        halves = split_batch(part, 2, num_rows=size)
        outcomes, is_random = self._run_apart([half for half, _ in halves], fn)
        done = [each.result for each in outcomes if isinstance(each, Done)]
        if is_random or len(done) < len(halves):
            return
        together = _together([(each, rows) for each, (_, rows) in zip(done, halves, strict=True)])
        mean, joined = self.mean_of(result), self.mean_of(together)
        # A mean of both signs may be small beside those of its halves.
        scale = max(abs(float(self.mean_of(each).nan_to_num(0.0, 0.0, 0.0))) for each in (*done, result))
        tolerance = self._tolerance(mean.dtype)
        if not torch.allclose(mean, joined, tolerance, tolerance * scale, equal_nan=True):
            raise InputError(
                "a validation by the mean of loss_fn",
                got=f"a loss of {size} rows, {mean.item():.4g}, that is not the mean of its halves, "
                f"{joined.item():.4g}, for a batch that had to be cut",
                expected="a mean over independent rows, or one with its divisor",
                fix="if it is a mean over n valid items, end loss_fn with return mk.Loss(mean=loss, count=n); if it "
                "compares rows, as a contrastive loss does, make batches that fit: DataLoader(val_data, "
                f"batch_size={size}).",
            )

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Return the relative difference that rounding may make to a result: the model's own, if it is coarser."""
        dtypes = {each.dtype for each in self._model.parameters() if each.is_floating_point()}
        coarsest = torch.float16 if self._is_in_half() else torch.float32 if torch.float32 in dtypes else dtype
        return float(max(torch.finfo(each).eps for each in (dtype, coarsest)) ** 0.5)

    def _is_in_half(self) -> bool:
        parameters = list(self._model.parameters())
        is_mixed = any(map(torch.is_autocast_enabled, {each.device.type for each in parameters}))
        return is_mixed or any(each.dtype in _HALF for each in parameters)

    def _run_apart(
        self, parts: Sequence[Any], fn: Callable[[nn.Module, Any], Any]
    ) -> tuple[list[Done[Any] | Failure], bool]:
        """Run ``fn`` on copies of rows, without a trace; return the results, and whether random numbers were drawn."""
        before, held = random_state.capture(), [HeldState(each, content="counts") for each in (self._model, fn)]
        outcomes = [attempt(fn, self._model, copied(unmark_samples(each))) for each in parts]
        is_random = not random_state.is_same_state(before, random_state.capture())
        random_state.restore(before)
        for each in held:
            insist(each.restore, "undoing a comparison of rows")
        return outcomes, is_random

    def _attempt(self, fn: Callable[[nn.Module, Any], Any], part: Any) -> Done[Any] | Failure:
        """Run ``fn``; undo what a failed attempt has changed: rows that a metric counted are counted again."""
        before, roots = random_state.capture(self._host), {None: self._model, key_of_loss(fn): fn}
        held = {
            key: insist(functools.partial(HeldState, root, content="counts"), "saving what fn and the model hold")
            for key, root in roots.items()
            if key not in self._quiet
        }

        def undo() -> None:
            for each in held.values():
                each.restore()
            random_state.restore(before, self._host)

        def look() -> None:
            self._restless.update(key for key, each in held.items() if each.differ())

        with looking_inside(self._model, look) if held.keys() - self._restless else nullcontext():
            outcome = attempt(fn, self._model, part, undo=undo)
        if isinstance(outcome, Done):
            self._quiet.update(key for key, each in held.items() if key not in self._restless and not each.differ())
        return outcome

    def _whole(self, batch: Any, fn: Callable[[nn.Module, Any], Any], why: str) -> Any:
        """Run ``fn`` over a batch that cannot be cut."""
        outcome = attempt(fn, self._model, batch)
        if isinstance(outcome, Done):
            return outcome.result
        raise _not_cut(outcome, why) from outcome.error


_HALF = (torch.bfloat16, torch.float16)
_FLOATS = frozenset({torch.float32, torch.float64, *_HALF})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_MOST_ROWS, _MOST_ORDERS = 8, 3  # rows by themselves at a time, and tensors of a result that choose them
_LESS, _LESS_IN_HALF = 0.25, 0.5  # rounding changes a smaller share of classes and of comparisons


def _telling_rows(result: Any, size: int) -> list[list[int]]:
    """Choose rows of a part whose results change when these rows are by themselves, if a result compares rows.

    The last two: the first ones would be the same where each row depends on those before it. But two rows may be alike
    by chance, on one side of a median or a threshold: so also those with the highest and with the lowest results, none
    of which has the part's smallest or largest value.
    """
    chosen = {tuple(range(max(1, size - 2), size)): None}
    for each in list(filter(functools.partial(_has_order, size), _leaves(result)))[:_MOST_ORDERS]:
        rows = each.detach().reshape(size, -1)
        for values, largest in ((rows.amin(1), True), (rows.amax(1), False)):
            found = values.double().topk(min(_MOST_ROWS, size - 1), largest=largest).indices
            chosen[tuple(sorted(found.tolist()))] = None
    return [list(rows) for rows in chosen]


def _has_order(size: int, leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or not leaf.numel():
        return False
    return leaf.shape[:1] == (size,) and leaf.dtype in _FLOATS | _INTEGERS | {torch.bool}


def _are_other_choices(whole: torch.Tensor, part: torch.Tensor, share: float) -> bool:
    """Whether more integers or comparisons differ than rounding explains: another class for one row, a small share."""
    if part.is_complex():
        return False
    differ = whole != part
    if part.dtype is not torch.bool:  # rounding may reorder many classes of a row, but hardly all of them
        differ = differ.reshape(len(part), -1).all(dim=1) if part.numel() else differ
    number = int(differ.sum())
    return number > 0 and (number == differ.numel() or (number > 1 and number >= share * differ.numel()))


def _not_cut(failure: Failure, why: str) -> MemkitOutOfMemoryError:
    return MemkitOutOfMemoryError(
        _CALL,
        got=f"out of memory ({failure.description}) with a batch that cannot be cut: {why}",
        expected="memory for the whole batch, or tensors that all have the rows in dimension 0",
        fix="make smaller batches for validation: DataLoader(dataset, batch_size=1).",
    )


def _is_unwritten(marks: Any, contents: Contents | None) -> bool:
    return are_unwritten(marks) and (contents is None or contents.are_same())


def _check_unwritten(marks: Any, contents: Contents | None, failure: Failure) -> None:
    if _is_unwritten(marks, contents):
        return
    raise MemkitOutOfMemoryError(
        _CALL,
        got=f"out of memory ({failure.description}) in a forward that changes the batch in place and so cannot run "
        "again",
        expected="a forward that leaves the batch unchanged",
        fix="write `x = x / 255`, not `x /= 255`, in the model and in fn; or pass fewer rows at a time.",
    ) from failure.error


class EvaluationBlock(AbstractContextManager[Evaluation]):
    """Context manager that ``trainer.evaluation()`` returns; entering it gives the `Evaluation`.

    Args:
        block: The wrapped context manager.
    """

    def __init__(self, block: AbstractContextManager[Evaluation]) -> None:
        self._block = block

    def __enter__(self) -> Evaluation:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a call of the block itself.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "trainer.evaluation()(batch, fn)",
            got="a call outside of the block",
            expected="a call of the function that the block yields, in eval mode and without gradients",
            fix="write with trainer.evaluation() as evaluate: outputs = evaluate(batch, fn)",
        )


def _check_function(fn: object, model: object, batch: object) -> None:
    if callable(fn) and fn is not model:
        return
    if fn is model:
        got, fix = "the model itself as fn", "write evaluate(batch, lambda model, rows: model(rows))"
    elif callable(batch):
        got, fix = f"a {type(fn).__name__} as fn, and a function as batch", "write evaluate(batch, fn)"
    else:
        got, fix = f"a {type(fn).__name__} as fn", "write evaluate(batch, lambda model, rows: model(rows))"
    raise InputTypeError(_CALL, got=got, expected="a function of the model and the rows", fix=fix)


def _leaves(result: Any) -> list[Any]:
    return pytree.tree_leaves(result)


def _is_list_of(number: int, result: Any) -> bool:
    return isinstance(result, list) and len(result) == number


def _is_column(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (size,)


def _together(results: list[tuple[Any, int]]) -> Any:
    columns, tree = [], None
    for result, size in results:
        leaves, tree = pytree.tree_flatten(result)
        for leaf in leaves:
            if not _is_column(leaf, size):
                got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                got += f" in a list of {len(result)}" if isinstance(result, list) else ""
                raise InputError(
                    _CALL,
                    got=f"a function that returns {got} for {size} rows of a batch that had to be cut",
                    expected="tensors with one row for each row, or a list with one entry for each row: a mean of the "
                    "parts' means is not the batch's mean",
                    fix="return one value per row (losses with reduction='none'), and average outside of fn.",
                )
        columns.append(leaves)
        widths = [(tuple(one.shape[1:]), tuple(leaf.shape[1:])) for one, leaf in zip(columns[0], leaves, strict=False)]
        unlike = next((pair for pair in widths if pair[0] != pair[1]), None)
        if len(leaves) != len(columns[0]) or unlike is not None:
            raise InputError(
                _CALL,
                got=f"parts of {unlike[0]} and of {unlike[1]} for each row"
                if unlike is not None
                else "other numbers of tensors for two parts",
                expected="rows of one shape, whichever part they are in: a batch that had to be cut is joined from "
                "several",
                fix="pad to a length of the whole batch, F.pad(out, (0, longest - out.shape[1])), where a loop over "
                "tokens ends with the part's last row.",
            )
    assert tree is not None  # noqa: S101 - there is at least one part
    return pytree.tree_unflatten([torch.cat(column) for column in zip(*columns, strict=True)], tree)
