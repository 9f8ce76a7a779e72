"""Cross-entropy over a large vocabulary without materializing all logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import ANY_WHOLE, Checker
from memkit._core.words import guided
from memkit._gradients.captured import UNSHARDED
from memkit._gradients.streamed import Gradients, accumulator_dtype, with_gradients
from memkit._machine.devices import is_capturing
from memkit._torch.compiler import runs_eagerly
from memkit._torch.fake import FakeTensor
from memkit.chunk.assembly import ChunkRows
from memkit.chunk.loss import check_row_reduction
from memkit.chunk.sizing import ChunkSize, check_chunk_size, is_auto

_MIN_LOGITS_BYTES = 2**20  # measured: smaller chunks are dominated by operator call overhead
_MOST_COUNTED = 0.75  # share of the rows; with more, the ignored ones are computed too
_MIN_ROWS = 64  # measured: with fewer rows, reading and writing the weight's gradient outweighs the product


@guided(
    words={
        "write chunked_linear_cross_entropy(x, head.weight, targets, head.bias)": "lm_head head lin_weight classifier",
        "write chunked_linear_cross_entropy(x, head.weight, targets): logits are computed from the hidden states, a "
        "chunk at a time": "logits",
        "there is no num_chunks: pass the rows of a chunk, chunk_size=-(-len(x) // num_chunks)": "num_chunks",
        "there is no softcap: use memkit.chunk.chunked_loss for a softcap of the logits": "softcap",
        "label_smoothing": "smoothing",
        "ignore_index": "ignore_id",
    }
)
@runs_eagerly
def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    chunk_size: ChunkSize | None = "auto",
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight, bias), targets)`` with the logits of one chunk of rows at a time.

    The gradients are computed in the forward pass, from the same logits, and the weight's gradient is accumulated in
    place: nothing is computed twice, and no second gradient of the weight exists. A mean divides once, by the number of
    targets over all rows that are not ignored.

    Args:
        x: Hidden states (..., H), for example (B, T, H), floating point.
        weight: (V, H).
        targets: Class indices (...), int64.
        bias: (V,), or None.
        ignore_index: Targets with this value are ignored. Where they are a quarter of all or more, their logits are not
            computed (to count them waits for the device).
        reduction: ``"mean"`` over the targets that count, or ``"sum"``.
        label_smoothing: Between 0 and 1, as in `torch.nn.functional.cross_entropy`.
        chunk_size: Rows whose logits exist at a time. ``"auto"`` or None: these logits take half the memory of the
            gradients of ``x`` and ``weight``, or 1 MiB, or 64 rows, whichever is largest.

    Returns:
        The loss, 0-dim, in the dtype of ``x``; float32 under autocast. As in torch, the mean is NaN if all targets are
        ignored, and its gradients are zero.

    Raises:
        ConfigError: ``chunk_size`` is neither a positive int nor ``"auto"``, ``reduction`` is invalid, such as
            ``"none"``, ``label_smoothing`` lies outside [0, 1], or ``ignore_index`` is not an int.
        InputError: The shapes do not match, the targets are not int64, one of them is out of range (on CUDA that is a
            device-side assertion), or ``weight`` is a shard.
        StateError: In the backward pass with ``create_graph=True``.

    Memory cost: the gradients of ``x`` and ``weight``, which exist from the forward on, and one chunk's logits. For
    half precision the logits and the weight's gradient are float32.

    Source: gradients computed in the forward as in Liger's fused linear cross-entropy (Hsu et al. 2024), in plain
    torch.

    Example:
        >>> import torch
        >>> from memkit import chunked_linear_cross_entropy
        >>> head = torch.nn.Linear(16, 1000, bias=False)
        >>> hidden = torch.randn(2, 8, 16, requires_grad=True)
        >>> targets = torch.randint(1000, (2, 8))
        >>> loss = chunked_linear_cross_entropy(hidden, head.weight, targets)
        >>> loss.backward()
        >>> whole = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        >>> torch.allclose(loss, whole)
        True
    """
    call = f"chunked_linear_cross_entropy(x, weight, targets, reduction={reduction!r}, chunk_size={chunk_size!r})"
    check_row_reduction(reduction, call)
    given: object = weight
    if isinstance(given, nn.Module):
        raise InputTypeError(
            call,
            got=f"the module {type(given).__name__} as weight",
            expected="its weight",
            fix="write chunked_linear_cross_entropy(x, head.weight, targets, head.bias)",
        )
    _check_shapes(x, weight, targets, bias, call)
    if hasattr(weight, "to_local") and not hasattr(x, "to_local"):
        raise InputError(
            call,
            got="a weight of which this rank holds a shard (DTensor), and x as a plain tensor",
            expected="the whole weight, as the forward of a module sees it that is sharded together with its head",
            fix=UNSHARDED,
        )
    Checker(call).number("label_smoothing", label_smoothing, 0, 1, fix="pass label_smoothing=0.1, the usual value.")
    Checker(call).whole("ignore_index", ignore_index, *ANY_WHOLE, fix="leave ignore_index out, or pass the class.")
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if chunk_size is None or is_auto(chunk_size):
        chunk_size = choose_chunk_size(len(x), *weight.shape, itemsize=accumulator_dtype(x.dtype).itemsize)
    is_autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64  # autocast leaves float64 alone
    is_counted = targets != ignore_index
    problem = _Problem(
        x=x,
        weight=weight,
        bias=bias,
        index=targets.where(is_counted, 0).unsqueeze(1),
        is_counted=is_counted.unsqueeze(1),
        label_smoothing=label_smoothing,
        chunk_size=check_chunk_size(call, chunk_size),
        dtype=torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype,
    ).without_ignored()
    inputs = [x, weight] if bias is None else [x, weight, bias]
    try:
        total = with_gradients(problem.solve, inputs, call=call)
    except RuntimeError as error:
        if "out of bounds" in str(error):  # looked for only now: on a device it would synchronize
            _refuse_targets(call, targets[is_counted], len(weight), ignore_index, error)
        raise
    if reduction == "mean":
        # The gradients belong to the sum; this division reaches them in backward. No 0 / 0 if all targets are ignored.
        count = is_counted.sum()
        total = torch.where(count > 0, total / count.clamp(min=1), math.nan)
    return total if is_autocast else total.to(x.dtype)


