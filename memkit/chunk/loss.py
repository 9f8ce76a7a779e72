"""A loss over many rows, with the memory of one chunk: gradients are taken inside the forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.words import guided
from memkit._gradients.loss import Loss, refuse_complex
from memkit._gradients.streamed import accumulator_dtype, num_rows_of, refuse_transforms, sum_of_chunks
from memkit._torch import pytree
from memkit._torch.compiler import runs_eagerly
from memkit.chunk.independence import check_independence, warn_of_draws
from memkit.chunk.map import BOUND, WORDS
from memkit.chunk.measured import HEAD, cast_bytes, kind_of, sum_bytes, watched
from memkit.chunk.params import check_function, function_name, used_parameters
from memkit.chunk.probes import undone, unpacked
from memkit.chunk.sizing import ChunkSize, Measurement, Sizer, as_size


@guided(words=WORDS | {BOUND: ""})
@runs_eagerly
def chunked_loss(
    fn: Callable[..., Tensor | Loss],
    *rows: Any,
    chunk_size: ChunkSize = "auto",
    memory_budget: SupportsIndex | str | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    params: Iterable[Tensor] | None = None,
    check: bool = True,
) -> Tensor:
    """Compute a loss and its gradient over all rows, keeping the activations of one chunk at a time.

    Equals ``fn(*rows).mean()`` (or ``.sum()``) for a function that treats rows independently. Each chunk's gradient is
    taken right after its forward, so nothing is computed twice. The division happens once, over all rows: chunks of
    unequal weight are exact, which a mean of the chunks' means would not be.

    Args:
        fn: ``fn(*chunk)`` returns the losses of the chunk's rows, (n,) or (n, ...); or a `memkit.Loss` with the chunk's
            sum or mean and the divisor of the mean: the number of valid tokens, a sum of weights.
        *rows: Tensors (N, ...), alone or in containers, cut along dimension 0; those that require grad get gradients.
            Other values, and 0-dim tensors, are passed to every chunk unchanged.
        chunk_size: Rows per chunk: a few thousand for a small MLP; below a few hundred, overhead shows. Or ``"auto"``:
            see `memkit.chunked_map`.
        memory_budget: With ``"auto"``, the peak memory of the call beyond its arguments; the gradients it creates
            count.
        reduction: ``"mean"`` divides by the number of losses (all elements that ``fn`` returns) or by the sum of the
            counts; ``"sum"`` does not divide.
        params: Leaf tensors that ``fn`` trains besides the rows. A module contributes its own, also through a method or
            a `functools.partial`.
        check: Whether to verify on a few rows that ``fn`` treats each row independently: see `memkit.chunked_map`;
            if it returns a `Loss`, that sum and count over some rows are those of their parts together.

    Returns:
        The loss, 0-dim, in the dtype that ``fn`` returns. A mean over nothing is NaN, with zero
        gradients.

    Raises:
        ConfigError: ``chunk_size`` is invalid, or not even one row fits into ``memory_budget``; ``reduction`` is
            invalid, such as ``"none"``: per-row upstream gradients cannot be applied to gradients that are already
            summed.
        InputError: ``fn`` returns a single number, or the wrong number of rows; its losses are complex; its
            count requires a gradient; it uses a tensor that requires grad and is neither among the rows nor in
            ``params``; the arguments differ in their number of rows.
        InputTypeError: ``fn`` returns neither a tensor nor a `Loss`.
        StateError: In the backward pass with ``create_graph=True``.

    Memory cost: the graph of one chunk; the gradients of rows and parameters, which exist from the forward on; and one
    chunk's gradient of the parameters. Half-precision parameters accumulate in float32.

    Source: gradients computed inside the forward as in Liger's fused linear cross-entropy (Hsu et al. 2024), for any
    function.

    Example:
        >>> import torch
        >>> from memkit.chunk import chunked_loss
        >>> model = torch.nn.Linear(6, 1)
        >>> def squared_error(x, y):
        ...     return (model(x) - y).square()
        >>> x, y = torch.ones(1000, 6), torch.ones(1000, 1)
        >>> loss = chunked_loss(squared_error, x, y, chunk_size=256, params=model.parameters())
        >>> loss.backward()
        >>> torch.allclose(loss, squared_error(x, y).mean())
        True
    """
    check_function("chunked_loss", fn, rows)
    call = f"chunked_loss({function_name(fn)}, ..., reduction={reduction!r})"
    return loss_call(
        call,
        fn,
        rows,
        as_size(call, chunk_size, memory_budget),
        reduction=reduction,
        params=params,
        check=check,
    )


def loss_call(
    call: str,
    fn: Callable[..., Any],
    rows: tuple[Any, ...],
    size: int | Sizer,
    *,
    reduction: Literal["mean", "sum"],
    params: Iterable[Tensor] | None,
    check: bool,
) -> Tensor:
    """Run `chunked_loss`; ``call`` is the user's call, for messages."""
    check_row_reduction(reduction, call)
    tensors = [each for each in pytree.tree_leaves(rows) if isinstance(each, Tensor)]
    refuse_transforms(call, tensors, "inside the transform, call the function itself: fn(*rows).mean().")
    problem = _Problem(call, fn, rows, used_parameters(call, fn, params))
    draws_for_all = check and check_independence(fn, rows, call=call, pick=partial(_picked, rows), whole=tensors)
    chunk_size = size.plan(problem).chunk_size if isinstance(size, Sizer) else size
    if draws_for_all and problem.num_rows > chunk_size:
        warn_of_draws(call)
    total, count, dtype = problem.run(problem.rows, chunk_size)
    if reduction == "mean":
        total = _mean(total, count)
    return total.to(dtype)


