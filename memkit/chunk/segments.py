"""Edge messages reduced over segments in chunks, with the memory of one chunk for any number of edges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, get_args

from torch import Tensor

from memkit._core.errors import InputError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit.chunk.engine import ChunkedCall
from memkit.chunk.gather import Gather, gathered
from memkit.chunk.map import BOUND, WORDS
from memkit.chunk.params import check_function, function_name
from memkit.chunk.segments_index import Segments
from memkit.chunk.segments_reductions import SYNONYMS, Reduce, reduction
from memkit.chunk.segments_weight import takes_no_gradient, weighted
from memkit.chunk.sizing import ChunkSize, Sizer, as_size


@guided(words=WORDS | {BOUND: ""})
@runs_eagerly
def chunked_segment_reduce(
    fn: Callable[..., Any],
    *edge_rows: Any,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_segments: int | None = None,
    reduce: Reduce = "sum",
    gather: Gather | None = None,
    weight: Tensor | None = None,
    chunk_size: ChunkSize = "auto",
    memory_budget: SupportsIndex | str | None = None,
    params: Iterable[Tensor] | None = None,
    check: bool = True,
) -> Tensor:
    """Compute messages ``fn(*edge_rows, **gathered)`` in chunks of edges and reduce them over segments.

    This is the core of a graph network or an integral operator: an MLP per edge, summed at each node. The messages and
    all intermediate tensors of the MLP exist for one chunk at a time, in the backward pass too.

    Args:
        fn: A module or function that treats each edge independently and returns a tensor (n, ...). It is run again in
            the backward pass.
        *edge_rows: Its arguments, or containers of them: tensors (num_edges, ...); everything else is passed unchanged.
        index: int64 or int32 (num_edges,), the segment of each edge, in any order: nothing is sorted.
        ptr: Instead of ``index``, for edges sorted by segment: segment i has the edges ptr[i]:ptr[i + 1].
        num_segments: Rows of the result. None: the largest index plus one (which synchronizes with the device).
        reduce: ``"sum"`` (PyG's ``"add"``); ``"mean"`` over the edges of the segment; ``"max"`` and ``"min"`` (torch's
            ``"amax"`` and ``"amin"``), whose gradient goes to the first of tied edges; ``"softmax"`` over the edges of
            the segment, which keeps one row per edge. A segment without edges gets 0.
        gather: Keyword arguments of ``fn`` gathered from a smaller tensor: ``{"x_j": (x, src)}`` passes rows of
            ``x[src]``, gathered chunk by chunk. ``x`` (num_nodes, ...), ``src`` integers (num_edges,).
        weight: (num_edges,), or (num_edges, H) for messages (num_edges, H, ...): multiplies the messages before they
            are reduced; ``"mean"`` still divides by the number of edges.
        chunk_size: Edges per call, or ``"auto"``: see `memkit.chunked_map`.
        memory_budget: As in `memkit.chunked_map`; running sums count, the result does not.
        params: As in `memkit.chunked_map`.
        check: As in `memkit.chunked_map`.

    Returns:
        (num_segments, ...), for ``"softmax"`` (num_edges, ...) in the order of the edges, in the messages' dtype. Half
        precision is accumulated in float32.

    Raises:
        ConfigError: ``chunk_size`` or ``reduce`` is invalid, or not even one edge fits into
            ``memory_budget``.
        InputError: Arguments differ in their number of edges, an index is out of range (checked on the CPU only),
            ``fn`` does not return a tensor of messages, or `memkit.chunked_map` would raise it.
        StateError: In the backward pass: ``create_graph=True``.

    Memory cost: the result; for max and min in training 4 bytes per element of it (8 from 2**31 edges on); the
    gradients of tensors that need one; and the memory of one chunk, forward and backward.

    Example:
        >>> import torch
        >>> from memkit import chunked_segment_reduce
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> x, src, dst = torch.randn(100, 8), torch.randint(100, (5000,)), torch.randint(100, (5000,))
        >>> offsets = torch.randn(5000, 3)
        >>> def message(offset, x_j):
        ...     return mlp(offset) * x_j
        >>> out = chunked_segment_reduce(
        ...     message, offsets, index=dst, num_segments=100, gather={"x_j": (x, src)},
        ...     params=mlp.parameters(), chunk_size=1024,
        ... )
        >>> expected = torch.zeros(100, 8).index_add(0, dst, message(offsets, x[src]))
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    check_function("chunked_segment_reduce", fn, edge_rows)
    name = f"chunked_segment_reduce({function_name(fn)}, ...)"
    return segment_call(
        name,
        fn,
        edge_rows,
        as_size(name, chunk_size, memory_budget),
        Segments(name, index, ptr, num_segments),
        reduce=reduce,
        gather=gather,
        weight=weight,
        params=params,
        check=check,
    )


