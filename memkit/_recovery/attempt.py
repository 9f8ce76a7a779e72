"""Run a function that may run out of memory: get its result, or an error that holds no tensors of the failed call.

An error holds the frames of the failed call, and the frames hold its tensors. So the frames are cleared where the error
is caught, and dropped; undoing, collecting and releasing happen after ``except``, which holds the frames too.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, SupportsIndex, TypeVar

from memkit._core.errors import InputError, InputTypeError, MemkitOutOfMemoryError
from memkit._machine.devices import keep_heap_whole, release_cached_memory
from memkit._recovery.errors import classify_oom, describe_error, drop_frames, is_out_of_memory

_logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Kinds = tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """Result of an attempt that succeeded."""

    result: Result


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that did not succeed.

    Attributes:
        error: The error, without frames: it can be the cause of another error, and holds no tensor.
    """

    error: BaseException

    @property
    def description(self) -> str:
        """The error's type and the first line of its text."""
        return describe_error(self.error)


class OutOfMemory(Failure):
    """An attempt ran out of memory."""


class Failed(Failure):
    """An attempt ended with another error."""


class Caught(contextlib.AbstractContextManager["Caught"]):
    """A context that suppresses out-of-memory errors; the only handler of such errors.

    Args:
        others: Other exception types to catch.
        handled: See `drop_frames`.

    Attributes:
        failure: The caught failure; None if the block completed, or another error propagates.
    """

    def __init__(self, others: Kinds = (), *, handled: BaseException | None) -> None:
        self._others, self._handled = others, handled
        self.failure: Failure | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        handled, self._handled = self._handled, None  # its frames may hold this object
        if error is not None:
            self.failure = _judge(error, self._others, handled)
        return self.failure is not None


def _judge(error: BaseException, others: Kinds, handled: BaseException | None) -> Failure | None:
    """Classify a caught error and drop its frames; None if the error should propagate."""
    failure: Failure
    if is_out_of_memory(error):
        failure = OutOfMemory(error)
    elif isinstance(error, others):
        failure = Failed(error)
    else:
        return None
    drop_frames(error, handled)
    with contextlib.suppress(MemoryError):  # not even enough memory to inspect the error
        verdict = classify_oom(error)
        if verdict is not None and verdict.backend == "cpu":
            keep_heap_whole()
    return failure


def attempt(
    run: Callable[..., Result], *args: Any, undo: Callable[[], object] | None = None, others: Kinds = ()
) -> Done[Result] | Failure:
    """Call ``run(*args)``; after an out-of-memory error, release cached memory and undo the call's changes.

    Args:
        run: The function that may run out of memory.
        *args: Its arguments.
        undo: Restores everything that ``run`` may have changed; tried twice, since it may need memory itself.
        others: Other exception types to catch and undo in the same way.

    Returns:
        The result, or the failure. Other errors propagate.
    """
    handled = sys.exception()
    try:
        return Done(run(*args))
    except BaseException as error:
        failure = _judge(error, others, handled)
        if failure is None:
            raise
    release_cached_memory()
    if undo is not None:
        insist(undo, "undoing a call that ran out of memory")
    return failure


def unless_failed(kinds: Kinds, run: Callable[..., Result], *args: Any) -> Done[Result] | Failed:
    """Call ``run(*args)`` and catch errors of some kinds. Out-of-memory errors propagate to an outer recovery."""
    try:
        return Done(run(*args))
    except kinds as error:
        if is_out_of_memory(error):
            raise
        return Failed(error)


class ReportingErrors(contextlib.AbstractContextManager[None]):
    """A context that reports any error raised in its block, and lets it propagate; cheap enough for every step.

    Args:
        tell: Called with the error, and whether it is an out-of-memory error.
        done: Called at the end of a block that raised nothing.
    """

    __slots__ = ("_done", "_tell")

    def __init__(self, tell: Callable[[Exception, bool], None], done: Callable[[], None] | None = None) -> None:
        self._tell, self._done = tell, done

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._tell(error, is_out_of_memory(error))
        elif error is None and self._done is not None:
            self._done()


def insist(run: Callable[[], Result], call: str) -> Result:
    """Call ``run``; after an out-of-memory error, release cached memory and call it once more.

    Args:
        run: Function that does all of its work or none of it.
        call: Description of the work, for the error message.

    Raises:
        MemkitOutOfMemoryError: ``run`` ran out of memory twice.
    """
    handled = sys.exception()
    try:
        return run()
    except BaseException as error:
        if _judge(error, (), handled) is None:
            raise
    release_cached_memory()
    outcome = attempt(run)
    if isinstance(outcome, Done):
        return outcome.result
    raise MemkitOutOfMemoryError(
        call,
        got=f"out of memory, twice: {outcome.description}",
        expected="enough memory for the temporary results of the call",
        fix="free more memory: use a smaller micro-batch, checkpointing, a lower precision.",
    ) from outcome.error