def _picked(rows: tuple[Any, ...], numbers: Tensor) -> tuple[Any, ...]:
    def picked(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.detach().index_select(0, numbers.to(value.device)).requires_grad_(value.requires_grad)

    return tuple(pytree.tree_map(picked, rows))


class _Problem:
    """A loss whose chunk size may still have to be chosen: a `memkit.chunk.sizing.Problem`."""

    def __init__(self, call: str, fn: Callable[..., Any], rows: tuple[Any, ...], params: Sequence[Tensor]) -> None:
        self.name, self._fn, self._params = call, fn, params
        self.elsewhere = ""
        self.rows, self._tree = pytree.tree_flatten(rows)  # tensors inside containers are cut as well
        self.num_rows = num_rows_of(self.rows, call)
        self._tensors = [each for each in self.rows if isinstance(each, Tensor)]
        self.is_on_cpu = all(tensor.is_cpu for tensor in (*self._tensors, *params))

    def run(self, rows: Sequence[Any], chunk_size: int, head: int = 0) -> tuple[Tensor, float | Tensor, torch.dtype]:
        """Return the sum, its count, and the dtype of the losses."""
        count: float | Tensor = 0
        dtype = torch.get_default_dtype()

        def chunk_sum(*chunk: Any) -> Tensor:
            nonlocal count, dtype
            output = self._call(chunk)
            loss_sum, chunk_count = (
                _read_sum(output, self.name) if isinstance(output, Loss) else _read_losses(output, chunk, self.name)
            )
            if loss_sum.is_complex():
                refuse_complex(loss_sum, call=self.name)
            count = count + chunk_count
            dtype = output.value.dtype if isinstance(output, Loss) else output.dtype
            return loss_sum

        total = sum_of_chunks(
            chunk_sum, rows, self._params, chunk_size=chunk_size, call=self.name, behind=self._fn, head=head
        )
        return total, count, dtype

    def _call(self, leaves: Iterable[Any]) -> Any:
        return self._fn(*pytree.tree_unflatten(leaves, self._tree))

    def kind(self) -> Hashable:
        """See `memkit.chunk.sizing.Problem`."""
        needs = tuple(torch.is_grad_enabled() and each.requires_grad for each in (*self._tensors, *self._params))
        return needs, kind_of(self._fn, self._tensors, [each for each in self.rows if not isinstance(each, Tensor)])

    def held_bytes(self, found: Measurement) -> tuple[int, int]:  # noqa: ARG002 - the same for all sizes
        """See `memkit.chunk.sizing.Problem`."""
        held = _gradient_bytes(self._tensors, self._params) + cast_bytes(self._params)
        return held, held

    def measure(self, num_rows: int) -> Measurement:
        """See `memkit.chunk.sizing.Problem`."""
        length = min(num_rows, self.num_rows)
        head = min(HEAD, self.num_rows - length)
        rows = [
            each.detach()[: head + length].requires_grad_(each.requires_grad)
            if isinstance(each, Tensor) and each.dim()
            else each
            for each in self.rows
        ]
        with unpacked(), undone(self._fn, self.rows):
            _, forward_peak, _ = watched(lambda: self._call(rows))
            _, peak, _ = watched(lambda: self.run(rows, max(num_rows, 1), head))
        held = _gradient_bytes([each for each in rows if isinstance(each, Tensor)], self._params)
        return Measurement(num_rows, forward_peak, peak - held)


def _mean(total: Tensor, count: float | Tensor) -> Tensor:
    """Divide a sum by its count; a mean over nothing is NaN, and its gradient zero, as that of torch's own losses.

    The gradients that are already taken belong to the sum. The division reaches them as the single factor of backward.
    """
    if not isinstance(count, Tensor):
        return total / count if count else total * 0 + math.nan
    is_empty = (count == 0).to(total.device)  # without waiting for the device
    return torch.where(is_empty, total.detach() / count, total / (count + is_empty.to(count.device)))


def _gradient_bytes(rows: Sequence[Tensor], params: Sequence[Tensor]) -> int:
    if not torch.is_grad_enabled():
        return 0
    return sum(each.nbytes for each in rows if each.requires_grad) + sum(map(sum_bytes, params))


def check_row_reduction(reduction: object, call: str) -> None:
    """Check that the reduction gives a single number."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            call,
            got=f"reduction={reduction!r}",
            expected="'mean' or 'sum': the forward already sums the gradients over rows, so weights per row that "
            "arrive in backward would come too late",
            fix="multiply the losses by the weights inside the function, or compute losses per row with chunked_map."
            if reduction == "none"
            else "pass reduction='mean'.",
        )


def _read_losses(losses: object, chunk: tuple[Any, ...], call: str) -> tuple[Tensor, int]:
    if not isinstance(losses, Tensor):
        raise InputTypeError(
            call,
            got=f"a {type(losses).__name__} from fn",
            expected="a tensor with the losses of the chunk's rows, or mk.Loss(...)",
            fix="return the losses per row (reduction='none'), or mk.Loss(sum=loss_sum, count=n).",
        )
    num_rows = next(len(each) for each in chunk if isinstance(each, Tensor) and each.dim() > 0)
    if losses.dim() == 0:
        raise InputError(
            call,
            got="one number from fn",
            expected="one loss per row: if it is a mean, the mean of the chunks' means is not the mean over all rows "
            "when chunks are unequal or rows are ignored",
            fix="return the losses per row (reduction='none'), or mk.Loss(sum=loss_sum, count=n).",
        )
    if len(losses) != num_rows:
        raise InputError(
            call,
            got=f"losses of shape {tuple(losses.shape)} from fn for {num_rows} rows",
            expected="one loss per row, in dimension 0",
            fix="return the losses per row (reduction='none'), or mk.Loss(sum=loss_sum, count=n).",
        )
    return losses.sum(dtype=accumulator_dtype(losses.dtype)), losses.numel()


def _read_sum(loss: Loss, call: str) -> tuple[Tensor, float | Tensor]:
    count, value = loss.count, loss.value.reshape(())
    if count is None or loss.outputs is not None:
        raise InputError(
            call,
            got="mk.Loss(mean=...) without its count from fn" if count is None else "mk.Loss(outputs=...) from fn",
            expected="a loss with its count and without outputs: chunked_loss adds up the counts, and returns a "
            "single tensor",
            fix="return mk.Loss(sum=losses.sum(), count=valid.sum()); compute other outputs with chunked_map.",
        )
    if isinstance(count, Tensor) and count.requires_grad:
        raise InputError(
            call,
            got="a count that requires a gradient, as a sum of learned weights does",
            expected="a count of numbers that are not trained: the gradient of each chunk is taken before all are "
            "counted",
            fix="return mk.Loss(sum=loss_sum, count=count.detach()) if the weights are not to learn from the divisor; "
            "otherwise return both per row and divide outside: weights, losses = mk.chunked_map(fn, x, y); loss = "
            "(weights * losses).sum() / weights.sum().",
        )
    weight = count.detach().to(accumulator_dtype(count.dtype)).reshape(()) if isinstance(count, Tensor) else count
    if loss.reduction == "sum":
        return value, weight
    value = value.to(accumulator_dtype(value.dtype))  # float16 overflows for large sums
    # A mean over zero rows is NaN, and so is zero times its gradient.
    return value * weight if weight else torch.zeros_like(value), weight
