"""A function of rows, in pieces: the same result and gradients, with the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from memkit.chunk.assembly import Assembly, Pieces, Upstream
from memkit.chunk.engine import ChunkedCall, Strategy
from memkit.chunk.params import function_name
from memkit.chunk.sizing import ChunkSize, Sizer, as_size


def chunked_map(
    fn: Callable[..., Any],
    *rows: Any,
    chunk_size: ChunkSize | Sizer = "auto",
    memory_budget: SupportsIndex | str | None = None,
    params: Iterable[Tensor] | None = None,
    strategy: Strategy = "auto",
    preserve_rng_state: bool = True,
    output_device: str | torch.device | None = None,
    num_kept: int = 0,
    check: bool = True,
) -> Any:
    """Compute ``fn(*rows)`` in chunks of rows, with the gradients of ``fn(*rows)``.

    Args:
        fn: A module or function that treats each row by itself. It is run again in the backward.
        *rows: Its arguments, or containers of them. Tensors have shape (n, ...), all with the same n, any dtype and
            layout; everything else is passed to each call as it is.
        chunk_size: Rows of one call. ``"auto"`` tries some sizes on the first rows, forward and backward, in every
            call: a `ChunkedProcessor` remembers what it found.
        memory_budget: With ``"auto"``, what the call may take at any moment beyond its arguments and its result, in
            bytes or as text such as ``"512MiB"``; the gradients that it makes count. What it leaves buys time back: the
            graphs of some chunks are kept. None for chunks of 16 MiB on a CPU, 256 MiB elsewhere.
        params: Leaf tensors that a plain function uses and that need a gradient. A module brings its own, also through
            a method or a `functools.partial`. A tensor that was forgotten is found, and refused.
        strategy: ``"auto"`` runs each chunk again in the backward. ``"checkpoint"`` does the same by
            `torch.utils.checkpoint`: a little slower, the outputs are there twice for a moment, but any closure and
            second derivatives work. ``"save"`` keeps all graphs: no saving, for comparisons. The last two need a
            ``chunk_size``.
        preserve_rng_state: Whether the backward draws the random numbers of the forward: torch's (CPU and the current
            accelerator), NumPy's and Python's. Dropout needs it; without it a call is some 0.1 ms shorter.
        output_device: Where the result is put together, chunk by chunk; None is where ``fn`` leaves it.
        num_kept: With a number as ``chunk_size``: of so many last chunks the graph is kept, so that the backward need
            not run them again.
        check: Whether to try on a few rows that ``fn`` treats each row by itself; a module is tried once.

    Returns:
        What ``fn(*rows)`` returns: tensors of shape (n, ...), alone or in containers. A tensor that is not used gets no
        gradient, None and not zeros.

    Raises:
        ConfigError: ``chunk_size`` or ``strategy`` is none, ``num_kept`` would be ignored, or not even one row fits
            into ``memory_budget``.
        InputError: Rows differ in number; ``fn`` mixes them (BatchNorm in training mode, a softmax over rows), does not
            return a row for each row, changes its arguments in place, or uses a tensor that needs a gradient and is
            not known.
        StateError: In the backward: ``create_graph=True`` with ``strategy="auto"``.

    Memory cost: the result, gradients of ``rows`` and parameters, and what one chunk takes, forward and backward.

    Example:
        >>> import torch
        >>> from memkit import chunked_map
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
        >>> x = torch.randn(10_000, 3)
        >>> y = chunked_map(mlp, x, chunk_size=1024)
        >>> y.square().mean().backward()
        >>> torch.allclose(y, mlp(x), atol=1e-6), mlp[0].weight.grad is not None
        (True, True)
    """
    name = f"chunked_map({function_name(fn)}, ...)"
    call = map_call(
        name,
        fn,
        as_size(name, chunk_size, memory_budget, may_choose=strategy == "auto"),
        preserve_rng_state=preserve_rng_state,
        output_device=output_device,
        num_kept=num_kept,
        check=check,
    )
    return call.run(rows, {}, params=params, strategy=strategy)


def map_call(
    name: str,
    fn: Callable[..., Any],
    size: int | Sizer,
    *,
    preserve_rng_state: bool = True,
    output_device: str | torch.device | None = None,
    num_kept: int = 0,
    check: bool = True,
) -> ChunkedCall:
    """Make the call of `chunked_map`."""
    return ChunkedCall(
        name,
        fn,
        _Rows(output_device),
        size,
        num_kept=num_kept,
        check=check,
        preserve_rng_state=preserve_rng_state,
    )


class _Rows(Assembly):
    """Row after row into outputs that are there from the first chunk on: a list of pieces would double them."""

    def __init__(self, device: str | torch.device | None) -> None:
        self._device = device

    def collect(self, pieces: Pieces) -> tuple[list[Tensor], list[Tensor]]:
        outputs: list[Tensor] = []
        for start, tensors in pieces:
            if not outputs:
                outputs = [
                    tensor.new_empty((pieces.num_rows, *tensor.shape[1:]), device=self._device or tensor.device)
                    for tensor in tensors
                ]
            for output, tensor in zip(outputs, tensors, strict=True):
                output.narrow(0, start, len(tensor)).copy_(tensor)
            del tensors, tensor, output  # before the next chunk runs
        return outputs, []

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:  # noqa: ARG002
        return lambda start, length: [
            None if gradient is None else gradient.narrow(0, start, length) for gradient in gradients
        ]

    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(self._device or tensor.device) for tensor in tensors]