def _refuse_targets(call: str, targets: Tensor, num_classes: int, ignore_index: int, error: RuntimeError) -> NoReturn:
    outside = targets[(targets < 0) | (targets >= num_classes)]
    value = int(outside[0]) if len(outside) else None
    raise InputError(
        call,
        got=f"{len(outside)} of {len(targets)} targets out of range, the first of them {value}",
        expected=f"targets from 0 to {num_classes - 1}, since weight has {num_classes} rows, or {ignore_index} for "
        "those to ignore",
        fix=f"pass ignore_index={value} if it stands for padding; else make the weight as large as the tokenizer's "
        "vocabulary.",
    ) from error


def choose_chunk_size(num_rows: int, num_classes: int, width: int, *, itemsize: int) -> int:
    """Return how many rows' logits may exist at a time: half the memory of the gradients, which exist anyway."""
    gradient_bytes = (num_rows + num_classes) * width * itemsize
    logits_bytes = max(gradient_bytes // 2, _MIN_LOGITS_BYTES)
    return max(min(max(logits_bytes // (num_classes * itemsize), _MIN_ROWS), num_rows), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """A sum of losses over rows; `dtype` is that of the matrix products."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    index: Tensor  # (N, 1) int64, in range even for ignored rows
    is_counted: Tensor  # (N, 1) bool
    label_smoothing: float
    chunk_size: int
    dtype: torch.dtype
    counted: Tensor | None = None  # int64, the numbers of the rows that are computed; None for all

    def without_ignored(self) -> _Problem:
        """Return the problem of the rows that are not ignored, if that is much less work and no more memory."""
        is_known = not isinstance(self.is_counted, FakeTensor) or self.is_counted.constant is not None
        if not is_known or self.is_counted.is_meta or is_capturing():
            return self
        counted = self.is_counted.squeeze(1).nonzero().squeeze(1)
        if len(counted) > _MOST_COUNTED * len(self.x):
            return self
        # A chunk's rows are copied, and their gradient too: the fewer logits make room for both.
        wide, width, num_classes = accumulator_dtype(self.dtype).itemsize, self.x.shape[1], len(self.weight)
        most = min(self.chunk_size, len(self.x))
        room = most * num_classes * wide - counted.nbytes
        chunk_size = room // (num_classes * wide + 2 * width * self.x.itemsize)
        return replace(self, counted=counted, chunk_size=chunk_size) if 2 * chunk_size >= max(most, 1) else self

    def _chunks(self) -> Iterator[ChunkRows]:
        num_rows = len(self.x) if self.counted is None else len(self.counted)
        for start in range(0, num_rows, self.chunk_size):
            length = min(self.chunk_size, num_rows - start)
            numbers = None if self.counted is None else self.counted.narrow(0, start, length)
            yield ChunkRows(start, length, numbers)

    def solve(self, needs: Sequence[bool]) -> tuple[Tensor, Gradients]:
        """Return the sum and, where needed, the gradients of x, weight and bias."""
        wide = accumulator_dtype(self.dtype)
        gradients: Gradients = [
            torch.zeros_like(each, dtype=each.dtype if each is self.x else wide) if is_needed else None
            for each, is_needed in zip((self.x, self.weight, self.bias), needs, strict=False)
            if each is not None
        ]
        buffer = self.x.new_empty(min(self.chunk_size, len(self.x)), len(self.weight), dtype=wide)
        total = buffer.new_zeros(())
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            weight = self.weight.to(self.dtype)
            for rows in self._chunks():
                x = rows.of(self.x).to(self.dtype)
                logits = buffer[: rows.length]
                _multiply_into(logits, x, weight.t())
                total += self._loss(logits, rows, with_gradient=any(needs))
                if any(needs):
                    _add_gradients(gradients, rows, logits, x, weight)
        return total, gradients

    def _loss(self, logits: Tensor, rows: ChunkRows, *, with_gradient: bool) -> Tensor:
        """Return a chunk's loss; overwrite ``logits`` with its gradient, if wanted."""
        index, is_counted = rows.of(self.index), rows.of(self.is_counted)
        smooth, num_classes = self.label_smoothing, logits.shape[1]
        if self.bias is not None:
            logits += self.bias
        logits -= logits.amax(dim=1, keepdim=True)
        expected = logits.gather(1, index) * (1 - smooth)
        if smooth:
            expected += logits.mean(dim=1, keepdim=True) * smooth
        normalizer = logits.exp_().sum(dim=1, keepdim=True)
        if with_gradient:
            factor = is_counted.to(logits.dtype)
            logits *= factor / normalizer
            if smooth:
                logits -= factor * (smooth / num_classes)
            logits.scatter_add_(1, index, factor * (smooth - 1))
        return (normalizer.log() - expected).where(is_counted, 0).sum()


def _add_gradients(gradients: Gradients, rows: ChunkRows, logits: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add a chunk's gradients; ``logits`` holds the gradient of its logits."""
    of_x, of_weight, *of_bias = gradients
    products = logits.to(x.dtype)
    if of_x is not None:
        if rows.numbers is None:
            _multiply_into(rows.of(of_x), products, weight)
        else:
            of_x.index_copy_(0, rows.numbers, (products @ weight).to(of_x.dtype))
    if of_weight is not None:
        if of_weight.dtype == x.dtype:
            of_weight.addmm_(products.t(), x)
        else:
            of_weight += products.t() @ x
    for each in of_bias:
        if each is not None:
            each.add_(logits.sum(dim=0))


def _multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _check_shapes(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, call: str) -> None:
    tensors: dict[str, object] = {"x": x, "weight": weight, "targets": targets}
    if bias is not None:
        tensors["bias"] = bias
    for name, each in tensors.items():
        if not isinstance(each, Tensor):
            raise InputTypeError(
                call,
                got=f"{name} as a {type(each).__name__}",
                expected="tensors",
                fix=f"pass {'the tensor' if each is None else f'torch.as_tensor({name})'} as {name}.",
            )
    fits = (
        x.dim() >= 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and x.shape[:-1] == targets.shape
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        given = {"x": x, "weight": weight, "targets": targets} | ({} if bias is None else {"bias": bias})
        raise InputError(
            call,
            got=", ".join(f"{name} of shape {tuple(each.shape)}" for name, each in given.items()),
            expected="x (..., H), weight (V, H), targets (...), bias (V,)",
            fix="write chunked_linear_cross_entropy(x, weight.T, targets)"
            if weight.dim() == 2 and x.shape[-1:] == weight.shape[:1] != weight.shape[1:]
            else "pass one target for each vector of x, and weight in the layout of torch.nn.Linear.",
        )
    if targets.dtype != torch.int64:
        raise InputError(
            call,
            got=f"targets of {targets.dtype}",
            expected="class indices of torch.int64",
            fix="convert indices with targets.long(); for probabilities use chunked_loss.",
        )
