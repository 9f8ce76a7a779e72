"""A function with its chunking settings, for a loop that calls it repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit.chunk.engine import ChunkedCall
from memkit.chunk.gather import Gather, gathered
from memkit.chunk.loss import loss_call
from memkit.chunk.map import BOUND, WORDS, Rows, read_device
from memkit.chunk.params import check_function, function_name, listed
from memkit.chunk.segments import segment_call
from memkit.chunk.segments_index import Segments
from memkit.chunk.segments_reductions import Reduce
from memkit.chunk.sizing import ChunkPlan, ChunkSize, Sizer, as_size

_REDUCING = "write ChunkedProcessor(fn).segment_reduce(x, index=index, num_segments=num_segments)"
_CALL_WORDS = {
    _REDUCING: "index ptr num_segments reduce weight aggr dim_size",
    _REDUCING.replace("index=index", "index=edge_index[1]"): "edge_index",
    "write ChunkedProcessor(fn, chunk_size=chunk_size)(x)": "chunk_size",
    "write ChunkedProcessor(fn, memory_budget=memory_budget)(x)": "memory_budget",
    "write ChunkedProcessor(fn).map(x, output_device='cpu')": "output_device",
    BOUND: "",
}


@guided(
    words=WORDS,
    absent={
        "ChunkedProcessor(fn)(x)": "apply forward process run",
        "ChunkedProcessor(fn).segment_reduce(x, index=index, num_segments=n)": "scatter",
        "fn.parameters(): a processor holds no parameters of its own": "parameters",
        "fn.to(device): a processor holds no tensors of its own": "to",
        "fn.train(): a processor has no mode of its own": "train",
        "fn.eval(): a processor has no mode of its own": "eval",
    },
    methods={"__call__": _CALL_WORDS, "map": _CALL_WORDS, "plan": _CALL_WORDS, "segment_reduce": WORDS, "loss": WORDS},
)
class ChunkedProcessor:
    """Run a function of rows in pieces, forward and backward, within a memory budget.

    Chunks are as large as is useful for speed, or as the budget allows. Leftover budget saves time: the results of all
    matrix products and convolutions if there is room for them, or else the graphs of as many chunks as fit, are kept
    and not recomputed. Sizes are measured on the first rows of the first call of a kind (shapes, dtypes, modes, numbers
    and flags of the function), in bytes rather than time, so the same call is always cut the same way; calls of that
    kind with a different number of rows reuse the measurement.

    Args:
        fn: A module or function that treats each row independently. It is run again in the backward pass.
        chunk_size: Rows per call of ``fn``, or ``"auto"``.
        memory_budget: With ``"auto"``, the peak memory of a call beyond its arguments and its result, in bytes or as
            text such as ``"512MiB"``. The gradients it creates and running sums count. None for chunks of 16 MiB on a
            CPU, 256 MiB elsewhere.
        params: Leaf tensors that a plain function uses and that need a gradient. A module contributes its own.
        check: Whether to verify on a few rows that ``fn`` treats each row independently.

    Raises:
        ConfigError: ``chunk_size`` or ``memory_budget`` is invalid, or both are given.
        InputTypeError: ``memory_budget`` is not a size.

    Memory cost: for each call, the result, the gradients it creates, and the memory of one chunk; never more than the
    budget beyond the result, unless the work of a chunk depends on the values of its rows.

    Time cost: the first call of a kind runs about one and a half extra chunks, forward and backward, to measure.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
        >>> proc = mk.ChunkedProcessor(mlp, memory_budget="4MiB")
        >>> x = torch.randn(100_000, 3)
        >>> y = proc(x)
        >>> y.square().mean().backward()
        >>> plan = proc.plan(x)
        >>> plan.predicted_peak_bytes <= 4 * 2**20, plan.num_chunks > 1
        (True, True)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        chunk_size: ChunkSize = "auto",
        memory_budget: SupportsIndex | str | None = None,
        params: Iterable[Tensor] | None = None,
        check: bool = True,
    ) -> None:
        check_function("ChunkedProcessor", fn)
        self._fn, self._name = fn, f"ChunkedProcessor({function_name(fn)})"
        self._size = as_size(self._name, chunk_size, memory_budget)
        self._params = listed(self._name, params)
        self._check = check

    def __call__(self, *rows: Any, gather: Gather | None = None) -> Any:
        """Return ``fn(*rows, **gathered)``: see `map`."""
        return self.map(*rows, gather=gather)

    @runs_eagerly
    def map(self, *rows: Any, output_device: str | torch.device | None = None, gather: Gather | None = None) -> Any:
        """Compute ``fn(*rows, **gathered)``: see `memkit.chunked_map`."""
        call = self._map_call(output_device)
        return call.run(rows, gathered(self._name, self._fn, gather), params=self._params)

    def _map_call(self, output_device: str | torch.device | None = None) -> ChunkedCall:
        return ChunkedCall(
            self._name,
            self._fn,
            Rows(self._name, read_device(self._name, output_device)),
            self._size,
            check=self._check,
        )

    # Full signature, as in chunked_segment_reduce: help() and completion show it to users.
    @runs_eagerly
    def segment_reduce(
        self,
        *edge_rows: Any,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        num_segments: int | None = None,
        reduce: Reduce = "sum",
        gather: Gather | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Reduce ``fn(*edge_rows, **gathered)`` over segments: see `memkit.chunked_segment_reduce`."""
        name = f"{self._name}.segment_reduce(...)"
        return segment_call(
            name,
            self._fn,
            edge_rows,
            self._size,
            Segments(name, index, ptr, num_segments),
            reduce=reduce,
            gather=gather,
            weight=weight,
            params=self._params,
            check=self._check,
        )

    @runs_eagerly
    def loss(
        self,
        *rows: Any,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Compute a loss and its gradients; ``fn`` returns per-row losses: see `memkit.chunk.chunked_loss`."""
        return loss_call(
            f"{self._name}.loss(..., reduction={reduction!r})",
            self._fn,
            rows,
            self._size,
            reduction=reduction,
            params=self._params,
            check=self._check,
        )

    @runs_eagerly
    def plan(self, *rows: Any, gather: Gather | None = None) -> ChunkPlan:
        """Return how `map` would cut a call with these arguments and its memory cost, measuring if necessary.

        Raises:
            ConfigError: Not even one row fits into the budget.
            InputError: `map` would refuse the call.
        """
        return self._map_call().choose(rows, gathered(self._name, self._fn, gather), params=self._params)

    @property
    def last_plan(self) -> ChunkPlan | None:
        """Plan of the last call of any form; None before the first call, and with a fixed ``chunk_size``."""
        return self._size.last if isinstance(self._size, Sizer) else None
