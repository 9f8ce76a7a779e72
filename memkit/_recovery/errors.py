"""Detection of out-of-memory errors by type, message and causes, and by free memory if these are ambiguous."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memkit._core.errors import InputTypeError, MemkitError, MemkitOutOfMemoryError
from memkit._core.settings import Checker
from memkit._machine.devices import under_memory_pressure

# Backend and message. Each row matches a real message, listed with its source in tests/data/oom_corpus.json.
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
# Bad indices, unsupported inputs or a broken installation also raise these: only memory pressure decides.
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
# torch.save to memory: closing the archive fails because writing it already failed; the real error is the context.
_MASKS_ITS_CONTEXT = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos")
_HANDLED_BEFORE = "During handling of the above exception, another exception occurred:"
_LONGEST_DESCRIPTION = 200  # characters


@dataclass(frozen=True, slots=True)
class OomVerdict:
    """An error that is, or may be, out-of-memory.

    Attributes:
        certain: False if the same message also has other causes, so that only memory pressure decides.
        backend: The memory that ran out: ``"cpu"`` (host memory), ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, ...
    """

    certain: bool
    backend: str


def classify_oom(exc: BaseException) -> OomVerdict | None:
    """Classify an error by its type, its message and its explicit causes, without querying the machine.

    Args:
        exc: The error. An error raised ``from`` an out-of-memory counts as one; an error raised while one was being
            handled does not. A group counts when all of its errors do, and is only as certain as the least certain.

    Returns:
        The verdict; None for every other error.
    """
    verdicts = [verdict for link in _links(exc) if (verdict := _classify_link(link)) is not None]
    return max(verdicts, key=lambda verdict: verdict.certain, default=None)


def is_out_of_memory(exc: BaseException, *, under_pressure: bool | None = None) -> bool:
    """Return whether an error means that memory ran out, on the host or on any accelerator (CUDA, ROCm, XPU, MPS, ...).

    It recognizes errors from the allocators of torch, NumPy and Python, from the underlying libraries (cuBLAS, cuDNN,
    cuFFT, cuSOLVER, oneDNN), and errors wrapped by DataLoader workers, DataParallel and torch.compile. Some messages
    have other causes too, such as cuBLAS NOT_INITIALIZED after a bad index: these count only under memory pressure.
    Call it inside the ``except`` block, while the failed attempt still holds its memory.

    Args:
        exc: The error, as caught.
        under_pressure: Whether memory is short, for an ambiguous message; None queries the machine: less than a tenth
            of that backend's memory free. Unused if the message is unambiguous.

    Returns:
        True when memory ran out. ``KeyboardInterrupt`` and ``SystemExit`` never count.

    Raises:
        InputTypeError: ``exc`` is not an exception, but for example its text.

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
    if not isinstance(exc, BaseException):
        raise InputTypeError(
            "is_out_of_memory(exc)",
            got=f"a {type(exc).__name__}",
            expected="the error itself, which has a type and causes",
            fix="inside `except Exception as exc:` write is_out_of_memory(exc)",
        )
    if under_pressure is not None:
        under_pressure = Checker("is_out_of_memory(exc)").flag("under_pressure", under_pressure)
    try:
        verdict = classify_oom(exc)
    except MemoryError:  # not even enough memory to inspect the error
        return isinstance(exc, Exception)
    if verdict is None:
        return False
    if verdict.certain:
        return True
    return under_memory_pressure(verdict.backend) if under_pressure is None else under_pressure


def drop_frames(exc: BaseException, handled: BaseException | None = None) -> None:
    """Drop the frames of an error and of its causes, so that keeping the error does not keep their tensors alive.

    Frames that are referenced elsewhere are cleared too.

    Args:
        exc: The error.
        handled: The exception that was being handled when the failed attempt began, a context of all of its errors. It
            belongs to code around the attempt, and stays as it is.
    """
    todo, seen = [exc], {id(handled)} - {id(exc)}
    while todo:
        error = todo.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        todo += [each for each in (error.__cause__, error.__context__, *members) if each is not None]


def explain(exc: Exception, note: str) -> None:
    """Add a note to an error of the user's code, which memkit's own errors and an out-of-memory are not."""
    if not isinstance(exc, MemkitError) and not is_out_of_memory(exc):
        exc.add_note(f"memkit: {note}")


def _links(exc: BaseException) -> Iterator[BaseException]:
    """Yield an error, the errors it was raised from, and those it is known to mask."""
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
    # Other types may quote such messages (a ValueError about a log file); memkit's own errors quote them in the fix.
    return by_text if isinstance(exc, (RuntimeError, OSError)) and not isinstance(exc, MemkitError) else None


def _classify_text(text: str) -> OomVerdict | None:
    # A worker's error arrives as the text of its whole traceback. Source lines, which are indented, and errors that
    # were only being handled when the last one was raised, say nothing about the last one.
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
    except Exception:  # noqa: BLE001 - a third-party __str__ can fail, and a second error here would hide the first
        return ""


def describe_error(exc: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return ": ".join([type(exc).__name__, *_text(exc).splitlines()[:1]])[:_LONGEST_DESCRIPTION]
