"""Places for offloaded tensors: unlinked temporary files, or pinned host memory of an accelerator."""

from __future__ import annotations

import bisect
import mmap
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from memkit._core.errors import MemkitOutOfMemoryError
from memkit._core.settings import Checker
from memkit._machine.devices import current_stream
from memkit._machine.files import check_folder

_ALIGNMENT = 64  # bytes, of a tensor in a mapped file


class Arriving(NamedTuple):
    """Bytes on their way back.

    Attributes:
        memory: Where they arrive, shape ``(num_bytes,)``, uint8.
        arrived: Recorded when they are there; None if they are.
    """

    memory: torch.Tensor
    arrived: torch.Event | None = None

    def wait(self) -> torch.Tensor:
        """Return them; later work on the current stream, perhaps another than that of `read`, waits for them."""
        if self.arrived is not None:
            self.arrived.wait()
            self.memory.record_stream(current_stream(self.memory.device))
        return self.memory


class Store(Protocol):
    """Storage for offloaded bytes. The caller of `write` must release the handle it gets."""

    @property
    def reads_ahead(self) -> bool:
        """Whether `read` returns before the bytes are there."""

    def write(self, source: torch.Tensor) -> Any:
        """Store a one-dimensional tensor of bytes; return its handle."""

    def read(self, handle: Any, device: torch.device) -> Arriving:
        """Bring the bytes of a handle back, in new memory."""

    def release(self, handle: Any) -> None:
        """Release a handle; may be called at any time, also by the garbage collector."""


class DiskStore:
    """Ranges of one unnamed temporary file, which disappears with the process however it ends.

    Args:
        folder: Folder of the file; None is the system's temporary folder, which on some systems is in memory.
    """

    reads_ahead = False

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        # On Linux it never has a name (O_TMPFILE); elsewhere it is unlinked or removed by the system when closed.
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0, prefix="memkit-offload-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # backward may run in several threads
        self._ranges = _Ranges()

    def write(self, source: torch.Tensor) -> tuple[int, int]:
        """Write bytes, from any device.

        Raises:
            MemkitOutOfMemoryError: The disk is full. Nothing of the tensor is stored; earlier writes stay valid.
        """
        source = source.detach().cpu()
        data = memoryview(source.numpy())  # type: ignore[arg-type]  # an array has a buffer
        with self._lock:
            place = self._ranges.take(len(data))
            try:
                self._file.seek(place[0])
                written = 0
                while written < len(data):
                    written += self._file.write(data[written:])
            except OSError as error:
                self._ranges.give_back(place)
                raise MemkitOutOfMemoryError(
                    "offload_activations(to='disk')",
                    got=f"{error.strerror} for {len(data)} bytes in {self._folder or tempfile.gettempdir()}",
                    expected="enough disk space for the activations that the budget does not cover",
                    fix="pass folder=... on a larger disk, pass a larger budget, or use a smaller batch.",
                ) from error
        return place

    def read(self, handle: tuple[int, int], device: torch.device) -> Arriving:
        """Read bytes into new memory."""
        start, num_bytes = handle
        result = torch.empty(num_bytes, dtype=torch.uint8)
        data = memoryview(result.numpy())  # type: ignore[arg-type]  # an array has a buffer
        with self._lock:
            self._file.seek(start)
            done = 0
            while done < num_bytes:
                count = self._file.readinto(data[done:])
                if not count:
                    raise OSError(f"the offload file ends at byte {start + done}")
                done += count
        return Arriving(result.to(device))

    def release(self, handle: tuple[int, int]) -> None:
        """Free the range for later writes."""
        self._ranges.give_back(handle)


