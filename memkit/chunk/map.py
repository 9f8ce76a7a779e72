"""A row-wise function in chunks: the same result and gradients, with the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit.chunk.assembly import Assembly, ChunkResults, Upstream
from memkit.chunk.engine import ChunkedCall
from memkit.chunk.gather import Gather, gathered
from memkit.chunk.params import check_function, function_name
from memkit.chunk.sizing import ChunkSize, as_size

WORDS = {  # for calls in chunks
    "there is no {key}: pass the rows of a chunk, chunk_size=-(-len(x) // {key})": "num_chunks chunks n_chunks",
    "rows are dimension 0: pass x.movedim(1, 0) to cut dimension 1": "dim axis chunk_dim in_dims",
    "index=edge_index[1]": "edge_index",
    "there is no {key}: chunks are always recomputed, with the same random numbers": (
        "use_reentrant preserve_rng_state strategy"
    ),
}
BOUND = (
    "pass rows by position, rows picked by an index as gather={'{key}': (x, src)}, and bind values that are the same "
    "for all rows: functools.partial(fn, {key}={key})"
)


@guided(words=WORDS | {BOUND: ""})
@runs_eagerly
def chunked_map(
    fn: Callable[..., Any],
    *rows: Any,
    chunk_size: ChunkSize = "auto",
    memory_budget: SupportsIndex | str | None = None,
    params: Iterable[Tensor] | None = None,
    output_device: str | torch.device | None = None,
    check: bool = True,
    gather: Gather | None = None,
) -> Any:
    """Compute ``fn(*rows)`` in chunks of rows, with the gradients of ``fn(*rows)``.

    Args:
        fn: A module or function that treats each row independently. It is run again in the backward pass, with the same
            random numbers: torch's (CPU and the current accelerator), NumPy's and Python's.
        *rows: Its arguments, or containers of them. Tensors have shape (n, ...), all with the same n, any dtype and
            strides; everything else is passed to each call unchanged.
        chunk_size: Rows per call. ``"auto"`` tries some sizes on the first rows, forward and backward, in every call; a
            `ChunkedProcessor` remembers the result.
        memory_budget: With ``"auto"``, the peak memory of the call beyond its arguments and its result, in bytes or as
            text such as ``"512MiB"``; the gradients it creates count. Leftover budget saves time: the results of all
            matrix products, or the graphs of some chunks, are kept. None for chunks of 16 MiB on a CPU, 256 MiB
            elsewhere.
        params: Leaf tensors that a plain function uses and that need a gradient. A module contributes its own, also
            through a method or a `functools.partial`. A forgotten tensor is detected and refused.
        output_device: Device on which the result is assembled, chunk by chunk; None for the device of the output of
            ``fn``.
        check: Whether to verify on a few rows that ``fn`` treats each row independently; a module is checked once,
            and again when its modes, children or settings have changed.
        gather: Keyword arguments of ``fn`` whose rows are gathered chunk by chunk: ``{"x_j": (x, src)}`` passes rows of
            ``x[src]``. ``x`` (m, ...), ``src`` int64 or int32 (n,). The gradient of a row of ``x`` is the sum over all
            rows that refer to it.

    Returns:
        The result of ``fn(*rows)``: tensors of shape (n, ...), alone or in containers. An unused tensor gets no
        gradient: None, not zeros.

    Raises:
        ConfigError: ``chunk_size`` is invalid, or not even one row fits into ``memory_budget``.
        InputError: Arguments differ in their number of rows; ``fn`` mixes rows (BatchNorm in training mode, a softmax
            over rows), does not return one row per row, modifies its arguments in place, or uses an undeclared tensor
            that needs a gradient.
        StateError: In the backward pass: ``create_graph=True``.

    Memory cost: the result, the gradients of ``rows`` and parameters, and the memory of one chunk, forward and
        backward.

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
    check_function("chunked_map", fn, rows)
    name = f"chunked_map({function_name(fn)}, ...)"
    call = ChunkedCall(
        name,
        fn,
        Rows(name, read_device(name, output_device)),
        as_size(name, chunk_size, memory_budget),
        check=check,
    )
    return call.run(rows, gathered(name, fn, gather), params=params)


def read_device(call: str, device: str | torch.device | None) -> torch.device | None:
    """Return the device on which a result is assembled; None for the device of the function's output.

    Raises:
        ConfigError: It is not a device.
    """
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            call,
            got=f"output_device={device!r}",
            expected="a device such as 'cpu' or 'cuda:0'",
            fix=f"pass output_device={'cuda' if isinstance(device, str) and device.lower() == 'gpu' else 'cpu'!r}.",
        ) from None


class Rows(Assembly):
    """Writes rows into outputs allocated at the first chunk: a list of them would double the memory."""

    def __init__(self, call: str, device: torch.device | None) -> None:
        self._call, self._device = call, device

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        """See `Assembly`."""
        outputs: list[Tensor] = []
        for rows, tensors in chunks:
            if not outputs:
                outputs = [
                    tensor.new_empty((chunks.num_rows, *tensor.shape[1:]), device=self._device or tensor.device)
                    for tensor in tensors
                ]
            if len(tensors) != len(outputs):
                raise InputError(
                    self._call,
                    got=f"a function that returns {len(tensors)} tensors for the chunk from row {rows.start} on, and "
                    f"{len(outputs)} for the first",
                    expected="the same tensors for each chunk",
                    fix="return a tensor of zeros in place of None: torch.zeros_like(x).",
                )
            for output, tensor in zip(outputs, tensors, strict=True):
                output.narrow(0, rows.start, rows.length).copy_(tensor)
            del tensors, tensor, output  # before the next chunk runs
        return outputs, []

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:  # noqa: ARG002
        """See `Assembly`."""
        return lambda rows: [None if gradient is None else rows.of(gradient) for gradient in gradients]
