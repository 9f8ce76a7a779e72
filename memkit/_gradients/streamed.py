"""Scalars whose gradient is computed inside the forward, chunk by chunk, so that no graph outlives its chunk."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit._core.errors import InputError, StateError
from memkit._gradients.captured import CapturedTensors
from memkit._torch.autocast import graphs
from memkit._torch.graph import current_backward, have_tangents, is_transforming, keeps_graph
from memkit._torch.tensors import hooks_of, set_hooks

Gradients = list[Tensor | None]
Compute = Callable[[Sequence[bool]], tuple[Tensor, Gradients]]

_HALF = (torch.float16, torch.bfloat16)


def with_gradients(compute: Compute, inputs: Sequence[Tensor], *, call: str) -> Tensor:
    """Make a differentiable 0-dim tensor whose gradients are computed together with its value.

    Backward multiplies the gradients by the scalar upstream gradient: in place, unless the graph is retained. With
    ``retain_graph=True`` a second backward is exact; without, it raises torch's own error. Each input gets one
    gradient per call, so a parameter's hooks run once.

    Args:
        compute: Called once, with whether each input needs a gradient, in no-grad mode if any does and in the caller's
            mode if none does. Returns the value, 0-dim, and for each input its gradient: of the input's shape, in any
            dtype (see `accumulator_dtype`), or None for no gradient.
        inputs: All tensors that the value depends on.
        call: The user's call, for the message.

    Returns:
        The value. It requires no gradient if no input does, if gradients are disabled, or if `compute` returned none;
        in the first two cases `compute` is told to do no gradient work.

    Raises:
        StateError: In backward, with ``create_graph=True``: the graphs of the chunks are gone. In the forward, see
            `refuse_transforms`.
    """
    refuse_transforms(call, inputs, "inside the transform, compute this loss without memkit.")
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        return _WithGradients.apply(compute, call, *inputs)  # type: ignore[no-any-return, no-untyped-call]
    return compute([False] * len(inputs))[0]


def sum_of_chunks(
    chunk_sum: Callable[..., Tensor],
    rows: Sequence[Any],
    params: Sequence[Tensor],
    *,
    chunk_size: int,
    call: str,
    behind: Callable[..., Any] | None = None,
    head: int = 0,
) -> Tensor:
    """Sum a function over chunks of rows, differentiating each chunk at once: memory is bounded by one chunk.

    The chunks run in order and once, under the caller's autocast, so random numbers are drawn as in the plain loop
    over the same chunks. Half-precision parameters accumulate their gradient in float32.

    Args:
        chunk_sum: ``chunk_sum(*chunk)`` returns a 0-dim tensor.
        rows: Tensors of one or more dimensions with the same number of rows in dimension 0 are split; everything else
            is passed to every chunk unchanged.
        params: Distinct leaf tensors that ``chunk_sum`` uses besides the rows and that require grad.
        chunk_size: Rows per chunk. Zero rows give one empty chunk.
        call: The user's call, for messages.
        behind: The user's function that ``chunk_sum`` calls, if any; errors name the tensors that it captured.
        head: See `spans`.

    Returns:
        The sum, 0-dim, at least float32.

    Raises:
        InputError: The rows disagree or there are none to split; ``chunk_sum`` uses another tensor that requires grad.
        StateError: See `with_gradients`.

    Memory cost: per chunk its graph and one gradient of all parameters; throughout, one gradient of all parameters
    and of the rows that require grad.
    """
    num_rows = num_rows_of(rows, call)
    cut = [index for index, each in enumerate(rows) if _is_cut(each)]
    is_grad_enabled = torch.is_grad_enabled()

    def compute(needs: Sequence[bool]) -> tuple[Tensor, Gradients]:
        gradients = GradientTotals([*(rows[index] for index in cut), *params])
        captured = CapturedTensors(call, chunk_sum if behind is None else behind)
        targets = [index for index, is_needed in enumerate(needs) if is_needed]

        def add(part: slice) -> Tensor:
            chunk = list(rows)
            for index, is_needed in zip(cut, needs, strict=False):
                chunk[index] = rows[index].detach()[part].requires_grad_(is_needed)
            value = chunk_sum(*chunk)
            if value.requires_grad:
                leaves = [*(chunk[index] for index in cut), *params]
                unknown = captured.refuse([value], leaves)
                wanted = [leaves[index] for index in targets]
                found = torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ()
                for index, gradient in zip(targets, found, strict=True):
                    gradients.add(index, gradient, part if index < len(cut) else ..., is_once=index < len(cut))
                value = value.detach()  # its graph is gone
                captured.refuse_survivors(unknown)
            return value.to(accumulator_dtype(value.dtype))

        with graphs(enabled=is_grad_enabled), without_hooks(params), refuse_reentrant(call):
            sums = (add(slice(start, start + length)) for start, length in spans(num_rows, chunk_size, head))
            total = functools.reduce(operator.add, sums)
        return total, gradients.buffers

    return with_gradients(compute, [*(rows[index] for index in cut), *params], call=call)


def spans(num_rows: int, chunk_size: int, head: int = 0) -> Iterator[tuple[int, int]]:
    """Yield start and length of each chunk, the last one short; one empty chunk if there are no rows.

    Args:
        num_rows: Total number of rows.
        chunk_size: Rows per chunk.
        head: Rows of an extra first chunk; 0 for none.
    """
    if head:
        yield 0, head
    for start in range(head, max(num_rows, 1), chunk_size):
        yield start, min(chunk_size, num_rows - start)


def refuse_second_derivative(call: str, fix: str) -> None:
    """Refuse ``create_graph=True`` in the backward of a node whose graphs are already gone.

    Raises:
        StateError: It is a backward with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise StateError(
            call,
            got="a backward with create_graph=True",
            expected="first derivatives only: the graphs of the parts are freed when their gradients are computed",
            fix=fix,
        )