class HostStore:
    """Pinned host memory, copied on streams of its own, one for each direction, while the accelerator keeps computing.

    The blocks come from torch's pinned allocator, which caches them for the next step and reuses none before the
    copies that use it are done.

    Args:
        device: The accelerator.
    """

    reads_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def write(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        """Start copying bytes to the host, without blocking; return the block, and the event of its last byte."""
        block = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        self._follow(self._out)
        with self._out:
            block.copy_(source, non_blocking=True)
        source.record_stream(self._out)  # its memory is not reused before it has been copied
        return block, self._out.record_event()

    def read(self, handle: tuple[torch.Tensor, torch.Event], device: torch.device) -> Arriving:
        """Start copying bytes back."""
        block, written = handle
        memory = torch.empty(len(block), dtype=torch.uint8, device=device)
        self._follow(self._back)  # its memory may still be in use by earlier kernels
        self._back.wait_event(written)
        with self._back:
            memory.copy_(block, non_blocking=True)
        memory.record_stream(self._back)
        return Arriving(memory, self._back.record_event())

    def release(self, handle: tuple[torch.Tensor, torch.Event]) -> None:
        """Nothing to do: the block goes back to torch's allocator with the last reference."""

    def _follow(self, stream: torch.Stream) -> None:
        """Make a stream wait for all work launched so far."""
        launched = torch.Event(self._device)
        launched.record()
        stream.wait_event(launched)


class FakeStore:
    """Store for fake tensors, which have no data; reading allocates new memory, as in the other stores.

    Args:
        reads_ahead: Whether the store that it stands for does.
    """

    def __init__(self, *, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead

    def write(self, source: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Record the number of bytes."""
        return source.new_empty(0), len(source)

    def read(self, handle: tuple[torch.Tensor, int], device: torch.device) -> Arriving:
        """Make a fake tensor of that many bytes."""
        empty, num_bytes = handle
        return Arriving(empty.new_empty(num_bytes, device=device))

    def release(self, handle: tuple[torch.Tensor, int]) -> None:
        """Nothing to do."""


def given_folder(check: Checker, folder: str | Path | None) -> Path | None:
    """Return the folder that a user has given for the file; a missing one is refused before the training begins.

    Raises:
        InputTypeError: It is not a path.
        InputError: It is not a directory that exists.
    """
    if folder is None:
        return None
    path = check.path("folder", folder)
    check_folder(f"{check.call}(folder=...)", path)
    return path


class _Ranges:
    """Free ranges of a file. Returned ranges are merged with their neighbors when the next one is taken."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (start, size), sorted, never touching
        self._end = 0
        self._returned: deque[tuple[int, int]] = deque()  # appending is atomic: the garbage collector may do it

    def take(self, size: int) -> tuple[int, int]:
        while self._returned:
            self._join(self._returned.popleft())
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start, size
        start, self._end = self._end, self._end + size
        return start, size

    def give_back(self, place: tuple[int, int]) -> None:
        self._returned.append(place)

    def _join(self, place: tuple[int, int]) -> None:
        start, size = place
        index = bisect.bisect(self._free, place)
        if index < len(self._free) and self._free[index][0] == start + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start, more = self._free.pop(index - 1)
            size, index = size + more, index - 1
        if start + size == self._end:
            self._end = start
        else:
            self._free.insert(index, (start, size))


def map_file(values: Sequence[torch.Tensor], folder: str | Path | None = None) -> list[torch.Tensor]:
    """Write host tensors to an unnamed file, and return them mapped from it, with their strides.

    Writing first makes a full disk an error instead of a crash.

    Args:
        values: The tensors.
        folder: Folder of the file; None is the system's temporary folder, which some systems keep in memory.

    Raises:
        MemkitOutOfMemoryError: The disk is full.
    """
    if not any(value.numel() for value in values):
        return list(values)  # a file of 0 bytes cannot be mapped
    with tempfile.TemporaryFile(dir=folder, prefix="memkit-state-") as file:
        starts = []
        try:
            for value in values:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                starts.append(file.tell())
                dense = torch.as_strided(value, (span(value),), (1,), value.storage_offset())
                file.write(memoryview(dense.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # it has a buffer
            file.flush()
        except OSError as error:
            raise MemkitOutOfMemoryError(
                "offload_state(optimizer)",
                got=f"{error.strerror} in {folder or tempfile.gettempdir()}",
                expected="enough disk space for the optimizer's state",
                fix="pass folder=... on a larger disk.",
            ) from error
        data = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    return [
        data[start : start + span(value) * value.element_size()]
        .view(value.dtype)
        .as_strided(value.shape, value.stride())
        for start, value in zip(starts, values, strict=True)
    ]


def span(tensor: torch.Tensor) -> int:
    """Return how many elements of its storage a tensor spans."""
    if not tensor.numel():
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
