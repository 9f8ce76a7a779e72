"""Is this error out-of-memory, and how to try again at a smaller size without the failed attempt's tensors."""

from __future__ import annotations

import errno
import logging
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

import torch

from memkit._device import release_cached_memory, under_memory_pressure
from memkit._errors import InputError, InputTypeError, MemkitError, MemkitOutOfMemoryError

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Backend and message. Each row is there for a real message: tests/data/oom_corpus.json has it, with its source.
_CERTAIN = (
    ("cuda", r"CUDA out of memory|CUDA (driver )?error: ?out of memory|cuda runtime error \(2\)"),
    ("cuda", r"Triton Error \[CUDA\]: out of memory|Cuda failure (2 )?'out of memory'"),
    ("cuda", r"Allocation on device .*would exceed allowed memory"),  # the cudaMallocAsync backend
    ("cuda", r"_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"),  # cuBLAS, cuDNN, cuSOLVER
    ("cuda", r"cuda (execution )?failed with error 2\b|Cuda error: 2\[cudaMalloc"),  # spconv, nvdiffrast
    ("cuda", r"cudaErrorMemoryAllocation|get_temporary_buffer failed|cudaMalloc .*out of memory"),  # thrust, faiss
    ("hip", r"HIP out of memory|HIP error: out of memory|hipErrorOutOfMemory"),
    ("xpu", r"XPU out of memory|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    ("xpu", r"can NOT allocate memory block with size larger than"),  # a smaller tensor fits
    ("mps", r"MPS backend out of memory|Invalid buffer size: "),
    ("npu", r"NPU out of memory"),
    ("hpu", r"MODULE:PT_DEVMEM Allocation failed"),
    ("cpu", r"DefaultCPUAllocator: (can't allocate|not enough) memory|posix_memalign\(&data.*\. 12 vs 0"),
    ("cpu", r"std::bad_alloc|\[Errno 12\]|unable to mmap .*\(12\)|Unable to allocate .* for an array"),
    ("cpu", r"posix_memalign failed:"),  # NNPACK's convolutions; its alignment is right, so memory is short
    ("cpu", r"_HOST_ALLOCATION_FAILED|WinError 1455|os error 1455"),  # 1455: the Windows page file is full
)
# These also come from bad indices, unsupported inputs or a broken installation: only memory pressure decides.
_PROBABLE = (
    ("cuda", r"CUBLAS_STATUS_NOT_INITIALIZED|CUSOLVER_STATUS_INTERNAL_ERROR|CUFFT_INTERNAL_ERROR"),
    ("cuda", r"CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_NOT_INITIALIZED"),
    ("cuda", r"Unable to find a valid cuDNN algorithm|was unable to find an engine to execute this computation"),
    ("cuda", r"INTERNAL ASSERT FAILED at \".*CUDACachingAllocator\.cpp|CUDA driver error: device not ready"),
    ("xpu", r"UR_RESULT_ERROR_OUT_OF_RESOURCES"),
    ("cpu", r"could not create a primitive(?! descriptor)|DataLoader worker .* is killed by signal: Killed"),
)
_SIGNS = tuple(
    (certain, backend, re.compile(pattern))
    for certain, table in ((True, _CERTAIN), (False, _PROBABLE))
    for backend, pattern in table
)
# torch.save into memory: closing the archive fails because writing it already did; the true error is the context.
_MASKS_ITS_CONTEXT = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos")
_HANDLED_BEFORE = "During handling of the above exception, another exception occurred:"
_LONGEST_DESCRIPTION = 200  # characters


@dataclass(frozen=True, slots=True)
class OomVerdict:
    """An error that is, or may be, out-of-memory.

    Attributes:
        certain: False where the same message also has other causes, so that only memory pressure decides.
        backend: The memory that ran out: ``"cpu"`` (host memory), ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, ...
    """

    certain: bool
    backend: str


def classify_oom(exc: BaseException) -> OomVerdict | None:
    """Judge an error by its type, its message and its explicit causes, without looking at the machine.

    Args:
        exc: The error. An error raised ``from`` an out-of-memory counts as one; an error raised while one was being
            handled does not. A group counts when all of its errors do, and is only as certain as the least certain.

    Returns:
        The verdict; None for every other error.
    """
    verdicts = [verdict for link in _links(exc) if (verdict := _classify_link(link)) is not None]
    return max(verdicts, key=lambda verdict: verdict.certain, default=None)


def is_out_of_memory(exc: BaseException, *, under_pressure: bool | None = None) -> bool:
    """Say whether an error means that memory ran out: on CUDA, ROCm, XPU, MPS and other accelerators, or on the host.

    The allocators of torch, NumPy and Python, the libraries beneath (cuBLAS, cuDNN, cuFFT, cuSOLVER, oneDNN), and
    errors that DataLoader workers, DataParallel and torch.compile wrap are recognised. Some messages have other
    causes too, such as cuBLAS NOT_INITIALIZED after a bad index: these count only under memory pressure. Ask inside
    the ``except`` block, while the failed attempt still holds its memory.

    Args:
        exc: The error, as caught.
        under_pressure: Whether memory is short, for a message that does not decide; None reads the machine: less
            than a tenth of that backend's memory free. Unused where the message decides.

    Returns:
        True when memory ran out. ``KeyboardInterrupt`` and ``SystemExit`` never count.

    Source:
        The messages and where each comes from: ``tests/data/oom_corpus.json``.

    Example:
        >>> import memkit as mk
        >>> mk.is_out_of_memory(MemoryError())
        True
        >>> mk.is_out_of_memory(RuntimeError("shape '[4]' is invalid for input of size 6"))
        False
        >>> ambiguous = RuntimeError("could not create a primitive")
        >>> mk.is_out_of_memory(ambiguous, under_pressure=True)
        True
    """
    try:
        verdict = classify_oom(exc)
    except MemoryError:  # not even enough is left to look at the error
        return isinstance(exc, Exception)
    if verdict is None:
        return False
    if verdict.certain:
        return True
    return under_memory_pressure(verdict.backend) if under_pressure is None else under_pressure


def recover_from_oom(fn: Callable[[int], _Result], sizes: SupportsIndex | Iterable[SupportsIndex]) -> _Result:
    """Call ``fn(size)`` with falling sizes until one does not run out of memory.

    After a failure the attempt's tensors are gone before the next call: the error is dropped and its frames are
    cleared, then reference cycles are collected and the allocator's cache is released, all outside ``except``, where
    a traceback would still hold every local of the failed call. Each failure is logged as a warning.

    Args:
        fn: Does the whole piece of work at one size. It starts anew at each size, so it must not leave half-done
            work behind, such as gradients of a failed backward: call ``zero_grad()`` first.
        sizes: The sizes to try, positive and each smaller than the one before; or the first size as an int, which is
            halved (rounded down) down to 1: at most ``size.bit_length()`` calls.

    Returns:
        What ``fn`` returned. Where the size is wanted too, let ``fn`` return it.

    Raises:
        MemkitOutOfMemoryError: Every size ran out of memory.
        InputError: There is no size, or the sizes are not positive and falling.
        InputTypeError: A size is not an int.
        Exception: What ``fn`` raises and is not out-of-memory passes through unchanged, at once.

    Memory:
        Nothing of a failed attempt but its size and one line of text.

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
    failures: list[tuple[int, str]] = []
    for size in tuple(_falling(sizes)):  # all checked before the first call: a late complaint would come hours later
        try:
            return fn(size)
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            failures.append((size, describe_error(exc)))
            drop_frames(exc)
        _logger.warning("out of memory at size %d: %s", *failures[-1])
        release_cached_memory()
    raise MemkitOutOfMemoryError(
        "recover_from_oom(fn, sizes)",
        got=f"out of memory at every size: {', '.join(str(size) for size, _ in failures)}; the last error was"
        f" {failures[-1][1]}",
        expected="one size that fits",
        fix="allow smaller sizes, or free memory outside fn: checkpointing, a smaller model, a lower precision.",
    )


def retry_once(fn: Callable[[], _Result], what: str) -> _Result:
    """Call ``fn``; after an out-of-memory release what is cached and call it once more.

    Args:
        fn: Does all of its work or none of it.
        what: What it does, for the error.

    Raises:
        MemkitOutOfMemoryError: It ran out of memory twice.
    """
    for _ in range(2):
        try:
            return fn()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            failure = describe_error(exc)
            drop_frames(exc)
        release_cached_memory()
    raise MemkitOutOfMemoryError(
        what,
        got=f"out of memory, twice: {failure}",
        expected="memory for its temporary results",
        fix="leave more memory free: a smaller micro-batch, checkpointing, a lower precision.",
    )


def drop_frames(exc: BaseException) -> None:
    """Drop the locals of the failed call: who else keeps the error (a logger, a notebook) must not keep its tensors."""
    for link in _links(exc):
        traceback.clear_frames(link.__traceback__)


def _links(exc: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and what it is known to mask."""
    seen: set[int] = set()
    link: BaseException | None = exc
    # An interrupt stays an interrupt, whatever it was raised from.
    while isinstance(link, (Exception, BaseExceptionGroup)) and id(link) not in seen:
        seen.add(id(link))
        yield link
        masks = link.__cause__ is None and _MASKS_ITS_CONTEXT.search(_text(link))
        link = link.__context__ if masks else link.__cause__


def _classify_link(exc: BaseException) -> OomVerdict | None:
    if isinstance(exc, BaseExceptionGroup):
        verdicts = [classify_oom(member) for member in exc.exceptions]
        known = [verdict for verdict in verdicts if verdict is not None]
        return min(known, key=lambda verdict: verdict.certain) if len(known) == len(verdicts) else None
    by_text = _classify_text(_text(exc))
    if isinstance(exc, torch.OutOfMemoryError):
        return OomVerdict(certain=True, backend=by_text.backend if by_text else "cuda")
    if isinstance(exc, (MemoryError, MemkitOutOfMemoryError)) or (
        isinstance(exc, OSError) and exc.errno == errno.ENOMEM
    ):
        return OomVerdict(certain=True, backend=by_text.backend if by_text else "cpu")
    # Other types quote such messages (a ValueError about a log file); memkit's own errors quote them in their advice.
    return by_text if isinstance(exc, (RuntimeError, OSError)) and not isinstance(exc, MemkitError) else None


def _classify_text(text: str) -> OomVerdict | None:
    # A worker's error arrives as its whole traceback in text. Source lines, which are indented, and errors that were
    # only being handled when the last one came, say nothing about the last one.
    if "Traceback" in text:
        last_error = text.rpartition(_HANDLED_BEFORE)[2]
        text = "\n".join(line for line in last_error.splitlines() if not line.startswith(" "))
    for certain, backend, pattern in _SIGNS:
        if pattern.search(text):
            return OomVerdict(certain, backend)
    return None


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a foreign __str__ can fail, and a second error here would hide the first
        return ""


def describe_error(exc: BaseException) -> str:
    return ": ".join([type(exc).__name__, *_text(exc).splitlines()[:1]])[:_LONGEST_DESCRIPTION]


def _falling(sizes: SupportsIndex | Iterable[SupportsIndex]) -> Iterator[int]:
    """Yield the sizes as ints; what falls and stays positive ends, so that this ends too."""
    call = "recover_from_oom(fn, sizes)"
    previous: int | None = None
    for size in sizes if isinstance(sizes, Iterable) else _halved(_as_size(sizes, call)):
        current = _as_size(size, call)
        if current < 1 or (previous is not None and current >= previous):
            raise InputError(
                call,
                got=f"size {current}" + (f" after {previous}" if previous is not None else ""),
                expected="positive sizes, each smaller than the one before",
                fix="sort the sizes from large to small and drop repeats.",
            )
        yield current
        previous = current
    if previous is None:
        raise InputError(call, got="no size", expected="at least one size", fix="pass for example sizes=256.")


def _halved(size: int) -> Iterator[int]:
    yield size
    while size > 1:
        size //= 2
        yield size


def _as_size(size: object, call: str) -> int:
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        raise InputTypeError(call, got=f"a {type(size).__name__}", expected="int sizes", fix="pass ints, or one int.")
    return operator.index(size)