def recover_from_oom(fn: Callable[[int], Result], sizes: SupportsIndex | Iterable[SupportsIndex]) -> Result:
    """Call ``fn(size)`` with decreasing sizes until one does not run out of memory.

    After a failure, the attempt's tensors are freed before the next call: the error is dropped and its frames are
    cleared, then reference cycles are collected and the allocator's cache is released, all outside ``except``, where
    a traceback would still hold every local of the failed call. Each failure is logged as a warning.

    Args:
        fn: Function that does all of the work at one size. It starts over at each size, so it must not leave
            half-finished work behind, such as gradients of a failed backward: call ``zero_grad()`` first.
        sizes: The sizes to try, positive and each smaller than the one before; or the first size as an int, which is
            halved (rounding down) until it reaches 1: at most ``size.bit_length()`` calls.

    Returns:
        The result of ``fn``. If you also need the size, have ``fn`` return it.

    Raises:
        MemkitOutOfMemoryError: Every size ran out of memory.
        InputError: There are no sizes, or the sizes are not positive and decreasing.
        InputTypeError: A size is not an int.
        Exception: Any other error that ``fn`` raises propagates unchanged, at once.

    Memory:
        Only the size and one line of text are kept of a failed attempt.

    Example:
        >>> import memkit as mk
        >>> def step(size):
        ...     if size > 100:  # stands for a real out-of-memory
        ...         raise MemoryError
        ...     return size
        >>> mk.recover_from_oom(step, 256)
        64
        >>> mk.recover_from_oom(step, [200, 96, 32])
        96
    """
    _check_function(fn, sizes)
    tried: list[str] = []
    error: BaseException | None = None
    falling = tuple(_falling(sizes))
    _check_takes_a_size(fn)
    for size in falling:  # all checked before the first call: a late error could come hours into the run
        outcome = attempt(fn, size)
        if isinstance(outcome, Done):
            return outcome.result
        error = outcome.error
        tried.append(str(size))
        _logger.warning("out of memory at size %d: %s", size, outcome.description)
    assert error is not None  # noqa: S101 - there is a size
    raise MemkitOutOfMemoryError(
        "recover_from_oom(fn, sizes)",
        got=f"out of memory at every size: {', '.join(tried)}; the last error was {describe_error(error)}",
        expected="at least one size that fits into memory",
        fix="allow smaller sizes, or free memory outside fn: checkpointing, a smaller model, a lower precision.",
    ) from error


def _check_function(fn: object, sizes: object) -> None:
    """Refuse a value that is not a function, and swapped arguments."""
    if not callable(fn):
        is_swapped = callable(sizes)
        raise InputTypeError(
            "recover_from_oom(fn, sizes)",
            got="the sizes first and the function second" if is_swapped else f"a {type(fn).__name__} as fn",
            expected="a function of a size, then the sizes",
            fix=f"write recover_from_oom({'fn' if is_swapped else 'lambda size: step(size)'}, sizes).",
        )


def _check_takes_a_size(fn: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise InputTypeError(
            "recover_from_oom(fn, sizes)",
            got="a generator or an async function, whose call ends before its work begins",
            expected="a function whose call does all of the work",
            fix="call recover_from_oom inside of it, around the work itself, which returns its result.",
        )
    try:
        inspect.signature(fn).bind(1)
    except TypeError as error:
        raise InputTypeError(
            "recover_from_oom(fn, sizes)",
            got=f"a function that cannot be called with a size alone ({error})",
            expected="fn(size)",
            fix="write recover_from_oom(lambda size: step(batch[:size]), sizes).",
        ) from None
    except ValueError:  # a function in C that does not expose its signature
        return


def _falling(sizes: SupportsIndex | Iterable[SupportsIndex]) -> Iterator[int]:
    """Yield the sizes as ints; terminates, since the sizes must be decreasing and positive."""
    call = "recover_from_oom(fn, sizes)"
    previous: int | None = None
    is_series = isinstance(sizes, Iterable) and not isinstance(sizes, bytes | bytearray)  # whose items are ints
    is_number = not is_series or getattr(sizes, "ndim", 1) == 0  # a tensor may hold one number
    many: Any = _halved(_as_size(sizes, call)) if is_number else sizes
    for size in many:
        current = _as_size(size, call)
        if current < 1 or (previous is not None and current >= previous):
            raise InputError(
                call,
                got=f"size {current}" + (f" after {previous}" if previous is not None else ""),
                expected="positive sizes, each smaller than the one before",
                fix="sort the sizes from large to small and remove duplicates.",
            )
        yield current
        previous = current
    if previous is None:
        raise InputError(call, got="no sizes", expected="at least one size", fix="pass for example sizes=256.")


def _halved(size: int) -> Iterator[int]:
    yield size
    while size > 1:
        size //= 2
        yield size


def _as_size(size: object, call: str) -> int:
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        fix = "write recover_from_oom(fn, [256, 128, 64]), or recover_from_oom(fn, 256)."
        raise InputTypeError(call, got=f"a {type(size).__name__}", expected="int sizes", fix=fix)
    return operator.index(size)