def segment_call(
    name: str,
    fn: Callable[..., Any],
    edge_rows: tuple[Any, ...],
    size: int | Sizer,
    segments: Segments,
    *,
    reduce: Reduce,
    gather: Gather | None,
    weight: Tensor | None,
    params: Iterable[Tensor] | None,
    check: bool,
) -> Tensor:
    """Run `chunked_segment_reduce`; ``name`` is the user's call, for messages."""
    is_mean = str(reduce).lower() in ("avg", "average")
    fix = "pass reduce='mean'." if is_mean else "use 'sum', and divide or normalize the result."
    Checker(name).choice("reduce", reduce, get_args(Reduce), fix=fix)
    reduce = SYNONYMS.get(reduce, reduce)
    if weight is not None:
        way_out = "for a weight that is computed from the edge's rows, multiply by it in fn."
        Checker(f"{name}: weight").instance(weight, Tensor, "a tensor with a number for each edge", way_out)
    assembly = reduction(reduce, segments)
    if takes_no_gradient(weight, segments.num_edges):
        assembly, weight = weighted(assembly, weight), None
    call = ChunkedCall(
        name,
        functools.partial(_message, name, fn),
        assembly,
        size,
        num_rows=segments.num_edges,
        check=check,
    )
    rows = gathered(name, fn, gather, segments.num_edges)
    result: Tensor = call.run((weight, *edge_rows), rows, params=params)
    return result


def _message(name: str, fn: Callable[..., Any], weight: Tensor | None, *rows: Any, **gathered: Tensor) -> Tensor:
    message = fn(*rows, **gathered)
    if not isinstance(message, Tensor) or not message.is_floating_point():
        raise InputError(
            name,
            got=f"a function that returns {message.dtype if isinstance(message, Tensor) else type(message).__name__}",
            expected="one tensor of messages, in a floating-point dtype",
            fix="return messages.float(); a maximum or a count of them is exact up to 2**24."
            if isinstance(message, Tensor)
            else "concatenate the messages in their last dimension, and split the result.",
        )
    return message if weight is None else message * _like_message(name, weight, message)


def _like_message(name: str, weight: Tensor, message: Tensor) -> Tensor:
    """Reshape a weight of rows, or of the first dimensions of a row, so that it broadcasts over the message."""
    ones = message.dim() - weight.dim()
    shape = (*weight.shape, *[1] * ones) if ones >= 0 else weight.shape[: message.dim()]
    is_one = ones >= 0 or weight[0].numel() <= 1
    if not is_one or any(each not in (1, size) for each, size in zip(shape, message.shape, strict=True)):
        raise InputError(
            name,
            got=f"a weight of shape {tuple(weight.shape[1:])} and a message of {tuple(message.shape[1:])} for each "
            "edge",
            expected="one number for each edge, or for each of the first dimensions of its message, such as heads",
            fix="multiply in fn: pass the weight as one of its arguments.",
        )
    return weight.reshape(shape)
