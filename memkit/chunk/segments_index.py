"""Assignment of edges to segments, as an index per edge or as CSR pointers."""

from __future__ import annotations

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit.chunk.assembly import ChunkRows

_BLOCK = 1 << 16


class Segments:
    """The segment of every edge.

    Args:
        call: The user's call, for messages.
        index: Integer tensor (num_edges,), in any order; None with ``ptr``.
        ptr: Integer tensor (num_segments + 1,): segment i has the edges ptr[i] to ptr[i + 1]; None with ``index``.
        num_segments: Number of segments; with ``index``, None means the largest index plus one, which synchronizes.

    Attributes:
        num_segments: Number of segments.
        num_edges: Number of edges.
        tensor: ``index`` or ``ptr``.

    Raises:
        ConfigError: ``num_segments`` is not a whole number.
        InputError: Both or neither are given, a shape or dtype is wrong, or values are out of range (an index is
            checked on the CPU only).
    """

    def __init__(self, call: str, index: Tensor | None, ptr: Tensor | None, num_segments: int | None) -> None:
        if (index is None) == (ptr is None):
            raise InputError(
                call,
                got="both index and ptr" if ptr is not None else "neither index nor ptr",
                expected="exactly one of the two",
                fix="pass index=dst with the segment of each edge.",
            )
        self._index, self._ptr = index, ptr
        if num_segments is not None:
            num_segments = Checker(call).whole("num_segments", num_segments)
        if ptr is not None:
            self._check(call, "ptr", ptr)
            num_segments = self._matching(call, num_segments, len(ptr) - 1)
            self.num_edges = int(ptr[-1]) if len(ptr) else -1
            if num_segments < 0 or int(ptr[0]) != 0 or bool((ptr[1:] < ptr[:-1]).any()):
                self._refuse(
                    call,
                    "a ptr that does not start at 0 or decreases",
                    "0 first, then the end of each segment in ascending order",
                )
        elif index is not None:
            self._check(call, "index", index)
            self.num_edges = len(index)
            if num_segments is None:
                num_segments = int(index.max()) + 1 if len(index) else 0
            if index.device.type == "cpu" and len(index):  # elsewhere the check would synchronize
                low, high = (int(bound) for bound in index.aminmax())
                if low < 0 or high >= num_segments:
                    self._refuse(
                        call,
                        f"an index from {low} to {high}",
                        f"segments from 0 to {num_segments - 1} (num_segments - 1)",
                        f"pass num_segments={high + 1}, or check how the edges were built." if low >= 0 else None,
                    )
        self.num_segments = num_segments or 0

    @property
    def tensor(self) -> Tensor:
        """``index`` or ``ptr``, whichever was given."""
        return self._index if self._index is not None else self._ptr  # type: ignore[return-value] # one is there

    def of(self, edges: ChunkRows) -> Tensor:
        """Return the segments of a chunk's edges, int64 (length,); a ``ptr`` is never expanded for all edges."""
        if self._index is not None:
            return edges.of(self._index).long()
        numbers, end = edges.numbers, edges.start + edges.length
        if numbers is None:
            numbers = torch.arange(edges.start, end, dtype=self.tensor.dtype, device=self.tensor.device)
        return torch.bucketize(numbers, self.tensor[1:], right=True)

    def counts(self) -> Tensor:
        """Count the edges of each segment, int64 (num_segments,)."""
        if self._index is None:
            return self.tensor.diff().long()
        counts = self._index.new_zeros(self.num_segments, dtype=torch.int64)
        for part in torch.split(self._index, _BLOCK):  # in blocks: int32 must be converted
            counts.scatter_add_(0, part.long(), counts.new_ones(1).expand(len(part)))
        return counts

    @staticmethod
    def _matching(call: str, given: int | None, found: int) -> int:
        if given not in (None, found):
            Segments._refuse(call, f"num_segments={given} and a ptr of {found + 1} numbers", "num_segments + 1 numbers")
        return found

    @staticmethod
    def _check(call: str, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise InputTypeError(
                call,
                got=f"{name} as a {type(tensor).__name__}",
                expected="a 1-dimensional tensor of int64 or int32",
                fix=f"pass {name}=torch.as_tensor({name}).",
            )
        if tensor.dim() != 1 or tensor.dtype not in (torch.int64, torch.int32):
            fix = None
            if tensor.shape[:1] == (2,) and tensor.dim() == 2:
                fix = f"pass {name}=edge_index[1], the node that each edge ends in."
            elif tensor.dim() == 1:
                fix = f"pass {name}={name}.long()."
            Segments._refuse(
                call,
                f"{name} of shape {tuple(tensor.shape)} in {tensor.dtype}",
                "a 1-dimensional tensor of int64 or int32",
                fix,
            )

    @staticmethod
    def _refuse(call: str, got: str, expected: str, fix: str | None = None) -> None:
        raise InputError(call, got=got, expected=expected, fix=fix or "check how the edges were built.")