def refuse_transforms(call: str, tensors: Sequence[Tensor], fix: str) -> None:
    """Refuse what a node of memkit's own has no rule for: tangents of forward-mode differentiation, and `torch.func`.

    Args:
        call: The user's call.
        tensors: Its tensors, whose tangents would be lost.
        fix: What to call instead, inside the transform.

    Raises:
        StateError: One of the tensors has a tangent, or the call is inside a transform.
    """
    is_func = is_transforming()
    if is_func or have_tangents(tensors):
        raise StateError(
            call,
            got="a call inside a transform of torch.func" if is_func else "a tensor with a tangent",
            expected="first derivatives by backward() or torch.autograd.grad: each part's graph is freed before the "
            "next part runs",
            fix=fix,
        )


@contextlib.contextmanager
def refuse_reentrant(call: str) -> Iterator[None]:
    """Refuse, in a block that takes gradients part by part, a checkpoint that can only accumulate them.

    Raises:
        InputError: The function has such a checkpoint inside.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise InputError(
            call,
            got="a function with torch.utils.checkpoint inside that has use_reentrant=True",
            expected="a checkpoint that works with torch.autograd.grad",
            fix="write checkpoint(..., use_reentrant=False).",
        ) from error


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for accumulating many values of ``dtype``: float32 for half precision, which loses digits."""
    return torch.float32 if dtype in _HALF else dtype


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, call: str, *inputs: Tensor) -> Tensor:
        value, gradients = compute(ctx.needs_input_grad[2:])
        # Saved as if they were activations: torch frees them, and refuses a second backward, as with any graph.
        ctx.save_for_backward(*gradients)
        ctx.call = call
        ctx.dtypes = [each.dtype for each in inputs]
        if all(gradient is None for gradient in gradients):
            ctx.mark_non_differentiable(value)
        return value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(
            ctx.call,
            "for second derivatives, compute this loss without memkit, or in chunks that each run under "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
        )
        # Without a retained graph these buffers have no other use. torch offers no public way to ask.
        is_last = not keeps_graph()
        results: Gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if gradient is not None:
                factor = upstream[0].to(gradient.device)  # a model's parameters may be on several devices
                gradient = gradient.mul_(factor) if is_last else gradient * factor  # noqa: PLW2901
            results.append(gradient if gradient is None else gradient.to(dtype))
        return None, None, *results


class GradientTotals:
    """Accumulated gradients of all inputs, each allocated with its first contribution; None if there was none."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self.buffers: Gradients = [None] * len(inputs)

    def add(self, index: int, gradient: Tensor | None, where: Any, *, is_once: bool = False) -> None:
        """Add a chunk's gradient to an input's; in the input's own dtype if each part comes once."""
        if gradient is None:
            return
        buffer, source = self.buffers[index], self._inputs[index]
        dtype = source.dtype if is_once else accumulator_dtype(source.dtype)
        if not is_once and (gradient.is_sparse or (buffer is not None and buffer.is_sparse)):
            self.buffers[index] = sparse_sum(buffer, gradient.to(dtype))
            return
        if buffer is None:
            buffer = self.buffers[index] = torch.zeros_like(source, dtype=dtype, requires_grad=False)
        buffer[where].add_(gradient)


def sparse_sum(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the sum of two gradients of which one is sparse, as of ``Embedding(sparse=True)``; sparse if both are.

    Equal rows are added up: otherwise the gradient of a small table would grow with the rows of all chunks.
    """
    if total is None:
        return gradient.clone() if gradient.is_coalesced() else gradient.coalesce()  # autograd may return its own
    if total.is_sparse and gradient.is_sparse:
        return (total + gradient).coalesce()
    return gradient + total if total.is_sparse else total.add_(gradient)  # torch adds to a dense one alone


def catch_gradients(
    root: Tensor, slope: Tensor, parameters: Sequence[Tensor], catch: Callable[[int, Tensor], object]
) -> None:
    """Run backward outside autocast, and call ``catch(index, gradient)`` with each gradient as soon as it is computed.

    Memory cost: one gradient at a time.
    """
    running: list[int] = []

    def note(index: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of a constant: a bias, in the backward of a double backward
            return None
        if current_backward() != running[0]:  # of a node that differentiates by itself, as an adjoint of an ODE does
            return None
        catch(index, gradient)
        # Autograd holds a hook's result until the backward ends: return a stand-in without memory.
        return gradient.new_zeros(()).expand_as(gradient) if gradient.layout is torch.strided else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(root.device.type, enabled=False))  # each node has its forward's dtype
        handle = root.register_hook(lambda _: running.append(current_backward()))  # type: ignore[no-untyped-call]
        stack.callback(handle.remove)
        for index, each in enumerate(parameters):
            handle = each.register_hook(functools.partial(note, index))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        torch.autograd.grad(root, parameters, slope, allow_unused=True)


@contextlib.contextmanager
def without_hooks(params: Sequence[Tensor]) -> Iterator[None]:
    """Keep tensor hooks on parameters from running per chunk; they run once, on the whole gradient."""
    hooks = [(each, hooks_of(each)) for each in params if hooks_of(each)]
    try:
        for each, _ in hooks:
            set_hooks(each, None)
        yield
    finally:
        for each, found in hooks:
            set_hooks(each, found)


def _is_cut(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def num_rows_of(rows: Sequence[Any], call: str) -> int:
    """Return the number of rows of the split tensors; refuse different numbers, and calls without such a tensor."""
    cut = [each for each in rows if _is_cut(each)]
    refuse_unsliced(call, cut)
    counts = set(map(len, cut))
    if len(counts) != 1:
        raise InputError(
            call,
            got=f"tensors with {sorted(counts)} rows" if counts else "no tensor with rows",
            expected="one or more tensors that all have the rows in dimension 0",
            fix="bind values that belong to no row to the function itself, for example with functools.partial.",
        )
    return counts.pop()


def refuse_unsliced(call: str, rows: Iterable[Tensor]) -> None:
    """Refuse sparse and nested tensors as rows, of which torch cannot take a slice."""
    found = next((each for each in rows if each.layout is not torch.strided or each.is_nested), None)
    if found is None:
        return
    is_nested = found.is_nested
    raise InputError(
        call,
        got=f"rows in a {'nested' if is_nested else 'sparse'} tensor ({found.layout}), of which torch takes no slices",
        expected="strided tensors",
        fix="pass torch.nested.to_padded_tensor(x, 0.0), and the lengths as another argument."
        if is_nested
        else "pass the numbers of the rows, torch.arange(len(x)), to a function that looks them up, "
        "lambda rows: fn(x.index_select(0, rows)) with x = x.to_sparse_coo(); or pass x.to_dense().",
    )
